"""Feed-forwards, which work on each token by itself, in the layers of a `ModelSpec`.

x [tokens, hidden_size] is the norm of the residual stream, and `stream` that itself; both are read only.
"""

from __future__ import annotations

import torch

from kernels.expert_lora import ops as expert_lora_ops
from kernels.experts import ops as expert_ops
from kernels.experts.ops import ExpertAdapters, experts, route
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.rms_norm.ops import rms_norm
from kernels.swiglu import ops as swiglu_ops
from service.models.layers.mixers import RmsNorm
from service.models.layers.projection import RowSource
from service.models.layers.weights import Weights
from service.models.spec.model_spec import MlpSpec, ModelSpec, MoeSpec, StreamSpec


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

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        """Norms of hidden states inside."""
        return ()

    def __call__(self, x: torch.Tensor, stream: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        del stream
        gated = self._gate_up.swiglu(x, lora, window_rows, self._activation)
        return self._down(gated, lora, window_rows)


class _StreamInputs:
    """Norms and scales of `StreamSpec`."""

    def __init__(self, weights: Weights, prefix: str, stream: StreamSpec, spec: ModelSpec) -> None:
        names = (stream.norm, stream.end_norm, stream.shared_end_norm)
        self.norm, self.end_norm, self.shared_end_norm = (RmsNorm(weights, prefix + name, spec) for name in names)
        self.norms = (self.norm, self.end_norm, self.shared_end_norm)
        self.expert_scales = weights.exact(prefix + stream.expert_scales)
        self._router_weight = weights.exact(prefix + stream.router_scale).mul_(spec.hidden_size**-0.5)
        self._eps = spec.norm_eps

    def of_router(self, stream: torch.Tensor) -> torch.Tensor:
        """The router's input, fresh [tokens, hidden_size]."""
        return rms_norm(stream, self._router_weight, self._eps)


class MixtureOfExperts:
    """The weighted sum of the experts that the router chose for each token, plus shared(x), or
    sigmoid(gate(x)) * shared(x)."""

    def __init__(self, weights: Weights, prefix: str, moe: MoeSpec, spec: ModelSpec) -> None:
        """prefix  before the names of the layer's modules, "model.layers.3." for example"""
        self._correction = None if moe.correction is None else weights.exact(prefix + moe.correction)
        self._router = weights.projection(prefix + moe.router, is_exact=self._correction is not None)
        self._experts = weights.experts(prefix + moe.experts, moe, spec.hidden_size)
        self._stacks: tuple[LoraStack, LoraStack] | None = None
        self._expert_names = [prefix + linear.name for linear in moe.expert_linears(spec.hidden_size)]
        self._shared = None if moe.shared is None else GatedMlp(weights, prefix + moe.shared.name, moe.shared)
        gate = None if moe.shared is None else moe.shared_gate
        self._shared_gate = None if gate is None else weights.projection(prefix + gate)
        self._spec = moe
        self._stream = None if moe.stream is None else _StreamInputs(weights, prefix, moe.stream, spec)

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        """Norms of hidden states inside."""
        return () if self._stream is None else self._stream.norms

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
        expert_ops.warm_up(packed, self._spec.num_chosen)
        swiglu_ops.warm_up(packed.size, packed.dtype, self._router.weight.data.device, packed.activation)
        if self._stacks is not None:
            expert_lora_ops.warm_up(self._stacks, packed.dtype, packed.num_experts)
        if self._shared is not None:
            self._shared.warm_up()

    @property
    def fused_stack(self) -> LoraStack | None:
        """LoRA rows that may be expanded in the kernel that computes the gate: see `Projection.swiglu`."""
        return None if self._shared is None else self._shared.fused_stack

    def __call__(self, x: torch.Tensor, stream: torch.Tensor, lora: LoraMaps | None, window_rows: int) -> torch.Tensor:
        if self._stream is None:
            out = self._routed(x, x, lora, window_rows)
        else:
            of_router, of_experts = self._stream.of_router(stream), self._stream.norm(stream, lora)
            out = self._stream.end_norm(self._routed(of_router, of_experts, lora, window_rows), lora)
        if self._shared is None:
            return out
        shared = self._shared(x, stream, lora, window_rows)
        if self._stream is not None:
            shared = self._stream.shared_end_norm(shared, lora)
        if self._shared_gate is not None:
            shared = torch.sigmoid(self._shared_gate(x, lora, window_rows)) * shared
        return out + shared

    def _routed(
        self, of_router: torch.Tensor, x: torch.Tensor, lora: LoraMaps | None, window_rows: int
    ) -> torch.Tensor:
        """The weighted sum of each token's experts of x; of_router decides on these."""
        chosen, weights = route(
            self._router(of_router, lora, window_rows),
            self._spec.num_chosen,
            normalises=self._spec.normalises,
            correction=self._correction,
            scale=self._spec.scale,
            expert_scales=None if self._stream is None else self._stream.expert_scales,
        )
        adapters = None
        if lora is not None and lora.has_experts:
            assert self._stacks is not None, "experts have no rows, but adapters of the step have"
            adapters = ExpertAdapters(*self._stacks, lora)
        return experts(x, chosen, weights.to(x.dtype), self._experts, adapters)


FeedForwardLayer = GatedMlp | MixtureOfExperts


def build_feed_forward(weights: Weights, prefix: str, layer: MlpSpec | MoeSpec, spec: ModelSpec) -> FeedForwardLayer:
    """prefix  before the names of the layer's modules, "model.layers.3." for example"""
    if isinstance(layer, MoeSpec):
        return MixtureOfExperts(weights, prefix, layer, spec)
    return GatedMlp(weights, prefix + layer.name, layer)
