"""POST /v1/embeddings: hidden states of prompts, pooled to one vector each."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission.pipeline import Admitted
from service.api.entry.request_log import note_job, notes_of
from service.api.errors import BadRequest
from service.api.generation.job import GenerationJob
from service.api.http.json_body import JsonRoute
from service.api.http.sse import JsonResponse, until_disconnect
from service.api.openapi import GENERATION_ERRORS
from service.api.routes.answer import admitted
from service.api.schema.answers import EmbeddingList
from service.api.schema.requests import EmbeddingRequest
from service.api.state import Services, services_of
from service.api.threads import run_in_thread
from service.engine.ipc.messages import Ready

router = APIRouter(tags=["OpenAI"], route_class=JsonRoute)

# Characters of text that cost as much as one number of an embedding written as JSON.
_NUMBER_CHARS = 2


@router.post(
    "/v1/embeddings", response_model=EmbeddingList, responses=GENERATION_ERRORS, summary="Embed one text or several"
)
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """The hidden state of each input's last token, or the mean of all its tokens', behind the model's last norm, with
    the base or an adapter."""
    services = services_of(request)
    _check_dimensions(services.require_ready(), body)
    held = await admitted(request, body)
    try:
        jobs = await _run(request, services, held)
    finally:
        held.release()
    vectors = [vector for _, vectors in jobs for vector in vectors]
    answered = partial(_answer, body, jobs[0][0], vectors, sum(len(plan.prompt.token_ids) for plan in held.plans))
    return await run_in_thread(answered, size_chars=_NUMBER_CHARS * sum(map(len, vectors)))


async def _run(request: Request, services: Services, held: Admitted) -> list[tuple[GenerationJob, list[bytes]]]:
    """The vectors of all sequences, as many at a time as there are places."""
    done: list[tuple[GenerationJob, list[bytes]]] = []
    num_places = held.places.num_held
    for start in range(0, len(held.plans), num_places):
        services.require_ready()
        job = GenerationJob(services, held, part=held.plans[start : start + num_places])
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


def _check_dimensions(ready: Ready, body: EmbeddingRequest) -> None:
    if body.dimensions is not None and body.dimensions != ready.hidden_size:
        raise BadRequest(
            f"`dimensions` is {body.dimensions}, but this model's embeddings have {ready.hidden_size} numbers, none of "
            "which can be left out; leave it out.",
            param="dimensions",
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
