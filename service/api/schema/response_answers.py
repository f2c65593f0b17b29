"""Answers of POST /v1/responses."""

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
