"""Answers of the HTTP interface: the JSON shapes of errors, models, adapters, tokens, embeddings and health.
`generation_answers` and `response_answers` hold the others; `service.api.schema.requests` holds the
requests."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from adapters.files.name_versions import OnNewVersion


class Response(BaseModel):
    """Base of all answers; complete, so that clients can be generated from it."""

    model_config = ConfigDict(extra="forbid")


class ErrorProblem(Response):
    """A tensor or module that does not fit."""

    name: str
    reason: str


class ErrorDetail(Response):
    """OpenAI's error object; `problems` is complete when tensors of an upload do not bind."""

    message: str
    type: str
    param: str | None
    code: str | None
    problems: list[ErrorProblem] | None = None


class ErrorResponse(Response):
    """Every answer with a status of 400 or more."""

    error: ErrorDetail


class CompletionTokensDetails(Response):
    """Token details of a chat's answers: `reasoning_tokens` are the tokens of the model's thoughts."""

    reasoning_tokens: int


class PromptTokensDetails(Response):
    """Token details of prompts: `cached_tokens` were found in the prefix cache and not computed again."""

    cached_tokens: int


class Usage(Response):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Embedding(Response):
    """The vector of one input: numbers, or float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Response):
    """Token counts of embeddings; the last two are there for vLLM's clients."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]
    prompt_tokens_details: None


class EmbeddingList(Response):
    """Answer of POST /v1/embeddings: one for each input, in order."""

    id: str
    created: int
    object: Literal["list"]
    data: list[Embedding]
    model: str
    system_fingerprint: str
    usage: EmbeddingUsage


class ModelCard(Response):
    """A name that `model` may take.

    `root` is the base's name, and of an adapter its digest; for keys with the scope `admin` the directory of the base,
    and the one that the adapter was loaded from. The last three are Anthropic's.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(Response):
    """A page of names; `last_id` is what `after` takes where more follow."""

    object: Literal["list"]
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool


class TokenizeResponse(Response):
    """Token ids of a prompt."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class TokenizerInfo(Response):
    """The fields of the model's tokenizer_config.json, whatever they are, and these."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str | None = None
    chat_template: str | None = None
    additional_chat_templates: dict[str, str] = {}
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


class DetokenizeResponse(Response):
    """Text of token ids."""

    prompt: str


class HealthResponse(Response):
    """The process is up; `engine` tells how the engine is, and where there are several, `replicas` how each is. `store`
    is there while the directory of the adapters is not, or cannot be written: what was uploaded is served."""

    status: Literal["ok"]
    engine: str
    replicas: dict[str, str] | None = None
    store: Literal["full", "unreachable", "read-only"] | None = None


class LoadResponse(Response):
    """Sequences that are admitted and have not ended."""

    server_load: int


class ReadyResponse(Response):
    """The model is loaded and warm."""

    status: Literal["ready"]
    model: str


class StatusResponse(Response):
    """Answer of POST /reset_prefix_cache."""

    status: Literal["ok"]


class VersionResponse(Response):
    """Version of the server and form of the base."""

    version: str
    model: str
    dtype: str | None
    device: str | None


class ModuleReport(Response):
    """One adapted module: rank, scaling and size of its tensors. `rank` is 0 where it has no LoRA weights, and `parts`
    are what it has beside them: `lora_magnitude_vector`, `lora_B.bias`, `bias`, `weight`,
    `token_adapter.trainable_tokens_delta`."""

    module: str
    rank: int
    scaling: float
    bytes: int
    parts: list[str]


class AdapterSummary(Response):
    """An adapter, as it is listed: the current `version` of its name. `state` is where its weights are now; `last_used`
    when a request for it last began to run, in Unix seconds, null if none has since the server started. `pinned`:
    whether it is to be on the device, asked for or not. `ephemeral`: whether the name goes with the server.
    `on_new_version`: of requests that do not say; null: the server's. `replicas`: of several engines, those that hold
    it."""

    name: str
    object: Literal["adapter"]
    version: int
    digest: str
    base: str
    owner: str
    visibility: Literal["private", "shared", "public"]
    created: int
    rank: int
    bytes: int
    rows: dict[str, int]
    pinned: bool
    ephemeral: bool
    on_new_version: OnNewVersion | None
    state: Literal["disk", "host", "device"]
    has_chat_template: bool
    last_used: int | None
    replicas: dict[str, Literal["disk", "host", "device"]] = Field({})


class AdapterResponse(AdapterSummary):
    """An adapter: what was bound where. `eos_token_ids` end its answers beside the base's; `labels` are of
    its score head."""

    modules: list[ModuleReport]
    eos_token_ids: list[int]
    labels: list[str]
    notes: list[str]


class LoraUpdated(Response):
    """Answer of SGLang's routes, with the digest of what the name stands for, or stood for."""

    success: Literal[True]
    error_message: Literal[""]
    digest: str
    version: int | None = None


class AdapterVersion(Response):
    """A content that a name has stood for: since when, by whom, and what they said of it. `same_as` is the version that
    has the same weights, value by value, in another float type."""

    number: int
    digest: str
    created: int
    by: str
    note: str
    same_as: int | None


class AdapterHistory(Response):
    """The versions of a name, newest first. `shared_with`, and `by` of each version, are told to its owner alone."""

    object: Literal["list"]
    name: str
    owner: str
    visibility: Literal["private", "shared", "public"]
    shared_with: list[str]
    data: list[AdapterVersion]


class AdapterList(Response):
    """A page of adapters, without their load reports; `last_id` is what `after` takes where more follow."""

    object: Literal["list"]
    data: list[AdapterSummary]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AdapterDeleted(Response):
    """The name is gone; what runs finishes."""

    name: str
    object: Literal["adapter.deleted"]
    digest: str
    deleted: bool
