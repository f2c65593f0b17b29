"""Binding of an upload's tensors to projection slices. Every tensor binds, or the upload is refused with the list of
those that do not and why."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from adapters.errors import BindingError
from adapters.files.safetensors_header import Tensor
from adapters.layout import BaseLayout
from adapters.peft.bound_tensors import BIAS, SCORE, WEIGHT, Binding, BoundSlice, first_of, rows_of
from adapters.peft.config import AdapterConfig
from adapters.peft.expert_tensors import ExpertForms
from adapters.peft.module_names import KnownModules, OutputRows, model_prefix, tail_of
from adapters.peft.slice_mapping import Problems, SlicePiece, bind_slice, clashes, misfits, pieces_of
from adapters.peft.target_patterns import endings, is_targeted_parameter, pattern_values, targeted
from adapters.peft.tensor_names import FoundModule, OtherTensors, sort_in


def tie_whole_head(known: KnownModules, others: OtherTensors) -> None:
    """Use an embedding trained whole for a tied head too, unless the file has the head itself."""
    if not (others.config.ties_head and known.ties_head):
        return
    whole = {extra.module: extra for extra in others.extras if extra.part == WEIGHT}
    tied = [whole[name] for name in known.embeddings if name in whole]
    others.extras += [
        replace(one, module=head, group="saved_head") for one in tied for head in known.heads if head not in whole
    ]


def check_saved(known: KnownModules, others: OtherTensors) -> list[tuple[str, str]]:
    """Modules that modules_to_save names, matched as PEFT does, and that the file lacks, each with a sentence: some
    ways of saving lose them, and the base's would answer instead."""
    whole = {extra.module for extra in others.extras if extra.part == WEIGHT}
    names = others.config.modules_to_save
    of_head = {one.part: one.tensor for one in others.extras if one.module == SCORE}
    if others.config.needs_head and WEIGHT not in of_head:
        return [(SCORE, "task_type SEQ_CLS needs a score head, and the file has no weight of `score` or `classifier`")]
    if of_head and (WEIGHT not in of_head or len({tensor.shape[0] for tensor in of_head.values()}) > 1):
        return [(one.name, "weight and bias of the score head do not belong together") for one in of_head.values()]
    modules = (*known.slices, *(norm.module for norm in known.norms.values()))
    return [
        (module, "modules_to_save names it, but the file has no tensors for it")
        for module in modules
        if module not in whole and module.endswith(names)
    ]


def check_tokens(known: KnownModules, others: OtherTensors, adapted: Collection[str]) -> list[tuple[str, str]]:
    """Share trained tokens with a tied head, and list what the configuration names and the file lacks, each with a
    sentence.

    A tied head shares the embedding's trained tokens, unless it has its own or is saved whole: then training untied it.
    """
    bound = {one.module for one in others.tokens}
    if others.config.trained_tokens and not bound:
        return [("trainable_token_indices", "the file has no tensors for it")]
    whole = {extra.module for extra in others.extras if extra.part == WEIGHT}
    tied = [one for one in others.tokens if one.module in known.embeddings and known.ties_head]
    others.tokens += [replace(one, module=head) for one in tied for head in known.heads if head not in bound | whole]
    bound = {one.module for one in others.tokens}
    problems = [
        (module, "trainable_token_indices names it, but the file has no tensors for it")
        for module in (*known.embeddings, *known.heads)
        if module not in bound and not others.config.trained_tokens.keys().isdisjoint(endings(module))
    ]
    problems += [
        (one.tensor.name, f"{one.module} is trained in another way too; an adapter does either")
        for one in others.tokens
        if one.module in adapted or one.module in whole
    ]
    return problems


_INDEX = re.compile(r"(?<=\.)\d+\.")
_WITHOUT_TENSORS = "target_modules names it, but the file has no tensors for it"
_NO_PARAMETER = (
    "target_parameters names it, but the base model has no such parameter and the file no tensors for it; send the "
    "adapter to the base that it was trained on"
)


