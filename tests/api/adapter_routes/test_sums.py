"""Sums of adapters over HTTP: where they can be asked for, what answers, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, wait_for
from tests.support.http.uploads import parts_of
from tests.support.models.tiny_models import make_adapter

SUM = [{"name": "alpha", "weight": 0.5}, {"name": "beta", "weight": -0.25}]
OF_LLAMA_CPP = [{"id": "beta", "scale": -0.25}, {"id": "alpha", "scale": 0.5}]
MESSAGES = [{"role": "user", "content": "the other day"}]
PROMPT = {"prompt": "the other day", "max_tokens": 6, "temperature": 0, "logprobs": 0, "return_token_ids": True}
NAMED = "alpha * 0.5 + beta * -0.25"


def ask(server: Server, body: dict[str, Any], path: str = "/v1/completions", **options: Any) -> Any:
    return server.http.post(server.url + path, json=body, **options)


def complete(server: Server, **body: Any) -> Any:
    answer = ask(server, {**PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return answer


def refusal(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def digest_of(server: Server, name: str) -> str:
    return str(server.http.get(f"{server.url}/v1/adapters/{name}").json()["digest"])


@pytest.fixture
def put(server: Server, request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Uploads a directory under a name of this test, or moves that; the names are deleted in the end."""
    names: set[str] = set()

    def upload(directory: Path, name: str = "own", *, templates: dict[str, str] | None = None) -> str:
        full_name = f"{re.sub(r'[^a-z]+', '-', request.node.name)}.{name}"
        names.add(full_name)
        files = parts_of(directory) | {key: (key, text.encode()) for key, text in (templates or {}).items()}
        answer = server.http.put(f"{server.url}/v1/adapters/{full_name}", files=files)
        assert answer.status_code in (200, 201), answer.text
        return full_name

    yield upload
    for name in names:
        server.http.delete(f"{server.url}/v1/adapters/{name}")


# ---- what answers


def test_all_ways_to_ask_for_a_sum_are_one(server: Server) -> None:
    asked: list[dict[str, Any]] = [
        {"model": SUM},
        {"model": [{"name": f"{BASE}:beta", "weight": -0.25}, {"name": "alpha@1", "weight": 0.5}]},
        {"adapters": SUM},
        {"model": BASE, "adapters": SUM[::-1], "lora": []},
        {"model": BASE, "lora": OF_LLAMA_CPP},
        {"model": [*SUM, {"name": "gamma", "weight": 0}]},
        {"model": [{"name": "alpha", "weight": 1}, {"name": "alpha", "weight": -0.5}, SUM[1]]},
    ]
    answers = [complete(server, **body).json() for body in asked]
    assert len({answer["system_fingerprint"] for answer in answers}) == 1
    assert all(answer["choices"][0]["token_ids"] == answers[0]["choices"][0]["token_ids"] for answer in answers)
    for other in ({"model": "alpha"}, {"model": "beta"}, {"model": BASE}, {"model": [SUM[0]]}):
        assert complete(server, **other).json()["system_fingerprint"] != answers[0]["system_fingerprint"]


def test_the_answer_names_all_adapters_with_their_versions_and_weights(server: Server) -> None:
    answer = complete(server, model=SUM)
    digests = [digest_of(server, name) for name in ("alpha", "beta")]
    assert answer.json()["model"] == NAMED
    told = f"alpha@1 sha256:{digests[0]} * 0.5 + beta@1 sha256:{digests[1]} * -0.25"
    assert answer.headers["X-Multilora-Adapter"] == told
    (line,) = wait_for(lambda: server.log_lines(answer.headers["X-Request-Id"]), "the request's line")
    assert (line["model"], line["version"]) == ("alpha+beta", f"alpha@1:{digests[0][:12]}+beta@1:{digests[1][:12]}")


def test_one_adapter_of_weight_1_is_that_adapter_and_of_weight_0_the_base(server: Server) -> None:
    for same, model in (
        ([{"name": "alpha"}], "alpha"),
        ([{"name": "alpha", "weight": 0.25}, {"name": "alpha", "weight": 0.75}], "alpha"),
        ([{"name": "beta", "weight": 0}, {"name": "alpha", "weight": 1.0}], "alpha"),
        ([{"name": "alpha", "weight": 0}], BASE),
        ([{"name": "alpha", "weight": 2}, {"name": "alpha", "weight": -2}], BASE),
    ):
        found, wanted = complete(server, model=same), complete(server, model=model)
        for field in ("model", "system_fingerprint"):
            assert found.json()[field] == wanted.json()[field]
        assert found.headers.get("X-Multilora-Adapter") == wanted.headers.get("X-Multilora-Adapter")


