"""Mutants that survive because they change nothing that matters, each with its reason."""

from __future__ import annotations

from tests.ascend.mutants.changes import Mutant

_BEYOND = "the compiler drops a row or tap beyond the width: no output reads it"

# (function, before, after) -> reason.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (function, f"WIDTH > {width}", f"WIDTH >= {width}"): _BEYOND
    for function in ("_history", "_taps", "conv_update", "conv_prefill")
    for width in range(2, 8)
}


def reason_for(mutant: Mutant) -> str | None:
    """Why a surviving mutant is equivalent; None if it is not listed."""
    return EQUIVALENT.get((mutant.function, mutant.before, mutant.after))
