"""`?probe=true` of an upload: a fixed prompt, run by the base and with the adapter, before the adapter has a name."""

from __future__ import annotations

import asyncio
import uuid

from adapters.errors import Malformed
from adapters.invocation import invocation_start
from adapters.records import Manifest
from service.api.errors import NotReady
from service.api.state import Services
from service.engine.messages import Finished, Sampling, Submit
from service.engine.streams import EngineDied
from service.tenants.tenants import Tenant

NUM_TOKENS = 24
LIMIT_SECONDS = 60.0
# Log probabilities that differ by less are the same: sums in another order.
SAME = 1e-5


async def probe(services: Services, tenant: Tenant, manifest: Manifest) -> None:
    """Raises Malformed for an adapter that changes no log probability of the prompt, or whose logits the engine finds
    to be no numbers; NotReady if it cannot tell now."""
    assert services.engine.ready is not None, "an upload is probed when the engine is ready"
    ready = services.engine.ready
    prompt = prompt_for(manifest, ready.vocab_size, min(ready.max_model_len_tokens, ready.kv_capacity_tokens))
    start = invocation_start(prompt, manifest.invocation) or 0 if manifest.invocation else 0
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            plain, adapted = await asyncio.gather(
                _logprobs(services, tenant, prompt), _logprobs(services, tenant, prompt, manifest, start)
            )
    except (TimeoutError, EngineDied):
        raise NotReady("The adapter could not be probed now; upload it again, or without ?probe=true.") from None
    if max(abs(one - other) for one, other in zip(plain, adapted, strict=True)) < SAME:
        raise Malformed("The adapter changes nothing: with it the base answers a fixed prompt as it does alone.")


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
    """Of the prompt's tokens but the first."""
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
