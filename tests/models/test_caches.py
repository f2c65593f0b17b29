"""What caches hold before anything was written."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from service.models.caches import KvCache, allocate_caches
from service.models.config_json import read_config
from service.models.families import model_spec
from tests.support.tiny_models import make_tiny_model


def _on_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *arguments, **options: make(*arguments, **{**options, "device": "cpu"})


def test_keys_and_values_on_an_npu_begin_as_zeros(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is made up: its memory is the host's."""
    spec = model_spec(read_config(make_tiny_model("lfm2", tmp_path)))
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, _on_the_host(getattr(torch, name)))
    npu = cast("torch.device", SimpleNamespace(type="npu"))
    caches = [one for one in allocate_caches(spec, 3, 16, 2, torch.bfloat16, npu).layers if isinstance(one, KvCache)]
    assert caches
    for cache in caches:
        assert all(torch.count_nonzero(getattr(cache, name)) == 0 for name in cache.__slots__)
