"""Pages of listings as they were written last: machines that poll ask again and again for what has not changed.

A page is as good as new while the store has made no change and the facts that it shows beside the store's (where an
adapter is, when it was last used) are the same, so that nobody ever gets an old one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

# A page of 1,000 models has 300 KB: one for each of several tenants, and those that an interface shows.
MOST_BYTES = 8 << 20
# Bytes of memory for an adapter's name, digest and facts.
_BYTES_PER_ADAPTER = 400


class WrittenPage(NamedTuple):
    """change    number of the store's last change before the page was read
    adapters  name and digest of those whose facts are shown
    facts     of each of them, as shown
    text      JSON
    """

    change: int
    adapters: tuple[tuple[str, str], ...]
    facts: tuple[Any, ...]
    text: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, about."""
        return len(self.text) + _BYTES_PER_ADAPTER * len(self.adapters)


class PageCache:
    """The pages that were asked for last, by all that they depend on beside changes and facts: who sees them, the
    filters. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.num_bytes = 0
        self._most_bytes = most_bytes
        self._pages: OrderedDict[Hashable, WrittenPage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> WrittenPage | None:
        """The last page put under the key, current or not."""
        with self._lock:
            page = self._pages.get(key)
            if page is not None:
                self._pages.move_to_end(key)
            return page

    def put(self, key: Hashable, page: WrittenPage) -> None:
        """Keep it instead of an older one; those that nobody has asked for make room."""
        with self._lock:
            before = self._pages.pop(key, None)
            self._pages[key] = page
            self.num_bytes += page.num_bytes - (0 if before is None else before.num_bytes)
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= self._pages.popitem(last=False)[1].num_bytes
