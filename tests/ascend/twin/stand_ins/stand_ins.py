"""CPU stand-ins of the fused NPU operators that the service calls, registered for the real torch_npu's own schemas.

Each computes what the operator's documentation says, and refuses what it forbids: the operators themselves check little
of it, and on a device a broken rule is a fault of the vector core, or a wrong number. Rules come from the documentation
inside the torch_npu 2.13.0 wheel (`torch_npu/_op_plugin_docs.py`) and in Ascend/op-plugin. Before it computes, each
call is replayed on meta tensors, so that the wheel's own shape function sees it; the result must have those shapes.

Numerics are those of float32 with one rounding at the end. Not verified on an NPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MASK_SIZE = 2048
INT_MAX = 2147483647


class BrokenRule(AssertionError):
    """A call that the operator's documentation forbids."""


def rule(condition: bool, sentence: str) -> None:
    if not condition:
        raise BrokenRule(sentence)


def fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: Sequence[torch.Tensor],
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The form `.out`: see `attend`. out: the result, like the query, and a place of one element for what is not asked
    for. workspace: one-dimensional, of the query's dtype; the operator's own where None."""
    attention_out, lse = out
    _check_attention(query, key, value, **arguments)
    for tensor in out:
        rule(tensor.is_contiguous() and tensor.dtype == query.dtype, "what is written is contiguous, in query's dtype")
    rule(attention_out.shape == query.shape, "the result has the query's shape")
    rule(lse.shape == (1,), "softmax_lse is a place of one element")
    if workspace is not None:
        rule(workspace.dim() == 1 and workspace.is_contiguous(), "the workspace has one dimension")
        rule(workspace.dtype == query.dtype, "the workspace has the query's dtype")
        needed = asked_workspaces.get(_workspace_key(query, key, value, **arguments))
        rule(needed is not None, "the workspace's size was asked for with these very arguments")
        assert needed is not None
        rule(workspace.numel() >= needed, f"the workspace has {needed} elements, not {workspace.numel()}")
        asked = workspace_of_call(query, arguments["actual_seq_lengths_kv"], arguments["block_size"])
        # What a device does that is asked for less than a call writes: it writes all the same.
        workspace.as_strided((max(needed, asked),), (1,)).fill_(torch.nan)
        writes.append((workspace, lse))
    lse.fill_(torch.nan)
    attention_out.copy_(attend(query, key, value, **arguments))
    return attention_out, lse


def largest_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """What `fused_infer_attention_score` may write to with arguments of these shapes, whatever the lengths are. How
    much that is on a device is not known; here more for more tokens and for wider tables."""
    _check_attention(query, key, value, **arguments)
    num_elements = 32 * query.numel() + 8 * arguments["block_table"].numel()
    asked_workspaces[_workspace_key(query, key, value, **arguments)] = num_elements
    return query.new_full((num_elements,), torch.nan)


def workspace_of_call(query: torch.Tensor, kv_lens: Sequence[int], block_size: int) -> int:
    """Elements that a call of these lengths writes, which should be no more than `largest_workspace` has."""
    return 32 * query.numel() + sum(-(-length // block_size) for length in kv_lens)


# Elements by `_workspace_key`, and what calls with a workspace wrote to beside their result, in order.
asked_workspaces: dict[tuple[Any, ...], int] = {}
writes: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=2)


def _workspace_key(*tensors: torch.Tensor, **arguments: Any) -> tuple[Any, ...]:
    """All but what tensors hold, and lengths."""
    parts = (*enumerate(tensors), *sorted(arguments.items()))
    return tuple(
        (name, (value.shape, value.dtype) if isinstance(value, torch.Tensor) else
         len(value) if isinstance(value, Sequence) and not isinstance(value, str) else value)
        for name, value in parts
    )  # fmt: skip


def _check_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,  # noqa: ARG001 - any will do
    pre_tokens: int = INT_MAX,
    next_tokens: int = INT_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    **others: Any,
) -> None:
    """Refuses what the documentation forbids, whatever the form."""
    rule(input_layout == "TND", f"this service uses the layout TND, not {input_layout!r}")
    rule(not any(others.values()), f"not used by this service: {sorted(name for name in others if others[name])}")
    _check_attention_tensors(query, key, value, num_heads, num_key_value_heads or num_heads, block_size)
    rule(actual_seq_lengths is not None, "TND needs actual_seq_lengths")
    rule(actual_seq_lengths_kv is not None, "a paged cache needs actual_seq_lengths_kv")
    assert actual_seq_lengths is not None and actual_seq_lengths_kv is not None
    starts, kv_lens = [0, *actual_seq_lengths], list(actual_seq_lengths_kv)
    _check_lengths(starts, kv_lens, query.shape[0])
    rule(block_table is not None, "the cache is paged, so there is a block_table")
    assert block_table is not None
    _check_block_table(block_table, kv_lens, key.shape[0], block_size)
    rule(sparse_mode in (3, 4), "causal attention is sparse_mode 3, or 4 within a window")
    rule(sparse_mode == 3 or pre_tokens >= 0, "a band reaches back, so pre_tokens is not negative")
    rule(sparse_mode == 3 or next_tokens == 0, "a causal band ends at the token itself: next_tokens is 0")
    rule(inner_precise == 0, "high precision, without corrections of rows that see nothing: there are none")
    rule(atten_mask is not None, "sparse modes 3 and 4 need the mask")
    assert atten_mask is not None
    _check_mask(atten_mask)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: torch.Tensor,
    num_heads: int,
    scale: float = 1.0,
    pre_tokens: int = INT_MAX,
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    **_others: Any,
) -> torch.Tensor:
    """Attention of T query tokens of B requests, one after the other, over a paged cache (layout TND).

    query       [T, num_heads, head_dim]
    key, value  [num_blocks, block_size, num_key_value_heads * head_dim], or
                [num_blocks, num_key_value_heads, block_size, head_dim]
    A request's last query stands at its last key. sparse_mode 3: each query sees all keys up to its own; 4 (band): of
    these the `pre_tokens` before its own, and its own.
    """
    starts = [0, *actual_seq_lengths]
    out = torch.empty_like(query)
    kv_shape = (num_key_value_heads or num_heads, query.shape[2])
    for request, kv_len in enumerate(actual_seq_lengths_kv):
        q = query[starts[request] : starts[request + 1]].float()
        blocks = block_table[request, : -(-kv_len // block_size)].long()
        k, v = (_rows(cache[blocks], kv_shape)[:kv_len].float() for cache in (key, value))
        out[starts[request] : starts[request + 1]] = _attend(
            q, k, v, scale, pre_tokens if sparse_mode == 4 else INT_MAX
        )
    return out


def _rows(blocks: torch.Tensor, kv_shape: tuple[int, int]) -> torch.Tensor:
    """Blocks of a cache in either layout as [positions, kv_heads, head_dim]."""
    return (blocks.transpose(1, 2) if blocks.dim() == 4 else blocks).reshape(-1, *kv_shape)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, reach: int) -> torch.Tensor:
    """q [queries, heads, head_dim], k and v [keys, kv_heads, head_dim], all float32."""
    num_queries, num_keys, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    hidden = (distance < 0) | (distance > reach)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(groups, 1)) * scale
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(groups, 1))


def _check_attention_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    rule(query.dim() == 3, "the query has three dimensions")
    for tensor in (query, key, value):
        rule(tensor.is_contiguous(), "query, key and value are contiguous")
        rule(tensor.dtype == query.dtype, "query, key and value have one dtype")
        rule(tensor.numel() < 2**31, "a cache has fewer than 2**31 elements")
    known = (torch.float16, torch.bfloat16)
    rule(query.dtype in known or (_float32_attention and query.dtype == torch.float32), "attention computes in 16 bits")
    head_dim = query.shape[2]
    rule(head_dim in (64, 128, 192, 256), f"TND takes head sizes 64, 128, 192 (256 in practice), not {head_dim}")
    rule(query.shape[1] == num_heads, "num_heads is the query's")
    rule(num_heads <= 256 and num_heads % num_kv_heads == 0, "heads are shared evenly, 256 at most")
    rule(num_heads // num_kv_heads <= 64, "at most 64 query heads share a key/value head")
    rule(num_kv_heads * head_dim <= 65535, "a token's keys have at most 65535 elements")
    rule(128 <= block_size <= 512 and block_size % 128 == 0, "block_size is 128, 256, 384 or 512")
    rule(key.shape == value.shape, "key and value have one shape")
    shapes = {3: (block_size, num_kv_heads * head_dim), 4: (num_kv_heads, block_size, head_dim)}
    rule(
        key.shape[1:] == shapes.get(key.dim()),
        "the cache is [blocks, block_size, kv_heads * head_dim] or [blocks, kv_heads, block_size, head_dim]",
    )


def _check_lengths(starts: list[int], kv_lens: list[int], num_tokens: int) -> None:
    """starts: 0 and the cumulative lengths of the queries."""
    rule(1 <= len(kv_lens) <= 4096, "TND takes 1 to 4096 requests")
    rule(len(starts) == len(kv_lens) + 1, "one length of queries and one of keys per request")
    rule(all(a <= b for a, b in itertools.pairwise(starts)), "actual_seq_lengths is cumulative")
    rule(starts[-1] == num_tokens, "the last of actual_seq_lengths is the number of tokens")
    q_lens = [end - start for start, end in itertools.pairwise(starts)]
    rule(all(kv_len >= 1 for kv_len in kv_lens), "every request has a key")
    rule(all(q <= kv for q, kv in zip(q_lens, kv_lens, strict=True)), "a request has no more queries than keys")


def _check_block_table(block_table: torch.Tensor, kv_lens: list[int], num_blocks: int, block_size: int) -> None:
    rule(block_table.dtype == torch.int32, "block_table is int32")
    rule(block_table.dim() == 2 and block_table.is_contiguous(), "block_table is a contiguous matrix")
    rule(block_table.shape[0] == len(kv_lens), "block_table has one row per request")
    needed = [-(-kv_len // block_size) for kv_len in kv_lens]
    rule(max(needed) <= block_table.shape[1], "block_table is wide enough for the longest request")
    rule(sum(needed) <= num_blocks, "the cache has the blocks of all requests")
    for row, count in zip(block_table.tolist(), needed, strict=True):
        rule(all(0 <= block < num_blocks for block in row[:count]), "block_table names blocks of the cache")


def _check_mask(mask: torch.Tensor) -> None:
    """The compressed mask of all sparse modes: always 2048 x 2048, true above the diagonal."""
    rule(mask.dtype in (torch.bool, torch.int8, torch.uint8), "the mask is bool, int8 or uint8")
    rule(mask.shape == (MASK_SIZE, MASK_SIZE), "the compressed mask is 2048 x 2048")
    rule(mask.is_contiguous(), "the mask is contiguous")
    key = (mask.data_ptr(), mask.dtype)
    if key not in _good_masks:
        right = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu_(1)
        rule(bool(torch.equal(mask.to(torch.int64), right.to(torch.int64))), "the mask is 1 above its diagonal, else 0")
        _good_masks[key] = mask  # kept alive, so that its address belongs to no other


_good_masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}
_float32_attention = False


@contextlib.contextmanager
def float32_attention() -> Iterator[None]:
    """Lift the rule that attention computes in 16 bits; for the run that is compared token by token."""
    global _float32_attention
    _float32_attention = True
    try:
        yield
    finally:
        _float32_attention = False


def scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """cache[slot // block_size, slot % block_size] = new for each token, in place; slots of -1 are skipped.

    key, value              [T, kv_heads, head_dim]
    key_cache, value_cache  [num_blocks, block_size, kv_heads, head_dim]
    """
    rule(
        cache_mode in (None, "Norm"), f"this cache has the plain layout, which is cache_mode 'Norm', not {cache_mode!r}"
    )
    rule(compress_lens is None and compress_seq_offsets is None and seq_lens is None, "nothing here is compressed")
    for new, cache in ((key, key_cache), (value, value_cache)):
        rule(new.dim() == 3 and cache.dim() == 4, "tokens have three dimensions, caches four")
        rule(new.is_contiguous() and cache.is_contiguous(), "key, value and caches are contiguous")
        rule(new.dtype == cache.dtype == key.dtype, "key, value and caches have one dtype")
        rule(new.shape[:2] == key.shape[:2] and new.shape[1:] == cache.shape[2:], "tokens fit the cache")
    rule(key_cache.shape[:2] == value_cache.shape[:2], "key and value cache have the same blocks")
    rule(key.dtype in FLOATS, "keys and values are floating-point numbers")
    rule(slot_mapping.dtype in (torch.int32, torch.int64), "slot_mapping is int32 or int64")
    rule(slot_mapping.shape == key.shape[:1] and slot_mapping.is_contiguous(), "one slot per token")
    is_real = slot_mapping != -1
    slots = slot_mapping[is_real].tolist()
    num_slots = key_cache.shape[0] * key_cache.shape[1]
    rule(all(0 <= slot < num_slots for slot in slots), "slots lie in the cache")
    rule(len(set(slots)) == len(slots), "no slot twice")
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = new[is_real]


def rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm over the dimensions that gamma has, which are the last ones: (y, 1 / rms in float32)."""
    rule(input.numel() > 0, "the norm's input is not empty")
    rule(2 <= input.dim() <= 8, "the input has 2 to 8 dimensions")
    rule(input.dtype in FLOATS, "the input is float16, bfloat16 or float32")
    rule(gamma.dtype == input.dtype, "gamma has the input's dtype")
    rule(1 <= gamma.dim() < input.dim(), "gamma has fewer dimensions than the input")
    rule(gamma.shape == input.shape[-gamma.dim() :], "gamma has the shape of the input's last dimensions")
    x = input.float()
    dims = tuple(range(-gamma.dim(), 0))
    rstd = (x.square().mean(dims, keepdim=True) + epsilon).rsqrt()
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(norm of x1 + x2, 1 / rms in float32, x1 + x2); all three are new tensors."""
    rule(x1.shape == x2.shape and x1.dtype == x2.dtype, "both summands have one shape and dtype")
    total = x1 + x2
    return *rms_norm(total, gamma, epsilon), total


def rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """input * r1 + (-second half, first half) * r2, over the whole last dimension.

    input   [T, heads, head_dim] or, with a batch of one before it, [1, T, heads, head_dim]
    r1, r2  cosine and sine with one head: [T, 1, head_dim] or [1, T, 1, head_dim]
    """
    rule(input.numel() > 0, "what is rotated is not empty")
    rule(rotary_mode == "half" and rotate is None, "halves are rotated, not pairs")
    rule(input.dim() == 3 or (input.dim() == 4 and input.shape[0] == 1), "the input is [T, N, D] or [1, T, N, D]")
    rule(input.dtype in FLOATS, "the input is float16, bfloat16 or float32")
    heads, head_dim = input.shape[-2:]
    rule(head_dim % 2 == 0 and head_dim < 896, "head_dim is even and below 896")
    rule(heads < 1000, "fewer than 1000 heads")
    for factor in (r1, r2):
        rule(factor.dtype == input.dtype, "cosine and sine have the input's dtype")
        rule(factor.shape == (*input.shape[:-2], 1, head_dim), "cosine and sine are [T, 1, head_dim], in full width")
        rule(factor.numel() == 0 or float(factor.abs().max()) <= 1.0, "cosine and sine lie in [-1, 1]")
    first, second = input.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (input.float() * r1.float() + turned * r2.float()).to(input.dtype)


def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along `dim`."""
    rule(input.numel() > 0, "the gate's input is not empty")
    rule(1 <= input.dim() <= 8, "the input has 1 to 8 dimensions")
    rule(input.dtype in FLOATS, "the input is float16, bfloat16 or float32")
    rule(-input.dim() <= dim < input.dim(), "dim is a dimension of the input")
    rule(input.shape[dim] % 2 == 0, "the halves are equal")
    gate, up = input.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(input.dtype)


def moe_init_routing_v2(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of x by expert, tokens of one expert in their order: (x of each pair; of each pair, token by token, its row
    there; number of rows of each expert; scales, which are undefined without quantisation).

    expert_idx  int32 [tokens, K]
    """
    unused = sorted(name for name, value in others.items() if isinstance(value, torch.Tensor))
    rule(not unused, f"not used by this service: {unused}")
    rule(x.dim() == 2 and x.dtype in FLOATS, "x is a matrix of float16, bfloat16 or float32")
    rule(expert_idx.dtype == torch.int32, "expert_idx is int32")
    rule(expert_idx.dim() == 2 and len(expert_idx) == len(x), "expert_idx has one row per token")
    rule(0 < expert_num <= 10240, "expert_num is positive, 10240 at most")
    rule(bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()), "experts lie below expert_num")
    rule(active_num in (-1, 0, expert_idx.numel()), "all pairs are worked on")
    rule(drop_pad_mode == 0, "nothing is dropped: drop_pad_mode is 0")
    rule(expert_tokens_num_type == 1 and expert_tokens_num_flag, "tokens are counted: type 1, with the flag")
    rule(quant_mode == -1, "nothing is quantised: quant_mode is -1")
    rule([*active_expert_range] == [0, expert_num], "active_expert_range is that of all experts")
    rule(row_idx_type == 0, "row indices are for gathering: row_idx_type is 0")
    order = expert_idx.flatten().argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    counts = expert_idx.flatten().bincount(minlength=expert_num)
    undefined = torch.full((len(order),), torch.nan)
    return x[order // expert_idx.shape[1]], places.int(), counts, undefined


def grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: Any,
) -> list[torch.Tensor]:
    """Rows of one x, group after group, by the weights of their group: one result.

    weight  one tensor [groups, K, N], or a transposed view of [groups, N, K]
    """
    rule(not any(value is not None for value in others.values()), f"not used by this service: {sorted(others)}")
    rule(len(x) == len(weight) == 1 and split_item in (2, 3), "one x, one weight, one result: split_item is 2 or 3")
    (rows,), (weights,) = x, weight
    rule(rows.dim() == 2 and weights.dim() == 3, "x has two dimensions, weight three")
    rule(rows.is_contiguous(), "x is not transposed")
    rule(weights.is_contiguous() or weights.mT.is_contiguous(), "weights lie in order, or transposed")
    rule(rows.dtype == weights.dtype and rows.dtype in FLOATS, "x and weight have one dtype")
    rule(rows.shape[1] == weights.shape[1], "x fits the weights")
    rule(max(rows.shape[1], weights.shape[2]) < 65536, "last dimensions are below 65536")
    rule(group_type == 0 and act_type == 0, "rows are in groups, and not activated")
    rule(group_list is not None and group_list.dtype == torch.int64, "group_list is an int64 tensor")
    assert group_list is not None
    rule(group_list.shape == weights.shape[:1] and len(group_list) <= 1024, "one number per group, 1024 at most")
    sums = group_list if group_list_type == 0 else group_list.cumsum(0)
    rule(group_list_type in (0, 1) and bool((group_list >= 0).all()), "numbers of rows, or their running sum")
    rule(int(sums[-1]) == len(rows), "the groups have all rows")
    rule(bool((sums.diff() >= 0).all()), "running sums do not fall")
    ends = [0, *sums.tolist()]
    parts = [rows[a:b].float() @ weights[i].float() for i, (a, b) in enumerate(itertools.pairwise(ends))]
    return [torch.cat(parts).to(rows.dtype)]


def dynamic_quant(input: torch.Tensor, **others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows rounded to int8, to the nearest and halves to even, and float32 scales [rows]: the largest by 127."""
    rule(not any(value is not None for name, value in others.items() if name not in _ROUNDING), "rows alone, to int8")
    rule(input.dtype in (torch.float16, torch.bfloat16), "the input has 16 bits")
    rule(input.dim() == 2 and input.numel() > 0, "the input is a matrix, not empty")
    scales = input.float().abs().amax(1) / 127
    codes = torch.where(scales[:, None] > 0, input.float() / scales[:, None], 0.0)
    return codes.round().nan_to_num().clamp(-128, 127).to(torch.int8), scales


# Arguments of `npu_dynamic_quant` with values of their own where they are left out.
_ROUNDING = ("quant_mode", "dst_type", "dst_type_max")


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | torch.dtype | None = None,
    **others: Any,
) -> torch.Tensor:
    """x1 @ x2 in int32, times the scales of rows and columns in float32, plus bias, rounded once.

    x1  int8 [M, K];  x2  int8 [K, N];  scale  float32 [N];  pertoken_scale  float32 [M];  bias  [N] as the result
    """
    rule(not any(value is not None for value in others.values()), f"not used by this service: {sorted(others)}")
    rule(x1.dtype == x2.dtype == torch.int8, "both are int8")
    rule(x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0], "x1 fits x2")
    rule(max(*x1.shape[1:], *x2.shape) < 65536, "sides are below 65536")
    rule(x1.is_contiguous() and x2.is_contiguous(), "both lie in order")
    rule(scale.dtype == torch.float32 and scale.shape == x2.shape[1:], "scale is float32, one for each column")
    rule(pertoken_scale is not None, "pertoken_scale is given")
    assert pertoken_scale is not None
    rule(pertoken_scale.dtype == torch.float32 and pertoken_scale.shape == x1.shape[:1], "one scale for each row")
    # An operator is given a dtype's number.
    dtype = {5: torch.float16, 15: torch.bfloat16}.get(output_dtype, output_dtype)  # type: ignore[call-overload]
    rule(dtype in (torch.float16, torch.bfloat16), "the result is float16 or bfloat16")
    scaled = (x1.int() @ x2.int()).float() * scale * pertoken_scale[:, None]
    if bias is not None:
        rule(bias.dtype == dtype and bias.shape == scale.shape, "bias is of the result's dtype, one for each column")
        scaled += bias.float()
    return scaled.to(dtype)


