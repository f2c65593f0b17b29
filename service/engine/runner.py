"""Runs the model on one step's batch, and says what the engine must know about the model.

Owns the caches (KV blocks and conv-state lines), allocated once; blocks and lines in use are the scheduler's to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from service.engine.batch import StepBatch
from service.engine.config import EngineConfig

if TYPE_CHECKING:
    from adapters.row_pool import RowPool
    from service.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The model and its caches in numbers. num_lines 0: no convolution layers. num_groups: see `BaseLayout.groups`."""

    vocab_size: int
    max_model_len_tokens: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    num_lines: int
    num_groups: int
    has_length_limits: bool
    dtype: str
    device: torch.device


class Runner(Protocol):
    """What the engine needs of a model."""

    @property
    def capacity(self) -> Capacity: ...

    def run(self, batch: StepBatch) -> torch.Tensor:
        """float32 [len(batch.logits_rows), vocab]; writes the caches."""


class ModelRunner:
    """A loaded model with its caches."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, *, pool: RowPool | None, device: torch.device
    ) -> None:
        from service.models.caches import allocate_caches, block_bytes, line_bytes

        facts = loaded.facts
        self._model = loaded.model
        dtype = loaded.dtype
        if pool is not None:
            self._model.bind_rows(pool)
        per_block = block_bytes(facts, config.block_size_tokens, dtype)
        num_blocks = 1 + max(1, config.kv_bytes // per_block)
        num_lines = 0
        if facts.conv_layers:
            wanted = config.max_sequences
            if config.state_bytes is not None:
                wanted = min(wanted, max(1, config.state_bytes // line_bytes(facts, dtype)))
            num_lines = 1 + wanted
        self._caches = allocate_caches(facts, num_blocks, config.block_size_tokens, num_lines, dtype, device)
        limit = facts.max_position_embeddings
        self.capacity = Capacity(
            vocab_size=facts.vocab_size,
            max_model_len_tokens=min(limit, config.max_model_len_tokens or limit),
            eos_token_ids=facts.eos_token_ids,
            num_blocks=num_blocks,
            num_lines=num_lines,
            num_groups=len(loaded.layout.groups),
            has_length_limits=facts.needs_rope_limits,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
        )

    def run(self, batch: StepBatch) -> torch.Tensor:
        with torch.inference_mode():
            return self._model.forward(batch, self._caches)
