"""Who may hurt whom: places, tokens and rows between tenants and adapters, counted in steps."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.ipc.messages import Load
from tests.support.engine.engine_mock import MockEngine, expected_tokens, make_mock_engine
from tests.support.engine.step_counts import CountedSteps
from tests.support.tiers import examples

PLACES, QUEUED = 64, 256


def flood(*, overlap: bool, num_blocks: int = 2048, num_flood_adapters: int = 1, num_rows: int = 64) -> MockEngine:
    """All places run, and many more requests wait, of one tenant."""
    mock = make_mock_engine(
        num_blocks=num_blocks, num_rows=num_rows, max_sequences=PLACES, token_budget=128, overlap=overlap
    )
    for adapter in {f"a{i % num_flood_adapters}" for i in range(PLACES)}:
        mock.engine.handle(Load(adapter))
    mock.step_until(lambda: len(mock.rows.residents) == num_flood_adapters)
    for i in range(PLACES + QUEUED):
        mock.submit(f"flood-{i}", (i % 90, 2), f"a{i % num_flood_adapters}", max_tokens=100, tenant="flood")
    for _ in range(6):
        mock.step()
    assert running_of(mock) == {"flood": PLACES}
    return mock


def running_of(mock: MockEngine) -> Counter[str]:
    """Running requests by tenant."""
    return Counter(sequence.request.tenant for sequence in mock.engine.scheduler.running)


def steps_to_first_token(mock: MockEngine, name: str, *, steps_per_read: int = 1, max_steps: int = 40) -> int:
    """Calls of `step` until the first token is told; what is to be read takes so many of them."""
    for num_steps in range(1, max_steps + 1):
        mock.step()
        if mock.output.get(name):
            return num_steps
        if num_steps % steps_per_read == 0:
            mock.loader.do_next()
    raise AssertionError("no token came")


# ---- a flood


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tenant", ["other", "flood"], ids=["another-tenant", "another-adapter"])
@pytest.mark.parametrize(
    ("where", "steps_per_read", "most_steps"), [("device", 1, 3), ("host", 100, 5), ("disk", 4, 8)]
)
def test_one_of_another_tenant_or_adapter_does_not_wait_behind_a_flood(
    where: str, steps_per_read: int, most_steps: int, tenant: str, overlap: bool
) -> None:
    """What host memory has needs no loader, however slow that is."""
    mock = flood(overlap=overlap)
    if where == "device":
        mock.engine.handle(Load("a7"))
        mock.step_until(lambda: "a7" in mock.rows.residents)
    if where == "host":
        mock.host.memory.add("a7")
    mock.submit("other", tuple(range(20)), "a7", tenant=tenant)
    assert steps_to_first_token(mock, "other", steps_per_read=steps_per_read) <= most_steps
    assert mock.engine.scheduler.num_preemptions == 1
    mock.step_until(lambda: "other" in mock.finished)
    assert mock.output["other"] == expected_tokens(tuple(range(20)), "a7", 4)
    mock.engine.close()


@pytest.mark.parametrize("tenant", ["other", "flood"], ids=["another-tenant", "another-adapter"])
@pytest.mark.parametrize(
    ("places", "prompts_apart", "most_p50", "most_p90"),
    [(32, False, 1.8, 4.0), (32, True, 1.3, 3.0), (64, False, 2.6, 6.5), (64, True, 1.6, 3.2)],
)
def test_a_newcomer_s_first_token_takes_few_tokens_beside_its_own(
    places: int, prompts_apart: bool, most_p50: float, most_p90: float, tenant: str
) -> None:
    """What steps compute from its coming, in the middle of one, to its first token, in units of what an idle server
    computes: of the step in flight, which now and then has prompts of the flood; and where prompts have no step apart,
    of the flood's tokens in the step of its own."""
    chance = random.Random(1)
    steps = CountedSteps(64, max_sequences=places, num_blocks=2048, prompts_apart=prompts_apart)
    num_prompt, costs = 64, list[float]()
    for number in range(200):
        for _ in range(chance.randrange(5, 30) if number else 200):
            while steps.num_open < 3 * places:
                steps.submit(f"flood-{len(steps.requests)}", num_prompt, 96, "a1", tenant="flood")
            in_flight = sum(chunk.num_tokens for chunk in steps.step())
        other = steps.submit(f"other-{number}", num_prompt, 1, "a2", tenant=tenant)
        num_tokens = in_flight / 2
        while other.first_token < 0:
            num_tokens += sum(chunk.num_tokens for chunk in steps.step())
        costs.append(num_tokens / num_prompt)
    costs.sort()
    assert costs[100] <= most_p50
    assert costs[180] <= most_p90


