"""The twin: the NPU path of the service on a CPU. scripts/test-ascend.sh runs it, where torch_npu can be found."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernels.platform import Platform

if importlib.util.find_spec("torch_npu") is None:
    collect_ignore_glob = ["*"]
else:
    from tests.ascend.twin.stand_ins.install import import_torch_npu, prepare_interpreter

    import_torch_npu()
    prepare_interpreter()


@pytest.fixture
def npu() -> Iterator[Platform]:
    """Tensors on the CPU are served as if they lay on an NPU."""
    from tests.ascend.twin.stand_ins.install import npu_path

    with npu_path() as platform:
        yield platform


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests have recorded as "twin", wherever they ran."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "twin" and report.when == "call":
                    terminalreporter.write_line(f"twin: {value}")
