"""The keys file: what it may say, and how `multilora keys` changes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.cli.main import main
from service.tenants.edit import add_key, revoke_key
from service.tenants.keys_file import MAX_FILE_BYTES, KeysFileError, hash_of, parse_keys, read_keys

ROOT = Path(__file__).resolve().parents[2]
HASH = "ab" * 32
BY_HAND = f"""\
# Who may ask.
[tenants.acme]  # the first
weight = 2
requests_in_flight = 8
tokens_per_minute = 1000
uploads_per_minute = 0
adapters = 3
adapter_bytes = "2MiB"

# Of the job.
[[keys]]
tenant = "acme"
sha256 = "{HASH}"
scopes = ["infer"]

# Of nobody yet.
[tenants.zeta]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


class TestReading:
    def test_what_it_says(self) -> None:
        file = parse_keys(BY_HAND)
        limits = file.tenants["acme"]
        assert (limits.weight, limits.requests_in_flight, limits.adapter_bytes) == (2.0, 8, 2 << 20)
        assert file.tenants["zeta"].model_dump(exclude_defaults=True) == {}
        assert [(key.tenant, key.key_id, key.scopes) for key in file.keys] == [("acme", HASH[:12], ("infer",))]

    @pytest.mark.parametrize(
        ("before", "after", "words"),
        [
            ("weight = 2", "weight = 0", "tenants.acme.weight: input should be greater than or equal to 0.01"),
            ("weight = 2", "weight = nan", "tenants.acme.weight"),
            ("weight = 2", 'weight = "2"', "tenants.acme.weight"),
            ("weight = 2", "wieght = 2", "tenants.acme.wieght is not known here"),
            ("adapters = 3", "adapters = true", "tenants.acme.adapters"),
            ("adapters = 3", "adapters = -1", "tenants.acme.adapters"),
            ('"2MiB"', '"much"', "tenants.acme.adapter_bytes"),
            ("[tenants.acme]", "[tenants.Acme]", "'Acme' must be named by lower-case"),
            ('tenant = "acme"', 'tenant = "amce"', "has no table; write \\[tenants.amce\\]"),
            ('["infer"]', '["infer", "fly"]', "keys\\[0\\].scopes\\[1\\]"),
            ('["infer"]', "[]", "keys\\[0\\].scopes"),
            (HASH, HASH.upper(), "keys\\[0\\].sha256"),
            (HASH, HASH[:-1], "keys\\[0\\].sha256"),
            ("[tenants.zeta]", f'[[keys]]\ntenant = "acme"\nsha256 = "{HASH}"\nscopes = ["admin"]', "twice"),
            ("# Who may ask.", "tenants = 5", "it is no TOML"),
            ("# Who may ask.", "what = 5", "what is not known here"),
            ("# Who may ask.", f"what = {'[' * 5_000}", "nested too deeply"),
            ("# Who may ask.", f"what = {'9' * 5_000}", "it is no TOML"),
        ],
    )
    def test_a_fault_is_named_with_its_place(self, before: str, after: str, words: str) -> None:
        assert before in BY_HAND
        with pytest.raises(KeysFileError, match=words) as caught:
            parse_keys(BY_HAND.replace(before, after))
        assert "\n" not in str(caught.value)

    def test_files_that_cannot_be_read(self, path: Path) -> None:
        with pytest.raises(KeysFileError, match=r"keys\.toml cannot be read: No such file"):
            read_keys(path)
        path.write_bytes(b"# \xff")
        with pytest.raises(KeysFileError, match="not UTF-8"):
            read_keys(path)
        path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
        with pytest.raises(KeysFileError, match="larger than"):
            read_keys(path)


