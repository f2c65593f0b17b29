"""The kernels of the gated delta rule in chunks, each by itself, in the forms that their launcher can choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels.ascend_relaunch import AscendLaunch
from kernels.gated_delta import triton_ascend_chunks as chunks
from kernels.gated_delta import triton_ascend_prepare as prepare
from kernels.gated_delta.ops import gates_of, heads_of
from kernels.gated_delta.triton_ascend_chunks import CHUNK, Buffers
from kernels.gated_delta.triton_ascend_scan import gated_delta_scan
from kernels.platform import detect, installed
from tests.ascend.cases.gated_delta_cases import NUM_VECTOR_CORES, QWEN_2B, QWEN_9B, QWEN_27B
from tests.ascend.cases.gated_delta_prefill_cases import MAPS, Data, Step, make_data
from tests.ascend.gate.cases import MAX_TRAFFIC, Case, Launch
from tests.tolerances import OP

NORM, PREPARE, SOLVE, DOUBLE_16, DOUBLE_32, SCAN = range(6)


def parts_of(data: Data, start: int, end: int, block_k: int) -> dict[str, torch.Tensor]:
    """What the launches before the scan's leave, from float64, by the names of `triton_ascend_prepare`; beside that L
    as it comes ("changes"), and with blocks of 16 and 32 rows inverted ("solved", "halves")."""
    here, num_heads = slice(start, end), data.b.shape[1]
    q, k, _ = heads_of(data.qkv[here], data.states[:1], torch.float64)
    beta, decay_log = gates_of(data.b[here], data.a[here], data.a_log, data.dt_bias, torch.float64)

    def chunked(x: torch.Tensor, padding: float = 0.0) -> torch.Tensor:
        """x [tokens, heads, size] -> [chunks, heads, CHUNK, size]"""
        tail = torch.full((-len(x) % CHUNK, *x.shape[1:]), padding, dtype=x.dtype)
        return torch.cat((x, tail)).unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q, k = chunked(q), chunked(k)
    beta, total = chunked(beta[..., None], 0.5)[..., 0], chunked(decay_log[..., None])[..., 0].cumsum(2)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    shared = 2 * num_heads * q.shape[-1] // (data.qkv.shape[1] - num_heads * data.out.shape[2])
    normed = torch.cat((q[:, ::shared], k[:, ::shared]), dim=1)
    last = total[..., -1:]
    changes = -(beta[..., None] * (k @ k.transpose(2, 3)) * decay).tril(-1)
    solved, halves = (_inverted(changes, width) for width in (16, 32))
    wide = {
        "normed": torch.nn.functional.pad(normed, (0, block_k - normed.shape[-1])),
        "factors": torch.stack((beta, total.exp(), (last - total).exp(), last.exp().expand_as(total)), dim=2),
        "scores": (q @ k.transpose(2, 3)) * decay,
        "changes": changes,
        "solved": solved,
        "halves": halves,
        "matrix": _inverted(changes, CHUNK),
    }
    return {name: part.float().contiguous() for name, part in wide.items()}


def _inverted(changes: torch.Tensor, width: int) -> torch.Tensor:
    """changes [..., CHUNK, CHUNK], with each block of `width` rows on the diagonal the inverse of 1 less it."""
    result = changes.clone()
    for first in range(0, CHUNK, width):
        here = slice(first, first + width)
        result[..., here, here] = torch.linalg.inv(torch.eye(width, dtype=changes.dtype) - changes[..., here, here])
    return result


_THREE_CHUNKS = Step((5, 150, 3), (2, 1, -1), (True, True, False))
# What matrix_ptr holds before each launch, and after it.
_MATRICES = {
    PREPARE: ("", "changes"),
    SOLVE: ("changes", "solved"),
    DOUBLE_16: ("solved", "halves"),
    DOUBLE_32: ("halves", "matrix"),
    SCAN: ("matrix", "matrix"),
}


def launch(
    which: int,
    step: Step = _THREE_CHUNKS,
    *,
    sequence: int = 1,
    is_begun: bool = False,
    later_source: int | None = None,
    num_cores: int = NUM_VECTOR_CORES,
    minimum_bytes: Callable[[Mapping[str, torch.Tensor]], int] | None = None,
    max_traffic: float = MAX_TRAFFIC,
) -> Launch:
    """One of the launches for one sequence of a step, with what the others before it have left. Buffers have room for
    one more chunk, which stays NaN.

    is_begun       the sequence, which continues nothing by itself, is at its second piece
    later_source   the line that its first piece read; None: its own
    minimum_bytes  of the tensors by name; None: traffic is not judged
    """
    data = make_data(step if not is_begun else replace(step, continued=[True] * len(step.lengths)))
    start, end = data.starts[sequence].item(), data.starts[sequence + 1].item()
    buffers = Buffers(end - start + CHUNK, step.sizes[0], data.states)
    continued = torch.zeros_like(data.continued) if is_begun else data.continued
    if later_source is not None:
        data.sources[sequence] = later_source
    with installed(replace(detect("cpu"), num_cores=num_cores)):
        inputs = (data.qkv, data.b, data.a, data.a_log, data.dt_bias, data.states, data.lines, data.sources, continued)
        planned = list(chunks.plan_sequence(*inputs, data.out, buffers, sequence, int(start), int(end)))[which]
    parts = parts_of(data, int(start), int(end), buffers.normed.shape[-1])
    for buffer in (buffers.normed, buffers.factors, buffers.matrix, buffers.scores):
        buffer.fill_(torch.nan)
    before, after = _MATRICES.get(which, ("", ""))
    expected = {"normed_ptr": _filled(buffers.normed, parts["normed"]), "matrix_ptr": buffers.matrix.clone()}
    if before:
        _filled(buffers.matrix, parts[before], in_place=True)
    if after:
        expected["matrix_ptr"] = _filled(buffers.matrix, parts[after])
    expected |= {f"{name}_ptr": _filled(getattr(buffers, name), parts[name]) for name in ("factors", "scores")}
    if which > NORM:
        _filled(buffers.normed, parts["normed"], in_place=True)
    if which == SCAN:
        for name in ("factors", "scores"):
            _filled(getattr(buffers, name), parts[name], in_place=True)
        expected |= _of_sequence(data, sequence, int(start), int(end))
    arguments = {**planned.arguments, **({"is_begun": 1} if is_begun else {})}
    return _launch(replace(planned, arguments=arguments), expected, data, step, minimum_bytes, max_traffic)


def _of_sequence(data: Data, sequence: int, start: int, end: int) -> dict[str, torch.Tensor]:
    """Output and states where this sequence alone is advanced."""
    out, states = torch.full_like(data.out, torch.nan), data.used_states.clone()
    line = int(data.lines[sequence]) - (len(data.states) - len(states))
    if int(data.lines[sequence]) > 0:
        out[start:end], states[line] = data.expected_out[start:end], data.expected_states[line]
    return {"out_ptr": out, "states": states}


def _launch(
    planned: AscendLaunch,
    expected: dict[str, torch.Tensor],
    data: Data,
    step: Step,
    minimum_bytes: Callable[[Mapping[str, torch.Tensor]], int] | None,
    max_traffic: float,
) -> Launch:
    tensors = {name: value for name, value in planned.arguments.items() if isinstance(value, torch.Tensor)}
    reachable = {"states": data.used_states} if "states_ptr" in tensors else {}
    return Launch(
        planned.arguments,
        planned.grid,
        {name: value for name, value in expected.items() if name in tensors or name in reachable},
        MAPS,
        reachable=reachable,
        minimum_bytes=minimum_bytes(tensors) if minimum_bytes else None,
        max_traffic=max_traffic,
        tolerance=OP[step.dtype if "out_ptr" in tensors else torch.float32],
    )


def _filled(buffer: torch.Tensor, part: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
    """The buffer with its first chunks replaced."""
    target = buffer if in_place else buffer.clone()
    target[: len(part)] = part
    return target


def bytes_of(*parts: tuple[str, float]) -> Callable[[Mapping[str, torch.Tensor]], int]:
    """Tensors by name, and how many times their bytes count."""
    return lambda tensors: int(sum(tensors[name].nbytes * times for name, times in parts))


def _forms(which: int, published: Mapping[str, Callable[[], Launch]]) -> dict[str, Callable[[], Launch]]:
    make = partial(launch, which)
    return {
        **published,
        "a tail of one token": partial(make, Step((65,), (1,), (False,)), sequence=0),
        "whole chunks": partial(make, Step((128,), (1,), (True,)), sequence=0),
        "keys unlike values, fp16": partial(make, Step((2, 70), (2, 1), (True, True), (2, 4, 48, 80), torch.float16)),
        "values unlike keys, fp32": partial(make, Step((2, 70), (2, 1), (True, False), (1, 3, 16, 96), torch.float32)),
        "small heads, few cores": partial(make, Step((1, 140), (2, 1), (True, True), (2, 6, 16, 32)), num_cores=3),
        "large values": partial(make, Step((70,), (1,), (True,), (1, 1, 128, 256)), sequence=0),
    }


def _published(which: int) -> dict[str, Callable[[], Launch]]:
    step = {"qwen3.5 2B": QWEN_2B, "qwen3.5 9B": QWEN_9B, "qwen3.5 27B": QWEN_27B}
    return {
        name: partial(launch, which, Step((65,), (1,), (False,), sizes), sequence=0) for name, sizes in step.items()
    }


def _judged(which: int, parts: Sequence[tuple[str, float]], max_traffic: float) -> Callable[[], Launch]:
    return partial(launch, which, minimum_bytes=bytes_of(*parts), max_traffic=max_traffic)


# What is read and written once, of buffers three chunks of four, of rows those of the sequence, of lines its own. All
# else is the compiler's workspace, through which the cores of a program hand on what they compute, and what both of
# its vector cores read: without the workspace 1.5 times the minimum is moved by the first, and 4.7 by the second, of
# which each of a head's four tiles of values reads queries, keys, scores and matrix again. Fewer tiles would be fewer
# cores: the two heads here are the work of 8 of 20.
# Bytes alone are 2.98 and 12.16 times the minimum. The rest is pieces of 128 bytes: of the first around 4 bytes of each
# gate of a token, of the second around 64 bytes of a tile's values and outputs.
_OF_CHUNKS = (("normed_ptr", 0.75), ("factors_ptr", 0.75), ("matrix_ptr", 0.75), ("scores_ptr", 0.75))
_PREPARED = (_OF_CHUNKS, 3.21)
_SCANNED = ((*_OF_CHUNKS, ("out_ptr", 2 * 150 / 158), ("states_ptr", 2 / 4)), 12.52)
_SCANS = {
    **_forms(SCAN, {"three chunks": _judged(SCAN, *_SCANNED), "qwen3.5 9B": _published(SCAN)["qwen3.5 9B"]}),
    "padding": partial(launch, SCAN, Step((70,), (-1,), (True,), (1, 2, 16, 16)), sequence=0),
    "padding on the null line": partial(launch, SCAN, Step((70,), (0,), (True,), (1, 2, 16, 16)), sequence=0),
    "another source": partial(launch, SCAN, Step((5, 70), (2, 1), (True, True), (1, 2, 16, 16), sources=(2, 3))),
    # Of its own line, which the first piece has written.
    "a later piece": partial(launch, SCAN, is_begun=True),
    "a later piece of another source": partial(launch, SCAN, is_begun=True, later_source=3),
    "far": partial(launch, SCAN, Step((1, 70), (2, 1), (True, True), (1, 2, 16, 32), far=True, sources=(2, 3))),
}
_PREPARES = {
    **_forms(PREPARE, {"three chunks": _judged(PREPARE, *_PREPARED), **_published(PREPARE)}),
    "far": partial(launch, PREPARE, Step((1, 70), (2, 1), (True, True), (1, 2, 16, 32), far=True)),
}
_SOLVES = {"three chunks": partial(launch, SOLVE), "whole chunks": _forms(SOLVE, {})["whole chunks"]}
_DOUBLES = {
    f"{width} rows, {name}": partial(launch, which, **options)
    for width, which in (("16", DOUBLE_16), ("32", DOUBLE_32))
    for name, options in (("three chunks", {}), ("few cores", {"num_cores": 3}))
}

# 2 % above what they take by estimate.
_PREPARE_US, _SCAN_US = {"three chunks": 5.3}, {"three chunks": 6.54}
CASES = [
    Case("gated_delta_norm", prepare.gated_delta_norm, _forms(NORM, _published(NORM)), on_chip_fraction=0.85),
    Case("gated_delta_prepare", prepare.gated_delta_prepare, _PREPARES, on_chip_fraction=0.85, max_us=_PREPARE_US),
    Case("gated_delta_solve", prepare.gated_delta_solve, _SOLVES, on_chip_fraction=0.85),
    Case("gated_delta_double", prepare.gated_delta_double, _DOUBLES, on_chip_fraction=0.85),
    Case("gated_delta_scan", gated_delta_scan, _SCANS, on_chip_fraction=0.85, max_us=_SCAN_US),
]
