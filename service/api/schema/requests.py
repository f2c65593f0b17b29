"""The JSON shapes that the HTTP interface takes, but for those of the Responses API (`service.api.schema.responses`);
`service.api.schema.answers` has those that it answers with.

The fields here are served. Requests refuse all others, but for those of `service.api.schema.unserved_fields`, which
they accept while these ask for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from adapters.files.name_versions import OnNewVersion
from kernels.sampling.parameters import PARAMETERS, Parameter
from service.api.schema.base import FIRST, Answering, Request, bounded, field_error, value_fault
from service.api.schema.chat_messages import ChatMessage, TemplateVariables
from service.api.schema.response_formats import JsonSchema, ResponseFormat, StructuredOutputs
from service.api.schema.tools import MAX_TOOLS, ToolChoice, ToolList, check_tool_choice, check_tools
from service.api.schema.unserved_fields import (
    EMBEDDING_FIELDS,
    GENERATION_FIELDS,
    STREAM_FIELDS,
    TOKENIZE_FIELDS,
)
from service.engine.ipc.messages import MAX_LOGIT_BIASES, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_TOKEN_IDS

# Alternatives included, of one request, and of all answers of a client that are not sent yet: 0.5 KB each.
MAX_HELD_LOGPROBS = 1_000_000
MAX_STOP_STRINGS = 32
MAX_DETOKENIZED = 1 << 20  # tokens
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 128
MAX_CACHE_SALT_CHARS = 256

StopString = Annotated[str, Field(min_length=1, max_length=1000)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], FIRST]


_REASONING_EFFORT = (
    "how much to think first, for chat templates that take `reasoning_effort`; `none` for those too that take "
    "`enable_thinking`, and for those that do not speak of thinking"
)


class StreamOptions(Request):
    """Options of a streamed answer."""

    unserved = STREAM_FIELDS

    include_usage: bool | None = Field(default=None, description="send token counts in a last chunk without choices")
    continuous_usage_stats: bool | None = Field(
        default=None, description="with `include_usage`, send the token counts so far in every chunk"
    )

    @property
    def counts_each_chunk(self) -> bool:
        """Whether every chunk has the token counts so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


def _asked(parameter: Parameter) -> tuple[Any, Any]:
    """Type and field of a sampling parameter in a request."""
    if parameter.is_whole:
        kind: Any = Annotated[int, Field(ge=int(parameter.least))]
    else:
        kind = Annotated[float, Field(ge=parameter.least, le=parameter.most)]
    default = f"the model's, or {parameter.neutral:g}" if parameter.is_models else f"{parameter.neutral:g}"
    description = f"{parameter.meaning}; default: {default}"
    return kind | None, Field(None, description=description)


if TYPE_CHECKING:

    class SamplingParameters(Answering):
        """A field for each of `kernels.sampling.parameters.PARAMETERS`, under its name."""
else:
    SamplingParameters = create_model(
        "SamplingParameters", __base__=Answering, **{parameter.name: _asked(parameter) for parameter in PARAMETERS}
    )


