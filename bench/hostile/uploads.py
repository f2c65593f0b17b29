"""Uploads: archives, configurations, tensors and multipart bodies that are no adapter, or one that costs."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from bench.hostile.target import Attack, Target, in_turn, spread
from service.settings import BUNDLED_ADAPTERS_DIR

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
MIB = 1 << 20
BACKTRACKING = (r"(([a-z_.0-9])+)+!", r"(a|b|.)*(.*)*(.*)*!", ".*" * 14 + "!", "(?:a?){60}" + "a" * 60, "(" * 200_000)


class Uploads:
    """Uploads of the bundled adapter `shout`, with something about it changed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.config = json.loads((BUNDLED_ADAPTERS_DIR / "shout" / CONFIG_FILE).read_bytes())
        self.tensors = (BUNDLED_ADAPTERS_DIR / "shout" / TENSORS_FILE).read_bytes()

    def put(
        self, name: str, template: str | None = None, tensors: bytes | None = None, *, keep: bool = False, **config: Any
    ) -> Attack:
        """The parts, with these fields of the configuration, and an own chat template. What is taken is deleted again,
        unless it is to be kept."""
        content = {
            "adapter_config": (CONFIG_FILE, json.dumps({**self.config, **config}).encode()),
            "adapter_model": (TENSORS_FILE, self.tensors if tensors is None else tensors),
        }
        if template is not None:
            content["chat_template"] = ("chat_template.jinja", template.encode())
        return self.put_parts(name, content, keep=keep)

    def put_parts(self, name: str, parts: dict[str, tuple[str, bytes]], *, keep: bool = False) -> Attack:
        """These parts."""
        return lambda: self._put(name, parts, keep=keep)

    def _put(self, name: str, parts: dict[str, tuple[str, bytes]], *, keep: bool) -> None:
        path = f"/v1/adapters/{name}"
        if self._target.request("PUT", path, files=parts) in (200, 201) and not keep:
            self._target.request("DELETE", path)

    def put_archive(self, make: Callable[[], bytes]) -> Attack:
        """An archive, which is made when it is first sent."""
        made = cache(make)
        return lambda: self._put("hostile-archive", {"archive": ("adapter.archive", made())}, keep=False)

    def files(self) -> dict[str, bytes]:
        """What a good archive holds."""
        return {CONFIG_FILE: json.dumps(self.config).encode(), TENSORS_FILE: self.tensors}


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""
    uploads = Uploads(target)
    return {**_archives(uploads), **_configs(target, uploads), **_bodies(target, uploads)}


