"""Experts of a sparse feed-forward layer: every implementation against the pairs one by one, in float64.

torch's grouped products run on a CPU too, in the same calls as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kernels.expert_lora import reference as expert_lora_reference
from kernels.expert_lora.ops import Pairs, expert_lora
from kernels.experts import grouped, reference
from kernels.experts.ops import ExpertAdapters, experts, pack_experts, pack_quantised, route
from kernels.linear.quantised import E2M1, Quantised, dequantise
from kernels.platform import in_use, installed
from kernels.shapes import ProbeShapes
from tests.support.engine.replay import Recording
from tests.support.npu.triton_interpreter import multiply_bfloat16, round_floats
from tests.support.ops.lora_cases import Case, Step, make_step
from tests.tolerances import OP

# num_experts, num_chosen, hidden_size, size
SIZES = [(7, 3, 32, 24), (4, 1, 16, 40), (5, 5, 24, 8)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=["any_device", "grouped", "triton_cuda"])
def serving(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Triton's kernels in its interpreter on a CPU."""
    if request.param == "triton_cuda":
        pytest.importorskip("triton", reason="Triton is not installed")
        if device == "cpu":
            multiply_bfloat16(monkeypatch)
            round_floats(monkeypatch)
    platform = in_use(torch.device(device)).with_fallback("experts", request.param, "for the test")
    with installed(platform, torch.device(device).type):
        yield request.param


