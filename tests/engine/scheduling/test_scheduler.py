"""Who runs when: chunks mixed with decode tokens, preemption, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adapters.errors import NotFound
from service.engine.ipc.messages import Abort, Evict, Finished, Load
from service.engine.loras.residency import AdapterState
from service.engine.sequences.sequence import Sequence
from tests.support.engine.engine_mock import MockEngine, expected_tokens, make_mock_engine


@pytest.fixture
def mocks() -> Iterator[list[MockEngine]]:
    """Engines that the test makes, closed at its end."""
    made: list[MockEngine] = []
    yield made
    for mock in made:
        mock.engine.close()


def prompt(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + i) % 90 for i in range(length))


def names_of(sequences: list[Sequence]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def state_of(mock: MockEngine, digest: str) -> AdapterState:
    assert mock.engine.adapter_loads.residency is not None
    return mock.engine.adapter_loads.residency.state_of(digest)


def test_prefill_chunks_share_the_step_with_decode_tokens(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(token_budget=8, max_sequences=4)
    mocks.append(mock)
    mock.submit("short", prompt(3), max_tokens=10)
    mock.step()
    mock.submit("long", prompt(20, 5), max_tokens=3)
    mock.settle()
    steps = [(record.num_decode_tokens, record.num_prefill_tokens) for record in mock.engine.step_records]
    assert steps[:5] == [(0, 3), (1, 7), (1, 7), (1, 6), (2, 0)]
    assert mock.output["short"] == expected_tokens(prompt(3), None, 10)
    assert mock.output["long"] == expected_tokens(prompt(20, 5), None, 3)


def test_no_step_exceeds_the_token_budget(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(token_budget=8, max_sequences=8, num_blocks=200)
    mocks.append(mock)
    for i in range(20):
        mock.submit(f"r{i}", prompt(1 + 3 * i, i), max_tokens=1 + i)
    mock.settle()
    assert max(record.num_tokens for record in mock.engine.step_records) == 8
    for i in range(20):
        assert mock.output[f"r{i}"] == expected_tokens(prompt(1 + 3 * i, i), None, 1 + i)


def test_sequences_join_and_leave_at_every_step(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(max_sequences=2)
    mocks.append(mock)
    for i in range(4):
        mock.submit(f"r{i}", prompt(2, i), max_tokens=2 + i)
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["r0", "r1"]
    mock.step_until(lambda: "r0" in mock.finished)
    mock.step()
    # r0 has left after two tokens, and r2 has its place; r1 has taken its third and last.
    assert names_of(mock.engine.scheduler.running) == ["r2"]
    mock.settle()
    assert {finished.reason for finished in mock.finished.values()} == {"length"}


def test_the_youngest_is_preempted_and_its_output_does_not_change(mocks: list[MockEngine]) -> None:
    # 11 blocks of 4 tokens: three sequences of up to 20 tokens cannot all stay.
    mock = make_mock_engine(num_blocks=12, token_budget=16)
    mocks.append(mock)
    for i in range(3):
        mock.submit(f"r{i}", prompt(6, 10 * i), max_tokens=14)
    order: list[str] = []
    while mock.engine.num_requests:
        order += [event.request_id for event in mock.step() if isinstance(event, Finished)]
    assert mock.engine.scheduler.num_preemptions > 0
    assert order[0] == "r0", "the oldest never yields"
    for i in range(3):
        assert mock.output[f"r{i}"] == expected_tokens(prompt(6, 10 * i), None, 14)


def test_a_preempted_request_goes_before_newer_ones(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_blocks=9, token_budget=16)
    mocks.append(mock)
    for i in range(2):
        mock.submit(f"r{i}", prompt(8, 10 * i), max_tokens=16)
    while mock.engine.scheduler.num_preemptions == 0:
        mock.step()
    mock.submit("newer", prompt(2, 50), max_tokens=2)
    assert names_of(mock.engine.scheduler.waiting) == ["r1", "newer"]
    mock.settle()
    assert mock.output["r1"] == expected_tokens(prompt(8, 10), None, 16)


@pytest.mark.parametrize(
    ("token_budget", "prompt_logprobs"), [(8, None), (64, None), (64, 0)], ids=["in-chunks", "at-once", "by-logits"]
)
def test_two_prompts_are_not_admitted_into_blocks_for_one(
    mocks: list[MockEngine], token_budget: int, prompt_logprobs: int | None
) -> None:
    """With prompt logprobs the first takes few blocks per step, and leaves budget: what it will take is not free."""
    mock = make_mock_engine(num_blocks=11, token_budget=token_budget, max_prompt_logits=3)
    mocks.append(mock)
    mock.submit("first", prompt(30), max_tokens=4, prompt_logprobs=prompt_logprobs)
    mock.submit("second", prompt(30, 1), max_tokens=4)
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["first"]
    mock.settle()
    assert mock.engine.scheduler.num_preemptions == 0


def test_nobody_takes_the_blocks_of_one_just_preempted(mocks: list[MockEngine]) -> None:
    """It is passed over in that very step, since somebody else waits for rows; it would be first were that one gone."""
    mock = make_mock_engine(num_blocks=25, num_rows=4, max_steps_waiting_for_rows=1, max_sequences=8)
    mocks.append(mock)
    for adapter in ("a1-2", "a2-2"):
        mock.engine.handle(Load(adapter))
    mock.step_until(lambda: {"a1-2", "a2-2"} == set(mock.rows.resident()))
    mock.submit("oldest", prompt(12), max_tokens=60)
    mock.submit("holds-rows", prompt(2), adapter="a1-2", max_tokens=60)
    mock.submit("waits-for-rows", prompt(2), adapter="a3-4", max_tokens=2)
    mock.submit("youngest", prompt(30), adapter="a2-2", max_tokens=60)
    mock.step()
    mock.load()
    mock.step_until(lambda: mock.engine.scheduler.blocks.num_free < 4)
    mock.submit("newcomer", prompt(14), max_tokens=2)
    mock.step_until(lambda: mock.engine.scheduler.num_preemptions)
    running = mock.engine.scheduler.running
    assert names_of(running) == ["oldest", "holds-rows"], "who was preempted goes before a newcomer"
    mock.engine.handle(Abort("waits-for-rows"))
    mock.step()
    assert "newcomer" not in names_of(mock.engine.scheduler.running)
    mock.settle()
    assert mock.output["youngest"] == expected_tokens(prompt(30), "a2-2", 60)
    assert mock.output["newcomer"] == expected_tokens(prompt(14), None, 2)


def test_a_slow_load_does_not_hold_up_the_others(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine()
    mocks.append(mock)
    mock.submit("waits", adapter="a1")
    for i in range(5):
        mock.submit(f"r{i}", prompt(3, i))
    for _ in range(10):
        mock.step()
    assert set(mock.finished) == {f"r{i}" for i in range(5)}
    mock.settle()
    assert mock.output["waits"] == expected_tokens((1, 2, 3), "a1", 4)


def with_a_long_prompt_at_the_head(mocks: list[MockEngine], *, has_rows: bool) -> MockEngine:
    """The request "long" needs more blocks than the two running ones leave. Its adapter has not been read yet;
    without `has_rows` there are none for it before "holds-rows" has ended. Small base requests come after it."""
    mock = make_mock_engine(num_blocks=24, num_rows=4)
    mocks.append(mock)
    mock.submit("holds-rows", prompt(3), adapter="a1-1" if has_rows else "a1-4", max_tokens=25)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("holds-blocks", prompt(28), max_tokens=8)
    mock.step()
    mock.submit("long", prompt(60), adapter="a2-2", max_tokens=4)
    mock.step()
    for i in range(3):
        mock.submit(f"small-{i}", prompt(3, i), max_tokens=2)
    scheduler = mock.engine.scheduler
    assert scheduler.waiting[0].request_id == "long"
    assert 2 * 3 <= scheduler.blocks.num_free < 16, "enough for the small ones, too few for the long one"
    return mock


@pytest.mark.parametrize("is_read", [False, True], ids=["being-read", "no-rows"])
def test_a_long_prompt_that_waits_for_its_adapter_keeps_no_blocks_from_the_others(
    mocks: list[MockEngine], is_read: bool
) -> None:
    mock = with_a_long_prompt_at_the_head(mocks, has_rows=False)
    if is_read:
        mock.load()
    for _ in range(3):
        mock.step()
    assert set(mock.finished) == {"small-0", "small-1", "small-2"}
    assert names_of(mock.engine.scheduler.waiting) == ["long"]
    mock.settle()
    assert mock.engine.scheduler.num_preemptions == 0
    assert mock.output["long"] == expected_tokens(prompt(60), "a2-2", 4)


def test_a_long_prompt_whose_adapter_is_there_is_overtaken_by_nobody_and_pins_no_rows(mocks: list[MockEngine]) -> None:
    mock = with_a_long_prompt_at_the_head(mocks, has_rows=True)
    mock.load()
    for _ in range(3):
        mock.step()
        assert not mock.rows.pins.get("a2-2")
        assert names_of(mock.engine.scheduler.waiting) == ["long", "small-0", "small-1", "small-2"]
    mock.settle()
    assert mock.output["long"] == expected_tokens(prompt(60), "a2-2", 4)


def test_only_so_many_adapters_are_read_ahead(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(max_loads_ahead=2)
    mocks.append(mock)
    for i in range(6):
        mock.submit(f"r{i}", adapter=f"a{i}")
    mock.step()
    assert [one for one in (f"a{i}" for i in range(6)) if state_of(mock, one) is AdapterState.READING] == ["a0", "a1"]
    mock.settle()
    assert sorted(mock.host.reads) == [f"a{i}" for i in range(6)]


def test_who_has_room_is_read_although_those_read_before_have_none(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=4, max_loads_ahead=2, max_sequences=8)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-3", max_tokens=60)
    mock.step_until(lambda: mock.engine.scheduler.running)
    for i in range(2, 5):
        mock.submit(f"large-{i}", adapter=f"a{i}-4", max_tokens=2)
    mock.step_and_load()
    mock.submit("small", adapter="a5-1", max_tokens=2)
    for _ in range(4):
        mock.step_and_load()
    assert "small" in mock.finished
    assert "holds" not in mock.finished
    assert mock.host.reads == ["a1-3", "a2-4", "a3-4", "a5-1", "a4-4"]
    held = [one for one in (f"a{i}-4" for i in range(2, 5)) if state_of(mock, one) is AdapterState.HOST]
    assert held == ["a2-4", "a4-4"], "the last one made way, not the first, and is not read again for nothing"
    mock.settle()
    for i in range(2, 5):
        assert mock.output[f"large-{i}"] == expected_tokens((1, 2, 3), f"a{i}-4", 2)


def test_who_has_reserved_rows_keeps_what_was_read_of_it(mocks: list[MockEngine]) -> None:
    """Else it would be read again when its rows are free at last, and nobody could run meanwhile. Its copy takes no
    place from those that are let in."""
    mock = make_mock_engine(num_rows=4, max_loads_ahead=1, max_steps_waiting_for_rows=2, max_len=200)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-3", max_tokens=40)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("waits", adapter="a2-4", max_tokens=2)
    for _ in range(4):
        mock.step_and_load()
    mock.submit("barred", adapter="a3-1", max_tokens=150)
    mock.submit("short", adapter="a4-1", max_tokens=2)
    mock.step_until(lambda: "short" in mock.finished)
    assert "holds" not in mock.finished
    mock.step_until(lambda: "holds" in mock.finished)
    assert mock.host.reads == ["a1-3", "a2-4", "a4-1", "a3-1"]
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["waits"]
    mock.settle()
    for name, adapter, num_tokens in (("waits", "a2-4", 2), ("barred", "a3-1", 150), ("short", "a4-1", 2)):
        assert mock.output[name] == expected_tokens((1, 2, 3), adapter, num_tokens)


def test_who_may_join_does_not_wait_behind_those_who_may_not(mocks: list[MockEngine]) -> None:
    """Long requests that a reservation keeps out have been read, and hold all places; a short one is let in."""
    mock = make_mock_engine(num_rows=8, max_loads_ahead=3, max_steps_waiting_for_rows=2, max_len=400, num_blocks=400)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-3", max_tokens=100)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("waits", adapter="a2-8", max_tokens=2)
    for _ in range(4):
        mock.step_and_load()
    for i in range(3, 7):
        mock.submit(f"barred-{i}", adapter=f"a{i}-1", max_tokens=300)
    for _ in range(3):
        mock.step_and_load()
    mock.submit("short", adapter="a7-1", max_tokens=2)
    for _ in range(5):
        mock.step_and_load()
    assert "short" in mock.finished
    assert names_of(mock.engine.scheduler.running) == ["holds"]
    mock.settle()


def test_large_ones_are_not_read_again_for_every_small_one_that_passes(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=8, max_loads_ahead=2, max_sequences=8, max_len=400, num_blocks=400)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-6", max_tokens=300)
    mock.step_until(lambda: mock.engine.scheduler.running)
    for i in (2, 3, 4):
        mock.submit(f"large-{i}", adapter=f"a{i}-8", max_tokens=2)
    for i in range(5, 25):
        mock.submit(f"small-{i}", adapter=f"a{i}-1", max_tokens=2)
        for _ in range(4):
            mock.step_and_load()
        assert f"small-{i}" in mock.finished
    mock.settle()
    assert sum(digest.endswith("-8") for digest in mock.host.reads) <= 6, "each at most twice"


def test_never_more_than_so_many_are_ahead(mocks: list[MockEngine]) -> None:
    """Also when one gives up its place: that is one place, not more."""
    mock = make_mock_engine(num_rows=12, max_loads_ahead=2, max_sequences=16, max_len=400, num_blocks=400)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-6", max_tokens=60)
    mock.step_until(lambda: mock.engine.scheduler.running)
    for i in (2, 3):
        mock.submit(f"large-{i}", adapter=f"a{i}-12", max_tokens=2)
    mock.step_and_load()
    for i in range(4, 10):
        mock.submit(f"small-{i}", adapter=f"a{i}-1", max_tokens=2)
    while mock.engine.num_requests:
        mock.step_and_load()
        wanted = ["a2-12", "a3-12", *(f"a{i}-1" for i in range(4, 10))]
        assert sum(state_of(mock, one) in (AdapterState.READING, AdapterState.HOST) for one in wanted) <= 2
    assert mock.host.reads.index("a9-1") < mock.host.reads.index("a2-12", 3), "the large ones were read again last"


def test_an_adapter_that_cannot_be_read_leaves_its_place_to_others(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=4, max_loads_ahead=1)
    mocks.append(mock)
    mock.host.broken.add("a3")
    mock.submit("holds", adapter="a1-3", max_tokens=20)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("large", adapter="a2-4", max_tokens=2)
    mock.step_and_load()
    mock.submit("broken", adapter="a3", max_tokens=2)
    mock.settle()
    assert mock.finished["broken"].error == "Adapter a3 could not be read: the file is damaged"
    assert mock.output["large"] == expected_tokens((1, 2, 3), "a2-4", 2)


def test_an_adapter_that_came_back_while_it_was_read_is_read_again(
    mocks: list[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploaded, deleted before the hint was followed, uploaded again, and asked for before the first news came."""
    mock = make_mock_engine()
    mocks.append(mock)
    asked = miss_in_store(monkeypatch, mock, times=1)
    mock.engine.handle(Load("a1"))
    mock.step()
    mock.load()
    mock.submit("r", adapter="a1", max_tokens=2)
    mock.settle()
    assert mock.output["r"] == expected_tokens((1, 2, 3), "a1", 2)
    assert asked == ["a1", "a1"]


