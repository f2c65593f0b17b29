"""Shares tenants' use between the servers of one store, so that their limits count over all of them.

Each server writes what its tenants have taken into a file of its own, twice a second, and reads those of the others.
Nobody asks anybody before a request is admitted, so what others have admitted within about a second is not known: by
that a limit can be exceeded. Times are ages, and files are dated by whoever keeps them: no two clocks are compared.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from adapters.files.durable_files import replace_file

EXCHANGE_SECONDS = 0.5
# A server that has written nothing for so long stands still or is gone, and its requests with it.
ABSENT_SECONDS = 10.0
_FORGET_SECONDS = 300.0

# (seconds ago, amount), the oldest first.
Taken = tuple[tuple[float, int], ...]


class TenantUsage(msgspec.Struct, frozen=True):
    """One tenant's use: sequences in flight, and tokens and uploads of the last minute."""

    num_in_flight: int = 0
    tokens: Taken = ()
    uploads: Taken = ()


_decoder = msgspec.json.Decoder(dict[str, TenantUsage])


class Exchange:
    """One server's file among those of the others, in `directory`. Blocking; one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / uuid.uuid4().hex
        self._was_made = False

    def say_and_hear(self, own: dict[str, TenantUsage]) -> dict[str, TenantUsage]:
        """Write what tenants here have taken; what they have taken on all others together. Raises OSError."""
        if not self._was_made:  # once: where the store is away nothing may be put in its place
            self._directory.mkdir(parents=True, exist_ok=True)
            self._was_made = True
        replace_file(self._own, msgspec.json.encode(own), is_durable=False)
        now_seconds = self._own.stat().st_mtime
        return _together(self._others(now_seconds))

    def _others(self, now_seconds: float) -> Iterator[dict[str, TenantUsage]]:
        for path in self._directory.iterdir():
            if path == self._own:
                continue
            with suppress(FileNotFoundError, msgspec.DecodeError):
                with path.open("rb") as file:
                    age_seconds = max(0.0, now_seconds - os.fstat(file.fileno()).st_mtime)
                    data = file.read()
                if age_seconds > _FORGET_SECONDS:
                    path.unlink()
                elif not path.name.startswith("."):
                    yield {name: _older(one, age_seconds) for name, one in _decoder.decode(data).items()}


def _older(usage: TenantUsage, age_seconds: float) -> TenantUsage:
    return TenantUsage(
        usage.num_in_flight if age_seconds <= ABSENT_SECONDS else 0,
        tuple((ago + age_seconds, amount) for ago, amount in usage.tokens),
        tuple((ago + age_seconds, amount) for ago, amount in usage.uploads),
    )


def _together(servers: Iterable[dict[str, TenantUsage]]) -> dict[str, TenantUsage]:
    sums: dict[str, TenantUsage] = {}
    for server in servers:
        for name, one in server.items():
            so_far = sums.get(name, TenantUsage())
            sums[name] = TenantUsage(
                so_far.num_in_flight + one.num_in_flight,
                tuple(sorted(so_far.tokens + one.tokens, reverse=True)),
                tuple(sorted(so_far.uploads + one.uploads, reverse=True)),
            )
    return sums
