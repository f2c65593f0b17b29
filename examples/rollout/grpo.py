"""GRPO on the bundled model, with a server for the rollouts: `python -m examples.rollout.grpo`.

It needs a running server (`make serve`). Each step samples answers with the adapter as the server has it, rewards them,
trains the adapter by their advantages, and uploads it as an ephemeral version. The reward is the share of an answer's
words that begin with the letter s. Two cores need about two minutes; a line for each step shows the reward rise.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.bundled_jobs import ALL_LINEAR, prompts
from examples.train_base import BASE_DIR
from service.client import Answer, Client

NUM_PROMPTS, NUM_ANSWERS, MAX_TOKENS = 8, 8, 32
LEARNING_RATE, CLIP = 5e-3, 0.2
NAME = "grpo"


class Rollout(NamedTuple):
    """One answer: its tokens behind those of the prompt, and their log probabilities as the server sampled them."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    reward: float
    advantage: float


def reward_of(text: str) -> float:
    """The share of the words that begin with an s."""
    words = text.split()
    return sum(word.lower().startswith("s") for word in words) / max(1, len(words))


def rollouts(client: Client, model: str, questions: list[str], tokenizer: AutoTokenizer, digest: str) -> list[Rollout]:
    """Several answers to each question, each with its advantage over the others to the same question."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompt_ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]

    def ask(ids: list[int]) -> Answer:
        return client.generate(model, ids, n=NUM_ANSWERS, max_tokens=MAX_TOKENS, temperature=1.0, top_p=1.0, logprobs=0)

    with ThreadPoolExecutor(len(questions)) as threads:
        answers = list(threads.map(ask, prompt_ids))
    assert {answer.digest for answer in answers} == {digest}, "another version answered"
    found = []
    for ids, answer in zip(prompt_ids, answers, strict=True):
        rewards = torch.tensor([reward_of(tokenizer.decode(choice["token_ids"])) for choice in answer.choices])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for index, choice in enumerate(answer.choices):
            values = rewards[index].item(), advantages[index].item()
            found.append(Rollout(ids, choice["token_ids"], answer.logprobs(index), *values))
    return found


def loss_of(model: torch.nn.Module, batch: list[Rollout]) -> tuple[Tensor, float]:
    """The clipped policy loss, and how far the trainer's log probabilities are from the server's, in the mean."""
    rows = [torch.tensor(one.prompt_ids + one.token_ids) for one in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = model(input_ids=ids).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    losses, distances = [], []
    for row, one in zip(logprobs, batch, strict=True):
        begin = len(one.prompt_ids) - 1
        ours, sampled = row[begin : begin + len(one.token_ids)], torch.tensor(one.logprobs)
        ratio = (ours - sampled).exp()
        losses.append(-torch.minimum(ratio * one.advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * one.advantage))
        distances.append((ours - sampled).abs().detach())
    return torch.cat(losses).mean(), torch.cat(distances).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--api-key", help="a key that may upload and run models, where the server wants one")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    base = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=ALL_LINEAR, task_type="CAUSAL_LM"))
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], LEARNING_RATE)
    questions = prompts("rollout", held_out=False)
    with Client(arguments.url, arguments.api_key) as client:
        for step in range(arguments.steps):
            version = client.upload(NAME, model)
            batch = rollouts(client, NAME, [next(questions) for _ in range(NUM_PROMPTS)], tokenizer, version.digest)
            loss, distance = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reward = sum(one.reward for one in batch) / len(batch)
            bar = "#" * round(60 * reward)
            print(
                f"{step:3d}  version {version.number:3d}  reward {reward:.2f}  distance {distance:.0e}  {bar}",
                flush=True,
            )


if __name__ == "__main__":
    main()
