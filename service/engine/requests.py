"""The requests that wait or run, from their arrival to their last message.

Who owns: this owns the table of requests and their unsent events; the scheduler owns what a sequence holds, and
`constrained` its grammar. Who frees: `finish` and `abort`, through those two, at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal

from adapters.errors import RowsExceeded
from service.engine import request_checks
from service.engine.grammar.grammar_sequences import GrammarSequences, without_grammar
from service.engine.ipc.messages import Finished, Move, Submit, Tokens
from service.engine.loras.interfaces import Rows
from service.engine.loras.prefetch import Failure
from service.engine.model.runner import Capacity
from service.engine.scheduling.scheduler import Scheduler
from service.engine.scheduling.version_moves import set_adapter
from service.engine.sequences.sequence import Sequence

Event = Tokens | Finished
NOT_FINITE = "The model gave no finite logits for this request."
ADAPTER_NOT_FINITE = "The adapter gives no finite logits for this request: its weights or its scaling are too large."
BAD_GRAMMAR = "The answer's format cannot be followed"


class Requests:
    """See the module's docstring.

    events  to be sent, oldest first; the sender fetches them by `take_events`
    rows    of adapters, None where LoRA is off
    """

    def __init__(
        self,
        capacity: Capacity,
        kv_capacity_tokens: int,
        rows: Rows | None,
        scheduler: Scheduler,
        constrained: GrammarSequences,
    ) -> None:
        self.events: list[Event] = []
        self._capacity = capacity
        self._kv_capacity_tokens = kv_capacity_tokens
        self._rows = rows
        self._scheduler = scheduler
        self._constrained = constrained
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._fits: str | None = None  # the adapter of the last move

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether this very sequence has not ended; another one may have its id by now."""
        return self._sequences.get(sequence.request_id) is sequence

    # ---- coming and going

    def submit(self, request: Submit, num_steps: int) -> None:
        """Queue a request. One that can never run is answered with Finished(error).

        num_steps  launched before it came
        """
        error = request_checks.error_in(
            request,
            self._capacity,
            self._kv_capacity_tokens,
            self._rows,
            has_grammars=self._constrained.has_grammars,
        )
        if error is None and request.request_id in self._sequences:
            error = f"The request id {request.request_id!r} is in use."
        if error is not None:
            self.events.append(Finished(request.request_id, "error", error=error, client_fault=True))
            return
        sequence = request_checks.sequence_of(without_grammar(request), self._num_arrived, self._capacity)
        sequence.came_at = (time.perf_counter(), num_steps)
        self._num_arrived += 1
        self._sequences[request.request_id] = sequence
        if self._constrained.add(sequence, request):
            self._scheduler.add(sequence)

    def schedule_compiled(self) -> None:
        """Pass sequences with compiled grammars to the scheduler; fail those whose grammar cannot be followed."""
        for sequence, error in self._constrained.take_compiled():
            if error:
                self.finish(sequence, _bad_grammar(sequence, error))
            else:
                self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Forget the request; everything it holds is free when this returns. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._forget(sequence)

    def move(self, message: Move) -> None:
        """Let a request go on with another adapter. Unknown ids are ignored, and adapters that can never have rows."""
        sequence = self._sequences.get(message.request_id)
        if sequence is None or sequence.adapter is None or self._rows is None:
            return
        if message.adapter != self._fits:  # mostly all requests of a name move together
            try:
                self._rows.check_size(message.adapter_rows)
            except RowsExceeded:
                return
            self._fits = message.adapter
        if sequence in self._constrained.waiting:
            set_adapter(sequence, message.adapter, message.adapter_rows)
        else:
            self._scheduler.move(sequence, message.adapter, message.adapter_rows)

    def end_all(self, reason: Literal["abort", "error"], error: str | None = None) -> None:
        """End every request for this reason."""
        for sequence in list(self._sequences.values()):
            self.finish(sequence, Finished(sequence.request_id, reason, error=error))

    def fail_waiting(self, failures: Mapping[str, Failure]) -> None:
        """End those that wait for an adapter which could not be loaded, by its digest; those that were to go on with it
        keep the one that they have."""
        if failures:
            self._scheduler.moves.fail(failures)
        for sequence in list(self._sequences.values()) if failures else ():
            failure = None if sequence.adapter is None else failures.get(sequence.adapter)
            if failure is not None and not sequence.is_running:
                error, is_clients = failure.error, failure.client_fault
                self.finish(sequence, Finished(sequence.request_id, "error", error=error, client_fault=is_clients))

    def finish(self, sequence: Sequence, message: Finished) -> None:
        """Free all that the sequence holds, and add the event of its end."""
        self._forget(sequence)
        self.events.append(message)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        if not self._constrained.discard(sequence):
            self._scheduler.remove(sequence)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    # ---- going on

    def advance(self, sequence: Sequence, token: int | None) -> None:
        """The sequence has its next token (None: there was none to choose); end it if that was the last."""
        request_id, sampling = sequence.request_id, sequence.request.sampling
        if token is None or (sequence.request.pooling is not None and sequence.pooled is None):
            self._scheduler.cache.withdraw(sequence)
            is_adapters = sequence.adapter is not None
            error = ADAPTER_NOT_FINITE if is_adapters else NOT_FINITE
            self.finish(sequence, Finished(request_id, "error", error=error, client_fault=is_adapters))
            return
        if sampling.max_tokens > 0:
            sequence.token_ids.append(token)
            if token in sequence.stop_ids:
                self.finish(sequence, Finished(request_id, "stop", stop_token_id=token))
                return
        if sequence.constraint is not None:
            sequence.constraint.consume(token)
            if self.end_if_stuck(sequence):
                return
            if sequence.constraint.is_complete:
                self.finish(sequence, Finished(request_id, "stop"))
                return
        if len(sequence.token_ids) >= sequence.max_total:
            self.finish(sequence, _complete(sequence))

    def end_if_stuck(self, sequence: Sequence) -> bool:
        """End a sequence whose grammar cannot be followed any further; False if it can be."""
        error = self._constrained.error_in(sequence)
        if error and sequence in self:
            self.finish(sequence, _bad_grammar(sequence, error))
        return bool(error)

    def check_integrity(self) -> None:
        """Every request is in exactly one queue, and nothing else is."""
        known = sorted(sequence.key for sequence in self._sequences.values())
        queued = [*self._scheduler.waiting, *self._scheduler.running, *self._constrained.waiting]
        assert known == sorted(sequence.key for sequence in queued), "a request is lost"


def _complete(sequence: Sequence) -> Finished:
    """The end of a sequence that has all that it may have."""
    if sequence.pooled is None:
        return Finished(sequence.request_id, "length")
    waited_seconds, loads = sequence.waited_seconds, sequence.loads
    return Finished(sequence.request_id, "length", pooled=sequence.pooled, waited_seconds=waited_seconds, loads=loads)


def _bad_grammar(sequence: Sequence, reason: str) -> Finished:
    return Finished(sequence.request_id, "error", error=f"{BAD_GRAMMAR}: {reason}.", client_fault=True)
