"""Every JSON shape that the HTTP interface answers with; `service.api.schemas` has those that it takes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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


class Usage(Response):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


FinishReason = Literal["stop", "length"]


class CompletionLogprobs(Response):
    """Log probabilities as OpenAI's completions give them; null for the first prompt token, which nothing precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Response):
    """Of a prompt's token or an alternative. `rank` among the alternatives, from 1; null for a token that is none."""

    logprob: float
    rank: int | None
    decoded_token: str


# For each token of the prompt, by token id; null for the first one, which nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Response):
    """One answer. `stop_reason` is the stop string or stop token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(Response):
    """Answer of POST /v1/completions, and each chunk of its stream. `model` is the base or adapter that answers, and
    `system_fingerprint` changes with the content of either."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Response):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response):
    """Log probabilities as OpenAI's chat gives them."""

    content: list[TokenLogprob]


class CalledFunction(Response):
    """Which tool is called; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(Response):
    """A call that the client is to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Response):
    """What the model said. `content` is null where it only thought or called; `reasoning_content` is what it thought
    before it spoke."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Response):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(Response):
    """Answer of POST /v1/chat/completions. `model` is the base or adapter that answers, and `system_fingerprint`
    changes with the content of either."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(Response):
    """The name of a call's tool comes first, then its arguments, in pieces to be joined."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Response):
    """What is new of the call `index`; `id` and `type` come once, with the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Response):
    """What is new of a streamed answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Response):
    """What is new of one streamed answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Response):
    """One event of a streamed chat; the last one before `[DONE]` may carry `usage` and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class OutputText(Response):
    """The text of a message or of a reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[str] | None = None
    logprobs: list[TokenLogprob] | None = None


class OutputItem(Response):
    """What the model said, thought or called."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[OutputText] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputDetails(Response):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Response):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Response):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Response):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Response):
    """Answer of POST /v1/responses: what was asked, as far as it matters, and `output`. `model` is the base or adapter
    that answers, and `system_fingerprint` changes with the content of either."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: Literal[False]
    system_fingerprint: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(Response):
    """One event of a streamed response; what else it has follows from its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class Embedding(Response):
    """Of one input: numbers, or float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Response):
    """Token counts of embeddings."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Response):
    """Answer of POST /v1/embeddings: one for each input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    system_fingerprint: str
    usage: EmbeddingUsage


class BatchResponse(Response):
    """One answer per item, in order."""

    items: list[CompletionResponse | ChatResponse | ErrorResponse]


class ModelCard(Response):
    """A name that `model` may take. `root` of an adapter is its digest."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


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
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


class DetokenizeResponse(Response):
    """Text of token ids."""

    prompt: str


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
    whether it is to be on the device, asked for or not. `replicas`: of several engines, those that hold it."""

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
    state: Literal["disk", "host", "device"]
    has_chat_template: bool
    last_used: int | None
    replicas: dict[str, Literal["disk", "host", "device"]] = {}


class AdapterResponse(AdapterSummary):
    """An adapter: what was bound where."""

    modules: list[ModuleReport]
    notes: list[str]


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
    """The versions of a name, newest first. `shared_with` is told to its owner alone."""

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


class HealthResponse(Response):
    """The process is up; `engine` tells how the engine is, and where there are several, `replicas` how each is."""

    status: Literal["ok"]
    engine: str
    replicas: dict[str, str] | None = None


class ReadyResponse(Response):
    """The model is loaded and warm."""

    status: Literal["ready"]
    model: str


class VersionResponse(Response):
    """What runs here."""

    version: str
    model: str
    dtype: str | None
    device: str | None
