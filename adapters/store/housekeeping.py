"""Periodic work of a server of a shared store: a sign of life, and removing files that no server uses."""

from __future__ import annotations

import logging
import threading
from itertools import count

from adapters.errors import StorageFull, StoreUnreachable
from adapters.files.disk import StoreFiles
from adapters.store.catalog import Catalog
from adapters.store.shared_log import SharedLog
from adapters.store.transactions import Changes

log = logging.getLogger(__name__)

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
