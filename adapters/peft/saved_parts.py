"""Modules that were trained whole and tokens that were trained: what tied heads share, and whether the file has all
that the configuration names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from adapters.peft.bound_tensors import WEIGHT
from adapters.peft.module_names import KnownModules
from adapters.peft.target_patterns import endings
from adapters.peft.tensor_names import OtherTensors


def tie_whole_head(known: KnownModules, others: OtherTensors) -> None:
    """An embedding that was trained whole as the head too is the head's, unless the file has the head itself."""
    if not (others.config.ties_head and known.ties_head):
        return
    whole = {extra.module: extra for extra in others.extras if extra.part == WEIGHT}
    tied = [whole[name] for name in known.embeddings if name in whole]
    others.extras += [
        replace(one, module=head, group="saved_head") for one in tied for head in known.heads if head not in whole
    ]


def check_saved(known: KnownModules, others: OtherTensors) -> list[tuple[str, str]]:
    """What modules_to_save names, as PEFT looks for it, and the file has not: some ways to save lose these modules, and
    the base's would answer in their place."""
    whole = {extra.module for extra in others.extras if extra.part == WEIGHT}
    names = others.config.modules_to_save
    modules = (*known.slices, *(norm.module for norm in known.norms.values()))
    return [
        (module, "modules_to_save names it, but the file has no tensors for it")
        for module in modules
        if module not in whole and module.endswith(names)
    ]


def check_tokens(known: KnownModules, others: OtherTensors, adapted: Collection[str]) -> list[tuple[str, str]]:
    """Of a base that ties its head, the embedding's trained tokens are the head's too, unless it has its own, or is
    there whole: then it was untied to be trained. What the configuration names and the file has not is refused."""
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
