"""The names in a request to what they stand for, once: the base, or the digest of an adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from adapters import errors as store_errors
from adapters.files.manifest import Manifest
from adapters.files.name_versions import split
from adapters.peft.config import invocation_start
from adapters.store.store import Lease
from service.api.access.namespace import Namespace
from service.api.errors import BadRequest, UnknownModel, quoted
from service.api.state import Services
from service.tenants.tenants import Caller


@dataclass(frozen=True)
class ResolvedModel:
    """The model that a request names: the base (no lease) or one adapter's digest, leased until `release`.

    name        the base's, or the store's name of the adapter
    shown_name  what the caller calls it
    turn        what takes turns for an adapter's own template, see `Services.template_turn`
    newest      what the name stands for now, leased, as `resolve` has it; None: it never stands for anything else
    """

    name: str
    lease: Lease | None
    shown_name: str = ""
    turn: str = ""
    newest: Callable[[], ResolvedModel] | None = None

    @property
    def digest(self) -> str | None:
        """The adapter's digest, None for the base."""
        return None if self.lease is None else self.lease.record.digest

    @property
    def adapter_rows(self) -> dict[str, int]:
        """Rows that the adapter takes on the device, by projection group."""
        return {} if self.lease is None else self.lease.record.manifest.rows

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """The token of a prompt at which the adapter begins to work; None where it is not invoked."""
        invocation = () if self.lease is None else self.lease.record.manifest.invocation
        return invocation_start(token_ids, invocation) if invocation else 0

    @property
    def has_template(self) -> bool:
        """Whether the adapter ships chat templates of its own, which nobody here has chosen."""
        return self.lease is not None and self.lease.record.manifest.has_chat_template

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the adapter's score head, in order; none without a head."""
        return () if self.lease is None else self.lease.record.manifest.labels

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end the adapter's answers beside the base's."""
        return () if self.lease is None else self.lease.record.manifest.eos_token_ids

    @property
    def changed_tokens(self) -> dict[str, str | None]:
        """Special tokens that the adapter has in place of the base's; None: it has none of that name."""
        return {} if self.lease is None else self.lease.record.manifest.special_tokens

    def release(self) -> None:
        """Give the adapter's files back to the store; exactly once."""
        if self.lease is not None:
            self.lease.release()


def resolve_name(services: Services, model: str | None, adapter_id: str | None = None) -> str | None:
    """The adapter that `model` (None: the base) and `adapter_id` name, None for the base. Whether it exists is not
    checked."""
    base = services.settings.base_name
    if model is None:
        return adapter_id
    if not model:
        raise BadRequest(f"`model` is empty; send {base!r}, an adapter's name, or '{base}:<adapter>'.", param="model")
    prefix, _, suffix = model.partition(":")
    if prefix == base and suffix:
        named: str | None = suffix
    else:
        named = None if model == base else model
    if adapter_id:
        if named is not None and named != adapter_id:
            raise BadRequest(
                f"`model` names the adapter {quoted(named)!r} and `adapter_id` names {quoted(adapter_id)!r}; "
                "send one of them.",
                param="adapter_id",
            )
        return adapter_id
    return named


def resolve(services: Services, caller: Caller, model: str | None, adapter_id: str | None = None) -> ResolvedModel:
    """Names to a digest, with a lease on it. UnknownModel if there is no such adapter for the caller, or none at all:
    LoRA is off."""
    name = resolve_name(services, model, adapter_id)
    if name is None:
        return ResolvedModel(services.settings.base_name, None, services.settings.base_name)
    param = "adapter_id" if adapter_id else "model"
    unknown = f"The model `{quoted(adapter_id or model or name)}` does not exist"
    if services.store is None:
        raise UnknownModel(
            f"{unknown}: LoRA is off, so there is only {services.settings.base_name!r}; to serve adapters, start the "
            "server with --adapter-row-bytes above 0.",
            param=param,
        )
    try:
        namespace = Namespace(services.store, services.tenants, caller)
        lease = namespace.lease(name)
        full_name = lease.record.name
        # Where there are several tenants none of them can have all turns.
        turn = f"{caller.tenant.name}/" if services.tenants.has_file else lease.record.digest
        newest = None if split(name)[1] else partial(resolve, services, caller, model, adapter_id)
        return ResolvedModel(full_name, lease, namespace.shown_name(full_name), turn, newest)
    except store_errors.NotFound:
        raise UnknownModel(f"{unknown}; GET /v1/models lists what does.", param=param) from None


def obstacle(services: Services, old: Manifest, new: Manifest) -> str | None:
    """One sentence: why a request that was admitted with one version cannot go on with another one. None if it can."""
    parts = {"invocation": "invocation tokens", "eos_token_ids": "end tokens", "special_tokens": "special tokens"}
    differing = [told for name, told in parts.items() if getattr(old, name) != getattr(new, name)]
    if old.has_chat_template or new.has_chat_template:
        assert services.store is not None, "adapters without a store"
        templates = [services.store.chat_templates(one.digest) for one in (old, new)]
        differing += ["chat templates"] if templates[0] != templates[1] else []
    return f"Its {' and '.join(differing)} are others; send the request again." if differing else None
