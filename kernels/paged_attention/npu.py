"""Paged attention with torch_npu's fused attention: prefill, chunks and decode in one call. Not verified on an NPU.

Of caches that lie token by token; `npu_heads_first.py` is the same for the others.

The lengths go to the operator as host integers, so they come from the maps' host side: reading them back from the
device would stall every layer.

The operator writes to memory that it is given: its result to `out`, what it works with to one workspace for all layers
of all decode steps, which run one after another. A captured call writes there again at each replay, so nothing of it
may move. Steps with prompts, which are not captured and have any sizes, leave the workspace to torch_npu's allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
import torch_npu

from kernels.attention_maps import AttentionMaps
from kernels.contract import Contract
from kernels.platform import MAX_CACHE_ELEMENTS
from kernels.shapes import ProbeShapes

# Limits of the operator in the layout TND with a paged cache. 256 is not documented, but used in production.
DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 192, 256)
_BLOCK_SIZES_TOKENS = (128, 256, 384, 512)
_MAX_SEQUENCES = 4096
_MAX_HEADS = 256
_MAX_GROUPS = 64
_MAX_TOKEN_ELEMENTS = 65_535

_CAUSAL, _BAND = 3, 4
_MASK_SIZE = 2048
_ALL_TOKENS = 2**31 - 1
# No result of arithmetic is likely to be this, in both formats of 16 bits.
_MARK = -12_345.0


def refuses(shapes: ProbeShapes) -> str | None:
    """Why the operator cannot serve a model and its cache, as part of a sentence; None if it can."""
    num_heads, kv_heads, head_dim = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    num_blocks, block_size, max_sequences = shapes.num_blocks, shapes.block_size, shapes.max_sequences
    if shapes.score_cap is not None:
        return "it does not cap scores"
    if shapes.has_sinks:
        return "it has no attention sinks"
    if shapes.torch_dtype not in DTYPES:
        return f"it computes in 16 bits, not in {shapes.dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"it takes heads of {', '.join(map(str, _HEAD_DIMS))} elements, not {head_dim}"
    if block_size not in _BLOCK_SIZES_TOKENS:
        return f"it takes blocks of {', '.join(map(str, _BLOCK_SIZES_TOKENS))} tokens, not {block_size}"
    if num_heads > _MAX_HEADS or num_heads // kv_heads > _MAX_GROUPS:
        return f"it takes at most {_MAX_HEADS} query heads and {_MAX_GROUPS} of them for each key head"
    num_elements = num_blocks * block_size * kv_heads * head_dim
    if kv_heads * head_dim > _MAX_TOKEN_ELEMENTS or num_elements > MAX_CACHE_ELEMENTS["npu"]:
        return f"it takes caches of less than 2**31 elements, {_MAX_TOKEN_ELEMENTS} of them for each token"
    if max_sequences > _MAX_SEQUENCES:
        return f"it takes at most {_MAX_SEQUENCES} sequences in a step, not {max_sequences}"
    return None


def host_lengths(maps: AttentionMaps) -> Mapping[str, list[int]]:
    """The operator's host arguments: the end of each sequence's queries, and its length.

    The last end must be the number of tokens, and no length 0. Padding, which only decode steps have, is
    therefore passed as sequences of one token, whose block is the null block.
    """
    num_tokens, num_known = maps.slot_mapping.shape[0], maps.query_starts[-1]
    num_padding = num_tokens - num_known
    num = len(maps.kv_lens) - num_padding
    ends, lengths = [*maps.query_starts[1 : num + 1]], [*maps.kv_lens[:num]]
    assert not num_padding or ends[-1:] in ([], [num_known]), "padding lies behind the sequences"
    return {
        "actual_seq_lengths": ends + list(range(num_known + 1, num_tokens + 1)),
        "actual_seq_lengths_kv": lengths + [1] * num_padding,
    }


CONTRACT = Contract(refuses=refuses, updates=host_lengths)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    maps: AttentionMaps,
    *,
    scale: float,
    sliding_window: int | None,
    score_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
) -> None:
    """See `ops.paged_attention`; writes all of `out`. What `refuses` names must have been kept away."""
    assert score_cap is None and sinks is None, "scores are not capped, and have no sinks"
    flat_shape = (*k_cache.shape[:2], k_cache.shape[2] * k_cache.shape[3])
    attend(q, k_cache.view(flat_shape), v_cache.view(flat_shape), k_cache.shape, maps, scale, sliding_window, out)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cache_shape: torch.Size,
    maps: AttentionMaps,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """`paged_attention` over a cache as the operator takes it, contiguous: with three dimensions token by token, with
    four head by head.

    keys, values  [num_blocks, block_size, kv_heads * head_dim], or [num_blocks, kv_heads, block_size, head_dim]
    cache_shape   (num_blocks, block_size, kv_heads, head_dim)
    """
    _, block_size, kv_heads, _ = cache_shape
    call = _Call(q.contiguous(), keys, values, maps, host_lengths(maps), block_size, kv_heads, scale, sliding_window)
    memory = call_memory(q.device, q.dtype)
    workspace = memory.workspace(call) if maps.is_decode else None
    torch_npu.npu_fused_infer_attention_score.out(
        query=call.q,
        key=call.keys,
        value=call.values,
        atten_mask=_mask(q.device),
        actual_seq_lengths=call.lengths["actual_seq_lengths"],
        actual_seq_lengths_kv=call.lengths["actual_seq_lengths_kv"],
        block_table=maps.block_table,
        num_heads=q.shape[1],
        scale=scale,
        pre_tokens=call.reach,
        next_tokens=0,
        input_layout="TND",
        num_key_value_heads=call.kv_heads,
        sparse_mode=call.sparse_mode,
        block_size=block_size,
        workspace=workspace,
        out=[out, memory.lse],
    )


class _Call(NamedTuple):
    """The arguments of one call of the operator, contiguous tensors."""

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    maps: AttentionMaps
    lengths: Mapping[str, list[int]]
    block_size: int
    kv_heads: int
    scale: float
    sliding_window: int | None

    @property
    def reach(self) -> int:
        """How far a band reaches back from the query's own token, which the window counts too."""
        return _ALL_TOKENS if self.sliding_window is None else self.sliding_window - 1

    @property
    def sparse_mode(self) -> int:
        return _CAUSAL if self.sliding_window is None else _BAND


