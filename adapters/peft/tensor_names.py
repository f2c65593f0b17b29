"""Sorting of an upload's tensors by name and shape, or the reason why one belongs nowhere."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

from adapters.files.safetensors_header import ELEMENT_BYTES, Tensor
from adapters.layout import Group, ProjectionSpec, Slice
from adapters.peft.block_tensors import why_in_parts
from adapters.peft.bound_tensors import (
    BIAS,
    LORA_BIAS,
    MAGNITUDE,
    SCORE,
    WEIGHT,
    BaseCopy,
    BoundExtra,
    BoundTokens,
    Repeat,
)
from adapters.peft.config import HEADS, MAX_LABELS, AdapterConfig
from adapters.peft.expert_tensors import FoundExperts
from adapters.peft.module_names import KnownModules, OutputRows, part_beside_text, tail_of, trained_path
from adapters.peft.target_patterns import endings

_SIDE = re.compile(
    r"(?P<path>.+)\.(?P<side>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?P<rest>(?:\.[^.]+){0,2})"
)
_TOKENS = re.compile(r"(?P<path>.+)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?")
_BASE_TENSOR = re.compile(
    r"(?P<path>.+?)"
    r"(?:\.(?P<wrapper>(?:token_adapter\.)?base_layer|original_module|modules_to_save(?:\.[^.]+)?))?"
    r"\.(?P<what>weight|bias)"
)
_IN_TOKENS = "token_adapter.base_layer"


@dataclass(slots=True)
class FoundModule:
    """Tensors of a trainer's module: "A", "B", MAGNITUDE, LORA_BIAS.

    name  the base's name, where it has the module
    path  the module's path in training
    rows  output rows that it covers
    """

    name: str
    path: str
    rows: tuple[OutputRows, ...]
    sides: dict[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class OtherTensors:
    """Tensors other than LoRA weights: non-LoRA parameters, copies of the base's tensors, and repeated tensors, since
    PEFT's `save_embedding_layers` saves a module of `modules_to_save` twice.

    left        names by the part of a multimodal model that they belong to, which is not served
    spare_rows  as `Binding` has them
    experts     LoRA of experts, by the path of their module
    """

    config: AdapterConfig
    extras: list[BoundExtra] = field(default_factory=list)
    copies: list[BaseCopy] = field(default_factory=list)
    tokens: list[BoundTokens] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    spare_rows: list[tuple[Tensor, int]] = field(default_factory=list)
    experts: dict[str, FoundExperts] = field(default_factory=dict)

    def add(self, extra: BoundExtra) -> str | None:
        twin = next((one for one in self.extras if (one.module, one.part) == (extra.module, extra.part)), None)
        if twin is None:
            self.extras.append(extra)
        elif twin.tensor.dtype != extra.tensor.dtype or any(one.of == twin.tensor for one in self.repeats):
            return f"{extra.module} already has its {extra.part} from tensor {twin.tensor.name[:200]!r}"
        else:
            self.repeats.append(Repeat(extra.tensor, twin.tensor))
        return None


def sort_in(tensor: Tensor, known: KnownModules, found: dict[str, FoundModule], others: OtherTensors) -> str | None:
    """Add the tensor to `found`, by a path without the model's name; returns the reason if it belongs nowhere."""
    part = part_beside_text(trained_path(tensor.name))
    if part is not None:
        others.left.setdefault(part, []).append(tensor.name)
        return None
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
    path = trained_path(match["path"])
    rows = known.rows_of(path)
    of_experts = known.experts_at(path)
    if of_experts is not None and side in ("lora_A", "lora_B"):
        layer, module, behind = of_experts
        return others.experts.setdefault(module, FoundExperts(layer, module)).add(behind, side[-1], tensor)
    if rows is None:
        return known.why_unknown(path)
    name = known.resolve(path) or path
    is_embedding = known.slices[rows[0].module][0].kind == "embedding"
    if side != MAGNITUDE and is_embedding != side.startswith("lora_embedding"):
        return f"{name} takes {'lora_embedding_A/B' if is_embedding else 'lora_A/B'}, not {match['side']}"
    entry = found.setdefault(tail_of(path), FoundModule(name, path, rows))
    side = side if side in (MAGNITUDE, LORA_BIAS) else side[-1]
    if side in entry.sides:
        named = f"lora_{side}" if len(side) == 1 else side
        return f"{name} already has {named} from tensor {entry.sides[side].name[:200]!r}"
    entry.sides[side] = tensor
    return None


