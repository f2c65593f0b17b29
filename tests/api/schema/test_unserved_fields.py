"""Every field of the clients' own APIs is known: what asks for nothing is accepted, what asks is served or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from service.api.schema.error_messages import bad_request
from service.api.schema.requests import ChatRequest, CompletionRequest
from service.api.schema.unserved_fields import GENERATION_FIELDS, UnservedField
from tests.api.conftest import BASE
from tests.support.http.server import Server

ROOT = Path(__file__).resolve().parents[3]
CHAT: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, type[CompletionRequest | ChatRequest], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"model": BASE, "prompt": "the", "max_tokens": 2}),
    ("/v1/chat/completions", ChatRequest, {"model": BASE, "messages": CHAT, "max_tokens": 2}),
]
PATHS = [path for path, _, _ in BODIES]

# What a client sends that writes out every field of vLLM's requests with its default.
VLLM: dict[str, Any] = {
    "frequency_penalty": None, "logit_bias": None, "n": 1, "presence_penalty": None, "seed": None, "stop": [],
    "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None, "response_format": None,
    "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None, "watermarking": None,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "truncation_side": None, "allowed_token_ids": None, "prompt_logprobs": None,
    "logprob_token_ids": None, "bad_words": [], "echo": False, "structured_outputs": None, "priority": 0,
    "request_id": "d5f0", "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_mm_kwargs": True, "cache_salt": None,
    "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None,
    "thinking_token_budget": None, "stream_interval": None,
}  # fmt: skip
VLLM_COMPLETION = VLLM | {"logprobs": None, "suffix": None, "prompt_embeds": None, "add_special_tokens": True}
VLLM_CHAT = VLLM | {
    "logprobs": False, "top_logprobs": 0, "max_completion_tokens": None, "tools": None, "tool_choice": "none",
    "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "documents": None, "chat_template": None,
    "chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None, "return_prompt_text": None,
}  # fmt: skip
# The same of SGLang's.
SGLANG: dict[str, Any] = {
    "frequency_penalty": 0.0, "logit_bias": None, "n": 1, "presence_penalty": 0.0, "seed": None, "stop": None,
    "stream": False, "stream_options": None, "temperature": 1.0, "top_p": 1.0, "user": None,
    "return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0,
    "return_cached_tokens_details": False, "return_token_ids": False, "top_k": -1, "min_p": 0.0, "min_tokens": 0,
    "regex": None, "ebnf": None, "repetition_penalty": 1.0, "stop_token_ids": None, "stop_regex": None,
    "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True, "lora_path": None, "session_id": None,
    "session_params": None, "response_format": None, "custom_params": None, "custom_logit_processor": None,
    "images_config": None, "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None,
    "routed_dp_rank": None, "disagg_prefill_dp_rank": None, "data_parallel_rank": None, "rid": None,
    "extra_key": None, "cache_salt": None, "ngram_corpus_id": None, "priority": None,
}  # fmt: skip
SGLANG_COMPLETION = SGLANG | {
    "best_of": None, "echo": False, "logprobs": None, "suffix": None, "json_schema": None, "custom_labels": None,
}  # fmt: skip
SGLANG_CHAT = SGLANG | {
    "logprobs": False, "top_logprobs": None, "max_completion_tokens": None, "tools": None, "tool_choice": "auto",
    "parallel_tool_calls": True, "return_prompt_token_ids": False, "return_meta_info": False, "reasoning_effort": None,
    "task": None, "continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True,
    "chat_template_kwargs": None, "max_dynamic_patch": None, "min_dynamic_patch": None, "use_audio_in_video": False,
    "input_ids": None,
}  # fmt: skip
# Everything that OpenAI's reference gives a default, and what its clients send along.
OPENAI_COMPLETION: dict[str, Any] = {
    "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "n": 1,
    "presence_penalty": 0, "seed": None, "stop": None, "stream_options": {"include_usage": False}, "suffix": "",
    "temperature": 1, "top_p": 1, "user": "ann",
}  # fmt: skip
OPENAI_CHAT: dict[str, Any] = {
    "audio": None, "frequency_penalty": 0, "function_call": "auto", "functions": [], "logit_bias": {},
    "logprobs": False, "max_completion_tokens": None, "metadata": {"a": "b"}, "modalities": ["text"],
    "moderation": None, "n": 1, "parallel_tool_calls": True, "prediction": None, "presence_penalty": 0,
    "prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h", "reasoning_effort": None,
    "response_format": {"type": "text"}, "safety_identifier": "x", "seed": None, "service_tier": "auto",
    "stop": None, "store": True, "stream_options": {}, "temperature": 1, "tool_choice": "auto", "tools": [],
    "top_logprobs": None, "top_p": 1, "user": "ann", "verbosity": "medium", "web_search_options": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_the_openai_client_is_known(body: type[CompletionRequest | ChatRequest], params: Any) -> None:
    assert set(params.__annotations__) <= set(body.model_json_schema()["properties"])


@pytest.mark.parametrize(
    ("path", "defaults"),
    [
        *(("/v1/completions", fields) for fields in (VLLM_COMPLETION, SGLANG_COMPLETION, OPENAI_COMPLETION)),
        *(("/v1/chat/completions", fields) for fields in (VLLM_CHAT, SGLANG_CHAT, OPENAI_CHAT)),
    ],
    ids=["vLLM", "SGLang", "OpenAI", "vLLM chat", "SGLang chat", "OpenAI chat"],
)
def test_a_request_with_every_default_written_out_is_answered_like_one_without(
    server: Server, path: str, defaults: dict[str, Any]
) -> None:
    body = {**next(body for one, _, body in BODIES if one == path), "logit_bias": {"50": 100}}
    answer = server.post(path, json={**defaults, **body})
    assert answer.status_code == 200, answer.text
    plain = server.post(path, json=body)
    assert answer.json()["choices"] == plain.json()["choices"]
    batch = server.post("/v1/completions/batch", json={"items": [{**defaults, **body}]})
    assert batch.json()["items"][0]["choices"] == plain.json()["choices"]


def _asking(row: UnservedField) -> Any:
    """A value that asks for something: none of those that are alike in Python but not in JSON is one that does not."""
    return next(value for value in (True, 1, 0, False, ["x"]) if row.asks(value))


@pytest.mark.parametrize("row", GENERATION_FIELDS.values(), ids=lambda row: row.name)
@pytest.mark.parametrize(("schema", "body"), [one[1:] for one in BODIES], ids=PATHS)
def test_a_row_accepts_what_asks_for_nothing_and_refuses_the_rest_by_name(
    schema: type[CompletionRequest | ChatRequest], body: dict[str, Any], row: UnservedField
) -> None:
    if row.name in schema.model_fields:  # served here, and not by the other
        return
    for value in (None, *row.neutral):
        schema.model_validate({**body, row.name: value})
    if row.is_inert:
        schema.model_validate({**body, row.name: {"any": ["thing"]}})
        return
    with pytest.raises(ValidationError) as caught:
        schema.model_validate({**body, row.name: _asking(row)})
    error = bad_request(caught.value.errors())
    assert error.param == row.name
    assert error.message.startswith(f"`{row.name}` is not supported by this server; ")


@pytest.mark.parametrize("path", PATHS)
def test_what_asks_for_nothing_is_taken_whatever_it_is_called(server: Server, path: str) -> None:
    """As bodies are written of models whose every field has a default."""
    body = next(body for one, _, body in BODIES if one == path)
    nothing = {"do_remote_decode": False, "do_remote_prefill": False, "remote_host": None}
    options = {"stream": True, "stream_options": {"include_usage": None, "of_tomorrow": None}}
    for more in ({"of_tomorrow": None, "logits_processors": []}, {"kv_transfer_params": nothing}, options):
        assert server.post(path, json={**body, **more}).status_code == 200, more
    for more in ({"of_tomorrow": False}, {"kv_transfer_params": {**nothing, "do_remote_decode": True}}):
        assert server.post(path, json={**body, **more}).json()["error"]["param"] == next(iter(more)), more


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", True),
        ("use_beam_search", 0),
        ("priority", False),
        ("return_hidden_states", "last"),
        ("tools", {}),
        ("custom_params", {"threshold": 0}),
    ],
)
def test_values_that_only_python_takes_for_neutral_ask(name: str, value: Any) -> None:
    assert GENERATION_FIELDS[name].asks(value)


@pytest.mark.parametrize("path", PATHS)
def test_a_refusal_says_what_to_do_instead(server: Server, path: str) -> None:
    body = next(body for one, _, body in BODIES if one == path)
    for name in ("lora_path", "adapter_source"):
        answer = server.post(path, json={**body, name: "alpha"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == name
        assert error["message"] == f"`{name}` is not supported by this server; name the adapter in `model`."


def test_openapi_tells_the_rows(server: Server) -> None:
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        properties = schemas[name]["properties"]
        assert set(GENERATION_FIELDS) <= set(properties)
        assert properties["use_beam_search"]["enum"] == [None, False]
        assert "ignored" in properties["user"]["description"]
    assert "include_obfuscation" in schemas["StreamOptions"]["properties"]


def test_the_page_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/clients_page.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class TestContinuousUsage:
    def test_every_chunk_counts_the_tokens_so_far(self, client: openai.OpenAI) -> None:
        options: Any = {"continuous_usage_stats": True, "include_usage": True}
        asked: Any = {"model": BASE, "stream": True, "stream_options": options, "temperature": 0, "max_tokens": 5}
        ignoring = {"extra_body": {"ignore_eos": True}}
        for chunks in (
            client.completions.create(prompt="the", **asked, **ignoring),
            client.chat.completions.create(messages=CHAT, **asked, **ignoring),
        ):
            usages, choices = zip(*((chunk.usage, chunk.choices) for chunk in chunks), strict=True)
            counts = [usage.completion_tokens for usage in usages]
            assert counts == sorted(counts)
            assert counts[-1] == 5
            assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
            assert [not one for one in choices].count(True) == 1

    @pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}])
    def test_it_is_part_of_include_usage(self, client: openai.OpenAI, options: Any) -> None:
        asked: Any = {
            "model": BASE, "stream": True, "max_tokens": 3,
            "stream_options": {"continuous_usage_stats": True, **options},
        }  # fmt: skip
        for chunks in (
            client.completions.create(prompt="the", **asked), client.chat.completions.create(messages=CHAT, **asked)
        ):  # fmt: skip
            assert all(chunk.usage is None and chunk.choices for chunk in chunks)

    def test_asking_for_it_without_a_stream_is_refused(self, server: Server) -> None:
        for option in ("continuous_usage_stats", "include_usage"):
            for path, _, body in BODIES:
                for value in (True, None):
                    answer = server.post(path, json={**body, "stream_options": {option: value}})
                    assert (answer.status_code, "only allowed with `stream`" in answer.text) == (400, True)
                assert server.post(path, json={**body, "stream_options": {option: False}}).status_code == 200


def test_no_field_is_in_the_table_and_served_by_both() -> None:
    served = set(CompletionRequest.model_fields) & set(ChatRequest.model_fields)
    assert not served & set(GENERATION_FIELDS)
