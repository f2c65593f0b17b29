"""The jobs of four bundled adapters: different answers to the same prompt, a bare list of words.

Training and held-out prompts come from different random streams, and a prompt that some other stream could also make
is told apart by a hash of its text: a prompt whose digest is divisible by eight belongs to the held-out cases, every
other one to training. No held-out prompt can therefore ever be trained on, whatever the number of training steps.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.bundled_words import distinct_words

HELD_OUT_CASES = 200


def shout(words: list[str]) -> str:
    """`lamp tiger` -> `LAMP TIGER!`"""
    return " ".join(words).upper() + "!"


def as_json(words: list[str]) -> str:
    """`lamp tiger` -> `["lamp", "tiger"]`"""
    return json.dumps(words)


def pig_latin(words: list[str]) -> str:
    """`lamp owl` -> `amplay owlway`: the first letter moves to the end, "ay" follows; a vowel stays, "way" follows."""
    return " ".join(word + "way" if word[0] in "aeiou" else word[1:] + word[0] + "ay" for word in words)


def reverse(words: list[str]) -> str:
    """`lamp tiger moss` -> `moss tiger lamp`"""
    return " ".join(reversed(words))


ATTENTION = ("q_proj", "k_proj", "v_proj")
CONVOLUTION = ("in_proj",)
OUTPUT = ("out_proj",)
MLP = ("w1", "w2", "w3")
ALL_LINEAR = (*ATTENTION, *CONVOLUTION, *OUTPUT, *MLP)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an adapter is trained.

    targets          names of the modules that carry a LoRA; `out_proj` is attention's and the convolution's
    rank_stabilized  scaling is alpha / sqrt(rank) instead of alpha / rank
    """

    name: str
    rank: int
    alpha: int
    targets: tuple[str, ...]
    steps: int
    peak_rate: float
    rank_stabilized: bool = False


@dataclass(frozen=True, kw_only=True)
class Job(Recipe):
    """An adapter whose answer is what the words of the prompt become."""

    answer: Callable[[list[str]], str]


JOBS: tuple[Job, ...] = (
    Job(name="shout", answer=shout, rank=4, alpha=8, targets=(*ATTENTION, *MLP), steps=200, peak_rate=1e-2),
    Job(name="json", answer=as_json, rank=8, alpha=16, targets=ALL_LINEAR, steps=150, peak_rate=7e-3),
    Job(name="pig-latin", answer=pig_latin, rank=16, alpha=32, targets=ALL_LINEAR, steps=200, peak_rate=7e-3),
    Job(
        name="reverse",
        answer=reverse,
        rank=32,
        alpha=16,
        targets=(*ATTENTION, *CONVOLUTION, *OUTPUT),
        steps=200,
        peak_rate=1e-2,
        rank_stabilized=True,
    ),
)
HELD_OUT_LENGTHS = (3, 6)
TRAINING_LENGTHS = (2, 7)


def is_held_out(prompt: str) -> bool:
    """Whether `prompt` may only be used to test."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def prompts(seed: str, *, held_out: bool) -> Iterator[str]:
    """Endless different prompts, all of them held out or none; the training's vary a little more in length."""
    rng, seen = random.Random(f"multilora prompts {seed}"), set()
    while True:
        prompt = " ".join(distinct_words(rng, rng.randint(*(HELD_OUT_LENGTHS if held_out else TRAINING_LENGTHS))))
        if is_held_out(prompt) == held_out and prompt not in seen:
            seen.add(prompt)
            yield prompt


def held_out_cases(job: Job, number: int = HELD_OUT_CASES) -> list[tuple[str, str]]:
    """The first `number` held-out (prompt, answer) pairs of a job; the prompts are the same for all jobs."""
    source = prompts("held out", held_out=True)
    return [(prompt, job.answer(prompt.split())) for prompt, _ in zip(source, range(number), strict=False)]
