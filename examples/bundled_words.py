"""The words that all data of the bundled model is made of: lists written for this project, and invented words."""

from __future__ import annotations

import random
from pathlib import Path


def _lists() -> dict[str, tuple[str, ...]]:
    """The sections of bundled_words.txt: a line that ends in a colon opens one, the words below belong to it."""
    sections: dict[str, tuple[str, ...]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.endswith(":"):
            name = line.removesuffix(":")
            sections[name] = ()
        else:
            sections[name] += tuple(line.split())
    return sections


_LISTS = _lists()
NOUNS, ADJECTIVES, NAMES = _LISTS["nouns"], _LISTS["adjectives"], _LISTS["names"]
TRADES, PLACES, ANIMALS = _LISTS["trades"], _LISTS["places"], _LISTS["animals"]
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_BLENDS = (
    "bl",
    "br",
    "ch",
    "cl",
    "dr",
    "fl",
    "gl",
    "gr",
    "pl",
    "pr",
    "qu",
    "sh",
    "sk",
    "sl",
    "sn",
    "sp",
    "st",
    "th",
    "tr",
)
_ONSETS = (*"bcdfghjklmnprstvwyz", *_BLENDS)
_VOWELS = (*"aaeeiioou", "ai", "ea", "oo")
_CODAS = (*"bdklmnrsx", "nd", "rk", "rn", "st")


def invented_word(rng: random.Random) -> str:
    """A pronounceable word of three to nine letters that is, but for chance, in no list, e.g. `drimol`, `peanto`."""
    word = ""
    for _ in range(rng.choice((1, 2, 2))):
        word += (rng.choice(_ONSETS) if word or rng.random() < 0.85 else "") + rng.choice(_VOWELS)
    word += rng.choice(_CODAS) if rng.random() < 0.7 or len(word) < 3 else ""
    return word if 3 <= len(word) <= 9 else invented_word(rng)


def any_word(rng: random.Random) -> str:
    """A noun, an adjective or an invented word."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(NOUNS)
    return rng.choice(ADJECTIVES) if kind < 0.65 else invented_word(rng)


def any_chunk(rng: random.Random) -> str:
    """What may stand between two spaces: mostly invented words, also capitals, numbers and mixed ASCII characters."""
    kind = rng.random()
    if kind < 0.6:
        return invented_word(rng)
    if kind < 0.75:
        return invented_word(rng).capitalize() if rng.random() < 0.7 else invented_word(rng).upper()
    if kind < 0.85:
        return str(rng.randrange(10 ** rng.randint(1, 5)))
    return "".join(chr(rng.randrange(33, 127)) for _ in range(rng.randint(1, 7)))


def distinct_words(rng: random.Random, number: int) -> list[str]:
    """`number` different words from `any_word`."""
    words: list[str] = []
    while len(words) < number:
        word = any_word(rng)
        if word not in words:
            words.append(word)
    return words
