"""The benchmarks run and say what they found; how fast anything is, is no test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench.rounds import forth_and_back, percentile
from bench.steps import engine
from service.doctor.checks.profiles import NUM_STEPS, figures_of_events
from tests.support.http.server import running_server
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
SMALL = "--shape tiny --requests 3 --prompt-tokens 12 --output-tokens 6 --token-budget 32 --rounds 1 --threads 1"


def _run(module: str, work_dir: Path, *arguments: str) -> dict[str, Any]:
    """What the benchmark writes as JSON."""
    out = work_dir / "figures.json"
    command = [sys.executable, "-m", module, *SMALL.split(), *arguments, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def test_the_engine_is_measured_in_all_cases_and_beside_a_long_prompt(tmp_path: Path) -> None:
    figures = _run("bench.steps.engine", tmp_path, "--adapters", "0,1,2", "--rank", "4", "--long-prompt", "96")
    assert set(figures["starts"]) == {"base", "lora"}
    cases = figures["cases"]
    several = ["base", "lora-unused", "adapters-1", "adapters-2"]
    assert list(cases) == [*several, "single-base", "single-adapter"]
    for name, case in cases.items():
        assert case["output_tokens"] == 6 * (3 if name in several else 1), name
        assert case["decode_steps"] > 0, name
        assert None not in case.values(), name
    long = figures["long_prompt"]
    assert long["running_streams"] == 2
    assert long["steps_with_prompt_tokens"] >= 96 / 32
    assert long["largest_gap_steps"] >= 1
    assert long["largest_gap_ms"] > 0


def test_grammars_are_measured_beside_free_answers(tmp_path: Path) -> None:
    figures = _run("bench.steps.structured", tmp_path)
    assert list(figures["decode_step_ms"]) == ["free", "constrained"]
    assert len(figures["ratios"]) == 1
    assert min(*figures["ratios"], *figures["decode_step_ms"]["free"]) > 0


def test_the_prefix_cache_is_measured_beside_an_engine_without_it(tmp_path: Path) -> None:
    memory = ("--engine", "prefix_host_bytes=16777216", "kv_bytes=400000")
    figures = _run("bench.steps.prefix", tmp_path, "--long-prompt", "160", *memory)
    assert min(figures["host"]["found_on_host"]) > 0
    assert None not in figures["cost"].values()
    assert figures["long"]["first_token_ms_found"] > 0
    # Each of the three computes the end of its prompt by itself, which fills no block.
    assert 1 <= figures["equal"]["computed_of_one"] < 2
    assert figures["chats"]["found_tokens"] > 0
    assert figures["alora"]["found_of_tokens_before"] > 0


@pytest.mark.wide
def test_the_prefix_cache_is_measured_over_http(tmp_path: Path) -> None:
    sizes = "--users 2 --turns 2 --requests 16 --system-tokens 96 --own-tokens 32 --adapters 2 --sessions 2"
    figures = _run("bench.http.prefix", tmp_path, *sizes.split(), "--kv-bytes", "8MiB")
    assert figures["chats"]["found_tokens"] > 0 and len(figures["chats"]["first_token_ms_p50_by_turn"]) == 2
    assert all(figures["shared"][kind]["hits"] == 8 for kind in ("chats", "raw"))
    counts = figures["adapters"]
    assert [counts[name] for name in ("first_found_anything", "second_found_all", "moved_found_anything")] == [0, 2, 0]
    assert figures["replicas"]["two_of_one"] > 0


def test_the_prefix_cache_of_a_model_with_states_keeps_some_and_changes_no_token(tmp_path: Path) -> None:
    figures = _run("bench.steps.prefix", tmp_path, "--long-prompt", "480", "--shape", "qwen3_5-tiny")["chats"]
    assert figures["states_at_most"] == 3 and figures["states_kept"] > 0
    assert figures["found_of_unbounded"] > 0.7
    assert figures["answers_as_eager"] == figures["answers"] == 3 * 6


def test_http_is_measured_beside_the_engine_in_process(tmp_path: Path) -> None:
    sides = _run("bench.http.http", tmp_path)["sides"]
    assert list(sides) == ["in-process", "whole", "streamed"]
    for side in sides.values():
        assert side["output_tokens"] == 3 * 6
    assert sides["in-process"]["share_of_in_process"] == 1.0
    # Events that came together have no time between them.
    assert sides["streamed"]["between_tokens_ms_p99"] >= sides["streamed"]["between_tokens_ms_p50"] >= 0
    assert sides["streamed"]["first_token_ms_p50"] > 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--only adapters-3", "no case is called adapters-3; there are base, lora-unused"),
        ("--engine tokens=3", "'tokens' is none of model_dir, store_root"),
        ("--profile", "--profile looks at the kernels of a GPU; add --device cuda"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.steps.engine", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        engine.main()
    assert ended.value.code == 2
    assert error in " ".join(capsys.readouterr().err.split())


def test_a_round_favours_no_side() -> None:
    assert forth_and_back(["a", "b", "c"]) == ["a", "b", "c", "b", "a"]


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 2.0), (51, 3.0), (99, 4.0), (100, 4.0)])
def test_percentiles_are_values_that_were_seen(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected
    assert percentile([], percent) is None


def test_a_profile_counts_time_that_kernels_share_once() -> None:
    def event(name: str, device: DeviceType, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))

    found = figures_of_events(
        [
            event("cudaLaunchKernel", DeviceType.CPU, 0.0, 1.0),
            event("cuLaunchKernelEx", DeviceType.CPU, 1.0, 2.0),
            event("aten::mm", DeviceType.CPU, 0.0, 3.0),
            event("shrink", DeviceType.CUDA, 10.0, 20.0),
            event("expand", DeviceType.CUDA, 18.0, 30.0),
            event("shrink", DeviceType.CUDA, 40.0, 50.0),
        ],
        DeviceType.CUDA,
    )
    assert found["device_busy_ms_per_step"] == pytest.approx(30.0 / NUM_STEPS / 1e3)
    assert found["device_busy_share"] == pytest.approx(30.0 / 40.0)
    assert found["launch_calls_per_step"] == pytest.approx(2 / NUM_STEPS)
    assert found["kernels"][0] == {
        "name": "shrink", "calls_per_step": pytest.approx(2 / NUM_STEPS), "us_per_step": pytest.approx(20 / NUM_STEPS)
    }  # fmt: skip


def test_a_server_by_its_address_is_measured_with_its_adapters(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    with running_server(None, tmp_path) as server:
        command = (
            f"{sys.executable} -m bench.http.any_server --url {server.url} --models base shout --rounds 2 --json {out}"
        )
        size = ["--requests", "4", "--prompt-words", "5", "--output-tokens", "6"]
        subprocess.run([*command.split(), *size], cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_SECONDS)
        log = server.log
    rounds = json.loads(out.read_text())["rounds"]
    assert len(rounds) == 2
    assert all(one["output_tokens_per_second"] > 0 and one["first_token_ms_p50"] > 0 for one in rounds)
    # The round before them warms the server.
    for model in ("base", "shout"):
        assert len(re.findall(rf"path=/v1/completions status=200 .* model={model} ", log)) == 3 * 2