def format_cast(input: torch.Tensor, acl_format: int, **others: Any) -> torch.Tensor:
    """Values in another layout, which they hide."""
    rule(acl_format == 29, "weights are brought into FRACTAL_NZ")
    rule(not any(value is not None for value in others.values()), f"not used by this service: {sorted(others)}")
    rule(input.dtype == torch.int8 and input.dim() == 2 and input.is_contiguous(), "a matrix of int8, in order")
    return input.clone()


STAND_INS: dict[str, Callable[..., Any]] = {
    "npu_fused_infer_attention_score": fused_infer_attention_score,
    "_npu_fused_infer_attention_score_get_max_workspace": largest_workspace,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "npu_rms_norm": rms_norm,
    "npu_add_rms_norm": add_rms_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_swiglu": swiglu,
    "npu_moe_init_routing_v2": moe_init_routing_v2,
    "npu_grouped_matmul": grouped_matmul,
    "npu_dynamic_quant": dynamic_quant,
    "npu_quant_matmul": quant_matmul,
    "npu_format_cast": format_cast,
}

# Operators that are called in another form than that of their own name.
OVERLOADS = {"npu_fused_infer_attention_score": "out"}
# For which the wheel has no shape function.
_SHAPELESS = frozenset({"_npu_fused_infer_attention_score_get_max_workspace", "npu_format_cast"})
# What a form takes that the shape function of the operator's own does not.
_PLACES = ("workspace", "out")

