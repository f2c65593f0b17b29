"""Chooses the next token of each row of logits.

    x = logits of the row
    x[t] = x[t] / repetition if x[t] > 0 else x[t] * repetition     for tokens t of prompt and output
    x[t] -= frequency * n(t) + presence * [n(t) > 0]                n(t): how often the output has t
    x[t] += bias(t);  x[t] = -inf for barred tokens and for those that the mask does not allow
    token = argmax x                                                with temperature 0; otherwise
    w = exp((x - max x) / temperature)
    w[t] = 0 below min_p; then below the top_k-th largest; then below the last of the largest that sum to top_p of what
    is left (equals of the last one kept stay, too)
    token = the first t at which the running sum of w exceeds (uniform number) * (sum of w)

as in vLLM. The uniform number is a hash of the request's seed and the token's index. Log probabilities are those of the
model's own distribution, before any of this.
"""

from __future__ import annotations

import torch

from kernels.batch_invariant.mode import batch_invariant_mode
from kernels.platform import contract, implementation
from kernels.sampling.maps import SamplingMaps
from kernels.sampling.penalty_state import PenaltyState
from kernels.sampling.results import Sampled

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sample(logits: torch.Tensor, maps: SamplingMaps, state: PenaltyState | None = None) -> Sampled:
    """One token per row, and the log probabilities that are asked for.

    A row's token depends on no other row. Rows whose largest logit is not finite (NaN, infinite, all tokens excluded)
    get -1. Nothing waits for the device, and all that is done follows from `maps.facts`, so that a captured call may be
    replayed with other maps of equal facts.

    logits  [num_logits, vocab], float32, bfloat16 or float16, each row contiguous; spent. Whatever is computed from
            them is computed in float32 at least
    state   `new_state` of the same device, every slot with penalties `reset` once; its counts grow by the tokens chosen
            here. May be None if no row has penalties
    """
    facts = maps.facts
    assert logits.dtype in _DTYPES and logits.stride(1) == 1, "logits are float32 or shorter floats, rows contiguous"
    assert logits.shape == (facts.num_logits, facts.vocab), f"logits are {list(logits.shape)}, the facts say otherwise"
    assert state is not None or not facts.num_penalised, "penalties need the state of their slots"
    assert facts.num_rows + facts.num_given, "nothing is asked for"
    with batch_invariant_mode(logits.device):
        sampled: Sampled = implementation("sampling", logits.device).sample(logits, maps, state)
    return sampled


def new_state(num_slots: int, vocab: int, device: torch.device) -> PenaltyState:
    """Counts for the penalties of so many slots, 0 to num_slots - 1; takes memory when the first slot is reset.

    On an accelerator that is 4 bytes per slot and token of the vocabulary.
    """
    state: PenaltyState = implementation("sampling", device).new_state(num_slots, vocab, device)
    return state


def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Compile all that calls with logits of such rows can need, whatever their number; the variants compiled.

    dtype  of the logits

    0 where nothing is ever compiled (on a CPU).
    """
    return contract("sampling", device).warm_up_and_count(vocab, dtype, device)
