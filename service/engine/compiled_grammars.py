"""Sequences whose tokens a grammar constrains: grammars compiled beside the steps, masks made beside the model.

Compiling takes from under a millisecond to a tenth of a second, so it happens in a thread, and the sequence is
scheduled when it is done. A compiled grammar is kept at its beginning, and each sequence goes on with a copy. The API
has compiled the same grammar before, in a process that may die of it (`service.grammars.trial`).

A step's masks need all tokens before it, but the model does not: they are made in a thread while it runs, and only
sampling waits for them. A matcher belongs to one thread at a time: to the mask thread between `begin` and `wait`, to
the engine's own otherwise.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from kernels.sampling.asked import mask_of
from service.engine.grammar_turns import Account
from service.engine.messages import Sampling
from service.engine.token_rules import TokenRules
from service.grammars.matching import GrammarError, TokenTable, compile_grammar, error_of

MAX_COMPILED = 32
# Of processor time, for one sequence's grammar. Usual ones take a fifth of the first or less, and some ms for a mask
# whose lexer's states are new; all sequences wait for the one thread that makes masks.
SECONDS_A_TOKEN = 0.5e-3
MAX_SECONDS_BEHIND = 50e-3
TOO_COSTLY = "it takes too much processor time to follow; simplify it, so that a text can be read in fewer ways"
NOTHING_LEFT = "allowed_token_ids and bad_words leave no token of those that it allows"
NO_GRAMMARS = "This engine was started without the tokens that grammars need; leave the constraint out."


class Worker(Protocol):
    """What runs a compilation; `service.engine.brief_thread.BriefThread` is the real one."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` after what was submitted before it."""

    def close(self) -> None:
        """Drop what has not begun."""


def has_constraint(sampling: Sampling) -> bool:
    """Whether lists say what a token may be; grammars are looked at apart."""
    return bool(sampling.allowed_tokens or sampling.bad_words)


