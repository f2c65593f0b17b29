"""Limits on a request's answers: stop strings, lists of tokens, and one grammar from all fields that constrain them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from service.api.admission.rendering import is_format_idle, shown_tools
from service.api.errors import BadRequest, quoted
from service.api.schema.error_messages import out_of_vocabulary
from service.api.schema.requests import ChatRequest, Generation
from service.api.schema.response_formats import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from service.api.schema.tools import AllowedToolsChoice, callable_tools, may_skip_calls, tools_chars
from service.api.state import Services
from service.engine.ipc.messages import Ready
from service.fairness.thread_pool import run_in_thread
from service.grammars.constraints import (
    Constraint,
    ConstraintError,
    choice_constraint,
    schema_constraint,
    tag_constraint,
    text_constraint,
)
from service.grammars.tool_calls import Beside, lark_of_calls, lark_of_thoughts
from service.text.answer_reader import ParserConfig
from service.text.stop_strings import StopAutomaton
from service.text.tokenizer import TextTokenizer

# Characters of a request's stop strings together; the automaton takes about 150 bytes for each.
MAX_STOP_CHARS = 4096
# A character of a stop string, in the automaton, as much as so many of a text that is tokenised.
_STOP_CHARS = 10
# Characters of a request's bad words together: each step looks for their tokens.
MAX_BAD_CHARS = 4096
_JSON_OBJECT = {"type": "object"}
_Makes = Callable[[], Constraint | None]


@dataclass(frozen=True)
class TokenLists:
    """See `Sampling`, whose fields these are. The default allows everything."""

    allowed_tokens: bytes = b""
    bad_words: tuple[tuple[int, ...], ...] = ()

    def leave_a_token(self, barred: Iterable[int], vocab_size: int) -> bool:
        """Whether a token can be chosen wherever the bad words bar what they can, and these tokens are barred too."""
        gone = {*barred, *(word[-1] for word in self.bad_words)}
        if not self.allowed_tokens:
            return len(gone) < vocab_size
        bits = bytearray(self.allowed_tokens)
        for token_id in gone:
            if token_id >> 3 < len(bits):
                bits[token_id >> 3] &= ~(1 << (token_id & 7))
        return any(bits)


@dataclass(frozen=True)
class AnswerConstraints:
    """Limits on the answers, for all sequences of a request."""

    stop: StopAutomaton
    lists: TokenLists
    grammar: str | None


async def constraints_of(
    services: Services, ready: Ready, request: Generation, reading: ParserConfig
) -> AnswerConstraints:
    """All limits on the request's answers, which `reading` parses. BadRequest names a wrong field."""
    stop = stop_strings(request)
    automaton = await run_in_thread(partial(StopAutomaton, stop), size_chars=_STOP_CHARS * sum(map(len, stop)))
    lists = await run_in_thread(
        partial(token_lists, request, services.tokenizer, ready.vocab_size), size_chars=num_list_chars(request)
    )
    return AnswerConstraints(automaton, lists, await requested_grammar(services, request, reading))


def stop_strings(request: Generation) -> tuple[str, ...]:
    """The `stop` field as a tuple. BadRequest if the texts are too long together."""
    if request.stop is None:
        return ()
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    num_chars = sum(map(len, stop))
    if num_chars > MAX_STOP_CHARS:
        raise BadRequest(
            f"`stop` has {num_chars} characters in all; this server takes {MAX_STOP_CHARS}. Send shorter texts, or "
            "fewer.",
            param="stop",
        )
    return stop


def num_list_chars(request: Generation) -> int:
    """About the characters that `token_lists` has to handle, for `run_in_thread`."""
    return len(request.allowed_token_ids or ()) + 2 * sum(map(len, request.bad_words or ()))


def token_lists(request: Generation, tokenizer: TextTokenizer, vocab_size: int) -> TokenLists:
    """BadRequest names a wrong field."""
    return TokenLists(_allowed(request, vocab_size), _bad_words(request, tokenizer, vocab_size))


