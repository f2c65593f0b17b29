"""Sections on the device, its ops, and what moves to it."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from service.doctor.report import Examination, Section, Skipped
from service.machine import memory_bytes, num_usable_cpus

MIB = 2**20
_NUM_REPEATS = 20
_BUFFER_BYTES = {"cpu": 64 * MIB, "cuda": 256 * MIB, "npu": 256 * MIB}
# Width for a model without convolutions, whose op is probed all the same.
_CONV_WIDTH = 3


def look_at_device(examination: Examination) -> Section:
    """The kind of device, and whether it is there."""
    section = Section("device", "Device")
    if "torch" in examination.import_errors:
        raise Skipped("torch cannot be imported")
    from kernels.platform import BackendError, detect, prepare

    try:
        # As an engine does it: what is known of an NPU is asked of the one made this process's.
        prepare(examination.device)
        platform = detect(examination.device)
    except BackendError as error:
        section.find("error", "device-absent", _sentence(str(error)), "Name another --device, or see above.")
        return section
    examination.platform = platform
    memory = _host_memory() if platform.device == "cpu" else _device_memory(examination.device)
    examination.memory_free_bytes = memory["memory_free_bytes"]
    section.facts = {
        "name": examination.device,
        "kind": _cpu_name() if platform.device == "cpu" else platform.kind,
        "num_cores": platform.num_cores,
        "on_chip_bytes": platform.on_chip_bytes or None,
        **memory,
        "native_bfloat16": platform.native_bfloat16,
    }
    if platform.device == "cpu":
        section.facts["cores_allowed"] = num_usable_cpus()
    for sentence in platform.fallbacks:
        section.find("note", "platform", _sentence(sentence))
    return section


def look_at_ops(examination: Examination) -> Section:
    """Every op's implementation against plain torch on the host, at the model's own sizes."""
    from kernels.platform import BackendError
    from kernels.probe.isolated import probe_apart
    from kernels.shapes import ProbeShapes

    section = Section("ops", "Ops")
    if examination.platform is None:
        raise Skipped("there is no device")
    shapes = examination.shapes or ProbeShapes()
    if shapes.conv_width == 0:
        shapes = replace(shapes, conv_width=_CONV_WIDTH)
    if shapes.delta is None:
        shapes = replace(shapes, delta=ProbeShapes().delta)
    if shapes.mamba2 is None:
        shapes = replace(shapes, mamba2=ProbeShapes().mamba2)
    has_experts = shapes.experts is not None
    if not has_experts:
        shapes = replace(shapes, experts=ProbeShapes().experts)

    def tell(op: str, implementation: str) -> None:
        examination.tell(f"probing {op}: {implementation}")

    try:
        reports = probe_apart(examination.platform, examination.device, shapes, num_repeats=_NUM_REPEATS, on_begin=tell)
    except BackendError as error:
        section.find("error", "probe-failed", _sentence(str(error)))
        return section
    section.facts = {"shapes": asdict(shapes), "ops": [_op_facts(report) for report in reports]}
    for report in reports:
        if not report.is_served:
            section.find("error", "op-unserved", str(report.sentence),
                         "Try another --dtype; else report it with --json.")  # fmt: skip
        elif report.is_fallback and (has_experts or report.op != "experts"):  # refused for a dtype, say
            section.find("warning", "op-fallback", str(report.sentence))
    return section


def measure_bandwidth(examination: Examination) -> Section:
    """Copies between host and device, and on a CPU within its memory. Bytes per second, median of several."""
    import torch

    section = Section("bandwidth", "Bandwidth")
    if examination.platform is None:
        raise Skipped("there is no device")
    num_bytes = _BUFFER_BYTES[examination.device_type]
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    section.facts["buffer_bytes"] = num_bytes
    if examination.device_type == "cpu":
        target = torch.empty_like(pageable)
        section.facts["memory_copy"] = _rate(lambda: target.copy_(pageable), num_bytes, lambda: None)
        return section
    device = torch.device(examination.device)
    module = torch.get_device_module(device)
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    for name, host in (("pinned", pageable.pin_memory()), ("pageable", pageable)):
        is_pinned = name == "pinned"
        to_device = functools.partial(on_device.copy_, host, non_blocking=is_pinned)
        to_host = functools.partial(host.copy_, on_device, non_blocking=is_pinned)
        section.facts[f"host_to_device_{name}"] = _rate(to_device, num_bytes, module.synchronize)
        section.facts[f"device_to_host_{name}"] = _rate(to_host, num_bytes, module.synchronize)
    return section


def _op_facts(report: Any) -> dict[str, Any]:
    """One op as JSON; the trials without what the op itself says."""
    trials = [{name: value for name, value in asdict(trial).items() if name != "op"} for trial in report.trials]
    return {
        "op": report.op,
        "wished": report.wished,
        "used": report.used,
        "regimes": dict(report.regimes),
        "trials": trials,
    }


def _rate(copy: Callable[[], object], num_bytes: int, wait: Callable[[], object]) -> float:
    seconds = []
    for _ in range(6):
        wait()
        started = time.perf_counter()
        copy()
        wait()
        seconds.append(time.perf_counter() - started)
    return num_bytes / statistics.median(seconds[1:])


def _device_memory(device: str) -> dict[str, int]:
    import torch

    free, total = torch.get_device_module(torch.device(device)).mem_get_info(torch.device(device))
    return {"memory_total_bytes": int(total), "memory_free_bytes": int(free)}


def _host_memory() -> dict[str, int]:
    total, available = memory_bytes()
    return {"memory_total_bytes": total, "memory_free_bytes": available}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
