"""A model, a row pool and a host tier of a few lines each, for tests of the engine's own logic.

The model's logits are a hash of everything the sequence has been through, read back from the caches: the tokens in its
KV slots, a running sum in its state line, and the adapter whose rows its maps point at. A wrong slot, block table,
line, place, segment or logits row, or anything lost in a preemption, changes the tokens. `expected_tokens` says what
must come out.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from adapters.errors import RowsExceeded
from adapters.layout import Group
from adapters.memory.device_upload import COMPLETED
from adapters.memory.row_pool import PoolUsage
from service.engine.engine import Engine, Event
from service.engine.ipc.config import EngineConfig
from service.engine.ipc.messages import Finished, Sampling, Submit, Tokens
from service.engine.loras.interfaces import CopyEvent
from service.engine.model.graphs import CapturedSteps
from service.engine.model.padding import StepSizes
from service.engine.model.runner import Capacity
from service.engine.scheduling.host_prefixes import Pairs
from service.engine.scheduling.prefix_trie import Found
from service.engine.scheduling.state_lines import StateLines
from service.engine.sequences.sequence import Sequence as RunningSequence
from service.grammars.matching import TokenTable
from service.models.step_batch import StepBatch
from service.text.tokenizer import TextTokenizer
from tests.support.engine.stepped_loader import SteppedLoader

VOCAB = 97
EOS = 96
GROUP: Group = "attention"


def next_logits(history: list[int], adapter: int) -> torch.Tensor:
    """float32 [VOCAB]: logits after `history` under an adapter (-1: the base). End-of-sequence is never the largest."""
    key = hash((tuple(history), adapter)) % (2**31)
    generator = torch.Generator().manual_seed(key)
    logits = torch.randn(VOCAB, generator=generator)
    logits[EOS] = -10.0
    return logits


def expected_tokens(prompt: tuple[int, ...], adapter: str | None, num_tokens: int) -> list[int]:
    """Greedy output of the mock model, one token at a time, without any engine."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(int(next_logits(history, adapter_number(adapter)).argmax()))
    return history[len(prompt) :]


def adapter_number(adapter: str | None) -> int:
    """ "a17" -> 17; the base -> -1."""
    return -1 if adapter is None else int(adapter.removeprefix("a").partition("-")[0])


@dataclass(frozen=True)
class MockWeights:
    """An adapter in host memory: "a3-8" takes 8 rows, 1 where no size is named."""

    digest: str
    num_bytes: int = 1000
    score_head: None = None

    @property
    def rows(self) -> dict[Group, int]:
        return {GROUP: int(self.digest.partition("-")[2] or 1)}


class SlowMarks:
    """Makes the marks of copies that end when the test says so, oldest first."""

    def __init__(self) -> None:
        self.num_reached = self.num_made = 0

    def __call__(self) -> CopyEvent:
        self.num_made += 1
        return _SlowMark(self, self.num_made)


class _SlowMark:
    def __init__(self, marks: SlowMarks, number: int) -> None:
        self._marks = marks
        self._number = number

    def is_completed(self) -> bool:
        return self._number <= self._marks.num_reached


