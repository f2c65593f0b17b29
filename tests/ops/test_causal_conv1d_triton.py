"""The Triton sources of the causal convolution: in Triton's interpreter on a CPU, on a GPU with `--device cuda`.

What the Ascend compiler makes of its source is checked by the gate under tests/ascend, on few calls; here are many.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.causal_conv1d import ops, reference
from kernels.causal_conv1d.call import PrefillCall
from tests.support.ops import conv_checks
from tests.support.ops.conv_cases import Call
from tests.support.ops.conv_checks import CALLS, PREFILL, SCALES, UPDATE, moved, one_sequence, serving
from tests.tolerances import OP

pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
if ON_GPU and not torch.cuda.is_available():
    pytest.skip("NOT RUN: no NVIDIA GPU", allow_module_level=True)

DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter cuts float32 to bfloat16 instead of rounding.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if ON_GPU else (torch.float32, torch.float16)
# The interpreter runs the Ascend source too.
SOURCES = ["triton_cuda"] if ON_GPU else ["triton_cuda", "triton_ascend"]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="NOT RUN: no NVIDIA GPU")
needs_no_gpu = pytest.mark.skipif(ON_GPU, reason="NOT RUN: on a GPU the other tests compile for that GPU")
both_ops = pytest.mark.parametrize("name", [PREFILL, UPDATE])


@pytest.fixture(params=SOURCES, autouse=True)
def source(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The implementation that serves the device."""
    module = importlib.import_module(f"kernels.causal_conv1d.{request.param}")
    with serving(module, DEVICE):
        yield module


def seeds(quick: int, on_gpu: int) -> Any:
    return pytest.mark.parametrize("seed", range(on_gpu if ON_GPU else quick))


@both_ops
@seeds(24, 80)
def test_gives_the_float64_truth(name: str, seed: int) -> None:
    in_place = seed // 12 % 2 == 0  # 24 seeds: each form of update both ways
    conv_checks.check_float64(name, CALLS[name](seed, dtypes=DTYPES), in_place=in_place, device=DEVICE)


@both_ops
@seeds(24, 80)
def test_states_are_read_from_other_lines(name: str, seed: int) -> None:
    conv_checks.check_sources(name, seed, device=DEVICE)


@both_ops
@seeds(2, 8)
def test_many_sequences(name: str, seed: int) -> None:
    """More than the search for a tile's sequences reads at a time."""
    call = CALLS[name](seed, num_sequences=130, dim=3, dtypes=DTYPES)
    conv_checks.check_float64(name, call, in_place=False, device=DEVICE)


@both_ops
@seeds(3, 12)
def test_blocks_of_channels_with_a_tail(name: str, seed: int) -> None:
    conv_checks.check_float64(name, CALLS[name](seed, dim=1030, dtypes=DTYPES), in_place=seed == 1, device=DEVICE)


@both_ops
@seeds(6, 24)
@pytest.mark.parametrize("scale", SCALES)
def test_the_range_of_bfloat16_is_kept(name: str, seed: int, scale: float) -> None:
    conv_checks.check_range(name, seed, scale, device=DEVICE)


@both_ops
@seeds(8, 24)
def test_the_order_of_sequences_does_not_matter(name: str, seed: int) -> None:
    conv_checks.check_order(name, seed, device=DEVICE)


@both_ops
def test_garbage_in_padding_rows_stays_there(name: str) -> None:
    conv_checks.check_garbage_in_padding(name, DEVICE)


def test_state_indices_may_be_empty() -> None:
    conv_checks.check_empty(DEVICE)


@seeds(6, 12)
def test_any_chunking_and_token_by_token_give_the_same_bits(seed: int) -> None:
    rng, fixed = one_sequence(seed, **({"dim": 2048, "num_tokens": 300} if ON_GPU else {"dim": 5}))
    conv_checks.check_chunkings(rng, moved(fixed, DEVICE))


@seeds(6, 12)
def test_any_chunking_fills_a_prefix_cache_with_the_same_bits(seed: int) -> None:
    rng, fixed = one_sequence(seed, **({"dim": 2048, "num_tokens": 300} if ON_GPU else {"dim": 5}))
    conv_checks.check_paged_chunkings(rng, moved(fixed, DEVICE))


@seeds(6, 12)
def test_rejected_drafts_leave_no_trace(seed: int) -> None:
    rng, fixed = one_sequence(seed, **({"dim": 2048, "num_tokens": 100} if ON_GPU else {"dim": 5}))
    conv_checks.check_drafts(rng, moved(fixed, DEVICE))


