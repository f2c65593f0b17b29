"""Every setting of the server, in one place. Environment `MULTILORA_<NAME>`, or `--<name>` of `multilora serve`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from service.engine.ipc.config import EngineOptions
from service.machine import usual_connections, usual_queue
from service.setting_types import Addresses, Keys, OpenPaths, Origins, RootPath, Size

MIB = 2**20
_BUNDLED = Path(__file__).resolve().parent / "bundled"
BUNDLED_MODEL_DIR = _BUNDLED / "base"
BUNDLED_ADAPTERS_DIR = _BUNDLED / "adapters"

_KEY_FIELDS = ("api_keys", "admin_api_keys")


class SettingsError(ValueError):
    """A setting is wrong; the message names it and says what to write."""


class _KeyVariables(EnvSettingsSource):
    """The variables of API keys, the empty ones too: those must not pass for unset, see `setting_types`."""

    def __init__(self, settings: type[BaseSettings]) -> None:
        super().__init__(settings, env_ignore_empty=False)

    def __call__(self) -> dict[str, Any]:
        """The values by the fields' names."""
        return {name: value for name, value in super().__call__().items() if name in _KEY_FIELDS}


class Settings(BaseSettings):
    """Frozen after the start. Byte sizes take a number or a text such as 512MiB; durations are in seconds."""

    model_config = SettingsConfigDict(env_prefix="MULTILORA_", frozen=True, extra="forbid", env_ignore_empty=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one and logs it")
    model_dir: Path = Field(BUNDLED_MODEL_DIR, description="Hugging Face directory of the base model")
    model_name: str | None = Field(
        None, description="name clients use for the base, such as Qwen/Qwen3-0.6B; default: the directory's name"
    )
    preload_adapters_dir: Path | None = Field(
        None,
        description="directory of adapter directories that are put into the store at the start under their folder "
        "names, `org/name` for those of a folder in it; default: the bundled adapters for the bundled model, nothing "
        "for any other",
    )
    store_dir: Path = Field(
        Path("data") / "adapters",
        description="where uploaded adapters live; adapters of several base models may share it",
    )
    store_shared: bool = Field(
        False,
        description="let other servers that say so too have the same store at the same time, on one machine or on "
        "several with a shared file system: what is uploaded, moved or deleted on one holds on all",
    )

    tool_parser: Literal[
        "auto", "template", "generic", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "lfm2"
    ] = Field(
        "auto",
        description="how the model writes tool calls; auto: as its chat template shows, or an adapter's own, and for "
        "templates that show no tools as a prompt of the server's explains; template: the latter are refused; generic: "
        "always as that prompt explains; none: `tools` are refused",
    )
    reasoning_parser: Literal["auto", "none", "think"] = Field(
        "auto",
        description="think: what the model writes between <think> and </think> is `reasoning_content`; auto: so for "
        "chat templates that know these marks; none: it is part of the answer",
    )
    disable_additional_properties: bool = Field(
        True,
        description="objects of a JSON schema that names properties and does not say `additionalProperties` take no "
        "others, in answers and in enforced calls of tools; false: they may; a request's field of this name goes first",
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what the base computes in; auto: the checkpoint's, float16 on a CPU as float32"
    )
    device: str = Field(
        "auto",
        description="cpu, cuda or npu, perhaps with an index; auto: an NPU if there is one, else a GPU, else the CPU",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=64,
        description="engines of this server, each with a device of its own, the first ones that this process may use; "
        "requests go where their adapter is, and those that an engine loses before their first token to another one",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="what a request has that does not say: what the model's generation_config.json names "
        "(temperature, top_p, top_k, min_p, repetition_penalty), or OpenAI's (temperature 1, all else off); end "
        "tokens are the model's either way",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the engine; default: as many as make a decode step fastest at the start, within "
        "the cores and the quota that there are",
    )
    max_model_len_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt and output of one request; default and most: the model's own limit (with linear RoPE "
        "scaling up to that times its factor)",
    )
    token_budget: int | None = Field(
        None,
        ge=1,
        description="most tokens in one step, prefill and decode together; default: 8192 on a GPU, 2048 on an NPU, 256 "
        "on a CPU, less on a device with little memory",
    )
    max_sequences: int | None = Field(
        None, ge=1, description="most sequences that run at the same time; default: 256, on a CPU 64"
    )
    block_size_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens per KV block; default: 16, on an NPU 128, whose fused attention takes multiples of that",
    )
    eager: bool = Field(
        False, description="run each step from Python, where devices would replay it from a captured graph"
    )
    lora_window: bool = Field(
        True,
        description="hold the A rows of adapters behind the base weights, so that small steps on a GPU, and decode "
        "steps on an NPU, need no shrink of their own; without effect on a CPU",
    )
    npu_graphs: bool = Field(
        False,
        description="on an NPU capture decode steps of up to 64 sequences as graphs and replay them, so that they cost "
        "no Python; what cannot be captured runs as without, for a reason that /metrics names; not verified on an NPU",
    )
    kv_bytes: Size | None = Field(
        None,
        description="KV cache, allocated once; default: what the weights, the steps and the adapter rows leave of the "
        "device's memory, as far as max-sequences can fill it; on a CPU a quarter of the free memory, or what one "
        "request of the longest context takes if that is more, as far as half of the free memory goes",
    )
    state_bytes: Size | None = Field(
        None, description="conv states, allocated once; default: one line for each of max-sequences"
    )
    adapter_row_bytes: Size | None = Field(
        None,
        description="adapter rows on the device, allocated once; 0 turns LoRA off; default: a quarter of what the "
        "weights and the steps leave of the device's memory, as far as it is of use, on a CPU at most 1,024 rows or "
        "256 MiB, and half of the free memory counts",
    )
    adapter_side_bytes: Size | None = Field(
        None,
        description="what adapters have on the device beside rows, allocated once: magnitudes of DoRA, biases, norms, "
        "and embeddings and heads of their own; 0: such adapters are refused; default: on a CPU at most 64 MiB, "
        "elsewhere room for magnitudes, biases and norms of 16 adapters, and for embeddings and heads of two adapters "
        "or one, if all that is at most a sixteenth of what the weights and the steps leave",
    )
    host_tier_bytes: Size = Field(ByteSize(512 * MIB), description="adapters held in host memory")

    max_queued_requests: int = Field(
        default_factory=usual_queue,
        ge=1,
        description="sequences of a client that may wait or run at the same time, of several as many as each "
        "leaves free of twice as many; beyond it requests get 429; default: one for 8 MiB of memory, 512 to 4096",
    )
    max_connections: int = Field(
        default_factory=usual_connections,
        ge=1,
        description="open connections, of one tenant half of them, and of one address that is neither this machine's "
        "own nor in trusted_proxies; beyond it they are answered 429 at once; default: one for 4 MiB of memory, 1024 "
        "to 16384",
    )
    trusted_proxies: Addresses = Field(
        (),
        description="proxies before this server, as addresses or networks separated by commas: X-Forwarded-For of "
        "requests from there says who the client is, and their connections have no share; default: none",
    )
    max_batch_items: int = Field(256, ge=1, description="most items of one POST /v1/completions/batch")
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="most alternatives of a token in `logprobs`, `top_logprobs`, `prompt_logprobs`; -1: all tokens",
    )
    max_choices: int = Field(16, ge=1, description="largest `n` of a request")
    max_body_bytes: Size = Field(ByteSize(16 * MIB), description="largest JSON request body")
    max_buffered_bytes: Size = Field(
        ByteSize(64 * MIB),
        description="JSON request bodies that are being read, of one client half of it and of several as much as each "
        "leaves free; beyond it requests get 429, but for small ones",
    )
    max_upload_bytes: Size = Field(ByteSize(2048 * MIB), description="largest adapter upload, packed and unpacked")
    max_versions: int = Field(
        8, ge=1, description="versions that are kept of an adapter, the current one included; older ones go"
    )
    max_version_bytes: Size = Field(
        ByteSize(1024 * MIB), description="older versions that are kept of one adapter, together; the oldest go first"
    )
    max_uploads: int = Field(
        16,
        ge=1,
        le=64,
        description="uploads at a time, of one client half of them and of several as many as each leaves free, one at "
        "least; beyond it they get 429",
    )
    max_staging_bytes: Size | None = Field(
        None,
        description="what uploads that are not finished may hold on the disk together, one client half of it and "
        "several as much as each leaves free; beyond it they get 429; default: eight times max-upload-bytes",
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
    admin_api_keys: Keys = Field((), description="keys for inference, upload and delete, separated by commas")
    keys_file: Path | None = Field(
        None,
        description="TOML file of tenants, their limits and the hashes of their keys, which multilora keys changes; "
        "default: all that asks is one tenant",
    )
    root_path: RootPath = Field(
        "",
        description="path below which a proxy serves this server, such as /lora: requests may have it before theirs, "
        "and /docs and /openapi.json say so",
    )
    open_paths: OpenPaths = Field(
        ("/docs", "/openapi.json", "/version"),
        description="which of /docs, /openapi.json, /version and /metrics need no key where keys are set, separated by "
        "commas; none for none of them",
    )

    cors_origins: Origins = Field(
        (),
        description="web pages that may call this server from a browser, as origins such as https://ui.example, "
        "separated by commas; * for all; default: none",
    )
    page: bool = Field(True, description="serve a page at / to try the server in a browser; false turns it off")

    stall_limit_seconds: float = Field(
        30.0,
        gt=0,
        description="a client that for so long takes or sends less than 1 KiB/s, or has sent no whole head of a "
        "request, loses its connection",
    )
    shutdown_limit_seconds: float = Field(
        30.0, ge=0, description="how long running requests and uploads may go on after SIGTERM"
    )
    metrics_adapters: int = Field(
        64,
        ge=0,
        le=1000,
        description="adapters that /metrics tells of one by one, the busiest ones; others with ?adapter=NAME",
    )
    log_format: Literal["text", "json"] = Field("text", description="one line per request as text or as JSON")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    refusal_lines_per_minute: int = Field(
        60,
        ge=0,
        description="lines of the log about requests of one payer that are refused; the rest are counted in one line",
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
        """What is given, then the environment."""
        return init_settings, env_settings, _KeyVariables(settings_cls)

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
        """What unfinished uploads may hold on the disk."""
        return 8 * int(self.max_upload_bytes) if self.max_staging_bytes is None else int(self.max_staging_bytes)

    @property
    def lora_enabled(self) -> bool:
        """Whether adapters can be used at all."""
        return self.adapter_row_bytes != 0

    def engine_options(self) -> EngineOptions:
        """What the engine process is told. SettingsError if the engine's sizes do not fit together."""
        try:
            return EngineOptions(
                model_dir=str(self.model_dir.absolute()),
                store_root=str(self.store_root),
                dtype=self.dtype,
                device=self.device,
                token_budget=self.token_budget,
                max_sequences=self.max_sequences,
                max_model_len_tokens=self.max_model_len_tokens,
                block_size_tokens=self.block_size_tokens,
                kv_bytes=_plain(self.kv_bytes),
                state_bytes=_plain(self.state_bytes),
                row_bytes=_plain(self.adapter_row_bytes),
                side_bytes=_plain(self.adapter_side_bytes),
                host_tier_bytes=int(self.host_tier_bytes),
                num_threads=self.num_threads,
                eager=self.eager,
                lora_window=self.lora_window,
                npu_graphs=self.npu_graphs,
                log_level=self.log_level.upper(),
                log_format=self.log_format,
            )
        except ValueError as error:
            raise SettingsError(str(error)) from error


def _plain(size: ByteSize | None) -> int | None:
    return None if size is None else int(size)


def load_settings(**given: Any) -> Settings:
    """Settings from the environment, `given` going first. SettingsError in one sentence per wrong setting."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_sentence(fault) for fault in error.errors())) from error


def _sentence(fault: Any) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        return f"Settings: {message}."
    name = str(fault["loc"][0])
    flag = name.lower().removeprefix("multilora_").replace("_", "-")
    return f"Setting --{flag} (MULTILORA_{flag.replace('-', '_').upper()}): {message}."
