"""How long a request may be: the model's own limit, and what the operator makes of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.platform import detect
from service.engine.ipc.config import EngineConfig
from service.engine.model.runner import capacity_of
from service.models.families import model_spec
from tests.support.models.tiny_models import tiny_config

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
    spec = model_spec(json.loads(tiny_config("llama", **changes).to_json_string(use_diff=False)))
    loaded: Any = SimpleNamespace(
        spec=spec,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layout=SimpleNamespace(groups=(), experts=()),
        model=SimpleNamespace(num_window_rows=0),
    )
    config = EngineConfig(model_dir="", store_root="", max_model_len_tokens=given)
    assert capacity_of(loaded, config, detect("cpu")).max_model_len_tokens == limit
