"""KV blocks: which sequences hold which.

Blocks are integers; the cache tensors live in `service.models.layers.caches`. Block 0 is the null block and is never
handed out. A sequence opens an account under a key, extends it as it grows, and releases it as a whole. Blocks are
counted by reference: an account may open with blocks that others hold, which it only reads, and a block is free when
the last account that holds it is released. Blocks end with the engine's process.

Blocks of one sequence are contiguous whenever there is room, so that a CPU attention can read keys and values as one
view instead of gathering: opening an account *claims* a run as long as the sequence may ever become. A claim is only a
wish: claimed blocks count as free, and are taken from the end of the longest claim when nothing else is left.

Cost per step: nothing for a sequence that stays within its last block; O(number of runs) for one that needs another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class _Account:
    """`blocks` in the order of the sequence; [claim_start, claim_end) is claimed behind the last of them."""

    blocks: list[int] = field(default_factory=list)
    claim_start: int = 0
    claim_end: int = 0
    view: tuple[int, ...] = ()


class BlockPool:
    """Blocks 1 .. num_blocks - 1; see the module's docstring."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "the null block and one more"
        self.num_blocks = num_blocks
        self._runs: list[tuple[int, int]] = [(1, num_blocks)]  # free and unclaimed, half-open, sorted, never adjacent
        self._accounts: dict[int, _Account] = {}
        self._num_holders = [0] * num_blocks  # accounts that hold each block
        self._num_free = num_blocks - 1

    @property
    def capacity(self) -> int:
        """Blocks that sequences can hold, all together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Free blocks, claimed ones included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.capacity - self._num_free

    def open(self, key: int, expected: int, shared: Sequence[int] = ()) -> None:
        """Open an account for a sequence that will need up to `expected` blocks. Takes no free block yet.

        shared  held blocks that it begins with, in its order
        """
        assert key not in self._accounts, f"account {key} is open already"
        account = _Account([*shared], view=tuple(shared))
        for block in shared:
            assert self._num_holders[block], f"block {block} is held by nobody"
            self._num_holders[block] += 1
        self._accounts[key] = account
        self._claim(account, expected - len(shared))

    def extend(self, key: int, total: int) -> bool:
        """Bring the account to `total` blocks. False, and nothing changed, if too few are free."""
        account = self._accounts[key]
        need = total - len(account.blocks)
        if need <= 0:
            return True
        if need > self._num_free:
            return False
        self._num_free -= need
        num_before = len(account.blocks)
        taken = min(need, account.claim_end - account.claim_start)
        account.blocks.extend(range(account.claim_start, account.claim_start + taken))
        account.claim_start += taken
        while len(account.blocks) < total:
            self._take_elsewhere(account, total)
        for block in account.blocks[num_before:]:
            self._num_holders[block] = 1
        account.view = tuple(account.blocks)
        return True

    def blocks(self, key: int) -> tuple[int, ...]:
        """The account's blocks, in the order of the sequence."""
        return self._accounts[key].view

    def num_held_alone(self, key: int) -> int:
        """Blocks of the account that no other one holds, which its release would free."""
        return sum(self._num_holders[block] == 1 for block in self._accounts[key].blocks)

    def release(self, key: int) -> None:
        """Close the account; its claim is free, and so are the blocks that no other account holds."""
        account = self._accounts.pop(key)
        freed = []
        for block in account.blocks:
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                freed.append(block)
        self._num_free += len(freed)
        self._insert(account.claim_start, account.claim_end)
        for start, end in _runs_of(sorted(freed)):
            self._insert(start, end)

    def check_integrity(self) -> None:
        """Every block but 0 is in exactly one of: a free run, a claim, accounts; and the counts add up."""
        seen: list[int] = []
        for start, end in self._runs:
            assert start < end, "empty run"
            seen.extend(range(start, end))
        assert all(a[1] < b[0] for a, b in pairwise(self._runs)), "runs unsorted or adjacent"
        num_holders = [0] * self.num_blocks
        for account in self._accounts.values():
            assert account.view == tuple(account.blocks), "stale view"
            assert len(set(account.blocks)) == len(account.blocks), "a block twice in one account"
            for block in account.blocks:
                num_holders[block] += 1
            seen.extend(range(account.claim_start, account.claim_end))
        assert self._num_holders == num_holders, "holders miscounted"
        held = [block for block, number in enumerate(num_holders) if number]
        assert sorted([*seen, *held]) == list(range(1, self.num_blocks)), "blocks lost, or free and held"
        assert self._num_free == self.capacity - len(held), "free count is wrong"

    def _claim(self, account: _Account, wanted: int) -> None:
        """Claim the start of the shortest free run that is long enough, else of the longest."""
        run = self._pick_run(wanted)
        if run is None or wanted <= 0:
            return
        start, end = self._runs[run]
        account.claim_start, account.claim_end = start, min(end, start + wanted)
        self._shrink_run(run, account.claim_end)

    def _take_elsewhere(self, account: _Account, total: int) -> None:
        """The account's own claim is used up: take from a free run, or else from the end of the longest claim."""
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
        taken = min(need, victim.claim_end - victim.claim_start)
        assert taken > 0, "the free count promised a block"
        victim.claim_end -= taken
        account.blocks.extend(range(victim.claim_end, victim.claim_end + taken))

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