def miss_in_store(monkeypatch: pytest.MonkeyPatch, mock: MockEngine, *, times: int) -> list[str]:
    """The store has nothing, so many times; returns the digests asked for, as they come."""
    read, asked = mock.host.get, []

    def get(digest: str) -> object:
        asked.append(digest)
        if len(asked) <= times:
            raise NotFound(f"The store has no adapter {digest}.")
        return read(digest)

    monkeypatch.setattr(mock.host, "get", get)
    return asked


def test_an_adapter_that_is_not_there_fails_in_the_end(
    mocks: list[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = make_mock_engine()
    mocks.append(mock)
    asked = miss_in_store(monkeypatch, mock, times=9)
    mock.submit("r", adapter="a1", max_tokens=2)
    mock.settle()
    assert "has no adapter" in (mock.finished["r"].error or "")
    assert asked == ["a1", "a1"]


def test_a_request_that_finds_no_rows_is_served_under_any_load_of_others(mocks: list[MockEngine]) -> None:
    """Two adapters of small rank keep the rows busy for ever; the one that needs them all must still get its turn."""
    mock = make_mock_engine(num_rows=4, max_sequences=4, max_steps_waiting_for_rows=5)
    mocks.append(mock)
    for adapter in ("a1-2", "a2-2"):
        mock.engine.handle(Load(adapter))
    mock.step_until(lambda: {"a1-2", "a2-2"} == set(mock.rows.resident()))
    mock.submit("small-0", adapter="a1-2", max_tokens=6)
    mock.submit("small-1", adapter="a2-2", max_tokens=6)
    mock.step()
    assert len(mock.engine.scheduler.running) == 2
    mock.submit("large", prompt(3), adapter="a3-4", max_tokens=3)
    for i in range(2, 400):
        mock.submit(f"small-{i}", prompt(2, i), adapter=f"a{1 + i % 2}-2", max_tokens=6)
        mock.step_and_load()
        if "large" in mock.finished:
            break
    assert mock.output["large"] == expected_tokens(prompt(3), "a3-4", 3)
    assert any(f"small-{j}" not in mock.finished for j in range(i)), "nobody came after it"
    mock.settle()


def with_one_that_waits_for_rows(mocks: list[MockEngine], adapter: str, *, holder: str, max_steps: int) -> MockEngine:
    """Four rows: "holds" runs with those of its adapter, that of "waits" has not been read yet, and a3-1 is idle on the
    device."""
    mock = make_mock_engine(num_rows=4, max_steps_waiting_for_rows=max_steps)
    mocks.append(mock)
    mock.submit("idle", adapter="a3-1", max_tokens=1)
    mock.settle()
    mock.submit("holds", adapter=holder, max_tokens=100)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("waits", adapter=adapter, max_tokens=2)
    return mock


def test_who_can_be_served_goes_on_while_somebody_waits_for_rows(mocks: list[MockEngine]) -> None:
    """The base model, and whoever cannot outlast the one that has the rows: it has to be waited for in any case."""
    mock = with_one_that_waits_for_rows(mocks, "a2-2", holder="a1-3", max_steps=1)
    mock.step()
    mock.load()
    for _ in range(2):
        mock.step()
    mock.submit("base", prompt(4), max_tokens=2)
    mock.submit("same", adapter="a1-3", max_tokens=2)
    mock.submit("same-for-long", adapter="a1-3", max_tokens=150)
    mock.submit("another", adapter="a3-1", max_tokens=2)
    mock.submit("another-for-long", adapter="a3-1", max_tokens=150)
    for _ in range(4):
        mock.step()
    assert {"base", "same", "another"} <= set(mock.finished)
    assert names_of(mock.engine.scheduler.running) == ["holds"]
    assert names_of(mock.engine.scheduler.waiting) == ["waits", "same-for-long", "another-for-long"]
    assert mock.rows.place_of("a3-1") is not None, "it had only to run"
    mock.settle()
    assert mock.output["waits"] == expected_tokens((1, 2, 3), "a2-2", 2)


def test_who_fits_beside_the_older_ones_waits_for_the_younger_ones_only(mocks: list[MockEngine]) -> None:
    """Short requests of seven adapters come without end; one that came before keeps its row for long."""
    mock = make_mock_engine(num_rows=8, max_sequences=8, max_steps_waiting_for_rows=2)
    mocks.append(mock)
    for i in range(1, 8):
        mock.submit(f"before-{i}", adapter=f"a{i}-1", max_tokens=1)
    mock.settle()
    mock.submit("older", adapter="a8-1", max_tokens=150)
    mock.submit("small-0", adapter="a1-1", max_tokens=10)
    mock.submit("small-1", adapter="a2-1", max_tokens=10)
    mock.step_until(lambda: len(mock.engine.scheduler.running) == 3)
    mock.submit("large", adapter="a9-6", max_tokens=2)
    mock.step()
    mock.load()
    for i in range(2, 50):
        mock.submit(f"small-{i}", adapter=f"a{1 + i % 7}-1", max_tokens=10)
        mock.step_and_load()
    assert "large" in mock.finished
    assert "older" not in mock.finished
    mock.settle()


def test_beside_the_older_ones_those_that_run_are_joined_as_others_are(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=4, max_sequences=8, max_steps_waiting_for_rows=1)
    mocks.append(mock)
    for adapter in ("a1-1", "a2-1"):
        mock.submit(f"before-{adapter}", adapter=adapter, max_tokens=1)
    mock.settle()
    mock.submit("older", adapter="a0-2", max_tokens=100)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("waits", adapter="a3-3", max_tokens=2)
    mock.submit("younger", adapter="a1-1", max_tokens=10)
    mock.step()
    assert len(mock.engine.scheduler.running) == 2
    mock.load()
    for _ in range(3):
        mock.step()
    for name, adapter in (("joins", "a1-1"), ("another", "a2-1")):
        mock.submit(name, adapter=adapter, max_tokens=40)
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["older", "younger", "joins", "another"]
    mock.settle()


def test_beside_younger_ones_only_those_go_on_that_outlast_nobody(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=4, max_steps_waiting_for_rows=1)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-3", max_tokens=20)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("waits", adapter="a2-3", max_tokens=2)
    mock.submit("younger", adapter="a1-3", max_tokens=60)
    mock.step()
    mock.load()
    mock.step_until(lambda: "holds" in mock.finished)
    (younger,) = mock.engine.scheduler.running
    num_left = younger.max_total - younger.num_computed
    # Their prompts of three tokens have to be computed too.
    mock.submit("as-long", adapter="a1-3", max_tokens=num_left - 3)
    mock.submit("shorter", adapter="a1-3", max_tokens=num_left - 4)
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["younger", "shorter"]
    mock.step_until(lambda: "waits" in mock.finished)
    assert "as-long" not in mock.output
    mock.settle()
    assert mock.output["waits"] == expected_tokens((1, 2, 3), "a2-3", 2)


def test_who_needs_one_row_does_not_wait_for_those_beside_whom_it_fits(mocks: list[MockEngine]) -> None:
    """Only the short one is in the way: nobody may join who outlasts it, but for those with the rows of the long one,
    beside whom there is room."""
    mock = make_mock_engine(num_rows=8, max_steps_waiting_for_rows=1, max_len=400, num_blocks=400)
    mocks.append(mock)
    for adapter in ("a1-4", "a2-1"):
        mock.engine.handle(Load(adapter))
    mock.step_until(lambda: {"a1-4", "a2-1"} == set(mock.rows.resident()))
    mock.submit("short", adapter="a1-4", max_tokens=10)
    mock.submit("long", adapter="a2-1", max_tokens=300)
    mock.step()
    mock.submit("waits", adapter="a3-7", max_tokens=2)
    for _ in range(2):
        mock.step_and_load()
    mock.submit("outlasts", adapter="a4-1", max_tokens=250)
    mock.submit("joins-short", adapter="a1-4", max_tokens=250)
    mock.submit("joins-long", adapter="a2-1", max_tokens=350)
    for _ in range(3):
        mock.step_and_load()
    assert names_of(mock.engine.scheduler.running) == ["short", "long", "joins-long"]
    mock.step_until(lambda: "short" in mock.finished)
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["long", "waits", "joins-long"]
    mock.settle()


def test_no_rows_are_reserved_while_who_waits_for_them_is_being_read(mocks: list[MockEngine]) -> None:
    """Read once, its copy given up for others, and the disk is slow now: rows that it could not use are not kept."""
    mock = with_one_that_waits_for_rows(mocks, "a2-4", holder="a1-2", max_steps=3)
    for _ in range(6):
        mock.step()
    mock.submit("long", adapter="a3-1", max_tokens=150)
    mock.step()
    assert names_of(mock.engine.scheduler.running) == ["holds", "long"]
    mock.load()
    mock.step()
    mock.submit("late", adapter="a4-1", max_tokens=150)
    for _ in range(3):
        mock.step_and_load()
    assert names_of(mock.engine.scheduler.running) == ["holds", "long"], "from now on they are reserved"
    mock.settle()
    assert mock.output["waits"] == expected_tokens((1, 2, 3), "a2-4", 2)


@pytest.mark.parametrize(("max_sequences", "num_rows"), [(1, 4), (3, 6)])
def test_who_is_read_only_while_there_is_room_is_served_under_any_load_of_others(
    mocks: list[MockEngine], max_sequences: int, num_rows: int
) -> None:
    """There is room for it only in the step in which somebody ends; all places ahead are taken then, its own copy has
    made way for theirs, and a younger one takes the rows."""
    mock = make_mock_engine(
        num_rows=num_rows, max_sequences=max_sequences, max_loads_ahead=1, max_steps_waiting_for_rows=4, num_blocks=400
    )
    mocks.append(mock)
    for i in range(max_sequences):
        mock.engine.handle(Load(f"a{10 + i}-1"))
    mock.step_until(lambda: len(mock.rows.resident()) == max_sequences)
    for i in range(max_sequences):
        mock.submit(f"s-{i}", adapter=f"a{10 + i}-1", max_tokens=6)
    mock.step()
    assert len(mock.engine.scheduler.running) == max_sequences
    mock.submit("large", adapter="a2-4", max_tokens=2)
    for i in range(max_sequences, 60):
        mock.submit(f"s-{i}", adapter=f"a{10 + i}-1", max_tokens=6)
        if i > 2 * max_sequences:
            for _ in range(max(6 // max_sequences, 2)):
                mock.step_and_load()
    assert "large" in mock.finished
    mock.settle()


# ---- what is read, and in which order


def test_nothing_is_read_for_those_that_have_left(mocks: list[MockEngine]) -> None:
    """Clients that give up and ask again for something else must not queue behind what they gave up."""
    mock = make_mock_engine(max_loads_ahead=2)
    mocks.append(mock)
    mock.submit("slow", adapter="a0")
    for i in range(1, 20):
        mock.submit(f"gone-{i}", adapter=f"a{i}")
        mock.step()
        mock.engine.handle(Abort(f"gone-{i}"))
    mock.submit("back", adapter="a7", max_tokens=2)
    mock.submit("live", adapter="a99", max_tokens=2)
    mock.step()
    mock.settle()
    assert mock.output["live"] == expected_tokens((1, 2, 3), "a99", 2)
    assert mock.output["back"] == expected_tokens((1, 2, 3), "a7", 2)
    assert mock.host.reads == ["a0", "a7", "a99"]


def test_what_was_not_read_for_somebody_who_left_is_read_ahead_for_the_next(mocks: list[MockEngine]) -> None:
    """It has no room yet: it is read ahead once, and that has not happened."""
    mock = make_mock_engine(num_rows=4)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-3", max_tokens=60)
    mock.step_until(lambda: mock.engine.scheduler.running)
    mock.submit("slow", adapter="a0")
    mock.submit("gone", adapter="a2-4")
    mock.step()
    mock.engine.handle(Abort("gone"))
    mock.load()
    mock.submit("again", adapter="a2-4", max_tokens=2)
    for _ in range(2):
        mock.step_and_load()
    assert mock.host.reads == ["a1-3", "a0", "a2-4"]
    assert "holds" not in mock.finished
    mock.settle()
    assert mock.output["again"] == expected_tokens((1, 2, 3), "a2-4", 2)


def test_hints_wait_until_no_request_waits_to_be_read_for(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(max_loads_ahead=1)
    mocks.append(mock)
    for i in range(6):
        mock.engine.handle(Load(f"a{i}"))
    for adapter in ("a8", "a9"):
        mock.submit(adapter, adapter=adapter, max_tokens=2)
    mock.step_until(lambda: len(mock.host.reads) == 8)
    assert mock.host.reads == ["a8", "a9", "a0", "a1", "a2", "a3", "a4", "a5"]
    mock.settle()
    assert mock.output["a9"] == expected_tokens((1, 2, 3), "a9", 2)


def test_hints_read_no_more_ahead_for_those_that_wait(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=4, max_loads_ahead=2)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-4", max_tokens=30)
    mock.step_until(lambda: mock.engine.scheduler.running)
    for i in range(2, 9):
        mock.submit(f"waits-{i}", adapter=f"a{i}-4", max_tokens=2)
        mock.engine.handle(Load(f"a{i}-4"))
    for _ in range(12):
        mock.step_and_load()
    assert mock.host.reads == ["a1-4", "a2-4", "a3-4"]
    mock.settle()


def test_a_request_waits_for_one_hint_at_most(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine()
    mocks.append(mock)
    for i in range(6):
        mock.engine.handle(Load(f"a{i}"))
    mock.step()
    mock.submit("r", adapter="a9", max_tokens=2)
    mock.step()
    mock.load()
    mock.step_until(lambda: len(mock.host.reads) == 7)
    assert mock.host.reads[:2] == ["a0", "a9"]
    mock.settle()


def test_hints_of_what_is_there_or_gone_read_nothing(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine()
    mocks.append(mock)
    for adapter in ("a0", "a1", "a2", "a0"):
        mock.engine.handle(Load(adapter))
        mock.step()
    mock.engine.handle(Evict("a1"))
    mock.load()
    mock.step_until(lambda: mock.rows.place_of("a2") is not None)
    mock.step_and_load()
    assert mock.host.reads == ["a0", "a2"]
    assert not mock.engine.adapter_loads.num_wanted


def test_where_nothing_can_be_read_the_request_fails_and_the_engine_goes_on(
    mocks: list[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = make_mock_engine()
    mocks.append(mock)

    def refuse(_work: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(mock.loader, "submit", refuse)
        mock.submit("r", adapter="a1", max_tokens=2)
        mock.settle()
    assert mock.finished["r"].error == "Adapter a1 could not be read: can't start new thread"
    assert not mock.finished["r"].client_fault
    mock.submit("again", adapter="a1", max_tokens=2)
    mock.settle()
    assert mock.output["again"] == expected_tokens((1, 2, 3), "a1", 2)


def test_a_step_in_which_no_rows_change_hands_asks_for_no_room(
    mocks: list[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds may wait, for one adapter or for one each."""
    mock = make_mock_engine(num_rows=4, max_sequences=8, max_steps_waiting_for_rows=10**6)
    mocks.append(mock)
    mock.submit("holds", adapter="a1-4", max_tokens=60)
    mock.step_until(lambda: mock.engine.scheduler.running)
    for i in range(40):
        mock.submit(f"same-{i}", adapter="a2-4", max_tokens=1)
        mock.submit(f"other-{i}", adapter=f"a{10 + i}-1", max_tokens=1)
    for _ in range(4):
        mock.step_and_load()
    asked: list[object] = []
    has_room = mock.rows.has_room
    monkeypatch.setattr(mock.rows, "has_room", lambda rows: asked.append(rows) or has_room(rows))
    for _ in range(5):
        mock.engine.step()
        mock.loader.do_all()
    assert not asked
    mock.settle()


def test_who_lacks_blocks_only_does_not_pin_and_unpin_in_every_step(
    mocks: list[MockEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change of pins makes the room of all that wait unknown."""
    mock = with_a_long_prompt_at_the_head(mocks, has_rows=True)
    mock.load()
    mock.step()
    assert mock.host.reads[-1] == "a2-2"
    pinned: list[str] = []
    monkeypatch.setattr(mock.rows, "pin", pinned.append)
    for _ in range(3):
        mock.step()
    assert not pinned
    monkeypatch.undo()
    mock.settle()
    assert mock.output["long"] == expected_tokens(prompt(60), "a2-2", 4)


def test_rows_in_use_are_never_taken_and_idle_ones_are(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_rows=2, max_sequences=8)
    mocks.append(mock)
    for i in range(6):
        mock.submit(f"r{i}", prompt(3, i), adapter=f"a{i}", max_tokens=3 + i)
    mock.settle()  # checks after every step that running sequences have their rows
    for i in range(6):
        assert mock.output[f"r{i}"] == expected_tokens(prompt(3, i), f"a{i}", 3 + i)
    assert mock.rows.loads == 6


def test_a_request_without_any_room_ever_is_refused_not_queued(mocks: list[MockEngine]) -> None:
    mock = make_mock_engine(num_blocks=5)
    mocks.append(mock)
    mock.submit("fits", prompt(10), max_tokens=6)
    mock.submit("too-long", prompt(10), max_tokens=7)
    mock.settle()
    assert mock.finished["fits"].reason == "length"
    assert mock.finished["too-long"].client_fault
    assert "16" in (mock.finished["too-long"].error or "")
