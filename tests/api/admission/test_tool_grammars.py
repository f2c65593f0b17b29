"""Calls that are enforced: whatever the model would rather say, what comes is a call that its tool's schema allows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
import transformers

from service.api.admission.answer_constraints import chat_constraint
from service.api.schema.requests import ChatRequest
from service.grammars.constraints import ConstraintError, grammar_of, text_constraint
from service.grammars.matching import TokenTable, compile_grammar
from service.grammars.tool_calls import lark_of_calls
from service.text.answer_reader import AnswerReader, ParserConfig, Said, Thought
from service.text.calls.call import Call
from service.text.calls.formats import FORMATS
from service.text.tokenizer import TextTokenizer
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server
from tests.support.http.tool_templates import SPECIAL_TOKENS, TEMPLATES
from tests.support.http.uploads import parts_of
from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import CHAT_TEMPLATE, VOCAB_SIZE, make_tokenizer

SCHEMAS: dict[str, dict[str, Any]] = {
    "calculate": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 999},
            "op": {"enum": ["+", "-", 'it\'s "x"']},
            "how": {"$ref": "#/$defs/How"},
        },
        "required": ["a", "how"],
        "$defs": {
            "How": {"type": "object", "properties": {"exact": {"type": "boolean"}}, "additionalProperties": False}
        },
    },
    "now": {"type": "object", "properties": {}},
    "wait": {
        "type": "object",
        "properties": {"seconds": {"enum": [1, 2.5]}, "why": {"enum": ["x", None, ["y", {"z": True}]]}},
    },
}
# Arguments that cannot be written one by one.
OTHER: dict[str, dict[str, Any]] = {
    "any-of": {"type": "object", "properties": {"a b": {"const": 1}}, "required": ["a b"]},
    "v1.now": {"type": "object", "properties": {"x": {"const": "é"}}, "additionalProperties": False},
}
MAX_TOKENS = 400
ASK: list[Any] = [{"role": "user", "content": "go on"}]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], TextTokenizer]:
    """By format and whether its marks and those of thoughts are special tokens."""
    made = {}
    for name in FORMATS:
        for is_special in (False, True):
            directory = tmp_path_factory.mktemp("tokenizer")
            make_tokenizer(directory)
            fast = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
            marks = [*SPECIAL_TOKENS[name], "<think>", "</think>"] if is_special else []
            fast.add_special_tokens({"additional_special_tokens": marks})
            fast.save_pretrained(directory)
            made[name, is_special] = TextTokenizer.load(directory)
    return made


def walks(tokenizer: TextTokenizer, lark: str, number: int) -> Iterator[str]:
    """Answers that follow a grammar, chosen at random, special tokens more often than others; those that come to an
    end."""
    table = TokenTable(tokenizer, VOCAB_SIZE)
    pristine = compile_grammar(table, grammar_of(text_constraint("lark", lark), tokenizer.special_id_of))
    rng = random.Random(lark)
    for _ in range(number):
        matcher, token_ids = pristine.deep_copy(), list[int]()
        while not matcher.is_stopped() and len(token_ids) < MAX_TOKENS:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE].nonzero()[0].tolist()
            marks = [token_id for token_id in allowed if token_id in tokenizer.special_ids]
            token_id = rng.choice(marks if marks and rng.random() < 0.4 else allowed)
            if token_id in table.eos_token_ids:
                break
            assert matcher.consume_token(token_id)
            token_ids.append(token_id)
        if len(token_ids) < MAX_TOKENS:
            yield tokenizer.decode(token_ids, skip_special_tokens=False)


def read(text: str, name: str, tools: dict[str, Any], **more: bool) -> list[Said]:
    reader = AnswerReader(ParserConfig(calls=FORMATS[name], tools=tools, **more))
    return [*reader.push(text), *reader.finish()]


def check(calls: list[Call], tools: dict[str, Any]) -> None:
    for call in calls:
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, tools[call.name])
        assert set(arguments) <= set(tools[call.name]["properties"])


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("tools", [SCHEMAS, OTHER, SCHEMAS | OTHER], ids=["plain", "other", "both"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_answer_of_the_grammar_is_calls(
    tokenizers: dict[tuple[str, bool], TextTokenizer], name: str, tools: dict[str, Any], is_special: bool
) -> None:
    tokenizer = tokenizers[name, is_special]
    lark = lark_of_calls(name, list(tools.items()), tokenizer.special_id_of)
    called, several = set(), 0
    for text in walks(tokenizer, lark, 40):
        said = read(text, name, tools)
        calls = [one for one in said if isinstance(one, Call)]
        assert calls == said, text
        check(calls, tools)
        called |= {call.name for call in calls}
        several += len(calls) > 1
    assert called == set(tools)
    assert bool(several) == (name != "llama3_json")


@pytest.mark.parametrize("name", FORMATS)
def test_open_arguments_may_have_others(tokenizers: dict[tuple[str, bool], TextTokenizer], name: str) -> None:
    """By the server's setting, or since the schema says so; written as the format writes all others."""
    unsaid = {"type": "object", "properties": {"a": {"type": "integer"}, "b/": {"type": "string"}}, "required": ["a"]}
    if name == "lfm2":  # whose calls are Python's
        unsaid["properties"] = {"a": {"type": "integer"}, "b": {"type": "string"}}
    calls = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1, "x": "y"}}\n</tool_call>',
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=x>\ny\n</parameter>\n"
        "</function>\n</tool_call>",
        "llama3_json": '{"name": "f", "parameters": {"a": 1, "x": "y"}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1, "x": "y"}}]',
        "lfm2": '<|tool_call_start|>[f(a=1, x="y")]<|tool_call_end|>',
    }
    tokenizer, text = tokenizers[name, False], calls[name]
    (call,) = read(text, name, {"f": unsaid})
    assert isinstance(call, Call) and json.loads(call.arguments) == {"a": 1, "x": "y"}

    def fits(schema: dict[str, Any], **how: bool) -> bool:
        return follows(tokenizer, lark_of_calls(name, [("f", schema)], {}, **how), text)

    assert not fits(unsaid)
    assert fits(unsaid, closes_objects=False)
    assert fits({**unsaid, "additionalProperties": True})
    assert not fits({**unsaid, "additionalProperties": False}, closes_objects=False)
    opened = {"f": {**unsaid, "additionalProperties": True}}
    for walked in walks(tokenizer, lark_of_calls(name, list(opened.items()), {}, is_several=False), 20):
        (call,) = read(walked, name, opened)
        assert isinstance(call, Call), walked
        jsonschema.validate(json.loads(call.arguments), opened["f"])


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_one(tokenizers: dict[tuple[str, bool], TextTokenizer], name: str) -> None:
    lark = lark_of_calls(name, list(SCHEMAS.items()), {}, is_several=False)
    assert {len(read(text, name, SCHEMAS)) for text in walks(tokenizers[name, False], lark, 20)} == {1}


