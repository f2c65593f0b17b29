"""Feed-forwards, which work on each token by itself, in the layers of a `ModelSpec`."""

from __future__ import annotations

import torch

from kernels.experts.ops import experts, route
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.swiglu import ops as swiglu_ops
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
    """The weighted sum of the experts that the router chose for each token, plus sigmoid(gate(x)) * shared(x)."""

    def __init__(self, weights: Weights, prefix: str, moe: MoeSpec, spec: ModelSpec) -> None:
        """prefix  before the names of the layer's modules, "model.layers.3." for example"""
        name = prefix + moe.name
        self._router = weights.projection(f"{name}.{moe.router}")
        self._experts = weights.experts(f"{name}.{moe.experts}", moe.num_experts, moe.size, spec.hidden_size)
        self._shared = None if moe.shared is None else GatedMlp(weights, prefix + moe.shared.name, moe.shared)
        self._shared_gate = None if moe.shared is None else weights.projection(f"{name}.{moe.shared_gate}")
        self._spec = moe

    @property
    def form(self) -> object:
        """Equal for layers that need the same kernels."""
        return "experts", self._spec

    def warm_up(self) -> None:
        """Compile what steps of any size need here."""
        packed = self._experts
        swiglu_ops.warm_up(packed.size, packed.dtype, self._router.weight.data.device)
        if self._shared is not None:
            self._shared.warm_up()

    @property
    def fused_stack(self) -> LoraStack | None:
        """LoRA rows that may be expanded in the kernel that computes the gate: see `Projection.swiglu`."""
        return None if self._shared is None else self._shared.fused_stack

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        logits = self._router(x, lora, window_rows)
        chosen, weights = route(logits, self._spec.num_chosen, normalises=self._spec.normalises)
        out = experts(x, chosen, weights, self._experts)
        if self._shared is None or self._shared_gate is None:
            return out
        gate = torch.sigmoid(self._shared_gate(x, lora, window_rows))
        return out + gate * self._shared(x, lora, window_rows)


FeedForwardLayer = GatedMlp | MixtureOfExperts


def build_feed_forward(weights: Weights, prefix: str, layer: MlpSpec | MoeSpec, spec: ModelSpec) -> FeedForwardLayer:
    """prefix  before the names of the layer's modules, "model.layers.3." for example"""
    if isinstance(layer, MoeSpec):
        return MixtureOfExperts(weights, prefix, layer, spec)
    return GatedMlp(weights, prefix + layer.name, layer)