def _sort_in_other(tensor: Tensor, known: KnownModules, others: OtherTensors) -> str | None:
    """Tensors that are no LoRA weights: trained whole, or copies of the base's that are kept for a comparison."""
    name = tensor.name
    if (reason := why_in_parts(tensor)) is not None:
        return reason
    if (trained := _TOKENS.fullmatch(name)) is not None:
        return _add_tokens(tensor, trained_path(trained["path"]), known, others)
    match = _BASE_TENSOR.fullmatch(name)
    why_unserved = known.why_unserved(trained_path(name))
    if match is None or why_unserved is not None:
        return why_unserved or "it is neither lora_A nor lora_B of a projection of this base model"
    path, wrapper, what = trained_path(match["path"]), match["wrapper"] or "", match["what"]
    module, config = known.resolve(path), others.config
    if path in HEADS and not wrapper.startswith(("original_module", "base_layer")):
        return _add_head(tensor, path, what, known, others)
    norm = known.norms.get(tail_of(path))
    if what == BIAS:
        if module is None or not config.has_biases:
            return "it is a bias, and adapter_config.json says bias 'none' or this base has no such projection"
        return _add_bias(tensor, *known.slices[module], others)
    if module is None and norm is None:
        if config.modules_to_save:
            return (
                "of whole modules (modules_to_save), norms of hidden states and of attention heads, the embedding, the "
                "head and a score head are applied"
            )
        return "it is neither lora_A nor lora_B of a projection of this base model"
    if wrapper == _IN_TOKENS and module in known.heads and known.ties_head and _is_saved(module, config):
        # PEFT's TrainableTokensLayer takes an Embedding or a Linear, and finds its own wrapper of a saved module there.
        return (
            "it is a head that was saved whole (modules_to_save) where the trained tokens of the embedding are the "
            "head's too, since this base ties them; PEFT cannot run such an adapter: leave lm_head out of "
            "modules_to_save, or save both whole, embed_tokens and lm_head, without trainable_token_indices"
        )
    is_saved = bool(config.modules_to_save) and wrapper not in (_IN_TOKENS, "base_layer", "original_module")
    if wrapper.startswith("modules_to_save") and not is_saved:
        return "it belongs to a fully trained module, and adapter_config.json names none (modules_to_save)"
    if norm is not None:
        return _add_weight(tensor, norm.module, (norm.out_features,), "norms", is_saved, others)
    assert module is not None
    projection, piece = known.slices[module]
    if projection.group != "embeddings":
        return f"it is a full weight of {module}; of whole modules, norms, the embedding and the head are applied"
    if projection.kind == "embedding":  # [vocabulary, width], as a head is too
        sizes: tuple[int, int] = (projection.in_features, piece.out_features)
        return _add_weight(tensor, module, sizes, "saved_embedding", is_saved, others)
    return _add_weight(tensor, module, (piece.out_features, projection.in_features), "saved_head", is_saved, others)


def _add_head(tensor: Tensor, path: str, what: str, known: KnownModules, others: OtherTensors) -> str | None:
    """A score head's weight [labels, width] or bias [labels]."""
    if path not in others.config.modules_to_save:
        return f"it is a score head, and adapter_config.json names none: add {path!r} to modules_to_save"
    width = next(piece.out_features for p, piece in known.slices.values() if p.kind == "embedding")
    num_labels = tensor.shape[0] if tensor.shape else 0
    if tensor.shape != ((num_labels, width) if what == WEIGHT else (num_labels,)):
        return f"it is a score head's {what} of shape {tensor.shape}; this base's hidden states are {width} wide"
    if not 1 <= num_labels <= MAX_LABELS:
        return f"it is a score head with {num_labels} labels; this server takes 1 to {MAX_LABELS}"
    return others.add(BoundExtra(SCORE, what, tensor, None))


def _is_saved(module: str, config: AdapterConfig) -> bool:
    """Whether modules_to_save names it, as PEFT looks for that."""
    return any(module.endswith(name) for name in config.modules_to_save)


def _add_weight(
    tensor: Tensor, module: str, shape: tuple[int, ...], group: Group, is_saved: bool, others: OtherTensors
) -> str | None:
    """The whole weight of a module, as the adapter has it, or as a copy of the base's; without rows behind the
    vocabulary."""
    if group != "norms" and tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
        others.spare_rows.append((tensor, tensor.shape[0] - shape[0]))
        num_bytes = math.prod(shape) * ELEMENT_BYTES[tensor.dtype]
        tensor = replace(tensor, shape=shape, end=tensor.start + num_bytes)
    if tensor.shape != shape:
        why = "" if group == "norms" else ": the vocabulary was changed in training"
        return f"it is a full weight of shape {tensor.shape}, not {shape}{why}"
    if is_saved:
        return others.add(BoundExtra(module, WEIGHT, tensor, group))
    others.copies.append(BaseCopy(tensor, f"{module}.{WEIGHT}"))
    return None


def _add_tokens(tensor: Tensor, path: str, known: KnownModules, others: OtherTensors) -> str | None:
    module = known.resolve(path)
    if module is None or known.slices[module][0].group != "embeddings":
        return "it belongs to trained tokens of a module that is neither the embedding nor the head"
    projection, piece = known.slices[module]
    sizes = (projection.in_features, piece.out_features)
    hidden, vocab_size = sizes[::-1] if projection.kind == "embedding" else sizes
    ids = _trained_ids(module, path, known, others.config)
    if ids is None:
        return f"it belongs to trained tokens, and trainable_token_indices names none of {module}"
    if tensor.shape != (len(ids), hidden) or max(ids) >= vocab_size:
        return (
            f"its shape is {tensor.shape}, for {len(ids)} tokens up to {max(ids)} of {vocab_size}, {hidden} wide each"
        )
    others.tokens.append(BoundTokens(module, ids, tensor))
    return None


def _trained_ids(module: str, path: str, known: KnownModules, config: AdapterConfig) -> tuple[int, ...] | None:
    """Ids of trained tokens. A tied head has the embedding's, unless the configuration names the head: PEFT saves it
    too where it saves embeddings (`save_embedding_layers`)."""
    named = {*endings(path), *([""] if module in known.embeddings else ())}
    ids = next((ids for key, ids in config.trained_tokens.items() if key in named), None)
    if ids is None and module in known.heads and known.ties_head:
        return next((_trained_ids(one, one, known, config) for one in known.embeddings), None)
    return ids


def _add_bias(tensor: Tensor, projection: ProjectionSpec, piece: Slice, others: OtherTensors) -> str | None:
    if projection.kind == "embedding" or tensor.shape != (piece.out_features,):
        return f"it is a bias of shape {tensor.shape}; that of {piece.module} would be {(piece.out_features,)}"
    return others.add(BoundExtra(piece.module, BIAS, tensor, "vectors"))
