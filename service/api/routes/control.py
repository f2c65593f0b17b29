"""Pauses and facts of the engine by vLLM's and SGLang's names, for trainers that change weights between rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Query, Request

from service.api.access.auth import caller_of
from service.api.errors import BadRequest, NotReady
from service.api.http.json_body import JsonRoute
from service.api.openapi import errors
from service.api.schema.base import each_once, no_body, no_query
from service.api.schema.control import (
    AbortRequestRequest,
    AbortRequestsRequest,
    AbortResponse,
    CacheConfig,
    GenerationStateResponse,
    IsPausedResponse,
    IsSleepingResponse,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PauseGenerationRequest,
    PauseQuery,
    PauseResponse,
    ServerConfig,
    ServerInfoQuery,
    ServerInfoResponse,
    SleepQuery,
    WakeUpQuery,
    WorldSizeQuery,
    WorldSizeResponse,
)
from service.api.state import Services, services_of
from service.engine.ipc.link import EngineDied
from service.engine.ipc.messages import PauseMode
from service.logs import audit

router = APIRouter(tags=["control"], route_class=JsonRoute)
_ERRORS = errors((400, 401, 403, 413, 503))


@router.post("/pause", dependencies=[each_once, no_body], responses=_ERRORS, summary="Stop the engine between steps")
async def pause(request: Request, query: Annotated[PauseQuery, Query()]) -> PauseResponse:
    """vLLM's: answers once no step runs, and with `wait` no request from before. Requests that come meanwhile wait;
    everything that needs no step is served. The pause ends by /resume, or after --pause-limit-seconds."""
    await _pause(request, "wait" if query.wait_for_inflight_requests else query.mode)
    if query.clear_cache:
        services_of(request).engine.reset_prefix_cache()
    return PauseResponse(status="paused")


@router.post("/resume", dependencies=[no_query], responses=_ERRORS, summary="Let the engine go on")
async def resume(request: Request) -> PauseResponse:
    """vLLM's: all requests go on. Without a pause nothing changes."""
    await _resume(request)
    return PauseResponse(status="resumed")


@router.get("/is_paused", dependencies=[no_query], responses=errors((400, 401, 403)), summary="Is the engine paused?")
async def is_paused(request: Request) -> IsPausedResponse:
    """vLLM's: true while all engines are paused. An engine that was started again is not."""
    return IsPausedResponse(is_paused=services_of(request).engine.is_paused)


@router.post("/pause_generation", responses=_ERRORS, summary="The same as /pause")
async def pause_generation(request: Request, body: PauseGenerationRequest) -> GenerationStateResponse:
    """SGLang's /pause."""
    await _pause(request, "keep" if body.mode == "in_place" else body.mode)
    return GenerationStateResponse(message="Generation paused successfully.", status="ok")


@router.post("/continue_generation", dependencies=[no_query], responses=_ERRORS, summary="The same as /resume")
async def continue_generation(request: Request) -> GenerationStateResponse:
    """SGLang's /resume."""
    await _resume(request)
    return GenerationStateResponse(message="Generation continued successfully.", status="ok")


@router.post("/sleep", dependencies=[each_once, no_body], responses=_ERRORS, summary="Give the devices' memory back")
async def sleep(request: Request, query: Annotated[SleepQuery, Query()]) -> IsSleepingResponse:
    """vLLM's: until /wake_up the devices' memory is free. At level 1 weights and adapters wait in host memory, at level
    2 the engines end and read them again. What runs is paused first. Meanwhile requests get 503, and uploads, listings
    and /health are served."""
    services = services_of(request)
    if not services.engine.can_sleep:
        raise BadRequest("Engines behind Ray Serve do not sleep; scale the deployment down instead.")
    is_asleep = services.engine.state == "asleep"
    with _controlling(request, f"sleep {query.level}", is_ready=not is_asleep):
        if not is_asleep:
            await services.engine.pause(query.mode, services.settings.pause_limit_seconds)
            services.woken.clear()
        await services.engine.sleep(query.level)
    return IsSleepingResponse(is_sleeping=True)


@router.post("/wake_up", dependencies=[no_body], responses=_ERRORS, summary="Start the engine again")
async def wake_up(request: Request, query: Annotated[WakeUpQuery, Query()]) -> IsSleepingResponse:
    """vLLM's: answers once the engine is ready. Without a sleep nothing changes."""
    services = services_of(request)
    services.woken.update(query.tags or ("weights", "kv_cache"))
    if len(services.woken) == 2 and services.engine.can_sleep:
        with _controlling(request, "wake up", is_ready=False):
            await services.engine.wake()
    return IsSleepingResponse(is_sleeping=services.engine.state == "asleep")


