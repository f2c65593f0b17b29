"""Models as some trainers have them: a packed projection's parts by modules of their own, or parts by one module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.models.tiny_models import load_oracle

PARTS = ("in_proj_q", "in_proj_k", "in_proj_v")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# The parts of each packed module.
_PACKED = {"in_proj_qkv": PARTS, "qkv_proj": QKV, "gate_up_proj": GATE_UP}


def load_split(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model by transformers; each packed module gives place to its parts, which hold its rows."""
    model = load_oracle(model_dir, dtype)
    for whole, parts in _PACKED.items():
        for parent in [module for module in model.modules() if hasattr(module, whole)]:
            rows = parent._modules.pop(whole).weight.detach()
            for name, weight in zip(parts, rows.split(_sizes(parent, whole, len(rows))), strict=True):
                parent.add_module(name, _linear(weight))

            def together(x: torch.Tensor, parent: Any = parent, parts: Sequence[str] = parts) -> torch.Tensor:
                return torch.cat([getattr(parent, name)(x) for name in parts], -1)

            parent.__dict__[whole] = together
    return model


def load_packed(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model by transformers; the parts of each packed module give place to it, which holds their rows in order."""
    model = load_oracle(model_dir, dtype)
    for whole, parts in _PACKED.items():
        for parent in [module for module in model.modules() if hasattr(module, parts[0])]:
            sizes = [getattr(parent, name).out_features for name in parts]
            parent.add_module(whole, _linear(torch.cat([parent._modules.pop(name).weight.detach() for name in parts])))
            for i, name in enumerate(parts):
                parent.__dict__[name] = partial(_part, parent, whole, tuple(sizes), i)
    return model


def _sizes(parent: Any, whole: str, num_rows: int) -> tuple[int, ...]:
    """Rows of each part."""
    if whole == "in_proj_qkv":
        return parent.key_dim, parent.key_dim, parent.value_dim
    if whole == "gate_up_proj":
        return num_rows // 2, num_rows // 2
    kv_size = parent.config.num_key_value_heads * parent.head_dim
    return num_rows - 2 * kv_size, kv_size, kv_size


def _part(parent: Any, whole: str, sizes: tuple[int, ...], index: int, x: torch.Tensor) -> Any:
    return getattr(parent, whole)(x).split(sizes, -1)[index]


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.clone())
    return linear
