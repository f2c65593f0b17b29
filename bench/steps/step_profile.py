"""Where the time of decode steps goes on a GPU, by torch's profiler."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from service.doctor.checks.probe_engine import Driver
from service.doctor.checks.profiles import NUM_STEPS, figures_of_events
from service.engine.engine import Engine
from service.engine.ipc.messages import Submit


def measure(engine: Engine, work: list[Submit]) -> dict[str, object]:
    """Of `NUM_STEPS` decode steps of all requests, per step: kernels and copies, the host's calls that launch them,
    milliseconds in which the GPU was busy, and the kernels that took longest. The profiler slows the host down, so
    `device_busy_share` is less than without it."""
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
    return figures_of_events(profiler.events(), DeviceType.CUDA)


def show(console: Console, name: str, profile: dict[str, Any]) -> None:
    """A table on the terminal."""
    title = (
        f"{name}: {profile['kernels_per_step']:.0f} kernels and {profile['launch_calls_per_step']:.0f} launch calls a "
        f"step, GPU busy {profile['device_busy_ms_per_step']:.2f} ms a step, {profile['device_busy_share']:.0%} of all"
    )
    table = Table("kernel", "calls a step", "us a step", title=title)
    for kernel in profile["kernels"]:
        table.add_row(kernel["name"][:90], f"{kernel['calls_per_step']:.1f}", f"{kernel['us_per_step']:.1f}")
    console.print(table)
