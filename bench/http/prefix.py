"""The prefix cache over HTTP: what of the prompts is found, and when first tokens come.

python -m bench.http.prefix [--device cpu] [--shape tiny] [--only CASE ...] [--users 8] [--turns 6] [--requests 64]
                            [--system-tokens 1500] [--own-tokens 700] [--output-tokens 64] [--adapters 1000]
                            [--sessions 64] [--kv-bytes BYTES] [--engine NAME=VALUE ...] [--json FILE]

chats     --users chats of --turns turns behind one system prompt, all turns of one number at once. The template begins
          a thought, and shows none of those before
shared    --requests prompts that begin with one of eight texts of --system-tokens and go on with --own-tokens of their
          own, all at once: as chats, whose system prompt is common, and as raw prompts. A hit has found all whole
          blocks that are common
adapters  each of --adapters adapters twice with one system prompt, so many at a time as the KV cache holds; then once
          more when each name stands for a new version
replicas  --sessions chats as `chats`, to a server with one engine and to one with two; on a machine with two devices,
          or a CPU

Of `chats` a first run, with other texts, warms the server and is not counted.

A share of an unbounded cache's is of the tokens that one would find which keeps all that it was sent, token by token.
The model and its adapters are random numbers, written to a temporary directory: 16 GB for 8b.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.arguments import facts_of, load_of, parser_of
from bench.http.http_client import Answer, complete_all
from bench.server import upload
from bench.shapes import SEED, SHAPES, Shape, write_checkpoint
from bench.steps.in_process import EngineLoad
from service.engine.sequences.sequence import num_equal
from tests.support.http.server_process import Server, running_server

CASES = ("chats", "shared", "adapters", "replicas")
NUM_BEGINNINGS = 8
_BLOCK_TOKENS = 16
_LEAST_CONTEXT_TOKENS = 8192
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # a token each in checkpoints of `bench.shapes`
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


class Client:
    """Texts that no other request has had, and answers to them."""

    def __init__(self, server: Server, num_output_tokens: int, seed: int = SEED) -> None:
        self.server, self._num_output_tokens, self._random = server, num_output_tokens, random.Random(seed)

    def text(self, num_tokens: int) -> str:
        return "".join(self._random.choices(_LETTERS, k=num_tokens))

    def ask(self, path: str, bodies: list[dict[str, Any]]) -> tuple[list[Answer], list[float]]:
        """All at once, streamed; the answers, and milliseconds to their first tokens."""
        same = {"model": "base", "max_tokens": self._num_output_tokens, "temperature": 0, "ignore_eos": True}
        same |= {"stream": True, "stream_options": {"include_usage": True}}
        answers, started, _ = complete_all(self.server.url, [same | body for body in bodies], path)
        return answers, [(answer.token_seconds[0] - started) * 1e3 for answer in answers]

    def tokens_of(self, messages: list[dict[str, str]]) -> list[int]:
        tokens: list[int] = (
            self.server.post("/tokenize", json={"messages": messages}).raise_for_status().json()["tokens"]
        )
        return tokens


def chats(client: Client, num_users: int, num_turns: int, num_system: int) -> dict[str, Any]:
    """Figures of all turns together, and first tokens turn by turn."""
    system = {"role": "system", "content": client.text(num_system)}
    histories = [[system] for _ in range(num_users)]
    known: list[list[int]] = []
    firsts: list[list[float]] = []
    num_prompt = num_cached = num_findable = 0
    for _ in range(num_turns):
        for history in histories:
            history.append({"role": "user", "content": client.text(num_system // 15)})
        answers, first_ms = client.ask("/v1/chat/completions", [{"messages": history} for history in histories])
        firsts.append(first_ms)
        for history, answer in zip(histories, answers, strict=True):
            prompt = client.tokens_of(history)
            num_findable += max((num_equal(one, prompt[:-1]) for one in known), default=0)
            known.append(prompt)
            num_prompt, num_cached = num_prompt + answer.num_prompt, num_cached + answer.num_cached
            history.append({"role": "assistant", "content": f"{answer.text}</think>{client.text(30)}"})
    return {
        "prompt_tokens": num_prompt,
        "found_tokens": num_cached,
        "found_of_all": num_cached / num_prompt,
        "found_of_unbounded": num_cached / num_findable,
        "first_token_ms_p50_by_turn": [statistics.median(one) for one in firsts],
        "first_token_ms_p50_after_first_turn": statistics.median(ms for one in firsts[1:] for ms in one),
    }


def shared(client: Client, num_requests: int, num_system: int, num_own: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in ("chats", "raw"):
        beginnings = [client.text(num_system) for _ in range(NUM_BEGINNINGS)]
        texts = [(beginnings[index % NUM_BEGINNINGS], client.text(num_own)) for index in range(num_requests)]
        if kind == "raw":
            answers, first_ms = client.ask("/v1/completions", [{"prompt": common + own} for common, own in texts])
        else:
            answers, first_ms = client.ask("/v1/chat/completions", [{"messages": _chat_of(*both)} for both in texts])
        least = num_system // _BLOCK_TOKENS * _BLOCK_TOKENS
        figures[kind] = {
            "requests": num_requests,
            "hits": sum(answer.num_cached >= least for answer in answers),
            "found_of_all": sum(answer.num_cached for answer in answers) / sum(answer.num_prompt for answer in answers),
            "first_token_ms_p50": statistics.median(first_ms),
        }
    return figures


def _chat_of(system: str, user: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def adapters(client: Client, directory: Path, num_adapters: int, num_system: int) -> dict[str, Any]:
    """Requests of each kind that found anything, and of the second ones those that found all whole blocks."""
    server = client.server
    for index in range(num_adapters):
        upload(server, f"adapter-{index}", directory, lora_alpha=index + 1)
    prompt = client.text(num_system)
    num_tokens = num_system + 2 * _BLOCK_TOKENS
    num_at_once = max(1, int(server.metric("kv_blocks_total")) * _BLOCK_TOKENS // num_tokens - 1)
    found: dict[str, list[int]] = {"first": [], "second": [], "moved": []}

    def ask(name: str, numbers: range) -> None:
        for index in numbers:
            answers, _ = client.ask("/v1/completions", [{"model": f"adapter-{index}", "prompt": prompt}])
            found[name] += [answer.num_cached for answer in answers]

    groups = [range(start, min(start + num_at_once, num_adapters)) for start in range(0, num_adapters, num_at_once)]
    for group in groups:
        ask("first", group)
        ask("second", group)
        for index in group:
            upload(server, f"adapter-{index}", directory, lora_alpha=num_adapters + index + 1, is_version=True)
        ask("moved", group)
    least = (num_system - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
    return {
        "adapters": num_adapters,
        "at_a_time": num_at_once,
        "first_found_anything": sum(num > 0 for num in found["first"]),
        "second_found_all": sum(num >= least for num in found["second"]),
        "moved_found_anything": sum(num > 0 for num in found["moved"]),
    }


def write_adapter(directory: Path, shape: Shape, dtype: torch.dtype) -> None:
    """A PEFT directory of one small adapter, of the first layer."""
    directory.mkdir()
    base = "base_model.model.model.layers.0.mlp.up_proj"
    sizes = {"lora_A": (1, shape.hidden_size), "lora_B": (shape.intermediate_size, 1)}
    tensors = {f"{base}.{side}.weight": torch.full(size, 0.01, dtype=dtype) for side, size in sizes.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 1, "lora_alpha": 1}
    config["target_modules"] = ["layers.0.mlp.up_proj"]
    (directory / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = parser_of("bench.http.prefix", __doc__)
    parser.set_defaults(shape="tiny", output_tokens=64)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    for name, number in (("users", 8), ("turns", 6), ("system-tokens", 1500), ("own-tokens", 700)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--kv-bytes", help="default: the server's own, on a CPU 1280 MiB")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if shape is None:
        parser.error("the bundled model has no room for these prompts; name another --shape")
    result = facts_of(given)
    with tempfile.TemporaryDirectory() as scratch:
        for name, figures in measure(given, load_of(given), shape, Path(scratch)):
            result[name] = figures
            print(json.dumps({name: figures}, indent=1), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1))


def measure(
    given: argparse.Namespace, load: EngineLoad, shape: Shape, scratch: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of each case."""
    model_dir, adapter_dir = scratch / "model", scratch / "adapter"
    model_dir.mkdir()
    shape = replace(shape, max_position_embeddings=max(shape.max_position_embeddings, _LEAST_CONTEXT_TOKENS))
    write_checkpoint(model_dir, shape, load.device, load.dtype)
    (model_dir / "chat_template.jinja").write_text(_TEMPLATE)
    write_adapter(adapter_dir, shape, load.dtype)
    settings: dict[str, Any] = {"model_name": "base", "device": load.device, "num_threads": given.threads}
    if load.device != "cpu":  # as the server chooses
        settings |= {"kv_bytes": None, "adapter_row_bytes": None}
    settings |= {"kv_bytes": given.kv_bytes or settings.get("kv_bytes", "1280MiB"), **load.engine_fields}

    @contextmanager
    def client(num_engines: int) -> Iterator[Client]:
        with running_server(model_dir, scratch / "server", replicas=num_engines, **settings) as server:
            yield Client(server, given.output_tokens)

    if {*given.only} - {"replicas"}:
        with client(1) as one:
            if "chats" in given.only:
                chats(one, given.users, given.turns, given.system_tokens)  # with what is captured at first use
                yield "chats", chats(one, given.users, given.turns, given.system_tokens)
            if "shared" in given.only:
                yield "shared", shared(one, given.requests, given.system_tokens, given.own_tokens)
            if "adapters" in given.only:
                yield "adapters", adapters(one, adapter_dir, given.adapters, given.system_tokens)
    if "replicas" in given.only:
        shares = []
        for num in (1, 2):
            with client(num) as one:
                shares.append(chats(one, given.sessions, given.turns, given.system_tokens)["found_of_all"])
        yield "replicas", {"found_of_all": shares, "two_of_one": shares[1] / shares[0]}


if __name__ == "__main__":
    main()
