"""The non-LoRA parameters of resident adapters on the device: lines of vectors and norms, and tables.

The row pool owns this pool and decides which lines belong to whom: each non-LoRA group is one more group of ranges, of
length 1 per adapter, so room, eviction, pins and moves work as for rows. A killed engine leaves nothing behind:
everything is rebuilt from the store at the next load.

Magnitudes become scales when an adapter's line is first written, because they need the norms of the base's weight plus
the adapter's delta: see `BaseFacts.delta_squares` for the cost. The scales then replace the magnitudes in the adapter's
host memory, in the order of the copy stream; later loads are plain copies. A row without a delta whose magnitude is 0
was not trained (`adapters.peft.slice_mapping`) and keeps the base's norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch

from adapters.layout import TABLE_GROUPS, BaseLayout, Group, ProjectionSpec, Slice
from adapters.memory.slab import HostAdapter
from adapters.peft.bound_tensors import BIAS, LORA_BIAS, MAGNITUDE, WEIGHT
from kernels.lora.non_lora import NonLoraVectors

_SCALE = "scale"  # the part of an adapter that its magnitudes have become


class BaseFacts(Protocol):
    """The base model, as far as adapters' own parts depend on it."""

    def bias(self, name: str) -> torch.Tensor | None:
        """float32 [outputs] of the projection `name`, None without one."""

    def norm_weight(self, name: str) -> torch.Tensor:
        """[width] of the norm `name`, as it multiplies."""

    @property
    def norm_offset(self) -> float:
        """Added to a norm's weight as files hold it, before it multiplies."""

    def rows(self, name: str, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [num_ids, hidden]: what the embedding, or the head, has for these tokens. Of a head that costs a
        product of as many tokens as the model is wide."""

    def delta_squares(self, name: str, first: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """Fresh float32 [outputs of the slice]: |W + scaling * (b.T @ a)| ** 2 of each row of the weight; of an
        embedding, of each column. Rounding may leave it below 0. a [rank, in], b [rank, outputs] of the slice whose
        outputs begin at `first`.

        Costs a product of `rank` tokens with the projection; its first call for a projection one of `in` tokens.
        """


class _Place(NamedTuple):
    """The line of one module: its projection, its columns, and the projection's scale and shift."""

    name: str
    columns: slice
    scale: torch.Tensor
    shift: torch.Tensor


class NonLoraPool:
    """See the module's docstring. `lines`: how many of each non-LoRA group."""

    def __init__(
        self,
        layout: BaseLayout,
        lines: Mapping[Group, int],
        base: BaseFacts,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._layout = layout
        self._projections = [projection for projection in layout.projections if projection.kind != "experts"]
        self._base = base
        self.vectors: dict[str, NonLoraVectors] = {}
        self.norms: dict[str, torch.Tensor] = {}
        self.tables: dict[Group, torch.Tensor] = {}
        new = partial(torch.empty, dtype=torch.float32, device=device)
        if lines["vectors"]:
            for projection in self._projections:
                shape = (1 + lines["vectors"], _num_outputs(projection))
                vectors = NonLoraVectors(new(shape), new(shape))
                vectors.scale[0].fill_(1)
                vectors.shift[0].zero_()
                self.vectors[projection.name] = vectors
        if lines["norms"]:
            for norm in layout.norms:
                weights = new((1 + lines["norms"], norm.out_features))
                weights[0].copy_(base.norm_weight(norm.module))
                self.norms[norm.module] = weights
        for embedding in [projection for projection in layout.projections if projection.kind == "embedding"][:1]:
            for group in TABLE_GROUPS:
                if lines[group]:
                    sizes = (lines[group], embedding.in_features, _num_outputs(embedding))
                    self.tables[group] = torch.empty(sizes, dtype=dtype, device=device)

    @torch.no_grad()
    def write(self, group: Group, index: int, adapter: HostAdapter) -> None:
        """Fill the adapter's line, or table, of this group: `index` counts without the base's. The caller holds the
        adapter until the device has copied it."""
        if group == "vectors":
            self._write_vectors(1 + index, adapter)
        elif group == "norms":
            for name, weights in self.norms.items():
                own = adapter.extras.get((name, WEIGHT))
                if own is None:
                    weights[1 + index].copy_(weights[0])
                else:
                    weights[1 + index].copy_(own, non_blocking=True).add_(self._base.norm_offset)
        else:
            kind = "embedding" if group == "saved_embedding" else "linear"
            modules = {
                p.slices[0].module for p in self._layout.projections if p.group == "embeddings" and p.kind == kind
            }
            own = next(tensor for (name, part), tensor in adapter.extras.items() if part == WEIGHT and name in modules)
            self.tables[group][index].copy_(own, non_blocking=True)

    def move(self, group: Group, start: int, to: int) -> None:
        """Copy what stands at `start` to `to`; both count without the base's."""
        if group == "vectors":
            for vectors in self.vectors.values():
                for tensor in (vectors.scale, vectors.shift):
                    tensor[1 + to].copy_(tensor[1 + start])
        elif group == "norms":
            for weights in self.norms.values():
                weights[1 + to].copy_(weights[1 + start])
        else:
            self.tables[group][to].copy_(self.tables[group][start])

    def _write_vectors(self, line: int, adapter: HostAdapter) -> None:
        # By lists where that can be: the engine's thread asks for all this between two steps, and each call costs it.
        scales = [vectors.scale[line] for vectors in self.vectors.values()]
        shifts = [vectors.shift[line] for vectors in self.vectors.values()]
        torch._foreach_zero_(shifts)
        torch._foreach_zero_(scales)
        torch._foreach_add_(scales, 1.0)
        places = {
            piece.module: _Place(projection.name, slice(first, first + piece.out_features), scale, shift)
            for projection, scale, shift in zip(self._projections, scales, shifts, strict=True)
            for first, piece in _slices(projection)
        }
        scaled = self._write_scales(adapter, places)
        for module, place in places.items():
            lora_bias, bias = (adapter.extras.get((module, part)) for part in (LORA_BIAS, BIAS))
            shift = place.shift[place.columns]
            is_scaled = module in scaled
            base_bias = self._base.bias(place.name) if is_scaled or bias is not None else None
            if base_bias is not None and is_scaled:
                shift.copy_((1 - place.scale[place.columns]) * base_bias[place.columns])
            if bias is not None:
                shift.add_(bias.to(shift.device, non_blocking=True))
                if base_bias is not None:
                    shift.sub_(base_bias[place.columns])
            if lora_bias is not None:
                lora_bias = lora_bias.to(shift.device, non_blocking=True)
                shift.add_(lora_bias, alpha=adapter.slices[module].scaling)

    def _write_scales(self, adapter: HostAdapter, places: Mapping[str, _Place]) -> set[str]:
        """Write the scales of all modules that have magnitudes; returns these modules."""
        extras = adapter.extras
        new = [module for module, part in extras if part == MAGNITUDE]
        found = [places[module].scale[places[module].columns] for module in new]
        if new:
            torch._foreach_copy_(found, [extras[module, MAGNITUDE] for module in new], non_blocking=True)
            norms = [self._delta_squares(places[module], adapter, module) for module in new]
            torch._foreach_clamp_min_(norms, 0.0)
            torch._foreach_sqrt_(norms)
            torch._foreach_div_(found, norms)
            for module, scale in zip(new, found, strict=True):
                untrained = extras[module, MAGNITUDE] == 0
                if untrained.any():  # of few adapters, so that the others need not look through B
                    untrained &= (adapter.slices[module].b == 0).all(0)
                    scale.masked_fill_(untrained.to(scale.device), 1.0)
            torch._foreach_copy_([extras[module, MAGNITUDE] for module in new], found, non_blocking=True)
            for module in new:  # when the copy has been asked for: what it is called is what it holds
                extras[module, _SCALE] = extras.pop((module, MAGNITUDE))
            return set(new)
        known = [module for module, part in extras if part == _SCALE]
        if known:
            held = [places[module].scale[places[module].columns] for module in known]
            torch._foreach_copy_(held, [extras[module, _SCALE] for module in known], non_blocking=True)
        return set(known)

    def _delta_squares(self, place: _Place, adapter: HostAdapter, module: str) -> torch.Tensor:
        weights = adapter.slices[module]
        a, b = (side.to(place.scale.device, non_blocking=True) for side in (weights.a, weights.b))
        return self._base.delta_squares(place.name, place.columns.start, a, b, weights.scaling)


def _num_outputs(projection: ProjectionSpec) -> int:
    return sum(piece.out_features for piece in projection.slices)


def _slices(projection: ProjectionSpec) -> Iterator[tuple[int, Slice]]:
    """Its slices, with the output at which each begins."""
    first = 0
    for piece in projection.slices:
        yield first, piece
        first += piece.out_features
