"""`kernels.gated_delta.ops` on Ascend NPUs by the kernels for vector cores alone: as `triton_ascend`, but prompts are
walked token by token whatever their length. For devices on which a kernel for chunks fails. Not verified on an NPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from kernels.contract import Contract
from kernels.gated_delta import triton_ascend


def prefill(
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    query_start_loc: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    query_starts: Sequence[int] | None,  # noqa: ARG001 -- what says which sequences go to chunks
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_prefill`. What `triton_ascend.refuses` names must have been kept away."""
    where = (query_start_loc, state_indices, has_initial_state)
    return triton_ascend.prefill(qkv, b, a, a_log, dt_bias, states, *where, None, sources)


def decode(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    taps: torch.Tensor,
    conv_states: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    states: torch.Tensor,
    state_indices: torch.Tensor,
    eps: float,
    sources: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.gated_delta_decode`, and above."""
    parts = (a_log, dt_bias, norm_weight, states, state_indices, eps, sources)
    return triton_ascend.decode(qkv, z, b, a, taps, conv_states, *parts)


CONTRACT = Contract(
    refuses=triton_ascend.refuses,
    warm_up=partial(triton_ascend.warm_up_with, prefill),
    compiled_count=triton_ascend.compiled_count,
    replayable=True,
)
