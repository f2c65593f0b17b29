"""The causal convolution for NVIDIA GPUs: in Triton's interpreter on a CPU, on a GPU with `--device cuda`."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from kernels.causal_conv1d import reference
from tests.support.conv_cases import Call, float64_truth, prefill_call, update_call
from tests.tolerances import OP

pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"
if ON_GPU and not torch.cuda.is_available():
    pytest.skip("NOT RUN: no NVIDIA GPU", allow_module_level=True)

from kernels.causal_conv1d import triton_cuda  # noqa: E402 - needs Triton

DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter cuts float32 to bfloat16 instead of rounding.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if ON_GPU else (torch.float32, torch.float16)
SEEDS = range(80) if ON_GPU else range(30)
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="NOT RUN: no NVIDIA GPU")


def on_device(call: Call) -> Call:
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def check_call(name: str, call: Call, *, in_place: bool) -> None:
    expected, expected_states = float64_truth(getattr(reference, name), call, in_place=in_place)
    call = on_device({**call, "x": call["x"].clone()})
    out = call["x"] if in_place else torch.full_like(call["x"], torch.nan)
    result = getattr(triton_cuda, name)(**call, out=out)
    absolute, relative = OP[result.dtype]
    bound = absolute * call["weight"].shape[0]
    torch.testing.assert_close(result.double().cpu(), expected, atol=bound, rtol=relative)
    if expected_states is not None:
        assert torch.equal(call["conv_states"].cpu(), expected_states)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefill_gives_the_float64_truth(seed: int) -> None:
    check_call("causal_conv1d_prefill", prefill_call(seed, dtypes=DTYPES), in_place=seed % 3 == 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_update_gives_the_float64_truth(seed: int) -> None:
    check_call("causal_conv1d_update", update_call(seed, dtypes=DTYPES), in_place=seed % 3 == 0)


@pytest.mark.parametrize("name", ["causal_conv1d_update", "causal_conv1d_prefill"])
def test_garbage_in_padding_rows_stays_there(name: str) -> None:
    """Rows of the null line and of no line may hold anything in a captured graph: their outputs are zero."""
    x, gate_in, gate_out = torch.randn(3, 4, 8).unbind(0)
    for tensor in (x, gate_in, gate_out):
        tensor[0], tensor[2] = torch.nan, torch.inf
    states = torch.randn(4, 2, 8)
    lines = torch.tensor([0, 2, -1, 3], dtype=torch.int32)
    call: Call = {"x": x, "weight": torch.randn(3, 8), "bias": None, "conv_states": states.clone(), "gate_in": gate_in,
                  "gate_out": gate_out, "state_indices": lines}  # fmt: skip
    if name == "causal_conv1d_prefill":
        starts, initial = torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
        call |= {"query_start_loc": starts, "has_initial_state": initial}
    result = getattr(triton_cuda, name)(**on_device(call), out=torch.full_like(x, torch.nan).to(DEVICE))
    assert torch.equal(result[[0, 2]].cpu(), torch.zeros(2, 8))
    assert result.isfinite().all()


@pytest.mark.parametrize("width", [2, 4, 7] if ON_GPU else [3])
def test_any_chunking_and_token_by_token_give_the_same_bits(width: int) -> None:
    rng = random.Random(width)
    dim, num_tokens = (2048, 300) if ON_GPU else (24, 19)
    fixed = {
        "weight": torch.randn(width, dim, device=DEVICE),
        "bias": torch.randn(dim, device=DEVICE),
        "activation": "silu",
    }
    x = torch.randn(num_tokens, dim, device=DEVICE)
    lines = torch.tensor([1], dtype=torch.int32, device=DEVICE)

    def prefill(states: torch.Tensor, start: int, end: int) -> torch.Tensor:
        starts = torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE)
        continues = torch.tensor([start > 0], device=DEVICE)
        return triton_cuda.causal_conv1d_prefill(
            x[start:end],
            conv_states=states,
            query_start_loc=starts,
            state_indices=lines,
            has_initial_state=continues,
            **fixed,
        )

    states = [torch.zeros(2, width - 1, dim, device=DEVICE) for _ in range(3)]
    whole = prefill(states[0], 0, num_tokens)
    cuts = sorted(rng.randint(1, num_tokens - 1) for _ in range(5))
    bounds = zip([0, *cuts], [*cuts, num_tokens], strict=True)
    chunks = torch.cat([prefill(states[1], start, end) for start, end in bounds if end > start])
    rows = x.split(1)
    tokens = torch.cat(
        [triton_cuda.causal_conv1d_update(row, conv_states=states[2], state_indices=lines, **fixed) for row in rows]
    )
    assert torch.equal(chunks, whole)
    assert torch.equal(tokens, whole)
    assert torch.equal(states[1], states[0])
    assert torch.equal(states[2], states[0])


def padded_step(num_sequences: int, lengths: list[int]) -> Call:
    """Maps of a captured step: sequences beyond `lengths` are empty and own the null line."""
    padding = [0] * (num_sequences - len(lengths))
    starts = torch.tensor([0, *lengths, *padding], dtype=torch.int32).cumsum(0).int()
    lines = torch.tensor([*range(1, len(lengths) + 1), *padding], dtype=torch.int32)
    return {"query_start_loc": starts, "state_indices": lines, "has_initial_state": lines > 0}


@needs_gpu
def test_a_captured_graph_serves_other_lengths_and_lines() -> None:
    """One graph, replayed with maps of another batch and with padding, computes what a fresh call would."""
    dim, num_tokens, num_sequences = 384, 200, 16
    torch.manual_seed(0)
    x = torch.randn(num_tokens, dim, device="cuda", dtype=torch.bfloat16)
    fixed = {
        "weight": torch.randn(4, dim, device="cuda", dtype=torch.bfloat16),
        "bias": None,
        "activation": "silu",
        "out": torch.empty_like(x),
    }
    states = torch.randn(num_sequences + 1, 3, dim, device="cuda", dtype=torch.bfloat16)
    maps = on_device(padded_step(num_sequences, [100, 100]))
    triton_cuda.causal_conv1d_prefill(x, conv_states=states.clone(), **fixed, **maps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_cuda.causal_conv1d_prefill(x, conv_states=states, **fixed, **maps)
    for lengths in ([200], [1] * 16, [7, 50, 3, 1, 64], []):
        other = padded_step(num_sequences, lengths)
        for name, value in other.items():
            maps[name].copy_(value)
        before = states.cpu()
        graph.replay()
        host = {name: None if value is None or isinstance(value, str) else value.cpu() for name, value in fixed.items()}
        host |= {"activation": "silu", "out": None}
        truth = reference.causal_conv1d_prefill(x.cpu(), conv_states=before, **host, **other)
        torch.testing.assert_close(fixed["out"].cpu().float(), truth.float(), atol=3e-2, rtol=3e-2)
        assert torch.equal(states.cpu(), before)


@needs_gpu
def test_another_batch_compiles_nothing() -> None:
    """Batch sizes, lengths and the alignment of packed maps are no part of a kernel's identity."""
    dim = 384
    fixed: dict[str, Any] = {
        "weight": torch.randn(4, dim, device="cuda"),
        "bias": None,
        "conv_states": torch.zeros(70, 3, dim, device="cuda"),
    }
    packed = torch.zeros(400, device="cuda", dtype=torch.int32)
    counts = []
    for num_sequences, length, offset in ((2, 16, 0), (1, 9, 1), (33, 8, 2), (64, 17, 3)):
        starts, lines = packed[offset:][: num_sequences + 1], packed[200 + offset :][:num_sequences]
        starts.copy_(torch.arange(num_sequences + 1) * length)
        lines.copy_(torch.arange(num_sequences) + 1)
        x = torch.randn(num_sequences * length, dim, device="cuda")
        triton_cuda.causal_conv1d_prefill(x, query_start_loc=starts, state_indices=lines, **fixed)
        triton_cuda.causal_conv1d_update(x[:num_sequences], state_indices=lines, **fixed)
        torch.cuda.synchronize()
        kernels = (triton_cuda._prefill_kernel, triton_cuda._update_kernel)
        counts.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert counts == [counts[0]] * len(counts)
