"""`?probe=true` of an upload: a fixed prompt, run by the base and with the adapter, before the adapter has a name."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from adapters.errors import Malformed
from adapters.files.manifest import Manifest
from adapters.peft.config import invocation_start
from service.api.admission.pipeline import reserve
from service.api.errors import BadRequest, NotReady
from service.api.state import Services
from service.engine.ipc.link import EngineDied
from service.engine.ipc.messages import Finished, Sampling, Submit
from service.tenants.limits import Charge, Tenant

NUM_TOKENS = 24
# Tokens of the prompt, its invocation and trained tokens included.
MAX_TOKENS = 2048
# The base's and the adapter's, one after the other.
_NUM_SEQUENCES = 2
LIMIT_SECONDS = 60.0
# Log probabilities that differ by less are the same: sums in another order.
SAME = 1e-5


def refuse_probe(services: Services, tenant: Tenant) -> None:
    """Raises what `probe` would raise now for the shortest prompt, so that nobody sends gigabytes first. Takes
    nothing."""
    services.require_ready()
    with _paid(services, tenant, NUM_TOKENS) as charge:
        tenant.give_back_tokens(charge, _NUM_SEQUENCES * NUM_TOKENS)


async def probe(services: Services, tenant: Tenant, manifest: Manifest) -> None:
    """Paid for by the tenant as one of its requests: a queue slot, and the tokens of both sequences.

    Raises Malformed for an adapter that changes no log probability of the prompt, or whose logits the engine finds to
    be no numbers; NotReady if it cannot tell now; BadRequest, LimitReached and QueueFull if the tenant may not.
    """
    ready = services.require_ready()
    limit_tokens = min(ready.max_model_len_tokens, ready.kv_capacity_tokens, MAX_TOKENS)
    prompt = prompt_for(manifest, ready.vocab_size, limit_tokens)
    start = invocation_start(prompt, manifest.invocation) or 0 if manifest.invocation else 0
    with _paid(services, tenant, len(prompt)):
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                plain = await _logprobs(services, tenant, prompt)
                adapted = await _logprobs(services, tenant, prompt, manifest, start)
        except (TimeoutError, EngineDied):
            raise NotReady("The adapter could not be probed now; upload it again, or without ?probe=true.") from None
    if max(abs(one - other) for one, other in zip(plain, adapted, strict=True)) < SAME:
        raise Malformed("The adapter changes nothing: with it the base answers a fixed prompt as it does alone.")


@contextmanager
def _paid(services: Services, tenant: Tenant, num_prompt_tokens: int) -> Iterator[Charge]:
    """A queue slot, held inside, and the tokens of both sequences, which are spent.

    BadRequest if the tenant may never have so many tokens in a minute, LimitReached if not now, QueueFull.
    """
    num_tokens, limit = _NUM_SEQUENCES * num_prompt_tokens, tenant.limits.tokens_per_minute
    if limit is not None and num_tokens > limit:
        raise BadRequest(
            f"A probe of this adapter takes {num_tokens} tokens, more than your {limit} tokens per minute; upload it "
            "without ?probe=true.",
            param="probe",
        )
    slots = reserve(services, tenant, 1, services.settings.base_name)
    try:
        yield tenant.take_tokens(num_tokens)
    finally:
        slots.release()


def prompt_for(manifest: Manifest, vocab_size: int, limit_tokens: int) -> tuple[int, ...]:
    """Tokens from all over the vocabulary; and, where the adapter has them, between their halves its invocation and
    behind that the tokens that it has trained, as many as the context holds: it may change nothing else."""
    fixed = tuple((7919 * index + 11) % vocab_size for index in range(NUM_TOKENS))
    trained = tuple(dict.fromkeys(token for module in manifest.modules for token in module.token_ids))
    room = max(0, limit_tokens - NUM_TOKENS - len(manifest.invocation))
    half = NUM_TOKENS // 2
    return (*fixed[:half], *manifest.invocation, *trained[:room], *fixed[half:])


async def _logprobs(
    services: Services, tenant: Tenant, prompt: tuple[int, ...], manifest: Manifest | None = None, start: int = 0
) -> list[float]:
    """Log probabilities of the prompt's tokens, without the first."""
    digest, rows = (None, {}) if manifest is None else (manifest.digest, manifest.rows)
    sampling = Sampling(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    request = Submit(
        f"probe-{uuid.uuid4().hex}",
        prompt,
        sampling,
        digest,
        rows,
        tenant=tenant.name,
        weight=tenant.limits.weight,
        adapter_start=start,
    )
    messages, news = services.engine.submit(request), asyncio.Event()
    messages.listen(news.set)
    found: list[float] = []
    try:
        while True:
            while (message := messages.poll()) is not None:
                if not isinstance(message, Finished):
                    found += [entry.logprob for entry in message.prompt_logprobs or () if entry is not None]
                elif message.error is None:
                    return found
                else:
                    raise Malformed(message.error) if message.client_fault else NotReady(message.error)
            news.clear()
            await news.wait()
    finally:
        services.engine.abort(request.request_id)