def bind(layout: BaseLayout, config: AdapterConfig, tensors: Mapping[str, Tensor]) -> Binding:
    """Raises BindingError listing every tensor that does not bind and every target without tensors, Malformed for a
    pattern that cannot be evaluated."""
    known = KnownModules(layout)
    problems: Problems = []
    found: dict[str, FoundModule] = {}
    others = OtherTensors(config)
    for tensor in tensors.values():
        reason = sort_in(tensor, known, found, others)
        if reason is not None:
            problems.append((tensor.name, reason))
    if others.left and not (problems or found or others.experts or others.extras or others.tokens):
        raise BindingError(
            f"The adapter changes {', '.join(sorted(others.left))} alone, which is not served: this server answers "
            "texts, and no answer to a text would change. Train modules of the text model too.",
            (),
        )
    tie_whole_head(known, others)
    problems += _check_targets(known, config, found)
    if not problems:
        problems += _check_unserved_targets(known, config, found, others, layout)
    slices, faults = _bind_modules(known, config, found, others)
    problems += faults
    of_experts, faults = _bind_experts(layout, config, others)
    problems += faults
    if not (problems or of_experts):
        problems += _check_parameters(config, found)
    order = {piece.module: at for at, piece in enumerate(piece for p in layout.projections for piece in p.slices)}
    slices = sorted((*slices, *of_experts), key=lambda bound: order[bound.slice.module])
    adapted = {rows.module for entry in found.values() for rows in entry.rows}
    problems += [
        (extra.tensor.name, f"{extra.module} has LoRA weights too; an adapter trains it whole or with LoRA")
        for extra in others.extras
        if extra.part == WEIGHT and extra.module in adapted
    ]
    problems += check_tokens(known, others, adapted)
    if not problems:
        problems += check_saved(known, others)
    problems += _check_invocation(config, slices, layout)
    _refuse(problems, slices, others)
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
        tuple(others.spare_rows),
        config.head_facts if any(extra.module == SCORE for extra in extras) else None,
        config.classifier_from_token,
    )


def _check_parameters(config: AdapterConfig, found: Mapping[str, FoundModule]) -> Problems:
    if any(is_targeted_parameter(config, f"{entry.path}.weight") for entry in found.values()):
        return []
    return [(one, _NO_PARAMETER) for one in config.target_parameters]


def _bind_modules(
    known: KnownModules, config: AdapterConfig, found: Mapping[str, FoundModule], others: OtherTensors
) -> tuple[list[BoundSlice], Problems]:
    """The slices of adapted modules, and what is wrong with others of them; their magnitudes and biases go to
    `others`."""
    slices: list[BoundSlice] = []
    problems: Problems = []
    paths = {name: _pattern_path(config, entry.path) for name, entry in found.items()}
    ranks = pattern_values(list(config.rank_pattern), [*paths.values()], "rank_pattern")
    alphas = pattern_values(list(config.alpha_pattern), [*paths.values()], "alpha_pattern")
    own_ranks = {
        name: config.rank_pattern[ranks[path]] if path in ranks else config.rank for name, path in paths.items()
    }
    of_embedding = [own_ranks[name] for name, entry in found.items() if entry.rows[0].module in known.embeddings]
    pieces: list[SlicePiece] = []
    for name, entry in found.items():
        rank, path = own_ranks[name], paths[name]
        alpha = config.alpha_pattern[alphas[path]] if path in alphas else config.alpha
        scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
        if config.ties_head and known.ties_head and entry.rows[0].module in known.heads:
            # Its weights are the embedding's, hence their rank, but it is scaled as its own settings say.
            rank = next(iter(of_embedding), rank)
        faults = misfits(entry, known, config, rank)
        problems += faults
        pieces += () if faults else pieces_of(entry, rank, scaling)
    in_order = sorted(pieces, key=lambda one: known.place(one.rows))
    for module, of_module in groupby(in_order, key=lambda one: one.rows.module):
        some = list(of_module)
        faults = clashes(some, known.slices[module][1])
        problems += faults
        if not faults:
            bound, extras = bind_slice(*known.slices[module], some)
            slices.append(bound)
            others.extras += extras
    return slices, problems


def _bind_experts(layout: BaseLayout, config: AdapterConfig, others: OtherTensors) -> tuple[list[BoundSlice], Problems]:
    """The slices of adapted experts, and what is wrong with others of them."""
    if not (others.experts or config.target_parameters):
        return [], []
    forms = ExpertForms(config, {projection.name: projection for projection in layout.projections})
    pieces, problems = forms.pieces(tuple(others.experts.values()))
    trained_beside = "use_dora" if config.use_dora else "lora_bias" if config.lora_bias else None
    if others.experts and trained_beside is not None:
        reason = f"adapter_config.json says {trained_beside}, which is not served of experts: train them without it"
        return [], [(path, reason) for path in others.experts]
    paths = [path for _, piece in pieces for path in piece.paths]
    ranks = pattern_values(list(config.rank_pattern), paths, "rank_pattern")
    alphas = pattern_values(list(config.alpha_pattern), paths, "alpha_pattern")
    possible = {path for entry, piece in pieces for names in forms.names(entry, piece) for path in names}
    possible |= {path for _, piece in pieces for path in piece.absent}
    matched = targeted(config, sorted(possible), possible)
    slices: dict[str, BoundSlice] = {}
    for entry, piece in pieces:
        settings = {
            (
                config.rank_pattern[ranks[path]] if path in ranks else config.rank,
                config.alpha_pattern[alphas[path]] if path in alphas else config.alpha,
            )
            for path in piece.paths
        }
        rank, alpha = next(iter(settings))
        if len(settings) > 1:
            what = "rank_pattern or alpha_pattern tells experts of its layer apart; give all one value"
            problems.append((piece.path, what))
        elif piece.rank != rank:
            reason = f"its tensors have rank {piece.rank} for each expert, and adapter_config.json says {rank}"
            problems.append((piece.path, reason))
        elif not any(map(matched.issuperset, forms.names(entry, piece))) and not is_targeted_parameter(
            config, piece.path
        ):
            where = "target_parameters" if piece.is_parameter else "target_modules"
            problems.append((piece.path, f"the file has tensors for it, but {where} does not name it"))
        elif absent := [path for path in piece.absent if not matched.isdisjoint((path, entry.path))]:
            problems += ((path, _WITHOUT_TENSORS) for path in absent)
        else:
            scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
            for bound in forms.bind(entry, piece, scaling):
                if bound.slice.module in slices:
                    problems.append((piece.path, f"the file has {bound.slice.module} in another form too"))
                slices[bound.slice.module] = bound
    if not problems:
        problems += forms.missing(layout, pieces, slices)
    return list(slices.values()), problems


