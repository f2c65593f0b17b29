"""Handles that the store hands out: uploads in progress, and leases on published adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from adapters.files.durable_files import store_faults_are_ours
from adapters.files.manifest import AdapterRecord, Manifest
from adapters.files.name_versions import Change, Condition, keep, while_ephemeral
from adapters.upload.staging import Staging
from adapters.upload.staging_bytes import UploadPart

if TYPE_CHECKING:
    from adapters.store.publishing import Publishing


class Lease:
    """Keeps an adapter's files until it is released, even if its name is deleted or moves to another version. Release
    it exactly once (`with` does)."""

    def __init__(self, release: Callable[[str], None], record: AdapterRecord) -> None:
        """release  called with the digest when the lease ends"""
        self._release = release
        self._held = True
        self.record = record

    def release(self) -> None:
        """Quick, for an event loop. After the last release of a digest that no name keeps, a thread of the store
        removes the files and calls `on_gone(digest)`; `AdapterStore.settle` waits for that."""
        assert self._held, "a lease is released once"
        self._held = False
        self._release(self.record.digest)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Upload:
    """One adapter on its way in, staged in the store's own file system. One thread at a time writes it; it may be
    discarded from another one."""

    def __init__(self, publishing: Publishing, staging: Staging) -> None:
        self._publishing = publishing
        self._staging: Staging | None = staging
        self._held: Manifest | None = None
        # A thread whose request was cancelled works on, while the upload is discarded in another. To empty the staging
        # directory beside it would empty what it publishes: a rename does not hinder who has a directory open.
        self._at_work = threading.RLock()  # `finish` discards

    def open_part(self, part_name: str, file_name: str | None = None) -> UploadPart:
        """Open the next file, recognised by its part name ("adapter_config", "adapter_model", "archive",
        "chat_template"...) or else by its file name (adapter_config.json, *.safetensors, *.tar.gz, *.tgz, *.zip...).

        Raises Unsupported for pickles and other weight files, Malformed for a file given twice or not recognised.
        """
        with self._at_work:
            return self._open_staging().open_part(part_name, file_name)

    def leave_tokenizer_out(self) -> None:
        """Keep nothing of files of the adapter's tokenizer that come from now on; the load report names them."""
        with self._at_work:
            self._open_staging().without_tokenizer = True

    def order_experts(self, expert_b_order: str) -> None:
        """Read lora_B of experts in this order, one of `adapters.peft.config.EXPERT_ORDERS`; called before files
        come."""
        with self._at_work:
            self._open_staging().expert_b_order = expert_b_order

    def check_config(self) -> None:
        """Refuse now what `finish` would refuse for the configuration alone. Call it when its part is closed: the
        tensors that follow are gigabytes. Raises Malformed, Unsupported."""
        with self._at_work:
            self._open_staging().check_config()

    def add_directory(self, path: Path, links_below: Path | None = None) -> None:
        """Take the files of a PEFT directory on this machine instead of parts. The caller has checked that the
        operator allows the path. Symbolic links that leave the directory, and lead to nothing below `links_below`, are
        refused."""
        with self._at_work:
            self._open_staging().add_directory(path, links_below)

    def hold(self) -> Lease:
        """Check everything and put the content into the store without a name, so that the engine can read it: the lease
        keeps its files, which go with it unless `finish` gives them a name before. Raises as `finish` does."""
        with self._at_work:
            staging = self._open_staging()
            with store_faults_are_ours():
                manifest, ready = self._publishing.intake.prepare(staging)
                lease = Lease(self._publishing.changes.release, self._publishing.hold(manifest, ready))
            self._held = manifest
            return lease

    def finish(
        self, name: str, change: Change | None = None, *, condition: Condition = keep
    ) -> tuple[AdapterRecord, bool]:
        """Check everything, publish, and make it the current version of `name`, in one step. Returns (record, created);
        created is False when that was the name's content already. Older versions stay as the limits say; the files of
        others go with their last lease.

        condition  what `name` may stand for until now; asked at the moment of the change

        Raises InvalidName, Conflict, Stale, Malformed, Unsupported, BindingError, RowsExceeded, TooLarge, StorageFull;
        after any of them the upload is discarded, and the name stands for what it stood for.
        """
        change = change or Change()
        with self._at_work:
            staging = self._open_staging()
            if staging.is_ephemeral:
                change = msgspec.structs.replace(change, is_ephemeral=True)
                condition = while_ephemeral(condition)
            try:
                self._publishing.check_name(name, change.owner)
                with store_faults_are_ours():
                    if self._held is not None:
                        return self._publishing.publish(name, self._held, None, change, condition)
                    manifest, ready = self._publishing.intake.prepare(staging)
                    return self._publishing.publish(name, manifest, ready, change, condition)
            finally:
                self.discard()

    def discard(self) -> None:
        """Forget the upload and remove what it wrote. Does nothing after finish() or a second time; waits for a call of
        finish() that another thread is in."""
        with self._at_work:
            if self._staging is not None:
                self._staging.remove()
                self._staging = None

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.discard()

    def _open_staging(self) -> Staging:
        assert self._staging is not None, "the upload is over"
        return self._staging
