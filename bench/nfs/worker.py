"""A process of a machine of `bench.nfs` that uses a store: it says its process id, and from then on one call is a line
of JSON, and so is its answer."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from adapters.errors import AdapterError
from adapters.files.name_versions import move
from adapters.store import shared_log
from adapters.store.store import AdapterStore, StoreLimits
from service.models.layouts import layout_in
from service.settings import BUNDLED_MODEL_DIR
from tests.support.peft_files import adapter_files

_REPLACED_BYTES = 8192


class Worker:
    """What can be asked of it; each returns what becomes JSON."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = ExitStack()
        self._store: AdapterStore | None = None
        self._parts: shared_log.SharedLog | None = None

    # ---- what the store relies on

    def replace(self, times: int) -> int:
        """A file, by rename, so many times: each is its number again and again."""
        for number in range(times):
            new = self._root / f"new-{number % 2}"
            with new.open("wb") as file:
                file.write(b"%07d\n" % number * (_REPLACED_BYTES // 8))
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._root / "replaced")
        return times

    def read(self, times: int) -> dict[str, int]:
        """That file, so many times: how often it was not there, not whole, or older than before, and its numbers."""
        seen = {"missing": 0, "torn": 0, "older": 0, "numbers": 0}
        last = -1
        for _ in range(times):
            try:
                data = (self._root / "replaced").read_bytes()
            except FileNotFoundError:
                seen["missing"] += 1
                continue
            number = int(data[:8] or -1)
            seen["torn"] += data != b"%07d\n" % number * (_REPLACED_BYTES // 8)
            seen["older"] += number < last
            seen["numbers"] += number != last
            last = number
        return seen

    def count_up(self, times: int) -> int:
        """A number in a file, so many times, each in a turn: what others have written must be there."""
        path = self._root / "counter"
        for _ in range(times):
            with self._sharing.change_lock():
                number = int(path.read_text()) if path.exists() else 0
                path.write_text(f"{number + 1}\n")
        return int(path.read_text())

    def take_turn(self) -> bool:
        """Keep it; False where another has it for too long."""
        try:
            self._turn.enter_context(self._sharing.change_lock())
        except AdapterError:
            return False
        return True

    def give_turn(self) -> None:
        self._turn.close()

    # ---- a store that all share

    def open(self, log_bytes: int) -> None:
        """log_bytes  of the log of changes: where there are few, it begins anew often"""
        shared_log.LOG_BYTES = log_bytes
        limits = StoreLimits(free_disk_floor_bytes=0, max_versions=3)
        layout = layout_in(BUNDLED_MODEL_DIR)
        self._store = AdapterStore(self._root / "store", layout, limits, base_name="base", shared=True)

    def close(self) -> None:
        self._there.close()

    def put(self, name: str, content: int) -> int:
        """The version."""
        with self._there.begin() as upload:
            for _, (file_name, data) in adapter_files(content):
                with upload.open_part(file_name.partition(".")[0], file_name) as part:
                    part.write(data)
            return upload.finish(name, condition=move)[0].version.number

    def rollback(self, name: str) -> bool:
        """False where there is nothing to go back to."""
        try:
            self._there.rollback(name)
        except AdapterError:
            return False
        return True

    def delete(self, name: str) -> bool:
        """False where it is not there."""
        try:
            self._there.delete(name)
        except AdapterError:
            return False
        return True

    def held(self) -> dict[str, list[str]]:
        """Digests of the versions of all names, oldest first, by look-ups; the files of each are there."""
        held = {}
        for name in self._there.names():
            with self._there.lease(name) as lease:
                assert (self._there.path_of(lease.record.digest) / "adapter_model.safetensors").stat().st_size
            held[name] = [one.digest for one in self._there.versions(name).versions]
        return held

    # ---- inner parts

    @property
    def _there(self) -> AdapterStore:
        assert self._store is not None, "not opened"
        return self._store

    @property
    def _sharing(self) -> shared_log.SharedLog:
        self._parts = self._parts or shared_log.SharedLog(self._root)
        return self._parts


def main() -> None:
    worker = Worker(Path(sys.argv[1]))
    print(os.getpid(), flush=True)  # the shell that this was may have read ahead until now
    for line in sys.stdin:
        call, *given = json.loads(line)
        said: dict[str, Any] = {}
        try:
            said["is"] = getattr(worker, call)(*given)
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
