"""LoRA on experts as trainers store it, and in one form: for each slice A [num_experts * rank, in] and
B [out, num_experts * rank], expert after expert.

E experts, hidden width H, their own width I; the base's weights are [E, 2 I, H] (gate before up) and [E, H, I]:

    parameters   PEFT from 0.19.1 on: A [E * r, in], expert after expert, and B [out, r * E], rank after rank; as
                 [E, r, in] and [out, r, E] from Megatron-Bridge for vLLM
    exchanged    PEFT up to 0.19.0 takes inputs for outputs: A [E * r, out] and B [in, r * E]
    one by one   modules of each expert, gate_proj or w1, up_proj or w3, down_proj or w2, or gate_up_projs and
                 down_projs of all: A [r, in], B [out, r]
    stacked      A [E, r, in], B [E, out, r]; of either, 1 instead of E where all experts share it

Where a file's gate and up have one A of twice the rank and a B of two blocks, as PEFT converts modules, each gets its
own half: see `split_blocks`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from adapters.files.safetensors_header import Tensor
from adapters.layout import BaseLayout, Experts, ProjectionSpec
from adapters.peft.block_tensors import Arranged, Matrix, arranged, matrix_values, why_in_parts
from adapters.peft.bound_tensors import BoundSlice
from adapters.peft.config import AdapterConfig
from adapters.peft.module_names import model_prefix, tail_of
from adapters.peft.target_patterns import is_targeted_parameter, targeted

# As `adapters.peft.slice_mapping` has them.
Problems = list[tuple[str, str]]
Part = Literal["gate_up", "gate", "up", "down"]
_MODULES: Mapping[str, Part] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_PARAMETERS: Mapping[str, Part] = {"gate_up_proj": "gate_up", "down_proj": "down"}
_STACKED: Mapping[str, Part] = {**_MODULES, **_PARAMETERS}
# Lists of modules, one for each expert: Unsloth's gpt-oss in 4 bits.
_LISTS: Mapping[str, Part] = {"gate_up_projs": "gate_up", "down_projs": "down"}
_NESTED = re.compile(r"(?:base_layer(?:\.|$))*")
_ONE = re.compile(r"(?P<expert>\d{1,6})\.(?P<module>\w+)|(?P<list>\w+)\.(?P<index>\d{1,6})")
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_WITHOUT_TENSORS = " names it, but the file has no tensors for it"
# The first version of PEFT that takes inputs for inputs.
_RIGHT_VERSION = (0, 19, 1)
# Of weights [experts, in, out] this one alone exchanges the two.
_WRONG_VERSION = (0, 19, 0)


@dataclass(slots=True)
class FoundExperts:
    """Tensors of the experts of one layer, "A" and "B", by what stands behind the experts' module in their names.

    path  of that module in training
    """

    experts: Experts
    path: str
    sides: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def has_ordered_ranks(self) -> bool:
        """Whether ranks and experts share an axis of lora_B, as in parameters, so that their order matters."""
        return any(
            _NESTED.fullmatch(rest) is not None and "A" in sides and sides["A"].shape[0] > self.experts.num
            for rest, sides in self.sides.items()
        )

    def add(self, rest: str, side: str, tensor: Tensor) -> str | None:
        """Returns the reason if it is none of the forms."""
        if _NESTED.fullmatch(rest) is None and rest not in _STACKED:
            one = _one_of(rest)
            if one is None:
                return (
                    "of experts, lora_A and lora_B of gate_up_proj and down_proj are served, or of each expert's "
                    "gate_proj, up_proj and down_proj (w1, w3, w2)"
                )
            if one[0] >= self.experts.num:
                return f"this base model has {self.experts.num} experts in a layer"
        elif rest not in _STACKED:
            tensor = self._flat(tensor, side)
        sides = self.sides.setdefault(rest, {})
        if side in sides:
            return f"{self.path} already has lora_{side} from tensor {sides[side].name[:200]!r}"
        sides[side] = tensor
        return None

    def _flat(self, tensor: Tensor, side: str) -> Tensor:
        """The parameter's tensor with experts and ranks on one axis, as PEFT has it: its elements in their order."""
        if len(tensor.shape) != 3 or tensor.shape[0 if side == "A" else 2] != self.experts.num:
            return tensor
        first, middle, last = tensor.shape
        return replace(tensor, shape=(first * middle, last) if side == "A" else (first, middle * last))


def _one_of(rest: str) -> tuple[int, Part] | None:
    """The expert whose module it is, and the part; None for other names."""
    match = _ONE.fullmatch(rest)
    if match is None:
        return None
    part = _MODULES.get(match["module"]) if match["list"] is None else _LISTS.get(match["list"])
    return None if part is None else (int(match["expert"] or match["index"]), part)


