"""The composition root: builds the parts from the settings, joins them, and gives them to the routers."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.utils import get_fields_from_routes
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

from adapters.files.paths import join, layout_root
from adapters.row_plan import plan_rows
from adapters.store.store import AdapterStore, StoreLimits
from adapters.text.vocabulary import BaseText
from kernels.lora import MAX_KERNEL_RANK
from kernels.sampling.parameters import NEUTRAL
from service.api import page
from service.api.access.auth import Access
from service.api.adapter_routes import adapters, sglang_lora, versions, vllm_lora
from service.api.admission.plans import model_defaults
from service.api.entry.error_handlers import add_error_handlers
from service.api.entry.middleware import BodyRule, EntryMiddleware
from service.api.http.json_body import ALWAYS_BYTES, BodyBudget
from service.api.metrics.metrics import Metrics
from service.api.metrics.traces import Tracing, tracing_to
from service.api.openapi import serve_openapi
from service.api.response_store import ResponseStore
from service.api.routes import (
    batch,
    chat,
    completions,
    control,
    embeddings,
    generate,
    health,
    invocations,
    messages,
    models,
    responses,
    scoring,
    stored_responses,
    tokenize,
)
from service.api.state import Services
from service.cluster.engines import Engines
from service.engine.ipc.client import EngineClient
from service.engine.ipc.link import EngineDied, EngineLink
from service.logs import LOGGER
from service.models.layouts import layout_in
from service.server.gc_tuning import freeze, keep_up
from service.server.own_engines import own_engines
from service.server.preloading import preload
from service.settings import Settings
from service.start_check import StartError
from service.tenants.keys_file import KeysFileError
from service.tenants.limits import RATE_HEADERS
from service.tenants.tenants import Tenants, follow_usage
from service.text.chat_template import ChatTemplate, template_sources
from service.text.template_worker import AdapterTemplate
from service.text.tokenizer import TextTokenizer


def build_routes(app: FastAPI) -> None:
    """Have all of them built: 0.05 to 0.1 s, in which the event loop would do nothing else."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []})
    # Queries' fields are kept when they are first asked for. If a request and /openapi.json asked at once, each would
    # have its own, and a schema of the one knows nothing of the other.
    get_fields_from_routes(app.routes)


# The rank of most adapters there are: so many rows is one of them, where routers are told how many a server holds.
RANK_OF_MOST = 16

ROUTERS = (
    chat.router,
    completions.router,
    generate.router,
    responses.router,
    stored_responses.router,
    messages.router,
    embeddings.router,
    scoring.router,
    invocations.router,
    batch.router,
    models.router,
    tokenize.router,
    versions.router,  # before the adapters: below an adapter's path there are names too
    adapters.router,
    vllm_lora.router,
    sglang_lora.router,
    health.router,
    control.router,
)

# Largest body of paths that accept little but a name.
_SMALL_BODY_BYTES = 1 << 16


