"""Sequences in flight: engine messages to text, stop strings and log probabilities; all is given back at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from service.api.admission import Admitted, Plan, Target
from service.api.errors import BadRequest, EngineFailed, NotReady
from service.api.metrics import SequenceTimer
from service.api.state import Services
from service.engine.client import EngineDied, NeverSent
from service.engine.messages import Finished, Submit, TokenLogprob, Tokens
from service.text.detokenizer import IncrementalDetokenizer
from service.text.stop_strings import StopStrings

_SHUT_DOWN = "The server was shut down before the answer was complete; ask another one."


@dataclass
class Piece:
    """What is new of a sequence. Text and tokens need not match: text may wait for the rest of a character.

    text_offsets  for each token, the number of characters of the answer before it
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None

    def add(self, other: Piece) -> None:
        """Append what came later."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.text_offsets += other.text_offsets
        if other.prompt_logprobs is not None:
            self.prompt_logprobs = other.prompt_logprobs
        self.finish_reason = other.finish_reason
        self.stop_reason = other.stop_reason


class SequenceRun:
    """One sequence in the engine. Submitted when built; read `pieces` once; `close` always."""

    def __init__(self, services: Services, target: Target, plan: Plan) -> None:
        self._services = services
        self._plan = plan
        self._stop_token_ids = frozenset(plan.sampling.stop_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            services.tokenizer, plan.prompt.token_ids, skip_special_tokens=plan.skip_special_tokens
        )
        self._stop = StopStrings(plan.stop)
        self._num_chars = 0
        self._ended = False
        self.timer = SequenceTimer(services.metrics, target.name, len(plan.prompt.token_ids))
        self._messages = services.engine.submit(
            Submit(plan.request_id, plan.prompt.token_ids, plan.sampling, target.digest, target.adapter_rows)
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._plan.prompt.token_ids)

    async def pieces(self) -> AsyncIterator[Piece]:
        """What the engine sends, as pieces; the last one has a finish_reason.

        EngineFailed if the engine fails; NotReady if it never had the request, or the server shuts down.
        """
        try:
            async for piece in self._pieces():
                yield piece
        except EngineDied as error:
            self.close("error")
            if self._services.draining:
                raise NotReady(_SHUT_DOWN) from error
            if isinstance(error, NeverSent):
                raise NotReady(f"{error} Send the request again later.") from error
            raise EngineFailed(f"{error} The request was lost; send it again.") from error

    async def collect(self) -> Piece:
        """All pieces as one."""
        whole = Piece()
        async for piece in self.pieces():
            whole.add(piece)
        return whole

    async def _pieces(self) -> AsyncIterator[Piece]:
        async for message in self._messages:
            piece = self._finished(message) if isinstance(message, Finished) else self._tokens(message)
            if piece.finish_reason is not None:
                # Before the piece is given out: who stops reading at it does not come back here.
                self._ended = True
                self._services.engine.abort(self._plan.request_id)
                self.timer.end(piece.finish_reason)
            yield piece
            if self._ended:
                return
        raise EngineFailed("The engine ended this request without saying why; send it again.")

    def close(self, outcome: str = "abort") -> None:
        """Free what the engine still holds; does nothing for a sequence that has ended."""
        if not self._ended:
            self._ended = True
            self._services.engine.abort(self._plan.request_id)
            self.timer.end(outcome)

    def _tokens(self, message: Tokens) -> Piece:
        piece = Piece(prompt_logprobs=message.prompt_logprobs)
        for index, token_id in enumerate(message.token_ids):
            piece.token_ids.append(token_id)
            piece.text_offsets.append(self._num_chars)
            if message.logprobs:
                piece.logprobs.append(message.logprobs[index])
            self.timer.tokens(1)
            # The token that ends the answer is counted, but is no part of its text unless that is asked for.
            ends = token_id in self._stop_token_ids and self.timer.num_tokens > self._plan.sampling.min_tokens
            if ends and not self._plan.include_stop:
                continue
            piece.text += self._give(self._detokenizer.push(token_id))
            if self._stop.matched is not None:
                piece.finish_reason, piece.stop_reason = "stop", self._stop.matched
                break
        return piece

    def _give(self, text: str) -> str:
        """Text through the stop strings, of which none ends the text before `min_tokens`."""
        self._num_chars += len(text)
        given = self._stop.push(text, may_end=self.timer.num_tokens > self._plan.sampling.min_tokens)
        return given + (self._stop.matched or "") if self._plan.include_stop else given

    def _finished(self, message: Finished) -> Piece:
        if message.reason == "error":
            self.timer.end("error")
            if self._services.draining:
                raise NotReady(_SHUT_DOWN)
            sentence = message.error or "The engine failed on this request."
            raise BadRequest(sentence) if message.client_fault else EngineFailed(sentence)
        piece = Piece(text=self._give(self._detokenizer.finish()), finish_reason=message.reason)
        if self._stop.matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._stop.matched
            return piece
        piece.text += self._stop.finish()
        if message.stop_token_id is not None and message.stop_token_id not in self._services.tokenizer.eos_token_ids:
            piece.stop_reason = message.stop_token_id
        return piece


class Job:
    """The sequences of one request: n for each prompt, in order of the choices' index, all submitted when built.

    Takes over the lease and the places in the queue of `admitted`, and holds them until `close`. If it cannot be built,
    everything is given back at once.
    """

    def __init__(self, services: Services, admitted: Admitted) -> None:
        self._target = admitted.target
        self._base_digest = services.base_digest
        self._admitted = admitted
        self._closed = False
        self.plans = admitted.plans
        self.runs: list[SequenceRun] = []
        try:
            for plan in self.plans:
                self.runs.append(SequenceRun(services, self._target, plan))
        except BaseException:
            self.close("error")
            raise

    @property
    def name(self) -> str:
        """The adapter that answers, or the base."""
        return self._target.name

    @property
    def fingerprint(self) -> str:
        """Changes with what answers: the digest of the base, and of the adapter if there is one."""
        digest = self._target.digest
        return f"fp_{self._base_digest}" if digest is None else f"fp_{self._base_digest}_{digest[:16]}"

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(run.timer.num_tokens for run in self.runs)

    @property
    def outcomes(self) -> list[str]:
        """How the sequences that have ended did: stop, length, abort (the client went) or error."""
        return [run.timer.outcome for run in self.runs if run.timer.outcome is not None]

    @property
    def first_token_seconds(self) -> float | None:
        """From admission to the first token of any sequence."""
        return min((run.timer.first_token_seconds or 0.0 for run in self.runs if run.timer.num_tokens), default=None)

    async def collect(self) -> list[Piece]:
        """The whole answers. The first failure ends all of them."""
        if len(self.runs) == 1:
            return [await self.runs[0].collect()]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(run.collect()) for run in self.runs]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def stream(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the choice, piece) as they come."""
        if len(self.runs) == 1:
            async for piece in self.runs[0].pieces():
                yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self.runs))]
        try:
            open_runs = len(tasks)
            while open_runs:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                open_runs -= item[1].finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, Piece] | Exception]) -> None:
        try:
            async for piece in self.runs[index].pieces():
                queue.put_nowait((index, piece))
        except Exception as error:  # handed to the reader of the stream
            queue.put_nowait(error)

    def close(self, outcome: str = "abort") -> None:
        """Abort what still runs and give everything back; once is enough, more does nothing."""
        if self._closed:
            return
        self._closed = True
        for run in self.runs:
            run.close(outcome)
        self._admitted.release()
