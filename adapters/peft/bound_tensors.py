"""Tensors bound to the base's modules: made by `adapters.peft.binding`, kept by the store, loaded to the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from adapters.errors import MAX_SHOWN, Malformed
from adapters.files.safetensors_header import Tensor, parse_json_object
from adapters.layout import Group, ProjectionSpec, Slice
from adapters.peft.config import HeadFacts


@dataclass(frozen=True, slots=True)
class BoundSlice:
    """LoRA weights of one slice: a [rank, in_features] and b [out_features, rank] as the file holds them; of experts, a
    and b have as many rows and columns for each, in their order."""

    projection: ProjectionSpec
    slice: Slice
    rank: int
    scaling: float
    a: Tensor
    b: Tensor
    num_experts: int = 1

    @property
    def num_rows(self) -> int:
        """Rows on the device."""
        return self.rank * self.num_experts


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A tensor of the base model that the file repeats; one that differs from the base's is refused as a change.

    name  the base's name of the tensor
    """

    tensor: Tensor
    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A tensor that the file has twice, under two names of a module; both must be equal, or it is unclear which
    counts."""

    tensor: Tensor
    of: Tensor


@dataclass(frozen=True, slots=True)
class BoundTokens:
    """Trained rows of the embedding [vocabulary, hidden], or of the head, that replace the base's: tensor [num_ids,
    hidden]. On the device each is a row of rank that only its token uses."""

    module: str
    token_ids: tuple[int, ...]
    tensor: Tensor


# Parts of an adapter that are no rows, by what stands behind the module in PEFT's names.
MAGNITUDE, LORA_BIAS, BIAS, WEIGHT = "lora_magnitude_vector", "lora_B.bias", "bias", "weight"
TOKENS = "token_adapter.trainable_tokens_delta"
SCORE = "score"  # the module of a score head, whatever the trainer calls it


@dataclass(frozen=True, slots=True)
class BoundExtra:
    """A non-LoRA tensor of a module: a magnitude or a bias of a projection [out_features], the weight of a norm
    [width], of the embedding or of the head [vocabulary, width]; or of a score head, [labels, width] and [labels],
    which takes nothing of the device: its group is None."""

    module: str
    part: str
    tensor: Tensor
    group: Group | None

    @property
    def replaces(self) -> str | None:
        """The base's tensor that it stands for; None for what the base has not."""
        is_the_base_s = self.part in (BIAS, WEIGHT) and self.group is not None
        return f"{self.module}.{self.part}" if is_the_base_s else None


@dataclass(frozen=True, slots=True)
class Binding:
    """slices      in the layout's order
    rows        the largest rank per projection group, and 1 per non-LoRA group of the extras
    spare_rows  rows behind the base's vocabulary that whole embeddings and heads have in the file, by tensor; they are
                bound without these
    head        of a score head; None: the adapter has none
    classifier_from_token  as in `AdapterConfig`
    """

    slices: tuple[BoundSlice, ...]
    base_copies: tuple[BaseCopy, ...]
    rows: dict[str, int]
    notes: tuple[str, ...] = ()
    extras: tuple[BoundExtra, ...] = ()
    invocation: tuple[int, ...] = ()
    tokens: tuple[BoundTokens, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    spare_rows: tuple[tuple[Tensor, int], ...] = ()
    head: HeadFacts | None = None
    classifier_from_token: tuple[str, ...] = ()

    def with_head_of(self, config: bytes | None, file_name: str) -> Binding:
        """With what a model's config.json says of the head where adapter_config.json does not, and a name for each
        label. Raises Malformed, Unsupported."""
        if self.head is None:
            return self
        facts = self.head
        if config is not None:
            other = HeadFacts.of(parse_json_object(config, file_name), file_name)
            facts = HeadFacts(facts.labels or other.labels, facts.problem_type or other.problem_type)
        num_labels = next(one.tensor.shape[0] for one in self.extras if (one.module, one.part) == (SCORE, WEIGHT))
        labels = facts.labels or tuple(f"LABEL_{index}" for index in range(num_labels))
        if len(labels) != num_labels:
            raise Malformed(f"id2label names {len(labels)} labels, and the score head has {num_labels}; name each.")
        return replace(self, head=facts._replace(labels=labels))

    def without(self, unchanged: Collection[BoundExtra]) -> Binding:
        """Leave out extras that equal the base's own tensors."""
        extras = tuple(extra for extra in self.extras if extra not in unchanged)
        notes = first_of([f"{one.tensor.name} repeats the base's own tensor and is not stored." for one in unchanged])
        return replace(self, extras=extras, rows=rows_of(self.slices, extras, self.tokens), notes=(*self.notes, *notes))


def first_of(notes: list[str]) -> list[str]:
    """The first notes of one kind, and a sentence with the number of the others."""
    more = len(notes) - MAX_SHOWN
    return notes if more <= 0 else [*notes[:MAX_SHOWN], f"The same is true of {more} more."]


def rows_of(
    slices: Sequence[BoundSlice], extras: Sequence[BoundExtra], tokens: Sequence[BoundTokens]
) -> dict[str, int]:
    rows: dict[str, int] = {}
    for bound in slices:
        group = bound.projection.group
        rows[group] = max(rows.get(group, 0), bound.num_rows)
    for one in tokens:
        rows["embeddings"] = max(rows.get("embeddings", 0), len(one.token_ids))
    return rows | {extra.group: 1 for extra in extras if extra.group is not None}
