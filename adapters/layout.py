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
Group = Literal["attention", "mlp", "operator", "embeddings", "vectors", "norms", "saved_embedding", "saved_head"]
GROUPS: tuple[Group, ...] = ("attention", "mlp", "operator", "embeddings")
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
    """One (packed) projection: slices that share their input. `kind` "embedding" looks its input up by token id.

    name         unique, e.g. `model.layers.3.self_attn.qkv_proj`
    layer        index of the layer, -1 for the token embedding and the head
    in_features  width of the input; for an embedding the vocabulary size
    """

    name: str
    layer: int
    group: Group
    kind: Literal["linear", "embedding"]
    in_features: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """All projections of a base model, in the order of the forward pass.

    num_layers   hidden layers (for `layers_to_transform`)
    layer_prefix what stands before the layer index in module paths, e.g. `model.layers.`
    weights      fingerprint of the base's weights: an adapter fits the weights it was trained on, so adapters of two
                 bases of one shape are kept apart by it
    unadapted    modules whose adapters are not served, what is below them included: experts
    routers      of experts: projections, which stores are older than
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
    unadapted: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    norms: tuple[Slice, ...] = ()
    splits: tuple[SplitModule, ...] = ()
    ties_head: bool = False
    fixed: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that this model has, in the fixed order that `LoraMaps.first_rows` uses."""
        present = {projection.group for projection in self.projections}
        return tuple(group for group in GROUPS if group in present)
