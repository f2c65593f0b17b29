"""The engine's compiled grammars: compiled beside the steps, and kept for the next sequence that has the same one,
whatever others have compiled meanwhile.

Compiling takes from under a millisecond to a tenth of a second, so it happens in a thread, and the sequence is
scheduled when it is done. A compiled grammar is kept at its beginning, and each sequence goes on with a copy. The API
has compiled the same grammar before, in a process that may die of it (`service.grammars.trial`).
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from service.fairness.fair_cache import FairCache
from service.grammars.matching import GrammarError, TokenTable, compile_grammar

MAX_COMPILED = 32
NO_GRAMMARS = "This engine was started without the tokens that grammars need; leave the constraint out."


class Worker(Protocol):
    """A thread that runs compilations; `service.engine.transient_thread.TransientThread` is the real one."""

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` after what was submitted before it."""

    def close(self) -> None:
        """Drop what has not begun."""


class Grammars:
    """The engine's compiled grammars. One is compiled at a time; owners are served round-robin.

    table   None where the model's tokenizer cannot be used with grammars
    thread  the thread that compiles
    wake    called in that thread when a grammar has been compiled
    """

    def __init__(self, table: TokenTable | None, thread: Worker, wake: Callable[[], None]) -> None:
        self.table = table
        self._thread = thread
        self._wake = wake
        self._compiled: FairCache[str, Any] = FairCache(MAX_COMPILED)
        # Grammar, its owner (None if it was cached already), and the result.
        self._done: deque[tuple[str, str | None, Any]] = deque()
        self._waiting: dict[str, list[Any]] = {}
        self._turns: dict[str, deque[str]] = {}  # by owner, the next one first; shared with the thread
        self._lock = threading.Lock()

    def begin(self, grammar: str, key: Any, owner: str) -> None:
        """Queue the grammar for compilation; `take_done` returns it with `key`."""
        assert self.table is not None, "admission refuses grammars without a table"
        if grammar in self._waiting:
            self._waiting[grammar].append(key)
            return
        self._waiting[grammar] = [key]
        if (compiled := self._compiled.get(grammar)) is not None:
            self._done.append((grammar, None, compiled))
            return
        with self._lock:
            self._turns.setdefault(owner, deque()).append(grammar)
        try:
            self._thread.submit(functools.partial(self._compile_next, self.table))
        except RuntimeError as error:
            with self._lock:
                self._take_turn(owner, grammar)
            self._done.append((grammar, None, GrammarError(f"there is no thread to compile it in now ({error})")))

    def take_done(self) -> list[tuple[Any, str, Any | GrammarError]]:
        """(key, its grammar, a matcher of its own or what is wrong) of those that have been compiled."""
        taken = []
        while self._done:
            grammar, owner, found = self._done.popleft()
            for key in self._waiting.pop(grammar):
                taken.append((key, grammar, found if isinstance(found, GrammarError) else found.deep_copy()))
            if owner is not None and not isinstance(found, GrammarError):
                self._compiled.put(grammar, found, owner)
        return taken

    def forget(self, grammar: str) -> None:
        """A sequence has come to the bounds of its lexer, whose states all copies share: the next gets a new one."""
        self._compiled.drop(grammar)

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
        self._done.append((grammar, owner, found))
        self._wake()
