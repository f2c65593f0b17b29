"""Evaluate the bundled model as it lies on disk: `python -m examples.evaluate`.

Two questions: how many bits per byte does the base need for held-out text, beside a 5-gram Kneser-Ney model counted
over all text that the base was trained on; and how many held-out cases of its job does each adapter answer exactly,
beside the base. Everything is greedy and computed in float32 with transformers and PEFT.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import Lfm2ForCausalLM

from examples.bundled_calculator import CALCULATOR, call_text, first_turn, held_out_calls
from examples.bundled_data import BYTE_OFFSET, documents, encode
from examples.bundled_jobs import HELD_OUT_CASES, JOBS, held_out_cases
from examples.kneser_ney import KneserNey
from examples.train_adapters import ADAPTERS_DIR, exact_matches, load_base, text_batch
from examples.train_base import BASE_DIR, Recipe, training_rows
from examples.training import device_of_choice


def held_out_documents(number: int, seen: np.ndarray) -> list[np.ndarray]:
    """The first `number` held-out documents as tokens, without those that also stand somewhere in the `seen` rows."""
    found: list[np.ndarray] = []
    trained_on = b"".join(row.astype("<u2").tobytes() for row in seen)
    for text in documents("heldout"):
        ids = np.array(encode(text), dtype=np.int64)
        if ids.astype("<u2").tobytes() not in trained_on:
            found.append(ids)
        if len(found) == number:
            return found
    raise AssertionError("the stream of documents has no end")


def model_bits(model: torch.nn.Module, document: np.ndarray, device: torch.device) -> float:
    """Bits that all tokens of a document cost the model, its start token excepted."""
    ids = torch.from_numpy(document).to(device)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")) / float(np.log(2.0))


def bits_per_byte(base: Lfm2ForCausalLM, number: int, device: torch.device) -> tuple[float, float, int]:
    """(base, 5-gram, bytes): bits per byte of held-out text, ends of turns and documents included, and its size."""
    seen = training_rows(Recipe())
    chosen = held_out_documents(number, seen)
    num_bytes = sum(int((document >= BYTE_OFFSET).sum()) for document in chosen)
    baseline = KneserNey(seen)
    return (
        sum(model_bits(base, document, device) for document in chosen) / num_bytes,
        sum(baseline.bits(document) for document in chosen) / num_bytes,
        num_bytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=BASE_DIR, help="the base's directory (default: %(default)s)")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS_DIR, help="adapters (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=1000, help="held-out documents (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=HELD_OUT_CASES, help="cases of each job (default: %(default)s)")
    arguments = parser.parse_args()
    device = device_of_choice()
    base = load_base(arguments.base, device)
    ours, theirs, num_bytes = bits_per_byte(base, arguments.documents, device)
    print(f"bits per byte on {num_bytes} held-out bytes: base {ours:.3f}, 5-gram Kneser-Ney {theirs:.3f}")
    print(f"{'job':10} {'rank':>4} {'adapter':>8} {'base':>6} {'constant':>9}   of {arguments.cases} held-out cases")
    for job in JOBS:
        cases = held_out_cases(job, arguments.cases)
        by_base = np.mean(exact_matches(base, cases, device))
        adapted = PeftModel.from_pretrained(load_base(arguments.base, device), arguments.adapters / job.name)
        by_adapter = np.mean(exact_matches(adapted.eval(), cases, device))
        constant = Counter(answer for _, answer in cases).most_common(1)[0][1] / len(cases)
        print(f"{job.name:10} {job.rank:4} {by_adapter:8.1%} {by_base:6.1%} {constant:9.1%}")
    calls = [
        (first_turn(question, "calculator", "expression"), call_text("calculator", "expression", expression))
        for question, expression in held_out_calls(arguments.cases)
    ]
    adapted = PeftModel.from_pretrained(load_base(arguments.base, device), arguments.adapters / CALCULATOR.name)
    by_adapter = np.mean(exact_matches(adapted.eval(), calls, device, text_batch))
    print(f"{CALCULATOR.name:10} {CALCULATOR.rank:4} {by_adapter:8.1%}, calls of a tool")


if __name__ == "__main__":
    main()
