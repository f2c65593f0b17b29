"""Every sampling field on its way from a request's body to the engine, and its effect on an answer over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from pydantic import ValidationError

from kernels.sampling.maps import row_of
from kernels.sampling.parameters import PARAMETERS, Parameter
from kernels.sampling.sampling_request import Asked, RowSampling, ask
from service.api.admission.answer_constraints import TokenLists, token_lists
from service.api.admission.plans import NEUTRAL, build_sampling, model_defaults
from service.api.schema.requests import ChatRequest, CompletionRequest
from service.api.schema.responses import ResponsesRequest
from service.engine.ipc.messages import Sampling
from service.text.tokenizer import TextError, TextTokenizer
from tests.api.conftest import BASE, Checkpoints
from tests.support.http.server import Server, running_server
from tests.support.models.tiny_models import EOS_ID, VOCAB_SIZE

REQUIRED: dict[type[CompletionRequest] | type[ChatRequest], dict[str, Any]] = {
    CompletionRequest: {"prompt": "the"},
    ChatRequest: {"messages": [{"role": "user", "content": "the"}]},
}
MAX_TOKENS = 24
# Every field is away from its default, and no two fields are alike.
FIELDS: dict[str, Any] = {
    "max_tokens": MAX_TOKENS,
    "min_tokens": 3,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": -0.5,
    "frequency_penalty": 1.5,
    "logit_bias": {"9": -2.5, "17": 4.0},
    "seed": 11,
    "stop_token_ids": [8, 6],
    "ignore_eos": True,
}
# Made of several fields, by `service.api.admission.answer_constraints`.
GRAMMAR = "start: /a/"
LISTS = TokenLists(allowed_tokens=b"\0\6", bad_words=((9, 17),))
COMMON = {
    **FIELDS,
    "logit_bias": {9: -2.5, 17: 4.0},
    "stop_token_ids": (8, 6),
    "grammar": GRAMMAR,
    "allowed_tokens": LISTS.allowed_tokens,
    "bad_words": LISTS.bad_words,
    "logprob_token_ids": (),
    "eos_token_ids": (),
}
TABLE: list[tuple[type[CompletionRequest] | type[ChatRequest], dict[str, Any], dict[str, Any]]] = [
    (CompletionRequest, {"logprobs": 5, "echo": True}, {**COMMON, "logprobs": 5, "prompt_logprobs": 5}),
    # Tokens by their ids stand for the most likely ones, of the answer.
    (
        CompletionRequest,
        {"logprobs": 5, "echo": True, "logprob_token_ids": [7, 3]},
        {**COMMON, "logprobs": 0, "prompt_logprobs": 5, "logprob_token_ids": (7, 3)},
    ),
    # A chat has no `echo`, so nothing of its prompt is told.
    (ChatRequest, {"logprobs": True, "top_logprobs": 4}, {**COMMON, "logprobs": 4, "prompt_logprobs": None}),
]


def sampling_of(
    kind: type[CompletionRequest] | type[ChatRequest],
    *,
    grammar: str | None = None,
    lists: TokenLists | None = None,
    **fields: Any,
) -> Sampling:
    request = kind(model=BASE, **REQUIRED[kind], **fields)
    return build_sampling(
        request,
        max_tokens=MAX_TOKENS,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
        lists=lists or TokenLists(),
        grammar=grammar,
    )


class TestModelDefaults:
    NAMED: ClassVar = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05,
    }  # fmt: skip

    def defaults(self, tmp_path: Path, **config: Any) -> Mapping[str, float]:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return model_defaults(tmp_path)

    def test_they_stand_where_a_request_does_not_say(self, tmp_path: Path) -> None:
        config = {**self.NAMED, "do_sample": True, "eos_token_id": [2], "top_h": None, "max_new_tokens": 9}
        found = self.defaults(tmp_path, **config)
        for said in ({}, dict.fromkeys(self.NAMED)):
            sampling = build_sampling(
                CompletionRequest(prompt="the", **said), max_tokens=9, vocab_size=99, eos_token_ids=(), defaults=found
            )
            assert {name: getattr(sampling, name) for name in self.NAMED} == self.NAMED
        off = dict(NEUTRAL)
        sampling = build_sampling(
            CompletionRequest(prompt="the", **off | {"top_k": 0}),
            max_tokens=9,
            vocab_size=99,
            eos_token_ids=(),
            defaults=found,
        )
        assert {name: getattr(sampling, name) for name in off} == off

    def test_what_is_not_named_is_openai_s(self, tmp_path: Path) -> None:
        assert model_defaults(tmp_path) == NEUTRAL
        assert self.defaults(tmp_path, presence_penalty=9, frequency_penalty="no") == NEUTRAL
        assert self.defaults(tmp_path, top_p=0.8, temperature=None) == {**NEUTRAL, "top_p": 0.8}

    @pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 2}, {"top_k": -5}])
    def test_what_no_request_may_have_is_refused_at_the_start(self, tmp_path: Path, wrong: dict[str, Any]) -> None:
        (name,) = wrong
        with pytest.raises(TextError, match=rf"generation_config\.json.*`{name}`.*--sampling-defaults openai"):
            self.defaults(tmp_path, **wrong)


def test_a_model_s_defaults_are_served_unless_the_operator_says_no(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """top_k 1 is greedy, whatever the seed."""
    model = tmp_path / "model"
    shutil.copytree(checkpoints.base, model)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "top_k": 1}))
    body = {"prompt": "the", "max_tokens": 8, "n": 6, "seed": 5}
    num_texts = {}
    for choice in ("model", "openai"):
        with running_server(model, tmp_path / choice, sampling_defaults=choice) as server:
            choices = server.post("/v1/completions", json=body).json()["choices"]
            num_texts[choice] = len({one["text"] for one in choices})
            assert ("sampling defaults" in server.log) == (choice == "model")
            said = server.post("/v1/completions", json={**body, "top_k": 0}).json()["choices"]
            assert len({one["text"] for one in said}) > 1
    assert num_texts["model"] == 1 < num_texts["openai"]


def is_default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return bool(value == default)


@pytest.mark.parametrize(("kind", "own", "expected"), TABLE, ids=["completion", "tokens by id", "chat"])
def test_every_field_reaches_the_engine(
    kind: type[CompletionRequest] | type[ChatRequest], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    sampling = sampling_of(kind, grammar=GRAMMAR, lists=LISTS, **FIELDS, **own)
    assert {name: getattr(sampling, name) for name in sampling.__struct_fields__} == expected


def test_the_table_leaves_no_field_at_its_default() -> None:
    for field in msgspec.structs.fields(Sampling):
        if field.name == "eos_token_ids":  # an adapter's, and no field of a request
            continue
        assert not all(is_default(field, expected[field.name]) for _, _, expected in TABLE), field.name


@pytest.mark.parametrize("kind", REQUIRED, ids=lambda kind: kind.__name__)
def test_what_is_null_or_left_out_is_the_default(kind: type[CompletionRequest] | type[ChatRequest]) -> None:
    default = Sampling(max_tokens=MAX_TOKENS, stop_token_ids=(EOS_ID,))
    assert sampling_of(kind) == sampling_of(kind, **dict.fromkeys(FIELDS)) == default


def test_end_tokens_stop_beside_those_of_the_request() -> None:
    assert sampling_of(CompletionRequest, stop_token_ids=[8, EOS_ID]).stop_token_ids == (8, EOS_ID)
    assert sampling_of(CompletionRequest, stop_token_ids=[8]).stop_token_ids == (8, EOS_ID)


def test_end_tokens_that_the_model_cannot_produce_are_left_out() -> None:
    request = CompletionRequest(model=BASE, **REQUIRED[CompletionRequest])
    ids = (-1, EOS_ID, VOCAB_SIZE - 1, VOCAB_SIZE, 10**9)
    sampling = build_sampling(request, max_tokens=MAX_TOKENS, vocab_size=VOCAB_SIZE, eos_token_ids=ids)
    assert sampling.stop_token_ids == (EOS_ID, VOCAB_SIZE - 1)


def asked(**fields: Any) -> Asked:
    """What the op is told for a request."""
    request = sampling_of(CompletionRequest, **fields)
    return ask([RowSampling(0, row_of(request), seed=0, index=0, slot=0)], num_logits=1, vocab=VOCAB_SIZE)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 10**400])
def test_top_k_is_off_at_both_ends(top_k: int) -> None:
    assert (asked(top_k=1).facts.num_ranked, asked(top_k=top_k).facts) == (1, asked().facts)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_parameter_is_declared_once_for_client_and_engine(parameter: Parameter) -> None:
    """Its field in requests takes what the engine takes, and says what it does; the engine's message has it."""
    step = 1 if parameter.is_whole else 1e-3
    around = (parameter.least - step, parameter.least, parameter.least + step, parameter.most, parameter.most + step)
    for value in around:
        sent = {parameter.name: int(value) if parameter.is_whole else value}
        if parameter.takes(value):
            assert getattr(sampling_of(CompletionRequest, **sent), parameter.name) == value
        elif parameter.is_whole and value > parameter.most:
            assert getattr(sampling_of(CompletionRequest, **sent), parameter.name) == parameter.most
        else:
            with pytest.raises(ValidationError):
                sampling_of(CompletionRequest, **sent)
    assert parameter.takes(parameter.neutral) and getattr(Sampling(max_tokens=1), parameter.name) == parameter.neutral
    for kind in (CompletionRequest, ChatRequest, ResponsesRequest):
        assert parameter.meaning in str(kind.model_fields[parameter.name].description)


