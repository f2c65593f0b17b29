"""The names in a request to what they stand for, once: the base, or the digest of an adapter or of a sum of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from adapters import errors as store_errors
from adapters.files.manifest import AdapterRecord, Manifest
from adapters.files.name_versions import OnNewVersion, Version, split
from adapters.peft.config import invocation_start
from adapters.store.store import Lease
from adapters.sums import digest_of, is_sum, parts_of, rows_of, what_cannot_be_added
from service.api.access.namespace import Namespace
from service.api.errors import BadRequest, UnknownModel, quoted
from service.api.metrics.adapter_metrics import SUMS
from service.api.schema.base import Answering
from service.api.state import Services
from service.tenants.tenants import Caller


@dataclass(frozen=True)
class Part:
    """A version of an adapter that answers, by itself or in a sum. shown_name: what the caller calls it"""

    record: AdapterRecord
    shown_name: str
    weight: float = 1.0

    @property
    def manifest(self) -> Manifest:
        """All that is known of its content."""
        return self.record.manifest


@dataclass(frozen=True)
class ResolvedModel:
    """The model that a request names: the base (no parts), an adapter or a sum of some, leased until `release`.

    name        the base's, the store's name of the adapter, or SUMS
    shown_name  what the caller calls it
    digest      the adapter's, or the sum's (`adapters.sums`); None for the base
    parts       the adapters with their weights, each content once
    leases      of all adapters that were named
    template_owner
                renders one chat at a time by templates of adapters, see `Services.template_lock`
    newest      what the name stands for now, leased, as `resolve` has it; None: it never stands for anything else
    """

    name: str
    shown_name: str
    digest: str | None = None
    parts: tuple[Part, ...] = ()
    leases: tuple[Lease, ...] = ()
    template_owner: str = ""
    newest: Callable[[], ResolvedModel] | None = None

    @property
    def is_sum(self) -> bool:
        """Whether several adapters answer, or one with another weight than 1."""
        return self.digest is not None and is_sum(self.digest)

    @property
    def version(self) -> Version | None:
        """The adapter's version; None for the base and for sums."""
        return self.parts[0].record.version if self.parts and not self.is_sum else None

    @property
    def on_new_version(self) -> OnNewVersion | None:
        """The setting of the adapter's name; None where it has none, and for the base and sums."""
        return self.parts[0].record.on_new_version if self.version is not None else None

    @property
    def adapter_rows(self) -> dict[str, int]:
        """Rows that the adapter takes on the device, by projection group."""
        return rows_of(part.manifest for part in self.parts)

    def start_in(self, token_ids: Sequence[int]) -> int | None:
        """The token of a prompt at which the adapter begins to work; None where it is not invoked."""
        invocation = self.parts[0].manifest.invocation if self.parts else ()
        return invocation_start(token_ids, invocation) if invocation else 0

    @property
    def has_template(self) -> bool:
        """Whether an adapter ships chat templates of its own, which nobody here has chosen."""
        return any(part.manifest.has_chat_template for part in self.parts)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the adapter's score head, in order; none without a head."""
        return self.parts[0].manifest.labels if len(self.parts) == 1 else ()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end the adapters' answers beside the base's."""
        return tuple(dict.fromkeys(one for part in self.parts for one in part.manifest.eos_token_ids))

    @property
    def changed_tokens(self) -> dict[str, str | None]:
        """Special tokens that the adapter has in place of the base's; None: it has none of that name."""
        return self.parts[0].manifest.special_tokens if self.parts else {}

    def release(self) -> None:
        """Give the adapters' files back to the store; exactly once."""
        for lease in self.leases:
            lease.release()


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


def shared_name(services: Services, request: Answering) -> str:
    """`ResolvedModel.name` of what the request names, known or not. BadRequest where its names exclude each other."""
    if request.summed is not None:
        return SUMS
    assert not isinstance(request.model, list)
    return resolve_name(services, request.model, request.adapter_id) or services.settings.base_name


def resolve_request(services: Services, caller: Caller, request: Answering) -> ResolvedModel:
    """The model that a request names, leased. UnknownModel if there is no such adapter for the caller; BadRequest for
    adapters that cannot be added up."""
    if request.summed is not None:
        return _resolve_sum(services, caller, request)
    assert not isinstance(request.model, list)
    return resolve(services, caller, request.model, request.adapter_id)


def resolve(services: Services, caller: Caller, model: str | None, adapter_id: str | None = None) -> ResolvedModel:
    """Names to a digest, with a lease on it. UnknownModel if there is no such adapter for the caller, or none at all:
    LoRA is off."""
    name = resolve_name(services, model, adapter_id)
    if name is None:
        return _resolved(services, caller, None, (), ())
    lease, part = _find(services, caller, name, adapter_id or model or name, "adapter_id" if adapter_id else "model")
    newest = None if split(name)[1] else partial(resolve, services, caller, model, adapter_id)
    return replace(_resolved(services, caller, part.record.digest, (part,), (lease,)), newest=newest)


