"""What decode steps of fused attention write to: memory that stays where it is, as captured calls write there again."""

from __future__ import annotations

import gc
import io
import json
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.attention_maps import AttentionMaps
from kernels.paged_attention import npu
from kernels.paged_attention.ops import paged_attention
from kernels.platform import in_use
from kernels.shapes import ProbeShapes
from service.doctor.checks.kernels import compare_workspaces
from service.doctor.checks.step_process import StepHost
from tests.ascend.twin.stand_ins import stand_ins
from tests.ascend.twin.stand_ins.checks import HEAD_DIM, KV_HEADS, NUM_BLOCKS, NUM_HEADS, attention_maps, laid_out

WORKSPACE = "_npu_fused_infer_attention_score_get_max_workspace"
DTYPE = torch.float16
CACHE = laid_out(torch.zeros(NUM_BLOCKS, 128, KV_HEADS, HEAD_DIM, dtype=DTYPE), heads_first=True)


pytestmark = pytest.mark.usefixtures("npu")


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    npu.call_memory.cache_clear()
    stand_ins.asked_workspaces.clear()
    stand_ins.writes.clear()


def attend(maps: AttentionMaps, sliding_window: int | None = None) -> None:
    q = torch.zeros(maps.query_starts[-1], NUM_HEADS, HEAD_DIM, dtype=DTYPE)
    paged_attention(q, CACHE, CACHE, maps, scale=0.1, sliding_window=sliding_window, out=torch.empty_like(q))


def decode(num_sequences: int, kv_len: int = 3) -> AttentionMaps:
    return attention_maps(((1, kv_len),) * num_sequences)


def written() -> tuple[torch.Tensor, torch.Tensor]:
    """Workspace and place of the softmax of the latest call."""
    return stand_ins.writes[-1]


def test_smaller_steps_and_other_layers_share_the_workspace_of_the_largest() -> None:
    attend(decode(5))
    workspace, lse = written()
    for maps, sliding_window in ((decode(5), None), (decode(2), None), (decode(5), 4), (decode(1, 200), None)):
        attend(maps, sliding_window)
        assert written()[0] is workspace and written()[1] is lse


def test_a_larger_step_leaves_the_workspace_of_smaller_ones_to_captured_calls() -> None:
    attend(decode(2))
    small, _ = written()
    attend(decode(3))
    large, _ = written()
    assert large.numel() >= 2 * small.numel(), "few sizes, whose sum is less than twice the last"
    alive = weakref.ref(small)
    del small
    stand_ins.writes.clear()
    gc.collect()
    assert alive() is not None, "captured calls still write there"


def test_the_size_is_asked_for_once_for_each_size_of_a_step() -> None:
    before = stand_ins.num_calls[WORKSPACE]
    for num_sequences in (1, 4, 4, 1, 4):
        attend(decode(num_sequences))
    assert stand_ins.num_calls[WORKSPACE] - before == 2
    attend(decode(4, 4))  # other lengths in the same shapes
    assert stand_ins.num_calls[WORKSPACE] - before == 2
    attend(decode(4), 2)
    assert stand_ins.num_calls[WORKSPACE] - before == 3


def test_steps_with_prompts_leave_the_workspace_to_the_allocator() -> None:
    before = stand_ins.num_calls[WORKSPACE]
    attend(attention_maps(((1, 40), (5, 131))))
    assert stand_ins.num_calls[WORKSPACE] == before and not stand_ins.writes


def compared() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The output of the doctor's step: workspaces, and faults."""
    said = io.StringIO()
    shapes = ProbeShapes(dtype="float16", num_heads=NUM_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=128)
    compare_workspaces(StepHost("cpu", {}, 60.0, said), in_use(CACHE.device), shapes)
    words = [json.loads(line) for line in said.getvalue().splitlines()]
    return words[-1]["facts"]["workspaces"], [word["fault"] for word in words if "fault" in word]


def test_the_doctor_sees_what_calls_write_behind_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, faults = compared()
    assert [row["sequences"] for row in rows] == [1, 1, 8, 8, 64, 64] and not faults
    assert all(0 < row["written"] <= row["elements"] for row in rows)
    attend(decode(2))
    first, _ = written()
    attend(decode(2))
    assert written()[0] is first, "the watch has ended"
    largest = {row["sequences"]: row["elements"] for row in rows}
    monkeypatch.setattr(stand_ins, "workspace_of_call", lambda query, *_: largest[len(query)] + (len(query) == 8))
    rows, faults = compared()
    assert [row["written"] - row["elements"] for row in rows] == [0, 0, 1, 1, 0, 0]
    assert [(fault["level"], fault["code"]) for fault in faults] == [("error", "attention-workspace")] * 2


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_of_known_sizes_makes_no_tensor_and_copies_none() -> None:
    maps = decode(4)
    q = torch.zeros(4, NUM_HEADS, HEAD_DIM, dtype=DTYPE)
    out = torch.empty_like(q)
    attend(maps)
    with _Operators() as operators:
        paged_attention(q, CACHE, CACHE, maps, scale=0.1, out=out)
    assert operators.names == ["aten.transpose.int", "aten.transpose.int", "npu.npu_fused_infer_attention_score.out"]
