"""Modules trained whole and trained tokens: sharing with tied heads, and checking that the file has all that the
configuration names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from adapters.peft.bound_tensors import WEIGHT
from adapters.peft.module_names import KnownModules
from adapters.peft.target_patterns import endings
from adapters.peft.tensor_names import OtherTensors


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
