"""Experts of a sparse feed-forward layer: every implementation against the pairs one by one, in float64.

torch's grouped products run on a CPU too, in the same calls as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kernels.experts import grouped, reference
from kernels.experts.ops import experts, pack_experts, route
from kernels.platform import in_use, installed
from kernels.shapes import ProbeShapes
from tests.support.engine.replay import Recording
from tests.tolerances import OP

# num_experts, num_chosen, hidden_size, size
SIZES = [(7, 3, 32, 24), (4, 1, 16, 40), (5, 5, 24, 8)]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=["any_device", "grouped"])
def serving(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
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
