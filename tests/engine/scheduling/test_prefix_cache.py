"""The prefix cache: what must be found is found, nothing else is, and tokens never change.

The mock model of these tests follows, for each token in the KV cache, all that its keys and values depend on, and fails
when a sequence reads another's (`engine_mock.py`).
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.engine.ipc.messages import Abort, Evict
from tests.support.engine.engine_mock import MockEngine, expected_tokens, make_mock_engine, poison_free
from tests.support.tiers import examples

BLOCK = 4
PROMPT = tuple(range(1, 42))  # ten blocks and a token


def cached_engine(**config: Any) -> MockEngine:
    config = {"num_blocks": 200, "token_budget": 64, "has_conv": False} | config
    return make_mock_engine(block_size_tokens=BLOCK, **config)


def run(mock: MockEngine, name: str, *args: Any, **fields: Any) -> int:
    """The cached tokens of a request that runs by itself, whose tokens must be right."""
    mock.submit(name, *args, **fields)
    mock.settle()
    return mock.messages[name][0].num_cached


def num_computed(mock: MockEngine) -> int:
    """Tokens of all steps."""
    return sum(len(batch.token_ids) for batch in mock.runner.batches)


@pytest.fixture
def mock() -> MockEngine:
    return cached_engine()


# ---- what is found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, 40),
        (PROMPT[:40], 39),  # one token is left, and its block copied
        (PROMPT[:39], 36),
        ((*PROMPT[:21], 90, 91), 20),
        ((*PROMPT[:19], 90, 91), 16),
        (PROMPT[:3], 0),
        ((90, *PROMPT), 0),
    ],
    ids=["equal", "whole blocks", "within a block", "longer", "parts in a block", "shorter than a block", "shifted"],
)
def test_a_prompt_is_computed_from_where_it_differs(mock: MockEngine, prompt: tuple[int, ...], expected: int) -> None:
    run(mock, "first", PROMPT)
    mock.runner.batches.clear()
    assert run(mock, "second", prompt, max_tokens=6) == expected
    assert mock.output["second"] == expected_tokens(prompt, None, 6)
    assert num_computed(mock) == len(prompt) - expected + 5


def test_an_answer_is_found_as_part_of_the_next_prompt(mock: MockEngine) -> None:
    run(mock, "first", PROMPT, max_tokens=20)
    history = (*PROMPT, *mock.output["first"])
    assert run(mock, "second", (*history, 90, 91, 92)) == 60  # the last token of an answer is never computed
    assert mock.output["second"] == expected_tokens((*history, 90, 91, 92), None, 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stopped_and_an_aborted_request_leave_what_they_computed(overlap: bool) -> None:
    mock = cached_engine(overlap=overlap)
    tokens = expected_tokens(PROMPT, None, 9)
    mock.submit("stopped", PROMPT, max_tokens=30, stop_token_ids=(tokens[8],))
    mock.settle()
    history = (*PROMPT, *tokens)
    assert run(mock, "after", (*history, 90)) == 48
    mock.submit("aborted", (90, *PROMPT), max_tokens=30)
    mock.step_until(lambda: mock.output.get("aborted"))
    mock.engine.handle(Abort("aborted"))
    assert run(mock, "again", (90, *PROMPT)) == 40
    assert mock.engine.blocks.num_used == 0


@pytest.mark.parametrize(("num", "length"), [(16, 300), (64, 300), (64, 303)])
def test_equal_prompts_at_once_are_computed_once(num: int, length: int) -> None:
    mock = cached_engine(num_blocks=1200, max_sequences=64, max_len=400, token_budget=64)
    prompt = tuple(i % 89 for i in range(length))
    for i in range(num):
        mock.submit(f"r{i}", prompt, max_tokens=4)
    mock.settle()
    assert num_computed(mock) == length + num - 1 + 3 * num
    assert all(mock.output[f"r{i}"] == expected_tokens(prompt, None, 4) for i in range(num))


def test_others_do_not_wait_for_a_prefix_that_is_not_theirs(mock: MockEngine) -> None:
    mock.submit("long", (*range(90), *range(20)))
    mock.step()
    mock.submit("waits", (*range(90), 5), max_tokens=1)
    mock.submit("other", (5, 6, 7), max_tokens=1)
    mock.step()
    assert mock.output.get("other") and not mock.output.get("waits")
    mock.settle()
    assert mock.messages["waits"][0].num_cached == 88


def test_a_prefix_is_awaited_for_a_bounded_number_of_steps() -> None:
    """The sequence that computes it gets no tokens: others of its flow are before it in each step."""
    mock = cached_engine(token_budget=6, max_sequences=6)
    mock.submit("owner", PROMPT, tenant="x")
    mock.step()
    mock.submit("waits", PROMPT, max_tokens=1, tenant="x")
    for i in range(4):
        mock.submit(f"busy-{i}", (50 + i,), max_tokens=300, tenant=f"t{i}", weight=100.0)
    mock.step_until(lambda: mock.output.get("waits"), max_steps=400)
    mock.settle()
    assert mock.output["waits"] == expected_tokens(PROMPT, None, 1)


def test_who_waits_goes_on_when_the_owner_is_gone(mock: MockEngine) -> None:
    mock.submit("owner", tuple(range(90)) * 2)
    mock.step()
    mock.submit("waits", tuple(range(90)) * 2)
    mock.engine.handle(Abort("owner"))
    mock.settle()
    assert mock.messages["waits"][0].num_cached == 64
    assert mock.output["waits"] == expected_tokens(tuple(range(90)) * 2, None, 4)


# ---- whose it is


def test_tenants_salts_and_adapters_do_not_find_each_others() -> None:
    mock = cached_engine(num_blocks=400)
    kinds = [
        {"tenant": tenant, "cache_salt": salt, "adapter": adapter}
        for tenant, salt, adapter in itertools.product(("x", "y", ""), ("", "s", "x"), (None, "a1", "a2"))
    ]
    assert [run(mock, f"first-{i}", PROMPT, **kind) for i, kind in enumerate(kinds)] == [0] * len(kinds)
    assert [run(mock, f"again-{i}", PROMPT, **kind) for i, kind in enumerate(kinds)] == [40] * len(kinds)
    for i, kind in enumerate(kinds):
        assert mock.output[f"again-{i}"] == expected_tokens(PROMPT, kind["adapter"], 4)


def test_tenants_of_one_server_share_if_they_are_to() -> None:
    mock = cached_engine(prefix_cache_scope="server")
    mock.runner.sequence_in = lambda slot: _without_tenant(mock, slot)
    run(mock, "first", PROMPT, tenant="x")
    assert run(mock, "second", PROMPT, tenant="y") == 40
    assert run(mock, "third", PROMPT, tenant="y", cache_salt="s") == 0


def _without_tenant(mock: MockEngine, slot: int) -> Any:
    sequence = next(one for one in mock.engine.scheduler.running if one.slot == slot)
    request = type("R", (), _request_fields(sequence.request) | {"tenant": ""})
    return type("Shared", (), {"key": sequence.key, "request": request})


def _request_fields(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("cache_salt", "adapter", "adapter_start")}


def test_an_activated_adapter_finds_the_bases_tokens_before_its_invocation(mock: MockEngine) -> None:
    run(mock, "base", PROMPT)
    assert run(mock, "activated", PROMPT, "a1", adapter_start=26) == 24
    assert run(mock, "activated again", PROMPT, "a1", adapter_start=26) == 40
    assert run(mock, "other start", PROMPT, "a1", adapter_start=27) == 24
    assert run(mock, "whole", PROMPT, "a1") == 0
    assert run(mock, "base again", PROMPT) == 40


@pytest.mark.parametrize(("starts", "expected"), [((30, 30), 40), ((30, 31), 30), ((None, 30), 30), ((0, 30), 0)])
def test_a_block_that_is_being_filled_is_shared_up_to_where_an_adapter_begins(
    starts: tuple[int | None, int], expected: int
) -> None:
    mock = cached_engine(token_budget=256)
    run(mock, "load", (95,), "a1")
    prompt = PROMPT[:31] if expected == 30 else PROMPT
    first, second = ((None, 0) if start is None else ("a1", start) for start in starts)
    mock.submit("runs", prompt, first[0], adapter_start=first[1], max_tokens=20)
    mock.step_until(lambda: mock.output.get("runs"))
    mock.submit("second", (*prompt, 90), second[0], adapter_start=second[1])
    mock.settle()
    assert mock.messages["second"][0].num_cached == (expected if expected != 40 else 41)


def test_requests_whose_rotations_differ_do_not_share(mock: MockEngine) -> None:
    mock.engine.cache._rope_class = lambda limit: (int(limit > 50),)
    run(mock, "short", PROMPT, max_tokens=4)
    assert run(mock, "long", PROMPT, max_tokens=20) == 0
    assert run(mock, "short again", PROMPT, max_tokens=5) == 40


def test_prompt_logprobs_and_means_are_of_all_tokens(mock: MockEngine) -> None:
    run(mock, "first", PROMPT)
    assert run(mock, "echo", PROMPT, prompt_logprobs=0) == 0
    assert len(mock.messages["echo"][0].prompt_logprobs or ()) == len(PROMPT)
    for pooling in ("mean", "last"):
        mock.submit(f"{pooling}-1", PROMPT, max_tokens=0, pooling=pooling)
        mock.submit(f"{pooling}-2", PROMPT, max_tokens=0, pooling=pooling, cache_salt="other")
        mock.settle()
        assert mock.finished[f"{pooling}-1"].pooled == mock.finished[f"{pooling}-2"].pooled


def test_penalties_count_cached_tokens_too(mock: MockEngine) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "frequency_penalty": 1.5, "seed": 3}
    fields |= {"repetition_penalty": 1.5}
    other = tuple(reversed(PROMPT))
    assert run(mock, "cold", PROMPT, **fields) == 0
    run(mock, "between", other, **fields)  # in the same slot
    assert run(mock, "warm", PROMPT, **fields) == 40
    assert mock.output["warm"] == mock.output["cold"]


# ---- preemption, eviction, and what is dropped


@pytest.mark.parametrize("overlap", [False, True])
def test_a_preempted_request_computes_no_more_than_a_block_again(overlap: bool) -> None:
    mock = cached_engine(overlap=overlap)
    mock.submit("r", PROMPT, max_tokens=30)
    mock.step_until(lambda: len(mock.output.get("r", [])) == 13)
    mock.engine.scheduler.preempt(mock.engine.scheduler.running[0])
    mock.settle()
    assert mock.output["r"] == expected_tokens(PROMPT, None, 30)
    assert num_computed(mock) <= len(PROMPT) + 29 + BLOCK
    assert mock.engine.cache.counts.resumed_tokens >= 48


def test_what_was_used_last_stays_and_ends_go_first() -> None:
    mock = cached_engine(num_blocks=31)  # thirty blocks; a prompt of this kind takes ten and its answer one
    for i in range(2):
        run(mock, f"{i}", tuple(range(i, i + 40)))
    run(mock, "0 again", tuple(range(40)))
    run(mock, "2", tuple(range(2, 42)))
    assert run(mock, "0 at last", tuple(range(40))) == 39
    assert 0 < run(mock, "1 at last", tuple(range(1, 41))) < 39
    assert mock.engine.cache.trie.num_evicted


def test_sequences_have_their_blocks_in_a_row_when_the_cache_is_full_of_idle_ones() -> None:
    """An attention of a CPU reads them as one view then."""
    mock = cached_engine(num_blocks=400, max_sequences=8, token_budget=64)
    rng = random.Random(0)
    num_runs: list[int] = []
    release = mock.engine.blocks.release

    def noted(key: int) -> None:
        num_runs.append(1 + sum(b != a + 1 for a, b in itertools.pairwise(mock.engine.blocks.blocks(key))))
        release(key)

    mock.engine.blocks.release = noted  # type: ignore[method-assign]
    for i in range(160):
        mock.submit(f"r{i}", tuple(rng.choices(range(90), k=rng.randint(50, 90))), max_tokens=rng.randint(8, 24))
        if i % 8 == 7:
            mock.settle()
    assert mock.engine.cache.trie.num_evicted > 1000
    assert sum(num_runs[80:]) < 1.2 * 80


def test_a_flood_does_not_empty_another_tenants_cache() -> None:
    mock = cached_engine(num_blocks=61, max_sequences=2)
    run(mock, "mine", PROMPT, tenant="small")
    for i in range(40):
        mock.submit(f"flood-{i}", tuple(random.Random(i).choices(range(90), k=50)), tenant="large")
    mock.settle()
    assert run(mock, "mine again", PROMPT, tenant="small") == 40


def test_a_request_without_finite_logits_leaves_nothing(mock: MockEngine) -> None:
    run(mock, "good", PROMPT[:20])
    whole_run = mock.runner.run
    mock.runner.run = lambda *args: torch.full_like(whole_run(*args), float("nan"))  # type: ignore[method-assign]
    mock.submit("bad", PROMPT)
    mock.settle()
    assert mock.finished["bad"].reason == "error"
    mock.runner.run = whole_run  # type: ignore[method-assign]
    assert run(mock, "again", PROMPT) == 20


def test_what_damaged_files_made_is_dropped_and_not_made_again(mock: MockEngine) -> None:
    """Sequences that run with it go on with the damaged rows."""
    run(mock, "before", PROMPT, "a1")
    run(mock, "other", PROMPT, "a2")
    run(mock, "base", PROMPT)
    mock.submit("runs", (9, *PROMPT), "a1", max_tokens=30)
    mock.step_until(lambda: mock.output.get("runs"))
    mock.engine.handle(Evict("a1"))
    mock.submit("after", (*PROMPT, 5), "a1")
    mock.settle()
    assert mock.messages["after"][0].num_cached == 0
    assert run(mock, "after too", (9, *PROMPT), "a1") == 0
    assert (run(mock, "again", (*PROMPT, 5), "a1"), run(mock, "again too", (9, *PROMPT), "a1")) == (40, 40)
    assert (run(mock, "other again", PROMPT, "a2"), run(mock, "base again", PROMPT)) == (40, 40)


def test_a_reset_drops_all_and_disturbs_nobody(mock: MockEngine) -> None:
    run(mock, "before", PROMPT)
    mock.submit("runs", (9, *PROMPT), max_tokens=30)
    mock.step_until(lambda: mock.output.get("runs"))
    mock.engine.cache.reset()
    mock.engine.check_integrity()
    mock.settle()
    assert mock.output["runs"] == expected_tokens((9, *PROMPT), None, 30)
    assert (run(mock, "a", PROMPT), run(mock, "b", (9, *PROMPT))) == (0, 0)


def test_models_with_states_find_nothing() -> None:
    mock = make_mock_engine(has_conv=True, block_size_tokens=BLOCK, num_blocks=200)
    run(mock, "first", PROMPT)
    assert run(mock, "second", PROMPT) == 0
    assert not mock.engine.cache.trie.num_idle


# ---- models with states


@pytest.fixture
def hybrid() -> MockEngine:
    return cached_engine(has_conv=True, num_kept=8)


def test_a_state_is_kept_where_a_second_prompt_goes_on_otherwise(hybrid: MockEngine) -> None:
    long = tuple(range(1, 62))
    run(hybrid, "first", long, max_tokens=2)
    for name, prompt, expected in (
        ("second", (*long[:30], 90), 0),
        ("third", (*long[:30], 91), 28),
        ("near", (*long[:42], 90), 28),
        ("near too", (*long[:42], 91), 28),
        ("deeper", long, 28),
        ("again", long, 60),
        ("shorter", long[:38], 28),
        ("elsewhere", (9, *long), 0),
    ):
        hybrid.runner.batches.clear()
        assert run(hybrid, name, prompt) == expected
        assert num_computed(hybrid) == len(prompt) - expected + 3
        assert hybrid.output[name] == expected_tokens(prompt, None, 4)
    assert hybrid.engine.stats().prefix_cache_stateless_tokens == 28 + 12 + 12 + 32 + 8


def test_a_state_is_kept_at_the_end_of_an_answer(hybrid: MockEngine) -> None:
    run(hybrid, "first", PROMPT, max_tokens=20)
    history = (*PROMPT, *hybrid.output["first"])
    assert run(hybrid, "second", (*history, 90, 91, 92)) == 60


@pytest.mark.parametrize(("is_chat", "least"), [(True, 56), (False, 48)])
def test_prompts_with_one_of_eight_beginnings_find_it(is_chat: bool, least: int) -> None:
    """Chats say where their system prompt ends; of raw prompts, the second one with a beginning shows it. In blocks it
    is the load of 1,500 common and 700 own tokens that others' figures are of."""
    mock = cached_engine(num_blocks=5000, max_len=600, token_budget=512, has_conv=True, num_kept=24)
    rng = random.Random(0)
    beginnings = [tuple(rng.randrange(90) for _ in range(375)) for _ in range(8)]
    found = []
    for i in range(64):
        prompt = (*beginnings[i % 8], *(rng.randrange(90) for _ in range(175)))
        keep_at = (375, 547) if is_chat else ()
        found.append(run(mock, f"r{i}", prompt, max_tokens=1, keep_at=keep_at))
        assert mock.output[f"r{i}"] == expected_tokens(prompt, None, 1)
    assert sum(num >= 372 for num in found) >= least