def make_weights(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts, _, hidden_size, size = sizes
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(num_experts, 2 * size, hidden_size, generator=generator) / hidden_size**0.5
    down = torch.randn(num_experts, hidden_size, size, generator=generator) / size**0.5
    return gate_up.to(device, dtype), down.to(device, dtype)


def make_tokens(
    sizes: tuple[int, int, int, int], num: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_experts, num_chosen, hidden_size, _ = sizes
    generator = torch.Generator().manual_seed(num)
    x = torch.randn(num, hidden_size, generator=generator).to(device, dtype)
    logits = torch.randn(num, num_experts, generator=generator).to(device, dtype)
    return x, *route(logits, num_chosen, normalises=True)


@pytest.mark.usefixtures("serving")
@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_token_has_the_weighted_sum_of_its_experts(
    sizes: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    """Few tokens leave most experts without any; the last token is padding."""
    weights = make_weights(sizes, dtype, device)
    x, chosen, shares = make_tokens(sizes, num_tokens + 1, dtype, device)
    x[-1], shares[-1] = torch.nan, torch.nan
    expected = reference.experts(x[:-1], chosen[:-1], shares[:-1], reference.pack_experts(*weights))
    before = [tensor.clone() for tensor in (x, chosen, shares)]
    found = experts(x, chosen, shares, pack_experts(*weights))[:-1]
    absolute, relative = OP[dtype]
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected.double(), atol=absolute, rtol=relative)
    after = zip((x, chosen, shares), before, strict=True)
    assert all(torch.equal(tensor.nan_to_num(7), was.nan_to_num(7)) for tensor, was in after)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("expert", [0, 2, 3])
def test_many_tokens_may_choose_one_expert(expert: int, device: str) -> None:
    weights = make_weights(SIZES[1], torch.bfloat16, device)
    x, chosen, shares = make_tokens(SIZES[1], 40, torch.bfloat16, device)
    chosen[:37] = expert
    expected = reference.experts(x, chosen, shares, reference.pack_experts(*weights))
    found = experts(x, chosen, shares, pack_experts(*weights))
    absolute, relative = OP[torch.bfloat16]
    torch.testing.assert_close(found.double(), expected.double(), atol=absolute, rtol=relative)


@pytest.mark.usefixtures("serving")
@DTYPES
def test_biases_and_the_clamped_gate_of_experts(dtype: torch.dtype, device: str) -> None:
    num_experts, _, hidden_size, size = SIZES[0]
    gate_up, down = make_weights(SIZES[0], dtype, device)
    gate_up *= 5  # so that some are clamped
    generator = torch.Generator().manual_seed(4)
    biases = tuple(torch.randn(num_experts, n, generator=generator).to(device, dtype) for n in (2 * size, hidden_size))
    x, chosen, shares = make_tokens(SIZES[0], 9, dtype, device)
    found = experts(x, chosen, shares, pack_experts(gate_up, down, biases=biases, activation="clamped"))
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token, (of_token, weights) in enumerate(zip(chosen.tolist(), shares.double().cpu(), strict=True)):
        for expert, weight in zip(of_token, weights, strict=True):
            gate, up = (gate_up[expert] @ x[token] + biases[0][expert]).double().cpu().chunk(2)
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            gated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            expected[token] += weight * (down[expert].double().cpu() @ gated + biases[1][expert].double().cpu())
    absolute, relative = OP[dtype]
    scale = float(expected.abs().max())
    torch.testing.assert_close(found.double().cpu(), expected, atol=2 * scale * absolute, rtol=2 * relative)


FORMS = {
    "fp8": (torch.float8_e4m3fn, None),
    "int8": (torch.int8, None),
    "int4": (torch.uint8, None),
    "mxfp4": (torch.uint8, E2M1),
}


def quantised(form: str, out_features: int, in_features: int, device: str) -> Quantised:
    """Random codes in groups of 32 inputs, of about normal size."""
    (codes_dtype, table), generator = FORMS[form], torch.Generator().manual_seed(out_features)
    shape = (out_features, in_features)
    if codes_dtype == torch.float8_e4m3fn:
        codes = torch.randn(shape, generator=generator).to(codes_dtype)
    else:
        columns = in_features // 2 if codes_dtype == torch.uint8 else in_features
        low, high = (0, 256) if codes_dtype == torch.uint8 else (-127, 128)
        codes = torch.randint(low, high, (out_features, columns), generator=generator).to(codes_dtype)
    size = {"fp8": 1.0, "int8": 1 / 64, "int4": 1 / 4, "mxfp4": 1 / 4}[form] * in_features**-0.5
    scales = (torch.rand(out_features, in_features // 32, generator=generator) + 0.5) * size
    if form == "mxfp4":
        scales = (2 ** scales.log2().round()).to(torch.float8_e8m0fnu)
    offsets = -8 * scales if form == "int4" else None
    values = None if table is None else torch.tensor(table)
    return Quantised(codes, scales, offsets, values, 32, None).to(torch.device(device))


@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_experts_in_codes_are_those_of_the_dequantised_weights(
    form: str, dtype: torch.dtype, serving: str, device: str
) -> None:
    """The last token is padding. Where codes have no kernel, they are dequantised when they are packed."""
    num_experts, _, hidden_size, size = sizes = (7, 3, 64, 96)
    gate_up = [quantised(form, 2 * size, hidden_size, device) for _ in range(num_experts)]
    down = [quantised(form, hidden_size, size, device) for _ in range(num_experts)]
    generator = torch.Generator().manual_seed(4)
    first, second = (torch.randn(num_experts, n, generator=generator) for n in (2 * size, hidden_size))
    biases = (first.to(device, dtype), second.to(device, dtype))
    weights = [torch.stack([dequantise(weight, dtype) for weight in both]) for both in (gate_up, down)]
    for num_tokens in (1, 2, 40):
        x, chosen, shares = make_tokens(sizes, num_tokens + 1, dtype, device)
        x[-1], shares[-1] = torch.nan, torch.nan
        truth = replace(reference.pack_experts(*weights), biases=biases)
        expected = reference.experts(x[:-1], chosen[:-1], shares[:-1], truth)
        packed = pack_quantised(gate_up, down, dtype, biases=biases)
        assert packed.holds_codes == (serving == "any_device" or (serving == "triton_cuda" and dtype == torch.bfloat16))
        found = experts(x, chosen, shares, packed)[:-1]
        absolute, relative = OP[dtype]
        assert found.dtype == dtype and found.is_contiguous()
        scale = float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected.double(), atol=scale * absolute, rtol=relative)


def test_experts_of_many_tokens_and_of_none_share_a_launch_of_codes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 16 pairs: of three tiles, of none, of one pair, and of a tile and one."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if device == "cpu":
        multiply_bfloat16(monkeypatch)
        round_floats(monkeypatch)
    from kernels.experts import triton_cuda

    weights = [quantised("mxfp4", 96 + 8 * index, 64, device).rows(slice(96)) for index in range(5)]
    codes = triton_cuda._packed(weights, torch.bfloat16)
    assert codes is not None
    counts = (35, 0, 1, 17, 0)
    rows = torch.randn(sum(counts), 64, generator=torch.Generator().manual_seed(2)).to(device, torch.bfloat16)
    ends = torch.tensor(counts).cumsum(0).to(device, torch.int32)
    found = triton_cuda.multiply(rows, codes, ends, triton_cuda._CONFIGS[8])
    each = [dequantise(weight, torch.float64) for weight in weights]
    parts = [part.double() @ weight.t() for part, weight in zip(rows.split(counts), each, strict=True)]
    torch.testing.assert_close(found.double(), torch.cat(parts), atol=OP[torch.bfloat16][0], rtol=OP[torch.bfloat16][1])


def test_corrections_move_the_choice_alone() -> None:
    logits, correction = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([9.0, 0.0, 0.5])
    chosen, weights = route(logits, 2, normalises=False, correction=correction, scale=2.0)
    assert chosen.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, 2 * torch.sigmoid(logits[:, [0, 2]]))
    _, normalised = route(logits, 2, normalises=True, correction=correction, scale=2.0)
    torch.testing.assert_close(normalised.sum(), torch.tensor(2.0))


def test_routing_is_that_of_the_largest_probabilities() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.5]])
    probabilities = torch.softmax(logits.double(), 1)
    chosen, weights = route(logits, 2, normalises=False)
    assert chosen.tolist() == [[1, 2], [2, 0]]
    torch.testing.assert_close(weights.double(), probabilities.gather(1, chosen), atol=1e-6, rtol=0)
    _, normalised = route(logits.bfloat16(), 2, normalises=True)
    assert normalised.dtype == torch.bfloat16
    torch.testing.assert_close(normalised.float().sum(1), torch.ones(2), atol=1e-2, rtol=0)


