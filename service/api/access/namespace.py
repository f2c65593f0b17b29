"""Adapters as one caller sees them: the only way from a name that a client sent to the store.

A tenant calls its own adapters by their names, `org/name` too, and those of another `tenant/name`. What may be either
is its own if there is such a one, whatever the others have or are. The store calls all of them `tenant/name`, but for
those of the operator's own tenant (DEFAULT), which have no owner there (`adapters.files.paths.join`). What a caller may
not see, or may not do, is answered like what does not exist.
"""

from __future__ import annotations

from typing import NoReturn

from starlette.convertors import Convertor, register_url_convertor

from adapters.errors import NotFound, QuotaExceeded
from adapters.files.manifest import AdapterRecord
from adapters.files.name_versions import Change, Condition, NameRecord, OnNewVersion, Quota, Visibility, split
from adapters.files.paths import OWNERLESS, join, separate
from adapters.store.name_index import Viewer
from adapters.store.store import AdapterStore, Lease, Upload
from service.api.errors import Forbidden
from service.tenants.limits import LimitReached
from service.tenants.tenants import DEFAULT, Caller, Tenants


class _Name(Convertor[str]):
    """In a path: a name, or another tenant's, of any number of parts. No adapter's name of several ends as the paths
    below one do."""

    regex = "[^/]+(?:/(?!(?:history|rollback|pin|archive)$)[^/]+)*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("adapter", _Name())
assert OWNERLESS == DEFAULT, "names without an owner are the operator's"

# Room comes with a deletion, which nobody can foresee.
_QUOTA_RETRY_SECONDS = 60


class Namespace:
    """The adapters of a store as a caller may see and change them."""

    def __init__(self, store: AdapterStore, tenants: Tenants, caller: Caller) -> None:
        self.store = store
        self._tenants = tenants
        self._tenant = caller.tenant
        self._is_admin = caller.may("admin")
        self._by = caller.by
        self._owner = _owner_of(caller.tenant.name)

    # ---- names

    def full_name(self, name: str) -> str:
        """The store's name for the caller's `name`; also for a version (`name@number`)."""
        prefix, slash, rest = name.partition("/")
        if not slash or not prefix:
            return join(self._owner, name)
        if prefix in (self._tenant.name, DEFAULT):
            return join(_owner_of(prefix), rest)
        own = join(self._owner, name)
        return name if self._record(own) is None else own

    def shown_name(self, full_name: str) -> str:
        """The caller's name for the store's `full_name`."""
        owner, name = separate(full_name)
        return name if owner == self._owner else f"{owner or DEFAULT}/{name}"

    def shown_owner(self, owner: str) -> str:
        """The tenant for an owner of the store; "" where there are no tenants."""
        return owner or (DEFAULT if self._tenants.has_file else "")

    def owner_of(self, tenant: str) -> str:
        """The store's owner for a tenant."""
        return _owner_of(tenant)

    # ---- what may be seen

    def find(self, name: str) -> str:
        """The store's name for an adapter, or a version of one, that the caller may use. NotFound."""
        full_name = self.full_name(name)
        record = self._record(full_name)
        if record is None or not self._may_use(record):
            _not_found(name)
        return full_name

    def lease(self, name: str) -> Lease:
        """See `AdapterStore.lease`."""
        full_name = self.find(name)
        return self.store.lease(full_name)

    def get(self, name: str) -> AdapterRecord:
        """See `AdapterStore.get`."""
        return self.store.get(self.find(name))

    @property
    def viewer(self) -> Viewer:
        """The caller as listings filter by it."""
        return Viewer(self._tenant.name, self._owner, self._is_admin, f"{DEFAULT}/" if self._owner else "")

    # ---- what may be changed

    def find_own(self, name: str) -> str:
        """The store's name for an adapter that the caller may change. NotFound."""
        full_name = self.full_name(name)
        record = self._record(full_name)
        if record is None or not self.may_change(record.owner):
            _not_found(name)
        return full_name

    def may_change(self, owner: str) -> bool:
        """Whether an owner's names are the caller's to change, and all about them to see."""
        return owner == self._owner or self._is_admin

    def name_for_upload(self, name: str) -> str:
        """The store's name for an adapter that the caller is about to upload, whatever is there. InvalidName, Conflict;
        Forbidden for the names of others that the caller may use, and all of the operator's. What might be another
        tenant's is the caller's own: whether there is such a tenant is told to nobody but an admin, who reaches it."""
        full_name = self.full_name(name)
        owner = separate(full_name)[0]
        is_reached = self._is_admin and self._tenants.limits_of(owner or DEFAULT) is not None
        if owner != self._owner and not is_reached:
            record = self._record(full_name)
            if not owner or (record is not None and self._may_use(record)):
                raise Forbidden(
                    "A name of another tenant cannot be given; leave out what stands before the `/`.",
                    param="name",
                )
            owner, full_name = self._owner, join(self._owner, name)
        self.store.check_name(full_name, owner)
        return full_name

    def finish(
        self,
        upload: Upload,
        full_name: str,
        *,
        note: str = "",
        visibility: Visibility | None = None,
        shared_with: tuple[str, ...] = (),
        root: str = "",
        condition: Condition,
        on_new_version: OnNewVersion | None = None,
    ) -> tuple[AdapterRecord, bool]:
        """See `Upload.finish`; `full_name` is of `name_for_upload`. LimitReached if the owner may not have more."""
        owner = separate(full_name)[0]
        usual: Visibility = "private" if self._tenants.has_file else "public"
        limits = self._tenants.limits_of(owner or DEFAULT)
        quota = Quota() if limits is None else Quota(limits.adapters, limits.adapter_bytes)
        change = Change(
            *(self._by, note, owner, visibility, shared_with, usual, quota), root=root, on_new_version=on_new_version
        )
        try:
            return upload.finish(full_name, change, condition=condition)
        except QuotaExceeded as error:
            headers = {
                f"x-ratelimit-limit-{error.what}": str(error.limit),
                f"x-ratelimit-remaining-{error.what}": str(max(0, error.limit - error.used)),
            }
            raise LimitReached(str(error), _QUOTA_RETRY_SECONDS, headers) from error

    def _record(self, reference: str) -> NameRecord | None:
        """Without a look at files: whether they are whole is told to nobody who may not see them."""
        return self.store.find(split(reference)[0])

    def _may_use(self, record: NameRecord) -> bool:
        is_shared = record.visibility == "shared" and self._tenant.name in record.shared_with
        return self.may_change(record.owner) or record.visibility == "public" or is_shared


def _owner_of(tenant: str) -> str:
    return "" if tenant == DEFAULT else tenant


def _not_found(name: str) -> NoReturn:
    raise NotFound(f"The adapter {name[:200]!r} does not exist.")
