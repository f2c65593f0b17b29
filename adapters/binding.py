"""Which projection slice each tensor of an upload belongs to. Every tensor finds one, or the upload is refused with
the list of those that did not and why."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from adapters.config import AdapterConfig
from adapters.errors import BindingError
from adapters.format import Tensor
from adapters.layout import BaseLayout, Group, Projection, Slice
from adapters.patterns import endings, pattern_values, targeted

# Path components that wrap a model without being part of it; training frameworks stack them in any order.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PEFT_PREFIX = re.compile(r"(?:module\.)*(?:base_model\.model\.)?(?:module\.)*")
# Models inside models: the text part of a multimodal model is the same tree under another name.
_MODEL_PREFIX = re.compile(r"(?:(?:base_model|model|language_model|text_model|module)\.)*")
_SIDE = re.compile(
    r"(?P<path>.+)\.(?P<side>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?P<rest>(?:\.[^.]+){0,2})"
)
_TOKENS = re.compile(r"(?P<path>.+)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?")
_BASE_TENSOR = re.compile(
    r"(?P<path>.+?)(?:\.(?P<wrapper>base_layer|original_module|modules_to_save(?:\.[^.]+)?))?\.(?P<what>weight|bias)"
)
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
    """A tensor of the base model itself that the file repeats; it must equal the base's, or it would be a change.

    name  that the base has for it
    """

    tensor: Tensor
    name: str


@dataclass(frozen=True, slots=True)
class BoundTokens:
    """Rows of the embedding [vocabulary, hidden], or of the head, that an adapter has in the place of the base's:
    tensor [num_ids, hidden]. On the device each is a row of rank that only its token meets."""

    module: str
    token_ids: tuple[int, ...]
    tensor: Tensor


# Parts of an adapter that are no rows, by what stands behind the module in PEFT's names.
MAGNITUDE, LORA_BIAS, BIAS, WEIGHT = "lora_magnitude_vector", "lora_B.bias", "bias", "weight"
TOKENS = "token_adapter.trainable_tokens_delta"


@dataclass(frozen=True, slots=True)
class BoundExtra:
    """What an adapter has for a module beside rows: a magnitude or a bias of a projection [out_features], the weight of
    a norm [width], of the embedding or of the head [vocabulary, width]."""

    module: str
    part: str
    tensor: Tensor
    group: Group

    @property
    def replaces(self) -> str | None:
        """The base's tensor that it stands for; None for what the base has not."""
        return f"{self.module}.{self.part}" if self.part in (BIAS, WEIGHT) else None


@dataclass(frozen=True, slots=True)
class Binding:
    """slices in the layout's order; rows: the largest rank per projection group, and 1 per side group of the extras."""

    slices: tuple[BoundSlice, ...]
    base_copies: tuple[BaseCopy, ...]
    rows: dict[str, int]
    notes: tuple[str, ...] = ()
    extras: tuple[BoundExtra, ...] = ()
    invocation: tuple[int, ...] = ()
    tokens: tuple[BoundTokens, ...] = ()

    def without(self, unchanged: Collection[BoundExtra]) -> Binding:
        """Leave out extras that equal the base's own tensors."""
        extras = tuple(extra for extra in self.extras if extra not in unchanged)
        notes = tuple(f"{extra.tensor.name} repeats the base's own tensor and is not stored." for extra in unchanged)
        return replace(self, extras=extras, rows=_rows(self.slices, extras, self.tokens), notes=(*self.notes, *notes))


@dataclass(slots=True)
class _Found:
    """Tensors of one module: "A", "B", MAGNITUDE, LORA_BIAS; `path` is the module's path as the trainer saw it."""

    path: str
    sides: dict[str, Tensor] = field(default_factory=dict)


