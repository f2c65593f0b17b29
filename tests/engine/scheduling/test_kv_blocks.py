"""The KV block allocator: nothing lost, nothing held twice, contiguous where there is room."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.scheduling.kv_blocks import BlockPool
from tests.support.tiers import examples


def opened(pool: BlockPool, key: int, *, expected: int, total: int) -> tuple[int, ...]:
    pool.open(key, expected)
    assert pool.extend(key, total)
    pool.check_integrity()
    return pool.blocks(key)


def is_contiguous(blocks: tuple[int, ...]) -> bool:
    return blocks == tuple(range(blocks[0], blocks[0] + len(blocks)))


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(6)
    assert sorted(opened(pool, 1, expected=5, total=5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_sequences_that_grow_in_turns_stay_contiguous() -> None:
    pool = BlockPool(31)
    for key in range(3):
        pool.open(key, 10)
    for total in range(1, 11):
        for key in range(3):
            assert pool.extend(key, total)
            pool.check_integrity()
    assert all(is_contiguous(pool.blocks(key)) for key in range(3))


def test_a_new_sequence_starts_in_the_shortest_gap_that_is_long_enough() -> None:
    pool = BlockPool(21)
    gaps = {0: 4, 1: 2, 2: 6, 3: 1, 4: 7}
    first = {key: opened(pool, key, expected=size, total=size)[0] for key, size in gaps.items()}
    for freed in (0, 2):
        pool.release(freed)
    assert opened(pool, 9, expected=3, total=1) == (first[0],)
    assert opened(pool, 10, expected=5, total=1) == (first[2],)


def test_claimed_blocks_count_as_free_and_are_taken_from_the_end() -> None:
    pool = BlockPool(9)
    pool.open(1, 8)
    assert pool.num_free == 8
    assert opened(pool, 2, expected=8, total=3) == (6, 7, 8)
    assert pool.extend(1, 5)
    assert pool.blocks(1) == (1, 2, 3, 4, 5)
    assert pool.num_free == 0


def test_a_refused_extension_changes_nothing() -> None:
    pool = BlockPool(5)
    opened(pool, 1, expected=4, total=3)
    pool.open(2, 2)
    assert not pool.extend(2, 2)
    pool.check_integrity()
    assert pool.blocks(2) == ()
    assert pool.num_free == 1


def test_release_makes_one_run_of_everything() -> None:
    pool = BlockPool(17)
    for key in range(4):
        opened(pool, key, expected=4, total=3)
    for key in (2, 0, 3, 1):
        pool.release(key)
        pool.check_integrity()
    assert opened(pool, 9, expected=16, total=16) == tuple(range(1, 17))


def test_an_account_cannot_be_opened_twice() -> None:
    pool = BlockPool(4)
    pool.open(1, 2)
    with pytest.raises(AssertionError, match="open already"):
        pool.open(1, 2)


def test_a_shared_block_is_free_when_its_last_account_is_released() -> None:
    pool = BlockPool(9)
    first = opened(pool, 1, expected=3, total=3)
    pool.open(2, 5, first[:2])
    assert pool.extend(2, 4)
    assert pool.blocks(2)[:2] == first[:2]
    assert pool.num_used == 5
    assert (pool.num_held_alone(1), pool.num_held_alone(2)) == (1, 2)
    pool.release(1)
    pool.check_integrity()
    assert pool.num_used == 4
    assert not set(opened(pool, 3, expected=4, total=4)) & set(first[:2])
    pool.release(2)
    pool.check_integrity()
    assert pool.num_used == 4


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.open(1, 2, [3])


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(2, 40))
@settings(max_examples=examples(60), deadline=None)
def test_random_accounts_keep_the_books_straight(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks)
    totals: dict[int, int] = {}
    for key in range(60):
        match rng.choice(("open", "share", "extend", "extend", "release")):
            case "open":
                pool.open(key, rng.randint(0, num_blocks))
                totals[key] = 0
            case "share" if totals:
                blocks = pool.blocks(rng.choice(list(totals)))
                totals[key] = rng.randint(0, len(blocks))
                pool.open(key, rng.randint(0, num_blocks), blocks[: totals[key]])
            case "extend" if totals:
                chosen = rng.choice(list(totals))
                wanted = totals[chosen] + rng.randint(0, 5)
                before = pool.blocks(chosen)
                could = wanted - totals[chosen] <= pool.num_free
                assert pool.extend(chosen, wanted) == could
                assert pool.blocks(chosen)[: len(before)] == before
                totals[chosen] = wanted if could else totals[chosen]
            case "release" if totals:
                chosen = rng.choice(list(totals))
                pool.release(chosen)
                del totals[chosen]
            case _:
                continue
        pool.check_integrity()
        assert pool.num_used == len({block for one in totals for block in pool.blocks(one)})