def _of_expert(rest: str, expert: int) -> str:
    """The name of another expert's module of the same part."""
    match = _ONE.fullmatch(rest)
    assert match is not None, "sorted in by its name"
    return f"{expert}.{match['module']}" if match["list"] is None else f"{match['list']}.{expert}"


def _siblings(rest: str) -> dict[str, Part]:
    """All parts of the experts, or of one, named as `rest` is."""
    if rest.startswith(tuple(_LISTS)):
        return {f"{name}.{rest.rpartition('.')[2]}": part for name, part in _LISTS.items()}
    before, name = rest[: rest.rfind(".") + 1], rest.rpartition(".")[2]
    return {before + one: part for one, part in _MODULES.items() if one.startswith("w") == name.startswith("w")}


@dataclass(frozen=True, slots=True)
class _Piece:
    """One part of a layer's experts: matrices of each expert, A [rank, in] and B [out, rank].

    paths         what rank_pattern and alpha_pattern name: of all experts, or of each
    absent        paths of experts that the file lacks, to which the piece adds nothing
    is_parameter  of PEFT's for all experts
    """

    part: Part
    paths: tuple[str, ...]
    rank: int
    a: tuple[Matrix, ...]
    b: tuple[Matrix, ...]
    absent: tuple[str, ...] = ()
    is_parameter: bool = False

    @property
    def path(self) -> str:
        """The first of `paths`."""
        return self.paths[0]


