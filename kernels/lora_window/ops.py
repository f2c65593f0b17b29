"""LoRA where the shrink rides in the base product: its last columns are h, and the op that reads it adds the expand.

The rows of A stand behind the rows of the base weight (`kernels.linear.ops.append_rows`), those of the step's adapters
among the first ones, the *window*. One base product over a prefix of that buffer then gives, with N columns of output,
S slices, p the adapter of token t, r its first row in the stack's group, n its rank in slice s and scaling c:

    product[t, :N]                      the base output
    product[t, N + j * S + s]           x[t] @ a[s][j]
    delta[t, slice s]                 = c[s, p] * product[t, N + r * S + s :: S][:n] @ b[s][r : r + n]

    lora_expand_window                  product[t, :N] += delta[t]
    swiglu_window                       silu(product + delta)[t, gate] * (product + delta)[t, up]

Columns of rows that are not the token's own adapter's may hold anything, NaN too. Whoever builds a step sees to it that
the rows of its adapters lie in its window. Nothing here looks at the host's view of the maps (the references do): a
captured step can be replayed with any adapters whose rows lie in the window it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora.maps import LoraMaps, LoraStack
from kernels.platform import contract, implementation


def lora_expand_window(product: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """product[t, slice s] += c[s, p] * h[t, s] @ b[s][r : r + n]

    product  [tokens, N + window * slices] of the rows' dtype, unit stride along the columns; its first N columns are
             changed in place, but for base rows (segment -1)
    """
    _check(product, stack, maps)
    if maps.num_tokens:
        implementation("lora_window", product.device).lora_expand_window(product, stack, maps)


def swiglu_window(product: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> torch.Tensor:
    """silu(gate) * up, fresh [tokens, size], with gate and up the two slices of product + delta; for base rows too.

    product  as in `lora_expand_window`, N = 2 * size; read only
    """
    _check(product, stack, maps)
    assert len(stack.b) == 2 and stack.b[0].shape == stack.b[1].shape, "gate and up are two slices of one width"
    out = product.new_empty(product.shape[0], stack.b[0].shape[1])
    if maps.num_tokens:
        implementation("lora_window", product.device).swiglu_window(product, stack, maps, out=out)
    return out


def warm_up(
    stacks: Sequence[LoraStack],
    max_tokens: int,
    dtype: torch.dtype,
    *,
    gated: Sequence[LoraStack] = (),
    max_segments: int = 64,
) -> int:
    """Compile all that `lora_expand_window` (of `stacks`) and `swiglu_window` (of `gated`) can need in steps of up to
    max_tokens tokens, so that none is compiled in a step. Arguments as in `kernels.lora.ops.warm_up`.

    Returns the number of variants that were compiled; changes nothing, as the ops run on steps without an adapter.
    """
    num_compiled = 0
    for stack, is_gated in [*((stack, False) for stack in stacks), *((stack, True) for stack in gated)]:
        if stack.b[0].shape[0]:  # a pool too small for any row
            serving = contract("lora_window", stack.ranks.device)
            num_compiled += serving.warm_up_and_count(stack, max_tokens, dtype, max_segments, is_gated=is_gated)
    return num_compiled


def _check(product: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    """Check what both ops rely on. A broken rule is a fault of our own callers."""
    assert product.dim() == 2 and product.stride(1) == 1, "product is a matrix with unit stride along its columns"
    assert product.shape[0] == maps.num_tokens, "product does not cover the step"
    assert product.dtype == stack.b[0].dtype, f"product is {product.dtype}, the rows are {stack.b[0].dtype}"
    window_columns = product.shape[1] - stack.output_width
    assert window_columns > 0 and window_columns % len(stack.b) == 0, "product ends with one column per row and slice"
    assert all(b.is_contiguous() for b in stack.b), "rows of B are contiguous"


@dataclass(frozen=True, slots=True)
class WindowLength:
    """A window of `rows` rows serves steps of min_tokens to max_tokens (padded) tokens.

    Fewer tokens use few adapters, whose rows two kernels of their own read in less time than the product takes for a
    long window; for more tokens the product is bound by arithmetic, and pays for every row of the window.
    """

    rows: int
    min_tokens: int
    max_tokens: int


LENGTHS = (
    WindowLength(16, 1, 256),
    WindowLength(64, 1, 256),
    WindowLength(128, 1, 256),
    WindowLength(256, 1, 256),
    WindowLength(512, 4, 256),
    WindowLength(1024, 8, 256),
)


def window_lengths(total_rows: int) -> tuple[int, ...]:
    """The lengths, ascending, that steps can need where a group has at most `total_rows` rows."""
    shorter = sum(length.rows < total_rows for length in LENGTHS)
    return tuple(length.rows for length in LENGTHS[: shorter + 1]) if total_rows else ()


def window_for(end_row: int, num_tokens: int) -> int | None:
    """The length of the window for a step of `num_tokens` padded tokens whose adapters' rows, in all groups, lie below
    row `end_row` (`RowPool.rows_end`); None where the step is better off without one."""
    found = next((length for length in LENGTHS if end_row <= length.rows), None)
    if found is None or not found.min_tokens <= num_tokens <= found.max_tokens:
        return None
    return found.rows