def test_turns_of_chats_without_thoughts_begin_at_the_state_before_the_answer() -> None:
    """Four chats in turn: the prompt's end and the thoughts of an answer are no part of the next prompt. Two
    lines for each chat are enough."""
    mock = cached_engine(num_blocks=3000, max_len=600, token_budget=512, has_conv=True, num_kept=8)
    rng = random.Random(0)
    system = tuple(rng.randrange(90) for _ in range(200))
    histories, known = dict.fromkeys(range(4), system), set[tuple[int, ...]]()
    num_found = num_findable = 0
    for turn in range(5):
        for user in histories:
            history = (*histories[user], *(rng.randrange(90) for _ in range(rng.randint(24, 36))))
            prompt, name = (*history, 91, 92, 93), f"{user}-{turn}"
            num_found += run(mock, name, prompt, max_tokens=40, keep_at=(200, len(history)))
            num_findable += max((end for end in range(0, len(prompt), BLOCK) if prompt[:end] in known), default=0)
            whole = (*prompt, *mock.output[name])
            known |= {whole[:end] for end in range(BLOCK, len(whole), BLOCK)}
            histories[user] = (*history, 91, *mock.output[name][30:], 94)
    assert num_found >= 0.9 * num_findable


def test_states_that_save_few_tokens_are_not_worth_a_step(hybrid: MockEngine) -> None:
    prompt = tuple(range(90))
    for i, keep_at in enumerate(((12, 15), (18, 30, 500))):
        run(hybrid, f"r{i}", (i, *prompt), max_tokens=1, keep_at=keep_at)
    assert [len(batch.token_ids) for batch in hybrid.runner.batches] == [64, 27, 16, 64, 11]
    assert run(hybrid, "again", (1, *prompt[:70], 5)) == 16


