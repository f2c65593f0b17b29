"""An upload as one multipart request, whose files the kernel sends. Nothing that takes long is imported."""

from __future__ import annotations

import os
import socket
from binascii import b2a_base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from service.cli.client import TIMEOUT_SECONDS, ClientError, connect, headers_of, no_server, sentences

_BLOCK_BYTES = 4 << 20
# Smaller files go with what stands around them in one piece.
_SMALL_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 16  # of an answer's head


class Answer(NamedTuple):
    """The part of httpx.Response that `client.checked` and `answer_of` read."""

    url: str
    status_code: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def read(self) -> bytes:
        """The content, which is there already."""
        return self.content


class Multipart:
    """The body of a request: text parts, then files.

    texts     part name to text
    files     (part name, file name, open file, on the disk or in memory); closed by the caller
    boundary  random where nothing else is said
    """

    def __init__(self, texts: Mapping[str, str], files: Sequence[tuple[str, str, BinaryIO]]) -> None:
        self._boundary = os.urandom(16).hex().encode()
        self.content_type = f"multipart/form-data; boundary={self._boundary.decode()}"
        # Bytes, or a file with the number of its bytes that are sent.
        self.pieces: list[bytes | tuple[BinaryIO, int]] = [b""]
        for name, text in texts.items():
            self._add(self._head(name) + text.encode() + b"\r\n")
        for name, file_name, file in files:
            self._add(self._head(name, file_name))
            num_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            if num_bytes <= _SMALL_BYTES:
                self._add(file.read())
            else:
                self.pieces += [(file, num_bytes), b""]
            self._add(b"\r\n")
        self._add(b"--" + self._boundary + b"--\r\n")
        self.num_bytes = sum(len(piece) if isinstance(piece, bytes) else piece[1] for piece in self.pieces)

    def _add(self, data: bytes) -> None:
        last = self.pieces[-1]
        assert isinstance(last, bytes), "bytes follow each file"
        self.pieces[-1] = last + data

    def _head(self, name: str, file_name: str | None = None) -> bytes:
        named = f'; filename="{_quoted(file_name)}"' if file_name is not None else ""
        text = f'Content-Disposition: form-data; name="{_quoted(name)}"{named}'
        return b"--" + self._boundary + b"\r\n" + text.encode() + b"\r\n\r\n"

    def blocks(self, on_sent: Callable[[int], object]) -> Iterator[bytes]:
        """All of it, for a client that sends bytes; `on_sent` is called with the number of bytes before each block."""
        for piece in self.pieces:
            if isinstance(piece, bytes):
                yield piece
                continue
            file, left = piece
            while left:
                block = file.read(min(left, _BLOCK_BYTES))
                if not block:
                    raise _shorter(file)
                left -= len(block)
                on_sent(len(block))
                yield block


def put(
    url: str,
    api_key: str | None,
    path: str,
    body: Multipart,
    headers: Mapping[str, str],
    on_sent: Callable[[int], object] = lambda _: None,
) -> Answer:
    """PUT the body to `path`, which may have a query, of the server at `url`, of `server_url`.

    on_sent  called with the number of bytes of each block of a file

    ClientError when it cannot be sent or nothing answers; OSError of a file that cannot be read.
    """
    given = {**headers, **headers_of(api_key), "Content-Type": body.content_type}
    given["Content-Length"] = str(body.num_bytes)
    target = _split(url)
    if target is None or any(name.lower().endswith("_proxy") and value for name, value in os.environ.items()):
        with sentences(url), connect(url, api_key) as client:  # which knows certificates and proxies
            response = client.put(path, content=body.blocks(on_sent), headers=given)
            return Answer(str(response.url), response.status_code, response.content)
    return _put_plain(url, target, path, body, given, on_sent)


