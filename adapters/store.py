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
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from adapters import extras
from adapters.base_weights import BaseWeights
from adapters.disk import Alias, StoreFiles
from adapters.errors import AdapterError, Conflict, Damaged, InvalidName, Malformed, NotFound, TooLarge
from adapters.layout import BaseLayout
from adapters.paths import NAME, TEMPLATE_FILE, TENSOR_FILE, layout_fingerprint
from adapters.records import AdapterRecord, Manifest
from adapters.row_plan import RowPlan
from adapters.upload import Budget, Part, Staging, StoreLimits, disk_full_is_ours
from adapters.validate import check_headers, module_reports, write_canonical

log = logging.getLogger(__name__)

# A manifest lists every module: thousands of adapters would fill memory with them. The rest is read when asked for.
MAX_MANIFESTS_KEPT = 256

__all__ = ["AdapterStore", "Lease", "Part", "StoreLimits", "Upload"]


class Lease:
    """Keeps an adapter's files while held, also after its name is deleted. Release it exactly once (`with` does)."""

    def __init__(self, store: AdapterStore, record: AdapterRecord) -> None:
        self._store = store
        self._held = True
        self.record = record

    def release(self) -> None:
        """Quick, for an event loop. After the last release of a digest that no name points at, a thread of the store
        removes the files and calls `on_gone(digest)`; `AdapterStore.settle` waits for that."""
        assert self._held, "a lease is released once"
        self._held = False
        self._store._release(self.record.digest)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Upload:
    """One adapter on its way in, staged in the store's own file system. One thread at a time writes it; it may be
    discarded from another one."""

    def __init__(self, store: AdapterStore, staging: Staging) -> None:
        self._store = store
        self._staging: Staging | None = staging
        # A thread whose request was cancelled works on, while the upload is discarded in another. To empty the staging
        # directory beside it would empty what it publishes: a rename does not hinder who has a directory open.
        self._at_work = threading.RLock()  # `finish` discards

    def open_part(self, part_name: str, file_name: str | None = None) -> Part:
        """Open the next file, recognised by its part name ("adapter_config", "adapter_model", "archive",
        "chat_template"...) or else by its file name (adapter_config.json, *.safetensors, *.tar.gz, *.tgz, *.zip...).

        Raises Unsupported for pickles and other weight files, Malformed for a file given twice or not recognised.
        """
        with self._at_work:
            return self._open_staging().open_part(part_name, file_name)

    def check_config(self) -> None:
        """Refuse now what `finish` would refuse for the configuration alone. Call it when its part is closed: the
        tensors that follow are gigabytes. Raises Malformed, Unsupported."""
        with self._at_work:
            self._open_staging().check_config()

    def add_directory(self, path: Path) -> None:
        """Take the files of a PEFT directory on this machine instead of parts. The caller has checked that the
        operator allows the path. Symbolic links that leave the directory are refused."""
        with self._at_work:
            self._open_staging().add_directory(path)

    def finish(self, name: str, *, replace: bool = False) -> tuple[AdapterRecord, bool]:
        """Check everything, publish, and point `name` at it. Returns (record, created); created is False when the name
        already pointed at the same content. With `replace` a name that points at other content moves to this one, in
        one step; the old content goes with its last lease.

        Raises InvalidName, Conflict, Malformed, Unsupported, BindingError, RowsExceeded, TooLarge, StorageFull; after
        any of them the upload is discarded.
        """
        with self._at_work:
            staging = self._open_staging()
            try:
                self._store.check_name(name)
                with disk_full_is_ours():
                    manifest, ready = self._store._prepare(staging)
                    return self._store._publish(name, manifest, ready, replace=replace)
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


