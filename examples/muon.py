"""The Muon optimizer (K. Jordan et al., 2024) for the matrices of a model, in float32, which a CPU is good at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Coefficients of the quintic Newton-Schulz step that pushes singular values towards one fastest.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalized(matrices: Tensor) -> Tensor:
    """U Vᵀ of each matrix's singular value decomposition U S Vᵀ, roughly: [n, rows, columns] -> the same shape."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _LINEAR * x + (_CUBIC * gram + _QUINTIC * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(Optimizer):
    """Momentum whose update matrices are made orthogonal, so that every direction of a matrix learns equally fast.

    w <- (1 - lr * weight_decay) * w - lr * sqrt(max(1, rows / columns)) * orthogonalized(g + momentum * (m - g))
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update of all matrices in place; matrices of one shape are made orthogonal together."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                by_shape[matrix.shape].append((matrix, matrix.grad.lerp(state["momentum"], group["momentum"])))
            for shape, members in by_shape.items():
                updates = orthogonalized(torch.stack([update for _, update in members]))
                for (matrix, _), update in zip(members, updates, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(update, alpha=-group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5)
