"""Connections: many of them, slow ones, ones that are not read, and heads and bodies that are no proper HTTP."""

from __future__ import annotations

from bench.hostile.target import Attack, Target, in_turn, spread

# Longer than `--stall-limit-seconds` (30), so that the server ends them.
_BEYOND_THE_STALL_LIMIT_SECONDS = 36.0
_CHUNKED = "Transfer-Encoding: chunked"
_GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
_UNREAD = {"prompt": "the", "max_tokens": 200, "stream": True, "ignore_eos": True, "n": 16}
# Each of these may be read in two ways, or in none.
_FRAMING = (
    "Content-Length: 4\r\nContent-Length: 5",
    "Content-Length: +4",
    "Content-Length: 4, 5",
    "Content-Length: 1e1",
    "Content-Length: " + "9" * 30,
    "Transfer-Encoding: identity",
    "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding : chunked",
    "Content-Length",
    " folded: x",
    "Content-Length:\r\n 15",
    "Transfer-Encoding:\r\n chunked",
    "X: a\0b",
    "Content-Encoding: gzip\r\nContent-Length: 4",
    "Expect: 100-continue\r\nContent-Length: 99999999999",
)
_HEADS = (
    _GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"A" * 9_000 + b" / HTTP/1.1\r\n\r\n",
    b"\r\n" * 50_000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /%00%ff/../..//v1/models HTTP/1.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\0" * 10_000 + b"\r\n\r\n",
)


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""
    return {**_many(target), **_slow(target), **_wrong(target)}


def _many(target: Target) -> dict[str, Attack]:
    chunked = target.head("POST", "/tokenize", "Content-Type: application/json", _CHUNKED) + b"\r\n"
    small = target.head("POST", "/tokenize", "Content-Type: application/json", "Content-Length: 48001") + b"\r\n["
    head = b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 3900 + b"\r\n"
    chunks = (chunked, b"1\r\n \r\n" * 40_000, b"0\r\n\r\n")
    return {
        "2,000 requests on one connection at once": target.send((_GET + b"\r\n") * 2000, num_answers=2000),
        "500,000 chunks of a byte": target.send(chunked, b"1\r\n \r\n" * 500_000),
        "200 connections with 40,000 chunks of a byte each": target.send(*chunks, times=200),
        "200 connections with a long head each": target.send(head, times=200),
        "200 connections with 16,000 empty lists each": target.send(small + b"[]," * 15_999 + b"[]]", times=200),
        "200 connections with 25 requests each": target.send((_GET + b"\r\n") * 25, num_answers=25, times=200),
        "1,500 idle connections": target.hold(1500, b"", 0.0),
        "2,000 connections, one after the other": spread([target.hold(1, b"", 0.0)] * 2000, 8),
    }


def _slow(target: Target) -> dict[str, Attack]:
    kind = "Content-Type: multipart/form-data; boundary=x"
    upload = target.head("POST", "/v1/adapters", kind) + b"Content-Length: 1000000000\r\n\r\n"
    upload += b'--x\r\nContent-Disposition: form-data; name="adapter_model"\r\n\r\n'
    unread = target.json_request("/v1/completions", _UNREAD)
    body = target.head("POST", "/tokenize", "Content-Type: application/json") + b"Content-Length: 100000\r\n\r\n["
    seconds = _BEYOND_THE_STALL_LIMIT_SECONDS
    everything = [
        target.hold(20, _GET, seconds, drip=b"a"),
        target.hold(20, body, seconds, drip=b" "),
        target.hold(20, upload, seconds, drip=b"a"),
        target.hold(20, unread, seconds),
        target.hold(5, target.json_request("/detokenize", {"tokens": [100] * 500_000}), seconds),
    ]
    return {
        "20 streams that nobody reads": target.hold(20, unread, 2.0),
        "20 uploads that send nothing": target.hold(20, upload, 2.0),
        "20 heads, bodies and uploads that drip, 20 streams and 5 long answers that nobody reads, for 36 s": spread(
            everything, len(everything)
        ),
        "100 half-closed connections": target.send(unread, half_closed=True, times=100),
        "400 requests whose client goes at once": spread([target.hold(1, unread, 0.0)] * 400, 8),
    }


def _wrong(target: Target) -> dict[str, Attack]:
    def framed(*headers: str) -> Attack:
        head = target.head("POST", "/tokenize", "Content-Type: application/json", *headers)
        return target.send(head + b"\r\n0\r\n\r\n" + _GET + b"\r\n", half_closed=True)

    extension = target.head("POST", "/tokenize", _CHUNKED) + b"\r\n" + (b"1;" + b"x" * 4000 + b"\r\n \r\n") * 500
    return {
        "Content-Length with Transfer-Encoding": framed(_CHUNKED, "Content-Length: 4"),
        "framing that can be read in two ways": in_turn(*(framed(headers) for headers in _FRAMING)),
        "a head of 3,900 headers": target.send(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 3900 + b"\r\n"),
        "heads that are too long, of other protocols, or nothing": in_turn(
            *(target.send(head, half_closed=True) for head in _HEADS)
        ),
        "chunks with long extensions": target.send(extension),
    }
