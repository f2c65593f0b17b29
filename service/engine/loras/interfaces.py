"""Interfaces of the parts of residency: host memory, rows on the device, the reader and the copies.

Tests have parts of their own, which they step without threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from adapters.memory.row_pool import PoolUsage


class HostSource(Protocol):
    """The host tier, as far as the engine needs it. `get` is called by the loader, the others in the step's thread."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the adapters that it holds."""

    @property
    def num_kept(self) -> int:
        """Adapters in host memory."""

    def kept(self, digest: str) -> Any | None:
        """The adapter if it is in host memory; reads nothing."""

    def is_kept(self, digest: str) -> bool:
        """Whether it is in host memory, which is no use of it."""

    def get(self, digest: str) -> Any:
        """The adapter in host memory, read from the store if need be. Its `rows` are those that it takes on the device,
        its `num_bytes` its size."""

    def drop(self, digest: str) -> None:
        """Forget it; unknown digests are ignored."""

    def take_evicted(self) -> list[str]:
        """Digests that were evicted since the last call."""


class Loader(Protocol):
    """Runs submitted work, one piece after the other: in a thread (`TransientThread`), or when a test steps it."""

    def submit(self, work: Callable[[], None]) -> None:
        """Queue `work`, which handles its own errors. Raises RuntimeError, and does not queue it, where it cannot be
        done."""

    def close(self) -> None:
        """Drop work that has not begun, and wait for the one that has."""


class CopyEvent(Protocol):
    """See `adapters.memory.device_upload.CopyEvent`."""

    def is_completed(self) -> bool: ...


class Rows(Protocol):
    """The row pool, as far as the engine needs it."""

    @property
    def num_changes(self) -> int: ...

    def load(self, digest: str, host_adapter: Any, *, may_evict: bool = True) -> CopyEvent | None: ...
    def publish(self, mark: Any) -> None: ...
    def take_evicted(self) -> list[str]: ...
    def pin(self, digest: str) -> None: ...
    def unpin(self, digest: str) -> None: ...
    def hold(self, digest: str, is_held: bool) -> None: ...
    def drop(self, digest: str) -> None: ...
    def check_size(self, rows: Mapping[str, int]) -> None: ...
    def has_room(self, rows: Mapping[str, int]) -> bool: ...
    def fits_beside(self, rows: Mapping[str, int], digests: Collection[str], *, and_held: bool = True) -> bool: ...
    def place_of(self, digest: str) -> int | None: ...
    def first_rows(self, place: int) -> tuple[int, ...]: ...
    def rows_end(self, digests: Collection[str]) -> int: ...
    def rows_needed(self, digests: Collection[str]) -> int: ...
    def bring_below(self, end_row: int, digests: Collection[str], *, max_adapters: int) -> bool: ...
    def resident(self) -> tuple[str, ...]: ...
    def usage(self) -> PoolUsage: ...
    def forget_addresses(self) -> None: ...
    def trim(self) -> None: ...
    def check_integrity(self) -> None: ...
