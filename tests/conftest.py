"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import compiled_after_ready, tiers
from tests.support.npu.triton_interpreter import look_up_once
from tests.support.on_ray import through_ray

torch.set_num_threads(1)
_POISONED = Path(__file__).parent / "support" / "poisoned"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device of the op, model and parity tests: cpu (default) or cuda")
    parser.addoption("--tier", choices=tiers.TIERS, default="quick", help="see tests/support/tiers.py; default: quick")


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

    Interrupts arrive in what the tests start, too where a shell started them in the background, which ignores them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--device") == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    _choose_examples("quick" if config.getoption("--tier") == "quick" else "wide")


def pytest_sessionfinish() -> None:
    """pytest collects garbage five times when it has ended, and walks through all that lives each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tier's tests among those that were asked for, and order them. Some cannot hold behind Ray's proxy."""
    kept = tiers.select(items, config.getoption("--tier"))
    left_out = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = tiers.longest_first(kept)
    if through_ray.is_on_ray():
        through_ray.mark(items)


def _choose_examples(profile: str) -> None:
    """Hypothesis tries the same cases each time, and calls none too slow, however slow the machine is;
    `--hypothesis-profile=search` tries others. What that finds belongs into an `@example`."""
    unhurried: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("search", **unhurried, print_blob=True)
    settings.register_profile("quick", **unhurried, derandomize=True, max_examples=tiers.QUICK_EXAMPLES)
    settings.register_profile("wide", **unhurried, derandomize=True)
    settings.load_profile(profile)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Torch device that the op tests run on."""
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True, scope="session")
def _poisoned_memory() -> Iterator[None]:
    """Fill fresh floating-point memory with NaN (integers: their largest value), so unwritten cells show.

    For the session, since fixtures of a module are made before those of its tests; and in the processes that tests
    start, by tests/support/poisoned/sitecustomize.py.
    """
    paths = [str(_POISONED), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # see tests/support/poisoned/sitecustomize.py
    torch.utils.deterministic.fill_uninitialized_memory = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        yield
    torch._C._set_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter looks nothing up twice in a launch, where kernels run in it."""
    with pytest.MonkeyPatch.context() as patch:
        if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton"):
            look_up_once(patch)
        yield


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    """Engines of this process draw the same seeds in each run; those of others by poisoned/sitecustomize.py."""
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _watched_engines() -> Iterator[None]:
    """The last test of a server ends before the server does."""
    with compiled_after_ready.watching():
        yield
        compiled_after_ready.check()


@pytest.fixture(autouse=True)
def _nothing_compiles_after_ready() -> Iterator[None]:
    """No step of an engine or a server that the test had has waited for a compiler."""
    yield
    compiled_after_ready.check()