def test_every_route_that_generates_takes_sums(server: Server, client: openai.OpenAI) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "the", "max_tokens": 3}),
        ("/v1/responses", {"input": "the", "max_output_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/embeddings", {"input": "the"}),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES, MESSAGES], "max_tokens": 3}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}),
        ("/invocations", {"prompt": "the", "max_tokens": 3}),
    ]
    for path, body in bodies:
        for named in ({"model": SUM}, {"adapters": SUM}):
            answer = ask(server, {**body, **named}, path)
            assert answer.status_code == 200, (path, answer.text)
            assert answer.json()["model"] == NAMED, path
            assert " * 0.5 + beta@1 " in answer.headers["X-Multilora-Adapter"], path
    items = [{**PROMPT, "model": SUM}, {**PROMPT, "model": "alpha"}, {**PROMPT, "lora": [{"id": 0, "scale": 1}]}]
    batch = ask(server, {"items": items}, "/v1/completions/batch").json()["items"]
    assert [item.get("model") for item in batch] == [NAMED, "alpha", None]
    assert batch[2]["error"]["param"] == "lora[0].id"
    chat = client.chat.completions.create(model=SUM, messages=MESSAGES, max_tokens=3)  # type: ignore[call-overload]
    assert chat.model == NAMED
    counted = ask(server, {"messages": MESSAGES, "model": SUM}, "/v1/messages/count_tokens")
    assert counted.json()["input_tokens"] > 0


def test_metrics_count_all_sums_as_one(server: Server) -> None:
    before = server.metric("generation_tokens_total", adapter="sums:")
    for weight in (0.1, 0.2, 0.3):
        complete(server, model=[{"name": "alpha", "weight": weight}], ignore_eos=True)
    assert server.metric("generation_tokens_total", adapter="sums:") == before + 3 * PROMPT["max_tokens"]
    assert "*" not in re.sub(r"#.*", "", server.http.get(f"{server.url}/metrics").text)


# ---- names that move


def test_a_moved_name_makes_another_sum(server: Server, checkpoints: Checkpoints, put: Callable[..., str]) -> None:
    name = put(checkpoints.adapters / "beta")
    asked = [{"name": name, "weight": 0.5}, {"name": "gamma", "weight": 0.5}]
    before = complete(server, model=asked)
    assert put(checkpoints.spare) == name
    after = complete(server, model=asked)
    assert before.json()["system_fingerprint"] != after.json()["system_fingerprint"]
    assert f"{name}@2 sha256:" in after.headers["X-Multilora-Adapter"]
    earlier = complete(server, model=[{**asked[0], "name": f"{name}@1"}, asked[1]])
    assert earlier.json()["system_fingerprint"] == before.json()["system_fingerprint"]
    server.http.delete(f"{server.url}/v1/adapters/{name}")
    assert refusal(ask(server, {**PROMPT, "model": asked}))[:2] == (404, "model[0].name")


