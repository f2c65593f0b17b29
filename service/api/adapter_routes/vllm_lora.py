"""vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter, and what trainers put in the first one's place: adapters
from a directory that the operator allowed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute

from adapters import errors as store_errors
from adapters.files.durable_files import store_fault
from adapters.files.manifest import AdapterRecord
from adapters.files.name_versions import keep, move
from service.api.access.auth import caller_of, namespace_of
from service.api.access.namespace import Namespace
from service.api.adapter_routes.adapters import audit_change, refuse_conditions, remove_adapter, require_open_store
from service.api.entry.request_log import note, notes_of
from service.api.errors import BadRequest, Forbidden, InvalidUserInput, UnknownModel
from service.api.openapi import DELETE_ERRORS, errors
from service.api.schema.answers import LoraUpdated
from service.api.schema.base import no_query
from service.api.schema.control import LoadInPlaceRequest, LoadLoraRequest, UnloadLoraRequest
from service.api.schema.error_messages import bad_request
from service.api.state import Services, services_of
from service.api.uploads.multipart import in_upload_thread
from service.fairness.client_identity import CLIENT


class _Route(APIRoute):
    """Asks whether loading by path is on before it looks at the body, and says of missing fields what vLLM says."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_if_on(request: Request) -> Response:
            _require_root(services_of(request))
            try:
                return await handle(request)
            except RequestValidationError as error:
                faults = error.errors()
                # For vLLM an empty field is a missing one.
                if not all(fault["type"] in ("missing", "string_too_short") for fault in faults):
                    raise
                wrong = bad_request(faults)
                raise InvalidUserInput(wrong.message, param=wrong.param) from error

        return handle_if_on


# prime-rl and SGLang call the third, SkyRL the fourth.
PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter")
router = APIRouter(tags=["vLLM"], route_class=_Route)

_LOAD_ERRORS = errors((400, 401, 403, 404, 409, 413, 429, 500, 503, 507))
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Done; a sentence says so."}
}


@router.post(
    PATHS[0],
    dependencies=[no_query],
    response_class=PlainTextResponse,
    responses={**_LOAD_ERRORS, **_ANSWER},
    summary="Load an adapter from the operator's directory",
)
async def load_lora_adapter(request: Request, body: LoadLoraRequest) -> PlainTextResponse:
    """Copy a PEFT directory below --lora-path-root into the store under a name."""
    await _load(request, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    PATHS[2], dependencies=[no_query], responses=_LOAD_ERRORS, summary="Move a name to an adapter in the directory"
)
@router.post(PATHS[3], dependencies=[no_query], responses=_LOAD_ERRORS, summary="The same as /load_lora_adapter")
async def load_in_place(request: Request, body: LoadInPlaceRequest) -> LoraUpdated:
    """The same as /v1/load_lora_adapter with `load_inplace`: a name that is taken moves."""
    record = await _load(request, body)
    return LoraUpdated(success=True, error_message="", version=record.version.number, digest=record.digest)


async def _load(request: Request, body: LoadLoraRequest) -> AdapterRecord:
    refuse_conditions(request, "send PUT /v1/adapters/{name}")
    services = services_of(request)
    root = _require_root(services)
    store = require_open_store(services)
    namespace = namespace_of(request, store)
    full_name = namespace.name_for_upload(body.lora_name)
    caller_of(request).tenant.take_change()
    async with services.loading():
        path = _below(root, body.lora_path)
        with notes_of(request).phase("receive"):  # and the move of the name
            record = await in_upload_thread(load_directory, namespace, root, path, body, full_name)
    services.published(record)
    note(request, adapter=record.reference, digest=record.digest[:12])
    audit_change(request, "upload" if record.is_first else "replacement", record)
    return record


@router.post(
    PATHS[1],
    dependencies=[no_query],
    response_class=PlainTextResponse,
    responses={**DELETE_ERRORS, **_ANSWER},
    summary="Delete an adapter",
)
async def unload_lora_adapter(request: Request, body: UnloadLoraRequest) -> PlainTextResponse:
    """The same as DELETE /v1/adapters/{name}, but for conditions."""
    refuse_conditions(request, "send DELETE /v1/adapters/{name}")
    try:
        await remove_adapter(request, body.lora_name, move)
    except store_errors.NotFound:
        raise UnknownModel(f"The lora adapter '{body.lora_name}' cannot be found.", param="lora_name") from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _require_root(services: Services) -> Path:
    root = services.settings.lora_path_root
    if root is None:
        raise Forbidden(
            "Loading by path is off. The operator allows it with --lora-path-root (MULTILORA_LORA_PATH_ROOT); "
            "without it, upload the adapter to POST /v1/adapters."
        )
    return root.resolve()


def _below(root: Path, path: str) -> Path:
    """The directory, with every link resolved, if it is below `root`; nothing is told of what lies elsewhere."""
    try:
        resolved = (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadRequest("`lora_path` is not a path.", param="lora_path") from error
    if not resolved.is_relative_to(root):
        raise Forbidden(
            "`lora_path` is not below the directory that --lora-path-root allows; copy the adapter there.",
            param="lora_path",
        )
    try:
        is_directory = resolved.is_dir()
    except OSError as error:  # no access, or a name too long
        raise _unreadable(error) from error
    if not is_directory:
        raise UnknownModel("There is no directory at `lora_path`; check it.", param="lora_path")
    return resolved


def load_directory(
    namespace: Namespace, root: Path, path: Path, body: LoadLoraRequest, full_name: str
) -> AdapterRecord:
    """Load the directory `path`, whose links may lead to files below `root`, as Hugging Face's cache has them."""
    if namespace.store.has(full_name) and not body.load_inplace:
        raise InvalidUserInput(
            f"The lora adapter '{body.lora_name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True.",
            param="lora_name",
        )
    with namespace.store.begin(owner=CLIENT.get()) as upload:
        try:
            upload.add_directory(path, root)
        except OSError as error:
            if _is_about(error, path):
                raise _unreadable(error) from error
            raise store_fault(error) or error from error  # the store's own directory fails: no fault of the client's
        condition = move if body.load_inplace else keep
        finished = namespace.finish(
            upload, full_name, root=body.lora_path, condition=condition, on_new_version=body.on_new_version
        )
        return finished[0]


def _is_about(error: OSError, path: Path) -> bool:
    """Whether what could not be opened or listed is `path` or lies below it."""
    return isinstance(error.filename, str | Path) and Path(error.filename).is_relative_to(path)


def _unreadable(error: OSError) -> BadRequest:
    """In the words of the operating system alone: the error's own text holds a path of this machine."""
    return BadRequest(
        f"`lora_path` cannot be read: {error.strerror or type(error).__name__}. Give the server's user access to the "
        "directory and its files, or name another one.",
        param="lora_path",
    )