# Calls of each operator in this process.
num_calls: Counter[str] = Counter()


def register() -> torch.library.Library:
    """Make every stand-in the operator's implementation for CPU tensors, while the returned object lives."""
    library = torch.library.Library("npu", "IMPL")
    for name, stand_in in STAND_INS.items():
        form = f"{name}.{OVERLOADS[name]}" if name in OVERLOADS else name
        library.impl(form, _with_shape_function(name, stand_in), "CPU")
    return library


def _with_shape_function(name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in, after the wheel's own shape function, with which it must agree."""

    @functools.wraps(stand_in)
    def call(*args: Any, **kwargs: Any) -> Any:
        num_calls[name] += 1
        if name in _SHAPELESS:
            return stand_in(*args, **kwargs)
        asked = {key: value for key, value in kwargs.items() if key not in _PLACES}
        meta_args, meta_kwargs = pytree.tree_map_only(torch.Tensor, _on_meta, (args, asked))
        expected = getattr(torch.ops.npu, name)(*meta_args, **meta_kwargs)
        result = stand_in(*args, **kwargs)
        shapes = [[(t.shape, t.dtype) for t in pytree.tree_leaves(r) if t is not None] for r in (result, expected)]
        if name in OVERLOADS:  # whose last result is a mere place
            shapes = [shape[:-1] for shape in shapes]
        assert shapes[0] == shapes[1], f"{name}: the stand-in gives {shapes[0]}, the wheel says {shapes[1]}"
        return result

    return call


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
