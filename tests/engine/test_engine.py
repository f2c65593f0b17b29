"""The engine over a mock model: endings, errors, aborts, evictions, log probabilities, and random operations."""

from __future__ import annotations

import gc
import logging
import math
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters.errors import NotFound, RowsExceeded, Unsupported
from kernels.lora import MAX_KERNEL_RANK
from kernels.platform import detect
from kernels.sampling.maps import row_of
from kernels.sampling.ops import new_state, sample
from kernels.sampling.sampling_request import RowSampling, ask
from service.engine.engine import Engine
from service.engine.ipc.messages import (
    MAX_ENDINGS,
    MAX_LOGIT_BIASES,
    Abort,
    Evict,
    Finished,
    Load,
    Pin,
    Sampling,
    Submit,
    Tokens,
)
from service.engine.requests import error_in
from service.engine.startup.build import max_rank_of
from service.engine.transient_thread import TransientThread
from tests.support.engine.engine_mock import (
    EOS,
    GROUP,
    VOCAB,
    LruHost,
    MockEngine,
    MockWeights,
    SlowMarks,
    adapter_number,
    expected_tokens,
    make_mock_engine,
    next_logits,
)
from tests.support.tiers import examples


@pytest.fixture
def mock() -> Iterator[MockEngine]:
    made = make_mock_engine()
    yield made
    made.engine.close()


def holds_nothing(mock: MockEngine) -> bool:
    scheduler = mock.engine.scheduler
    no_pins = not any(mock.rows.pins.values())
    return scheduler.blocks.num_used == scheduler.slots.num_used == mock.engine.num_requests == 0 and no_pins


# ---- endings


def test_a_request_ends_at_max_tokens(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=5)
    mock.settle()
    assert mock.finished["r"].reason == "length"
    assert mock.output["r"] == expected_tokens((1, 2, 3), None, 5)
    assert holds_nothing(mock)


def test_a_stop_token_ends_it_and_is_part_of_the_output(mock: MockEngine) -> None:
    expected = expected_tokens((1, 2, 3), None, 4)
    mock.submit("r", max_tokens=10, stop_token_ids=(expected[2], 77))
    mock.settle()
    assert mock.output["r"] == expected[:3]
    assert (mock.finished["r"].reason, mock.finished["r"].stop_token_id) == ("stop", expected[2])


def test_end_of_sequence_ends_it_unless_ignored(mock: MockEngine) -> None:
    mock.submit("stops", max_tokens=3, logit_bias={EOS: 100.0})
    mock.submit("goes-on", max_tokens=3, logit_bias={EOS: 100.0}, ignore_eos=True)
    mock.settle()
    assert (mock.output["stops"], mock.finished["stops"].stop_token_id) == ([EOS], EOS)
    assert (mock.output["goes-on"], mock.finished["goes-on"].reason) == ([EOS] * 3, "length")


def test_ending_tokens_are_barred_before_min_tokens(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=9, min_tokens=3, logit_bias={EOS: 100.0, 5: 90.0}, stop_token_ids=(5,))
    mock.settle()
    assert len(mock.output["r"]) == 4
    assert {EOS, 5}.isdisjoint(mock.output["r"][:3])
    assert mock.output["r"][3] == EOS


def constrained_tokens(
    prompt: tuple[int, ...], num_tokens: int, words: list[tuple[int, ...]], allowed: set[int]
) -> list[int]:
    """`expected_tokens` where a token must be allowed and complete no word within the output."""
    output: list[int] = []
    for _ in range(num_tokens):
        logits = next_logits([*prompt, *output], -1)
        for token in range(VOCAB):
            ends = [(*output, token)[-len(word) :] for word in words]
            if token not in allowed or any(end == word for end, word in zip(ends, words, strict=True)):
                logits[token] = -torch.inf
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_bad_words_and_allowed_tokens_hold_at_every_place(overlap: bool, num_blocks: int) -> None:
    """Also where a step is launched before the last one is collected, and after preemptions."""
    prompt, allowed = (1, 2, 3), {*range(0, VOCAB, 2), *expected_tokens((1, 2, 3), None, 12)}
    free = constrained_tokens(prompt, 12, [], allowed)
    pairs = [*pairwise(free)]
    # The second is of the prompt's last token and the first of the answer: not within the output.
    words = [
        (free[1],),
        (3, free[0]),
        pairs[4],
        (*pairs[4], free[6]),
        tuple(free[:3]),
        (free[0],) * 20,
    ]
    mock = make_mock_engine(overlap=overlap, num_blocks=num_blocks)
    mask = sum(1 << token for token in allowed).to_bytes(13, "little").rstrip(b"\0")
    mock.submit("plain", max_tokens=20)
    for name, asked in (("words", words), ("pairs", pairs)):
        mock.submit(name, prompt, max_tokens=12, bad_words=tuple(asked), allowed_tokens=mask, ignore_eos=True)
    mock.settle()
    mock.engine.close()
    assert (mock.engine.scheduler.num_preemptions > 0) == (num_blocks < 64)
    assert mock.output["plain"] == expected_tokens(prompt, None, 20)
    assert mock.output["words"] == constrained_tokens(prompt, 12, words, allowed) != free
    assert mock.output["pairs"] == constrained_tokens(prompt, 12, pairs, allowed)
    assert mock.output["words"][0] == free[0]


