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
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 chooses a free one and logs it")
    model_dir: Path = Field(
        BUNDLED_MODEL_DIR,
        description="Hugging Face directory of the base model, or a .gguf file; default: the bundled model",
    )
    model_name: str | None = Field(
        None, description="name of the base in requests, such as Qwen/Qwen3-0.6B; default: the directory's name"
    )
    preload_adapters_dir: Path | None = Field(
        None,
        description="directory of adapter directories that are stored at the start under their folder names, "
        "`org/name` for those two deep; default: the bundled adapters with the bundled model, else none",
    )
    store_dir: Path = Field(
        Path("data") / "adapters",
        description="directory of uploaded adapters; adapters of several base models may share it",
    )
    store_shared: bool = Field(
        False,
        description="share store-dir with other servers, on one machine or on a shared file system; each server needs "
        "this setting, and a change on one holds on all",
    )

    tool_parser: Literal[
        "auto", "template", "generic", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "lfm2"
    ] = Field(
        "auto",
        description="format of the model's tool calls; auto: the one that the chat template shows, else a prompt of "
        "the server's; template: no such prompt, tools are refused; generic: always that prompt; none: tools are "
        "refused",
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        "auto",
        description="think: text between <think> and </think> is `reasoning_content`; auto: the same for chat "
        "templates that name these marks; none: it is part of the answer",
    )
    classifier_from_token: TokenPair = Field(
        (),
        description="the base is a yes/no reranker, as Qwen3-Reranker is: two tokens, such as no,yes, whose logits "
        "behind its chat template score a query's document; adapters may name tokens of their own; default: it is none",
    )
    disable_additional_properties: bool = Field(
        True,
        description="objects of a JSON schema that names properties and does not say `additionalProperties` take no "
        "others, in answers and in enforced calls of tools; false: they take others; a request's field of this name "
        "decides first",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of the base's computation; auto: the checkpoint's, but float32 for float16 on a CPU"
    )
    weights: Literal["auto", "bf16", "fp8", "int8", "nf4"] = Field(
        "auto",
        description="how the base's layers are held; auto: as the checkpoint has them; bf16: dequantised; others: "
        "quantised while they load, which the same directory and adapters serve. Embeddings and head stay",
    )
    fp8_activations: bool = Field(
        False,
        description="in steps of more than 256 tokens, which prompts bring, round the inputs of float8 weights to "
        "float8, so that prompts take less time; a token's numbers then depend on the size of its step, and answers on "
        "what the prefix cache has; LoRA reads inputs as they are; on NVIDIA GPUs alone; see docs/quantised.md",
    )
    on_new_version: Literal["keep", "continue"] = Field(
        "keep",
        description="what requests without `on_new_version` do when their adapter's name moves to another version: "
        "keep theirs, or continue with the new one from the next token",
    )
    device: str = Field(
        "auto",
        description="cpu, cuda or npu, with an index if need be (cuda:1); auto: an NPU if there is one, else a GPU, "
        "else the CPU",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="number of engines, each on a device of its own; requests go to an engine that has their adapter, "
        "and those that an engine loses before their first token go to another one",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="sampling parameters of a request that does not name them; model: those of generation_config.json "
        "(temperature, top_p, top_k, min_p, repetition_penalty); openai: temperature 1 and nothing else. End tokens "
        "are the model's either way",
    )
    num_threads: Count | None = Field(
        None,
        description="number of CPU threads of the engine; default: the number with the fastest decode step at the "
        "start, within the cores and the quota",
    )
    max_model_len_tokens: Count | None = Field(
        None,
        description="largest number of tokens of one request, prompt and output; default and maximum: the model's own "
        "limit (with linear RoPE scaling that times its factor)",
    )
    token_budget: Count | None = Field(
        None,
        description="largest number of tokens in one step, prefill and decode together; default: 8192 on a GPU, 2048 "
        "on an NPU, 256 on a CPU, less on a device with little memory",
    )
    max_sequences: Count | None = Field(
        None,
        description="largest number of sequences that run at the same time; default: 256, on a CPU 64, and fewer "
        "where their states would take more than half of the free memory",
    )
    block_size_tokens: Count | None = Field(
        None,
        description="number of tokens per KV block; default: 16, on an NPU 128, whose fused attention takes multiples "
        "of that",
    )
    prefix_cache: bool | None = Field(
        None,
        description="keep keys and values of past requests for requests that begin alike; default: yes, on an NPU no; "
        "--no-prefix-cache turns it off",
    )
    prefix_cache_scope: Literal["tenant", "server"] = Field(
        "tenant",
        description="who shares the prefix cache; tenant: requests of one tenant; server: all requests, which can tell "
        "from times what others have asked",
    )
    eager: bool = Field(False, description="launch every step from Python and capture no graphs")
    batch_invariant: bool = Field(
        False,
        description="a token's log probabilities are the same to the bit, whatever else is computed beside it; slower, "
        "and not on an NPU; see docs/rollouts.md",
    )
    lora_window: bool = Field(
        True,
        description="keep the A rows of adapters behind the base weights, so that small steps on a GPU, and decode "
        "steps on an NPU, need no separate shrink; no effect on a CPU",
    )
    npu_graphs: bool = Field(
        False,
        description="capture decode steps of up to 64 sequences as NPU graphs and replay them; /metrics names the "
        "reason for steps that cannot be captured; not verified on an NPU",
    )
    kv_bytes: Size | None = Field(
        None,
        description="size of the KV cache, allocated once; default: the device's memory beside weights, steps and "
        "adapter rows, up to what max-sequences can fill; on a CPU a quarter of the free memory, or one request of "
        "the longest context if that is more, up to half of the free memory",
    )
    state_bytes: Size | None = Field(
        None,
        description="size of convolution and delta-net states, allocated once; default: one line for each of "
        "max-sequences",
    )
    state_cache_bytes: Size | None = Field(
        None,
        description="size of the states that the prefix cache keeps of models with convolutions or delta nets, "
        "allocated once; 0: such models compute every prompt; default: a sixth of kv-bytes, on an NPU 0",
    )
    prefix_host_bytes: Size = Field(
        ByteSize(0),
        description="size of the host memory for keys, values and states that leave the device, from where prompts "
        "find them again; allocated once, and pinned beside a GPU; 0: none",
    )
    adapter_row_bytes: Size | None = Field(
        None,
        description="size of adapter rows on the device, allocated once; 0 turns LoRA off; default: up to a quarter "
        "of the device's memory beside weights and steps; on a CPU of half of the free memory, and at most 1,024 rows "
        "or 256 MiB",
    )
    adapter_side_bytes: Size | None = Field(
        None,
        description="size of non-LoRA parameters on the device, allocated once: DoRA magnitudes, biases, norms, "
        "embeddings and heads of adapters; 0 refuses such adapters; default: on a CPU at most 64 MiB, elsewhere room "
        "for vectors and norms of 16 adapters, and for embeddings and heads of two adapters or one, if all that is at "
        "most a sixteenth of the memory beside weights and steps",
    )
    host_tier_bytes: Size = Field(ByteSize(512 * MIB), description="size of the adapters in host memory")

    max_queued_requests: Count = Field(
        default_factory=usual_queue,
        description="largest number of sequences of one client that wait or run; beside others it may have half of "
        "what they leave of twice as many; beyond it requests get 429; default: one for 8 MiB of memory, 512 to 4096",
    )
    max_connections: Count = Field(
        default_factory=usual_connections,
        description="largest number of open connections; a tenant, and an address other than this machine's own and "
        "trusted-proxies, may have half of them; others get 429 at once; default: one for 4 MiB of memory, 1024 to "
        "16384",
    )
    trusted_proxies: Addresses = Field(
        (),
        description="proxies before this server, as addresses or networks separated by commas: their X-Forwarded-For "
        "names the client, and their connections are not limited by address; default: none",
    )
    max_batch_items: Count = Field(256, description="largest number of items of one POST /v1/completions/batch")
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="largest number of alternatives of a token in `logprobs`, `top_logprobs`, `prompt_logprobs`; -1: "
        "all tokens",
    )
    max_choices: Count = Field(16, description="largest `n` of a request")
    max_body_bytes: Size = Field(
        ByteSize(4 * MIB),
        description="largest size of a JSON request body; large batches and lists of token ids may need more",
    )
    max_buffered_bytes: Size = Field(
        ByteSize(64 * MIB),
        description="largest size of all JSON request bodies that are being read; a client may have half of what "
        "others leave of it; beyond it all but small requests get 429",
    )
    max_upload_bytes: Size = Field(
        ByteSize(2048 * MIB), description="largest size of an adapter upload, packed and unpacked"
    )
    max_versions: Count = Field(
        8, description="number of stored versions of an adapter, the current one included; the oldest are deleted"
    )
    max_version_bytes: Size = Field(
        ByteSize(1024 * MIB),
        description="largest size of the older versions of one adapter together; the oldest are deleted first",
    )
    max_ephemeral_bytes: Size = Field(
        ByteSize(4096 * MIB),
        description="largest size of ephemeral versions in memory together; a client may have half of what others "
        "leave of it; beyond that uploads get 429, beyond half of it 413; 0 refuses them",
    )
    responses_store_bytes: Size = Field(
        ByteSize(0),
        description="largest size of the stored responses of one tenant, below store-dir; the oldest are deleted; 0: "
        "none is stored, and `previous_response_id` is refused",
    )
    max_uploads: int = Field(
        16,
        ge=1,
        le=64,
        description="largest number of uploads at a time; a client may have half of what others leave of it, and at "
        "least one; beyond it uploads get 429",
    )
    max_staging_bytes: Size | None = Field(
        None,
        description="largest size of unfinished uploads on the disk together; a client may have half of what "
        "others leave of it; beyond it uploads get 429; default: eight times max-upload-bytes",
    )
    min_free_disk_bytes: Size = Field(
        ByteSize(256 * MIB), description="uploads that would leave less than this free on the disk get 507"
    )
    lora_path_root: Path | None = Field(
        None,
        description="directory below which POST /v1/load_lora_adapter may read; default: that endpoint and "
        "/v1/unload_lora_adapter are off",
    )

    api_keys: Keys = Field((), description="keys for inference, separated by commas; default: no key is needed")
    admin_api_keys: Keys = Field(
        (), description="keys for everything, uploads and deletions included, separated by commas"
    )
    keys_file: Path | None = Field(
        None,
        description="TOML file of tenants, their limits and the hashes of their keys, edited by `multilora keys`; "
        "default: every client is one tenant",
    )
    root_path: RootPath = Field(
        "",
        description="path below which a proxy serves this server, such as /lora; requests may have it before their "
        "path, and /docs and /openapi.json name it",
    )
    open_paths: OpenPaths = Field(
        ("/docs", "/openapi.json", "/version"),
        description="those of /docs, /openapi.json, /version and /metrics that need no key where keys are set, "
        "separated by commas; `none` for no path",
    )
    cors_origins: Origins = Field(
        (),
        description="origins of web pages that may call this server from a browser, such as https://ui.example, "
        "separated by commas; * for all; default: none",
    )
    page: bool = Field(True, description="serve the page at /")

    stall_limit_seconds: float = Field(
        30.0,
        gt=0,
        description="a client that sends or reads less than 1 KiB/s for this many seconds, or has not sent a whole "
        "head in that time, loses its connection",
    )
    shutdown_limit_seconds: float = Field(
        30.0, ge=0, description="number of seconds for running requests and uploads after SIGTERM"
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
        description="number of adapters with series of their own in /metrics, the busiest ones; ?adapter=NAME names "
        "others",
    )
    otlp_endpoint: Endpoint | None = Field(
        None,
        description="OpenTelemetry collector that takes traces by OTLP over HTTP, such as http://127.0.0.1:4318; needs "
        "the extra `otel`; default: no traces",
    )
    log_format: Literal["text", "json"] = Field("text", description="format of the log, one line per request")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level that is logged")
    refusal_lines_per_minute: int = Field(
        60,
        ge=0,
        description="number of log lines per minute about refused requests of one client; one line counts the rest",
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