@DTYPES
def test_a_replay_serves_tokens_that_choose_other_experts(dtype: torch.dtype, device: str) -> None:
    """What the grouped products are told of the experts' tokens is computed in the recording, or the graph."""
    if device != "cpu" and (dtype == torch.float32 or torch.cuda.get_device_capability() < (9, 0)):
        pytest.skip("NOT RUN: there torch has no grouped product of its own")
    platform = in_use(torch.device(device)).with_fallback("experts", "grouped", "for the test")
    with installed(platform, torch.device(device).type), torch.inference_mode():
        packed = pack_experts(*make_weights(SIZES[0], dtype, device))
        x, chosen, shares = make_tokens(SIZES[0], 9, dtype, device)
        result, replay = captured(lambda: experts(x, chosen, shares, packed), device)
        others = make_tokens(SIZES[0], 90, dtype, device)
        for tensor, other in zip((x, chosen, shares), others, strict=True):
            tensor.copy_(other[40:49])
        replay()
        assert torch.equal(result, experts(x, chosen, shares, packed))


def captured(work: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, Callable[[], None]]:
    """What a replay fills, and the replay: of a recording on a CPU, of a graph on a GPU."""
    if device == "cpu":
        recording = Recording(work)
        return recording.result, recording.replay
    work()  # loads what a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return result, graph.replay


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (ProbeShapes(dtype="float32", experts=(8, 2, 64)), "bfloat16 only"),
        (ProbeShapes(dtype="bfloat16", experts=(8, 2, 20)), "not aligned"),
    ],
    ids=["dtype", "alignment"],
)
def test_grouped_products_refuse_what_torch_has_no_kernel_for(shapes: ProbeShapes, words: str) -> None:
    refusal = grouped.CONTRACT.refuses(shapes)
    assert refusal is not None and words in refusal


def test_grouped_products_are_no_matter_to_a_model_without_experts() -> None:
    assert grouped.CONTRACT.refuses(ProbeShapes(dtype="float32", experts=None)) is None


def test_wrong_arguments_are_named(device: str) -> None:
    gate_up, down = make_weights(SIZES[0], torch.float32, device)
    x, chosen, shares = make_tokens(SIZES[0], 4, torch.float32, device)
    with pytest.raises(AssertionError, match="do not fit"):
        pack_experts(gate_up, down[:, :, 1:])
    packed = pack_experts(gate_up, down)
    with pytest.raises(AssertionError, match="hidden_size"):
        experts(x[:, 1:], chosen, shares, packed)
    with pytest.raises(AssertionError, match="float32"):
        experts(x.bfloat16(), chosen, shares, packed)
    with pytest.raises(AssertionError, match="num_chosen"):
        experts(x, chosen[:2], shares, packed)


