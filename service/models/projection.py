"""The two places where an adapter's delta joins the base model: linear projections and the token embedding."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from kernels.linear.ops import PackedWeight, append_rows, linear
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.ops import lora_embedding, lora_linear
from kernels.lora_window.ops import lora_expand_window, swiglu_window
from kernels.swiglu.activation import Activation
from kernels.swiglu.ops import swiglu


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

    def rows_behind(self, num_rows: int, num_slices: int) -> torch.Tensor:
        """Memory for rows of A behind the weight, which moves there: see `kernels.linear.ops.append_rows`."""
        self.weight, rows = append_rows(self.weight, num_rows, num_slices)
        return rows

    def __call__(self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int = 0) -> torch.Tensor:
        """x [tokens, in] -> fresh [tokens, out], whose rows may stand apart in a wider buffer.

        lora         None: no token of the step uses an adapter
        window_rows  as in `StepBatch`
        """
        if lora is None:
            return linear(x, self.weight)
        window_rows = self._window(window_rows)
        if window_rows:
            product = linear(x, self.weight, window_rows=window_rows)
            lora_expand_window(product, self._rows, lora)
            return product[:, : self.weight.out_features]
        out = linear(x, self.weight)
        lora_linear(x, out, self._rows, lora)
        return out

    def swiglu(
        self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int = 0, activation: Activation = "silu"
    ) -> torch.Tensor:
        """activation(gate) * up of a projection whose halves are these: x [tokens, in] -> fresh [tokens, out / 2]."""
        rows = 0 if lora is None else self._window(window_rows)
        if lora is None or not rows or activation != "silu" or len(self._rows.b) == 1:
            return swiglu(self(x, lora, window_rows), activation)
        return swiglu_window(linear(x, self.weight, window_rows=rows), self._rows, lora)

    @property
    def _rows(self) -> LoraStack:
        assert self._stack is not None, f"{self.name} has no rows, but the step has adapters"
        return self._stack

    def _window(self, window_rows: int) -> int:
        """Rows of the window that this projection's group has."""
        behind = self.weight.behind
        return 0 if behind is None else min(window_rows, behind.num_rows)


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
