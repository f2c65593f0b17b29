"""Chooses the next token of each row of logits.

Order, as in vLLM: repetition, presence and frequency penalties; logit_bias; min_tokens (ending tokens barred);
temperature; min_p; top_k; top_p over what is left, renormalised. Temperature 0 takes the most likely token after
penalties and bias. Log probabilities are those of the model's own distribution, before any of this.

Randomness: one uniform number per token, a hash of (seed of the request, index of the output token), used for inverse
transform sampling. Hence a request's tokens depend neither on its neighbours nor on preemption.

Cost: all-greedy steps are one `max` over the logits; random ones add an `exp` and a sum. Rows with top_k or top_p are
cut one by one, by a sort of the few tokens that can matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from service.engine.messages import Sampling, TokenLogprob
from service.engine.penalties import TokenCounts, apply_penalties


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What is wanted of one row of logits.

    sampling     of the request
    seed, index  random stream of the request, and which of its output tokens this is
    barred       tokens that must not be chosen (ending tokens before min_tokens)
    counts       for penalties; None without
    """

    sampling: Sampling
    seed: int
    index: int
    barred: frozenset[int] = frozenset()
    counts: TokenCounts | None = None

    @property
    def is_plain_greedy(self) -> bool:
        sampling = self.sampling
        return sampling.temperature == 0.0 and self.counts is None and not sampling.logit_bias and not self.barred


@dataclass(frozen=True, slots=True)
class Choice:
    """`token_id` None: the logits were not finite, so there is nothing to choose from."""

    token_id: int | None
    logprob: TokenLogprob | None = None