@pytest.mark.parametrize(("num", "length"), [(16, 300), (64, 300), (64, 303)])
@pytest.mark.parametrize("is_known", [False, True])
def test_equal_prompts_at_once_wait_for_their_state(num: int, length: int, is_known: bool) -> None:
    """Also where their blocks are known and no state."""
    mock = cached_engine(num_blocks=1200, max_sequences=64, max_len=400, has_conv=True, num_kept=8, token_budget=256)
    prompt = tuple(i % 89 for i in range(length))
    if is_known:
        run(mock, "before", prompt, max_tokens=1)
        for node in mock.engine.cache.trie.nodes:
            mock.engine.lines.drop(node)
        mock.runner.batches.clear()
    for i in range(num):
        mock.submit(f"r{i}", prompt, max_tokens=4)
    mock.settle()
    assert num_computed(mock) == length + num - 1 + 3 * num
    assert all(mock.output[f"r{i}"] == expected_tokens(prompt, None, 4) for i in range(num))
    assert run(mock, "again", prompt) == length - 1
    assert run(mock, "longer", (*prompt, 5)) >= length - 1


def test_equal_prompts_wait_for_slots_and_for_the_state_of_one_that_is_gone(hybrid: MockEngine) -> None:
    """Three may run at a time; the one that has kept the state ends, is aborted, or yields, and others find it."""
    prompt = tuple(range(1, 40))
    for i in range(9):
        hybrid.submit(f"r{i}", prompt, max_tokens=1 + i)
    hybrid.step()
    hybrid.engine.handle(Abort("r0"))
    hybrid.step()
    hybrid.engine.scheduler.preempt(hybrid.engine.scheduler.running[0])
    hybrid.settle()
    assert all(hybrid.output[f"r{i}"] == expected_tokens(prompt, None, 1 + i) for i in range(1, 9))
    assert all(hybrid.messages[f"r{i}"][0].num_cached == 38 for i in range(1, 9))


