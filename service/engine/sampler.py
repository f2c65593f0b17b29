"""Chooses the next token of each row of logits.

Order, as in vLLM: repetition, presence and frequency penalties; logit_bias; min_tokens (ending tokens barred);
temperature; min_p; top_k; top_p over what is left, renormalised. Temperature 0 takes the most likely token after
penalties and bias.
Log probabilities are those of the model's own distribution, before any of this.

Randomness: one uniform number per token, a hash of (seed of the request, index of the output token), used for inverse
transform sampling. Hence a request's tokens depend neither on its neighbours nor on preemption.

Cost: all-greedy steps are one `max` over the logits. Rows with top_k or top_p look at their most likely candidates
only, and are sorted whole only if those do not reach top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from service.engine.messages import Sampling, TokenLogprob
from service.engine.penalties import TokenCounts, apply_penalties

# Enough that top_p 0.95 of a trained model nearly always lies within; a full sort of 32k logits costs 30 times as much.
NUM_CANDIDATES = 256


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
    tokens: list[int | None] = [*best_tokens.tolist()]
    drawn = [row for row, request in enumerate(requests) if request.sampling.temperature > 0.0]
    if drawn:
        for row, token in zip(drawn, _draw(logits, drawn, requests), strict=True):
            tokens[row] = token
    for row, is_finite in enumerate(best_values.isfinite().tolist()):
        if not is_finite:
            tokens[row] = None
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


def _draw(logits: torch.Tensor, rows: Sequence[int], requests: Sequence[RowRequest]) -> list[int]:
    """Random tokens of `rows`, in their order."""
    samplings = [requests[row].sampling for row in rows]
    numbers = [uniform(requests[row].seed, requests[row].index) for row in rows]
    temperatures = torch.tensor([max(sampling.temperature, 1e-5) for sampling in samplings], device=logits.device)
    selected = logits if len(rows) == len(requests) else logits[_index(rows, logits)]
    # The largest logit becomes 0 before the division, so that a tiny temperature cannot overflow.
    scaled = (selected - selected.max(dim=-1, keepdim=True).values) / temperatures[:, None]
    probs = scaled.softmax(dim=-1)
    tokens = [0] * len(rows)
    plain = [i for i, s in enumerate(samplings) if s.top_p >= 1.0 and s.top_k <= 0 and s.min_p <= 0.0]
    cut = [i for i, s in enumerate(samplings) if not (s.top_p >= 1.0 and s.top_k <= 0 and s.min_p <= 0.0)]
    if plain:
        picked = _pick(probs[_index(plain, probs)], [numbers[i] for i in plain])
        for i, token in zip(plain, picked.tolist(), strict=True):
            tokens[i] = token
    if cut:
        picked_cut = _draw_cut(probs[_index(cut, probs)], [samplings[i] for i in cut], [numbers[i] for i in cut])
        for i, token in zip(cut, picked_cut, strict=True):
            tokens[i] = token
    return tokens


def _draw_cut(probs: torch.Tensor, samplings: Sequence[Sampling], numbers: Sequence[float]) -> list[int]:
    """Rows with min_p, top_k or top_p: only their most likely candidates matter."""
    vocab = probs.shape[-1]
    num_candidates = min(NUM_CANDIDATES, vocab)
    values, tokens = probs.topk(num_candidates, dim=-1)
    kept, is_complete = _cut(values, samplings, num_candidates == vocab)
    chosen = tokens.gather(1, _pick(kept, numbers)[:, None])[:, 0].tolist()
    rest = [i for i, complete in enumerate(is_complete) if not complete]
    if rest:
        values, tokens = probs[_index(rest, probs)].sort(dim=-1, descending=True)
        kept, _ = _cut(values, [samplings[i] for i in rest], True)
        picked = tokens.gather(1, _pick(kept, [numbers[i] for i in rest])[:, None])[:, 0].tolist()
        for i, token in zip(rest, picked, strict=True):
            chosen[i] = token
    return chosen


def _cut(values: torch.Tensor, samplings: Sequence[Sampling], is_whole: bool) -> tuple[torch.Tensor, list[bool]]:
    """Zero what min_p, top_k and top_p exclude of the descending `values` [rows, n]; and whether the n most likely tell
    all: whether nothing outside of them would be kept."""
    n = values.shape[-1]

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, device=values.device)[:, None]

    rank = torch.arange(n, device=values.device)[None]
    top_k = column([float(s.top_k if s.top_k > 0 else 2**31) for s in samplings])
    kept = (rank < top_k) & (values >= column([s.min_p for s in samplings]) * values[:, :1])
    left = torch.where(kept, values, 0.0).double()
    cumulated = left.cumsum(dim=-1)
    # top_p is a share of what min_p and top_k leave: of the candidates, if that ends among them, else of all tokens.
    ends_inside = ~kept[:, -1] | (top_k[:, 0] <= n) | is_whole
    total = torch.where(ends_inside, cumulated[:, -1], 1.0)
    top_p = column([s.top_p for s in samplings])
    left = torch.where(cumulated - left < top_p * total[:, None], left, 0.0)
    left[:, 0] = values[:, 0]  # the most likely token always stays
    cut_by_top_p_alone = torch.tensor([s.top_k <= 0 and s.min_p <= 0.0 for s in samplings], device=values.device)
    is_complete = ends_inside | (cut_by_top_p_alone & (left[:, -1] == 0.0))
    return left, is_complete.tolist()


def _pick(weights: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """int64 [rows]: inverse transform sampling from rows of unnormalised weights; a weight of 0 is never picked."""
    cumulated = weights.double().cumsum(dim=-1)
    total = cumulated[:, -1:]
    target = torch.tensor(numbers, dtype=torch.float64, device=weights.device)[:, None] * total
    # Rounding must not carry the target up to the total, which would pick the last token whatever its weight.
    target = target.minimum(torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True)[:, 0].clamp(max=weights.shape[-1] - 1)
