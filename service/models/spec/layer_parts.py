"""Declarations of a layer's parts, projections and states, from which all else is derived. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from adapters.layout import Group

# Shapes of tensors as checkpoints hold them, by name.
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Linear:
    """A product of a layer that adapters bind to; names are relative to the layer.

    slices  widths of the outputs by module, in the order in which they are packed: each has a weight [width,
            in_features] and, where `has_bias`, a bias [width]
    splits  slices that some trainers have as several modules: widths of these by name, in the order of the slice's rows
    """

    name: str
    group: Group
    in_features: int
    slices: Mapping[str, int]
    has_bias: bool = False
    splits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixerState:
    """A tensor that a mixer remembers between steps, as lines of `shape`.

    per         how a step advances it. "token": it appends a line for each of its tokens, in blocks of the paged cache,
                and leaves the lines before. "sequence": it reads and overwrites the one line that a sequence has in its
                slot, whatever the number of its tokens; a sequence's first step reads none.
    in_float32  whatever the model computes in; else in the model's dtype
    """

    name: str
    per: Literal["token", "sequence"]
    shape: tuple[int, ...]
    in_float32: bool = False


def named(parent: str, modules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Widths of outputs by module: one for each size, or one module for all of them."""
    if len(modules) == 1:
        return {f"{parent}.{modules[0]}": sum(sizes)}
    return {f"{parent}.{module}": size for module, size in zip(modules, sizes, strict=True)}


def split_input(
    parent: str, inputs: tuple[str, ...], split: tuple[str, ...], sizes: tuple[int, ...]
) -> dict[str, dict[str, int]]:
    """`Linear.splits` of one module for all `sizes`; nothing where each size has a module of its own."""
    return {f"{parent}.{inputs[0]}": named(parent, split, sizes)} if len(inputs) == 1 else {}
