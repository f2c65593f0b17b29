"""What the command line tells of itself: the settings by topic, and completion in real shells."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli.help import flag_parser, topics
from service.cli.main import main
from service.settings import Settings
from tests.support.http.terminal import terminal
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parent.parent


def test_each_setting_is_in_one_topic() -> None:
    assert [name for names in topics().values() for name in names] == list(Settings.model_fields)


@pytest.mark.parametrize("flags", [["--no-prefix-cache"], ["--prefix-cache", "false"], ["--prefix-cache=false"]])
def test_a_setting_that_is_yes_or_no_is_turned_on_or_off_by_a_flag(flags: list[str]) -> None:
    given = vars(flag_parser().parse_args([*flags, "--batch-invariant", "--no-eager"]))
    assert {name: value for name, value in given.items() if value is not None} == {
        "prefix_cache": "false",
        "batch_invariant": "true",
        "eager": "false",
    }


def test_the_list_of_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    shown = capsys.readouterr().out
    words = shown.replace(",", " ").split()
    assert set(topics()) | {name.replace("_", "-") for name in Settings.model_fields} <= set(words)


def test_a_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """Every setting of it with flag, variable, description, values and default."""
    assert main(["help", "device"]) == 0
    shown = capsys.readouterr().out
    for name in topics()["device"]:
        assert f"--{name.replace('_', '-')} VALUE, MULTILORA_{name.upper()}" in shown
        assert str(Settings.model_fields[name].description) in shown
    assert "one of: auto, float32, bfloat16, float16\n      default: auto\n" in shown


def test_the_flags_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that most people set stand first, and each default is a value that can be given."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    common, advanced = capsys.readouterr().out.split("advanced settings:")
    assert common.count("\n  --") == 15
    assert all(f"--{name} VALUE" in common for name in ("model-dir", "store-dir", "kv-bytes", "api-keys"))
    assert "default: 4.0MiB" in advanced
    assert "--tool-parser {auto,template," in advanced
    assert "Undefined" not in advanced
    assert str(ROOT) not in common


@pytest.mark.parametrize("name", Settings.model_fields)
def test_the_help_of_a_setting_is_one_short_sentence_with_its_default(name: str) -> None:
    (action,) = (one for one in flag_parser()._actions if one.option_strings == [f"--{name.replace('_', '-')}"])
    text = str(action.help)
    assert len(re.findall(r"\bdefault: |\bdefault and maximum: ", text)) == 1, text
    assert len(text.split()) <= 45, text
    assert not re.search(r"\. [A-Z]", text), text


@pytest.mark.parametrize("spelling", ["max-body-bytes", "max_body_bytes", "MULTILORA_MAX_BODY_BYTES"])
def test_one_setting(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", spelling]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("  --max-body-bytes VALUE, MULTILORA_MAX_BODY_BYTES\n")
    assert "default: 4.0MiB" in shown
    assert shown.count("MULTILORA_") == 1


def test_no_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "cooking"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.startswith("multilora: 'cooking' is neither a topic")) == ("", True)


def test_whoever_reads_may_stop_reading() -> None:
    """As `multilora help limits | head -1` does: no traceback, and the exit code of a program that SIGPIPE ends."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "service.cli.main", "help", "limits"]
        streams = {"stdout": writing, "stderr": subprocess.PIPE}
        done = subprocess.run(command, cwd=ROOT, text=True, timeout=LIMIT_SECONDS, **streams)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    command = [sys.executable, "-m", "service.cli.main", "help", "limits"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    sentence = "multilora: The output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, sentence)


def test_a_closed_stdout_is_no_fault() -> None:
    command = ["sh", "-c", f"exec {sys.executable} -m service.cli.main help limits >&-"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["ls", "--nope"], "multilora ls "),
        (["rollback", "shout", "99"], "multilora rollback "),
        (["keys", "list", "--nope"], "multilora keys list "),
        (["--nope", "ls"], "multilora "),
    ],
)
def test_an_unknown_word_is_told_with_the_usage_of_its_command(
    words: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith(f"usage: {usage}[")
    assert f"error: unrecognized arguments: {next(word for word in words if word in ('--nope', '99'))}\n" in told


def _script(shell: str, directory: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", "completion", shell],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_SECONDS,
    )
    assert str(ROOT) not in done.stdout, "a default of this machine is told"
    path = directory / f"completion.{shell}"
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["multilora", "se"], ["serve"]),
        (["multilora", "serve", "--kv"], ["--kv-bytes"]),
        (["multilora", "serve", "--dtype", "=", "fl"], ["float32", "float16"]),
        (["multilora", "serve", "--log-format", "="], ["text", "json"]),
        (["multilora", "serve", "--log-format", "j"], ["json"]),
        (["multilora", "rm", "--u"], ["--url"]),
        (["multilora", "help", "mem"], ["memory"]),
        (["multilora", "completion", ""], ["bash", "zsh"]),
        (["multilora", "keys", ""], ["add", "list", "revoke"]),
        (["multilora", "keys", "add", "acme", "--"], ["--help", "--keys-file", "--scopes", "--note"]),
        (["multilora", "upload", "some"], []),  # names of files, by the shell
    ],
)
def test_bash_completes(words: list[str], expected: list[str], tmp_path: Path) -> None:
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _multilora; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "--norc", "-c", code, "bash", str(_script("bash", tmp_path)), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (done.stderr, done.stdout.split()) == ("", expected)


def test_zsh_completes(tmp_path: Path) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed: completion in zsh was NOT RUN")
    script = _script("zsh", tmp_path)
    with terminal([zsh, "-f", "-i"], tmp_path) as shell:
        # Spelled so that what is awaited is not in the echo of what is typed.
        shell.type(f"PS1='rea''dy>'; autoload -U compinit && compinit -u -D && source {script}\n")
        shell.read_until("ready>")
        shell.type("multilora() { print as''ked: $*; }\n")
        shell.read_until("ready>")
        for typed, completed in (("ser\t--dty\tbf\t", "serve --dtype=bfloat16"), ("help mem\t", "help memory")):
            shell.type(f"multilora {typed}\n")
            shell.read_until(f"asked: {completed}")
