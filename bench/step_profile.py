"""Where the time of decode steps goes on a GPU, by torch's profiler."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.in_process import Driver
from service.engine.engine import Engine
from service.engine.messages import Submit

NUM_STEPS = 20
_NUM_KERNELS = 25
_LAUNCHES = ("LaunchKernel", "GraphLaunch")


def measure(engine: Engine, work: list[Submit]) -> dict[str, object]:
    """Of `NUM_STEPS` decode steps of all requests, per step: kernels and copies, the host's calls that launch them,
    milliseconds in which the GPU was busy, and the kernels that took longest. The profiler slows the host down, so
    `gpu_busy_share` is less than without it."""
    driver = Driver(engine)
    driver.submit(work)
    while len(driver.run.arrivals) < len(work):
        driver.step()
    driver.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            driver.step()
        torch.cuda.synchronize()
    driver.abort(work)
    return figures(profiler.events())


def figures(events: Any) -> dict[str, Any]:
    """Of the profiler's events; times are in microseconds."""
    kernels: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    num_launches = 0
    for event in events:
        if event.device_type == DeviceType.CUDA:
            span = event.time_range
            kernels[event.name].append(span.end - span.start)
            spans.append((span.start, span.end))
        else:
            num_launches += any(name in event.name for name in _LAUNCHES)
    if not spans:
        raise RuntimeError("the profiler saw nothing on the GPU")
    busy_us = _union(spans)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:_NUM_KERNELS]
    return {
        "steps": NUM_STEPS,
        "kernels_per_step": len(spans) / NUM_STEPS,
        "launch_calls_per_step": num_launches / NUM_STEPS,
        "gpu_busy_ms_per_step": busy_us / NUM_STEPS / 1e3,
        "gpu_busy_share": busy_us / (max(end for _, end in spans) - min(start for start, _ in spans)),
        "kernels": [
            {"name": name, "calls_per_step": len(times) / NUM_STEPS, "us_per_step": sum(times) / NUM_STEPS}
            for name, times in longest
        ],
    }


def _union(spans: list[tuple[float, float]]) -> float:
    """Time covered by at least one span: kernels may overlap by dependent launch."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def show(console: Console, name: str, profile: dict[str, Any]) -> None:
    """A table on the terminal."""
    title = (
        f"{name}: {profile['kernels_per_step']:.0f} kernels and {profile['launch_calls_per_step']:.0f} launch calls a "
        f"step, GPU busy {profile['gpu_busy_ms_per_step']:.2f} ms a step, {profile['gpu_busy_share']:.0%} of the time"
    )
    table = Table("kernel", "calls a step", "us a step", title=title)
    for kernel in profile["kernels"]:
        table.add_row(kernel["name"][:90], f"{kernel['calls_per_step']:.1f}", f"{kernel['us_per_step']:.1f}")
    console.print(table)
