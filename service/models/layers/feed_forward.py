"""Feed-forwards, which work on each token by itself, in the layers of a `ModelSpec`."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.expert_lora import ops as expert_lora_ops
from kernels.experts import ops as expert_ops
from kernels.experts.ops import ExpertAdapters, experts, route
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.swiglu import ops as swiglu_ops
from service.models.layers.projection import Projection, RowSource
from service.models.layers.weights import Weights
from service.models.spec.model_spec import MlpSpec, ModelSpec, MoeSpec


class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up packed."""

    def __init__(self, weights: Weights, prefix: str, mlp: MlpSpec) -> None:
        """prefix  of its modules' names, "model.layers.3.mlp" for example"""
        self._gate_up = weights.projection(f"{prefix}.{mlp.packed}")
        self._down = weights.projection(f"{prefix}.{mlp.output}")
        self._activation = mlp.activation

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "gated", self._down.weight.in_features

    def warm_up(self) -> None:
        """Compile what steps of any size need here."""
        weight = self._down.weight
        swiglu_ops.warm_up(weight.in_features, weight.dtype, weight.data.device, self._activation)

    @property
    def fused_stack(self) -> LoraStack | None:
        """LoRA rows that may be expanded in the kernel that computes the gate: see `Projection.swiglu`."""
        stack = self._gate_up.stack
        return stack if stack is not None and self._activation == "silu" and len(stack.b) == 2 else None

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        gated = self._gate_up.swiglu(x, lora, window_rows, self._activation)
        return self._down(gated, lora, window_rows)


class MixtureOfExperts:
    """The weighted sum of the experts that the router chose for each token, plus shared(x), or
    sigmoid(gate(x)) * shared(x)."""

    def __init__(self, weights: Weights, prefix: str, moe: MoeSpec, spec: ModelSpec) -> None:
        """prefix  before the names of the layer's modules, "model.layers.3." for example"""
        name = prefix + moe.name
        self._router: Projection | torch.Tensor  # with a correction float32 [num_experts, hidden_size]
        self._correction: torch.Tensor | None = None
        if moe.correction is None:
            self._router = weights.projection(f"{name}.{moe.router}")
        else:
            self._router = weights.exact(f"{name}.{moe.router}.weight")
            self._correction = weights.exact(f"{name}.{moe.correction}")
        self._experts = weights.experts(f"{name}.{moe.experts}", moe, spec.hidden_size)
        self._stacks: tuple[LoraStack, LoraStack] | None = None
        self._expert_names = [prefix + linear.name for linear in moe.expert_linears(spec.hidden_size)]
        self._shared = None if moe.shared is None else GatedMlp(weights, prefix + moe.shared.name, moe.shared)
        has_gate = moe.shared is not None and moe.shared_gate is not None
        self._shared_gate = weights.projection(f"{name}.{moe.shared_gate}") if has_gate else None
        self._spec = moe

    def bind_rows(self, rows: RowSource) -> None:
        """Bind the LoRA rows of the experts."""
        gate_up, down = map(rows.stack, self._expert_names)
        self._stacks = gate_up, down

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "experts", self._spec, self._experts.holds_codes

    def warm_up(self) -> None:
        """Compile what steps of any size need here."""
        packed = self._experts
        router = self._router if isinstance(self._router, torch.Tensor) else self._router.weight.data
        expert_ops.warm_up(packed, self._spec.num_chosen)
        swiglu_ops.warm_up(packed.size, packed.dtype, router.device, packed.activation)
        if self._stacks is not None:
            expert_lora_ops.warm_up(self._stacks, packed.dtype, packed.num_experts)
        if self._shared is not None:
            self._shared.warm_up()

    @property
    def fused_stack(self) -> LoraStack | None:
        """LoRA rows that may be expanded in the kernel that computes the gate: see `Projection.swiglu`."""
        return None if self._shared is None else self._shared.fused_stack

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        if isinstance(self._router, torch.Tensor):
            logits = functional.linear(x.float(), self._router)
        else:
            logits = self._router(x, lora, window_rows)
        chosen, weights = route(
            logits,
            self._spec.num_chosen,
            normalises=self._spec.normalises,
            correction=self._correction,
            scale=self._spec.scale,
        )
        adapters = None
        if lora is not None and lora.has_experts:
            assert self._stacks is not None, "experts have no rows, but adapters of the step have"
            adapters = ExpertAdapters(*self._stacks, lora)
        out = experts(x, chosen, weights.to(x.dtype), self._experts, adapters)
        if self._shared is None:
            return out
        if self._shared_gate is None:
            return out + self._shared(x, lora, window_rows)
        gate = torch.sigmoid(self._shared_gate(x, lora, window_rows))
        return out + gate * self._shared(x, lora, window_rows)


FeedForwardLayer = GatedMlp | MixtureOfExperts


def build_feed_forward(weights: Weights, prefix: str, layer: MlpSpec | MoeSpec, spec: ModelSpec) -> FeedForwardLayer:
    """prefix  before the names of the layer's modules, "model.layers.3." for example"""
    if isinstance(layer, MoeSpec):
        return MixtureOfExperts(weights, prefix, layer, spec)
    return GatedMlp(weights, prefix + layer.name, layer)
