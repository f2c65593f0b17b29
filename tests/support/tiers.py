"""Tiers of the suite: `make test` runs "quick", `make test-wide` runs "wide", which is the rest; "all" is both.

In the wide tier are tests marked `wide`, cases of model families beyond REPRESENTATIVE, and the examples of Hypothesis
beyond QUICK_EXAMPLES.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from service.models.families import FAMILIES

TIERS = ("quick", "wide", "all")
# Attention alone, short convolutions, gated delta rule.
REPRESENTATIVE = frozenset({"llama", "lfm2", "qwen3_5_text"})
QUICK_EXAMPLES = 20
_ROOT = Path(__file__).resolve().parents[2]
# Files that take long for their number of tests: most start many processes.
_LONG_FILES = (
    "tests/doctor/test_doctor.py",
    "tests/api/operation/test_process.py",
    "tests/parity/test_steps_in_flight.py",
    "tests/doctor/test_deep.py",
    "tests/cluster/test_engines.py",
    "tests/cluster/test_shared_store.py",
    "tests/api/operation/test_prefix_cache.py",
    "tests/doctor/test_checks.py",
    "tests/test_wheel.py",
    "bench/tests/test_bench.py",
)


def examples(num: int) -> int:
    """`max_examples` of a Hypothesis test whose wide tier tries `num`."""
    return num if settings.get_current_profile_name() != "quick" else min(num, QUICK_EXAMPLES)


def select(items: list[pytest.Item], tier: str) -> list[pytest.Item]:
    """The tests of a tier, in their order."""
    if tier == "all":
        return items
    families = {item: _families(item) for item in items}
    represented = {_function(item) for item in items if families[item] & REPRESENTATIVE}
    return [
        item
        for item in items
        if _is_wide(item, families[item], _function(item) in represented) == (tier == "wide")
        or (tier == "wide" and item.get_closest_marker("hypothesis"))
    ]


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests file by file, so that no process of xdist's begins a long file when the others have ended: long files,
    then those of many tests. xdist itself would begin a long file of two tests last."""
    num_tests = Counter(item.path for item in items)
    ranks = {_ROOT / name: rank for rank, name in enumerate(_LONG_FILES)}
    return sorted(items, key=lambda item: (ranks.get(item.path, len(ranks)), -num_tests[item.path], item.path))


def _is_wide(item: pytest.Item, families: set[str], is_represented: bool) -> bool:
    """A test that has no case of a representative family keeps all of its cases in the quick tier."""
    return bool(item.get_closest_marker("wide") or (is_represented and families - REPRESENTATIVE))


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _families(item: pytest.Item) -> set[str]:
    """Families that parameters name ("qwen2", "qwen2-bfloat16"). In tests/api they are formats of tool calls."""
    if not hasattr(item, "callspec") or item.nodeid.startswith("tests/api/"):
        return set()
    values = [value for value in item.callspec.params.values() if isinstance(value, str)]
    return {value.partition("-")[0] for value in values}.intersection(FAMILIES)
