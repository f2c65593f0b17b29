"""Mapping of a trainer's modules to slices of the base: each module covers rows of one slice or more.

Modules that cover all rows of slices share their A, and each slice has its rows of B. Modules that cover some rows of a
slice become one LoRA whose rank is the sum of theirs, with zeros where the rows of one meet the ranks of another. Rows
that no module covers stay the base's: their B is zero, and so is their magnitude, which no trained row has beside a B
of zero (`adapters.memory.non_lora_pool` takes both for a scale of 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from adapters.files.safetensors_header import Tensor
from adapters.layout import ProjectionSpec, Slice
from adapters.peft.block_tensors import Block, stacked, why_in_parts
from adapters.peft.bound_tensors import LORA_BIAS, MAGNITUDE, BoundExtra, BoundSlice
from adapters.peft.config import AdapterConfig
from adapters.peft.module_names import KnownModules, OutputRows
from adapters.peft.tensor_names import FoundModule


@dataclass(frozen=True, slots=True)
class SlicePiece:
    """The part of one slice that one of a trainer's modules changes.

    name   the trainer's module
    rows   rows of the slice
    sides  "A" [rank, in_features]; "B" [rows, rank]; MAGNITUDE and LORA_BIAS [rows], where present
    """

    name: str
    rows: OutputRows
    rank: int
    scaling: float
    sides: Mapping[str, Tensor]


_OTHER_VOCABULARY = (
    ": the vocabulary was changed in training; train without resize_token_embeddings, or save the module whole "
    "(modules_to_save), whose rows of padding tokens can be left out"
)
# Faults, by the name of the faulty thing.
Problems = list[tuple[str, str]]


def misfits(entry: FoundModule, known: KnownModules, config: AdapterConfig, rank: int) -> Problems:
    """Faults of the tensors of one module."""
    if not {"A", "B"} <= entry.sides.keys():
        present = next(iter(entry.sides.values()))
        other = "B" if "A" in entry.sides else "A"
        return [(present.name, f"its counterpart lora_{other} is missing")]
    projection = known.slices[entry.rows[0].module][0]
    in_features = projection.in_features
    num_rows = sum(rows.num for rows in entry.rows)
    problems = []
    for side, wanted in (("A", (rank, in_features)), ("B", (num_rows, rank))):
        tensor = entry.sides[side]
        if tensor.shape != wanted:
            reason = f"its shape is {tensor.shape}; rank {rank} of {entry.name} needs {wanted}"
            # The vocabulary's dimension: the last one of an embedding's A, the first one of a head's B.
            where, axis = ("A", 1) if projection.kind == "embedding" else ("B", 0)
            others = tensor.shape[:axis] + tensor.shape[axis + 1 :], wanted[:axis] + wanted[axis + 1 :]
            if projection.group == "embeddings" and side == where and others[0] == others[1]:
                reason += _OTHER_VOCABULARY
            problems.append((tensor.name, why_in_parts(tensor) or reason))
    for side, is_wanted in ((MAGNITUDE, config.use_dora), (LORA_BIAS, config.lora_bias)):
        if side in entry.sides and entry.sides[side].shape != (num_rows,):
            problems.append((entry.name, f"its {side} has shape {entry.sides[side].shape}, not {(num_rows,)}"))
        if is_wanted and side not in entry.sides:
            reason = f"its {side} is missing, and adapter_config.json says that there is one"
            problems.append((entry.name, reason))
    return problems


def pieces_of(entry: FoundModule, rank: int, scaling: float) -> Iterator[SlicePiece]:
    """The pieces of one module whose tensors fit, in the order of its rows."""
    first, total = 0, sum(rows.num for rows in entry.rows)
    for rows in entry.rows:
        sides = {
            side: tensor if side == "A" else _part(tensor, first, rows.num, total)
            for side, tensor in entry.sides.items()
        }
        yield SlicePiece(entry.name, rows, rank, scaling, sides)
        first += rows.num


def _part(tensor: Tensor, first: int, num_rows: int, total: int) -> Tensor:
    """Some of the tensor's rows."""
    row_bytes = tensor.num_bytes // total
    start = tensor.start + first * row_bytes
    return replace(tensor, shape=(num_rows, *tensor.shape[1:]), start=start, end=start + num_rows * row_bytes)


def clashes(pieces: Sequence[SlicePiece], piece: Slice) -> Problems:
    """Faults of the pieces of one slice together, by their first rows."""
    return [
        (two.name, f"{one.name} changes the same rows of {piece.module}; train these in one way")
        for one, two in pairwise(pieces)
        if one.rows.meets(two.rows)
    ]


def bind_slice(
    projection: ProjectionSpec, piece: Slice, pieces: Sequence[SlicePiece]
) -> tuple[BoundSlice, list[BoundExtra]]:
    """The bound slice made from pieces that do not clash, by their first rows, with its magnitudes and biases."""
    whole = pieces[0] if pieces[0].rows.num == piece.out_features else _together(pieces, piece.out_features)
    bound = BoundSlice(projection, piece, whole.rank, whole.scaling, whole.sides["A"], whole.sides["B"])
    extras = [
        BoundExtra(piece.module, part, whole.sides[part], "vectors")
        for part in (MAGNITUDE, LORA_BIAS)
        if part in whole.sides
    ]
    return bound, extras


def _together(pieces: Sequence[SlicePiece], num_rows: int) -> SlicePiece:
    """One LoRA for all rows of the slice. Its scaling is the largest; smaller ones are compensated in B."""
    rank, in_features = sum(one.rank for one in pieces), pieces[0].sides["A"].shape[1]
    scaling = max((one.scaling for one in pieces), key=abs)
    shapes = {"A": (rank, in_features), "B": (num_rows, rank), MAGNITUDE: (num_rows,), LORA_BIAS: (num_rows,)}
    sides = {
        side: stacked(shape, list(_blocks(side, pieces, scaling)))
        for side, shape in shapes.items()
        if any(side in one.sides for one in pieces)
    }
    rows = OutputRows(pieces[0].rows.module, 0, num_rows)
    return SlicePiece(", ".join(one.name for one in pieces), rows, rank, scaling, sides)


def _blocks(side: str, pieces: Sequence[SlicePiece], scaling: float) -> Iterator[Block]:
    rank = 0
    for one in pieces:
        factor = one.scaling / scaling if scaling and side in ("B", LORA_BIAS) else 1.0
        if side == "A":
            yield Block(one.sides[side], rank, 0, factor)
        elif side in one.sides:
            yield Block(one.sides[side], one.rows.start, rank if side == "B" else 0, factor)
        rank += one.rank
