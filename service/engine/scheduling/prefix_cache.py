"""Prefix cache: a prompt that begins like another one is computed from where they differ.

It knows the ways of sequences through the trie (`prefix_trie.py`), and holds nothing but through their accounts. The
key of a block are its tokens, and the digest of the adapter with its first token in the block where it has begun: an
aLoRA's blocks before its invocation are the base's. A scope is the tenant and `cache_salt`, and the class of the
request's length limit where rotations depend on it; requests of different scopes never find each other's blocks.

A running sequence *publishes* its full blocks when the step that computes their last token is launched and their tokens
are known: a device runs steps in that order, so the next step may read them. Its account holds all blocks above those
that it publishes, also where it has computed a second copy of one. Nothing found is kept across steps: a waiting
sequence is looked up in each step that could admit it. Behind the last full block, tokens that a running sequence has
computed of its last block are found too, and that block is copied.

Where the model has states, a prefix is found as far as a state was kept (`state_lines.py`), and its blocks behind that
are computed a second time. States are kept where a later request is known to want one: where the request says so
(`Submit.keep_at`: chats know it), where one begins that goes on like this one (the blocks are found and no state), and
where one waits for this one. A chunk ends there, with a block, since a node is a whole one. Others are kept where a
chunk happens to end with a block.

A sequence whose prompt another one is just computing *awaits* it, for a bounded number of steps.

Host time: one look-up in a dict for a block that is found or published, nothing for a token within a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from adapters.sums import parts_of
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.scheduling.prefix_trie import Node, PrefixTrie, Scope
from service.engine.scheduling.state_lines import StateLines
from service.engine.sequences.sequence import NEVER, Sequence, num_equal, same_until

# Steps that a prefix is awaited for: so many, and so many times those that the sequence's own prompt takes.
_AWAITED_STEPS, _AWAITED_TIMES = 16, 4
_TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class _Way:
    """The way of a sequence through the trie.

    tag          digest of its adapter; empty for the base
    parts        keys of its first blocks, as far as they were asked for
    node         while it runs and publishes: the last that it has found or published, `num_nodes` below the root
    first_own    blocks before this one were others' whenever it joined
    in_flight    its entry in the table of blocks that are being computed
    awaited      the sequence that it awaits, and how many tokens that must have computed
    awaits_until  number of the step from which on it awaits nobody
    """

    sequence: Sequence
    scope: Scope
    tag: bytes
    parts: list[bytes] = field(default_factory=list)
    node: Node | None = None
    num_nodes: int = 0
    first_own: int = NEVER
    in_flight: tuple[Node, bytes] | None = None
    awaited: tuple[Sequence, int] | None = None
    awaits_until: int | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """blocks: of the first tokens. source: the block that begins with the rest of `num_tokens`, to be copied, or 0.
    state_of: the node whose state was kept. known: the node and the tokens up to which blocks are known without one."""

    blocks: list[int]
    num_tokens: int
    source: int = 0
    state_of: Node | None = None
    known: tuple[Node, int] | None = None


@dataclass(slots=True)
class CacheCounts:
    """Tokens of prompts when requests first joined, those of them that were found, those whose blocks were and no state
    behind them, and tokens found when preempted requests joined again."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    stateless_tokens: int = 0
    resumed_tokens: int = 0


