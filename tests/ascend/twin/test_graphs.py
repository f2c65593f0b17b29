"""Captured decode steps on the NPU path: replayed with other contents they give what eager ones give, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from kernels.attention_maps import AttentionMaps
from kernels.lora import triton_ascend as lora
from kernels.paged_attention import npu, npu_heads_first
from service.engine.engine import Engine
from service.engine.model.graphs import LARGE, UPDATE_FAILED
from service.engine.model.padding import StepSizes
from tests.ascend.twin.stand_ins.install import npu_path
from tests.ascend.twin.test_service import SIZES, config, make_twin_world
from tests.support.engine.engine_parity import BASE, Request, World, build_engine, make_world, run_engine
from tests.support.engine.replay import TwinGraph, TwinGraphs

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter


def test_the_lengths_are_updated_by_the_names_of_torch_npu_s_own_table() -> None:
    """A key that its handler does not know would be passed over without a word."""
    import torch_npu.npu._npugraph_handlers as handlers
    from torch_npu.npu.graphs import _NPU_GRAPH_OP_HANDLERS

    assert handlers.__name__
    maps = maps_of((1, 1), (5, 9), num_tokens=4)
    for name in ("npu_fused_infer_attention_score.default", "npu_fused_infer_attention_score.out"):
        specs = _NPU_GRAPH_OP_HANDLERS[name].UPDATE_SPECS[name]
        assert {key for _, _, key in specs} == npu.host_lengths(maps).keys()
        schema = torch.ops.npu.npu_fused_infer_attention_score.default._schema
        assert {key for _, _, key in specs} <= {argument.name for argument in schema.arguments}


def maps_of(num_queries: tuple[int, ...], kv_lens: tuple[int, ...], num_tokens: int) -> AttentionMaps:
    """Decode sequences, padded to num_tokens."""
    num_missing = num_tokens - len(kv_lens)
    starts = [sum(num_queries[:i]) for i in range(len(num_queries) + 1)]
    empty = torch.empty(0, dtype=torch.int32)
    return AttentionMaps(
        query_starts=(*starts, *starts[-1:] * num_missing),
        kv_lens=(*kv_lens, *(0,) * num_missing),
        block_tables=((1,),) * len(kv_lens) + ((),) * num_missing,
        query_start_loc=empty,
        kv_lens_device=empty,
        block_table=empty,
        slot_mapping=torch.empty(num_tokens, dtype=torch.int64),
    )


def test_padding_is_told_as_sequences_of_one_token() -> None:
    """The last end is the number of tokens, and no length is 0: what the operator asks for."""
    assert npu.host_lengths(maps_of((1, 1, 1), (5, 9, 2), num_tokens=4)) == {
        "actual_seq_lengths": [1, 2, 3, 4],
        "actual_seq_lengths_kv": [5, 9, 2, 1],
    }
    assert npu.host_lengths(maps_of((), (), num_tokens=2)) == {
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [1, 1],
    }
    assert npu.host_lengths(maps_of((3, 1), (5, 9), num_tokens=2 + 2).__class__(
        query_starts=(0, 3, 4), kv_lens=(5, 9), block_tables=((1,), (2,)), query_start_loc=torch.empty(0),
        kv_lens_device=torch.empty(0), block_table=torch.empty(0), slot_mapping=torch.empty(4),
    )) == {"actual_seq_lengths": [3, 4], "actual_seq_lengths_kv": [5, 9]}  # fmt: skip


def run(world: World, *, npu_graphs: bool, replays: bool = True) -> tuple[list[tuple[StepSizes, torch.Tensor]], Engine]:
    """Sizes and logits of each step, of requests that join one by one, prompts among decode steps.

    replays  False: what would be replayed runs eagerly in the same padded sizes
    """
    engine_config = msgspec.structs.replace(
        config(world, num_blocks=9, token_budget=64), npu_graphs=npu_graphs, overlap=True
    )
    engine = build_engine(engine_config, graphs=TwinGraphs())
    steps: list[tuple[StepSizes, torch.Tensor]] = []
    runner: Any = engine.runner
    if not replays:
        runner.captured.run = lambda _batch, _sizes, _is_padded, work: work()
    model_run = runner.run

    def noted(batch: Any, sizes: StepSizes) -> torch.Tensor:
        out: torch.Tensor = model_run(batch, sizes)
        steps.append((sizes, out[: sum(kv_len > 0 for kv_len in batch.attention.kv_lens)].clone()))
        return out

    runner.run = noted
    names = (BASE, "all", "one", "attention", "rs")
    waiting = [Request(f"r{i}", name, (7 + i, 9, 8 + i), 8) for i, name in enumerate(names)]
    while waiting or engine.num_requests:
        if waiting:
            engine.submit(waiting.pop(0).submit(world))
        engine.step()
    engine.check_integrity()
    return steps, engine


@pytest.fixture(scope="module", params=["llama", "lfm2", "qwen3_moe"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_twin_world(request.param, tmp_path_factory.mktemp(request.param))


def test_replayed_decode_steps_equal_eager_ones(world: World) -> None:
    """Bit for bit those of the same padded sizes; but for rounding those that are not padded."""
    with npu_path(float32_attention=True):
        eager, other = run(world, npu_graphs=False)
        padded, third = run(world, npu_graphs=True, replays=False)
        captured, engine = run(world, npu_graphs=True)
    third.close()
    counts, reason = engine.runner.captured, other.runner.captured.eager
    engine.close()
    other.close()
    assert counts.num_replayed > counts.num_graphs > 1, "something is replayed"
    assert set(counts.eager) == {LARGE}, "prompts run eagerly, and nothing else does"
    assert set(reason) == {"npu_graphs is off"}
    for step, ((_, found), (_, expected), (_, exact)) in enumerate(zip(captured, padded, eager, strict=True)):
        assert torch.equal(found, expected), f"step {step}"
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)


def test_steps_are_not_padded_unless_they_are_captured(world: World) -> None:
    """Padding costs an NPU: without graphs there is none, with them in decode steps alone."""
    with npu_path(float32_attention=True):
        eager, other = run(world, npu_graphs=False)
        captured, engine = run(world, npu_graphs=True)
        exact = {step: sizes for step, (sizes, _) in enumerate(eager)}
        assert {sizes.num_tokens for sizes in exact.values()} >= {3, 5}, "sizes that nothing is padded to"
        assert all(sizes.num_sequences == len(logits) for sizes, logits in eager)
        for step, (sizes, _) in enumerate(captured):
            if sizes.all_decode and sizes.num_rows is None:
                assert sizes.num_tokens in (1, 2, 4, 8)
            else:
                assert sizes == exact[step]
        decode = next(sizes for sizes, _ in eager if sizes.all_decode and sizes.num_tokens == 3)
        assert engine.runner.padded(decode).num_tokens == 4
        with mock.patch.object(TwinGraph, "update", side_effect=RuntimeError("planted")):
            run_engine(engine, [Request("last", BASE, (5,), 3).submit(world)])
        assert engine.runner.captured.eager[UPDATE_FAILED] == 2
        assert engine.runner.padded(decode) == decode
        engine.close()
        other.close()


def lengths_that_are_not_updated(patch: pytest.MonkeyPatch) -> None:
    from tests.support.engine.replay import Recording

    patch.setattr(Recording, "rewrite", lambda _self, _values: 1)


def another_sequence_s_lengths(patch: pytest.MonkeyPatch) -> None:
    right = npu.host_lengths

    def turned(maps: AttentionMaps) -> Any:
        told = right(maps)
        return {**told, "actual_seq_lengths_kv": told["actual_seq_lengths_kv"][::-1]}

    patch.setattr(npu_heads_first, "CONTRACT", replace(npu.CONTRACT, updates=turned))


def a_key_that_the_operator_has_not(patch: pytest.MonkeyPatch) -> None:
    right = npu.host_lengths
    patch.setattr(npu_heads_first, "CONTRACT", replace(npu.CONTRACT, updates=lambda maps: {"lengths": right(maps)}))


@pytest.mark.parametrize(
    "fault", [lengths_that_are_not_updated, another_sequence_s_lengths, a_key_that_the_operator_has_not]
)
def test_a_fault_in_the_updates_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world("llama", tmp_path, "cpu", **SIZES["llama"])
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_replayed_decode_steps_equal_eager_ones(world)


def test_an_op_that_cannot_be_replayed_is_named(world: World) -> None:
    with (
        npu_path(float32_attention=True),
        mock.patch.object(lora, "CONTRACT", replace(lora.CONTRACT, replayable=False)),
    ):
        _, engine = run(world, npu_graphs=True)
        assert set(engine.runner.captured.eager) == {"lora not replayable"}
        engine.close()
