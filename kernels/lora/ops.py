"""The public LoRA ops: shapes, strides and dtypes are checked here, and the platform's implementation does the work.

With t a position of the step (tokens stand in adapter order), p the adapter of t's segment, r its first row in the
stack's group, n its rank in slice s, and row(t) = t, or row_index[t] where a row index is given:

    shrink   h[s, t, :n]              = scalings[s, p] * x[row(t)] @ a[s][r : r + n].T
    expand   out[row(t), slice s]    += h[s, t, :n] @ b[s][r : r + n]         ("=" in overwrite mode)
    linear   shrink, then expand, without h leaving the op

Rows of base tokens (segment -1) are neither read nor written, in overwrite mode too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.lora.maps import LoraMaps, LoraStack
from kernels.platform import FEW_TOKENS, contract, implementation, in_use

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_num_calls = 0


def call_count() -> int:
    """Number of LoRA op calls of this process so far: steps without adapters must not raise it."""
    return _num_calls


def lora_shrink(
    x: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    out: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """h[s, t, :n] = scalings[s, p] * x[row(t)] @ a[s][r : r + n].T

    x          [tokens, in], unit stride along `in`; cast to the rows' dtype
    out        float32 [slices, tokens, width], width >= `shrink_width(stack)`; made when None.
               Only the columns below an adapter's rank, in the rows of its tokens, are defined afterwards
    row_index  int32 or int64 [tokens]: position t of the step is row row_index[t] of x

    Returns out.
    """
    _check(x, None, stack, maps, row_index)
    assert all(a.shape[1] == x.shape[1] for a in stack.a), "x and A disagree about the input width"
    if out is None:
        out = x.new_empty(len(stack.a), maps.num_tokens, shrink_width(stack), dtype=torch.float32)
    _check_h(out, stack, maps)
    if _has_room(maps):
        implementation("lora", x.device).lora_shrink(x, stack, maps, out=out, row_index=row_index)
    return out


def lora_expand(
    h: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """out[row(t), slice s] += h[s, t, :n] @ b[s][r : r + n]

    h          float32 [slices, tokens, width] of `lora_shrink`
    out        [tokens, total width], unit stride along the columns; changed in place, base rows excepted
    overwrite  write the product instead of adding it; slices that an adapter does not target are written with zero
    """
    _check(None, out, stack, maps, row_index)
    _check_h(h, stack, maps)
    if _has_room(maps):
        implementation("lora", out.device).lora_expand(h, out, stack, maps, overwrite=overwrite, row_index=row_index)


def lora_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """out[row(t), slice s] += scalings[s, p] * (x[row(t)] @ a[s][r : r + n].T) @ b[s][r : r + n]

    The op a layer calls once per (packed) projection, after the base product is in `out`.

    x          [tokens, in], unit stride along `in`; cast to the rows' dtype
    out        [tokens, total width], unit stride along the columns; changed in place, base rows excepted
    overwrite, row_index as in `lora_expand` and `lora_shrink`
    """
    _check(x, out, stack, maps, row_index)
    assert all(a.shape[1] == x.shape[1] for a in stack.a), "x and A disagree about the input width"
    if _has_room(maps):
        module = implementation("lora", x.device, _regime(maps, x.device))
        module.lora_linear(x, out, stack, maps, overwrite=overwrite, row_index=row_index)


def lora_embedding(
    token_ids: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """out[row(t)] += scalings[0, p] * a[0][r : r + n, token_ids[row(t)]] @ b[0][r : r + n]

    token_ids  int64 [tokens]; out [tokens, width], changed in place, base rows excepted. The stack has one slice, whose
    `a` is [rows, vocabulary].
    """
    _check(None, out, stack, maps, row_index)
    assert len(stack.a) == 1, "an embedding has one slice"
    assert token_ids.dtype == torch.int64, "token_ids is int64"
    assert token_ids.dim() == 1, "token_ids is one-dimensional"
    assert row_index is not None or token_ids.shape[0] == maps.num_tokens, "token_ids does not cover the step"
    if _has_room(maps):
        implementation("lora", out.device).lora_embedding(
            token_ids, out, stack, maps, overwrite=overwrite, row_index=row_index
        )


def _has_room(maps: LoraMaps) -> bool:
    """Whether steps of these (padded) sizes can hold a token of an adapter."""
    return maps.num_tokens > 0 and maps.places.shape[0] > 0


def warm_up(
    stacks: Sequence[LoraStack],
    max_tokens: int,
    dtype: torch.dtype,
    *,
    embeddings: Sequence[LoraStack] = (),
    max_segments: int = 64,
) -> int:
    """Compile all that `lora_linear` (of `stacks`) and `lora_embedding` (of `embeddings`) can need, and reserve memory.

    Afterwards steps of 1 to max_tokens tokens, whatever their mix of adapters, compile nothing and grow no workspace,
    so that they can be captured in graphs. Covers calls that add, without a row index.

    max_tokens    largest (padded) step
    dtype         of x and out
    max_segments  padded length of the step's maps

    Returns the number of variants that were compiled; 0 where nothing is ever compiled (on a CPU), and for a second
    call of the same kind. Changes nothing else: the ops run on steps without an active adapter.
    """
    num_compiled = 0
    for stack, embeds in [*((stack, False) for stack in stacks), *((stack, True) for stack in embeddings)]:
        device = stack.a[0].device
        serving, most = contract("lora", device), max_tokens
        if "many" in in_use(device).regimes_of("lora"):
            # The kernels for few tokens alone: those for many may be what does not compile here.
            serving, most = contract("lora", device, ("",)), min(max_tokens, FEW_TOKENS[in_use(device).device])
        num_compiled += serving.warm_up_and_count(stack, most, dtype, max_segments, is_embedding=embeds)
    return num_compiled


def _regime(maps: LoraMaps, device: torch.device) -> str:
    """By the padded number of tokens, which a captured step keeps."""
    return "many" if maps.num_tokens > FEW_TOKENS[in_use(device).device] else ""


def shrink_width(stack: LoraStack) -> int:
    """Columns of h that any resident adapter needs: the largest rank, rounded up to 16."""
    largest = max((max(ranks, default=0) for ranks in stack.host_ranks), default=0)
    return max(16, -(-largest // 16) * 16)


def _check(
    x: torch.Tensor | None,
    out: torch.Tensor | None,
    stack: LoraStack,
    maps: LoraMaps,
    row_index: torch.Tensor | None,
) -> None:
    """Check what every op relies on, and count the call. A broken rule is a fault of our own callers."""
    global _num_calls
    _num_calls += 1
    for tensor in (x, out):
        if tensor is not None:
            assert tensor.dim() == 2, "x and out are matrices"
            assert tensor.stride(1) == 1 or tensor.shape[1] == 1, "x and out need unit stride along their columns"
            assert tensor.dtype in _DTYPES, f"unsupported dtype {tensor.dtype}"
            assert row_index is not None or tensor.shape[0] == maps.num_tokens, "x or out does not cover the step"
    assert len(stack.a) == len(stack.b) == len(stack.slice_starts) == len(stack.host_ranks), "slices disagree"
    assert all(b.is_contiguous() for b in stack.b), "rows of B are contiguous"
    strides_of_a = stack.a[0].stride(0), 1
    assert all(a.stride() == strides_of_a for a in stack.a), "rows of A have one stride and unit columns"
    if out is not None:
        assert stack.output_width <= out.shape[1], "a slice ends beyond the output"
    if row_index is not None:
        assert row_index.dtype in (torch.int32, torch.int64), "row_index is int32 or int64"
        assert row_index.shape == (maps.num_tokens,), "row_index has one entry per token of the step"


def _check_h(h: torch.Tensor, stack: LoraStack, maps: LoraMaps) -> None:
    assert h.dtype == torch.float32, "h is float32"
    assert h.is_contiguous(), "h is contiguous"
    assert h.shape[:2] == (len(stack.a), maps.num_tokens), "h is [slices, tokens, width]"
    assert h.shape[2] >= shrink_width(stack), "h is narrower than a resident adapter's rank"