class PrefixCache:
    """See the module's docstring.

    lines        of states; a model without any keeps none, and finds blocks alone
    is_on        else nothing is found
    is_shared    tenants share prefixes
    rope_class   of a request's length limit: requests of one class rotate alike
    """

    def __init__(
        self,
        blocks: BlockPool,
        lines: StateLines,
        *,
        block_size_tokens: int,
        token_budget: int,
        is_on: bool = True,
        is_shared: bool = False,
        rope_class: Callable[[int], tuple[int, ...]] = lambda _limit: (),
    ) -> None:
        self.counts = CacheCounts()
        self.lines = lines
        self.trie = PrefixTrie(lambda node: self.lines.drop(node))
        self._blocks = blocks
        self._block_size = block_size_tokens
        self._token_budget = token_budget
        self.is_on = is_on
        self._is_shared = is_shared
        self._rope_class = rope_class
        self._ways: dict[int, _Way] = {}  # of sequences that were looked up
        self._computing: dict[tuple[Node, bytes], Sequence] = {}
        self._latest: dict[Node, Sequence] = {}  # by the node above the block that they fill
        self._num_steps = 0
        blocks.keep_idle_in(self.trie)

    # ---- lookups

    def begin_step(self) -> None:
        """Count a step: prefixes are awaited for so many."""
        self._num_steps += 1
        self.lines.begin_step()

    def find(self, sequence: Sequence) -> Found:
        """The longest prefix of the sequence's tokens that it need not compute; one is left in any case."""
        if not self._may_read(sequence):
            return Found([], 0)
        way = self._way_of(sequence)
        nodes = self._walk(way, (len(sequence.token_ids) - 1) // self._block_size)
        if not self.lines.most_kept:
            num_tokens, source = self._tail(way, nodes)
            return Found([node.block for node in nodes], num_tokens, source)
        known = (nodes[-1], len(nodes) * self._block_size) if nodes and not nodes[-1].line else None
        while nodes and not nodes[-1].line:
            nodes.pop()
        state_of = nodes[-1] if nodes else None
        return Found([node.block for node in nodes], len(nodes) * self._block_size, 0, state_of, known)

    def num_idle_in(self, found: Found) -> int:
        """Blocks of these that count as free now, and will not when they are held."""
        return sum(not self._blocks.num_holders(block) for block in {*found.blocks, found.source} - {0})

    def is_awaiting(self, sequence: Sequence) -> bool:
        """Whether a running sequence computes tokens that this one should find instead of computing them too."""
        if not self._computing or not self._may_read(sequence):
            return False
        way = self._way_of(sequence)
        if way.awaits_until is not None and self._num_steps >= way.awaits_until:
            return False
        if way.awaited is None:
            way.awaited = self._owner_of_next(way)
        if way.awaited is None:
            return False
        owner, num_tokens = way.awaited
        if not owner.is_running or owner.num_computed >= num_tokens:
            way.awaited = None
            return False
        if way.awaits_until is None:
            num_steps = -(-sequence.num_prompt // self._token_budget)
            way.awaits_until = self._num_steps + _AWAITED_STEPS + _AWAITED_TIMES * num_steps
        return True

    # ---- the way of a sequence that runs

    def start(self, sequence: Sequence, expected: int) -> None:
        """Open the sequence's account with what is found for it, and let it begin behind that.

        expected  blocks that it will need
        """
        found = self.find(sequence)
        self._blocks.open(sequence.key, expected, found.blocks)
        num_tokens, source = len(found.blocks) * self._block_size, 0
        if found.source:
            self._blocks.hold_beside(sequence.key, len(found.blocks), found.source)
            if self._blocks.extend(sequence.key, len(found.blocks) + 1):
                num_tokens, source = found.num_tokens, found.source
        sequence.num_computed, sequence.copied_block = num_tokens, source
        self.lines.start(sequence, found.state_of, found.known, self._block_size)
        self._count(sequence, num_tokens, found)
        sequence.publish_at = NEVER
        if not self.is_on:
            return
        way = self._way_of(sequence)
        way.num_nodes, way.awaited = len(found.blocks), None
        way.first_own = min(way.first_own, way.num_nodes)
        nodes = self._walk(way, way.num_nodes)
        self._arrive(way, nodes[-1] if nodes else self.trie.use_root(way.scope))

    def follow(self, sequence: Sequence) -> None:
        """A step of the sequence is scheduled."""
        if sequence.num_computed >= sequence.publish_at:
            self.publish(sequence)
        if sequence.source_line:
            self.lines.note_read(sequence)
        num_blocks, num_more = divmod(sequence.num_computed, self._block_size)
        if self.lines.most_kept and not num_more and sequence.publish_at != NEVER:
            way = self._ways[sequence.key]
            self.lines.keep(sequence, way.node if way.num_nodes == num_blocks else None)

    def publish(self, sequence: Sequence) -> None:
        """Let others find the sequence's full blocks, which launched steps compute."""
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        if num_known < sequence.publish_at:
            return
        way, num_full = self._ways[sequence.key], num_known // self._block_size
        node = way.node
        assert node is not None, "a sequence that publishes has a way"
        if node.is_dropped:
            self._publish_no_more(way)
            return
        table = self._blocks.blocks(sequence.key)
        parts = self._parts(way, num_full)
        for index in range(way.num_nodes, num_full):
            child = node.children.get(parts[index])
            if child is None:
                child = self.trie.add(node, parts[index], table[index])
            elif child.block != table[index]:
                self._blocks.hold_beside(sequence.key, index, child.block)
            node = child
            if self.lines.most_kept:
                self.lines.know(sequence, node, (index + 1) * self._block_size)
        self._leave(way)
        way.num_nodes = num_full
        self._arrive(way, node)

    def stop(self, sequence: Sequence) -> None:
        """Release the sequence's account, after publishing what it has computed."""
        self.publish(sequence)
        way = self._ways.get(sequence.key)
        if way is not None and way.node is not None:
            self._publish_no_more(way)
        self.lines.stop(sequence)
        self._blocks.release(sequence.key)

    def leave_version(self, sequence: Sequence) -> None:
        """The sequence goes on with another adapter: publish what it has computed, and nothing from now on."""
        self.publish(sequence)
        way = self._ways.get(sequence.key)
        if way is not None and way.node is not None:
            self._publish_no_more(way)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is over and holds nothing."""
        self._ways.pop(sequence.key, None)

    # ---- what is dropped

    def withdraw(self, sequence: Sequence) -> None:
        """Drop all that the sequence has published, with what others have published below it; it publishes no more.
        For one whose logits are not finite."""
        way = self._ways.get(sequence.key)
        if way is None:
            return
        nodes = self._walk(way, len(sequence.token_ids) // self._block_size)
        if way.node is not None:
            self._publish_no_more(way)
        self._blocks.take_back(self.trie.drop(nodes[way.first_own :]))

    def drop_adapter(self, digest: str) -> None:
        """Drop what was computed with an adapter, or with a sum that has it, in all scopes. Its files were deleted or
        damaged: sequences that run with it publish no more, and none joins before it has been read again."""
        tag_start = (self._block_size + 1) * _TOKEN_BYTES
        self._blocks.take_back(
            self.trie.drop([node for node in self.trie.nodes if _has_part(node.part[tag_start:], digest)])
        )
        for way in self._ways.values():
            if _has_part(way.tag, digest) and way.node is not None:
                self._publish_no_more(way)

    def reset(self) -> None:
        """Drop everything. Sequences that run keep their blocks, and publish no more."""
        for way in self._ways.values():
            if way.node is not None:
                self._publish_no_more(way)
        self._blocks.take_back(self.trie.drop_all())

    def check_integrity(self) -> None:
        """The trie and the accounts agree, and tables of running sequences name no others."""
        self.trie.check_integrity(self._blocks.num_holders)
        entries = {way.in_flight for way in self._ways.values()} - {None}
        assert entries == set(self._computing), "a block is computed by nobody"
        ways = {way.node for way in self._ways.values() if way.node is not None}
        assert set(self._latest) <= ways, "a block is filled by nobody"
        assert all(way.sequence.is_running for way in self._ways.values() if way.node is not None), "one does not run"

    # ---- inner parts

    def _count(self, sequence: Sequence, num_tokens: int, found: Found) -> None:
        if sequence.num_cached is None:
            sequence.num_cached = num_tokens
            self.counts.queried_tokens += sequence.num_prompt
            self.counts.hit_tokens += num_tokens
            if found.known is not None:
                self.counts.stateless_tokens += found.known[1] - num_tokens
        else:
            self.counts.resumed_tokens += num_tokens

    def _may_read(self, sequence: Sequence) -> bool:
        """Whether the sequence may begin behind cached tokens: no logits of theirs, and no sum over them, is wanted."""
        wants_all = sequence.num_prompt_logprobs_missing > 0 or sequence.request.pooling == "mean"
        return self.is_on and not wants_all

    def _way_of(self, sequence: Sequence) -> _Way:
        way, tag = self._ways.get(sequence.key), (sequence.adapter or "").encode()
        if way is None or way.tag != tag:
            tenant = "" if self._is_shared else sequence.request.tenant
            scope = (tenant, sequence.request.cache_salt, self._rope_class(sequence.max_total))
            way = self._ways[sequence.key] = _Way(sequence, scope, tag)
        return way

    def _parts(self, way: _Way, num_blocks: int) -> list[bytes]:
        """The keys of the first blocks, at least so many: int32 tokens, and where the adapter has begun its first
        token in the block, int32, and its digest."""
        first, size = len(way.parts), self._block_size
        if num_blocks <= first:
            return way.parts
        num_blocks = max(num_blocks, way.sequence.num_prompt // size)
        tokens = np.array(way.sequence.token_ids[first * size : num_blocks * size], np.int32).tobytes()
        width, adapter_start = size * _TOKEN_BYTES, way.sequence.request.adapter_start
        for index in range(first, num_blocks):
            part = tokens[(index - first) * width : (index - first + 1) * width]
            if way.tag and (index + 1) * size > adapter_start:
                offset = max(adapter_start - index * size, 0)
                part += offset.to_bytes(_TOKEN_BYTES, "little") + way.tag
            way.parts.append(part)
        return way.parts

    def _walk(self, way: _Way, num_blocks: int) -> list[Node]:
        """The nodes of the sequence's first blocks, as far as there are."""
        return self.trie.walk(way.scope, self._parts(way, num_blocks)[:num_blocks])

    def _tail(self, way: _Way, nodes: list[Node]) -> tuple[int, int]:
        """How many tokens are found with those of a block behind `nodes`, and that block: one of which all but the last
        token is wanted, or one that a running sequence fills."""
        sequence, size = way.sequence, self._block_size
        start = len(nodes) * size
        above = nodes[-1] if nodes else self.trie.root(way.scope)
        most = min(len(sequence.token_ids) - 1 - start, size - 1)
        if above is None or most <= 0:
            return start, 0
        if len(sequence.token_ids) == start + size:
            child = above.children.get(self._parts(way, len(nodes) + 1)[len(nodes)])
            if child is not None:
                return start + most, child.block
        other = self._latest.get(above)
        if other is None or not other.has_begun:  # its own copy is not launched
            return start, 0
        end = min(start + most, other.num_computed, same_until(sequence, other))
        num = num_equal(sequence.token_ids[start:end], other.token_ids[start:end])
        return (start + num, self._blocks.blocks(other.key)[len(nodes)]) if num else (start, 0)

    def _owner_of_next(self, way: _Way) -> tuple[Sequence, int] | None:
        """The running sequence that computes the block behind what is found, and how many tokens of its are of use."""
        sequence = way.sequence
        num_blocks = sequence.num_prompt // self._block_size
        nodes = self._walk(way, num_blocks)
        if (expected := self.lines.expected(nodes)) is not None:
            return expected[0], expected[1] * self._block_size
        above = nodes[-1] if nodes else self.trie.root(way.scope)
        if above is None or len(nodes) == num_blocks:
            return None
        owner = self._computing.get((above, way.parts[len(nodes)]))
        if owner is None:
            return None
        most = min(sequence.num_prompt - 1, owner.num_prompt, same_until(sequence, owner))
        num = num_equal(sequence.token_ids[:most], owner.token_ids[:most])
        if not self.lines.most_kept:
            return owner, num
        num -= num % self._block_size
        return (owner, num) if self.lines.ask(owner, num) else None

    def _arrive(self, way: _Way, node: Node) -> None:
        """The sequence's next block is below this node; let others know if it is one of its prompt."""
        way.node = node
        node.num_users += 1
        if way.sequence.has_begun or node not in self._latest:
            self._latest[node] = way.sequence
        way.sequence.publish_at = (way.num_nodes + 1) * self._block_size
        if way.sequence.publish_at <= way.sequence.num_prompt:
            key = node, self._parts(way, way.num_nodes + 1)[way.num_nodes]
            if self._computing.setdefault(key, way.sequence) is way.sequence:
                way.in_flight = key

    def _leave(self, way: _Way) -> None:
        """Undo `_arrive`."""
        node = way.node
        assert node is not None
        if way.in_flight is not None:
            del self._computing[way.in_flight]
            way.in_flight = None
        if self._latest.get(node) is way.sequence:
            del self._latest[node]
        node.num_users -= 1
        if node.parent is None:
            self.trie.leave_root(node)

    def _publish_no_more(self, way: _Way) -> None:
        self._leave(way)
        way.node = None
        way.sequence.publish_at = NEVER
        self.lines.publish_no_more(way.sequence)


def _has_part(tag: bytes, digest: str) -> bool:
    """Whether a tag is an adapter's, or that of a sum with it."""
    return any(part == digest for part, _ in parts_of(tag.decode()))
