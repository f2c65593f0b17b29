"""Constrained sequences: from their request on they wait for their grammars, which are compiled beside the steps
(`compiled_grammars.py`), and each of their steps has a mask of its own.

A mask needs all tokens before it, but the model does not: the masks are made in a thread while it runs, and only
sampling waits for them.

Who owns: this owns the compiled grammars, the masks under way and the sequences that wait; a sequence owns its
constraint. The code that drops a sequence must also call `discard`.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch

from service.engine.grammar.compiled_grammars import Grammars, Worker
from service.engine.ipc.messages import Submit
from service.engine.model.runner import Capacity
from service.engine.sequences.constraint import TokenConstraint, has_constraint
from service.engine.sequences.grammar_budget import GrammarBudget
from service.engine.sequences.sequence import Sequence
from service.engine.transient_thread import TransientThread
from service.grammars.matching import GrammarError, TokenTable
from service.grammars.trial import ENGINE_STACK_BYTES


class StepMasks:
    """The masks of one step at a time, on their way to the device.

    On a device there are two pinned buffers on the host, used in turn, as in `step_inputs`: one is written while the
    device may still fetch the other.
    """

    def __init__(self, max_sequences: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_sequences, -(-vocab_size // 32))
        self._device_of_steps = device
        self._runtime: Any = None if device.type == "cpu" else torch.get_device_module(device)
        # The buffers, and what is written through.
        self._hosts: list[torch.Tensor] = []
        self._masks: list[np.ndarray] = []
        self._copied: list[Any] = []
        self._device = torch.empty(0, dtype=torch.int32)
        self._turn = 0
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._num_rows = 0

    def begin(self, constraints: abc.Sequence[TokenConstraint | None]) -> None:
        """Start to make masks, in this order; None: of a sequence that has ended, whose token nobody reads."""
        assert self._filling is None, "the masks of one step at a time"
        if self._thread is None:
            self._allocate()
        assert self._thread is not None
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        self._num_rows = len(constraints)
        masks = self._masks[self._turn][: len(constraints)]
        self._filling = self._thread.submit(_fill, masks, list(constraints))

    def wait(self) -> torch.Tensor:
        """int32 [rows, ceil(vocab / 32)] on the device, valid until the next but one `begin`."""
        assert self._filling is not None, "nothing was begun"
        filling, self._filling = self._filling, None
        filling.result()
        host = self._hosts[self._turn][: self._num_rows]
        if self._runtime is None:
            return host
        on_device = self._device[: self._num_rows]
        on_device.copy_(host, non_blocking=True)
        self._copied[self._turn] = self._runtime.Event()
        self._copied[self._turn].record()
        return on_device

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def _allocate(self) -> None:
        is_pinned = self._runtime is not None
        if is_pinned:
            self._hosts = [torch.zeros(self._shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
            self._masks = [host.numpy() for host in self._hosts]
        else:
            self._masks = [np.zeros(self._shape, np.int32)]
            self._hosts = [torch.from_numpy(masks) for masks in self._masks]
        self._copied = [None] * len(self._hosts)
        if is_pinned:
            self._device = torch.zeros(self._shape, dtype=torch.int32, device=self._device_of_steps)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-masks")


def _fill(masks: np.ndarray, constraints: list[TokenConstraint | None]) -> None:
    for mask, constraint in zip(masks, constraints, strict=True):
        if constraint is None:
            mask[:] = -1
        else:
            constraint.fill(mask)


class GrammarSequences:
    """See the module's docstring. `tokens`, `compiler`: as of the engine; `wake` is called when a grammar is compiled;
    `turns` says what grammars may cost.

    waiting  for their grammars; not to be scheduled yet
    """

    def __init__(
        self,
        tokens: TokenTable | None,
        compiler: Worker | None,
        wake: Callable[[], None],
        capacity: Capacity,
        max_sequences: int,
        turns: GrammarBudget,
    ) -> None:
        self.waiting: set[Sequence] = set()
        self._vocab_size = capacity.vocab_size
        self._turns = turns
        self._grammars = Grammars(tokens, compiler or TransientThread("grammar-compiler", ENGINE_STACK_BYTES), wake)
        self._masks = StepMasks(max_sequences, capacity.vocab_size, capacity.device)

    @property
    def has_grammars(self) -> bool:
        """Whether grammars can be followed."""
        return self._grammars.table is not None

    # ---- the way to the scheduler

    def add(self, sequence: Sequence, request: Submit) -> bool:
        """Whether the request's sequence can be scheduled now; if not, `take_compiled` returns it once it can."""
        sampling = request.sampling
        if sampling.grammar is None or not sampling.max_tokens:
            if has_constraint(sampling):
                sequence.constraint = TokenConstraint(sampling, sequence.stop_ids, self._vocab_size)
            return True
        self.waiting.add(sequence)
        # Compilations are shared fairly between tenants, and where there are none, between adapters.
        self._grammars.begin(sampling.grammar, sequence, request.tenant or request.adapter or "")
        return False

    def take_compiled(self) -> list[tuple[Sequence, str]]:
        """Those that can be scheduled since the last call, each with "", or with why its grammar cannot be followed."""
        taken = []
        for sequence, grammar, outcome in self._grammars.take_done():
            if sequence not in self.waiting:
                continue  # it has ended meanwhile
            if isinstance(outcome, GrammarError):
                taken.append((sequence, str(outcome)))
                continue
            self.waiting.remove(sequence)
            sequence.constraint = self._constraint(sequence, grammar, outcome)
            taken.append((sequence, ""))
        return taken

    def _constraint(self, sequence: Sequence, grammar: str, matcher: Any) -> TokenConstraint:
        """matcher  of the grammar, the sequence's own"""
        table = self._grammars.table
        assert table is not None
        return TokenConstraint(
            sequence.request.sampling,
            sequence.stop_ids,
            self._vocab_size,
            grammar=grammar,
            matcher=matcher,
            eos_token_ids=table.eos_token_ids,
            account=self._turns.account(sequence.request.tenant),
        )

    def discard(self, sequence: Sequence) -> bool:
        """The sequence has ended. Whether it waited, and so was never scheduled."""
        if sequence not in self.waiting:
            return False
        self.waiting.remove(sequence)
        return True

    # ---- the masks of a step

    def begin_masks(self, sequences: abc.Sequence[Sequence], gone: Collection[Sequence] = ()) -> None:
        """Make the masks of a step's constrained sequences in a thread. All their tokens before it are known, except
        those of sequences in `gone`, whose tokens are not read."""
        self._masks.begin([None if sequence in gone else sequence.constraint for sequence in sequences])

    def wait_masks(self) -> torch.Tensor:
        """int32 [sequences, ceil(vocab / 32)] on the device."""
        return self._masks.wait()

    def error_in(self, sequence: Sequence) -> str:
        """Why the sequence cannot follow its grammar any further; "" while it can. The next gets it compiled anew."""
        constraint = sequence.constraint
        if constraint is None or not constraint.error:
            return ""
        if constraint.grammar is not None:
            self._grammars.forget(constraint.grammar)
        return constraint.error

    def close(self) -> None:
        self._grammars.close()
        self._masks.close()


def without_grammar(request: Submit) -> Submit:
    """The same for its sequence to keep: a grammar may be long, and each sequence has a copy of it."""
    if request.sampling.grammar is None:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=None))