@pytest.fixture
def _last_to_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter run programs from last to first, tiles before heads; a GPU takes them as it likes."""
    if ON_GPU:
        return
    from triton.runtime.interpreter import interpreter_builder

    set_grid_index = interpreter_builder.set_grid_idx

    def set_reversed(x: int, y: int, z: int) -> None:
        set_grid_index(interpreter_builder.grid_dim[0] - 1 - x, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_reversed)


@pytest.mark.usefixtures("_last_to_first")
@pytest.mark.parametrize("seed", range(1, 81, 4))
def test_a_prefix_cache_takes_programs_in_any_order(seed: int) -> None:
    """Several programs write its states."""
    conv_checks.check_float64(PREFILL, CALLS[PREFILL](seed, dtypes=DTYPES), in_place=seed % 8 == 1, device=DEVICE)


@pytest.mark.usefixtures("_last_to_first")
def test_a_prefix_cache_reads_old_states_from_any_block() -> None:
    conv_checks.check_blocks(DEVICE)


@needs_gpu
def test_a_prefix_cache_on_a_full_gpu() -> None:
    """More programs than run at a time, so that tiles of a sequence start long after its head, and before it."""
    conv_checks.check_blocks(DEVICE, dim=2048, length=1000, block_size=16)


@needs_no_gpu
def test_starts_that_do_not_begin_at_0_read_nothing_before_the_maps(source: ModuleType) -> None:
    """Against the rules, and refused where the host sees it: an NPU's kernel leaves those tokens out."""
    if source.__name__.endswith("cuda"):
        pytest.skip("NOT RUN: the interpreter knows no assertions; the next test reads them off the program")
    starts = torch.tensor([-(2**30), 5, 12], dtype=torch.int32)[1:]
    x, states = torch.ones(12, 4), torch.ones(3, 1, 4)
    nothing = dict.fromkeys(
        ("bias", "activation", "gate_in", "gate_out", "has_initial_state", "initial_state_idx", "query_starts",
         "block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "num_computed_tokens",
         "block_size_tokens")
    )  # fmt: skip
    lines = torch.tensor([-(2**30), 2], dtype=torch.int32)[1:]
    call = PrefillCall(x=x, weight=torch.ones(2, 4), conv_states=states, state_indices=lines, pad_slot_id=-1,
                       out=torch.full_like(x, torch.nan), query_start_loc=starts, **nothing)  # fmt: skip
    source.prefill(call)
    assert call.out[:5].isnan().all()
    assert torch.equal(call.out[5:], torch.tensor([1.0, *[2.0] * 6])[:, None].expand(7, 4))


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What `compile_conv.py` found out, in a process where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "ops" / "compile_conv.py"
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@needs_no_gpu
def test_a_gpu_asserts_in_debug_mode_that_starts_begin_at_0(compiled: dict[str, Any]) -> None:
    assert compiled["asserts"] == [False, True]


@needs_no_gpu
def test_compiles_without_a_gpu_for_hopper_and_for_what_came_before(compiled: dict[str, Any]) -> None:
    """Every variant that a layer can need; the overlap of launches is Hopper's, and left out before it."""
    sizes = {capability: len(programs) for capability, programs in compiled["overlaps_launches"].items()}
    assert sizes == {"90": 11, "80": 3, "75": 3}
    assert all(compiled["overlaps_launches"]["90"])
    assert not any(compiled["overlaps_launches"]["80"] + compiled["overlaps_launches"]["75"])


@needs_no_gpu
@pytest.mark.parametrize("form", ["plain", "paged", "columns"])
def test_another_batch_is_another_variant_of_no_kernel(compiled: dict[str, Any], source: ModuleType, form: str) -> None:
    """Batch sizes, lengths, drafts and the alignment of packed maps are no part of a kernel's identity."""
    found = compiled["variants"][source.__name__.rpartition(".")[2]][form]
    assert found["num_calls"] == 48
    assert found["not_warmed_up"] == []
    # CUDA: two tiles of prefill, and updates of one token, of several, and varlen, each with drafts or not.
    assert found["num_variants"] == (8 if source.__name__.endswith("cuda") else 5)


def padded_step(num_sequences: int, lengths: list[int], form: str = "in place") -> Call:
    """Maps of a captured step: sequences beyond `lengths` are empty and own the null line. In the other forms states
    are read from the lines behind all those that are written."""
    padding = [0] * (num_sequences - len(lengths))
    starts = torch.tensor([0, *lengths, *padding], dtype=torch.int32).cumsum(0).int()
    lines = torch.tensor([*range(1, len(lengths) + 1), *padding], dtype=torch.int32)
    maps: Call = {"query_start_loc": starts, "state_indices": lines, "has_initial_state": lines > 0}
    sources = torch.where(lines > 0, lines + num_sequences, 0).int()
    if form == "sources":
        maps["source_state_indices"] = sources
    if form == "blocks":
        zeros, ones = torch.zeros_like(lines), torch.ones_like(lines)
        maps |= {"state_indices": torch.stack([sources, lines], dim=1), "initial_state_idx": zeros}
        maps |= {"block_idx_first_scheduled_token": ones, "block_idx_last_scheduled_token": ones}
        maps["num_computed_tokens"] = zeros
    return maps


