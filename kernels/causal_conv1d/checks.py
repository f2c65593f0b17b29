"""The argument checks of the causal convolution ops: shapes, strides, types; no device is waited for."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.attention_maps import QueryStarts
from kernels.causal_conv1d.call import PrefillCall, UpdateCall, row_stride

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ACTIVATIONS = (None, False, True, "silu", "swish")
MIN_WIDTH, MAX_WIDTH = 2, 8


def check_prefill(call: PrefillCall) -> None:
    """Raises ValueError for what `ops.causal_conv1d_prefill` does not take."""
    _expect(call.x.dim() == 2, f"x must be [tokens, dim], not {list(call.x.shape)}")
    _check_tensors(call)
    _check_starts(call)
    _expect(call.has_initial_state is None or call.conv_states is not None, "has_initial_state without conv_states")
    _check_indices(call.num_sequences, has_initial_state=call.has_initial_state)
    blocks = {
        "initial_state_idx": call.initial_state_idx,
        "block_idx_first_scheduled_token": call.block_idx_first_scheduled_token,
        "block_idx_last_scheduled_token": call.block_idx_last_scheduled_token,
        "num_computed_tokens": call.num_computed_tokens,
    }
    _check_indices(call.num_sequences, **blocks)
    given = [name for name, value in blocks.items() if value is not None]
    _expect(len(given) in (0, len(blocks)), f"the prefix-cache form needs all of {sorted(blocks)}, got only {given}")
    block_size = call.block_size_tokens
    _expect(bool(given) == (block_size is not None), "block_size_tokens belongs to the prefix-cache form only")
    _expect(block_size is None or block_size > 0, f"block_size_tokens {block_size} must be positive")
    _check_lines(call)


def check_update(call: UpdateCall) -> None:
    """Raises ValueError for what `ops.causal_conv1d_update` does not take."""
    shape = list(call.x.shape)
    if call.query_start_loc is None:
        _expect(call.x.dim() in (2, 3), f"x must be [sequences, dim] or [sequences, tokens, dim], not {shape}")
        _expect(call.max_query_len is None, "max_query_len belongs to query_start_loc")
    else:
        _expect(call.x.dim() == 2, f"with query_start_loc x must be [tokens, dim], not {shape}")
        _expect(call.max_query_len is not None, "query_start_loc needs max_query_len, the most tokens any sequence has")
    _check_tensors(call)
    starts = _check_starts(call)
    if starts is not None and call.max_query_len is not None:
        longest = max((end - start for start, end in pairwise(starts)), default=0)
        _expect(
            longest <= call.max_query_len, f"max_query_len is {call.max_query_len}, but a sequence has {longest} tokens"
        )
    _expect(
        (call.block_idx_last_scheduled_token is None) == (call.initial_state_idx is None),
        "initial_state_idx and block_idx_last_scheduled_token belong together: give both or neither",
    )
    _check_indices(
        call.num_sequences,
        num_accepted_tokens=call.num_accepted_tokens,
        initial_state_idx=call.initial_state_idx,
        block_idx_last_scheduled_token=call.block_idx_last_scheduled_token,
    )
    _check_lines(call)
    needed = call.width - 1 if call.num_accepted_tokens is None else call.width - 2 + max(call.tokens_each, 1)
    kept = call.conv_states.shape[1]
    _expect(
        kept >= needed, f"conv_states keeps {kept} tokens a line, but {call.tokens_each} draft tokens need {needed}"
    )


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_tensors(call: PrefillCall | UpdateCall) -> None:
    _expect(call.activation in _ACTIVATIONS, f"activation {call.activation!r} is neither None nor 'silu'")
    x, dim = call.x, call.dim
    _expect(x.dtype in _DTYPES, f"x is {x.dtype}; supported are float32, float16 and bfloat16")
    for name, like_x in (("x", x), ("gate_in", call.gate_in), ("gate_out", call.gate_out), ("out", call.out)):
        if like_x is None:
            continue
        _expect(
            like_x.shape == x.shape and like_x.dtype == x.dtype,
            f"{name} is {list(like_x.shape)} {like_x.dtype}, but x is {list(x.shape)} {x.dtype}",
        )
        _expect(like_x.stride(-1) == 1 or dim <= 1, f"the channels of {name} must be contiguous")
        if like_x.dim() == 3 and like_x.shape[1] > 1:
            _expect(
                like_x.shape[0] <= 1 or like_x.stride(0) == like_x.shape[1] * like_x.stride(1),
                f"the tokens of {name} must be rows of one stride",
            )
    weight, bias = call.weight, call.bias
    _expect(
        weight.dim() == 2 and weight.shape[1] == dim and MIN_WIDTH <= weight.shape[0] <= MAX_WIDTH,
        f"weight is {list(weight.shape)}; it must be [width, {dim}] with width {MIN_WIDTH} to {MAX_WIDTH}",
    )
    _expect(weight.is_contiguous(), "weight must be contiguous")
    _expect(weight.dtype in _DTYPES, f"weight is {weight.dtype}")
    _expect(bias is None or (bias.shape == (dim,) and bias.is_contiguous()), f"bias must be [{dim}]")
    _expect(bias is None or bias.dtype in _DTYPES, f"bias is {'' if bias is None else bias.dtype}")
    states = call.conv_states
    if states is not None:
        _expect(
            states.dim() == 3 and states.shape[2] == dim and states.shape[1] >= call.width - 1,
            f"conv_states is {list(states.shape)}; it must be [lines, at least {call.width - 1}, {dim}]",
        )
        _expect(states.stride(2) == 1 or dim <= 1, "the channels of conv_states must be contiguous")
        _expect(states.dtype in _DTYPES, f"conv_states is {states.dtype}")


def check_out(call: PrefillCall | UpdateCall) -> None:
    """Raises ValueError where the caller's `out` overlaps what the op still reads: programs run in any order."""
    x, out, dim = call.x, call.out, call.dim
    num_tokens = x.numel() // dim if dim else 0
    if num_tokens == 0:
        return
    size, start, stride = out.element_size(), out.data_ptr(), row_stride(out)
    end = start + ((num_tokens - 1) * stride + dim) * size
    for name, other in (("x", x), ("gate_in", call.gate_in), ("gate_out", call.gate_out)):
        if other is None:
            continue
        begin = other.data_ptr()
        if begin >= end or begin + ((num_tokens - 1) * row_stride(other) + dim) * size <= start:
            continue
        if name == "x" and begin == start and out.stride() == x.stride():
            continue
        # Different columns of one packed tensor interleave, and share nothing.
        if stride and row_stride(other) == stride and dim <= (begin - start) // size % stride <= stride - dim:
            continue
        raise ValueError(f"out shares memory with {name}; it must be x itself or lie elsewhere")