def test_the_state_within_a_block_is_dropped_with_what_is_wrong(hybrid: MockEngine) -> None:
    prompt = tuple(range(1, 40))
    for i in range(3):
        hybrid.submit(f"r{i}", prompt, max_tokens=9)
    hybrid.step()
    hybrid.step()
    hybrid.engine.cache.withdraw(hybrid.engine.scheduler.running[0])
    hybrid.settle()
    assert run(hybrid, "again", prompt) == 0


def test_the_state_of_a_preempted_request_is_dropped_with_what_is_wrong(hybrid: MockEngine) -> None:
    """It has no whole block to itself; its logits, not finite, are collected when it waits."""
    prompt = PROMPT[:38]
    for i in range(2):
        run(hybrid, f"before-{i}", (*prompt[:36], 90 + i), max_tokens=1)
    hybrid.submit("r", prompt, max_tokens=3)
    hybrid.step()
    hybrid.engine.scheduler.preempt(hybrid.engine.scheduler.running[0])
    hybrid.engine.cache.withdraw(hybrid.engine.scheduler.waiting[0])
    hybrid.settle()
    assert hybrid.messages["r"][0].num_cached == 36
    assert hybrid.engine.cache.counts.resumed_tokens == 36


def test_equal_prompts_that_fill_the_cache_run_one_after_another() -> None:
    """No block is left beside them for a copy."""
    for has_conv in (True, False):
        mock = cached_engine(has_conv=has_conv, num_kept=8, num_blocks=12)
        prompt = tuple(range(1, 41))
        for i in range(4):
            mock.submit(f"r{i}", prompt, max_tokens=4)
        mock.settle()
        assert all(mock.output[f"r{i}"] == expected_tokens(prompt, None, 4) for i in range(4))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_others", [0, 5])
