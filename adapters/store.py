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
import sqlite3
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from adapters import names as rules
from adapters import pins as pin_rules
from adapters.disk import StoreFiles, delete
from adapters.errors import Conflict, Damaged, InvalidName, Malformed, NotFound, QuotaExceeded, TooLarge
from adapters.handles import Lease, Upload
from adapters.index import Index, Query, Row
from adapters.intake import Intake
from adapters.layout import BaseLayout
from adapters.names import Change, Condition, NameRecord, Quota, Version, Visibility
from adapters.paths import RESERVED, TEMPLATE_FILE, is_name
from adapters.records import AdapterRecord, Manifest
from adapters.row_plan import RowPlan
from adapters.same_weights import have_same_weights
from adapters.sharing import Sharing
from adapters.staging_bytes import StagingBytes
from adapters.upload import Account, Budget, Part, Staging, StoreLimits, disk_full_is_ours

log = logging.getLogger(__name__)

# A manifest lists every module: thousands of adapters would fill memory with them. The rest is read when asked for.
MAX_MANIFESTS_KEPT = 256
# Between two signs of life of a server that shares its store; each sixth time it looks for files that may go.
HOUSE_SECONDS = 5.0
_SIGNS_PER_SWEEP = 6


@dataclass(frozen=True, slots=True)
class _Found:
    """What an upload's files were compared with: the name's versions and the identity of the digest's files then.

    is_whole  the store has the same files
    same_as   see `AdapterStore._same_as`
    """

    record: NameRecord | None
    identity: tuple[int, ...] | None
    is_whole: bool
    same_as: int | None

    def still_holds(self, record: NameRecord | None, identity: tuple[int, ...] | None) -> bool:
        return (record, identity) == (self.record, self.identity)


__all__ = ["AdapterStore", "Lease", "Part", "StoreLimits", "Upload"]


