"""Host tier of the prefix cache: blocks and states that leave the device stay in pinned host memory for a while.

Written behind: idle blocks, and kept states, are copied to host rows, those first that leave the device next. So many
are copied ahead as a quarter of the rows holds, and a few in a step. A row counts once its copy has ended; a block or a
state that is used again before it leaves gives its row back, so that nearly all rows hold what is nowhere else. When
rows are wanted, the tenant with most of these loses those that left the device longest ago.

Read ahead: a waiting sequence that goes on behind nodes without blocks has these copied to blocks, and the state to a
line, and waits as for an adapter that is copied. The blocks are an account's of its own until the copies have ended.
Then they are idle, the nodes have them, and the sequence finds them as any others, in the same step where copies take
no time. It has that done once; if they are gone again before it joins, it computes them.

All copies run on one stream, in the order of their calls: a row, or a block, that is given away while a copy of it is
under way is written by the next one after that, and what that copy has brought counts no more.

Cost per step: one question for each copy under way, and O(tenants). Everything ends with the engine's process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING

from service.engine.loras.interfaces import CopyEvent
from service.engine.loras.residency import Copying
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.scheduling.prefix_trie import Found, Node, PrefixTrie, Way
from service.engine.scheduling.state_lines import StateLines

if TYPE_CHECKING:
    from service.models.layers.caches import HostCopies

_AHEAD_SHARE = 4  # of the rows, those of nodes that are on the device too
_MOST_LINES = 1  # that are copied in a step
Pairs = Sequence[tuple[int, int]]  # blocks, or lines, and rows


class _Queues:
    """Nodes by tenant, those that came first are first."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, OrderedDict[Node, None]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, node: Node) -> None:
        self._by_tenant.setdefault(node.scope[0], OrderedDict())[node] = None
        self._num += 1

    def discard(self, node: Node) -> None:
        queue = self._by_tenant.get(node.scope[0])
        if queue is not None and node in queue:
            del queue[node]
            self._num -= 1
            if not queue:
                del self._by_tenant[node.scope[0]]

    def first(self, most: int) -> list[Node]:
        """Up to so many of the tenant that has most."""
        if not self._num or most <= 0:
            return []
        largest = max(self._by_tenant.values(), key=len)
        return list(islice(largest, most))


