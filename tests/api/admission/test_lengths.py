"""How long a text may be before anybody looks for its tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from service.api.admission.prompts import MAX_TEXT_CHARS, refuse_hopeless
from service.api.errors import BadRequest
from service.api.schema.requests import ChatRequest, TokenizeRequest

CHAT = ChatRequest(model="base", messages=[{"role": "user", "content": "x"}])
TOKENIZE = TokenizeRequest(messages=[{"role": "user", "content": "x"}])


def services(context_tokens: int | None, most_chars: int | None) -> Any:
    ready = None
    if context_tokens is not None:
        ready = SimpleNamespace(max_model_len_tokens=context_tokens, kv_capacity_tokens=10 * context_tokens)
    return SimpleNamespace(
        engine=SimpleNamespace(ready=ready), tokenizer=SimpleNamespace(max_chars_per_token=most_chars)
    )


@pytest.mark.parametrize("request_", [CHAT, TOKENIZE], ids=["chat", "tokenize"])
@pytest.mark.parametrize(
    ("context_tokens", "most_chars", "longest"),
    [
        (None, 20, MAX_TEXT_CHARS),
        (2048, None, MAX_TEXT_CHARS),  # any number of characters may be one token
        (2048, 20, 2048 * 20),
        (2048, 1000, MAX_TEXT_CHARS),
        (131_072, 1000, 131_072 * 16),
        (131_072, 4, 131_072 * 4),
    ],
)
def test_a_text_has_a_bound_whatever_the_vocabulary_is(
    request_: Any, context_tokens: int | None, most_chars: int | None, longest: int
) -> None:
    these = services(context_tokens, most_chars)
    refuse_hopeless(these, request_, "x" * longest, "messages")
    with pytest.raises(BadRequest, match=rf"The prompt has {longest + 1} characters, .*shorten it\.$") as caught:
        refuse_hopeless(these, request_, "x" * (longest + 1), "messages")
    assert caught.value.param == "messages"