def test_a_preempted_request_goes_on_behind_the_state_that_it_leaves(overlap: bool, num_others: int) -> None:
    """Also where so many run that none of theirs was kept on the way; the next one that it keeps takes its place."""
    mock = cached_engine(overlap=overlap, has_conv=True, num_kept=4, token_budget=18, max_sequences=6, num_blocks=400)
    for i in range(num_others):
        mock.submit(f"other-{i}", (50 + i, 1), max_tokens=200)
    mock.step_until(lambda: len(mock.output.get(f"other-{num_others - 1}", [])) == 30 or not num_others)
    mock.submit("r", PROMPT, max_tokens=30)
    mock.step()
    sequence, places = mock.engine.scheduler.running[-1], []
    for num_tokens in (1, 2, 13, 14, 28):
        mock.step_until(lambda num=num_tokens: sequence.is_running and len(mock.output.get("r", [])) >= num)
        places.append(sequence.num_computed)
        mock.engine.scheduler.preempt(sequence)
        mock.engine.check_integrity()
        mock.step_until(lambda: sequence.is_running)
    mock.step_until(lambda: "r" in mock.finished)
    assert mock.output["r"] == expected_tokens(PROMPT, None, 30)
    assert mock.engine.cache.counts.resumed_tokens == sum(places)
    mock.settle()


