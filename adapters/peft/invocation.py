"""The start of an activated LoRA (Greenewald et al., 2025): the last occurrence of its invocation in the prompt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_INVOCATION_TOKENS = 1024


def invocation_start(token_ids: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Index in `token_ids` at which the last whole occurrence of `invocation` begins; None without one, and then the
    base alone answers. All tokens from there on use the adapter, as in PEFT."""
    assert invocation, "an empty invocation is nowhere"
    text, wanted = array("q", token_ids), array("q", invocation).tobytes()
    size, end = text.itemsize, len(text) * text.itemsize
    held = text.tobytes()
    while (at := held.rfind(wanted, 0, end)) >= 0:
        if at % size == 0:
            return at // size
        end = at + len(wanted) - 1  # across the bytes of two tokens
    return None