class ExpertForms:
    """The readings of all experts' tensors of a file, which one tool wrote."""

    def __init__(self, config: AdapterConfig, projections: Mapping[str, ProjectionSpec]) -> None:
        self._config = config
        self._projections = projections
        self._is_exchanged: bool | None = None
        version = _VERSION.match(config.peft_version or "")
        self._version = None if version is None else tuple(int(one or 0) for one in version.groups())

    def pieces(self, found: Sequence[FoundExperts]) -> tuple[list[tuple[FoundExperts, _Piece]], Problems]:
        """The parts that bind, and the faults of the others."""
        problems: Problems = []
        is_interleaved = any(entry.experts.is_interleaved for entry in found)
        if is_interleaved:
            self._is_exchanged = self._version == _WRONG_VERSION
        elif self._version is not None:
            self._is_exchanged = self._version < _RIGHT_VERSION
        for entry in found:  # Shapes that tell are believed first: they decide those that do not.
            for rest, sides in entry.sides.items():
                if _NESTED.fullmatch(rest) is not None and sides.keys() == {"A", "B"}:
                    found_exchanged = {is_exchanged for _, is_exchanged in self._fits(entry.experts, sides)}
                    if len(found_exchanged) == 1:
                        self._is_exchanged = found_exchanged.pop()
        pieces: list[tuple[FoundExperts, _Piece]] = []
        for entry in found:
            try:
                pieces += ((entry, piece) for piece in self._of_layer(entry))
            except _Misfit as misfit:
                problems.append((misfit.name, misfit.reason))
        return pieces, problems

    def _of_layer(self, entry: FoundExperts) -> Iterator[_Piece]:
        singles: dict[Part, dict[int, tuple[str, Mapping[str, Tensor]]]] = {}
        for rest, sides in entry.sides.items():
            present = next(iter(sides.values()))
            if sides.keys() != {"A", "B"}:
                raise _Misfit(present.name, f"its counterpart lora_{'B' if 'A' in sides else 'A'} is missing")
            for tensor in sides.values():
                if (reason := why_in_parts(tensor)) is not None:
                    raise _Misfit(tensor.name, reason)
            if _NESTED.fullmatch(rest) is not None:
                yield self._parameter(entry, sides)
            elif rest in _STACKED:
                yield self._stacked(entry, rest, sides)
            else:
                one = _one_of(rest)
                assert one is not None, "sorted in by its name"
                of_part = singles.setdefault(one[1], {})
                if one[0] in of_part:
                    raise _Misfit(present.name, f"the file has {of_part[one[0]][0]} too, which is the same weight")
                of_part[one[0]] = f"{entry.path}.{rest}", sides
        for part, of_part in singles.items():
            yield self._one_by_one(entry, part, of_part)

    def sizes(self, experts: Experts, part: Part) -> tuple[int, int]:
        """Inputs and outputs of one expert."""
        projection = self._projections[experts.down if part == "down" else experts.gate_up]
        widths = [piece.out_features for piece in projection.slices]
        return projection.in_features, sum(widths) if part == "gate_up" else widths[0]

    def _fits(self, experts: Experts, sides: Mapping[str, Tensor]) -> list[tuple[Part, bool]]:
        """The parameters, and whether exchanged, that the shapes of PEFT's tensors fit."""
        a, b = sides["A"].shape, sides["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % experts.num:
            return []
        found: list[tuple[Part, bool]] = []
        for part in _PARAMETERS.values():
            sizes = self.sizes(experts, part)
            found += [(part, False)] if (a[1], b[0]) == sizes else []
            found += [(part, True)] if (b[0], a[1]) == sizes else []
        return found

    def _parameter(self, entry: FoundExperts, sides: Mapping[str, Tensor]) -> _Piece:
        a, b = sides["A"], sides["B"]
        fits = self._fits(entry.experts, sides)
        if not fits:
            raise _Misfit(
                a.name,
                f"with shapes {a.shape} and {b.shape} of lora_A and lora_B it is neither gate_up_proj nor down_proj of "
                f"{entry.experts.num} experts",
            )
        if len(fits) > 1:
            if self._is_exchanged is None:
                raise _Misfit(
                    a.name,
                    "inputs and outputs are of one width, which PEFT exchanges before version 0.19.1; add the "
                    "peft_version that trained it to adapter_config.json",
                )
            fits = [one for one in fits if one[1] == self._is_exchanged]
        part, is_exchanged = fits[0]
        num, rank = entry.experts.num, a.shape[0] // entry.experts.num
        in_features, out_features = self.sizes(entry.experts, part)
        first, second = (b, a) if is_exchanged else (a, b)
        is_grouped = self._config.has_grouped_experts
        # Of the tensor with an expert's rows after another's, and of that with columns: rank after rank, or grouped.
        of_columns = [(e * rank, num * rank, 1) if is_grouped else (e, num * rank, num) for e in range(num)]
        if is_exchanged:
            of_a = [Matrix(first, start, (rank, in_features), (step, row)) for start, row, step in of_columns]
            of_b = [
                Matrix(second, e * rank * out_features, (out_features, rank), (1, out_features)) for e in range(num)
            ]
        else:
            of_a = [Matrix(first, e * rank * in_features, (rank, in_features), (in_features, 1)) for e in range(num)]
            of_b = [Matrix(second, start, (out_features, rank), (row, step)) for start, row, step in of_columns]
        name = next(name for name, one in _PARAMETERS.items() if one == part)
        return _Piece(part, (f"{entry.path}.{name}",), rank, tuple(of_a), tuple(of_b), is_parameter=True)

    def _stacked(self, entry: FoundExperts, rest: str, sides: Mapping[str, Tensor]) -> _Piece:
        part, a, b, num = _STACKED[rest], sides["A"], sides["B"], entry.experts.num
        in_features, out_features = self.sizes(entry.experts, part)
        rank = a.shape[1] if len(a.shape) == 3 else 0
        if not all(
            rank and len(tensor.shape) == 3 and tensor.shape[0] in (1, num) and tensor.shape[1:] == wanted
            for tensor, wanted in ((a, (rank, in_features)), (b, (out_features, rank)))
        ):
            raise _Misfit(
                a.name,
                f"lora_A and lora_B have shapes {a.shape} and {b.shape}; stacked ones have [{num}, r, {in_features}] "
                f"and [{num}, {out_features}, r], or 1 in the place of {num}",
            )

        def each(tensor: Tensor, rows: int, columns: int) -> tuple[Matrix, ...]:
            step = rows * columns if tensor.shape[0] > 1 else 0
            return tuple(Matrix(tensor, e * step, (rows, columns), (columns, 1)) for e in range(num))

        path = f"{entry.path}.{rest}"
        return _Piece(part, (path,), rank, each(a, rank, in_features), each(b, out_features, rank))

    def _one_by_one(
        self, entry: FoundExperts, part: Part, found: Mapping[int, tuple[str, Mapping[str, Tensor]]]
    ) -> _Piece:
        in_features, out_features = self.sizes(entry.experts, part)
        first_path, sides = next(iter(found.values()))
        rank = sides["A"].shape[0]
        matrices: dict[str, list[Matrix]] = {"A": [], "B": []}
        for e in range(entry.experts.num):
            for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                if e not in found:
                    matrices[side].append(Matrix(sides[side], 0, shape, (0, 0), is_zero=True))
                    continue
                tensor = found[e][1][side]
                if tensor.shape != shape:
                    raise _Misfit(
                        tensor.name,
                        f"its shape is {tensor.shape}; rank {rank} of all experts needs {shape}, since experts of a "
                        "layer have one rank here",
                    )
                matrices[side].append(Matrix(tensor, 0, shape, (shape[1], 1)))
        paths = tuple(path for path, _ in found.values())
        rest = first_path.removeprefix(f"{entry.path}.")
        absent = tuple(f"{entry.path}.{_of_expert(rest, e)}" for e in range(entry.experts.num) if e not in found)
        return _Piece(part, paths, rank, tuple(matrices["A"]), tuple(matrices["B"]), absent)

    def names(self, entry: FoundExperts, piece: _Piece) -> tuple[set[str], ...]:
        """Sets of names, each of which trains the piece if the configuration has all of it: the piece's own paths, the
        experts' module, as prime-rl has it, or gate and up of one piece for both."""
        both = {f"{entry.path}.gate_proj", f"{entry.path}.up_proj"}
        own = set(piece.paths), {entry.path}
        return (*own, both) if piece.part == "gate_up" else own

    def bind(self, entry: FoundExperts, piece: _Piece, scaling: float) -> list[BoundSlice]:
        """The slices that the piece covers."""
        experts = entry.experts
        projection = self._projections[experts.down if piece.part == "down" else experts.gate_up]
        slices = {"gate": projection.slices[:1], "up": projection.slices[1:]}.get(piece.part, projection.slices)
        bound: list[BoundSlice] = []
        first = 0
        for one in slices:
            if piece.part == "gate_up" and experts.is_interleaved:
                b = tuple(matrix.every_second(len(bound), one.out_features) for matrix in piece.b)
            else:
                b = tuple(matrix.rows(first, one.out_features) for matrix in piece.b)
            first += one.out_features
            bound.append(
                BoundSlice(
                    *(projection, one, piece.rank, scaling, arranged(piece.a, axis=0), arranged(b, axis=1)),
                    num_experts=experts.num,
                )
            )
        return bound

    def missing(
        self, layout: BaseLayout, found: Sequence[tuple[FoundExperts, _Piece]], bound: Collection[str]
    ) -> Problems:
        """Parameters of experts that target_parameters names, or target_modules by the experts' module, and the file
        lacks; and, of a file with modules of experts, those modules that target_modules names."""
        prefix = next((model_prefix(entry.path) for entry, _ in found), "")
        modules = [prefix + tail_of(experts.module) for experts in layout.experts]
        whole = targeted(self._config, modules, ())
        problems = [
            (path, f"{'target_modules' if module in whole else 'target_parameters'}{_WITHOUT_TENSORS}")
            for experts, module in zip(layout.experts, modules, strict=True)
            for name, projection in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down))
            if is_targeted_parameter(self._config, path := f"{experts.module}.{name}") or module in whole
            if not all(piece.module in bound for piece in self._projections[projection].slices)
        ]
        piece = next(((entry, piece) for entry, piece in found if not piece.is_parameter), None)
        if piece is None:
            return problems
        names = _siblings(piece[1].path.removeprefix(f"{piece[0].path}."))
        absent = {
            f"{module}.{rest}"
            for experts, module in zip(layout.experts, modules, strict=True)
            for rest, part in names.items()
            if not all(f"{experts.module}.{one}_proj" in bound for one in part.split("_"))
        }
        matched = sorted(targeted(self._config, sorted(absent), absent))
        return problems + [(path, f"target_modules{_WITHOUT_TENSORS}") for path in matched]