@pytest.mark.parametrize("is_thinking", [False, True], ids=["may think", "is thinking"])
@pytest.mark.parametrize("name", FORMATS)
def test_thoughts_come_first(tokenizers: dict[tuple[str, bool], TextTokenizer], name: str, is_thinking: bool) -> None:
    tokenizer = tokenizers[name, True]
    how = {"thinks": True, "is_thinking": is_thinking}
    lark = lark_of_calls(name, list(SCHEMAS.items()), tokenizer.special_id_of, **how)
    texts = list(walks(tokenizer, lark, 40))
    assert any("</think>" in text for text in texts)
    for text in texts:
        said = read(text, name, SCHEMAS, **how)
        assert isinstance(said[-1], Call), text
        assert all(isinstance(one, Call | Thought) for one in said)


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_free_answer_holds_no_wrong_call(
    tokenizers: dict[tuple[str, bool], TextTokenizer], name: str, is_special: bool
) -> None:
    tokenizer = tokenizers[name, is_special]
    lark = lark_of_calls(name, list(SCHEMAS.items()), tokenizer.special_id_of, beside="text")
    num_calls = num_texts = 0
    for text in walks(tokenizer, lark, 60):
        said = read(text, name, SCHEMAS)
        check([one for one in said if isinstance(one, Call)], SCHEMAS)
        assert all(FORMATS[name].marks[0] not in one for one in said if isinstance(one, str))
        num_calls += any(isinstance(one, Call) for one in said)
        num_texts += any(isinstance(one, str) for one in said)
    assert num_texts
    assert num_calls or not (is_special and SPECIAL_TOKENS[name])


