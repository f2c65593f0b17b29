"""Prefix trie: blocks whose keys and values can be used again, by their tokens, and which of them are idle.

A node is one full block below the block before it. Its key are the tokens themselves, with what else its keys and
values depend on (`prefix_cache.py`), so equal keys mean equal blocks; nothing is hashed but by Python's dicts. A root
is a scope, and knows of no other one. A *tail* is a node of a block's first tokens alone, to which a state belongs:
whoever goes on behind it copies its block.

A block is held by accounts of `kv_blocks.py` or idle. Whoever holds a block holds all above it, and an account releases
its last blocks first, so that in a queue of idle blocks, least recently held first, none comes before those below it.
Each tenant has a queue of its own, and the largest gives when blocks are wanted: a flood empties its own.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from adapters.sums import parts_of
from service.engine.sequences.sequence import NEVER, Sequence

_TOKEN_BYTES = 4
Scope = tuple[str, str, tuple[int, ...]]  # tenant, "" where all share; salt; class of the length limit


@dataclass(slots=True, eq=False, repr=False)  # it would show prompts
class Node:
    """parent: None for a root. block: 0 for a root, once the node is dropped, and while it is in host memory alone
    (`host_prefixes.py`), with all below it. line: of the state behind the block's last token; 0: it was not kept.
    num_users: of a root, which stays for them. has_tails: whether there were nodes below it of parts of a block."""

    parent: Node | None
    part: bytes
    scope: Scope
    block: int
    line: int = 0
    has_tails: bool = False
    children: dict[bytes, Node] = field(default_factory=dict)
    num_users: int = 0
    is_dropped: bool = False


class NodeRows(Protocol):
    """Rows of host memory for nodes, as the host tier has them (`host_prefixes.py`)."""

    row_of: dict[Node, int]

    def rest(self, node: Node) -> None: ...
    def wake(self, node: Node) -> None: ...
    def leave(self, node: Node) -> bool: ...


@dataclass(slots=True, eq=False, repr=False)  # it would show prompts
class Way:
    """The way of a sequence through the trie.

    tag          digest of its adapter; empty for the base
    node         while it runs and publishes: the last that it has found or published, `num_nodes` below the root
    first_own    blocks before this one were others' whenever it joined
    in_flight    its entry in the table of blocks that are being computed
    awaited      the sequence that it awaits, and how many tokens that must have computed
    awaits_until  number of the step from which on it awaits nobody
    num_here     tokens that it found on the device when more were found in host memory
    has_loaded   these were brought to the device since it last ran
    """

    sequence: Sequence
    scope: Scope
    tag: bytes
    block_size_tokens: int
    node: Node | None = None
    num_nodes: int = 0
    first_own: int = NEVER
    in_flight: tuple[Node, bytes] | None = None
    awaited: tuple[Sequence, int] | None = None
    awaits_until: int | None = None
    num_here: int | None = None
    has_loaded: bool = False
    _parts: list[bytes] = field(default_factory=list)

    def parts(self, num_blocks: int) -> list[bytes]:
        """The keys of the first blocks, at least so many. A prompt has hundreds, and its first step waits for them."""
        first, size = len(self._parts), self.block_size_tokens
        if num_blocks > first:
            num_blocks, num_bytes = max(num_blocks, self.sequence.num_prompt // size), size * _TOKEN_BYTES
            tokens = self._tokens(first * size, num_blocks * size)
            parts = [tokens[at : at + num_bytes] for at in range(0, len(tokens), num_bytes)]
            if self.tag:
                # One block may have tokens of the base and the adapter's first; those behind it are all the adapter's.
                begun = max(self.sequence.request.adapter_start // size - first, 0)
                of_adapter = bytes(_TOKEN_BYTES) + self.tag
                parts[begun + 1 :] = [part + of_adapter for part in parts[begun + 1 :]]
                if begun < len(parts):
                    parts[begun] = self._key((first + begun) * size, parts[begun])
            self._parts += parts
        return self._parts

    def tail_below(self, node: Node, num_blocks: int, has_state: Callable[[Node], object]) -> tuple[Node | None, int]:
        """The longest tail with a state below the node of the last of these blocks that the sequence can begin behind,
        one token being left, and its number of tokens."""
        size = self.block_size_tokens
        for num, key in self.tails(num_blocks, min(len(self.sequence.token_ids) - 1 - num_blocks * size, size - 1)):
            tail = node.children.get(key)
            if tail is not None and has_state(tail):
                return tail, num
        return None, 0

    def tails(self, num_blocks: int, most: int) -> Iterator[tuple[int, bytes]]:
        """The numbers of tokens up to `most` behind the first blocks, largest first, and the keys of such parts."""
        start = num_blocks * self.block_size_tokens
        tokens = self._tokens(start, start + most)
        for num in range(len(tokens) // _TOKEN_BYTES, 0, -1):
            yield num, self._key(start, tokens[: num * _TOKEN_BYTES])

    def _tokens(self, start: int, end: int) -> bytes:
        tokens = self.sequence.token_ids[start:end]
        return struct.pack(f"<{len(tokens)}i", *tokens)

    def _key(self, start: int, tokens: bytes) -> bytes:
        """int32 tokens, -1 up to a block's size, and where the adapter has begun its first token in the block, int32,
        and its digest."""
        adapter_start = self.sequence.request.adapter_start
        key = tokens.ljust(self.block_size_tokens * _TOKEN_BYTES, b"\xff")
        if self.tag and start + len(tokens) // _TOKEN_BYTES > adapter_start:
            key += max(adapter_start - start, 0).to_bytes(_TOKEN_BYTES, "little") + self.tag
        return key


def tag_of(part: bytes, block_size_tokens: int) -> bytes:
    """The adapter's digest in a node's key; empty for the base."""
    return part[(block_size_tokens + 1) * _TOKEN_BYTES :]


def has_adapter(tag: bytes, digest: str) -> bool:
    """Whether a tag is an adapter's, or that of a sum with it."""
    return any(part == digest for part, _ in parts_of(tag.decode()))


