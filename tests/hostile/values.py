"""What targets are tried with: mostly right, with a few things in it that are not."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from service.api.schema.messages import CountTokensRequest, MessagesRequest
from service.api.schema.pooled import (
    ClassifyRequest,
    EmbeddingRequest,
    InputRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from service.api.schema.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from service.api.schema.responses import ResponsesRequest
from tests.support.adapter_files import config_bytes, lora_tensors, modules_ending, safetensors_bytes, small_layout
from tests.support.http.uploads import CONFIG, TENSORS, multipart

LAYOUT = small_layout()
GOOD_TENSORS = safetensors_bytes(lora_tensors(LAYOUT, modules_ending(LAYOUT, "q_proj"), 4))

SPECIAL: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2,
    16,
    20,
    300,
    1 << 31,
    1 << 63,
    10**40,
    0.0,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "base",
    "base:shout",
    "shout",
    "\x00",
    "\ud800",
    "é" * 300,
    "a" * 5000,
    [],
    {},
    [[]],
    [0],
    [-1],
    [1, "a"],
    ["", "a"],
    ["a"] * 40,
    {"": ""},
    {"type": "text", "text": "a"},
    {"type": "json_object"},
    {"1": 1},
    {"x": float("nan")},
    "../../etc/passwd",
]
VALUES = st.recursive(
    st.sampled_from(SPECIAL) | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
GOOD_FIELDS: dict[str, Any] = {
    "model": "shout",
    "max_tokens": 3,
    "n": 2,
    "stream": True,
    "stop": ["a", "ab"],
    "logprobs": 2,
    "echo": True,
    "seed": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "logit_bias": {"5": 1.5},
    "prompt": ["a", "b"],
    "min_tokens": 1,
    "user": "me",
    "messages": [{"role": "user", "content": "a"}],
    "tokens": [1, 2],
    "return_token_strs": True,
    "stream_options": {"include_usage": True},
    "prompt_logprobs": 1,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1},
    "text_1": "a",
    "text_2": ["b", ""],
    "queries": ["a", "c"],
    "query": "a",
    "documents": ["b", {"text": "c"}],
    "top_n": 1,
    "max_tokens_per_doc": 1,
    "truncate_prompt_tokens": 200,
    "instruction": "a",
    "task": "embed",
}
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "x"]),
        st.sampled_from(["user", "assistant", "system", "tool", "developer", "", [{"type": "text", "text": "a"}]])
        | VALUES,
        max_size=4,
    ),
    max_size=4,
)
# Of Anthropic's API.
BLOCKS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "thinking", "tool_use", "tool_result", "tool_addition", "tool_removal", "image"]
        )
    },
    optional={
        "text": st.sampled_from(["a", "", "\x00"]) | VALUES,
        "thinking": st.sampled_from(["hm", "<think>"]) | VALUES,
        "id": st.just("c1") | VALUES,
        "name": st.just("add") | VALUES,
        "input": st.just({"a": 1}) | VALUES,
        "tool_use_id": st.just("c1") | VALUES,
        "content": st.sampled_from(["a", [{"type": "tool_reference", "tool_name": "add"}]]) | VALUES,
        "is_error": st.booleans() | VALUES,
        "tool": st.just({"type": "tool_reference", "name": "add"}) | VALUES,
    },
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.just("a") | st.lists(BLOCKS, max_size=3) | VALUES,
        }
    ),
    max_size=4,
)
ASKED: dict[str, st.SearchStrategy[Any]] = {
    "system": st.sampled_from(["a", [{"type": "text", "text": "a"}]]) | VALUES,
    "tools": st.lists(
        st.fixed_dictionaries(
            {"name": st.just("add") | VALUES, "input_schema": st.just({"type": "object"}) | VALUES},
            optional={"type": VALUES, "defer_loading": st.booleans(), "strict": st.booleans()},
        ),
        max_size=2,
    ),
    "tool_choice": st.fixed_dictionaries(
        {"type": st.sampled_from(["auto", "any", "tool", "none"])}, optional={"name": st.just("add") | VALUES}
    ),
    "thinking": st.fixed_dictionaries(
        {"type": st.sampled_from(["enabled", "disabled", "adaptive"])}, optional={"display": VALUES}
    ),
    "output_config": st.fixed_dictionaries({}, optional={"effort": VALUES, "format": VALUES}),
    "stop_sequences": st.lists(st.just("a") | VALUES, max_size=3),
    "stream": st.booleans(),
}
# Of the Responses API.
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
            ),
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.sampled_from(["a", [{"type": "input_text", "text": "a"}]]) | VALUES,
            "call_id": st.just("c1") | VALUES,
            "name": st.just("add") | VALUES,
            "arguments": st.sampled_from(["{}", '{"a', "\x00"]) | VALUES,
            "output": st.just("3") | VALUES,
        },
    ),
    max_size=4,
)
CONTINUED: dict[str, st.SearchStrategy[Any]] = {
    "previous_response_id": st.sampled_from(["resp_1", "resp_" + "0" * 32, "../x", "\x00"]) | VALUES,
    "store": st.booleans() | VALUES,
    "background": st.booleans() | VALUES,
}
SCHEMAS: dict[str, Any] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/classify": ClassifyRequest,
    "/pooling": PoolingRequest,
    "/v1/score": ScoreRequest,
    "/v2/rerank": RerankRequest,
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, Any]:
    """A request with a few right fields and a few that hold anything."""
    path = draw(st.sampled_from([*SCHEMAS, "/v1/completions/batch", "/v1/load_lora_adapter"]))
    schema = SCHEMAS.get(path, draw(st.sampled_from([CompletionRequest, ChatRequest])))
    names = sorted({*schema.model_fields, *schema.unserved})
    good = draw(st.sets(st.sampled_from([name for name in names if name in GOOD_FIELDS]), max_size=5))
    body = {name: GOOD_FIELDS[name] for name in sorted(good)}
    if schema in (MessagesRequest, CountTokensRequest):
        body |= {"max_tokens": 3, "messages": draw(st.just(GOOD_FIELDS["messages"]) | TURNS | MESSAGES)}
        body |= draw(st.fixed_dictionaries({}, optional=ASKED))
    elif schema is ResponsesRequest:
        body |= {"input": draw(st.just("a") | ITEMS), "max_output_tokens": 3}
        body |= draw(st.fixed_dictionaries({}, optional=CONTINUED))
    elif schema is ChatRequest:
        body["messages"] = draw(st.just(GOOD_FIELDS["messages"]) | MESSAGES)
    elif schema is CompletionRequest:
        body.setdefault("prompt", "a")
    elif issubclass(schema, InputRequest):
        body["input"] = draw(st.sampled_from(["a", ["a", "b"], [1, 2], [[3]]]) | VALUES)
    body |= draw(st.dictionaries(st.sampled_from(names) | st.text(max_size=8), VALUES, max_size=2))
    if path == "/v1/completions/batch":
        return path, {"items": [body] * draw(st.integers(0, 3))}
    if draw(st.integers(0, 19)) == 0:
        return path, draw(VALUES)
    return path, body


HEADER_NAMES = """content-type authorization x-request-id content-length expect origin accept range x-api-key
transfer-encoding cookie if-match if-none-match content-encoding x-forwarded-for"""
PATHS = """/v1/completions /tokenize /v1/models /v1/adapters /v1/adapters/shout /v1/adapters/.. /metrics
/health /version /openapi.json /docs / /v1/models/ /v1/models/base // /tokenizer_info /v1/responses/resp_1
/v1/responses/x/input_items?limit=1&include[]=a /v1/responses/%00/cancel"""


def headers() -> st.SearchStrategy[Any]:
    """Methods, paths and heads; bytes as they come from the connection."""
    name = st.sampled_from(HEADER_NAMES.encode().split()) | st.binary(min_size=1, max_size=10).map(bytes.lower)
    value = st.sampled_from(
        [
            b"",
            b"0",
            b"-1",
            b"9" * 30,
            b"application/json",
            b"text/plain",
            b"multipart/form-data; boundary=",
            b"Bearer ",
            b"Bearer \xff\xfe",
            b"100-continue",
            b"*",
            b"bytes=0-",
            b"gzip",
            b"chunked",
            b"\xff" * 40,
            b"a" * 300,
        ]
    ) | st.binary(max_size=20)
    path = st.sampled_from(PATHS.split()) | st.text(max_size=12).map(lambda text: "/" + text)
    method = st.sampled_from(["GET", "POST", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "get", ""])
    return st.tuples(method, path, st.lists(st.tuples(name, value), max_size=5))


def configs() -> st.SearchStrategy[Any]:
    """adapter_config.json with a few fields that hold anything."""
    from adapters.peft.config import INERT, NOT_SUPPORTED

    known = ["r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"]
    known += ["layers_to_transform", "layers_pattern", "peft_type", *INERT, *NOT_SUPPORTED]
    names = ["q_proj", "model.layers.0.self_attn.q_proj", "", ".", "q_proj.", "é", "all-linear", "lm_head"]
    value = VALUES | st.sampled_from(names) | st.lists(st.sampled_from(names), max_size=4)
    value |= st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    good = json.loads(config_bytes())
    fields = st.dictionaries(st.sampled_from(known) | st.text(max_size=9), value, max_size=3)
    return fields.map(lambda given: good | given)


# Blanks are written as underscores, underscores as two tildes.
TEMPLATE_PIECES = """
{{_ _}} {%_for_m_in_messages_%} {%_endfor_%} {%_if_ _%} {%_endif_%} {%_set_x_=_ messages m m.content [0]
|tojson |string |list |map('upper') |join |reverse |attr('keys') .keys .~~~~class~~~~ |length {} [] _~_ _+_ _*_ 99 'a'
('a'_*_9) range(9) cycler(1) lipsum namespace(a=1) self loop strftime~~now('%Y') raise~~exception( ) x
.format( '{0.keys}' '%s'
{%_macro_f(a)_%} {%_endmacro_%} f( {%_generation_%} {%_endgeneration_%} |groupby('role') dict( bos~~token
{{_messages|tojson_}} {{_messages.keys_}} {{_messages|map('list')_}} |pprint |sort _ {{_messages[0].content_}}
"""


def templates() -> st.SearchStrategy[Any]:
    """Sources put together from what templates are made of; few of them are right."""
    piece = st.sampled_from([piece.replace("_", " ").replace("~~", "_") for piece in TEMPLATE_PIECES.split()])
    source = st.lists(piece | st.text(max_size=4), max_size=12).map("".join)
    part = st.text(max_size=9).map(lambda text: {"type": "text", "text": text})
    content = st.text(max_size=9) | st.lists(part, max_size=3)
    message = st.fixed_dictionaries({"role": st.text(max_size=9), "content": content})
    messages = st.lists(message, min_size=1, max_size=2)
    return st.tuples(source, messages, st.dictionaries(st.text(max_size=5), VALUES, max_size=2))


def stop_strings() -> st.SearchStrategy[Any]:
    """Few letters, so that they meet."""
    text = st.text(alphabet="abé\U0001f600", min_size=1, max_size=6)
    return st.tuples(st.lists(text, min_size=1, max_size=5), st.lists(text, max_size=12))


def uploads() -> st.SearchStrategy[Any]:
    """Parts in any order, with names, files and contents that are right or not."""
    disposition = st.sampled_from(
        [
            'name="name"',
            f'name="adapter_config"; filename="{CONFIG}"',
            f'name="adapter_model"; filename="{TENSORS}"',
            'name="archive"; filename="a.zip"',
            'name="chat_template"; filename="chat_template.jinja"',
            'name="../x"',
            'name="adapter_model"; filename="../../x.safetensors"',
            'name="x"; filename="pytorch_model.bin"',
            "",
            'name="',
            'name="tokenizer"; filename="tokenizer.json"',
            'name="added_tokens"; filename="added_tokens.json"',
        ]
    )
    content = st.sampled_from(
        [
            b"some",
            b"",
            b"..",
            b"base",
            b"a" * 200,
            b"\xff",
            config_bytes(),
            GOOD_TENSORS,
            b"{}",
            b"PK\x03\x04",
            b"\x1f\x8b",
            b"{{ messages.keys }}",
            b'{"a": 999}',
            b"\r\n--frontier",
            *archives(),
        ]
    ) | st.binary(max_size=30)
    return st.lists(st.tuples(disposition, content), max_size=4)


def archives() -> tuple[bytes, ...]:
    """A right one of each kind."""
    from tests.adapters.upload.test_archives import GOOD, tar_gz, zip_of

    return tar_gz(GOOD), zip_of(GOOD)


def a_body() -> bytes:
    """A right upload."""
    return multipart(
        [
            ('name="name"', b"some"),
            (f'name="adapter_config"; filename="{CONFIG}"', config_bytes()),
            (f'name="adapter_model"; filename="{TENSORS}"', GOOD_TENSORS[:300]),
        ]
    )


REQUESTS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
)