def follows(tokenizer: TextTokenizer, lark: str, text: str) -> bool:
    """Whether a text is an answer of the grammar, whole."""
    table = TokenTable(tokenizer, VOCAB_SIZE)
    matcher = compile_grammar(table, grammar_of(text_constraint("lark", lark), tokenizer.special_id_of)).deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(
        matcher.validate_tokens(token_ids) == len(token_ids)
        and matcher.consume_tokens(token_ids)
        and matcher.is_accepting()
    )


_CALL = '{"name": "calculate", "parameters": {"a": 1, "how": {}}}'
_NO_CALL = '{"name": "calculate", "parameters": {"a": "x"}}'


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (f"Wait: {_CALL} done", 1),
        (f"<|python_tag|>{_CALL}; {_CALL}", 2),
        ('{"name":"now","arguments":{}}', 1),
        ('{\n  "type": "function",\n  "name": "now",\n  "parameters": {}\n}', 1),
        ('{"name": "Bob", "name": "now", "parameters": {}} and {"a": {"name": 1}}', 0),
        ("As {JSON} has it: {} and { and", 0),
        (_NO_CALL, None),
        (f"Wait: {_NO_CALL}", None),
        (f"<|python_tag|>{_NO_CALL}", None),
        ('<|python_tag|>{"name": "Bob", "parameters": {}}', None),
        ('<|python_tag|>print("x")', None),
        (_NO_CALL.replace("cal", "c\\u0061l"), None),
        (_NO_CALL.replace('{"name', '{ \n"name'), None),
        ('{"parameters": {"a": "x"}, "name": "calculate"}', None),
        ('{"arguments":{"a": "x"}, "name": "calculate"}', None),
        ('{"function": "calculate", "parameters": {"a": "x"}}', None),
        ('{"type": "function", "name": "calculate", "parameters": {"a": "x"}}', None),
        ('{"type": "x", "name": "calculate", "parameters": {"a": "x"}}', None),
    ],
)  # fmt: skip
def test_calls_without_a_mark_are_enforced_among_texts(
    tokenizers: dict[tuple[str, bool], TextTokenizer], text: str, num_calls: int | None, is_special: bool
) -> None:
    tokenizer = tokenizers["llama3_json", is_special]
    tools = list(SCHEMAS.items())
    for is_several in (False, True):
        lark = lark_of_calls("llama3_json", tools, tokenizer.special_id_of, beside="text", is_several=is_several)
        may_come = num_calls is not None and (is_several or num_calls < 2)
        assert follows(tokenizer, lark, text) == may_come
    calls = [one for one in read(text, "llama3_json", SCHEMAS) if isinstance(one, Call)]
    if num_calls is None:
        assert "print" in text or calls  # what is forbidden would have been one
    else:
        assert len(calls) == num_calls
        check(calls, SCHEMAS)


_TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "value", "read_as"),
    [
        (_TEXT, "two\n lines, <b> </function> and 5", ...),
        (_TEXT, "", ...),
        (_TEXT, "\n\n", ...),
        ({**_TEXT, "maxLength": 3}, "é\n1", ...),
        ({**_TEXT, "maxLength": 3}, "four", None),
        ({**_TEXT, "minLength": 2}, "1", None),
        ({**_TEXT, "enum": ["5", "a\nb"], "default": "5"}, "a\nb", ...),
        ({**_TEXT, "enum": ["5", "a\nb"]}, "6", None),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, '"5"', None),
        ({"type": "array", "items": _TEXT}, '["x", "1"]', ["x", "1"]),
        ({"anyOf": [_TEXT, {"type": "null"}]}, '"5"', "5"),
        ({"anyOf": [_TEXT, {"type": "null"}]}, "null", None),
        ({"anyOf": [_TEXT, {"type": "null"}]}, "5", None),
    ],
    ids=str,
)
def test_a_text_is_written_without_quotes_in_xml(
    tokenizers: dict[tuple[str, bool], TextTokenizer], schema: dict[str, Any], value: str, read_as: Any
) -> None:
    tools = {"f": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    tokenizer = tokenizers["qwen3_coder", False]
    does = follows(tokenizer, lark_of_calls("qwen3_coder", list(tools.items()), {}), text)
    assert does == (read_as is not None or value == "null")
    if does:
        assert read(text, "qwen3_coder", tools) == [
            Call("f", json.dumps({"x": value if read_as is ... else read_as}, ensure_ascii=False))
        ]


def test_a_tool_that_xml_cannot_write_is_called_in_json(tokenizers: dict[tuple[str, bool], TextTokenizer]) -> None:
    tokenizer = tokenizers["qwen3_coder", False]
    for schema in ({**_TEXT, "pattern": "^a+$"}, {**_TEXT, "const": "</parameter>"}, {**_TEXT, "format": "date"}):
        tool = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        lark = lark_of_calls("qwen3_coder", [("f", tool), ("now", SCHEMAS["now"])], {})
        assert not follows(
            tokenizer, lark, "<tool_call>\n<function=f>\n<parameter=x>\naa\n</parameter>\n</function>\n</tool_call>"
        )
        assert follows(tokenizer, lark, "<tool_call>\n<function=now>\n</function>\n</tool_call>")
    lark = lark_of_calls(
        "qwen3_coder", [("f", {"type": "object", "properties": {"x": {**_TEXT, "pattern": "^a+$"}}})], {}
    )
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "aa"}}\n</tool_call>'
    assert follows(tokenizer, lark, text)
    assert read(text, "qwen3_coder", {"f": {}}) == [Call("f", '{"x": "aa"}')]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_coder"])
def test_a_grammar_is_bounded_while_it_is_made(name: str) -> None:
    """The rule of each parameter has all definitions: this one would have ten million characters."""
    tool = {
        "type": "object",
        "properties": {f"x{number}": {} for number in range(1000)},
        "$defs": {"Long": {"description": "long " * 2000}},
    }
    with pytest.raises(ConstraintError, match="needs a grammar of more than 262144 characters"):
        lark_of_calls(name, [("f", tool)], {})


TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"leaf": {"type": "integer"}, "inner": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["leaf"],
}
_TREE = '{"leaf": 1, "inner": [{"leaf": 2, "inner": []}]}'
_NO_TREE = '{"leaf": 1, "inner": [[]]}'


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>'),
        ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": ARGUMENTS}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]'),
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": ARGUMENTS}]<|tool_call_end|>'),
    ],
)
def test_a_tool_whose_schema_holds_itself_means_the_whole_of_it(
    tokenizers: dict[tuple[str, bool], TextTokenizer], name: str, call: str
) -> None:
    tokenizer = tokenizers[name, False]
    lark = lark_of_calls(name, [("f", TREE)], {})
    assert follows(tokenizer, lark, call.replace("ARGUMENTS", _TREE))
    assert not follows(tokenizer, lark, call.replace("ARGUMENTS", _NO_TREE))
    assert read(call.replace("ARGUMENTS", _TREE), name, {"f": TREE}) == [Call("f", _TREE)]


# ---- over HTTP, with the engine


@pytest.fixture(scope="module")
def roomy(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With room for tools in the prompt, and an adapter of each format's name that speaks it."""
    with running_server(checkpoints.endless_base, tmp_path_factory.mktemp("roomy"), model_name=BASE) as running:
        for name, source in {**TEMPLATES, "generic": CHAT_TEMPLATE}.items():
            files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", source.encode())}
            running.post("/v1/adapters", data={"name": name}, files=files).raise_for_status()
        yield running


@pytest.fixture(scope="module")
def talk(roomy: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=roomy.openai_url, api_key="unused", max_retries=0, timeout=LIMIT_SECONDS) as made:
        yield made


each_format = pytest.mark.parametrize("speaker", sorted(TEMPLATES))
# Long calls: the wide tier has the formats whose calls are JSON as hermes's are, but for their marks.
SPEAKERS = [
    pytest.param(name, marks=pytest.mark.wide if name in ("llama3_json", "mistral") else ())
    for name in sorted(TEMPLATES)
]
each_served_format = pytest.mark.parametrize("speaker", SPEAKERS)
# And a template that shows no tools.
each_speaker = pytest.mark.parametrize("speaker", [*SPEAKERS, "generic"])


def tools_of(schemas: dict[str, Any], **more: Any) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **more}}
        for name, schema in schemas.items()
    ]


