"""The keys file: tenants, their limits, and the hashes of their keys. TOML; docs/tenants.md shows one.

The server reads it, `multilora keys` changes it.
"""

from __future__ import annotations

import hashlib
import re
import stat
import tomllib
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from service.engine.ipc.messages import MAX_WEIGHT, MIN_WEIGHT

Scope = Literal["infer", "upload", "delete", "download", "control", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
# Thousands of tenants. The more keys there are, the longer each check takes.
MAX_FILE_BYTES = 1 << 20
# Hexadecimal digits of a key's hash that identify the key to people.
_ID_DIGITS = 12


class KeysFileError(ValueError):
    """The keys file cannot be used as it is; one sentence for the operator."""


class _Table(BaseModel):
    """TOML has types, so that nothing needs to be guessed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Limits(_Table):
    """A tenant's limits; None is no limit."""

    weight: float = Field(default=1.0, ge=MIN_WEIGHT, le=MAX_WEIGHT)
    requests_in_flight: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    uploads_per_minute: int | None = Field(default=None, ge=0)
    adapters: int | None = Field(default=None, ge=0)
    adapter_bytes: Annotated[ByteSize, Field(ge=0)] | None = None


class Key(_Table):
    """One key of a tenant, by its hash."""

    tenant: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(min_length=1, strict=False)
    created: date | None = None
    note: str = ""

    @property
    def key_id(self) -> str:
        """How the key is called in lists and logs."""
        return id_of(bytes.fromhex(self.sha256))


class KeysFile(_Table):
    """All that the file says."""

    tenants: dict[str, Limits] = {}
    keys: tuple[Key, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _check_together(self) -> KeysFile:
        for name in self.tenants:
            if not TENANT.fullmatch(name):
                raise ValueError(f"the tenant {name!r} must be named by lower-case letters, digits and '-', at most 63")
        known: set[str] = set()
        for key in self.keys:
            if key.tenant not in self.tenants:
                raise ValueError(
                    f"the key {key.key_id} is of the tenant {key.tenant!r}, which has no table; write "
                    f"[tenants.{key.tenant}], or correct the name"
                )
            if key.sha256 in known:
                raise ValueError(f"the key {key.key_id} is there twice; remove one of its [[keys]]")
            known.add(key.sha256)
        return self


def parse_keys(text: str) -> KeysFile:
    """Parse the text of a keys file. KeysFileError names the line of the first fault."""
    try:
        return KeysFile.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise KeysFileError(_sentence(error.errors()[0])) from error
    except RecursionError as error:
        raise KeysFileError("it is no TOML that can be read: its lists are nested too deeply.") from error
    except ValueError as error:  # of tomllib; of Python for numbers of thousands of digits
        raise KeysFileError(f"it is no TOML: {error}.") from error


def read_keys(path: Path) -> KeysFile:
    """The keys file. KeysFileError if it cannot be read or says what cannot be."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for whoever writes to it
            raise KeysFileError("it is no regular file; name one.")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise KeysFileError(f"it is larger than {MAX_FILE_BYTES} bytes; remove keys that nobody uses.")
        return parse_keys(data.decode())
    except OSError as error:
        raise KeysFileError(f"The keys file {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise KeysFileError(f"The keys file {path} is not UTF-8 ({error.reason}).") from error
    except KeysFileError as error:
        raise KeysFileError(f"The keys file {path}: {error}") from error


def hash_of(key: str) -> bytes:
    """The stored hash of a key. Good enough for keys of 256 random bits, which nobody can search; not for words."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def id_of(digest: bytes) -> str:
    """How a key is called in lists and logs: the beginning of its hash."""
    return digest.hex()[:_ID_DIGITS]


def _sentence(fault: Any) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        return f"{message}."
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    if fault["type"] == "extra_forbidden":
        return f"{place} is not known here; correct or remove it."
    return f"{place}: {message[0].lower()}{message[1:]}."