def create_app(settings: Settings, engine: EngineClient | Engines | None = None) -> FastAPI:
    """The application. The engine process starts with the application's lifespan, if it has not been started before.

    engine  another client, or several engines, than the settings' own, for tests

    Raises StartError and the ValueErrors of the parts, each one sentence, if something is wrong with the model or the
    store.
    """
    engine = engine if engine is not None else own_engines(settings)
    services = _build_services(settings, engine)
    app = FastAPI(title="multilora", lifespan=_lifespan, redoc_url=None, docs_url=None, redirect_slashes=False)
    app.state.services, app.state.engine = services, engine
    for router in ROUTERS:
        app.include_router(router)
    if settings.page:
        app.include_router(page.router)
    add_error_handlers(app)
    access = Access(services.tenants, settings.open_paths)
    app.state.tracing = _tracing(settings)
    buffered_bytes = int(settings.max_buffered_bytes)
    budget = BodyBudget(max(buffered_bytes // 2, int(settings.max_body_bytes)), ALWAYS_BYTES)
    app.add_middleware(
        EntryMiddleware,
        access=access,
        metrics=services.metrics,
        body_rule=_body_rule(settings),
        budget=budget,
        root_path=settings.root_path,
        tracing=app.state.tracing,
    )
    if settings.cors_origins:
        _allow_pages(app, settings.cors_origins)
    serve_openapi(app, access if services.tenants.need_keys else None, settings.root_path)
    return app


def _tracing(settings: Settings) -> Tracing | None:
    """None without an endpoint. StartError if the SDK is missing, or its variables are wrong."""
    try:
        return tracing_to(settings.otlp_endpoint)
    except ImportError as error:
        raise StartError(
            f"--otlp-endpoint needs OpenTelemetry's SDK ({error}); install it with pip install 'multilora[otel]', or "
            "leave the setting out."
        ) from error
    except (ValueError, OSError) as error:
        raise StartError(f"The traces of --otlp-endpoint cannot be sent: {str(error).rstrip('.')}.") from error


def _allow_pages(app: FastAPI, origins: tuple[str, ...]) -> None:
    """Let browsers call from pages of these origins. Outside `EntryMiddleware`: they ask first, without a key."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=[
            "X-Request-Id",
            "request-id",
            "traceresponse",
            "X-Multilora-Adapter",
            "X-Multilora-Left-Out",
            "X-Multilora-Cached-Tokens",
            "ETag",
            "Retry-After",
            *RATE_HEADERS,
        ],
    )


def _build_services(settings: Settings, engine: EngineClient | Engines) -> Services:
    tenants = _tenants(settings)
    layout = layout_in(settings.model_dir)
    tokenizer = TextTokenizer.load(settings.model_dir)
    sources = _template_sources(settings.model_dir)
    services = Services(
        settings=settings,
        engine=engine,
        layout=layout,
        tokenizer=tokenizer,
        templates={name: ChatTemplate(source, tokenizer.special_tokens) for name, source in sources.items()},
        metrics=Metrics(settings.base_name, settings.metrics_adapters),
        tenants=tenants,
        sampling_defaults=_sampling_defaults(settings),
    )
    if settings.responses_store_bytes:
        services.responses = ResponseStore(
            layout_root(settings.store_root, layout) / "responses",
            int(settings.responses_store_bytes),
            int(settings.min_free_disk_bytes),
        )
    if settings.lora_enabled:
        services.store = _open_store(services)
        names = services.store.names()
        if not names.keys().isdisjoint({settings.base_name, join("", settings.base_name)}):
            services.store.close()
            raise StartError(_shadowed(settings))
        for name in names:
            services.metrics.by_adapter.know(name)
    return services


def _tenants(settings: Settings) -> Tenants:
    """The tenants and keys of the settings. StartError if the keys file cannot be used."""
    try:
        return Tenants(
            [key.get_secret_value() for key in settings.api_keys],
            [key.get_secret_value() for key in settings.admin_api_keys],
            settings.keys_file,
        )
    except KeysFileError as error:
        raise StartError(str(error)) from error


def _sampling_defaults(settings: Settings) -> Mapping[str, float]:
    """The model's, said in the log where they are not OpenAI's: they change answers to requests that do not say."""
    if settings.sampling_defaults == "openai":
        return NEUTRAL
    defaults = model_defaults(settings.model_dir)
    if defaults != NEUTRAL:
        LOGGER.info("sampling defaults of the model's generation_config.json", extra={"fields": defaults})
    return defaults


def _template_sources(model_dir: Path) -> dict[str, str]:
    """The base's own chat templates by name. StartError if a file of them cannot be read."""
    try:
        return template_sources(model_dir)
    except UnicodeDecodeError as error:
        raise StartError(
            f"chat_template.jinja of the model is not UTF-8 ({error.reason}); save it as UTF-8."
        ) from error


def _open_store(services: Services) -> AdapterStore:
    """The adapters of this base. StartError if the directory cannot be used."""
    settings, tokenizer = services.settings, services.tokenizer
    try:
        return AdapterStore(
            settings.store_root,
            services.layout,
            StoreLimits(
                max_upload_bytes=int(settings.max_upload_bytes),
                free_disk_floor_bytes=int(settings.min_free_disk_bytes),
                max_versions=settings.max_versions,
                max_version_bytes=int(settings.max_version_bytes),
                max_staging_bytes=settings.staging_bytes,
                max_ephemeral_bytes=int(settings.max_ephemeral_bytes),
            ),
            base_name=settings.base_name,
            base_dir=settings.model_dir,
            base_text=BaseText(
                tokenizer.token_id,
                tokenizer.token_name,
                tokenizer.token_flags,
                tokenizer.special_tokens,
                tokenizer.eos_token_ids,
                tuple(template.source for template in services.templates.values()),
            ),
            check_template=lambda template: AdapterTemplate(
                services.template_workers, template, tokenizer.special_tokens
            ).check(),
            on_gone=services.gone,
            shared=settings.store_shared,
            on_change=services.changed_elsewhere,
        )
    except OSError as error:
        raise StartError(
            f"The adapter store {settings.store_root} cannot be opened ({error.strerror or error}); set --store-dir "
            "(MULTILORA_STORE_DIR) to a directory that this user may write."
        ) from error


def _shadowed(settings: Settings) -> str:
    """Advice for an adapter whose name became the base's: requests could not reach it."""
    name = settings.base_name
    return (
        f"The store {settings.store_root} holds an adapter named {name!r}, which is also the base model's name; start "
        f"with another --model-name (MULTILORA_MODEL_NAME), and to use {name!r} for the base delete the adapter first "
        f"(multilora rm {name})."
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """From the start of the engine to its end."""
    services: Services = app.state.services
    engine: EngineClient | Engines = app.state.engine
    services.bind_loop(asyncio.get_running_loop())
    engine.on_client(lambda number, client: _count(services.metrics, number, client))
    await engine.start()
    await asyncio.to_thread(build_routes, app)
    tasks = [
        asyncio.create_task(finish_start(services, engine), name="prepare"),
        asyncio.create_task(keep_up(), name="upkeep"),
    ]
    if services.store is not None:
        tasks.append(asyncio.create_task(versions.follow_pins(services, services.store), name="pins"))
    if services.settings.store_shared and services.tenants.has_file:
        directory = services.settings.store_root / "tenants"
        tasks.append(asyncio.create_task(follow_usage(services.tenants, directory), name="usage"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await engine.drain(0)
        if services.responses is not None:
            tasks += services.responses.running.values()
        await asyncio.gather(*tasks, return_exceptions=True)
        if services.store is not None:
            services.store.close()
        if app.state.tracing is not None:
            await asyncio.to_thread(app.state.tracing.close)
        services.template_workers.close()
        services.grammar_trial.close()


def _count(metrics: Metrics, number: int, client: EngineLink) -> None:
    """Have the metrics take what an engine says."""
    client.on_stats(lambda stats: metrics.take_stats(stats, client.num_restarts, number))


async def finish_start(services: Services, engine: EngineClient | Engines) -> None:
    """The start's last steps, once the engine knows its sizes; `/ready` waits for them."""
    try:
        ready = await engine.wait_ready()
    except EngineDied as error:
        if not services.draining:
            services.fail_start(str(error))
        return
    try:
        if services.store is not None:
            services.store.row_plan = plan_rows(
                services.layout,
                ready.row_bytes,
                element_bytes=ready.row_element_bytes,
                alignment=ready.row_alignment,
                side_bytes=ready.side_bytes,
                # On a CPU any rank will do.
                max_rank=None if ready.device.startswith("cpu") else MAX_KERNEL_RANK,
            )
            services.metrics.by_adapter.max_adapters = services.store.row_plan.most_rows // RANK_OF_MOST
            await asyncio.to_thread(preload, services)
            # numpy reads an upload's values; its parts written in C are loaded with Python's lock.
            await asyncio.to_thread(importlib.import_module, "numpy")
        # Starlette's streams import what they need of this kind of event loop at their first use: 8 ms on the loop.
        await run_in_threadpool(lambda: None)
    except Exception as error:
        services.fail_start(str(error))
        return
    services.pins_changed.set()
    freeze()
    services.prepared = True
    LOGGER.info("ready: %s", services.settings.base_name)


def _body_rule(settings: Settings) -> Callable[[str, str], BodyRule]:
    """Uploads may be large and go to disk, other bodies not. Multipart framing comes on top of the upload's own bytes.
    Those of the vLLM paths and of rollbacks are a name or two, and parsed in the loop."""
    upload = BodyRule(int(settings.max_upload_bytes) + (1 << 16), is_buffered=False, flag="--max-upload-bytes")
    small = BodyRule(min(_SMALL_BODY_BYTES, int(settings.max_body_bytes)))
    rules = {"/v1/adapters": upload, **dict.fromkeys((*vllm_lora.PATHS, "/unload_lora_adapter"), small)}
    rules[sglang_lora.LOAD_PATH] = upload._replace(limit_bytes=sglang_lora.body_bytes(upload.limit_bytes))
    other = BodyRule(int(settings.max_body_bytes), flag="--max-body-bytes")

    def rule(method: str, path: str) -> BodyRule:
        name = path.removeprefix("/v1/adapters/")
        if method == "PUT" and name != path and not name.endswith("/pin"):
            return upload
        return small if name.endswith(("/rollback", "/pin")) else rules.get(path, other)

    return rule