class HostRows:
    """Rows for blocks, or for lines. give_up: is called for a node that loses the only copy; it calls `wake`."""

    def __init__(self, num_rows: int, give_up: Callable[[Node], object]) -> None:
        self.num_rows = num_rows
        self.row_of: dict[Node, int] = {}  # nodes whose copy has ended
        self._free = list(range(num_rows - 1, -1, -1))
        self._copying: dict[Node, int] = {}
        self._uncopied = _Queues()  # which have no row, and are used by no sequence
        self._alone = _Queues()  # which are in host memory only, and not on their way
        self._give_up = give_up

    @property
    def num_used(self) -> int:
        return self.num_rows - len(self._free)

    def rest(self, node: Node) -> None:
        """Nobody uses it on the device, where it may soon have no place."""
        self._uncopied.add(node)

    def wake(self, node: Node) -> None:
        """It is used on the device, or dropped: it has no row from now on."""
        for rows in (self.row_of, self._copying):
            if (row := rows.pop(node, None)) is not None:
                self._free.append(row)
        self._uncopied.discard(node)
        self._alone.discard(node)

    def leave(self, node: Node) -> bool:
        """It has no place on the device any more; whether it has a row."""
        if node not in self.row_of:
            self.wake(node)
            return False
        self._alone.add(node)
        return True

    def bring(self, node: Node) -> int:
        """Its row, which is its own until it wakes."""
        self._alone.discard(node)
        return self.row_of[node]

    def due(self, most: int) -> list[tuple[Node, int]]:
        """Up to so many nodes that are to be copied now, and rows for them."""
        num_ahead = len(self.row_of) - len(self._alone)
        nodes = self._uncopied.first(min(most, max(1, self.num_rows // _AHEAD_SHARE) - num_ahead))
        for node in self._alone.first(len(nodes) - len(self._free)):
            self._give_up(node)
        for node in nodes[: len(self._free)]:
            self._uncopied.discard(node)
            self._copying[node] = self._free.pop()
        return list(self._copying.items())

    def end_copies(self) -> None:
        """The copies of all that was due have ended."""
        for node in self._copying:
            self._uncopied.discard(node)
        self.row_of |= self._copying
        self._copying.clear()

    def check_integrity(self) -> None:
        """Each row is free, or one node's."""
        rows = [*self._free, *self.row_of.values(), *self._copying.values()]
        assert sorted(rows) == list(range(self.num_rows)), "rows lost, or of two nodes"
        assert not any(node.is_dropped for node in (*self.row_of, *self._copying)), "a row of a dropped node"


@dataclass(slots=True, eq=False)
class _Load:
    """Nodes on their way to blocks of the account `key`, and the state of one to a line; 0: it is no part."""

    key: int
    nodes: list[Node]
    state_of: Node | None
    line: int
    copying: Copying


class HostPrefixes:
    """See the module's docstring."""

    def __init__(self, copies: HostCopies, pool: BlockPool, trie: PrefixTrie, lines: StateLines) -> None:
        self.blocks = HostRows(copies.num_rows[0], lambda node: trie.drop([node]))
        self.lines = HostRows(copies.num_rows[1], lines.drop_on_host)
        trie.host, lines.host = self.blocks, self.lines
        self._copies = copies
        self._pool = pool
        self._trie = trie
        self._lines = lines
        self._saving: CopyEvent | None = None
        self._loads: list[_Load] = []
        self._keys = count(-1, -1)  # of accounts, which no sequence has

    @property
    def total_bytes(self) -> int:
        return sum(num * size for num, size in zip(self._copies.num_rows, self._copies.row_bytes, strict=True))

    @property
    def used_bytes(self) -> int:
        nums = (self.blocks.num_used, self.lines.num_used)
        return sum(num * size for num, size in zip(nums, self._copies.row_bytes, strict=True))

    @property
    def loading_keys(self) -> list[int]:
        """Accounts of blocks that are being read."""
        return [load.key for load in self._loads]

    def begin_step(self, *, is_idle: bool) -> None:
        """Take over the copies that have ended, and begin others. All that the trie has is launched by now.

        is_idle  nothing runs that could go on meanwhile
        """
        self._end_saving()
        for load in [load for load in self._loads if load.copying.has_ended(is_idle=is_idle)]:
            self._end(load)
        if self._saving is None:
            blocks, lines = self.blocks.due(self._copies.most_blocks), self.lines.due(_MOST_LINES)
            if blocks or lines:
                self._saving = self._copies.save(
                    [(node.block, row) for node, row in blocks], [(node.line, row) for node, row in lines]
                )
                self._end_saving()

    def is_loading(self, way: Way, found: Found, num_here: int, num_free_blocks: int, *, is_idle: bool) -> bool:
        """Whether some of what a waiting sequence has found is on its way to the device; once, that is begun here.

        num_here         tokens that it has found on the device
        num_free_blocks  that may be used for it
        """
        nodes, state_of = found.nodes, found.state_of
        if state_of is not None and state_of is not nodes[-1]:
            nodes = [*nodes, state_of]  # a tail
        if not way.has_loaded and not self._are_coming(nodes):
            way.has_loaded = self._load(nodes, state_of, num_free_blocks, is_idle=is_idle)
            if not way.has_loaded:
                return False
        way.num_here = num_here if way.num_here is None else way.num_here
        return self._are_coming(nodes)

    def _are_coming(self, nodes: list[Node]) -> bool:
        return any(node in nodes for load in self._loads for node in (*load.nodes, load.state_of))

    def _load(self, nodes: list[Node], state_of: Node | None, num_free_blocks: int, *, is_idle: bool) -> bool:
        """Begin to bring these nodes, each below the one before it, to the device, with the state of one of them. False
        if blocks, or lines, are short."""
        held = [node.block for node in nodes if node.block]
        missing = nodes[len(held) :]
        if len(missing) + sum(not self._pool.num_holders(block) for block in held) > num_free_blocks:
            return False
        line = 0
        if state_of is not None and not state_of.line and not (line := self._lines.take_kept()):
            return False
        key = next(self._keys)
        self._pool.open(key, len(nodes), held)
        is_there = self._pool.extend(key, len(nodes))
        assert is_there, "no block for what is loaded"
        pairs = zip(self._pool.blocks(key)[len(held) :], map(self.blocks.bring, missing), strict=True)
        lines = [(line, self.lines.bring(state_of))] if line and state_of is not None else []
        copying = Copying(self._copies.load(list(pairs), lines))
        self._loads.append(_Load(key, missing, state_of if line else None, line, copying))
        if is_idle or copying.mark.is_completed():
            self._end(self._loads[-1])
        return True

    def check_integrity(self) -> None:
        """Nodes without a block have a row."""
        self.blocks.check_integrity()
        self.lines.check_integrity()
        assert all(node in self.blocks.row_of for node in self._trie.nodes if not node.block), "a node is nowhere"

    def _end_saving(self) -> None:
        if self._saving is not None and self._saving.is_completed():
            self.blocks.end_copies()
            self.lines.end_copies()
            self._saving = None

    def _end(self, load: _Load) -> None:
        """Steps that are launched from now on find what was loaded, unless it was dropped or computed meanwhile."""
        self._loads.remove(load)
        self._copies.publish(load.copying.mark)
        blocks = self._pool.blocks(load.key)
        first = len(blocks) - len(load.nodes)
        for index, (node, block) in enumerate(zip(load.nodes, blocks[first:], strict=True), start=first):
            if node.is_dropped:
                continue
            if not node.block:
                self._trie.place(node, block)
            else:  # computed meanwhile: it stays longer than those below it, which become idle now
                self._pool.hold_beside(load.key, index, node.block)
        if load.state_of is not None:
            self._lines.bring(load.state_of, load.line)
        self._pool.release(load.key)
