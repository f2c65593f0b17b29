"""Grammars of strangers: compiled for the model's tokens, and their first mask made, in a process that may die of it.

A schema of a few lines can overflow the library's stack, or keep it busy for minutes; whatever passes here does neither
in the engine, which has the same tokens and limits, and more stack. The process reaches no files, no network and no
other process (`adapters.isolation.confinement`). `GrammarTrial` is the parent's side, `python -m
service.grammars.trial` the child's (`adapters.isolation.bounded_child`).
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import resource
import signal
import sys
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adapters.isolation.bounded_child import BoundedChild, excess_of
from adapters.isolation.confinement import serve
from service.fairness.client_identity import CLIENT, NOBODY
from service.fairness.fair_cache import FairCache
from service.fairness.thread_pool import FairPool
from service.grammars.constraints import Constraint, ConstraintError, grammar_of

if TYPE_CHECKING:
    from service.grammars.matching import TokenTable

MAX_SECONDS = 1.0
# Stack of the child, and of the engine's thread that compiles: a grammar that passes one does not overflow the other.
_STACK_BYTES = 4 << 20
ENGINE_STACK_BYTES = 4 * _STACK_BYTES
_MAX_KNOWN_BYTES = 16 << 20
_ENTRY_BYTES = 512  # what each takes beside its text
# Modules that compile a grammar, imported when needed; a confined process finds no modules.
_LAZY_MODULES = ("llguidance.gbnf_to_lark", "service.grammars.matching", "service.grammars.lark")


class GrammarTrial(BoundedChild):
    """Tries one grammar at a time, clients in turn, and caches the good ones for each client (`FairCache`).

    max_seconds  of processor time that one may take
    """

    def __init__(self, model_dir: Path, max_seconds: float = MAX_SECONDS) -> None:
        super().__init__("service.grammars.trial", [str(model_dir), str(max_seconds)])
        self._pool = FairPool(1, "grammar-trial")
        self._max_seconds = max_seconds
        self._known: FairCache[Constraint, str] = FairCache(_MAX_KNOWN_BYTES)

    def known(self, constraint: Constraint) -> str | None:
        """The grammar of a constraint that has been tried and is good; None for others. Waits for nobody."""
        return self._known.get(constraint)

    def submit(self, constraint: Constraint) -> Future[str]:
        """`compile` it when it is the client's turn."""
        client = CLIENT.get()
        return self._pool.submit(client, functools.partial(self.compile, constraint, client))

    def close(self) -> None:
        """End the child, after the grammar that it has."""
        self._pool.close()
        super().close()

    def compile(self, constraint: Constraint, client: str = NOBODY) -> str:
        """The constraint's grammar, serialised, for `Sampling.grammar`, which is remembered as the client's.
        ConstraintError if it is none or takes too much; RuntimeError or OSError if the child cannot work."""
        known = self._known.get(constraint)
        if known is not None:
            return known
        answer = self.ask(json.dumps(asdict(constraint)).encode() + b"\n")
        if isinstance(answer, int):
            if answer in (-signal.SIGSEGV, -signal.SIGBUS):
                raise ConstraintError("is nested, or refers from one to the next, too deeply to compile; simplify it")
            excess = excess_of(answer, self._max_seconds)
            if excess is not None:
                raise ConstraintError(f"{excess} to compile; simplify it")
            raise RuntimeError(f"the process that tries grammars ended with exit code {answer}")
        if "error" in answer:
            raise ConstraintError(answer["error"])
        grammar = str(answer["grammar"])
        self._known.put(constraint, grammar, client, _ENTRY_BYTES + len(grammar) + len(constraint.text))
        return grammar


# ---- the child's side


def _answer(table: TokenTable | str, line: bytes) -> dict[str, str]:
    """The answer to the parent. `table`: or the reason why there is none."""
    if isinstance(table, str):
        return {"error": f"is not available with this model: {table}"}
    try:
        return _tried(table, Constraint(**json.loads(line)))
    except MemoryError:
        raise
    except BaseException as error:  # the library's panics are no Exceptions
        return {"error": f"makes the grammar library fail: {str(error)[:500]}"}


def _tried(table: TokenTable, constraint: Constraint) -> dict[str, str]:
    from service.grammars.matching import GrammarError, compile_grammar

    try:
        grammar = grammar_of(constraint, table.special_ids)
        compile_grammar(table, grammar)
        if constraint.around is not None:  # whose first mask is not the answer's
            compile_grammar(table, grammar_of(replace(constraint, around=None), table.special_ids))
    except ConstraintError as error:
        return {"error": str(error)}
    except GrammarError as error:
        return {"error": f"cannot be followed: {error}"}
    return {"grammar": grammar}


def main() -> int:
    """Returns the exit code."""
    for name in _LAZY_MODULES:
        importlib.import_module(name)
    from service.grammars.matching import GrammarError, TokenTable

    model_dir, max_seconds = sys.argv[1:]
    table: TokenTable | str
    try:
        table = TokenTable.load(Path(model_dir))
    except GrammarError as error:
        table = str(error)
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))  # Linux looks at it whenever a stack grows
    answer = functools.partial(_answer, table)
    return serve(answer, max_seconds=float(max_seconds))


if __name__ == "__main__":
    os._exit(main())
