"""The two places where an adapter's delta joins the base model: linear projections and the token embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.nn import functional

from kernels.linear.ops import PackedWeight, append_rows, linear
from kernels.lora.maps import LoraMaps, LoraStack
from kernels.lora.non_lora import NonLoraLines, NonLoraVectors, own_embedding, own_head, scale_and_shift
from kernels.lora.ops import lora_embedding, lora_linear
from kernels.lora_window.ops import lora_expand_window, swiglu_window
from kernels.shapes import Activation
from kernels.swiglu.ops import swiglu


class Sides(Protocol):
    """Parameters of adapters beside rows, by the layout's names; empty where there is no room. See
    `adapters.memory.non_lora_pool`."""

    @property
    def vectors(self) -> Mapping[str, NonLoraVectors]: ...

    @property
    def norms(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def tables(self) -> Mapping[Any, torch.Tensor]: ...


class RowSource(Protocol):
    """The owner of the stacked LoRA rows: the row pool."""

    def stack(self, name: str) -> LoraStack:
        """The rows of the projection that the layout calls `name`."""
        ...

    @property
    def side(self) -> Sides | None:
        """None where adapters have nothing but rows."""
        ...


def side_of(lora: LoraMaps | None) -> NonLoraLines | None:
    """Lines of the step, None if no adapter in it has anything beside rows."""
    return None if lora is None else lora.side


class Projection:
    """x @ weight.T + bias, plus the deltas of the step's adapters. May be several slices packed into one product."""

    def __init__(self, name: str, weight: PackedWeight) -> None:
        self.name = name
        self.weight = weight
        self._stack: LoraStack | None = None
        self._vectors: NonLoraVectors | None = None
        self._tables: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    @property
    def stack(self) -> LoraStack | None:
        """Its LoRA rows, once they are bound."""
        return self._stack

    @property
    def has_vectors(self) -> bool:
        """Whether there is room for magnitudes and biases of adapters."""
        return self._vectors is not None

    def bind_rows(self, rows: RowSource) -> None:
        self._stack = rows.stack(self.name)
        if rows.side is not None:
            self._vectors = rows.side.vectors.get(self.name)

    def bind_heads(self, tables: torch.Tensor | None) -> None:
        """Bind the weights that adapters have in place of the head, [tables, outputs, inputs]."""
        self._tables = tables

    def rows_behind(self, num_rows: int, num_slices: int) -> torch.Tensor | None:
        """Memory for rows of A behind the weight, which moves there: see `kernels.linear.ops.append_rows`."""
        self.weight, rows = append_rows(self.weight, num_rows, num_slices)
        return rows

    @property
    def most_columns(self) -> int:
        """Columns of a product with the rows behind the weight."""
        behind = self.weight.behind
        return self.weight.out_features + (0 if behind is None else behind.num_rows * behind.num_slices)

    def __call__(
        self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int = 0, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, in] -> fresh [tokens, out], whose rows may stand apart in a wider buffer.

        lora         None: no token of the step uses an adapter
        window_rows  as in `StepBatch`
        memory       1-D, at least tokens * `most_columns` of the weight's dtype: where the product is written
        """
        window_rows = 0 if lora is None else self._window(window_rows)
        out = None if memory is None else self._place(memory, x.shape[0], window_rows)
        if lora is None:
            return linear(x, self.weight, out=out)
        if window_rows:
            product = linear(x, self.weight, window_rows=window_rows, out=out)
            lora_expand_window(product, self._rows, lora)
            out = product[:, : self.weight.out_features]
        else:
            out = linear(x, self.weight, out=out)
            lora_linear(x, out, self._rows, lora)
        return out if lora.side is None else self._own(x, out, lora.side)

    def _place(self, memory: torch.Tensor, num_tokens: int, window_rows: int) -> torch.Tensor:
        """[tokens, columns of the product] at the start of the memory."""
        behind = self.weight.behind
        num_columns = self.weight.out_features + (0 if behind is None else window_rows * behind.num_slices)
        return memory[: num_tokens * num_columns].view(num_tokens, num_columns)

    def _own(self, x: torch.Tensor, out: torch.Tensor, side: NonLoraLines) -> torch.Tensor:
        """The outputs with what adapters have beside rows."""
        if side.vectors is not None:
            assert self._vectors is not None, f"{self.name} has no vectors, but adapters of the step have"
            scale_and_shift(out, self._vectors, side.vectors)
        if side.saved_head is not None and self._tables is not None:
            out = own_head(out, x, self._tables, side.saved_head, side.num_heads)
        return out

    @torch.no_grad()
    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """float32 [num_outputs, inputs]: these rows of a weight in any layout: the identity is multiplied."""
        bare = replace(self.weight, bias=None, rounds_prompts=False)
        parts = [linear(part, bare).float().index_select(1, outputs) for part in _identity(bare)]
        return torch.cat(parts).t()

    @torch.no_grad()
    def delta_squares(self, first: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """See `adapters.memory.non_lora_pool.BaseFacts`: |w + c B A|^2 = |w|^2 + 2 c B (A w) + c^2 B (A A^T) B^T, row
        by row.
        """
        bare = replace(self.weight, bias=None, rounds_prompts=False)
        if self._squares is None:
            self._squares = _squares_of(bare)
        columns = slice(first, first + b.shape[1])
        if bare.rounds_inputs:
            product = a.float() @ self.rows(torch.arange(first, columns.stop, device=a.device)).t()
        else:
            product = linear(a.to(bare.dtype), bare).float()[:, columns]
        return _delta_squares(self._squares[columns], product, a, b, scaling)

    def swiglu(
        self, x: torch.Tensor, lora: LoraMaps | None, window_rows: int = 0, activation: Activation = "silu"
    ) -> torch.Tensor:
        """activation(gate) * up of a projection whose halves are these: x [tokens, in] -> fresh [tokens, out / 2]."""
        rows = 0 if lora is None else self._window(window_rows)
        side = side_of(lora)
        has_vectors = side is not None and side.vectors is not None
        if lora is None or not rows or has_vectors or activation != "silu" or len(self._rows.b) == 1:
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


class ExactProjection(Projection):
    """x @ weight.T in float32, whatever the model's dtype, plus the deltas of the step's adapters in that."""

    def rows_behind(self, num_rows: int, num_slices: int) -> torch.Tensor | None:  # noqa: ARG002
        """None: rows are in the model's dtype."""
        return None

    def __call__(
        self,
        x: torch.Tensor,
        lora: LoraMaps | None,
        window_rows: int = 0,  # noqa: ARG002
        memory: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [tokens, in] -> fresh float32 [tokens, out]"""
        assert memory is None, "its product is of another dtype"
        out = linear(x.float(), self.weight)
        if lora is None:
            return out
        delta = x.new_zeros(out.shape)
        lora_linear(x, delta, self._rows, lora)
        out += delta
        return out if lora.side is None else self._own(x, out, lora.side)


class TokenEmbedding:
    """Rows of a table [vocabulary, hidden] by token id, plus the deltas of the step's adapters."""

    def __init__(self, name: str, table: torch.Tensor) -> None:
        self.name = name
        self.table = table
        self._stack: LoraStack | None = None
        self._vectors: NonLoraVectors | None = None
        self._tables: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    @property
    def stack(self) -> LoraStack | None:
        """Its LoRA rows, once they are bound."""
        return self._stack

    def bind_rows(self, rows: RowSource) -> None:
        self._stack = rows.stack(self.name)
        if rows.side is not None:
            self._vectors = rows.side.vectors.get(self.name)
            self._tables = rows.side.tables.get("saved_embedding")

    def __call__(self, token_ids: torch.Tensor, lora: LoraMaps | None) -> torch.Tensor:
        """token_ids int64 [tokens] -> fresh [tokens, hidden]"""
        out = functional.embedding(token_ids, self.table)
        if lora is not None:
            assert self._stack is not None, f"{self.name} has no rows, but the step has adapters"
            side = lora.side
            if side is not None and side.saved_embedding is not None:
                assert self._tables is not None, "adapters of the step have embeddings of their own"
                out = own_embedding(out, token_ids, self._tables, side.saved_embedding)
            lora_embedding(token_ids, out, self._stack, lora)
            if side is not None and side.vectors is not None:
                assert self._vectors is not None, f"{self.name} has no vectors, but adapters of the step have"
                scale_and_shift(out, self._vectors, side.vectors)
        return out

    @torch.no_grad()
    def delta_squares(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """As `Projection.delta_squares`, of the columns of the table."""
        table = self.table
        if self._squares is None:
            self._squares = torch.zeros(table.shape[1], dtype=torch.float32, device=table.device)
            for part in table.split(_ROWS_AT_ONCE):
                self._squares += part.float().square().sum(0)
        return _delta_squares(self._squares, (a.to(table.dtype) @ table).float(), a, b, scaling)

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [num_ids, hidden] of the table."""
        return self.table.index_select(0, token_ids).float()


_ROWS_AT_ONCE = 256


def _squares_of(weight: PackedWeight) -> torch.Tensor:
    """float32 [outputs]: the square of each row's length, of a weight in any layout: the identity is multiplied."""
    squares = torch.zeros(weight.out_features, dtype=torch.float32, device=weight.data.device)
    for rows in _identity(weight):
        squares += linear(rows, weight).float().square().sum(0)
    return squares


def _identity(weight: PackedWeight) -> Iterator[torch.Tensor]:
    """[inputs, inputs] in parts of some rows, in the weight's dtype."""
    for start in range(0, weight.in_features, _ROWS_AT_ONCE):
        num = min(_ROWS_AT_ONCE, weight.in_features - start)
        rows = torch.zeros(num, weight.in_features, dtype=weight.dtype, device=weight.data.device)
        rows[:, start : start + num].fill_diagonal_(1)
        yield rows


def _delta_squares(
    squares: torch.Tensor, product: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """squares [outputs] of the base; product [rank, outputs] of A and the base; a [rank, in], b [rank, outputs]"""
    a, b = a.float(), b.float()
    delta = torch.addmm(product, a @ a.t(), b, beta=2 * scaling, alpha=scaling**2)
    return delta.mul_(b).sum(0).add_(squares)
