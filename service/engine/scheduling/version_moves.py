"""Moves of requests to another version of their adapter, between two steps.

A running request goes on with its old version until the new one is on the device and its own prompt is computed. Its
keys and values stay; from then on they are those of several versions, and the prefix cache gets none of them. A request
that waits moves at once: it holds nothing, and is computed with the new version alone. So is one that is preempted.
Where the rows in use leave the new version no room for many steps, the requests that are to have it are preempted.

A version is a *target* while a request is to have it, which is a user of it that pins nothing. Cost per step:
O(targets).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from service.engine.loras.prefetch import AdapterLoads
from service.engine.scheduling.fair_queue import FairQueue
from service.engine.scheduling.prefix_cache import PrefixCache
from service.engine.sequences.sequence import Sequence


@dataclass(slots=True)
class _Target:
    """num_steps  in which the rows in use left it no room."""

    sequence: Sequence
    adapter: str
    rows: dict[str, int]
    num_steps: int = 0


class VersionMoves:
    """See the module's docstring. `preempt` frees what a running sequence holds, and calls `stopped`."""

    def __init__(
        self,
        queue: FairQueue,
        cache: PrefixCache,
        adapter_loads: AdapterLoads,
        preempt: Callable[[Sequence], None],
        *,
        max_steps: int,
    ) -> None:
        self._queue, self._cache, self._loads = queue, cache, adapter_loads
        self._preempt, self._max_steps = preempt, max_steps
        self._targets: dict[int, _Target] = {}  # by the sequence's key

    def ask(self, sequence: Sequence, adapter: str, rows: dict[str, int]) -> None:
        """Let a sequence with an adapter, which runs or waits, have this one from the next step that may."""
        self.forget(sequence)
        if adapter == sequence.adapter:
            return
        self._loads.enter(adapter, rows)
        self._targets[sequence.key] = _Target(sequence, adapter, rows)
        self.stopped(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence stays with what it has, or is over."""
        target = self._targets.pop(sequence.key, None)
        if target is not None:
            self._loads.leave(target.adapter)

    def fail(self, failures: Collection[str]) -> None:
        """These adapters cannot be loaded: who was to have them stays with what it has."""
        for target in [one for one in self._targets.values() if one.adapter in failures]:
            self.forget(target.sequence)

    def stopped(self, sequence: Sequence) -> None:
        """Move a sequence that waits, if it is to move. One that has some of its prompt's log probabilities gets the
        others by the same version first."""
        target = self._targets.get(sequence.key)
        if target is None or sequence.is_running:
            return
        if not (sequence.num_prompt_logprobs > 1 and sequence.num_prompt_logprobs_missing):
            self._move(target)

    def begin_step(self) -> None:
        """Move the running sequences whose targets are on the device, and bring the others there."""
        if not self._targets:
            return
        self._loads.prefetch({one.adapter: self._loads.has_room(one.adapter) for one in self._targets.values()}, None)
        for target in list(self._targets.values()):
            sequence, adapter = target.sequence, target.adapter
            if not sequence.is_running or sequence.num_computed < sequence.num_prompt:
                continue
            if self._loads.is_on_device(adapter) or (self._loads.can_bring(adapter) and self._loads.bring(adapter)):
                self._move(target)
            elif not self._loads.can_bring(adapter) and not self._loads.has_room(adapter):
                target.num_steps += 1
                if target.num_steps >= self._max_steps:
                    self._preempt(sequence)

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Every target is of one of these, which have other adapters."""
        for target in self._targets.values():
            assert target.sequence in sequences, "a target of a request that is over"
            assert target.sequence.adapter not in (None, target.adapter), "a target that has been reached"

    def _move(self, target: _Target) -> None:
        sequence, old = target.sequence, target.sequence.adapter
        assert old is not None, "the base has no versions"
        del self._targets[sequence.key]
        if sequence.is_running:
            self._cache.leave_version(sequence)
            self._loads.acquire(target.adapter)
            self._loads.release(old)
        self._loads.leave(old)
        self._queue.move(sequence, lambda: set_adapter(sequence, target.adapter, target.rows))


def set_adapter(sequence: Sequence, adapter: str, rows: Mapping[str, int]) -> None:
    """Give the sequence an adapter from its next token that no launched step samples."""
    sequence.request = msgspec.structs.replace(sequence.request, adapter=adapter, adapter_rows=dict(rows))
    sequence.unsent_versions += ((sequence.num_tokens - sequence.num_prompt, adapter),)
