"""How much uploads may take of the server before they are adapters, all together and one client's."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterError, StagingFull, TooLarge
from adapters.store.store import AdapterStore, StoreLimits
from adapters.upload.staging_bytes import StagingBytes
from service.api.errors import ApiError
from service.api.uploads.tensors_json import MAX_BESIDE_BYTES, TensorsJson
from tests.api.conftest import BASE, Checkpoints
from tests.support.adapter_files import (
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_small,
)
from tests.support.http.server import Server, running_server, wait_for
from tests.support.http.uploads import CONFIG, MULTIPART, multipart, parts_of, tar_of
from tests.support.limits import LIMIT_SECONDS

MIB = 1 << 20


@pytest.fixture(scope="module")
def narrow(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two uploads of one key, one of each other key; those that are held open are no stalled clients."""
    settings: dict[str, Any] = {"model_name": BASE, "max_uploads": 4, "stall_limit_seconds": LIMIT_SECONDS}
    settings |= {"api_keys": "reader", "admin_api_keys": "one,two,three", "max_ephemeral_bytes": "8MiB"}
    with running_server(checkpoints.base, tmp_path_factory.mktemp("narrow"), **settings) as running:
        running.http.headers["Authorization"] = "Bearer one"
        yield running


def sent_to(
    server: Server, key: str, sent: bytes = b"", line: str = "POST /v1/adapters", **headers: object
) -> socket.socket:
    """The head of an upload and the beginning of its body have gone."""
    usual = {"Host": "x", "Authorization": f"Bearer {key}", **MULTIPART, "Content-Length": 1 << 30}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**usual, **headers}.items())
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=LIMIT_SECONDS)
    connection.sendall(f"{line} HTTP/1.1\r\n{head}\r\n".encode() + sent)
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


@pytest.mark.parametrize(
    ("line", "content_type"),
    [
        ("PUT /v1/adapters/policy?ephemeral=true", MULTIPART["Content-Type"]),
        ("POST /load_lora_adapter_from_tensors", MULTIPART["Content-Type"]),
        ("POST /load_lora_adapter_from_tensors", "application/json"),
    ],
)
def test_an_announced_body_that_memory_cannot_take_is_refused_before_it_comes(
    narrow: Server, line: str, content_type: str
) -> None:
    headers = {"Content-Type": content_type, "Content-Length": 84_000_000}
    with sent_to(narrow, "one", line=line, **headers) as connection:
        answer = b""
        while not answer.endswith(b"}"):
            answer += (piece := connection.recv(1 << 16))
            assert piece, answer
    assert answer.startswith(b"HTTP/1.1 413 "), answer
    assert b"4194304 bytes, half of --max-ephemeral-bytes (8388608)" in answer
    assert num_staged(narrow) == 0


def test_an_owner_has_at_most_half_of_the_bytes_and_leaves_as_many_free() -> None:
    staged = StagingBytes(512)
    with pytest.raises(TooLarge, match=r"takes 257 bytes .* 256 bytes, half of --max-staging-bytes \(512\)"):
        staged.check("one", 257)
    staged.check("one", 256)
    staged.take("one", 200)
    with pytest.raises(StagingFull, match=r"hold 200 bytes, of which yours hold 200; .* this upload takes 57 or more"):
        staged.take("one", 57)
    staged.take("one", 56)
    with pytest.raises(StagingFull, match="of which yours hold 200; a client gets as much as it leaves"):
        staged.take("one", 1, before=56)
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


LAYOUT = small_layout()
TENSORS = safetensors_bytes(lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4))
NAN = TENSORS[:-4] + b"\x00\x00\xc0\x7f"


def tensors_body(tensors: bytes = TENSORS, **change: Any) -> dict[str, Any]:
    encoded = base64.b64encode(tensors).decode()
    return {"lora_name": "policy", "config_dict": json.loads(config_bytes()), "serialized_tensors": encoded, **change}


def loaded(store: AdapterStore, body: bytes, chunk_bytes: int) -> str:
    """The digest of the adapter in a body that comes in chunks of this size."""
    with store.begin(is_ephemeral=True) as upload:
        parts = TensorsJson(store.check_name, upload)
        try:
            parts.feed_all([body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes)])
            return upload.finish(parts.finish().name_for(None))[0].digest
        finally:
            parts.close()


