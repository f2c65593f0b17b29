"""The store's directory: every change is one rename or unlink, synced, so that a kill leaves a whole state or none.

Order matters: an adapter's directory is published before a name points at it, and names go before directories do.
What a kill can leave (staging directories, adapters without a name) is removed by `recover`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from filecmp import cmp
from pathlib import Path

import msgspec

from adapters.errors import Damaged, NotFound, StoreBusy
from adapters.paths import CONFIG_FILE, DIGEST, MANIFEST_FILE, NAME, TEMPLATE_FILE, TENSOR_FILE
from adapters.records import UNREADABLE, Manifest

log = logging.getLogger(__name__)


class Alias(msgspec.Struct, frozen=True):
    """What a name's file holds."""

    digest: str
    created_at_seconds: float


class StoreFiles:
    """See `adapters.paths` for the directories. Callers serialise changes of names and adapters."""

    def __init__(self, root: Path) -> None:
        self.staging = root / "staging"
        self._adapters = root / "adapters"
        self._names = root / "names"
        for directory in (self.staging, self._adapters, self._names):
            directory.mkdir(parents=True, exist_ok=True)
        self._lock = (root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreBusy(
                "Another server uses this adapter store; stop it, or give this one a store of its own."
            ) from None

    def close(self) -> None:
        self._lock.close()

    def recover(self) -> dict[str, Alias]:
        """Remove what a killed process left, and return the names."""
        for leftover in self.staging.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        names = self.names()
        for name, alias in list(names.items()):
            if not (self._adapters / alias.digest / MANIFEST_FILE).is_file():
                log.error("adapter %s points at missing files (%s); the name is removed", name, alias.digest)
                self.remove_name(name)
                del names[name]
        for digest in self.digests() - {alias.digest for alias in names.values()}:
            self.remove_adapter(digest)
        return names

    def names(self) -> dict[str, Alias]:
        """All names on disk. Foreign or damaged files are logged and left alone."""
        names = {}
        for path in self._names.iterdir():
            try:
                alias = msgspec.json.decode(path.read_bytes(), type=Alias)
                if not NAME.fullmatch(path.name) or not DIGEST.fullmatch(alias.digest):
                    raise msgspec.DecodeError("not a name of this store")
                names[path.name] = alias
            except UNREADABLE as error:
                log.error("the adapter store's file names/%s is ignored: %s", path.name, error)
        return names

    def digests(self) -> set[str]:
        return {path.name for path in self._adapters.iterdir() if DIGEST.fullmatch(path.name)}

    def has_adapter(self, digest: str) -> bool:
        """Whether there is anything under the digest, whole or not."""
        return (self._adapters / digest).exists()

    def adapter(self, digest: str) -> Path:
        """Raises NotFound."""
        path = self._adapters / digest
        if not DIGEST.fullmatch(digest) or not path.is_dir():
            raise NotFound(f"The store has no adapter {digest[:64]!r}.")
        return path

    def read_manifest(self, digest: str) -> Manifest:
        """Raises NotFound, and Damaged if something else has changed the file since it was published."""
        path = self.adapter(digest) / MANIFEST_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (*UNREADABLE, FileNotFoundError) as error:
            raise Damaged(f"The files of adapter {digest[:12]} are damaged; delete it and upload it again.") from error

    def complete(self, ready: Path, config: bytes, template: bytes | None, manifest: Manifest) -> None:
        """Write what stands beside the tensors, and sync the directory: it can be published then."""
        assert (ready / TENSOR_FILE).is_file()
        _write_synced(ready / CONFIG_FILE, config)
        if template is not None:
            _write_synced(ready / TEMPLATE_FILE, template)
        _write_synced(ready / MANIFEST_FILE, msgspec.json.encode(manifest))
        _sync_directory(ready)

    def publish(self, ready: Path, digest: str) -> bool:
        """Move a complete directory to its digest. One that is there already stays as it is unless it is damaged:
        False then."""
        if self.is_whole(digest, ready):
            return False
        damaged = self._take_out(digest)
        try:
            ready.rename(self._adapters / digest)
        except OSError:
            if damaged is not None:
                damaged.rename(self._adapters / digest)
            raise
        _sync_renamed(self._adapters)
        if damaged is not None:
            shutil.rmtree(damaged, ignore_errors=True)
        return True

    def is_whole(self, digest: str, ready: Path) -> bool:
        """Whether the files are what they were when they were published; `ready` holds the same adapter again."""
        try:
            path = self.adapter(digest)
            self.read_manifest(digest)
            kept = [name for name in (TENSOR_FILE, TEMPLATE_FILE) if (ready / name).is_file()]
            return (path / CONFIG_FILE).is_file() and all(
                cmp(path / name, ready / name, shallow=False) for name in kept
            )
        except (Damaged, NotFound, OSError):
            return False

    def write_name(self, name: str, alias: Alias) -> None:
        temporary = self.staging / f"name-{uuid.uuid4().hex}"
        _write_synced(temporary, msgspec.json.encode(alias))
        temporary.rename(self._names / name)
        _sync_renamed(self._names)

    def remove_name(self, name: str) -> None:
        (self._names / name).unlink(missing_ok=True)  # somebody else's removal of it is as good
        _sync_directory(self._names)

    def remove_adapter(self, digest: str) -> bool:
        """Out of sight by one rename, then deleted. False when it is not there."""
        out = self._take_out(digest)
        if out is not None:
            shutil.rmtree(out, ignore_errors=True)
        return out is not None

    def _take_out(self, digest: str) -> Path | None:
        """Out of sight by one rename; returns where it is now, to be deleted."""
        out = self.staging / f"gone-{uuid.uuid4().hex}"
        try:
            return (self._adapters / digest).rename(out)
        except FileNotFoundError:
            return None


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_renamed(path: Path) -> None:
    """After a rename into `path`, which holds whether this works or not: only a failure of power could undo it."""
    try:
        _sync_directory(path)
    except OSError:
        log.exception("what was written to the store may not outlast a failure of power")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
