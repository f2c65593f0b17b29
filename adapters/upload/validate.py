"""The checks of an adapter before its data is read: where each tensor binds, and whether the device has room."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec

from adapters.errors import BindingError, RowsExceeded
from adapters.files.manifest import ModuleRecord
from adapters.files.safetensors_header import read_chunks, read_header
from adapters.layout import BaseLayout
from adapters.peft.base_weights import BaseWeights
from adapters.peft.binding import bind
from adapters.peft.block_tensors import Stacked
from adapters.peft.bound_tensors import TOKENS, Binding, BoundExtra, BoundSlice, Repeat, first_of, rows_of
from adapters.peft.config import parse_config
from adapters.peft.expert_tensors import split_blocks
from adapters.row_plan import RowPlan

# Training rounds the vocabulary up to a multiple of at most so many tokens (`pad_to_multiple_of`), each a power of two.
_MAX_ROUNDING = 256


def bind_header(config: bytes, tensor_path: Path, layout: BaseLayout, *, is_growing: bool = False) -> Binding:
    """Where each tensor of the file's header binds; `is_growing` as for `read_header`. Raises Malformed, Unsupported,
    BindingError."""
    return bind(layout, parse_config(config), read_header(tensor_path, is_growing=is_growing))


def with_split_blocks(binding: Binding, tensor_path: Path) -> Binding:
    """The binding with each expert's gate and up apart where the file's values allow it."""
    slices = split_blocks(binding.slices, tensor_path)
    return replace(binding, slices=slices, rows=rows_of(slices, binding.extras, binding.tokens))


def check_spare_rows(binding: Binding, num_padding_tokens: int) -> list[str]:
    """Notes about rows behind the base's vocabulary. They stand for tokens that no text holds where the upload's
    tokenizer adds padding tokens alone, and for nothing up to the size that training rounded the vocabulary to.

    num_padding_tokens  that the tokenizer files add behind the vocabulary

    Raises BindingError where the rows may be other tokens'.
    """
    unknown, notes = [], []
    for tensor, num_rows in binding.spare_rows:
        rounded = math.gcd(tensor.shape[0], _MAX_ROUNDING)
        if num_padding_tokens and 0 <= num_rows - num_padding_tokens < rounded:
            notes.append(
                f"The last {num_rows} rows of {tensor.name} are of padding tokens, or of none, which no text holds; "
                "they were left out."
            )
            continue
        unknown.append(
            (
                tensor.name,
                f"it has {num_rows} rows more than the base model's vocabulary: the vocabulary was changed in "
                "training. It is served where these are of padding tokens, as the adapter's tokenizer.json or "
                "added_tokens.json says; upload that too, or train without resize_token_embeddings",
            )
        )
    if unknown:
        raise BindingError.listing(unknown)
    return first_of(notes)


def check_binding(binding: Binding, tensor_path: Path, row_plan: RowPlan | None, base: BaseWeights | None) -> Binding:
    """Everything else that can be decided before a byte of LoRA data is read; the binding without what only repeats the
    base, which PEFT's copies do where that cannot be read. Raises Malformed, BindingError, RowsExceeded."""
    if base is not None:
        unchanged = [
            extra
            for extra in binding.extras
            if extra.replaces is not None and base.repeats(extra.replaces, extra.tensor, tensor_path)
        ]
        binding = binding.without(unchanged) if unchanged else binding
    if row_plan is not None:
        _check_rows(binding, row_plan)
    changed = [
        (
            copy.tensor.name,
            f"it is a full weight of {copy.name.removesuffix('.weight')} that differs from the base's, and "
            "modules_to_save does not name it",
        )
        for copy in binding.base_copies
        if base is None or (base.can_compare and not base.repeats(copy.name, copy.tensor, tensor_path))
    ]
    changed += [
        (one.tensor.name, f"it differs from {one.of.name[:200]!r}, which the file has for the same module")
        for one in binding.repeats
        if not _are_equal(tensor_path, one)
    ]
    if changed:
        raise BindingError.listing(changed)
    return binding


def module_reports(binding: Binding) -> tuple[ModuleRecord, ...]:
    """The load report, in the order of the forward pass; modules without LoRA behind the others."""
    extras: dict[str, list[BoundExtra]] = {}
    for extra in binding.extras:
        extras.setdefault(extra.module, []).append(extra)
    reports = []
    for bound in binding.slices:
        also = extras.pop(bound.slice.module, [])
        num_bytes = bound.a.num_bytes + bound.b.num_bytes + sum(extra.tensor.num_bytes for extra in also)
        parts = tuple(extra.part for extra in also)
        record = ModuleRecord(bound.slice.module, bound.rank, bound.scaling, num_bytes, parts)
        reports.append(msgspec.structs.replace(record, num_experts=bound.num_experts))
    for module, alone in extras.items():
        num_bytes = sum(extra.tensor.num_bytes for extra in alone)
        reports.append(ModuleRecord(module, 0, 0.0, num_bytes, tuple(extra.part for extra in alone)))
    for tokens in binding.tokens:
        num_bytes = tokens.tensor.num_bytes
        reports.append(ModuleRecord(tokens.module, 0, 0.0, num_bytes, (TOKENS,), tokens.token_ids))
    return tuple(reports)


def _are_equal(path: Path, repeat: Repeat) -> bool:
    chunks = zip(read_chunks(path, repeat.tensor), read_chunks(path, repeat.of), strict=True)
    return all(one == other for one, other in chunks)


def _sum_of(bound: BoundSlice) -> str:
    """How the rank of what a trainer has as several modules comes about."""
    ranks = [block.tensor.shape[0] for block in bound.a.blocks] if isinstance(bound.a, Stacked) else []
    return f", the sum of {' + '.join(map(str, ranks))} of its parts" if len(ranks) > 1 else ""


def _check_rows(binding: Binding, plan: RowPlan) -> None:
    largest = max(binding.slices, key=lambda bound: bound.rank, default=None)
    if largest is not None and plan.max_rank is not None and largest.rank > plan.max_rank:
        raise RowsExceeded(
            f"The adapter has rank {largest.rank} in {largest.slice.module}{_sum_of(largest)}; the kernels of this "
            f"device take ranks up to {plan.max_rank}. Use a smaller rank."
        )
    num_tokens = max((len(tokens.token_ids) for tokens in binding.tokens), default=0)
    if plan.max_rank is not None and num_tokens > plan.max_rank:
        raise RowsExceeded(
            f"The adapter has {num_tokens} trained tokens, each a row of rank; the kernels of this device take ranks "
            f"up to {plan.max_rank}. Save the embedding whole (modules_to_save) instead."
        )
    group = plan.group_too_small(binding.rows)
    if group is not None:
        raise RowsExceeded(plan.refusal(group, binding.rows))
