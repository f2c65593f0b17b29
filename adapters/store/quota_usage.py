"""Names and bytes of one owner, updated as names change, so that a change does not scan the owner's thousands of
names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from adapters.errors import Conflict, QuotaExceeded
from adapters.files.name_versions import NameRecord, Quota, folded
from adapters.files.paths import without_root


class QuotaUsage:
    """Thread-safe. Callers serialise `point`, and hold no lock then that `size_of` acquires.

    size_of  bytes of a digest; 0 for one that cannot be read now, which is asked again
    """

    def __init__(self, names: Mapping[str, NameRecord], size_of: Callable[[str], int]) -> None:
        self._size_of = size_of
        self._lock = threading.Lock()
        self._num_names = 0
        # By their folded form; a store may hold twins that are older than the rule about them.
        self._names: dict[str, str] = {}
        self._twins: dict[str, tuple[str, ...]] = {}
        self._num_uses: Counter[str] = Counter()  # names that keep a digest
        self._sizes: dict[str, int] = {}  # of digests that are counted
        self._uncounted: set[str] = set()
        self._num_bytes = 0  # of those that are counted
        for name, record in names.items():
            self.point(name, None, record)

    def point(self, name: str, before: NameRecord | None, after: NameRecord | None) -> None:
        """Change the record of one of the owner's names; None means no name."""
        before_digests = before.digests if before is not None else set()
        after_digests = after.digests if after is not None else set()
        with self._lock:
            if (before is None) != (after is None):
                self._name(name, is_there=after is not None)
            for digest in after_digests - before_digests:
                self._num_uses[digest] += 1
                if self._num_uses[digest] == 1:
                    self._uncounted.add(digest)
            for digest in before_digests - after_digests:
                self._num_uses[digest] -= 1
                if not self._num_uses[digest]:
                    del self._num_uses[digest]
                    self._uncounted.discard(digest)
                    self._num_bytes -= self._sizes.pop(digest, 0)

    def refuse_twin(self, name: str) -> None:
        """Conflict if another name differs from `name` in case alone, or in its Unicode form."""
        form = folded(name)
        with self._lock:
            others = self._twins.get(form) or ((self._names[form],) if form in self._names else ())
        twin = next((one for one in others if one != name), None)
        if twin is not None:
            raise Conflict(
                f"The name {without_root(name)!r} differs in case alone from {without_root(twin)!r}, which is there; "
                "choose another."
            )

    def refuse_excess(self, before: NameRecord | None, after: NameRecord, quota: Quota) -> None:
        """Raises QuotaExceeded if the name's record `after` makes the owner's names, or their bytes, more than they
        were and more than the quota. `before` is the name's current record."""
        if quota.max_names is not None and before is None and self._num_names + 1 > quota.max_names:
            raise QuotaExceeded(
                f"You have {self._num_names} of your {quota.max_names} adapters; delete one first.",
                "adapters",
                quota.max_names,
                self._num_names,
            )
        if quota.max_bytes is None:
            return
        before_bytes, after_bytes = self._bytes(before.digests if before is not None else set(), after.digests)
        if after_bytes > max(quota.max_bytes, before_bytes):
            raise QuotaExceeded(
                f"Your adapters have {before_bytes} bytes, with versions that are kept, and would have {after_bytes} "
                f"of your {quota.max_bytes}; delete some first.",
                "adapter-bytes",
                quota.max_bytes,
                before_bytes,
            )

    def _name(self, name: str, *, is_there: bool) -> None:
        """Under the lock: add or remove a name."""
        self._num_names += 1 if is_there else -1
        form = folded(name)
        known = self._twins.pop(form, None) or ((self._names[form],) if form in self._names else ())
        names = (*known, name) if is_there else tuple(one for one in known if one != name)
        self._names.pop(form, None)
        if names:
            self._names[form] = names[0]
        if len(names) > 1:
            self._twins[form] = names

    def _bytes(self, before: set[str], after: set[str]) -> tuple[int, int]:
        """Bytes of all contents, each counted once: now, and with a name's digests `before` replaced by `after`."""
        with self._lock:
            for digest in list(self._uncounted):
                if size := self._size_of(digest):
                    self._sizes[digest] = size
                    self._num_bytes += size
                    self._uncounted.remove(digest)
            gone = sum(self._sizes.get(one, 0) for one in before - after if self._num_uses[one] == 1)
            come = [one for one in after - before if one not in self._num_uses]
            return self._num_bytes, self._num_bytes - gone + sum(map(self._size_of, come))
