"""`kernels.sampling.ops` on NVIDIA GPUs: as on any device, but for the largest logit of each row, which takes two
launches and one look at the logits in their own dtype.

A greedy step is nothing else: from the logits to what the host reads in these two launches. First a program for each
part of a row, then one for each row. Grids follow from shapes alone.
"""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import triton_launch
from kernels.batch_invariant.mode import replacing
from kernels.contract import Contract
from kernels.platform import in_use
from kernels.sampling import any_device
from kernels.sampling.any_device import rows_to_sample
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.ops import Sampled
from kernels.sampling.penalty_state import PenaltyState

# Columns of a part: 64 bytes of bfloat16 for each thread, and enough programs where rows are few.
PART_COLUMNS = 4096
_WARPS = 4


@triton.jit
def largest_of_part_kernel(
    logits_ptr,  # [rows, vocab], rows of stride
    values_ptr,  # float32 [rows, parts]
    columns_ptr,  # int32 [rows, parts]
    stride,
    vocab,
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The largest logit of each part of a row, and its first column. Grid (rows, parts)."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    row = tl.program_id(0)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    logits_ptr += row.to(tl.int64) * stride + column
    logits = tl.load(logits_ptr, mask=column < vocab, other=-float("inf")).to(tl.float32)
    # A maximum passes over NaN. Either way the row has no largest logit that is finite.
    logits = tl.where(logits != logits, float("inf"), logits)
    largest = tl.max(logits, 0)
    place = row * tl.num_programs(1) + part
    tl.store(values_ptr + place, largest)
    tl.store(columns_ptr + place, tl.min(tl.where(logits == largest, column, vocab), 0))


@triton.jit
def largest_of_row_kernel(
    part_values_ptr,  # float32 [rows, PARTS]
    part_columns_ptr,  # int32 [rows, PARTS]
    values_ptr,  # float32 [rows]
    tokens_ptr,  # int64 [rows]
    packed_ptr,  # int32 [rows], the same tokens
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two that holds them
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """The largest of a row's parts, the first of equals; token -1 where it is not finite. Grid (rows)."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(part_values_ptr + row * PARTS + part, mask=part < PARTS, other=-float("inf"))
    columns = tl.load(part_columns_ptr + row * PARTS + part, mask=part < PARTS, other=0)
    largest = tl.max(values, 0)
    # Parts stand in the order of their columns.
    column = tl.min(tl.where((values == largest) & (part < PARTS), columns, 2**31 - 1), 0)
    token = tl.where(tl.abs(largest) < float("inf"), column, -1)
    tl.store(values_ptr + row, largest)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(packed_ptr + row, token)


def new_state(num_slots: int, vocab: int, device: torch.device) -> PenaltyState:
    """See `ops.new_state`."""
    return any_device.new_state(num_slots, vocab, device)


def sample(logits: torch.Tensor, maps: SamplingMaps, state: PenaltyState | None) -> Sampled:
    """See `ops.sample`."""
    facts = maps.facts
    if not facts.num_rows or not facts.is_largest_only or facts.num_given or facts.num_chosen:
        return any_device.sample(logits, maps, state, largest=largest)
    _values, token_ids, packed = _launch(rows_to_sample(logits, maps))
    return Sampled(token_ids, packed)


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `any_device.largest`; a NaN is told as infinity."""
    values, tokens, _packed = _launch(logits)
    return values, tokens


def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """See `ops.warm_up`. Of rows as the model makes them, and of float32, as edits and draws take them; the number of
    rows is no argument of the kernels."""
    for each in {dtype, torch.float32}:
        largest(torch.zeros(1, vocab, dtype=each, device=device))
    if in_use(device).batch_invariant:
        replacing(device).warm_up_rows(vocab, device)


def compiled_count() -> int:
    """Number of compiled variants in this process."""
    return triton_launch.count_compiled(largest_of_part_kernel, largest_of_row_kernel)


CONTRACT = Contract(warm_up=warm_up, compiled_count=compiled_count, replayable=True)


def _launch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32, int64, int32 [rows]: the largest logits, their tokens or -1, and these tokens again.

    logits  [rows, vocab], unit stride along the vocabulary
    """
    num_rows, vocab = logits.shape
    device = logits.device
    num_parts = triton.cdiv(vocab, PART_COLUMNS)
    part_values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=device)
    part_columns = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    values = torch.empty(num_rows, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    packed = torch.empty(num_rows, dtype=torch.int32, device=device)
    options = {
        "DEPENDENT_LAUNCH": triton_launch.launches_dependently(device),
        **triton_launch.launch_options(device),
    }
    largest_of_part_kernel[num_rows, num_parts](
        *(logits, part_values, part_columns, logits.stride(0), vocab), BLOCK=PART_COLUMNS, num_warps=_WARPS, **options
    )
    block = triton.next_power_of_2(num_parts)
    largest_of_row_kernel[(num_rows,)](
        *(part_values, part_columns, values, tokens, packed), PARTS=num_parts, BLOCK=block, num_warps=1, **options
    )
    return values, tokens, packed
