"""Body and answers of POST /inference/v1/generate, vLLM's: token ids in, token ids out."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from adapters.files.name_versions import OnNewVersion
from service.api.schema.answers import Response, Usage
from service.api.schema.base import Answering, field_error
from service.api.schema.generation_answers import AdapterVersionStart, ChatLogprobs, FinishReason, PromptLogprobs
from service.api.schema.requests import (
    CacheSalt,
    CompletionRequest,
    StreamOptions,
    TokenIds,
    check_stream,
    check_streamed,
)
from service.api.schema.unserved_fields import GENERATE_FIELDS, GENERATE_SAMPLING_FIELDS

# Fields of a completion that the body has, or that the answer does not depend on.
_NO_SAMPLING = frozenset(
    {*Answering.model_fields, "prompt", "cache_salt", "stream", "stream_options", "echo", "add_special_tokens"}
    | {"on_new_version"}
    | {"return_token_ids", "return_tokens_as_token_ids"}
)


class GenerateSampling(CompletionRequest):
    """vLLM's SamplingParams: the fields of a completion that say how to sample. Without `max_tokens` an answer may have
    the rest of the context."""

    unserved = GENERATE_SAMPLING_FIELDS
    fills_context: ClassVar[bool] = True

    prompt: Literal[None] = Field(None, description="send `token_ids`")  # type: ignore[assignment]

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, value: Any) -> Any:
        for name in _NO_SAMPLING & value.keys() if isinstance(value, dict) else ():
            raise field_error(name, f"`{name}` is no sampling parameter; leave it out of `sampling_params`.")
        return value


class GenerateRequest(Answering):
    """Body of POST /inference/v1/generate."""

    unserved = GENERATE_FIELDS

    token_ids: TokenIds = Field(min_length=1, description="the prompt")
    sampling_params: GenerateSampling = Field(description="as for completions; `logprobs` is a number")
    request_id: str = Field("", max_length=200, description="repeated in the answer; default: one of the server's")
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    cache_salt: CacheSalt | None = Field(None, description="as for completions")
    on_new_version: OnNewVersion | None = Field(None, description="as for completions")

    @model_validator(mode="after")
    def _check_stream(self) -> GenerateRequest:
        check_stream(self.stream, self.stream_options)
        if self.stream:
            check_streamed(self.on_new_version, self.sampling_params.prompt_logprobs, "sampling_params")
        return self

    def as_completion(self) -> CompletionRequest:
        """The same request to /v1/completions, whose answer is in tokens."""
        names = (*Answering.model_fields, "cache_salt", "on_new_version", "stream", "stream_options")
        given = {name: getattr(self, name) for name in names}
        in_tokens = {"prompt": self.token_ids, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return self.sampling_params.model_copy(update={**given, **in_tokens})


class GenerateChoice(Response):
    """One answer, or new parts of it."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    adapter_versions: list[AdapterVersionStart] | None = None


class GenerateResponse(Response):
    """Answer of POST /inference/v1/generate, and each chunk of its stream; the header X-Multilora-Adapter and
    `system_fingerprint` say which version of the adapter answers."""

    request_id: str
    id: str
    object: Literal["generate"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | None = None
    usage: Usage | None = None
