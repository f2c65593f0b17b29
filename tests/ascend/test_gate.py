"""The gate: every registered kernel, in every configuration, against the five rules (see README.md here)."""

from __future__ import annotations

import importlib

import pytest

from tests.ascend.gate import checks, linalg_cpu
from tests.ascend.gate.cases import OPTIONAL_TARGET, REQUIRED_TARGETS, Case
from tests.ascend.gate.compiler import CompileError

SIMULATED_TARGET = REQUIRED_TARGETS[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test runs on every launch of the cases; `--gate-cases` names another module of cases than the registry."""
    cases: list[Case] = importlib.import_module(metafunc.config.getoption("--gate-cases")).CASES
    launches = [
        pytest.param(case, name, id=f"{case.name}-{name.replace(' ', '_')}") for case in cases for name in case.launches
    ]
    metafunc.parametrize(("case", "name"), launches, scope="module")  # the tests of a launch follow one another


@pytest.mark.parametrize("target", REQUIRED_TARGETS)
def test_compiles_within_the_chip(case: Case, name: str, target: str) -> None:
    compiled = checks.compile_launch(case, case.launches[name](), target)
    checks.check_fits(case, compiled)
    checks.check_loops(case, compiled)


@pytest.mark.wide
def test_compiles_for_ascend950(case: Case, name: str) -> None:
    launch = case.launches[name]()
    if case.crashes and name not in case.compiles:
        with pytest.raises(CompileError) as caught:
            checks.compile_launch(case, launch, OPTIONAL_TARGET)
        assert caught.value.crashed, f"{case.name} is listed as crashing the compiler, but was refused: {caught.value}"
        return
    compiled = checks.compile_launch(case, launch, OPTIONAL_TARGET)
    checks.check_fits(case, compiled)


@pytest.mark.skipif(not linalg_cpu.available(), reason="NOT EXECUTED: mlir-19-tools, llvm-19 or clang-19 is missing")
def test_lowered_code_computes_the_reference(case: Case, name: str) -> None:
    orders: tuple[linalg_cpu.Order, ...] = ("reverse", "random")  # the simulator's is forward
    for order in orders:
        launch = case.launches[name]()
        checks.run_on_cpu(case, launch, checks.compile_launch(case, launch, SIMULATED_TARGET), order)
        checks.check_values(launch)


def test_final_code_moves_little_and_is_right(case: Case, name: str) -> None:
    launch = case.launches[name]()
    counts = checks.run_simulated(case, launch, checks.compile_launch(case, launch, SIMULATED_TARGET))
    checks.check_values(launch)
    checks.check_scalars(launch, counts)
    checks.check_traffic(launch, counts)
    checks.check_time(case, name, launch, counts)