class AdapterStore:
    """All adapters of one base model below `root`. One process owns it (a file lock), unless all that open it share it;
    others may read published files.

    root           created if missing; adapters of other base models (another layout) below it are left alone
    base_name      reserved: no adapter may take it
    base_dir       the base checkpoint, to recognise copies of base embeddings that PEFT saves beside embedding targets
    row_plan       rows of the device (`adapters.row_plan.plan_rows`), to refuse what could never fit; None = no check.
                   May be set after construction, once the engine has told its sizes
    check_template called with an upload's own chat template; its ValueError refuses the upload
    base_token_id  token text -> id of the base tokenizer or None, to refuse adapters that extend the vocabulary
    on_gone        called with a digest after its files were removed, or put in the place of damaged ones, outside all
                   locks; the API sends Evict then
    shared         whether other processes that say so too may have the store open; see `adapters.sharing`
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
        base_token_id: Callable[[str], int | None] | None = None,
        on_gone: Callable[[str], None] | None = None,
        shared: bool = False,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self.limits = limits or StoreLimits()
        most = self.limits.max_staging_bytes
        self.staging_bytes = None if most is None else StagingBytes(most)
        self.base_name = base_name
        self.on_gone = on_gone
        self._intake = Intake(layout, base_dir, row_plan, check_template, base_token_id)
        self.on_change = on_change
        root = root / self._intake.fingerprint
        self._sharing = Sharing(root) if shared else None
        self._files = StoreFiles(root, None if self._sharing is None else self._sharing.member)
        # Two locks, always taken in this order. `_disk` is held through every change of names/ and adapters/, which
        # syncs and may take long; `_lock` guards the tables below and is held for moments, so that leases are quick.
        self._disk = threading.Lock()
        self._lock = threading.Lock()
        # Of a shared store. `_reading` is held while the log is read; `_tables`, after it, while a name's file and what
        # is known of it change together.
        self._reading, self._tables = threading.Lock(), threading.Lock()
        if self._sharing is None:
            self._names: dict[str, NameRecord] = self._files.recover()
        else:
            with self._sharing.turn():
                self._sharing.begin_log()
                self._sharing.news()  # of which all names tell
                self._names = self._files.recover()
        self._index = Index(self._files.index, self._names, self._files.read_summary)
        self._num_names = Counter(rules.uses(self._names.values()))
        self._pinned = {name for name, record in self._names.items() if record.is_pinned}
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        # Of all digests that quotas had to look at.
        self._sizes: dict[str, int] = {}
        self._leases: Counter[str] = Counter()
        # Whoever releases the last lease need not wait for the disk.
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-files")
        self._closing = threading.Event()
        if self._sharing is not None:
            self._say()
            threading.Thread(target=self._keep_house, name="adapter-store", daemon=True).start()

    @property
    def row_plan(self) -> RowPlan | None:
        """Rows of the device, see the class."""
        return self._intake.row_plan

    @row_plan.setter
    def row_plan(self, row_plan: RowPlan | None) -> None:
        self._intake.row_plan = row_plan

    def close(self) -> None:
        """Release the lock, once all files are removed that nobody uses. Uploads in progress are discarded by the next
        open."""
        self._closing.set()
        self._remover.shutdown()
        with self._disk:
            self._index.close()
            self._files.close()
            if self._sharing is not None:
                self._sharing.close()

    def settle(self) -> None:
        """Wait until the files of all leases released so far are removed, if they had to go."""
        self._remover.submit(lambda: None).result()

    # ---- uploads

    def check_name(self, name: str, owner: str = "") -> None:
        """Raises InvalidName, or Conflict for the base model's name. Call it before reading a body."""
        if owner and name.rpartition("/")[2] in RESERVED:
            raise InvalidName(f"The name {name!r} would be mistaken in addresses; choose another.")
        if not is_name(name, owner):
            raise InvalidName(
                "An adapter's name has 1 to 128 letters, digits, '.', '_' and '-', and starts with a letter or a digit."
            )
        short = name.rpartition("/")[2]  # which its owner would call so
        if short == self.base_name or (owner and rules.are_twins(short, self.base_name)):
            raise Conflict(f"The name {self.base_name!r} is the base model's; choose another.")

    def check(self, name: str, condition: Condition) -> None:
        """Raises what `condition` does for the name as it is now; it is asked again when the name changes."""
        condition(self.find(name), None)

    def begin(self, *, declared_bytes: int | None = None, owner: str = "") -> Upload:
        """Start an upload. `declared_bytes` (Content-Length) is checked first: TooLarge, StorageFull. `owner` is who
        pays for its bytes on the disk until it is finished."""
        if declared_bytes is not None and declared_bytes > self.limits.max_upload_bytes:
            raise TooLarge(f"The upload is larger than the limit of {self.limits.max_upload_bytes} bytes.")
        account = Account(self.staging_bytes, owner)
        Budget(self._files.staging, self.limits, account).check_disk(declared_bytes or 0)
        with disk_full_is_ours():
            return Upload(self, Staging(self._files.staging / uuid.uuid4().hex, self.limits, account))

    # ---- changes of names

    def _publish(
        self, name: str, manifest: Manifest, ready: Path | None, change: Change, condition: Condition
    ) -> tuple[AdapterRecord, bool]:
        """What must be read for it, which may be gigabytes, is read before `_disk` is taken, and once more where
        somebody has changed it meanwhile: no other upload waits for this one's files.

        ready  None if a lease of `_hold` keeps the files
        """
        while True:
            found = self._look(name, manifest, ready, condition)
            gone: list[str] = []
            try:
                with self._change():
                    if found.still_holds(self._names.get(name), self._files.identity(manifest.digest)):
                        return self._publish_found(name, manifest, ready, change, found, gone)
            finally:
                for one in gone:
                    self._tell_if_gone(one, True)

    def _look(self, name: str, manifest: Manifest, ready: Path | None, condition: Condition) -> _Found:
        """Compare the files that are `ready` with those that the store has. Raises what `condition` does."""
        record, identity = self.find(name), self._files.identity(manifest.digest)
        condition(record, manifest.digest)
        is_whole = ready is None or self._is_whole(manifest, ready)
        is_new = record is None or record.digest != manifest.digest
        same_as = self._same_as(record, manifest, ready or self.path_of(manifest.digest)) if is_new else None
        return _Found(record, identity, is_whole, same_as)

    def _publish_found(
        self, name: str, manifest: Manifest, ready: Path | None, change: Change, found: _Found, gone: list[str]
    ) -> tuple[AdapterRecord, bool]:
        """Under `_disk`. Adds digests whose files are gone by it to `gone`, whatever is raised."""
        digest = manifest.digest
        if ready is not None and not found.is_whole and self._put(ready, digest):
            gone.append(digest)
        is_new = found.record is None or found.record.digest != digest
        try:
            if is_new:
                gone += self._move(name, digest, change, found.same_as)
            else:
                self._show(name, change)
        except (OSError, Conflict, QuotaExceeded):
            if self._remove_if_unused(digest):
                gone.append(digest)
            raise
        return self._shown(name, self._names[name].current, manifest), is_new or not found.is_whole

    def _is_whole(self, manifest: Manifest, ready: Path) -> bool:
        return self._files.is_whole(manifest, ready, lambda config: self._intake.fits(config, manifest, ready))

    def _hold(self, manifest: Manifest, ready: Path) -> Lease:
        """Put a checked directory into the store, if it is not there, for as long as the lease lives."""
        digest, is_held, was_replaced = manifest.digest, False, False
        while not is_held:  # as in `_publish`
            identity, is_whole = self._files.identity(digest), self._is_whole(manifest, ready)
            with self._change():
                is_held = identity == self._files.identity(digest)
                if is_held:
                    was_replaced = not is_whole and self._put(ready, digest)
                    with self._lock:
                        self._leases[digest] += 1
        self._tell_if_gone(digest, was_replaced)
        return Lease(self, AdapterRecord("", Version(0, digest, time.time()), manifest))

    def rollback(
        self, name: str, selector: str = "", change: Change | None = None, *, condition: Condition = rules.move
    ) -> tuple[AdapterRecord, bool]:
        """Make the content of an older version, by number or digest, the current one again; without a selector that of
        the newest version with other content. Returns (record, created) as `Upload.finish` does.

        Raises NotFound if there is no such name or version, and what `condition` raises.
        """
        gone: list[str] = []
        with self._change():
            record = self._record_of(name)
            condition(record, None)
            digest = rules.find(self._names, f"{name}@{selector}" if selector else rules.before(name, record))[1].digest
            manifest = self.manifest(digest)
            is_new = digest != record.digest
            if is_new:
                gone = self._move(name, digest, change or Change())
            shown = self._shown(name, self._names[name].current, manifest)
        for one in gone:
            self._tell_if_gone(one, True)
        return shown, is_new

    def set_visibility(self, name: str, visibility: Visibility, shared_with: tuple[str, ...] = ()) -> None:
        """Say who beside its owner may use a name. Raises NotFound."""
        with self._change():
            self._record_of(name)
            self._show(name, Change(visibility=visibility, shared_with=shared_with))

    def set_pinned(self, name: str, is_pinned: bool) -> None:
        """Have what a name stands for among `pins`, or no longer; it stays so when the name moves. Raises NotFound, and
        Conflict if more rows would be pinned than may be. `row_plan` must be set."""
        with self._change():
            record = self._record_of(name)
            if is_pinned == record.is_pinned:
                return
            if is_pinned:
                assert self.row_plan is not None, "pinned before the engine has told its rows"
                rows = self.manifest(record.digest).rows
                others = (one for one in self._pinned_now() if one.name != name)
                pin_rules.refuse_excess((*others, pin_rules.Pinned(name, record.digest, rows)), self.row_plan)
            self._write(name, msgspec.structs.replace(record, is_pinned=is_pinned))

    def pins(self) -> pin_rules.Pins:
        """What engines keep on the device; nothing before `row_plan` is set. May read a file for each."""
        self._catch_up()
        return pin_rules.Pins() if self.row_plan is None else pin_rules.select(self._pinned_now(), self.row_plan)

    def _pinned_now(self) -> list[pin_rules.Pinned]:
        """Without those whose files are damaged or missing."""
        with self._lock:
            pinned = [(name, self._names[name].digest) for name in self._pinned]
        found = []
        for name, digest in pinned:
            with suppress(NotFound, Damaged):
                found.append(pin_rules.Pinned(name, digest, self.manifest(digest).rows))
        return found

    def _show(self, name: str, change: Change) -> None:
        """Under `_disk`: give a name that is there the change's visibility, and nothing else."""
        before = self._names[name]
        record = rules.seen(before, change)
        if record != before:
            self._write(name, record)

    def _same_as(self, record: NameRecord | None, manifest: Manifest, ready: Path) -> int | None:
        """The newest version of the name that has the same weights as those that are `ready`, in another float type."""
        for version in reversed(record.versions if record is not None else ()):
            with suppress(NotFound, Damaged, Malformed, OSError):
                path = self.path_of(version.digest)
                if have_same_weights(ready, manifest, path, self.manifest(version.digest)):
                    return version.number
        return None

    def _move(self, name: str, digest: str, change: Change, same_as: int | None = None) -> list[str]:
        """Under `_disk`: make a digest whose files are there the name's current version. Returns the digests whose
        files are gone by that. After an OSError, a Conflict or QuotaExceeded the name is as before."""
        before = self._names.get(name)
        record = rules.changed(before, digest, time.time(), change, same_as)
        limits = self.limits
        record = rules.pruned(record, self._num_bytes, most=limits.max_versions, most_bytes=limits.max_version_bytes)
        self._refuse_for_owner(name, before, record, change.quota)
        self._write(name, record)
        unused = before.digests - record.digests if before is not None else set()
        return [one for one in unused if self._remove_if_unused(one)]

    def _refuse_for_owner(self, name: str, before: NameRecord | None, after: NameRecord, quota: Quota) -> None:
        """Raises Conflict, QuotaExceeded. Names without an owner may be older than the rule about twins."""
        if not after.owner and quota == Quota():
            return
        others = {one: record for one, record in self._names.items() if record.owner == after.owner and one != name}
        if before is None and after.owner:
            rules.refuse_twin(others, name)
        rules.refuse_excess(before, after, others.values(), quota, self._num_bytes)

    def _num_bytes(self, digest: str) -> int:
        """Of the tensors; 0 for a digest whose manifest is damaged."""
        if digest not in self._sizes:
            try:
                self._sizes[digest] = self.manifest(digest).num_bytes
            except (NotFound, Damaged):
                return 0
        return self._sizes[digest]

    def _put(self, ready: Path, digest: str) -> bool:
        """The adapter's files are in the store from now on, as uploaded. Returns whether they are in the place of
        damaged or missing ones: whoever has read those must read again."""
        with self._lock:
            was_used = self._is_used(digest)
        was_there = self._files.has_adapter(digest)  # although not used any more: its last user is about to remove it
        self._files.publish(ready, digest)
        if self._sharing is not None and (was_used or was_there):
            self._sharing.tell_replaced(digest)
        with self._tables:
            with self._lock:
                self._manifests.pop(digest, None)
                names = self._names.items() if was_used else ()
                named = [(name, record) for name, record in names if record.digest == digest]
            for name, record in named:  # which may have been left out, for damage
                self._tell_index(name, record)
        return was_used or was_there

    def _point(self, name: str, record: NameRecord | None) -> None:
        """Under `_tables`, after the name's file: change what a name stands for in memory and in the index; None
        removes it."""
        with self._lock:
            before = self._names.pop(name, None)
            if record is not None:
                self._names[name] = record
                self._num_names.update(record.digests)
            if before is not None:
                self._num_names.subtract(before.digests)
            (self._pinned.add if record is not None and record.is_pinned else self._pinned.discard)(name)
        self._tell_index(name, record)

    def _tell_index(self, name: str, record: NameRecord | None) -> None:
        """Under `_tables`."""
        try:
            if record is None:
                self._index.remove(name)
            else:
                self._index.put(name, record)
        except sqlite3.Error:
            log.exception("the index of adapters is built anew")
            self._index.rebuild(self._names)

    def _write(self, name: str, record: NameRecord | None) -> None:
        """In a change: what a name stands for, on disk and in memory; None removes it. After an OSError it stands for
        what its file says."""
        with nullcontext() if self._sharing is None else self._sharing.announced(name), self._tables:
            if record is None:
                self._files.remove_name(name)
            else:
                self._files.write_name(name, record)
            self._point(name, record)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Names and adapters are changed inside, under `_disk`, by one thread of all servers. StoreBusy."""
        with self._changing_files():
            if self._sharing is None:
                yield
                return
            with self._sharing.turn():
                self._sharing.begin_log()
                self._catch_up()
                yield

    @contextmanager
    def _changing_files(self) -> Iterator[None]:
        """Under `_disk`. Files that go by it are deleted after that, by the thread that made them go: nobody else's
        change waits for them."""
        taken_out: list[Path] = []
        try:
            with self._disk:
                try:
                    yield
                finally:
                    taken_out = self._files.taken_out()
        finally:
            delete(taken_out)

    # ---- servers that share the store

    def _catch_up(self) -> None:
        """Know what other servers have changed until now."""
        if self._sharing is None:
            return
        with self._reading:
            news = self._sharing.news()
            names = news.names
            if news.is_all:
                names = tuple(self._names.keys() | self._files.names().keys())
            gone = [digest for name in names for digest in self._read_again(name)]
            with self._lock:
                for digest in news.replaced:
                    self._manifests.pop(digest, None)
        for digest in (*gone, *news.replaced):
            self._tell_if_gone(digest, True)

    def _read_again(self, name: str) -> list[str]:
        """A name that somebody has changed. Returns the digests that nobody uses here any more."""
        with self._tables:
            record, before = self._files.name(name), self._names.get(name)
            if record == before:
                return []
            self._point(name, record)
        if self.on_change is not None:
            self.on_change(name)
        unused = before.digests - (record.digests if record is not None else set()) if before is not None else set()
        return [digest for digest in unused if self._remove_if_unused(digest)]

    def _say(self) -> None:
        """A sign of life, and what requests here hold that no name keeps."""
        assert self._sharing is not None
        self._catch_up()
        self._files.staging.mkdir(exist_ok=True)  # which is gone if this server stood still and was taken for dead
        with self._reading:
            with self._lock:
                held = [digest for digest in +self._leases if not self._num_names[digest] > 0]
            self._sharing.say(held)

    def _keep_house(self) -> None:
        """In a thread of its own: say what is held, and remove files that no server uses."""
        for number in count(1):
            if self._closing.wait(HOUSE_SECONDS):
                return
            try:
                self._say()
                if number % _SIGNS_PER_SWEEP == 0:
                    self.sweep()
            except Exception:
                log.exception("the adapter store is not tidied up; the next attempt is soon")

    def sweep(self) -> None:
        """Remove the files of adapters that no name keeps and no server of a shared store uses."""
        assert self._sharing is not None, "a store of one server is always swept"
        with self._change():
            if self._closing.is_set():
                return
            self._say()
            unused = self._files.digests() - set(rules.uses(self._names.values()))
            for digest in self._sharing.removable(unused):
                self._files.remove_adapter(digest)

    # ---- look-up

    def get(self, name: str) -> AdapterRecord:
        """What `name`, `name@number` or `name@digest` stands for. Raises NotFound, Damaged."""
        self._catch_up()
        with self._lock:
            return self._record(name)

    def versions(self, name: str) -> NameRecord:
        """The versions of a name. Raises NotFound."""
        self._catch_up()
        return self._record_of(name)

    def _record_of(self, name: str) -> NameRecord:
        with self._lock:
            return rules.record_of(self._names, name)

    def each(self) -> Iterator[AdapterRecord]:
        """What every name stands for, sorted; damaged adapters are logged and left out. Reads a file for each; one by
        one, so that leases need not wait, and the load reports of thousands need not be in memory together."""
        for name in self.names():
            try:
                yield self.get(name)
            except NotFound:
                continue  # deleted meanwhile
            except Damaged as error:
                log.error("adapter %s: %s", name, error)

    def names(self) -> dict[str, NameRecord]:
        """All names, sorted, without reading a file."""
        self._catch_up()
        with self._lock:
            return dict(sorted(self._names.items()))

    def page(self, query: Query) -> list[Row]:
        """Names as listings show them, without reading a file of theirs; damaged ones are left out. Takes milliseconds:
        not for an event loop."""
        self._catch_up()
        try:
            return self._index.page(query)
        except sqlite3.Error:
            log.exception("the index of adapters is built anew")
            with self._disk:
                self._index.rebuild(self._names)
            return self._index.page(query)

    def find(self, name: str) -> NameRecord | None:
        """The versions of a name, None if it stands for no adapter."""
        self._catch_up()
        with self._lock:
            return self._names.get(name)

    def has(self, name: str) -> bool:
        """Whether the name stands for an adapter now."""
        return self.find(name) is not None

    def num_names(self) -> int:
        """How many names there are: cheap enough for every scrape of metrics."""
        with self._lock:
            return len(self._names)

    def num_on_disk(self) -> int:
        """How many adapters have files here, by content: also those that only leases keep. As cheap."""
        with self._lock:
            return len(self._num_names)

    def manifest(self, digest: str) -> Manifest:
        """Raises NotFound."""
        with self._lock:
            return self._manifest(digest)

    def path_of(self, digest: str) -> Path:
        """The published PEFT directory. Raises NotFound."""
        return self._files.adapter(digest)

    def chat_template(self, digest: str) -> str | None:
        """The adapter's own chat template, None if it ships none. Raises NotFound."""
        if not self.manifest(digest).has_chat_template:
            return None
        return (self.path_of(digest) / TEMPLATE_FILE).read_text(encoding="utf-8")

    def _record(self, reference: str) -> AdapterRecord:
        name, version = rules.find(self._names, reference)
        return self._shown(name, version, self._manifest(version.digest))

    def _shown(self, name: str, version: Version, manifest: Manifest) -> AdapterRecord:
        record = self._names[name]
        return AdapterRecord(name, version, manifest, record.owner, record.visibility, record.is_pinned)

    def _manifest(self, digest: str) -> Manifest:
        """Under the lock."""
        if digest not in self._manifests:
            self._manifests[digest] = self._files.read_manifest(digest)
            if len(self._manifests) > MAX_MANIFESTS_KEPT:
                self._manifests.popitem(last=False)
        self._manifests.move_to_end(digest)
        return self._manifests[digest]

    # ---- leases and deletion

    def lease(self, name: str) -> Lease:
        """Resolve `name`, `name@number` or `name@digest` and keep its files until the lease is released. Raises
        NotFound, Damaged."""
        self._catch_up()
        with self._lock:
            record = self._record(name)
            self._leases[record.digest] += 1
        return Lease(self, record)

    def num_leases(self, digest: str) -> int:
        """Leases held on the digest, for metrics and tests."""
        return self._leases[digest]

    def delete(self, name: str, condition: Condition = rules.move) -> str:
        """Remove the name and its versions at once; the files go with the last lease, or now if nobody holds one and no
        other name keeps them. Returns the current digest, damaged or not. Raises NotFound, and what `condition`
        raises."""
        with self._change():
            record = self._record_of(name)
            condition(record, None)
            self._write(name, None)
            gone = [digest for digest in record.digests if self._remove_if_unused(digest)]
        for digest in gone:
            self._tell_if_gone(digest, True)
        return record.digest

    def _release(self, digest: str) -> None:
        with self._lock:
            assert self._leases[digest] > 0, digest
            self._leases[digest] -= 1
            is_used = self._is_used(digest)
        if not is_used:
            with suppress(RuntimeError):  # the store is closed: the next to open it removes them
                self._remover.submit(self._collect, digest)

    def _collect(self, digest: str) -> None:
        """Remove a digest that nobody uses, unless somebody does by now."""
        try:
            with self._changing_files():
                is_gone = self._remove_if_unused(digest)
            self._tell_if_gone(digest, is_gone)
        except Exception:
            log.exception("the files of adapter %s could not be removed; the next start will try again", digest)

    def _is_used(self, digest: str) -> bool:
        """Under `_lock`."""
        return self._leases[digest] > 0 or self._num_names[digest] > 0

    def _remove_if_unused(self, digest: str) -> bool:
        """Under `_disk`, so that no name, and hence no lease, can come to the digest meanwhile. False when it is used
        or gone already. In a shared store the files stay until `sweep` knows that no server uses them."""
        with self._lock:
            if self._is_used(digest):
                return False
            del self._leases[digest]
            self._sizes.pop(digest, None)
            self._manifests.pop(digest, None)
        is_gone = self._sharing is not None or self._files.remove_adapter(digest)
        with self._lock:
            if self._num_names[digest] <= 0:
                del self._num_names[digest]  # not before: `num_on_disk` counts it until its files are out of sight
        return is_gone

    def _tell_if_gone(self, digest: str, is_gone: bool) -> None:
        if is_gone and self.on_gone is not None:
            self.on_gone(digest)

    def check_integrity(self) -> None:
        """Assert that names, leases and directories agree, on disk and in memory, after `settle`."""
        self.settle()
        with self._disk, self._lock:
            assert self._files.names() == self._names
            assert self._pinned == {name for name, record in self._names.items() if record.is_pinned}
            assert +self._num_names == Counter(rules.uses(self._names.values()))
            assert all(count >= 0 for count in self._leases.values())
            wanted = set(+self._num_names) | set(+self._leases)
            assert self._files.digests() == wanted
            assert set(self._manifests) <= wanted
            kept = list(self._index.each())
            self._index.rebuild(self._names)
            assert kept == list(self._index.each()), "the index kept is not the index built anew"
