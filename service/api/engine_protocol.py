"""The interface of an engine for the API; `service.engine.ipc.client` and `service.cluster.engines` implement it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from service.engine.ipc.messages import EngineStatus, Finished, PauseMode, Ready, Stats, Submit, Tier, Tokens


class Messages(Protocol):
    """The engine's messages about one request; `service.engine.ipc.link.TokenStream` implements it."""

    def listen(self, listener: Callable[[], None], begin_anew: Callable[[], bool] | None = None) -> None:
        """Call `listener` whenever there is something to `poll`, now if there is already.

        begin_anew  called where the engine is lost that has begun with the request, and another one can do it from the
                    start: forgets all that was polled, and True; False if some of that has been told to the client
        """

    def poll(self) -> Tokens | Finished | None:
        """The next message, None while there is none. Raises EngineDied."""


class EngineProtocol(Protocol):
    """The engine client as routers use it; `service.engine.ipc.client.EngineClient` implements it."""

    @property
    def state(self) -> str:
        """ "starting", "ready", "restarting", "asleep", "draining" or "down"."""

    @property
    def state_error(self) -> str | None:
        """One sentence about the last death of the engine, if it died."""

    @property
    def ready(self) -> Ready | None:
        """Sizes of the running engine; None while there is none."""

    @property
    def stats(self) -> Stats | None:
        """The last Stats of the running engine; None while there is none."""

    @property
    def tiers(self) -> Mapping[str, Tier]:
        """Where the running engine holds adapters, by digest; those that are not named are on disk alone."""

    @property
    def num_restarts(self) -> int:
        """How often an engine was started again."""

    def replicas(self) -> Mapping[str, EngineStatus]:
        """The state of each of several engines by name; empty for a single one."""

    def places_of(self, digest: str) -> Mapping[str, Tier]:
        """The names of the engines that hold an adapter; empty for a single engine."""

    def submit(self, request: Submit) -> Messages:
        """Send at once; the messages end with Finished, or EngineDied is raised."""

    def abort(self, request_id: str) -> None:
        """Free everything of the request; unknown ids are ignored."""

    def move(self, request_id: str, adapter: str, adapter_rows: dict[str, int]) -> None:
        """Let a request go on with this adapter, see `Move`; unknown ids are ignored."""

    def load(self, adapter: str) -> None:
        """Hint that the adapter will be used."""

    def evict(self, adapter: str) -> None:
        """Free its rows and host memory."""

    def pin(self, adapters: Collection[str]) -> None:
        """Have these on the device, asked for or not, and no others for that reason; later engines too."""

    async def pause(self, mode: PauseMode, limit_seconds: float) -> None:
        """Pause all engines, and wait until they are quiet. EngineDied if one ends before, or is resumed."""

    async def resume(self) -> None:
        """End the pauses of all engines. EngineDied if one ends before."""

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` and `wake` may be called."""

    async def sleep(self, level: int) -> None:
        """Have all engines give their devices' memory back until `wake`, at level 2 by ending their processes; the
        state is "asleep" then. EngineDied if one ends for good."""

    async def wake(self) -> None:
        """Wake those that sleep, and wait until they are ready. EngineDied if one cannot start."""

    @property
    def is_paused(self) -> bool:
        """Whether all engines are paused, by their last reports."""

    def reset_prefix_cache(self) -> None:
        """Forget what prefix caches have, on all engines."""
