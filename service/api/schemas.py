"""Every JSON shape of the HTTP interface. Requests refuse unknown fields; the few that are accepted without effect are
declared in `InertFields`, those that OpenAI has and this server has not are declared as `Unsupported` (null only)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MAX_LOGPROBS = 20
# Of the prompts of one request, where it has more than one sequence: each takes a few hundred bytes until all are sent.
MAX_PROMPT_LOGPROBS = 1_000_000
MAX_STOP_STRINGS = 32
# Both are gone through token by token in each step of the request; 300 is OpenAI's figure.
MAX_LOGIT_BIASES = 300
MAX_STOP_TOKEN_IDS = 512
MAX_DETOKENIZED = 1 << 20  # tokens
MAX_FIELDS = 256  # of any object of a request

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
_INERT = "Accepted and ignored: it has no meaning for this server."
_UNSUPPORTED = "Not supported: leave it out or send null."

Unsupported = Annotated[None, Field(description=_UNSUPPORTED)]
# For every list that may be long: the first wrong item tells all that a client needs.
FIRST = Field(fail_fast=True)


def _bounded(value: Any, most: int) -> Any:
    if isinstance(value, dict) and len(value) > most:
        raise ValueError(f"The object may have at most {most} items, and has {len(value)}")
    return value


class Request(BaseModel):
    """Base of all request bodies: unknown fields, wrong types, NaN and infinity are refused.

    What is wrong with a body is found in bounded time and memory, for pydantic keeps an error of every field and every
    item: lists stop at the first (`FIRST`), and objects with too many fields are not looked at.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: Any) -> Any:
        return _bounded(value, MAX_FIELDS)


class Response(BaseModel):
    """Base of all answers; complete, so that clients can be generated from it."""

    model_config = ConfigDict(extra="forbid")


class InertFields(Request):
    """Fields that OpenAI clients send and that cannot change an answer here."""

    user: Any = Field(None, description=_INERT)
    metadata: Any = Field(None, description=_INERT)
    store: Any = Field(None, description=_INERT)
    service_tier: Any = Field(None, description=_INERT)
    safety_identifier: Any = Field(None, description=_INERT)
    prompt_cache_key: Any = Field(None, description=_INERT)
    prompt_cache_retention: Any = Field(None, description=_INERT)


class StreamOptions(Request):
    """Options of a streamed answer."""

    include_usage: bool = Field(False, description="send token counts in a last chunk without choices")
    include_obfuscation: Any = Field(None, description=_INERT)


class Generation(InertFields):
    """What completions and chat completions have in common; null is the same as leaving a field out."""

    model: str = Field(description="the base's name, an adapter's name, or `base:adapter`")
    adapter_id: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="an adapter's name; if `model` names one too it must be the same"
    )
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    n: Annotated[int, Field(ge=1)] | None = Field(None, description="independent answers per prompt, 1 by default")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="most tokens of an answer")
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="no end before so many tokens")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="1 by default, 0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="1 by default")
    top_k: Annotated[int, Field(ge=-1)] | None = Field(None, description="0 or -1 is off, the default")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="0 by default")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = Field(None, description="1 by default")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="0 by default")
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(None, description="0 by default")
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
            BeforeValidator(lambda value: _bounded(value, MAX_LOGIT_BIASES)),
        ]
        | None
    ) = Field(None, description=f"token id, as text, to what is added to its logit; up to {MAX_LOGIT_BIASES} of them")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="the same seed, request and model give the same answer"
    )
    stop: StopString | Annotated[list[StopString], FIRST] | None = Field(
        None, description=f"up to {MAX_STOP_STRINGS} texts that end the answer and are not part of it"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS), FIRST] | None = Field(
        None, description=f"up to {MAX_STOP_TOKEN_IDS} token ids that end the answer"
    )
    ignore_eos: bool | None = Field(None, description="go on to max_tokens, whatever end tokens come")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; true by default")
    add_special_tokens: bool | None = Field(
        None, description="add what the tokenizer adds (a BOS, say); true for prompts, false for chats by default"
    )
    return_token_ids: bool | None = Field(None, description="answer with the token ids too, as vLLM does")

    @model_validator(mode="after")
    def _check_stop_and_stream(self) -> Generation:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"`stop` takes at most {MAX_STOP_STRINGS} texts")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is only allowed with `stream`: true")
        return self


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], FIRST]
        | Annotated[list[TokenId], FIRST]
        | Annotated[list[Annotated[list[TokenId], FIRST]], FIRST]
    ) = Field(description="a text, texts, token ids, or lists of token ids")
    echo: bool | None = Field(None, description="begin the answer with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="log probabilities, with so many alternatives; with `echo` of the prompt too, up to "
        f"{MAX_PROMPT_LOGPROBS} in all where there are several prompts or choices",
    )
    suffix: Unsupported = None
    best_of: Unsupported = None
    response_format: Unsupported = None


