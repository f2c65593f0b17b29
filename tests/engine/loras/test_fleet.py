"""Adapters on their whole way, from uploads to rows, in random sequences: what runs with an adapter has its rows, and
everything adds up after every change."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.errors import NotFound
from adapters.files.name_versions import move
from adapters.memory.host_tier import HostTier, read_adapter
from adapters.memory.row_pool import RowPool
from adapters.memory.slab import HostAdapter
from adapters.peft.bound_tensors import MAGNITUDE
from adapters.store.leases import Lease
from adapters.store.store import AdapterStore, StoreLimits
from adapters.sums import digest_of, is_sum, parts_of, rows_of
from service.engine.loras.prefetch import AdapterLoads
from tests.adapters.memory.test_copies import Base
from tests.adapters.memory.test_row_pool import assert_holds
from tests.adapters.memory.test_sums import assert_holds_sum
from tests.support.adapter_files import (
    config_bytes,
    lora_tensors,
    modules_ending,
    safetensors_bytes,
    small_layout,
    upload_bytes,
)
from tests.support.engine.fake_stream import FakeStream
from tests.support.engine.stepped_loader import SteppedLoader

LAYOUT = small_layout()
NAMES = ("one", "two", "three", "four")
ENDINGS = ("q_proj", "down_proj")
RANKS = (2, 4, 7, 16)
Q_PROJS = modules_ending(LAYOUT, "q_proj")
# Lines for two of those with DoRA, of which there are three.
SIDE_BYTES = 6 << 10


def is_dora(at: int) -> bool:
    return at % 3 == 1


def tensors_of(at: int, rank: int) -> bytes:
    tensors = lora_tensors(LAYOUT, modules_ending(LAYOUT, *ENDINGS[: 1 + at % 2]), rank, seed=at)
    if is_dora(at):
        modules = [name.removesuffix(".lora_B.weight") for name in tensors if name.endswith(".lora_B.weight")]
        sizes = {module: tensors[f"{module}.lora_B.weight"].shape[0] for module in modules}
        magnitudes = np.random.default_rng(at)
        for module, size in sizes.items():
            tensors[f"{module}.lora_magnitude_vector"] = magnitudes.uniform(1, 2, size).astype("<f4")
    return safetensors_bytes(tensors)


TENSORS = [tensors_of(at, rank) for at, rank in enumerate(RANKS * 2)]
CONFIGS = [
    config_bytes(r=rank, target_modules=list(ENDINGS[: 1 + at % 2]), use_dora=is_dora(at))
    for at, rank in enumerate(RANKS * 2)
]


@dataclass(eq=False)
class User:
    """A request for an adapter or a sum of some: it holds leases from its arrival to its end."""

    leases: list[Lease]
    digest: str
    runs: bool = False


@dataclass
class Fleet:
    """A store, and the engine's tiers over it without a model."""

    root: Path
    rng: random.Random
    has_device: bool
    users: list[User] = field(default_factory=list)
    gone: deque[str] = field(default_factory=deque)

    def __post_init__(self) -> None:
        limits = StoreLimits(free_disk_floor_bytes=0, max_versions=2)
        self.store = AdapterStore(self.root, LAYOUT, limits, base_name="base", on_gone=self.gone.append)
        self.stream = FakeStream()
        self.host = HostTier(self.root, LAYOUT, self.rng.choice((0, 4000, 12_000, 1 << 20)))
        self.pool = RowPool(
            LAYOUT,
            self.rng.choice((16_000, 30_000)),
            alignment=4,
            copies=self.stream if self.has_device else None,
            buffer_bytes=self.rng.choice((1, 1 << 20)),
            side_bytes=SIDE_BYTES,
            base=Base(),
        )
        self.loader = SteppedLoader()
        self.loads = AdapterLoads(
            self.pool, self.host, self.loader, max_loads_ahead=self.rng.randint(1, 3), wake=lambda: None
        )

    def change(self) -> None:
        """One random thing, perhaps a few times."""
        changes = (self.upload, self.move, self.delete, self.rollback, self.pin, self.hint, self.end)
        # Most of what happens is that somebody asks, and gets on.
        steps = (self.ask, self.ask_sum, self.read, self.copy, self.step)
        what = self.rng.choice((*changes, *steps, *steps, *steps))
        for _ in range(self.rng.choice((1, 1, 3))):
            what()

    def upload(self) -> None:
        content = self.rng.randrange(len(TENSORS))
        record, _ = upload_bytes(self.store, self.rng.choice(NAMES), CONFIGS[content], TENSORS[content], condition=move)
        self.loads.hint(record.digest)

    move = upload

    def delete(self) -> None:
        self._if_there(self.store.delete)

    def rollback(self) -> None:
        self._if_there(self.store.rollback)

    def _if_there(self, change: Callable[[str], object]) -> None:
        names = list(self.store.names())
        with contextlib.suppress(NotFound):  # a name without an earlier version
            change(self.rng.choice(names or NAMES))

    def pin(self) -> None:
        digests = [record.digest for record in self.store.names().values()]
        self.loads.pin(self.rng.sample(digests, min(len(digests), self.rng.randint(0, 1))))

    def hint(self) -> None:
        self._if_there(lambda name: self.loads.hint(self.store.get(name).digest))

    def read(self) -> None:
        self.loader.do_next()

    def copy(self) -> None:
        self.stream.num_reached = self.rng.randint(self.stream.num_reached, len(self.stream.marks))

    def ask(self) -> None:
        self._if_there(lambda name: self.begin([(self.store.lease(name), 1.0)]))

    def ask_sum(self) -> None:
        records = [self.store.get(name) for name in self.store.names()]
        summed = [record.name for record in records if "vectors" not in record.manifest.rows]
        names = self.rng.sample(summed, min(len(summed), self.rng.randint(1, 3)))
        self.begin([(self.store.lease(name), self.rng.choice((0.5, 1.0, -2.0))) for name in names])

    def begin(self, parts: list[tuple[Lease, float]]) -> None:
        digest = digest_of((lease.record.digest, weight) for lease, weight in parts)
        manifests = {lease.record.digest: lease.record.manifest for lease, _ in parts}
        # None: one content under two names, or nobody is there.
        rows = {} if digest is None else rows_of(manifests[part] for part, _ in parts_of(digest))
        if digest is None or self.pool.plan.group_too_small(rows):
            for lease, _ in parts:
                lease.release()
            return
        self.users.append(User([lease for lease, _ in parts], digest))
        self.loads.enter(digest, rows)

    def end(self) -> None:
        if self.users:
            self.leave(self.rng.choice(self.users))

    def leave(self, user: User) -> None:
        self.users.remove(user)
        if user.runs:
            self.loads.release(user.digest)
        self.loads.leave(user.digest)
        for lease in user.leases:
            lease.release()

    def step(self) -> None:
        """As the scheduler does it."""
        self.loads.settle_loads(is_idle=not any(user.runs for user in self.users))
        waiting = [user for user in self.users if not user.runs]
        self.loads.prefetch({user.digest: self.loads.has_room(user.digest) for user in waiting}, None)
        for user in waiting:
            if self.loads.can_bring(user.digest) and self.loads.bring(user.digest):
                self.loads.acquire(user.digest)
                user.runs = True
        self.loads.follow_hints()
        assert not {user.digest for user in self.users} & self.loads.take_failures().keys()

    def check(self) -> None:
        self.store.settle()
        while self.gone:
            self.loads.evict(self.gone.popleft())
        self.loads.check_integrity()
        self.host.check_integrity()
        self.store.check_integrity()
        for user in self.users:
            if user.runs:
                parts = [(self.read_part(digest), weight) for digest, weight in parts_of(user.digest)]
                if is_sum(user.digest):
                    assert_holds_sum(self.pool, LAYOUT, user.digest, parts)
                else:
                    assert_holds(self.pool, LAYOUT, parts[0][0])
                    self.assert_has_its_line(parts[0][0])

    def read_part(self, digest: str) -> HostAdapter:
        return read_adapter(self.root, LAYOUT, digest, torch.float32)

    def assert_has_its_line(self, adapter: HostAdapter) -> None:
        """Of magnitudes m the line of vectors has m / 2, since `Base` gives every norm as 2."""
        assert ("vectors" in adapter.rows) == any(part == MAGNITUDE for _, part in adapter.extras)
        if "vectors" in adapter.rows:
            place = self.pool.place_of(adapter.digest)
            assert place is not None and self.pool.side is not None
            line = 1 + self.pool.first_rows(place)[self.pool.plan.groups.index("vectors")]
            for module in Q_PROJS:
                vectors = self.pool.side.vectors[module.replace("q_proj", "qkv_proj")]
                own = adapter.extras[module, MAGNITUDE]
                assert torch.equal(vectors.scale[line, : len(own)], own / 2)
                assert not vectors.shift[line].any()


@given(seed=st.integers(0, 2**32), has_device=st.booleans())
@settings(max_examples=8, deadline=None)
def test_random_uploads_moves_pins_loads_evictions_and_requests_add_up(seed: int, has_device: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        fleet = Fleet(Path(root), random.Random(seed), has_device)
        for _ in NAMES:
            fleet.upload()
            fleet.ask()
        for _ in range(60):
            fleet.change()
            fleet.check()
        for _ in range(400):  # everybody is served in the end, whatever is pinned
            if not fleet.users:
                break
            fleet.copy()
            fleet.read()
            fleet.step()
            fleet.check()
            for user in [user for user in fleet.users if user.runs]:
                fleet.leave(user)
            fleet.check()
        assert not fleet.users, "somebody waits for ever"
        fleet.loads.pin(())
        for name in fleet.store.names():
            fleet.store.delete(name)
        fleet.loader.do_all()
        fleet.stream.num_reached = len(fleet.stream.marks)
        for _ in range(3):
            fleet.step()
            fleet.loader.do_all()
            fleet.check()
        assert (fleet.pool.resident(), fleet.host.num_kept) == ((), 0)
        fleet.store.close()
