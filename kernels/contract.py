"""What every implementation of an op states about itself, beside the functions that the op's `ops.py` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.probe.shapes import ProbeShapes


def _serves_all(_shapes: ProbeShapes) -> str | None:
    return None


def _has_nothing_to_do(*_arguments: object, **_options: object) -> None:
    pass


def _compiles_nothing() -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """`CONTRACT` of a module `kernels/<op>/<implementation>.py`. As it is, it is that of plain torch calls.

    The functions themselves look at no values of a step: what they decide follows from (padded) sizes, so that a call
    that was captured in a graph serves every step of its size. A call that `ops.py` lets through is served; what an
    implementation cannot serve, it refuses here.

    refuses         why it cannot serve a model of these shapes, as part of a sentence; None if it can
    warm_up         compiles all that calls up to a size can need and reserves their memory, so that they can be
                    captured afterwards; what it is given is said by `warm_up` in the op's `ops.py`
    compiled_count  number of variants compiled in this process; it must not rise after warm-up
    """

    refuses: Callable[[ProbeShapes], str | None] = _serves_all
    warm_up: Callable[..., None] = _has_nothing_to_do
    compiled_count: Callable[[], int] = _compiles_nothing

    def warm_up_and_count(self, *arguments: object, **options: object) -> int:
        """`warm_up`; the number of variants that it compiled."""
        before = self.compiled_count()
        self.warm_up(*arguments, **options)
        return self.compiled_count() - before
