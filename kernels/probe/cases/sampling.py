"""Probe cases of sampling: logits with few likely tokens, so that rounding cannot move a draw to another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernels.probe.cases.tensors import Place, Prepared
from kernels.sampling import ops
from kernels.sampling.maps import index_of, neutral_row
from kernels.sampling.sampling_request import GivenRow, RowSampling, ask, mask_of
from kernels.shapes import ProbeShapes

_SCALE = 6.0
_NUM_SLOTS = 3


def sample(shapes: ProbeShapes, place: Place) -> Prepared:
    """All that a row may ask for, but for a sort of the vocabulary: penalties, edits, a mask, log probabilities."""
    vocab = shapes.vocab_size
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
    rows = [
        _row(0, {"temperature": 0.0}, num_top=3, scored=(vocab - 1, 0)),
        _row(2, {"top_k": 20, "top_p": 0.9}, bias={vocab - 1: 9.0}, num_top=0),
        _row(3, {"temperature": 0.7, "min_p": 0.05} | penalties, slot=2),
        _row(4, {"temperature": 0.0} | penalties, slot=0, barred=[0, vocab // 2]),
        _row(5, {"temperature": 1.5}, mask=mask_of(range(1, vocab, 3), vocab)),
        _row(6, {"top_k": 5}),
    ]
    return _prepared(rows, [GivenRow(1, vocab - 2, 2)], vocab, place)


def sample_top_p(shapes: ProbeShapes, place: Place) -> Prepared:
    """Nuclei of the whole vocabulary, beside a row that cannot be sampled."""
    rows = [
        _row(0, {"top_p": 0.9}),
        _row(1, {"top_p": 0.5, "temperature": 2.0}),
        _row(2, {}),
        _row(6, {"top_p": 0.7, "top_k": 3}),
    ]
    return _prepared(rows, [], shapes.vocab_size, place)


def sample_greedy(shapes: ProbeShapes, place: Place) -> Prepared:
    """Largest logits alone, which an implementation may find in a way of its own."""
    rows = [_row(i, {"temperature": 0.0}) for i in range(7)]
    return _prepared(rows, [], shapes.vocab_size, place)


def _row(logits_row: int, values: Mapping[str, float], **wanted: Any) -> RowSampling:
    parameters = neutral_row()
    for name, value in values.items():
        parameters[index_of(name)] = value
    return RowSampling(logits_row, parameters, seed=7, index=logits_row, **wanted)


def _prepared(rows: list[RowSampling], given: list[GivenRow], vocab: int, place: Place) -> Prepared:
    """Tokens, one-hot, since a wrong one is wrong however near; log probabilities; the counts of penalised rows."""
    logits = (_SCALE * place.random(7, vocab)).to(place.device)
    logits[6, 1] = torch.nan
    asked = ask(rows, given, num_logits=len(logits), vocab=vocab)
    maps = asked.maps(place.device)
    state = ops.new_state(_NUM_SLOTS, vocab, place.device)
    slots = [row.slot for row in rows if row.slot >= 0]
    columns = torch.arange(vocab, device=place.device)
    facts = asked.facts
    num_floats = (facts.num_given + facts.num_chosen) * (1 + facts.num_top) + facts.num_chosen * facts.num_scored

    def call() -> tuple[torch.Tensor, ...]:
        for slot in slots:
            state.reset(slot, [1, 2, vocab - 1], [2, 3, 3])
        sampled = ops.sample(logits.clone(), maps, state)
        told = sampled.packed[facts.num_rows :]
        floats, top_tokens, ranks = told.tensor_split([num_floats, len(told) - facts.num_given])
        counts = [count.float() for slot in slots for count in state.counts(slot)]
        tokens = torch.cat((sampled.token_ids, top_tokens.long()))
        ranked = (ranks.long()[:, None] == columns + 1).float()
        return ((tokens[:, None] == columns).float(), ranked, floats.clone().view(torch.float32), *counts)

    return call
