"""The contract of every implementation of an op, beside the functions that the op's `ops.py` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.attention_maps import AttentionMaps
    from kernels.shapes import ProbeShapes


def _serves_all(_shapes: ProbeShapes) -> str | None:
    return None


def _has_nothing_to_do(*_arguments: object, **_options: object) -> None:
    pass


def _compiles_nothing() -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """`CONTRACT` of a module `kernels/<op>/<implementation>.py`. The defaults are those of plain torch calls.

    A call that `ops.py` admits is served; an implementation refuses here what it cannot serve.

    refuses         why it cannot serve a model of these shapes, as part of a sentence; None if it can
    warm_up         compiles all variants for calls up to a size and reserves their memory, so that they can be captured
                    afterwards; `warm_up` in the op's `ops.py` describes its arguments
    compiled_count  number of variants compiled in this process; it must not rise after warm-up
    replayable      a call recorded in a graph, and run again with other contents in the same tensors, does what a new
                    call would: it depends on nothing of the host's view of a step. The engine captures its steps only
                    where all its ops are replayable
    updates         of attention that takes lengths from the host: the arguments of the device operator that a replay
                    must update. With it the op is replayable where graphs can be updated: on NPUs
    """

    refuses: Callable[[ProbeShapes], str | None] = _serves_all
    warm_up: Callable[..., None] = _has_nothing_to_do
    compiled_count: Callable[[], int] = _compiles_nothing
    replayable: bool = False
    updates: Callable[[AttentionMaps], Mapping[str, object]] | None = None

    def warm_up_and_count(self, *arguments: object, **options: object) -> int:
        """`warm_up`; the number of variants that it compiled."""
        before = self.compiled_count()
        self.warm_up(*arguments, **options)
        return self.compiled_count() - before


def combined(contracts: Sequence[Contract]) -> Contract:
    """The contract of several implementations that serve one op together, each in regimes of its own.

    They are not warmed up, because one may be unable to compile a regime that it does not serve; they compile at first
    use.
    """
    if len(contracts) == 1:
        return contracts[0]
    # Those that share kernels state one count, which is theirs together.
    counts = dict.fromkeys(one.compiled_count for one in contracts)
    return Contract(
        compiled_count=lambda: sum(count() for count in counts),
        replayable=all(one.replayable for one in contracts),
        updates=contracts[0].updates if all(one.replayable or one.updates for one in contracts) else None,
    )