def _allowed(request: Generation, vocab_size: int) -> bytes:
    token_ids = request.allowed_token_ids
    if token_ids is None:
        return b""
    highest = max(token_ids)
    if highest >= vocab_size:
        raise out_of_vocabulary("allowed_token_ids", highest, vocab_size)
    bits = bytearray(highest // 8 + 1)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def _bad_words(request: Generation, tokenizer: TextTokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as a text begins with it, and as it stands behind a space."""
    words = request.bad_words or []
    num_chars = sum(map(len, words))
    if num_chars > MAX_BAD_CHARS:
        raise BadRequest(
            f"`bad_words` has {num_chars} characters in all; this server takes {MAX_BAD_CHARS}. Send shorter texts, or "
            "fewer.",
            param="bad_words",
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        first, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not first or max(first + spaced) >= vocab_size:
            raise BadRequest(
                f"`bad_words` holds {quoted(word)!r}, which has no tokens of this model.", param="bad_words"
            )
        found[first] = None
        # Where the space is a token by itself, the word behind it is the same as without.
        if spaced[-len(first) :] != first:
            found[spaced] = None
    return tuple(found)


async def requested_grammar(services: Services, request: Generation, reading: ParserConfig) -> str | None:
    """The grammar that the request's answers must follow, which are read so; None if they are free. BadRequest for one
    that cannot be followed, or takes too much, or for several."""
    said = request.closes_objects
    closes_objects = services.settings.disable_additional_properties if said is None else said
    asked = _asked(request, closes_objects=closes_objects)
    if len(asked) > 1:
        names = " and ".join(f"`{name}`" for name, _ in asked)
        raise BadRequest(f"{names} are both given; send one of them.", param=asked[1][0])
    field, makes = asked[0] if asked else ("tools", lambda: None)
    try:
        constraint = makes()
        if isinstance(request, ChatRequest):
            special_ids = services.tokenizer.special_id_of
            work = partial(chat_constraint, request, reading, constraint, special_ids, closes_objects=closes_objects)
            constraint = await run_in_thread(work, size_chars=tools_chars(shown_tools(request)))
    except ConstraintError as error:
        raise bad_constraint(error, field) from error
    return None if constraint is None else await compiled(services, constraint, field)


async def compiled(services: Services, constraint: Constraint, field: str) -> str:
    """The constraint's grammar, for `Sampling.grammar`, once it has been tried. BadRequest about `field` if it cannot
    be followed, or takes too much."""
    trial = services.grammar_trial
    known = trial.known(constraint)
    if known is not None:
        services.metrics.grammars.labels("known").inc()
        return known
    try:
        grammar = await asyncio.wrap_future(trial.submit(constraint))
    except ConstraintError as error:
        services.metrics.grammars.labels("refused").inc()
        raise bad_constraint(error, field) from error
    services.metrics.grammars.labels("compiled").inc()
    return grammar


def bad_constraint(error: ConstraintError, field: str) -> BadRequest:
    """The BadRequest for an invalid constraint."""
    return BadRequest(f"`{field}` {error}.", param=field)


def _asked(request: Generation, *, closes_objects: bool) -> list[tuple[str, _Makes]]:
    """(field, what makes the constraint of it), of all that constrain the answer."""
    asked = _asked_by_format(request, closes_objects=closes_objects)
    options = request.structured_outputs or StructuredOutputs()
    whitespace = "" if options.disable_any_whitespace else options.whitespace_pattern
    schemas = (
        ("structured_outputs.json", options.json_, whitespace),
        ("structured_outputs.json_object", _JSON_OBJECT if options.json_object else None, whitespace),
        ("guided_json", request.guided_json, request.guided_whitespace_pattern),
        ("json_schema", request.json_schema, None),
    )
    for field, schema, pattern in schemas:
        if schema is not None:
            asked.append((field, partial(schema_constraint, schema, pattern, closes_objects=closes_objects)))
    _refuse_idle_whitespace(request, {field for field, schema, _ in schemas if schema is not None})
    for field, regex in (
        ("structured_outputs.regex", options.regex),
        ("guided_regex", request.guided_regex),
        ("regex", request.regex),
    ):
        if regex is not None:
            asked.append((field, partial(text_constraint, "regex", regex)))
    for field, choices in (("structured_outputs.choice", options.choice), ("guided_choice", request.guided_choice)):
        if choices is not None:
            asked.append((field, partial(choice_constraint, choices)))
    for field, grammar in (
        ("structured_outputs.grammar", options.grammar),
        ("guided_grammar", request.guided_grammar),
        ("ebnf", request.ebnf),
    ):
        if grammar is not None:
            asked.append((field, partial(text_constraint, "grammar", grammar)))
    if options.structural_tag is not None:
        makes = partial(tag_constraint, options.structural_tag, closes_objects=closes_objects)
        asked.append(("structured_outputs.structural_tag", makes))
    return asked


def _refuse_idle_whitespace(request: Generation, fields: set[str]) -> None:
    """BadRequest where white space is spoken of and no JSON beside it; `fields` are the schemas that there are."""
    options = request.structured_outputs or StructuredOutputs()
    is_spoken_of = options.whitespace_pattern is not None or options.disable_any_whitespace
    if is_spoken_of and not any(field.startswith("structured_outputs.") for field in fields):
        raise BadRequest(
            "`structured_outputs` says what white space may be and has no `json` or `json_object`; send one, or leave "
            "it out.",
            param="structured_outputs",
        )
    if request.guided_whitespace_pattern is not None and "guided_json" not in fields:
        raise BadRequest(
            "`guided_whitespace_pattern` is about `guided_json`; send both, or leave it out.",
            param="guided_whitespace_pattern",
        )


def _asked_by_format(request: Generation, *, closes_objects: bool) -> list[tuple[str, _Makes]]:
    if isinstance(request, ChatRequest) and is_format_idle(request):
        return []
    match request.response_format:
        case JsonObjectFormat():
            return [("response_format", partial(schema_constraint, _JSON_OBJECT))]
        case JsonSchemaFormat(json_schema=named):
            makes = partial(schema_constraint, named.schema_, closes_objects=closes_objects)
            return [("response_format.json_schema.schema", makes)]
        case StructuralTagFormat() as tag:
            plain: dict[str, Any] = tag.model_dump(by_alias=True, exclude_none=True)
            return [("response_format", partial(tag_constraint, plain, closes_objects=closes_objects))]
    return []


def chat_constraint(
    request: ChatRequest,
    reading: ParserConfig,
    answer: Constraint | None,
    special_ids: Mapping[str, int],
    *,
    closes_objects: bool = True,
) -> Constraint | None:
    """The constraint on a chat's answer, with thoughts before it where the model thinks; None where answers are free.
    ConstraintError for tools that are too large for a grammar, BadRequest for a call and another constraint at once.

    `required`, a named tool and a choice among some of the tools are enforced with all schemas. Where the model
    chooses, a tool that is `strict` has all calls enforced. An answer that is constrained may be calls instead.

    answer       what other fields of the request constrain the answer to
    special_ids  ids of the special tokens by their texts
    closes_objects  of the tools' arguments, as `schema_constraint` does
    """
    choice = request.tool_choice
    tools = callable_tools(shown_tools(request), choice)
    thoughts = {"thinks": reading.thinks, "is_thinking": reading.is_thinking}
    if reading.calls is None:
        if answer is None or not reading.thinks:
            return answer
        return replace(answer, around=lark_of_thoughts(special_ids, is_thinking=reading.is_thinking))
    is_free = may_skip_calls(choice)
    if answer is not None and not is_free:
        raise BadRequest(
            "`tool_choice` asks for a call, and another field says what the answer must be; send one of them.",
            param="tool_choice",
        )
    is_enforced = isinstance(choice, AllowedToolsChoice) or any(tool.function.strict for tool in tools)
    if answer is None and is_free and not is_enforced:
        return None
    beside: Beside = "answer" if answer is not None else "text" if is_free else None
    lark = lark_of_calls(
        reading.calls.name,
        [(tool.function.name, tool.schema_of_arguments) for tool in tools],
        special_ids,
        beside=beside,
        is_several=reading.max_calls is None,
        closes_objects=closes_objects,
        **thoughts,
    )
    constraint = text_constraint("lark", lark)
    return constraint if answer is None else replace(answer, around=lark)
