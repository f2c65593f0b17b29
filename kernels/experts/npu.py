"""`kernels.experts.ops` with torch_npu's grouped matrix products: two for all experts, whatever tokens choose. Not
verified on an NPU.

How many tokens each expert has stays on the device, so no call waits for it, and a captured call does what a new one
would.
"""

from __future__ import annotations

import torch
import torch_npu

from kernels.contract import Contract
from kernels.expert_lora.ops import Pairs
from kernels.experts.ops import ExpertAdapters, PackedExperts
from kernels.shapes import ProbeShapes
from kernels.swiglu.ops import swiglu

_MAX_EXPERTS = 1024
# The last dimension of inputs and weights is below this.
_INNER_LIMIT = 65_536
# Constants of `npu_grouped_matmul`: one result, groups of rows, and numbers of rows instead of their running sum.
_ONE_RESULT, _ROWS, _COUNTS = 2, 0, 1
# Constants of `npu_moe_init_routing_v2`: numbers of rows, and no quantisation.
_COUNT_TOKENS, _NOT_QUANTISED = 1, -1


def pack_experts(gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
    """Keep the weights as they are: the products read them transposed."""
    num_experts, hidden_size, size = down.shape
    nbytes = gate_up.nbytes + down.nbytes
    return PackedExperts(gate_up, down, down.dtype, num_experts, hidden_size, size, "npu", nbytes)


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    packed: PackedExperts,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `ops.experts`."""
    assert packed.biases is None, "experts have no biases"
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        chosen.to(torch.int32),
        active_num=chosen.numel(),
        expert_num=packed.num_experts,
        expert_tokens_num_type=_COUNT_TOKENS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, packed.num_experts],
        quant_mode=_NOT_QUANTISED,
    )
    gate_up = _multiply(rows, packed.gate_up, counts)
    if adapters is None:
        out = _multiply(swiglu(gate_up, packed.activation), packed.down, counts)
    else:
        order = places.argsort()
        pairs = Pairs(chosen.flatten().index_select(0, order), order // chosen.shape[1], packed.num_experts)
        adapters.add_gate_up(rows, gate_up, pairs)
        gated = swiglu(gate_up, packed.activation)
        out = _multiply(gated, packed.down, counts)
        adapters.add_down(gated, out, pairs)
    # places: of each pair, token by token, its row among those that are sorted by expert.
    by_token = out.index_select(0, places).unflatten(0, weights.shape)
    return (weights.unsqueeze(1) @ by_token).squeeze(1)


def _multiply(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The rows of each expert by its weights [num_experts, out, in]; counts int64 [num_experts]."""
    product: list[torch.Tensor] = torch_npu.npu_grouped_matmul(
        [rows],
        [weights.transpose(1, 2)],
        group_list=counts,
        split_item=_ONE_RESULT,
        group_type=_ROWS,
        group_list_type=_COUNTS,
    )
    return product[0]


def _refuses(shapes: ProbeShapes) -> str | None:
    if shapes.experts is None:
        return None
    if shapes.has_expert_biases:
        return "it adds no biases of experts"
    num_experts, _, size = shapes.experts
    if num_experts > _MAX_EXPERTS:
        return f"it takes at most {_MAX_EXPERTS} experts, not {num_experts}"
    if max(shapes.hidden_size, 2 * size) >= _INNER_LIMIT:
        return f"it takes rows of less than {_INNER_LIMIT} numbers"
    return None


CONTRACT = Contract(refuses=_refuses, replayable=True)
