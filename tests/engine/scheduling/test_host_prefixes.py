"""The host tier of the prefix cache: what has left the device is found again, as it was, and nothing else is.

The mock model follows all that keys, values and states depend on; blocks and lines that are free hold nonsense.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from service.engine.ipc.messages import Abort, Evict, Pause
from tests.support.engine.engine_mock import MockEngine, MockHostCopies, expected_tokens, make_mock_engine, poison_free

BLOCK = 4
PROMPT = tuple(range(1, 42))  # ten blocks and a token
OTHER = tuple(range(42, 83))


def engine_of(has_states: bool = False, host_rows: tuple[int, int] = (200, 40), **config: Any) -> MockEngine:
    """Fourteen blocks, which a prompt and its answer nearly fill, and with states two lines for them."""
    config = {"num_blocks": 15, "token_budget": 64, "most_copied": 16} | config
    kept = {"has_conv": True, "num_kept": 2} if has_states else {"has_conv": False}
    mock = make_mock_engine(block_size_tokens=BLOCK, host_rows=host_rows, **kept, **config)
    whole_run = mock.runner.run

    def run(*args: Any) -> Any:
        poison_free(mock)
        return whole_run(*args)

    mock.runner.run = run  # type: ignore[method-assign]
    return mock


def copies_of(mock: MockEngine) -> MockHostCopies:
    assert mock.runner.host_copies is not None
    return mock.runner.host_copies


def run(mock: MockEngine, name: str, *args: Any, **fields: Any) -> int:
    """The cached tokens of a request that runs by itself, whose tokens must be right."""
    fields = {"max_tokens": 6} | fields
    mock.submit(name, *args, **fields)
    mock.settle()
    adapter = args[1] if len(args) > 1 else None
    assert mock.output[name] == expected_tokens(args[0], adapter, fields["max_tokens"])
    return mock.messages[name][0].num_cached


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_states", [False, True])
def test_a_prompt_that_left_the_device_is_found_in_host_memory(has_states: bool, overlap: bool) -> None:
    mock = engine_of(has_states, overlap=overlap)
    prompts = [tuple((i + 7 * j) % 90 for j in range(41)) for i in range(6)]
    for i, prompt in enumerate(prompts):
        assert run(mock, f"first-{i}", prompt, keep_at=(40,)) == 0
    num_computed = sum(len(batch.token_ids) for batch in mock.runner.batches)
    for i, prompt in enumerate(prompts):
        assert run(mock, f"again-{i}", prompt, keep_at=(40,)) == 40
    assert sum(len(batch.token_ids) for batch in mock.runner.batches) == num_computed + 6 * 6
    assert mock.engine.stats().prefix_cache_host_hit_tokens > 4 * 40
    assert mock.engine.stats().prefix_cache_host_hit_tokens <= mock.engine.stats().prefix_cache_hit_tokens


def test_without_the_tier_it_is_computed_again() -> None:
    off = make_mock_engine(block_size_tokens=BLOCK, num_blocks=15, token_budget=64, has_conv=False)
    for name, prompt in (("first", PROMPT), ("other", OTHER)):
        run(off, name, prompt)
    assert run(off, "again", PROMPT) < 12
    assert off.engine.stats().prefix_cache_host_bytes_total == 0


@pytest.mark.parametrize("has_states", [False, True])
def test_a_sequence_waits_for_slow_copies_and_others_run(has_states: bool) -> None:
    mock = engine_of(has_states, num_blocks=30)
    run(mock, "first", PROMPT, keep_at=(40,))
    for i in range(4):
        run(mock, f"other-{i}", (i, *OTHER), keep_at=(40,))
    mock.submit("runs", (9, 8, 7), max_tokens=30)
    mock.step()
    copies_of(mock).is_slow = True
    num_loaded = copies_of(mock).num_loaded
    for name in ("again", "too"):
        mock.submit(name, PROMPT, max_tokens=6)
    mock.step()
    assert copies_of(mock).num_loaded - num_loaded == 10 + has_states
    assert len(mock.output["runs"]) == 2 and not mock.output.get("again")
    mock.settle()
    assert [mock.messages[name][0].num_cached for name in ("again", "too")] == [40, 40]
    for name, prompt, num in (("again", PROMPT, 6), ("too", PROMPT, 6), ("runs", (9, 8, 7), 30)):
        assert mock.output[name] == expected_tokens(prompt, None, num)
    assert copies_of(mock).num_loaded - num_loaded == 10 + has_states, "what is on its way is not read twice"


def test_blocks_leave_from_the_end_where_one_was_computed_while_all_were_read() -> None:
    """Else a beginning is in host memory alone while the device has what comes behind it."""
    mock = engine_of(num_blocks=30)
    shared = tuple(range(1, 22))
    prompt = shared + tuple(expected_tokens(shared, None, 20))
    run(mock, "first", prompt)
    for i in range(4):
        run(mock, f"other-{i}", (i, *OTHER))
    mock.submit("runs", (9, 8, 7), max_tokens=30)
    mock.submit("computes", shared, max_tokens=4)
    mock.step_until(lambda: len(mock.output.get("computes", [])) >= 3)
    copies_of(mock).is_slow = True
    mock.submit("gone", prompt, max_tokens=6)
    mock.step()
    mock.engine.abort("gone")
    mock.settle()
    for i in range(1, 20):  # they take blocks one by one
        run(mock, f"new-{i}", tuple((50 + 3 * i + j) % 89 for j in range(8)), max_tokens=1)
        assert run(mock, f"again-{i}", prompt, max_tokens=2) == 40
        mock.submit(f"aside-{i}", (i, *OTHER), max_tokens=1)
        mock.settle()


def test_nothing_waits_where_nothing_else_runs() -> None:
    """The device waits for the copy itself: no step would come that could ask for it."""
    mock = engine_of()
    run(mock, "first", PROMPT)
    run(mock, "other", OTHER)
    copies_of(mock).is_slow = True
    mock.submit("again", PROMPT, max_tokens=1)
    mock.step()
    assert mock.messages["again"][0].num_cached == 40


@pytest.mark.parametrize("has_states", [False, True])
def test_what_is_written_over_while_it_is_copied_does_not_count(has_states: bool) -> None:
    mock = engine_of(has_states)
    copies_of(mock).is_slow = True
    run(mock, "first", PROMPT, keep_at=(40,))
    run(mock, "other", OTHER, keep_at=(40,))
    for _ in range(9):
        copies_of(mock).end_next()
    copies_of(mock).is_slow = False
    assert run(mock, "again", PROMPT, keep_at=(40,)) < 40


@pytest.mark.parametrize("how", ["reset", "evict", "abort"])
@pytest.mark.parametrize("has_states", [False, True])
def test_what_is_dropped_on_its_way_is_found_by_nobody(has_states: bool, how: str) -> None:
    mock = engine_of(has_states, num_blocks=30)
    for i in range(4):
        run(mock, f"first-{i}", (i, *PROMPT), "a1", keep_at=(40,))
        run(mock, f"other-{i}", (i, *OTHER), keep_at=(40,))
    mock.submit("runs", (9, 8, 7), max_tokens=20)
    mock.step()
    copies_of(mock).is_slow = True
    mock.submit("again", (0, *PROMPT), "a1")
    mock.step()
    assert copies_of(mock).num_loaded and not mock.output.get("again")
    match how:
        case "reset":
            mock.engine.cache.reset()
        case "evict":
            mock.engine.handle(Evict("a1"))
        case "abort":
            mock.engine.handle(Abort("again"))
    mock.settle()
    assert mock.output["runs"] == expected_tokens((9, 8, 7), None, 20)
    if how == "abort":
        assert run(mock, "at last", (0, *PROMPT), "a1", keep_at=(40,)) == 40
    else:
        assert mock.messages["again"][0].num_cached == 0
    assert run(mock, "base", (3, *OTHER), keep_at=(40,)) == (0 if how == "reset" else 40)


def test_a_pause_holds_no_blocks_for_one_that_is_gone() -> None:
    mock = engine_of(num_blocks=30)
    run(mock, "first", PROMPT)
    for i in range(4):
        run(mock, f"other-{i}", (i, *OTHER))
    mock.submit("runs", (9, 8, 7), max_tokens=20)
    mock.step()
    copies_of(mock).is_slow = True
    mock.submit("again", PROMPT)
    mock.step()
    num_used = mock.engine.blocks.num_used
    mock.engine.handle(Abort("again"))
    mock.engine.pauses.begin(Pause("pause", "keep", 60.0))
    mock.step()
    assert mock.engine.blocks.num_used <= num_used - 10
    mock.engine.pauses.end()
    mock.settle()
    assert mock.output["runs"] == expected_tokens((9, 8, 7), None, 20)
    assert run(mock, "at last", PROMPT) == 40


@pytest.mark.parametrize("has_states", [False, True])
def test_a_reset_drops_what_is_in_host_memory(has_states: bool) -> None:
    mock = engine_of(has_states)
    for i in range(4):
        run(mock, f"first-{i}", (i, *PROMPT), keep_at=(40,))
    assert mock.engine.stats().prefix_cache_host_bytes_used
    mock.engine.cache.reset()
    mock.engine.check_integrity()
    assert mock.engine.stats().prefix_cache_host_bytes_used == 0
    assert [run(mock, f"again-{i}", (i, *PROMPT), keep_at=(40,)) for i in range(4)] == [0] * 4


def test_tenants_salts_and_versions_do_not_find_each_others() -> None:
    mock = engine_of(host_rows=(400, 0))
    kinds = list(itertools.product(("x", "y"), ("", "s"), (None, "a1", "a2")))

    def found(name: str) -> list[int]:
        return [
            run(mock, f"{name}-{i}", PROMPT, adapter, tenant=tenant, cache_salt=salt)
            for i, (tenant, salt, adapter) in enumerate(kinds)
        ]

    assert found("first") == [0] * len(kinds)
    assert found("again") == [40] * len(kinds)
    mock.engine.handle(Evict("a1"))
    assert found("at last") == [0 if adapter == "a1" else 40 for _, _, adapter in kinds]


@pytest.mark.parametrize("has_states", [False, True])
def test_a_flood_does_not_take_another_tenants_rows(has_states: bool) -> None:
    mock = engine_of(has_states, host_rows=(40, 4))
    run(mock, "mine", PROMPT, tenant="small", keep_at=(40,))
    for i in range(20):
        run(mock, f"flood-{i}", (i, *OTHER), tenant="large", keep_at=(40,))
    assert mock.engine.stats().prefix_cache_host_bytes_used
    assert run(mock, "mine again", PROMPT, tenant="small", keep_at=(40,)) == 40


def test_rows_are_of_those_that_left_last() -> None:
    """Sixty rows, fifteen of them for what is on the device too."""
    mock = engine_of(host_rows=(60, 0))
    for i in range(9):
        run(mock, f"first-{i}", (i, *PROMPT[1:]), max_tokens=1)
    assert run(mock, "sixth", (6, *PROMPT[1:]), max_tokens=1) == 40
    assert run(mock, "first", (0, *PROMPT[1:]), max_tokens=1) == 0


def test_a_preempted_request_goes_on_from_host_memory() -> None:
    mock = engine_of()
    mock.submit("r", PROMPT, max_tokens=8)
    mock.step_until(lambda: len(mock.output.get("r", [])) == 4)
    mock.engine.scheduler.preempt(mock.engine.scheduler.running[0])
    mock.engine.cache.begin_step()
    assert mock.engine.blocks.num_free == mock.engine.blocks.capacity
    mock.settle()
    assert mock.output["r"] == expected_tokens(PROMPT, None, 8)
    assert run(mock, "other", OTHER) == 0
    assert run(mock, "again", PROMPT) == 40


def test_an_idle_tier_asks_the_device_nothing() -> None:
    mock = engine_of(num_blocks=100)
    mock.submit("r", (1, 2, 3), max_tokens=30)
    mock.step_until(lambda: mock.output.get("r"))
    num_saved = copies_of(mock).num_saved
    mock.settle()
    assert copies_of(mock).num_saved == num_saved and not copies_of(mock).num_loaded