def sample(logits: torch.Tensor, requests: Sequence[RowRequest]) -> list[Choice]:
    """One choice per row. logits float32 [num_rows, vocab]; changed in place."""
    if not requests:
        return []
    wanted = [(row, request.sampling.logprobs) for row, request in enumerate(requests)]
    logprob_rows = [(row, num_top) for row, num_top in wanted if num_top is not None]
    logprobs = _RowLogprobs(logits, logprob_rows) if logprob_rows else None
    _adjust(logits, requests)
    best_values, best_tokens = logits.max(dim=-1)
    is_finite = best_values.isfinite().tolist()
    tokens = [token if fine else None for token, fine in zip(best_tokens.tolist(), is_finite, strict=True)]
    drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0.0 and is_finite[row]]
    if drawn:
        for row, token in zip(drawn, _draw(logits, best_values, drawn, requests), strict=True):
            tokens[row] = token
    if logprobs is None:
        return [Choice(token) for token in tokens]
    return [Choice(token, logprobs.of(row, token)) for row, token in enumerate(tokens)]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Log probability of token_ids[i] under row i, with the `num_top` most likely; for prompt tokens.

    logits float32 [num_rows, vocab], not changed
    """
    known = _RowLogprobs(logits, [(row, num_top) for row in range(len(token_ids))])
    return [known.known(row, token) for row, token in enumerate(token_ids)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that is a hash (splitmix64) of the two."""
    mask = 0xFFFFFFFFFFFFFFFF
    x = (_mix(seed & mask) + (index + 1) * 0x9E3779B97F4A7C15) & mask
    return (_mix(x) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    mask = 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


class _RowLogprobs:
    """Log probabilities of some rows, taken before the logits are adjusted."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[tuple[int, int]]) -> None:
        index = torch.tensor([row for row, _ in rows], device=logits.device)
        self._slots = {row: slot for slot, (row, _) in enumerate(rows)}
        self._num_top = [num_top for _, num_top in rows]
        self._logprobs = logits[index].log_softmax(dim=-1)
        values, tokens = self._logprobs.topk(min(max(self._num_top), logits.shape[-1]), dim=-1)
        self._top = [
            list(zip(row_tokens, row_values, strict=True))
            for row_tokens, row_values in zip(tokens.tolist(), values.tolist(), strict=True)
        ]

    def of(self, row: int, token: int | None) -> TokenLogprob | None:
        """None where the row wants none, or has no token."""
        return self.known(row, token) if row in self._slots and token is not None else None

    def known(self, row: int, token: int) -> TokenLogprob:
        slot = self._slots[row]
        top = tuple(self._top[slot][: self._num_top[slot]])
        return TokenLogprob(token, self._logprobs[slot, token].item(), top)


def _adjust(logits: torch.Tensor, requests: Sequence[RowRequest]) -> None:
    """Penalties, bias and barred tokens, in place."""
    if all(request.is_plain_greedy for request in requests):
        return
    apply_penalties(
        logits,
        [(row, request.sampling, request.counts) for row, request in enumerate(requests) if request.counts is not None],
    )
    biases = [
        (row, token, bias)
        for row, request in enumerate(requests)
        for token, bias in request.sampling.logit_bias.items()
    ]
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        logits[_index(rows, logits), _index(tokens, logits)] += torch.tensor(values, device=logits.device)
    barred = [(row, token) for row, request in enumerate(requests) for token in request.barred]
    if barred:
        rows, tokens = zip(*barred, strict=True)
        logits[_index(rows, logits), _index(tokens, logits)] = float("-inf")


def _index(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)


def _draw(
    logits: torch.Tensor, best_values: torch.Tensor, rows: Sequence[int], requests: Sequence[RowRequest]
) -> list[int]:
    """Random tokens of `rows`, in their order; their logits are spent."""
    samplings = [requests[row].sampling for row in rows]
    numbers = [uniform(requests[row].seed, requests[row].index) for row in rows]
    temperatures = torch.tensor([max(sampling.temperature, 1e-5) for sampling in samplings], device=logits.device)
    if len(rows) < len(requests):
        logits, best_values = logits[_index(rows, logits)], best_values[_index(rows, logits)]
    # Relative to the most likely token, whose weight is 1: no temperature can overflow.
    weights = logits.sub_(best_values[:, None]).div_(temperatures[:, None]).exp_()
    for row, sampling in zip(weights, samplings, strict=True):
        _cut(row, sampling)
    return _pick(weights, numbers).tolist()


def _cut(weights: torch.Tensor, sampling: Sampling) -> None:
    """Zero what min_p, top_k and top_p exclude, in place; equals of the last token kept stay too.

    weights  [vocab], the largest being 1
    """
    if sampling.min_p > 0.0:
        weights.masked_fill_(weights < sampling.min_p, 0.0)
    if 0 < sampling.top_k < len(weights):
        weights.masked_fill_(weights < weights.topk(sampling.top_k).values[-1], 0.0)
    if sampling.top_p < 1.0:
        wanted = sampling.top_p * weights.sum(dtype=torch.float64)
        # Tokens below this weight sum to less than what top_p leaves out, so the sort can do without them.
        floor = (weights.sum(dtype=torch.float64) - wanted) / len(weights)
        ranked = weights[weights >= floor.float()].sort(descending=True).values
        num_kept = int(torch.searchsorted(ranked.cumsum(0, dtype=torch.float64), wanted)) + 1
        weights.masked_fill_(weights < ranked[min(num_kept, len(ranked)) - 1], 0.0)


def _pick(weights: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """int64 [rows]: inverse transform sampling from rows of unnormalised weights; a weight of 0 is never picked.

    First the block of tokens, by the blocks' sums, then the token within it: a running sum over the whole vocabulary
    costs ten times as much.
    """
    num_rows, vocab = weights.shape
    padded = functional.pad(weights, (0, -vocab % _BLOCK)) if vocab % _BLOCK else weights
    blocks = padded.view(num_rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    numbers_column = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None]
    block, left = _pick_column(sums, numbers_column)
    within = blocks[torch.arange(num_rows, device=weights.device), block].double()
    token, _ = _pick_column(within, left)
    return block * _BLOCK + token


_BLOCK = 256


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


_BELOW_ONE = 1.0 - 2.0**-53
