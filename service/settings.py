"""Every setting of the server, in one place. Environment `MULTILORA_<NAME>`, or `--<name>` of `multilora serve`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from service.engine.ipc.config import MIB, EngineOptions
from service.machine import usual_connections, usual_queue
from service.setting_types import (
    Addresses,
    Count,
    Endpoint,
    Keys,
    KeyVariables,
    OpenPaths,
    Origins,
    RootPath,
    Size,
    TokenPair,
    sentence_of,
)

BUNDLED_MODEL_DIR = Path(__file__).resolve().parent / "bundled" / "base"
BUNDLED_ADAPTERS_DIR = BUNDLED_MODEL_DIR.parent / "adapters"

# Settings that the engine's options call otherwise.
_ENGINE_NAMES = {"adapter_row_bytes": "row_bytes", "adapter_side_bytes": "side_bytes"}


class SettingsError(ValueError):
    """A setting is wrong; the message names it and says what to write."""


class Settings(BaseSettings):
    """Frozen after the start. Byte sizes take a number or a text such as 512MiB; durations are in seconds."""

    model_config = SettingsConfigDict(env_prefix="MULTILORA_", frozen=True, extra="forbid", env_ignore_empty=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 chooses a free one and logs it")
    model_dir: Path = Field(
        BUNDLED_MODEL_DIR,
        description="Hugging Face directory of the base model, or a .gguf file; default: the bundled model",
    )
    model_name: str | None = Field(
        None, description="name of the base in requests, such as Qwen/Qwen3-0.6B; default: the directory's name"
    )
    preload_adapters_dir: Path | None = Field(
        None,
        description="directory whose adapters are stored at the start under the names of their folders, `org/name` "
        "for those two deep; default: the bundled adapters with the bundled model, else none",
    )
    store_dir: Path = Field(
        Path("data") / "adapters",
        description="directory of uploaded adapters, which several base models may share",
    )
    store_shared: bool = Field(
        False,
        description="share store-dir with other servers that have this setting too, on one machine or a shared file "
        "system",
    )

    tool_parser: Literal[
        "auto", "template", "generic", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "lfm2"
    ] = Field(
        "auto",
        description="format of the model's tool calls; auto: as the chat template shows, else generic; generic: the "
        "server's own prompt; template: as the chat template shows, else tools are refused; none: tools "
        "are refused",
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        "auto",
        description="text of an answer that becomes `reasoning_content`; think: between <think> and </think>; auto: "
        "the same where the chat template names these marks; none: no text",
    )
    classifier_from_token: TokenPair = Field(
        (),
        description="two tokens, such as no,yes, whose logits score documents, for a base that is a yes/no reranker; "
        "default: the base is none",
    )
    disable_additional_properties: bool = Field(
        True,
        description="objects of a JSON schema with `properties` and without `additionalProperties` take no others; a "
        "request's field of this name goes first",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the base's computation; auto: the checkpoint's, but float32 for float16 on a CPU"
    )
    weights: Literal["auto", "bf16", "fp8", "int8", "nf4"] = Field(
        "auto",
        description="form of the base's layers in memory, but of embeddings and head; auto: the checkpoint's; bf16: "
        "dequantised; others: quantised while they load",
    )
    fp8_activations: bool = Field(
        False,
        description="round the inputs of float8 weights to float8 in steps of more than 256 tokens, on NVIDIA GPUs "
        "alone: prompts take less time, and a token's numbers depend on the size of its step; see "
        "docs/quantised.md",
    )
    on_new_version: Literal["keep", "continue", "restart"] = Field(
        "keep",
        description="version of a running request when its adapter's name moves, unless the request says; keep: its "
        "own; continue: the new one from the next token; restart: the new one from the first, but in streams",
    )
    device: str = Field(
        "auto",
        description="device of the engine, such as cpu, cuda:1 or npu; auto: an NPU if there is one, else a GPU, else "
        "the CPU",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="number of engines, each on a device of its own; see docs/scale.md",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="values of sampling parameters that a request leaves out; model: those of generation_config.json; "
        "openai: temperature 1 and nothing else",
    )
    num_threads: Count | None = Field(
        None,
        description="number of CPU threads of the engine; default: the number with the fastest decode step at the "
        "start",
    )
    max_model_len_tokens: Count | None = Field(
        None,
        description="largest number of tokens of a request, prompt and output together; default and maximum: the "
        "model's own limit, with linear RoPE scaling times its factor",
    )
    token_budget: Count | None = Field(
        None,
        description="largest number of tokens in a step, prefill and decode together; default: 8192 on a GPU, 2048 on "
        "an NPU, 256 on a CPU, fewer with little memory",
    )
    max_sequences: Count | None = Field(
        None,
        description="largest number of sequences that run at the same time; default: 256, on a CPU 64, fewer where "
        "their states would fill half of the free memory",
    )
    block_size_tokens: Count | None = Field(
        None,
        description="number of tokens in a KV block; default: 16, on an NPU 128",
    )
    prefix_cache: bool | None = Field(
        None,
        description="keep keys and values of past requests for requests that begin alike; default: true, on an NPU "
        "false",
    )
    prefix_cache_scope: Literal["tenant", "server"] = Field(
        "tenant",
        description="requests that share the prefix cache; tenant: those of one tenant; server: all, which can tell "
        "from times what others have asked",
    )
    eager: bool = Field(False, description="launch every step from Python and capture no graphs")
    batch_invariant: bool = Field(
        False,
        description="give a token the same log probabilities to the bit, whatever is computed beside it; slower, and "
        "not on an NPU; see docs/rollouts.md",
    )
    lora_window: bool = Field(
        True,
        description="keep the A rows of adapters behind the base weights, which saves small steps a separate shrink; "
        "no effect on a CPU",
    )
    npu_graphs: bool = Field(
        False,
        description="replay decode steps of up to 64 sequences from NPU graphs; not verified on an NPU",
    )
    kv_bytes: Size | None = Field(
        None,
        description="size of the KV cache, allocated at the start; default: the memory beside weights, steps and "
        "adapter rows, as far as max-sequences can fill it; on a CPU a quarter of the free memory, or up "
        "to half for one request of the longest context",
    )
    state_bytes: Size | None = Field(
        None,
        description="size of convolution and delta-net states, allocated at the start; default: room for max-sequences",
    )
    state_cache_bytes: Size | None = Field(
        None,
        description="size of the states that the prefix cache keeps, for models with convolutions or delta nets; 0: "
        "such models compute every prompt; default: a sixth of kv-bytes, on an NPU 0",
    )
    prefix_host_bytes: Size = Field(
        ByteSize(0),
        description="size of the host memory for keys, values and states that leave the device, from where prompts "
        "find them again; 0: none",
    )
    adapter_row_bytes: Size | None = Field(
        None,
        description="size of adapter rows on the device, allocated at the start; 0 turns LoRA off; default: up to a "
        "quarter of the memory beside weights and steps; on a CPU an eighth of the free memory, up to 1,024 rows or "
        "256 MiB",
    )
    adapter_side_bytes: Size | None = Field(
        None,
        description="size of non-LoRA parameters of adapters on the device, such as DoRA magnitudes, biases and heads; "
        "0 refuses such adapters; see docs/adapters.md; default: up to a sixteenth of the memory beside weights and "
        "steps, on a CPU up to 64 MiB",
    )
    host_tier_bytes: Size = Field(ByteSize(512 * MIB), description="size of the copies of adapters in host memory")

    max_queued_requests: Count = Field(
        default_factory=usual_queue,
        description="largest number of one client's sequences that wait or run, fewer beside other clients; beyond it "
        "requests get 429; default: one for 8 MiB of memory, 512 to 4096",
    )
    max_connections: Count = Field(
        default_factory=usual_connections,
        description="largest number of open connections, half of it for one tenant or address; beyond it they get "
        "429; default: one for 4 MiB of memory, 1024 to 16384",
    )
    trusted_proxies: Addresses = Field(
        (),
        description="addresses or networks of proxies before this server, separated by commas, whose X-Forwarded-For "
        "names the client; default: none",
    )
    max_batch_items: Count = Field(256, description="largest number of items of one POST /v1/completions/batch")
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="largest number of alternatives of a token in `logprobs`, `top_logprobs` and `prompt_logprobs`; "
        "-1: all tokens",
    )
    max_choices: Count = Field(16, description="largest `n` of a request")
    max_body_bytes: Size = Field(
        ByteSize(4 * MIB),
        description="largest size of a JSON request body",
    )
    max_buffered_bytes: Size = Field(
        ByteSize(64 * MIB),
        description="largest size of all JSON request bodies that are being read, half of it for one client; beyond "
        "it large ones get 429",
    )
    max_upload_bytes: Size = Field(
        ByteSize(2048 * MIB), description="largest size of an adapter upload, packed and unpacked"
    )
    max_versions: Count = Field(
        8,
        description="largest number of stored versions of an adapter, the current one included; older ones are deleted",
    )
    max_version_bytes: Size = Field(
        ByteSize(1024 * MIB),
        description="largest size of the older versions of an adapter together; the oldest are deleted first",
    )
    max_ephemeral_bytes: Size = Field(
        ByteSize(4096 * MIB),
        description="largest size of all ephemeral versions in memory, half of it for one client; beyond that uploads "
        "get 429, and one that is larger than half 413; 0 refuses them",
    )
    responses_store_bytes: Size = Field(
        ByteSize(0),
        description="largest size of a tenant's stored responses, of which the oldest are deleted; 0: none is stored, "
        "and `previous_response_id` is refused",
    )
    max_uploads: int = Field(
        16,
        ge=1,
        le=64,
        description="largest number of uploads at a time, half of it for one client; beyond it uploads get 429",
    )
    max_staging_bytes: Size | None = Field(
        None,
        description="largest size of unfinished uploads on the disk, half of it for one client; beyond it uploads get "
        "429; default: eight times max-upload-bytes",
    )
    min_free_disk_bytes: Size = Field(
        ByteSize(256 * MIB), description="free space that an upload must leave on the disk, or it gets 507"
    )
    lora_path_root: Path | None = Field(
        None,
        description="directory below which POST /v1/load_lora_adapter may read; default: that endpoint and "
        "/v1/unload_lora_adapter are off",
    )

    api_keys: Keys = Field((), description="keys for inference, separated by commas; default: no key is needed")
    admin_api_keys: Keys = Field(
        (),
        description="keys for everything, uploads and deletions included, separated by commas; default: none, so that "
        "nobody may upload where api-keys is set",
    )
    keys_file: Path | None = Field(
        None,
        description="TOML file of tenants, their limits and the hashes of their keys, which `multilora keys` edits; "
        "default: every client is one tenant",
    )
    root_path: RootPath = Field(
        "",
        description="path below which a proxy serves this server, such as /lora; default: none",
    )
    open_paths: OpenPaths = Field(
        ("/docs", "/openapi.json", "/version"),
        description="paths among /docs, /openapi.json, /version and /metrics that need no key where keys are set, "
        "separated by commas; none: no path",
    )
    cors_origins: Origins = Field(
        (),
        description="origins of web pages that may call this server from a browser, such as https://ui.example, "
        "separated by commas; *: all; default: none",
    )
    page: bool = Field(True, description="serve the page at /")

    stall_limit_seconds: float = Field(
        30.0,
        gt=0,
        description="number of seconds after which a client loses its connection if it has not sent a whole head, or "
        "sends or reads less than 1 KiB/s",
    )
    shutdown_limit_seconds: float = Field(
        30.0, ge=0, description="number of seconds that running requests and uploads have after SIGTERM"
    )
    pause_limit_seconds: float = Field(
        300.0,
        gt=0,
        le=86_400,
        description="number of seconds after which an engine that POST /pause has stopped goes on by itself",
    )
    metrics_adapters: int = Field(
        64,
        ge=0,
        le=1000,
        description="number of adapters, the busiest ones, with series of their own in /metrics; ?adapter=NAME names "
        "others",
    )
    otlp_endpoint: Endpoint | None = Field(
        None,
        description="OpenTelemetry collector that takes traces by OTLP over HTTP, such as http://127.0.0.1:4318; "
        "needs the extra `otel`; default: no traces",
    )
    log_format: Literal["text", "json"] = Field("text", description="format of the log, one line per request")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    refusal_lines_per_minute: int = Field(
        60,
        ge=0,
        description="largest number of log lines per minute about refused requests of one client; one line counts the "
        "rest",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Sources of settings in order: the given values, then the environment."""
        return init_settings, env_settings, KeyVariables(settings_cls)

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.max_batch_items > self.max_queued_requests:
            raise ValueError(
                "max_batch_items must not be larger than max_queued_requests, since a batch is admitted whole"
            )
        if self.staging_bytes < 6 * self.max_upload_bytes:
            raise ValueError(
                "max_staging_bytes must be at least six times max_upload_bytes, since a client has half of it, and the "
                "largest upload counts packed, unpacked and checked"
            )
        if self.replicas > 1 and ":" in self.device:
            raise ValueError(
                f"device {self.device!r} is one device, but replicas is {self.replicas}; leave out the index"
            )
        if self.max_body_bytes > self.max_buffered_bytes:
            raise ValueError("max_body_bytes must not be larger than max_buffered_bytes, which holds all bodies")
        if ":" in self.base_name or not {"", ".", ".."}.isdisjoint(self.base_name.split("/")):
            raise ValueError(
                f"model_name {self.base_name!r} may not be empty, contain ':' or begin or end with '/'; set another "
                "one, such as Qwen/Qwen3-0.6B"
            )
        return self

    @cached_property
    def base_name(self) -> str:
        """The name of the base model in requests. Every line of a listing has it, so the directory is asked once: it
        also stays what it was where a link of the directory is turned to another one meanwhile."""
        return self.model_name if self.model_name is not None else self.model_dir.resolve().name

    @property
    def store_root(self) -> Path:
        """Root directory of the adapter store, absolute."""
        return self.store_dir.absolute()

    @property
    def preload_dir(self) -> Path | None:
        """The directory of adapters to put into the store at the start, if any."""
        if self.preload_adapters_dir is None and self.model_dir.resolve() == BUNDLED_MODEL_DIR:
            return BUNDLED_ADAPTERS_DIR
        return self.preload_adapters_dir

    @property
    def staging_bytes(self) -> int:
        """Bytes of disk that unfinished uploads may hold together."""
        return 8 * int(self.max_upload_bytes) if self.max_staging_bytes is None else int(self.max_staging_bytes)

    @property
    def lora_enabled(self) -> bool:
        """Whether adapters can be used at all."""
        return self.adapter_row_bytes != 0

    def engine_options(self) -> EngineOptions:
        """Options of the engine process. SettingsError if the engine's sizes do not fit together."""
        own: dict[str, Any] = {
            _ENGINE_NAMES.get(name, name): int(value) if isinstance(value, ByteSize) else value for name, value in self
        }
        own |= {"model_dir": str(self.model_dir.absolute()), "store_root": str(self.store_root)}
        own["log_level"] = self.log_level.upper()
        try:
            return EngineOptions(**{name: own[name] for name in EngineOptions.__struct_fields__ if name in own})
        except ValueError as error:
            raise SettingsError(str(error)) from error


def load_settings(**given: Any) -> Settings:
    """Settings from the environment, `given` going first. SettingsError in one sentence per wrong setting."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(sentence_of(fault) for fault in error.errors())) from error