def zip_of(files: dict[str, bytes], *entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    """With entries after the files, whose names may be anything."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in (*files.items(), *entries):
            packed.writestr(name, content)
    return out.getvalue()


def tar_of(files: dict[str, bytes], *entries: tarfile.TarInfo) -> bytes:
    """As .tar.gz, the entries first."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as packed:
        for entry in entries:
            packed.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def _renamed(archive: bytes, name: bytes) -> bytes:
    """A zip whose entry `name` has a name of NULs, in both places that tell it."""
    return archive.replace(name, b"\0" * len(name))


def _link(kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(TENSORS_FILE)
    entry.type, entry.linkname = kind, "/etc/passwd"
    return entry


def _archives(uploads: Uploads) -> dict[str, Attack]:
    files = uploads.files()
    config = {CONFIG_FILE: files[CONFIG_FILE]}
    symbolic = zipfile.ZipInfo("link")
    symbolic.create_system, symbolic.external_attr = 3, 0o120777 << 16
    out = ("../evil", "/etc/evil", "a/../../evil", "..", "a\\..\\evil", "C:/evil")
    tricks = [
        *(zip_of(files, (name, b"x")) for name in out),
        *(tar_of({name: b"x", **files}) for name in out),
        _renamed(zip_of(files, ("nameless", b"x")), b"nameless"),
        _renamed(zip_of(files, ("x", b"x")), b"x"),
        zip_of(files, (symbolic, b"/etc/passwd")),
        *(
            tar_of(config, _link(kind))
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
        ),
        zip_of({f"{number}/{name}": content for number in range(2) for name, content in files.items()}),
        zip_of({**files, "adapter_model.bin": b"\x80\x04."}),
        *(archive[: len(archive) // 2] for archive in (zip_of(files), tar_of(files))),
        b"PK\x03\x04" + b"\0" * 1000,
        b"\x1f\x8b" + b"\0" * 1000,
        b"",
    ]
    crowd = {f"{number}.txt": b"" for number in range(20_000)}
    zeros = bytes(64 * MIB)
    bomb = {**config, TENSORS_FILE: zeros}
    bombs: list[Callable[[], bytes]] = [
        lambda: zip_of(bomb),
        lambda: tar_of(bomb),
        lambda: zip_of(config, *((f"{number}.txt", zeros) for number in range(4))),
        lambda: gzip.compress(tar_of(bomb)),
        lambda: tar_of(files) + gzip.compress(zeros),  # behind the end that a tar has of its own
    ]
    return {
        "archives with links, names that lead out, of NULs, or none": in_turn(
            *(uploads.put_archive(partial(bytes, trick)) for trick in tricks)
        ),
        "archives of 20,000 entries": in_turn(
            uploads.put_archive(lambda: zip_of({**crowd, **files})),
            uploads.put_archive(lambda: tar_of({**crowd, **files})),
        ),
        "5 archives that unpack to a thousand times as much, at once": spread(
            [uploads.put_archive(one) for one in bombs], len(bombs)
        ),
    }


def _configs(target: Target, uploads: Uploads) -> dict[str, Attack]:
    def refused_early(config: bytes) -> Attack:
        head = target.head("PUT", "/v1/adapters/hostile-early", "Content-Type: multipart/form-data; boundary=x")
        part = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n'
        begun = head + b"Content-Length: 600000000\r\n\r\n" + part % (b"adapter_config", CONFIG_FILE.encode()) + config
        return target.send(
            begun, b"\r\n" + part % (b"adapter_model", TENSORS_FILE.encode()), *[bytes(MIB)] * 600, num_answers=1
        )

    many = {f"model.layers.{number}.x": 4 for number in range(20_000)}
    bad: tuple[dict[str, Any], ...] = (
        {"r": -1},
        {"r": 10**9},
        {"lora_alpha": float("inf")},
        {"rank_pattern": many},
        {"rank_pattern": dict.fromkeys(BACKTRACKING, 4)},
        {"target_modules": ["x" * 100] * 30_000},
        {"layers_to_transform": list(range(100_000))},
        {"modules_to_save": ["lm_head", "../x"]},
        {"base_model_name_or_path": "x" * 900_000},
        {"nested": json.loads("[" * 900 + "]" * 900)},
    )
    wrong = [
        *(json.dumps({**uploads.config, **fields}).encode() for fields in ({"peft_type": "VERA"}, {"r": 0})),
        b"[]",
    ]
    return {
        "600 MB after a configuration that is refused": in_turn(*map(refused_early, wrong)),
        "target_modules and exclude_modules that backtrack": in_turn(
            *(uploads.put("hostile-regex", target_modules=pattern) for pattern in BACKTRACKING),
            *(uploads.put("hostile-regex", exclude_modules=pattern) for pattern in BACKTRACKING),
        ),
        "16 of target_modules that backtrack at once": spread(
            [uploads.put("hostile-regex", target_modules=BACKTRACKING[0])] * 16, 16
        ),
        "configurations of wrong, many and large values": in_turn(*(uploads.put("hostile-bad", **one) for one in bad)),
    }


def _bodies(target: Target, uploads: Uploads) -> dict[str, Attack]:
    deep = b'{"a":' + b"[" * 3_000_000
    headers = (
        deep,
        b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 4]}}' % (b"1," * 900_000 + b"4"),
        b"{}",
    )
    no_tensors = [*(struct.pack("<Q", len(header)) + header for header in headers), b"\xff" * 100, b"", bytes(40 * MIB)]
    text = {"adapter_config": (CONFIG_FILE, b"{}")}
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    crowd = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\na\r\n' * 50_000 + b"--x--\r\n"
    malformed = [b"", b"--x", b"--x\r\n" + b"A: b\r\n" * 50_000, b"--x\r\n" + b"A" * MIB, crowd, b"\0" * MIB]
    disposition = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\na\r\n--x--\r\n'
    malformed += [disposition % (name * 3_000, name) for name in (b"a", b"\0", b"../", b"\xff")]
    return {
        "tensors whose header is deep, long, or none": in_turn(
            *(uploads.put("hostile-tensors", tensors=tensors) for tensors in no_tensors)
        ),
        "16 uploads of 40 MiB of zeros": spread([uploads.put("hostile-zeros", tensors=bytes(40 * MIB))] * 16, 16),
        "multipart bodies that are none, of 50,000 parts, with long heads": in_turn(
            *(
                lambda body=body: target.request("POST", "/v1/adapters", content=body, headers=kind)
                for body in malformed
            )
        ),
        "parts that are missing, or twice": in_turn(
            uploads.put_parts("hostile-parts", text),
            uploads.put_parts("hostile-parts", {**text, "archive": ("a.zip", zip_of(uploads.files()))}),
            uploads.put_parts("\u0130\u0301" * 60, text),
        ),
    }
