"""The two places where an adapter's delta joins the base model: linear projections and the token embedding."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from kernels.linear.ops import PackedWeight, linear
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.ops import lora_embedding, lora_linear


class RowSource(Protocol):
    """Who owns the stacked LoRA rows: the row pool."""

    def stack(self, name: str) -> LoraStack:
        """The rows of the projection that the layout calls `name`."""
        ...


class Projection:
    """x @ weight.T + bias, plus the deltas of the step's adapters. May be several slices packed into one product."""

    def __init__(self, name: str, weight: PackedWeight) -> None:
        self.name = name
        self.weight = weight
        self._stack: LoraStack | None = None

    @property
    def stack(self) -> LoraStack | None:
        """Its LoRA rows, once they are bound."""
        return self._stack

    def bind_rows(self, rows: RowSource) -> None:
        self._stack = rows.stack(self.name)

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None) -> torch.Tensor:
        """x [tokens, in] -> fresh [tokens, out]; `lora` None: no token of the step uses an adapter."""
        out = linear(x, self.weight)
        if lora is not None:
            assert self._stack is not None, f"{self.name} has no rows, but the step has adapters"
            lora_linear(x, out, self._stack, lora)
        return out


class TokenEmbedding:
    """Rows of a table [vocabulary, hidden] by token id, plus the deltas of the step's adapters."""

    def __init__(self, name: str, table: torch.Tensor) -> None:
        self.name = name
        self.table = table
        self._stack: LoraStack | None = None

    @property
    def stack(self) -> LoraStack | None:
        """Its LoRA rows, once they are bound."""
        return self._stack

    def bind_rows(self, rows: RowSource) -> None:
        self._stack = rows.stack(self.name)

    def __call__(self, token_ids: torch.Tensor, lora: LoraMaps | None) -> torch.Tensor:
        """token_ids int64 [tokens] -> fresh [tokens, hidden]"""
        out = functional.embedding(token_ids, self.table)
        if lora is not None:
            assert self._stack is not None, f"{self.name} has no rows, but the step has adapters"
            lora_embedding(token_ids, out, self._stack, lora)
        return out