# ---- errors

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty prompt": ({"prompt": ()}, "empty"),
    "token outside": ({"prompt": (1, VOCAB)}, "vocabulary"),
    "negative token": ({"prompt": (-1,)}, "vocabulary"),
    "context": ({"prompt": (1,) * 10, "max_tokens": 600}, "context"),
    "max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "temperature": ({"temperature": float("nan")}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "bias": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    "stop ids": ({"stop_token_ids": (-3,)}, "stop_token_ids"),
    "bad words": ({"bad_words": ((3, VOCAB),)}, "bad_words"),
    "an empty bad word": ({"bad_words": ((),)}, "bad_words"),
    "allowed": ({"allowed_tokens": b"\1" * 14}, "allowed_tokens"),
    "nothing left": ({"allowed_tokens": b"\6", "bad_words": ((1,), (5, 2))}, "no token"),
    "nothing left but an end": ({"allowed_tokens": b"\2", "stop_token_ids": (1,), "min_tokens": 1}, "no token"),
    "min over max": ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
}


@pytest.mark.parametrize(("fields", "word"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_is_answered_and_stops_nobody(mock: MockEngine, fields: dict[str, Any], word: str) -> None:
    mock.submit("good")
    mock.submit("bad", **fields)
    mock.settle()
    assert (mock.finished["bad"].reason, mock.finished["bad"].client_fault) == ("error", True)
    assert word in (mock.finished["bad"].error or "")
    assert mock.output["good"] == expected_tokens((1, 2, 3), None, 4)


def test_more_than_a_step_has_room_for_is_refused(mock: MockEngine) -> None:
    capacity = replace(mock.runner.capacity, vocab_size=2 * MAX_ENDINGS, eos_token_ids=(2, 3))
    biases = dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)
    endings = tuple(range(4, MAX_ENDINGS + 3))

    def error(**fields: Any) -> str | None:
        submit = Submit("r", (1,), Sampling(max_tokens=2, **fields))
        return error_in(submit, capacity, 99, None, has_grammars=False)

    assert "logit_bias" in (error(logit_bias=biases) or "")
    assert "stop_token_ids" in (error(stop_token_ids=endings) or "")
    del biases[0]
    assert error(logit_bias=biases, stop_token_ids=endings, ignore_eos=True) is None
    assert error(stop_token_ids=endings[1:]) is None


@pytest.mark.parametrize(
    ("name", "fine", "wrong"),
    [
        ("temperature", (0.0, 2.0), (-0.1, 2.1, math.inf)),
        ("top_p", (0.0, 1.0), (-0.1, 1.1)),
        ("top_k", (-1, 0, 2**31 - 1), (-2, 2**31)),
        ("min_p", (0.0, 1.0), (-0.1, 1.1)),
        ("repetition_penalty", (0.01, 10.0), (0.0, -1.0, 10.1, math.inf)),
        ("presence_penalty", (-2.0, 2.0), (-2.1, 2.1, -math.inf, math.inf)),
        ("frequency_penalty", (-2.0, 2.0), (-2.1, 2.1, -math.inf, math.inf)),
    ],
)
def test_a_parameter_of_a_choice_is_in_its_range(
    name: str, fine: tuple[float, ...], wrong: tuple[float, ...], mock: MockEngine
) -> None:
    def error(value: float) -> str | None:
        submit = Submit("r", (1,), Sampling(max_tokens=2, **{name: value}))  # type: ignore[arg-type]
        return error_in(submit, mock.runner.capacity, 99, None, has_grammars=False)

    assert [error(value) for value in fine] == [None] * len(fine)
    assert [error(value) for value in (*wrong, math.nan)] == [f"{name} is out of range."] * (len(wrong) + 1)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_pooled_vector_and_tokens_are_not_asked_for_together(
    mock: MockEngine, pooling: Literal["last", "mean"]
) -> None:
    """What has been summed up of a prompt is gone once its vector is told."""

    def error(max_tokens: int) -> str | None:
        submit = Submit("r", (1,), Sampling(max_tokens=max_tokens), pooling=pooling)
        return error_in(submit, mock.runner.capacity, 99, None, has_grammars=False)

    assert error(0) is None
    assert "max_tokens 0" in (error(1) or "")


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e-9, 1e9])
def test_a_weight_that_is_none_is_refused(mock: MockEngine, weight: float) -> None:
    mock.engine.submit(Submit("r", (1,), Sampling(max_tokens=2), tenant="t", weight=weight))
    assert mock.engine.num_requests == 0
    (finished,) = mock.engine.take_events()
    assert isinstance(finished, Finished)
    assert "between 0.01 and 100" in (finished.error or "")


