"""The projections of a base model that an adapter can bind to, described without torch.

`service.models.layouts` derives a `BaseLayout` from a checkpoint's config.json; the API process checks uploads
against it and the engine process sizes the row pool by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A group shares one row range per adapter across all of its layers and projections.
# The non-LoRA groups hold what is no row: a line (or table) of it for each adapter that has such; see
# `adapters.memory.non_lora_pool`.
Group = Literal[
    "attention", "mlp", "operator", "experts", "embeddings", "vectors", "norms", "saved_embedding", "saved_head"
]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "operator", "experts", "embeddings")
# Groups whose rows of A may stand behind base weights.
WINDOW_GROUPS: tuple[Group, ...] = ("attention", "mlp", "operator", "embeddings")
TABLE_GROUPS: tuple[Group, ...] = ("saved_embedding", "saved_head")
NON_LORA_GROUPS: tuple[Group, ...] = ("vectors", "norms", *TABLE_GROUPS)


@dataclass(frozen=True, slots=True)
class Slice:
    """One checkpoint module inside a (packed) projection, e.g. `model.layers.3.self_attn.q_proj`."""

    module: str
    out_features: int


@dataclass(frozen=True, slots=True)
class SplitModule:
    """A slice's module that some trainers have as several, each with its own rows of the output, in this order."""

    module: str
    parts: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """One (packed) projection: slices that share their input. `kind` "embedding" looks its input up by token id; one of
    "experts" is of all experts of a layer, and an adapter of rank r has r rows there for each expert, in their order.

    name         unique, e.g. `model.layers.3.self_attn.qkv_proj`
    layer        index of the layer, -1 for the token embedding and the head
    in_features  width of the input; for an embedding the vocabulary size
    """

    name: str
    layer: int
    group: Group
    kind: Literal["linear", "embedding", "experts"]
    in_features: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, which trainers store one by one or all in two tensors.

    module, router  e.g. `model.layers.3.mlp.experts` and `model.layers.3.mlp.gate`
    gate_up, down   names of their projections, of kind "experts"
    is_interleaved  trainers hold the weights transposed, [num, in, out], the columns of gate and of up by turns
    """

    module: str
    router: str
    num: int
    gate_up: str
    down: str
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """All projections of a base model, in the order of the forward pass.

    num_layers   hidden layers (for `layers_to_transform`)
    layer_prefix what stands before the layer index in module paths, e.g. `model.layers.`
    weights      fingerprint of the base's weights: an adapter fits the weights it was trained on, so adapters of two
                 bases of one shape are kept apart by it
    experts      of the layers that have such
    fixed        tensors beside the projections that no adapter changes, a convolution's weight say
    splits       slices that some trainers have as several modules
    ties_head    the head is the token embedding
    norms        of the hidden states and of the heads of attention: the modules whose weights an adapter may replace,
                 and their widths
    """

    model_type: str
    num_layers: int
    layer_prefix: str
    projections: tuple[ProjectionSpec, ...]
    weights: str = ""
    experts: tuple[Experts, ...] = ()
    norms: tuple[Slice, ...] = ()
    splits: tuple[SplitModule, ...] = ()
    ties_head: bool = False
    fixed: tuple[str, ...] = ()

    def num_experts_of(self, projection: ProjectionSpec) -> int:
        """Experts of a projection of kind "experts"; 1 of any other."""
        if projection.kind != "experts":
            return 1
        return next(one.num for one in self.experts if projection.name in (one.gate_up, one.down))

    @property
    def routers(self) -> tuple[str, ...]:
        """Routers of experts."""
        return tuple(one.router for one in self.experts)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that this model has, in the fixed order that `LoraMaps.first_rows` uses."""
        present = {projection.group for projection in self.projections}
        return tuple(group for group in GROUPS if group in present)
