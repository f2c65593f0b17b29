"""Qwen3.5 as some trainers have it: queries, keys and values of a delta net by three modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import load_oracle

PARTS = ("in_proj_q", "in_proj_k", "in_proj_v")


def load_split(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model by transformers; in_proj_qkv of each delta net gives place to PARTS, which hold its rows."""
    model = load_oracle(model_dir, dtype)
    for net in [module for module in model.modules() if hasattr(module, "in_proj_qkv")]:
        whole = net._modules.pop("in_proj_qkv")
        sizes = (net.key_dim, net.key_dim, net.value_dim)
        for name, weight in zip(PARTS, whole.weight.detach().split(sizes), strict=True):
            part = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            part.weight = torch.nn.Parameter(weight.clone())
            net.add_module(name, part)

        def together(x: torch.Tensor, net: Any = net) -> torch.Tensor:
            return torch.cat([getattr(net, name)(x) for name in PARTS], -1)

        net.__dict__["in_proj_qkv"] = together
    return model
