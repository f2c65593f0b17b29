"""Kernels are compiled side by side before a warm-up launches them, and what is compiled is counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from kernels.compile_ahead import num_variants, warm_up_ahead
from kernels.contract import Contract
from kernels.platform import in_use, installed

ROOT = Path(__file__).resolve().parents[3]


def test_a_warm_up_finds_its_kernels_in_the_cache(tmp_path: Path) -> None:
    """In a process of its own, without Triton's interpreter, with the LoRA kernels: other processes compile, this one
    reads and launches; nothing is read twice, and a second warm-up asks for nothing. Constants stay what they are."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "ops" / "compile_ahead.py")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, quantised = json.loads(done.stdout)
    assert first == {"asked": 4, "compiled here": 0, "read": 4, "launched": True, "variants": 4}
    assert second == {"asked": 0, "compiled here": 0, "read": 4}
    assert "'int8' is a type's name" in quantised.pop("a type's")
    assert quantised == dict.fromkeys(("fp8", "i8", "i4", "table"), "asked for")


@pytest.mark.parametrize("device_type", ["cpu", "npu"])
def test_on_other_devices_the_warm_up_runs_once(device_type: str) -> None:
    warm_up = mock.Mock()
    warm_up_ahead(warm_up, device_type)
    assert warm_up.call_count == 1


def test_the_variants_of_all_implementations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    platform = in_use(device)
    assert num_variants(device) == 0  # nothing is compiled on a CPU
    for op, count in (("lora", 3), ("causal_conv1d", 4)):
        module = mock.Mock(CONTRACT=Contract(compiled_count=mock.Mock(return_value=count)))
        monkeypatch.setitem(sys.modules, f"kernels.{op}.made_up", module)
        platform = platform.with_fallback(op, "made_up", "for the test")
    with installed(platform):
        assert num_variants(device) == 7