def test_a_request_id_in_use_is_refused(mock: MockEngine) -> None:
    mock.engine.submit(Submit("r", (1,), Sampling(max_tokens=2)))
    mock.engine.submit(Submit("r", (1,), Sampling(max_tokens=2)))
    assert mock.engine.num_requests == 1
    assert [event.reason for event in mock.engine.take_events()] == ["error"]  # type: ignore[union-attr]


def test_an_adapter_that_cannot_be_read_fails_its_own_requests_only(mock: MockEngine) -> None:
    mock.host.broken.add("a1")
    for name, adapter in (("bad-1", "a1"), ("good", "a2"), ("bad-2", "a1")):
        mock.submit(name, adapter=adapter)
    mock.settle()
    for name in ("bad-1", "bad-2"):
        assert mock.finished[name].reason == "error"
        assert "damaged" in (mock.finished[name].error or "")
        assert not mock.finished[name].client_fault
    assert mock.output["good"] == expected_tokens((1, 2, 3), "a2", 4)


def test_an_operating_system_s_error_is_told_without_its_path(
    mock: MockEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def get(_digest: str) -> str:
        raise PermissionError(13, "Permission denied", "/srv/secret/store/adapter.json")

    monkeypatch.setattr(mock.host, "get", get)
    mock.submit("bad", adapter="a1")
    mock.settle()
    assert mock.finished["bad"].error == "Adapter a1 could not be read: Permission denied"
    assert not mock.finished["bad"].client_fault
    assert "/srv/secret/store/adapter.json" in caplog.text


@pytest.mark.parametrize("kind", [RowsExceeded, Unsupported])
def test_an_adapter_that_this_server_cannot_hold_is_its_owners_fault(
    mock: MockEngine, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The store may hold it from a server with more rows or another device."""

    def refuse(*_: object, **__: object) -> bool:
        raise kind("it needs 80 rows; the budget holds 64")

    if kind is RowsExceeded:
        monkeypatch.setattr(mock.rows, "load", refuse)
    else:
        monkeypatch.setattr(mock.host, "get", refuse)
    mock.submit("bad", adapter="a1")
    mock.submit("good")
    mock.settle()
    assert "80 rows; the budget holds 64" in (mock.finished["bad"].error or "")
    assert mock.finished["bad"].client_fault
    assert mock.finished["good"].reason == "length"


def test_files_that_need_more_rows_than_was_said_and_there_are_fail_their_requests(
    mock: MockEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another adapter's files, put there by hand: waiting for room would never end, and keep all others out."""
    monkeypatch.setattr(mock.host, "get", lambda _digest: MockWeights("a1-65"))
    mock.submit("bad", adapter="a1")
    mock.settle()
    assert "row budget" in (mock.finished["bad"].error or "")


def test_only_a_cpu_takes_any_rank() -> None:
    cpu = detect("cpu")
    assert max_rank_of(cpu) is None
    assert [max_rank_of(replace(cpu, device=kind)) for kind in ("cuda", "npu")] == [MAX_KERNEL_RANK] * 2


def test_an_adapter_that_failed_may_be_tried_again(mock: MockEngine) -> None:
    mock.host.broken.add("a1")
    mock.submit("first", adapter="a1")
    mock.settle()
    mock.host.broken.clear()
    mock.submit("second", adapter="a1")
    mock.settle()
    assert mock.output["second"] == expected_tokens((1, 2, 3), "a1", 4)


def test_an_adapter_larger_than_all_rows_is_refused(mock: MockEngine) -> None:
    mock.submit("huge", adapter="a1-65")
    mock.submit("good", adapter="a2")
    mock.settle()
    assert "row budget" in (mock.finished["huge"].error or "")
    assert mock.finished["huge"].client_fault
    assert mock.finished["good"].reason == "length"


def test_an_adapter_larger_than_all_rows_is_refused_where_nothing_else_runs(mock: MockEngine) -> None:
    mock.submit("huge", adapter="a1-65")
    mock.step()
    assert mock.finished["huge"].reason == "error"
    assert mock.engine.num_steps == 0


def test_not_a_number_ends_one_request_with_a_sentence(mock: MockEngine) -> None:
    run = mock.runner.run

    def poisoned(*args: Any) -> torch.Tensor:
        logits = run(*args)
        logits[-1] = float("nan")  # the base model's rows come last
        return logits

    mock.runner.run = poisoned  # type: ignore[method-assign]
    mock.submit("good", adapter="a1", max_tokens=1)
    mock.submit("bad")
    mock.settle()
    assert "finite" in (mock.finished["bad"].error or "")
    assert not mock.finished["bad"].client_fault
    assert holds_nothing(mock)


def test_an_adapter_that_overflows_is_its_owners_fault(mock: MockEngine) -> None:
    run = mock.runner.run
    mock.runner.run = lambda *args: run(*args) * float("nan")  # type: ignore[method-assign]
    mock.submit("bad", adapter="a1")
    mock.settle()
    assert "adapter" in (mock.finished["bad"].error or "")
    assert mock.finished["bad"].client_fault


def test_without_lora_requests_for_adapters_are_refused(mock: MockEngine) -> None:
    engine = Engine(mock.runner, None, None, mock.engine.config, loader=mock.loader)
    engine.submit(Submit("r", (1, 2, 3), Sampling(max_tokens=4), "a1", {GROUP: 1}))
    engine.handle(Load("a1"))
    engine.handle(Evict("a1"))
    (refused,) = engine.step()
    assert isinstance(refused, Finished) and "adapter_row_bytes" in refused.error
    assert engine.num_requests == 0
    assert not mock.loader.do_all()


# ---- aborts and evictions


def test_an_abort_frees_everything_at_once(mock: MockEngine) -> None:
    mock.submit("r", adapter="a1", max_tokens=50)
    mock.step_until(lambda: mock.output.get("r"))
    mock.engine.handle(Abort("r"))
    assert holds_nothing(mock)
    mock.engine.check_integrity()
    assert mock.step() == []


def test_aborting_an_unknown_request_does_nothing(mock: MockEngine) -> None:
    mock.engine.handle(Abort("nobody"))
    assert mock.step() == []


def test_evict_waits_for_the_last_user(mock: MockEngine) -> None:
    mock.submit("r", adapter="a1", max_tokens=6)
    mock.step_until(lambda: mock.output.get("r"))
    mock.engine.handle(Evict("a1"))
    mock.step()
    assert mock.rows.resident() == ("a1",)
    mock.settle()
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a1", 6)
    assert mock.rows.resident() == ()
    assert mock.host.dropped == ["a1"]


def test_what_nobody_uses_is_evicted_at_once(mock: MockEngine) -> None:
    """Kept by the host tier only, or not at all: then nothing remembers it."""
    mock.engine.handle(Evict("a9"))
    assert mock.host.dropped == ["a9"]
    assert not mock.engine.adapter_loads.num_wanted


def test_what_replaces_a_damaged_adapter_is_served_as_soon_as_nobody_runs_with_the_damaged_one(
    mock: MockEngine,
) -> None:
    """Its name and its digest stay, so its requests may come without end: newcomers wait for the new files."""
    mock.submit("before", adapter="a1", max_tokens=6)
    mock.submit("other", adapter="a2", max_tokens=40)
    mock.step_until(lambda: mock.output.get("before"))
    mock.engine.handle(Evict("a1"))
    for i in range(20):
        mock.submit(f"after-{i}", adapter="a1", max_tokens=6)
        mock.step_and_load()
        assert "before" in mock.finished or not any(name.startswith("after") for name in mock.output)
    mock.settle()
    assert mock.host.reads == ["a1", "a2", "a1"]
    assert mock.host.dropped == ["a1"]
    assert mock.output["after-19"] == expected_tokens((1, 2, 3), "a1", 6)


def test_what_is_being_read_when_it_is_replaced_is_read_again(mock: MockEngine) -> None:
    mock.host.during_next_read = lambda: mock.engine.handle(Evict("a1"))
    mock.submit("r", adapter="a1")
    mock.settle()
    assert mock.host.reads == ["a1", "a1"]
    assert mock.host.dropped == ["a1"]
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a1", 4)


def test_who_waits_for_what_was_damaged_is_served_from_what_replaces_it(mock: MockEngine) -> None:
    """The damaged files were read before the new ones came, and that they could not be is not yet told."""
    mock.host.broken.add("a1")
    mock.submit("r", adapter="a1")
    mock.step()
    mock.load()
    mock.host.broken.clear()
    mock.engine.handle(Evict("a1"))
    mock.settle()
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a1", 4)


def test_a_copy_of_what_is_replaced_is_read_again(mock: MockEngine) -> None:
    """It waits for rows in host memory."""
    mock.submit("holds", adapter="a2-64", max_tokens=10)
    mock.step_until(lambda: mock.output.get("holds"))
    mock.submit("r", adapter="a1")
    mock.step()
    mock.load()
    mock.step()
    assert "holds" not in mock.finished
    mock.engine.handle(Evict("a1"))
    mock.settle()
    assert mock.host.reads == ["a2-64", "a1", "a1"]


def test_the_thread_that_reads_in_the_process_serves_the_engine_as_well(mock: MockEngine) -> None:
    """However its reads and the steps fall together: the outcome is the same, and `run_until_idle` waits for them."""
    loader = TransientThread("adapter-loader")
    engine = Engine(mock.runner, mock.rows, mock.host, mock.engine.config, loader=loader)
    for i in range(12):
        engine.submit(Submit(f"r{i}", (1, i), Sampling(max_tokens=3, temperature=0.0), f"a{i}-16", {GROUP: 16}))
    output: dict[str, list[int]] = {}
    for event in engine.run_until_idle():
        if isinstance(event, Tokens):
            output.setdefault(event.request_id, []).extend(event.token_ids)
    engine.check_integrity()
    engine.close()
    assert output == {f"r{i}": expected_tokens((1, i), f"a{i}-16", 3) for i in range(12)}


def test_a_failed_read_leaves_nothing_of_the_adapter_in_memory(
    mock: MockEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error holds the frames that it came through, and with them what had been read."""

    class Weights:
        pass

    alive: list[weakref.ref[Weights]] = []

    def get(_digest: str) -> None:
        weights = Weights()
        alive.append(weakref.ref(weights))
        raise ValueError("the file is damaged")

    monkeypatch.setattr(mock.host, "get", get)
    caplog.set_level(logging.CRITICAL)  # its records hold the error too
    gc.disable()
    try:
        mock.submit("r", adapter="a1")
        mock.settle()
        assert mock.finished["r"].reason == "error"
        assert [one() for one in alive] == [None]
    finally:
        gc.enable()


def test_an_evicted_adapter_may_come_back(mock: MockEngine) -> None:
    mock.submit("before", adapter="a1")
    mock.settle()
    mock.engine.handle(Evict("a1"))
    mock.submit("after", adapter="a1")
    mock.settle()
    assert mock.output["before"] == mock.output["after"]


def test_a_hint_loads_ahead_of_any_request(mock: MockEngine) -> None:
    mock.engine.handle(Load("a1"))
    mock.step_until(lambda: mock.rows.place_of("a1") is not None)
    assert mock.host.reads == ["a1"]
    mock.submit("r", adapter="a1", max_tokens=1)
    mock.step()
    assert mock.finished["r"].reason == "length"


def test_a_hint_evicts_nobody() -> None:
    """A burst of uploads must not push out the adapters that requests come back to."""
    mock = make_mock_engine(num_rows=2)
    for adapter in ("a1", "a2"):
        mock.submit(adapter, adapter=adapter)
        mock.settle()
    for i in range(3, 8):
        mock.engine.handle(Load(f"a{i}"))
    mock.step_until(lambda: len(mock.host.reads) == 7 and not mock.engine.adapter_loads.num_wanted)
    assert mock.host.reads == [f"a{i}" for i in range(1, 8)]
    assert mock.rows.resident() == ("a1", "a2")
    mock.submit("r", adapter="a3")
    mock.settle()
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a3", 4)
    assert mock.rows.resident() == ("a2", "a3")
    mock.engine.close()


@pytest.mark.parametrize("is_awaited", [False, True])
def test_an_adapter_deleted_after_a_hint_is_no_warning_unless_somebody_waits_for_it(
    mock: MockEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_awaited: bool
) -> None:
    def get(digest: str) -> str:
        raise NotFound(f"The store has no adapter {digest}.")

    monkeypatch.setattr(mock.host, "get", get)
    caplog.set_level(logging.INFO)
    mock.engine.handle(Load("a1"))
    mock.step()
    if is_awaited:
        mock.submit("r", adapter="a1")
    mock.engine.handle(Evict("a1"))
    mock.step_until(lambda: mock.host.dropped)
    mock.settle()
    assert mock.host.dropped == ["a1"]
    assert ("r" in mock.finished) == is_awaited
    records = [(record.levelname, record.exc_info is not None) for record in caplog.records]
    assert records == [("WARNING", True) if is_awaited else ("INFO", False)]
    assert not mock.engine.adapter_loads.num_wanted


# ---- log probabilities of the prompt


def prompt_logprobs(prompt: tuple[int, ...], adapter: str | None) -> list[float]:
    rows = [next_logits(list(prompt[:i]), adapter_number(adapter)) for i in range(1, len(prompt))]
    return [float(row.log_softmax(-1)[token]) for row, token in zip(rows, prompt[1:], strict=True)]


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_prompt_logprobs_come_once_and_whole(max_tokens: int, length: int) -> None:
    mock = make_mock_engine(token_budget=8, max_prompt_logits=3)
    prompt = tuple(range(length))
    mock.submit("echo", prompt, max_tokens=max_tokens, prompt_logprobs=2)
    mock.submit("other", prompt, max_tokens=5)
    mock.settle()
    first, *later = mock.messages["echo"]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    found = [entry for entry in first.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in found] == list(prompt[1:])
    assert [entry.logprob for entry in found] == pytest.approx(prompt_logprobs(prompt, None), abs=1e-5)
    assert all(len(entry.top) == 2 for entry in found)
    assert all(message.prompt_logprobs is None for message in later)
    assert mock.output["echo"] == expected_tokens(prompt, None, max_tokens)
    assert mock.finished["echo"].reason == "length"
    mock.engine.close()


def test_prompt_logprobs_survive_a_preemption_in_the_middle() -> None:
    mock = make_mock_engine(num_blocks=11, token_budget=8, max_prompt_logits=1)
    prompt = tuple(range(20))
    mock.submit("older", (1, 2, 3, 4, 5, 6, 7, 8), max_tokens=30)
    mock.step()
    mock.submit("echo", prompt, max_tokens=2, prompt_logprobs=0)
    mock.settle()
    assert mock.engine.scheduler.num_preemptions > 0
    found = [entry.logprob for entry in mock.messages["echo"][0].prompt_logprobs or () if entry is not None]
    assert found == pytest.approx(prompt_logprobs(prompt, None), abs=1e-5)
    assert mock.output["echo"] == expected_tokens(prompt, None, 2)
    mock.engine.close()


def test_prompt_logprobs_of_all_requests_share_the_bound_of_a_step() -> None:
    mock = make_mock_engine(token_budget=64, max_prompt_logits=5)
    prompts = {f"echo-{i}": tuple(range(i, i + 12)) for i in range(3)}
    for name, prompt in prompts.items():
        mock.submit(name, prompt, max_tokens=0, prompt_logprobs=0)
    mock.settle()
    mock.engine.close()
    assert max(mock.runner.num_logits) == 5
    for name, prompt in prompts.items():
        found = [entry.logprob for entry in mock.messages[name][0].prompt_logprobs or () if entry is not None]
        assert found == pytest.approx(prompt_logprobs(prompt, None), abs=1e-5)


def test_output_logprobs_follow_each_token(mock: MockEngine) -> None:
    mock.submit("r", max_tokens=3, logprobs=1)
    mock.settle()
    entries = [entry for message in mock.messages["r"] for entry in message.logprobs]
    assert [entry.token_id for entry in entries] == mock.output["r"]
    assert [entry.top[0][0] for entry in entries] == mock.output["r"]


# ---- hidden states


def pooled_mock(prompt: tuple[int, ...], pooling: str) -> list[float]:
    """What the mock model's hidden states come to: a token and its position."""
    states = np.array([prompt, range(len(prompt))], np.float32)
    return list(states[:, -1] if pooling == "last" else states.mean(axis=1))


@pytest.mark.parametrize("overlap", [False, True])
def test_pooled_hidden_states_are_those_of_the_whole_prompt(overlap: bool) -> None:
    """In chunks, beside requests that generate, after aborts, in slots that others have left."""
    mock = make_mock_engine(overlap=overlap, token_budget=6, max_sequences=3)
    prompts = {f"{pooling}-{i}": tuple(range(i, i + 9 + i)) for pooling in ("last", "mean") for i in range(1, 5)}
    mock.submit("first", (1, 2, 3, 4, 5), max_tokens=40)
    for i, (name, prompt) in enumerate(prompts.items()):
        mock.submit(f"gone-{i}", tuple(range(60, 85)), max_tokens=0, pooling="mean")
        mock.submit(name, prompt, "a1" if i % 2 else None, max_tokens=0, pooling=name[:4])  # type: ignore[arg-type]
        mock.submit(f"other-{i}", prompt, max_tokens=3)
        mock.step_and_load()
        mock.engine.abort(f"gone-{i}")
    mock.settle()
    mock.engine.close()
    assert mock.output["first"] == expected_tokens((1, 2, 3, 4, 5), None, 40)
    for i, (name, prompt) in enumerate(prompts.items()):
        ended = mock.finished[name]
        assert ended.reason == "length"
        assert name not in mock.output
        assert np.frombuffer(ended.pooled or b"", "<f4") == pytest.approx(pooled_mock(prompt, name[:4]))
        assert mock.output[f"other-{i}"] == expected_tokens(prompt, None, 3)
        assert mock.finished[f"other-{i}"].pooled is None
        assert f"gone-{i}" not in mock.finished


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mean_begins_anew_after_a_preemption(overlap: bool) -> None:
    """Two tokens a step: while a prompt comes one by one, the older request takes the blocks."""
    mock = make_mock_engine(overlap=overlap, token_budget=2, max_sequences=2, num_blocks=13)
    mock.submit("older", (1, 2, 3, 4, 5), max_tokens=40)
    mock.step_until(lambda: mock.output.get("older"))
    mock.submit("mean", tuple(range(30)), max_tokens=0, pooling="mean")
    mock.settle()
    mock.engine.close()
    assert mock.engine.scheduler.num_preemptions == 1
    pooled = np.frombuffer(mock.finished["mean"].pooled or b"", "<f4")
    assert pooled == pytest.approx(pooled_mock(tuple(range(30)), "mean"))


# ---- sampling inside the engine


def test_random_tokens_depend_neither_on_neighbours_nor_on_preemption() -> None:
    def run(num_others: int, num_blocks: int) -> tuple[list[int], int]:
        mock = make_mock_engine(num_blocks=num_blocks)
        for i in range(num_others):
            mock.submit(f"other-{i}", (i, 2), max_tokens=24, temperature=1.0)
        mock.submit("r", max_tokens=24, temperature=0.8, top_p=0.9, seed=11, frequency_penalty=0.5)
        mock.settle()
        mock.engine.close()
        return mock.output["r"], mock.engine.scheduler.num_preemptions

    alone, _ = run(0, 64)
    crowded, num_preemptions = run(5, 16)
    assert num_preemptions > 0
    assert alone == crowded


def test_each_token_is_drawn_from_its_own_place_in_the_stream_with_all_counts_so_far(mock: MockEngine) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.8, frequency_penalty=2.0, seed=5)
    prompt = (1, 2, 3)
    history, cpu = list(prompt), torch.device("cpu")
    for index in range(sampling.max_tokens):
        state = new_state(1, VOCAB, cpu)
        state.reset(0, prompt, history[3:])
        row = RowSampling(0, row_of(sampling), seed=5, index=index, slot=0)
        asked = ask([row], num_logits=1, vocab=VOCAB)
        history.append(int(sample(next_logits(history, -1)[None], asked.maps(cpu), state).token_ids[0]))
    mock.submit("r", prompt, max_tokens=12, temperature=0.8, frequency_penalty=2.0, seed=5)
    mock.settle()
    assert mock.output["r"] == history[3:]


def test_without_a_seed_two_requests_differ(mock: MockEngine) -> None:
    for name in ("x", "y"):
        mock.submit(name, max_tokens=12, temperature=1.0)
    mock.settle()
    assert mock.output["x"] != mock.output["y"]


# ---- everything together


def test_the_record_of_a_step_counts_who_was_in_it(mock: MockEngine) -> None:
    mock.engine.handle(Load("a1"))
    mock.step_until(lambda: mock.rows.place_of("a1") is not None)
    mock.submit("base", (1, 2, 3))
    mock.submit("adapter", (1, 2, 3, 4, 5), "a1")
    mock.step()
    mock.step()
    first, second = mock.engine.step_records
    assert (first.num_tokens, first.num_base_tokens, first.num_decode_tokens) == (8, 3, 0)
    assert (second.num_tokens, second.num_base_tokens, second.num_decode_tokens) == (2, 1, 2)
    assert (first.adapters, first.num_sequences) == (("a1",), 2)


def test_one_step_holds_eight_adapters_the_base_chunks_and_decode_tokens() -> None:
    mock = make_mock_engine(max_sequences=16, token_budget=64)
    for i in range(8):
        mock.engine.handle(Load(f"a{i}"))
    mock.step_until(lambda: all(mock.rows.place_of(f"a{i}") is not None for i in range(8)))
    for i in range(8):
        mock.submit(f"a{i}", (1, i), f"a{i}", max_tokens=20)
        mock.submit(f"base{i}", (1, i), max_tokens=20)
    mock.step_until(lambda: len(mock.engine.scheduler.running) == 16)
    mock.engine.abort("base0")
    mock.submit("late", tuple(range(80)), "a3", max_tokens=3)
    mock.settle()
    mixed = [
        record
        for record in mock.engine.step_records
        if len(record.adapters) == 8
        and record.num_base_tokens
        and record.num_prefill_tokens
        and record.num_decode_tokens
    ]
    assert mixed
    assert mock.output["late"] == expected_tokens(tuple(range(80)), "a3", 3)
    mock.engine.close()


def test_nothing_is_left_of_many_requests(mock: MockEngine) -> None:
    for i in range(300):
        mock.submit(f"r{i}", (i % 90, 3), f"a{i % 7}" if i % 2 else None, max_tokens=1 + i % 3)
        if i % 10 == 9:
            mock.settle()
    for i in range(7):
        mock.engine.handle(Evict(f"a{i}"))
    assert holds_nothing(mock)
    assert not mock.engine.adapter_loads.num_wanted
    assert not mock.rows.residents
    assert {*mock.host.dropped} == {f"a{i}" for i in range(7)}
    assert mock.engine.take_events() == []
    assert mock.engine.step_records.maxlen is not None


@given(seed=st.integers(0, 2**32))
@example(seed=35988)  # who waited for rows too long is aborted, while others of its adapter run
@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_operations_lose_nothing(seed: int) -> None:
    """Submits, aborts, hints, pins, evictions, failures, and copies that take time, in any order; integrity is checked
    after each."""
    rng = random.Random(seed)
    mock = make_mock_engine(
        num_blocks=rng.randint(10, 30),
        num_rows=rng.randint(2, 6),
        max_sequences=rng.randint(1, 6),
        token_budget=rng.randint(6, 20),
        has_conv=rng.random() < 0.5,
        max_steps_waiting_for_rows=rng.randint(1, 6),
        max_loads_ahead=rng.randint(1, 3),
        overlap=rng.random() < 0.5,
        host=LruHost(rng.randint(1, 3)) if rng.random() < 0.5 else None,
    )
    marks = SlowMarks()
    if rng.random() < 0.5:
        mock.rows.new_mark = marks
    mock.host.broken.add("a5")
    requests: dict[str, tuple[tuple[int, ...], str | None, int]] = {}
    aborted: set[str] = set()
    for i in range(60):
        match rng.choice(
            ("submit", "submit", "step", "step", "step", "read", "read", "abort", "evict", "load", "keep", "copy")
        ):
            case "submit":
                prompt = tuple(rng.randrange(90) for _ in range(rng.randint(1, 18)))
                adapter = rng.choice((None, "a1", "a2-2", "a3", "a4-2", "a5", "a6-7"))
                requests[f"r{i}"] = (prompt, adapter, rng.randint(1, 16))
                tenant = rng.choice(("", "x", "y"))
                weight = {"": 1.0, "x": 0.25, "y": 3.0}[tenant]
                mock.submit(f"r{i}", prompt, adapter, max_tokens=requests[f"r{i}"][2], tenant=tenant, weight=weight)
            case "step":
                mock.step()
            case "read":
                mock.loader.do_next()
            case "abort" if requests:
                name = rng.choice(list(requests))
                mock.engine.handle(Abort(name))
                aborted.add(name)
            case "evict":
                mock.engine.handle(Evict(rng.choice(("a1", "a2-2", "a5", "a9"))))
            case "load":
                mock.engine.handle(Load(rng.choice(("a1", "a3", "a5"))))
            case "keep":
                mock.engine.handle(Pin(tuple(rng.sample(("a1", "a3", "a5"), rng.randint(0, 1)))))
            case "copy":
                marks.num_reached = rng.randint(marks.num_reached, marks.num_made)
            case _:
                continue
        mock.engine.check_integrity()
    mock.engine.handle(Pin(()))
    mock.settle()
    mock.engine.close()
    assert holds_nothing(mock)
    for name, (prompt, adapter, num_tokens) in requests.items():
        expected = [] if adapter in ("a5", "a6-7") else expected_tokens(prompt, adapter, num_tokens)
        if name in aborted and name not in mock.finished:
            assert mock.output.get(name, []) == expected[: len(mock.output.get(name, []))]
        else:
            assert mock.output.get(name, []) == expected
            assert mock.finished[name].reason == ("error" if adapter in ("a5", "a6-7") else "length")
