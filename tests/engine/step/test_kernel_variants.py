"""No request makes a GPU's compiler work: the warm-up of an engine asks for all that Triton will ever want to compile.

As Triton's launch path sees it, without a GPU and without compiling: a variant depends on the arguments' dtypes and on
what divides them, strides and addresses included, so that inputs of other widths may need another one. On a GPU
`tests/conftest.py` counts what really is compiled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ops.lora.test_lora_triton import run_compiling
from tests.support.models.tiny_models import FAMILIES


@pytest.fixture(scope="module")
def counted(
    request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Of each family that is selected, what its warm-up asked for and what its requests did."""
    if device != "cpu":
        pytest.skip("NOT RUN: the count is made for the machine without a GPU")
    pytest.importorskip("triton", reason="NOT RUN: Triton has no build for this machine")
    directory: Path = tmp_path_factory.mktemp("models")
    selected = [item for item in request.session.items if item.path == request.path]
    families = [family for family in FAMILIES if any(f"[{family}]" in item.name for item in selected)]
    lines = run_compiling("count_model_variants.py", str(directory), "bfloat16", *families).splitlines()
    return {found["family"]: found for found in map(json.loads, lines)}


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_compiled_for_requests(counted: dict[str, dict[str, Any]], family: str) -> None:
    assert counted[family]["warm"] > 20
    assert counted[family]["later"] == []
