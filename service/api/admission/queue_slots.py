"""Places in the queue: one for each sequence, taken before any text is looked at."""

from __future__ import annotations

from service.api.admission.prompts import raw_prompts
from service.api.errors import BadRequest, QueueFull
from service.api.schema.requests import ChatRequest, CompletionRequest
from service.api.state import Services
from service.tenants.limits import Tenant


def client_of_places(services: Services, tenant: Tenant, model: str) -> str:
    """Among whom places in the queue are shared: tenants, and models where there are none."""
    return tenant.name if services.tenants.has_file else model


def enter(services: Services, tenant: Tenant, num_sequences: int, client: str) -> None:
    """Take places for a tenant's sequences. LimitReached, QueueFull if it may not have all, or not all are free."""
    tenant.enter(num_sequences)
    try:
        services.gate.enter(num_sequences, client)
    except QueueFull:
        tenant.leave(num_sequences)
        raise


def leave(services: Services, tenant: Tenant, num_sequences: int, client: str) -> None:
    """Give places of a tenant's sequences back."""
    services.gate.leave(num_sequences, client)
    tenant.leave(num_sequences)


def most_sequences(services: Services, tenant: Tenant) -> int:
    """How many the tenant can ever have in flight."""
    limit = tenant.limits.requests_in_flight
    return services.gate.limit if limit is None else min(limit, services.gate.limit)


def num_sequences(services: Services, tenant: Tenant, request: CompletionRequest | ChatRequest) -> int:
    """`n` for each prompt. BadRequest if the tenant could never have so many."""
    num_choices = request.n or 1
    if num_choices > services.settings.max_choices:
        raise BadRequest(f"`n` is {num_choices}; this server allows {services.settings.max_choices}.", param="n")
    num_prompts = 1 if isinstance(request, ChatRequest) else len(raw_prompts(request))
    most = most_sequences(services, tenant)
    if num_prompts * num_choices > most:
        raise BadRequest(
            f"{num_prompts} prompts with n = {num_choices} are more than the {most} sequences this server runs or "
            f"queues{'' if most == services.gate.limit else ' for you'}; send fewer.",
            param="prompt",
        )
    return num_prompts * num_choices
