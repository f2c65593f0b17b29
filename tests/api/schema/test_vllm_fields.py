"""What vLLM and SGLang serve beyond OpenAI's API, through the real client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server
from tests.support.models.tiny_models import VOCAB_SIZE

CHAT: list[Any] = [{"role": "user", "content": "the thing in the tin"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
# A run of one token, whose text is one character.
FORCED: dict[str, Any] = {"model": BASE, "logit_bias": {"50": 100}, "temperature": 0, "max_tokens": 10}


class TestStopInTheAnswer:
    @pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
    def test_a_stop_string_stays_in_the_text(self, client: openai.OpenAI, field: str) -> None:
        char = client.completions.create(prompt="the", **FORCED).choices[0].text[0]
        options: Any = {**FORCED, "stop": char * 3, "extra_body": {field: True}}
        for answer in (client.completions.create(prompt="the", **options),):
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (char * 3, "stop")
        chat = client.chat.completions.create(messages=CHAT, **options).choices[0]
        assert (chat.message.content, chat.model_extra) == (char * 3, {"stop_reason": char * 3, "token_ids": None})
        chunks = client.completions.create(prompt="the", stream=True, **options)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == char * 3

    def test_an_end_token_s_text_stays_in_it(self, client: openai.OpenAI) -> None:
        char = client.completions.create(prompt="the", **FORCED).choices[0].text[0]
        kept: Any = {"stop_token_ids": [50], "include_stop_str_in_output": True}
        assert client.completions.create(prompt="the", extra_body=kept, **FORCED).choices[0].text == char
        end: Any = {**FORCED, "logit_bias": {"2": 100}}
        shown: Any = {"include_stop_str_in_output": True, "skip_special_tokens": False}
        texts = [
            client.completions.create(prompt="the", extra_body={**shown, **change}, **end).choices[0].text
            for change in ({}, {"skip_special_tokens": True}, {"include_stop_str_in_output": False})
        ]
        assert texts == ["</s>", "", ""]


class TestInvocations:
    """SageMaker's one route; the answers are those of the others."""

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", {"messages": CHAT, **GREEDY}),
            ("/v1/completions", {"prompt": ["the", "tin"], **GREEDY}),
            ("/v1/completions", {"prompt": "the " * 20_000, "truncate_prompt_tokens": 5, **GREEDY}),
            ("/v1/embeddings", {"input": "the"}),
            ("/v1/embeddings", {"messages": None, "prompt": None, "input": "the"}),
        ],
        ids=["chat", "completion", "a large body", "embedding", "null fields"],
    )
    def test_the_body_says_what_it_is(self, server: Server, path: str, body: dict[str, Any]) -> None:
        body = {"model": "alpha", **body}
        answers = [server.post(one, json={**body, "cache_salt": one}) for one in (path, "/invocations")]
        assert answers[0].status_code == 200, answers[0].text
        ours, theirs = ({**one.json(), "id": "", "created": 0} for one in answers)
        assert ours == theirs
        assert answers[1].headers["X-Multilora-Adapter"].startswith("alpha@1 ")

    def test_chats_are_streamed(self, server: Server) -> None:
        body = {"model": BASE, "messages": CHAT, "stream": True, **GREEDY}
        streamed = server.post("/invocations", json=body)
        assert (streamed.headers["content-type"], streamed.text[-14:]) == (
            "text/event-stream; charset=utf-8",
            "data: [DONE]\n\n",
        )

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"model": BASE}, "messages"),
            ([], "messages"),
            ({"messages": CHAT, "prompt": "the"}, "prompt"),
            ({"messages": CHAT, "temperature": "hot"}, "temperature"),
            ({"prompt": "the", "stop": [1]}, "stop"),
            ({"input": "the", "max_tokens": 1}, "max_tokens"),
        ],
        ids=str,
    )
    def test_what_is_wrong_has_the_field_s_own_name(self, server: Server, body: Any, param: str) -> None:
        refused = server.post("/invocations", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


class TestTokensAsIds:
    def test_completions(self, client: openai.OpenAI) -> None:
        body: Any = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        answer: Any = client.completions.create(
            model=BASE, prompt="the", logprobs=2, echo=True, extra_body=body, **GREEDY
        ).choices[0]
        ids = answer.prompt_token_ids + answer.token_ids
        assert answer.logprobs.tokens == [f"token_id:{token_id}" for token_id in ids]
        for token, top in zip(answer.logprobs.tokens[1:], answer.logprobs.top_logprobs[1:], strict=True):
            assert token in top
            assert all(name.startswith("token_id:") for name in top)

    def test_chats_still_tell_the_bytes(self, client: openai.OpenAI) -> None:
        options: Any = {"model": BASE, "messages": CHAT, "logprobs": True, "top_logprobs": 2, **GREEDY}
        body: Any = {"return_tokens_as_token_ids": True, "return_token_ids": True}
        plain: Any = client.chat.completions.create(**options).choices[0]
        named: Any = client.chat.completions.create(extra_body=body, **options).choices[0]
        tokens = named.logprobs.content
        assert [token.token for token in tokens] == [f"token_id:{token_id}" for token_id in named.token_ids]
        assert [token.bytes for token in tokens] == [token.bytes for token in plain.logprobs.content]
        assert all(top.token.startswith("token_id:") for token in tokens for top in token.top_logprobs)


class TestPromptLogprobs:
    def test_they_are_those_of_echo(self, client: openai.OpenAI) -> None:
        body: Any = {"prompt_logprobs": 3, "return_token_ids": True}
        answer = client.completions.create(
            model="alpha", prompt="the tin in", logprobs=1, echo=True, extra_body=body, **GREEDY
        )
        choice: Any = answer.choices[0]
        assert choice.prompt_logprobs[0] is None
        assert len(choice.prompt_logprobs) == len(choice.prompt_token_ids)
        for index, token_id in enumerate(choice.prompt_token_ids[1:], start=1):
            entries = choice.prompt_logprobs[index]
            own = entries[str(token_id)]
            assert own["logprob"] == pytest.approx(choice.logprobs.token_logprobs[index])
            assert own["decoded_token"] == choice.logprobs.tokens[index]
            ranked = sorted((one["rank"], -one["logprob"]) for one in entries.values())
            assert [rank for rank, _ in ranked][:3] == [1, 2, 3]
            assert [logprob for _, logprob in ranked] == sorted(logprob for _, logprob in ranked)
            assert len(entries) == (3 if own["rank"] <= 3 else 4)
            assert len(choice.logprobs.top_logprobs[index]) <= 2

    def test_chats_have_them_at_the_root(self, client: openai.OpenAI) -> None:
        answer: Any = client.chat.completions.create(
            model="alpha", messages=CHAT, extra_body={"prompt_logprobs": 0, "return_token_ids": True}, **GREEDY
        )
        assert [None if one is None else list(one) for one in answer.prompt_logprobs] == [
            None,
            *([str(token_id)] for token_id in answer.prompt_token_ids[1:]),
        ]
        assert answer.choices[0].logprobs is None

    def test_a_rank_counts_all_tokens(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        """And `--max-logprobs -1` has all of them."""
        with running_server(checkpoints.base, tmp_path, model_name=BASE, max_logprobs=-1) as server:
            body = {"prompt": "the tin in", "prompt_logprobs": -1, "logprobs": -1, "max_tokens": 1}
            choice = server.post("/v1/completions", json=body).json()["choices"][0]
            few = server.post("/v1/completions", json={**body, "prompt_logprobs": 0, "logprobs": 0}).json()["choices"][
                0
            ]
            chat = {"messages": CHAT, "logprobs": True, "top_logprobs": -1, "max_tokens": 1}
            (told,) = server.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
        assert len(told["top_logprobs"]) == VOCAB_SIZE
        for entries, own in zip(choice["prompt_logprobs"][1:], few["prompt_logprobs"][1:], strict=True):
            assert sorted(one["rank"] for one in entries.values()) == list(range(1, VOCAB_SIZE + 1))
            ((token_id, alone),) = own.items()
            assert alone["rank"] == entries[token_id]["rank"]

    @pytest.mark.parametrize("wrong", [-1, -2, 21, True])
    def test_what_cannot_be_is_refused(self, server: Server, wrong: Any) -> None:
        body = {"prompt": "the", "prompt_logprobs": wrong}
        answer = server.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")

    def test_a_stream_has_none(self, server: Server) -> None:
        answer = server.post("/v1/completions", json={"prompt": "the", "prompt_logprobs": 0, "stream": True})
        assert (answer.status_code, "`stream`" in answer.json()["error"]["message"]) == (400, True)


class TestLogprobTokenIds:
    """The alternatives are the tokens that were asked for, and the chosen one."""

    def test_they_are_those_among_all(self, client: openai.OpenAI) -> None:
        body: Any = {"logprob_token_ids": [20, 30, 40], "return_tokens_as_token_ids": True}
        options: Any = {"model": "alpha", "messages": CHAT, "logprobs": True, **GREEDY}
        plain = client.chat.completions.create(
            top_logprobs=20, extra_body={**body, "logprob_token_ids": None}, **options
        )
        named = client.chat.completions.create(top_logprobs=2, extra_body=body, **options)
        streamed = client.chat.completions.create(extra_body=body, stream=True, **options)
        entries: Any = named.choices[0].logprobs
        likely: Any = plain.choices[0].logprobs
        for one, other in zip(entries.content, likely.content, strict=True):
            found = {top.token: top.logprob for top in one.top_logprobs}
            assert one.top_logprobs[0].token == one.token == other.token
            assert set(found) == {one.token, *(f"token_id:{token_id}" for token_id in (20, 30, 40))}
            for top in other.top_logprobs:
                assert found.get(top.token, top.logprob) == pytest.approx(top.logprob)
        chunks = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
        tops = [one.top_logprobs for logprobs in chunks if logprobs is not None for one in logprobs.content]
        assert tops == [one.top_logprobs for one in entries.content]

    def test_completions_have_them(self, client: openai.OpenAI) -> None:
        body: Any = {"logprob_token_ids": [20], "return_tokens_as_token_ids": True}
        columns = (
            client.completions.create(model="alpha", prompt="the", logprobs=5, extra_body=body, **GREEDY)
            .choices[0]
            .logprobs
        )
        assert columns is not None and columns.tokens and columns.top_logprobs
        for token, top in zip(columns.tokens, columns.top_logprobs, strict=True):
            assert set(top) == {token, "token_id:20"}

    @pytest.mark.parametrize("more", [{"logprob_token_ids": [9999], "logprobs": 1}, {"logprob_token_ids": [1]}])
    def test_what_cannot_be_is_refused(self, server: Server, more: Any) -> None:
        answer = server.post("/v1/completions", json={"prompt": "the", **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids")


class TestTruncation:
    IDS = tuple(index % 211 + 20 for index in range(700))

    @pytest.mark.parametrize(
        ("asked", "kept"),
        [
            ({"truncate_prompt_tokens": 100}, IDS[-100:]),
            ({"truncate_prompt_tokens": 100, "truncation_side": "left"}, IDS[-100:]),
            ({"truncate_prompt_tokens": 100, "truncation_side": "right"}, IDS[:100]),
            ({"truncate_prompt_tokens": -1}, IDS[-(512 - 6) :]),
        ],
    )
    def test_so_many_tokens_are_kept(self, client: openai.OpenAI, asked: Any, kept: tuple[int, ...]) -> None:
        body: Any = {**asked, "return_token_ids": True}
        answer: Any = client.completions.create(
            model=BASE, prompt=list(self.IDS), echo=True, extra_body=body, **GREEDY
        ).choices[0]
        assert tuple(answer.prompt_token_ids) == kept
        alone = client.completions.create(model=BASE, prompt=list(kept), echo=True, **GREEDY)
        assert answer.text == alone.choices[0].text

    def test_long_texts_and_chats_are_cut_too(self, client: openai.OpenAI) -> None:
        long = "the thing in the tin " * 2000
        for asked in (7, -1):
            body: Any = {"truncate_prompt_tokens": asked}
            text = client.completions.create(model=BASE, prompt=long, extra_body=body, **GREEDY)
            said: list[Any] = [{"role": "user", "content": long}]
            chat = client.chat.completions.create(model=BASE, messages=said, extra_body=body, **GREEDY)
            for answer in (text, chat):
                assert answer.usage is not None
                assert answer.usage.prompt_tokens == (7 if asked == 7 else 512 - 6)

    def test_a_short_prompt_stays(self, client: openai.OpenAI) -> None:
        body: Any = {"truncate_prompt_tokens": 500}
        plain, kept = (
            client.completions.create(model=BASE, prompt="the tin", echo=True, extra_body=extra, **GREEDY)
            for extra in ({}, body)
        )
        assert plain.choices == kept.choices

    @pytest.mark.parametrize(
        ("asked", "words"), [(513, "holds 512 tokens"), (0, "at least 1"), (-2, "-1"), ("5", "valid integer")]
    )
    def test_what_cannot_be_kept_is_refused(self, server: Server, asked: Any, words: str) -> None:
        answer = server.post("/v1/completions", json={"prompt": "the", "truncate_prompt_tokens": asked})
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text


class TestEchoOfAChat:
    def test_the_answer_begins_with_the_message_that_it_continues(self, client: openai.OpenAI) -> None:
        begun: list[Any] = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "a thing"}]}]
        body: Any = {"continue_final_message": True}
        options: Any = {"model": "beta", "n": 2, **GREEDY}
        plain = client.chat.completions.create(messages=begun, extra_body=body, **options)
        echoed = client.chat.completions.create(messages=begun, extra_body={**body, "echo": True}, **options)
        texts = [f"a thing{choice.message.content}" for choice in plain.choices]
        assert [choice.message.content for choice in echoed.choices] == texts
        streamed = ["", ""]
        for chunk in client.chat.completions.create(
            messages=begun, extra_body={**body, "echo": True}, stream=True, **options
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts

    def test_what_the_user_said_is_not_the_answer_s(self, client: openai.OpenAI) -> None:
        plain, echoed = (
            client.chat.completions.create(model="beta", messages=CHAT, extra_body={"echo": echo}, **GREEDY)
            for echo in (False, True)
        )
        assert plain.choices == echoed.choices


class TestGenerate:
    """/inference/v1/generate: vLLM's tokens in and tokens out."""

    IDS = (20, 30, 40)

    def ask(self, server: Server, *, stream: bool = False, model: str | None = "alpha", **sampling: Any) -> Any:
        body = {"model": model, "token_ids": list(self.IDS), "sampling_params": {"temperature": 0, **sampling}}
        return server.post("/inference/v1/generate", json={**body, "stream": stream})

    @pytest.mark.parametrize("model", ["alpha", BASE])
    def test_tokens_and_logprobs_are_those_of_a_completion(self, server: Server, model: str) -> None:
        answer = self.ask(server, model=model, max_tokens=6, logprobs=2, n=2, detokenize=False, prompt_logprobs=1)
        body = {"model": model, "prompt": list(self.IDS), "logprobs": 2, "n": 2, "return_token_ids": True, **GREEDY}
        other = server.post("/v1/completions", json={**body, "prompt_logprobs": 1}).json()
        told = answer.json()
        for mine, theirs in zip(told["choices"], other["choices"], strict=True):
            assert mine["token_ids"] == theirs["token_ids"]
            assert [one["logprob"] for one in mine["logprobs"]["content"]] == theirs["logprobs"]["token_logprobs"]
            assert [one["token"] for one in mine["logprobs"]["content"]] == [f"token_id:{i}" for i in mine["token_ids"]]
            assert mine["finish_reason"] == theirs["finish_reason"] == "length"
        assert told["prompt_logprobs"] == other["choices"][0]["prompt_logprobs"]
        assert (told["usage"]["completion_tokens"], told["model"]) == (12, model)
        assert ("x-multilora-adapter" in answer.headers) == (model == "alpha")

    def test_a_stream_has_the_same_tokens_and_logprobs(self, server: Server) -> None:
        whole = self.ask(server, max_tokens=6, logprobs=0).json()["choices"][0]
        lines = self.ask(server, stream=True, max_tokens=6, logprobs=0).text.splitlines()
        assert lines[-2] == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
        assert [one for chunk in chunks for one in chunk["token_ids"]] == whole["token_ids"]
        assert [one for chunk in chunks for one in chunk["logprobs"]["content"]] == whole["logprobs"]["content"]
        assert chunks[-1]["finish_reason"] == "length"

    def test_without_a_limit_an_answer_may_have_the_rest_of_the_context(self, server: Server) -> None:
        choice = self.ask(server, ignore_eos=True).json()["choices"][0]
        limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (limit - len(self.IDS), "length")

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"token_ids": []}, "token_ids"),
            ({"token_ids": "the"}, "token_ids"),
            ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
            ({"sampling_params": {"prompt": "x"}}, "sampling_params.prompt"),
            ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
            ({"sampling_params": {"logprobs": True}}, "sampling_params.logprobs"),
            ({"sampling_params": {"best_of": 3}}, "sampling_params.best_of"),
            ({"sampling_params": None}, "sampling_params"),
            ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
            ({"features": {"mm_hashes": {}}}, "features"),
            ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params"),
            ({"token_ids": [10**6]}, "token_ids"),
        ],
    )
    def test_what_cannot_be_asked_is_refused_by_name(self, server: Server, change: Any, param: str) -> None:
        body = {"token_ids": [20, 30], "sampling_params": {"max_tokens": 2}, **change}
        answer = server.post("/inference/v1/generate", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
