"""Which projection slice each tensor of an upload belongs to. Every tensor finds one, or the upload is refused with
the list of those that did not and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from adapters.bound import (
    BIAS,
    LORA_BIAS,
    MAGNITUDE,
    WEIGHT,
    Binding,
    BoundExtra,
    BoundSlice,
    rows_of,
)
from adapters.errors import BindingError
from adapters.format import Tensor
from adapters.layout import BaseLayout, ProjectionSpec, Slice
from adapters.module_names import KnownModules, model_prefix, tail_of
from adapters.patterns import endings, pattern_values, targeted
from adapters.peft_config import AdapterConfig
from adapters.saved_parts import check_saved, check_tokens, tie_whole_head
from adapters.tensor_sorting import FoundModule, OtherTensors, sort_in

MAX_SHOWN = 8
_WITHOUT_TENSORS = "target_modules names it, but the file has no tensors for it"


def bind(
    layout: BaseLayout, config: AdapterConfig, tensors: Mapping[str, Tensor], *, is_stored: bool = False
) -> Binding:
    """Raises BindingError listing every tensor that does not bind and every target without tensors, Malformed for a
    pattern that cannot be evaluated. is_stored: see `check_headers`."""
    known = KnownModules(layout)
    problems: list[tuple[str, str]] = []
    found: dict[str, FoundModule] = {}
    others = OtherTensors(config)
    for tensor in tensors.values():
        reason = sort_in(tensor, known, found, others)
        if reason is not None:
            problems.append((tensor.name, reason))
    tie_whole_head(known, others)
    problems += _check_targets(known, config, found)
    if not problems:
        problems += _check_unserved_targets(known, config, layout)
    slices, misfits = _bind_modules(known, config, found, others)
    problems += misfits
    problems += [
        (extra.tensor.name, f"{extra.module} has LoRA weights too; an adapter trains it whole or with LoRA")
        for extra in others.extras
        if extra.part == WEIGHT and extra.module in found
    ]
    problems += check_tokens(known, others, found)
    if not problems and not is_stored:
        problems += check_saved(known, others)
    problems += _check_invocation(config, slices, layout)
    _refuse(problems, slices, bool(others.extras or others.tokens))
    extras = tuple(sorted(others.extras, key=lambda extra: (extra.module, extra.part)))
    return Binding(
        tuple(slices),
        tuple(others.copies),
        rows_of(slices, extras, others.tokens),
        _notes(config, known, found, others),
        extras,
        config.invocation,
        tuple(others.tokens),
        tuple(others.repeats),
    )


def _bind_modules(
    known: KnownModules, config: AdapterConfig, found: Mapping[str, FoundModule], others: OtherTensors
) -> tuple[list[BoundSlice], list[tuple[str, str]]]:
    """The slices of adapted modules, and what is wrong with others of them; their magnitudes and biases go to
    `others`."""
    slices: list[BoundSlice] = []
    problems: list[tuple[str, str]] = []
    paths = [entry.path for entry in found.values()]
    ranks = pattern_values(list(config.rank_pattern), paths, "rank_pattern")
    alphas = pattern_values(list(config.alpha_pattern), paths, "alpha_pattern")
    own_ranks = {
        module: config.rank_pattern[ranks[entry.path]] if entry.path in ranks else config.rank
        for module, entry in found.items()
    }
    for module in known.in_order(found):
        entry = found[module]
        rank = own_ranks[module]
        alpha = config.alpha_pattern[alphas[entry.path]] if entry.path in alphas else config.alpha
        scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
        if config.ties_head and known.ties_head and module in known.heads:
            # Its weights are the embedding's, hence their rank, but it is scaled as its own settings say.
            rank = next((own_ranks[name] for name in known.embeddings if name in own_ranks), rank)
        bound = _bind_module(*known.slices[module], entry, rank, scaling)
        if isinstance(bound, BoundSlice):
            slices.append(bound)
        else:
            problems += bound
        vectors = _vectors(known.slices[module][1], entry, config)
        if isinstance(vectors, str):
            problems.append((module, vectors))
        else:
            others.extras += vectors
    return slices, problems


def _bind_module(
    projection: ProjectionSpec, piece: Slice, entry: FoundModule, rank: int, scaling: float
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
    return problems or BoundSlice(projection, piece, rank, scaling, a, b)


def _vectors(piece: Slice, entry: FoundModule, config: AdapterConfig) -> list[BoundExtra] | str:
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


def _check_targets(
    known: KnownModules, config: AdapterConfig, found: Mapping[str, FoundModule]
) -> list[tuple[str, str]]:
    """Targets and tensors must name the same modules: more targets mean an incomplete file, more tensors mean tensors
    that PEFT would leave out."""
    paths = {module: found[module].path if module in found else None for module in known.slices}
    renamed = {model_prefix(module): model_prefix(path) for module, path in paths.items() if path is not None}
    for module, path in paths.items():
        if path is None:
            prefix = model_prefix(module)
            paths[module] = renamed.get(prefix, prefix) + tail_of(module)
    seen = {module: path for module, path in paths.items() if path is not None}
    linear = [
        name
        for module, path in seen.items()
        if known.slices[module][0].kind == "linear" and known.slices[module][0].group != "embeddings"
        for name in (path, module)
    ]
    # Merged modules, which no layout has, where the file has nothing of what they stand for.
    absent = {
        renamed.get(model_prefix(modules[0]), model_prefix(modules[0])) + tail: modules
        for tail, modules in _merged(known, found).items()
        if not any(module in found for module in modules)
    }
    matched = targeted(config, sorted({*seen.values(), *found, *absent}), linear)
    if config.ties_head and known.ties_head and any(seen[name] in matched for name in known.embeddings if name in seen):
        matched |= {seen[head] for head in known.heads if head in seen}
    problems = []
    for module, path in seen.items():
        if path in matched and module not in found:
            problems.append((module, _WITHOUT_TENSORS))
        if module in found and path not in matched and module not in matched:
            problems.append((module, "the file has tensors for it, but target_modules does not name it"))
    problems += [
        (path, _WITHOUT_TENSORS)
        for path, modules in absent.items()
        if path in matched and not any(seen[module] in matched for module in modules)
    ]
    return problems


def _merged(known: KnownModules, found: Mapping[str, FoundModule]) -> Mapping[str, tuple[str, ...]]:
    """`KnownModules.fused` of a trainer that merges modules; of others nothing, whose models have none of that name, so
    that a target called so adapts nothing."""
    return known.fused if any(known.resolve(entry.path) is None for entry in found.values()) else {}


def _check_unserved_targets(known: KnownModules, config: AdapterConfig, layout: BaseLayout) -> list[tuple[str, str]]:
    """Names in a list of targets that stand for what no adapter changes, and have no tensors: PEFT adapts such a module
    or refuses it, so the file lacks what was asked for."""
    if isinstance(config.target_modules, str):
        return []
    paths = [model_prefix(layout.layer_prefix) + tail for tail in known.unserved]
    matched, names = targeted(config, paths, ()), frozenset(config.target_modules)
    problems: dict[str, str] = {}  # one for each name, of the first module that it stands for
    for path in paths:
        if path in matched:
            name = next(ending for ending in endings(path) if ending in names)
            problems.setdefault(f"target_modules {name!r}", known.why_unknown(path))
    return list(problems.items())


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


def _notes(
    config: AdapterConfig, known: KnownModules, found: Mapping[str, FoundModule], others: OtherTensors
) -> tuple[str, ...]:
    notes = [f"{copy.tensor.name} repeats the base's own weight and is not stored." for copy in others.copies]
    notes += [f"{one.tensor.name} repeats {one.of.name} and is not stored." for one in others.repeats]
    names = config.target_modules if isinstance(config.target_modules, tuple) else ()
    known_endings = {ending for tail in (*known.by_tail, *_merged(known, found)) for ending in endings(tail)}
    unused = [name for name in names if tail_of(name) not in known_endings]
    if config.has_biases and not any(extra.part == BIAS for extra in others.extras):
        notes.append("The file has no biases, though `bias` says that they were trained: those of the base stay.")
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
