"""Stored responses of the Responses API: a file each, in a directory of each tenant.

They lie on disk, below the adapter store, so that servers that share it find one another's, and a restart finds all. A
file appears by one rename: after a kill it is whole or absent. It ends with its own hash: one that a failure of power
has torn, or somebody has edited, counts as absent.

No index is kept. Files sort by age, as their names begin with the time, and a directory is read once for each sixteenth
of the bound that is written: then the oldest go. Each server that shares the store may exceed the bound by as much.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import msgspec

from adapters.errors import StoreUnreachable
from adapters.files.durable_files import replace_file
from service.logs import LOGGER

# Of one tenant.
MAX_RESPONSES = 1 << 14
_PART = 16  # of the bound, which is freed at a time
_ID = re.compile(r"resp_[0-9a-f]{32}")
_LOST = "The server ended before the response was complete; send the request again."


def new_id() -> str:
    """The id of a response that is made now."""
    return f"resp_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


class StoredResponse(msgspec.Struct):
    """A response with all that led to it, so that the next one needs no other file.

    response      as it was answered
    input         its items: those of the response before it, that one's output, and the request's own
    num_bytes     of the file; 0 where none was read
    is_abandoned  it is in progress, and no server works on it
    """

    response: dict[str, Any]
    input: list[dict[str, Any]]
    num_bytes: int = 0
    is_abandoned: bool = False

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation that the next response continues, without log probabilities and a call that was cut off."""
        items = list(self.input)
        for item in self.response["output"]:
            if "content" in item:
                item = {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
            if item["type"] != "function_call" or item["status"] == "completed" or _is_json(item["arguments"]):
                items.append(item)
        return items


class ResponseStore:
    """See the module. Methods block, and may be called from any thread, but for what `running` holds.

    max_bytes          of one tenant's files
    free_floor_bytes   what stays free on the disk
    running            responses in the background that run here, by id
    """

    def __init__(self, root: Path, max_bytes: int, free_floor_bytes: int) -> None:
        self._root, self._max_bytes, self._free_floor_bytes = root, max_bytes, free_floor_bytes
        self.running: dict[str, asyncio.Task[None]] = {}
        self._lock = Lock()
        # Bytes and files of each tenant that may be written before its directory is read again.
        self._room: dict[str, tuple[int, int]] = {}

    def put(self, tenant: str, stored: StoredResponse) -> bool:
        """Store it, in the place of one with its id; whether that could be done: it has to fit the bound and the disk,
        whose errors are logged."""
        data, path = _sealed(msgspec.json.encode(stored)), self._path(tenant, stored.response["id"])
        if len(data) > self._max_bytes:
            return False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk = os.statvfs(path.parent)
            if disk.f_bavail * disk.f_frsize - len(data) < self._free_floor_bytes:
                return False
            self._take_room(tenant, len(data))
            replace_file(path, data, mode=0o600, is_durable=False)
        except OSError as error:
            LOGGER.error("A response is not stored: %s", error)
            return False
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response of this id, None if there is none. StoreUnreachable."""
        if not _ID.fullmatch(response_id):
            return None
        path = self._path(tenant, response_id)
        stored = self._read(path)
        if stored is not None and stored.is_abandoned:
            stored = self._read(path)  # it may have been completed after all
        if stored is not None and stored.is_abandoned and response_id not in self.running:
            stored.response |= {"status": "failed", "error": {"code": "server_error", "message": _LOST}}
        return stored

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one. StoreUnreachable."""
        if not _ID.fullmatch(response_id):
            return False
        try:
            self._path(tenant, response_id).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreachable(error) from error
        return True

    def claim(self, tenant: str, response_id: str) -> BinaryIO:
        """Tell all servers that somebody works on a stored response, until the file is closed, also by a kill.
        StoreUnreachable."""
        try:
            file = self._path(tenant, response_id).open("r+b")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise _unreachable(error) from error
        return file

    def is_claimed(self, tenant: str, response_id: str, claim: BinaryIO) -> bool:
        """Whether the file is still the one that was claimed: nobody has cancelled or deleted the response."""
        try:
            return os.path.samestat(os.stat(self._path(tenant, response_id)), os.fstat(claim.fileno()))
        except OSError:
            return False

    def _path(self, tenant: str, response_id: str) -> Path:
        return self._root / tenant / f"{response_id}.json"

    def _read(self, path: Path) -> StoredResponse | None:
        try:
            with path.open("rb") as file:
                data = file.read()
                encoded, _, _ = data.rpartition(b"\n")
                if data != _sealed(encoded):
                    LOGGER.error("The stored response %s is damaged.", path)
                    return None
                stored = msgspec.json.decode(encoded, type=StoredResponse)
                stored.num_bytes = len(data)
                if stored.response["status"] == "in_progress":
                    with suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        stored.is_abandoned = True
                return stored
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(error) from error

    def _take_room(self, tenant: str, num_bytes: int) -> None:
        with self._lock:
            left_bytes, left = self._room.get(tenant, (0, 0))
            if left_bytes < num_bytes or not left:
                left_bytes, left = self._make_room(tenant, num_bytes)
            self._room[tenant] = left_bytes - num_bytes, left - 1

    def _make_room(self, tenant: str, num_bytes: int) -> tuple[int, int]:
        """Delete the oldest files, and return the bytes and number of those that may come."""
        room_bytes, room = max(num_bytes, self._max_bytes // _PART), MAX_RESPONSES // _PART
        left_bytes, left = self._max_bytes - room_bytes, MAX_RESPONSES - room
        # What a killed process was about to rename is as old as its name says, and goes with the others.
        for entry in sorted(os.scandir(self._root / tenant), key=lambda one: one.name.lstrip("."), reverse=True):
            with suppress(FileNotFoundError):  # another server deletes, too
                left_bytes, left = left_bytes - entry.stat().st_size, left - 1
                if left_bytes < 0 or left < 0:
                    os.unlink(entry)
        return room_bytes, room


def _sealed(encoded: bytes) -> bytes:
    """The content of a file."""
    return b"%s\n%s" % (encoded, hashlib.sha256(encoded).hexdigest().encode())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _unreachable(error: OSError) -> StoreUnreachable:
    return StoreUnreachable(f"The stored responses cannot be used now ({error.strerror or error}); try again later.")
