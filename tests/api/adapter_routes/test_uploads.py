"""How much uploads may take of the server before they are adapters, all together and one client's."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import StagingFull
from adapters.store.store import AdapterStore, StoreLimits
from adapters.upload.staging_bytes import StagingBytes
from tests.api.conftest import BASE, Checkpoints
from tests.support.adapter_files import config_bytes, small_layout, upload_small
from tests.support.http.server import Server, running_server, wait_for
from tests.support.http.uploads import CONFIG, MULTIPART, multipart, parts_of, tar_of
from tests.support.limits import LIMIT_SECONDS

MIB = 1 << 20


@pytest.fixture(scope="module")
def narrow(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two uploads of one key, one of each other key; those that are held open are no stalled clients."""
    settings: dict[str, Any] = {"model_name": BASE, "max_uploads": 4, "stall_limit_seconds": LIMIT_SECONDS}
    settings |= {"api_keys": "reader", "admin_api_keys": "one,two,three"}
    with running_server(checkpoints.base, tmp_path_factory.mktemp("narrow"), **settings) as running:
        running.http.headers["Authorization"] = "Bearer one"
        yield running


def sent_to(server: Server, key: str, sent: bytes = b"") -> socket.socket:
    """The head of an upload and the beginning of its body have gone."""
    head = "".join(
        f"{name}: {value}\r\n"
        for name, value in {
            "Host": "x",
            "Authorization": f"Bearer {key}",
            **MULTIPART,
            "Content-Length": 1 << 30,
        }.items()
    )
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS)
    connection.sendall(f"POST /v1/adapters HTTP/1.1\r\n{head}\r\n".encode() + sent)
    return connection


@contextlib.contextmanager
def begun(server: Server, key: str) -> Iterator[None]:
    """An upload that is open."""
    before = num_staged(server)
    with sent_to(server, key):
        wait_for(lambda: num_staged(server) > before, "the upload to have begun")
        yield


def num_staged(server: Server) -> int:
    return len(list(server.store_dir.glob("*/staging/*")))


def upload(server: Server, key: str, directory: Path, name: str = "late") -> tuple[int, str | None]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = server.post("/v1/adapters", data={"name": name}, files=parts_of(directory), headers=headers)
    return answer.status_code, answer.headers.get("retry-after")


def test_a_client_that_uploads_leaves_room_for_others_and_all_have_a_bound(
    narrow: Server, checkpoints: Checkpoints
) -> None:
    with contextlib.ExitStack() as opened:
        for key in ("one", "one"):
            opened.enter_context(begun(narrow, key))
        assert upload(narrow, "one", checkpoints.spare) == (429, "5")
        assert upload(narrow, "two", checkpoints.spare)[0] == 201
        opened.enter_context(begun(narrow, "two"))
        assert upload(narrow, "two", checkpoints.spare) == (429, "5")
        assert upload(narrow, "three", checkpoints.spare)[0] == 200
        opened.enter_context(begun(narrow, "three"))
        assert upload(narrow, "three", checkpoints.spare) == (429, "5")
    wait_for(lambda: num_staged(narrow) == 0, "the uploads that were given up to be gone")
    assert upload(narrow, "three", checkpoints.spare)[0] == 200


def test_a_configuration_that_is_refused_ends_the_upload_at_once(narrow: Server) -> None:
    """600 MiB would follow; the answer comes after the first, and little of the rest is read."""
    refused = multipart([(f'name="adapter_config"; filename="{CONFIG}"', config_bytes(use_qalora=True))])
    started = refused.removesuffix(b"--\r\n") + b'\r\nContent-Disposition: form-data; name="adapter_model"\r\n\r\n'
    with sent_to(narrow, "one", started + b"\0" * MIB) as connection:
        answer = b""
        while b"use_qalora" not in answer:
            piece = connection.recv(1 << 16)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        num_sent = 0
        with contextlib.suppress(ConnectionError):  # it is closed on us
            while num_sent < 600 * MIB:
                num_sent += connection.send(b"\0" * MIB)
    assert num_sent < 128 * MIB
    wait_for(lambda: num_staged(narrow) == 0, "the upload to be gone")


def test_an_owner_has_at_most_half_of_the_bytes_and_leaves_as_many_free() -> None:
    staged = StagingBytes(512)
    staged.take("one", 256)
    with pytest.raises(StagingFull, match="256 bytes, of which yours hold 256; a client gets as much as it leaves"):
        staged.take("one", 1)
    staged.take("two", 128)
    with pytest.raises(StagingFull):
        staged.take("two", 1)
    staged.take("three", 64)
    for index in range(64):
        staged.take(f"small {index}", 2)
    staged.give_back("two", 128)
    assert staged.num_bytes == 256 + 64 + 128


def test_bytes_are_held_until_the_upload_is_an_adapter_or_gone(tmp_path: Path, checkpoints: Checkpoints) -> None:
    layout = small_layout()
    limits = StoreLimits(free_disk_floor_bytes=0, max_staging_bytes=4 * MIB)
    store = AdapterStore(tmp_path, layout, limits, base_name="base")
    assert store.staging_bytes is not None
    upload_small(store, layout, "small")
    assert store.staging_bytes.num_bytes == 0
    with store.begin(owner="one") as first, first.open_part("adapter_model") as part:
        part.write(b"\0" * (2 * MIB))
        with store.begin(owner="one") as second, second.open_part("adapter_model") as more, pytest.raises(StagingFull):
            more.write(b"\0")
        upload_small(store, layout, "anothers")
        assert store.staging_bytes.num_bytes == 2 * MIB
    assert store.staging_bytes.num_bytes == 0
    packed = tar_of(checkpoints.spare)
    with store.begin(owner="one") as archive:
        with archive.open_part("archive", "a.tar.gz") as part:
            part.write(packed)
        with pytest.raises(ValueError, match=r".") as refused:  # another base's
            archive.finish("packed")
        assert not isinstance(refused.value, StagingFull)
    assert store.staging_bytes.num_bytes == 0
    store.close()
