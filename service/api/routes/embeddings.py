"""POST /v1/embeddings: hidden states of prompts, pooled to one vector each."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.access.auth import caller_of
from service.api.admission.admission import charged
from service.api.admission.lengths import MAX_TEXT_CHARS
from service.api.admission.model_resolution import ResolvedModel, resolve
from service.api.admission.prompts import Prompt, encoded
from service.api.admission.queue_slots import client_of_places, enter, leave, most_sequences
from service.api.admission.sequences import PlannedSequence
from service.api.entry.request_log import note_job, notes_of
from service.api.errors import BadRequest
from service.api.generation.job import GenerationJob
from service.api.http.json_body import JsonRoute
from service.api.http.sse import JsonResponse, until_disconnect
from service.api.openapi import GENERATION_ERRORS
from service.api.run_in_thread import run_in_thread
from service.api.schema.answers import EmbeddingList
from service.api.schema.requests import EmbeddingRequest
from service.api.state import Services, services_of
from service.engine.ipc.messages import Ready, Sampling
from service.tenants.limits import Tenant
from service.text.stop_strings import StopAutomaton

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

# So many inputs of a request run at a time, fewer where its tenant may have fewer, each in a place of the queue; the
# others come after them.
MAX_AT_A_TIME = 64
# Characters of text that cost as much as one number of an embedding written as JSON.
_NUMBER_CHARS = 2


@router.post(
    "/v1/embeddings", response_model=EmbeddingList, responses=GENERATION_ERRORS, summary="Embed one text or several"
)
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The hidden state of each input's last token, or the mean of all its tokens', behind the model's last norm, with
    the base or an adapter."""
    services = services_of(request)
    ready = services.require_ready()
    inputs = _inputs(body)
    _check(ready, body)
    caller = caller_of(request)
    tenant, target = caller.tenant, resolve(services, caller, body.model, body.adapter_id)
    try:
        places = min(len(inputs), MAX_AT_A_TIME, most_sequences(services, tenant))
        client = client_of_places(services, tenant, target.name)
        enter(services, tenant, places, client)
        # Held until the end: a request that has begun need not wait behind others.
        try:
            prompts = await until_disconnect(request, _prompts(services, ready, body, inputs))
            plans = [_plan(body, prompt) for prompt in prompts]
            charged(tenant, plans)
            jobs = await _run(request, services, tenant, target, plans, places)
        finally:
            leave(services, tenant, places, client)
        vectors = [vector for _, vectors in jobs for vector in vectors]
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        answered = partial(_answer, body, jobs[0][0], vectors, num_tokens)
        return await run_in_thread(answered, size_chars=_NUMBER_CHARS * sum(map(len, vectors)))
    finally:
        target.release()


@dataclass(frozen=True)
class _Group:
    """Inputs that run together; places and adapter are the whole request's, which gives them back."""

    tenant: Tenant
    target: ResolvedModel
    plans: list[PlannedSequence]

    def end_one(self, plan: PlannedSequence, num_generated: int) -> None:
        """A sequence has ended."""

    def release(self) -> None:
        """All have."""


async def _run(
    request: Request,
    services: Services,
    tenant: Tenant,
    target: ResolvedModel,
    plans: Sequence[PlannedSequence],
    places: int,
) -> list[tuple[GenerationJob, list[bytes]]]:
    """The vectors of all sequences, as many at a time as there are places."""
    done: list[tuple[GenerationJob, list[bytes]]] = []
    for start in range(0, len(plans), places):
        services.require_ready()
        job = GenerationJob(services, _Group(tenant, target, list(plans[start : start + places])))
        if done:
            notes_of(request).jobs.append(job)
        else:
            note_job(request, job)
        try:
            pieces = await until_disconnect(request, job.collect())
        finally:
            job.close()
        done.append((job, [piece.pooled or b"" for piece in pieces]))
    return done


def _inputs(body: EmbeddingRequest) -> list[str | list[int]]:
    """The four forms of `input` as one."""
    given = body.input
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest("`input` is an empty list; send at least one text or token.", param="input")
    return [given] if isinstance(given[0], int) else list(given)


