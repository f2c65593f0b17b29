"""Which projection slice each tensor of an upload belongs to. Every tensor finds one, or the upload is refused with
the list of those that did not and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from adapters.config import AdapterConfig
from adapters.errors import BindingError
from adapters.format import Tensor
from adapters.layout import BaseLayout, Projection, Slice
from adapters.patterns import endings, pattern_values, targeted

# Path components that wrap a model without being part of it; training frameworks stack them in any order.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT_PREFIX = re.compile(r"(?:module\.)*(?:base_model\.model\.)?(?:module\.)*")
# Models inside models: the text part of a multimodal model is the same tree under another name.
_MODEL_PREFIX = re.compile(r"(?:(?:base_model|model|language_model|text_model|module)\.)*")
_SIDE = re.compile(r"(?P<path>.+)\.(?P<side>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?P<rest>(?:\.[^.]+){0,2})")
_BASE_WEIGHT = re.compile(r"(?P<path>.+?)(?:\.base_layer|\.original_module)?\.weight")
MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class BoundSlice:
    """LoRA weights of one slice: a [rank, in_features] and b [out_features, rank] as the file holds them."""

    projection: Projection
    slice: Slice
    rank: int
    scaling: float
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A weight of the base model itself that the file repeats; it must equal the base's, or it would be a change."""

    tensor: Tensor
    slice: Slice
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Binding:
    """slices in the layout's order; rows: the largest rank per projection group."""

    slices: tuple[BoundSlice, ...]
    base_copies: tuple[BaseCopy, ...]
    rows: dict[str, int]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Found:
    """Tensors of one module; `path` is the module's path as the trainer saw it."""

    path: str
    sides: dict[str, Tensor] = field(default_factory=dict)


