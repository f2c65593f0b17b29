"""The argument checks of the causal convolution ops: shapes, strides, types; no device is waited for."""

from __future__ import annotations

import torch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MIN_WIDTH, MAX_WIDTH = 2, 8


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor | None,
    gate_in: torch.Tensor | None,
    gate_out: torch.Tensor | None,
    out: torch.Tensor | None,
    activation: str | bool | None,
) -> None:
    expect(activation in (None, False, True, "silu", "swish"), f"activation {activation!r} is neither None nor 'silu'")
    dim = x.shape[-1]
    expect(x.dtype in _DTYPES, f"x is {x.dtype}; supported are float32, float16 and bfloat16")
    for name, like_x in (("x", x), ("gate_in", gate_in), ("gate_out", gate_out), ("out", out)):
        if like_x is None:
            continue
        expect(
            like_x.shape == x.shape and like_x.dtype == x.dtype,
            f"{name} is {list(like_x.shape)} {like_x.dtype}, but x is {list(x.shape)} {x.dtype}",
        )
        expect(like_x.stride(-1) == 1 or dim <= 1, f"the channels of {name} must be contiguous")
        if like_x.dim() == 3 and like_x.shape[1] > 1:
            expect(
                like_x.shape[0] <= 1 or like_x.stride(0) == like_x.shape[1] * like_x.stride(1),
                f"the tokens of {name} must be rows of one stride",
            )
    expect(
        weight.dim() == 2 and weight.shape[1] == dim and MIN_WIDTH <= weight.shape[0] <= MAX_WIDTH,
        f"weight is {list(weight.shape)}; it must be [width, {dim}] with width {MIN_WIDTH} to {MAX_WIDTH}",
    )
    expect(weight.is_contiguous(), "weight must be contiguous")
    expect(bias is None or (bias.shape == (dim,) and bias.is_contiguous()), f"bias must be [{dim}]")
    if conv_states is not None:
        expect(
            conv_states.dim() == 3 and conv_states.shape[2] == dim and conv_states.shape[1] >= weight.shape[0] - 1,
            f"conv_states is {list(conv_states.shape)}; it must be [lines, at least {weight.shape[0] - 1}, {dim}]",
        )
        expect(conv_states.stride(2) == 1 or dim <= 1, "the channels of conv_states must be contiguous")
        expect(conv_states.dtype in _DTYPES, f"conv_states is {conv_states.dtype}")


def check_lines(
    conv_states: torch.Tensor | None, state_indices: torch.Tensor | None, num_sequences: int, *, is_paged: bool
) -> None:
    if state_indices is None:
        expect(not is_paged, "the block indices of the prefix cache need state_indices [sequences, blocks]")
        expect(
            conv_states is None or conv_states.shape[0] >= num_sequences,
            f"without state_indices each of {num_sequences} sequences needs a line of its own",
        )
        return
    expect(conv_states is not None, "state_indices without conv_states")
    shape = "[sequences, blocks]" if is_paged else "[sequences]"
    expect(
        state_indices.dim() == (2 if is_paged else 1) and state_indices.shape[0] == num_sequences,
        f"state_indices is {list(state_indices.shape)}; it must be {shape} for {num_sequences} sequences",
    )
    expect(state_indices.dtype in (torch.int32, torch.int64), f"state_indices is {state_indices.dtype}, not int32")
    expect(not is_paged or state_indices.stride(1) == 1, "the blocks of a sequence must be contiguous in state_indices")


def check_indices(num_sequences: int, **indices: torch.Tensor | None) -> None:
    for name, value in indices.items():
        if value is None:
            continue
        expect(
            value.shape == (num_sequences,), f"{name} is {list(value.shape)}, which is not [{num_sequences}] sequences"
        )
        wanted = (torch.bool,) if name == "has_initial_state" else (torch.int32, torch.int64)
        expect(value.dtype in wanted, f"{name} is {value.dtype}; it must be {wanted[0]}")
        expect(value.is_contiguous(), f"{name} must be contiguous")
