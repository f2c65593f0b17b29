"""Sleep of a paused engine: until it is woken, it holds and uses no memory of its device that it can give back."""

from __future__ import annotations

from service.engine.ipc.messages import Finished
from service.engine.loras.interfaces import Rows
from service.engine.model.runner import Runner
from service.engine.model.sleeping_memory import CannotSleep
from service.engine.pauses import Pauses
from service.engine.requests import Requests
from service.engine.scheduling.prefix_cache import PrefixCache
from service.engine.step.launcher import StepLauncher


class Sleeping:
    """See the module's docstring. Everything is in the engine's thread.

    is_asleep  `begin` has been followed, and no `end`
    """

    def __init__(
        self,
        runner: Runner,
        rows: Rows | None,
        cache: PrefixCache,
        launcher: StepLauncher,
        pauses: Pauses,
        requests: Requests,
    ) -> None:
        self._runner, self._rows, self._cache, self._launcher = runner, rows, cache, launcher
        self._pauses, self._requests = pauses, requests
        self.is_asleep = False

    def begin(self, request_id: str, *, has_step_in_flight: bool) -> None:
        """Give the device's memory back, see `Sleep`: captured graphs, caches with what they hold, and what
        `Runner.sleep` says."""
        try:
            if self._requests or has_step_in_flight:
                raise CannotSleep("the pause has ended, and requests run")
            self._cache.reset()
            self._runner.sleep(self._rows)
        except CannotSleep as refusal:
            self._pauses.end()
            self._requests.events.append(Finished(request_id, "error", error=str(refusal)))
            return
        self.is_asleep = True
        self._pauses.hold()
        self._requests.events.append(Finished(request_id, "stop"))

    def end(self) -> None:
        """Have the memory again, if it was given back. Raises torch's error if the device has too little by now."""
        if self.is_asleep:
            self._runner.wake()
            if self._rows is not None:
                self._rows.forget_addresses()
            self._launcher.capture_again()
            self.is_asleep = False
