"""Train the bundled base model from nothing: `python -m examples.train_base`.

Writes a Hugging Face directory (config, float16 weights, tokenizer, chat template). All data is made by the script, all
random streams are seeded.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import Lfm2Config, Lfm2ForCausalLM

from examples.bundled_data import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, documents, practice, rows
from examples.bundled_tokenizer import save_tokenizer
from examples.muon import Muon
from examples.training import Schedule, Stopwatch, device_of_choice, fit

BASE_DIR = Path(__file__).parents[1] / "service" / "bundled" / "base"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the outcome.

    layers               one letter per layer: c = short convolution, a = attention
    row_length           tokens per training row
    batch_rows           rows per step
    practice_steps       of all steps, those that begin the training with copying alone
    matrix_rate          peak learning rate of Muon, which trains the projections
    other_rate           peak learning rate of AdamW, which trains embedding, convolutions and norms
    """

    hidden_size: int = 256
    intermediate_size: int = 512
    layers: str = "cacac"
    kv_heads: int = 2
    row_length: int = 512
    batch_rows: int = 8
    practice_steps: int = 280
    steps: int = 1150
    warmup_steps: int = 60
    matrix_rate: float = 0.02
    other_rate: float = 2e-3
    weight_decay: float = 0.05
    seed: int = 1


def build_model(recipe: Recipe) -> Lfm2ForCausalLM:
    """A randomly initialised model; its random stream is the recipe's seed."""
    torch.manual_seed(recipe.seed)
    kinds = {"c": "conv", "a": "full_attention"}
    config = Lfm2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=len(recipe.layers),
        num_attention_heads=recipe.hidden_size // 64,
        num_key_value_heads=recipe.kv_heads,
        layer_types=[kinds[letter] for letter in recipe.layers],
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        conv_L_cache=3,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return Lfm2ForCausalLM(config)


def training_rows(recipe: Recipe) -> np.ndarray:
    """All rows that the training sees, in order: int64 [steps * batch_rows, row_length]."""
    first = recipe.practice_steps * recipe.batch_rows
    later = recipe.steps * recipe.batch_rows - first
    return np.stack(
        [
            *islice(rows(practice(), recipe.row_length), first),
            *islice(rows(documents("train"), recipe.row_length), later),
        ]
    )


def optimizers_for(model: Lfm2ForCausalLM, recipe: Recipe) -> tuple[Optimizer, ...]:
    """Muon for the projections, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return (
        Muon(matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


def batches(recipe: Recipe, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels) of every step; every token but a row's first is a label."""
    for batch in training_rows(recipe).reshape(recipe.steps, recipe.batch_rows, recipe.row_length):
        ids = torch.from_numpy(batch).to(device)
        yield ids, ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=BASE_DIR, help="directory to write (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe, device, watch = Recipe(), device_of_choice(), Stopwatch()
    model = build_model(recipe)
    model.to(device)  # type: ignore[arg-type]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    tokens = recipe.steps * recipe.batch_rows * recipe.row_length
    print(f"{parameters / 1e6:.2f} M parameters, {tokens / 1e6:.1f} M tokens")
    schedule = Schedule(recipe.steps, recipe.warmup_steps)
    loss = fit(model, batches(recipe, device), optimizers_for(model, recipe), schedule, "base")
    model.to(torch.float16).save_pretrained(arguments.out)  # type: ignore[arg-type]
    save_tokenizer(arguments.out)
    print(f"base: last loss {loss:.4f} nats per token, {watch}, written to {arguments.out}")


if __name__ == "__main__":
    main()
