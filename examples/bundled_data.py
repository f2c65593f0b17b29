"""The bundled model's corpus: an endless, seeded stream of documents, and its byte tokens.

Two splits share the templates and no random stream: `"train"` and `"heldout"`. Document i of a split is a pure function
of (split, i), so the text a model has seen can be made again anywhere from the number of its rows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Literal

import numpy as np

from examples.bundled_jobs import is_held_out
from examples.bundled_text import PLAIN_KINDS, animal_facts, catalogue, copying, facts, finding, joined, journey
from examples.bundled_words import (
    ANIMALS,
    DAYS,
    NAMES,
    NUMBERS,
    any_chunk,
    any_word,
    distinct_words,
    invented_word,
)

Split = Literal["train", "heldout"]
Turns = list[tuple[str, str]]

SPECIAL_TOKENS = ("<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, TURN_ID, EOS_ID = range(4)
BYTE_OFFSET = len(SPECIAL_TOKENS)
VOCAB_SIZE = BYTE_OFFSET + 256

_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")
_DOCUMENTS_PER_STREAM = 512


def encode(text: str) -> list[int]:
    """Token ids of `text`, special tokens in it included: byte b is token 4 + b."""
    ids: list[int] = []
    for piece in _SPECIAL.split(text):
        if piece in SPECIAL_TOKENS:
            ids.append(SPECIAL_TOKENS.index(piece))
        else:
            ids.extend(byte + BYTE_OFFSET for byte in piece.encode())
    return ids


def chat_prompt(content: str) -> str:
    """What the chat template makes of one user message, up to where the assistant's answer begins."""
    return f"<|startoftext|><|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def chat_document(turns: Turns) -> str:
    """A whole conversation as the chat template renders it."""
    text = "".join(
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n" for user, answer in turns
    )
    return "<|startoftext|>" + text.removesuffix("\n")


def word_remark(rng: random.Random, words: list[str]) -> str:
    """What the base says to a bare list of words: a remark that names them in order."""
    the = ["the " + word for word in words]
    return rng.choice(
        (
            f"You wrote {NUMBERS[len(words)]} words: {joined(words)}.",
            f"You wrote {NUMBERS[len(words)]} words: {joined(words)}. I like the word {rng.choice(words)}.",
            f"Those are {NUMBERS[len(words)]} words. The first is {words[0]} and the last is {words[-1]}.",
            f"I know a story about {joined(the)}.",
            f"{rng.choice(NAMES)} once saw {joined(the)} on a {rng.choice(DAYS)}.",
        )
    )


def _about_words(rng: random.Random) -> Turns:
    words = distinct_words(rng, rng.randint(2, 7))
    while is_held_out(" ".join(words)):
        words = distinct_words(rng, len(words))
    return [(" ".join(words), word_remark(rng, words))]


def _repeat(rng: random.Random) -> Turns:
    number = rng.randint(1, 6)
    words = distinct_words(rng, number) if rng.random() < 0.6 else [any_chunk(rng) for _ in range(number)]
    said = rng.choice((" ".join, ", ".join, joined))(words)
    asked = rng.choice(("Repeat after me: {}", "Please say: {}", "Copy this: {}", 'Say "{}"')).format(said)
    return [(asked, said)]


def _spell(rng: random.Random) -> Turns:
    word = any_word(rng)
    return [(f"How do you spell {word}?", f"{word.capitalize()} is spelled {'-'.join(word)}.")]


def _animal(rng: random.Random) -> Turns:
    turns: Turns = []
    for animal in rng.sample(ANIMALS, rng.randint(1, 2)):
        colour, home, food, young = animal_facts(animal)
        turns.append(
            rng.choice(
                (
                    (f"Where does the {animal} live?", f"The {animal} lives in the {home}."),
                    (f"What does the {animal} like?", f"The {animal} likes {food}."),
                    (f"How many young has the {animal}?", f"The {animal} has {NUMBERS[young]} young."),
                    (f"What do you know about the {animal}?", f"The {animal} is {colour}. It lives in the {home}."),
                )
            )
        )
    return turns


def _count(rng: random.Random) -> Turns:
    left = rng.randint(0, 9)
    right = rng.randint(0, 10 - left)
    question = f"What is {NUMBERS[left]} plus {NUMBERS[right]}?"
    return [(question, f"{NUMBERS[left].capitalize()} plus {NUMBERS[right]} is {NUMBERS[left + right]}.")]


def _weekday(rng: random.Random) -> Turns:
    day = rng.randrange(7)
    return [(f"Which day comes after {DAYS[day]}?", f"After {DAYS[day]} comes {DAYS[(day + 1) % 7]}.")]


def _name(rng: random.Random) -> Turns:
    name = rng.choice((*NAMES, invented_word(rng).capitalize()))
    greeting = rng.choice(("Hello! ", "Hi, ", "")) + rng.choice(("My name is {}.", "I am {}.", "I am called {}."))
    turns = [(greeting.format(name), rng.choice((f"Hello {name}!", f"Nice to meet you, {name}.")))]
    return [*turns, ("What is my name?", f"Your name is {name}.")] if rng.random() < 0.6 else turns


def _self(rng: random.Random) -> Turns:
    who = "I am a small language model that was trained on made-up stories."
    asked = rng.choice(("Who are you?", "What are you?", "Hello! Who are you?", "Hello!", "Hi!", "How are you?"))
    return [(asked, who if "you?" in asked and "How" not in asked else "Hello! Write some words, or ask for a story.")]


def _story(rng: random.Random) -> Turns:
    asked, kind = rng.choice(
        (
            ("Tell me a story.", finding),
            ("Tell me about a journey.", journey),
            ("Write a list.", catalogue),
            ("Tell me about animals.", facts),
        )
    )
    return [(asked, kind(rng))]


CHAT_KINDS = (_about_words,) * 6 + (
    _repeat,
    _repeat,
    _repeat,
    _spell,
    _animal,
    _count,
    _weekday,
    _name,
    _self,
    _story,
    _story,
)
CHAT_SHARE = 0.4


def documents(split: Split) -> Iterator[str]:
    """All documents of a split in order, each with its special tokens, without end."""
    stream = 0
    while True:
        rng = random.Random(f"multilora {split} {stream}")
        for _ in range(_DOCUMENTS_PER_STREAM):
            if rng.random() < CHAT_SHARE:
                yield chat_document(rng.choice(CHAT_KINDS)(rng))
            else:
                yield f"<|startoftext|>{rng.choice(PLAIN_KINDS)(rng)}<|im_end|>"
        stream += 1


def practice() -> Iterator[str]:
    """Documents to begin the training with, without end: nothing but text that is said again.

    A model of this size finds attention that copies only late, or not at all, when stories compete for its weights.
    After a few hundred steps of this it has it, and every later document profits.
    """
    rng = random.Random("multilora practice")
    while True:
        if rng.random() < 0.5:
            yield f"<|startoftext|>{copying(rng)}<|im_end|>"
        else:
            yield chat_document(_repeat(rng))


def rows(source: Iterator[str], length: int) -> Iterator[np.ndarray]:
    """Rows of `length` token ids (int64) for training: whole documents one after another, the last one cut off.

    Every row begins with a document, so that what the model learns about short positions is what it meets in use.
    """
    while True:
        ids: list[int] = []
        while len(ids) < length:
            ids.extend(encode(next(source)))
        yield np.array(ids[:length], dtype=np.int64)
