"""What is compiled before the first step: the kernels of every form of layer, once, and of every LoRA stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.memory.row_pool import RowPool
from kernels.causal_conv1d import ops as conv_ops
from kernels.lora import ops as lora_ops
from kernels.paged_attention import ops as attention_ops
from service.models.layers.caches import KvCache, allocate_caches
from service.models.loader import load_model
from tests.support.models.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(("family", "num_attention_forms", "num_conv_forms"), [("llama", 1, 0), ("lfm2", 1, 1)])
def test_all_that_a_step_calls_is_warmed_up(
    family: str, num_attention_forms: int, num_conv_forms: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(make_tiny_model(family, tmp_path / family), dtype="float32")
    pool = RowPool(loaded.layout, 1 << 22, dtype=torch.float32, device=CPU)
    loaded.model.bind_rows(pool)
    caches = allocate_caches(loaded.spec, 3, 16, 3, loaded.dtype, CPU)
    calls: dict[str, list[tuple[Any, Any]]] = {"attention": [], "conv": [], "lora": []}
    for name, ops in (("attention", attention_ops), ("conv", conv_ops), ("lora", lora_ops)):
        monkeypatch.setattr(ops, "warm_up", lambda *args, name=name, **kwargs: calls[name].append((args, kwargs)))
    loaded.model.warm_up(caches, 64, 8)
    assert len(calls["attention"]) == num_attention_forms
    of_layers = {id(cache.k) for cache in caches.layers if isinstance(cache, KvCache)}
    assert {id(args[0]) for args, _ in calls["attention"]} <= of_layers
    assert len(calls["conv"]) == num_conv_forms
    ((stacks, max_tokens, dtype), keywords) = calls["lora"][0]
    names = {id(pool.stack(projection.name)) for projection in loaded.layout.projections}
    assert {id(stack) for stack in (*stacks, *keywords["embeddings"])} == names
    assert (max_tokens, dtype, keywords["max_segments"]) == (64, torch.float32, 8)


def test_warming_up_changes_nothing_and_compiles_nothing_on_a_cpu(tmp_path: Any) -> None:
    loaded = load_model(make_tiny_model("lfm2", tmp_path / "lfm2"), dtype="float32")
    caches = allocate_caches(loaded.spec, 3, 16, 3, loaded.dtype, CPU)
    tensors = [t for c in caches.layers for t in ((c.k, c.v) if isinstance(c, KvCache) else (c.lines,))]
    for tensor in tensors:
        tensor.fill_(3.0)
    loaded.model.warm_up(caches, 64, 8)
    assert all(bool((tensor == 3.0).all()) for tensor in tensors)
