"""Errors of adapters and of the store; the API maps each class to one HTTP status.

Messages are sentences for the person who uploaded: they name the thing and say what to do. They never contain a path of
this machine.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 8  # of one kind, in a message or among notes: a file may give thousands


class AdapterError(ValueError):
    """Base of the tree. `code` is stable and machine-readable."""

    code = "adapter_error"


class Malformed(AdapterError):
    """The bytes are not what they claim to be: a broken header, archive or configuration. 400."""

    code = "malformed"


class Unsupported(AdapterError):
    """Well-formed, but asks for something that is not done here (layer replication, QA-LoRA, pickles...). 400."""

    code = "unsupported"


class BindingError(AdapterError):
    """Tensors that do not fit the base model, or targets without tensors. 400.

    `problems` lists (tensor or module name, reason), complete; the message shows the first ones.
    """

    code = "does_not_bind"

    def __init__(self, message: str, problems: tuple[tuple[str, str], ...]) -> None:
        super().__init__(message)
        self.problems = problems

    @classmethod
    def listing(cls, problems: Sequence[tuple[str, str]]) -> BindingError:
        """With the first ones in its message, and how many more there are."""
        names: dict[str, list[str]] = {}  # by reason, which many tensors may share
        for name, reason in problems[:MAX_SHOWN]:
            names.setdefault(reason, []).append(name[:200])
        shown = "; ".join(f"{', '.join(some)}: {reason}" for reason, some in names.items())
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        return cls(f"The adapter does not fit this base model. {shown}{more}.", tuple(problems))


class InvalidName(AdapterError):
    """The name is outside [A-Za-z0-9][A-Za-z0-9._-]{0,127}. 400."""

    code = "invalid_name"


class TooLarge(AdapterError):
    """More bytes or files than the operator allows. 413."""

    code = "too_large"


class RowsExceeded(AdapterError):
    """The adapter could never fit in the device's row budget; the message says both sizes. 400."""

    code = "rows_exceeded"


class Conflict(AdapterError):
    """The name is taken by other content, or it is the base model's. 409."""

    code = "conflict"


class Stale(AdapterError):
    """The name no longer stands for what the caller said it does. 412."""

    code = "precondition_failed"


class QuotaExceeded(AdapterError):
    """The owner has as much as it may have. 429.

    what   "adapters" or "adapter-bytes", of which `used` of `limit` are there
    """

    code = "quota_exceeded"

    def __init__(self, message: str, what: str = "adapters", limit: int = 0, used: int = 0) -> None:
        super().__init__(message)
        self.what, self.limit, self.used = what, limit, used


class NotFound(AdapterError):
    """No adapter of this name or digest. 404."""

    code = "not_found"


class Damaged(AdapterError):
    """Something else has changed the adapter's files in the store. 500."""

    code = "damaged"

    def __init__(self, digest: str) -> None:
        super().__init__(f"The files of adapter {digest[:12]} are damaged; delete it and upload it again.")


class StorageFull(AdapterError):
    """Writing on would leave less free disk than the operator's floor. 507."""

    code = "storage_full"


class StagingFull(AdapterError):
    """Uploads that are not finished hold as many bytes as they may. 429: it passes."""

    code = "staging_full"
    headers = {"Retry-After": "5"}  # noqa: RUF012  of the answer


class StoreUnreachable(AdapterError):
    """The store's files cannot be read or written now: they are away, read-only, or on a file server that does not
    answer. 503: it may pass."""

    code = "store_unreachable"
    headers = {"Retry-After": "5"}  # noqa: RUF012  of the answer


class StoreBusy(AdapterError):
    """Another process holds the store's lock. The server cannot start."""

    code = "store_busy"