def test_a_preempted_request_that_is_aborted_leaves_no_state(hybrid: MockEngine) -> None:
    hybrid.submit("r", PROMPT, max_tokens=30)
    hybrid.step_until(lambda: len(hybrid.output.get("r", [])) == 6)
    num_kept = hybrid.engine.lines.num_kept
    hybrid.engine.scheduler.preempt(hybrid.engine.scheduler.running[0])
    hybrid.engine.handle(Abort("r"))
    hybrid.engine.lines.begin_step()
    assert (num_kept, hybrid.engine.lines.num_kept) == (1, 0)


def test_a_flood_does_not_take_another_tenants_states() -> None:
    mock = cached_engine(has_conv=True, num_kept=6, num_blocks=400)
    for i in range(3):
        run(mock, f"mine-{i}", PROMPT, tenant="small", max_tokens=1)
    for i in range(40):
        prompt = (50 + i, *range(i, i + 30))
        for j in range(2):
            run(mock, f"flood-{i}-{j}", prompt, tenant="large", max_tokens=1)
    assert mock.engine.lines.num_evicted and mock.engine.lines.num_kept == 6
    assert run(mock, "mine again", PROMPT, tenant="small") == 40


def test_dropped_states_are_free_and_change_nothing_that_runs(hybrid: MockEngine) -> None:
    for i in range(2):
        run(hybrid, f"before-{i}", PROMPT, max_tokens=1)
    hybrid.submit("runs", (*PROMPT, 5), max_tokens=30)
    hybrid.step_until(lambda: hybrid.output.get("runs"))
    hybrid.engine.cache.reset()
    hybrid.settle()
    assert hybrid.messages["runs"][0].num_cached == 40
    assert hybrid.output["runs"] == expected_tokens((*PROMPT, 5), None, 30)
    hybrid.engine.lines.begin_step()
    assert hybrid.engine.lines.num_used == 0
    assert run(hybrid, "again", PROMPT) == 0


