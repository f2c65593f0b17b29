"""Train an adapter for Qwen3.5 with PEFT, upload it and ask it something.

    multilora serve --model-dir Qwen3.5-0.8B
    python -m examples.qwen3_5 --model-dir Qwen3.5-0.8B --texts my-answers.jsonl --name my-adapter

The first is a checkpoint as it is published, with its tokenizer. Each line of the second holds a conversation,
whose last answer is learned:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

All projections of the text model are adapted: attention, delta nets and feed-forward layers, and nothing of the vision
tower, which is not served.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
IGNORED = -100  # a label that is not learned

Messages = list[dict[str, Any]]


def example_of(tokenizer: Any, messages: Messages) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, labels), each [1, tokens]: the last answer is learned, and what stands before it is not."""
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    token_ids = torch.tensor([prompt_ids + answer_ids])
    labels = torch.tensor([[IGNORED] * len(prompt_ids) + answer_ids])
    return token_ids, labels


def train(
    model_dir: Path, conversations: Sequence[Messages], out: Path, *, rank: int = 16, num_epochs: int = 3,
    learning_rate: float = 2e-4, device: str = "cpu",
) -> float:  # fmt: skip
    """Save a PEFT adapter in `out`; returns the loss of the last conversation."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    # Of a whole checkpoint this is the text model.
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto").to(device)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    loss = torch.zeros(())
    for epoch in range(num_epochs):
        for messages in conversations:
            token_ids, labels = example_of(tokenizer, messages)
            loss = model(input_ids=token_ids.to(device), labels=labels.to(device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1} of {num_epochs}: loss {loss.item():.3f}")
    model.save_pretrained(str(out))
    return loss.item()


def upload(directory: Path, name: str, url: str) -> None:
    """Send the two files of a PEFT directory to the server. Raises httpx.HTTPStatusError if it refuses them."""
    files = {
        "adapter_config": (directory / "adapter_config.json").read_bytes(),
        "adapter_model": (directory / "adapter_model.safetensors").read_bytes(),
    }
    reply = httpx.post(f"{url}/v1/adapters", data={"name": name}, files=files, timeout=600)
    if not reply.is_success:
        print(reply.text)
    reply.raise_for_status()


def ask(name: str, messages: Messages, url: str, max_tokens: int = 64) -> str:
    """What the adapter answers."""
    question = {"model": name, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    reply = httpx.post(f"{url}/v1/chat/completions", json=question, timeout=600).raise_for_status()
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", type=Path, required=True, help="the checkpoint that the server serves")
    parser.add_argument("--texts", type=Path, required=True, help="conversations, one JSON object a line")
    parser.add_argument("--name", default="my-adapter", help="the adapter's name on the server (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("data/qwen3_5"), help="where to save it (default: %(default)s)"
    )
    parser.add_argument("--url", default=os.environ.get("MULTILORA_URL", "http://127.0.0.1:8000"), help="the server")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to train on")
    arguments = parser.parse_args()
    lines = arguments.texts.read_text(encoding="utf-8").splitlines()
    conversations = [json.loads(line)["messages"] for line in lines if line.strip()]
    train(arguments.model_dir, conversations, arguments.out, rank=arguments.rank, num_epochs=arguments.epochs,
          device=arguments.device)  # fmt: skip
    upload(arguments.out, arguments.name, arguments.url)
    print(ask(arguments.name, conversations[0][:-1], arguments.url))


if __name__ == "__main__":
    main()
