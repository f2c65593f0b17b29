"""POST /v1/embeddings: hidden states of prompts, pooled to one vector each."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission.pipeline import Admitted
from service.api.entry.request_log import note_job, notes_of
from service.api.errors import BadRequest
from service.api.generation.job import GenerationJob
from service.api.generation.sequence import OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.http.sse import JsonResponse, until_disconnect
from service.api.openapi import GENERATION_ERRORS
from service.api.routes.answer import admitted
from service.api.schema.answers import EmbeddingList
from service.api.schema.pooled import EmbeddingRequest
from service.api.state import Services, services_of
from service.engine.ipc.messages import Ready
from service.fairness.thread_pool import run_in_thread

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

# Parts that share the slots: when one is done the next begins, while the others go on.
_PARTS_AT_A_TIME = 4
# Characters of text that cost as much as one number of an embedding written as JSON.
NUMBER_CHARS = 2


@router.post(
    "/v1/embeddings", response_model=EmbeddingList, responses=GENERATION_ERRORS, summary="Embed one text or several"
)
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The hidden state of each input's last token, or the mean of all its tokens', behind the model's last norm, with
    the base or an adapter."""
    services = services_of(request)
    _check_dimensions(services.require_ready(), body)
    held = await admitted(request, body)
    job, pieces = await run_all(request, services, held)
    vectors = [piece.pooled or b"" for piece in pieces]
    answered = partial(_answer, body, job, vectors, num_tokens_of(held))
    return await run_in_thread(answered, size_chars=NUMBER_CHARS * sum(map(len, vectors)))


async def run_all(request: Request, services: Services, held: Admitted) -> tuple[GenerationJob, list[OutputChunk]]:
    """One of the jobs, and the output of all sequences in their order, as many at a time as there are slots. Releases
    what is held."""
    size = max(1, held.slots.num_held // _PARTS_AT_A_TIME)
    num_at_a_time = min(_PARTS_AT_A_TIME, held.slots.num_held)
    starts = iter(range(0, len(held.plans), size))
    jobs: list[GenerationJob] = []
    found: dict[int, list[OutputChunk]] = {}

    async def run_parts() -> None:
        for start in starts:
            services.require_ready()
            job = GenerationJob(services, held, part=held.plans[start : start + size])
            jobs.append(job)
            if len(jobs) == 1:
                note_job(request, job)
            else:
                notes_of(request).jobs.append(job)
            try:
                found[start] = await job.collect()
            finally:
                job.close()

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_at_a_time):
                group.create_task(run_parts())

    try:
        await until_disconnect(request, run())
    except* Exception as errors:
        first: Exception = errors
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    finally:
        held.release()
    return jobs[0], [piece for start in sorted(found) for piece in found[start]]


def prompt_usage(num_tokens: int) -> dict[str, Any]:
    """Token counts of an answer without words, with the keys that vLLM sends."""
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def num_tokens_of(held: Admitted) -> int:
    """Tokens of all prompts."""
    return sum(len(plan.prompt.token_ids) for plan in held.plans)


def _check_dimensions(ready: Ready, body: EmbeddingRequest) -> None:
    if body.dimensions is not None and body.dimensions != ready.hidden_size:
        raise BadRequest(
            f"`dimensions` is {body.dimensions}, but this model's embeddings have {ready.hidden_size} numbers, all of "
            "which are sent; leave out `dimensions`.",
            param="dimensions",
        )


def _answer(body: EmbeddingRequest, job: GenerationJob, vectors: Sequence[bytes], num_tokens: int) -> Response:
    return JsonResponse(
        {
            "id": f"embd-{uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(body, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": job.name,
            "system_fingerprint": job.fingerprint,
            "usage": prompt_usage(num_tokens),
        }
    )


def _written(body: EmbeddingRequest, vector: bytes) -> str | list[float]:
    """A vector, float32, as it is asked for; of length 1 unless the request says no."""
    numbers = array("f", vector)
    return coded(unit(numbers) if body.is_normalized else numbers, body.encoding_format)


def unit(numbers: array[float]) -> array[float]:
    """The vector with the length 1; one that is all zeros stays so."""
    length = math.sqrt(math.fsum(number * number for number in numbers)) or 1.0
    return array("f", [number / length for number in numbers])


def coded(numbers: array[float], encoding_format: str | None) -> str | list[float]:
    """Numbers as a request's `encoding_format` has them."""
    return base64.b64encode(numbers.tobytes()).decode() if encoding_format == "base64" else numbers.tolist()