# ---- what is refused


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({"model": []}, "model", "empty"),
    "number": ({"model": 5}, "model", "valid string"),
    "names": ({"model": ["alpha"]}, "model[0]", "object"),
    "text-weight": ({"model": [{"name": "alpha", "weight": "1"}]}, "model[0].weight", "number"),
    "bool-weight": ({"adapters": [{"name": "alpha", "weight": True}]}, "adapters[0].weight", "number"),
    "huge-weight": ({"model": [{"name": "alpha", "weight": -100.5}]}, "model[0].weight", "equal to -100"),
    "no-name": ({"model": [{"weight": 1}]}, "model[0].name", "missing"),
    "empty-name": ({"adapters": [{"name": ""}]}, "adapters[0].name", "empty"),
    "misspelt": ({"model": [{"name": "alpha", "wieght": 1}]}, "model[0].wieght", "not a field"),
    "too-many": ({"model": [{"name": "alpha"}] * 9}, "model", "at most 8"),
    "base": ({"model": [{"name": BASE}, {"name": "alpha"}]}, "model[0].name", "is the base"),
    "index": ({"lora": [{"id": 0, "scale": 1.0}]}, "lora[0].id", "adapters have names here"),
    "no-scale": ({"lora": [{"id": "alpha"}]}, "lora[0].scale", "missing"),
    "two-lists": ({"adapters": SUM, "lora": OF_LLAMA_CPP}, "lora", "send one of them"),
    "list-and-list": ({"model": SUM, "adapters": SUM}, "adapters", "send one of them"),
    "list-and-id": ({"model": SUM, "adapter_id": "alpha"}, "adapter_id", "send one of them"),
    "name-and-list": ({"model": "alpha", "adapters": SUM}, "adapters", "send one of them"),
    "new-version": ({"model": SUM, "on_new_version": "continue"}, "on_new_version", "keep their versions"),
    "colon-and-list": ({"model": f"{BASE}:alpha", "lora": OF_LLAMA_CPP}, "lora", "send one of them"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_sum_is_refused(server: Server, case: str) -> None:
    body, param, words = BAD[case]
    status, found, message = refusal(ask(server, {**PROMPT, **body}))
    assert (status, found) == (400, param)
    assert words in message


@pytest.mark.parametrize("weight", ["NaN", "Infinity", "1e999", "-1e999", "1" + "0" * 400])
def test_weights_that_are_no_numbers_are_refused(server: Server, weight: str) -> None:
    content = f'{{"prompt": "a", "model": [{{"name": "alpha", "weight": {weight}}}]}}'
    headers = {"Content-Type": "application/json"}
    answer = server.http.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert refusal(answer)[:2] == (400, "model[0].weight")


def test_adapters_that_are_not_there_are_named(server: Server) -> None:
    for asked, param in (
        ({"model": [SUM[0], {"name": "nobody"}]}, "model[1].name"),
        ({"adapters": [{"name": "alpha@7", "weight": 0}]}, "adapters[0].name"),
        ({"lora": [{"id": "x" * 4000, "scale": 0.5}]}, "lora[0].id"),
    ):
        status, found, message = refusal(ask(server, {**PROMPT, **asked}))
        assert (status, found) == (404, param)
        assert "does not exist" in message and len(message) < 500


KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "tokens": {"trainable_token_indices": [5, 9]},
    "norm": {"modules_to_save": ["model.embedding_norm"]},
    "alora": {"alora_invocation_tokens": [7, 8]},
}


def test_adapters_that_cannot_be_added_up_are_named(
    server: Server, checkpoints: Checkpoints, tmp_path: Path, put: Callable[..., str]
) -> None:
    names = {}
    for seed, (kind, config) in enumerate(KINDS.items()):
        options = {"rank": 2, "target_modules": ["q_proj"], "seed": seed} | config
        names[kind] = put(make_adapter(checkpoints.base, tmp_path / kind, **options), kind)
    for kind, words in (("dora", "magnitudes"), ("tokens", "trained tokens"), ("norm", "norms")):
        for asked in ([{"name": names[kind], "weight": 0.5}], [{"name": names[kind]}, SUM[0]]):
            status, param, message = refusal(ask(server, {**PROMPT, "model": asked}))
            assert (status, param) == (400, "model")
            assert names[kind] in message and words in message
        assert complete(server, model=[{"name": names[kind]}]).json()["model"] == names[kind]
    status, _, message = refusal(ask(server, {**PROMPT, "adapters": [SUM[0], {"name": names["alora"]}]}))
    assert status == 400
    assert "alora_invocation_tokens" in message and "alpha" in message and names["alora"] in message
    invoked = complete(server, model=[{"name": names["alora"], "weight": 3}], prompt=[5, 7, 8, 9]).json()
    assert invoked["choices"][0]["token_ids"] != complete(server, prompt=[5, 7, 8, 9]).json()["choices"][0]["token_ids"]


def test_chats_of_adapters_with_different_templates_are_refused(
    server: Server, checkpoints: Checkpoints, put: Callable[..., str]
) -> None:
    template = {"chat_template": "{% for m in messages %}<{{ m.content }}>{% endfor %}"}
    own = put(checkpoints.spare, "own", templates=template)
    same = put(checkpoints.adapters / "beta", "same", templates=template)
    chat = {"messages": MESSAGES, "max_tokens": 2}
    status, param, message = refusal(
        ask(server, {**chat, "model": [SUM[0], {"name": own, "weight": 0.5}]}, "/v1/chat/completions")
    )
    assert (status, param) == (400, "messages")
    assert "'alpha'" in message and own in message and "/v1/completions" in message
    assert complete(server, model=[SUM[0], {"name": own, "weight": 0.5}]).status_code == 200
    both = [{"name": own, "weight": 0.5}, {"name": same, "weight": 0.5}]
    answer = ask(server, {**chat, "model": both}, "/v1/chat/completions")
    assert answer.status_code == 200, answer.text
    alone = ask(server, {**chat, "model": own}, "/v1/chat/completions")
    assert answer.json()["usage"]["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]