def _check_starts(call: PrefillCall | UpdateCall) -> QueryStarts | None:
    """Their values too, where that waits for nothing; kernels trust them elsewhere. Returns them, None if not known."""
    starts, host = call.query_start_loc, call.query_starts
    if starts is None:
        _expect(host is None, "query_starts mirrors query_start_loc, which is not there")
        return None
    _check_indices(call.num_sequences, query_start_loc=starts[1:])
    _expect(host is None or len(host) == call.num_sequences + 1, "query_starts must mirror query_start_loc")
    if host is None:
        if starts.device.type != "cpu":
            return None
        host = starts.tolist()
    known = host if isinstance(host, QueryStarts) else QueryStarts(host)
    _expect(
        known.num_tokens <= call.num_tokens,
        f"query_start_loc goes to {known.num_tokens}; it must stay within {call.num_tokens} tokens",
    )
    return known


def _check_lines(call: PrefillCall | UpdateCall) -> None:
    states, lines, num_sequences = call.conv_states, call.state_indices, call.num_sequences
    is_paged = call.block_idx_last_scheduled_token is not None
    if call.source_state_indices is not None:
        _expect(lines is not None and not is_paged, "source_state_indices belongs to state_indices [sequences]")
        _expect(lines is not None and lines.is_contiguous(), "state_indices must be contiguous beside its sources")
        _check_indices(num_sequences, source_state_indices=call.source_state_indices)
    if lines is None:
        _expect(not is_paged, "the block indices of the prefix cache need state_indices [sequences, blocks]")
        _expect(
            states is None or states.shape[0] >= num_sequences,
            f"without state_indices each of {num_sequences} sequences needs a line of its own",
        )
        return
    _expect(states is not None, "state_indices without conv_states")
    shape = "[sequences, blocks]" if is_paged else "[sequences]"
    _expect(
        lines.dim() == (2 if is_paged else 1) and lines.shape[0] == num_sequences,
        f"state_indices is {list(lines.shape)}; it must be {shape} for {num_sequences} sequences",
    )
    _expect(lines.dtype == torch.int32, f"state_indices is {lines.dtype}, not int32")
    _expect(not is_paged or lines.stride(1) == 1, "the blocks of a sequence must be contiguous in state_indices")


def _check_indices(num_sequences: int, **indices: torch.Tensor | None) -> None:
    for name, value in indices.items():
        if value is None:
            continue
        _expect(
            value.shape == (num_sequences,), f"{name} is {list(value.shape)}, which is not [{num_sequences}] sequences"
        )
        wanted = torch.bool if name == "has_initial_state" else torch.int32
        _expect(value.dtype == wanted, f"{name} is {value.dtype}; it must be {wanted}")
        _expect(value.is_contiguous(), f"{name} must be contiguous")