@needs_gpu
@both_ops
@pytest.mark.parametrize("form", ["in place", "sources", "blocks"])
@pytest.mark.parametrize("served_by", ["triton_cuda", "any_device"])
def test_a_captured_graph_serves_other_lengths_and_lines(name: str, form: str, served_by: str) -> None:
    """One graph, replayed with maps of another batch and with padding, computes what a fresh call would."""
    with serving(importlib.import_module(f"kernels.causal_conv1d.{served_by}"), DEVICE):
        check_captured(name, form)


def check_captured(name: str, form: str) -> None:
    num_sequences, is_update = 16, name == UPDATE
    torch.manual_seed(0)
    x = torch.randn(96 if is_update else 200, 384, device="cuda", dtype=torch.bfloat16)
    fixed: Call = {"weight": torch.randn(4, 384, device="cuda", dtype=torch.bfloat16), "bias": None,
                   "activation": "silu", "out": torch.empty_like(x)}  # fmt: skip
    if is_update:
        fixed["max_query_len"] = 6
    elif form == "blocks":
        fixed["block_size_tokens"] = 1
    states = torch.randn(2 * num_sequences + 1, 8, 384, device="cuda", dtype=torch.bfloat16)

    def maps_of(lengths: list[int]) -> Call:
        maps = padded_step(num_sequences, lengths, form)
        if is_update:
            for key in ("has_initial_state", "block_idx_first_scheduled_token", "num_computed_tokens"):
                maps.pop(key, None)
            maps["num_accepted_tokens"] = torch.arange(num_sequences, dtype=torch.int32) % 6 + 1
        return maps

    op, truth_op = getattr(ops, name), getattr(reference, name)
    maps = moved(maps_of([6, 6]), "cuda")
    op(x, conv_states=states.clone(), **fixed, **maps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(x, conv_states=states, **fixed, **maps)
    few = ([6], [1] * 16, [3, 0, 6, 2], [])
    for lengths in few if is_update else (*few, [200], [7, 50, 3, 1, 64]):
        other = maps_of(lengths)
        for key, value in other.items():
            maps[key].copy_(value)
        before = states.cpu()
        graph.replay()
        truth = truth_op(x.cpu(), conv_states=before, **{**moved(fixed, "cpu"), "out": None}, **other)
        absolute, relative = OP[x.dtype]
        torch.testing.assert_close(fixed["out"].cpu(), truth, atol=absolute, rtol=relative)
        assert torch.equal(states.cpu(), before)


@needs_gpu
@both_ops
def test_waits_for_nothing(name: str) -> None:
    """No synchronisation with the host, whatever the form of the call."""
    for seed in range(24):
        call = moved(CALLS[name](seed), "cuda")
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            getattr(ops, name)(**call)
        finally:
            torch.cuda.set_sync_debug_mode(before)


@needs_gpu
@pytest.mark.parametrize(("paged", "columns"), [(False, 384), (True, 384), (False, 390)])
def test_after_warming_up_nothing_is_compiled(source: ModuleType, paged: bool, columns: int) -> None:
    weight = torch.randn(4, 384, device="cuda")
    states = torch.zeros(70, 6, 384, device="cuda")
    ops.warm_up(weight, None, states, activation="silu", drafts=True, paged=paged, x_columns=columns)

    before = source.compiled_count()
    packed = torch.zeros(400, device="cuda", dtype=torch.int32)
    fixed: Call = {"weight": weight, "bias": None, "conv_states": states, "activation": "silu"}
    for num_sequences, length, offset in ((2, 16, 0), (1, 3, 1), (33, 8, 2), (64, 17, 3)):
        starts, lines = packed[offset:][: num_sequences + 1], packed[200 + offset :][:num_sequences]
        starts.copy_(torch.arange(num_sequences + 1) * length)
        lines.copy_(torch.arange(num_sequences) + 1)
        x = torch.randn(num_sequences * length, columns, device="cuda")[:, :384]
        table: Call = {"state_indices": lines}
        firsts: Call = {}
        if paged:
            zeros = packed[300 + offset :][:num_sequences]
            table = {"state_indices": lines[:, None], "initial_state_idx": zeros,
                     "block_idx_last_scheduled_token": zeros}  # fmt: skip
            firsts = {"block_idx_first_scheduled_token": zeros, "num_computed_tokens": zeros, "block_size_tokens": 40}
        ops.causal_conv1d_prefill(x, query_start_loc=starts, has_initial_state=lines > 1, **table, **firsts, **fixed)
        ops.causal_conv1d_update(x[:num_sequences], **table, **fixed)
        ops.causal_conv1d_update(x.unflatten(0, (num_sequences, length)), **table, **fixed)
    assert source.compiled_count() == before > 0
