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
    ... Submit(adapter=lease.record.digest, adapter_rows=lease.record.manifest.rows) ...
    lease.release()
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import msgspec

from adapters.errors import Damaged, Malformed, NotFound, TooLarge, Unsupported
from adapters.files import name_versions as rules
from adapters.files.disk import StoreFiles
from adapters.files.durable_files import WriteFault, refuse_shortage, store_faults_are_ours
from adapters.files.manifest import AdapterRecord, Manifest
from adapters.files.name_versions import Change, Condition, NameRecord
from adapters.layout import BaseLayout
from adapters.row_plan import RowPlan
from adapters.store.catalog import Catalog, Pinned, Pins, refuse_excess, select
from adapters.store.leases import Lease, Upload
from adapters.store.name_index import Query, Row
from adapters.store.publishing import Publishing
from adapters.store.shared_log import SharedLog
from adapters.store.transactions import Changes, Housekeeping
from adapters.text.vocabulary import BaseText
from adapters.upload.prepare import Intake
from adapters.upload.staging import Staging
from adapters.upload.staging_bytes import Budget, HeldBytes, StagingBytes, StoreLimits, UploadPart

log = logging.getLogger(__name__)

__all__ = ["AdapterStore", "Lease", "StoreLimits", "Upload", "UploadPart"]


