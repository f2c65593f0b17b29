"""The prefix cache over HTTP: what is told of it, to whom it belongs, and what wrong requests get."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from service.models.families import model_spec
from service.models.layers.caches import kv_bytes_per_token
from service.models.spec.config_json import read_config
from service.tenants.edit import add_key
from service.tenants.keys_file import Scope
from tests.support.http.server import Server, running_server, wait_for
from tests.support.models.tiny_models import make_tiny_model

TEXT = "abcdefghij" * 30  # a token each, nearly
BLOCK = 16


def whole_blocks(num_tokens: int) -> int:
    """Tokens that an equal prompt finds once the first has ended: all but the last, in whole blocks."""
    return (num_tokens - 1) // BLOCK * BLOCK


@dataclass(frozen=True)
class Cached:
    """A server of a model with attention only, with a keys file."""

    server: Server
    path: Path

    def key(self, tenant: str, *scopes: Scope) -> dict[str, str]:
        return {"Authorization": f"Bearer {add_key(self.path, tenant, scopes or ('infer',))[0]}"}

    def post(self, path: str, key: dict[str, str], **body: Any) -> httpx.Response:
        return self.server.http.post(f"{self.server.url}{path}", headers=key, json=body)

    def usage(self, key: dict[str, str], path: str = "/v1/completions", **body: Any) -> tuple[int, int]:
        """Tokens of the prompt, and those of them that were cached."""
        answer = self.post(path, key, max_tokens=4, ignore_eos=True, **body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def metric(self, name: str, key: dict[str, str]) -> float:
        lines = self.server.http.get(f"{self.server.url}/metrics", headers=key).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cached]:
    directory = tmp_path_factory.mktemp("prefix-cache")
    model = make_tiny_model("llama", directory / "model", max_position_embeddings=2048)
    path = directory / "keys.toml"
    add_key(path, "operator", ("infer", "admin"))
    with running_server(model, directory / "server", keys_file=path) as server:
        yield Cached(server, path)


def test_each_turn_of_a_chat_finds_the_turns_before(cached: Cached) -> None:
    key, messages = cached.key("chats"), [{"role": "system", "content": TEXT}]
    before = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn} and what then?"})
        num_prompt, num_cached = cached.usage(key, "/v1/chat/completions", messages=messages)
        assert num_cached >= before - before % BLOCK - 2 * BLOCK if turn else num_cached == 0
        before = num_prompt
        messages.append({"role": "assistant", "content": "go on"})
    assert before > 300


def test_usage_of_streams_responses_and_batches_has_it(cached: Cached) -> None:
    key = cached.key("usages")
    num_prompt, _ = cached.usage(key, prompt=TEXT)
    assert cached.usage(key, prompt=TEXT) == (num_prompt, whole_blocks(num_prompt))
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 2}
    item = cached.post("/v1/completions/batch", key, items=[body]).json()
    assert f'"cached_tokens":{whole_blocks(num_prompt)}' in str(item).replace("'", '"').replace(" ", "")
    stream = cached.post("/v1/completions", key, stream=True, stream_options={"include_usage": True}, **body)
    assert f'"cached_tokens":{whole_blocks(num_prompt)}' in stream.text.replace(" ", "")
    chat = {"messages": [{"role": "user", "content": TEXT[1:]}], "max_tokens": 2}
    usages = [cached.post("/v1/messages", key, **chat).json()["usage"] for _ in range(2)]
    num_prompt = usages[0]["input_tokens"]
    assert [usage["cache_read_input_tokens"] for usage in usages] == [0, whole_blocks(num_prompt)]
    assert usages[1]["input_tokens"] == num_prompt - whole_blocks(num_prompt)
    started = cached.post("/v1/messages", key, stream=True, **chat).text
    assert f'"cache_read_input_tokens":{whole_blocks(num_prompt)},"output_tokens":1,' in started
    first, second = (cached.post("/v1/responses", key, input=TEXT, max_output_tokens=2).json() for _ in range(2))
    assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == whole_blocks(second["usage"]["input_tokens"])


def test_sixteen_choices_compute_their_prompt_once(cached: Cached) -> None:
    key = cached.key("choices", "infer", "admin")
    queried, hit = (cached.metric(f"vllm:prefix_cache_{name}_total", key) for name in ("queries", "hits"))
    num_prompt, num_cached = cached.usage(key, prompt=TEXT[::-1], n=16)
    assert num_cached == 0
    wait_for(
        lambda: cached.metric("multilora_prefix_cache_queries_total", key) == queried + 16 * num_prompt,
        "the engine's report",
    )
    computed = 16 * num_prompt - (cached.metric("vllm:prefix_cache_hits_total", key) - hit)
    assert computed <= 1.1 * num_prompt


def test_equal_prompts_sent_at_once_are_computed_once(cached: Cached) -> None:
    key = cached.key("at-once", "infer", "admin")
    queried, hit = (cached.metric(f"vllm:prefix_cache_{name}_total", key) for name in ("queries", "hits"))
    shown = cached.metric("multilora_cached_prompt_tokens_total", key)
    # One token behind the last whole block: so much computes each that comes when the first one's prompt is done.
    prompt = (TEXT[3:] * 6)[:-5]
    with ThreadPoolExecutor(64) as clients:
        found = list(clients.map(lambda _: cached.usage(key, prompt=prompt), range(64)))
    num_prompt = found[0][0]
    assert num_prompt % BLOCK == 1
    wait_for(
        lambda: cached.metric("multilora_prefix_cache_queries_total", key) == queried + 64 * num_prompt,
        "the engine's report",
    )
    num_hit = cached.metric("vllm:prefix_cache_hits_total", key) - hit
    assert 64 * num_prompt - num_hit <= 1.1 * num_prompt
    assert num_hit == sum(num_cached for _, num_cached in found)
    assert cached.metric("multilora_cached_prompt_tokens_total", key) - shown == num_hit


def test_a_whole_answer_names_its_cached_tokens_in_a_header(cached: Cached) -> None:
    key, name = cached.key("headers"), "X-Multilora-Cached-Tokens"
    body = {"prompt": TEXT[9:], "max_tokens": 2}
    first, second = (cached.post("/v1/completions", key, **body, prompt_cache_key="k") for _ in range(2))
    num_cached = whole_blocks(second.json()["usage"]["prompt_tokens"])
    assert (first.headers[name], second.headers[name]) == ("0", str(num_cached))
    batch = cached.post("/v1/completions/batch", key, items=[body, body])
    assert batch.headers[name] == str(2 * num_cached)
    assert name not in cached.post("/v1/completions", key, **body, stream=True).headers
    assert name not in cached.post("/v1/embeddings", key, input=TEXT[9:]).headers
    assert name not in cached.post("/v1/completions", key, **body, cache_salt="").headers


def test_a_cache_of_hardly_more_than_a_prompt_changes_no_answer(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=2048)
    block_bytes = BLOCK * kv_bytes_per_token(model_spec(read_config(model)), torch.float32)
    with running_server(model, tmp_path / "server", kv_bytes=21 * block_bytes, dtype="float32") as server:

        def ask(prompt: str, salt: str = "s") -> tuple[str, int, int]:
            body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "cache_salt": salt}
            answer = server.post("/v1/completions", json=body)
            usage = answer.json()["usage"]
            details = usage["prompt_tokens_details"]
            return answer.json()["choices"][0]["text"], usage["prompt_tokens"], details["cached_tokens"]

        cold, num_prompt, _ = ask(TEXT)
        assert num_prompt > 19 * BLOCK - 8
        assert ask(TEXT) == (cold, num_prompt, whole_blocks(num_prompt))
        assert ask(TEXT[::-1])[2] == 0
        assert ask(TEXT, "other")[::2] == ask(TEXT, "another")[::2] == (cold, 0)
        refused = server.post("/v1/completions", json={"prompt": TEXT * 2})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_turn_that_left_the_device_is_found_in_host_memory(tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=2048)
    block_bytes = BLOCK * kv_bytes_per_token(model_spec(read_config(model)), torch.float32)
    sizes = {"kv_bytes": 25 * block_bytes, "prefix_host_bytes": 400 * block_bytes, "dtype": "float32"}
    with running_server(model, tmp_path / "server", **sizes) as server:

        def ask(messages: list[dict[str, str]], salt: str) -> tuple[str, int, int]:
            body = {"messages": messages, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "cache_salt": salt}
            answer = server.post("/v1/chat/completions", json=body).json()
            usage = answer["usage"]
            text = str(answer["choices"][0]["message"])
            return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        chat = [{"role": "system", "content": TEXT}, {"role": "user", "content": "and what then?"}]
        num_before = ask(chat, "chat")[1]
        assert num_before > 17 * BLOCK
        chat += [{"role": "assistant", "content": "go on"}, {"role": "user", "content": "and then?"}]
        alone = ask(chat, "alone")
        assert alone[2] == 0  # it has filled the cache
        text, _, num_cached = ask(chat, "chat")
        assert (text, num_cached >= num_before - 2 * BLOCK) == (alone[0], True)
        wait_for(lambda: server.metric("prefix_cache_host_hits_total") >= num_cached - 2 * BLOCK, "the engine's report")
        told = server.http.get(f"{server.url}/server_info", params={"config_format": "json"}).json()["vllm_config"]
        cache = told["cache_config"]
        assert cache["prefix_host_hit_tokens"] == server.metric("prefix_cache_host_hits_total")
        assert 0 < cache["prefix_host_bytes_used"] <= cache["prefix_host_bytes"] == 400 * block_bytes
        assert server.post("/reset_prefix_cache").status_code == 200
        assert ask(chat, "chat")[::2] == (text, 0)


# A template that begins a thought, and shows none of those that came before.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5_text"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(request.param, directory / "model", max_position_embeddings=2048)
    (model / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with running_server(model, directory / "server", dtype="float32") as server:
        yield server


def test_turns_without_their_thoughts_begin_behind_the_turn_before(hybrid: Server) -> None:
    def ask(messages: list[dict[str, str]], salt: str) -> tuple[str, int, int]:
        body = {"messages": messages, "max_tokens": 24, "ignore_eos": True, "temperature": 0, "cache_salt": salt}
        answer = hybrid.post("/v1/chat/completions", json=body).json()
        usage = answer["usage"]
        text = answer["choices"][0]["message"]
        return str(text), usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    system = {"role": "system", "content": TEXT}
    messages, before = [system], 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn} {TEXT[:80]}"})
        text, _, num_cached = ask(messages, "chats")
        assert (text, 0) == ask(messages, f"alone {turn}")[::2]
        assert num_cached >= before - before % BLOCK if turn else num_cached == 0
        chat = {"messages": messages, "add_generation_prompt": False}
        before = hybrid.post("/tokenize", json=chat).json()["count"]
        messages.append({"role": "assistant", "content": f"{text[:9]}</think>{turn} and so on"})
    # Another chat begins behind the system prompt.
    other = [system, {"role": "user", "content": TEXT[::-1]}]
    assert len(TEXT) - BLOCK < ask(other, "chats")[2] < len(TEXT) + 2 * BLOCK


def test_a_hybrid_computes_a_prompt_of_sixteen_choices_once(hybrid: Server) -> None:
    def ask(prompt: str, **fields: Any) -> tuple[list[str], int, int]:
        body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
        answer = hybrid.post("/v1/completions", json=body).json()
        usage = answer["usage"]
        details = usage["prompt_tokens_details"]
        return [one["text"] for one in answer["choices"]], usage["prompt_tokens"], details["cached_tokens"]

    def counts() -> tuple[float, float]:
        return hybrid.metric("prefix_cache_queries_total"), hybrid.metric("prefix_cache_hits_total")

    ask("the")
    wait_for(lambda: counts()[0], "the engine's report")
    queried, hit = counts()
    texts, num_prompt, num_cached = ask(TEXT * 4, n=16)
    assert (len(set(texts)), num_cached) == (1, 0)
    wait_for(lambda: counts()[0] == queried + 16 * num_prompt, "the engine's report")
    assert 16 * num_prompt - (counts()[1] - hit) <= 1.1 * num_prompt
    assert ask(TEXT * 4) == (texts[:1], num_prompt, num_prompt - 1)
    # The first prompt that goes on otherwise keeps a state there, and the next one finds it.
    found = [ask(TEXT * 2 + 100 * letter)[2] for letter in "xy"]
    assert found[0] == 0 and 2 * len(TEXT) - 2 * BLOCK < found[1] <= 2 * len(TEXT)


def test_nobody_finds_what_other_tenants_have_asked(cached: Cached) -> None:
    one, other = cached.key("one"), cached.key("other")
    assert cached.usage(one, prompt=TEXT[5:], cache_salt="s")[1] == 0
    for salt in ({}, {"cache_salt": "s"}, {"cache_salt": "one"}):
        assert cached.usage(other, prompt=TEXT[5:], **salt)[1] == 0
    num_prompt, num_cached = cached.usage(one, prompt=TEXT[5:], cache_salt="s")
    assert num_cached == whole_blocks(num_prompt)
    assert cached.usage(one, prompt=TEXT[5:])[1] == 0


@pytest.mark.parametrize("salt", ["", 5, True, ["s"], {"a": 1}, "s" * 257, "s" * 2**20])
def test_a_wrong_salt_is_a_bad_request(cached: Cached, salt: Any) -> None:
    key = cached.key("salts")
    for path, body in (
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
        ("/v1/responses", {"input": "the"}),
        ("/v1/embeddings", {"input": "the"}),
        ("/classify", {"input": "the"}),
        ("/rerank", {"query": "the", "documents": ["the"]}),
    ):
        answer = cached.post(path, key, cache_salt=salt, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt"), answer.text


def test_operators_alone_may_reset_it(cached: Cached) -> None:
    key = cached.key("reset")
    num_prompt, _ = cached.usage(key, prompt=TEXT[7:])
    assert cached.post("/reset_prefix_cache", key).status_code == 403
    assert cached.usage(key, prompt=TEXT[7:])[1] == whole_blocks(num_prompt)
    assert cached.post("/reset_prefix_cache", cached.key("operator", "admin")).json() == {"status": "ok"}
    assert cached.usage(key, prompt=TEXT[7:])[1] == 0