def _split(url: str) -> SplitResult | None:
    """The parts of a URL of plain HTTP; None for any other, and for a host that only httpx can judge."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    host = parts.hostname or ""
    labels = host.split(".") if ":" not in host else [host]
    plain = parts.scheme == "http" and url.isascii() and url.isprintable() and not parts.query and not parts.fragment
    return parts if plain and all(0 < len(label) < 64 for label in labels) else None


def _put_plain(
    url: str,
    target: SplitResult,
    path: str,
    body: Multipart,
    headers: Mapping[str, str],
    on_sent: Callable[[int], object],
) -> Answer:
    netloc = target.netloc.rpartition("@")[2]
    given = {"Host": netloc, "User-Agent": "multilora", "Accept": "application/json", "Connection": "close", **headers}
    if target.username is not None:
        credentials = f"{unquote(target.username)}:{unquote(target.password or '')}".encode()
        given["Authorization"] = f"Basic {b2a_base64(credentials, newline=False).decode()}"
    lines = [f"PUT {target.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items()), "", ""]
    assert target.hostname is not None
    host: Any = target.hostname.encode()  # bytes: of a str the codec for international names would be imported
    try:
        connection = socket.create_connection((host, target.port or 80), TIMEOUT_SECONDS["connect"])
    except TimeoutError as error:
        raise ClientError(f"The server at {url} does not answer.") from error
    except OSError as error:
        raise no_server(url) from error
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(TIMEOUT_SECONDS["write"])
        try:
            _send(connection, "\r\n".join(lines).encode(), body, on_sent)
            broken = None
        except (BrokenPipeError, ConnectionResetError) as error:
            broken = error  # a server that refuses says why and reads no further
        except TimeoutError as error:
            raise ClientError(f"The server at {url} does not answer.") from error
        return _answer(connection, url + path, url, broken)


def _send(connection: socket.socket, head: bytes, body: Multipart, on_sent: Callable[[int], object]) -> None:
    for piece in body.pieces:
        if isinstance(piece, bytes):
            connection.sendall(head + piece)
            head = b""
            continue
        file, left = piece
        begin = 0
        while left:
            num_sent = connection.sendfile(file, begin, min(left, _BLOCK_BYTES))
            if not num_sent:
                raise _shorter(file)
            begin, left = begin + num_sent, left - num_sent
            on_sent(num_sent)


def _answer(connection: socket.socket, shown: str, url: str, broken: OSError | None) -> Answer:
    connection.settimeout(TIMEOUT_SECONDS["read"])
    try:
        with connection.makefile("rb") as reader:
            return Answer(shown, *_read_answer(reader))
    except TimeoutError as error:
        raise ClientError(f"The server at {url} does not answer.") from error
    except (OSError, ValueError) as error:
        raise ClientError(f"The connection to {url} broke: {broken or error}.") from error


def _read_answer(reader: BinaryIO) -> tuple[int, bytes]:
    """Status and body of an HTTP answer; ValueError for what is none. Read by hand: `http.client` takes as long to
    import as Python to start."""
    status = 100
    while 100 <= status < 200:
        version, _, rest = reader.readline(_MAX_LINE_BYTES).partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError("no HTTP answer came" if version else "no answer came")
        status, headers = int(rest[:3]), {}
        while (line := _line(reader)) != b"":
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        pieces = []
        while num_bytes := int(_line(reader).partition(b";")[0], 16):
            pieces.append(_exactly(reader, num_bytes))
            _line(reader)
        return status, b"".join(pieces)
    if (length := headers.get(b"content-length")) is not None:
        return status, _exactly(reader, int(length))
    return status, reader.read()


def _line(reader: BinaryIO) -> bytes:
    line = reader.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the answer ends in the middle")
    return line.strip()


def _exactly(reader: BinaryIO, num_bytes: int) -> bytes:
    data = reader.read(num_bytes)
    if len(data) != num_bytes:
        raise ValueError("the answer ends in the middle")
    return data


def _quoted(name: str) -> str:
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _shorter(file: BinaryIO) -> ClientError:
    name = Path(file.name).name.encode(errors="replace").decode()
    return ClientError(f"{name} became shorter while it was sent; upload it again once nothing writes it.")
