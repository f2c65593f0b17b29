"""What a step's sampling needs on an accelerator, in host integers and arrays, and how its result is read.

All of it is known before the model runs, so the arrays travel with the step's maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from service.engine.messages import TokenLogprob
from service.engine.sampler import Choice, RowRequest, uniform

# A sort of everything serves larger ones as well.
_LARGEST_TOP_K = 1024


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Log probabilities are wanted of a row of logits: of `token_id` and the `num_top` most likely tokens.

    request  index of the request whose chosen token is meant instead; None: token_id is given
    """

    row: int
    num_top: int
    token_id: int = 0
    request: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's sampling in host integers.

    rows      rows of the logits that get a token, one per request, ascending
    logprobs  rows whose log probabilities are wanted, those with a given token first
    vocab     columns of the logits
    """

    rows: tuple[int, ...]
    requests: tuple[RowRequest, ...]
    logprobs: tuple[LogprobRow, ...]
    vocab: int

    @property
    def is_random(self) -> bool:
        return any(request.sampling.temperature > 0.0 for request in self.requests)

    @property
    def num_given(self) -> int:
        """Rows of `logprobs` with a given token."""
        return sum(entry.request is None for entry in self.logprobs)

    @property
    def num_top(self) -> int:
        """Most likely tokens wanted of any row."""
        return min(max((entry.num_top for entry in self.logprobs), default=0), self.vocab)

    @property
    def has_top_k(self) -> bool:
        return any(0 < request.sampling.top_k < self.vocab for request in self.requests)

    @property
    def has_top_p(self) -> bool:
        return any(request.sampling.top_p < 1.0 for request in self.requests)

    @property
    def num_ranked(self) -> int:
        """How many of the largest weights of each row tell where it is cut."""
        num_ranked = 1
        for sampling in (request.sampling for request in self.requests if request.sampling.temperature > 0.0):
            if 0 < sampling.top_k < self.vocab:
                num_ranked = max(num_ranked, sampling.top_k)
            elif sampling.top_p < 1.0:
                return self.vocab
        return num_ranked if num_ranked <= _LARGEST_TOP_K else self.vocab


def plan_of(rows: Sequence[int], requests: Sequence[RowRequest], given: Sequence[LogprobRow], num_columns: int) -> Plan:
    """given  rows whose token is known already, those of prompts"""
    chosen = [
        LogprobRow(rows[i], request.sampling.logprobs, request=i)
        for i, request in enumerate(requests)
        if request.sampling.logprobs is not None
    ]
    return Plan(tuple(rows), tuple(requests), (*given, *chosen), num_columns)


def arrays_of(plan: Plan) -> dict[str, np.ndarray]:
    """What `launch` reads on the device, by name; absent where nothing asks for it."""
    arrays: dict[str, np.ndarray] = {}
    if plan.requests:
        arrays["sample/rows"] = np.array(plan.rows, np.int64)
        arrays |= _edit_arrays(plan)
    if plan.is_random:
        arrays |= _draw_arrays(plan)
    if plan.logprobs:
        arrays["sample/logprob_rows"] = np.array([entry.row for entry in plan.logprobs], np.int64)
        given = [entry.token_id for entry in plan.logprobs if entry.request is None]
        asked = [entry.request for entry in plan.logprobs if entry.request is not None]
        arrays["sample/given_tokens"] = np.array(given, np.int64)
        arrays["sample/logprob_requests"] = np.array(asked, np.int64)
    return arrays


def read(packed: torch.Tensor, plan: Plan) -> tuple[list[Choice], list[TokenLogprob]]:
    """The choices of the plan's requests and the log probabilities of its given tokens; waits for the device, once."""
    numbers = packed.cpu().numpy()
    tokens = [token if token >= 0 else None for token in numbers[: len(plan.requests)].tolist()]
    logprobs: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    if plan.logprobs:
        rest, num_rows = numbers[len(plan.requests) :], len(plan.logprobs)
        logprobs = rest[:num_rows].view(np.float32).tolist()
        values, top_tokens = rest[num_rows:].reshape(2, num_rows, plan.num_top)
        pairs = zip(top_tokens.tolist(), values.copy().view(np.float32).tolist(), strict=True)
        tops = [list(zip(ids, row, strict=True)) for ids, row in pairs]
    of_request: dict[int, TokenLogprob] = {}
    given: list[TokenLogprob] = []
    for entry, logprob, top in zip(plan.logprobs, logprobs, tops, strict=True):
        token = entry.token_id if entry.request is None else tokens[entry.request]
        if token is None:
            continue
        told = TokenLogprob(token, logprob, tuple(top[: entry.num_top]))
        if entry.request is None:
            given.append(told)
        else:
            of_request[entry.request] = told
    return [Choice(token, of_request.get(i)) for i, token in enumerate(tokens)], given


def _edit_arrays(plan: Plan) -> dict[str, np.ndarray]:
    """Penalties, biases and barred tokens; places are row * vocab + token."""
    arrays: dict[str, np.ndarray] = {}
    counted = [
        (i, request.sampling, request.counts) for i, request in enumerate(plan.requests) if request.counts is not None
    ]
    if counted:
        lengths = [len(counts.token_ids) for _, _, counts in counted]

        def per_token(values: list[float]) -> np.ndarray:
            return np.repeat(np.array(values, np.float32), lengths)

        outputs = np.concatenate([counts.output_counts for _, _, counts in counted])
        places = [i * plan.vocab + counts.token_ids for i, _, counts in counted]
        arrays["sample/penalised"] = np.concatenate(places)
        arrays["sample/repetition"] = per_token([sampling.repetition_penalty for _, sampling, _ in counted])
        frequencies = per_token([sampling.frequency_penalty for _, sampling, _ in counted])
        presences = per_token([sampling.presence_penalty for _, sampling, _ in counted])
        arrays["sample/frequency"] = frequencies * outputs
        arrays["sample/presence"] = presences * (outputs > 0)
    biases = [
        (i * plan.vocab + token, bias)
        for i, request in enumerate(plan.requests)
        for token, bias in request.sampling.logit_bias.items()
    ]
    if biases:
        arrays["sample/biased"] = np.array([place for place, _ in biases], np.int64)
        arrays["sample/bias"] = np.array([bias for _, bias in biases], np.float32)
    barred = [i * plan.vocab + token for i, request in enumerate(plan.requests) for token in request.barred]
    if barred:
        arrays["sample/barred"] = np.array(barred, np.int64)
        arrays["sample/minus_infinity"] = np.full(len(barred), -np.inf, np.float32)
    return arrays


def _draw_arrays(plan: Plan) -> dict[str, np.ndarray]:
    """Per request; those that take the most likely token get harmless values."""
    samplings = [request.sampling for request in plan.requests]
    arrays = {
        "sample/is_drawn": np.array([sampling.temperature > 0.0 for sampling in samplings], np.bool_),
        "sample/temperature": np.array([max(s.temperature, 1e-5) for s in samplings], np.float32),
        "sample/numbers": np.array([uniform(request.seed, request.index) for request in plan.requests], np.float32),
    }
    if any(sampling.min_p > 0.0 for sampling in samplings):
        arrays["sample/min_p"] = np.array([sampling.min_p for sampling in samplings], np.float32)
    if plan.has_top_k or plan.has_top_p:
        limits = [s.top_k if 0 < s.top_k < plan.vocab else plan.vocab for s in samplings]
        arrays["sample/top_k"] = np.array(limits, np.int64)
        arrays["sample/top_p"] = np.array([sampling.top_p for sampling in samplings], np.float32)
    return arrays