class AdapterStore:
    """All adapters of one base model below `root`. One process owns it (a file lock), unless all that open it share it;
    others may read published files.

    root           created if missing; adapters of other base models (another layout) below it are left alone
    base_name      reserved: no adapter may take it
    base_dir       the base checkpoint, to recognise copies of base embeddings that PEFT saves beside embedding targets
    row_plan       rows of the device (`adapters.row_plan.plan_rows`), to refuse what could never fit; None = no check.
                   May be set after construction, once the engine has told its sizes
    check_template called with an upload's own chat template; its ValueError refuses the upload
    base_text      the base's tokenizer and templates, which those of adapters are compared with; None = no comparison
    on_gone        called with a digest after its files were removed, or put instead of damaged ones, outside all
                   locks; the API sends Evict then
    shared         whether other processes that say so too may have the store open; see `adapters.store.shared_log`
    on_change      called with a name after another process changed it, in the thread that looked it up

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
        check_template: Callable[[str], None] | None = None,
        base_text: BaseText | None = None,
        on_gone: Callable[[str], None] | None = None,
        shared: bool = False,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self.limits = limits or StoreLimits()
        most = self.limits.max_staging_bytes
        self.staging_bytes = None if most is None else StagingBytes(most)
        in_memory = None if shared else self.limits.max_ephemeral_bytes  # no other machine can read that
        self._ephemeral_bytes = None
        if in_memory:
            self._ephemeral_bytes = StagingBytes(
                in_memory, "--max-ephemeral-bytes", "Ephemeral versions", "delete some, or move fewer names"
            )
        self.base_name = base_name
        self._intake = Intake(layout, base_dir, row_plan, check_template, base_text)
        root = root / self._intake.fingerprint
        sharing = SharedLog(root) if shared else None
        self._sharing = sharing
        self._files = StoreFiles(root, None if sharing is None else sharing.member)
        self._catalog = Catalog(self._files, _recover(self._files, sharing))
        self._changes = Changes(self._files, self._catalog, sharing, on_gone, on_change)
        self._publishing = Publishing(
            self._files, self._catalog, self._changes, self._intake, self.limits, self.base_name
        )
        self._house = None
        if sharing is not None:
            self._house = Housekeeping(self._files, self._catalog, self._changes, sharing)

    @property
    def row_plan(self) -> RowPlan | None:
        """Rows of the device, see the class."""
        return self._intake.row_plan

    @row_plan.setter
    def row_plan(self, row_plan: RowPlan | None) -> None:
        self._intake.row_plan = row_plan

    @property
    def on_gone(self) -> Callable[[str], None] | None:
        """See the class."""
        return self._changes.on_gone

    @on_gone.setter
    def on_gone(self, on_gone: Callable[[str], None] | None) -> None:
        self._changes.on_gone = on_gone

    def close(self) -> None:
        """Release the lock, once all files are removed that nobody uses. Uploads in progress are discarded by the next
        open."""
        if self._house is not None:
            self._house.stop()
        self._changes.remover.shutdown()
        with self._changes.disk:
            self._files.close()
            if self._sharing is not None:
                self._sharing.close()

    def settle(self) -> None:
        """Wait until the files of all leases released so far are removed, if they had to go."""
        self._changes.settle()

    # ---- uploads

    def check_name(self, name: str, owner: str = "") -> None:
        """Raises InvalidName, or Conflict for the base model's name. Call it before reading a body."""
        self._publishing.check_name(name, owner)

    def check(self, name: str, condition: Condition) -> None:
        """Raises what `condition` does for the name as it is now; it is asked again when the name changes."""
        condition(self.find(name), None)

    def begin(self, *, declared_bytes: int | None = None, owner: str = "", is_ephemeral: bool = False) -> Upload:
        """Start an upload. `declared_bytes`, the fewest that its files will have, are checked first: TooLarge,
        StagingFull, StorageFull. `owner`'s quota counts its bytes on the disk until it is finished.

        is_ephemeral  its tensors are in memory alone, and its name, which has no durable version, goes when the store
                      is closed; `owner` has its share of `max_ephemeral_bytes`. Raises Unsupported if none is taken
        """
        if declared_bytes is not None and declared_bytes > self.limits.max_upload_bytes:
            raise TooLarge(f"The upload is larger than the limit of {self.limits.max_upload_bytes} bytes.")
        if is_ephemeral and self._ephemeral_bytes is None:
            raise Unsupported(
                "This server keeps no ephemeral versions (--max-ephemeral-bytes is 0, or --store-shared is true); "
                "upload without `ephemeral`."
            )
        memory = self._files.memory if is_ephemeral else None
        held = HeldBytes(self._ephemeral_bytes if is_ephemeral else self.staging_bytes, owner)
        held.check(declared_bytes or 0)
        Budget(self._files.staging, self.limits, held).check_disk(0 if is_ephemeral else declared_bytes or 0)
        with store_faults_are_ours():
            directory = self._files.staging / uuid.uuid4().hex
            staging = Staging(directory, self.limits, held, self._intake.follow, memory)
            return Upload(self._publishing, staging)

    # ---- changes of names

    def rollback(
        self, name: str, selector: str = "", change: Change | None = None, *, condition: Condition = rules.move
    ) -> tuple[AdapterRecord, bool]:
        """Make the content of an older version, by number or digest, the current one again; without a selector that of
        the newest version with other content. Returns (record, created) as `Upload.finish` does.

        Raises NotFound if there is no such name or version, and what `condition` raises.
        """
        return self._publishing.rollback(name, selector, change or Change(), condition)

    def change_settings(self, name: str, change: Change) -> None:
        """Set the change's visibility and `on_new_version`, those that it has, of a name. Raises NotFound."""
        with self._changes.change():
            self._publishing.show(name, change)

    def set_pinned(self, name: str, is_pinned: bool) -> None:
        """Pin or unpin a name; it stays so when the name moves to another version. Raises NotFound, and Conflict if
        more rows would be pinned than may be. `row_plan` must be set."""
        with self._changes.change():
            record = self._catalog.record_of(name)
            if is_pinned == record.is_pinned:
                return
            if is_pinned:
                assert self.row_plan is not None, "pinned before the engine has told its rows"
                rows = self.manifest(record.digest).rows
                others = (one for one in self._catalog.pinned() if one.name != name)
                refuse_excess((*others, Pinned(name, record.digest, rows)), self.row_plan)
            self._changes.write(name, msgspec.structs.replace(record, is_pinned=is_pinned))

    def pins(self) -> Pins:
        """Digests that engines keep on the device; none before `row_plan` is set. May read a file for each."""
        self._changes.catch_up()
        return Pins() if self.row_plan is None else select(self._catalog.pinned(), self.row_plan)

    def delete(self, name: str, condition: Condition = rules.move) -> str:
        """Remove the name and its versions at once; the files go with the last lease, or now if nobody holds one and no
        other name keeps them. Returns the current digest, damaged or not. Raises NotFound, and what `condition`
        raises."""
        with self._changes.change():
            record = self._catalog.record_of(name)
            condition(record, None)
            self._changes.write(name, None)
            gone = [digest for digest in record.digests if self._changes.remove_if_unused(digest)]
        self._changes.notify_gone(gone)
        return record.digest

    # ---- look-up

    def get(self, name: str) -> AdapterRecord:
        """The version that `name`, `name@number` or `name@digest` refers to. Raises NotFound, Damaged."""
        self._changes.catch_up()
        return self._catalog.get(name)

    def versions(self, name: str) -> NameRecord:
        """The versions of a name. Raises NotFound."""
        self._changes.catch_up()
        return self._catalog.record_of(name)

    def each(self) -> Iterator[AdapterRecord]:
        """The current version of every name, sorted; damaged adapters are logged and left out. Reads one file per name,
        one by one, so that leases need not wait and thousands of load reports are not in memory together."""
        for name in self.names():
            try:
                yield self.get(name)
            except NotFound:
                continue  # deleted meanwhile
            except Damaged as error:
                log.error("adapter %s: %s", name, error)

    def names(self) -> dict[str, NameRecord]:
        """All names, sorted, without reading a file."""
        self._changes.catch_up()
        return self._catalog.names()

    def page(self, query: Query) -> list[Row]:
        """Names as listings show them, without reading a file of theirs; damaged ones are left out. Takes milliseconds:
        not for an event loop."""
        self._changes.catch_up()
        return self._catalog.page(query)

    def num_changes(self) -> int:
        """A counter that differs after each change that a page may show, as soon as the change is answered."""
        self._changes.catch_up()
        return self._catalog.num_changes

    def find(self, name: str) -> NameRecord | None:
        """The versions of a name, None if it stands for no adapter."""
        self._changes.catch_up()
        return self._catalog.find(name)

    def has(self, name: str) -> bool:
        """Whether the name stands for an adapter now."""
        return self.find(name) is not None

    def num_names(self) -> int:
        """How many names there are: cheap enough for every scrape of metrics."""
        return self._catalog.num_names

    def num_on_disk(self) -> int:
        """How many adapters have files here, by content: also those that only leases keep. As cheap."""
        return self._catalog.num_on_disk

    def manifest(self, digest: str) -> Manifest:
        """Raises NotFound."""
        return self._catalog.manifest(digest)

    def path_of(self, digest: str) -> Path:
        """The published PEFT directory. Raises NotFound."""
        return self._files.adapter(digest)

    def chat_templates(self, digest: str) -> dict[str, str]:
        """The adapter's own chat templates by name, the usual one as "default". Raises NotFound, Damaged."""
        return self._files.chat_templates(digest) if self.manifest(digest).has_chat_template else {}

    def archive(self, record: AdapterRecord) -> Generator[bytes, None, None]:
        """A .tar.gz, piece by piece, of a PEFT directory that is the adapter of this lease's record when it is
        uploaded; tensors byte for byte as they came where they came in the canonical form. Reads files at each step.

        Raises NotFound, Damaged, Unsupported for an adapter that PEFT's form cannot express; Malformed or OSError in
        the middle, for a file that is damaged or gone.
        """
        path, created = self.path_of(record.digest), int(record.version.created_at_seconds)
        templates = self.chat_templates(record.digest)
        try:
            return self._intake.archive(path, record.manifest, templates, created)
        except (Malformed, OSError) as error:
            refuse_shortage(error)
            raise Damaged(record.digest) from error

    def fault(self) -> WriteFault | None:
        """The reason why the store cannot take changes; None where none is found. Writes to the disk."""
        return self._files.fault()

    # ---- leases

    def lease(self, name: str) -> Lease:
        """Resolve `name`, `name@number` or `name@digest` and keep its files until the lease is released. Raises
        NotFound, Damaged."""
        self._changes.catch_up()
        return Lease(self._changes.release, self._catalog.lease(name))

    def num_leases(self, digest: str) -> int:
        """Leases held on the digest, for metrics and tests."""
        return self._catalog.num_leases(digest)

    # ---- for tests and operators' tools

    def sweep(self) -> None:
        """Remove the files of adapters that no name keeps and no server of a shared store uses."""
        assert self._house is not None, "a store of one server is always swept"
        self._house.sweep()

    def check_integrity(self) -> None:
        """Assert that names, leases and directories agree, on disk and in memory, after `settle`."""
        self.settle()
        with self._changes.disk:
            self._catalog.check_integrity()


def _recover(files: StoreFiles, sharing: SharedLog | None) -> dict[str, NameRecord]:
    """The names, once what a killed process left is removed."""
    if sharing is None:
        return files.recover()
    with sharing.change_lock():
        sharing.begin_log()
        sharing.news()  # all names are read next
        return files.recover()
