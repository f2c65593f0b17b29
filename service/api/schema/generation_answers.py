"""Answers of completions, chats and batches of them."""

from __future__ import annotations

from typing import Literal

from service.api.schema.answers import ErrorResponse, Response, Usage

FinishReason = Literal["stop", "length", "abort"]


class AdapterVersionStart(Response):
    """A version of the adapter, and the number of the first of the choice's tokens that it made, from 0: up to the next
    one's all tokens and log probabilities are its own. `start` is null for one that was not taken over, and `reason`
    says why."""

    start: int | None
    version: int
    digest: str
    reason: str | None = None


class CompletionLogprobs(Response):
    """Log probabilities as OpenAI's completions give them; null for the first prompt token, which nothing precedes."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Response):
    """Log probability of a prompt's token or an alternative. `rank` among all tokens, from 1."""

    logprob: float
    rank: int
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
    adapter_versions: list[AdapterVersionStart] | None = None
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
    """The model's message. `content` is null where it only thought or called; `reasoning_content` holds its thoughts,
    and `reasoning` the same."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ChatChoice(Response):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None = None
    adapter_versions: list[AdapterVersionStart] | None = None
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
    """New parts of the call `index`; `id` and `type` come once, with the name."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(Response):
    """New parts of a streamed answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Response):
    """New parts of one choice of a stream."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    adapter_versions: list[AdapterVersionStart] | None = None
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


class BatchResponse(Response):
    """One answer per item, in order."""

    items: list[CompletionResponse | ChatResponse | ErrorResponse]
