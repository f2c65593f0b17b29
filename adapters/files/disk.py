"""The store's directory: every change is one rename or unlink, synced, so that a kill leaves a whole state or none.

Order matters: an adapter's directory is published before a name points at it, and names go before directories do.
What a kill can leave (staging directories, adapters without a name) is removed by `recover`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import uuid
from collections.abc import Mapping
from filecmp import cmp
from pathlib import Path
from shutil import copyfile
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import msgspec

from adapters.errors import Damaged, NotFound, StoreBusy
from adapters.files.durable_files import (
    WriteFault,
    delete,
    refuse_shortage,
    remove,
    replace_file,
    store_faults_are_ours,
    sync_directory,
    sync_files,
    sync_renamed,
    write_fault,
    write_synced,
)
from adapters.files.manifest import UNREADABLE, Manifest, Summary
from adapters.files.memory_files import MemoryFiles, is_in_memory
from adapters.files.name_versions import NameRecord, decode_name, is_ours, uses
from adapters.files.paths import (
    CONFIG_FILE,
    DEFAULT_TEMPLATE,
    DIGEST,
    MANIFEST_FILE,
    NAMED_TEMPLATES_FILE,
    TEMPLATE_FILE,
    TENSOR_FILE,
)
from adapters.files.tombstones import Tombstones

log = logging.getLogger(__name__)


class _Published(Manifest, frozen=True, gc=False):
    """A manifest as its file has it.

    config  sha256 of the adapter_config.json beside it; "" where a version before this field wrote it
    """

    config: str = ""


_Read = TypeVar("_Read", Manifest, Summary, _Published)


class StoreFiles:
    """See `adapters.files.paths` for the directories. Callers serialise changes of names and adapters, and delete what
    `taken_out` says when they have let others change the store again: files of gigabytes take seconds to go.

    shared_as  None: this server alone has the store. Else others that share it may have it open too, and this is what
               its own staging directory is called
    """

    def __init__(self, root: Path, shared_as: str | None = None) -> None:
        self._is_shared = shared_as is not None
        self.staging = root / "staging" if shared_as is None else root / "staging" / shared_as
        self._adapters = root / "adapters"
        self._names = root / "names"
        self._taken_out: list[Path] = []
        self.memory = MemoryFiles()
        for directory in (self.staging, self._adapters, self._names):
            directory.mkdir(parents=True, exist_ok=True)
        self._retired = Tombstones(root / "retired")
        self._lock = (root / "lock").open("a+")
        try:
            fcntl.flock(self._lock, (fcntl.LOCK_SH if self._is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise StoreBusy(
                "Another server uses this adapter store; stop it, give this one a store of its own (--store-dir), or "
                "let all servers of the store share it (--store-shared true)."
            ) from None

    def close(self) -> None:
        self.memory.close()
        self._lock.close()

    def recover(self) -> dict[str, NameRecord]:
        """Remove what a killed process left, and return the names. Adapters without a name stay for this time if a
        name could not be read: it may be theirs. A name goes if the files of all its versions are missing.

        Of a store that is shared only names are read: what lies there without one may be of another server."""
        for leftover in self.staging.iterdir():
            # A server that has closed the store may still be deleting what it took out.
            remove(leftover)
        names, unreadable = self._read_names()
        for name, record in list(names.items()):
            missing = [version.number for version in record.versions if self._is_missing(version.digest)]
            if missing:
                log.error("adapter %s: the files of its versions %s are missing", name, missing)
            if len(missing) == len(record.versions):
                log.error("adapter %s: the name is removed", name)
                self.remove_name(name)
                del names[name]
        for digest in self.digests() - set(uses(names.values())) if not self._is_shared else ():
            if unreadable and not self.is_ephemeral(digest):
                log.error("adapter %s has no name; it is kept, since names/%s cannot be read", digest, unreadable[0])
            else:
                self.remove_adapter(digest)
        self.delete(self.taken_out())
        return names

    def names(self) -> dict[str, NameRecord]:
        """All names on disk. What is foreign, damaged or cannot be read is logged and left alone."""
        return self._read_names()[0]

    def name(self, name: str) -> NameRecord | None:
        """The record in a name's file, None if there is no file. A damaged or unreadable file is logged. Raises OSError
        when the whole directory of names is unavailable, which says nothing about this name."""
        path = self._name_path(name)
        try:
            record = decode_name(path.read_bytes())
        except FileNotFoundError:
            self._names.stat()
            return None
        except (OSError, *UNREADABLE) as error:
            if isinstance(error, OSError):
                refuse_shortage(error)
                self._names.stat()
            log.error("the adapter store's file names/%s is ignored: %s", path.name, error)
            return None
        return record if is_ours(name, record) else None

    def _read_names(self) -> tuple[dict[str, NameRecord], list[str]]:
        """The names on disk, and the files among them that cannot be read."""
        names, unreadable = {}, []
        for path in self._names.iterdir():
            try:
                if not path.is_file():  # to open a pipe would wait for ever
                    raise msgspec.DecodeError("not a file")
                name, record = unquote(path.name), decode_name(path.read_bytes())
                if self._name_path(name) != path or not is_ours(name, record):
                    raise msgspec.DecodeError("not a name of this store")
                names[name] = record
            except UNREADABLE as error:
                log.error("the adapter store's file names/%s is ignored: %s", path.name, error)
            except OSError as error:
                refuse_shortage(error)
                log.error("the adapter store's file names/%s cannot be read: %s", path.name, error)
                unreadable.append(path.name)
        return names, unreadable

    def _name_path(self, name: str) -> Path:
        """A name's file is called like the name, with each `/` quoted."""
        return self._names / quote(name, safe="")

    def _is_missing(self, digest: str) -> bool:
        """Whether there is no manifest, not even one that cannot be read."""
        try:
            (self._adapters / digest / MANIFEST_FILE).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError as error:
            log.error("adapter %s cannot be read: %s", digest, error)
        return False

    def digests(self) -> set[str]:
        return {path.name for path in self._adapters.iterdir() if DIGEST.fullmatch(path.name)}

    def fault(self) -> WriteFault | None:
        """The reason why the store cannot take changes, found by writing an unnamed file; None if it can."""
        return write_fault(self.staging)

    def is_ephemeral(self, digest: str) -> bool:
        """Whether the tensors are in memory alone."""
        return is_in_memory(self._adapters / digest, TENSOR_FILE)

    def has_adapter(self, digest: str) -> bool:
        """Whether there is anything under the digest, whole or not."""
        return (self._adapters / digest).exists()

    def identity(self, digest: str) -> tuple[int, ...] | None:
        """Differs after other files were put under the digest or the files were removed; None without files."""
        try:
            found = (self._adapters / digest).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def adapter(self, digest: str) -> Path:
        """Raises NotFound, and StoreUnreachable where all adapters are away."""
        path = self._adapters / digest
        with store_faults_are_ours():
            if not DIGEST.fullmatch(digest) or not path.is_dir():
                self._adapters.stat()
                raise NotFound(f"The store has no adapter {digest[:64]!r}.")
        return path

    def read_manifest(self, digest: str) -> Manifest:
        """Raises NotFound, and Damaged if something else has changed the file since it was published, or it cannot be
        read; OSError when the process can read no file at all."""
        return self._read(digest, Manifest)

    def read_summary(self, digest: str) -> Summary:
        """A small part of the manifest. Raises as `read_manifest` does."""
        return self._read(digest, Summary)

    def _read(self, digest: str, kind: type[_Read]) -> _Read:
        path = self.adapter(digest) / MANIFEST_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (*UNREADABLE, OSError) as error:
            refuse_shortage(error)
            self.adapter(digest)
            raise Damaged(digest) from error

    @staticmethod
    def complete(ready: Path, config: bytes, templates: Mapping[str, str], manifest: Manifest) -> None:
        """Write what stands beside the tensors, and sync the directory unless those are in memory: it can be published
        then."""
        assert (ready / TENSOR_FILE).is_file()
        write = Path.write_bytes if is_in_memory(ready, TENSOR_FILE) else write_synced
        write(ready / CONFIG_FILE, config)
        others = dict(templates)
        default = others.pop(DEFAULT_TEMPLATE, None)
        if default is not None:
            write(ready / TEMPLATE_FILE, default.encode())
        if others:
            write(ready / NAMED_TEMPLATES_FILE, msgspec.json.encode(others, order="sorted"))
        published = _published(manifest, config=_digest_of(ready / CONFIG_FILE))
        write(ready / MANIFEST_FILE, msgspec.json.encode(published))
        if write is write_synced:
            sync_directory(ready)

    def to_disk(self, ready: Path) -> None:
        """Move the tensors of a complete directory from memory, if they are there, to the disk, synced."""
        tensors, copied = ready / TENSOR_FILE, ready / f"{TENSOR_FILE}.new"
        if is_in_memory(ready, TENSOR_FILE):
            copyfile(tensors, copied)
            self.memory.close_below(ready)
            copied.replace(tensors)
            sync_files(ready)

    def chat_templates(self, digest: str) -> dict[str, str]:
        """The adapter's own chat templates by name. Raises as `read_manifest` does."""
        path, found = self.adapter(digest), {}
        try:
            if (path / NAMED_TEMPLATES_FILE).is_file():
                found = msgspec.json.decode((path / NAMED_TEMPLATES_FILE).read_bytes(), type=dict[str, str])
            if (path / TEMPLATE_FILE).is_file():
                found[DEFAULT_TEMPLATE] = (path / TEMPLATE_FILE).read_text(encoding="utf-8")
        except (*UNREADABLE, OSError) as error:
            refuse_shortage(error)
            raise Damaged(digest) from error
        return found

    def publish(self, ready: Path, digest: str) -> None:
        """Move a complete directory to its digest, instead of a damaged one if there is one. After an OSError all
        is as before."""
        damaged = self._take_out(digest)
        try:
            ready.rename(self._adapters / digest)
        except OSError:
            if damaged is not None:
                damaged.rename(self._adapters / digest)
            raise
        if not self.is_ephemeral(digest):
            sync_renamed(self._adapters)
        if damaged is not None:
            self._taken_out.append(damaged)

    def is_whole(self, manifest: Manifest, ready: Path) -> bool:
        """Whether the files are what they were when they were published. `ready` holds the same adapter again, with its
        manifest; its notes may be others, and so may its adapter_config.json: settings that only matter in training,
        and modules by other names."""
        try:
            path, stored = self.adapter(manifest.digest), self._read(manifest.digest, _Published)
            if stored != _published(manifest, notes=stored.notes, config=stored.config):
                return False
            if _digest_of(path / CONFIG_FILE) != (stored.config or _digest_of(ready / CONFIG_FILE)):
                return False
            files = (TENSOR_FILE, TEMPLATE_FILE, NAMED_TEMPLATES_FILE)
            kept = [name for name in files if (ready / name).is_file()]
            return all(cmp(path / name, ready / name, shallow=False) for name in kept)
        except (Damaged, NotFound, OSError):
            return False

    def write_name(self, name: str, record: NameRecord) -> None:
        temporary = self.staging / f"name-{uuid.uuid4().hex}"
        replace_file(self._name_path(name), msgspec.json.encode(record), temporary=temporary)

    def remove_name(self, name: str) -> None:
        self._retired.move_in(self._name_path(name))
        sync_directory(self._names)

    def retire(self, name: str, record: NameRecord) -> None:
        """Keep the numbers of a deleted name that has no file."""
        self._retired.add(self._name_path(name).name, msgspec.json.encode(record))

    def first_number(self, name: str) -> int:
        """The first version number of a new name: higher than all numbers of a deleted name that was called the
        same."""
        return self._retired.first_number(self._name_path(name).name)

    def remove_adapter(self, digest: str) -> bool:
        """Move the adapter out of sight by one rename and list it in `taken_out`. False when it is not there."""
        out = self._take_out(digest)
        if out is not None:
            self._taken_out.append(out)
        return out is not None

    def taken_out(self) -> list[Path]:
        """Directories that were adapters before the caller's change, for the caller to `delete`; each is returned
        once."""
        taken_out, self._taken_out = self._taken_out, []
        return taken_out

    def delete(self, taken_out: list[Path]) -> None:
        """Remove what `taken_out` returned, from memory too."""
        for path in taken_out:
            self.memory.close_below(path)
        delete(taken_out)

    def _take_out(self, digest: str) -> Path | None:
        """Move the adapter out of sight by one rename; returns its new path, to be deleted, or None."""
        out = self.staging / f"gone-{uuid.uuid4().hex}"
        try:
            return (self._adapters / digest).rename(out)
        except FileNotFoundError:
            return None


def _published(manifest: Manifest, **fields: Any) -> _Published:
    return _Published(**(msgspec.structs.asdict(manifest) | fields))


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