def called(message: Any) -> list[Call]:
    return [Call(call.function.name, call.function.arguments) for call in message.tool_calls]


def test_tokens_of_a_chat_are_counted_with_its_tools(roomy: Server) -> None:
    body = {"model": "hermes", "messages": ASK}
    bare, shown = (roomy.post("/tokenize", json=body | more).json() for more in ({}, {"tools": tools_of(SCHEMAS)}))
    text = roomy.post("/detokenize", json={"tokens": shown["tokens"]}).json()["prompt"]
    assert shown["count"] > bare["count"]
    assert json.dumps(SCHEMAS["calculate"]) in text
    refused = roomy.post("/tokenize", json={"prompt": "x", "tools": tools_of(SCHEMAS)})
    assert (refused.status_code, "only allowed with `messages`" in refused.text) == (400, True)


@each_speaker
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_required_calls_come(talk: openai.OpenAI, speaker: str, stream: bool) -> None:
    asked: Any = {
        "model": speaker, "messages": ASK, "tools": tools_of(SCHEMAS), "tool_choice": "required",
        "parallel_tool_calls": False, "max_tokens": 300, "temperature": 1,
    }  # fmt: skip
    names = set()
    for seed in range(2):
        if stream:
            with talk.chat.completions.stream(**asked, seed=seed) as events:
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = talk.chat.completions.create(**asked, seed=seed).choices[0]
        assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
        assert len(choice.message.tool_calls) == 1
        check(called(choice.message), SCHEMAS)
        names |= {call.name for call in called(choice.message)}
    assert names <= set(SCHEMAS)