class TokenConstraint:
    """What a sequence's tokens may be: its place in its grammar, and its lists of tokens.

    error      why its grammar cannot be followed any further; empty while it can be: not allowed by the grammar, over
               the library's bounds, or more than MAX_SECONDS_BEHIND of processor time beyond SECONDS_A_TOKEN for each
               token
    account    that its grammar's processor time is spent from; None: from nobody's
    num_masks  that its grammar was asked for
    """

    def __init__(
        self,
        sampling: Sampling,
        stop_ids: frozenset[int],
        vocab_size: int,
        *,
        grammar: str | None = None,
        matcher: Any = None,
        eos_token_ids: Sequence[int] = (),
        account: Account | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """stop_ids       tokens that end the sequence
        matcher        of the grammar, at its beginning, which nobody else has; None without a grammar
        eos_token_ids  what ends an answer that the grammar allows to end; lists of tokens do not forbid it
        clock          seconds of processor time of the thread that calls: a loaded machine ends nobody's answer
        """
        self.grammar = grammar
        self._matcher = matcher
        self.account = account
        self.num_masks = 0
        self._clock = clock
        self._seconds = 0.0  # that the token before took, which the next mask tells of
        self._seconds_behind = 0.0
        self._num_min = sampling.min_tokens
        ends = frozenset(eos_token_ids)
        self._early_bar = _bar(stop_ids | ends, vocab_size) if sampling.min_tokens else None
        self._late_bar = _bar(ends, vocab_size) if sampling.ignore_eos and ends else None
        self._rules: TokenRules | None = None
        if sampling.allowed_tokens or sampling.bad_words:
            self._rules = TokenRules(sampling, vocab_size, eos_token_ids)
        self._output: list[int] = []
        self.error = ""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing may follow."""
        return self._matcher is not None and bool(self._matcher.is_stopped())

    def consume(self, token: int) -> None:
        """The sequence's next token."""
        self._output.append(token)
        if self._matcher is None:
            return
        started = self._clock()
        is_allowed = self._matcher.consume_token(token)
        self._seconds += self._clock() - started
        if not is_allowed:
            self.error = error_of(self._matcher)

    def fill(self, mask: np.ndarray) -> None:
        """Write the mask of the next token: int32 [ceil(vocab / 32)], contiguous. Where it goes wrong, `error` is set.

        An end that min_tokens or ignore_eos forbid is barred, unless the grammar allows nothing else.
        """
        mask[:] = -1
        if self._matcher is not None:
            self._fill_from_grammar(mask)
            if self.error:
                mask[:] = -1
                return
        bar = self._early_bar if len(self._output) < self._num_min else self._late_bar
        if bar is not None:
            narrowed = mask & bar
            if narrowed.any():
                mask[:] = narrowed
        if self._rules is not None:
            self._rules.narrow(mask, self._output)
            if not mask.any():
                self.error = NOTHING_LEFT
                mask[:] = -1

    def _fill_from_grammar(self, mask: np.ndarray) -> None:
        started = self._clock()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        seconds = self._seconds + self._clock() - started
        self._seconds = 0.0
        self.num_masks += 1
        if self.account is not None:
            self.account.spend(seconds)
        self._seconds_behind = max(0.0, self._seconds_behind + seconds - SECONDS_A_TOKEN)
        if self._matcher.is_error():
            self.error = error_of(self._matcher)
        elif self._seconds_behind > MAX_SECONDS_BEHIND:
            self.error = TOO_COSTLY


def _bar(tokens: frozenset[int], vocab_size: int) -> np.ndarray:
    """The mask that allows all but these."""
    bar: np.ndarray = ~mask_of(tokens, vocab_size)
    return bar


class Grammars:
    """The engine's compiled grammars. One is compiled at a time, of those who wait in turn.

    table   None where the model's tokenizer cannot be used with grammars
    thread  that compiles
    wake    called, in that thread, when something has been compiled
    """

    def __init__(self, table: TokenTable | None, thread: Worker, wake: Callable[[], None]) -> None:
        self.table = table
        self._thread = thread
        self._wake = wake
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._done: deque[tuple[str, Any]] = deque()
        self._waiting: dict[str, list[Any]] = {}
        self._turns: dict[str, deque[str]] = {}  # of each owner, whose turn is next first; shared with the thread
        self._lock = threading.Lock()

    def begin(self, grammar: str, key: Any, owner: str) -> None:
        """Compile the grammar for `key`, which `take_done` gives back, when it is its owner's turn."""
        assert self.table is not None, "admission refuses grammars without a table"
        if grammar in self._waiting:
            self._waiting[grammar].append(key)
            return
        self._waiting[grammar] = [key]
        if grammar in self._compiled:
            self._done.append((grammar, self._compiled[grammar]))
            return
        with self._lock:
            self._turns.setdefault(owner, deque()).append(grammar)
        try:
            self._thread.submit(functools.partial(self._compile_next, self.table))
        except RuntimeError as error:
            with self._lock:
                self._take_turn(owner, grammar)
            self._done.append((grammar, GrammarError(f"there is no thread to compile it in now ({error})")))

    def take_done(self) -> list[tuple[Any, str, Any | GrammarError]]:
        """(key, its grammar, a matcher of its own or what is wrong) of those that have been compiled."""
        taken = []
        while self._done:
            grammar, found = self._done.popleft()
            for key in self._waiting.pop(grammar):
                taken.append((key, grammar, found if isinstance(found, GrammarError) else found.deep_copy()))
            if not isinstance(found, GrammarError):
                self._compiled[grammar] = found
                self._compiled.move_to_end(grammar)
                if len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return taken

    def forget(self, grammar: str) -> None:
        """A sequence has come to the bounds of its lexer, whose states all copies share: the next gets a new one."""
        self._compiled.pop(grammar, None)

    def close(self) -> None:
        """Compile nothing more."""
        self._thread.close()

    def _take_turn(self, owner: str, grammar: str) -> None:
        """It is compiled, or will not be; the owner's next one comes behind those of all others. Under the lock."""
        queue = self._turns.pop(owner)
        queue.remove(grammar)
        if queue:
            self._turns[owner] = queue

    def _compile_next(self, table: TokenTable) -> None:
        """In the thread, once for each that waits."""
        with self._lock:
            owner = next(iter(self._turns))
            grammar = self._turns[owner][0]
            self._take_turn(owner, grammar)
        found: Any
        try:
            found = compile_grammar(table, grammar)
        except GrammarError as error:
            found = error
        except BaseException as error:  # a panic of the library is no Exception, and somebody waits for an answer
            found = GrammarError(f"the library failed on it: {error}")
        self._done.append((grammar, found))
        self._wake()


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

    def begin(self, constraints: Sequence[TokenConstraint | None]) -> None:
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
