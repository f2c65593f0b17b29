"""HTTP/1.1 as h11 reads it, bounded in the size of heads and in what a body costs beside its bytes."""

from __future__ import annotations

from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer

# Bytes of an incomplete head. A head that arrives whole in a single read may be longer by that read.
MAX_HEAD_BYTES = 1 << 14
MAX_HEADERS = 100
# Bytes that the framing of a chunked body may take: each chunk costs as much as a kilobyte, however small it is.
_FREE_FRAMING_BYTES = 1 << 18
_BODY_BYTES_PER_FRAMING_BYTE = 32

NO_HTTP = (
    "This is no HTTP/1.1 request, or its head is longer than the server takes; look at the client, or at the proxy "
    "before this server."
)
_TWO_LENGTHS = "The request has both Content-Length and Transfer-Encoding; send one of them."
_CHUNKED_OF_1_0 = "HTTP/1.0 knows no Transfer-Encoding; send HTTP/1.1, or a Content-Length."
_FOLDED = "A header of the request goes on in a second line; write each in one line."
_MANY_HEADERS = f"The request has more than {MAX_HEADERS} headers; send fewer."
_NOTHING = (b"", False)  # as `trailing_data`
_SMALL_CHUNKS = "The chunks of the body are too small for so many; send larger ones, or announce a Content-Length."


class _UnfoldedLines(ReceiveBuffer):
    """h11's, which refuses lines that begin with a blank: one reader joins such a line to the header before it, another
    one leaves it out, and with it the length of the body that follows."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """As h11's; LocalProtocolError, which h11 makes a remote one, for a folded line."""
        lines = super().maybe_extract_lines()
        if any(line.startswith((b" ", b"\t")) for line in lines or ()):
            raise h11.LocalProtocolError(_FOLDED)
        return lines


class BoundedConnection(h11.Connection):
    """h11's, which refuses what proxies read otherwise and what costs more than it says.

    refusal       why the last error was raised, if it was raised here
    sends_chunks  whether more of an answer may be sent with `chunk`
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._receive_buffer = _UnfoldedLines()
        self.refusal: str | None = None
        self.is_head = False
        self.num_received = 0
        self._is_chunked = self.sends_chunks = False
        self._left = "_remaining"  # where h11's reader of the body has what `num_announced` is
        self._num_framing = 0

    @staticmethod
    def chunk(data: bytes) -> bytes:
        """How a piece of a chunked body is written. It changes no state."""
        return b"%x\r\n%b\r\n" % (len(data), data)

    def send(self, event: Any) -> Any:
        """As h11's, with less work for the pieces of a chunked body: streams have many."""
        if self.sends_chunks and isinstance(event, h11.Data):
            return self.chunk(event.data) if event.data else b""
        self.sends_chunks = False  # also where h11 refuses the event
        output = super().send(event)
        if isinstance(event, h11.Response):
            self.sends_chunks = not self.is_head and b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output

    def receive_data(self, data: bytes) -> None:
        """More from the client."""
        self.num_received += len(data)
        self._num_framing += len(data)
        super().receive_data(data)

    @property
    def num_announced(self) -> int:
        """Bytes that are still to come of the body, or of the chunk of it that has begun: they cost little each."""
        reader: Any = self._reader
        return getattr(reader, self._left, 0) if self.their_state is h11.SEND_BODY else 0

    def skip_body(self, data: bytes) -> bool:
        """Whether this is from the middle of a body of announced length, or of a chunk, all of it: it is counted then,
        and need not be received. h11 would copy it three times."""
        if len(data) >= self.num_announced or self.they_are_waiting_for_100_continue:
            return False
        if self.trailing_data != _NOTHING:
            return False
        reader: Any = self._reader
        setattr(reader, self._left, getattr(reader, self._left) - len(data))
        self.num_received += len(data)
        self._num_framing -= len(data) // _BODY_BYTES_PER_FRAMING_BYTE
        return True

    def next_event(self) -> Any:
        """As h11's; RemoteProtocolError for what is refused."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if str(error) == _FOLDED:
                self.refusal = _FOLDED
            raise
        if isinstance(event, h11.Request):
            self._check_head(event)
        elif isinstance(event, h11.Data):
            self._num_framing -= len(event.data) + len(event.data) // _BODY_BYTES_PER_FRAMING_BYTE
            if self._is_chunked and self._num_framing > _FREE_FRAMING_BYTES:
                self._refuse(_SMALL_CHUNKS)
        return event

    def _check_head(self, head: h11.Request) -> None:
        names = {name for name, _ in head.headers}
        self.is_head = head.method == b"HEAD"
        self._is_chunked = b"transfer-encoding" in names
        self._left = "_bytes_in_chunk" if self._is_chunked else "_remaining"
        self._num_framing = 0
        if self._is_chunked and b"content-length" in names:
            self._refuse(_TWO_LENGTHS)
        if head.http_version not in (b"1.0", b"1.1"):
            self._refuse(NO_HTTP)
        if self._is_chunked and head.http_version == b"1.0":
            self._refuse(_CHUNKED_OF_1_0)
        if len(head.headers) > MAX_HEADERS:
            self._refuse(_MANY_HEADERS)

    def _refuse(self, sentence: str) -> None:
        self.refusal = sentence
        raise h11.RemoteProtocolError(sentence)