def _resolve_sum(services: Services, caller: Caller, request: Answering) -> ResolvedModel:
    assert request.summed is not None
    field, asked = request.summed
    if isinstance(request.model, str) and resolve_name(services, request.model) is not None:
        raise BadRequest(f"`model` and `{field}` both name adapters; send one of them.", param=field)
    if getattr(request, "on_new_version", None) not in (None, "keep"):
        sentence = "`on_new_version` is not available for sums of adapters, which keep their versions; leave it out."
        raise BadRequest(sentence, param="on_new_version")
    with ExitStack() as undo:
        leases: list[Lease] = []
        found: dict[str, Part] = {}
        for index, (name, _) in enumerate(asked):
            where = f"{field}[{index}].{'id' if field == 'lora' else 'name'}"
            adapter = resolve_name(services, name)
            if adapter is None:
                raise BadRequest(f"`{where}` is the base, which every sum is added to; leave it out.", param=where)
            lease, part = _find(services, caller, adapter, name, where)
            undo.callback(lease.release)
            leases.append(lease)
            found.setdefault(part.record.digest, part)
        digest = digest_of((one.record.digest, weight) for one, (_, weight) in zip(leases, asked, strict=True))
        weights = {} if digest is None else dict(parts_of(digest))
        parts = tuple(replace(part, weight=weights[key]) for key, part in found.items() if key in weights)
        if digest is not None and is_sum(digest):
            _check_addable(parts, field)
            _check_size(services, parts, field)
        undo.pop_all()
    return _resolved(services, caller, digest, parts, tuple(leases))


def _check_addable(parts: Sequence[Part], field: str) -> None:
    """BadRequest for an adapter that has more than LoRA weights, and for activated ones beside others."""
    for part in parts:
        if (what := what_cannot_be_added(part.manifest)) is not None:
            raise BadRequest(
                f"The adapter {part.shown_name!r} has {what}, which cannot be added up; name it alone, as `model`.",
                param=field,
            )
        if part.manifest.invocation != parts[0].manifest.invocation:
            raise BadRequest(
                f"The adapters {parts[0].shown_name!r} and {part.shown_name!r} begin to work at different tokens of a "
                "prompt (alora_invocation_tokens), so they cannot be added up; send one of them.",
                param=field,
            )


def _check_size(services: Services, parts: Sequence[Part], field: str) -> None:
    """BadRequest for a sum that could never fit the device."""
    assert services.store is not None
    plan, rows = services.store.row_plan, rows_of(part.manifest for part in parts)
    if plan is None:  # nobody has said yet
        return
    rank, group = plan.rank_of(rows), plan.group_too_small(rows)
    if plan.max_rank is not None and rank > plan.max_rank:
        raise BadRequest(
            f"These adapters have rank {rank} together; the kernels of this device take ranks up to {plan.max_rank}. "
            "Send fewer of them, or some of smaller ranks.",
            param=field,
        )
    if group is not None:
        raise BadRequest(
            f"These adapters need {plan.length(group, rows[group])} {group} rows on the device together, and the row "
            f"budget holds {plan.rows.get(group, 0)}. Send fewer of them, or ask the operator for a larger "
            "--adapter-row-bytes.",
            param=field,
        )


def _find(services: Services, caller: Caller, name: str, asked: str, param: str) -> tuple[Lease, Part]:
    """The adapter of a name that the client wrote as `asked`, in the field `param`. UnknownModel."""
    unknown = f"The model `{quoted(asked)}` does not exist"
    if services.store is None:
        raise UnknownModel(
            f"{unknown}: LoRA is off, so there is only {services.settings.base_name!r}; to serve adapters, start the "
            "server with --adapter-row-bytes above 0.",
            param=param,
        )
    try:
        namespace = Namespace(services.store, services.tenants, caller)
        lease = namespace.lease(name)
        return lease, Part(lease.record, namespace.shown_name(lease.record.name))
    except store_errors.NotFound:
        raise UnknownModel(f"{unknown}; GET /v1/models lists what does.", param=param) from None


def obstacle(services: Services, old: Manifest, new: Manifest) -> str | None:
    """One sentence: why a request that was admitted with one version cannot go on with another one. None if it can."""
    parts = {"invocation": "invocation tokens", "eos_token_ids": "end tokens", "special_tokens": "special tokens"}
    differing = [words for name, words in parts.items() if getattr(old, name) != getattr(new, name)]
    if old.has_chat_template or new.has_chat_template:
        assert services.store is not None, "adapters without a store"
        templates = [services.store.chat_templates(one.digest) for one in (old, new)]
        differing += ["chat templates"] if templates[0] != templates[1] else []
    return f"Its {' and '.join(differing)} are others; send the request again." if differing else None


def _resolved(
    services: Services, caller: Caller, digest: str | None, parts: tuple[Part, ...], leases: tuple[Lease, ...]
) -> ResolvedModel:
    if digest is None:
        return ResolvedModel(services.settings.base_name, services.settings.base_name, leases=leases)
    name, shown = parts[0].record.name, parts[0].shown_name
    if is_sum(digest):
        name, shown = SUMS, " + ".join(f"{part.shown_name} * {part.weight}" for part in parts)
    # Where there are several tenants none of them can have all turns.
    template_owner = f"{caller.tenant.name}/" if services.tenants.has_file else digest
    return ResolvedModel(name, shown, digest, parts, leases, template_owner)
