"""From checked header to stored files: the data is read once, in pieces, scanned for NaN and infinity, hashed, and
written in a canonical form (PEFT's own names for the base's modules, sorted, nothing else in the file)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from adapters.base_weights import BaseWeights
from adapters.binding import bind
from adapters.bound import TOKENS, Binding, BoundExtra, BoundSlice
from adapters.config import parse_config
from adapters.errors import BindingError, Malformed, RowsExceeded
from adapters.format import ELEMENT_BYTES, Tensor, read_chunks, read_header, write_header
from adapters.layout import BaseLayout
from adapters.paths import EMBEDDING_SIDES, LINEAR_SIDES, stored_name
from adapters.records import ModuleReport
from adapters.row_plan import RowPlan

IDLE = "The adapter changes nothing: lora_A or lora_B is zero in all of its modules."
LARGE = "Weights are so large that answers may not be finite"
# No training comes near: products of a few such overflow float32.
LARGE_DELTA = 1e6
# Exponent bits all ones: NaN or infinity.
_EXPONENT = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def check_headers(
    config: bytes, tensor_path: Path, layout: BaseLayout, row_plan: RowPlan | None, base: BaseWeights | None
) -> Binding:
    """Everything that can be decided before a byte of LoRA data is read.

    Raises Malformed, Unsupported, BindingError, RowsExceeded.
    """
    binding = bind(layout, parse_config(config), read_header(tensor_path))
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
        if base is None or not base.repeats(copy.name, copy.tensor, tensor_path)
    ]
    if changed:
        shown = "; ".join(f"{name[:200]}: {reason}" for name, reason in changed)
        raise BindingError(f"The adapter does not fit this base model. {shown}.", tuple(changed))
    return binding


def write_canonical(
    binding: Binding, source: Path, target: Path, chat_template: bytes | None
) -> tuple[str, tuple[str, ...]]:
    """Write the LoRA tensors of `source` to `target` (synced to disk) and return the adapter's digest, and warnings.

    The digest covers each module's rank, scaling, dtypes and data and the chat template: whatever changes an answer.
    Key order, metadata, tensor order and training-only settings do not. Raises Malformed for NaN and infinity.
    """
    entries = _canonical_order(binding)
    digest = hashlib.sha256(_canonical_header(binding, chat_template))
    largest: dict[str, float] = {}  # magnitude, by tensor
    with target.open("wb") as file:
        write_header(file, ((name, tensor.dtype, tensor.shape) for name, tensor in entries))
        for _, tensor in entries:
            for chunk in read_chunks(source, tensor):
                found = _refuse_non_finite(tensor, chunk)
                largest[tensor.name] = max(found, largest.get(tensor.name, 0.0))
                digest.update(chunk)
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), tuple(_warnings(binding, largest))


def _warnings(binding: Binding, largest: Mapping[str, float]) -> Iterator[str]:
    """What a probe would refuse, as far as the weights tell."""
    has_delta = any(bound.scaling and largest[bound.a.name] and largest[bound.b.name] for bound in binding.slices)
    if not (has_delta or binding.extras or binding.tokens):
        yield IDLE
    large = next((bound.slice.module for bound in binding.slices if _too_large(bound, largest)), None)
    if large is not None:
        yield f"{LARGE}, as those of {large}; upload it with ?probe=true to find out."


def module_reports(binding: Binding) -> tuple[ModuleReport, ...]:
    """The load report, in the order of the forward pass; modules without LoRA behind the others."""
    extras: dict[str, list[BoundExtra]] = {}
    for extra in binding.extras:
        extras.setdefault(extra.module, []).append(extra)
    reports = []
    for bound in binding.slices:
        also = extras.pop(bound.slice.module, [])
        num_bytes = bound.a.num_bytes + bound.b.num_bytes + sum(extra.tensor.num_bytes for extra in also)
        parts = tuple(extra.part for extra in also)
        reports.append(ModuleReport(bound.slice.module, bound.rank, bound.scaling, num_bytes, parts))
    for module, alone in extras.items():
        num_bytes = sum(extra.tensor.num_bytes for extra in alone)
        reports.append(ModuleReport(module, 0, 0.0, num_bytes, tuple(extra.part for extra in alone)))
    for tokens in binding.tokens:
        num_bytes = tokens.tensor.num_bytes
        reports.append(ModuleReport(tokens.module, 0, 0.0, num_bytes, (TOKENS,), tokens.token_ids))
    return tuple(reports)


def _check_rows(binding: Binding, plan: RowPlan) -> None:
    largest = max(binding.slices, key=lambda bound: bound.rank, default=None)
    if largest is not None and plan.max_rank is not None and largest.rank > plan.max_rank:
        raise RowsExceeded(
            f"The adapter has rank {largest.rank} in {largest.slice.module}; the kernels of this device take ranks up "
            f"to {plan.max_rank}. Use a smaller rank."
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


def _sides(bound: BoundSlice) -> Iterator[tuple[str, Tensor]]:
    names = EMBEDDING_SIDES if bound.projection.kind == "embedding" else LINEAR_SIDES
    for side, tensor in zip(names, (bound.a, bound.b), strict=True):
        yield stored_name(bound.slice.module, side), tensor


def _canonical_order(binding: Binding) -> list[tuple[str, Tensor]]:
    """Wide elements first, so that every tensor is aligned in the file; then by name."""
    entries = [entry for bound in binding.slices for entry in _sides(bound)]
    entries += [(stored_name(extra.module, extra.part), extra.tensor) for extra in binding.extras]
    entries += [(stored_name(tokens.module, TOKENS), tokens.tensor) for tokens in binding.tokens]
    return sorted(entries, key=lambda entry: (-ELEMENT_BYTES[entry[1].dtype], entry[0]))


def _canonical_header(binding: Binding, chat_template: bytes | None) -> bytes:
    """What the digest covers besides the data; shapes too, which also tell adapters of different bases apart."""
    modules = sorted(
        [bound.slice.module, bound.scaling.hex(), bound.a.dtype, bound.a.shape, bound.b.dtype, bound.b.shape]
        for bound in binding.slices
    )
    template = None if chat_template is None else hashlib.sha256(chat_template).hexdigest()
    extras = sorted([extra.module, extra.part, extra.tensor.dtype, extra.tensor.shape] for extra in binding.extras)
    described: list[object] = ["multilora adapter 1", modules, template, *([extras] if extras else [])]
    if binding.tokens:
        described.append({"tokens": sorted([one.module, one.token_ids, one.tensor.dtype] for one in binding.tokens)})
    if binding.invocation:
        described.append({"invocation": binding.invocation})
    return json.dumps(described, separators=(",", ":")).encode() + b"\n"


def _refuse_non_finite(tensor: Tensor, chunk: bytes) -> float:
    """The largest magnitude among the values."""
    import numpy as np

    unsigned, exponent = _EXPONENT[tensor.dtype]
    bits = np.frombuffer(chunk, unsigned)
    without_sign = (1 << (8 * bits.itemsize - 1)) - 1
    # As integers with a sign the largest are the positive values of most magnitude, without one the negative ones: no
    # copy of the chunk is made.
    positive, negative = bits.view(unsigned.replace("u", "i")).max(initial=0), bits.max(initial=0)
    largest = max(int(positive), int(negative) & without_sign)
    if largest >= exponent:
        raise Malformed(f"Tensor {tensor.name[:200]!r} holds NaN or infinity; the training has diverged.")
    if tensor.dtype == "F16":
        return float(np.uint16(largest).view("<f2"))
    return float((np.uint32(largest) << (32 - 8 * bits.itemsize)).view("<f4"))


def _too_large(bound: BoundSlice, largest: Mapping[str, float]) -> bool:
    """Whether an element of the delta could be LARGE_DELTA."""
    return bound.rank * abs(bound.scaling) * largest[bound.a.name] * largest[bound.b.name] > LARGE_DELTA