@each_speaker
def test_a_named_tool_is_called_once(talk: openai.OpenAI, speaker: str) -> None:
    for name in SCHEMAS:
        answer: Any = talk.chat.completions.create(
            model=speaker,
            messages=ASK,
            tools=tools_of(SCHEMAS),
            tool_choice={"type": "function", "function": {"name": name}},
            max_tokens=300,
            n=2,
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert [call.name for call in called(choice.message)] == [name]
            check(called(choice.message), SCHEMAS)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """The choice among these tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@each_served_format
def test_one_of_the_allowed_tools_is_called_though_the_template_shows_all(talk: openai.OpenAI, speaker: str) -> None:
    asked: Any = {
        "model": speaker, "messages": ASK, "tools": tools_of(SCHEMAS), "max_tokens": 300, "temperature": 1, "seed": 1,
        "parallel_tool_calls": False,
    }  # fmt: skip
    among_all = talk.chat.completions.create(**asked | {"max_tokens": 1}, tool_choice="required")
    for name in SCHEMAS:
        answer: Any = talk.chat.completions.create(**asked, tool_choice=allowed("required", name))
        assert answer.usage.prompt_tokens == among_all.usage.prompt_tokens
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert [call.name for call in called(choice.message)] == [name]
        check(called(choice.message), SCHEMAS)


@each_format
def test_beside_text_no_tools_but_those_that_are_allowed_can_be_called(speaker: str) -> None:
    fields: Any = {"messages": ASK, "tools": tools_of(SCHEMAS), "tool_choice": allowed("auto", "now")}
    given = chat_constraint(ChatRequest(**fields), ParserConfig(calls=FORMATS[speaker]), None, {})
    among_one = lark_of_calls(speaker, [("now", SCHEMAS["now"])], {}, beside="text")
    assert given == text_constraint("lark", among_one)


@each_served_format
def test_arguments_are_streamed_as_they_are_written(talk: openai.OpenAI, speaker: str) -> None:
    asked: Any = {
        "model": speaker, "messages": ASK, "tools": tools_of(SCHEMAS), "max_tokens": 300, "seed": 1,
        "tool_choice": {"type": "function", "function": {"name": "calculate"}},
    }  # fmt: skip
    with talk.chat.completions.stream(**asked) as events:
        pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
        (call,) = called(events.get_final_completion().choices[0].message)
    assert "".join(pieces) == call.arguments
    # A piece for each token, or where a format's values are not JSON's for each value.
    assert len([piece for piece in pieces if piece]) >= 3
    check([call], SCHEMAS)


@each_served_format
def test_a_batch_enforces_each_item_s_own(roomy: Server, speaker: str) -> None:
    items = [
        {"model": speaker, "messages": ASK, "tools": tools_of({name: SCHEMAS[name]}), "tool_choice": "required",
         "parallel_tool_calls": False, "max_tokens": 300}
        for name in SCHEMAS
    ]  # fmt: skip
    answers = roomy.post("/v1/completions/batch", json={"items": items}).json()["items"]
    names = [answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] for answer in answers]
    assert names == list(SCHEMAS)


@each_format
def test_strict_tools_leave_the_choice_to_the_model(talk: openai.OpenAI, speaker: str) -> None:
    answer: Any = talk.chat.completions.create(
        model=speaker,
        messages=ASK,
        tools=tools_of(SCHEMAS, strict=True),
        max_tokens=20,
        extra_body={"min_tokens": 20},  # the model says anything, and an end is one of it
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999983}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "strnig"}}},
        {"type": "object", "properties": {"a": {"$ref": "https://example.com/x.json"}}},
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}},
    ],
    ids=lambda schema: str(schema)[:60],
)
@pytest.mark.parametrize("speaker", ["hermes", "lfm2"])
def test_a_schema_that_cannot_be_followed_is_refused(talk: openai.OpenAI, speaker: str, schema: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        talk.chat.completions.create(model=speaker, messages=ASK, tools=tools_of({"f": schema}), tool_choice="required")
    assert caught.value.param == "tools"
    assert caught.value.body["message"].startswith("`tools` ")  # type: ignore[index]


@each_format
def test_strict_is_looked_at_where_the_model_chooses(talk: openai.OpenAI, speaker: str) -> None:
    """Only what is enforced can be refused for that it cannot be."""
    asked: Any = {"model": speaker, "messages": ASK, "max_tokens": 2}
    backwards = {
        "f": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}, "required": ["a"]}
    }
    assert talk.chat.completions.create(**asked, tools=tools_of(backwards)).choices
    with pytest.raises(openai.BadRequestError, match="`tools` "):
        talk.chat.completions.create(**asked, tools=tools_of(backwards, strict=True))


ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@each_served_format
def test_an_answer_in_a_format_may_be_a_call_instead(talk: openai.OpenAI, speaker: str) -> None:
    kinds = set()
    answer: Any = talk.chat.completions.create(
        model=speaker, messages=ASK, tools=tools_of(SCHEMAS), response_format=FORMAT, max_tokens=400, seed=0, n=4,
        parallel_tool_calls=False, temperature=1.5, extra_body={"repetition_penalty": 1.5},
    )  # fmt: skip
    for choice in answer.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            check(called(choice.message), SCHEMAS)
        else:
            jsonschema.validate(json.loads(choice.message.content), ANSWER)
    assert kinds <= {"stop", "tool_calls"}


def test_what_answers_do_without_is_named(roomy: Server) -> None:
    """As OpenAI's Codex CLI asks."""
    given = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    function = {"type": "function", "name": "f", "parameters": given, "strict": False}
    others = [
        {"type": "namespace", "name": "n", "description": "x", "tools": [function]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ]
    body = {
        "model": "hermes", "input": "x", "tools": [function, *others], "tool_choice": "auto", "max_output_tokens": 4,
        "reasoning": {"effort": "medium", "summary": "auto"}, "client_metadata": {"x-codex-installation-id": "1"},
    }  # fmt: skip
    rest = "tools[1] (namespace), tools[2] (web_search), tools[3] (custom)"
    named = f"client_metadata, reasoning.summary, {rest}, reasoning.effort"
    for stream in (False, True):
        answer = roomy.post("/v1/responses", json={**body, "stream": stream})
        assert (answer.status_code, answer.headers.get("X-Multilora-Left-Out")) == (200, named), answer.text
    alone = {name: value for name, value in body.items() if name not in ("reasoning", "client_metadata")}
    known = roomy.post("/v1/responses", json={**alone, "tools": [function]})
    assert "X-Multilora-Left-Out" not in known.headers
    seen = {"model": "hermes", "messages": ASK, "max_tokens": 4}
    nested = {"type": "function", "function": {"name": "f", "parameters": given}}
    chats = [roomy.post("/v1/chat/completions", json={**seen, "tools": [nested, *more]}) for more in ([], others)]
    assert chats[0].json()["usage"]["prompt_tokens"] == chats[1].json()["usage"]["prompt_tokens"]
    assert chats[1].headers["X-Multilora-Left-Out"] == rest


@each_served_format
def test_a_format_beside_a_call_that_must_come_is_left_out(roomy: Server, speaker: str) -> None:
    tools, form = tools_of(SCHEMAS), {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    name = next(iter(SCHEMAS))
    body = {"model": speaker, "messages": ASK, "tools": tools, "max_tokens": 300, "response_format": form}
    choice = {"type": "function", "function": {"name": name}}
    answer = roomy.post("/v1/chat/completions", json={**body, "tool_choice": choice})
    assert (answer.status_code, answer.headers["X-Multilora-Left-Out"]) == (200, "response_format")
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == name
    flat = {
        "model": speaker, "input": "x", "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "tool_choice": {"type": "function", "name": name}, "max_output_tokens": 300,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}},
    }  # fmt: skip
    answer = roomy.post("/v1/responses", json=flat)
    assert (answer.status_code, answer.headers["X-Multilora-Left-Out"]) == (200, "text.format")
    assert answer.json()["output"][0]["name"] == name


@pytest.mark.parametrize("field", ["guided_regex", "guided_choice"])
def test_a_constraint_and_a_call_that_must_come_exclude_each_other(talk: openai.OpenAI, field: str) -> None:
    values: dict[str, Any] = {"guided_regex": "a+", "guided_choice": ["a"]}
    body = {field: values[field]}
    asked: Any = {"model": "hermes", "messages": ASK, "tools": tools_of(SCHEMAS), "extra_body": body}
    with pytest.raises(openai.BadRequestError, match="`tool_choice` asks for a call, and another field"):
        talk.chat.completions.create(**asked, tool_choice="required")
    assert talk.chat.completions.create(**asked, max_tokens=200, seed=1).choices[0].finish_reason in (
        "stop", "length", "tool_calls",
    )  # fmt: skip


@pytest.mark.parametrize("begins", [False, True], ids=["may think", "is thinking"])
@pytest.mark.parametrize("body", [{"guided_regex": "[ab]{3}"}, {"response_format": FORMAT}], ids=["regex", "schema"])
def test_thoughts_stay_free_before_a_constrained_answer(
    roomy: Server, talk: openai.OpenAI, checkpoints: Checkpoints, begins: bool, body: dict[str, Any]
) -> None:
    thought = "<think>\n" if begins else ""
    source = CHAT_TEMPLATE.replace("assistant\n{% endif %}", f"assistant\n{thought}{{% endif %}}") + "{# </think> #}"
    files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", source.encode())}
    name = f"thinker-{begins}"
    roomy.post("/v1/adapters", data={"name": name}, files=files).raise_for_status()
    # Thoughts of a model that knows no end of them are long: those that come to one are looked at.
    biased = {str(byte): 8 for byte in token_ids_of(roomy, "</think>")}
    answer = talk.chat.completions.create(
        model=name, messages=ASK, max_tokens=200, logit_bias=biased, seed=0, n=2, extra_body=body, temperature=1
    )
    for choice in answer.choices:
        message: Any = choice.message
        assert message.content or choice.finish_reason == "length"
        if choice.finish_reason == "stop" and "guided_regex" in body:
            assert re.fullmatch("[ab]{3}", message.content)
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(message.content), ANSWER)
        if begins:
            assert message.reasoning_content or choice.finish_reason == "stop"


def token_ids_of(server: Server, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(server.post("/tokenize", json=body).json()["tokens"])
