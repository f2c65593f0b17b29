"""Answers of the Responses API and of the Messages API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from service.api.schema.answers import Response
from service.api.schema.generation_answers import TokenLogprob


class OutputText(Response):
    """The text of a message or of a reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[str] | None = None
    logprobs: list[TokenLogprob] | None = None


class OutputItem(Response):
    """One item of the output: a message, a reasoning or a call."""

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
    """Details of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Response):
    """Details of the output's tokens."""

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

    reason: Literal["max_output_tokens", "abort"]


class ResponseError(Response):
    """Why an answer failed."""

    code: str
    message: str


class ResponseObject(Response):
    """A response: what was asked, as far as it matters, and `output`. `model` is the base or adapter
    that answers, and `system_fingerprint` changes with the content of either."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: bool
    system_fingerprint: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class InputTokens(Response):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Response):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(Response):
    """A page of the items that a response answers, and whether more follow after `last_id`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(Response):
    """One event of a streamed response; what else it has follows from its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class MessageBlock(Response):
    """A part of an answer."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class OutputTokensDetails(Response):
    """Details of the answer's tokens."""

    thinking_tokens: int


class MessageUsage(Response):
    """Token counts; the prompt has the sum of the three of its tokens."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageObject(Response):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Response):
    """An event of a streamed message: its `type` says what else it holds."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]


class TokenCount(Response):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageErrorDetail(Response):
    """Kind and sentence of an error; `details` has a code that clients know, where there is one."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessageError(Response):
    """Every answer below /v1/messages with a status of 400 or more, and the event of a stream that fails."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str
