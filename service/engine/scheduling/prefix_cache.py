"""Prefix cache: a prompt that begins like another one is computed from where they differ.

It knows the ways of sequences through the trie (`prefix_trie.py`), and holds nothing but through their accounts. The
key of a block are its tokens, and the digest of the adapter with its first token in the block where it has begun: an
aLoRA's blocks before its invocation are the base's. A scope is the tenant and `cache_salt`, and the class of the
request's length limit where rotations depend on it; requests of different scopes never find each other's blocks.

A running sequence *publishes* its full blocks when the step that computes their last token is launched and their tokens
are known: a device runs steps in that order, so the next step may read them. Its account holds all blocks above those
that it publishes, also where it has computed a second copy of one. Nothing found is kept across steps: a waiting
sequence is looked up in each step that could admit it. Behind the last full block, tokens that a running sequence has
computed of its last block are found too, and that block is copied. A sequence whose prompt another one is just
computing *awaits* it, for a bounded number of steps.

Where the model has states, a prefix is found as far as a state was kept (`state_lines.py`), and its blocks behind that
are computed a second time. States are kept where a later request is known to want one: where the request says so
(`Submit.keep_at`: chats know it), where one begins that goes on like this one (the blocks are found and no state), and
where one waits for this one. A chunk ends there, with a block, since a node is a whole one; but where all prompt tokens
but the last of one that waits are common, a chunk ends with these, and the part of a block becomes a tail: the sequence
goes on in a copy of it, as all do that find it. A preempted sequence leaves its state likewise, and goes on behind it.
Others are kept where a chunk happens to end with a block.

Host time: one look-up in a dict for a block that is found or published, nothing for a token within a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from service.engine.scheduling.cache_counts import CacheCounts
from service.engine.scheduling.host_prefixes import HostPrefixes
from service.engine.scheduling.kv_blocks import BlockPool
from service.engine.scheduling.prefix_trie import Found, Node, PrefixTrie, Way, has_adapter, tag_of
from service.engine.scheduling.state_lines import StateLines
from service.engine.sequences.sequence import NEVER, Sequence, num_common

if TYPE_CHECKING:
    from service.models.layers.caches import HostCopies

# Steps that a prefix is awaited for: so many, and so many times those that the sequence's own prompt takes.
_AWAITED_STEPS, _AWAITED_TIMES = 16, 4


class PrefixCache:
    """See the module's docstring.

    lines        of states; a model without any keeps none, and finds blocks alone
    is_on        else nothing is found
    is_shared    tenants share prefixes
    rope_class   of a request's length limit: requests of one class rotate alike
    copies       of blocks and lines to host memory; None: there is no host tier
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
        copies: HostCopies | None = None,
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
        self._ways: dict[int, Way] = {}  # of sequences that were looked up
        self._computing: dict[tuple[Node, bytes], Sequence] = {}
        self._latest: dict[Node, Sequence] = {}  # by the node above the block that they fill
        self._tail_ends: list[Sequence] = []  # that have kept a state within a block in the last step
        self._num_steps = 0
        self.host = None if copies is None else HostPrefixes(copies, blocks, self.trie, lines)
        blocks.keep_idle_in(self.trie)

    # ---- lookups

    def begin_step(self, *, is_idle: bool = False) -> None:
        """Count a step: prefixes are awaited for so many. is_idle: no sequence runs."""
        self._num_steps += 1
        if self.host is not None:
            self.host.begin_step(is_idle=is_idle)
        self.lines.begin_step()
        ends, self._tail_ends = self._tail_ends, []
        for sequence in ends:
            self.publish(sequence)
            if sequence.publish_at != NEVER:
                self._publish_tail(sequence, goes_on=True)

    def pass_step(self) -> None:
        """No step comes while the engine is paused: what is read from host memory holds no blocks for longer."""
        if self.host is not None:
            self.host.begin_step(is_idle=True)

    def find(self, sequence: Sequence, *, may_copy: bool = True, on_host: bool = False) -> Found:
        """The longest prefix of the sequence's tokens that it need not compute; one is left in any case.

        may_copy  else whole blocks alone are found
        on_host   find what is in host memory, too
        """
        if not self._may_read(sequence):
            return Found([], 0)
        way = self._way_of(sequence)
        nodes = self.trie.walk(way, (len(sequence.token_ids) - 1) // self._block_size, on_host=on_host)
        may_copy = may_copy and self._may_copy(sequence)
        if not self.lines.most_kept:
            is_whole = on_host or not may_copy
            num_tokens, source = (len(nodes) * self._block_size, 0) if is_whole else self._begun(way, nodes)
            return Found(nodes, num_tokens, source)

        def has_state(node: Node) -> bool:
            return self.lines.has(node) if on_host else bool(node.block and node.line)

        known = (nodes[-1], len(nodes) * self._block_size) if nodes and not nodes[-1].line else None
        tail, num_more = None, 0
        while nodes:
            if may_copy and nodes[-1].has_tails:
                tail, num_more = way.tail_below(nodes[-1], len(nodes), has_state)
            if tail is not None or has_state(nodes[-1]):
                break
            nodes.pop()
        num_tokens = len(nodes) * self._block_size + num_more
        state_of = tail or (nodes[-1] if nodes else None)
        if known is not None and known[1] <= num_tokens:
            known = None
        return Found(nodes, num_tokens, 0 if tail is None else tail.block, state_of, known)

    def is_loading(self, sequence: Sequence, num_free_blocks: int, *, is_idle: bool) -> bool:
        """Whether more of the sequence's tokens than are found are on their way from host memory, where it can join.
        Begins that once.

        is_idle  nothing runs that could go on meanwhile
        """
        if self.host is None or not self.host.used_bytes or not self._may_read(sequence):
            return False
        found, num_here = self.find(sequence, on_host=True), self.find(sequence).num_tokens
        is_worth_it = found.num_tokens >= num_here + self._block_size
        way = self._way_of(sequence)
        return is_worth_it and self.host.is_loading(way, found, num_here, num_free_blocks, is_idle=is_idle)

    def is_awaiting(self, sequence: Sequence) -> bool:
        """Whether a running sequence computes tokens that this one should find instead of computing them too."""
        if not self._may_read(sequence):
            return False
        way = self._way_of(sequence)
        if way.awaits_until is not None and self._num_steps >= way.awaits_until:
            return False
        if way.awaited is None and self._computing:
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

    def start(self, sequence: Sequence, expected: int, found: Found | None = None) -> None:
        """Open the sequence's account with what is found for it, and let it begin behind that.

        expected  blocks that it will need
        found     by `find`, if no block was taken or freed since then; the line that it has taken may have been a state
        """
        if found is None or self.lines.most_kept:
            found = self.find(sequence)
        if found.source and self._blocks.num_idle_in(found.held) >= self._blocks.num_free:
            found = self.find(sequence, may_copy=False)
        present = -(-min(sequence.num_tokens + 1, sequence.max_total) // self._block_size)
        self._blocks.open(sequence.key, expected, found.blocks, present=present, beside=found.source)
        if found.source:
            is_there = self._blocks.extend(sequence.key, len(found.blocks) + 1)
            assert is_there, "no block for the copy"
        sequence.num_computed, sequence.copied_block = found.num_tokens, found.source
        self.lines.start(sequence, found.state_of, found.known, self._block_size)
        self.counts.add(sequence, found, self._ways.get(sequence.key))
        sequence.publish_at = NEVER
        if not self.is_on:
            return
        way = self._way_of(sequence)
        way.num_nodes, way.awaited, way.num_here, way.has_loaded = len(found.nodes), None, None, False
        way.first_own = min(way.first_own, way.num_nodes)
        self._arrive(way, found.nodes[-1] if found.nodes else self.trie.use_root(way.scope))

    def follow(self, sequence: Sequence) -> None:
        """A step of the sequence is scheduled."""
        if sequence.num_computed >= sequence.publish_at:
            self.publish(sequence)
        if sequence.source_line:
            self.lines.note_read(sequence)
        if not self.lines.most_kept or sequence.publish_at == NEVER:
            return
        num_blocks, num_more = divmod(sequence.num_computed, self._block_size)
        if not num_more:
            way = self._ways[sequence.key]
            self.lines.keep(sequence, way.node if way.num_nodes == num_blocks else None)
        elif sequence.num_computed in sequence.cuts and self.lines.keep(sequence, None):
            self._tail_ends.append(sequence)  # whose scheduled step still writes the block

    def publish(self, sequence: Sequence) -> None:
        """Let others find the sequence's full blocks, which launched steps compute."""
        if sequence.publish_at == NEVER:
            return
        way, num_known = self._ways[sequence.key], min(sequence.num_computed, len(sequence.token_ids))
        node, num_full = way.node, num_known // self._block_size
        assert node is not None, "a sequence that publishes has a way"
        if node.is_dropped:
            self._publish_no_more(way)
        if num_known < sequence.publish_at or node.is_dropped:
            return
        table = self._blocks.blocks(sequence.key)
        parts = way.parts(num_full)
        for index in range(way.num_nodes, num_full):
            child = node.children.get(parts[index])
            if child is None or not child.block:
                child = self.trie.add(node, parts[index], table[index])
            elif child.block != table[index]:
                self._blocks.hold_beside(sequence.key, index, child.block)
            node = child
            if self.lines.most_kept:
                self.lines.know(sequence, node, (index + 1) * self._block_size)
        self._leave(way)
        way.num_nodes = num_full
        self._arrive(way, node)

    def stop(self, sequence: Sequence, *, yields: bool = False) -> None:
        """Release the sequence's account, after publishing what it has computed. yields: it will be computed again, and
        begin behind the state that it leaves."""
        self.publish(sequence)
        if sequence.publish_at != NEVER:
            if sequence in self._tail_ends:
                self._publish_tail(sequence, goes_on=False)
            elif yields and self.lines.most_kept and sequence.num_computed and not sequence.source_line:
                self._keep_last(sequence)
        self.leave_version(sequence)
        self.lines.stop(sequence)
        self._blocks.release(sequence.key)

    def leave_version(self, sequence: Sequence) -> None:
        """The sequence goes on with another adapter: publish what it has computed, and nothing from now on."""
        self.publish(sequence)
        if (way := self._ways.get(sequence.key)) is not None:
            self._publish_no_more(way)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that is over and holds nothing."""
        self._ways.pop(sequence.key, None)
        self.lines.forget(sequence)

    # ---- what is dropped

    def withdraw(self, sequence: Sequence) -> None:
        """Drop all that the sequence has published, with what others have published below it; it publishes no more.
        For one whose logits are not finite."""
        way = self._ways.get(sequence.key)
        if way is None:
            return
        nodes = self.trie.walk(way, len(sequence.token_ids) // self._block_size, on_host=True)
        self._publish_no_more(way)
        own = nodes[way.first_own :]
        if not own and len(nodes) == way.first_own:  # it has shared all whole blocks with others, but no part of one
            above = nodes[-1] if nodes else self.trie.root(way.scope)
            keys = [key for _, key in way.tails(len(nodes), self._block_size - 1)]
            own = [] if above is None else [above.children[key] for key in keys if key in above.children]
        self._blocks.take_back(self.trie.drop(own))

    def drop_adapter(self, digest: str) -> None:
        """Drop what was computed with an adapter, or with a sum that has it, in all scopes. Its files were deleted or
        damaged: sequences that run with it publish no more, and none joins before it has been read again."""
        made = [node for node in self.trie.nodes if has_adapter(tag_of(node.part, self._block_size), digest)]
        self._blocks.take_back(self.trie.drop(made))
        for way in self._ways.values():
            if has_adapter(way.tag, digest):
                self._publish_no_more(way)

    def reset(self) -> None:
        """Drop everything. Sequences that run keep their blocks, and publish no more."""
        for way in self._ways.values():
            self._publish_no_more(way)
        self._blocks.take_back(self.trie.drop_all())

    def check_integrity(self) -> None:
        """The trie and the accounts agree, and tables of running sequences name no others."""
        self.trie.check_integrity(self._blocks.num_holders)
        if self.host is not None:
            self.host.check_integrity()
        entries = {way.in_flight for way in self._ways.values()} - {None}
        assert entries == set(self._computing), "a block is computed by nobody"
        ways = {way.node for way in self._ways.values() if way.node is not None}
        assert set(self._latest) <= ways, "a block is filled by nobody"
        assert all(way.sequence.is_running for way in self._ways.values() if way.node is not None), "one does not run"

    # ---- inner parts

    def _may_read(self, sequence: Sequence) -> bool:
        """Whether the sequence may begin behind cached tokens: no logits of theirs, and no sum over them, is wanted."""
        wants_all = sequence.num_prompt_logprobs_missing > 0 or sequence.request.pooling == "mean"
        return self.is_on and not wants_all

    def _way_of(self, sequence: Sequence) -> Way:
        way, tag = self._ways.get(sequence.key), (sequence.adapter or "").encode()
        if way is None or way.tag != tag:
            tenant = "" if self._is_shared else sequence.request.tenant
            scope = (tenant, sequence.request.cache_salt, self._rope_class(sequence.max_total))
            way = self._ways[sequence.key] = Way(sequence, scope, tag, self._block_size)
        return way

    def _may_copy(self, sequence: Sequence) -> bool:
        """Whether the whole sequence fits beside a block that it copies, which it holds."""
        return -(-sequence.max_total // self._block_size) < self._blocks.capacity

    def _keep_last(self, sequence: Sequence) -> None:
        """Keep the state that the sequence's launched steps lead to, whose tokens are known and published."""
        way = self._ways[sequence.key]
        is_whole = not sequence.num_computed % self._block_size
        if self.lines.keep(sequence, way.node if is_whole else None, yields=True) and not is_whole:
            self._publish_tail(sequence, goes_on=False)

    def _publish_tail(self, sequence: Sequence, *, goes_on: bool) -> None:
        """The launched steps lead to a state within a block, which is kept: let others find it, and the sequence, if it
        goes on, do so in a copy. Without a block for that nobody finds it."""
        way = self._ways[sequence.key]
        num_blocks, num = divmod(sequence.num_computed, self._block_size)
        assert way.node is not None and way.num_nodes == num_blocks, "a part of a prompt is known"
        key = next(way.tails(num_blocks, num))[1]
        tail = way.node.children.get(key)
        if tail is None or not tail.block:
            block = self._blocks.blocks(sequence.key)[num_blocks]
            if goes_on:
                if not self._blocks.replace_last(sequence.key):
                    return
                sequence.copied_block = block
            tail = self.trie.add(way.node, key, block)
            way.node.has_tails = True
        self.lines.know(sequence, tail, sequence.num_computed)

    def _begun(self, way: Way, nodes: list[Node]) -> tuple[int, int]:
        """How many tokens are found with those of a block behind `nodes`, and that block: one of which all but the last
        token is wanted, or one that a running sequence fills."""
        sequence, size = way.sequence, self._block_size
        start = len(nodes) * size
        above = nodes[-1] if nodes else self.trie.root(way.scope)
        most = min(len(sequence.token_ids) - 1 - start, size - 1)
        if above is None or most <= 0:
            return start, 0
        if len(sequence.token_ids) == start + size:
            child = above.children.get(way.parts(len(nodes) + 1)[len(nodes)])
            if child is not None and child.block:
                return start + most, child.block
        other = self._latest.get(above)
        if other is None or not other.has_begun:  # its own copy is not launched
            return start, 0
        num = num_common(sequence, other, start, min(start + most, other.num_computed))
        return (start + num, self._blocks.blocks(other.key)[len(nodes)]) if num else (start, 0)

    def _owner_of_next(self, way: Way) -> tuple[Sequence, int] | None:
        """The running sequence that computes the block behind what is found, and how many tokens of its are of use."""
        sequence = way.sequence
        num_blocks = sequence.num_prompt // self._block_size
        nodes = self.trie.walk(way, num_blocks)
        if (expected := self.lines.expected(nodes)) is not None:
            num = self._num_common(sequence, expected[0])
            is_tail = num % self._block_size and self.lines.ask(expected[0], num)
            return expected[0], num if is_tail else expected[1] * self._block_size
        above = nodes[-1] if nodes else self.trie.root(way.scope)
        if above is None or len(nodes) == num_blocks:
            return None
        if (owner := self._computing.get((above, way.parts(num_blocks)[len(nodes)]))) is None:
            return None
        num = self._num_common(sequence, owner)
        return (owner, num) if not self.lines.most_kept or self.lines.ask(owner, num) else None

    def _num_common(self, sequence: Sequence, owner: Sequence) -> int:
        """Tokens that the sequence need not compute once the owner has. Where there are states these are whole blocks,
        or all but the last one of its prompt."""
        num = num_common(sequence, owner, 0, min(sequence.num_prompt - 1, owner.num_prompt))
        if not self.lines.most_kept:
            return num
        is_worth_it = num == sequence.num_prompt - 1 and num - owner.num_computed > self._block_size
        may_copy = is_worth_it and self._may_copy(sequence) and self._may_copy(owner)
        return num if may_copy else num - num % self._block_size

    def _arrive(self, way: Way, node: Node) -> None:
        """The sequence's next block is below this node; let others know if it is one of its prompt."""
        way.node = node
        node.num_users += 1
        if way.sequence.has_begun or node not in self._latest:
            self._latest[node] = way.sequence
        way.sequence.publish_at = (way.num_nodes + 1) * self._block_size
        if way.sequence.publish_at <= way.sequence.num_prompt:
            key = node, way.parts(way.num_nodes + 1)[way.num_nodes]
            if self._computing.setdefault(key, way.sequence) is way.sequence:
                way.in_flight = key

    def _leave(self, way: Way) -> None:
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

    def _publish_no_more(self, way: Way) -> None:
        if way.node is not None:
            self._leave(way)
            way.node = None
            way.sequence.publish_at = NEVER
            self.lines.publish_no_more(way.sequence)