@dataclass
class MockRows:
    """A row pool of `num_rows`. Evicts idle ones, oldest first."""

    num_rows: int
    residents: dict[str, int] = field(default_factory=dict)
    pins: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    evicted: list[str] = field(default_factory=list)
    loads: int = 0
    new_mark: Callable[[], CopyEvent] = lambda: COMPLETED

    @staticmethod
    def size(digest: str) -> int:
        return MockWeights(digest).rows[GROUP]

    def load(self, digest: str, host_adapter: object, *, may_evict: bool = True) -> CopyEvent | None:
        assert host_adapter == MockWeights(digest)
        self.check_size(MockWeights(digest).rows)
        idle = [other for other in self.residents if not self.pins.get(other) and other not in self.held]
        staying = sum(size for other, size in self.residents.items() if other not in idle or not may_evict)
        if staying + self.size(digest) > self.num_rows:
            return None
        while sum(self.residents.values()) + self.size(digest) > self.num_rows:
            self.evicted.append(idle[0])
            self.drop(idle.pop(0))
        self.loads += 1
        self.residents[digest] = self.size(digest)
        self.places[digest] = min(set(range(len(self.places) + 1)) - set(self.places.values()))
        return self.new_mark()

    def publish(self, mark: object) -> None:
        pass

    def take_evicted(self) -> list[str]:
        evicted, self.evicted = self.evicted, []
        return evicted

    def hold(self, digest: str, is_held: bool) -> None:
        (self.held.add if is_held else self.held.discard)(digest)

    def forget_addresses(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def check_size(self, rows: Mapping[str, int]) -> None:
        if rows.get(GROUP, 0) > self.num_rows:
            raise RowsExceeded(f"The adapter needs {rows[GROUP]} rows; the row budget holds {self.num_rows}.")

    def has_room(self, rows: Mapping[str, int]) -> bool:
        return self.fits_beside(rows, [digest for digest in self.residents if self.pins.get(digest)])

    def fits_beside(self, rows: Mapping[str, int], digests: Collection[str], *, and_held: bool = True) -> bool:
        staying = {*digests, *(self.held if and_held else ())}
        return rows.get(GROUP, 0) + sum(self.residents[digest] for digest in staying) <= self.num_rows

    def pin(self, digest: str) -> None:
        self.pins[digest] = self.pins.get(digest, 0) + 1

    def unpin(self, digest: str) -> None:
        self.pins[digest] -= 1
        assert self.pins[digest] >= 0

    def drop(self, digest: str) -> None:
        assert not self.pins.get(digest) and digest not in self.held
        self.residents.pop(digest, None)
        self.places.pop(digest, None)

    def place_of(self, digest: str) -> int | None:
        return self.places.get(digest)

    def first_rows(self, place: int) -> tuple[int, ...]:
        return (100 + place,)

    def rows_end(self, _digests: Collection[str]) -> int:
        return 0

    @property
    def num_changes(self) -> int:
        return self.loads

    def rows_needed(self, _digests: Collection[str]) -> int:
        return 0

    def bring_below(self, _end_row: int, _digests: Collection[str], **_limits: int) -> bool:
        return True

    def resident(self) -> tuple[str, ...]:
        return tuple(self.residents)

    def usage(self) -> PoolUsage:
        used = sum(self.residents.values())
        return PoolUsage(used, self.num_rows, 4 * used, 4 * self.num_rows, len(self.residents), self.loads, 0, 0)

    def check_integrity(self) -> None:
        assert sum(self.residents.values()) <= self.num_rows
        assert set(self.residents) == set(self.places)


@dataclass
class MockHost:
    """A host tier whose reads fail for the digests in `broken`, and whose next one can be met in the middle. Only what
    is in `memory` needs none."""

    broken: set[str] = field(default_factory=set)
    memory: set[str] = field(default_factory=set)
    during_next_read: Callable[[], None] | None = None
    reads: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    used_bytes: int = 0

    @property
    def num_kept(self) -> int:
        return len(self.memory)

    def kept(self, digest: str) -> MockWeights | None:
        return MockWeights(digest) if digest in self.memory else None

    def is_kept(self, digest: str) -> bool:
        return digest in self.memory

    def take_evicted(self) -> list[str]:
        return []

    def get(self, digest: str) -> MockWeights:
        if self.during_next_read is not None:
            meet, self.during_next_read = self.during_next_read, None
            meet()
        self.reads.append(digest)
        if digest in self.broken:
            raise ValueError("the file is damaged")
        return MockWeights(digest)

    def drop(self, digest: str) -> None:
        self.dropped.append(digest)
        self.memory.discard(digest)


class LruHost(MockHost):
    """Keeps the last `size` that were read or used."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._order: list[str] = []
        self._evicted: list[str] = []

    def kept(self, digest: str) -> MockWeights | None:
        if digest in self.memory:
            self._order.remove(digest)
            self._order.append(digest)
        return super().kept(digest)

    def get(self, digest: str) -> MockWeights:
        weights = super().get(digest)
        if digest not in self.memory:
            self._order.append(digest)
            self.memory.add(digest)
        while len(self._order) > self._size:
            left = self._order.pop(0)
            self.memory.discard(left)
            self._evicted.append(left)
        return weights

    def drop(self, digest: str) -> None:
        if digest in self.memory:
            self._order.remove(digest)
        super().drop(digest)

    def take_evicted(self) -> list[str]:
        evicted, self._evicted = self._evicted, []
        return evicted


class MockRunner:
    """The model; see the module's docstring."""

    def __init__(
        self, rows: MockRows, config: EngineConfig, *, num_blocks: int, has_conv: bool, max_len: int, num_kept: int = 0
    ) -> None:
        self._rows = rows
        self._block_size = config.block_size_tokens
        self._kv = torch.full((num_blocks * config.block_size_tokens,), -1)
        # Of each KV slot: all that its keys and values follow from, hashed.
        self._origins = [0] * (num_blocks * config.block_size_tokens)
        self.sequence_in: Callable[[int], RunningSequence | None] = lambda _slot: None
        # By a sequence's key: the adapter of each position that it has computed since it last joined.
        self.computed_by: dict[int, list[str | None]] = {}
        # Of each line: all that its state follows from, hashed.
        self.lines = [-1] * (config.max_sequences + 1 + num_kept)
        self.batches: list[StepBatch] = []
        self.num_logits: list[int] = []  # of each step
        self.captured = CapturedSteps(None, "a mock", max_graphs=0)
        self.before_run: Callable[[], None] = lambda: None
        self.host_copies: MockHostCopies | None = None
        self.capacity = Capacity(
            vocab_size=VOCAB,
            hidden_size=2,
            max_model_len_tokens=max_len,
            eos_token_ids=(EOS,),
            num_blocks=num_blocks,
            max_blocks=-(-min(max_len, (num_blocks - 1) * config.block_size_tokens) // config.block_size_tokens),
            num_slots=config.max_sequences + 1,
            num_lines=config.max_sequences + 1 + num_kept,
            has_conv=has_conv,
            num_groups=1,
            has_length_limits=False,
            rope_class=lambda _limit: (),
            dtype="float32",
            device=torch.device("cpu"),
        )

    def padded(self, exact: StepSizes) -> StepSizes:
        return exact

    def run(self, batch: StepBatch, sizes: StepSizes) -> torch.Tensor:
        self.before_run()
        self.batches.append(copy.deepcopy(batch))  # its memory is the next step's too
        attention = batch.attention
        assert 0 not in (attention.slot_mapping // self._block_size), "the null block was written"
        self._kv[attention.slot_mapping] = batch.token_ids
        owner = {place: adapter_number(digest) for digest, place in self._rows.places.items()}
        adapters = [-1] * len(batch.token_ids)
        for segment in batch.lora.segments if batch.lora else ():
            assert segment.first_rows == self._rows.first_rows(segment.place)
            adapters[segment.start : segment.end] = [owner[segment.place]] * (segment.end - segment.start)
        wanted = range(sizes.num_tokens) if batch.logits_rows is None else batch.logits_rows.tolist()
        rows = {row: index for index, row in enumerate(wanted)}
        self.num_logits.append(len(rows))
        logits = torch.empty(len(rows), VOCAB)
        for sequence, kv_len in enumerate(attention.kv_lens):
            start, end = attention.query_starts[sequence], attention.query_starts[sequence + 1]
            blocks = attention.block_tables[sequence]
            history = [
                int(self._kv[blocks[p // self._block_size] * self._block_size + p % self._block_size])
                for p in range(kv_len)
            ]
            first = kv_len - (end - start)
            origins = self._check_origins(blocks, int(batch.token_slots[start]), history, first)
            assert batch.positions[start:end].tolist() == list(range(first, kv_len))
            if batch.conv is not None:
                self._check_line(batch, sequence, origins, first)
            for token in range(start, end):
                if token in rows:
                    logits[rows[token]] = next_logits(history[: first + token - start + 1], adapters[token])
        return logits

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert 0 not in (*sources, *targets), "the null block was copied"
        kv = self._kv.view(-1, self._block_size)
        kv[list(targets)] = kv[list(sources)]
        size = self._block_size
        origins = [self._origins[source * size : (source + 1) * size] for source in sources]
        for target, copied in zip(targets, origins, strict=True):
            self._origins[target * size : (target + 1) * size] = copied

    def sleep(self, rows: object) -> None:
        assert rows is self._rows
        self._kv.fill_(-1)

    def wake(self) -> None:
        """Its caches are as `sleep` has left them."""

    def block(self, block: int) -> tuple[torch.Tensor, list[int]]:
        """The content of a block now."""
        first, end = block * self._block_size, (block + 1) * self._block_size
        return self._kv[first:end].clone(), self._origins[first:end]

    def set_block(self, block: int, content: Any) -> None:
        """As `block` told it."""
        first, end = block * self._block_size, (block + 1) * self._block_size
        self._kv[first:end], self._origins[first:end] = content

    def _check_origins(self, blocks: tuple[int, ...], slot: int, history: list[int], first: int) -> list[int]:
        """Keys and values before `first` follow from the same tokens, under the same adapters, in the same scope. The
        origins of all positions."""
        sequence = self.sequence_in(slot)
        request = None if sequence is None else sequence.request  # None: of an engine that a test has made itself
        origins = [hash(None if request is None else (request.tenant, request.cache_salt))]
        computed_by: list[str | None] = [] if sequence is None else self.computed_by.setdefault(sequence.key, [])
        for position in range(len(computed_by), len(history)):
            computed_by.append(None if request is None or position < request.adapter_start else request.adapter)
        for position, (token, adapter) in enumerate(zip(history, computed_by, strict=True)):
            origins.append(hash((origins[-1], token, adapter)))
            place = blocks[position // self._block_size] * self._block_size + position % self._block_size
            if position < first and request is not None:
                assert self._origins[place] == origins[-1], f"position {position} was computed for something else"
            self._origins[place] = origins[-1]
        return origins

    def run_with_hidden(
        self, batch: StepBatch, sizes: StepSizes, *, of_all: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden state of a token is the token and its position."""
        hidden = torch.stack([batch.token_ids, batch.positions], dim=1).float()
        rows = None if of_all else batch.logits_rows
        return self.run(batch, sizes), hidden if rows is None else hidden.index_select(0, rows)

    def _check_line(self, batch: StepBatch, sequence: int, origins: list[int], first: int) -> None:
        """The state that is read follows from the tokens so far."""
        assert batch.conv is not None
        line, source = int(batch.conv.state_indices[sequence]), int(batch.conv.source_state_indices[sequence])
        assert line != 0
        assert bool(batch.conv.has_initial_state[sequence]) == (first > 0)
        assert not first or self.lines[source] == origins[first], "another sequence wrote the state line"
        assert batch.conv.source_state_indices.tolist().count(line) == (line == source), "a line is read and written"
        self.lines[line] = origins[-1]


class MockHostCopies:
    """Host memory of the mock's blocks and lines. Copies happen in the order of the calls: at once, or with `is_slow`
    when the test says so, by `end_next`, or when steps wait for them."""

    row_bytes = 1, 100

    def __init__(self, runner: MockRunner, num_rows: tuple[int, int], most_blocks: int) -> None:
        self.num_rows, self.most_blocks = num_rows, most_blocks
        self.is_slow = False
        self.num_saved = self.num_loaded = 0  # blocks and lines
        self._runner = runner
        self._rows: list[dict[int, object]] = [{}, {}]
        self._pending: deque[tuple[_HostMark, Callable[[], None]]] = deque()

    def save(self, blocks: Pairs, lines: Pairs) -> CopyEvent:
        self.num_saved += len(blocks) + len(lines)

        def copy() -> None:
            self._rows[0] |= {row: self._runner.block(block) for block, row in blocks}
            self._rows[1] |= {row: self._runner.lines[line] for line, row in lines}

        return self._begin(copy)

    def load(self, blocks: Pairs, lines: Pairs) -> CopyEvent:
        self.num_loaded += len(blocks) + len(lines)

        def copy() -> None:
            for block, row in blocks:
                self._runner.set_block(block, self._rows[0][row])
            for line, row in lines:
                self._runner.lines[line] = self._rows[1][row]  # type: ignore[assignment]

        return self._begin(copy)

    def publish(self, mark: CopyEvent) -> None:
        while not mark.is_completed():
            self.end_next()

    def end_next(self) -> None:
        """The oldest copy that is under way happens now, if there is one."""
        if self._pending:
            mark, copy = self._pending.popleft()
            copy()
            mark.is_reached = True

    def _begin(self, copy: Callable[[], None]) -> CopyEvent:
        self._pending.append((mark := _HostMark(), copy))
        if not self.is_slow:
            self.end_next()
        return mark


@dataclass
class _HostMark:
    is_reached: bool = False

    def is_completed(self) -> bool:
        return self.is_reached


@dataclass
class MockEngine:
    """An engine over the mocks; `step` checks the integrity of everything after each step and gathers the output.

    What a step asks the loader for is read when the test says so, by `load`, or in the course of `step_until`; grammars
    are compiled there as well.
    """

    engine: Engine
    runner: MockRunner
    rows: MockRows
    host: MockHost
    loader: SteppedLoader
    output: dict[str, list[int]] = field(default_factory=dict)
    messages: dict[str, list[Tokens]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)

    def submit(
        self,
        request_id: str,
        prompt: tuple[int, ...] = (1, 2, 3),
        adapter: str | None = None,
        *,
        max_tokens: int = 4,
        temperature: float = 0.0,
        tenant: str = "",
        weight: float = 1.0,
        pooling: Literal["last", "mean"] | None = None,
        adapter_start: int = 0,
        cache_salt: str = "",
        keep_at: tuple[int, ...] = (),
        **sampling: object,
    ) -> None:
        chosen = Sampling(max_tokens=max_tokens, temperature=temperature, **sampling)  # type: ignore[arg-type]
        rows = {} if adapter is None else {**MockWeights(adapter).rows}
        paid = (tenant, weight, pooling, adapter_start, cache_salt, keep_at)
        self.engine.submit(Submit(request_id, prompt, chosen, adapter, rows, *paid))
        self.engine.check_integrity()

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.engine.check_integrity()
        self._note(events)
        return events

    def load(self) -> None:
        """All that the loader was asked for; the next step finds it. There must be something."""
        assert self.loader.do_all(), "nothing was to be read"

    def step_and_load(self) -> list[Event]:
        """One step, and then whatever it asked the loader for."""
        events = self.step()
        self.loader.do_all()
        return events

    def settle(self) -> None:
        """Step until no request is left, and take what is to be told of those that were refused."""
        self.step_until(lambda: not self.engine.num_requests)
        self._note(self.engine.take_events())

    def step_until(self, condition: Callable[[], object], max_steps: int = 2000) -> None:
        """Step until the condition holds; one adapter that was asked for is read between two steps."""
        for _ in range(max_steps):
            if condition():
                return
            self.engine.wake.clear()
            self.step()
            if condition():
                return
            self.loader.do_next()
            assert not self.engine.is_idle or self.engine.wake.is_set(), "nothing can run, and no load ends"
        raise AssertionError(f"not after {max_steps} steps")

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                assert event.request_id not in self.finished, "tokens after the end"
                self.output.setdefault(event.request_id, []).extend(event.token_ids)
                self.messages.setdefault(event.request_id, []).append(event)
            else:
                assert event.request_id not in self.finished, "ended twice"
                self.finished[event.request_id] = event


def make_mock_engine(
    *,
    num_blocks: int = 64,
    num_rows: int = 64,
    has_conv: bool = True,
    max_len: int = 512,
    block_size_tokens: int = 4,
    token_budget: int = 16,
    max_sequences: int = 8,
    has_tokens: bool = True,
    num_kept: int = 0,
    host: MockHost | None = None,
    host_rows: tuple[int, int] | None = None,
    most_copied: int = 4,
    **config: object,
) -> MockEngine:
    """has_tokens: the engine knows its vocabulary, which grammars need. host: None is one that keeps nothing. num_kept:
    states that the prefix cache can keep. host_rows: of its host tier, for blocks and lines."""
    settings = EngineConfig(
        model_dir="",
        store_root="",
        block_size_tokens=block_size_tokens,
        token_budget=token_budget,
        max_sequences=max_sequences,
        **config,  # type: ignore[arg-type]
    )
    rows, host = MockRows(num_rows), host or MockHost()
    runner = MockRunner(rows, settings, num_blocks=num_blocks, has_conv=has_conv, max_len=max_len, num_kept=num_kept)
    if host_rows is not None:
        runner.host_copies = MockHostCopies(runner, host_rows, most_copied)
    loader = SteppedLoader()
    tokens = mock_tokens() if has_tokens else None
    engine = Engine(runner, rows, host, settings, loader=loader, tokens=tokens, compiler=loader)
    runner.sequence_in = lambda slot: next((one for one in engine.scheduler.running if one.slot == slot), None)
    start = engine.cache.start

    def start_anew(sequence: RunningSequence, expected: int, found: Found | None = None) -> None:
        runner.computed_by.pop(sequence.key, None)
        start(sequence, expected, found)

    engine.cache.start = start_anew  # type: ignore[method-assign]
    lines = engine.lines

    def acquire_low() -> int:
        """A line that no sequence has as its slot too, where most sequences may run."""
        lines._free.sort()
        return StateLines.acquire(lines)

    lines.acquire = acquire_low  # type: ignore[method-assign]
    return MockEngine(engine, runner, rows, host, loader)


def poison_free(mock: MockEngine) -> None:
    """Blocks and lines that neither a sequence nor the cache has hold what no sequence reads."""
    blocks, block_size = mock.engine.blocks, mock.engine.config.block_size_tokens
    known = {node.block for node in mock.engine.cache.trie.nodes}
    for block in range(1, blocks.num_blocks):
        if not blocks.num_holders(block) and block not in known:
            mock.runner.set_block(block, (-1, [-1] * block_size))
    for line in mock.engine.lines.free:
        mock.runner.lines[line] = -1


@functools.cache
def mock_tokens() -> TokenTable:
    """Token t is the character 32 + t, but for the end of the sequence."""
    vocabulary = {chr(32 + token) if token else "Ġ": token for token in range(EOS)} | {"<end>": EOS}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = ByteLevel()
    return TokenTable(TextTokenizer(tokenizer, {"eos_token": "<end>"}, ()), VOCAB)
