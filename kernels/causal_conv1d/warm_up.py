"""The calls that make a device compile every kernel a layer can need; implementations that compile run them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from kernels.causal_conv1d.call import PrefillCall, UpdateCall


def warm_up_calls(
    prefill_tokens: Iterable[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    *,
    activation: str | bool | None,
    gated: bool,
    drafts: bool,
    paged: bool,
    x_dtype: torch.dtype,
    x_columns: int | None = None,
) -> Iterator[PrefillCall | UpdateCall]:
    """The calls that `warm_up` makes: all of one sequence, which is padding; its arguments are those of `ops.warm_up`.

    prefill_tokens  token counts that reach, between them, every variant of the prefill kernel
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=weight.device)

    dim = weight.shape[1]

    def tokens(*shape: int) -> dict[str, Any]:
        columns = zeros(*shape, 3 * dim if gated else x_columns or dim, dtype=x_dtype)
        gate_in, gate_out, x = columns.chunk(3, dim=-1) if gated else (None, None, columns[..., :dim])
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return {"x": x, "gate_in": gate_in, "gate_out": gate_out, "out": out}

    block = zeros(1) if paged else None
    every: dict[str, Any] = {
        "weight": weight,
        "bias": bias,
        "conv_states": conv_states,
        "activation": activation,
        "state_indices": zeros(1, 1) if paged else zeros(1),
        "initial_state_idx": block,
        "block_idx_last_scheduled_token": block,
        "pad_slot_id": -1,
        "query_starts": None,
    }
    for num_tokens in prefill_tokens:
        starts = zeros(2)
        starts[1] = num_tokens
        yield PrefillCall(
            **every,
            **tokens(num_tokens),
            query_start_loc=starts,
            has_initial_state=zeros(1, dtype=torch.bool),
            block_idx_first_scheduled_token=block,
            num_computed_tokens=block,
            block_size_tokens=1 if paged else None,
        )
    plain: dict[str, Any] = {"query_start_loc": None, "max_query_len": None}
    yield UpdateCall(**every, **tokens(1), **plain, num_accepted_tokens=None)
    if drafts:
        yield UpdateCall(**every, **tokens(1), **plain, num_accepted_tokens=zeros(1) + 1)
        starts = zeros(2)
        starts[1] = 1
        for form, shape in ((plain, (1, 1)), ({"query_start_loc": starts, "max_query_len": 1}, (1,))):
            for accepted in (None, starts[1:]):
                yield UpdateCall(**every, **tokens(*shape), **form, num_accepted_tokens=accepted)
