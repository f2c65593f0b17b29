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
EQUIVALENT |= {
    (function, "tl.minimum(first_item + share, num_items)", "first_item + share"): (
        "items behind the last one are blocks of channels behind the last channel, where every access is masked"
    )
    for function in ("conv_update", "conv_prefill")
}
EQUIVALENT |= {
    (function, "(slice_index * num_tokens + begin).to(tl.int64)", "slice_index * num_tokens + begin"): (
        "h is a step's workspace, of slices x tokens x splits x 256 elements, which 32 bits count by far"
    )
    for function in ("lora_shrink_few", "lora_shrink_many", "lora_expand_few", "lora_expand_many")
}
EQUIVALENT |= {
    (function, "end < stop", "end <= stop"): "one more round for a segment without tokens, in which all is masked"
    for function in ("lora_shrink_few", "lora_expand_many")
}
EQUIVALENT["lora_expand_few", "tl.cast(t, tl.int64)", "t"] = (
    "of the tokens of a group, at most 16, whose rows 32 bits count from the first one's"
)


def reason_for(mutant: Mutant) -> str | None:
    """Why a surviving mutant is equivalent; None if it is not listed."""
    return EQUIVALENT.get((mutant.function, mutant.before, mutant.after))
