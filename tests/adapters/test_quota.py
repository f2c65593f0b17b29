"""What is scarce is divided so that nobody, and no number of others, keeps a newcomer out."""

from __future__ import annotations

import random

import pytest

from adapters.quota import NUM_SMALL, ClientQuota

MIB = 1 << 20


def fill(shares: ClientQuota, payer: str, largest: int) -> int:
    """Let a payer take all that it may, in pieces from the largest to single ones. Returns how much."""
    count = largest
    while count:
        if not shares.acquire(payer, count):
            count //= 2
    return shares.held_by(payer)


def test_one_alone_has_its_most_and_others_halves() -> None:
    shares = ClientQuota(32)
    assert [fill(shares, f"p{index}", 64) for index in range(6)] == [32, 16, 8, 4, 2, 1]
    shares.release("p0", 32)
    assert fill(shares, "p6", 64) == 16


@pytest.mark.parametrize("num_payers", [2, 8, 64])
def test_a_newcomer_gets_in_whoever_holds_what_it_can(num_payers: int) -> None:
    bodies, uploads = ClientQuota(32 * MIB, small=MIB, always=MIB >> 4), ClientQuota(8, small=1)
    for index in range(num_payers):
        assert fill(bodies, f"p{index}", 64 * MIB) >= MIB
        assert fill(uploads, f"p{index}", 16) >= 1
    assert bodies.acquire("newcomer", MIB)
    assert uploads.acquire("newcomer", 1)
    assert bodies.num_held <= bodies.most == (64 + NUM_SMALL) * MIB
    assert uploads.num_held <= uploads.most == 16 + NUM_SMALL


def test_what_is_always_free_is_so_beside_a_thousand() -> None:
    shares = ClientQuota(32 * MIB, small=MIB, always=MIB >> 4)
    for index in range(1024):
        assert fill(shares, f"p{index}", 64 * MIB) >= MIB >> 4
    assert shares.acquire("newcomer", MIB >> 4)
    assert not shares.acquire("newcomer", 1)
    assert shares.num_held <= shares.most + 1025 * (MIB >> 4)


@pytest.mark.parametrize("seed", range(5))
def test_random_payers_stay_within_the_bounds(seed: int) -> None:
    shares, rng, held = ClientQuota(64, small=2, always=1), random.Random(seed), dict[str, int]()
    for _ in range(5000):
        payer, count = f"p{rng.randrange(300)}", rng.choice((1, 1, 2, 5, 40))
        mine = held.get(payer, 0)
        if rng.random() < 0.3:
            count = rng.randint(0, mine)
            shares.release(payer, count)
            held[payer] = mine - count
        else:
            others = sum(held.values()) - mine
            taken = shares.acquire(payer, count)
            assert taken or mine + count > 1
            if mine + count <= 64 and others + 2 * (mine + count) <= 128:
                assert taken, "a payer that leaves as much as it takes was kept out"
            held[payer] = mine + count * taken
            assert held[payer] <= 64
        assert shares.num_held == sum(held.values()) <= shares.most + len(held)
    for payer, count in held.items():
        shares.release(payer, count)
    assert shares.num_held == 0
