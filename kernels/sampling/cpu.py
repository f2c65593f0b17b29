"""`kernels.sampling.ops` on a CPU: sums in float64, and work for those rows and tokens only that ask for it.

An all-greedy step is one `max` over the logits; random rows add an `exp` and a sum; rows with top_k or top_p are cut
one by one, by a sort of the few tokens that can matter; penalties touch the tokens that a sequence has.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from kernels.contract import Contract
from kernels.sampling.any_device import cut_rows, edit, model_logprobs, rows_to_sample
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.ops import Sampled, pack
from kernels.sampling.penalty_state import PenaltyState, SparseState

CONTRACT = Contract()
_BLOCK = 256
_BELOW_ONE = 1.0 - 2.0**-53


def new_state(num_slots: int, vocab: int, device: torch.device) -> PenaltyState:  # noqa: ARG001
    """See `ops.new_state`."""
    return SparseState(vocab)


def sample(logits: torch.Tensor, maps: SamplingMaps, state: PenaltyState | None) -> Sampled:
    """See `ops.sample`."""
    facts = maps.facts
    logprobs = model_logprobs(logits, maps)
    if not facts.num_rows:
        return pack(maps.given.new_empty(0), logprobs, maps)
    logits = rows_to_sample(logits, maps)
    if facts.num_penalised:
        assert state is not None
        state.penalise(logits, maps)
    edit(logits, maps)
    if facts.num_masked:
        _mask(logits, maps)
    best_values, tokens = logits.max(dim=-1)
    is_finite = best_values.isfinite()
    tokens.masked_fill_(~is_finite, -1)
    if facts.is_random:
        drawn = ((maps.parameter("temperature") > 0.0) & is_finite).nonzero()[:, 0]
        if len(drawn):
            tokens[drawn] = _draw(logits, best_values, drawn, maps)
    if state is not None and facts.num_penalised:
        state.add(maps.slots, tokens)
    return pack(tokens, logprobs, maps)


def _mask(logits: torch.Tensor, maps: SamplingMaps) -> None:
    """Exclude what masks do not allow, in place."""
    is_barred = np.unpackbits((~maps.masks).numpy().view(np.uint8), axis=1, bitorder="little")[:, : maps.facts.vocab]
    for row, barred in zip(maps.masked.tolist(), torch.from_numpy(is_barred).bool(), strict=True):
        logits[row].masked_fill_(barred, -torch.inf)


def _draw(logits: torch.Tensor, best_values: torch.Tensor, rows: torch.Tensor, maps: SamplingMaps) -> torch.Tensor:
    """int64 [rows]: random tokens of `rows`, in their order; their logits are spent."""
    if len(rows) < len(logits):
        logits, best_values = logits[rows], best_values[rows]
    # Relative to the most likely token, whose weight is 1: no temperature can overflow.
    temperatures = maps.parameter("temperature")[rows].float()
    weights = logits.sub_(best_values[:, None]).div_(temperatures[:, None]).exp_()
    cut_rows(weights, rows, maps)
    return _pick(weights, maps.numbers[rows].double())


def _pick(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: inverse transform sampling from rows of unnormalised weights; a weight of 0 is never picked.

    First the block of tokens, by the blocks' sums, then the token within it: a running sum over the whole vocabulary
    costs ten times as much.

    weights float32 [rows, vocab], numbers float64 [rows] in [0, 1)
    """
    num_rows, vocab = weights.shape
    padded = functional.pad(weights, (0, -vocab % _BLOCK)) if vocab % _BLOCK else weights
    blocks = padded.view(num_rows, -1, _BLOCK)
    block, left = _pick_column(blocks.sum(dim=-1).double(), numbers[:, None])
    within = blocks[torch.arange(num_rows), block].double()
    token, _ = _pick_column(within, left)
    return block * _BLOCK + token


def _pick_column(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [rows], float64 [rows, 1]: the column that each number in [0, 1) falls on, and where in it, in [0, 1).

    weights float64 [rows, n], numbers float64 [rows, 1]
    """
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Rounding must not carry the target up to the total, which would pick the last column whatever its weight.
    target = (numbers * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulated, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(1, column)
    start = cumulated.gather(1, column) - weight
    return column[:, 0], ((target - start) / weight).clamp(0.0, _BELOW_ONE)