def _pattern_path(config: AdapterConfig, path: str) -> str:
    """The path that rank_pattern and alpha_pattern are matched with: of the parameter, where that is the target."""
    return f"{path}.weight" if is_targeted_parameter(config, f"{path}.weight") else path


def _check_targets(known: KnownModules, config: AdapterConfig, found: Mapping[str, FoundModule]) -> Problems:
    """Targets and tensors must name the same modules: more targets mean an incomplete file, more tensors mean tensors
    that PEFT would leave out."""
    prefixes = _prefixes(found)

    def path_of(module: str) -> str:
        """The module's path as the trainer would write it."""
        entry, prefix = found.get(tail_of(module)), model_prefix(module)
        return entry.path if entry is not None else prefixes.get(prefix, prefix) + tail_of(module)

    paths = {module: path_of(module) for module in known.slices}
    adapted = {rows.module for entry in found.values() for rows in entry.rows}
    absent = {path_of(name): modules for name, modules in _absent(known, found).items()}
    linear = [
        name
        for module, path in paths.items()
        if known.slices[module][0].kind == "linear" and known.slices[module][0].group != "embeddings"
        for name in (path, module)
    ]
    renamed = [*absent, *(entry.path for tail, entry in found.items() if tail in known.renamed)]
    matched = targeted(config, sorted({*paths.values(), *adapted, *renamed}), [*linear, *renamed])
    if config.ties_head and known.ties_head and any(paths[name] in matched for name in known.embeddings):
        matched |= {paths[head] for head in known.heads}
    untrained = _untrained(known, config, found)
    missing = [module for module, path in paths.items() if path in matched and module not in adapted | untrained]
    problems = [(module, _WITHOUT_TENSORS) for module in missing]
    problems += [
        (entry.name, "the file has tensors for it, but target_modules does not name it")
        for entry in found.values()
        if entry.path not in matched and not all(rows.module in matched for rows in entry.rows)
    ]
    # A file with parts of a module of which the configuration knows the whole alone must have all of them.
    as_wholes = {rows.module for entry in found.values() if entry.path not in matched for rows in entry.rows}
    problems += [
        (path, _WITHOUT_TENSORS)
        for path, modules in absent.items()
        if modules.isdisjoint(missing)
        and (path in matched or modules <= as_wholes & matched)
        and untrained.isdisjoint(modules)
    ]
    return problems


def _kind(module: str) -> str:
    """The module's path without the index of its layer."""
    return _INDEX.sub("", module)


def _untrained(known: KnownModules, config: AdapterConfig, found: Mapping[str, FoundModule]) -> set[str]:
    """Modules that "all-linear" does not stand for: the file has none of their kind. PEFT saves names in its place, so
    another tool wrote it, and these leave out routers, say, or all of attention."""
    if not config.is_all_linear:
        return set()
    kinds = {_kind(rows.module) for entry in found.values() for rows in entry.rows}
    return {module for module in known.slices if _kind(module) not in kinds}


def _prefixes(found: Mapping[str, FoundModule]) -> dict[str, str]:
    """The trainer's prefix of module paths, by the base's prefix."""
    return {model_prefix(rows.module): model_prefix(entry.path) for entry in found.values() for rows in entry.rows}


