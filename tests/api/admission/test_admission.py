"""Names to targets and messages to tokens, without a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest

from adapters.files.name_versions import NameRecord, Version
from kernels.sampling.parameters import ScoredToken
from service.api.admission import plans
from service.api.admission.model_resolution import Part, ResolvedModel, resolve
from service.api.admission.pipeline import admit, reserve
from service.api.admission.plans import NEUTRAL
from service.api.admission.prompts import Prompt, tokenized
from service.api.admission.rendering import rendered
from service.api.errors import BadRequest, BodyTooLarge, QueueFull, UnknownModel, status_of
from service.api.generation.sequence import OutputChunk
from service.api.queue_limits import QueueLimits
from service.api.routes import batch, chat, completions
from service.api.routes import tokenize as tokenize_module
from service.api.schema.pooled import EmbeddingRequest
from service.api.schema.requests import (
    BatchRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from service.api.state import Services
from service.engine.ipc.messages import Ready
from service.tenants.keys_file import Limits
from service.tenants.limits import Tenant
from service.tenants.tenants import Caller, Tenants
from service.text.chat_template import ChatTemplate
from service.text.template_worker import AdapterTemplate, TemplateWorkers
from tests.support.limits import LIMIT_SECONDS

CALLER = Tenants().anybody()
LONG = "x" * 100_000
SETTINGS = SimpleNamespace(
    on_new_version="keep",
    base_name="tiny",
    tool_parser="auto",
    reasoning_parser="auto",
    disable_additional_properties=False,
)


class EmptyStore:
    """No adapter at all."""

    def find(self, name: str) -> None:
        """It has none."""


class Words:
    """A tokenizer that notes in which threads it works; a token for each character."""

    max_chars_per_token = None
    vocab_size = 900
    eos_token_ids = ()
    special_ids: frozenset[int] = frozenset()
    special_id_of: Mapping[str, int] = MappingProxyType({})
    special_tokens: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()
        self.num_names = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.current_thread())
        return [ord(char) + add_special_tokens for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        self.threads.add(threading.current_thread())
        return "".join(chr(token_id) for token_id in token_ids if token_id < self.vocab_size)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def token_name(self, token_id: int) -> str:
        self.threads.add(threading.current_thread())
        self.num_names += 1
        return chr(token_id)


def services(**parts: Any) -> Services:
    """As much of `Services` as a test needs."""
    return cast(Services, SimpleNamespace(**{"settings": SETTINGS, "store": None, "tenants": Tenants(), **parts}))


@pytest.mark.parametrize(("model", "adapter_id"), [("gpt-4", None), ("tiny:gpt-4", None), ("tiny", "gpt-4")])
def test_without_lora_any_other_model_is_unknown(model: str, adapter_id: str | None) -> None:
    with pytest.raises(
        UnknownModel, match=r"gpt-4` does not exist: LoRA is off.*--adapter-row-bytes above 0"
    ) as caught:
        resolve(services(), CALLER, model, adapter_id)
    assert status_of(caught.value) == 404
    assert caught.value.param == ("adapter_id" if adapter_id else "model")
    assert resolve(services(), CALLER, "tiny").digest is None


@pytest.mark.parametrize("store", [None, EmptyStore()], ids=["LoRA off", "LoRA on"])
@pytest.mark.parametrize("adapter_id", [None, LONG], ids=["model", "adapter_id"])
def test_a_long_name_is_cut_in_the_answer(store: EmptyStore | None, adapter_id: str | None) -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve(services(store=store), CALLER, "tiny" if adapter_id else LONG, adapter_id)
    assert len(caught.value.message) < 500
    assert "x" * 200 + "…" in caught.value.message
    with pytest.raises(BadRequest) as two_names:
        resolve(services(store=store), CALLER, LONG, LONG + "y")
    assert len(two_names.value.message) < 600


def render(source: str | None) -> tuple[list[str], Words]:
    """A chat with an adapter that brings this template, or none: names of the rendering threads, and the tokenizer."""
    threads: list[str] = []
    workers = TemplateWorkers()

    def noting(call: Callable[..., str]) -> Callable[..., str]:
        def noted(*args: Any, **options: Any) -> str:
            threads.append(threading.current_thread().name)
            return call(*args, **options)

        return noted

    template: ChatTemplate | AdapterTemplate
    template = ChatTemplate("{{ messages[0].content }}", {}) if source is None else AdapterTemplate(workers, source, {})
    template.render = noting(template.render)  # type: ignore[method-assign]
    manifest = SimpleNamespace(digest="d", has_chat_template=source is not None, special_tokens={})
    record: Any = SimpleNamespace(digest="d", manifest=manifest)
    words = Words()
    parts = services(
        store=EmptyStore(),
        templates={"default": template} if source is None else {},
        tokenizer=words,
        adapter_templates=lambda _digest, _tokens: {"default": template},
        template_workers=workers,
        template_lock=lambda _digest: asyncio.Lock(),
        engine=SimpleNamespace(ready=None),
    )

    async def prompt() -> None:
        await tokenized(
            parts, a_chat("a"), await rendered(parts, ResolvedModel("a", "a", "d", (Part(record, "a"),)), a_chat("a"))
        )

    asyncio.run(prompt())
    workers.close()
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
    parts = services(tokenizer=words, engine=SimpleNamespace(ready=None), calls=QueueLimits(1))
    monkeypatch.setattr(tokenize_module, "services_of", lambda _request: parts)
    body = TokenizeRequest(prompt=LONG, add_special_tokens=False, return_token_strs=wanted)
    stays = cast(Any, SimpleNamespace(receive=lambda: asyncio.Event().wait(), scope={"multilora.caller": CALLER}))
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def ask() -> None:
        answer = await tokenize_module.tokenize(stays, body)
        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, stays.receive, send)

    asyncio.run(ask())
    assert json.loads(b"".join(sent))["token_strs"] == (list(LONG) if wanted else None)
    assert words.num_names == (len(LONG) if wanted else 0)
    assert threading.main_thread() not in words.threads


READY = Ready(100, 100, 1000, 1, "float32", "cpu", 1)


class OneAdapter:
    """A store whose adapters all have a template of their own; counts the leases that are out."""

    def __init__(self) -> None:
        self.num_out, self.row_plan = 0, None

    def find(self, name: str) -> NameRecord:
        return NameRecord((Version(1, name, 0.0),))

    def lease(self, name: str) -> Any:
        self.num_out += 1
        none: dict[str, Any] = dict.fromkeys(("labels", "modules", "invocation", "eos_token_ids"), ())
        manifest = SimpleNamespace(**none, digest=name, has_chat_template=True, special_tokens={}, rows={})
        record = SimpleNamespace(name=name, digest=name, manifest=manifest, version=None)
        return SimpleNamespace(record=record, release=self._release)

    def _release(self) -> None:
        self.num_out -= 1


class Template:
    """Renders when `go` is set, and notes in which order."""

    def __init__(self) -> None:
        self.go, self.rendered = threading.Event(), list[str]()

    def of(self, digest: str) -> Any:
        def render(_messages: Any, **_options: Any) -> str:
            assert self.go.wait(LIMIT_SECONDS)
            self.rendered.append(digest)
            return "hi"

        return SimpleNamespace(render=render, source="")


@pytest.fixture
def template() -> Template:
    return Template()


@pytest.fixture
def full(template: Template) -> Iterator[Services]:
    """As much of `Services` as admission needs."""
    turns: dict[str, asyncio.Lock] = {}
    workers = TemplateWorkers()
    yield services(
        store=OneAdapter(),
        tokenizer=Words(),
        templates={},
        adapter_templates=lambda digest, _tokens: {"default": template.of(digest)},
        template_workers=workers,
        template_lock=lambda digest: turns.setdefault(digest, asyncio.Lock()),
        engine=SimpleNamespace(ready=READY, state="ready"),
        settings=SimpleNamespace(**vars(SETTINGS), max_choices=4, max_logprobs=20),
        queue=QueueLimits(30),
        require_ready=lambda: READY,
        sampling_defaults=NEUTRAL,
    )
    workers.close()


def test_a_sum_keeps_the_files_of_all_its_adapters_until_it_is_released(full: Services) -> None:
    """One adapter is named twice, and one adds nothing."""
    parts = [{"name": name, "weight": weight} for name, weight in (("a", 0.5), ("b", 2), ("a", 0.25), ("c", 0))]
    request = CompletionRequest.model_validate({"prompt": "hi", "max_tokens": 1, "adapters": parts})
    admitted = asyncio.run(admit(full, CALLER, request))
    assert [(part.shown_name, part.weight) for part in admitted.target.parts] == [("a", 0.75), ("b", 2.0)]
    store: Any = full.store
    assert store.num_out == 4
    admitted.release()
    assert store.num_out == 0


def a_chat(model: str, **fields: Any) -> ChatRequest:
    return ChatRequest(model=model, messages=[ChatMessage(role="user", content="hi")], **fields)


def nothing_is_held(parts: Services) -> bool:
    return parts.queue.num_open == CALLER.tenant.num_in_flight == 0 and cast(Any, parts.store).num_out == 0


def test_places_are_taken_before_any_text_is_looked_at(full: Services) -> None:
    full.queue.acquire(29, "tiny")
    with pytest.raises(QueueFull):
        asyncio.run(admit(full, CALLER, CompletionRequest(model="tiny", prompt=["a", "b"])))
    assert not cast(Any, full.tokenizer).threads
    full.queue.release(29, "tiny")
    assert nothing_is_held(full)


def test_requests_of_one_model_that_fill_the_queue_keep_no_other_out(full: Services) -> None:
    full.queue.acquire(30, "tiny")
    admitted = asyncio.run(admit(full, CALLER, CompletionRequest(model="own", prompt=["a"] * 15)))
    with pytest.raises(QueueFull):
        asyncio.run(admit(full, CALLER, CompletionRequest(model="own", prompt="a")))
    admitted.release()
    full.queue.release(30, "tiny")
    assert nothing_is_held(full)


def test_embeddings_hold_as_many_places_as_run_at_a_time_and_no_more_than_are_left(full: Services) -> None:
    admitted = asyncio.run(admit(full, CALLER, EmbeddingRequest(model="tiny", input=["a"] * 50)))
    assert full.queue.num_open == CALLER.tenant.num_in_flight == 30
    for plan in admitted.plans[:25]:
        admitted.end_one(plan, 0)
    assert full.queue.num_open == CALLER.tenant.num_in_flight == 25
    admitted.release()
    assert nothing_is_held(full)


def test_places_that_are_handed_over_are_given_back_once(full: Services) -> None:
    all_places = reserve(full, CALLER.tenant, 5, "tiny")
    part = all_places.split(2)
    all_places.release()
    assert full.queue.num_open == CALLER.tenant.num_in_flight == 2
    part.shrink(1)
    part.release()
    part.release()
    assert nothing_is_held(full)


@pytest.mark.parametrize("has_places", [False, True])
@pytest.mark.parametrize(
    "request_",
    [
        CompletionRequest(model="tiny", prompt=["a" * 101, "b"]),
        CompletionRequest(model="tiny", prompt=[[1], [1001]]),
        CompletionRequest(model="tiny", prompt=["", "a"], add_special_tokens=False),
    ],
    ids=["too long", "no such token", "empty"],
)
def test_what_is_refused_gives_its_places_back(full: Services, request_: CompletionRequest, has_places: bool) -> None:
    places = reserve(full, CALLER.tenant, 2, "tiny") if has_places else None
    with pytest.raises(BadRequest):
        asyncio.run(admit(full, CALLER, request_, places))
    assert nothing_is_held(full)


@pytest.mark.parametrize("prompt", [["a"] * 31, [""] * 10_000, [[]] * 10_000])
def test_more_prompts_than_there_are_places_are_not_even_tokenised(full: Services, prompt: Any) -> None:
    with pytest.raises(BadRequest, match="send fewer"):
        asyncio.run(admit(full, CALLER, CompletionRequest(model="tiny", prompt=prompt)))
    assert not cast(Any, full.tokenizer).threads
    assert nothing_is_held(full)


def test_a_text_that_can_never_fit_is_not_tokenised(full: Services) -> None:
    cast(Any, full.tokenizer).max_chars_per_token = 5
    with pytest.raises(BadRequest, match="501 characters"):
        asyncio.run(admit(full, CALLER, CompletionRequest(model="tiny", prompt="a" * 501)))
    assert not cast(Any, full.tokenizer).threads
    assert nothing_is_held(full)


@pytest.mark.parametrize("is_there", [True, False], ids=["engine ready", "engine gone meanwhile"])
def test_echo_tells_the_tokens_that_have_a_text(full: Services, is_there: bool) -> None:
    """An embedding is often larger than the vocabulary, whose other ids stand for nothing."""
    cast(Any, full.engine).ready = READY if is_there else None
    request = CompletionRequest(model="tiny", prompt=[ord("a"), 950, ord("b")], echo=True, max_tokens=1)
    admitted = asyncio.run(admit(full, CALLER, request))
    assert admitted.plans[0].prompt.text == "ab"
    admitted.release()


@pytest.mark.parametrize("prompt", [[1] * 101, [1, 1000]], ids=["too long", "no such token"])
def test_ids_that_are_refused_are_not_decoded(full: Services, prompt: list[int]) -> None:
    with pytest.raises(BadRequest):
        asyncio.run(admit(full, CALLER, CompletionRequest(model="tiny", prompt=prompt, echo=True)))
    assert not cast(Any, full.tokenizer).threads
    assert nothing_is_held(full)


@pytest.mark.parametrize("fields", [{"prompt": [[1] * 60] * 4}, {"prompt": [1] * 60, "n": 4}])
def test_log_probabilities_of_many_prompts_are_bounded(
    full: Services, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(plans, "MAX_HELD_LOGPROBS", (60 + 1) * 4 * 3)
    wanted = {"model": "tiny", "echo": True, "max_tokens": 1, **fields}
    asyncio.run(admit(full, CALLER, CompletionRequest(**wanted, logprobs=2))).release()
    with pytest.raises(
        BadRequest, match="976 log probabilities of prompts and answers; a request may have 732"
    ) as caught:
        asyncio.run(admit(full, CALLER, CompletionRequest(**wanted, logprobs=3)))
    assert caught.value.param == "logprobs"
    asyncio.run(admit(full, CALLER, CompletionRequest(**{**wanted, "echo": False}, logprobs=20))).release()
    assert nothing_is_held(full)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": "a", "n": 4, "logprobs": 4}, {"prompt": ["a", "b"], "n": 2, "logprobs": 4}],
    ids=["choices", "prompts"],
)
def test_log_probabilities_of_many_answers_are_bounded(
    full: Services, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(plans, "MAX_HELD_LOGPROBS", 10 * 4 * 5)
    wanted = {"model": "tiny", **fields}
    asyncio.run(admit(full, CALLER, CompletionRequest(**wanted, max_tokens=10))).release()
    with pytest.raises(BadRequest, match="220 log probabilities of prompts and answers; a request may have 200"):
        asyncio.run(admit(full, CALLER, CompletionRequest(**wanted, max_tokens=11)))
    # Those of a stream do not wait for the end, and one answer alone is counted as it comes.
    asyncio.run(admit(full, CALLER, CompletionRequest(**wanted, max_tokens=11, stream=True))).release()
    alone = {**wanted, "prompt": "a", "n": 1}
    asyncio.run(admit(full, CALLER, CompletionRequest(**alone, max_tokens=50))).release()
    assert nothing_is_held(full)


def test_log_probabilities_of_a_batch_are_bounded_together(full: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_HELD_LOGPROBS", 100)
    item = {"model": "tiny", "prompt": [1] * 29, "echo": True, "max_tokens": 1}
    items = [{**item, "logprobs": 3}, {**item, "logprobs": 0}, item, {**item, "logprobs": 1, "echo": False}]
    body = BatchRequest(items=[items[0], *items[1:], {}])
    first, *others = asyncio.run(batch.admit_all(full, CALLER, batch.parse_all(full, CALLER.tenant, body)))
    assert not isinstance(first, Exception)  # alone it may have as many as its prompt makes
    assert [isinstance(one, BadRequest) for one in others] == [True, False, True, True]
    assert "150 log probabilities" in str(others[0])
    assert full.queue.num_open == 2
    batch.release_all([first, *others])
    assert nothing_is_held(full)


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("num_tokens", [10, 10_000])
def test_many_log_probabilities_are_written_beside_the_loop(
    full: Services, monkeypatch: pytest.MonkeyPatch, is_chat: bool, num_tokens: int
) -> None:
    piece = OutputChunk(finish_reason="length", token_ids=[65] * num_tokens, text_offsets=[0] * num_tokens)
    piece.logprobs = [ScoredToken(65, -1.0, ((65, -1.0), (66, -2.0)))] * num_tokens

    class Ended:
        name, fingerprint = "tiny", "fp_0"
        plans = (SimpleNamespace(prompt=Prompt((1,), "a")),)
        runs = (SimpleNamespace(num_prompt_tokens=1),)
        num_completion_tokens, num_cached_tokens = num_tokens, 0

        async def collect(self) -> list[OutputChunk]:
            return [piece]

    cast(Any, full.tokenizer).token_bytes = lambda token_id: bytes([token_id])
    monkeypatch.setattr("service.api.routes.answer.GenerationJob", lambda *_, **_options: Ended())
    answer: Any
    if is_chat:
        answer = chat.ChatAnswer(full, a_chat("tiny", logprobs=True), cast(Any, None))
    else:
        answer = completions.CompletionAnswer(
            full, CompletionRequest(model="tiny", prompt=[1], logprobs=2), cast(Any, None)
        )
    whole = asyncio.run(answer.whole())
    logprobs = whole["choices"][0]["logprobs"]
    assert len(logprobs["content"] if is_chat else logprobs["tokens"]) == num_tokens
    assert (threading.main_thread() in cast(Any, full.tokenizer).threads) == (num_tokens == 10)


def test_chats_of_one_adapter_do_not_stand_in_the_way_of_another_s(full: Services, template: Template) -> None:
    async def run() -> None:
        many = [asyncio.create_task(admit(full, CALLER, a_chat("busy"))) for _ in range(20)]
        await asyncio.sleep(0)
        one = asyncio.create_task(admit(full, CALLER, a_chat("other")))
        await asyncio.sleep(0)
        template.go.set()
        for admitted in await asyncio.gather(one, *many):
            admitted.release()

    asyncio.run(run())
    assert template.rendered.index("other") <= 2
    assert len(template.rendered) == 21
    assert nothing_is_held(full)


def test_chats_of_one_tenant_do_not_stand_in_the_way_of_another_s(
    full: Services, template: Template, tmp_path: Path
) -> None:
    """However many adapters the one has."""
    path = tmp_path / "keys.toml"
    path.write_text("[tenants.acme]\n[tenants.zeta]\n")
    full.tenants = Tenants(keys_file=path)
    acme, zeta = (Caller(Tenant(name, Limits(), lambda: 0.0), frozenset({"admin"})) for name in ("acme", "zeta"))

    async def run() -> None:
        many = [asyncio.create_task(admit(full, acme, a_chat(f"acme/{index}"))) for index in range(20)]
        await asyncio.sleep(0)
        one = asyncio.create_task(admit(full, zeta, a_chat("zeta/other")))
        await asyncio.sleep(0)
        template.go.set()
        for admitted in await asyncio.gather(one, *many):
            admitted.release()

    asyncio.run(run())
    assert template.rendered.index("zeta/other") <= 2
    assert len(template.rendered) == 21


def test_a_chat_that_is_given_up_is_not_rendered(full: Services, template: Template) -> None:
    async def run() -> None:
        first, second = (asyncio.create_task(admit(full, CALLER, a_chat("busy"))) for _ in range(2))
        await asyncio.sleep(0)
        assert full.queue.num_open == 2
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert full.queue.num_open == 1
        template.go.set()
        (await first).release()

    asyncio.run(run())
    assert template.rendered == ["busy"]
    assert nothing_is_held(full)


def test_json_in_texts_is_bounded_over_all_messages(full: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's arguments are objects, so what a client kept as text is parsed."""
    monkeypatch.setattr("service.api.http.json_body.MAX_CONTAINERS", 10)
    full.templates = {"default": ChatTemplate("{{ messages | length }}", {})}

    def messages(num_lists: int) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": json.dumps({"a": [[]] * num_lists})}
        return [{"role": "assistant", "tool_calls": [{"function": function}]}] * 2

    asyncio.run(admit(full, CALLER, ChatRequest.model_validate({"model": "tiny", "messages": messages(3)}))).release()
    with pytest.raises(BodyTooLarge, match="more than 10 lists"):
        asyncio.run(admit(full, CALLER, ChatRequest.model_validate({"model": "tiny", "messages": messages(4)})))
    assert nothing_is_held(full)


def test_many_variables_of_a_template_are_handled_beside_the_loop(full: Services) -> None:
    template, threads = ChatTemplate("hi", {}), list[threading.Thread]()
    render = template.render

    def noted(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args, **options)

    template.render = noted  # type: ignore[method-assign]
    full.templates = {"default": template}
    for variables, is_beside in (({"a": [1] * 10_000}, True), ({"a": {"b": "c" * 30_000}}, True), ({"a": [1]}, False)):
        request = ChatRequest(model="tiny", messages=a_chat("tiny").messages, chat_template_kwargs=variables)
        asyncio.run(admit(full, CALLER, request)).release()
        assert (threads.pop() is not threading.main_thread()) == is_beside