@pytest.mark.parametrize("overlap", [False, True])
def test_newcomers_have_every_second_step_at_most(overlap: bool) -> None:
    """A newcomer in each step, of another adapter each: the flood's running ones have a token in every second one."""
    mock = flood(overlap=overlap, num_rows=128)
    adapters = [f"a{i}" for i in range(10, 50)]
    mock.host.memory.update(adapters)
    kept = mock.engine.scheduler.running[:8]
    before = {one.request_id: len(one.token_ids) for one in kept}
    num_apart = 0
    for number, adapter in enumerate(adapters):
        mock.submit(f"other-{number}", tuple(range(20)), adapter, max_tokens=1, tenant="other")
        mock.step()
        num_apart += not mock.engine.step_records[-1].num_decode_tokens
    assert num_apart >= 10
    for one in kept:
        assert len(one.token_ids) - before[one.request_id] >= len(adapters) // 2 - 1
    mock.engine.close()


def test_a_prompt_has_no_step_to_itself_without_a_flood_or_beyond_a_step() -> None:
    steps = CountedSteps(64, max_sequences=8, token_budget=64, prompts_apart=True, checks=True)
    for name in ("a", "b"):
        steps.submit(name, 4, 200, None, tenant=name)
    steps.step()
    steps.submit("c", 20, 200, None, tenant="c")
    assert len(steps.step()) == 3, "nobody has more than half"
    for i in range(5):
        steps.submit(f"a-{i}", 2, 200, None, tenant="a")
    steps.step()
    steps.submit("long", 64, 200, "a1", tenant="d")
    while steps.requests["long"].joined < 0:
        chunks = steps.step()
    assert {chunk.num_tokens for chunk in chunks} == {1, 64 - 7}


@pytest.mark.parametrize("overlap", [False, True])
def test_who_yields_to_others_tells_the_same_tokens(overlap: bool) -> None:
    """All of the flood, whenever it was preempted, with a token in flight or without."""
    mock = make_mock_engine(num_blocks=400, max_sequences=6, token_budget=24, overlap=overlap)
    for i in range(16):
        mock.submit(f"flood-{i}", (i, 2), "a1", max_tokens=20, tenant="flood")
    for i in range(12):
        for _ in range(4):
            mock.step_and_load()
        mock.submit(f"other-{i}", (i, 3), f"a{2 + i % 3}", max_tokens=5, tenant=f"tenant-{i % 4}")
    mock.settle()
    assert mock.engine.scheduler.num_preemptions >= 4
    for i in range(16):
        assert mock.output[f"flood-{i}"] == expected_tokens((i, 2), "a1", 20)
    for i in range(12):
        assert mock.output[f"other-{i}"] == expected_tokens((i, 3), f"a{2 + i % 3}", 5)
    mock.engine.close()