class TextPart(Request):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Request):
    """One message of a chat. Images, audio, files and tool calls are not supported."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1), FIRST]
    name: str | None = None
    reasoning_content: str | None = Field(None, description="for templates that show earlier reasoning")
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    refusal: Unsupported = None
    annotations: Unsupported = None


class TextFormat(Request):
    """The only response format of this server."""

    type: Literal["text"]


class ChatRequest(Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="most tokens of an answer; default: what the context has left"
    )
    logprobs: bool | None = Field(None, description="log probabilities of the answer's tokens")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="alternatives for each token; only with `logprobs`"
    )
    add_generation_prompt: bool | None = Field(None, description="true by default")
    continue_final_message: bool | None = Field(
        None, description="go on with the last message instead of starting a new one"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the chat template, such as enable_thinking"
    )
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], FIRST] | None = None
    tools: Unsupported = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.max_tokens == 0:
            raise ValueError("`max_tokens` must be at least 1")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("`max_tokens` and `max_completion_tokens` differ; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` is only allowed with `logprobs`: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "`continue_final_message` and `add_generation_prompt` exclude each other; send one of them"
            )
        return self


class BatchRequest(Request):
    """Body of POST /v1/completions/batch. Each item is checked by itself, so that one wrong item fails alone."""

    items: Annotated[list[Any], Field(min_length=1)] = Field(
        description="completion or chat completion requests, each with its own `model`, without `stream`"
    )


class TokenizeRequest(Request):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = Field(None, description="default: the base; an adapter may bring its own chat template")
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST] | None = None
    add_special_tokens: bool | None = Field(None, description="true for prompts, false for messages by default")
    add_generation_prompt: bool | None = Field(None, description="true by default; only with messages")
    continue_final_message: bool | None = Field(None, description="only with messages")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="only with messages")
    return_token_strs: bool | None = Field(None, description="answer with the tokens as the vocabulary spells them")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either `prompt` or `messages`")
        chat_only = (self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)
        if self.messages is None and any(value is not None for value in chat_only):
            raise ValueError(
                "`add_generation_prompt`, `continue_final_message` and `chat_template_kwargs` are only allowed with "
                "`messages`"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "`continue_final_message` and `add_generation_prompt` exclude each other; send one of them"
            )
        return self


class DetokenizeRequest(Request):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST, Field(max_length=MAX_DETOKENIZED)] = Field(
        description=f"token ids, up to {MAX_DETOKENIZED}"
    )


class LoadLoraRequest(Request):
    """Body of POST /v1/load_lora_adapter, vLLM's."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1, description="directory below the one the operator allowed")
    load_inplace: bool = Field(False, description="replace an adapter of this name")
    is_3d_lora_weight: Literal[False] | None = Field(None, description="3-D expert weights are not supported")


class UnloadLoraRequest(Request):
    """Body of POST /v1/unload_lora_adapter, vLLM's."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(None, description=_INERT)


# ---- answers


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


class CompletionChoice(Response):
    """One answer. `stop_reason` is the stop string or stop token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(Response):
    """Answer of POST /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
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


class AssistantMessage(Response):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Response):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(Response):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ChatDelta(Response):
    """What is new of a streamed answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Response):
    """What is new of one streamed answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Response):
    """One event of a streamed chat; the last one before `[DONE]` may carry `usage` and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


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
    """All names."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(Response):
    """Token ids of a prompt."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: list[str] | None = None


class DetokenizeResponse(Response):
    """Text of token ids."""

    prompt: str


class ModuleReport(Response):
    """One adapted module: rank, scaling and size of its tensors."""

    module: str
    rank: int
    scaling: float
    bytes: int


class AdapterSummary(Response):
    """An adapter, as it is listed. `state` is where its weights are now."""

    name: str
    object: Literal["adapter"]
    digest: str
    base: str
    created: int
    rank: int
    bytes: int
    rows: dict[str, int]
    state: Literal["disk", "host", "device"]
    has_chat_template: bool


class AdapterResponse(AdapterSummary):
    """An adapter: what was bound where."""

    modules: list[ModuleReport]
    notes: list[str]


class AdapterList(Response):
    """All adapters, without their load reports."""

    object: Literal["list"]
    data: list[AdapterSummary]


class AdapterDeleted(Response):
    """The name is gone; what runs finishes."""

    name: str
    object: Literal["adapter.deleted"]
    digest: str
    deleted: bool


class HealthResponse(Response):
    """The process is up; `engine` tells how the engine is."""

    status: Literal["ok"]
    engine: str


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
