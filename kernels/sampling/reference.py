"""The truth of `kernels.sampling.ops`: row by row in float64, on the host. Waits for the device."""

from __future__ import annotations

import torch

from kernels.contract import Contract
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.ops import Sampled, pack
from kernels.sampling.penalty_state import DenseState, PenaltyState

CONTRACT = Contract()


def new_state(num_slots: int, vocab: int, device: torch.device) -> PenaltyState:
    """See `ops.new_state`."""
    return DenseState(num_slots, vocab, device)


def sample(logits: torch.Tensor, maps: SamplingMaps, state: PenaltyState | None) -> Sampled:
    """See `ops.sample`."""
    facts, host = maps.facts, logits.double().cpu()
    tokens = [
        _choose(_adjusted(host[logits_row], row, maps, state), row, maps)
        for row, logits_row in enumerate(maps.rows.tolist() if facts.num_rows else [])
    ]
    told = maps.given.tolist() if facts.num_given else []
    if facts.num_chosen:
        told += maps.rows[maps.chosen].tolist()
    token_ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    if facts.num_penalised:
        assert state is not None
        state.add(maps.slots, token_ids)
    return pack(token_ids, host[told].log_softmax(-1).float().to(logits.device) if told else None, maps)


def _adjusted(logits: torch.Tensor, row: int, maps: SamplingMaps, state: PenaltyState | None) -> torch.Tensor:
    """float64 [vocab]: after penalties, bias, barred tokens and mask."""
    facts, logits = maps.facts, logits.clone()
    slot = int(maps.slots[row]) if facts.num_penalised else -1
    if slot >= 0:
        assert state is not None
        in_prompt, num_output = state.counts(slot)
        repetition = _value(maps, "repetition_penalty", row)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(in_prompt | (num_output > 0), repeated, logits)
        logits -= _value(maps, "frequency_penalty", row) * num_output
        logits -= _value(maps, "presence_penalty", row) * (num_output > 0)
    if facts.num_biased:
        edits = dict(zip(maps.biased.tolist(), maps.bias.tolist(), strict=True))
        for token, bias in _of_row(edits, row, facts.vocab).items():
            logits[token] += bias
    if facts.num_barred:
        for token in _of_row(dict.fromkeys(maps.barred.tolist(), 0.0), row, facts.vocab):
            logits[token] = -torch.inf
    if facts.num_masked and row in maps.masked.tolist():
        words = maps.masks[maps.masked.tolist().index(row)].tolist()
        is_allowed = [bool(words[token // 32] >> token % 32 & 1) for token in range(facts.vocab)]
        logits[~torch.tensor(is_allowed)] = -torch.inf
    return logits


def _choose(logits: torch.Tensor, row: int, maps: SamplingMaps) -> int:
    best = logits.max()
    if not best.isfinite():
        return -1
    temperature = _value(maps, "temperature", row)
    if temperature == 0.0:
        return int(logits.argmax())
    weights = ((logits - best) / temperature).exp()
    weights[weights < _value(maps, "min_p", row)] = 0.0
    top_k, top_p = int(_value(maps, "top_k", row)), _value(maps, "top_p", row)
    if top_k > 0:
        weights[weights < weights.sort(descending=True).values[top_k - 1]] = 0.0
    if top_p < 1.0:
        ranked = weights.sort(descending=True).values
        reaches = ranked.cumsum(0) >= top_p * ranked.sum()
        weights[weights < ranked[int(reaches.int().argmax())]] = 0.0
    cumulated = weights.cumsum(0)
    is_beyond = (weights > 0.0) & (cumulated > float(maps.numbers[row]) * cumulated[-1])
    # The number 1, which rounding to float32 can make, is beyond nothing.
    return int(is_beyond.int().argmax()) if is_beyond.any() else int(weights.nonzero()[-1])


def _value(maps: SamplingMaps, name: str, row: int) -> float:
    return float(maps.parameter(name)[row])


def _of_row(edits: dict[int, float], row: int, vocab: int) -> dict[int, float]:
    """Token -> value, of place -> value."""
    return {place % vocab: value for place, value in edits.items() if place // vocab == row}