@dataclass(frozen=True, slots=True)
class Found:
    """nodes: of the first tokens. source: the block that begins with the rest of `num_tokens`, to be copied, or 0.
    state_of: the node whose state was kept. known: the node and the tokens up to which blocks are known without one."""

    nodes: list[Node]
    num_tokens: int
    source: int = 0
    state_of: Node | None = None
    known: tuple[Node, int] | None = None

    @property
    def blocks(self) -> list[int]:
        """The blocks of the nodes."""
        return [node.block for node in self.nodes]

    @property
    def held(self) -> set[int]:
        """The blocks that the sequence holds when it begins with these."""
        return {*self.blocks, self.source} - {0}


class PrefixTrie:
    """See the module's docstring. drop_state: is called for each node that is dropped. host: its rows of host memory;
    None without the tier."""

    def __init__(self, drop_state: Callable[[Node], None]) -> None:
        self._drop_state = drop_state
        self.host: NodeRows | None = None
        self.num_idle = 0  # blocks that no account holds
        self.num_evicted = 0
        self._roots: dict[Scope, Node] = {}
        self._nodes: dict[int, Node] = {}  # by block
        self._idle: dict[str, OrderedDict[int, Node]] = {}  # by tenant and block

    @property
    def nodes(self) -> Collection[Node]:
        """All but roots."""
        return self._nodes.values() if self.host is None else {*self._nodes.values(), *self.host.row_of}

    def root(self, scope: Scope) -> Node | None:
        return self._roots.get(scope)

    def use_root(self, scope: Scope) -> Node:
        """The root, made if there is none."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = Node(None, b"", scope, 0)
        return root

    def leave_root(self, root: Node) -> None:
        """Drop a root without children and users; it is made anew when it is wanted."""
        if not root.children and not root.num_users:
            del self._roots[root.scope]

    def walk(self, way: Way, num_blocks: int, *, on_host: bool = False) -> list[Node]:
        """The nodes of the sequence's first blocks, as far as there are on the device, or in host memory too."""
        node, nodes = self._roots.get(way.scope), []
        if node is None:
            return []
        for part in way.parts(num_blocks)[:num_blocks]:
            node = node.children.get(part)
            if node is None or not (node.block or on_host):
                break
            nodes.append(node)
        return nodes

    def add(self, parent: Node, part: bytes, block: int) -> Node:
        """The node of a held block: a new one, or that in host memory, which is on the device again."""
        node = parent.children.get(part)
        if node is None:
            node = parent.children[part] = Node(parent, part, parent.scope, 0)
        self.place(node, block)
        return node

    def place(self, node: Node, block: int) -> None:
        """The node without a block has this one, which is held."""
        node.block, self._nodes[block] = block, node
        if self.host is not None:
            self.host.wake(node)

    def drop(self, nodes: Collection[Node]) -> list[int]:
        """Drop these nodes and all below them. Returns the blocks that were idle, and are free now."""
        freed = []
        for node in nodes:
            assert node.parent is not None
            node.parent.children.pop(node.part, None)
            if node.parent.parent is None:
                self.leave_root(node.parent)
        stack = [*nodes]
        while stack:
            node = stack.pop()
            if node.is_dropped:
                continue
            stack.extend(node.children.values())
            node.children.clear()
            if node.block in self._idle.get(node.scope[0], ()):
                self._leave_queue(node)
                freed.append(node.block)
            self._nodes.pop(node.block, None)
            self._drop_state(node)
            if self.host is not None:
                self.host.wake(node)
            node.block, node.is_dropped = 0, True
        return freed

    def drop_all(self) -> list[int]:
        """As `drop`, of all."""
        return self.drop([node for root in self._roots.values() for node in root.children.values()])

    # ---- idle blocks, for `BlockPool`

    def rest(self, block: int) -> bool:
        """Keep a block that its last account has released; False: it is not in the trie, and free."""
        node = self._nodes.get(block)
        if node is None:
            return False
        self._idle.setdefault(node.scope[0], OrderedDict())[block] = node
        self.num_idle += 1
        if self.host is not None:
            self.host.rest(node)
        return True

    def wake(self, block: int) -> None:
        """An idle block is held again."""
        self._leave_queue(self._nodes[block])
        if self.host is not None:
            self.host.wake(self._nodes[block])

    def _leave_queue(self, node: Node) -> None:
        queue = self._idle[node.scope[0]]
        del queue[node.block]
        self.num_idle -= 1
        if not queue:
            del self._idle[node.scope[0]]

    def _leave_device(self, node: Node) -> list[int]:
        """Drop a node with an idle block, unless it has a copy in host memory. Returns the block, which is free now."""
        if self.host is None or not self.host.leave(node):
            return self.drop([node])
        self._leave_queue(node)
        del self._nodes[node.block]
        block, node.block = node.block, 0
        return [block]

    def evict(self, num_blocks: int) -> list[int]:
        """Let up to so many idle blocks go, those of the tenant with most first, which are free now."""
        freed: list[int] = []
        while len(freed) < num_blocks and self._idle:
            sizes = sorted(map(len, self._idle.values()))
            largest = max(self._idle.values(), key=len)
            num_more = sizes[-1] - sizes[-2] if len(sizes) > 1 else sizes[-1]
            for _ in range(min(num_blocks - len(freed), max(num_more, 1))):
                if largest:
                    freed += self._leave_device(next(iter(largest.values())))
        self.num_evicted += len(freed)
        return freed

    def check_integrity(self, num_holders: Callable[[int], int]) -> None:
        """Ways, the table of blocks, the idle queues and the accounts agree."""
        seen: dict[int, Node] = {}
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            assert not node.is_dropped and node.block not in seen, "a block of two nodes, or a dropped node"
            assert node.parent is not None and node.parent.children[node.part] is node, "a node without a way to it"
            assert node.parent.parent is None or node.parent.block or not node.block, "no block above a block"
            if node.block:
                seen[node.block] = node
            else:
                assert self.host is not None and node in self.host.row_of, "a node is nowhere"
            stack.extend(node.children.values())
        assert seen == self._nodes, "blocks of no node, or nodes of no block"
        assert all(root.children or root.num_users for root in self._roots.values()), "an empty root"
        idle = {block: node for queue in self._idle.values() for block, node in queue.items()}
        assert set(idle) == {block for block in seen if not num_holders(block)}, "a free block in the trie"
        assert len(idle) == self.num_idle and all(self._idle.values()), "idle blocks miscounted"
        for tenant, queue in self._idle.items():
            order = {block: number for number, block in enumerate(queue)}
            for block, node in queue.items():
                assert node.scope[0] == tenant, "a block in another tenant's queue"
                below = [child.block for child in node.children.values() if child.block]
                assert all(order.get(child, len(order)) < order[block] for child in below), "evicted before those below"