def test_a_cache_smaller_than_a_prompt_finds_what_it_can() -> None:
    mock = cached_engine(num_blocks=13)  # the prompt and its answer, and no more
    for i in range(3):
        assert run(mock, f"r{i}", PROMPT) == (40 if i else 0)
        assert mock.output[f"r{i}"] == expected_tokens(PROMPT, None, 4)
    assert run(mock, "other", (90, *PROMPT)) == 0
    assert mock.output["other"] == expected_tokens((90, *PROMPT), None, 4)


# ---- everything at once


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_requests_one_after_another_find_what_a_list_of_all_prefixes_has(seed: int) -> None:
    """The shadow: every prefix of whole blocks that any request has computed, by all that it depends on."""
    rng = random.Random(seed)
    mock, known = cached_engine(num_blocks=2000, overlap=rng.random() < 0.5), set[Any]()
    for i in range(25):
        stems = rng.choices(((1, 2, 3, 4), (1, 2, 3, 5)), weights=(4, 1), k=8)
        prompt = tuple(itertools.chain(*stems))[: rng.randint(1, 30)]
        adapter = rng.choice((None, "a1", "a2"))
        start = rng.choice((0, 0, rng.randint(0, len(prompt)))) if adapter else 0
        scope = rng.choice((("x", ""), ("x", "s"), ("y", "")))
        num = rng.randint(1, 9)
        found = run(
            mock, f"r{i}", prompt, adapter, adapter_start=start, max_tokens=num, tenant=scope[0], cache_salt=scope[1]
        )
        tokens = [(token, adapter if j >= start else None) for j, token in enumerate((*prompt, *mock.output[f"r{i}"]))]
        prefixes = [(scope, tuple(tokens[:end])) for end in range(BLOCK, len(tokens), BLOCK)]
        expected = max((len(p[1]) for p in prefixes if p in known and len(p[1]) <= len(prompt)), default=0)
        assert found == min(expected, len(prompt) - 1)
        known |= {prefix for prefix in prefixes if len(prefix[1]) < len(tokens)}


