"""From tensors of a checkpoint to what layers hold: converted, packed, placed, and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from adapters.layout import BaseLayout
from kernels.experts import ops as expert_ops
from kernels.experts.ops import PackedExperts
from kernels.linear.ops import pack_quantised, pack_weight, round_prompts
from kernels.linear.quantised import Quantised, dequantise, joined, quantise
from service.models.checkpoint.checkpoint import TensorSource
from service.models.layers.projection import ExactProjection, Projection
from service.models.spec.config_json import ModelError
from service.models.spec.model_spec import ModelSpec, MoeSpec

log = logging.getLogger(__name__)

WeightsKind = Literal["auto", "bf16", "fp8", "int8", "nf4"]


class Weights:
    """Reads one tensor after the other, so that loading needs little more memory than the loaded model.

    num_bytes    bytes handed out so far, as they are held
    projections  linear projections handed out so far, in order
    num_codes, num_held_codes
                 projections and layers of experts whose weights are quantised, and those of them that are held so
    num_rounding projections whose products of prompts round their inputs
    saves_memory see `kernels.linear.ops.pack_quantised`
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        spec: ModelSpec,
        layout: BaseLayout,
        dtype: torch.dtype,
        device: torch.device,
        kind: WeightsKind = "auto",
        *,
        rounds_prompts: bool = False,
        saves_memory: bool = False,
    ) -> None:
        """
        spec    shapes of the tensors
        layout  derived from it
        kind    of projections in layers: as the checkpoint has them, in the dtype, or quantised
        rounds_prompts
                see `kernels.linear.ops.round_prompts`
        """
        self._checkpoint = checkpoint
        self._shapes = spec.tensors(checkpoint)
        self._layout = {projection.name: projection for projection in layout.projections}
        self.dtype = dtype
        self.device = device
        self.num_bytes = 0
        self.projections: list[Projection] = []
        self.num_codes = self.num_held_codes = self.num_rounding = 0
        self._kind = kind
        self._rounds_prompts, self.saves_memory = rounds_prompts, saves_memory
        self._routers = {
            f"{spec.layer_prefix}{index}.{router}.weight"
            for index, layer in enumerate(spec.layers)
            for router in layer.mlp.routers
        }

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in the model's dtype, on its device, in memory of its own. Raises ModelError."""
        tensor = self._stored(name).to(self.device, self.dtype, copy=True)
        self.num_bytes += tensor.nbytes
        return tensor

    def exact(self, name: str) -> torch.Tensor:
        """The tensor in float32 whatever the model's dtype. Raises ModelError."""
        tensor = self._stored(name).to(self.device, torch.float32, copy=True)
        self.num_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str, *, zero_centred: bool, exact: bool = False) -> torch.Tensor:
        """The weight of a norm. One that is stored as its distance from 1 is held in float32, in which nothing of it is
        lost, and so is an exact one. Raises ModelError."""
        if zero_centred:
            return self.exact(f"{name}.weight").add_(1)
        return self.exact(f"{name}.weight") if exact else self.tensor(f"{name}.weight")

    def taps(self, name: str) -> torch.Tensor:
        """Taps of a depthwise convolution, [width, size] as the kernels read them; checkpoints hold [size, 1, width].
        Raises ModelError."""
        return self.tensor(f"{name}.weight").squeeze(1).t().contiguous()

    def projection(self, name: str, *, is_exact: bool = False) -> Projection:
        """The projection that the layout calls `name`, its slices packed into one product, with the biases that it has;
        an exact one has neither these nor several slices. Raises ModelError."""
        spec = self._layout[name]
        modules = [piece.module for piece in spec.slices]
        if is_exact:
            weight = self._stored(f"{name}.weight").to(self.device, torch.float32)
            return self._hold(ExactProjection(name, pack_weight(weight)))
        weights = [self._weight(f"{module}.weight", in_layer=spec.layer >= 0) for module in modules]
        biases = [self._stored(f"{module}.bias") for module in modules if f"{module}.bias" in self._shapes]
        bias = self._join(biases) if biases else None
        codes = joined([weight for weight in weights if isinstance(weight, Quantised)])
        if codes is None or codes.out_features != sum(piece.out_features for piece in spec.slices):
            floats = [dequantise(w, self.dtype) if isinstance(w, Quantised) else w for w in weights]
            return self._pack(name, self._join(floats), bias)
        packed = pack_quantised(codes.to(self.device), bias, self.dtype, saves_memory=self.saves_memory)
        if self._rounds_prompts:
            packed = round_prompts(packed)
            self.num_rounding += packed.rounds_prompts
        self.num_codes += 1
        self.num_held_codes += packed.holds_codes
        return self._hold(Projection(name, packed))

    def experts(self, name: str, moe: MoeSpec, hidden_size: int) -> PackedExperts:
        """The experts of a layer, which checkpoints hold one by one, or all in one tensor for gate and up and one for
        down. Raises ModelError."""
        shapes = dict(zip(("gate_up_proj", "down_proj"), moe.packed_shapes(hidden_size), strict=True))
        if moe.interleaved:
            return self._interleaved_experts(name, moe)
        is_apart = not all(f"{name}.{part}" in self._shapes for part in shapes)
        together = [] if is_apart else [self._stored(f"{name}.{part}") for part in shapes]
        first: Sequence[torch.Tensor | Quantised] = self._expert(name, 0) if is_apart else [one[0] for one in together]

        def each() -> Iterator[Sequence[torch.Tensor | Quantised]]:
            yield first
            for expert in range(1, moe.num_experts):
                yield self._expert(name, expert) if is_apart else [one[expert] for one in together]

        codes = self._expert_codes(name, each(), moe.num_experts)
        if codes is not None:
            return self._hold_experts(expert_ops.pack_quantised(*codes, self.dtype, activation=moe.activation), True)
        if is_apart:
            gate_up, down = (torch.empty(s, dtype=self.dtype, device=self.device) for s in shapes.values())
            for expert, weights in enumerate(each()):
                places = (*gate_up[expert].chunk(2), down[expert])
                for weight, place in zip(weights, places, strict=True):
                    place.copy_(dequantise(weight, self.dtype) if isinstance(weight, Quantised) else weight)
        else:
            gate_up, down = (self._join([whole]).contiguous() for whole in together)
        return self._hold_experts(expert_ops.pack_experts(gate_up, down, activation=moe.activation), False)

    def _expert(self, name: str, expert: int) -> list[torch.Tensor | Quantised]:
        """Gate, up and down of an expert that is stored by itself."""
        modules = (f"{name}.{expert}.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))
        return [self._checkpoint.weight(module, self._shapes[module]) for module in modules]

    def _expert_codes(
        self, name: str, each: Iterable[Sequence[torch.Tensor | Quantised]], num_experts: int
    ) -> tuple[list[Quantised], list[Quantised]] | None:
        """Gate and up, and down of each expert; None unless all are stored or wanted in codes of one form.

        each  the weights of an expert, whose last one is down
        """
        gate_up, down = (_Codes(num_experts, self.device) for _ in range(2))
        for weights in each:
            wanted = (self._wanted(name, weight) for weight in weights)
            codes = [code for code in wanted if isinstance(code, Quantised)]
            both = joined(codes[:-1])
            if len(codes) < len(weights) or both is None:
                return None
            gate_up.append(both)
            down.append(codes[-1])
        return gate_up.weights, down.weights

    def _interleaved_experts(self, name: str, moe: MoeSpec) -> PackedExperts:
        """Those of `MoeSpec.interleaved`."""

        def parted(tensor: torch.Tensor) -> torch.Tensor:
            """Rows of gate before those of up, [num_experts, 2 * size, ...]."""
            return torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)

        names = [f"{name}.{part}" for part in ("gate_up_proj", "down_proj")]
        biases = [self._join([self._stored(f"{one}_bias")]).clone() for one in names]
        of_both: dict[str, Any] = {"biases": (parted(biases[0]), biases[1]), "activation": moe.activation}
        gate_up, down = (self._checkpoint.weight(one, self._shapes[one]) for one in names)
        if isinstance(gate_up, Quantised) and isinstance(down, Quantised) and self._kind != "bf16":
            order = parted(torch.arange(gate_up.out_features).view(moe.num_experts, -1)).flatten()
            codes = _each(gate_up.rows(order).to(self.device), moe.num_experts)
            of_down = _each(down.to(self.device, copy=True), moe.num_experts)
            return self._hold_experts(expert_ops.pack_quantised(codes, of_down, self.dtype, **of_both), True)
        held = zip(names, (gate_up, down), strict=True)
        floats = (self._stored(one) if isinstance(weight, Quantised) else weight for one, weight in held)
        into, back = (self._join([weight]).transpose(1, 2) for weight in floats)
        each = ((parted(one[None])[0], other) for one, other in zip(into, back, strict=True))
        wanted = self._expert_codes(name, each, moe.num_experts)
        if wanted is not None:
            return self._hold_experts(expert_ops.pack_quantised(*wanted, self.dtype, **of_both), True)
        return self._hold_experts(expert_ops.pack_experts(parted(into), back.contiguous(), **of_both), False)

    def _hold_experts(self, packed: PackedExperts, is_quantised: bool) -> PackedExperts:
        self.num_bytes += packed.nbytes
        self.num_codes += is_quantised
        self.num_held_codes += packed.holds_codes
        return packed

    def tied_head(self, name: str, embedding: torch.Tensor) -> Projection:
        """A head that multiplies with the token embedding [vocabulary, hidden]; packed, so a copy of it.

        Where the checkpoint holds a head of other values, against its config.json, that head wins, as in transformers.
        Raises ModelError.
        """
        tensor = f"{name}.weight"
        if tensor not in self._shapes:
            return self._pack(name, embedding, None)
        head = self._join([self._stored(tensor)])
        if not torch.equal(head, embedding):
            log.warning(
                "the checkpoint's %s differs from the token embedding, so it is used as it is, although config.json "
                "ties the two (its tie_word_embeddings or tie_embedding should be false)",
                tensor,
            )
        return self._pack(name, head, None)

    def _stored(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name, self._shapes[name])

    def _weight(self, name: str, *, in_layer: bool) -> torch.Tensor | Quantised:
        """A weight of a projection, quantised if it is stored or wanted so."""
        weight = self._checkpoint.weight(name, self._shapes[name])
        stays = not in_layer or name in self._routers or self._shapes[name][0] == 1
        return weight if stays and not isinstance(weight, Quantised) else self._wanted(name, weight)

    def _wanted(self, name: str, weight: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
        """The weight in the codes that are wanted, or in none. Raises ModelError."""
        if isinstance(weight, Quantised):
            return dequantise(weight, self.dtype) if self._kind == "bf16" else weight
        if self._kind == "auto" or self._kind == "bf16" or weight.shape[1] % 2:
            return weight
        codes = quantise(weight.to(self.device), self._kind)
        if not bool(torch.isfinite(codes.scales).all()):
            raise ModelError(
                f"{name} has a value that is NaN or infinite, so it cannot be quantised: download it again"
            )
        return codes

    def _pack(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
        return self._hold(Projection(name, pack_weight(weight, bias)))

    def _hold(self, projection: Projection) -> Projection:
        self.num_bytes += projection.weight.nbytes
        self.projections.append(projection)
        return projection

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        tensors = [tensor.to(self.device, self.dtype) for tensor in tensors]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _each(weight: Quantised, num_experts: int) -> list[Quantised]:
    """The weight of each expert, of those of all one below the other."""
    size = weight.out_features // num_experts
    return [weight.rows(slice(first, first + size)) for first in range(0, weight.out_features, size)]


class _Codes:
    """Copies of weights of one form, in memory that is taken for all of them when the first comes: blocks that are kept
    between those that are freed would leave holes, of as many bytes again."""

    def __init__(self, num_weights: int, device: torch.device) -> None:
        self.weights: list[Quantised] = []
        self._num_weights, self._device = num_weights, device
        self._rooms: dict[tuple[object, ...], torch.Tensor] = {}

    def append(self, weight: Quantised) -> None:
        weight, index = weight.to(self._device), len(self.weights)
        names = ("codes", "scales", "offsets", "table")
        parts: dict[str, Any] = {name: self._put(name, getattr(weight, name), index) for name in names}
        self.weights.append(replace(weight, **parts))

    def _put(self, name: str, part: torch.Tensor | None, index: int) -> torch.Tensor | None:
        if part is None:
            return None
        form = (name, part.shape, part.dtype)
        if form not in self._rooms:
            self._rooms[form] = part.new_empty((self._num_weights, *part.shape))
        return self._rooms[form][index].copy_(part)
