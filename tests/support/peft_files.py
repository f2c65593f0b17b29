"""Small adapters for the bundled model, each of another content, made without training. Their files are as PEFT saves
them."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from service.models.layouts import layout_in
from service.settings import BUNDLED_MODEL_DIR

RANK = 2
_HIDDEN, _MODULES = 256, [f"model.layers.{layer}.self_attn.q_proj" for layer in (1, 3)]


@functools.cache
def _every_module(model_dir: Path) -> list[tuple[str, int, int]]:
    """Path and widths of each projection of the model's layers."""
    projections = (one for one in layout_in(model_dir).projections if one.group != "embeddings")
    return [(piece.module, one.in_features, piece.out_features) for one in projections for piece in one.slices]


Files = list[tuple[str, tuple[str, bytes]]]


def adapter_files(
    seed: int,
    rank: int = RANK,
    *,
    is_whole: bool = False,
    num_labels: int = 0,
    model_dir: Path = BUNDLED_MODEL_DIR,
    dtype: str = "<f4",
) -> Files:
    """`files=` for httpx: an adapter on the q_proj of both attention layers; the same for the same seed.

    is_whole    on every projection of every layer of `model_dir` instead
    num_labels  of a score head; 0: none
    """
    generator = np.random.default_rng(seed)
    tensors = {}
    modules = _every_module(model_dir) if is_whole else [(module, _HIDDEN, _HIDDEN) for module in _MODULES]
    for module, in_features, out_features in modules:
        for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            values = generator.normal(0, 0.01, shape).astype(dtype)
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
    targets = sorted({module.rpartition(".")[2] for module, _, _ in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": targets}
    if num_labels:
        config["task_type"] = "SEQ_CLS"
        tensors["base_model.model.score.weight"] = generator.normal(0, 1, (num_labels, _HIDDEN)).astype("<f4")
    saved = save(tensors, {"format": "pt"})
    named = {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": saved}
    return [("file", named_part) for named_part in named.items()]
