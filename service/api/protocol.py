"""HTTP/1.1 as uvicorn speaks it with h11, with this server's shape for the one error that uvicorn answers by itself."""

from __future__ import annotations

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.errors import BadRequest, error_body

_NO_HTTP = BadRequest(
    "This is no HTTP/1.1 request, or its head is longer than the server takes; look at the client, or at the proxy "
    "before this server."
)


class Protocol(H11Protocol):
    """One connection."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what h11 cannot read, and close. uvicorn has logged it; no application has seen it."""
        body = msgspec.json.encode(error_body(_NO_HTTP))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