def _check(ready: Ready, body: EmbeddingRequest) -> None:
    if body.dimensions is not None and body.dimensions != ready.hidden_size:
        raise BadRequest(
            f"`dimensions` is {body.dimensions}, but this model's embeddings have {ready.hidden_size} numbers, none of "
            "which can be left out; leave it out.",
            param="dimensions",
        )
    limit = _limit(ready)
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens > limit:
        raise BadRequest(
            f"`truncate_prompt_tokens` is {body.truncate_prompt_tokens}, but this server holds {limit} tokens for a "
            "request; lower it.",
            param="truncate_prompt_tokens",
        )


def _limit(ready: Ready) -> int:
    return min(ready.max_model_len_tokens, ready.kv_capacity_tokens)


async def _prompts(
    services: Services, ready: Ready, body: EmbeddingRequest, inputs: Sequence[str | list[int]]
) -> list[Prompt]:
    """The inputs as tokens. BadRequest names one that cannot be embedded."""

    def work() -> list[Prompt]:
        return [_prompt(services, ready, body, index, one) for index, one in enumerate(inputs)]

    return await run_in_thread(work, size_chars=sum(map(len, inputs)))


def _prompt(services: Services, ready: Ready, body: EmbeddingRequest, index: int, one: str | list[int]) -> Prompt:
    limit, asked = _limit(ready), body.truncate_prompt_tokens
    name = f"input[{index}]" if isinstance(body.input, list) and not isinstance(body.input[0], int) else "input"
    if isinstance(one, str):
        most_chars = services.tokenizer.max_chars_per_token
        longest = MAX_TEXT_CHARS if asked is not None or most_chars is None else limit * most_chars
        if len(one) > longest:
            raise BadRequest(f"`{name}` has {len(one)} characters; send {longest} at most.", param=name)
        token_ids = encoded(services, one, special=body.add_special_tokens is not False).token_ids
    else:
        token_ids = tuple(one)
    if asked is not None:
        most = asked if asked > 0 else limit
        token_ids = token_ids[:most] if body.truncation_side == "right" else token_ids[-most:]
    if not token_ids:
        raise BadRequest(f"`{name}` has no tokens; send at least one.", param=name)
    if len(token_ids) > limit:
        raise BadRequest(
            f"`{name}` has {len(token_ids)} tokens, but this server holds {limit} for a request; shorten it, or send "
            "`truncate_prompt_tokens`.",
            param=name,
        )
    if max(token_ids) >= ready.vocab_size:
        raise BadRequest(
            f"`{name}` holds the token {max(token_ids)}, which is out of vocabulary: the last token is "
            f"{ready.vocab_size - 1}.",
            param=name,
        )
    return Prompt(token_ids, "")


def _plan(body: EmbeddingRequest, prompt: Prompt) -> PlannedSequence:
    return PlannedSequence(
        request_id=uuid4().hex,
        prompt=prompt,
        sampling=Sampling(max_tokens=0),
        stop=StopAutomaton(()),
        skip_special_tokens=True,
        include_stop=False,
        pooling=body.pooling or "last",
        cache_salt=body.cache_salt or "",
    )


def _answer(body: EmbeddingRequest, job: GenerationJob, vectors: Sequence[bytes], num_tokens: int) -> Response:
    return JsonResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(body, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": job.name,
            "system_fingerprint": job.fingerprint,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _written(body: EmbeddingRequest, vector: bytes) -> str | list[float]:
    """A vector, float32, as it is asked for; of length 1 unless the request says no."""
    numbers = array("f", vector)
    if body.is_normalized:
        # One that is all zeros stays so.
        length = math.sqrt(math.fsum(number * number for number in numbers)) or 1.0
        numbers = array("f", [number / length for number in numbers])
    return base64.b64encode(numbers.tobytes()).decode() if body.encoding_format == "base64" else numbers.tolist()
