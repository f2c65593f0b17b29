"""KV blocks: which sequences hold which.

Blocks are integers; the cache tensors live in `service.models.layers.caches`. Block 0 is the null block and is never
handed out. A sequence opens an account under a key, extends it as it grows, and releases it as a whole. Blocks are
counted by reference: an account may open with blocks that others hold, which it only reads. When the last account that
holds a block is released, the block is idle, if the prefix cache keeps it (`prefix_cache.py`), and otherwise free. Idle
blocks count as free, and are evicted when no others are left. Blocks end with the engine's process.

Blocks of one sequence are contiguous whenever there is room, so that a CPU attention can read keys and values as one
view instead of gathering: opening an account *claims* a run as long as the sequence may ever become. A claim is only a
wish: claimed blocks count as free, and are taken from the end of the longest claim when nothing else is left. Where
idle blocks are evicted for a sequence it claims a few more, so that it need not gather them one by one; and where runs
matter, enough are evicted before it begins that its present tokens have a run. Without that, sequences in a cache full
of idle blocks end in dozens of runs, each made of the remains of others.

Cost per step: nothing for a sequence that stays within its last block; O(number of runs) for one that needs another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Protocol

# The most blocks that are evicted together where fewer are needed.
_RUN_BLOCKS = 16


class IdleBlocks(Protocol):
    """Blocks without holders that are kept, as the prefix cache has them."""

    @property
    def num_idle(self) -> int: ...

    def rest(self, block: int) -> bool: ...
    def wake(self, block: int) -> None: ...
    def evict(self, num_blocks: int) -> list[int]: ...


@dataclass(slots=True)
class _Account:
    """`blocks` in the order of the sequence; [claim_start, claim_end) is claimed behind the last of them.

    beside  (number in the sequence, block) of blocks that it holds and has not in its table
    """

    blocks: list[int] = field(default_factory=list)
    beside: list[tuple[int, int]] = field(default_factory=list)
    claim_start: int = 0
    claim_end: int = 0
    view: tuple[int, ...] = ()


class BlockPool:
    """Blocks 1 .. num_blocks - 1; see the module's docstring. makes_runs: evict idle blocks for runs, too."""

    def __init__(self, num_blocks: int, *, makes_runs: bool = False) -> None:
        assert num_blocks >= 2, "the null block and one more"
        self._makes_runs = makes_runs
        self.num_blocks = num_blocks
        self._runs: list[tuple[int, int]] = [(1, num_blocks)]  # free and unclaimed, half-open, sorted, never adjacent
        self._accounts: dict[int, _Account] = {}
        self._num_holders = [0] * num_blocks  # accounts that hold each block
        self._num_unused = num_blocks - 1  # free ones, without idle ones
        self._idle: IdleBlocks | None = None

    def keep_idle_in(self, idle: IdleBlocks) -> None:
        """Offer blocks that lose their last holder to the prefix cache."""
        self._idle = idle

    @property
    def capacity(self) -> int:
        """Blocks that sequences can hold, all together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Free blocks, claimed and idle ones included."""
        return self._num_unused + (0 if self._idle is None else self._idle.num_idle)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    @property
    def held_beside(self) -> set[int]:
        """Blocks that accounts hold and have not in their tables."""
        return {block for account in self._accounts.values() for _, block in account.beside}

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def num_idle_in(self, blocks: Collection[int]) -> int:
        """Those of kept blocks that count as free now, and will not when they are held."""
        return sum(not self._num_holders[block] for block in blocks)

    def open(self, key: int, expected: int, shared: Sequence[int] = (), *, present: int = 0, beside: int = 0) -> None:
        """Open an account for a sequence that will need up to `expected` blocks. Takes no free block yet.

        shared   held or idle blocks that it begins with, in its order
        present  blocks that it needs for what it has now
        beside   such a block that it holds, too, instead of its own one behind these; 0: none
        """
        assert key not in self._accounts, f"account {key} is open already"
        account = _Account([*shared], view=tuple(shared))
        self._accounts[key] = account
        for block in shared:
            self._hold(block)
        if beside:
            self.hold_beside(key, len(shared), beside)
        if self._makes_runs:
            self._make_run(present - len(shared), expected - len(shared))
        self._claim(account, expected - len(shared))

    def hold_beside(self, key: int, index: int, block: int) -> None:
        """Hold a held or idle block that is not in the account's table, instead of its own one of this number."""
        self._hold(block)
        self._accounts[key].beside.append((index, block))

    def extend(self, key: int, total: int) -> bool:
        """Bring the account to `total` blocks. False, and nothing changed, if too few are free."""
        account = self._accounts[key]
        need = total - len(account.blocks)
        if need <= 0:
            return True
        if need > self.num_free:
            return False
        num_before = len(account.blocks)
        taken = min(need, account.claim_end - account.claim_start)
        account.blocks.extend(range(account.claim_start, account.claim_start + taken))
        account.claim_start += taken
        while len(account.blocks) < total:
            self._take_elsewhere(account, total)
        self._num_unused -= need
        for block in account.blocks[num_before:]:
            self._num_holders[block] = 1
        account.view = tuple(account.blocks)
        return True

    def replace_last(self, key: int) -> bool:
        """Take another block instead of the account's last one, which it holds beside its table. False, and nothing
        changed, if none is free."""
        account = self._accounts[key]
        index = len(account.blocks) - 1
        if not self.extend(key, index + 2):
            return False
        account.beside.append((index, account.blocks[index]))
        account.blocks[index] = account.blocks.pop()
        account.view = tuple(account.blocks)
        return True

    def blocks(self, key: int) -> tuple[int, ...]:
        """The account's blocks, in the order of the sequence."""
        return self._accounts[key].view

    def num_held_alone(self, key: int, wanted: Collection[int] = ()) -> int:
        """Blocks of the account that its release would free, without those that are wanted."""
        blocks = self._accounts[key].blocks
        return sum(self._num_holders[block] == 1 and block not in wanted for block in blocks)

    def release(self, key: int) -> None:
        """Close the account; its claim is free, and the blocks that no other account holds are idle or free, the last
        ones of the sequence first."""
        account = self._accounts.pop(key)
        held = list(enumerate(account.blocks)) + account.beside
        held.sort(key=itemgetter(0), reverse=True)
        freed = []
        for _, block in held:
            self._num_holders[block] -= 1
            if not self._num_holders[block] and (self._idle is None or not self._idle.rest(block)):
                freed.append(block)
        self._insert(account.claim_start, account.claim_end)
        self.take_back(freed)

    def take_back(self, blocks: Iterable[int]) -> None:
        """These blocks, which were idle or held, are free now."""
        for start, end in _runs_of(sorted(blocks)):
            self._num_unused += end - start
            self._insert(start, end)

    def check_integrity(self) -> None:
        """Every block but 0 is in exactly one of: a free run, a claim, accounts, idle ones; and the counts add up."""
        seen: list[int] = []
        for start, end in self._runs:
            assert start < end, "empty run"
            seen.extend(range(start, end))
        assert all(a[1] < b[0] for a, b in pairwise(self._runs)), "runs unsorted or adjacent"
        num_holders = [0] * self.num_blocks
        for account in self._accounts.values():
            assert account.view == tuple(account.blocks), "stale view"
            assert len(set(account.blocks)) == len(account.blocks), "a block twice in one account"
            for block in (*account.blocks, *(block for _, block in account.beside)):
                num_holders[block] += 1
            seen.extend(range(account.claim_start, account.claim_end))
        assert self._num_holders == num_holders, "holders miscounted"
        held = [block for block, number in enumerate(num_holders) if number]
        assert self._num_unused == len(seen), "free count is wrong"
        num_idle = 0 if self._idle is None else self._idle.num_idle
        assert len({*seen, *held}) == len(seen) + len(held) == self.capacity - num_idle, "blocks lost, or free and held"

    def _claim(self, account: _Account, wanted: int) -> None:
        """Claim the free run behind its last block, else the start of the shortest that is long enough, else of the
        longest."""
        run = self._run_starting_at(account.blocks[-1] + 1) if account.blocks else None
        if run is None:
            run = self._pick_run(wanted)
        if run is None or wanted <= 0:
            return
        start, end = self._runs[run]
        account.claim_start, account.claim_end = start, min(end, start + wanted)
        self._shrink_run(run, account.claim_end)

    def _make_run(self, present: int, expected: int) -> None:
        """Evict idle blocks until `present` free ones and a few more, of those expected, follow each other. Blocks of a
        former sequence mostly do; after twice as many the others stay where they are."""
        wanted = min(expected, present + self._num_ahead())
        left = 2 * wanted
        while self._idle is not None and self._idle.num_idle and left > 0:
            missing = wanted - max((end - start for start, end in self._runs), default=0)
            if missing <= 0:
                return
            evicted = self._idle.evict(min(left, max(missing, wanted // 8)))
            self.take_back(evicted)
            left -= len(evicted)

    def _num_ahead(self) -> int:
        """Blocks that are evicted beyond those that are needed."""
        return 0 if self._idle is None else min(_RUN_BLOCKS, self._idle.num_idle // _RUN_BLOCKS)

    def _take_elsewhere(self, account: _Account, total: int) -> None:
        """The account's own claim is used up: take from a free run, else from the end of the longest claim, else evict
        idle blocks."""
        need = total - len(account.blocks)
        run = self._run_starting_at(account.blocks[-1] + 1) if account.blocks else None
        if run is None:
            run = self._pick_run(need)
        if run is not None:
            start, end = self._runs[run]
            stop = min(end, start + need)
            account.blocks.extend(range(start, stop))
            self._shrink_run(run, stop)
            return
        victim = max(self._accounts.values(), key=lambda other: other.claim_end - other.claim_start)
        num = min(need, victim.claim_end - victim.claim_start)
        if num:
            victim.claim_end -= num
            start, end = victim.claim_end, victim.claim_end + num
        else:
            assert self._idle is not None, "the free count promised a block"
            evicted = self._idle.evict(max(need, self._num_ahead()))
            assert evicted, "the free count promised a block"
            self.take_back(evicted)
            run = self._pick_run(need)
            assert run is not None
            start, end = self._runs[run]
            end = min(end, start + max(need, _RUN_BLOCKS))
            self._shrink_run(run, end)
        stop = min(end, start + need)
        account.blocks.extend(range(start, stop))
        account.claim_start, account.claim_end = stop, end

    def _hold(self, block: int) -> None:
        if not self._num_holders[block]:
            assert self._idle is not None, f"block {block} is held by nobody"
            self._idle.wake(block)
        self._num_holders[block] += 1

    def _pick_run(self, wanted: int) -> int | None:
        """Index of the shortest run of at least `wanted` blocks, else of the longest; None if there is none."""
        best: int | None = None
        best_key: tuple[bool, int] = (True, 0)
        for index, (start, end) in enumerate(self._runs):
            length = end - start
            key = (length < wanted, length if length >= wanted else -length)
            if best is None or key < best_key:
                best, best_key = index, key
        return best

    def _run_starting_at(self, block: int) -> int | None:
        index = bisect_left(self._runs, (block, 0))
        return index if index < len(self._runs) and self._runs[index][0] == block else None

    def _shrink_run(self, index: int, new_start: int) -> None:
        _, end = self._runs[index]
        if new_start == end:
            del self._runs[index]
        else:
            self._runs[index] = (new_start, end)

    def _insert(self, start: int, end: int) -> None:
        """Put [start, end) back among the free runs, merged with its neighbours."""
        if start >= end:
            return
        index = bisect_left(self._runs, (start, 0))
        if index < len(self._runs) and self._runs[index][0] == end:
            end = self._runs.pop(index)[1]
        if index > 0 and self._runs[index - 1][1] == start:
            start = self._runs[index - 1][0]
            index -= 1
            del self._runs[index]
        self._runs.insert(index, (start, end))


def _runs_of(blocks: list[int]) -> list[tuple[int, int]]:
    """Sorted distinct integers as half-open runs: [3, 4, 7] -> [(3, 5), (7, 8)]."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
