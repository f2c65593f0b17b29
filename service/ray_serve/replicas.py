"""The replicas that run in the processes of `service.ray_serve.app`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from adapters.files.durable_files import DiskWatch
from service.engine.ipc.client import EngineClient
from service.logs import LOGGER, configure
from service.models.gguf_directory import model_directory
from service.ray_serve import members
from service.ray_serve.relay import Relay
from service.ray_serve.remote import Address, RemoteEngines
from service.server.gc_tuning import prepare
from service.settings import Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# Unanswered pings, one at each health check and second, after which an engine is killed.
_MOST_UNANSWERED = 60
_LOOK_SECONDS = 0.1
# Settings of `multilora serve` that mean nothing in Ray Serve's config, with the ones that replace them.
_CONFIG = "the config file of Ray Serve"
_NOT_OURS = {
    "host": _CONFIG,
    "port": _CONFIG,
    "replicas": "`engines`",
    "store_shared": "nothing, it always is",
    "shutdown_limit_seconds": "`drain_seconds`",
    # Also read by HAProxy, which knows the environment alone.
    "max_connections": "RAY_SERVE_HAPROXY_MAXCONN in the environment of all of Ray's processes",
    "stall_limit_seconds": "MULTILORA_STALL_LIMIT_SECONDS in the environment of all of Ray's processes",
    "trusted_proxies": "MULTILORA_TRUSTED_PROXIES in the environment of all of Ray's processes",
}


def ray_settings(given: Mapping[str, Any]) -> Settings:
    """Settings of a replica. Raises SettingsError if they are wrong, or belong into Ray Serve's config.

    Names are shared: at an upgrade two ingresses have the store at the same time.
    """
    others = sorted(given.keys() & _NOT_OURS.keys())
    if others:
        said = "; ".join(f"{name} (said by {_NOT_OURS[name]})" for name in others)
        raise SettingsError(f"Settings of the application on Ray Serve: take out {said}.")
    settings = load_settings(**given, store_shared=True, replicas=1)
    return settings.model_copy(update={"model_dir": model_directory(settings.model_dir, settings.store_root / "gguf")})


def _served(settings: Settings) -> str:
    """The settings that an ingress and an engine must share; at an upgrade old and new ones run at the same time."""
    return json.dumps([str(settings.model_dir.absolute()), str(settings.store_root)])


class DeploymentsRouter(RequestRouter):
    """Sends this process's ingress the list of engines. Hardly anything is routed by it."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray, in a thread of its own, whenever replicas have come or gone."""
        super().update_replicas(replicas)
        members.update({one.replica_id.unique_id: Address(**one.replica_metadata) for one in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """Any of them."""
        del pending_request
        return [[one] for one in candidate_replicas]


class EngineReplica:
    """One engine process, and the port by which ingresses use it."""

    async def __init__(self, given: Mapping[str, Any], drain_seconds: float) -> None:  # type: ignore[misc]
        settings = ray_settings(given)
        configure(settings.log_format, settings.log_level, settings.refusal_lines_per_minute)
        self._drain_seconds, self._serves = drain_seconds, _served(settings)
        self._num_unanswered, self._heard_seconds = 0, 0.0
        self._client = EngineClient(settings.engine_options())
        await self._client.start()
        await self._client.wait_ready()
        self._host = ray.util.get_node_ip_address()
        self._relay = Relay(self._client)
        await self._relay.start(self._host)
        # Ray's worker and the engine write there. The health check passes: a new replica would find the same disk.
        disks = DiskWatch([Path(tempfile.gettempdir()), settings.store_root], self._relay.cordon)
        await disks.look()
        self._watching_disks = asyncio.create_task(disks.run())

    def record_replica_metadata(self) -> dict[str, Any]:
        """The address of the engine for ingresses, and the token that admits them; read once. See `Address`."""
        relay = self._relay
        return {"host": self._host, "port": relay.port, "token": relay.token.hex(), "serves": self._serves}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that `service.ray_serve.scaling` decides by."""
        return {"queued_tokens": float(self._relay.queued_tokens)}

    async def check_health(self) -> None:
        """RuntimeError when the engine is down for good: Ray then starts another replica. One that has answered nothing
        for many checks is killed, which ends what it had begun, and started again: Ray would wait for that. Ingresses
        send it nothing long before."""
        client = self._client
        if client.state == "down":
            raise RuntimeError(client.state_error or "The engine is down.")
        is_silent = client.state == "ready" and client.heard_seconds == self._heard_seconds
        self._num_unanswered = self._num_unanswered + 1 if is_silent else 0
        self._heard_seconds = client.heard_seconds
        if self._num_unanswered > _MOST_UNANSWERED:
            LOGGER.error("the engine has left %d questions unanswered and is killed", self._num_unanswered)
            self._num_unanswered = 0
            client.kill()
        client.ping()

    async def hello(self) -> None:
        """A request for Ray's sake: with the first one a handle begins to follow the replicas."""

    async def __del__(self) -> None:
        """End the engine once ingresses have left: Ray has announced to them that this replica goes."""
        if hasattr(self, "_watching_disks"):
            self._watching_disks.cancel()
        if hasattr(self, "_relay"):
            await self._relay.close(self._drain_seconds)
        if hasattr(self, "_client"):
            await self._client.close()


class Ingress:
    """The FastAPI application, whose engines are the replicas of `EngineReplica`. Its own limits decide how many
    requests are admitted, not Ray's."""

    async def __init__(self, given: Mapping[str, Any], num_engines: int, engine: DeploymentHandle) -> None:  # type: ignore[misc]
        settings = ray_settings(given)
        configure(settings.log_format, settings.log_level, settings.refusal_lines_per_minute)
        prepare()
        # Not at the top: an engine's replica, which has this module too, has no use for what takes 0.3 s to import.
        from service.api.http.slow_bodies import BoundedBodies
        from service.server.app import create_app

        self._engines = RemoteEngines(num_engines, serves=_served(settings))
        self._application = create_app(settings, self._engines)
        self._bounded = BoundedBodies(self._application, settings.stall_limit_seconds)
        self._joining: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        members.listen(lambda addresses: _in_loop(loop, self._follow, addresses))
        self._hello = asyncio.create_task(_say_hello(engine))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._bounded

    async def check_health(self) -> None:
        """The first one waits until requests can be served: at an upgrade the ingress before goes only then.
        RuntimeError if that will never be."""
        services = self._application.state.services
        while not services.prepared:
            if services.start_error is not None:
                raise RuntimeError(services.start_error)
            await asyncio.sleep(_LOOK_SECONDS)

    def _follow(self, addresses: dict[str, Address]) -> None:
        joining = asyncio.create_task(self._engines.set_addresses(addresses))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *arguments)


async def _say_hello(engine: DeploymentHandle) -> None:
    await engine.hello.remote()
