"""Adapters on their way out: over HTTP, and by `multilora pull`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from service.cli.main import main
from tests.api.conftest import Checkpoints
from tests.support.http.server import Server, wait_for
from tests.support.http.uploads import CONFIG, TENSORS, parts_of
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import LINEAR_MODULES, make_adapter

NAMED = {"default": "{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}", "rag": "{{ messages }}"}


@pytest.fixture
def name(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """Deleted after the test."""
    made = f"out-{abs(hash(request.node.name))}"
    yield made
    server.http.delete(f"{server.url}/v1/adapters/{made}")


def put(server: Server, name: str, directory: Path, query: str = "") -> Any:
    answer = server.http.put(f"{server.url}/v1/adapters/{name}{query}", files=parts_of(directory))
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def archive_of(server: Server, reference: str) -> Any:
    answer = server.get(f"/v1/adapters/{reference}/archive")
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/gzip"), answer.text
    return answer


def unpacked(content: bytes, directory: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(content)) as packed:
        packed.extractall(directory, filter="data")
    return directory


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_what_came_goes_out_byte_for_byte_by_name_and_by_version(
    server: Server, checkpoints: Checkpoints, name: str, tmp_path: Path
) -> None:
    paths = [checkpoints.spare, checkpoints.adapters / "alpha"]
    digests = [put(server, name, path)["digest"] for path in paths]
    for reference, at in ((name, 1), (f"{name}@1", 0), (f"{name}@2", 1), (f"{name}@{digests[0]}", 0)):
        answer = archive_of(server, reference)
        assert answer.headers["ETag"] == f'"{digests[at]}"'
        assert answer.headers["X-Multilora-Adapter"] == f"{name}@{at + 1} sha256:{digests[at]}"
        out = unpacked(answer.content, tmp_path / reference.replace("@", "-"))
        assert files_in(out) == {one: (paths[at] / one).read_bytes() for one in (CONFIG, TENSORS)}
    sent = {"archive": ("a.tar.gz", archive_of(server, name).content)}
    again = server.post("/v1/adapters", data={"name": name}, files=sent)
    assert (again.status_code, again.json()["digest"]) == (200, digests[1])
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoints.base)
    assert peft.PeftModel.from_pretrained(base, str(tmp_path / name)).active_adapter == "default"
    head = server.http.head(f"{server.url}/v1/adapters/{name}/archive")
    assert (head.status_code, head.content, head.headers["ETag"]) == (200, b"", f'"{digests[1]}"')


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("nobody/archive", 404),
        ("alpha@99/archive", 404),
        ("alpha@x/archive", 404),
        ("tiny/archive", 404),
        ("alpha/archive?version=1", 400),
        ("org/archive/archive", 404),
    ],
)
def test_there_is_no_archive_of_what_is_not_there(server: Server, path: str, status: int) -> None:
    answer = server.get(f"/v1/adapters/{path}")
    assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True)


def test_templates_special_tokens_and_end_tokens_come_too(
    server: Server, checkpoints: Checkpoints, name: str, tmp_path: Path
) -> None:
    sent = tmp_path / "sent"
    shutil.copytree(checkpoints.spare, sent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints.base)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", NAMED
    tokenizer.save_pretrained(sent)
    (sent / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert main(["upload", str(sent), f"--name={name}", f"--url={server.url}"]) == 0
    report = server.get(f"/v1/adapters/{name}").json()
    assert report["eos_token_ids"]
    out = unpacked(archive_of(server, name).content, tmp_path / "out")
    assert (out / "chat_template.jinja").read_text() == NAMED["default"]
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == NAMED["rag"]
    server.http.delete(f"{server.url}/v1/adapters/{name}")
    assert main(["upload", str(out), f"--name={name}", f"--url={server.url}"]) == 0
    again = server.get(f"/v1/adapters/{name}").json()
    assert (again["digest"], again["eos_token_ids"]) == (report["digest"], report["eos_token_ids"])


def test_an_ephemeral_version_goes_out_of_memory(
    server: Server, checkpoints: Checkpoints, name: str, tmp_path: Path
) -> None:
    put(server, name, checkpoints.spare, "?ephemeral=true")
    out = unpacked(archive_of(server, name).content, tmp_path)
    assert (out / TENSORS).read_bytes() == (checkpoints.spare / TENSORS).read_bytes()


def open_files(server: Server, digest: str) -> list[str]:
    """Files of the adapter that the server has open."""
    links = []
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(link))
    return [path for path in links if digest in path]


def test_a_download_outlasts_its_name_and_ends_with_its_client(
    server: Server, checkpoints: Checkpoints, name: str, tmp_path: Path
) -> None:
    """More bytes than sockets hold: what is read after the deletion was not read before. The files go with the last."""
    targets = LINEAR_MODULES["lfm2"]
    large = make_adapter(checkpoints.base, tmp_path / "large", rank=900, target_modules=targets, seed=7)
    digest = put(server, name, large)["digest"]
    with server.http.stream("GET", f"{server.url}/v1/adapters/{name}/archive") as left:
        pieces = left.iter_raw(1024)  # which ends the request when nobody has it any more
        next(pieces)
        wait_for(lambda: open_files(server, digest), "the file of the tensors to be read")
    wait_for(lambda: not open_files(server, digest), "the file of who has left to be closed")
    with server.http.stream("GET", f"{server.url}/v1/adapters/{name}/archive") as answer:
        pieces = answer.iter_raw(1024)
        content = next(pieces)
        assert server.http.delete(f"{server.url}/v1/adapters/{name}").status_code == 200
        assert server.get(f"/v1/adapters/{name}/archive").status_code == 404
        content += b"".join(pieces)
    out = unpacked(content, tmp_path / "out")
    assert (out / TENSORS).read_bytes() == (large / TENSORS).read_bytes()
    wait_for(lambda: not list(server.store_dir.glob(f"*/adapters/{digest}")), "the files to go")


# ---- pull


def test_pull_makes_the_directory_and_replaces_none_unasked(
    server: Server, checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    at = f"--url={server.url}/v1"
    assert main(["pull", "alpha", at]) == 0
    assert files_in(tmp_path / "alpha") == files_in(unpacked(archive_of(server, "alpha").content, tmp_path / "out"))
    assert "alpha@1 sha256:" in capsys.readouterr().out
    assert main(["pull", "beta", "alpha", at]) == 1
    assert "--force" in capsys.readouterr().err
    before = (tmp_path / "alpha" / TENSORS).read_bytes()
    assert main(["pull", "nobody", "alpha", "--force", at]) == 1
    assert (tmp_path / "alpha" / TENSORS).read_bytes() == before
    assert main(["pull", "beta@1", "alpha", "--force", at]) == 0
    assert (tmp_path / "alpha" / TENSORS).read_bytes() == (checkpoints.adapters / "beta" / TENSORS).read_bytes()
    assert main(["pull", "alpha", "deeper/still", at]) == 0
    (tmp_path / "a file").write_text("x")
    assert main(["pull", "alpha", "a file", "--force", at]) == 1
    assert main(["pull", "alpha", "a file/below", at]) == 1
    assert {one.name for one in tmp_path.iterdir()} == {"alpha", "out", "deeper", "a file"}


@contextmanager
def half_a_server(sent: bytes) -> Iterator[tuple[str, threading.Event]]:
    """Sends so much to one client, and closes when the event is set."""
    ends = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(sent)
                ends.wait(LIMIT_SECONDS)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", ends
        finally:
            ends.set()
            thread.join()


def answer(body: bytes, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode() + body


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_is_ended_leaves_no_half_directory(server: Server, tmp_path: Path, how: signal.Signals) -> None:
    content = archive_of(server, "gamma").content
    target = tmp_path / "gamma"
    with half_a_server(answer(content[:-100], len(content))) as (url, _):
        command = [sys.executable, "-m", "service.cli.main", "pull", "gamma", str(target), f"--url={url}"]
        with subprocess.Popen(command) as process:
            wait_for(lambda: list(tmp_path.glob(f".gamma.*/new/{TENSORS}")), "the tensors to come")
            process.send_signal(how)
            code = process.wait(LIMIT_SECONDS)
    assert not target.exists()
    left = [one.name for one in tmp_path.iterdir()]
    if how is signal.SIGINT:
        assert (code, left) == (130, [])
    assert main(["pull", "gamma", str(target), f"--url={server.url}"]) == 0
    assert (target / TENSORS).is_file()


def test_what_is_no_whole_archive_makes_no_directory(server: Server, tmp_path: Path, capsys: Any) -> None:
    content = archive_of(server, "alpha").content
    spoilt = content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]
    stranger = io.BytesIO()
    with tarfile.open(fileobj=stranger, mode="w:gz") as packed:
        packed.addfile(tarfile.TarInfo("../outside"))
    wrong = {
        "cut off": answer(content[:-100], len(content) - 100),
        "broken off": answer(content[:-100], len(content)),
        "spoilt": answer(spoilt, len(spoilt)),
        "of another kind": answer(b"hello", 5),
        "outside": answer(stranger.getvalue(), len(stranger.getvalue())),
    }
    for case, sent in wrong.items():
        with half_a_server(sent) as (url, ends):
            ends.set()
            assert main(["pull", "alpha", str(tmp_path / "alpha"), f"--url={url}"]) == 1, case
        assert capsys.readouterr().err.startswith("multilora: ")
        assert list(tmp_path.iterdir()) == [], case
