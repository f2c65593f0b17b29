"""The gate is red for a convolution that reads too much, or whose states are only nearly right."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.ascend.cases.conv_cases import CASES
from tests.ascend.gate import checks
from tests.ascend.gate.cases import REQUIRED_TARGETS


def test_reading_too_much_is_refused_though_little_is_moved() -> None:
    case = CASES[0]
    launch = case.launches["varlen"]()
    counts = checks.run_simulated(case, launch, checks.compile_launch(case, launch, REQUIRED_TARGETS[0]))
    enough = int(counts.total("load_bytes") / launch.max_load_traffic) + 1
    checks.check_traffic(dataclasses.replace(launch, minimum_load_bytes=enough), counts)
    with pytest.raises(checks.GateError, match="bytes read"):
        checks.check_traffic(dataclasses.replace(launch, minimum_load_bytes=enough - 2), counts)


def test_states_are_compared_bit_for_bit() -> None:
    launch = CASES[0].launches["varlen"]()
    for name, expected in launch.expected.items():
        launch.tensor(name).copy_(expected)
    checks.check_values(launch)
    states = launch.tensor("states_ptr")
    states[1, 0, 0] = torch.nextafter(states[1, 0, 0], torch.tensor(torch.inf, dtype=states.dtype))
    with pytest.raises(AssertionError, match="states_ptr"):
        checks.check_values(launch)
    states[1, 0, 0] = launch.expected["states_ptr"][1, 0, 0]
    checks.check_values(launch)
    zeros = states == 0
    states[zeros] = -states[zeros]
    with pytest.raises(checks.GateError, match="zeros of the wrong sign"):
        checks.check_values(launch)
