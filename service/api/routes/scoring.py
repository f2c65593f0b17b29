"""POST /classify, /pooling, /score and /rerank: what an adapter's score head, or two tokens' logits, say of texts."""

from __future__ import annotations

import math
import time
from array import array
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response

from service.api.admission.pipeline import Admitted
from service.api.errors import NotReady
from service.api.generation.job import GenerationJob
from service.api.generation.sequence import ABORTED, OutputChunk
from service.api.http.json_body import JsonRoute
from service.api.http.sse import JsonResponse
from service.api.openapi import GENERATION_ERRORS
from service.api.routes.answer import admitted
from service.api.routes.embeddings import NUMBER_CHARS, coded, num_tokens_of, prompt_usage, run_all, unit
from service.api.schema.pooled import (
    ClassificationList,
    ClassifyRequest,
    PairRequest,
    PooledList,
    PoolingRequest,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from service.api.schema.requests import PooledRequest
from service.api.state import services_of
from service.fairness.thread_pool import LONG_TEXT_CHARS, run_in_thread
from service.grammars.json_schemas import least_chars

router = APIRouter(tags=["vLLM"], route_class=JsonRoute)


class _Outputs:
    """The engine's answers to all prompts, and who has answered."""

    def __init__(self, held: Admitted, job: GenerationJob, pieces: list[OutputChunk]) -> None:
        parts = held.target.parts
        self.model = job.name
        self.labels = held.target.labels
        self.pieces = pieces
        self.usage = prompt_usage(num_tokens_of(held))
        self._problem_type = parts[0].manifest.problem_type if parts else ""

    def numbers(self, piece: OutputChunk, body: PooledRequest) -> array[float]:
        """The head's probabilities of a prompt, float32 [labels], or its logits where no activation is asked for."""
        logits = array("f", piece.pooled or b"")
        if getattr(body, "use_activation", None) is False or self._problem_type == "regression":
            return logits
        if len(logits) == 1 or self._problem_type == "multi_label_classification":
            return array("f", [_sigmoid(one) for one in logits])
        largest = max(logits)
        powers = [math.exp(one - largest) for one in logits]
        total = math.fsum(powers)
        return array("f", [power / total for power in powers])

    def score(self, piece: OutputChunk, body: PairRequest) -> float:
        """The head's probability for a pair, or that of the second token among the two."""
        if self.labels:
            return self.numbers(piece, body)[0]
        if not piece.logprobs:
            raise NotReady(ABORTED)
        # In the order in which they were asked for; the sampled one may come first.
        no, yes = (logprob for _, logprob in piece.logprobs[0].top[-2:])
        return yes - no if body.use_activation is False else _sigmoid(yes - no)

    def listed(self, prefix: str, data: list[dict[str, Any]]) -> Response:
        """vLLM's answer."""
        head = {"id": f"{prefix}-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": self.model}
        return JsonResponse({**head, "data": data, "usage": self.usage})


async def _outputs(request: Request, body: PooledRequest) -> _Outputs:
    services = services_of(request)
    services.require_ready()
    held = await admitted(request, body)
    return _Outputs(held, *await run_all(request, services, held))


def _size_chars(outputs: _Outputs) -> int:
    return NUMBER_CHARS * sum(len(piece.pooled or b"") for piece in outputs.pieces)


@router.post(
    "/classify",
    response_model=ClassificationList,
    responses=GENERATION_ERRORS,
    summary="Classify one text or several",
)
async def classify(request: Request, body: ClassifyRequest) -> Response:
    """The probabilities of the adapter's labels, and the most probable one, for each input."""
    outputs = await _outputs(request, body)

    def written() -> Response:
        data = []
        for index, piece in enumerate(outputs.pieces):
            probs = outputs.numbers(piece, body)
            label = outputs.labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
        return outputs.listed("classify", data)

    return await run_in_thread(written, size_chars=_size_chars(outputs))


@router.post("/pooling", response_model=PooledList, responses=GENERATION_ERRORS, summary="Pool hidden states of texts")
async def pool(request: Request, body: PoolingRequest) -> Response:
    """An embedding, or the probabilities of the adapter's labels, for each input."""
    outputs = await _outputs(request, body)
    is_head = bool(outputs.labels) and body.task != "embed"

    def data_of(piece: OutputChunk) -> str | list[float]:
        if is_head:
            return coded(outputs.numbers(piece, body), body.encoding_format)
        vector = array("f", piece.pooled or b"")
        return coded(vector if body.use_activation is False else unit(vector), body.encoding_format)

    def written() -> Response:
        data = [
            {"index": index, "object": "pooling", "data": data_of(piece)} for index, piece in enumerate(outputs.pieces)
        ]
        return outputs.listed("pool", data)

    return await run_in_thread(written, size_chars=_size_chars(outputs))


@router.post("/v1/score", response_model=ScoreList, responses=GENERATION_ERRORS, summary="Score pairs of texts")
@router.post("/score", response_model=ScoreList, responses=GENERATION_ERRORS, summary="Score pairs of texts")
async def score(request: Request, body: ScoreRequest) -> Response:
    """How well each document fits its query."""
    outputs = await _outputs(request, body)
    scores = [outputs.score(piece, body) for piece in outputs.pieces]
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    return outputs.listed("score", data)


@router.post("/v1/rerank", response_model=Ranking, responses=GENERATION_ERRORS, summary="Rank documents for a query")
@router.post("/rerank", response_model=Ranking, responses=GENERATION_ERRORS, summary="Rank documents for a query")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """The documents that fit the query best, best first, as Jina's and Cohere's first API have them."""
    return await _ranked(request, body, version="1")


@router.post("/v2/rerank", response_model=Ranking, responses=GENERATION_ERRORS, summary="Rank documents for a query")
async def rerank_v2(request: Request, body: RerankRequest) -> Response:
    """The same without the documents' texts, as Cohere's second API has them."""
    return await _ranked(request, body, version="2")


async def _ranked(request: Request, body: RerankRequest, *, version: str) -> Response:
    outputs = await _outputs(request, body)
    scores = [outputs.score(piece, body) for piece in outputs.pieces]
    shows_documents = version != "2" if body.return_documents is None else body.return_documents

    def result(index: int) -> dict[str, Any]:
        shown = {"document": body.ranked(index)} if shows_documents else {}
        return {"index": index, "relevance_score": scores[index], **shown}

    best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: body.top_n or None]
    num_tokens = outputs.usage["prompt_tokens"]
    results = [result(index) for index in best]
    answer = {
        "id": f"rerank-{uuid4().hex}",
        "model": outputs.model,
        "usage": outputs.usage,
        "results": results,
        "meta": {"api_version": {"version": version}, "tokens": {"input_tokens": num_tokens, "output_tokens": 0}},
    }
    return await run_in_thread(partial(JsonResponse, answer), size_chars=least_chars(results, LONG_TEXT_CHARS))


def _sigmoid(logit: float) -> float:
    # Either way no power overflows.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
