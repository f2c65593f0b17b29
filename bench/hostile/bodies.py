"""JSON bodies that cost: stop strings, lists, long texts, many choices, log probabilities, floods of calls."""

from __future__ import annotations

import json
from typing import Any

from bench.hostile.target import Attack, Target, in_turn, spread

MIB = 1 << 20
BODY_BYTES = 4 * MIB  # `--max-body-bytes`
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "the", "max_tokens": 200, "ignore_eos": True, "n": 16}


def attacks(target: Target) -> dict[str, Attack]:
    """By what is told of them."""
    return {**_completions(target), **_texts(target), **_chats(target), **_lists(target), **_floods(target)}


def _completions(target: Target) -> dict[str, Attack]:
    stops = [["a" * length + chr(65 + index) for index in range(32)] for length in (999, 127)]
    item = {"model": target.model, "prompt": "lamp tiger " * 20, "max_tokens": 2, "stop": stops[1]}
    batch = json.dumps({"items": [item] * 256}).encode()
    scored = {"prompt": ["lamp " * 60] * 30, "echo": True, "logprobs": 20, "max_tokens": 1}
    return {
        "16 choices, nothing else": target.post(COMPLETIONS, LONG),
        "16 choices with 32 stop strings of 1,000 characters": target.post(COMPLETIONS, {**LONG, "stop": stops[0]}),
        "16 choices with 32 stop strings of 128 characters": target.post(COMPLETIONS, {**LONG, "stop": stops[1]}),
        "16 choices with 20 log probabilities": target.post(COMPLETIONS, {**LONG, "logprobs": 20}),
        "a batch of 256, each with 32 stop strings": target.post("/v1/completions/batch", batch),
        "log probabilities of 30 prompts": target.post(COMPLETIONS, scored),
    }


def _texts(target: Target) -> dict[str, Attack]:
    name = "a" * 100_000
    return {
        "/detokenize of 1,048,576 tokens": target.post("/detokenize", {"tokens": [9] * MIB}),
        "/tokenize of 1,000,000 characters": target.post("/tokenize", {"prompt": "lamp tiger " * 90_000}),
        "4 texts of 1,000,000 characters without a blank": target.post("/tokenize", {"prompt": "ab" * 500_000}, 4),
        "names of 100,000 characters, as model, adapter and prefix of a listing": in_turn(
            target.post(COMPLETIONS, {"model": name, "prompt": "a"}),
            target.post(COMPLETIONS, {"model": "é\u0301" * 50_000, "prompt": "a"}),
            target.post("/v1/load_lora_adapter", {"lora_name": name[:60_000], "lora_path": name[:1_000]}),
            lambda: target.request("GET", f"/v1/adapters/{name[:10_000]}"),
            lambda: target.request("GET", f"/v1/adapters?prefix={name[:10_000]}"),
        ),
    }


def _chats(target: Target) -> dict[str, Attack]:
    user = {"role": "user", "content": "a"}
    called = {"function": {"name": "f", "arguments": "[" + "[]," * 20_000 + "[]]"}}
    parts = [{"type": "text", "text": "a"}] * 16_000
    numbers = {"messages": [user], "chat_template_kwargs": {"a": [1] * MIB}, "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    calls = [{"role": "assistant", "tool_calls": [called]}] * 64
    return {
        "a message of 16,000 parts": target.post(CHATS, {"messages": [{**user, "content": parts}]}),
        "16,000 messages": target.post(CHATS, {"messages": [user] * 16_000}),
        "1,048,576 numbers for the template": target.post(CHATS, numbers),
        "JSON of 4 MiB inside of tool calls": target.post(CHATS, {"messages": calls}),
        "4 MB of fractions as arguments, tools, schemas, variables and types": in_turn(
            *(target.post(CHATS, {"messages": [user], "max_tokens": 1, **fields}) for fields in _of_fractions(user))
        ),
        "2,000 tools": target.post(CHATS, {"messages": [user], "tools": [tool] * 2_000}),
    }


def _of_fractions(user: dict[str, Any]) -> list[dict[str, Any]]:
    """Fields with as many as a body may hold, each as long as it may be: they take longest to write."""
    many = {"a": [1 / 3 + number for number in range(200_000)]}
    called = {"function": {"name": "f", "arguments": many}}
    tag = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": many, "end": "b"}], "triggers": ["<"]}
    return [
        {"messages": [user, {"role": "assistant", "tool_calls": [called]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": many}}]},
        {"guided_json": many},
        {"response_format": tag},
        {"response_format": {"type": many}},
        {"chat_template_kwargs": many},
        {"messages": [{**user, "content": [{"type": many}]}]},
    ]


def _lists(target: Target) -> dict[str, Attack]:
    short = {"prompt": "a", "max_tokens": 20, "n": 8}
    bias = {str(number): 1.0 for number in range(200_000)}
    empty = b"[" + b"[]," * (BODY_BYTES // 3 - 2) + b"[]]"
    announced = target.head("POST", COMPLETIONS, "Content-Type: application/json", f"Content-Length: {BODY_BYTES}")
    return {
        "a body of 4 MiB of empty lists": target.post(COMPLETIONS, empty),
        "8 bodies of 4 MiB of empty lists at once": target.post(COMPLETIONS, empty, 8),
        "8 bodies of 4 MiB that end early": target.send(announced + b"\r\n" + b"[" * (BODY_BYTES - MIB), times=8),
        "logit_bias, bad_words and lists of tokens, the most and more": in_turn(
            *(
                target.post(COMPLETIONS, {**short, "logit_bias": dict(list(bias.items())[:most])})
                for most in (300, None)
            ),
            *(target.post(COMPLETIONS, {**short, "bad_words": ["ab"] * number}) for number in (128, 100_000)),
            *(target.post(COMPLETIONS, {**short, "allowed_token_ids": [9] * number}) for number in (262_144, 10**6)),
            *(target.post(COMPLETIONS, {**short, "stop_token_ids": [9] * number}) for number in (512, 10**6)),
        ),
        "JSON of 1,000,000 brackets, numbers of 100,000 digits, broken bytes": in_turn(
            target.post(COMPLETIONS, b"[" * 10**6),
            target.post(COMPLETIONS, b'{"a":' * 200_000),
            target.post(COMPLETIONS, b'{"model": "base", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}"),
            target.post(COMPLETIONS, b'{"model": "base", "prompt": "\\ud800\xff"}'),
        ),
    }


def _floods(target: Target) -> dict[str, Attack]:
    flood = {"prompt": "the", "max_tokens": 100, "ignore_eos": True, "n": 8}

    def get(path: str) -> Attack:
        return lambda: target.request("GET", path)

    listings = ("/v1/adapters?limit=1000", "/v1/models", "/metrics", "/tokenizer_info", "/openapi.json", "/docs")
    inputs = {"input": ["lamp tiger"] * 2_048}
    return {
        "a flood of 512 sequences": target.post(COMPLETIONS, flood, 64),
        "64 long texts to tokenize at once": target.post("/tokenize", {"prompt": "lamp tiger " * 9_000}, 64),
        "2,048 inputs of /v1/embeddings": target.post("/v1/embeddings", inputs),
        "300 listings and /metrics": spread([get(path) for path in listings] * 50, 16),
        "2,000 requests that are refused": spread([target.post(COMPLETIONS, b"{")] * 2_000, 16),
    }