@pytest.fixture(scope="module")
def memory_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterStore]:
    limits = StoreLimits(free_disk_floor_bytes=0, max_ephemeral_bytes=8 * MIB, max_upload_bytes=MIB)
    store = AdapterStore(tmp_path_factory.mktemp("memory"), LAYOUT, limits, base_name="base")
    yield store
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 50, 1 << 20])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_tensors_come_in_any_pieces_and_order(
    memory_store: AdapterStore, chunk_bytes: int, order: tuple[int, ...]
) -> None:
    fields = list(tensors_body().items())
    spaced = json.dumps(dict(fields[at] for at in order), indent=1).encode()
    # A text that looks like the field is none.
    others = json.dumps({"rid": '{"serialized_tensors": "', **dict(fields)})
    # As .NET writes them, and PHP; any character may be escaped.
    escaped = [others.replace("+", "\\u002B"), others.replace("/", "\\/"), others.replace("AAA", "A\\u0041\\u0041")]
    assert len({others, *escaped}) == 4
    digest = upload_small(memory_store, LAYOUT, "as-files")[0].digest
    assert {loaded(memory_store, body, chunk_bytes) for body in (spaced, *map(str.encode, escaped))} == {digest}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (tensors_body(pickle.dumps({"a": [1.0] * 9})), "pickle"),
        (tensors_body(pickle.dumps({"a": 1}, protocol=2)), "pickle"),
        (tensors_body(b"\x80\x05."), "pickle"),
        (tensors_body(NAN), "NaN"),
        (tensors_body(TENSORS[:-4]), "cut off"),
        (tensors_body(b""), ""),
        (tensors_body(serialized_tensors=base64.b64encode(TENSORS).decode()[:-3]), "base64"),
        (tensors_body(serialized_tensors="!!!!" * 9), "base64"),
        (tensors_body(serialized_tensors="AA==AAAA" * 90), "base64"),
        (tensors_body(serialized_tensors=base64.encodebytes(TENSORS).decode()), "base64"),
        *(
            (json.dumps(tensors_body(serialized_tensors="AAAA" * 9)).replace("AAAA", wrong, 1).encode(), "base64")
            for wrong in ("\\u0100AAA", "\\u004AAA", "\\x41AAA", '\\"AAA', "\\\\u0041AAA", "\\nAAA")
        ),
        (json.dumps(tensors_body(serialized_tensors="AAAAAAA/" + "A" * 24)).replace("/", "\\\\/").encode(), "base64"),
        (tensors_body(serialized_tensors=None), "serialized_tensors"),
        (tensors_body(serialized_tensors=[base64.b64encode(TENSORS).decode()]), "serialized_tensors"),
        (tensors_body(load_format="flattened_bucket"), "safetensors"),
        (tensors_body(pinned=True), "/pin"),
        (tensors_body(config_dict={"r": "x"}), ""),
        (tensors_body(config_dict=[]), "config_dict"),
        (tensors_body(lora_name=""), "lora_name"),
        (tensors_body(lora_name="base"), "base"),
        (tensors_body(safetensors_bytes(lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 8))), "rank"),
        (tensors_body(b"\0" * MIB), "limit"),
        (tensors_body(rid="x" * MAX_BESIDE_BYTES), "beside"),
        (b'{"serialized_tensors": "AAAA", "serialized_tensors": "AAAA"}', "twice"),
        (json.dumps(tensors_body()).encode()[:-1], "JSON"),
        (json.dumps(tensors_body()).encode()[:-9], "whole"),
        (b"[1]", ""),
        (b"", ""),
    ],
)
def test_tensors_that_cannot_be_loaded_leave_nothing(memory_store: AdapterStore, body: Any, sentence: str) -> None:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    for chunk_bytes in (3, 1 << 20) if len(sent) < 1 << 16 else (1 << 18,):
        with pytest.raises((AdapterError, ApiError), match=rf"(?i){sentence}"):
            loaded(memory_store, sent, chunk_bytes)
    assert not list(memory_store._files.staging.iterdir())


def test_a_configuration_of_any_depth_is_the_client_s_own_fault(memory_store: AdapterStore) -> None:
    """One that can be parsed cannot always be written again."""
    for depth in range(850, 1010):
        config = b'{"a":' * depth + b"1" + b"}" * depth
        body = b'{"lora_name":"deep","config_dict":' + config + b',"serialized_tensors":"AAAA"}'
        with pytest.raises((AdapterError, ApiError)):
            loaded(memory_store, body, 1 << 20)
