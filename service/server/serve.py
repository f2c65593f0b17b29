"""`multilora serve`: settings from flags and environment, then one uvicorn server until SIGTERM.

Imports at the top are light: the engine process, whose start takes longest, is started as early as can be.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from service.cli.help import flag_parser
from service.logs import LOGGER, configure
from service.machine import OTHER_FILES
from service.models.gguf_directory import model_directory
from service.server.gc_tuning import prepare
from service.server.own_engines import own_engines
from service.settings import Settings, SettingsError, load_settings
from service.start_check import StartError

if TYPE_CHECKING:
    from types import FrameType

    import uvicorn

    from service.api.state import Services
    from service.cluster.engines import Engines
    from service.engine.ipc.client import EngineClient

# Environment variables of our prefix that are no settings of the server.
_OTHER_VARIABLES = {"MULTILORA_URL", "MULTILORA_API_KEY"}
# Answers that are being written when the last sequence has ended get so long to be sent.
_FLUSH_SECONDS = 5
_SEND_BUFFER_BYTES = 1 << 18
# New connections that wait in the kernel, and how many of them are accepted in one pass of the event loop: each costs
# 0.2 ms, and what somebody else's request needs several passes for waits for so many in each.
_BACKLOG, _ACCEPTED_PER_PASS = 2048, 4
# Longer than the pools of clients and proxies keep what they may send on (httpx 5 s, aiohttp 15, nginx and AWS's
# balancers 60): where the server closes first, a request that is on its way is lost, and not all of them send it again.
_KEEP_ALIVE_SECONDS = 75
# uvicorn ticks ten times a second; connections are checked in each of so many.
_TICKS_PER_LOOK = 10


def serve(flags: Sequence[str]) -> int:
    """Run the server; the exit code."""
    given = {name: value for name, value in vars(flag_parser().parse_args(flags)).items() if value is not None}
    try:
        settings = load_settings(**given)
        configure(settings.log_format, settings.log_level, settings.refusal_lines_per_minute)
        _warn_of_unknown_variables()
        served_dir = model_directory(settings.model_dir, settings.store_root / "gguf")
        return _run(settings.model_copy(update={"model_dir": served_dir}))
    except ValueError as error:  # SettingsError, StartError, ModelError, TextError, StoreBusy: one sentence each
        if not _is_for_operator(error):
            raise
        print(f"multilora: {error}", file=sys.stderr)
        return 1


def _is_for_operator(error: ValueError) -> bool:
    from adapters.errors import AdapterError
    from service.models.spec.config_json import ModelError
    from service.text.tokenizer import TextError

    return isinstance(error, SettingsError | StartError | ModelError | TextError | AdapterError)


def _warn_of_unknown_variables() -> None:
    known = {f"MULTILORA_{name.upper()}" for name in Settings.model_fields} | _OTHER_VARIABLES
    for name in sorted(os.environ):
        if name.upper().startswith("MULTILORA_") and name.upper() not in known:
            LOGGER.warning("The environment variable %s is no setting; see multilora serve --help.", name)


def _run(settings: Settings) -> int:
    prepare()
    listener = listen(settings.host, settings.port)
    _allow_files(settings.max_connections + OTHER_FILES)
    return asyncio.run(_start_and_serve(settings, listener))


async def _start_and_serve(settings: Settings, listener: socket.socket) -> int:
    """The engine process begins first, since what it imports takes longest: the application is imported beside it."""
    engine = own_engines(settings)
    await engine.start()
    try:
        await asyncio.to_thread(importlib.import_module, "service.server.app")
        app = _make_app(settings, engine)
        gc.freeze()
        gc.enable()
    except BaseException:
        await engine.close()
        raise
    return await _serve_app(app, settings, listener)


def _make_app(settings: Settings, engine: EngineClient | Engines) -> Any:
    """Raises StartError and the ValueErrors of the application's parts."""
    from service.server.app import create_app

    try:
        return create_app(settings, engine)
    except OSError as fault:
        raise StartError(
            f"{fault.filename or 'A file of the model'} cannot be used: {fault.strerror or fault}."
        ) from fault


