"""Adapters on disk, by content: uploads are staged, checked, and published atomically; names are aliases of digests.

Synchronous and thread-safe: call it from a thread pool. No torch here. Typical upload:

    with store.begin(declared_bytes=content_length) as upload:      # leaves nothing behind unless finish() returned
        with upload.open_part("adapter_config", "adapter_config.json") as part:
            part.write(chunk)                                       # TooLarge, StorageFull at once
        with upload.open_part("adapter_model", "adapter_model.safetensors") as part:
            part.write(chunk)
        record, created = upload.finish("my-adapter")               # every other error of adapters.errors

Typical request:

    lease = store.lease("my-adapter")        # NotFound; the files stay until the last lease is released
    ... Submit(adapter=lease.record.digest) ...
    lease.release()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from adapters.layout import BaseLayout
from adapters.records import AdapterRecord, Manifest
from adapters.row_plan import RowPlan


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What one upload may cost.

    max_upload_bytes      bytes received, all parts together; also the bound of what an archive unpacks to
    max_files             parts or archive members
    free_disk_floor_bytes refuse to write when less than this would stay free on the store's file system
    """

    max_upload_bytes: int = 4 << 30
    max_files: int = 256
    free_disk_floor_bytes: int = 256 << 20


class Lease:
    """Keeps an adapter's files while held, also after its name is deleted. Release it exactly once (`with` does)."""

    record: AdapterRecord

    def release(self) -> None:
        """The last release of a digest that no name points at removes its files and calls `on_gone(digest)`."""
        raise NotImplementedError

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Part:
    """A file of an upload, open for writing; a context manager. Not thread-safe by itself."""

    def write(self, data: bytes) -> int:
        """Append. Raises TooLarge or StorageFull the moment a limit is passed."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Part:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Upload:
    """One adapter on its way in, staged in the store's own file system. One thread at a time."""

    def open_part(self, part_name: str, file_name: str | None = None) -> Part:
        """Open the next file, recognised by its part name ("adapter_config", "adapter_model", "archive") or else by
        its file name (adapter_config.json, *.safetensors, *.tar.gz, *.tgz, *.zip, chat_template.jinja...).

        Raises Unsupported for pickles and other weight files, Malformed for a file given twice or not recognised.
        """
        raise NotImplementedError

    def add_directory(self, path: Path) -> None:
        """Take the files of a PEFT directory on this machine instead of parts. The caller has checked that the
        operator allows the path. Symbolic links that leave the directory are refused."""
        raise NotImplementedError

    def finish(self, name: str) -> tuple[AdapterRecord, bool]:
        """Check everything, publish, and point `name` at it. Returns (record, created); created is False when the name
        already pointed at the same content.

        Raises InvalidName, Conflict, Malformed, Unsupported, BindingError, RowsExceeded, TooLarge, StorageFull; after
        any of them the upload is discarded.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Forget the upload and remove what it wrote. Does nothing after finish() or a second time."""
        raise NotImplementedError

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.discard()


class AdapterStore:
    """All adapters of one base model below `root`; one process owns it (a file lock), others may read published files.

    root           created if missing; adapters of other base models (another layout) below it are left alone
    base_name      reserved: no adapter may take it
    base_dir       the base checkpoint, to recognise copies of base embeddings that PEFT saves beside embedding targets
    row_plan       rows of the device (`adapters.row_plan.plan_rows`), to refuse what could never fit; None = no check
    base_token_id  token text -> id of the base tokenizer or None, to refuse adapters that extend the vocabulary
    on_gone        called with a digest after its files were removed, outside all locks; the API sends Evict then

    Opening removes the leftovers of a killed process. Raises StoreBusy when another process holds the lock.
    """

    def __init__(
        self,
        root: Path,
        layout: BaseLayout,
        limits: StoreLimits | None = None,
        *,
        base_name: str,
        base_dir: Path | None = None,
        row_plan: RowPlan | None = None,
        base_token_id: Callable[[str], int | None] | None = None,
        on_gone: Callable[[str], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Release the lock. Uploads in progress are discarded by the next open."""
        raise NotImplementedError

    def check_name(self, name: str) -> None:
        """Raises InvalidName, or Conflict for the base model's name. Call it before reading a body."""
        raise NotImplementedError

    def begin(self, *, declared_bytes: int | None = None) -> Upload:
        """Start an upload. `declared_bytes` (Content-Length) is checked first: TooLarge, StorageFull."""
        raise NotImplementedError

    def get(self, name: str) -> AdapterRecord:
        """Raises NotFound."""
        raise NotImplementedError

    def list(self) -> tuple[AdapterRecord, ...]:
        """All names, sorted."""
        raise NotImplementedError

    def lease(self, name: str) -> Lease:
        """Resolve a name and keep its files until the lease is released. Raises NotFound."""
        raise NotImplementedError

    def delete(self, name: str) -> AdapterRecord:
        """Remove the name at once; the files go with the last lease, or now if nobody holds one and no other name
        points at them. Raises NotFound."""
        raise NotImplementedError

    def manifest(self, digest: str) -> Manifest:
        """Raises NotFound."""
        raise NotImplementedError

    def path_of(self, digest: str) -> Path:
        """The published PEFT directory. Raises NotFound."""
        raise NotImplementedError

    def chat_template(self, digest: str) -> str | None:
        """The adapter's own chat template, None if it ships none. Raises NotFound."""
        raise NotImplementedError

    def num_leases(self, digest: str) -> int:
        """Leases held on the digest, for metrics and tests."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Assert that names, leases and directories agree."""
        raise NotImplementedError