def test_a_tenant_alone_has_every_place_and_nobody_yields() -> None:
    mock = flood(overlap=False)
    mock.settle()
    assert mock.engine.scheduler.num_preemptions == 0
    sizes = [record.num_sequences for record in mock.engine.step_records if record.num_decode_tokens]
    assert sorted(sizes)[len(sizes) // 2] == PLACES
    mock.engine.close()


def test_blocks_that_a_flood_holds_are_given_up_to_another() -> None:
    """Places are free, blocks are not."""
    mock = make_mock_engine(num_blocks=64, max_sequences=32, token_budget=64)
    for i in range(32):
        mock.submit(f"flood-{i}", tuple(range(i, i + 12)), max_tokens=40, tenant="flood")
    for _ in range(20):
        mock.step()
    mock.submit("other", tuple(range(60)), max_tokens=2, tenant="other")
    assert steps_to_first_token(mock, "other") <= 3
    mock.settle()
    for i in range(32):
        assert mock.output[f"flood-{i}"] == expected_tokens(tuple(range(i, i + 12)), None, 40)
    mock.engine.close()


def test_who_has_yielded_joins_again_when_its_token_in_flight_is_known() -> None:
    """Two of different adapters yield for blocks. What is left would do for the smaller one, in the same step."""
    mock = make_mock_engine(num_blocks=26, max_sequences=8, token_budget=128, overlap=True)
    mock.engine.handle(Load("a1"))
    mock.step_until(lambda: "a1" in mock.rows.residents)
    small, large = (1, 2, 3, 4), tuple(range(40))
    flood = {"a": (small, "a1"), "large": (large, "a1"), "b": (small, None), "small": (small, None)}
    for name, (prompt, adapter) in flood.items():
        mock.submit(name, prompt, adapter, max_tokens=8, tenant="flood")
    mock.submit("waits", large, max_tokens=8, tenant="flood")
    for _ in range(3):
        mock.step()
    mock.submit("other", tuple(range(68)), max_tokens=2, tenant="other")
    mock.step()
    assert mock.engine.scheduler.num_preemptions == 2
    running = {sequence.request_id for sequence in mock.engine.scheduler.running}
    assert running == {"a", "b", "other"}
    mock.settle()
    for name, (prompt, adapter) in flood.items():
        assert mock.output[name] == expected_tokens(prompt, adapter, 8)
    mock.engine.close()


def test_rows_that_a_flood_holds_are_given_up_to_another() -> None:
    """Each row is in use by the flood; its own ninth adapter waits, the other tenant's does not."""
    mock = flood(overlap=False, num_flood_adapters=8, num_rows=8)
    mock.submit("ninth", (1, 2), "a20", tenant="flood")
    mock.submit("other", (1, 2), "a21-2", tenant="other")
    assert steps_to_first_token(mock, "other", steps_per_read=2) <= 8
    assert "ninth" not in mock.output
    mock.engine.close()


def test_rows_that_one_tenant_waits_for_are_not_kept_from_another() -> None:
    """The flood's long requests of a third adapter are; the other tenant's is as long."""
    mock = make_mock_engine(num_rows=8, max_steps_waiting_for_rows=2, max_len=400, num_blocks=400)
    mock.submit("holds", (1, 2), "a1-3", max_tokens=100, tenant="flood")
    mock.step_until(lambda: mock.output.get("holds"))
    mock.submit("waits", (1, 2), "a2-6", max_tokens=2, tenant="flood")
    for _ in range(5):
        mock.step_and_load()
    for tenant in ("flood", "other"):
        mock.submit(tenant, (1, 2), "a3-1", max_tokens=300, tenant=tenant)
    assert steps_to_first_token(mock, "other") <= 3
    assert "flood" not in mock.output
    mock.settle()
    mock.engine.close()


def test_what_waits_to_be_read_is_read_for_each_tenant_in_turn() -> None:
    mock = make_mock_engine(num_rows=64, max_sequences=32, token_budget=32, max_loads_ahead=2)
    for i in range(30):
        mock.submit(f"flood-{i}", (1,), f"a{i}", tenant="flood")
    mock.submit("other", (1,), "a50", tenant="other")
    mock.step_until(lambda: "other" in mock.output)
    assert mock.host.reads.index("a50") <= 1
    mock.engine.close()


# ---- parts


def test_places_are_divided_by_weight_and_then_between_adapters() -> None:
    steps = CountedSteps(64, max_sequences=24, token_budget=64, checks=True)
    for i in range(60):
        steps.submit(f"one-{i}", 4, 400, f"a{i % 2}", tenant="one", weight=1.0)
    for _ in range(5):
        steps.step()
    assert len(steps.scheduler.running) == 24
    for i in range(60):
        steps.submit(f"two-{i}", 4, 400, None if i % 3 else "a5", tenant="two", weight=2.0)
    for _ in range(10):
        steps.step()
    num_preemptions = steps.scheduler.num_preemptions
    for _ in range(60):
        steps.step()
    running = Counter((one.request.tenant, one.adapter) for one in steps.scheduler.running)
    assert running == {("one", "a0"): 4, ("one", "a1"): 4, ("two", None): 8, ("two", "a5"): 8}
    assert steps.scheduler.num_preemptions == num_preemptions, "nobody comes and goes"


@pytest.mark.parametrize(("num_places", "weight"), [(1, 8.0), (4, 8.0), (8, 100.0)])
def test_a_weight_of_many_times_another_s_leaves_that_its_part(num_places: int, weight: float) -> None:
    """Also with requests that are longer than a step, which run to their end then, once begun."""
    steps = CountedSteps(8, max_sequences=num_places, token_budget=32)
    for i in range(900):
        steps.submit(f"heavy-{i}", 4, 60, tenant="heavy", weight=weight)
    for i in range(40):
        steps.submit(f"light-{i}", 4, 100, tenant="light", weight=1.0)
    tokens: Counter[str] = Counter()
    for _ in range(6_000):
        for chunk in steps.step():
            tokens[chunk.sequence.request.tenant] += chunk.num_tokens
    steps.scheduler.check_integrity()
    part = tokens["light"] / tokens.total() * (1 + weight)
    assert 0.7 < part < 104 / 64 + 0.05, "a request has 104 tokens, and a deficit is told up to 32 either way"
    light = [one for name, one in steps.requests.items() if name.startswith("light") and one.joined >= 0]
    assert tokens["light"] <= 108 * len(light), "no answer is computed again"
    assert steps.scheduler.num_preemptions <= len(light) + 3, "nobody comes and goes"


def test_who_is_owed_a_place_keeps_it_although_another_of_its_requests_is_given_up() -> None:
    steps = CountedSteps(8, max_sequences=4, token_budget=32, checks=True)
    for i in range(200):
        steps.submit(f"heavy-{i}", 4, 60, tenant="heavy", weight=8.0)
    for i in range(40):
        steps.submit(f"light-{i}", 4, 100, tenant="light", weight=1.0)
    light = [one for name, one in steps.requests.items() if name.startswith("light")]
    while not light[0].sequence.is_running:
        steps.step()
    steps.scheduler.remove(light.pop().sequence)
    while light[0].ended < 0:
        steps.step()
        assert light[0].ended >= 0 or light[0].sequence.is_running


@pytest.mark.parametrize(("heavy", "budget"), [(12.0, 32), (12.0, 128), (60.0, 32)])
def test_many_of_little_weight_take_turns_and_leave_another_its_part(heavy: float, budget: int) -> None:
    """However much longer their requests are than what a deficit can pay for."""
    steps, num_sent = CountedSteps(8, max_sequences=4, token_budget=budget, checks=True), Counter[str]()

    def submit(tenant: str) -> None:
        weight, num_output = (heavy, 60) if tenant == "heavy" else (1.0, 400)
        steps.submit(f"{tenant}-{num_sent[tenant]}", 4, num_output, tenant=tenant, weight=weight)
        num_sent[tenant] += 1

    light = [f"light{i}" for i in range(12)]
    for tenant in [*light, *light, *["heavy"] * 20]:
        submit(tenant)
    tokens, num_ended = Counter[str](), Counter[str]()
    for _ in range(12_000):
        for chunk in steps.step():
            one = chunk.sequence
            tokens[one.request.tenant] += chunk.num_tokens
            if len(one.token_ids) == one.max_total:
                num_ended[one.request.tenant] += 1
                submit(one.request.tenant)
    part = tokens["heavy"] / tokens.total()
    assert part >= min(heavy / (heavy + 12), 3 / 4) - 0.02, "one place is the others', however little is due to them"
    counts = [num_ended[one] for one in light]
    assert max(counts) <= min(counts) + 1, num_ended
    assert min(counts) > 0


def test_tokens_of_prompts_are_divided_although_one_sends_long_ones() -> None:
    steps = CountedSteps(8, max_sequences=8, token_budget=64, checks=True)
    for i in range(4):
        steps.submit(f"long-{i}", 2000, 4, tenant="one")
    for _ in range(3):
        steps.step()
    tokens: Counter[str] = Counter()
    for i in range(60):
        if i % 2 == 0:
            steps.submit(f"short-{i}", 60, 1, tenant="two")
        for chunk in steps.step():
            tokens[chunk.sequence.request.tenant] += chunk.num_tokens
    waits = [one.first_token - one.came for one in steps.requests.values() if one.sequence.num_prompt == 60]
    assert max(waits) <= 3
    assert tokens["two"] == pytest.approx(tokens["one"], rel=0.15)


def test_who_asked_for_little_has_no_claim_to_what_was_not_asked_for() -> None:
    """One token a step for long, and then a flood of prompts: the other tenant's newcomer waits for one step of it."""
    steps = CountedSteps(8, max_sequences=16, token_budget=64, checks=True)
    steps.submit("little", 4, 900, tenant="little")
    steps.submit("much", 6000, 1, tenant="much")
    for _ in range(80):
        steps.step()
    for i in range(6):
        steps.submit(f"little-{i}", 600, 1, tenant="little")
    steps.submit("newcomer", 30, 1, tenant="much")
    for _ in range(4):
        steps.step()
    assert sum(one.num_computed for one in steps.scheduler.running if one.request.tenant == "much") > 0
    before = {one.request_id: one.num_computed for one in steps.scheduler.running}
    for _ in range(20):
        steps.step()
    much = steps.requests["much"].sequence
    assert much.num_computed - before["much"] >= 20 * 64 * 0.4


# ---- nobody starves


@pytest.mark.parametrize("by", ["tenant", "adapter"])
def test_who_became_active_later_does_not_go_first(by: str) -> None:
    """Newcomers without end, and two places: all have them in the order in which they came."""
    steps = CountedSteps(64, max_sequences=2, token_budget=16, checks=True)
    names = [f"a{i}" for i in range(12)]
    if by == "adapter":
        for name in names:
            steps.adapter_loads.hint(name)
        while len(steps.rows.residents) < len(names):
            steps.step()
    for name in names:
        steps.submit(name, 4, 20, *([name] if by == "adapter" else []), **({"tenant": name} if by == "tenant" else {}))
        steps.step()
    while steps.num_open:
        steps.step()
    joined = [steps.requests[name].joined for name in names]
    assert joined == sorted(joined)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(25), deadline=None)