class Decoding(SamplingParameters):
    """Fields of the model, the answer's constraint, sampling and detokenising; null is the same as leaving a field
    out."""

    min_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="no end before this number of tokens")
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LOGIT_BIASES),
            BeforeValidator(lambda value: bounded(value, MAX_LOGIT_BIASES)),
        ]
        | None
    ) = Field(
        None, description=f"token ids, as text, and the value added to each one's logit; up to {MAX_LOGIT_BIASES}"
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        None, description="the same seed, request and model give the same answer"
    )
    cache_salt: CacheSalt | None = Field(
        None, description="only requests with the same text here share the prefix cache, within a tenant"
    )
    stop: StopString | Annotated[list[StopString], FIRST] | None = Field(
        None, description=f"up to {MAX_STOP_STRINGS} texts that end the answer and are not part of it"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS), FIRST] | None = Field(
        None, description=f"up to {MAX_STOP_TOKEN_IDS} token ids that end the answer"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS), FIRST] | None = (
        Field(None, description="the only token ids of the answer; include an end token if it is to end")
    )
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS), FIRST] | None = Field(
        None,
        description=f"up to {MAX_BAD_WORDS} texts whose tokens, as at the beginning of a text or behind a space, the "
        "answer must not hold one after the other",
    )
    include_stop_str_in_output: bool | None = Field(None, description="keep the stop string in the answer's text")
    no_stop_trim: bool | None = Field(None, description="the same, as SGLang calls it")
    ignore_eos: bool | None = Field(None, description="end tokens do not end the answer")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; true by default")
    add_special_tokens: bool | None = Field(
        None,
        description="add the tokenizer's own special tokens (a BOS, say); true for prompts, false for chats by default",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar` and `structural_tag`, with "
        "`whitespace_pattern`, `disable_any_whitespace` and `disable_additional_properties`",
    )
    disable_additional_properties: bool | None = Field(
        None,
        description="true: objects of a JSON schema with `properties` and without `additionalProperties` take no "
        "others, wherever the schema stands; default: the server's setting, true",
    )
    guided_json: JsonSchema | None = Field(None, description="as `structured_outputs.json`")
    guided_regex: str | None = Field(None, description="as `structured_outputs.regex`")
    guided_choice: Annotated[list[str], FIRST] | None = Field(None, description="as `structured_outputs.choice`")
    guided_grammar: str | None = Field(None, description="as `structured_outputs.grammar`")
    guided_whitespace_pattern: str | None = Field(None, description="as `structured_outputs.whitespace_pattern`")
    json_schema: JsonSchema | None = Field(None, description="SGLang's, as `structured_outputs.json`")
    regex: str | None = Field(None, description="SGLang's, as `structured_outputs.regex`")
    ebnf: str | None = Field(None, description="SGLang's, as `structured_outputs.grammar`")

    @model_validator(mode="after")
    def _check_stop(self) -> Decoding:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise field_error("stop", f"`stop` takes at most {MAX_STOP_STRINGS} texts.")
        return self

    @property
    def closes_objects(self) -> bool | None:
        """Whether objects of JSON schemas that do not say `additionalProperties` are closed; None: as the server is
        set."""
        inner = self.structured_outputs.disable_additional_properties if self.structured_outputs is not None else None
        return self.disable_additional_properties if inner is None else inner


class Generation(Decoding):
    """Fields that completions and chat completions share."""

    unserved = GENERATION_FIELDS

    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with `stream`")
    n: Annotated[int, Field(ge=1)] | None = Field(None, description="independent answers per prompt, 1 by default")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(None, description="largest number of tokens of an answer")
    return_token_ids: bool | None = Field(None, description="answer with the token ids too, as vLLM does")
    on_new_version: OnNewVersion | None = Field(
        None,
        description="when the adapter's name moves: `keep`, `continue` or `restart`; see rollouts.md",
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="write the tokens of log probabilities as `token_id:<id>`"
    )
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="log probabilities of the prompt's tokens, with so many alternatives (-1: all tokens), as vLLM "
        "writes them; not with `stream`",
    )
    logprob_token_ids: Annotated[list[TokenId], FIRST, Field(max_length=MAX_LOGPROB_TOKEN_IDS)] | None = Field(
        None, description="with `logprobs`: the alternatives are these tokens and the one that is chosen"
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] | None = Field(
        None, description="number of tokens of the prompt that are used; -1: as many as fit beside the answer"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="side at which `truncate_prompt_tokens` cuts: left, the default, keeps the last tokens"
    )

    response_format: ResponseFormat | None = Field(
        None, description="form of the answer: `text`, `json_object`, `json_schema` or `structural_tag`"
    )

    @model_validator(mode="after")
    def _check_stream(self) -> Generation:
        check_stream(self.stream, self.stream_options)
        if self.stream:
            check_streamed(self.on_new_version, self.prompt_logprobs, "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "`truncate_prompt_tokens` must be at least 1, or -1.")
        return self


def check_stream(stream: bool | None, options: StreamOptions | None) -> None:
    """Refuse options of a stream where none is asked for, but for `false`, as vLLM has it."""
    asked = {} if options is None else options.model_dump(exclude_unset=True)
    if not stream and any(value is not False for value in asked.values()):
        raise field_error("stream_options", "`stream_options` is only allowed with `stream`: true.")


def check_streamed(on_new_version: str | None, prompt_logprobs: int | None, field: str) -> None:
    """Refuse of a stream to discard tokens that its client has, and log probabilities of the prompt, asked for in the
    field."""
    if prompt_logprobs is not None:
        raise field_error(field, "`prompt_logprobs` is not available with `stream`; leave one of them out.")
    if on_new_version == "restart":
        raise field_error(
            "on_new_version",
            '`on_new_version`: "restart" discards tokens, which a stream has sent; leave out `stream`, or send '
            '"continue".',
        )


class CompletionRequest(Generation):
    """Body of POST /v1/completions.

    fills_context  whether an answer without `max_tokens` may have the rest of the context
    """

    fills_context: ClassVar[bool] = False

    prompt: str | Annotated[list[str], FIRST] | TokenIds | Annotated[list[TokenIds], FIRST] = Field(
        description="a text, texts, token ids, or lists of token ids"
    )
    echo: bool | None = Field(None, description="begin the answer with the prompt")
    logprobs: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="log probabilities, with so many alternatives (-1: all tokens); with `echo` of the prompt "
        f"too, up to {MAX_HELD_LOGPROBS} in all",
    )


class TemplateFields(Request):
    """Fields of the chat template, which renders messages."""

    reasoning_effort: str | None = Field(None, description=_REASONING_EFFORT)
    enable_thinking: bool | None = Field(
        None,
        description="whether to think first, for chat templates that take it; false for templates without thoughts too",
    )
    add_generation_prompt: bool | None = Field(None, description="true by default")
    continue_final_message: bool | None = Field(
        None, description="continue the last message instead of starting a new one"
    )
    chat_template_kwargs: TemplateVariables = Field(
        None, description="variables for the chat template, such as enable_thinking"
    )
    chat_template_name: str | None = Field(
        None,
        max_length=64,
        description="which of the model's named chat templates; default: `tool_use` with tools, else `default`",
    )
    tools: ToolList | None = Field(None, description=f"functions that the model may call, up to {MAX_TOOLS}")

    @model_validator(mode="after")
    def _check_template(self) -> TemplateFields:
        if self.tools:
            check_tools(self.tools)
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error(
                "continue_final_message",
                "`continue_final_message` and `add_generation_prompt` exclude each other; send one of them.",
            )
        return self


class ChatRequest(TemplateFields, Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST] = Field(description="the conversation so far")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="largest number of tokens of the answer; default: the rest of the context"
    )
    echo: bool | None = Field(None, description="begin the answer with the last message, if it is the assistant's")
    logprobs: bool | None = Field(None, description="log probabilities of the answer's tokens")
    top_logprobs: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="alternatives for each token (-1: all tokens); only with `logprobs`"
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="`auto`, the default where there are `tools`: the model chooses; `none`; `required`: one at least; "
        "the one that is named; or `allowed_tools`: some of them, with `mode` `auto` or `required`",
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; true by default")
    separate_reasoning: bool | None = Field(
        None, description="false: thoughts stay in `content`; true, the default: they are `reasoning_content`"
    )
    include_reasoning: bool | None = Field(None, description="false: leave `reasoning_content` out; true by default")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="left out: ask in the prompt")

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        check_tool_choice(self.tool_choice, self.tools)
        if self.max_tokens == 0:
            raise field_error("max_tokens", "`max_tokens` must be at least 1.")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise field_error("max_tokens", "`max_tokens` and `max_completion_tokens` differ; send one of them.")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "`top_logprobs` is only allowed with `logprobs`: true.")
        return self


class PooledRequest(Answering):
    """Base of requests for what is made of prompts' hidden states, or of one token's logits, without an answer."""

    unserved = EMBEDDING_FIELDS

    cache_salt: CacheSalt | None = Field(None, description="as for completions")
    add_special_tokens: bool | None = Field(None, description="add the tokenizer's own special tokens; true by default")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, json_schema_extra={"not": {"const": 0}})] | None = Field(
        None, description="number of tokens of each input that are used; -1: as many as the server holds"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="side at which inputs are cut: left, the default, keeps the last tokens"
    )

    @property
    def num_prompts(self) -> int:
        """Prompts that are run."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_truncation(self) -> PooledRequest:
        if self.truncate_prompt_tokens == 0:
            raise field_error("truncate_prompt_tokens", "`truncate_prompt_tokens` must be at least 1, or -1.")
        return self


PromptRequest = CompletionRequest | ChatRequest | PooledRequest


class BatchRequest(Request):
    """Body of POST /v1/completions/batch. Each item is checked by itself, so that one wrong item fails alone."""

    items: Annotated[list[Any], Field(min_length=1)] = Field(
        description="completion or chat completion requests, each with its own `model`, without `stream`"
    )


class TokenizeRequest(TemplateFields):
    """Body of POST /tokenize: a prompt, or messages with the fields of their template."""

    unserved = TOKENIZE_FIELDS

    model: str | None = Field(None, description="default: the base; an adapter may bring its own chat template")
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1), FIRST] | None = None
    add_special_tokens: bool | None = Field(None, description="true for prompts, false for messages by default")
    return_token_strs: bool | None = Field(None, description="answer with the tokens as the vocabulary spells them")

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise value_fault("send either `prompt` or `messages`")
        names = TemplateFields.model_fields
        if self.messages is None and any(getattr(self, name) for name in names):
            raise value_fault(f"{', '.join(f'`{name}`' for name in names)} are only allowed with `messages`")
        return self


class DetokenizeRequest(Request):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], FIRST, Field(max_length=MAX_DETOKENIZED)] = Field(
        description=f"token ids, up to {MAX_DETOKENIZED}"
    )
