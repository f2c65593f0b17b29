"""A sequence in flight: the engine's messages to text, stop strings and log probabilities.

Messages are worked on when they come, not when somebody reads: a client that reads slowly, or not at all, holds neither
a queue slot nor an adapter when the engine is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal
from uuid import uuid4

import msgspec

from adapters.files.name_versions import Version
from kernels.sampling.parameters import ScoredToken
from service.api.admission.model_resolution import ResolvedModel
from service.api.admission.plans import PlannedSequence
from service.api.errors import BadRequest, EngineFailed, NotReady
from service.api.metrics.metrics import SequenceTimer
from service.api.queue_limits import LogprobBudget
from service.api.state import Services
from service.engine.ipc.link import EngineDied, NeverSent
from service.engine.ipc.messages import Finished, Submit, Tokens
from service.tenants.limits import Tenant
from service.text.detokenizer import detokenizer_of
from service.text.stop_strings import StopStrings

# Most tokens and alternatives of a streamed sequence whose log probabilities may wait for their client.
MAX_WAITING_ENTRIES = 1 << 16
ABORTED = "An operator has ended all requests; send this one again later."
_SHUT_DOWN = "The server was shut down before the answer was complete; ask another one."


class VersionStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """See `service.api.schema.generation_answers.AdapterVersionStart`."""

    start: int | None
    version: int
    digest: str
    reason: str | None = None


class OutputChunk(msgspec.Struct):
    """New text and tokens of a sequence. They need not match: text may wait for the rest of a character.

    text_offsets  for each token, the number of characters of the answer before it
    pooled        of the prompt's hidden states, where they are asked for: see `Finished`
    versions      of the adapter, those that begin with these tokens, where they are asked for
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[ScoredToken] = []
    text_offsets: list[int] = []
    prompt_logprobs: Sequence[ScoredToken | None] | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    pooled: bytes | None = None
    versions: list[VersionStart] = []

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended before the model had ended it."""
        return self.finish_reason in ("length", "abort")


class SequenceRun:
    """One sequence in the engine. Submitted when built; `take` what is new, `close` always.

    is_streamed  whether what is new will be taken as it comes: then only so much may wait (`MAX_WAITING_ENTRIES`)
    logprobs     what the request holds of them: those of this sequence from when they come until they are taken, and
                 with `keeps_logprobs` until the request is over
    on_news      called when there is something to take
    on_end       called once with the number of tokens generated, when the engine is done with the sequence; before that
                 `on_news`
    on_version   called when a token is of another version of the adapter than the one before
    """

    def __init__(
        self,
        services: Services,
        tenant: Tenant,
        target: ResolvedModel,
        plan: PlannedSequence,
        *,
        is_streamed: bool,
        keeps_logprobs: bool,
        logprobs: LogprobBudget,
        on_news: Callable[[], None],
        on_end: Callable[[int, int], None],
        on_version: Callable[[Version], None],
    ) -> None:
        self._services, self._tenant = services, tenant
        self._plan, self._request_id = plan, plan.request_id
        self._is_streamed, self._on_news, self._on_end, self._on_version = is_streamed, on_news, on_end, on_version
        self._logprobs, self._keeps_logprobs, self._num_held_logprobs = logprobs, keeps_logprobs, 0
        self._stop_token_ids = frozenset(plan.sampling.stop_token_ids)
        self._forget_all()
        self.is_over = self._was_taken = False
        self.num_cached_tokens = 0  # of the prompt, once its first token is there
        self.failure: Exception | None = None
        self.timer = SequenceTimer(services.metrics, target.name, len(plan.prompt.token_ids))
        self._submit(target)

    def _submit(self, target: ResolvedModel) -> None:
        plan, tenant, start = self._plan, self._tenant, target.start_in(self._plan.prompt.token_ids)
        # The version that has made the last token, or makes the first; and those that it was asked to go on with.
        self._version = None if start is None else target.version
        self._next_versions: dict[str, Version] = {}
        adapter = (None, {}) if start is None else (target.digest, target.adapter_rows)
        self._messages = self._services.engine.submit(
            Submit(
                self._request_id,
                plan.prompt.token_ids,
                plan.sampling,
                *adapter,
                tenant=tenant.name,
                weight=tenant.limits.weight,
                pooling=plan.pooling,
                adapter_start=start or 0,
                cache_salt=plan.cache_salt,
                keep_at=plan.prompt.keep_at,
            )
        )
        self._messages.listen(self._work, self._begin_anew)

    def _forget_all(self) -> None:
        """As if nothing had come."""
        services, plan = self._services, self._plan
        self._detokenizer = detokenizer_of(
            services.tokenizer,
            plan.prompt.token_ids,
            skip_special_tokens=plan.skip_special_tokens,
            seen_ids=plan.prompt.reading.seen_ids,
        )
        self._stop, self._has_stop = StopStrings(plan.stop), bool(plan.stop.stop)
        self._num_chars = self.num_cached_tokens = 0
        self._latest_digest = ""  # of the version that has made the last token
        # Output that nobody has read yet. Its text is joined when it is read: it may have thousands of parts.
        self._waiting, self._texts, self._num_waiting, self._has_news = OutputChunk(), list[str](), 0, False
        self._drop_logprobs()

    def _begin_anew(self) -> bool:
        """See `service.api.engine_protocol.Messages.listen`."""
        if self._was_taken or self.is_over:
            return False
        if self._next_versions:
            self._version = self._next_versions.popitem()[1]
            self._next_versions.clear()
        self._forget_all()
        self.timer.begin_anew()
        return True

    @property
    def digests(self) -> set[str]:
        """Those of the adapter's versions that the sequence needs."""
        if self.is_over or self._version is None:
            return set()
        return {self._version.digest, *list(self._next_versions)[-1:]}

    def move(self, target: ResolvedModel) -> None:
        """Go on with another version of the adapter, or begin anew with it, as `on_new_version` says. `digests` are
        leased."""
        version = target.version
        if self.is_over or self._version is None or version is None:
            return
        if self._plan.on_new_version == "restart":
            if version.digest == self._version.digest:
                return
            self._services.engine.abort(self._request_id)
            self._forget_all()
            self.timer.begin_anew()
            self._request_id = uuid4().hex
            self._submit(target)
            return
        self._next_versions.pop(version.digest, None)
        self._next_versions[version.digest] = version
        self._services.engine.move(self._request_id, version.digest, target.adapter_rows)

    def stay(self, version: Version, reason: str) -> None:
        """Tell with what comes next that a version was not taken over."""
        if self._plan.tells_versions and not self.is_over and self._version is not None:
            self._waiting.versions.append(VersionStart(None, version.number, version.digest, reason))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self._plan.prompt.token_ids)

    def take(self) -> OutputChunk | None:
        """The output since the last call, None if there is none; the last chunk has a finish_reason.

        EngineFailed if the engine fails; NotReady if it never had the request, or the server shuts down; BadRequest if
        too much waited; QueueFull if who pays for it may hold no more log probabilities.
        """
        if not self._has_news:
            if self.failure is not None:
                raise self.failure
            return None
        piece, texts = self._waiting, self._texts
        self._waiting, self._texts, self._num_waiting, self._has_news = OutputChunk(), [], 0, False
        self._was_taken = True
        if not self._keeps_logprobs:
            self._drop_logprobs()
        piece.text = "".join(texts)
        if self.failure is not None:
            self._on_news()
        return piece

    def end_early(self) -> None:
        """End with what there is, and the finish_reason "abort", as if the engine had said so."""
        if self.is_over:
            return
        self._has_news = True
        try:
            self._finish(Finished(self._plan.request_id, "abort"))
        except Exception as error:  # raised by `take`
            self.failure = self._client_error(error)
        self._on_news()
        self.close("abort")

    def close(self, outcome: str = "abort") -> None:
        """Free what the engine still holds; does nothing for a sequence that has ended."""
        if not self.is_over:
            self.is_over = True
            self._services.engine.abort(self._request_id)
            self.timer.end(outcome)
            self._on_end(self.timer.num_tokens, self.num_cached_tokens)

    def forget_others(self) -> None:
        """Drop the references between a closed sequence and its listeners. Left to Python's collector, the cycles of a
        few hundred requests that end together take it a tenth of a second."""
        self._on_news = _nobody_listens
        self._on_end = self._on_version = _nobody_listens
        del self._messages

    def _work(self) -> None:
        """Take in what the engine has said."""
        try:
            while not self.is_over and (message := self._messages.poll()) is not None:
                self._has_news = True
                if isinstance(message, Finished):
                    self._finish(message)
                else:
                    self._add_tokens(message)
                if self._num_waiting > MAX_WAITING_ENTRIES and self._is_streamed:
                    raise _too_much_waits()
        except Exception as error:  # raised by `take`
            self.failure = self._client_error(error)
        outcome = "error" if self.failure is not None else self._waiting.finish_reason
        if outcome is None and self.timer.num_tokens >= self._plan.sampling.max_tokens:
            return  # the end follows at once, and is told with the last token
        self._on_news()  # which may take what waits
        if outcome is not None:
            self.close(outcome)

    def _client_error(self, error: Exception) -> Exception:
        """The client's error for one of the engine."""
        if not isinstance(error, EngineDied):
            return error
        if self._services.draining:
            return NotReady(_SHUT_DOWN)
        if isinstance(error, NeverSent):
            return NotReady(f"{error} Send the request again later.")
        return EngineFailed(f"{error} The request was lost; send it again.")

    def _hold_logprobs(self, entries: Sequence[ScoredToken | None]) -> None:
        """Count them before they are kept. QueueFull."""
        count = sum(1 + len(entry.top) for entry in entries if entry is not None)
        self._logprobs.charge(count)
        self._num_held_logprobs += count

    def _drop_logprobs(self) -> None:
        self._logprobs.refund(self._num_held_logprobs)
        self._num_held_logprobs = 0

    def _add_tokens(self, message: Tokens) -> None:
        self.num_cached_tokens += message.num_cached
        piece = self._waiting
        if message.token_ids and self._version is not None:
            self._note_version(self._version, message.adapter)
        if message.logprobs or message.prompt_logprobs:
            self._hold_logprobs((*message.logprobs, *(message.prompt_logprobs or ())))
        if message.prompt_logprobs is not None:
            piece.prompt_logprobs = message.prompt_logprobs
        for index, token_id in enumerate(message.token_ids):
            piece.token_ids.append(token_id)
            piece.text_offsets.append(self._num_chars)
            self._num_waiting += 1
            if message.logprobs:
                piece.logprobs.append(message.logprobs[index])
                self._num_waiting += len(message.logprobs[index].top)
            self.timer.token(message.waited_seconds, message.num_cached, message.loads)
            # The token that ends the answer is counted, but is no part of its text unless that is asked for.
            ends = token_id in self._stop_token_ids and self.timer.num_tokens > self._plan.sampling.min_tokens
            if ends and not self._plan.include_stop:
                continue
            self._give(self._detokenizer.push(token_id))
            if self._stop.matched is not None:
                piece.finish_reason, piece.stop_reason = "stop", self._stop.matched
                break

    def _note_version(self, version: Version, moved_to: str | None) -> None:
        """The next token is of the adapter `moved_to`, or of `version` if that is None."""
        if moved_to in self._next_versions:
            for digest in list(self._next_versions):
                if version.digest == moved_to:
                    break
                version = self._next_versions.pop(digest)
            if version.digest != self._latest_digest:
                self._on_version(version)
        self._version = version
        if version.digest != self._latest_digest and self._plan.tells_versions:
            self._waiting.versions.append(VersionStart(self.timer.num_tokens, version.number, version.digest))
        self._latest_digest = version.digest

    def _give(self, text: str) -> None:
        """Text through the stop strings, of which none ends the text before `min_tokens`."""
        self._num_chars += len(text)
        if not self._has_stop:
            self._texts.append(text)
            return
        given = self._stop.push(text, may_end=self.timer.num_tokens > self._plan.sampling.min_tokens)
        self._texts.append(given + (self._stop.matched or "") if self._plan.include_stop else given)

    def _finish(self, message: Finished) -> None:
        if message.reason == "error":
            if self._services.draining:
                raise NotReady(_SHUT_DOWN)
            sentence = message.error or "The engine failed on this request."
            raise BadRequest(sentence) if message.client_fault else EngineFailed(sentence)
        if message.reason == "abort" and self._plan.pooling is not None:
            raise NotReady(ABORTED)
        piece = self._waiting
        self._give(self._detokenizer.finish())
        piece.finish_reason, piece.pooled = message.reason, message.pooled
        if message.pooled is not None:
            self.timer.waited_seconds, self.timer.loads = message.waited_seconds, message.loads
        if self._stop.matched is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._stop.matched
            return
        self._texts.append(self._stop.finish())
        ends = (*self._services.tokenizer.eos_token_ids, *self._plan.sampling.eos_token_ids)
        if message.stop_token_id is not None and message.stop_token_id not in ends:
            piece.stop_reason = message.stop_token_id


def _nobody_listens(*_news: object) -> None:
    """The listener of a sequence that is closed: it does nothing."""


def _too_much_waits() -> BadRequest:
    return BadRequest(
        f"More than {MAX_WAITING_ENTRIES} tokens of the answer and alternatives to them waited to be read; "
        "read the stream as it comes, or ask for fewer `logprobs`."
    )