@router.get("/is_sleeping", dependencies=[no_query], responses=errors((400, 401, 403)), summary="Is the engine asleep?")
async def is_sleeping(request: Request) -> IsSleepingResponse:
    """vLLM's: true from /sleep until /wake_up starts the engine."""
    return IsSleepingResponse(is_sleeping=services_of(request).engine.state == "asleep")


@router.post("/abort_requests", responses=_ERRORS, summary="End running requests")
async def abort_requests(request: Request, body: AbortRequestsRequest) -> AbortResponse:
    """vLLM's: requests of this server end with what they have, and the finish_reason `abort`."""
    return _abort(request, None if not body.request_ids else frozenset(body.request_ids))


@router.post("/abort_request", responses=_ERRORS, summary="End a running request")
async def abort_request(request: Request, body: AbortRequestRequest) -> AbortResponse:
    """SGLang's /abort_requests."""
    if not body.rid and not body.abort_all:
        raise BadRequest("Send the request's X-Request-Id as `rid`, or `abort_all`.", param="rid")
    return _abort(request, None if body.abort_all else frozenset([body.rid]))


def _abort(request: Request, request_ids: frozenset[str] | None) -> AbortResponse:
    """End these requests, or all."""
    with _controlling(request, "abort") as services:
        jobs = [job for job in services.open_jobs if request_ids is None or job.request_id in request_ids]
        for job in jobs:
            job.end_early()
    return AbortResponse(status="aborted", aborted=len({job.request_id for job in jobs}))


@router.get(
    "/server_info",
    dependencies=[each_once],
    responses=errors((400, 401, 403, 503)),
    summary="Sizes of model, adapters and replicas",
)
async def server_info(request: Request, query: Annotated[ServerInfoQuery, Query()]) -> ServerInfoResponse:
    """vLLM's, those parts of it that trainers read."""
    config = _server_config(services_of(request), shows_paths=caller_of(request).may("admin"))
    if query.config_format == "json":
        return ServerInfoResponse(vllm_config=config)
    parts = config.model_dump(by_alias=True)
    facts = {name: value for part in parts.values() if part is not None for name, value in part.items()}
    return ServerInfoResponse(vllm_config=", ".join(f"{name}={value}" for name, value in facts.items()))


@router.get(
    "/get_world_size", dependencies=[each_once], responses=errors((400, 401, 403)), summary="Number of model shards"
)
async def get_world_size(query: Annotated[WorldSizeQuery, Query()]) -> WorldSizeResponse:  # noqa: ARG001
    """vLLM's: always 1, since a model is on one device, and what is loaded reaches all replicas."""
    return WorldSizeResponse(world_size=1)


def _server_config(services: Services, *, shows_paths: bool) -> ServerConfig:
    ready, settings = services.require_ready(), services.settings
    plan, lora = None if services.store is None else services.store.row_plan, None
    if plan is not None:
        most = max(plan.rows.values())
        max_rank = most if plan.max_rank is None else min(most, plan.max_rank)
        lora = LoraConfig(max_lora_rank=max_rank, max_loras=services.metrics.by_adapter.max_adapters)
    model = ModelConfig(
        model=str(settings.model_dir) if shows_paths else settings.base_name,
        served_model_name=settings.base_name,
        dtype=f"torch.{ready.dtype}",
        max_model_len=ready.max_model_len_tokens,
    )
    stats = services.engine.stats
    cache = CacheConfig(
        enable_prefix_caching=ready.keeps_prefixes,
        prefix_host_bytes=0 if stats is None else stats.prefix_cache_host_bytes_total,
        prefix_host_bytes_used=0 if stats is None else stats.prefix_cache_host_bytes_used,
        prefix_host_hit_tokens=0 if stats is None else stats.prefix_cache_host_hit_tokens,
    )
    return ServerConfig(model_config=model, parallel_config=ParallelConfig(), cache_config=cache, lora_config=lora)


async def _pause(request: Request, mode: PauseMode) -> None:
    with _controlling(request, f"pause {mode}") as services:
        await services.engine.pause(mode, services.settings.pause_limit_seconds)


async def _resume(request: Request) -> None:
    with _controlling(request, "resume") as services:
        await services.engine.resume()


@contextmanager
def _controlling(request: Request, event: str, *, is_ready: bool = True) -> Iterator[Services]:
    """Write the audit line of an order to the engine, which `is_ready`. NotReady if it cannot follow it."""
    services, caller = services_of(request), caller_of(request)
    if is_ready:
        services.require_ready()
    audit(event, tenant=caller.tenant.name, key=caller.key_id or None)
    try:
        yield services
    except EngineDied as death:
        raise NotReady(f"{death} Send the request again.") from death
