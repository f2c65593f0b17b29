"""Adapters as clients send them: multipart parts, archives, and bodies by hand."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def parts_of(directory: Path) -> dict[str, tuple[str, bytes]]:
    """`files=` for httpx: the two parts of a PEFT directory."""
    return {
        "adapter_config": (CONFIG, (directory / CONFIG).read_bytes()),
        "adapter_model": (TENSORS, (directory / TENSORS).read_bytes()),
    }


def tar_of(directory: Path, *, prefix: str = "") -> bytes:
    """A .tar.gz of the directory's files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in (CONFIG, TENSORS):
            archive.add(directory / name, f"{prefix}{name}")
    return buffer.getvalue()


def zip_of(directory: Path) -> bytes:
    """A .zip of the directory's files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in (CONFIG, TENSORS):
            archive.write(directory / name, name)
    return buffer.getvalue()


def multipart(parts: list[tuple[str, bytes]], boundary: bytes = b"frontier") -> bytes:
    """A multipart body from (Content-Disposition parameters, content)."""
    body = b""
    for disposition, content in parts:
        body += b"--" + boundary + b"\r\nContent-Disposition: form-data; " + disposition.encode() + b"\r\n\r\n"
        body += content + b"\r\n"
    return body + b"--" + boundary + b"--\r\n"


MULTIPART = {"Content-Type": "multipart/form-data; boundary=frontier"}


def upload(server: Any, name: str, directory: Path, **options: Any) -> Any:
    """POST /v1/adapters with the two parts."""
    return server.post("/v1/adapters", data={"name": name}, files=parts_of(directory), **options)
