"""The gate is red where it must be: it is run on kernels that each break one rule."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from kernels.lora.ascend.tiles import TABLES, Regime
from tests.ascend.cases import bad_kernels
from tests.ascend.cases.lora_cases import CASES as LORA_CASES
from tests.ascend.cases.lora_cases import FOUR, NUM_VECTOR_CORES, shrink
from tests.ascend.gate import checks, compiler, linalg_cpu, simulator
from tests.ascend.gate.cases import REQUIRED_TARGETS, Case
from tests.ascend.gate.compiler import replace_device

TARGET = REQUIRED_TARGETS[0]


def run_gate(case: Case, directory: Path) -> tuple[int, dict[str, str]]:
    """Exit status of the gate on one case of `bad_kernels`, and the message of each test function that failed."""
    report = directory / "report.xml"
    gate = Path(__file__).with_name("test_gate.py")
    options = [
        "--tier",
        "all",
        "--gate-cases",
        "tests.ascend.cases.bad_kernels",
        "-k",
        f"{case.name}-",
        f"--junitxml={report}",
    ]
    command = [sys.executable, "-m", "pytest", str(gate), *options, "-p", "no:cacheprovider", "-q"]
    status = subprocess.run(command, capture_output=True, check=False, cwd=Path(__file__).parents[2]).returncode
    failures: dict[str, str] = {}
    for test in ElementTree.parse(report).iter("testcase"):
        for failure in test.findall("failure"):
            name = test.attrib["name"].partition("[")[0]
            failures[name] = failures.get(name, "") + failure.attrib["message"]
    return status, failures


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.case.name) for bad in bad_kernels.BAD])
def test_the_gate_fails_on_a_bad_kernel(bad: bad_kernels.Bad, tmp_path: Path) -> None:
    status, failures = run_gate(bad.case, tmp_path)
    assert status == pytest.ExitCode.TESTS_FAILED
    refused = dict(bad.refused)
    if not linalg_cpu.available():
        refused.pop("test_lowered_code_computes_the_reference", None)
    assert failures.keys() == refused.keys()
    for name, message in refused.items():
        assert message in failures[name], name


def test_the_gate_passes_on_a_good_kernel(tmp_path: Path) -> None:
    assert run_gate(bad_kernels.GOOD, tmp_path) == (pytest.ExitCode.OK, {})


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


def test_a_slower_tile_is_refused() -> None:
    """The table's tile was chosen by estimated time: another, which moves as little, does not stay within the bound."""
    case = LORA_CASES[0]
    bound = case.max_us["4 adapters"]
    tiles = dataclasses.replace(TABLES[0].few, shrink_tokens=32)
    launch = shrink(FOUR, Regime("few", tiles, NUM_VECTOR_CORES))
    counts = checks.run_simulated(case, launch, checks.compile_launch(case, launch, TARGET))
    checks.check_values(launch)
    with pytest.raises(checks.GateError, match=f"us by estimate; {bound} are allowed"):
        checks.check_time(case, "4 adapters", launch, counts)


def test_memory_starts_poisoned() -> None:
    core = simulator.Core(simulator.Chip.__new__(simulator.Chip), "AIV", 0, 0)
    assert torch.isnan(core.at_address(0, [8], "f32", "ub").read()).all()


@pytest.mark.parametrize(
    "end",
    [
        "kill -KILL $$",
        # A limit of computing time has LLVM print its stack.
        "echo 'Stack dump:' >&2; kill -XCPU $$",
        "echo 'LLVM ERROR: out of memory' >&2; exit 1",
    ],
)
def test_a_compiler_that_was_killed_has_refused_nothing(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run compiles again; what the compiler itself complained of is kept."""
    good, huge = (
        (case, case.launches["launch"]())
        for case in (bad_kernels.GOOD, next(bad.case for bad in bad_kernels.BAD if bad.case.name == "huge"))
    )
    monkeypatch.setattr(checks, "_compiled", {})
    monkeypatch.setattr(compiler, "CACHE", tmp_path / "cache")
    compiler._compiler_version()
    binaries = compiler._BINARIES
    monkeypatch.setattr(compiler, "_BINARIES", tmp_path)
    program = tmp_path / "bishengir-compile"
    program.write_text(f"#!/bin/sh\necho '[ERROR] Cannot find hivmc' >&2\n{end}\n")
    program.chmod(0o755)
    with pytest.raises(compiler.CompilerDied):
        checks.compile_launch(*good, TARGET)
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setattr(compiler, "_BINARIES", binaries)
    checks.check_fits(good[0], checks.compile_launch(*good, TARGET))
    with pytest.raises(compiler.CompileError, match="overflow, requires"):
        checks.compile_launch(*huge, TARGET)
    monkeypatch.setattr(compiler, "_BINARIES", tmp_path)
    with pytest.raises(compiler.CompileError, match="overflow, requires"):
        checks.compile_launch(*huge, TARGET)
