"""The gate is red where it must be: each rule has a kernel that breaks it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.ascend import bad_kernels
from tests.ascend.gate import checks, linalg_cpu, simulator
from tests.ascend.gate.cases import REQUIRED_TARGETS, Case, Launch
from tests.ascend.gate.compiler import CompileError, replace_device
from tests.ascend.gate.memory import SimulationError
from tests.ascend.lora_cases import CASES as LORA_CASES

TARGET = REQUIRED_TARGETS[0]


def _only(case: Case) -> Launch:
    (make,) = case.launches.values()
    return make()


def test_a_tile_beyond_the_chip_is_refused() -> None:
    case = bad_kernels.huge_case()
    with pytest.raises(CompileError, match="overflow, requires"):
        checks.compile_launch(case, _only(case), TARGET)


def test_gathered_rows_are_refused_by_the_code_alone() -> None:
    case = bad_kernels.gather_case()
    compiled = checks.compile_launch(case, _only(case), TARGET)
    with pytest.raises(checks.GateError, match="scalar accesses to global memory inside inner loops"):
        checks.check_loops(case, compiled)


def test_gathered_rows_are_refused_by_counting() -> None:
    case = bad_kernels.gather_case()
    launch = _only(case)
    counts = checks.run_simulated(case, launch, checks.compile_launch(case, launch, TARGET))
    with pytest.raises(checks.GateError, match=r"one by one|which are no maps|scalar loads for"):
        checks.check_scalars(launch, counts)


def test_too_much_traffic_is_refused() -> None:
    case = bad_kernels.copy_case()
    launch = _only(case)
    counts = checks.run_simulated(case, launch, checks.compile_launch(case, launch, TARGET))
    with pytest.raises(checks.GateError, match="x the minimum"):
        checks.check_traffic(launch, counts)


@pytest.mark.skipif(not linalg_cpu.available(), reason="NOT EXECUTED: mlir-19-tools, llvm-19 or clang-19 is missing")
def test_a_row_that_must_stay_untouched_is_noticed_in_the_lowered_code() -> None:
    case = bad_kernels.copy_case()
    launch = _only(case)
    checks.run_on_cpu(case, launch, checks.compile_launch(case, launch, TARGET))
    with pytest.raises(AssertionError, match="h_ptr"):
        checks.check_values(launch)


def test_reading_past_the_end_is_noticed() -> None:
    case = bad_kernels.copy_case()
    launch = _only(case)
    shorter = dict(launch.arguments) | {"x_ptr": launch.tensor("x_ptr")[:8].clone()}
    compiled = checks.compile_launch(case, launch, TARGET)
    with pytest.raises(SimulationError, match="out of bounds"):
        checks.run_simulated(case, dataclasses.replace(launch, arguments=shorter), compiled)


@pytest.mark.parametrize("callee", ["load_gm_to_ubuf_2d", "vmul_2d", "reduce_sum", "store_ubuf_to_gm_2d"])
def test_losing_any_kind_of_library_call_is_noticed(callee: str) -> None:
    """What the simulator computes comes from the compiled code, not from the Triton source."""
    case = LORA_CASES[0]
    launch = case.launches["odd sizes"]()
    compiled = checks.compile_launch(case, launch, TARGET)
    lost, count = re.subn(rf'\n[^\n]*"func\.call"[^\n]*@[a-z_]*{callee}[^\n]*', "", compiled.device)
    assert count, f"the kernel does not call {callee}"
    checks.run_simulated(case, launch, replace_device(compiled, lost))
    with pytest.raises(AssertionError):
        checks.check_values(launch)


def test_memory_starts_poisoned() -> None:
    core = simulator.Core(simulator.Chip.__new__(simulator.Chip), "AIV", 0, 0)
    assert torch.isnan(core.at_address(0, [8], "f32", "ub").read()).all()
