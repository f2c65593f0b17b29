"""Names to targets and messages to tokens, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters import errors as store_errors
from service.api import tokenize as tokenize_module
from service.api.admission import Target, chat_prompt, resolve
from service.api.errors import BadRequest, UnknownModel, status_of
from service.api.schemas import ChatMessage, TokenizeRequest
from service.api.state import Services
from service.text.chat_template import ChatTemplate
from service.text.template_worker import AdapterTemplate, TemplateWorker

LONG = "x" * 100_000
SETTINGS = SimpleNamespace(base_name="tiny")


class EmptyStore:
    """No adapter at all."""

    def lease(self, name: str) -> Any:
        raise store_errors.NotFound(name)


class Words:
    """A tokenizer that notes in which threads it works; a token for each character."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()
        self.num_names = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.current_thread())
        return [ord(char) + add_special_tokens for char in text]

    def token_name(self, token_id: int) -> str:
        self.threads.add(threading.current_thread())
        self.num_names += 1
        return chr(token_id)


def services(**parts: Any) -> Services:
    """As much of `Services` as a test needs."""
    return cast(Services, SimpleNamespace(**{"settings": SETTINGS, "store": None, **parts}))


@pytest.mark.parametrize(("model", "adapter_id"), [("gpt-4", None), ("tiny:gpt-4", None), ("tiny", "gpt-4")])
def test_without_lora_any_other_model_is_unknown(model: str, adapter_id: str | None) -> None:
    with pytest.raises(
        UnknownModel, match=r"gpt-4` does not exist: LoRA is off.*--adapter-row-bytes above 0"
    ) as caught:
        resolve(services(), model, adapter_id)
    assert status_of(caught.value) == 404
    assert caught.value.param == ("adapter_id" if adapter_id else "model")
    assert resolve(services(), "tiny").digest is None


@pytest.mark.parametrize("store", [None, EmptyStore()], ids=["LoRA off", "LoRA on"])
@pytest.mark.parametrize("adapter_id", [None, LONG], ids=["model", "adapter_id"])
def test_a_long_name_is_cut_in_the_answer(store: EmptyStore | None, adapter_id: str | None) -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve(services(store=store), "tiny" if adapter_id else LONG, adapter_id)
    assert len(caught.value.message) < 500
    assert "x" * 200 + "…" in caught.value.message
    with pytest.raises(BadRequest) as two_names:
        resolve(services(store=store), LONG, LONG + "y")
    assert len(two_names.value.message) < 600


def render(source: str | None) -> tuple[list[str], Words]:
    """A chat with an adapter that brings this template, or none: names of the rendering threads, and the tokenizer."""
    threads: list[str] = []
    worker = TemplateWorker()

    def noting(call: Callable[..., str]) -> Callable[..., str]:
        def noted(*args: Any, **options: Any) -> str:
            threads.append(threading.current_thread().name)
            return call(*args, **options)

        return noted

    template: ChatTemplate | AdapterTemplate
    template = ChatTemplate("{{ messages[0].content }}", {}) if source is None else AdapterTemplate(worker, source, {})
    template.render = noting(template.render)  # type: ignore[method-assign]
    manifest = SimpleNamespace(has_chat_template=source is not None)
    lease = SimpleNamespace(record=SimpleNamespace(digest="d", manifest=manifest))
    words = Words()
    parts = services(
        store=EmptyStore(),
        template=template if source is None else None,
        tokenizer=words,
        adapter_template=lambda _digest: template if source is not None else None,
        template_worker=worker,
    )
    messages = [ChatMessage(role="user", content="hi")]
    none: dict[str, Any] = dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "variables", "add_special_tokens")
    )
    asyncio.run(chat_prompt(parts, Target("a", cast(Any, lease)), messages, **none))
    worker.close()
    return threads, words


def test_an_adapter_s_own_template_renders_in_a_thread_of_its_own() -> None:
    """It may take its second, and the next one waits for it: not in a thread that uploads and other chats need."""
    threads, words = render("OWN {{ messages[0].content }}")
    assert [name.rpartition("_")[0] for name in threads] == ["adapter-template"]
    assert words.threads == {threading.main_thread()}


def test_an_adapter_without_a_template_takes_the_way_of_the_base() -> None:
    threads, _ = render(None)
    assert threads == [threading.main_thread().name]


@pytest.mark.parametrize("wanted", [False, True])
def test_the_names_of_tokens_are_looked_up_when_asked_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    words = Words()
    parts = services(tokenizer=words, engine=SimpleNamespace(ready=None))
    monkeypatch.setattr(tokenize_module, "services_of", lambda _request: parts)
    body = TokenizeRequest(prompt=LONG, add_special_tokens=False, return_token_strs=wanted)
    answer = asyncio.run(tokenize_module.tokenize(cast(Any, None), body))
    assert answer.token_strs == (list(LONG) if wanted else None)
    assert words.num_names == (len(LONG) if wanted else 0)
    assert threading.main_thread() not in words.threads