def _absent(known: KnownModules, found: Mapping[str, FoundModule]) -> dict[str, set[str]]:
    """Modules of `_renamed` without rows in the file, with the base's modules that they belong to."""
    adapted: dict[str, list[OutputRows]] = {}
    for entry in found.values():
        for rows in entry.rows:
            adapted.setdefault(rows.module, []).append(rows)
    return {
        model_prefix(rows[0].module) + tail: {one.module for one in rows}
        for tail, rows in _renamed(known, found).items()
        if not any(one.meets(other) for one in rows for other in adapted.get(one.module, ()))
    }


def _renamed(known: KnownModules, found: Mapping[str, FoundModule]) -> Mapping[str, tuple[OutputRows, ...]]:
    """`KnownModules.renamed` of a trainer that has such modules; of others nothing, whose models have none of that
    name, so that a target called so adapts nothing."""
    return known.renamed if any(tail in known.renamed for tail in found) else {}


def _check_unserved_targets(
    known: KnownModules,
    config: AdapterConfig,
    found: Mapping[str, FoundModule],
    others: OtherTensors,
    layout: BaseLayout,
) -> Problems:
    """Refuse targets, or modules trained whole, that match only modules which no adapter changes here and that have no
    tensors: PEFT adapts such a module or refuses it, so the file lacks what was asked for."""
    is_expression = isinstance(config.target_modules, str)
    prefix = model_prefix(layout.layer_prefix)
    prefix = _prefixes(found).get(prefix, prefix)
    served = known.experts if others.experts else {}  # `ExpertForms.missing` has looked at these
    paths = [prefix + tail for tail in known.unserved if tail not in served]
    modules = [prefix + tail for tail in known.unserved_modules if tail not in served]
    matched = targeted(config, modules if is_expression else paths, ())
    problems: dict[str, str] = {}  # one for each name or expression, of the first module that it stands for
    for path in paths:
        named = [("modules_to_save", name) for name in endings(path) if name in config.modules_to_save][:1]
        if path in matched and is_expression:
            named.append(("target_modules", str(config.target_modules)[:200]))
        elif path in matched:
            named += [("target_modules", name) for name in endings(path) if name in config.target_modules][:1]
        for field, name in named:
            is_without = field == "target_modules" and tail_of(path) in known.experts
            problems.setdefault(f"{field} {name!r}", _WITHOUT_TENSORS if is_without else known.why_unknown(path))
    return list(problems.items())


def _check_invocation(config: AdapterConfig, slices: Sequence[BoundSlice], layout: BaseLayout) -> Problems:
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
    notes = first_of([f"{copy.tensor.name} repeats the base's own weight and is not stored." for copy in others.copies])
    notes += first_of([f"{one.tensor.name} repeats {one.of.name} and is not stored." for one in others.repeats])
    notes += [
        f"{len(left)} tensors of {part} are left ({left[0][:200]}, ...): not served, and without effect on a text."
        for part, left in others.left.items()
    ]
    names = config.target_modules if isinstance(config.target_modules, tuple) else ()
    known_endings = {ending for tail in (*known.by_tail, *_renamed(known, found)) for ending in endings(tail)}
    of_experts = (f"{entry.path}.{rest}" for entry in others.experts.values() for rest in ("", *entry.sides))
    known_endings |= {ending for path in of_experts for ending in endings(tail_of(path.strip(".")))}
    unused = [name for name in names if tail_of(name) not in known_endings]
    ends = {*known.embeddings, *known.heads}
    untrained = sorted({tail_of(_kind(module)) for module in _untrained(known, config, found) - ends})
    is_ordered = any(entry.has_ordered_ranks for entry in others.experts.values())
    if is_ordered and config.is_of_unsloth and config.has_grouped_experts is None:
        notes.append(
            "lora_B of the experts is read in PEFT's order. It names Unsloth, which trained in another one before "
            "September 2026: if the answers lack what it learnt, upload it with expert_b_order=grouped_by_expert."
        )
    if config.has_biases and not any(extra.part == BIAS for extra in others.extras):
        notes.append("The file has no biases, though `bias` says that they were trained: those of the base stay.")
    if config.invocation:
        shown = str(list(config.invocation))[:200]
        notes.append(
            f"It begins at the last place of the tokens {shown} in a prompt; where they are not, the base answers."
        )
    if untrained:
        notes.append(f"It says all-linear, and the file has nothing for {', '.join(untrained)[:500]}: the base's stay.")
    if unused:
        notes.append(f"target_modules names nothing in this base model with: {', '.join(unused)[:500]}.")
    return tuple(notes)


def _refuse(problems: Problems, slices: list[BoundSlice], others: OtherTensors) -> None:
    if problems:
        raise BindingError.listing(problems)
    if not slices:
        raise BindingError("The adapter has no LoRA tensors for any projection of this base model.", ())
    if not (others.extras or others.tokens) and all(bound.scaling == 0 for bound in slices):
        raise BindingError("The adapter would change nothing: lora_alpha is 0 for all of its modules.", ())