class CallMemory:
    """Memory that calls on one device in one dtype write beside their result.

    lse  [1]: the softmax's log-sum-exp, which is not used; the operator requires an output for it
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.lse = torch.empty(1, dtype=dtype, device=device)
        self._num_elements: dict[tuple[object, ...], int] = {}
        # The last is the largest; captured calls may write to those before. Each is twice the one before at least.
        self._workspaces: list[torch.Tensor] = []
        self._marked: list[tuple[int, torch.Tensor]] | None = None

    def watch(self) -> None:
        """Give each call from now on a workspace of its own, with as much marked memory behind it: for `written`."""
        self._marked = []

    def written(self) -> list[tuple[int, int]]:
        """Pairs of each call since `watch`: elements of its workspace, and elements up to the last one that it wrote. A
        call that writes beyond its workspace would overwrite other tensors. Ends the watch."""
        marked, self._marked = self._marked or [], None
        found = []
        for num, memory in marked:
            places = (memory != memory.new_tensor(_MARK)).nonzero()
            found.append((num, int(places.max()) + 1 if places.numel() else 0))
        return found

    def workspace(self, call: _Call) -> torch.Tensor:
        """One that is large enough for any lengths in tensors of these shapes: torch_npu does not look at its size.

        A step of new sizes asks the operator once, for all layers.
        """
        if self._marked is not None:
            num_named = _largest_workspace(call).numel()
            memory = torch.full((2 * num_named,), _MARK, dtype=self.lse.dtype, device=self.lse.device)
            self._marked.append((num_named, memory))
            return memory[:num_named]
        key = call.q.shape, call.keys.shape, call.maps.block_table.shape, call.kv_heads, call.sparse_mode
        num_elements = self._num_elements.get(key)
        if num_elements is None:
            largest = _largest_workspace(call)
            num_elements = self._num_elements[key] = largest.numel()
            before = self._workspaces[-1].numel() if self._workspaces else 0
            if not self._workspaces or before < num_elements:
                self._workspaces.append(largest.new_empty(max(num_elements, 2 * before)))
        return self._workspaces[-1]


def _largest_workspace(call: _Call) -> torch.Tensor:
    """A workspace for these shapes and any lengths, fresh, of the operator's own making."""
    made: torch.Tensor = torch_npu._npu_fused_infer_attention_score_get_max_workspace(
        query=call.q,
        key=call.keys,
        value=call.values,
        atten_mask=_mask(call.q.device),
        actual_seq_lengths=call.lengths["actual_seq_lengths"],
        actual_seq_lengths_kv=call.lengths["actual_seq_lengths_kv"],
        block_table=call.maps.block_table,
        num_heads=call.q.shape[1],
        scale=call.scale,
        pre_tokens=call.reach,
        next_tokens=0,
        input_layout="TND",
        num_key_value_heads=call.kv_heads,
        sparse_mode=call.sparse_mode,
        block_size=call.block_size,
    )
    return made


@cache
def call_memory(device: torch.device, dtype: torch.dtype) -> CallMemory:
    return CallMemory(device, dtype)


@cache
def _mask(device: torch.device) -> torch.Tensor:
    """The compressed mask of the causal modes: one size for all lengths, 1 = hidden."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8).triu_(1).to(device)
