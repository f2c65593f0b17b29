"""The table from errors to statuses is complete, and nothing of the inside gets out."""

from __future__ import annotations

import json

import pytest

from adapters import errors as store_errors
from service.api.errors import TABLE, ApiError, EngineFailed, NotReady, UnknownModel, error_body, status_of
from service.engine.ipc.link import EngineDied
from service.models.spec.config_json import ModelError
from service.tenants.limits import LimitReached
from service.text.template_sandbox import TemplateError
from service.text.tokenizer import TextError


def descendants(root: type[Exception]) -> set[type[Exception]]:
    return {root}.union(*(descendants(child) for child in root.__subclasses__()))


def test_every_error_of_a_request_has_a_row() -> None:
    trees = descendants(ApiError) | descendants(store_errors.AdapterError)
    trees |= descendants(TextError) | descendants(TemplateError)
    trees |= {LimitReached}
    # The roots are never raised; a dead engine and an unusable model are told by errors of the API.
    assert trees - {ApiError, store_errors.AdapterError} == set(TABLE)
    assert not set(TABLE) & {EngineDied, ModelError}


def test_every_row_is_an_error_in_openai_s_shape() -> None:
    for kind, answer in TABLE.items():
        problems = ((),) if kind is store_errors.BindingError else ()
        error = kind("A sentence.", *problems)
        body = error_body(error)
        assert 400 <= answer.status < 600
        assert body["error"]["message"] == str(error)
        # Damaged makes its sentence of a digest.
        assert "A sentence." in str(error)
        assert {"message", "type", "param", "code"} <= set(body["error"])


def test_a_subclass_without_a_row_is_our_bug_and_says_nothing() -> None:
    class New(UnknownModel):
        pass

    assert status_of(New("secret")) == 500
    assert "secret" not in str(error_body(New("secret")))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("The checkpoint in /srv/models/tiny has no config.json.", "The checkpoint in tiny has no config.json."),
        (
            "OSError: [Errno 2] No such file: '/srv/a.b/x.safetensors'",
            "OSError: [Errno 2] No such file: 'x.safetensors'",
        ),
        ("/data/store/: it is full.", ": it is full."),
        ("The engine sleeps; POST /wake_up wakes it.", "The engine sleeps; POST /wake_up wakes it."),
        ("GET /v1/models/x lists 3/4 of https://a.b/c/d.", "GET /v1/models/x lists 3/4 of https://a.b/c/d."),
    ],
)
def test_what_the_engine_says_names_no_directory(said: str, told: str) -> None:
    for kind in (NotReady, EngineFailed):
        assert error_body(kind(said))["error"]["message"] == told
    assert error_body(UnknownModel(said))["error"]["message"] == said, "the client's own words"


@pytest.mark.parametrize("error", [RuntimeError("/root/secret"), KeyError("token"), AssertionError("x")])
def test_unexpected_errors_keep_their_words(error: Exception) -> None:
    assert status_of(error) == 500
    assert str(error) not in error_body(error)["error"]["message"]


def test_what_is_not_unicode_in_a_message_is_replaced() -> None:
    assert error_body(UnknownModel("a\ud800b"))["error"]["message"] == "a?b"
    assert error_body(UnknownModel("x", param="a\ud800b"))["error"]["param"] == "a?b"


def test_what_is_not_unicode_in_a_problem_is_replaced() -> None:
    body = error_body(store_errors.BindingError("x", (("layer\ud800", "no \udfff module"),)))
    assert body["error"]["problems"] == [{"name": "layer?", "reason": "no ? module"}]
    json.dumps(body, ensure_ascii=False).encode()
