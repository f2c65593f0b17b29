"""Checks of single ops: the same bits at every repeat, and every implementation of attention."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernels.attention_maps import AttentionMaps
from kernels.platform import MAX_CACHE_ELEMENTS, detect, in_use, installed, prepare
from kernels.probe import run as probing
from kernels.probe.cases.lora import race_cases
from kernels.probe.cases.registry import Case, cases_of
from kernels.probe.cases.tensors import Place
from kernels.probe.op_reports import OpReport
from kernels.shapes import ProbeShapes
from service.doctor.checks.step_process import StepHost
from service.doctor.report import Level

if TYPE_CHECKING:
    from kernels.platform import Platform

NUM_REPEATS = 20
_HEAD_DIMS = (64, 128)
# Share of a step's time after which it begins no further check.
_TIME_SHARE = 0.85


def races(host: StepHost) -> None:
    """Each case of each op, again and again on fresh memory: the same bits, and right ones."""
    platform, shapes = _served(host)
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + host.limit_seconds * _TIME_SHARE
    for op, name, case in _race_cases(platform, shapes):
        if time.monotonic() > until:
            host.find("warning", "races-cut-short", f"There was no time for {op}/{name} and what follows.", None)
            break
        host.tell(f"{NUM_REPEATS} times {op}: {name}")
        row = _repeat(host, platform, shapes, case)
        rows.append({"op": op, "case": name, "implementation": platform.implementations[op], **row})
        host.facts(cases=rows)
        if row["said"]:
            host.find("error", "races", f"{platform.implementations[op]}, {op}/{name}: {row['said']}",
                      f"Report it; until then another implementation of {op} is safer.")  # fmt: skip


def _race_cases(platform: Platform, shapes: ProbeShapes) -> Iterator[tuple[str, str, Case]]:
    yield from (("lora", name, case) for name, case in race_cases().items())
    for op in platform.implementations:
        yield from ((op, name, case) for name, case in cases_of(op, shapes).items())


def _repeat(host: StepHost, platform: Platform, shapes: ProbeShapes, case: Case) -> dict[str, Any]:
    """Largest error, differing repeats, and what is wrong in words."""
    device = torch.device(host.device)
    truth = probing.truth_of(case, shapes)
    tolerance, first, num_different, error = probing.tolerance_of(shapes), None, 0, 0.0
    try:
        with installed(platform, device.type), torch.inference_mode():
            for _ in range(NUM_REPEATS):
                call = case(shapes, Place(device, shapes.torch_dtype, shapes.torch_row_dtype))
                outputs = [output.to("cpu", torch.float32, copy=True) for output in call()]
                error = max(error, probing.distance(outputs, truth))
                first = outputs if first is None else first
                num_different += not _same_bits(first, outputs)
    except Exception as fault:
        return {"repeats": NUM_REPEATS, "different": None, "error": None,
                "said": f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"}  # fmt: skip
    said = ""
    if num_different:
        said = f"{num_different} of {NUM_REPEATS} repeats differ from the first"
    elif not error <= tolerance:
        said = f"the result is {error:.1e} away from plain torch, and may be {tolerance:.0e}"
    return {"repeats": NUM_REPEATS, "different": num_different, "error": error, "said": said}


def _same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
        for a, b in zip(first, second, strict=True)
    )


def attention(host: StepHost) -> None:
    """Every implementation of attention that this kind of device has, at the model's heads and at others; what fused
    attention writes to its workspaces."""
    platform, shapes = _served(host)
    if platform.implementations["paged_attention"] in MAX_CACHE_ELEMENTS:
        compare_workspaces(host, platform, shapes)
    device = torch.device(host.device)
    dims = dict.fromkeys((shapes.head_dim, *_HEAD_DIMS))
    rows: list[dict[str, Any]] = []
    for name in probing.candidates(detect(host.device), "paged_attention"):
        for head_dim in dims:
            # A window that cuts, whatever the model's own layers have: its cases come with it.
            sized = replace(shapes, head_dim=head_dim, rotary_dim=None, sliding_window=shapes.sliding_window or 4096)
            host.tell(f"attention: {name}, heads of {head_dim}")
            for trial in probing.try_all("paged_attention", name, platform, device, sized):
                rows.append({"implementation": name, "head_dim": head_dim, "case": trial.case, "status": trial.status,
                             "error": trial.error, "said": trial.sentence or ""})  # fmt: skip
                host.facts(cases=rows)
                if trial.status not in ("ok", "refused"):
                    level: Level = "warning" if head_dim == shapes.head_dim else "note"
                    host.find(level, "attention-case", f"Heads of {head_dim}: {trial.sentence}")


# Sequences of a decode step, and the blocks of each.
_WORKSPACE_STEPS = ((1, 64), (8, 8), (64, 1))


def compare_workspaces(host: StepHost, platform: Platform, shapes: ProbeShapes) -> None:
    """Whether decode steps write within the workspace that fused attention names for them: it does not look at the
    size of what it is given, and would overwrite other tensors."""
    from kernels.paged_attention import ops
    from kernels.paged_attention.cache_layout import made
    from kernels.paged_attention.npu import call_memory

    device, dtype, block_size = torch.device(host.device), shapes.torch_dtype, shapes.block_size
    host.tell("attention: what decode steps write to their workspaces")
    num_blocks = 1 + max(num * blocks for num, blocks in _WORKSPACE_STEPS)
    cache_shape = (num_blocks, block_size, shapes.num_kv_heads, shapes.head_dim)
    memory, rows = call_memory(device, dtype), []
    with installed(platform, device.type), torch.inference_mode():
        new_zeros = torch.zeros((), dtype=dtype, device=device).new_zeros
        k_cache, v_cache = (made(new_zeros, cache_shape, heads_first=platform.kv_heads_first) for _ in range(2))
        for num, blocks in _WORKSPACE_STEPS:
            memory.watch()
            for is_ragged in (False, True):
                maps = _decode_maps(num, blocks, block_size, is_ragged, device)
                q = torch.randn(num, shapes.num_heads, shapes.head_dim).to(device, dtype)
                ops.paged_attention(q, k_cache, v_cache, maps, scale=0.1, sliding_window=None, out=torch.empty_like(q))
            for num_elements, num_written in memory.written():
                rows.append({"sequences": num, "tokens": blocks * block_size, "elements": num_elements,
                             "written": num_written})  # fmt: skip
                if num_written > num_elements:
                    host.find("error", "attention-workspace", f"A decode step of {num} sequences wrote {num_written} "
                              f"elements of fused attention's workspace of {num_elements}, over other tensors.",
                              "Report it; do not serve on this host.")  # fmt: skip
    host.facts(workspaces=rows)


def _decode_maps(num: int, blocks: int, block_size: int, is_ragged: bool, device: torch.device) -> AttentionMaps:
    """One token of each sequence, of as many tokens as its blocks hold, or of fewer by one more for each next."""
    lengths = tuple(blocks * block_size - (index % block_size if is_ragged else 0) for index in range(num))
    tables = tuple(tuple(range(1 + index * blocks, 1 + (index + 1) * blocks)) for index in range(num))
    slots = [table[-1] * block_size + (length - 1) % block_size for table, length in zip(tables, lengths, strict=True)]
    return AttentionMaps(
        query_starts=tuple(range(num + 1)),
        kv_lens=lengths,
        block_tables=tables,
        query_start_loc=torch.arange(num + 1, dtype=torch.int32).to(device),
        kv_lens_device=torch.tensor(lengths, dtype=torch.int32).to(device),
        block_table=torch.tensor(tables, dtype=torch.int32).to(device),
        slot_mapping=torch.tensor(slots).to(device),
        is_decode=True,
    )


def _served(host: StepHost) -> tuple[Platform, ProbeShapes]:
    """The device made ready, with the implementations that the probe lets serve there; the model's sizes."""
    from kernels.probe.isolated import probe_apart, with_reports
    from service.engine.startup.build import decide, shapes_to_probe

    prepare(host.device)
    config, _ = decide(host.engine_options(), host.device)
    shapes = shapes_to_probe(config)
    platform = in_use(torch.device(host.device))
    host.tell("probing the ops")
    reports: list[OpReport] = probe_apart(platform, host.device, shapes)
    return with_reports(platform, tuple(reports)), shapes
