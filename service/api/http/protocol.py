"""HTTP/1.1 as uvicorn speaks it with h11, bounded for clients that mean harm: in the number of connections, in the size
of heads, in what a body costs beside its bytes, and in time. What is refused here is answered in the shape of every
other error; no application has seen it."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import h11
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.errors import ApiError, BadRequest, NotReady, QueueFull, RequestTimeout, error_body, status_of
from service.api.http.connection_limits import ConnectionShares
from service.api.http.h11_bounds import NO_HTTP, BoundedConnection
from service.api.http.read_scheduler import FIRST_READ_BYTES, USUAL_SECONDS, ReadScheduler, next_read_bytes
from service.api.http_rules import MIN_BYTES_PER_SECOND
from service.fairness.client_identity import network_of
from service.logs import LOGGER, REFUSAL_LINES

# Read at a time at most, hence worked on without a break; bytes of announced length cost little each.
_BODY_READ_BYTES = 1 << 18
# The same of an upload, of which there are few at a time (`--max-uploads`): each read costs the loop as much as 100 KB.
# A block of 1 MiB has pages of its own (`service.models.heap`), which cost more than the read.
_UPLOAD_READ_BYTES = (1 << 20) - (1 << 12)

_LINGER_SECONDS = 2.0


class _WithConnection:
    """The application, which is told by what connection a request has come."""

    def __init__(self, app: Any, connection: Protocol) -> None:
        self._app, self._connection = app, connection

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        own = set(scope)
        scope["multilora.connection"] = self._connection
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # the server ends, and has waited for this request
            self._connection.cut_off()
        finally:
            # The connection has the scope until its next request, and with it all that knows the connection.
            for name in scope.keys() - own:
                del scope[name]


class _Mark(NamedTuple):
    """How many bytes there were at some time."""

    at_seconds: float
    num_bytes: int


class Protocol(H11Protocol):
    """One connection. The server calls `look` now and then; requests find it in their scopes, for
    `belong_to` and `is_paid_by`.

    count  is called with the status of each refusal that no application has seen
    """

    def __init__(
        self, shares: ConnectionShares, reads: ReadScheduler, count: Callable[[int], None], **named: Any
    ) -> None:
        super().__init__(**named)
        self.conn: BoundedConnection = BoundedConnection()
        self.app = _WithConnection(self.app, self)
        self._shares, self._reads, self._count = shares, reads, count
        self._held = b""  # what came before it was this network's turn
        self._held_since = 0.0
        self._is_reading = False
        self.network = ""
        self._is_counted = False  # one that was one too many is not
        self.tenant = ""
        self._client = ""  # of the body that a trusted proxy sends now
        self._most_read_bytes = _BODY_READ_BYTES  # of the body that comes now
        self._uncharged_seconds = 0.0  # of heads that it sent, beyond what is usual
        self._is_answered = False
        self._head_since: float | None = None
        self._unread: _Mark | None = None
        self._unsent: _Mark | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection. Output that the kernel does not accept waits alone: nothing is added before it is gone."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        cast(Any, transport).max_size = FIRST_READ_BYTES
        self._head_since = self.loop.time()
        network = self._shares.open(self.client[0] if self.client else "")
        self.network, self._is_counted = network or "", network is not None
        if not self._is_counted:
            self._answer(
                QueueFull(
                    f"This server has all its {self._shares.most} connections, or you have half of them; close some, "
                    "or try again later.",
                    headers={"Retry-After": "1"},
                ),
                linger_seconds=0,
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        super().connection_lost(exc)
        # Other references to it: a timer, where the client has reset the connection, and its own application.
        self._unset_keepalive_if_required()
        self.app = self.config.loaded_app
        self._end_count()

    def _end_count(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._shares.close(self.network, self.tenant)

    def belong_to(self, tenant: str) -> None:
        """A request of this tenant has come. QueueFull if it has too many connections."""
        if tenant != self.tenant:
            self._shares.belong(self.tenant, tenant)
            self.tenant = tenant

    async def wait_to_be_read(self, network: str) -> None:
        """Wait until the request whose head has come may be served: of a client behind a trusted proxy, which is of
        this network, as many as one has reads that comes by itself, since heads are read before it is known whose they
        are."""
        if self.network:
            return
        begins = self.loop.create_future()
        may_read = self._reads.may_read(network, partial(_begin, begins))
        self._reads.charge(network, USUAL_SECONDS + self._uncharged_seconds)
        self._uncharged_seconds = 0.0
        if not may_read:
            await begins

    def is_paid_by(self, client: str) -> None:
        """The request whose head has come is this one's, whose reads of its body are counted."""
        self._client = client

    def reads_upload(self) -> None:
        """The body that comes is an upload that has its slot: what is still to come is read in larger pieces."""
        if self.conn.their_state is h11.SEND_BODY:
            self._most_read_bytes = _UPLOAD_READ_BYTES

    @property
    def _owner(self) -> str:
        """The network whose read budget the next read uses, "" for none. A trusted proxy has none: it sends one
        client's body at a time, and the client of a head is unknown before the head is read (`wait_to_be_read`)."""
        assert self._is_counted
        return self.network or (self._client if self.conn.their_state is h11.SEND_BODY else "")

    def data_received(self, data: bytes) -> None:
        """A piece of a head or a body."""
        if self._is_answered or not self._is_counted:
            return
        if self._held:  # the application wants more of a body
            self._held += data
            self.transport.pause_reading()
        elif (owner := self._owner) and not self._reads.may_read(owner, self._read_held):
            self._held, self._held_since = data, self.loop.time()
            self.transport.pause_reading()
            self._unset_keepalive_if_required()  # its client has sent something in time
        else:
            self._read(data)

    def _read_held(self) -> None:
        data, self._held = self._held, b""
        if self.transport.is_closing() or self._is_answered:
            return
        if self._head_since is not None:  # the wait was not its client's
            self._head_since += self.loop.time() - self._held_since
        if not self.flow.read_paused:
            self.transport.resume_reading()
        self._read(data)

    def _read(self, data: bytes) -> None:
        owner, started = self._owner, time.thread_time()
        self._is_reading = True
        if not self._read_body(data):
            super().data_received(data)
        self._is_reading = False
        seconds = time.thread_time() - started
        if owner:
            self._reads.charge(owner, seconds)
        else:
            self._uncharged_seconds += max(0.0, seconds - USUAL_SECONDS)
        if self.conn.their_state is not h11.SEND_BODY:
            self._client, self._most_read_bytes = "", _BODY_READ_BYTES
        self._time_head()
        size = self.conn.num_announced + next_read_bytes(len(data), seconds)
        cast(Any, self.transport).max_size = min(size, self._most_read_bytes)

    def handle_events(self) -> None:
        """Handle the bytes that arrived with an earlier, answered request as a read of their own."""
        if self._is_reading or not self.conn.trailing_data[0] or not (owner := self._owner):
            super().handle_events()
            return
        self._unset_keepalive_if_required()
        if self._reads.may_read(owner, self._go_on):
            self._go_on()

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            started = time.thread_time()
            super().handle_events()
            self._reads.charge(self._owner, time.thread_time() - started)
            self._time_head()

    def _time_head(self) -> None:
        """From now on, if something of a head has come, or may come, and it is not timed yet."""
        if self.conn.their_state is not h11.IDLE:
            self._head_since = None
        elif self._head_since is None:
            self._head_since = self.loop.time()

    def _read_body(self, data: bytes) -> bool:
        """Handle a part of a body as uvicorn does, where that needs no copy; False if it was not handled."""
        cycle = cast(Any, self.cycle)
        if cycle is None or cycle.body or not self.conn.skip_body(data):
            return False
        self._unset_keepalive_if_required()
        if self.conn.our_state is not h11.DONE:  # answered already: it is thrown away
            cycle.body = data
            if len(data) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()
        return True

    @property
    def can_write_pieces(self) -> bool:
        """Whether `write_pieces` may be called: the answer is sent in chunks, and what was written is gone."""
        return self.conn.sends_chunks and not self.flow.write_paused and not self.cycle.disconnected

    def write_pieces(self, pieces: Iterable[bytes]) -> None:
        """Write pieces of the answer's body, none of them empty, past the application's layers and at once."""
        if written := b"".join(map(self.conn.chunk, pieces)):
            self.transport.write(written)

    def pause_writing(self) -> None:
        """Something waits to be written."""
        super().pause_writing()
        self._unsent = _Mark(self.loop.time(), self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Nothing waits any more."""
        super().resume_writing()
        self._unsent = None

    def on_response_complete(self) -> None:
        """A request is answered."""
        super().on_response_complete()
        is_idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if self.timeout_keep_alive_task is not None and is_idle:
            self._shares.rest(self)

    def _unset_keepalive_if_required(self) -> None:
        super()._unset_keepalive_if_required()
        self._shares.wake(self)

    def close_if_idle(self) -> bool:
        """Close it between two requests, and count it down at once; False if it is closing, or has input, or its client
        has not taken all of its answer: its socket would stay for that."""
        return self._unsent is None and self._close_if_silent()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection without a request for long."""
        self._close_if_silent()

    def _close_if_silent(self) -> bool:
        """Close it once all is sent, unless it has input: on a busy machine the look at its sockets may be old, and
        what came since is read, and not cut off."""
        if self.transport.is_closing() or _has_input(self.transport.get_extra_info("socket").fileno()):
            return False
        self._unset_keepalive_if_required()
        if self._unsent is None:
            self._end_count()
        self.transport.close()
        return True

    def look(self, stall_limit_seconds: float) -> None:
        """End the connection if its client has been too slow for so long."""
        if self._is_answered:
            return
        now, least_bytes = self.loop.time(), MIN_BYTES_PER_SECOND * stall_limit_seconds
        if self._unsent is not None and now - self._unsent.at_seconds >= stall_limit_seconds:
            num_left = self.transport.get_write_buffer_size()
            if self._unsent.num_bytes - num_left < least_bytes:
                self._write_down("its client does not read")
                self.transport.abort()
            self._unsent = _Mark(now, num_left)
        if self._held:  # what came waits for this network's turn, and not for its client
            self._unread = None
            return
        if self._head_since is not None and now - self._head_since >= stall_limit_seconds:
            self._time_out("head")
        if self.conn.their_state is not h11.SEND_BODY or self.flow.read_paused:
            self._unread = None
        elif self._unread is None:
            self._unread = _Mark(now, self.conn.num_received)
        elif now - self._unread.at_seconds >= stall_limit_seconds:
            if self.conn.num_received - self._unread.num_bytes < least_bytes:
                self._time_out("body")
            self._unread = _Mark(now, self.conn.num_received)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what h11 cannot read, or what is refused here."""
        error = BadRequest(self.conn.refusal or NO_HTTP)
        self._write_down(str(error))
        self._answer(error)

    def _time_out(self, part: str) -> None:
        self._head_since = None
        if self.transport.is_closing():
            return
        self._write_down(f"the {part} of its request does not come")
        if self.conn.num_received:
            self._answer(RequestTimeout(f"The {part} of the request comes too slowly; send it again."))
        else:
            self.transport.close()

    def cut_off(self) -> None:
        """Answer a request that the server ends without."""
        self._answer(NotReady("The server has shut down; send the request to another one."))

    def _write_down(self, why: str) -> None:
        """The line of a connection that is closed here."""
        address = self.client[0] if self.client else ""
        if REFUSAL_LINES.may_write(network_of(address)):
            LOGGER.info("A connection is closed: %s", why, extra={"fields": {"client": address}})

    def _answer(self, error: ApiError, *, linger_seconds: float = _LINGER_SECONDS) -> None:
        """Answer instead of the application, and close; where half an answer is out, close.

        What still comes is thrown away for a while: a client that is still sending would otherwise see a reset and not
        the answer.
        """
        self._is_answered = True
        self._count(status_of(error))
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(error))
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                **error.headers,
            }
            response = h11.Response(status_code=status_of(error), headers=list(headers.items()))
            has_body = self.conn.our_state is h11.IDLE or not self.conn.is_head
            events = (response, *((h11.Data(data=body),) if has_body else ()), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
            try:
                self.transport.write_eof()
            except OSError:  # the client has gone, which is not seen while nothing is read of it
                self.transport.abort()
            self.loop.call_later(linger_seconds, self.transport.abort)
        else:
            self.transport.abort()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


def _has_input(file: int) -> bool:
    poll = select.poll()  # `select` takes no files from 1024 on
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _begin(begins: asyncio.Future[None]) -> None:
    if not begins.done():  # it is cancelled where the server ends
        begins.set_result(None)
