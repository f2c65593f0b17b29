"""One call of an op, made once by `ops.py` and handed to the implementations; and how Triton kernels are launched.

`ops.py` says what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# The state line of nobody: nothing is read from it, and nothing kept in it.
NULL_LINE = 0


@dataclass(frozen=True, kw_only=True)
class _Call:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    conv_states: torch.Tensor | None
    state_indices: torch.Tensor | None
    activation: str | bool | None
    gate_in: torch.Tensor | None
    gate_out: torch.Tensor | None
    out: torch.Tensor
    query_start_loc: torch.Tensor | None
    initial_state_idx: torch.Tensor | None
    block_idx_last_scheduled_token: torch.Tensor | None
    pad_slot_id: int | None
    source_state_indices: torch.Tensor | None = None
    query_starts: Sequence[int] | None

    @property
    def sources(self) -> torch.Tensor | None:
        """Where initial states are read, like state_indices: with the block indices, of the block that they name."""
        return self.state_indices if self.source_state_indices is None else self.source_state_indices

    @property
    def num_sequences(self) -> int:
        return self.x.shape[0] if self.query_start_loc is None else self.query_start_loc.shape[0] - 1

    @property
    def dim(self) -> int:
        return self.x.shape[-1]

    @property
    def num_tokens(self) -> int:
        return self.x.numel() // max(self.dim, 1)

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    @property
    def has_silu(self) -> bool:
        return self.activation in ("silu", "swish", True)

    @property
    def is_in_place(self) -> bool:
        return self.out.data_ptr() == self.x.data_ptr()

    @property
    def is_gated(self) -> bool:
        return self.gate_in is not None or self.gate_out is not None


@dataclass(frozen=True, kw_only=True)
class PrefillCall(_Call):
    """Arguments of `ops.causal_conv1d_prefill`, checked; `out` is there."""

    query_start_loc: torch.Tensor
    has_initial_state: torch.Tensor | None
    block_idx_first_scheduled_token: torch.Tensor | None
    num_computed_tokens: torch.Tensor | None
    block_size_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class UpdateCall(_Call):
    """Arguments of `ops.causal_conv1d_update`, checked; `out` is there, and `max_query_len` with query_start_loc."""

    conv_states: torch.Tensor
    max_query_len: int | None
    num_accepted_tokens: torch.Tensor | None

    @property
    def tokens_each(self) -> int:
        """Tokens of a sequence, with query_start_loc at most."""
        if self.max_query_len is not None:
            return self.max_query_len
        return 1 if self.x.dim() == 2 else self.x.shape[1]


@dataclass(frozen=True)
class ConvLaunch:
    """A Triton kernel, its grid, all of its arguments by name, and compile options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Launch it."""
        self.kernel[self.grid](**self.arguments, **self.options)


def kernel_arguments(call: PrefillCall | UpdateCall) -> dict[str, Any]:
    """The run-time arguments that the kernels of all devices share, by the names of their parameters."""
    states = call.conv_states
    return {
        "x_ptr": call.x,
        "weight_ptr": call.weight,
        "bias_ptr": call.bias,
        "states_ptr": states,
        "gate_in_ptr": call.gate_in,
        "gate_out_ptr": call.gate_out,
        "out_ptr": call.out,
        "starts_ptr": call.query_start_loc,
        "lines_ptr": call.state_indices,
        "sources_ptr": call.sources,
        "source_block_ptr": call.initial_state_idx,
        "last_block_ptr": call.block_idx_last_scheduled_token,
        "num_tokens": call.num_tokens,
        "num_sequences": call.num_sequences,
        "pad_slot": 0 if call.pad_slot_id is None else call.pad_slot_id,
        "stride_lines": 0 if call.state_indices is None else call.state_indices.stride(0),
        "dim": call.dim,
        "stride_x": row_stride(call.x),
        "stride_gate_in": row_stride(call.gate_in),
        "stride_gate_out": row_stride(call.gate_out),
        "stride_out": row_stride(call.out),
        "stride_line": 0 if states is None else states.stride(0),
        "stride_row": 0 if states is None else states.stride(1),
        "WIDTH": call.width,
        "SILU": call.has_silu,
        "IN_PLACE": call.is_in_place,
        **_arguments_of_one_op(call),
    }


def _arguments_of_one_op(call: PrefillCall | UpdateCall) -> dict[str, Any]:
    if isinstance(call, UpdateCall):
        return {"accepted_ptr": call.num_accepted_tokens}
    return {
        "initial_ptr": call.has_initial_state,
        "first_block_ptr": call.block_idx_first_scheduled_token,
        "computed_ptr": call.num_computed_tokens,
        "block_size_tokens": call.block_size_tokens or 0,
    }


def row_stride(tensor: torch.Tensor | None) -> int:
    """Distance of two tokens in a [tokens, dim] or [sequences, tokens, dim] tensor."""
    if tensor is None:
        return 0
    return tensor.stride(0) if tensor.dim() == 2 or tensor.shape[1] == 1 else tensor.stride(1)
