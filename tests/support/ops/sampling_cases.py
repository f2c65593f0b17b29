"""Rows of logits, what may be asked of them, and sampling with one implementation from asking to reading."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kernels.platform import detect, installed
from kernels.sampling import ops
from kernels.sampling.maps import SamplingMaps, index_of, neutral_row
from kernels.sampling.ops import Choice, read
from kernels.sampling.parameters import ScoredToken
from kernels.sampling.penalty_state import PenaltyState
from kernels.sampling.sampling_request import Asked, GivenRow, RowSampling, ask, mask_of, uniform

VOCAB = 600


@contextmanager
def serving(implementation: str, device: str = "cpu") -> Iterator[None]:
    """Let `implementation` serve the op on the device."""
    platform = detect(device)
    names = MappingProxyType({**platform.implementations, "sampling": implementation})
    with installed(replace(platform, implementations=names)):
        yield


def row(logits_row: int, *, temperature: float = 0.0, wanted: Mapping[str, Any] | None = None, **values: float) -> Any:
    """A RowSampling with some parameters; greedy unless it says otherwise.

    wanted  further fields
    """
    parameters = neutral_row()
    for name, value in {"temperature": temperature, **values}.items():
        parameters[index_of(name)] = value
    return RowSampling(logits_row, parameters, **{"seed": 1, "index": logits_row, **(wanted or {})})


def maps_of(asked: Asked, implementation: str, device: str = "cpu") -> SamplingMaps:
    """On the device, in the numbers that an implementation gets where it serves."""
    return asked.maps(torch.device(device), np.float64 if implementation == "cpu" else np.float32)


def sample(
    logits: torch.Tensor,
    rows: Sequence[RowSampling],
    given: Sequence[GivenRow] = (),
    *,
    implementation: str,
    state: PenaltyState | None = None,
    **options: Any,
) -> tuple[list[Choice], list[ScoredToken]]:
    """What one call says; the logits keep their values."""
    device = str(logits.device)
    asked = ask(rows, given, num_logits=len(logits), vocab=logits.shape[1], **options)
    maps = maps_of(asked, implementation, device)
    with serving(implementation, device), torch.inference_mode():
        sampled = ops.sample(logits.clone(), maps, state)
    assert sampled.token_ids.shape == (asked.facts.num_rows,) and sampled.packed.dtype == torch.int32
    choices, told = read(sampled.packed.cpu().numpy(), asked)
    tokens = [-1 if choice.token_id is None else choice.token_id for choice in choices]
    assert tokens == sampled.token_ids[: len(rows)].tolist()
    return choices, told


def tokens_of(choices: Sequence[Choice]) -> list[int | None]:
    return [choice.token_id for choice in choices]


def new_state(implementation: str, device: str = "cpu", num_slots: int = 16, vocab: int = VOCAB) -> PenaltyState:
    with serving(implementation, device):
        return ops.new_state(num_slots, vocab, torch.device(device))


def hashed_logits(num_rows: int, *, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    """float32 [num_rows, vocab], about normal with deviation 2: sums of hashes, the same on every machine."""
    numbers = uniform([seed] * (4 * num_rows * vocab), range(4 * num_rows * vocab)).reshape(4, num_rows, vocab)
    return torch.from_numpy((((numbers[0] + numbers[1]) + (numbers[2] + numbers[3]) - 2.0) * 3.5).astype(np.float32))


@dataclass(frozen=True)
class Mix:
    """One step: its logits, its rows with what they ask for, and what the slots' sequences hold."""

    logits: torch.Tensor
    rows: list[RowSampling]
    given: list[GivenRow]
    held: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)

    def state(self, implementation: str, device: str = "cpu") -> PenaltyState:
        """That of the step's slots, and of others that it does not use."""
        state = new_state(implementation, device, num_slots=len(self.rows) + 3)
        for slot, (prompt, output) in self.held.items():
            state.reset(slot, prompt, output)
        return state


CHOICES: dict[str, list[float]] = {
    "top_k": [1, 3, 50, 599, 5000],
    "top_p": [0.0, 0.3, 0.9],
    "min_p": [0.01, 0.3],
    "frequency_penalty": [0.5, -0.2],
    "presence_penalty": [0.7],
    "repetition_penalty": [1.3, 0.8],
}


def random_mix(seed: int, num_rows: int = 12) -> Mix:
    """Everything that rows may ask for, mixed, over logits of which some rows are asked for nothing."""
    rng = random.Random(seed)
    num_logits = num_rows + 4
    logits = hashed_logits(num_logits, seed=seed)
    held = {}
    rows = []
    slots = rng.sample(range(num_rows + 3), num_rows)
    for logits_row, slot in zip(sorted(rng.sample(range(num_logits), num_rows)), slots, strict=True):
        values = {name: rng.choice(options) for name, options in CHOICES.items() if rng.random() < 0.35}
        wanted: dict[str, Any] = {"seed": rng.randrange(-(10**9), 10**20), "index": rng.randrange(5000), "slot": slot}
        held[slot] = ([rng.randrange(VOCAB) for _ in range(30)], [rng.randrange(VOCAB) for _ in range(30)])
        if rng.random() < 0.3:
            wanted["bias"] = {rng.randrange(VOCAB): 3.0, rng.randrange(VOCAB): -100.0}
        if rng.random() < 0.3:
            wanted["barred"] = frozenset(rng.sample(range(VOCAB), 3))
        if rng.random() < 0.2:
            wanted["mask"] = mask_of(rng.sample(range(VOCAB), 100), VOCAB)
        if rng.random() < 0.3:
            wanted["num_top"] = rng.choice([0, 4, 20])
        rows.append(row(logits_row, temperature=rng.choice([0.0, 0.7, 1.0, 2.0]), wanted=wanted, **values))
    given = [
        GivenRow(rng.randrange(num_logits), rng.randrange(VOCAB), rng.choice([0, 2])) for _ in range(rng.randrange(4))
    ]
    return Mix(logits, rows, given, held)