def make_adapted(case: Case, num_experts: int, device: str, num_chosen: int = 3) -> tuple[Step, Pairs, torch.Tensor]:
    """A step of adapters of experts, its pairs, and x of them; ranks of the case are rows of all experts."""
    step = make_step(case, device=device, pad_to=9)
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(step.maps.num_tokens, num_experts, generator=generator)
    in_order, order = logits.topk(num_chosen, dim=1).indices.flatten().sort(stable=True)
    tokens = order // num_chosen
    pairs = Pairs(in_order.to(device), tokens.to(device), num_experts)
    return step, pairs, step.x[pairs.tokens].contiguous()


@pytest.fixture(params=["any_device", "triton_cuda", "triton_ascend"])
def adapting(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Triton's kernels in its interpreter on a CPU."""
    if request.param != "any_device":
        pytest.importorskip("triton", reason="Triton is not installed")
        if request.param == "triton_ascend" and device != "cpu":
            pytest.skip("NOT RUN: kernels for NPUs run in Triton's interpreter, on a CPU")
        if device == "cpu":
            multiply_bfloat16(monkeypatch)
    platform = in_use(torch.device(device)).with_fallback("expert_lora", request.param, "for the test")
    with installed(platform, torch.device(device).type):
        yield request.param


RANKS = {"mixed": ((7, 0, 14, 63), (21, 7, 0, 119)), "one-slice": ((7, 28, 0, 14),)}


@pytest.mark.usefixtures("adapting")
@DTYPES
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1), (3, 0, 9, 2), (30, 0, 17, 1)], ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_each_pair_has_the_delta_of_its_adapter_and_expert(
    ranks: str, lengths: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Ranks 0 to 17 of 7 experts, in rows that begin anywhere; rows of nobody, and inputs of base tokens, are NaN."""
    widths = (40,) * len(RANKS[ranks])
    step, pairs, x = make_adapted(Case(52, widths, RANKS[ranks], lengths, 2, dtype), 7, device)
    is_base = pairs.tokens >= sum(lengths)
    x[is_base] = torch.nan
    out = torch.randn(len(x), sum(widths), generator=torch.Generator().manual_seed(5)).to(device, dtype)
    expected, before = out.double(), out.clone()
    expert_lora_reference.expert_lora(x, expected, step.stack, step.maps, pairs)
    expert_lora(x, out, step.stack, step.maps, pairs)
    absolute, relative = OP[dtype]
    torch.testing.assert_close(out.double(), expected, atol=absolute, rtol=relative)
    assert torch.equal(out[is_base], before[is_base])
    assert bool((out != before).any())


@pytest.mark.usefixtures("serving")
def test_both_products_have_their_deltas(device: str) -> None:
    """Through all of an expert: the deltas of gate and up, and that of down, which is of what lies between."""
    if device != "cpu":
        pytest.skip("NOT RUN: float32 has no grouped product there")
    hidden_size, size = SIZES[0][2:]
    lengths = (1, 4, 0, 3)
    step = make_step(Case(hidden_size, (size, size), ((7, 14, 0, 21),) * 2, lengths, 2))
    # Of one seed, hence the same places and first rows.
    down = make_step(Case(size, (hidden_size,), ((7, 14, 0, 21),), lengths, 2))
    assert down.maps.segments == step.maps.segments
    weights = make_weights(SIZES[0], torch.float32, device)
    x, chosen, shares = make_tokens(SIZES[0], step.maps.num_tokens, torch.float32, device)
    adapters = ExpertAdapters(step.stack, down.stack, step.maps)
    expected = reference.experts(x, chosen, shares, reference.pack_experts(*weights), adapters)
    plain = experts(x, chosen, shares, pack_experts(*weights))
    found = experts(x, chosen, shares, pack_experts(*weights), adapters)
    torch.testing.assert_close(found, expected, atol=OP[torch.float32][0], rtol=OP[torch.float32][1])
    assert torch.equal(found[-2:], plain[-2:]) and not torch.equal(found[:-2], plain[:-2])
