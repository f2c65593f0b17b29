"""The OpenAI interface, driven by the real client against a real server."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import openai
import pytest
import transformers

from tests.api.conftest import ADAPTERS, BASE, Checkpoints
from tests.support.http.server import Server
from tests.support.http.uploads import parts_of
from tests.support.models.tiny_models import VOCAB_SIZE

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
CHAT: list[Any] = [{"role": "user", "content": "the thing in the tin"}]


def counts_of(usage: Any) -> tuple[int, int, int]:
    """Without the tokens that were cached, of which the second request for a prompt has more."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.fixture(scope="module")
def tokenizer(checkpoints: Checkpoints) -> transformers.PreTrainedTokenizerFast:
    return transformers.AutoTokenizer.from_pretrained(checkpoints.base)


class TestModels:
    def test_the_base_and_its_adapters_are_listed(self, client: openai.OpenAI, checkpoints: Checkpoints) -> None:
        cards = {card.id: card for card in client.models.list().data}
        assert {BASE, *ADAPTERS} <= set(cards)
        extra = cards["alpha"].model_extra or {}
        assert extra["parent"] == BASE
        assert extra["root"] == str(checkpoints.adapters / "alpha")
        assert (cards[BASE].model_extra or {})["root"] == str(checkpoints.base)
        assert (cards[BASE].model_extra or {})["max_model_len"] == 512

    def test_they_are_anthropic_s_models_too(self, server: Server) -> None:
        """Its client pages by `after_id`; the truth of the fields is its `ModelInfo`."""
        first = server.get("/v1/models?limit=2", headers={"anthropic-version": "2023-06-01"}).json()
        rest = server.get("/v1/models", params={"after_id": first["last_id"]}).json()
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert [one["id"] for one in first["data"] + rest["data"]][:4] == [BASE, *ADAPTERS]
        for card in first["data"]:
            assert (card["type"], card["display_name"]) == ("model", card["id"])
            assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
        assert server.get(f"/v1/models/{BASE}").json() == first["data"][0]

    def test_one_model_is_found_by_each_of_its_names(self, client: openai.OpenAI) -> None:
        assert client.models.retrieve(BASE).id == BASE
        assert client.models.retrieve("alpha").id == client.models.retrieve(f"{BASE}:alpha").id == "alpha"
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.models.retrieve("nobody")


class TestNames:
    def test_every_adapter_changes_the_answer_and_no_two_agree(self, client: openai.OpenAI) -> None:
        texts = [
            client.completions.create(model=name, prompt="the", **GREEDY).choices[0].text for name in (BASE, *ADAPTERS)
        ]
        assert len(set(texts)) == len(texts)

    def test_all_ways_to_name_an_adapter_are_one(self, client: openai.OpenAI) -> None:
        def text(model: str, **extra: str) -> str:
            return client.completions.create(model=model, prompt="the", extra_body=extra, **GREEDY).choices[0].text

        expected = text("beta")
        assert text(f"{BASE}:beta") == text(BASE, adapter_id="beta") == text("beta", adapter_id="beta") == expected
        assert text(f"{BASE}:beta", adapter_id="beta") == expected

    def test_an_answer_says_who_spoke(self, server: Server) -> None:
        digests = {one["name"]: one["digest"] for one in server.get("/v1/adapters").json()["data"]}
        prints = {}
        for names, speaker in (
            ({}, BASE),
            ({"model": None}, BASE),
            ({"model": BASE}, BASE),
            ({"adapter_id": "beta"}, "beta"),
            ({"model": BASE, "adapter_id": "beta"}, "beta"),
            ({"model": f"{BASE}:alpha"}, "alpha"),
        ):
            body = {**names, "max_tokens": 1}
            text = server.post("/v1/completions", json={**body, "prompt": "the"}).json()
            chat = server.post("/v1/chat/completions", json={**body, "messages": CHAT}).json()
            streamed = server.post("/v1/chat/completions", json={**body, "messages": CHAT, "stream": True}).text
            chunk = json.loads(streamed.split("\n\n")[0].removeprefix("data: "))
            assert text["model"] == chat["model"] == chunk["model"] == speaker
            assert text["system_fingerprint"] == chat["system_fingerprint"] == chunk["system_fingerprint"]
            prints.setdefault(speaker, set()).add(chat["system_fingerprint"])
        assert all(len(of_one) == 1 for of_one in prints.values())
        (base,) = prints[BASE]
        for name in ("alpha", "beta"):
            assert prints[name] == {f"{base}_{digests[name][:16]}"}

    def test_two_different_names_are_refused(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"alpha.*beta"):
            client.completions.create(model="alpha", prompt="the", extra_body={"adapter_id": "beta"})

    @pytest.mark.parametrize("name", ["nobody", f"{BASE}:nobody", "other:alpha", f"{BASE}:", "../alpha"])
    def test_unknown_names_are_not_found(self, client: openai.OpenAI, name: str) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
            client.completions.create(model=name, prompt="the")
        assert caught.value.param == "model"


