"""The causal convolution ops on the CPU against the float64 truth, and against themselves in other chunkings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.causal_conv1d import cpu, ops, reference
from tests.support.ops import conv_checks
from tests.support.ops.conv_cases import Call, prefill_call, update_call
from tests.support.ops.conv_checks import PREFILL, SCALES, UPDATE, one_sequence, serving
from tests.support.tiers import examples

SEEDS = st.integers(0, 2**31)
both_ops = pytest.mark.parametrize("name", [PREFILL, UPDATE])
both_modules = pytest.mark.parametrize("module", [cpu, reference], ids=["cpu", "reference"])


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with serving(cpu):
        yield


@settings(max_examples=examples(150), deadline=None)
@given(seed=SEEDS, in_place=st.booleans())
def test_prefill_gives_the_float64_truth(seed: int, in_place: bool) -> None:
    conv_checks.check_float64(PREFILL, prefill_call(seed), in_place=in_place)


@settings(max_examples=examples(150), deadline=None)
@given(seed=SEEDS, in_place=st.booleans())
def test_update_gives_the_float64_truth(seed: int, in_place: bool) -> None:
    conv_checks.check_float64(UPDATE, update_call(seed), in_place=in_place)


@settings(max_examples=examples(80), deadline=None)
@given(seed=SEEDS)
def test_any_chunking_token_by_token_and_the_reference_give_the_same_bits(seed: int) -> None:
    conv_checks.check_chunkings(*one_sequence(seed))


@settings(max_examples=examples(60), deadline=None)
@given(seed=SEEDS)
def test_any_chunking_fills_a_prefix_cache_with_the_same_bits(seed: int) -> None:
    conv_checks.check_paged_chunkings(*one_sequence(seed))


@settings(max_examples=examples(60), deadline=None)
@given(seed=SEEDS)
def test_rejected_drafts_leave_no_trace(seed: int) -> None:
    conv_checks.check_drafts(*one_sequence(seed))


@both_modules
@both_ops
@pytest.mark.parametrize("scale", SCALES)
def test_the_range_of_bfloat16_is_kept(name: str, scale: float, module: Any) -> None:
    with serving(module):
        for seed in range(24):
            conv_checks.check_range(name, seed, scale)


@both_modules
@both_ops
def test_the_order_of_sequences_does_not_matter(name: str, module: Any) -> None:
    with serving(module):
        for seed in range(24):
            conv_checks.check_order(name, seed)


@both_modules
@both_ops
def test_states_are_read_from_other_lines(name: str, module: Any) -> None:
    with serving(module):
        for seed in range(48):
            conv_checks.check_sources(name, seed)


@both_ops
def test_many_sequences_and_many_channels(name: str) -> None:
    for seed in range(8):
        conv_checks.check_float64(name, conv_checks.CALLS[name](seed, num_sequences=300, dim=3), in_place=False)
        conv_checks.check_float64(name, conv_checks.CALLS[name](seed, dim=1030), in_place=False)


@both_modules
def test_state_indices_may_be_empty(module: Any) -> None:
    with serving(module):
        conv_checks.check_empty()


@both_modules
@both_ops
def test_garbage_in_padding_rows_stays_there(name: str, module: Any) -> None:
    with serving(module):
        conv_checks.check_garbage_in_padding(name)


def test_a_few_updates_have_every_form_and_varlen_ones_an_empty_live_sequence() -> None:
    forms = set()
    for seed in range(24):
        call = update_call(seed)
        starts, lines, source = (call.get(key) for key in ("query_start_loc", "state_indices", "initial_state_idx"))
        is_varlen, is_paged = starts is not None, source is not None
        form = "varlen" if is_varlen else "one" if call["x"].dim() == 2 else "several"
        forms.add((form, call.get("num_accepted_tokens") is not None, is_paged))
        if is_varlen and lines is not None:
            for columns in (source, call.get("block_idx_last_scheduled_token")):
                line = lines if columns is None else lines.gather(1, columns.long()[:, None])[:, 0]
                is_live = (line > 0) & (line != (-1 if call.get("pad_slot_id") is None else call["pad_slot_id"]))
                assert (is_live & (starts.diff() == 0)).any()
    assert len(forms) == 12


@both_modules
def test_a_prefix_cache_reads_old_states_from_any_block(module: Any) -> None:
    with serving(module):
        conv_checks.check_blocks()


def test_prefix_cache_keeps_the_state_of_every_boundary() -> None:
    """10 tokens, 3 of them computed before, in blocks of 4: boundaries after tokens 4 and 8, the end in block 2."""
    x, weight = torch.arange(1.0, 8.0)[:, None], torch.ones(3, 1)
    states = torch.zeros(9, 2, 1)
    states[5, :, 0] = torch.tensor([-2.0, -1.0])
    ops.causal_conv1d_prefill(
        x,
        weight,
        None,
        states,
        torch.tensor([0, 7], dtype=torch.int32),
        torch.tensor([[5, 6, 8, 0]], dtype=torch.int32),
        torch.tensor([True]),
        initial_state_idx=torch.tensor([0], dtype=torch.int32),
        block_idx_first_scheduled_token=torch.tensor([0], dtype=torch.int32),
        block_idx_last_scheduled_token=torch.tensor([2], dtype=torch.int32),
        num_computed_tokens=torch.tensor([3], dtype=torch.int32),
        block_size_tokens=4,
    )
    expected = torch.zeros(9, 2, 1)
    expected[5, :, 0] = torch.tensor([-1.0, 1.0])
    expected[6, :, 0] = torch.tensor([4.0, 5.0])
    expected[8, :, 0] = torch.tensor([6.0, 7.0])
    assert torch.equal(states, expected)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def wrong(**changes: Any) -> Call:
    call: Call = {
        "x": torch.zeros(4, 6),
        "weight": torch.zeros(3, 6),
        "bias": None,
        "conv_states": torch.zeros(5, 2, 6),
        "state_indices": torch.tensor([1, 2, 3, 4], dtype=torch.int32),
    }
    return {**call, **changes}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (wrong(weight=torch.zeros(6, 3)), "weight"),
        (wrong(weight=torch.zeros(9, 6)), "width 2 to 8"),
        (wrong(weight=torch.zeros(6, 3).t()), "contiguous"),
        (wrong(bias=torch.zeros(3)), "bias"),
        (wrong(conv_states=torch.zeros(5, 1, 6)), "conv_states"),
        (wrong(conv_states=torch.zeros(5, 6, 2).transpose(1, 2)), "channels of conv_states"),
        (wrong(x=torch.zeros(6, 4).t()), "channels of x"),
        (wrong(x=torch.zeros(4, 6, dtype=torch.int32)), "int32"),
        (wrong(gate_in=torch.zeros(4, 5)), "gate_in"),
        (wrong(activation="relu"), "relu"),
        (wrong(state_indices=torch.tensor([1, 2])), "4 sequences"),
        (wrong(state_indices=None, x=torch.zeros(6, 6)), "line of its own"),
        (wrong(num_accepted_tokens=torch.tensor([1, 2])), "num_accepted_tokens"),
        (wrong(x=torch.zeros(4, 3, 6), num_accepted_tokens=torch.ones(4, dtype=torch.int32)), "draft"),
        (wrong(num_accepted_tokens=torch.ones(8, dtype=torch.int32)[::2]), "contiguous"),
        (wrong(num_accepted_tokens=torch.ones(4)), "int32"),
        (wrong(initial_state_idx=torch.zeros(4, dtype=torch.int32)), "both or neither"),
        (wrong(source_state_indices=int32(1, 2)), "source_state_indices"),
        (wrong(source_state_indices=torch.tensor([1, 2, 3, 4])), "int32"),
        (wrong(state_indices=None, source_state_indices=int32(1, 2, 3, 4)), "belongs to state_indices"),
        (wrong(state_indices=torch.ones(8, dtype=torch.int32)[::2], source_state_indices=int32(1, 2, 3, 4)), "beside"),
        (wrong(query_start_loc=torch.tensor([0, 1, 2, 3, 4])), "max_query_len"),
        (wrong(max_query_len=1), "query_start_loc"),
        (wrong(query_starts=[0, 1, 2, 3, 4]), "query_start_loc"),
        (wrong(query_start_loc=int32(0, 1, 2, 3, 5), max_query_len=2), "within 4 tokens"),
        (wrong(query_start_loc=int32(0, 3, 2, 3, 4), max_query_len=3), "ascend"),
        (wrong(query_start_loc=int32(0, 0, 0, 1, 4), max_query_len=2), "a sequence has 3 tokens"),
        (wrong(query_start_loc=int32(0, 0, 0, 0, 0), query_starts=[0, 3, 3, 3, 4], max_query_len=2), "has 3 tokens"),
        (wrong(query_start_loc=torch.tensor([0, 1, 2, 3, 4]), max_query_len=1), "int32"),
        (wrong(state_indices=torch.tensor([1, 2, 3, 4])), "int32"),
        (wrong(weight=torch.zeros(3, 6, dtype=torch.float64)), "weight is torch.float64"),
        (wrong(bias=torch.zeros(6, dtype=torch.int32)), "bias is torch.int32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.causal_conv1d_update(**call)


def test_half_a_prefix_cache_is_refused() -> None:
    starts = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="needs all of"):
        ops.causal_conv1d_prefill(**wrong(), query_start_loc=starts, num_computed_tokens=starts[1:])


def test_initial_states_without_states_are_refused() -> None:
    call = wrong(conv_states=None, state_indices=None, has_initial_state=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="has_initial_state without conv_states"):
        ops.causal_conv1d_prefill(**call, query_start_loc=int32(0, 1, 2, 3, 4))


def overlapping() -> Iterator[tuple[str, Call]]:
    """Calls whose out is read elsewhere, with the name of what it overlaps."""
    packed = torch.zeros(4, 24)
    x, gate = packed[:, :6], packed[:, 6:12]
    yield "gate_in", wrong(gate_in=gate, out=gate)
    yield "gate_out", wrong(gate_out=gate, out=gate)
    yield "gate_out", wrong(x=x, gate_out=x, out=x)
    yield "gate_in", wrong(x=x, gate_in=gate, out=packed[:, 11:17])
    yield "x", wrong(x=x, out=packed[:, 5:11])
    yield "x", wrong(x=packed.view(-1)[:24].view(4, 6), out=packed.view(-1)[18:42].view(4, 6))
    yield "x", wrong(x=packed.view(-1)[18:42].view(4, 6), out=packed.view(-1)[:24].view(4, 6))
    yield "x", wrong(x=packed.view(-1)[:24].view(4, 6), out=x)  # begins where x does, with another row stride


@both_ops
@pytest.mark.parametrize(("words", "call"), list(overlapping()))
def test_an_output_over_inputs_is_refused(name: str, words: str, call: Call) -> None:
    form = {"query_start_loc": int32(0, 1, 2, 3, 4)} if name == PREFILL else {}
    with pytest.raises(ValueError, match=f"out shares memory with {words};"):
        getattr(ops, name)(**call, **form)


@both_ops
def test_an_output_beside_inputs_is_taken(name: str) -> None:
    """x itself beside the gates that are packed with it, further columns of that tensor, and the memory behind it."""
    form = {"query_start_loc": int32(0, 1, 2, 3, 4)} if name == PREFILL else {}
    packed, line = torch.zeros(4, 24), torch.zeros(48)
    gate_in, x, gate_out, other = packed.split(6, dim=1)
    for out in (x, other):
        getattr(ops, name)(**wrong(x=x, gate_in=gate_in, gate_out=gate_out, out=out), **form)
    before, after = line.view(2, 4, 6)
    for source, out in ((before, after), (after, before)):
        getattr(ops, name)(**wrong(x=source, out=out), **form)


@pytest.mark.parametrize(
    ("starts", "sentence"),
    [
        ([1, 2, 3, 4, 4], "begins at 1; it must start at 0"),
        ([0, 1, 2, 3, 5], "goes to 5; it must stay within 4 tokens"),
    ],
)
@pytest.mark.parametrize("on_host", [False, True])
def test_starts_that_leave_the_tokens_are_refused(starts: list[int], sentence: str, on_host: bool) -> None:
    """Where their values are on the host; a device is not waited for."""
    call = wrong(query_start_loc=torch.tensor(starts, dtype=torch.int32))
    if on_host:
        call |= {"query_starts": starts, "query_start_loc": torch.zeros(5, dtype=torch.int32)}
    with pytest.raises(ValueError, match=sentence):
        ops.causal_conv1d_prefill(**call)


def test_warming_up_a_cpu_does_nothing() -> None:
    states = torch.full((2, 2, 4), torch.nan)
    ops.warm_up(torch.ones(3, 4), None, states, gated=True, drafts=True, paged=True)
    assert states.isnan().all()
