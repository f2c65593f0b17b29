"""Lines of state: one that each running sequence writes, and those whose states the prefix cache keeps.

Keeping a state copies nothing. The line changes its owner: the sequence that has written it gets a fresh one, which its
next step writes, and reads the kept one first (`source_state_indices`). A sequence that begins behind a kept state does
the same. A state belongs to the node that ends with its last token, or, until there is one, to its sequence.

A kept line is free when its node is dropped, or when another state is kept instead of it: of the tenant with most of
them, the one with the lowest *rank*. All lines have as many bytes, so a state's worth is the tokens that would have to
be computed again without it; its rank is that number and the rank of the last one that was given up when it was kept
(the rule is known as GreedyDual). A state that nobody has asked for is worth less, by the share of such ones that were
read. When the only sequence that has read a state leaves one further on, as the next turn of a chat does, the earlier
one is worth nothing; each further sequence shows that the state is shared, and renews the rank. A kept line is held,
besides, by each sequence that reads it in its next step, and until the step behind that is scheduled: in one step
nobody writes what another one reads.

The pool has a line for each sequence that may run, and `most_kept` more, so that one that joins, or hands over its
line, always finds one. Cost per step: O(sequences that end a block in it), and O(kept lines) for each that is given up.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.engine.scheduling.prefix_trie import Node, NodeRows
from service.engine.sequences.sequence import Sequence
from service.engine.sequences.slots import Slots

# Blocks that a state must save, to be worth a line and the further step in which its prompt is computed.
_LEAST_SAVED_BLOCKS = 4
_SHARE_OF_LAST = 16  # states over which `_share_read` goes, about


@dataclass(slots=True, eq=False)
class _Kept:
    """A state of a sequence's first tokens.

    is_asked   it was asked for; else kept where a chunk happened to end
    num_saved  tokens that are computed again where it is wanted and not there
    num_reads  sequences that have begun behind it, or have kept it and are to keep another one
    node       None until the tokens' values are known
    """

    num_tokens: int
    line: int
    is_asked: bool
    num_saved: int
    rank: float = 0.0
    num_reads: int = 0
    node: Node | None = None


class StateLines(Slots):
    """See the module's docstring. num_lines, num_slots: of all and of sequences, the null one included in each. host:
    rows of host memory for states; None without the tier."""

    def __init__(self, num_lines: int, num_slots: int) -> None:
        super().__init__(num_lines)
        self.most_kept = num_lines - num_slots
        self.num_evicted = 0
        self.host: NodeRows | None = None
        self._on_host: dict[Node, _Kept] = {}  # states that have no line
        self._num_holders: dict[int, int] = {}  # of kept lines
        self._states: dict[str, dict[Node, _Kept]] = {}  # by tenant
        self._share_read = 0.5  # of late, of states that nobody had asked for
        self._last_rank = 0.0  # of the state that was given up last
        # The tokens behind which a sequence would begin again if it left no further state, and the state that it alone
        # has read.
        self._behind: dict[Sequence, tuple[int, _Kept | None]] = {}
        self._are_read: list[int] = []  # in the step that was scheduled last
        self._of_no_node: dict[Sequence, list[_Kept]] = {}
        # The latest state of each sequence that was kept where nobody had asked for one; the next one takes its place.
        self._latest: dict[Sequence, _Kept] = {}
        self._yielded: dict[Sequence, _Kept] = {}  # by sequences that wait to go on behind them
        self._expected: dict[Node, Sequence] = {}  # who is to keep the state of a node that there is

    @property
    def num_kept(self) -> int:
        return len(self._num_holders)

    def begin_step(self) -> None:
        """The last step is launched: what is written from now on is written after it has read."""
        lines, self._are_read = self._are_read, []
        for line in lines:
            self._let_go(line)

    # ---- of a sequence that runs

    def start(
        self, sequence: Sequence, node: Node | None, known: tuple[Node, int] | None, block_size_tokens: int
    ) -> None:
        """The sequence begins behind the node's state; None: with no state.

        known  a node below that, and how many tokens it ends: others have gone on otherwise there, or will
        """
        if (left := self._yielded.pop(sequence, None)) is not None:
            self._latest[sequence] = left
        sequence.cuts = self._cuts(sequence, known, block_size_tokens)
        if known is not None and known[1] in sequence.cuts:
            self._expected.setdefault(known[0], sequence)
        self._behind[sequence] = 0, None
        if node is not None:
            self._read_next(sequence, node.line)
            self._rest(node)
            kept = self._states[node.scope[0]][node]
            kept.num_reads += 1
            if kept.num_reads > 1:
                self._renew(kept)
                self._behind[sequence] = kept.num_tokens, None
            else:
                self._behind[sequence] = kept.num_tokens - kept.num_saved, kept
                if not kept.is_asked:
                    self._share_read += (1 - self._share_read) / _SHARE_OF_LAST

    def ask(self, sequence: Sequence, num_tokens: int) -> bool:
        """Have a running sequence keep the state of so many of its tokens; False if it has begun to compute more."""
        if sequence.num_computed >= num_tokens:
            return False
        sequence.cuts = tuple(sorted({*sequence.cuts, num_tokens}))
        return True

    def expected(self, nodes: list[Node]) -> tuple[Sequence, int] | None:
        """The sequence that is to keep a state behind those that these nodes have: of the last node possible, with its
        number from 1 on."""
        for index in range(len(nodes) if self._expected else 0, 0, -1):
            if nodes[index - 1].line:
                break
            if (sequence := self._expected.get(nodes[index - 1])) is not None:
                return sequence, index
        return None

    def note_read(self, sequence: Sequence) -> None:
        """The sequence's next step is scheduled."""
        self._are_read.append(sequence.source_line)
        sequence.source_line = 0

    def keep(self, sequence: Sequence, node: Node | None, *, yields: bool = False) -> bool:
        """Keep the state that the sequence's scheduled steps lead to, if it was asked for or there is room; whether its
        line was.

        node    that ends there; None: there is none yet
        yields  the sequence is to begin behind it
        """
        if node is not None:
            self._expected.pop(node, None)
        if node is not None and node.line:
            self._renew(self._states[node.scope[0]][node])
            return False
        is_wanted = sequence.num_computed in sequence.cuts
        if not is_wanted and (before := self._latest.pop(sequence, None)) is not None:
            self._forget(sequence, before)
        elif not is_wanted and not yields and len(self._latest) >= self.most_kept // 2:
            return False
        if self.num_kept >= self.most_kept and not self._evict():
            return False
        behind, read = self._behind[sequence]
        kept = _Kept(sequence.num_computed, sequence.line, is_wanted or yields, sequence.num_computed - behind)
        self._renew(kept)
        if is_wanted:
            kept.num_reads = int(sequence.cuts[-1] > kept.num_tokens)
            self._behind[sequence] = kept.num_tokens, None
            if read is not None and read.num_reads == 1:
                read.rank = self._last_rank
        self._num_holders[kept.line] = 1
        sequence.line = self.acquire()
        self._read_next(sequence, kept.line)
        if not is_wanted:
            (self._yielded if yields else self._latest)[sequence] = kept
        if node is None:
            self._of_no_node.setdefault(sequence, []).append(kept)
        else:
            self._attach(kept, node)
        return True

    def know(self, sequence: Sequence, node: Node, num_tokens: int) -> None:
        """The sequence's first tokens are known and end with the node's block."""
        for kept in self._of_no_node.get(sequence, ()):
            if kept.num_tokens == num_tokens:
                self._attach(kept, node)
                self._remove(sequence, kept)
                return

    def publish_no_more(self, sequence: Sequence) -> None:
        """No node of the sequence will be known."""
        for kept in self._of_no_node.pop(sequence, ()):
            self._let_go(kept.line)
        self._latest.pop(sequence, None)
        if sequence.cuts:
            self._expected = {node: one for node, one in self._expected.items() if one is not sequence}

    def stop(self, sequence: Sequence) -> None:
        """The sequence runs no more, and has published."""
        self.publish_no_more(sequence)
        self._behind.pop(sequence, None)
        if sequence.source_line:
            self._let_go(sequence.source_line)
            sequence.source_line = 0

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        if (left := self._yielded.pop(sequence, None)) is not None:
            self._forget(sequence, left)

    # ---- of the trie

    def drop(self, node: Node) -> None:
        """The node is dropped, or its state is."""
        self._leave_line(node)
        self.drop_on_host(node)

    def drop_on_host(self, node: Node) -> None:
        """The node's state is in host memory no more."""
        if self.host is not None:
            self.host.wake(node)
            self._on_host.pop(node, None)

    def has(self, node: Node) -> bool:
        """Whether the node's state is on the device, or in host memory."""
        return node.line != 0 or node in self._on_host

    def take_kept(self) -> int:
        """A line for a state from host memory; 0 if there is none."""
        if self.num_kept >= self.most_kept and not self._evict():
            return 0
        line = self.acquire()
        self._num_holders[line] = 1
        return line

    def bring(self, node: Node, line: int) -> None:
        """The line has the node's state of host memory, unless that was dropped meanwhile."""
        if (kept := self._on_host.get(node)) is None:
            self._let_go(line)
            return
        kept.line = line
        self._renew(kept)
        self._attach(kept, node)

    def _leave_line(self, node: Node) -> None:
        if node.line:
            states = self._states[node.scope[0]]
            del states[node]
            if not states:
                del self._states[node.scope[0]]
            self._let_go(node.line)
            node.line = 0

    def check_integrity(self) -> None:
        """Each line is free, a running sequence's or kept, and held by those who read it or have its node."""
        super().check_integrity()
        num_holders: dict[int, int] = {}
        nodes = [node for states in self._states.values() for node in states]
        assert all(node.line and not node.is_dropped for node in nodes), "a state of no node"
        of_none = [kept.line for some in self._of_no_node.values() for kept in some]
        for line in (*(node.line for node in nodes), *of_none, *self._are_read):
            num_holders[line] = num_holders.get(line, 0) + 1
        for line, number in self._num_holders.items():
            assert line in self._used and number >= num_holders.pop(line, 0), "a kept line is held by nobody"
        assert not num_holders, "a line is read, or has a node, and is not kept"
        assert self.num_kept <= self.most_kept, "more states kept than there is room for"
        rows = {} if self.host is None else self.host.row_of
        assert {*self._on_host} == {node for node in rows if not node.line}, "states in host memory miscounted"

    # ---- inner parts

    def _cuts(self, sequence: Sequence, known: tuple[Node, int] | None, size: int) -> tuple[int, ...]:
        """Numbers of tokens, in whole blocks, at which others go on otherwise: as the request says, and as they do."""
        cuts: list[int] = []
        if self.most_kept:
            before = sequence.num_computed // size
            places = {at // size for at in sequence.request.keep_at if at < sequence.num_prompt}
            for num_blocks in sorted(places if known is None else {*places, known[1] // size}):
                if num_blocks - before >= _LEAST_SAVED_BLOCKS:
                    cuts.append(num_blocks * size)
                    before = num_blocks
        return tuple(cuts)

    def _read_next(self, sequence: Sequence, line: int) -> None:
        sequence.source_line = line
        self._num_holders[line] += 1

    def _attach(self, kept: _Kept, node: Node) -> None:
        """Give the node the line, unless it has one."""
        kept.node = node
        if node.line:
            self._let_go(kept.line)
            return
        node.line = kept.line
        self._states.setdefault(node.scope[0], {})[node] = kept
        self._rest(node)

    def _rest(self, node: Node) -> None:
        """The node's state is used now, and may leave its line some time later."""
        if self.host is not None:
            self.drop_on_host(node)
            self.host.rest(node)

    def _renew(self, kept: _Kept) -> None:
        kept.rank = self._last_rank + kept.num_saved * (1.0 if kept.is_asked else self._share_read)

    def _remove(self, sequence: Sequence, kept: _Kept) -> None:
        of_no_node = self._of_no_node[sequence]
        of_no_node.remove(kept)
        if not of_no_node:
            del self._of_no_node[sequence]

    def _forget(self, sequence: Sequence, kept: _Kept) -> None:
        if kept.node is None:
            self._remove(sequence, kept)
            self._let_go(kept.line)
        elif self._states.get(kept.node.scope[0], {}).get(kept.node) is kept:
            self.drop(kept.node)

    def _evict(self) -> bool:
        """Free a kept line that nobody reads; False if there is none."""
        for states in sorted(self._states.values(), key=len, reverse=True):
            free = [kept for kept in states.values() if self._num_holders[kept.line] == 1]
            if free:
                lowest = min(free, key=lambda kept: kept.rank)
                assert lowest.node is not None, "a state that has a node"
                self._last_rank = max(self._last_rank, lowest.rank)
                if not lowest.is_asked and not lowest.num_reads:
                    self._share_read -= self._share_read / _SHARE_OF_LAST
                if self.host is not None and self.host.leave(lowest.node):
                    self._on_host[lowest.node] = lowest
                    self._leave_line(lowest.node)
                else:
                    self.drop(lowest.node)
                self.num_evicted += 1
                return True
        return False

    def _let_go(self, line: int) -> None:
        self._num_holders[line] -= 1
        if not self._num_holders[line]:
            del self._num_holders[line]
            self.release(line)
