"""Pairs of a token and one of its experts: in the order of the experts for the products, and back."""

from __future__ import annotations

import torch

from kernels.platform import in_use


def by_expert(x: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(experts [pairs], ascending; order [pairs], the pair at each place, of those of chosen row by row; the row of x
    of each pair in that order)."""
    in_order, order = chosen.flatten().sort(stable=True)
    return in_order, order, x.index_select(0, order // chosen.shape[1])


def add_biases(
    product: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None, which: int, in_order: torch.Tensor
) -> None:
    """Add to each pair's row of product [pairs, columns] the bias of its expert, in place.

    which  0: of gate and up; 1: of down
    """
    if biases is not None:
        product.add_(biases[which].index_select(0, in_order))


def summed(out: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum over each token's experts, always in one order; out [pairs, hidden_size] in the order of the
    experts, weights [tokens, num_chosen]."""
    by_token = torch.empty_like(out).index_copy_(0, order, out).unflatten(0, weights.shape)
    if in_use(out.device).batch_invariant:
        total = torch.zeros(by_token.shape[0], by_token.shape[2], device=out.device)
        for weight, product in zip(weights.float().unbind(1), by_token.unbind(1), strict=True):
            total += product * weight.unsqueeze(1)
        return total.to(out.dtype)
    return (weights.unsqueeze(1) @ by_token).squeeze(1)
