"""The step that looks into 20 decode steps: host against device, operators on AI_CPU, each LoRA kernel."""

from __future__ import annotations

import csv
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from service.doctor.checks.probe_engine import Driver, Subject, build_subject, names
from service.doctor.checks.step_process import StepFailed, StepHost

NUM_STEPS = 20
_NUM_KERNELS = 25
_MAX_REQUESTS = 64
_LAUNCHES = ("LaunchKernel", "GraphLaunch")
# Parts of the names of kernels with LoRA, in every language; the last ones expand and compute the gate at once.
_LORA = ("lora", "shrink", "expand", "swiglu_token", "swiglu_tile", "swiglu_window")
_AI_CPU, _UNKNOWN = "AI_CPU", "N/A"


def profile(host: StepHost) -> None:
    """Decode steps of 64 requests with as many adapters as fit; without the profiler first, which slows the host."""
    subject = build_subject(host)
    number = min(_MAX_REQUESTS, subject.engine.config.max_sequences, subject.engine.capacity.num_slots - 1)
    longest = min(subject.engine.capacity.max_model_len_tokens, subject.engine.kv_capacity_tokens // number)
    num_tokens = min(2 * NUM_STEPS + 8, longest - subject.num_prompt_tokens - 1)
    if num_tokens < 2 * NUM_STEPS:
        raise StepFailed(f"The model's longest request has no room for {2 * NUM_STEPS} output tokens.")
    adapters = names(min(number, subject.num_adapters))
    subject.run(number, adapters, 2)
    driver = subject.decoding(subject.requests(number, adapters, num_tokens))
    host.tell(f"{NUM_STEPS} decode steps of {number} requests")
    host.facts(requests=number, adapters=len(adapters), steps=NUM_STEPS, **_host_and_device(driver, subject, host))
    host.tell("the same with the profiler")
    measure = {"npu": _profile_npu, "cuda": _profile_cuda, "cpu": _profile_cpu}[host.device_type]
    figures = measure(driver, host)
    driver.abort(subject.requests(number, adapters, 1))
    host.facts(**figures)
    _judge(host, figures)


def _host_and_device(driver: Driver, subject: Subject, host: StepHost) -> dict[str, float]:
    """Milliseconds of a step, and of its launch alone: where the two are alike, the host is what steps wait for."""
    wait = torch.get_device_module(torch.device(host.device)).synchronize
    wait()
    launch = 0.0
    runner: Any = subject.engine.runner
    run = runner.run

    def timed(*arguments: Any) -> torch.Tensor:
        nonlocal launch
        started = time.perf_counter()
        out: torch.Tensor = run(*arguments)
        launch += time.perf_counter() - started
        return out

    runner.run = timed
    started = time.perf_counter()
    for _ in range(NUM_STEPS):
        driver.step()
    wait()
    seconds = time.perf_counter() - started
    runner.run = run
    return {"ms_per_step": seconds / NUM_STEPS * 1e3, "ms_to_launch_the_model": launch / NUM_STEPS * 1e3}


def _steps(driver: Driver) -> None:
    for _ in range(NUM_STEPS - 4):
        driver.step()


def _steps_and_wait(driver: Driver, host: StepHost) -> None:
    _steps(driver)
    torch.get_device_module(torch.device(host.device)).synchronize()


def _profile_cpu(driver: Driver, _host: StepHost) -> dict[str, Any]:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        _steps(driver)
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profiler.key_averages():
        spent[event.key] = [event.self_cpu_time_total / max(event.count, 1)] * event.count
    return {"host_against_device": "not applicable on cpu", "ai_cpu": "not applicable on cpu",
            "kernels": _longest(spent, NUM_STEPS - 4)}  # fmt: skip


def _profile_cuda(driver: Driver, _host: StepHost) -> dict[str, Any]:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _steps(driver)
        torch.cuda.synchronize()
    return {"ai_cpu": "not applicable on cuda",
            **figures_of_events(profiler.events(), DeviceType.CUDA, num_steps=NUM_STEPS - 4)}  # fmt: skip


def _profile_npu(driver: Driver, host: StepHost) -> dict[str, Any]:
    """torch_npu's profiler writes tables; the one of kernels names the core that each ran on."""
    with tempfile.TemporaryDirectory(prefix="multilora-doctor-") as directory:
        record_npu(directory, lambda: _steps_and_wait(driver, host))
        tables = sorted(Path(directory).rglob("kernel_details.csv"))
        if not tables:
            raise StepFailed("torch_npu's profiler has written no kernel_details.csv.")
        with tables[0].open(newline="") as file:
            return figures_of_table(csv.DictReader(file), num_steps=NUM_STEPS - 4)


def record_npu(directory: str, work: Callable[[], None]) -> None:
    """Have torch_npu's profiler write its tables of `work` below the directory.

    At its default level, 0, the tables do not tell which core a kernel ran on: the column is N/A, for AI_CPU too.
    """
    from kernels.ascend_runtime import torch_npu

    npu = torch_npu()
    activities = [npu.profiler.ProfilerActivity.CPU, npu.profiler.ProfilerActivity.NPU]
    ready = npu.profiler.tensorboard_trace_handler(directory)
    config = npu.profiler._ExperimentalConfig(
        profiler_level=npu.profiler.ProfilerLevel.Level1, aic_metrics=npu.profiler.AiCMetrics.AiCoreNone
    )
    with npu.profiler.profile(activities=activities, on_trace_ready=ready, experimental_config=config):
        work()


def figures_of_table(rows: Iterable[Mapping[str, str]], *, num_steps: int) -> dict[str, Any]:
    """Figures of torch_npu's kernel_details.csv: "Name", "Accelerator Core", "Start Time(us)", "Duration(us)"."""
    kernels: dict[str, list[float]] = defaultdict(list)
    on_ai_cpu: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    knows_cores = False
    for row in rows:
        start, duration = float(row["Start Time(us)"].strip()), float(row["Duration(us)"])
        kernels[row["Name"]].append(duration)
        spans.append((start, start + duration))
        core = row.get("Accelerator Core", "").strip()
        knows_cores |= core not in ("", _UNKNOWN)
        if core == _AI_CPU:
            on_ai_cpu[row["Name"]].append(duration)
    if not spans:
        raise StepFailed("torch_npu's profiler saw nothing on the NPU.")
    longest = _longest(on_ai_cpu, num_steps) if knows_cores else "the profiler did not tell which core a kernel ran on"
    return _figures(kernels, spans, num_steps) | {"ai_cpu": longest}


def figures_of_events(events: Any, device_type: DeviceType, *, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Figures of the events of torch's profiler, whose times are in microseconds."""
    kernels: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    num_launches = 0
    for event in events:
        if event.device_type == device_type:
            span = event.time_range
            kernels[event.name].append(span.end - span.start)
            spans.append((span.start, span.end))
        else:
            num_launches += any(name in event.name for name in _LAUNCHES)
    if not spans:
        raise RuntimeError("the profiler saw nothing on the device")
    return _figures(kernels, spans, num_steps) | {"launch_calls_per_step": num_launches / num_steps}


def _figures(kernels: Mapping[str, list[float]], spans: list[tuple[float, float]], num_steps: int) -> dict[str, Any]:
    busy_us = _union(spans)
    return {
        "steps": num_steps,
        "kernels_per_step": len(spans) / num_steps,
        "device_busy_ms_per_step": busy_us / num_steps / 1e3,
        "device_busy_share": busy_us / (max(end for _, end in spans) - min(start for start, _ in spans)),
        "kernels": _longest(kernels, num_steps),
        "lora_kernels": _longest(kernels, num_steps, lambda name: any(part in name.lower() for part in _LORA)),
    }


def _longest(
    kernels: Mapping[str, list[float]], num_steps: int, is_wanted: Callable[[str], bool] = lambda _: True
) -> list[dict[str, Any]]:
    found = sorted(((name, times) for name, times in kernels.items() if is_wanted(name)), key=lambda one: -sum(one[1]))
    return [
        {"name": name, "calls_per_step": len(times) / num_steps, "us_per_step": sum(times) / num_steps}
        for name, times in found[:_NUM_KERNELS]
    ]


def _union(spans: list[tuple[float, float]]) -> float:
    """Time covered by at least one span: kernels may overlap by dependent launch."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _judge(host: StepHost, figures: Mapping[str, Any]) -> None:
    if isinstance(figures["ai_cpu"], list) and figures["ai_cpu"]:
        names = ", ".join(one["name"] for one in figures["ai_cpu"][:5])
        host.find("warning", "ai-cpu", f"Operators run on AI_CPU in decode steps: {names}.", "Report it.")
    if figures.get("device_busy_share", 1.0) < 0.5:
        host.find("note", "host-bound", f"The device is busy {figures['device_busy_share']:.0%} of the time under the "
                  "profiler: steps wait for the host.")  # fmt: skip