def bind(layout: BaseLayout, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> Binding:
    """Raises BindingError listing every tensor that does not bind and every target without tensors, Malformed for a
    pattern that cannot be evaluated."""
    known = _Known(layout)
    problems: list[tuple[str, str]] = []
    found: dict[str, _Found] = {}
    copies: list[BaseCopy] = []
    for tensor in tensors.values():
        reason = _sort_in(tensor, known, found, copies)
        if reason is not None:
            problems.append((tensor.name, reason))
    problems += _check_targets(known, config, found)
    paths = [entry.path for entry in found.values()]
    ranks = pattern_values(list(config.rank_pattern), paths, "rank_pattern")
    alphas = pattern_values(list(config.alpha_pattern), paths, "alpha_pattern")
    slices = []
    for module in known.in_order(found):
        entry = found[module]
        rank = config.rank_pattern[ranks[entry.path]] if entry.path in ranks else config.rank
        alpha = config.alpha_pattern[alphas[entry.path]] if entry.path in alphas else config.alpha
        bound = _bind_module(*known.slices[module], entry, rank, alpha, config.use_rslora)
        if isinstance(bound, BoundSlice):
            slices.append(bound)
        else:
            problems += bound
    _refuse(problems, slices)
    return Binding(tuple(slices), tuple(copies), _rows(slices), _notes(config, known, copies))


class _Known:
    """The layout's slices by module path, and by path without the name of the model around it."""

    def __init__(self, layout: BaseLayout) -> None:
        self.slices = {piece.module: (p, piece) for p in layout.projections for piece in p.slices}
        self.by_tail = {_tail(module): module for module in self.slices}
        assert len(self.by_tail) == len(self.slices), "module paths are unique without the model's name"

        self.unadapted = tuple(_tail(module) for module in layout.unadapted)
        self.fused = {_tail(name): modules for p in layout.projections for name, modules in _fused(p)}

    def in_order(self, modules: Mapping[str, object]) -> list[str]:
        return [module for module in self.slices if module in modules]

    def resolve(self, path: str) -> str | None:
        return self.by_tail.get(_tail(path))

    def why_unknown(self, path: str) -> str:
        """Why nothing binds to the module at `path`."""
        tail = f"{_tail(path)}."
        module = next((module for module in self.unadapted if tail.startswith(f"{module}.")), None)
        if module is None:
            return f"this base model has no projection {path[:200]!r}"
        return f"adapters of experts and of their routers ({module}) are not served: train without these modules"

    def resolve_fused(self, path: str) -> tuple[str, ...] | None:
        """The modules that the one at `path` stands for, in the order of its rows."""
        return self.fused.get(_tail(path))


def _fused(projection: Projection) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Modules that trainers merge out of two neighbours of one input, named by joining what tells them apart:
    in_proj_qkv and in_proj_z become in_proj_qkvz, with the rows of the first before those of the second."""
    for first, second in pairwise(piece.module for piece in projection.slices):
        shared, underscore, _ = first.rpartition("_")
        told_apart = second.removeprefix(shared + underscore)
        if underscore and told_apart != second and "." not in told_apart:
            yield first + told_apart, (first, second)


def _tail(path: str) -> str:
    return path[_end(_MODEL_PREFIX, path) :]


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _trained_path(name: str) -> str:
    """The module path as the trainer's configuration sees it: without what PEFT and wrappers put before it."""
    name = _WRAPPERS.sub("", name)
    return name[_end(_PEFT_PREFIX, name) :]


def _sort_in(tensor: Tensor, known: _Known, found: dict[str, _Found], copies: list[BaseCopy]) -> str | None:
    """Put the tensor where it belongs; the reason if it belongs nowhere."""
    match = _SIDE.fullmatch(tensor.name)
    if match is None:
        return _sort_in_other(tensor, known, copies)
    rest = match["rest"].removesuffix(".weight")
    if rest.count(".") > 1 or rest == ".bias" or match["rest"].endswith(".bias"):
        return "a bias or parameter beside lora_A and lora_B is not supported"
    path, side = _trained_path(match["path"]), match["side"][-1]
    module = known.resolve(path)
    if module is None:
        fused = known.resolve_fused(path)
        if fused is None:
            return known.why_unknown(path)
        return _sort_in_fused(tensor, path, side, fused, known, found)
    is_embedding = known.slices[module][0].kind == "embedding"
    if is_embedding != match["side"].startswith("lora_embedding"):
        return f"{module} takes {'lora_embedding_A/B' if is_embedding else 'lora_A/B'}, not {match['side']}"
    return _put(tensor, path, side, module, found)


def _put(tensor: Tensor, path: str, side: str, module: str, found: dict[str, _Found]) -> str | None:
    entry = found.setdefault(module, _Found(path))
    if side in entry.sides:
        return f"{module} already has lora_{side} from tensor {entry.sides[side].name[:200]!r}"
    entry.sides[side] = tensor
    return None


def _sort_in_fused(
    tensor: Tensor, path: str, side: str, modules: tuple[str, ...], known: _Known, found: dict[str, _Found]
) -> str | None:
    """Of a module that stands for several: each of them has its A, and its own rows of B."""
    sizes = [known.slices[module][1].out_features for module in modules]
    if side == "B" and (len(tensor.shape) != 2 or tensor.shape[0] != sum(sizes)):
        return f"its shape is {tensor.shape}; {path} stands for {', '.join(modules)}, which have {sum(sizes)} rows"
    start = tensor.start
    for module, size in zip(modules, sizes, strict=True):
        part = tensor
        if side == "B":
            end = start + tensor.num_bytes * size // sum(sizes)
            part, start = replace(tensor, shape=(size, tensor.shape[1]), start=start, end=end), end
        reason = _put(part, path, side, module, found)
        if reason is not None:
            return reason
    return None


def _sort_in_other(tensor: Tensor, known: _Known, copies: list[BaseCopy]) -> str | None:
    """Tensors that are no LoRA weights: copies of base embeddings are kept for a comparison, others are refused."""
    name = tensor.name
    if "lora_magnitude_vector" in name:
        return "it belongs to DoRA, which is not supported"
    if ".modules_to_save." in name:
        return "it belongs to a fully trained module (modules_to_save), which is not supported"
    if "token_adapter" in name or "trainable_tokens" in name:
        return "it belongs to trained tokens (trainable_token_indices), which are not supported"
    match = _BASE_WEIGHT.fullmatch(name)
    module = known.resolve(_trained_path(match["path"])) if match else None
    if module is None:
        return "it is neither lora_A nor lora_B of a projection of this base model"
    projection, piece = known.slices[module]
    if projection.group != "embeddings":
        return f"it is a full weight of {module}; only lora_A and lora_B are applied"
    # An embedding's weight is [vocabulary, width], a head's too.
    shape = (projection.in_features, piece.out_features)
    if projection.kind == "linear":
        shape = (piece.out_features, projection.in_features)
    if tensor.shape != shape:
        return f"it is a full weight of shape {tensor.shape}, not {shape}: the vocabulary was changed in training"
    copies.append(BaseCopy(tensor, piece, shape))
    return None


def _check_targets(known: _Known, config: AdapterConfig, found: Mapping[str, _Found]) -> list[tuple[str, str]]:
    """Targets and tensors must name the same modules: more targets mean an incomplete file, more tensors mean tensors
    that PEFT would leave out."""
    paths = {module: found[module].path if module in found else None for module in known.slices}
    renamed = {_model_prefix(module): _model_prefix(path) for module, path in paths.items() if path is not None}
    for module, path in paths.items():
        if path is None:
            prefix = _model_prefix(module)
            paths[module] = renamed.get(prefix, prefix) + _tail(module)
    seen = {module: path for module, path in paths.items() if path is not None}
    linear = [
        name
        for module, path in seen.items()
        if known.slices[module][0].kind == "linear" and known.slices[module][0].group != "embeddings"
        for name in (path, module)
    ]
    matched = targeted(config, sorted({*seen.values(), *found}), linear)
    problems = []
    for module, path in seen.items():
        if path in matched and module not in found:
            problems.append((module, "target_modules names it, but the file has no tensors for it"))
        if module in found and path not in matched and module not in matched:
            problems.append((module, "the file has tensors for it, but target_modules does not name it"))
    return problems


def _model_prefix(path: str) -> str:
    return path[: _end(_MODEL_PREFIX, path)]


def _bind_module(
    projection: Projection, piece: Slice, entry: _Found, rank: int, alpha: float, use_rslora: bool
) -> BoundSlice | list[tuple[str, str]]:
    """The module's slice, or what is wrong with its tensors."""
    if len(entry.sides) < 2:
        present = next(iter(entry.sides.values()))
        other = "B" if "A" in entry.sides else "A"
        return [(present.name, f"its counterpart lora_{other} is missing")]
    a, b = entry.sides["A"], entry.sides["B"]
    problems = []
    for tensor, wanted in ((a, (rank, projection.in_features)), (b, (piece.out_features, rank))):
        if tensor.shape != wanted:
            reason = f"its shape is {tensor.shape}; rank {rank} of {piece.module} needs {wanted}"
            problems.append((tensor.name, reason))
    scaling = alpha / math.sqrt(rank) if use_rslora else alpha / rank
    return problems or BoundSlice(projection, piece, rank, scaling, a, b)


def _rows(slices: list[BoundSlice]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for bound in slices:
        group = bound.projection.group
        rows[group] = max(rows.get(group, 0), bound.rank)
    return rows


def _notes(config: AdapterConfig, known: _Known, copies: list[BaseCopy]) -> tuple[str, ...]:
    notes = [f"{copy.tensor.name} repeats the base's own weight and is not stored." for copy in copies]
    names = config.target_modules if isinstance(config.target_modules, tuple) else ()
    known_endings = {ending for tail in known.by_tail for ending in endings(tail)}
    unused = [name for name in names if _tail(name) not in known_endings]
    if unused:
        notes.append(f"target_modules names nothing in this base model with: {', '.join(unused)[:500]}.")
    return tuple(notes)


def _refuse(problems: list[tuple[str, str]], slices: list[BoundSlice]) -> None:
    if problems:
        shown = "; ".join(f"{name[:200]}: {reason}" for name, reason in problems[:MAX_SHOWN])
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise BindingError(f"The adapter does not fit this base model. {shown}{more}.", tuple(problems))
    if not slices:
        raise BindingError("The adapter has no LoRA tensors for any projection of this base model.", ())
    if all(bound.scaling == 0 for bound in slices):
        raise BindingError("The adapter would change nothing: lora_alpha is 0 for all of its modules.", ())
