"""Reports of several engines, merged into one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from service.engine.ipc.messages import Ready, Stats, Tier

_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def least_of(ready: Sequence[Ready]) -> Ready:
    """The smallest size of each kind among these engines, of which there is at least one."""
    return msgspec.structs.replace(
        ready[0],
        max_model_len_tokens=min(one.max_model_len_tokens for one in ready),
        kv_capacity_tokens=min(one.kv_capacity_tokens for one in ready),
        row_bytes=min(one.row_bytes for one in ready),
    )


class DigestTiers(Mapping[str, Tier]):
    """The fastest tier of each digest over several engines; a digest that none holds is on disk."""

    def __init__(self, tiers: Sequence[Mapping[str, Tier]]) -> None:
        self._tiers = tiers

    def __getitem__(self, digest: str) -> Tier:
        held = {one.get(digest, "disk") for one in self._tiers}
        return next((tier for tier in _TIERS if tier in held), "disk")  # there may be no engine

    def __contains__(self, digest: object) -> bool:
        return any(digest in one for one in self._tiers)

    def __iter__(self) -> Iterator[str]:
        return iter(set().union(*map(list, self._tiers)))

    def __len__(self) -> int:
        return len(set().union(*map(list, self._tiers)))


def sum_of(stats: Sequence[Stats]) -> Stats:
    """Sums of numbers, and of counts by reason or tier; events of a single engine are left out."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in stats) for name in _SUMMED}
    for name in _COUNTED:
        counts: Counter[str] = Counter()
        for one in stats:
            counts.update(getattr(one, name))
        sums[name] = dict(counts)
    return msgspec.structs.replace(stats[0], **sums, **_NO_NEWS, is_paused=all(one.is_paused for one in stats))


_COUNTED = ("num_steps_eager", "num_adapter_requests", "num_tier_evictions", "loaded_bytes")
_NO_NEWS: dict[str, Any] = {"moved_adapters": {}, "adapter_load_seconds": (), "first_tokens": (), "steps": ()}
_SUMMED = tuple(name for name in Stats.__struct_fields__ if name not in (*_COUNTED, *_NO_NEWS, "is_paused"))