class AdapterStore:
    """All adapters of one base model below `root`; one process owns it (a file lock), others may read published files.

    root           created if missing; adapters of other base models (another layout) below it are left alone
    base_name      reserved: no adapter may take it
    base_dir       the base checkpoint, to recognise copies of base embeddings that PEFT saves beside embedding targets
    row_plan       rows of the device (`adapters.row_plan.plan_rows`), to refuse what could never fit; None = no check.
                   May be set after construction, once the engine has told its sizes
    check_template called with an upload's own chat template; its ValueError refuses the upload
    base_token_id  token text -> id of the base tokenizer or None, to refuse adapters that extend the vocabulary
    on_gone        called with a digest after its files were removed, or put in the place of damaged ones, outside all
                   locks; the API sends Evict then

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
    ) -> None:
        self.limits = limits or StoreLimits()
        self.base_name = base_name
        self.on_gone = on_gone
        self._layout = layout
        self._fingerprint = layout_fingerprint(layout)
        self._base = BaseWeights(base_dir) if base_dir is not None else None
        self.row_plan = row_plan
        self._check_template = check_template
        self._base_token_id = base_token_id
        self._files = StoreFiles(root / self._fingerprint)
        # Two locks, always taken in this order. `_disk` is held through every change of names/ and adapters/, which
        # syncs and may take long; `_lock` guards the tables below and is held for moments, so that leases are quick.
        self._disk = threading.Lock()
        self._lock = threading.Lock()
        self._names: dict[str, Alias] = self._files.recover()
        self._num_names = Counter(alias.digest for alias in self._names.values())
        self._manifests: OrderedDict[str, Manifest] = OrderedDict()
        self._leases: Counter[str] = Counter()
        # Whoever releases the last lease need not wait for the disk.
        self._remover = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-files")

    def close(self) -> None:
        """Release the lock, once all files are removed that nobody uses. Uploads in progress are discarded by the next
        open."""
        self._remover.shutdown()
        self._files.close()

    def settle(self) -> None:
        """Wait until the files of all leases released so far are removed, if they had to go."""
        self._remover.submit(lambda: None).result()

    # ---- uploads

    def check_name(self, name: str) -> None:
        """Raises InvalidName, or Conflict for the base model's name. Call it before reading a body."""
        if not NAME.fullmatch(name):
            raise InvalidName(
                "An adapter's name has 1 to 128 letters, digits, '.', '_' and '-', and starts with a letter or a digit."
            )
        if name == self.base_name:
            raise Conflict(f"The name {name!r} is the base model's; choose another.")

    def begin(self, *, declared_bytes: int | None = None) -> Upload:
        """Start an upload. `declared_bytes` (Content-Length) is checked first: TooLarge, StorageFull."""
        if declared_bytes is not None and declared_bytes > self.limits.max_upload_bytes:
            raise TooLarge(f"The upload is larger than the limit of {self.limits.max_upload_bytes} bytes.")
        Budget(self._files.staging, self.limits).check_disk(declared_bytes or 0)
        with disk_full_is_ours():
            return Upload(self, Staging(self._files.staging / uuid.uuid4().hex, self.limits))

    def _prepare(self, staging: Staging) -> tuple[Manifest, Path]:
        """Check a complete upload and write the directory to publish; returns it with its manifest."""
        staging.unpack_archive()
        config, tensors = staging.require()
        tokenizer_config = staging.read("tokenizer_config")
        vocab_size = next((p.in_features for p in self._layout.projections if p.kind == "embedding"), None)
        extras.check_vocabulary(
            staging.read("added_tokens"), tokenizer_config, staging.read("tokenizer"), vocab_size, self._base_token_id
        )
        template = extras.chat_template(staging.read("template"), tokenizer_config)
        self._refuse_template(template)
        template_bytes = None if template is None else template.encode()
        binding = check_headers(config, tensors, self._layout, self.row_plan, self._base)
        modules = module_reports(binding)
        num_bytes = sum(report.num_bytes for report in modules)
        staging.budget.check_disk(num_bytes)
        ready = staging.directory / "ready"
        ready.mkdir()
        digest = write_canonical(binding, tensors, ready / TENSOR_FILE, template_bytes)
        ignored = [f"The file {name} is not needed and was left out." for name in staging.ignored]
        manifest = Manifest(
            digest=digest,
            layout=self._fingerprint,
            rank=max(report.rank for report in modules),
            num_bytes=num_bytes,
            rows=binding.rows,
            modules=modules,
            notes=(*binding.notes, *ignored),
            has_chat_template=template is not None,
        )
        self._files.complete(ready, config, template_bytes, manifest)
        return manifest, ready

    def _refuse_template(self, template: str | None) -> None:
        if template is None or self._check_template is None:
            return
        try:
            self._check_template(template)
        except ValueError as error:
            raise Malformed(str(error)) from error

    def _publish(self, name: str, manifest: Manifest, ready: Path, *, replace: bool) -> tuple[AdapterRecord, bool]:
        digest = manifest.digest
        gone: list[str] = []
        try:
            with self._disk:
                taken = self._names.get(name)
                if taken is not None and taken.digest != digest and not replace:
                    raise Conflict(
                        f"The name {name!r} is taken by another adapter; delete that first or choose another name."
                    )
                is_whole = self._files.is_whole(manifest, ready, lambda config: self._fits(config, manifest, ready))
                if is_whole and taken is not None and taken.digest == digest:
                    return AdapterRecord(name, taken.created_at_seconds, manifest), False
                if not is_whole and self._put(ready, digest):
                    gone.append(digest)
                alias = Alias(digest, time.time())
                try:
                    self._files.write_name(name, alias)
                except OSError:
                    if self._remove_if_unused(digest):
                        gone.append(digest)
                    raise
                self._point(name, alias)
                if taken is not None and self._remove_if_unused(taken.digest):
                    gone.append(taken.digest)
        finally:
            for one in gone:
                self._tell_if_gone(one, True)
        return AdapterRecord(name, alias.created_at_seconds, manifest), True

    def _fits(self, config: bytes, manifest: Manifest, ready: Path) -> bool:
        """Whether an adapter_config.json makes of the tensors in `ready` what the manifest says."""
        try:
            binding = check_headers(config, ready / TENSOR_FILE, self._layout, None, self._base)
        except AdapterError:
            return False
        return module_reports(binding) == manifest.modules

    def _put(self, ready: Path, digest: str) -> bool:
        """The adapter's files are in the store from now on, as uploaded. Returns whether they are in the place of
        damaged or missing ones: whoever has read those must read again."""
        with self._lock:
            was_used = self._is_used(digest)
        was_there = self._files.has_adapter(digest)  # although not used any more: its last user is about to remove it
        self._files.publish(ready, digest)
        with self._lock:
            self._manifests.pop(digest, None)
        return was_used or was_there

    def _point(self, name: str, alias: Alias | None) -> None:
        """Change what a name points at in memory; None removes it."""
        with self._lock:
            before = self._names.pop(name, None)
            if before is not None:
                self._num_names[before.digest] -= 1
            if alias is not None:
                self._names[name] = alias
                self._num_names[alias.digest] += 1

    # ---- look-up

    def get(self, name: str) -> AdapterRecord:
        """Raises NotFound."""
        with self._lock:
            return self._record(name)

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

    def names(self) -> dict[str, Alias]:
        """All names, sorted, without reading a file."""
        with self._lock:
            return dict(sorted(self._names.items()))

    def has(self, name: str) -> bool:
        """Whether the name stands for an adapter now."""
        with self._lock:
            return name in self._names

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

    def _alias(self, name: str) -> Alias:
        """Under either lock."""
        alias = self._names.get(name)
        if alias is None:
            raise NotFound(f"The adapter {name[:200]!r} does not exist.")
        return alias

    def _record(self, name: str) -> AdapterRecord:
        alias = self._alias(name)
        return AdapterRecord(name, alias.created_at_seconds, self._manifest(alias.digest))

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
        """Resolve a name and keep its files until the lease is released. Raises NotFound."""
        with self._lock:
            record = self._record(name)
            self._leases[record.digest] += 1
        return Lease(self, record)

    def num_leases(self, digest: str) -> int:
        """Leases held on the digest, for metrics and tests."""
        return self._leases[digest]

    def delete(self, name: str) -> str:
        """Remove the name at once; the files go with the last lease, or now if nobody holds one and no other name
        points at them. Returns the digest, damaged or not. Raises NotFound."""
        with self._disk:
            digest = self._alias(name).digest
            self._files.remove_name(name)
            self._point(name, None)
            is_gone = self._remove_if_unused(digest)
        self._tell_if_gone(digest, is_gone)
        return digest

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
            with self._disk:
                is_gone = self._remove_if_unused(digest)
            self._tell_if_gone(digest, is_gone)
        except Exception:
            log.exception("the files of adapter %s could not be removed; the next start will try again", digest)

    def _is_used(self, digest: str) -> bool:
        """Under `_lock`."""
        return self._leases[digest] > 0 or self._num_names[digest] > 0

    def _remove_if_unused(self, digest: str) -> bool:
        """Under `_disk`, so that no name, and hence no lease, can come to the digest meanwhile. False when it is used
        or gone already."""
        with self._lock:
            if self._is_used(digest):
                return False
            del self._leases[digest]
            self._manifests.pop(digest, None)
        is_gone = self._files.remove_adapter(digest)
        with self._lock:
            del self._num_names[digest]  # not before: `num_on_disk` counts the digest until its files are gone
        return is_gone

    def _tell_if_gone(self, digest: str, is_gone: bool) -> None:
        if is_gone and self.on_gone is not None:
            self.on_gone(digest)

    def check_integrity(self) -> None:
        """Assert that names, leases and directories agree, on disk and in memory, after `settle`."""
        self.settle()
        with self._disk, self._lock:
            assert self._files.names() == self._names
            assert +self._num_names == Counter(alias.digest for alias in self._names.values())
            assert all(count >= 0 for count in self._leases.values())
            wanted = set(+self._num_names) | set(+self._leases)
            assert self._files.digests() == wanted
            assert set(self._manifests) <= wanted
