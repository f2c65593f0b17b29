"""/health and /ready with their other names, /version, /load, /metrics and /reset_prefix_cache (/flush_cache)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from service import server_version
from service.api.errors import NotReady
from service.api.openapi import errors
from service.api.schema.answers import HealthResponse, LoadResponse, ReadyResponse, StatusResponse, VersionResponse
from service.api.schema.base import no_query
from service.api.state import engine_sentence, services_of
from service.engine.ipc.config import default_block_size_tokens
from service.fairness.thread_pool import in_turn

router = APIRouter(tags=["operation"])

_EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."}
}


class MetricsQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    adapter: list[str] = Field([], max_length=64, description="adapters to tell of; default: the busiest")


@router.get("/health", responses=errors((503,)), response_model_exclude_none=True, summary="Is the process up?")
@router.get("/ping", responses=errors((503,)), response_model_exclude_none=True, summary="The same, of SageMaker")
@router.post("/ping", responses=errors((413, 503)), response_model_exclude_none=True, summary="The same, of SageMaker")
@router.get("/liveness", responses=errors((503,)), response_model_exclude_none=True, summary="The same, of prime-rl")
async def health(request: Request) -> HealthResponse:
    """200 while the process can serve or will again, or finishes what it has begun; 503 once the engine stays down. Of
    several engines one is enough; `replicas` tells how each is, and `store` what is the matter with the adapters'
    directory, without which adapters that are loaded are still served."""
    services = services_of(request)
    engine = services.engine
    if engine.state == "down" and not services.draining:
        raise NotReady(engine_sentence(engine))
    replicas = {name: one.state for name, one in engine.replicas().items()}
    fault = None if services.store is None else await services.store_look.fault(services.store.fault)
    return HealthResponse(status="ok", engine=engine.state, replicas=replicas or None, store=fault)


@router.get("/ready", responses=errors((503,)), summary="Can it serve now?")
@router.get("/health_generate", responses=errors((503,)), summary="The same, of SGLang")
async def ready(request: Request) -> ReadyResponse:
    """200 once the model is loaded and warm, while the engine is alive and the server is not shutting down."""
    services = services_of(request)
    services.require_ready()
    return ReadyResponse(status="ready", model=services.settings.base_name)


@router.get("/version", summary="Version of the server")
async def get_version(request: Request) -> VersionResponse:
    """Version of the server, and how the base is held once it is loaded."""
    services = services_of(request)
    ready = services.engine.ready
    return VersionResponse(
        version=server_version(),
        model=services.settings.base_name,
        dtype=None if ready is None else ready.dtype,
        device=None if ready is None else ready.device,
    )


@router.get("/load", responses=errors((401,)), summary="Number of unfinished sequences")
async def get_load(request: Request) -> LoadResponse:
    """vLLM's: sequences that are admitted and have not ended."""
    return LoadResponse(server_load=services_of(request).queue.num_open)


@router.get(  # as verl asks
    "/flush_cache",
    dependencies=[no_query],
    responses=errors((400, 401, 403, 503)),
    summary="The same as /reset_prefix_cache",
)
@router.post(
    "/flush_cache",
    dependencies=[no_query],
    responses=errors((400, 401, 403, 413, 503)),
    summary="The same as /reset_prefix_cache",
)
@router.post(
    "/reset_prefix_cache",
    dependencies=[no_query],
    responses=errors((400, 401, 403, 413, 503)),
    summary="Forget all cached prompts",
)
async def reset_prefix_cache(request: Request) -> StatusResponse:
    """vLLM's: no later request finds keys and values of an earlier one. Requests that run are not disturbed."""
    services = services_of(request)
    services.require_ready()
    services.engine.reset_prefix_cache()
    return StatusResponse(status="ok")


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={**errors((400, 401, 429)), **_EXPOSITION},
    summary="Prometheus",
)
async def metrics(request: Request, query: Annotated[MetricsQuery, Query()]) -> PlainTextResponse:
    """All metrics, and of single adapters those of the busiest, or of the ones that are asked for. They name adapters,
    so where API keys are set this needs one."""
    services = services_of(request)
    shown, engine, store = services.metrics, services.engine, services.store
    shown.queue.set(services.queue.num_open)
    shown.engine_up.set(engine.state == "ready")
    shown.show_engine(engine.stats, engine.num_restarts)
    shown.show_replicas(engine.replicas())
    shown.show_ops(() if engine.ready is None else engine.ready.ops)
    if engine.ready is not None:
        usual = default_block_size_tokens(engine.ready.device)
        shown.block_size_tokens = services.settings.block_size_tokens or usual
    shown.adapters.labels("store").set(0 if store is None else store.num_names())
    shown.adapters_on_disk.set(0 if store is None else store.num_on_disk())
    with services.calls.holding():
        text = await in_turn(shown.render, query.adapter)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")