async def _serve_app(app: Any, settings: Settings, listener: socket.socket) -> int:
    """Until the server ends; the exit code."""
    server = make_server(app, settings)
    app.state.services.stop = server.stop
    _reread_keys_on_hangup(app.state.services)
    host, port = listener.getsockname()[:2]
    LOGGER.info("listening", extra={"fields": {"url": f"http://{f'[{host}]' if ':' in host else host}:{port}"}})
    await server.serve(sockets=[listener])
    error = app.state.services.start_error
    if error is not None:
        print(f"multilora: {error}", file=sys.stderr)
        return 1
    return 0 if server.started else 1


def _reread_keys_on_hangup(services: Services) -> None:
    """SIGHUP, which would end the process, where there is a file to read."""
    if services.tenants.has_file:
        signal.signal(signal.SIGHUP, lambda _signal, _frame: services.on_loop(services.tenants.reread))


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. SettingsError if there can be none.

    What it accepts sends at once (TCP_NODELAY, which connections take over from it): asyncio sets that only on sockets
    that name TCP as their protocol. Otherwise the body of an answer waits until the client has acknowledged its head,
    40 ms on Linux, and the tokens of a stream leave in clumps.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise SettingsError(f"Cannot listen on {host} port {port}: {error.strerror}; set another --port.") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Kernels would hold megabytes for each connection that nobody reads.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return listener


def _allow_files(num_files: int) -> None:
    """Let this process open so many, as far as the system lets it: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return
    allowed = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < num_files:
        LOGGER.warning(
            "This process may open %d files, which are too few for --max-connections; lower that, or raise the limit.",
            allowed,
        )


def make_server(app: Any, settings: Settings) -> Any:
    import uvicorn

    from service.api.http.connection_limits import ConnectionShares
    from service.api.http.protocol import Protocol
    from service.api.http.read_scheduler import ReadScheduler

    def count(status: int) -> None:
        app.state.services.metrics.http_requests.labels("other", "unknown", str(status)).inc()

    shares = ConnectionShares(settings.max_connections, settings.trusted_proxies)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(Protocol, shares, ReadScheduler(), count)),
        log_config=None,
        access_log=False,
        backlog=_ACCEPTED_PER_PASS,  # which asyncio takes for both
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        loop="asyncio",
        ws="none",
    )
    return _server_class(uvicorn.Server)(config, app.state.services, app.state.engine, settings)


def _server_class(base: type[uvicorn.Server]) -> Any:
    """uvicorn's server, which is imported late, with a SIGTERM that lets requests finish while /ready says 503."""

    class Server(base):  # type: ignore[misc, valid-type]
        def __init__(self, config: uvicorn.Config, services: Any, engine: Any, settings: Settings) -> None:
            super().__init__(config)
            self._services, self._engine = services, engine
            self._settings = settings
            self._draining: set[asyncio.Task[None]] = set()

        def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
            """First signal: drain, then exit 0. Later ones: drain no longer. Without uvicorn's `force_exit`, with which
            the application would be cancelled where it stands."""
            limit_seconds = self._settings.shutdown_limit_seconds
            if self._services.draining:
                limit_seconds = 0.0
            else:
                LOGGER.info("%s: letting requests finish", signal.Signals(sig).name)
            self._services.draining = True
            self._services.on_loop(self._start_draining, limit_seconds)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Begin to accept connections."""
            await super().startup(sockets)
            for one in sockets or ():
                one.listen(_BACKLOG)

        async def on_tick(self, counter: int) -> bool:
            """Ten times a second, until the server ends."""
            if counter % _TICKS_PER_LOOK == 0:
                for connection in tuple(self.server_state.connections):
                    try:
                        connection.look(self._settings.stall_limit_seconds)
                    except Exception:  # in this task it would end the server
                        LOGGER.exception("A connection is closed: it could not be looked at.")
                        connection.transport.abort()
            return bool(await super().on_tick(counter))

        def stop(self) -> None:
            """End the server, from its own loop."""
            self.should_exit = True

        def _start_draining(self, limit_seconds: float) -> None:
            self._draining.add(asyncio.create_task(self.drain(limit_seconds)))

        async def drain(self, limit_seconds: float) -> None:
            """Let what is under way end, up to the limit; then the server ends."""
            try:
                await asyncio.gather(self._engine.drain(limit_seconds), self._services.uploads_end(limit_seconds))
            finally:
                self.should_exit = True

    return Server