def test_the_first_of_a_flow_has_its_place_within_the_bound(seed: int) -> None:
    """Random floods, short requests without end, newcomers in each step; all tenants equal, all rows there. The bound
    is that of `fair_queue.py`, in tokens computed."""
    rng = random.Random(seed)
    places, budget, longest = rng.randint(2, 8), rng.choice((16, 32, 64)), rng.choice((6, 20, 40))
    steps = CountedSteps(64, max_sequences=places, token_budget=budget, num_blocks=4000, checks=True)
    num_tenants, num_adapters = rng.randint(1, 4), rng.randint(1, 6)
    adapters = [None, *(f"a{i}" for i in range(1, num_adapters))]
    watched, computed_at, most_flows = [], {}, 0
    for _ in range(150):
        for _ in range(rng.choice((0, 1, 1, 4))):
            tenant, adapter = f"t{rng.randrange(num_tenants)}", rng.choice(adapters)
            is_first = not any(
                (one.request.tenant, one.adapter) == (tenant, adapter)
                for one in [*steps.scheduler.waiting, *steps.scheduler.running]
            )
            num_prompt = rng.randint(1, longest - 1)
            name = f"r{len(steps.requests)}"
            steps.submit(name, num_prompt, rng.randint(1, longest - num_prompt), adapter, tenant=tenant)
            if is_first and (adapter is None or adapter in steps.rows.residents):
                watched.append(name)
                computed_at[name] = steps.num_computed
        most_flows = max(most_flows, num_tenants * len(adapters))
        steps.step()
        for name in watched.copy():
            bound = most_flows * (2 * budget + longest) + places * longest
            if steps.requests[name].joined >= 0:
                watched.remove(name)
                assert steps.num_computed - computed_at[name] <= bound + budget
            else:
                assert steps.num_computed - computed_at[name] <= bound
    while steps.num_open:
        steps.step()
    assert all(one.ended >= 0 for one in steps.requests.values())


@pytest.mark.parametrize("seed", range(4))
def test_under_any_load_with_too_few_rows_everybody_ends(seed: int) -> None:
    """Adapters of all sizes, and of all tenants; the longest wait for rows is bounded by what runs."""
    rng = random.Random(seed)
    steps = CountedSteps(16, max_sequences=8, token_budget=32, max_steps_waiting_for_rows=8, checks=True)
    adapters = ["a1-1", "a2-4", "a3-16", "a4-8", "a5-2", "a6-16", "a7-4", None]
    for i in range(400):
        if steps.num_open < 24:
            tenant = f"t{rng.randrange(3)}"
            steps.submit(f"r{i}", rng.randint(1, 30), rng.randint(1, 30), rng.choice(adapters), tenant=tenant)
        steps.step()
    while steps.num_open:
        steps.step()
        assert steps.num_steps < 3000
    waits = [one.first_token - one.came for one in steps.requests.values()]
    assert max(waits) <= 400
