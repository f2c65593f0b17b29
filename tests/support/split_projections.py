"""Models as some trainers have them: a packed projection's parts by modules of their own, or parts by one module."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import load_oracle

PARTS = ("in_proj_q", "in_proj_k", "in_proj_v")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
# By family: the packed module, its parts, and their widths in tiny models.
PACKED: dict[str, dict[str, tuple[Sequence[str], Sequence[int]]]] = {
    "qwen3_5_text": {"in_proj_qkv": (PARTS, (24, 24, 32))},
    "phi3": {"qkv_proj": (QKV, (48, 16, 16)), "gate_up_proj": (GATE_UP, (88, 88))},
    "llama": {"qkv_proj": (QKV, (96, 32, 32)), "gate_up_proj": (GATE_UP, (88, 88))},
}


def load_split(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model by transformers; each packed module gives place to its parts, which hold its rows."""
    model = load_oracle(model_dir, dtype)
    for whole, (parts, sizes) in PACKED[model.config.model_type].items():
        for parent in [module for module in model.modules() if hasattr(module, whole)]:
            weights = parent._modules.pop(whole).weight.detach().split(sizes)
            for name, weight in zip(parts, weights, strict=True):
                parent.add_module(name, _linear(weight))

            def together(x: torch.Tensor, parent: Any = parent, parts: Sequence[str] = parts) -> torch.Tensor:
                return torch.cat([getattr(parent, name)(x) for name in parts], -1)

            parent.__dict__[whole] = together
    return model


def load_packed(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model by transformers; the parts of each packed module give place to it, which holds their rows in order."""
    model = load_oracle(model_dir, dtype)
    for whole, (parts, sizes) in PACKED[model.config.model_type].items():
        for parent in [module for module in model.modules() if hasattr(module, parts[0])]:
            parent.add_module(whole, _linear(torch.cat([parent._modules.pop(name).weight.detach() for name in parts])))
            for i, name in enumerate(parts):
                parent.__dict__[name] = partial(_part, parent, whole, tuple(sizes), i)
    return model


def _part(parent: Any, whole: str, sizes: tuple[int, ...], index: int, x: torch.Tensor) -> Any:
    return getattr(parent, whole)(x).split(sizes, -1)[index]


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(weight.clone())
    return linear
