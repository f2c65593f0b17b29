"""Capacity from a model and the operator's sizes: the longest request, and sizes that are refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.platform import detect
from service.engine.ipc.config import EngineConfig
from service.engine.model.runner import capacity_of
from service.models.families import model_spec
from service.models.spec.config_json import ModelError
from tests.support.models.tiny_models import tiny_config


def loaded_of(family: str, **changes: Any) -> Any:
    """A tiny model, as far as its sizes go."""
    return SimpleNamespace(
        spec=model_spec(json.loads(tiny_config(family, **changes).to_json_string(use_diff=False))),
        dtype=torch.float32,
        device=torch.device("cpu"),
        layout=SimpleNamespace(groups=(), experts=()),
        model=SimpleNamespace(num_window_rows=0),
    )


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("rope", "given", "limit"),
    [
        (None, None, 512),
        (None, 100, 100),
        (None, 4000, 512),
        (LINEAR, None, 512),
        (LINEAR, 900, 900),
        (LINEAR, 4000, 2048),
    ],
)
def test_the_operator_shortens_it_and_stretches_it_where_linear_scaling_does(
    rope: dict[str, Any] | None, given: int | None, limit: int
) -> None:
    changes = {} if rope is None else {"rope_parameters": rope}
    config = EngineConfig(model_dir="", store_root="", max_model_len_tokens=given)
    assert capacity_of(loaded_of("llama", **changes), config, detect("cpu")).max_model_len_tokens == limit


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        ("llama", {"prefix_host_bytes": 2**20, "prefix_cache": False}, "leave it out"),
        ("lfm2", {"prefix_host_bytes": 2**20}, "leave it out"),
        ("llama", {"prefix_host_bytes": 1}, "at least two blocks"),
        ("llama", {"prefix_host_bytes": 2**20}, None),
        ("lfm2", {"prefix_host_bytes": 2**20, "state_cache_bytes": 2**20}, None),
    ],
)
def test_a_host_tier_that_could_hold_nothing_is_refused(family: str, fields: dict[str, Any], told: str | None) -> None:
    config = EngineConfig(model_dir="", store_root="", **fields)
    with nullcontext() if told is None else pytest.raises(ModelError, match=f"--prefix-host-bytes .*{told}"):
        capacity_of(loaded_of(family), config, detect("cpu"))
