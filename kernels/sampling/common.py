"""Shared parts of the CPU and accelerator implementations: no data-dependent shapes, and nothing to wait for."""

from __future__ import annotations

import torch

from kernels.sampling.maps import SamplingMaps


def model_logprobs(logits: torch.Tensor, maps: SamplingMaps) -> torch.Tensor | None:
    """float32 [num_given + num_chosen, vocab]: log probabilities of the model's own distribution; None if not wanted.

    logits  as the model made them
    """
    rows = [maps.given] if maps.facts.num_given else []
    if maps.facts.num_chosen:
        rows.append(maps.rows.index_select(0, maps.chosen))
    return logits.index_select(0, torch.cat(rows)).float().log_softmax(dim=-1) if rows else None


def rows_to_sample(logits: torch.Tensor, maps: SamplingMaps) -> torch.Tensor:
    """[num_rows, vocab]: the logits themselves where they are in order already; float32 but where all that is left to
    do is to find the largest of each row."""
    facts = maps.facts
    rows = logits[: facts.num_rows] if facts.is_in_order else logits.index_select(0, maps.rows)
    return rows if facts.is_largest_only else rows.float().contiguous()


def edit(logits: torch.Tensor, maps: SamplingMaps) -> None:
    """Add biases and bar tokens, in place.

    logits  float32 [num_rows, vocab], contiguous where there is anything to do
    """
    facts = maps.facts
    if not facts.num_biased and not facts.num_barred:
        return
    flat = logits.view(-1)
    if facts.num_biased:
        flat.index_copy_(0, maps.biased, flat.index_select(0, maps.biased) + maps.bias)
    if facts.num_barred:
        flat.index_copy_(0, maps.barred, torch.full_like(maps.barred, -torch.inf, dtype=torch.float32))