def test_a_bad_word_is_barred_as_a_text_begins_with_it_and_behind_a_space(tmp_path: Path) -> None:
    """A space of its own makes the word behind it no other; one that is part of a token does."""
    vocabulary = {"a": 0, "b": 1, "Ġ": 2, "Ġa": 3, "ab": 4}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["Ġ", "a"], ["a", "b"]]}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"version": "1.0", "added_tokens": [], "model": model, "pre_tokenizer": byte_level, "decoder": byte_level}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    tokenizer = TextTokenizer.load(tmp_path)
    for words, expected in ((["a"], ((0,), (3,))), ([" ab", "ab"], ((4,), (3, 1))), (["b", "ba"], ((1,), (1, 0)))):
        assert token_lists(CompletionRequest(prompt="", bad_words=words), tokenizer, 5).bad_words == expected


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the thing in the tin"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the thing in the tin"}]},
}
HOT: dict[str, Any] = {"temperature": 2, "seed": 5}


@pytest.mark.parametrize("path", BODIES)
class TestAnswers:
    def answer(self, server: Server, path: str, **fields: Any) -> list[int]:
        """Token ids of an answer of 24 tokens."""
        body = {"model": BASE, "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True, **BODIES[path]}
        answer = server.post(path, json=body | fields)
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        assert len(token_ids) == MAX_TOKENS
        return token_ids

    def test_temperature_is_one_unless_told(self, server: Server, path: str) -> None:
        told = self.answer(server, path, seed=5, temperature=1)
        assert told == self.answer(server, path, seed=5)
        assert told != self.answer(server, path, seed=5, temperature=2)

    @pytest.mark.parametrize("cut", [{"top_k": 1}, {"min_p": 1}, {"top_p": 1e-6}, {"top_p": 0}], ids=str)
    def test_what_leaves_the_likeliest_token_alone_makes_heat_greedy(
        self, server: Server, path: str, cut: dict[str, float]
    ) -> None:
        greedy = self.answer(server, path, temperature=0)
        assert self.answer(server, path, **HOT) != greedy
        assert self.answer(server, path, **HOT, **cut) == greedy

    @pytest.mark.parametrize(
        "penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 10}], ids=str
    )
    def test_a_penalty_makes_a_greedy_answer_repeat_less(
        self, server: Server, path: str, penalty: dict[str, float]
    ) -> None:
        greedy = self.answer(server, path, temperature=0)
        assert len(set(greedy)) < MAX_TOKENS
        assert len(set(self.answer(server, path, temperature=0, **penalty))) > len(set(greedy))

    def test_only_allowed_tokens_are_chosen(self, server: Server, path: str) -> None:
        assert set(self.answer(server, path, allowed_token_ids=[50, 61, 50], **HOT)) == {50, 61}

    def test_a_bad_word_is_not_written_at_its_beginning_nor_later(self, server: Server, path: str) -> None:
        biased = {"temperature": 0, "logit_bias": {"50": 100, "61": 50}}
        char = server.post("/detokenize", json={"tokens": [50]}).json()["prompt"]
        assert self.answer(server, path, **biased, bad_words=[char]) == [61] * MAX_TOKENS
        assert self.answer(server, path, **biased, bad_words=[char * 2, "absent"]) == [50, 61] * (MAX_TOKENS // 2)
        assert self.answer(server, path, **biased, bad_words=[]) == [50] * MAX_TOKENS

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"allowed_token_ids": []}, "allowed_token_ids"),
            ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
            ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
            ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids"),
            ({"bad_words": "word"}, "bad_words"),
            ({"bad_words": [""]}, "bad_words[0]"),
            ({"bad_words": [" "]}, "bad_words"),
            ({"bad_words": ["x" * 1001]}, "bad_words[0]"),
            ({"bad_words": ["x" * 1000] * 5}, "bad_words"),
            ({"bad_words": ["x"] * 129}, "bad_words"),
        ],
        ids=str,
    )
    def test_rules_that_cannot_be_kept_are_refused(
        self, server: Server, path: str, fields: dict[str, Any], param: str
    ) -> None:
        answer = server.post(path, json={**BODIES[path], "max_tokens": 4, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    def test_a_bias_forces_a_token(self, server: Server, path: str) -> None:
        assert 50 not in self.answer(server, path, temperature=0)
        assert self.answer(server, path, temperature=0, logit_bias={"50": 100}) == [50] * MAX_TOKENS

    def test_a_seed_repeats_and_another_does_not(self, server: Server, path: str) -> None:
        first, second, other = (self.answer(server, path, seed=seed) for seed in (11, 11, 12))
        assert first == second != other