@pytest.mark.parametrize("has_states", [False, True])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_operations_change_no_token(has_states: bool, seed: int) -> None:
    """Submits, aborts, preemptions, evictions of adapters, resets and logits that are not finite, in small pools, with
    slow copies to host memory and back. Blocks and lines that are free hold what no sequence has."""
    rng = random.Random(seed)
    mock = cached_engine(
        num_blocks=rng.randint(12, 60),
        num_rows=rng.randint(2, 6),
        max_sequences=rng.randint(1, 6),
        token_budget=rng.randint(6, 40),
        overlap=rng.random() < 0.5,
        host_rows=(rng.randint(2, 60), rng.randint(0, 8)) if rng.random() < 0.7 else None,
        most_copied=rng.randint(1, 9),
        **({"has_conv": True, "num_kept": rng.randint(1, 12)} if has_states else {}),
    )
    whole_run = mock.runner.run
    is_poisoned = False

    def run_or_poison(*args: Any) -> torch.Tensor:
        poison_free(mock)
        logits = whole_run(*args)
        return torch.full_like(logits, float("nan")) if is_poisoned else logits

    mock.runner.run = run_or_poison  # type: ignore[method-assign]
    requests: dict[str, tuple[tuple[int, ...], str | None, int]] = {}
    stems = [tuple(rng.randrange(90) for _ in range(30)) for _ in range(2)]
    operations = ("submit", "submit", "step", "step", "step", "read", "abort", "preempt", "drop", "poison", "copy")
    for i in range(150):
        is_poisoned = False
        match rng.choice(operations):
            case "submit":
                stem = rng.choice([*stems, *((*requests[name][0], *out) for name, out in mock.output.items())])
                prompt = stem[: rng.randint(1, 36)] + tuple(rng.randrange(90) for _ in range(rng.randint(0, 3)))
                adapter = rng.choice((None, None, "a1", "a2-2"))
                start = rng.choice((0, rng.randint(0, len(prompt)))) if adapter else 0
                num = rng.randint(1, 8)
                requests[f"r{i}"] = (prompt, adapter if start < len(prompt) else None, num)
                fields = {"tenant": rng.choice(("x", "y")), "cache_salt": rng.choice(("", "", "s"))}
                for name in (f"r{i}", f"equal-{i}")[: rng.randint(1, 2)]:
                    requests[name] = requests[f"r{i}"]
                    mock.submit(name, prompt, requests[name][1], max_tokens=num, adapter_start=start, **fields)
            case "step":
                mock.step()
            case "read":
                mock.loader.do_next()
            case "copy" if mock.runner.host_copies is not None:
                mock.runner.host_copies.is_slow = rng.random() < 0.7
                mock.runner.host_copies.end_next()
            case "abort" if requests:
                mock.engine.handle(Abort(rng.choice(list(requests))))
            case "preempt" if mock.engine.scheduler.running:
                mock.engine.scheduler.preempt(rng.choice(mock.engine.scheduler.running))
            case "drop":
                if rng.random() < 0.7:
                    mock.engine.handle(Evict(rng.choice(("a1", "a2-2"))))
                else:
                    mock.engine.cache.reset()
            case "poison" if rng.random() < 0.3:
                is_poisoned = True
                mock.step()
            case _:
                continue
        mock.engine.check_integrity()
    is_poisoned = False
    mock.settle()
    assert mock.engine.blocks.num_used == 0
    mock.engine.cache.reset()
    mock.engine.check_integrity()
    assert mock.engine.blocks.num_free == mock.engine.blocks.capacity
    mock.engine.lines.begin_step()
    assert mock.engine.lines.num_used == 0
    for name, (prompt, adapter, num) in requests.items():
        tokens = mock.output.get(name, [])
        assert tokens == expected_tokens(prompt, adapter, num)[: len(tokens)]
        if name in mock.finished and mock.finished[name].reason == "length":
            assert len(tokens) == num
