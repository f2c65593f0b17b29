"""What a report recommends: no setting whose trial or capture failed, and comparisons of equal loads alone."""

from __future__ import annotations

from typing import Any

import pytest

from service.doctor.deep_report import DeepReport, Outcome, Status, conclude

GRAPHS, EAGER = "setting-npu-graphs", "setting-eager"


def load(requests: int, adapters: int, ms_per_token: float) -> dict[str, Any]:
    return {"requests": requests, "adapters": adapters, "ms_per_token": ms_per_token}


def step(name: str, status: Status = "ok", **facts: Any) -> Outcome:
    reason = None if status == "ok" else "the planted reason"
    return Outcome(name=name, title=name, asks="", status=status, reason=reason, facts=facts)


def recommended(device: str, *steps: Outcome) -> dict[str, str]:
    """Setting -> why, but for the device's own."""
    report = DeepReport(multilora="0", device=device, model="m", asked="", begun="", steps=list(steps))
    conclude(report)
    settings = [setting for setting in report.settings if not setting.setting.startswith("--device")]
    assert len({setting.setting.removeprefix("not ") for setting in settings}) == len(settings), "each setting once"
    return {setting.setting: setting.why for setting in settings}


SERVING = step("serving", loads=[load(1, 1, 10.0), load(8, 64, 11.0), load(64, 64, 20.0)])


@pytest.mark.parametrize(("milliseconds", "setting"), [(15.0, "--npu-graphs true"), (25.0, "not --npu-graphs true")])
def test_whether_capture_pays_its_trial_says(milliseconds: float, setting: str) -> None:
    trial = step(GRAPHS, requests=64, many_ms=milliseconds, one_ms=10.0)
    assert set(recommended("npu:0", SERVING, step("capture"), trial)) == {setting}


@pytest.mark.parametrize("status", ["failed", "crashed", "timed out"])
def test_a_setting_whose_trial_failed_is_not_recommended(status: Status) -> None:
    found = recommended("npu:0", SERVING, step("capture"), step(GRAPHS, status))
    assert found == {"not --npu-graphs true": f"its trial {status}: the planted reason"}


def test_a_trial_says_nothing_where_serving_failed_too() -> None:
    """It failed for that reason, and not for its setting."""
    assert recommended("npu:0", step("serving", "failed"), step("capture"), step(GRAPHS, "failed")) == {}


@pytest.mark.parametrize(
    ("device", "trial", "setting"),
    [
        ("npu:0", step(GRAPHS, requests=64, many_ms=15.0, one_ms=10.0), "not --npu-graphs true"),
        ("cuda", step(EAGER, requests=64, many_ms=25.0, one_ms=15.0), "--eager true"),
    ],
)
def test_a_captured_layer_that_failed_goes_before_speed(device: str, trial: Outcome, setting: str) -> None:
    found = recommended(device, SERVING, trial, step("capture", "failed"))
    assert found == {setting: "one captured layer failed: the planted reason"}


def test_a_trial_is_compared_with_the_same_load_alone() -> None:
    """Where there was no time for its most requests without the setting, fewer requests say nothing of them."""
    short = step("serving", loads=[load(1, 1, 10.0), load(8, 64, 11.0)])
    trial = step(GRAPHS, requests=64, many_ms=15.0, one_ms=9.0)
    assert recommended("npu:0", short, step("capture"), trial) == {
        "--npu-graphs true": "decode steps were 10% shorter with one of each"
    }
