"""Caches are what mixers declare, and hold before anything was written what they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kernels.platform import detect, installed
from service.models.families import model_spec
from service.models.layers.caches import ConvStates, KvCache, allocate_caches, kv_bytes_per_token, state_bytes_per_line
from service.models.spec.config_json import read_config
from service.models.spec.mixer_specs import MixerState
from tests.support.models.tiny_models import make_tiny_model


def _on_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments, **options: make(*arguments, **{**options, "device": "cpu"})


@pytest.mark.parametrize("serving", ["npu_heads_first", "npu", "gathered"])
def test_keys_and_values_on_an_npu_begin_as_zeros(serving: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is made up: its memory is the host's."""
    platform = replace(detect("cpu"), device="npu").with_fallback("paged_attention", serving, "for the test")
    spec = model_spec(read_config(make_tiny_model("lfm2", tmp_path)))
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, _on_the_host(getattr(torch, name)))
    npu = cast("torch.device", SimpleNamespace(type="npu"))
    with installed(platform):
        layers = allocate_caches(spec, 3, 16, 2, torch.bfloat16, npu).layers
    caches = [one for one in layers if isinstance(one, KvCache)]
    assert caches
    for cache in caches:
        for name in cache.__slots__:
            tensor = getattr(cache, name)
            assert torch.count_nonzero(tensor) == 0
            kv_heads, head_dim = tensor.shape[2:]
            by_token = kv_heads * head_dim
            strides = (head_dim, 16 * head_dim) if serving == "npu_heads_first" else (by_token, head_dim)
            assert kv_heads > 1 and tensor.shape[:2] == (3, 16) and tensor.stride() == (16 * by_token, *strides, 1)


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5_text"])
def test_caches_take_the_bytes_that_mixers_declare(family: str, tmp_path: Any) -> None:
    spec = model_spec(read_config(make_tiny_model(family, tmp_path)))
    caches = allocate_caches(spec, 3, 16, 5, torch.bfloat16, torch.device("cpu"))
    token_bytes, line_bytes = (of(spec, torch.bfloat16) for of in (kv_bytes_per_token, state_bytes_per_line))
    assert caches.num_bytes == 3 * 16 * token_bytes + 5 * line_bytes
    assert (line_bytes > 0) == spec.has_states == (family != "llama")
    names = [tuple(state.name for state in layer.mixer.states) for layer in spec.layers]
    assert [cache.__slots__ for cache in caches.layers] == names


@dataclass(frozen=True)
class MadeUpMixer:
    """No class that anything here knows."""

    name = "mixer"
    states = (MixerState("lines", "sequence", (2, 7), in_float32=True),)


def test_a_new_mixer_has_what_it_declares(tmp_path: Any) -> None:
    spec = model_spec(read_config(make_tiny_model("llama", tmp_path)))
    layer = replace(spec.layers[0], mixer=cast("Any", MadeUpMixer()))
    spec = replace(spec, layers=(layer, *spec.layers[1:]))
    cache = allocate_caches(spec, 3, 16, 5, torch.bfloat16, torch.device("cpu")).layers[0]
    assert isinstance(cache, ConvStates)
    assert (cache.lines.shape, cache.lines.dtype) == ((5, 2, 7), torch.float32)
    assert spec.has_states and state_bytes_per_line(spec, torch.bfloat16) == 2 * 7 * 4
