"""The decoder that all families are: embedding, layers on a residual stream, norm, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.lora import ops as lora_ops
from kernels.lora_window import ops as window_ops
from kernels.platform import in_use
from service.models.batch import StepBatch
from service.models.caches import Caches, ConvStates, KvCache
from service.models.facts import ModelFacts
from service.models.layers import Attention, GatedMlp, RmsNorm, ShortConv
from service.models.projection import RowSource, TokenEmbedding
from service.models.rope import RotaryEmbedding, Rotation
from service.models.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """What mixes the tokens (attention or a convolution), then what works on each token, both on normed input."""

    mixer_norm: RmsNorm
    mixer: Attention | ShortConv
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def mix(
        self, normed: torch.Tensor, batch: StepBatch, rotation: Rotation, cache: KvCache | ConvStates
    ) -> torch.Tensor:
        """normed [tokens, hidden_size] -> fresh, same shape, to be added to the residual stream."""
        return self.mixer(normed, batch, rotation, cache)  # type: ignore[arg-type]


# How a family names and builds the layer with this index.
LayerBuilder = Callable[[Weights, ModelFacts, int], DecoderLayer]


class Decoder:
    """A causal language model over flattened steps; everything about a step is an argument."""

    def __init__(self, weights: Weights, facts: ModelFacts, build_layer: LayerBuilder, final_norm: str) -> None:
        """final_norm  name of the norm before the head"""
        table = weights.tensor("model.embed_tokens.weight", facts.vocab_size, facts.hidden_size)
        self._embedding = TokenEmbedding("model.embed_tokens", table)
        self._layers = [build_layer(weights, facts, index) for index in range(facts.num_layers)]
        self._norm = RmsNorm(weights, final_norm, facts)
        self._vocab_size = facts.vocab_size
        tied = facts.tie_word_embeddings
        self._head = weights.tied_head("lm_head", table) if tied else weights.projection("lm_head")
        self._rope = RotaryEmbedding(facts.rope, facts.head_dim, facts.max_position_embeddings, weights.device)
        self._projections = weights.projections

    def bind_rows(self, rows: RowSource) -> None:
        """Give every projection, the token embedding and the head their LoRA rows."""
        self._embedding.bind_rows(rows)
        for projection in self._projections:
            projection.bind_rows(rows)

    def rows_behind(self, name: str, num_rows: int, num_slices: int) -> torch.Tensor | None:
        """Memory behind the base weight of projection `name` for its rows of A, [num_rows * num_slices, in], row j of
        slice s at j * num_slices + s. None where they stand by themselves: on devices without windows, and those of the
        token embedding.

        Moves the weight: one projection after the other, so that memory for one weight is needed besides.
        """
        if not in_use(self._embedding.table.device).window_rows:
            return None
        found = next((projection for projection in self._projections if projection.name == name), None)
        rows = None if found is None else found.rows_behind(num_rows, num_slices)
        if rows is not None and rows.is_cuda:
            torch.cuda.empty_cache()  # the old weights are too small for the next ones, and would all be kept
        return rows

    @property
    def num_window_rows(self) -> int:
        """The most rows of LoRA that stand behind a base weight; 0 where none do."""
        behind = (projection.weight.behind for projection in self._projections)
        return max((rows.num_rows for rows in behind if rows is not None), default=0)

    @torch.inference_mode()
    def warm_up(self, caches: Caches, max_tokens: int, max_segments: int) -> None:
        """Compile all kernels that steps of up to max_tokens tokens can need, so that none is compiled in a step.

        max_segments  padded length of the steps' LoRA maps
        """
        mixers = {
            layer.mixer.form: (layer.mixer, cache) for layer, cache in zip(self._layers, caches.layers, strict=True)
        }
        for mixer, cache in mixers.values():
            mixer.warm_up(cache)  # type: ignore[arg-type]
        self._norm.warm_up()
        self._layers[0].mlp.warm_up()
        stacks = [projection.stack for projection in self._projections if projection.stack is not None]
        embeddings = [self._embedding.stack] if self._embedding.stack is not None else []
        dtype = self._embedding.table.dtype
        lora_ops.warm_up(stacks, max_tokens, dtype, embeddings=embeddings, max_segments=max_segments)
        if self.num_window_rows:
            gated = [layer.mlp.gate_up.stack for layer in self._layers if layer.mlp.gate_up.stack is not None]
            expanded = [stack for stack in stacks if stack not in gated]
            window_ops.warm_up(expanded, max_tokens, dtype, gated=gated, max_segments=max_segments)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, caches: Caches, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits float32 [num_rows, vocabulary] of `batch.logits_rows` (None: of all tokens); advances the caches by
        the step's tokens.

        out  where the logits are written; made when None
        """
        stream = self._embedding(batch.token_ids, batch.lora)
        rotation = self._rope.rotation(batch.positions, batch.rope_limits, stream.dtype)
        *inner, last = self._layers
        normed = self._layers[0].mixer_norm(stream)
        # Each sum on the residual stream is taken together with the norm that reads it next.
        for layer, following, cache in zip(inner, self._layers[1:], caches.layers[:-1], strict=True):
            normed, stream = layer.mlp_norm.add(layer.mix(normed, batch, rotation, cache), stream)
            normed, stream = following.mixer_norm.add(layer.mlp(normed, batch.lora, batch.window_rows), stream)
        mixed = last.mix(normed, batch, rotation, caches.layers[-1])
        rows = batch.logits_rows
        if rows is not None:
            # What the last mixer leaves is read by nobody but the tokens whose logits are wanted.
            if rows.shape[0] == 0:  # chunks of prompts alone; fused ops need not take empty tensors
                return mixed.new_empty(0, self._vocab_size, dtype=torch.float32) if out is None else out
            mixed, stream = mixed.index_select(0, rows), stream.index_select(0, rows)
        normed, stream = last.mlp_norm.add(mixed, stream)
        normed, _ = self._norm.add(last.mlp(normed, batch.logits_lora, batch.window_rows), stream)
        logits = self._head(normed, batch.logits_lora, batch.window_rows)
        return logits.float().contiguous() if out is None else out.copy_(logits)