class _Misfit(Exception):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.name = name
        self.reason = reason


def split_blocks(slices: Sequence[BoundSlice], source: Path) -> tuple[BoundSlice, ...]:
    """The same slices, gate and up of one A each with half of it where B is zero in the other half: PEFT trains
    modules of all experts so, once it has made parameters of them."""
    split = list(slices)
    for at, gate in enumerate(slices[:-1]):
        up = slices[at + 1]
        if not (isinstance(gate.a, Arranged) and isinstance(up.a, Arranged) and gate.a.matrices == up.a.matrices):
            continue
        half = gate.rank // 2
        if gate.rank % 2 == 0 and all(
            not matrix_values(source, matrix.columns(half if side is gate else 0, half)).any()
            for side in (gate, up)
            if isinstance(side.b, Arranged)
            for matrix in side.b.matrices
        ):
            split[at], split[at + 1] = _half(gate, 0, half), _half(up, half, half)
    return tuple(split)


def _half(bound: BoundSlice, first: int, rank: int) -> BoundSlice:
    """Some of the slice's ranks, of each expert."""
    assert isinstance(bound.a, Arranged) and isinstance(bound.b, Arranged)
    a = tuple(matrix.rows(first, rank) for matrix in bound.a.matrices)
    b = tuple(matrix.columns(first, rank) for matrix in bound.b.matrices)
    return replace(bound, rank=rank, a=arranged(a, axis=0), b=arranged(b, axis=1))
