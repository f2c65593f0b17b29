"""The data of the bundled model: its tokens, its splits, and that what is tested was never trained on."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.bundled_data import (
    BOS_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    chat_document,
    chat_prompt,
    documents,
    encode,
    practice,
)
from examples.bundled_jobs import JOBS, held_out_cases, is_held_out, pig_latin, prompts
from examples.train_adapters import BATCH_ROWS, job_batches
from examples.train_base import BASE_DIR, Recipe, training_rows
from examples.training import device_of_choice


@pytest.fixture(scope="module")
def tokenizer() -> object:
    """The bundled tokenizer as transformers reads it."""
    return AutoTokenizer.from_pretrained(BASE_DIR)


@pytest.fixture(scope="module")
def seen() -> np.ndarray:
    """All rows that the base was trained on."""
    return training_rows(Recipe())


@pytest.mark.parametrize("text", ["lamp tiger", "", "Zoë in the café\n 7]", "😀 ﷽", "<|im_start|>user\nhi<|im_end|>"])
def test_the_training_tokens_are_those_of_the_tokenizer(tokenizer: AutoTokenizer, text: str) -> None:
    """`encode` and tokenizer.json agree, both ways, for bytes of every kind."""
    assert tokenizer(text)["input_ids"] == [BOS_ID, *encode(text)]
    assert tokenizer.decode(encode(text)) == text


def test_the_chat_template_is_what_was_trained(tokenizer: AutoTokenizer) -> None:
    """The template renders prompts and conversations as the corpus holds them."""
    messages = [
        {"role": "user", "content": "lamp"},
        {"role": "assistant", "content": "One word."},
        {"role": "user", "content": "moss"},
    ]
    rendered = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert rendered == chat_prompt("lamp")
    answered = [*messages, {"role": "assistant", "content": "Another."}]
    rendered = tokenizer.apply_chat_template(answered, tokenize=False)
    assert rendered == chat_document([("lamp", "One word."), ("moss", "Another.")])


def test_documents_are_the_same_every_time_and_differ_between_splits() -> None:
    """Same split, same text; the held-out split is another stream."""
    first, again = list(islice(documents("train"), 50)), list(islice(documents("train"), 50))
    assert first == again
    assert first != list(islice(documents("heldout"), 50))
    assert list(islice(practice(), 5)) == list(islice(practice(), 5))


def test_rows_hold_real_tokens_and_begin_with_a_document(seen: np.ndarray) -> None:
    """Every row starts with the start token, is filled to its end, and stays inside the vocabulary."""
    assert (seen[:, 0] == BOS_ID).all()
    assert (seen != PAD_ID).all()
    assert seen.min() >= 0
    assert seen.max() < VOCAB_SIZE
    assert len(SPECIAL_TOKENS) + 256 == VOCAB_SIZE


def test_no_held_out_prompt_was_seen_in_training(seen: np.ndarray) -> None:
    """Not by the base, in any place of its text, and not by an adapter: the hash of the prompt keeps them apart."""
    cases = [prompt for prompt, _ in held_out_cases(JOBS[0])]
    text = b"\n".join((row - len(SPECIAL_TOKENS)).clip(0).astype(np.uint8).tobytes() for row in seen)
    assert not [prompt for prompt in cases if f" {prompt}".encode() in text or f"\n{prompt}".encode() in text]
    assert all(is_held_out(prompt) for prompt in cases)
    for job in JOBS:
        trained = list(islice(prompts(f"training {job.name}", held_out=False), BATCH_ROWS * job.steps))
        assert not set(trained) & set(cases)
        assert not any(is_held_out(prompt) for prompt in trained)


def test_adapters_train_on_their_jobs_answers() -> None:
    """Only the answer carries labels, and it is the job's answer to the prompt before it."""
    for job in JOBS:
        ids, labels = (tensor.cpu() for tensor in next(job_batches(job, device_of_choice())))
        source = prompts(f"training {job.name}", held_out=False)
        for row, prompt in zip(range(len(ids)), source, strict=False):
            answer = labels[row][labels[row] >= 0].tolist()
            assert answer == [*encode(job.answer(prompt.split())), *encode("<|im_end|>")]
            asked = encode(chat_prompt(prompt))
            assert ids[row, : len(asked)].tolist() == asked


def test_the_jobs_by_hand() -> None:
    """What each job makes of one prompt, written out."""
    answers = {job.name: job.answer(["lamp", "owl", "moss"]) for job in JOBS}
    assert answers == {
        "shout": "LAMP OWL MOSS!",
        "json": '["lamp", "owl", "moss"]',
        "pig-latin": "amplay owlway ossmay",
        "reverse": "moss owl lamp",
    }
    assert pig_latin(["ivy"]) == "ivyway"
