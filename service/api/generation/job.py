"""The sequences of one request in the engine, read whole or streamed; the end releases everything they hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from adapters.errors import AdapterError
from adapters.files.name_versions import Version
from adapters.files.paths import without_root
from service.api.admission.model_resolution import ResolvedModel, obstacle
from service.api.admission.pipeline import Admitted
from service.api.admission.plans import PlannedSequence
from service.api.errors import ApiError, error_body
from service.api.generation.chat_delta import ChatFormatter
from service.api.generation.sequence import OutputChunk, SequenceRun
from service.api.metrics.traces import Answered, Phase
from service.api.queue_limits import LogprobBudget
from service.api.state import Services
from service.engine.ipc.messages import Sampling


class GenerationJob:
    """The sequences of one request: n for each prompt, in order of the choices' index, all submitted when built.

    Takes over the lease and the queue slots of `admitted`: each slot is given back when its sequence ends, the
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
        self._services, self._target = services, admitted.target
        self._base_digest = services.base_digest
        self._admitted = admitted
        self.is_closed = False
        self.request_id = self.answer_id = ""
        self.speakers: Sequence[ChatFormatter] = ()  # of a chat, one for each sequence
        self.on_close: Callable[[], None] | None = None  # once
        self._moves: list[tuple[float, Version]] = []  # by `time.perf_counter`
        services.open_jobs[self] = None
        self.is_streamed = is_streamed
        self._logprob_shares = services.logprobs
        self._logprobs = LogprobBudget(services.logprobs)
        # Indices of the runs that have something to take, in the order in which they got it.
        self._fresh: dict[int, None] = {}
        self._listener: Callable[[], object] | None = None
        self._ended = asyncio.Event()
        self._seen_digest = admitted.target.digest  # of the newest version that the name is known to stand for
        self._leased: list[ResolvedModel] = []  # versions that sequences have gone on with, or are to
        # The version that has made the latest token, or is to make the first.
        self._version = admitted.target.version
        self.plans, self.is_part = (admitted.plans, False) if part is None else (part, True)
        self.runs: list[SequenceRun] = []
        self._num_unfinished = len(self.plans)
        for part_of in self._target.parts:
            services.used(part_of.record.name)
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
                    on_version=self._note_version,
                )
                self.runs.append(run)
            self.follow(self._target.name)  # it may have moved since it was resolved
        except BaseException:
            self.close("error")
            raise

    @property
    def name(self) -> str:
        """The answering model under the caller's name."""
        return self._target.shown_name

    @property
    def full_name(self) -> str:
        """The answering model under the store's name, for logs; of a sum those of its parts."""
        names = "+".join(without_root(part.record.name) for part in self._target.parts)
        return names or self._target.name

    @property
    def adapter(self) -> str | None:
        """The answering adapter's version under the caller's name, and its digest; of a sum those of its parts with
        their weights; None for the base."""
        if self._target.is_sum:
            named = ((part, f"{part.shown_name}@{part.record.version.number}") for part in self._target.parts)
            return " + ".join(f"{name} sha256:{part.record.digest} * {part.weight}" for part, name in named)
        version = self.version
        return None if version is None else f"{self.name}@{version.number} sha256:{version.digest}"

    @property
    def version(self) -> Version | None:
        """The answering adapter's version; None for the base and for sums. Of several the one that has made the latest
        token."""
        return self._version

    @property
    def logged_version(self) -> str | None:
        """The answering adapters' versions for the log; None for the base."""
        if self._target.is_sum:
            return "+".join(f"{part.record.reference}:{part.record.digest[:12]}" for part in self._target.parts)
        version = self.version
        return None if version is None else f"{self.full_name}@{version.number}:{version.digest[:12]}"

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights that answer: it changes with the digest of the base or of the adapter."""
        version = self.version
        digest = None if version is None else version.digest
        if self._target.is_sum:
            digest = sha256((self._target.digest or "").encode()).hexdigest()
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

    def answered(self, operation: str) -> Answered:
        """The answer for a trace, once it is over.

        operation  what the route's requests do; "": as their bodies say
        """
        plan, version, runs = self.plans[0], self.version, self.runs
        prompts = {id(one.prompt): len(one.prompt.token_ids) for one in self.plans}
        if self.speakers or not operation:
            operation = "chat" if self.speakers else "text_completion" if plan.pooling is None else "embeddings"
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "multilora",
            "gen_ai.request.model": self.name,
            "gen_ai.response.model": self.name,
            "gen_ai.usage.input_tokens": sum(prompts.values()),
        }
        if self.answer_id:
            attributes |= self._generated(plan.sampling) | {"gen_ai.response.id": self.answer_id}
        if len(runs) > len(prompts):
            attributes["gen_ai.request.choice.count"] = len(runs) // len(prompts)
        if version is not None:
            attributes["multilora.adapter.name"] = self.name
            attributes |= {"multilora.adapter.version": version.number, "multilora.adapter.digest": version.digest}
        elif self.adapter is not None:
            attributes["multilora.adapter.name"] = self.adapter
        failure = next((run.failure for run in runs if run.failure is not None), None)
        if failure is not None or "abort" in self.outcomes:
            attributes["error.type"] = "abort" if failure is None else error_body(failure)["error"]["code"]
        return Answered(
            attributes,
            [run.timer for run in runs],
            [
                Phase("tool_parsing", *one.calls_span, {"multilora.tool_calls": one.num_calls})
                for one in self.speakers
                if one.calls_span is not None
            ],
            [
                ("adapter_version", at, {"multilora.adapter.version": to.number, "multilora.adapter.digest": to.digest})
                for at, to in self._moves
            ],
        )

    def _generated(self, sampling: Sampling) -> dict[str, Any]:
        """The attributes of an answer in tokens."""
        ends = [run.timer.outcome for run in self.runs]
        if self.speakers:
            ends = [one.finish_reason(end) for one, end in zip(self.speakers, ends, strict=True)]
        return {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            **{
                f"gen_ai.request.{name}": value
                for name in ("top_k", "frequency_penalty", "presence_penalty")
                if (value := getattr(sampling, name))
            },
            "gen_ai.usage.output_tokens": self.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.num_cached_tokens,
            "gen_ai.response.finish_reasons": [end or "error" for end in ends],
        }

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
        return not self._num_unfinished

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
                self._num_unfinished -= piece.finish_reason is not None
                return index, piece
        return None

    def hand_over(self) -> Callable[[], None]:
        """The release of the log probabilities that a whole answer still holds after the job is closed; call it once
        the answer has been sent."""
        held, self._logprobs = self._logprobs, LogprobBudget(self._logprob_shares)
        return held.release

    def follow(self, name: str) -> None:
        """A name of the store stands for something else. If it is this job's, and its `on_new_version` is not "keep",
        the sequences go on with that, or begin anew. Of a name that is gone they keep what they have."""
        find = self._target.newest
        if name != self._target.name or find is None or self.is_closed or self.plans[0].on_new_version == "keep":
            return
        try:
            newest = find()
        except (ApiError, AdapterError):
            return
        if newest.digest == self._seen_digest:
            newest.release()
            return
        self._leased.append(newest)
        self._seen_digest = newest.digest
        assert newest.parts and self._target.parts, "an adapter's name"
        before, after = self._target.parts[0].record, newest.parts[0].record
        reason = obstacle(self._services, before.manifest, after.manifest)
        for run in self.runs:
            if reason is None:
                run.move(newest)
            else:
                run.stay(after.version, reason)
        if reason is None and self.plans[0].on_new_version == "restart":
            self._version = after.version
        self._release_unused()

    def end_early(self) -> None:
        """End all sequences with what they have, and the finish_reason "abort"."""
        for run in self.runs:
            run.end_early()

    def close(self, outcome: str = "abort") -> None:
        """Abort the running sequences and release everything; further calls do nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self._services.open_jobs.pop(self, None)
        for run in self.runs:
            run.close(outcome)
            run.forget_others()
        self._listener = None
        self._release_unused()
        self._logprobs.release()
        if not self.is_part:
            self._admitted.release()
        if self.on_close is not None:
            self.on_close()

    def _note(self, index: int) -> None:
        self._fresh[index] = None
        if self._listener is not None:
            self._listener()

    def _end_one(self, plan: PlannedSequence, num_generated: int, num_cached: int) -> None:
        self._admitted.end_one(plan, num_generated, num_cached)
        if self._leased:
            self._release_unused()
        self._ended.set()

    def _note_version(self, version: Version) -> None:
        self._version = version
        self._moves.append((time.perf_counter(), version))
        self._release_unused()

    def _release_unused(self) -> None:
        """Give back the versions that no sequence needs any more, the first one among them."""
        if not self._leased:
            return
        used = set().union(*(run.digests for run in self.runs))
        for held in [one for one in self._leased if one.digest not in used]:
            self._leased.remove(held)
            held.release()
        if self._target.digest not in used:
            self._admitted.leave_target()