class TestCompletions:
    def test_the_four_forms_of_a_prompt_give_one_answer(
        self, client: openai.OpenAI, tokenizer: transformers.PreTrainedTokenizerFast
    ) -> None:
        ids = tokenizer.encode("the tin")
        forms: list[Any] = ["the tin", ["the tin"], ids, [ids]]
        answers = [client.completions.create(model="alpha", prompt=form, **GREEDY).choices[0].text for form in forms]
        assert len(set(answers)) == 1

    def test_several_prompts_with_several_answers_come_in_order(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model=BASE, prompt=["the", "and", "in"], n=2, **GREEDY)
        single = [client.completions.create(model=BASE, prompt=prompt, **GREEDY) for prompt in ("the", "and", "in")]
        assert [choice.index for choice in answer.choices] == list(range(6))
        expected = [one.choices[0].text for one in single for _ in range(2)]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in single if one.usage)
        assert answer.usage.completion_tokens == 6 * 12

    def test_tokens_ids_and_text_agree(
        self, client: openai.OpenAI, tokenizer: transformers.PreTrainedTokenizerFast
    ) -> None:
        answer = client.completions.create(model="gamma", prompt="and", extra_body={"return_token_ids": True}, **GREEDY)
        choice = answer.choices[0].model_extra or {}
        assert choice["prompt_token_ids"] == tokenizer.encode("and")
        assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == answer.choices[0].text
        assert len(choice["token_ids"]) == 12

    def test_the_default_is_sixteen_tokens(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model=BASE, prompt="the", temperature=0, extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        assert answer.choices[0].finish_reason == "length"

    @pytest.mark.parametrize("prompt", ["the tin", "ünï", ["in", "an"]])
    def test_a_stream_is_the_whole_answer_in_pieces(self, client: openai.OpenAI, prompt: Any) -> None:
        whole = client.completions.create(model="beta", prompt=prompt, n=2, temperature=0, max_tokens=20)
        texts = [""] * len(whole.choices)
        reasons = {}
        usage = None
        options: Any = {"include_usage": True}
        for chunk in client.completions.create(
            model="beta", prompt=prompt, n=2, temperature=0, max_tokens=20, stream=True, stream_options=options
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert texts == [choice.text for choice in whole.choices]
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert counts_of(usage) == counts_of(whole.usage)

    def test_the_last_token_of_a_stream_comes_with_the_end(self, client: openai.OpenAI) -> None:
        asked: Any = {"max_tokens": 6, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
        *_, last = client.completions.create(model="beta", prompt="the tin", logit_bias={"50": 100}, **asked)
        assert (bool(last.choices[0].text), last.choices[0].finish_reason) == (True, "length")
        *_, last = client.chat.completions.create(model="beta", messages=CHAT, logit_bias={"50": 100}, **asked)
        assert (bool(last.choices[0].delta.content), last.choices[0].finish_reason) == (True, "length")

    def test_usage_is_streamed_only_on_request(self, client: openai.OpenAI) -> None:
        assert all(
            chunk.usage is None and chunk.choices
            for chunk in client.completions.create(model=BASE, prompt="the", stream=True, **GREEDY)
        )


class TestLogprobs:
    def test_completions_tell_the_chosen_and_the_likely(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model=BASE, prompt="the", logprobs=3, **GREEDY)
        columns = answer.choices[0].logprobs
        assert columns is not None
        assert columns.tokens is not None
        assert columns.token_logprobs is not None
        assert columns.top_logprobs is not None
        assert len(columns.tokens) == len(columns.token_logprobs) == len(columns.text_offset or ()) == 12
        for token, logprob, top in zip(columns.tokens, columns.token_logprobs, columns.top_logprobs, strict=True):
            assert 1 <= len(top) <= 3
            assert top[token] == pytest.approx(logprob)
            assert max(top.values()) == pytest.approx(logprob)

    def test_the_token_itself_comes_first_among_its_alternatives(self, client: openai.OpenAI) -> None:
        """Log probabilities are the model's, which a bias does not change."""
        answer = client.completions.create(model=BASE, prompt="the", logprobs=3, logit_bias={"50": 100}, **GREEDY)
        columns: Any = answer.choices[0].logprobs
        assert [next(iter(top)) for top in columns.top_logprobs] == columns.tokens
        assert all(
            max(top.values()) > top[token] for token, top in zip(columns.tokens, columns.top_logprobs, strict=True)
        )

    def test_echo_gives_the_prompt_and_its_probabilities(self, client: openai.OpenAI) -> None:
        prompt = "the tin in"
        answer = client.completions.create(model="alpha", prompt=prompt, logprobs=1, echo=True, **GREEDY)
        plain = client.completions.create(model="alpha", prompt=prompt, logprobs=1, **GREEDY)
        both, alone = answer.choices[0].logprobs, plain.choices[0].logprobs
        assert both is not None
        assert alone is not None
        assert answer.choices[0].text == prompt + plain.choices[0].text
        num_prompt = answer.usage.prompt_tokens if answer.usage else 0
        assert both.token_logprobs is not None
        assert both.token_logprobs[0] is None
        assert all(logprob < 0 for logprob in both.token_logprobs[1:])
        assert "".join((both.tokens or [])[:num_prompt]) == prompt
        assert both.token_logprobs[num_prompt:] == pytest.approx(alone.token_logprobs)
        offsets = both.text_offset or []
        assert offsets[:num_prompt] == sorted(offsets[:num_prompt])
        assert offsets[num_prompt:] == [len(prompt) + offset for offset in alone.text_offset or []]

    def test_echo_of_the_prompt_alone_scores_it(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="alpha", prompt="the tin", logprobs=0, echo=True, max_tokens=0)
        assert answer.choices[0].text == "the tin"
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.tokens or ()) == (answer.usage.prompt_tokens if answer.usage else 0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0

    def test_a_streamed_echo_is_the_whole_one(self, client: openai.OpenAI) -> None:
        options: Any = {"model": "alpha", "prompt": ["the", "in an"], "logprobs": 2, "echo": True, **GREEDY}
        whole = client.completions.create(**options)
        texts, tokens = ["", ""], [[], []]  # type: ignore[var-annotated]
        for chunk in client.completions.create(stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                tokens[choice.index] += (choice.logprobs.tokens or []) if choice.logprobs else []
        assert texts == [choice.text for choice in whole.choices]
        assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]

    def test_chats_tell_bytes_and_alternatives(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="beta", messages=CHAT, logprobs=True, top_logprobs=4, temperature=0, max_tokens=6
        )
        content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
        assert content is not None
        assert len(content) == 6
        for token in content:
            assert token.bytes is not None
            assert len(token.top_logprobs) == 4
            assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        streamed = []
        for chunk in client.chat.completions.create(
            model="beta", messages=CHAT, logprobs=True, top_logprobs=4, temperature=0, max_tokens=6, stream=True
        ):
            for choice in chunk.choices:
                streamed += (choice.logprobs.content or []) if choice.logprobs else []
        assert streamed == content


class TestChat:
    def test_a_chat_is_the_completion_of_its_rendered_messages(
        self, client: openai.OpenAI, tokenizer: transformers.PreTrainedTokenizerFast
    ) -> None:
        messages: list[Any] = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "the tin"}]},
            {"role": "assistant", "content": "and?"},
            {"role": "user", "content": "in"},
        ]
        plain = [{**message, "content": "the tin"} if index == 1 else message for index, message in enumerate(messages)]
        ids = tokenizer.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        chat = client.chat.completions.create(model="alpha", messages=messages, **GREEDY)
        completion = client.completions.create(model="alpha", prompt=ids, **GREEDY)
        assert chat.choices[0].message.content == completion.choices[0].text
        assert chat.choices[0].message.role == "assistant"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == len(ids)

    def test_an_answer_can_be_sent_back_as_the_client_writes_it(self, client: openai.OpenAI) -> None:
        options: Any = {"model": "alpha", **GREEDY}
        said = client.chat.completions.create(messages=CHAT, **options).choices[0].message
        follow = {"role": "user", "content": "and?"}
        plain: list[Any] = [*CHAT, {"role": "assistant", "content": said.content}, follow]
        dumped: list[Any] = [*CHAT, said.model_dump(), follow]
        answers = [client.chat.completions.create(messages=messages, **options) for messages in (plain, dumped)]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content

    def test_what_vllm_always_sends_is_there(self, client: openai.OpenAI) -> None:
        asked = {"model": BASE, "max_tokens": 2, "cache_salt": "no other test has computed these prompts"}
        chat: Any = client.post(
            "/chat/completions", body={**asked, "messages": [{"role": "user", "content": "the"}]}, cast_to=object
        )
        completion: Any = client.post("/completions", body={**asked, "prompt": "the"}, cast_to=object)
        for part in (chat, completion["choices"][0]):
            assert {part[name] for name in ("prompt_logprobs", "prompt_token_ids")} == {None}
        for answer in (chat, completion):
            assert answer["choices"][0]["token_ids"] is None
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert chat["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}

    def test_a_stream_is_the_whole_answer_in_pieces(self, client: openai.OpenAI) -> None:
        options: Any = {"model": "gamma", "messages": CHAT, "n": 3, "seed": 7, "max_tokens": 15}
        whole = client.chat.completions.create(**options)
        texts = [""] * 3
        roles = []
        usage = None
        for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles += [(choice.index, choice.delta.role)] if choice.delta.role else []
        assert texts == [choice.message.content for choice in whole.choices]
        assert roles == [(index, "assistant") for index in range(3)]
        assert counts_of(usage) == counts_of(whole.usage)

    def test_the_default_is_what_the_context_has_left(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model=BASE, messages=CHAT, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens == 512
        assert answer.choices[0].finish_reason == "length"

    def test_both_names_of_the_limit_hold(self, client: openai.OpenAI) -> None:
        for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
            answer = client.chat.completions.create(model=BASE, messages=CHAT, extra_body={"ignore_eos": True}, **limit)  # type: ignore[arg-type]
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3

    def test_the_last_message_can_be_continued(self, client: openai.OpenAI, server: Server) -> None:
        messages = [*CHAT, {"role": "assistant", "content": "well, the"}]
        ids = server.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
        text = server.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text.endswith("<|im_start|>assistant\nwell, the")
        answer = client.chat.completions.create(
            model=BASE, messages=messages, extra_body={"continue_final_message": True}, **GREEDY
        )
        completion = client.completions.create(model=BASE, prompt=ids, **GREEDY)
        assert answer.choices[0].message.content == completion.choices[0].text


class TestSampling:
    def test_a_seed_repeats_and_choices_differ(self, client: openai.OpenAI) -> None:
        options: Any = {"model": BASE, "prompt": "the", "max_tokens": 12, "seed": 11, "n": 3}
        first, second = (client.completions.create(**options) for _ in range(2))
        texts = [choice.text for choice in first.choices]
        assert texts == [choice.text for choice in second.choices]
        assert len(set(texts)) == 3
        alone = client.completions.create(**{**options, "n": 1})
        assert alone.choices[0].text == texts[0]

    def test_a_bias_of_a_hundred_decides(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model=BASE, prompt="the", logit_bias={"50": 100}, extra_body={"return_token_ids": True}, **GREEDY
        )
        assert (answer.choices[0].model_extra or {})["token_ids"] == [50] * 12

    def test_stop_strings_end_the_answer_and_are_no_part_of_it(self, client: openai.OpenAI) -> None:
        # A forced run of one token makes a text whose stop string spans tokens.
        token = {"logit_bias": {"50": 100}, "max_tokens": 10, "temperature": 0}
        whole = client.completions.create(model=BASE, prompt="the", **token).choices[0].text  # type: ignore[arg-type]
        stop = whole[0] * 3
        cut: Any = client.completions.create(model=BASE, prompt="the", stop=[stop, "nothing"], **token)  # type: ignore[arg-type]
        assert cut.choices[0].text == ""
        assert cut.choices[0].finish_reason == "stop"
        assert cut.choices[0].model_extra["stop_reason"] == stop
        assert cut.usage.completion_tokens == 3
        chunks: Any = client.completions.create(model=BASE, prompt="the", stop=stop, stream=True, **token)  # type: ignore[arg-type]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == ""

    def test_stop_strings_wait_for_min_tokens(self, client: openai.OpenAI) -> None:
        forced: Any = {"logit_bias": {"50": 100}, "max_tokens": 10, "temperature": 0, "model": BASE, "prompt": "the"}
        char = client.completions.create(**forced).choices[0].text[0]
        answer = client.completions.create(stop=char, extra_body={"min_tokens": 4}, **forced)
        assert answer.choices[0].text == char * 4
        begun: Any = client.completions.create(stop=char * 3, extra_body={"min_tokens": 2}, **forced)
        assert (begun.choices[0].text, begun.usage.completion_tokens) == ("", 3)

    def test_a_stop_token_ends_the_answer(self, client: openai.OpenAI) -> None:
        answer: Any = client.completions.create(
            model=BASE, prompt="the", logit_bias={"50": 100}, extra_body={"stop_token_ids": [50]}, **GREEDY
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
        assert answer.choices[0].model_extra["stop_reason"] == 50
        assert answer.usage.completion_tokens == 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_end_without_a_reason_and_an_answer_without_thoughts_say_null(
        self, client: openai.OpenAI, stream: bool
    ) -> None:
        """As vLLM's, whose clients read these keys of every answer; the pieces before the last have none."""
        plain: Any = {"model": BASE, "stream": stream, "max_tokens": 3, "temperature": 0}
        for said in (
            client.completions.create(prompt="the", **plain),
            client.chat.completions.create(messages=CHAT, **plain),
        ):
            choices = [choice for one in (said if stream else [said]) for choice in one.choices]  # type: ignore[union-attr]
            assert (choices[-1].finish_reason, choices[-1].model_extra["stop_reason"]) == ("length", None)
            assert all("stop_reason" not in choice.model_extra for choice in choices[:-1])
        if not stream:
            message = choices[0].message.model_extra
            assert (message["reasoning"], message["reasoning_content"]) == (None, None)

    def test_the_end_token_stops_unless_it_is_ignored(self, client: openai.OpenAI) -> None:
        forced: Any = {"model": BASE, "prompt": "the", "logit_bias": {"2": 100}, **GREEDY}
        stopped = client.completions.create(**forced)
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
        ignored = client.completions.create(extra_body={"ignore_eos": True, "skip_special_tokens": False}, **forced)
        assert (ignored.choices[0].text, ignored.choices[0].finish_reason) == ("</s>" * 12, "length")


class TestBatch:
    def test_items_of_all_adapters_come_in_order_and_fail_alone(self, server: Server, client: openai.OpenAI) -> None:
        items: list[dict[str, Any]] = [{"model": name, "prompt": "the", **GREEDY} for name in (BASE, *ADAPTERS)] + [
            {"model": "alpha", "messages": CHAT, **GREEDY},
            {"model": "nobody", "prompt": "the"},
            {"model": "alpha", "prompt": "the", "stream": True},
            {"model": "alpha", "prompt": "the", "temperature": "hot"},
            {"prompt": 3},
            {},
        ]
        answer = server.post("/v1/completions/batch", json={"items": items})
        assert answer.status_code == 200
        got = answer.json()["items"]
        assert len(got) == len(items)
        for name, one in zip((BASE, *ADAPTERS), got, strict=False):
            alone = client.completions.create(model=name, prompt="the", **GREEDY)
            assert one["choices"][0]["text"] == alone.choices[0].text
            assert one["object"] == "text_completion"
        assert got[4]["object"] == "chat.completion"
        assert [one["error"]["code"] for one in got[5:]] == ["model_not_found", *["bad_request"] * 4]
        assert [one["error"]["param"] for one in got[5:8]] == ["model", "stream", "temperature"]

    def test_several_conversations_are_one_answer(self, server: Server) -> None:
        """vLLM's form: a choice for each, of the same adapter."""
        chats = [CHAT, [{"role": "user", "content": "the cat"}], [*CHAT, {"role": "assistant", "content": "a"}, *CHAT]]
        asked = {"model": "alpha", "return_token_ids": True, **GREEDY}
        answer = server.post("/v1/chat/completions/batch", json={"messages": chats, **asked})
        assert answer.status_code == 200, answer.text
        alone = [server.post("/v1/chat/completions", json={"messages": chat, **asked}).json() for chat in chats]
        wanted = [
            {**one["choices"][0], "index": index, "prompt_token_ids": one["prompt_token_ids"]}
            for index, one in enumerate(alone)
        ]
        assert answer.json()["choices"] == wanted
        assert answer.json()["object"] == "chat.completion"
        assert answer.json()["usage"]["total_tokens"] == sum(one["usage"]["total_tokens"] for one in alone)
        long = [{"role": "user", "content": "the cat " * 30}]
        for _ in range(3):  # from the second time on the prefix cache knows it
            one = server.post("/v1/chat/completions", json={"messages": long, **asked}).json()["usage"]
        both = server.post("/v1/chat/completions/batch", json={"messages": [long, long], **asked}).json()["usage"]
        assert one["prompt_tokens_details"]["cached_tokens"] > 0
        assert both["prompt_tokens_details"] == {"cached_tokens": 2 * one["prompt_tokens_details"]["cached_tokens"]}
        assert both["completion_tokens_details"] == {"reasoning_tokens": 0}
        for change, param in (
            ({"stream": True}, "stream"),
            ({"n": 2}, "n"),
            ({"messages": []}, "messages"),
            ({"messages": CHAT}, "messages[0]"),
            ({"messages": [CHAT, []]}, "messages[1]"),
            ({"messages": [CHAT, [{"role": "user"}]]}, "messages[1][0].content"),
        ):
            refused = server.post("/v1/chat/completions/batch", json={"messages": chats, **asked, **change})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        unknown = server.post("/v1/chat/completions/batch", json={"messages": chats, "model": "nobody"})
        assert unknown.status_code == 404
        many = server.post("/v1/chat/completions/batch", json={"messages": [CHAT] * 257})
        assert (many.status_code, many.json()["error"]["param"]) == (413, "messages")

    def test_a_role_of_one_s_own_is_what_the_template_makes_of_it(
        self, server: Server, checkpoints: Checkpoints
    ) -> None:
        chat = [{"role": "critic", "content": "the cat"}]
        asked = {"messages": chat, "add_generation_prompt": False}
        tokens = server.post("/tokenize", json=asked).json()["tokens"]
        prompt = server.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert "critic" in prompt
        assert "the cat" in prompt
        template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
        parts = parts_of(checkpoints.spare) | {"chat_template": ("chat_template.jinja", template.encode())}
        server.http.put(f"{server.url}/v1/adapters/users-only", files=parts).raise_for_status()
        try:
            body = {"model": "users-only", "messages": [*CHAT, *chat], "max_tokens": 1}
            refused = server.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400
            assert "does not show messages of the role 'critic'" in refused.json()["error"]["message"]
        finally:
            server.http.delete(f"{server.url}/v1/adapters/users-only")

    def test_too_many_items_are_too_large(self, server: Server) -> None:
        answer = server.post("/v1/completions/batch", json={"items": [{}] * 257})
        assert answer.status_code == 413
        assert "257" in answer.json()["error"]["message"]


class TestTokenize:
    def test_prompts_and_messages_give_the_ids_of_the_tokenizer(
        self, server: Server, tokenizer: transformers.PreTrainedTokenizerFast
    ) -> None:
        answer = server.post("/tokenize", json={"prompt": "the tin ü", "return_token_strs": True}).json()
        assert answer["tokens"] == tokenizer.encode("the tin ü")
        assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(answer["tokens"])
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
        chat = server.post("/tokenize", json={"model": "alpha", "messages": CHAT}).json()["tokens"]
        assert chat == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)

    def test_the_tokenizer_tells_what_it_is(
        self, server: Server, tokenizer: transformers.PreTrainedTokenizerFast
    ) -> None:
        info = server.get("/tokenizer_info").json()
        assert {name: info[name] for name in ("bos_token", "eos_token", "pad_token")} == tokenizer.special_tokens_map
        assert info["chat_template"] == tokenizer.chat_template
        # As lm-eval does: the id of the end token is what its text is cut into.
        ids = server.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
        assert ids == [tokenizer.eos_token_id]

    def test_an_adapter_s_own_template_is_told_and_what_is_unknown_refused(
        self, server: Server, checkpoints: Checkpoints
    ) -> None:
        own = "{{ messages[0].content }}"
        files = {**parts_of(checkpoints.spare), "chat_template": ("chat_template.jinja", own.encode())}
        server.post("/v1/adapters", data={"name": "own-words"}, files=files).raise_for_status()
        base = server.get("/tokenizer_info").json()
        assert server.get("/tokenizer_info", params={"model": BASE}).json() == base
        assert server.get("/tokenizer_info", params={"model": "alpha"}).json() == base
        assert server.get("/tokenizer_info", params={"model": "own-words"}).json() == base | {"chat_template": own}
        for params, status in ({"model": "nobody"}, 404), ({"model": ""}, 400), ({"modle": BASE}, 400):
            refused = server.get("/tokenizer_info", params=params)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, next(iter(params)))
        server.http.delete(f"{server.url}/v1/adapters/own-words").raise_for_status()

    def test_detokenize_is_the_way_back(self, server: Server) -> None:
        ids = server.post("/tokenize", json={"prompt": "the tin ü"}).json()["tokens"]
        assert server.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "the tin ü"}
        assert server.post("/detokenize", json={"tokens": [VOCAB_SIZE + 9]}).status_code == 400