class TestEditing:
    def test_a_key_is_shown_once_and_its_hash_kept(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        given = ["keys", "--keys-file", str(path), "add", "acme", "--scopes", "infer, upload", "--note", 'the "job" ü']
        assert main(given) == 0
        secret = capsys.readouterr().out.removesuffix("\n")
        (key,) = read_keys(path).keys
        assert key.sha256 == hash_of(secret).hex()
        assert (key.tenant, key.scopes, key.note) == ("acme", ("infer", "upload"), 'the "job" ü')
        assert secret not in path.read_text()
        assert len(secret) > 40
        assert path.stat().st_mode & 0o777 == 0o600
        assert main(["keys", "--keys-file", str(path), "list"]) == 0
        shown = capsys.readouterr().out
        assert key.key_id in shown
        assert secret not in shown

    def test_what_others_wrote_stays(self, path: Path) -> None:
        path.write_text(BY_HAND)
        path.chmod(0o640)
        _, key = add_key(path, "zeta", ["infer"])
        assert path.read_text().startswith(BY_HAND)
        revoke_key(path, key.key_id)
        assert path.read_text().rstrip("\n") == BY_HAND.rstrip("\n")
        revoke_key(path, HASH[:4])
        left = path.read_text()
        assert "# Of nobody yet." in left
        assert "# Of the job." in left
        assert (read_keys(path).keys, set(read_keys(path).tenants)) == ((), {"acme", "zeta"})
        assert path.stat().st_mode & 0o777 == 0o640
        assert list(path.parent.iterdir()) == [path]

    def test_a_form_that_is_not_looked_for_is_left_alone(self, path: Path) -> None:
        by_hand = f'keys = [{{tenant = "acme", sha256 = "{HASH}", scopes = ["infer"]}}]\n[tenants.acme]\n'
        path.write_text(by_hand)
        for change in (lambda: revoke_key(path, HASH[:5]), lambda: add_key(path, "acme", ["infer"])):
            with pytest.raises(KeysFileError, match="edit it by hand"):
                change()
        assert path.read_text() == by_hand

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["add", "Acme"], "must be named"),
            (["add", "a/b"], "must be named"),
            (["add", "acme", "--scopes", "fly"], "infer, upload, delete, download, control, admin"),
            (["add", "acme", "--scopes", ","], "infer, upload, delete, download, control, admin"),
            (["add", "acme", "--note", "a\nb"], "one line"),
            (["add", "acme", "--note", "\udcff"], "one line"),
            (["revoke", "ff"], "no key has an id that begins with 'ff'"),
            (["revoke", ""], "no key"),
        ],
    )
    def test_faults_are_sentences(
        self, path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
    ) -> None:
        path.write_text(BY_HAND)
        assert main(["keys", "--keys-file", str(path), *arguments]) == 1
        told = capsys.readouterr()
        assert words in told.err
        assert told.out == ""
        assert path.read_text() == BY_HAND

    def test_the_file_may_stand_after_the_action(
        self, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MULTILORA_KEYS_FILE", str(tmp_path / "usual.toml"))
        assert main(["keys", "add", "acme", "--keys-file", str(path), "--scopes", "infer"]) == 0
        assert main(["keys", "--keys-file", str(tmp_path / "other.toml"), "add", "zeta"]) == 0
        assert main(["keys", "add", "usual"]) == 0
        tenants = {file.name: set(read_keys(file).tenants) for file in tmp_path.glob("*.toml")}
        assert tenants == {path.name: {"acme"}, "other.toml": {"zeta"}, "usual.toml": {"usual"}}
        assert len(capsys.readouterr().out.splitlines()) == 3

    def test_a_broken_file_is_not_written_over(self, path: Path) -> None:
        path.write_text("[tenants.acme")
        with pytest.raises(KeysFileError, match="no TOML"):
            add_key(path, "acme", ["infer"])
        assert path.read_text() == "[tenants.acme"

    def test_through_a_link(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere" / "real.toml")
        add_key(path, "acme", ["infer"])
        assert path.is_symlink()
        assert len(read_keys(tmp_path / "elsewhere" / "real.toml").keys) == 1

    def test_what_a_killed_command_left_is_not_written_through(self, path: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        other.write_text("another's")
        path.with_name(f".{path.name}.new").symlink_to(other)
        add_key(path, "acme", ["infer"])
        assert other.read_text() == "another's"
        assert len(read_keys(path).keys) == 1
        assert not path.is_symlink()

    def test_without_a_file(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MULTILORA_KEYS_FILE", raising=False)
        assert main(["keys", "list"]) == 2
        assert "MULTILORA_KEYS_FILE" in capsys.readouterr().err

    def test_many_at_once_lose_nothing(self, path: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda number: add_key(path, f"t{number % 3}", ["infer"])[1], range(40)))
        assert {key.sha256 for key in read_keys(path).keys} == {key.sha256 for key in made}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: revoke_key(path, key.sha256), made[:20]))
        assert {key.sha256 for key in read_keys(path).keys} == {key.sha256 for key in made[20:]}


_DIE = """
import os, signal, sys
from pathlib import Path
from service.tenants.edit import add_key

path = Path(sys.argv[1])
add_key(path.with_name("first"), "acme", ["infer"])  # whatever is imported late is there now
os.unlink(path.with_name("first"))

def child(at):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if str(path.parent) in repr(arguments):
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)
    print(add_key(path, "acme", ["infer"])[0], flush=True)
    os._exit(0)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        child(int(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(path: Path) -> None:
    """At each operation on files in turn, until none is left to die at."""
    path.write_text(BY_HAND)
    command = [sys.executable, "-c", _DIE, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        at, shown = 0, list[str]()
        while not shown:
            before = path.read_text()
            process.stdin.write(f"{at}\n")
            process.stdin.flush()
            code = process.stdout.readline().strip()
            if code != str(-signal.SIGKILL):
                shown, code = [code], process.stdout.readline().strip()
                assert code == "0"
            after = path.read_text()
            assert after.startswith(before)
            num_new = len(tomllib.loads(after)["keys"]) - len(tomllib.loads(before)["keys"])
            assert num_new == 1 or (num_new == 0 and not shown)
            at += 1
        process.stdin.close()
    assert at > 6, "nothing was killed"
    assert read_keys(path).keys[-1].sha256 == hash_of(shown[0]).hex()
    assert os.listdir(path.parent) == [path.name], "the last one removes what kills left"


def test_hashes_are_plain_sha256() -> None:
    """So that one can be made elsewhere: printf %s KEY | sha256sum."""
    assert hash_of("abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
