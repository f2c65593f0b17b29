"""The base as a language model, beside a 5-gram model of the same training text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from examples.bundled_data import VOCAB_SIZE, encode
from examples.evaluate import bits_per_byte
from examples.kneser_ney import KneserNey
from examples.train_adapters import load_base
from examples.train_base import BASE_DIR

NUM_DOCUMENTS = 200


def test_kneser_ney_is_a_probability_distribution() -> None:
    """After a seen context, a partly seen one and an unseen one, all symbols together have probability one."""
    rows = np.array([encode("<|startoftext|>the cat and the hat<|im_end|><|startoftext|>the rat")])
    model = KneserNey(rows, order=4)
    for context in ("<|startoftext|>the ", "<|startoftext|>on that", "<|startoftext|>zzz"):
        ids = encode(context)
        before = model.bits(np.array(ids))
        total = sum(2 ** (before - model.bits(np.array([*ids, symbol]))) for symbol in range(VOCAB_SIZE) if symbol != 1)
        # The start token is never predicted, and what the smoothing would give it is missing.
        assert total == pytest.approx(1, abs=0.02)


def test_kneser_ney_by_hand() -> None:
    """A bigram model of "abac", worked out."""
    rows = np.array([encode("<|startoftext|>abac")])
    model = KneserNey(rows, order=2)
    # Bigrams ^a ab ba ac, each seen once: n1 = 4, n2 = 0, so all of a count of one is discounted and every bigram
    # probability is that of the unigram. Continuation counts: a (after ^ and b) 2, b 1, c 1; plus one of each symbol.
    expected = -np.log2((2 + 1) / (4 + VOCAB_SIZE))
    assert model.bits(np.array(encode("<|startoftext|>a"))) == pytest.approx(expected)


def test_base_beats_a_five_gram_model_on_held_out_text() -> None:
    """Bits per byte of held-out documents, none of which stands in the training text, and by a wide margin."""
    cpu = torch.device("cpu")
    base, five_gram, num_bytes = bits_per_byte(load_base(BASE_DIR, cpu), NUM_DOCUMENTS, cpu)
    assert num_bytes > 20_000
    assert base < 0.6 * five_gram
