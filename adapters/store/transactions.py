"""Changes of the store, one after the other: first on the disk, then in the catalog; and changes by other servers.
A server of a shared store gives a sign of life, and removes files that no server uses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path

from adapters.errors import StorageFull, StoreUnreachable
from adapters.files.disk import StoreFiles
from adapters.files.durable_files import refuse_shortage, store_faults_are_ours
from adapters.files.name_versions import NameRecord
from adapters.store.catalog import Catalog
from adapters.store.shared_log import SharedLog

log = logging.getLogger(__name__)


class Changes:
    """Locks are taken in this order: `disk`, that of the log of a shared store, `Catalog.changing`.

    disk     held through every change of names/ and adapters/, which syncs and may take long
    on_gone, on_change  see `adapters.store.store.AdapterStore`
    """

    def __init__(
        self,
        files: StoreFiles,
        catalog: Catalog,
        sharing: SharedLog | None,
        on_gone: Callable[[str], None] | None,
        on_change: Callable[[str], None] | None,
    ) -> None:
        self.disk = threading.Lock()
        self.on_gone = on_gone
        self._on_change = on_change
        self._files = files
        self._catalog = catalog
        self._sharing = sharing
        self._reading = threading.Lock()  # held while the log is read
        # Names in the log whose files are still to be read: the store may become unreachable in between.
        self._unread: dict[str, None] = {}
        self._is_all_unread = False  # likewise, where all of them must be read
        # Whoever releases the last lease need not wait for the disk.
        self.remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-files")

    @contextmanager
    def change(self) -> Iterator[None]:
        """Names and adapters are changed inside, under `disk`, by one thread of all servers. StoreBusy, and what
        `store_fault` says of an OSError."""
        with store_faults_are_ours(), self.changing_files():
            if self._sharing is None:
                yield
                return
            with self._sharing.change_lock():
                self._sharing.begin_log()
                self._read_news()
                yield

    @contextmanager
    def changing_files(self) -> Iterator[None]:
        """Hold `disk`. The thread that removed files deletes them after releasing it, so nobody else's change waits."""
        taken_out: list[Path] = []
        try:
            with self.disk:
                try:
                    yield
                finally:
                    taken_out = self._files.taken_out()
        finally:
            self._files.delete(taken_out)

    # ---- in a change

    def write(self, name: str, record: NameRecord | None) -> None:
        """Set a name's record on the disk, unless it is ephemeral, and in the catalog; None removes the name. After an
        OSError the file decides."""
        before = self._catalog.find(name)
        last = before if record is None else record
        if last is not None and last.is_ephemeral:
            if record is None:
                self._files.retire(name, last)
            with self._catalog.changing:
                self._catalog.point(name, record)
            return
        announced = nullcontext() if self._sharing is None else self._sharing.announced(name)
        with announced, self._catalog.changing:
            if record is None:
                self._files.remove_name(name)
            else:
                self._files.write_name(name, record)
            self._catalog.point(name, record)

    def put(self, ready: Path, digest: str) -> bool:
        """Move an uploaded adapter's files into the store. Returns whether they replace damaged or missing ones:
        whoever has read those must read again. In the place of files on the disk they are there too."""
        was_used = self._catalog.is_used(digest)
        was_there = self._files.has_adapter(digest)  # although not used any more: its last user is about to remove it
        if (was_used or was_there) and not self._files.is_ephemeral(digest):
            self._files.to_disk(ready)
        self._files.publish(ready, digest)
        if self._sharing is not None and (was_used or was_there):
            self._sharing.log_replaced(digest)
        with self._catalog.changing:
            self._catalog.files_put(digest, was_used=was_used)
        return was_used or was_there

    def remove_if_unused(self, digest: str) -> bool:
        """Under `disk`, so that no name, and hence no lease, can come to the digest meanwhile. False when it is used or
        gone already. In a shared store the files stay until a sweep knows that no server uses them."""
        if not self._catalog.forget_if_unused(digest):
            return False
        is_gone = self._sharing is not None or self._files.remove_adapter(digest)
        self._catalog.files_gone(digest)
        return is_gone

    # ---- outside of changes

    def notify_gone(self, digests: Iterable[str]) -> None:
        """Call `on_gone` for digests whose files were removed or replaced. Call it outside all locks."""
        if self.on_gone is not None:
            for digest in digests:
                self.on_gone(digest)

    def release(self, digest: str) -> None:
        """Release one lease without waiting for the disk."""
        if not self._catalog.release(digest):
            with suppress(RuntimeError):  # the store is closed: the next to open it removes them
                self.remover.submit(self._collect, digest)

    def settle(self) -> None:
        """Wait until the files of all leases released so far are removed, if they had to go."""
        self.remover.submit(lambda: None).result()

    def _collect(self, digest: str) -> None:
        """Remove a digest that nobody uses, unless somebody does by now."""
        try:
            with self.changing_files():
                is_gone = self.remove_if_unused(digest)
            self.notify_gone([digest] if is_gone else [])
        except Exception:
            log.exception("the files of adapter %s could not be removed; the next start will try again", digest)

    # ---- servers that share the store

    def catch_up(self) -> None:
        """Read the changes of other servers; while the store is unreachable, the last known state stays."""
        if self._sharing is None:
            return
        try:
            self._read_news()
        except OSError as error:
            refuse_shortage(error)  # Housekeeping logs the others

    def _read_news(self) -> None:
        """As `catch_up`; raises OSError."""
        assert self._sharing is not None
        gone: list[str] = []
        with self._reading:
            news = self._sharing.news()
            self._unread.update(dict.fromkeys(news.names))
            self._is_all_unread |= news.is_all
            if self._is_all_unread:
                self._unread.update(dict.fromkeys(self._catalog.names().keys() | self._files.names().keys()))
                self._is_all_unread = False
            for digest in news.replaced:
                self._catalog.forget_manifest(digest)
            for name in list(self._unread):
                gone += self._read_again(name)
                del self._unread[name]
        self.notify_gone((*gone, *news.replaced))

    def report_alive(self) -> None:
        """Write a sign of life, with the digests that only requests of this server keep."""
        assert self._sharing is not None
        self._read_news()
        self._files.staging.mkdir(exist_ok=True)  # which is gone if this server stood still and was taken for dead
        with self._reading:
            self._sharing.report_alive(self._catalog.held_by_leases_alone())

    def _read_again(self, name: str) -> list[str]:
        """Read a name that another server changed. Returns the digests without users here."""
        with self._catalog.changing:
            record, before = self._files.name(name), self._catalog.find(name)
            if record == before:
                return []
            self._catalog.point(name, record)
        if self._on_change is not None:
            self._on_change(name)
        unused = before.digests - (record.digests if record is not None else set()) if before is not None else set()
        return [digest for digest in unused if self.remove_if_unused(digest)]


