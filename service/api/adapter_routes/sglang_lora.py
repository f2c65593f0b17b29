"""SGLang's /load_lora_adapter_from_tensors and /unload_lora_adapter: adapters of trainers, by their tensors, which may
come as files too."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request

from adapters.files.name_versions import move
from adapters.store.store import Upload
from service.api.adapter_routes.adapters import refuse_conditions, remove_adapter, take_upload
from service.api.openapi import DELETE_ERRORS, UPLOAD_BODY, UPLOAD_ERRORS
from service.api.schema.answers import LoraUpdated
from service.api.schema.base import no_query
from service.api.schema.control import LoadTensorsRequest, SglangUnloadRequest
from service.api.uploads.multipart import UploadQuery
from service.api.uploads.receive import Parts, is_multipart, multipart
from service.api.uploads.tensors_json import MAX_BESIDE_BYTES, TensorsJson

LOAD_PATH = "/load_lora_adapter_from_tensors"
router = APIRouter(tags=["SGLang"])

_BODY = {
    "required": True,
    "content": {"application/json": {"schema": LoadTensorsRequest.model_json_schema()}, **UPLOAD_BODY["content"]},
}


def _parts(request: Request, check_name: Callable[[str], object], upload: Upload) -> Parts:
    return (multipart if is_multipart(request) else _tensors_json)(request, check_name, upload)


def _tensors_json(_request: Request, check_name: Callable[[str], object], upload: Upload) -> Parts:
    return TensorsJson(check_name, upload)


@router.post(
    LOAD_PATH,
    dependencies=[no_query],
    responses=UPLOAD_ERRORS,
    openapi_extra={"requestBody": _BODY},
    summary="Load an adapter from its tensors",
)
async def load_from_tensors(request: Request) -> LoraUpdated:
    """The name stands for these tensors in one step, as an ephemeral version; running requests end on the one that they
    began with."""
    refuse_conditions(request, "send PUT /v1/adapters/{name}")
    ephemeral = UploadQuery(probe=False, ephemeral=True, without_tokenizer=False, expert_b_order=None)
    record, _, _ = await take_upload(request, None, move, ephemeral, _parts)
    return LoraUpdated(success=True, error_message="", version=record.version.number, digest=record.digest)


@router.post("/unload_lora_adapter", dependencies=[no_query], responses=DELETE_ERRORS, summary="Delete an adapter")
async def unload(request: Request, body: SglangUnloadRequest) -> LoraUpdated:
    """The same as DELETE /v1/adapters/{name}, but for conditions."""
    refuse_conditions(request, "send DELETE /v1/adapters/{name}")
    digest = await remove_adapter(request, body.lora_name, move)
    return LoraUpdated(success=True, error_message="", digest=digest)


def body_bytes(upload_bytes: int) -> int:
    """The largest body of a load whose tensors are as large as an upload may be."""
    return upload_bytes * 4 // 3 + MAX_BESIDE_BYTES
