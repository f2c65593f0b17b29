"""Pauses of the engine: while one holds, the scheduler lets nothing run, or nothing that came after it.

The scheduler holds the mode; this owns the lease and the answers. A pause ends by `end`, or by itself when its lease
is over, so that a client that has died stops nobody. A new engine is not paused.
"""

from __future__ import annotations

import logging
import time

from service.engine.ipc.messages import Finished, Pause
from service.engine.requests import Requests
from service.engine.scheduling.scheduler import Scheduler

log = logging.getLogger("multilora.engine")

RESUMED = "The engine was resumed before it was quiet."


class Pauses:
    """See the module's docstring. Everything is in the engine's thread."""

    def __init__(self, scheduler: Scheduler, requests: Requests) -> None:
        self._scheduler, self._requests = scheduler, requests
        self._unanswered: list[str] = []
        self._limit_seconds = 0.0
        self._until_seconds: float | None = None  # by time.monotonic(), once the engine is quiet

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the lease is over; None while none runs."""
        return None if self._until_seconds is None else max(self._until_seconds - time.monotonic(), 0.0)

    def begin(self, message: Pause) -> None:
        """Pause, or change the mode of the pause and renew its lease. `settle` answers."""
        log.info("paused, mode %s", message.mode)
        if message.mode == "abort":
            self._requests.end_all("abort")
        elif message.mode == "retract":
            for sequence in list(self._scheduler.running):
                self._scheduler.preempt(sequence)
        self._scheduler.pause("wait" if message.mode == "wait" else "keep")
        self._unanswered.append(message.request_id)
        self._limit_seconds, self._until_seconds = message.limit_seconds, None

    def end(self, request_id: str | None = None) -> None:
        """Resume, and answer the one that asked; nothing else happens without a pause."""
        if self._scheduler.paused is not None:
            log.info("resumed")
        self._scheduler.resume()
        self._until_seconds = None
        self._answer(RESUMED)
        if request_id is not None:
            self._requests.events.append(Finished(request_id, "stop"))

    def hold(self) -> None:
        """End the lease, and not the pause."""
        self._until_seconds = None

    def expire(self) -> None:
        """Resume if the lease is over."""
        if self.seconds_left == 0.0:
            log.warning("the pause has lasted %g s and ends by itself", self._limit_seconds)
            self.end()

    def settle(self, *, has_step_in_flight: bool) -> None:
        """Answer pauses once the engine is quiet; their lease begins then."""
        if not self._unanswered or has_step_in_flight:
            return
        if self._scheduler.paused == "wait" and len(self._requests) > self._scheduler.num_held:
            return
        self._until_seconds = time.monotonic() + self._limit_seconds
        self._answer()

    def _answer(self, error: str | None = None) -> None:
        for request_id in self._unanswered:
            self._requests.events.append(Finished(request_id, "error" if error else "stop", error=error))
        self._unanswered.clear()
