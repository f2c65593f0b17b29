"""Bodies and answers of the routes that control the engine, and bodies of those that load and change adapters, most in
vLLM's and SGLang's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from adapters.files.name_versions import OnNewVersion
from service.api.schema.answers import Response
from service.api.schema.base import FIRST, Request
from service.api.schema.unserved_fields import LOAD_TENSORS_FIELDS

# A field of whatever loads an adapter or changes its settings.
NameSetting = Annotated[
    OnNewVersion | None,
    Field(
        description="what requests without `on_new_version` do from now on when the name moves; default: the name's "
        "setting stays, and one that has none takes --on-new-version"
    ),
]


class PauseQuery(BaseModel):
    """The query of POST /pause."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["abort", "wait", "keep"] = Field(
        "abort",
        description="running requests end at once with the finish_reason `abort`, end as usual while later ones wait, "
        "or stand still with all that is computed",
    )
    wait_for_inflight_requests: bool = Field(False, description="vLLM's older word for mode `wait`")
    clear_cache: bool = Field(False, description="reset the prefix cache too")


class PauseGenerationRequest(Request):
    """Body of POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="running requests end at once with the finish_reason `abort`, lose their keys and values and are "
        "computed again, or stand still with all that is computed",
    )


class AbortRequestsRequest(Request):
    """Body of POST /abort_requests."""

    request_ids: Annotated[list[str], FIRST] | None = Field(
        None, description="X-Request-Id of each; default, or empty: all requests"
    )


class AbortRequestRequest(Request):
    """Body of POST /abort_request."""

    rid: str = Field("", description="X-Request-Id of the request")
    abort_all: bool = Field(False, description="end all requests")


class AbortResponse(Response):
    """Answer of POST /abort_requests and /abort_request."""

    status: Literal["aborted"]
    aborted: int = Field(description="number of requests that were ended")


class PauseResponse(Response):
    """Answer of POST /pause and /resume."""

    status: Literal["paused", "resumed"]


class IsPausedResponse(Response):
    """Answer of GET /is_paused."""

    is_paused: bool


class SleepQuery(BaseModel):
    """The query of POST /sleep."""

    model_config = ConfigDict(extra="forbid")

    level: int = Field(1, ge=1, le=2, description="1: weights wait in host memory; 2: they are read again")
    mode: Literal["abort", "wait"] = Field(
        "abort", description="running requests end at once with the finish_reason `abort`, or as usual"
    )


class WakeUpQuery(BaseModel):
    """The query of POST /wake_up."""

    model_config = ConfigDict(extra="forbid")

    tags: list[Literal["weights", "kv_cache"]] = Field(
        [], max_length=2, description="the engine starts once both were named, in one call or two; default: both"
    )


class IsSleepingResponse(Response):
    """Answer of POST /sleep and /wake_up, and GET /is_sleeping."""

    is_sleeping: bool


class GenerationStateResponse(Response):
    """Answer of POST /pause_generation and /continue_generation."""

    message: str
    status: Literal["ok"]


class ServerInfoQuery(BaseModel):
    """The query of GET /server_info."""

    model_config = ConfigDict(extra="forbid")

    config_format: Literal["text", "json"] = Field("text", description="whether the configuration is one text")


class ModelConfig(Response):
    """The base in vLLM's words."""

    model: str = Field(description="for keys with the scope `admin` its directory, for others its name")
    served_model_name: str
    dtype: str = Field(description="as torch writes it, such as torch.bfloat16")
    max_model_len: int


class ParallelConfig(Response):
    """vLLM's; replicas are one to clients, since what is loaded reaches all of them."""

    tensor_parallel_size: Literal[1] = 1
    pipeline_parallel_size: Literal[1] = 1
    data_parallel_size: Literal[1] = 1


class LoraConfig(Response):
    """vLLM's; `max_loras` is the number of adapters of rank 16 that fit on the device together."""

    max_lora_rank: int
    max_loras: int


class CacheConfig(Response):
    """vLLM's name for it, and the prefix cache's part of host memory: its size, what is used of it, and the prompt
    tokens that came from there, of all engines together."""

    enable_prefix_caching: bool
    prefix_host_bytes: int
    prefix_host_bytes_used: int
    prefix_host_hit_tokens: int


class ServerConfig(Response):
    """Those parts of vLLM's configuration that its clients read; lora_config is null where LoRA is off, and
    weight_transfer_config always, since weights of the base never change."""

    model_config_: ModelConfig = Field(alias="model_config")
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    lora_config: LoraConfig | None
    weight_transfer_config: None = None


class ServerInfoResponse(Response):
    """Answer of GET /server_info."""

    vllm_config: str | ServerConfig


class WorldSizeQuery(BaseModel):
    """The query of GET /get_world_size."""

    model_config = ConfigDict(extra="forbid")

    include_dp: bool = Field(True, description="no effect: replicas count as one")


class WorldSizeResponse(Response):
    """Answer of GET /get_world_size."""

    world_size: Literal[1]


class LoadLoraRequest(Request):
    """Body of POST /v1/load_lora_adapter, vLLM's."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, description="directory below the one the operator allowed")
    load_inplace: bool = Field(False, description="replace an adapter of this name")
    on_new_version: NameSetting = None
    is_3d_lora_weight: Literal[False] | None = Field(None, description="3-D expert weights are not supported")


class LoadInPlaceRequest(LoadLoraRequest):
    """Body of POST /load_lora_adapter and /skyrl/v1/load_lora_adapter."""

    load_inplace: Literal[True] = Field(True, description="always")


class UnloadLoraRequest(Request):
    """Body of POST /v1/unload_lora_adapter, vLLM's."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(None, description="accepted and ignored")


class LoadTensorsRequest(Request):
    """Body of POST /load_lora_adapter_from_tensors, SGLang's, with safetensors instead of a pickle."""

    unserved = LOAD_TENSORS_FIELDS

    lora_name: str = Field(min_length=1)
    config_dict: dict[str, Any] = Field(description="PEFT's adapter_config.json")
    serialized_tensors: str = Field(
        description="PEFT's adapter_model.safetensors in base64: `base64.b64encode(safetensors.torch.save(tensors))`"
    )
    load_format: Literal["safetensors"] | None = None
    on_new_version: NameSetting = None


class SglangUnloadRequest(Request):
    """Body of POST /unload_lora_adapter, SGLang's."""

    lora_name: str = Field(min_length=1)
    lora_id: str | None = Field(None, description="accepted and ignored")


class SettingsRequest(Request):
    """Body of PATCH /v1/adapters/{name}: one setting at least."""

    visibility: Literal["private", "shared", "public"] | None = Field(None, description="default: as it is")
    shared_with: list[str] = Field([], max_length=256, description="with `shared`: the tenants who may use it")
    on_new_version: NameSetting = None


class RollbackRequest(Request):
    """Body of POST /v1/adapters/{name}/rollback."""

    version: int | Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="number, or at least 12 digits of the digest; default: the newest version with other content",
    )
    note: str = Field("", max_length=4096, description="kept in the history")