def bind(layout: BaseLayout, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> Binding:
    """Raises BindingError listing every tensor that does not bind and every target without tensors, Malformed for a
    pattern that cannot be evaluated."""
    known = _Known(layout)
    problems: list[tuple[str, str]] = []
    found: dict[str, _Found] = {}
    others = _Others(config)
    for tensor in tensors.values():
        reason = _sort_in(tensor, known, found, others)
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
        vectors = _vectors(known.slices[module][1], entry, config)
        if isinstance(vectors, str):
            problems.append((module, vectors))
        else:
            others.extras += vectors
    problems += [
        (extra.tensor.name, f"{extra.module} has LoRA weights too; an adapter trains it whole or with LoRA")
        for extra in others.extras
        if extra.part == WEIGHT and extra.module in found
    ]
    problems += _check_tokens(known, others, found)
    problems += _check_invocation(config, slices, layout)
    _refuse(problems, slices, bool(others.extras or others.tokens))
    extras = tuple(sorted(others.extras, key=lambda extra: (extra.module, extra.part)))
    return Binding(
        tuple(slices),
        tuple(others.copies),
        _rows(slices, extras, others.tokens),
        _notes(config, known, others.copies),
        extras,
        config.invocation,
        tuple(others.tokens),
    )


def _check_invocation(config: AdapterConfig, slices: Sequence[BoundSlice], layout: BaseLayout) -> list[tuple[str, str]]:
    """PEFT activates linear projections alone, so an embedding would be adapted everywhere."""
    if not config.invocation:
        return []
    embeddings = [bound.slice.module for bound in slices if bound.projection.kind == "embedding"]
    problems = [(module, "an adapter with alora_invocation_tokens cannot adapt it") for module in embeddings]
    vocab_size = max((p.in_features for p in layout.projections if p.kind == "embedding"), default=0)
    if max(config.invocation) >= vocab_size:
        problems.append(("alora_invocation_tokens", f"token {max(config.invocation)} is not of this base's vocabulary"))
    return problems


@dataclass(slots=True)
class _Others:
    """Tensors that are no LoRA weights: what is held beside rows, and what must repeat the base."""

    config: AdapterConfig
    extras: list[BoundExtra] = field(default_factory=list)
    copies: list[BaseCopy] = field(default_factory=list)
    tokens: list[BoundTokens] = field(default_factory=list)

    def add(self, extra: BoundExtra) -> str | None:
        twin = next((one for one in self.extras if (one.module, one.part) == (extra.module, extra.part)), None)
        if twin is not None:
            return f"{extra.module} already has its {extra.part} from tensor {twin.tensor.name[:200]!r}"
        self.extras.append(extra)
        return None


class _Known:
    """The layout's slices by module path, and by path without the name of the model around it."""

    def __init__(self, layout: BaseLayout) -> None:
        self.slices = {piece.module: (p, piece) for p in layout.projections for piece in p.slices}
        self.by_tail = {_tail(module): module for module in self.slices}
        assert len(self.by_tail) == len(self.slices), "module paths are unique without the model's name"

        self.unadapted = tuple(_tail(module) for module in layout.unadapted)
        self.ties_head = layout.ties_head
        self.norms = {_tail(norm.module): norm for norm in layout.norms}
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


def _sort_in(tensor: Tensor, known: _Known, found: dict[str, _Found], others: _Others) -> str | None:
    """Put the tensor where it belongs; the reason if it belongs nowhere."""
    match = _SIDE.fullmatch(tensor.name)
    if match is None:
        return _sort_in_other(tensor, known, others)
    side, rest = match["side"], match["rest"].removesuffix(".weight")
    if side == "lora_B" and rest.endswith(".bias"):
        side, rest = LORA_BIAS, rest.removesuffix(".bias")
    if rest.count(".") > 1 or rest.endswith(".bias"):
        return "a bias or parameter beside lora_A and lora_B is not supported"
    if side == MAGNITUDE and not others.config.use_dora:
        return "it belongs to DoRA, and adapter_config.json does not say use_dora"
    if side == LORA_BIAS and not others.config.lora_bias:
        return "it is a bias of lora_B, and adapter_config.json does not say lora_bias"
    path = _trained_path(match["path"])
    module = known.resolve(path)
    if module is None:
        fused = known.resolve_fused(path)
        if fused is None:
            return known.why_unknown(path)
        return _sort_in_fused(tensor, path, _short(side), fused, known, found)
    is_embedding = known.slices[module][0].kind == "embedding"
    if side != MAGNITUDE and is_embedding != side.startswith("lora_embedding"):
        return f"{module} takes {'lora_embedding_A/B' if is_embedding else 'lora_A/B'}, not {match['side']}"
    return _put(tensor, path, _short(side), module, found)


def _short(side: str) -> str:
    """ "A" or "B" of those, whatever the projection; the other parts as they are."""
    return side if side in (MAGNITUDE, LORA_BIAS) else side[-1]


def _put(tensor: Tensor, path: str, side: str, module: str, found: dict[str, _Found]) -> str | None:
    entry = found.setdefault(module, _Found(path))
    if side in entry.sides:
        named = f"lora_{side}" if len(side) == 1 else side
        return f"{module} already has {named} from tensor {entry.sides[side].name[:200]!r}"
    entry.sides[side] = tensor
    return None


def _sort_in_fused(
    tensor: Tensor, path: str, side: str, modules: tuple[str, ...], known: _Known, found: dict[str, _Found]
) -> str | None:
    """Of a module that stands for several: each of them has its A, and its own rows of B and of what goes with it."""
    sizes = [known.slices[module][1].out_features for module in modules]
    if side != "A" and (len(tensor.shape) != 1 + (side == "B") or tensor.shape[0] != sum(sizes)):
        return f"its shape is {tensor.shape}; {path} stands for {', '.join(modules)}, which have {sum(sizes)} rows"
    start = tensor.start
    for module, size in zip(modules, sizes, strict=True):
        part = tensor
        if side != "A":
            end = start + tensor.num_bytes * size // sum(sizes)
            part, start = replace(tensor, shape=(size, *tensor.shape[1:]), start=start, end=end), end
        reason = _put(part, path, side, module, found)
        if reason is not None:
            return reason
    return None


def _sort_in_other(tensor: Tensor, known: _Known, others: _Others) -> str | None:
    """Tensors that are no LoRA weights: trained whole, or copies of the base's that are kept for a comparison."""
    name = tensor.name
    if (trained := _TOKENS.fullmatch(name)) is not None:
        return _add_tokens(tensor, _trained_path(trained["path"]), known, others)
    match = _BASE_TENSOR.fullmatch(name)
    if match is None:
        return "it is neither lora_A nor lora_B of a projection of this base model"
    path, wrapper, what = _trained_path(match["path"]), match["wrapper"] or "", match["what"]
    module, config = known.resolve(path), others.config
    norm = known.norms.get(_tail(path))
    if what == BIAS:
        if module is None or not config.has_biases:
            return "it is a bias, and adapter_config.json says bias 'none' or this base has no such projection"
        return _add_bias(tensor, *known.slices[module], others)
    if module is None and norm is None:
        if config.modules_to_save:
            return "of whole modules (modules_to_save), norms of hidden states, the embedding and the head are applied"
        return "it is neither lora_A nor lora_B of a projection of this base model"
    is_saved = bool(config.modules_to_save) and wrapper not in ("base_layer", "original_module")
    if wrapper.startswith("modules_to_save") and not is_saved:
        return "it belongs to a fully trained module, and adapter_config.json names none (modules_to_save)"
    if norm is not None:
        shape: tuple[int, ...] = (norm.out_features,)
        home, group = norm.module, "norms"
    else:
        assert module is not None
        projection, piece = known.slices[module]
        if projection.group != "embeddings":
            return f"it is a full weight of {module}; of whole modules, norms, the embedding and the head are applied"
        # An embedding's weight is [vocabulary, width], a head's too.
        shape = (projection.in_features, piece.out_features)
        if projection.kind == "linear":
            shape = (piece.out_features, projection.in_features)
        home, group = module, "saved_head" if projection.kind == "linear" else "saved_embedding"
    if tensor.shape != shape:
        why = "" if norm is not None else ": the vocabulary was changed in training"
        return f"it is a full weight of shape {tensor.shape}, not {shape}{why}"
    if is_saved:
        return others.add(BoundExtra(home, WEIGHT, tensor, group))  # type: ignore[arg-type]
    others.copies.append(BaseCopy(tensor, f"{home}.{WEIGHT}"))
    return None


def _add_tokens(tensor: Tensor, path: str, known: _Known, others: _Others) -> str | None:
    module = known.resolve(path)
    if module is None or known.slices[module][0].group != "embeddings":
        return "it belongs to trained tokens of a module that is neither the embedding nor the head"
    projection, piece = known.slices[module]
    sizes = (projection.in_features, piece.out_features)
    hidden, vocab_size = sizes[::-1] if projection.kind == "embedding" else sizes
    named = {ending or ("" if projection.kind == "embedding" else None) for ending in (*endings(path), "")}
    ids = next((ids for key, ids in others.config.trained_tokens.items() if key in named), None)
    if ids is None:
        return f"it belongs to trained tokens, and trainable_token_indices names none of {module}"
    if tensor.shape != (len(ids), hidden) or max(ids) >= vocab_size:
        return (
            f"its shape is {tensor.shape}, for {len(ids)} tokens up to {max(ids)} of {vocab_size}, {hidden} wide each"
        )
    others.tokens.append(BoundTokens(module, ids, tensor))
    return None


def _check_tokens(known: _Known, others: _Others, found: Mapping[str, _Found]) -> list[tuple[str, str]]:
    """Of a base that ties its head, the embedding's trained tokens are the head's too, unless it has its own."""
    bound = {one.module for one in others.tokens}
    if others.config.trained_tokens and not bound:
        return [("trainable_token_indices", "the file has no tensors for it")]
    tied = [one for one in others.tokens if known.slices[one.module][0].kind == "embedding" and known.ties_head]
    heads = [name for name, (p, _) in known.slices.items() if p.group == "embeddings" and p.kind == "linear"]
    others.tokens += [replace(one, module=head) for one in tied for head in heads if head not in bound]
    whole = {extra.module for extra in others.extras if extra.part == WEIGHT}
    return [
        (one.tensor.name, f"{one.module} is trained in another way too; an adapter does either")
        for one in others.tokens
        if one.module in found or one.module in whole
    ]


def _add_bias(tensor: Tensor, projection: Projection, piece: Slice, others: _Others) -> str | None:
    if projection.kind == "embedding" or tensor.shape != (piece.out_features,):
        return f"it is a bias of shape {tensor.shape}; that of {piece.module} would be {(piece.out_features,)}"
    return others.add(BoundExtra(piece.module, BIAS, tensor, "vectors"))


def _vectors(piece: Slice, entry: _Found, config: AdapterConfig) -> list[BoundExtra] | str:
    """Magnitude and bias of an adapted module, or which is missing or misshapen."""
    extras = []
    for part, is_wanted in ((MAGNITUDE, config.use_dora), (LORA_BIAS, config.lora_bias)):
        tensor = entry.sides.get(part)
        if tensor is None:
            if is_wanted:
                return f"its {part} is missing, and adapter_config.json says that there is one"
            continue
        if tensor.shape != (piece.out_features,):
            return f"its {part} has shape {tensor.shape}, not {(piece.out_features,)}"
        extras.append(BoundExtra(piece.module, part, tensor, "vectors"))
    return extras


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
    if not {"A", "B"} <= entry.sides.keys():
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


def _rows(slices: Sequence[BoundSlice], extras: Sequence[BoundExtra], tokens: Sequence[BoundTokens]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for bound in slices:
        group = bound.projection.group
        rows[group] = max(rows.get(group, 0), bound.rank)
    for one in tokens:
        rows["embeddings"] = max(rows.get("embeddings", 0), len(one.token_ids))
    return rows | {extra.group: 1 for extra in extras}


def _notes(config: AdapterConfig, known: _Known, copies: list[BaseCopy]) -> tuple[str, ...]:
    notes = [f"{copy.tensor.name} repeats the base's own weight and is not stored." for copy in copies]
    names = config.target_modules if isinstance(config.target_modules, tuple) else ()
    known_endings = {ending for tail in known.by_tail for ending in endings(tail)}
    unused = [name for name in names if _tail(name) not in known_endings]
    if config.invocation:
        shown = str(list(config.invocation))[:200]
        notes.append(
            f"It begins at the last place of the tokens {shown} in a prompt; where they are not, the base answers."
        )
    if unused:
        notes.append(f"target_modules names nothing in this base model with: {', '.join(unused)[:500]}.")
    return tuple(notes)


def _refuse(problems: list[tuple[str, str]], slices: list[BoundSlice], has_more: bool) -> None:
    if problems:
        shown = "; ".join(f"{name[:200]}: {reason}" for name, reason in problems[:MAX_SHOWN])
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise BindingError(f"The adapter does not fit this base model. {shown}{more}.", tuple(problems))
    if not slices:
        raise BindingError("The adapter has no LoRA tensors for any projection of this base model.", ())
    if not has_more and all(bound.scaling == 0 for bound in slices):
        raise BindingError("The adapter would change nothing: lora_alpha is 0 for all of its modules.", ())
