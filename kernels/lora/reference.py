"""The LoRA ops in plain torch, float64 inside, rounded once at the end: the truth for every implementation."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.lora.maps import LoraMaps, LoraStack

CONTRACT = Contract()


def lora_shrink(
    x: torch.Tensor, stack: LoraStack, maps: LoraMaps, *, out: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    """See `ops.lora_shrink`."""
    for segment in maps.segments:
        first_row = segment.first_rows[stack.group]
        rows = _rows(row_index, segment.start, segment.end)
        for s in range(len(stack.a)):
            rank = stack.host_ranks[s][segment.place] if first_row >= 0 else 0
            if rank:
                a = stack.a[s][first_row : first_row + rank].double()
                h = stack.host_scalings[s][segment.place] * (x[rows].double() @ a.t())
                out[s, segment.start : segment.end, :rank] = h.to(out.dtype)
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
    """See `ops.lora_expand`."""
    for segment in maps.segments:
        first_row = segment.first_rows[stack.group]
        rows = _rows(row_index, segment.start, segment.end)
        for s, (b, column) in enumerate(zip(stack.b, stack.slice_starts, strict=True)):
            rank = stack.host_ranks[s][segment.place] if first_row >= 0 else 0
            columns = slice(column, column + b.shape[1])
            # An empty product (rank 0) is a zero delta: added it changes nothing, and in overwrite mode it is written.
            if rank or overwrite:
                delta = h[s, segment.start : segment.end, :rank].double() @ b[max(first_row, 0) :][:rank].double()
                out[rows, columns] = (delta if overwrite else out[rows, columns].double() + delta).to(out.dtype)


def lora_linear(
    x: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_linear`."""
    h = torch.zeros(len(stack.a), maps.num_tokens, _width(stack), dtype=torch.float64, device=x.device)
    lora_shrink(x, stack, maps, out=h, row_index=row_index)
    lora_expand(h, out, stack, maps, overwrite=overwrite, row_index=row_index)


def lora_embedding(
    token_ids: torch.Tensor,
    out: torch.Tensor,
    stack: LoraStack,
    maps: LoraMaps,
    *,
    overwrite: bool = False,
    row_index: torch.Tensor | None = None,
) -> None:
    """See `ops.lora_embedding`."""
    h = torch.zeros(1, maps.num_tokens, _width(stack), dtype=torch.float64, device=out.device)
    for segment in maps.segments:
        first_row = segment.first_rows[stack.group]
        rank = stack.host_ranks[0][segment.place] if first_row >= 0 else 0
        if rank:
            ids = token_ids[_rows(row_index, segment.start, segment.end)]
            columns = stack.a[0][first_row : first_row + rank][:, ids].double()  # [rank, tokens of the segment]
            h[0, segment.start : segment.end, :rank] = stack.host_scalings[0][segment.place] * columns.t()
    lora_expand(h, out, stack, maps, overwrite=overwrite, row_index=row_index)


def _rows(row_index: torch.Tensor | None, start: int, end: int) -> slice | torch.Tensor:
    return slice(start, end) if row_index is None else row_index[start:end].long()


def _width(stack: LoraStack) -> int:
    return max((max(ranks, default=0) for ranks in stack.host_ranks), default=0)
