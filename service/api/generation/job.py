"""The sequences of one request in the engine, read whole or streamed; the end releases everything they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from adapters.files.manifest import AdapterRecord
from adapters.files.paths import without_root
from service.api.admission.pipeline import Admitted, PlannedSequence
from service.api.generation.sequence import OutputChunk, SequenceRun
from service.api.queue_limits import LogprobBudget
from service.api.state import Services


class GenerationJob:
    """The sequences of one request: n for each prompt, in order of the choices' index, all submitted when built.

    Takes over the lease and the places in the queue of `admitted`: each place is given back when its sequence ends, the
    lease with the last, and all that is left by `close`. If it cannot be built, everything is given back at once.

    is_streamed  the answer is read by `listen` and `poll`, not by `collect`
    part  those of the request's plans that run now, where the caller runs the others later and releases what is left
    keeps_logprobs  a streamed answer repeats in the end all log probabilities that it had
    """

    def __init__(
        self,
        services: Services,
        admitted: Admitted,
        is_streamed: bool = False,
        *,
        keeps_logprobs: bool = False,
        part: list[PlannedSequence] | None = None,
    ) -> None:
        self._target = admitted.target
        self._base_digest = services.base_digest
        self._admitted = admitted
        self._closed = False
        self._open_jobs, self.request_id = services.open_jobs, ""
        self._open_jobs.add(self)
        self.is_streamed = is_streamed
        self._logprob_shares = services.logprobs
        self._logprobs = LogprobBudget(services.logprobs)
        # Indices of the runs that have something to take, in the order in which they got it.
        self._fresh: dict[int, None] = {}
        self._listener: Callable[[], object] | None = None
        self._ended = asyncio.Event()
        self.plans, self._is_part = (admitted.plans, False) if part is None else (part, True)
        self.runs: list[SequenceRun] = []
        self._num_untold = len(self.plans)
        if self._target.lease is not None:
            services.used(self._target.name)
        try:
            for index, plan in enumerate(self.plans):
                on_news = partial(self._note, index)
                run = SequenceRun(
                    services,
                    admitted.tenant,
                    self._target,
                    plan,
                    is_streamed=is_streamed,
                    keeps_logprobs=keeps_logprobs or not is_streamed,
                    logprobs=self._logprobs,
                    on_news=on_news,
                    on_end=partial(self._end_one, plan),
                )
                self.runs.append(run)
        except BaseException:
            self.close("error")
            raise

    @property
    def name(self) -> str:
        """The answering model under the caller's name."""
        return self._target.shown_name

    @property
    def full_name(self) -> str:
        """The answering model under the store's name, for logs and metrics."""
        return without_root(self._target.name)

    @property
    def adapter(self) -> str | None:
        """The answering adapter's version under the caller's name, and its digest; None for the base."""
        record = self.record
        return None if record is None else f"{self.name}@{record.version.number} sha256:{record.digest}"

    @property
    def record(self) -> AdapterRecord | None:
        """The answering adapter's version; None for the base."""
        return None if self._target.lease is None else self._target.lease.record

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights that answer: it changes with the digest of the base or of the adapter."""
        digest = self._target.digest
        return f"fp_{self._base_digest}" if digest is None else f"fp_{self._base_digest}_{digest[:16]}"

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(run.timer.num_tokens for run in self.runs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that the prefix cache had, for the first of each prompt's choices."""
        first = {id(plan.prompt): run for plan, run in zip(self.plans[::-1], self.runs[::-1], strict=False)}
        return sum(run.num_cached_tokens for run in first.values())

    @property
    def outcomes(self) -> list[str]:
        """How the sequences that have ended did: stop, length, abort (the client went) or error."""
        return [run.timer.outcome for run in self.runs if run.timer.outcome is not None]

    @property
    def is_over(self) -> bool:
        """Whether all its sequences have ended."""
        return all(run.is_over for run in self.runs)

    @property
    def first_token_seconds(self) -> float | None:
        """From admission to the first token of any sequence."""
        return min((run.timer.first_token_seconds or 0.0 for run in self.runs if run.timer.num_tokens), default=None)

    async def collect(self) -> list[OutputChunk]:
        """The whole answers. The first failure ends all of them."""
        while not all(run.is_over for run in self.runs) and not any(run.failure for run in self.runs):
            self._ended.clear()
            await self._ended.wait()
        for run in self.runs:
            if run.failure is not None:
                raise run.failure
        return [run.take() or OutputChunk() for run in self.runs]

    @property
    def is_finished(self) -> bool:
        """Whether `poll` has returned the last chunk of each sequence."""
        return not self._num_untold

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have a chunk to return or an error to raise."""
        return bool(self._fresh)

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` whenever `poll` has a chunk or an error, now if it has one already; it never raises."""
        self._listener = listener
        if self._fresh:
            listener()

    def poll(self) -> tuple[int, OutputChunk] | None:
        """(index of the choice, chunk) of the sequence that has waited longest; None while nothing is new. Raises as
        `SequenceRun.take` does."""
        while self._fresh:
            index = next(iter(self._fresh))
            del self._fresh[index]
            piece = self.runs[index].take()
            if piece is not None:
                self._num_untold -= piece.finish_reason is not None
                return index, piece
        return None

    def hand_over(self) -> Callable[[], None]:
        """The release of the log probabilities that a whole answer still holds after the job is closed; call it once
        the answer has been sent."""
        held, self._logprobs = self._logprobs, LogprobBudget(self._logprob_shares)
        return held.release

    def end_early(self) -> None:
        """End all sequences with what they have, and the finish_reason "abort"."""
        for run in self.runs:
            run.end_early()

    def close(self, outcome: str = "abort") -> None:
        """Abort the running sequences and release everything; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        self._open_jobs.discard(self)
        for run in self.runs:
            run.close(outcome)
            run.forget_others()
        self._listener = None
        self._logprobs.release()
        if not self._is_part:
            self._admitted.release()

    def _note(self, index: int) -> None:
        self._fresh[index] = None
        if self._listener is not None:
            self._listener()

    def _end_one(self, plan: PlannedSequence, num_generated: int) -> None:
        self._admitted.end_one(plan, num_generated)
        self._ended.set()