# Between two signs of life of a server that shares its store; each sixth time it looks for files that may go.
SIGN_OF_LIFE_SECONDS = 5.0
_SIGNS_PER_SWEEP = 6


class Housekeeping:
    """Begins with a sign of life, and goes on in a thread of its own until `stop`."""

    def __init__(self, files: StoreFiles, catalog: Catalog, changes: Changes, sharing: SharedLog) -> None:
        self._files = files
        self._catalog = catalog
        self._changes = changes
        self._sharing = sharing
        self._closing = threading.Event()
        self._is_refused = False
        changes.report_alive()
        threading.Thread(target=self._run, name="adapter-store", daemon=True).start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting; a sweep that is due does nothing."""
        self._closing.set()

    def sweep(self) -> None:
        """Remove the files of adapters that no name keeps and no server uses."""
        with self._changes.change():
            if self._closing.is_set():
                return
            self._changes.report_alive()
            unused = self._files.digests() - self._catalog.used_by_names()
            for digest in self._sharing.removable(unused):
                self._files.remove_adapter(digest)

    def attempt(self, *, sweeps: bool) -> None:
        """Write a sign of life, and sweep if `sweeps`. Failures are logged and do not end the thread: one sentence when
        the disk begins to refuse and one when it works again, not a traceback per attempt."""
        try:
            self._changes.report_alive()
            if sweeps:
                self.sweep()
        except (OSError, StorageFull, StoreUnreachable) as error:
            if not self._is_refused:
                log.error(
                    "the adapter store cannot be tidied up: %s; look at its disk. Tried again every %.0f s.",
                    error,
                    SIGN_OF_LIFE_SECONDS,
                )
            self._is_refused = True
        except Exception:
            log.exception("the adapter store is not tidied up; the next attempt is soon")
        else:
            if self._is_refused:
                log.info("the adapter store is tidied up again")
            self._is_refused = False

    def _run(self) -> None:
        for number in count(1):
            if self._closing.wait(SIGN_OF_LIFE_SECONDS):
                return
            self.attempt(sweeps=number % _SIGNS_PER_SWEEP == 0)
