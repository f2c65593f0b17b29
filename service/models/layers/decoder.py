"""The decoder that all families are: embedding, layers on a residual stream, norm, head."""

from __future__ import annotations

import torch

from kernels.batch_invariant.mode import batch_invariant_mode
from kernels.linear import ops as linear_ops
from kernels.lora import ops as lora_ops
from kernels.lora.maps import LoraMaps
from kernels.lora_window import ops as window_ops
from kernels.lora_window.ops import window_lengths
from kernels.platform import in_use
from service.models.layers.caches import Caches
from service.models.layers.decoder_layer import AllLayerInputs, DecoderLayer, build_layer
from service.models.layers.feed_forward import MixtureOfExperts
from service.models.layers.mixers import RmsNorm
from service.models.layers.projection import RowSource, TokenEmbedding
from service.models.layers.rope import RotaryEmbedding
from service.models.layers.weights import Weights
from service.models.spec.model_spec import ModelSpec
from service.models.step_batch import StepBatch


class Decoder:
    """A causal language model over flattened steps; everything about a step is an argument."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        """Reads all tensors. Raises ModelError for one that is missing or misshapen."""
        name = f"{spec.prefix}embed_tokens"
        table = weights.tensor(f"{name}.weight")
        self._embedding = TokenEmbedding(name, table)
        self.layers = [build_layer(weights, spec, index) for index in range(spec.num_layers)]
        self._norm = RmsNorm(weights, f"{spec.prefix}{spec.final_norm}", spec)
        self._head = weights.tied_head("lm_head", table) if spec.tie_word_embeddings else weights.projection("lm_head")
        self._spec = spec
        self._inputs = None if spec.layer_inputs is None else AllLayerInputs(weights, spec, spec.layer_inputs)
        self._ropes = [
            RotaryEmbedding(facts, _head_dim(spec, index), spec.max_position_embeddings, weights.device)
            for index, facts in enumerate(spec.rotations)
        ]
        # As transformers has it: rounded to the model's dtype before it multiplies.
        self._embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=table.dtype))
        self._projections = weights.projections
        self._by_name = {projection.name: projection for projection in self._projections}
        norms = [norm for layer in self.layers for norm in layer.norms]
        self._norms = {norm.name: norm for norm in (*norms, self._norm)}

    def bind_rows(self, rows: RowSource) -> None:
        """Bind LoRA rows to every projection, the token embedding and the head, and non-LoRA parameters to all modules
        that may have them."""
        self._embedding.bind_rows(rows)
        for projection in self._projections:
            projection.bind_rows(rows)
        for norm in self._norms.values():
            norm.bind_rows(rows)
        for layer in self.layers:
            if isinstance(layer.mlp, MixtureOfExperts):
                layer.mlp.bind_rows(rows)
        if rows.side is not None:
            self._head.bind_heads(rows.side.tables.get("saved_head"))

    # ---- what adapters' own parts depend on: see `adapters.memory.non_lora_pool.BaseFacts`

    def bias(self, name: str) -> torch.Tensor | None:
        """float32 [outputs] of a projection, None without one."""
        projection = self._by_name.get(name)
        bias = None if projection is None else projection.weight.bias
        return None if bias is None else bias.float()

    def norm_weight(self, name: str) -> torch.Tensor:
        """[width], as it multiplies."""
        return self._norms[name].weight

    @property
    def norm_offset(self) -> float:
        """See `adapters.memory.non_lora_pool.BaseFacts`."""
        return 1.0 if self._spec.zero_centred_norms else 0.0

    def rows(self, name: str, token_ids: torch.Tensor) -> torch.Tensor:
        """See `adapters.memory.non_lora_pool.BaseFacts`."""
        projection = self._by_name.get(name)
        return self._embedding.rows(token_ids) if projection is None else projection.rows(token_ids)

    def delta_squares(self, name: str, first: int, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
        """See `adapters.memory.non_lora_pool.BaseFacts`."""
        projection = self._by_name.get(name)
        if projection is None:
            return self._embedding.delta_squares(a, b, scaling)
        return projection.delta_squares(first, a, b, scaling)

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
        if rows is not None and rows.device.type != "cpu":
            # The old weights are too small for the next ones, and would all be kept.
            torch.get_device_module(rows.device).empty_cache()
        return rows

    @property
    def num_window_rows(self) -> int:
        """The most rows of LoRA that stand behind a base weight; 0 where none do."""
        behind = (projection.weight.behind for projection in self._projections)
        return max((rows.num_rows for rows in behind if rows is not None), default=0)

    @property
    def most_logits_columns(self) -> int:
        """Elements of a row of logits with what its product has besides."""
        return self._head.most_columns

    @torch.inference_mode()
    def warm_up(self, caches: Caches, max_tokens: int, max_segments: int) -> None:
        """Compile all kernels that steps of up to max_tokens tokens can need, so that none is compiled in a step.

        max_segments  padded length of the steps' LoRA maps
        """
        mixers = {
            layer.mixer.form: (layer.mixer, cache) for layer, cache in zip(self.layers, caches.layers, strict=True)
        }
        rotary_dims = [rope.rotary_dim for rope in self._ropes]
        for mixer, cache in mixers.values():
            mixer.warm_up(cache, rotary_dims)  # type: ignore[arg-type]
        self._norm.warm_up(self._embedding.table.dtype)
        if self._inputs is not None:
            self._inputs.norm.warm_up(self._embedding.table.dtype)
        for feed_forward in {layer.mlp.form: layer.mlp for layer in self.layers}.values():
            feed_forward.warm_up()
        stacks = [projection.stack for projection in self._projections if projection.stack is not None]
        embeddings = [self._embedding.stack] if self._embedding.stack is not None else []
        dtype = self._embedding.table.dtype
        lora_ops.warm_up(stacks, max_tokens, dtype, embeddings=embeddings, max_segments=max_segments)
        window_rows = max(window_lengths(self.num_window_rows), default=0)
        linear_ops.warm_up([projection.weight for projection in self._projections], max_tokens, window_rows)
        if self.num_window_rows:
            gated = [layer.mlp.fused_stack for layer in self.layers if layer.mlp.fused_stack is not None]
            # Where adapters may have magnitudes, those come between the expand and the gate: steps with them have both.
            apart = [projection.stack for projection in self._projections if projection.has_vectors]
            expanded = [stack for stack in stacks if stack not in gated or stack in apart]
            window_ops.warm_up(expanded, max_tokens, dtype, gated=gated, max_segments=max_segments)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, caches: Caches, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_rows, vocabulary] of `batch.logits_rows` (None: of all tokens) in the model's dtype; advances the
        caches by the step's tokens. Each row is contiguous; the next may stand apart.

        memory  1-D, at least num_rows * `most_logits_columns` of the model's dtype, in which the logits lie; made when
                None
        """
        with batch_invariant_mode(batch.token_ids.device):
            logits = self._logits(self._hidden(batch, caches, batch.logits_rows), batch, memory)
        if memory is None or logits.data_ptr() == memory.data_ptr():
            return logits
        return memory[: logits.numel()].view(logits.shape).copy_(logits)

    @torch.inference_mode()
    def forward_with_hidden(
        self, batch: StepBatch, caches: Caches, *, of_all: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, with hidden states behind the final norm, [num_tokens, hidden_size] in the model's dtype, or
        [num_rows, hidden_size] of `batch.logits_rows` unless `of_all`."""
        rows = batch.logits_rows
        with batch_invariant_mode(batch.token_ids.device):
            hidden = self._hidden(batch, caches, None if of_all else rows)
            wanted = hidden.index_select(0, rows) if of_all and rows is not None else hidden
            logits = self._logits(wanted, batch)
        return logits, hidden

    def _logits(self, hidden: torch.Tensor, batch: StepBatch, memory: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, vocabulary] of the hidden states of `batch.logits_rows`, in the model's dtype."""
        if hidden.shape[0] == 0:  # chunks of prompts alone; fused ops need not take empty tensors
            return hidden.new_empty(0, self._spec.vocab_size)
        return self._scaled(self._head(hidden, batch.logits_lora, batch.window_rows, memory))

    def _hidden(self, batch: StepBatch, caches: Caches, rows: torch.Tensor | None) -> torch.Tensor:
        """[num_rows, hidden_size] of `rows`, which are `batch.logits_rows` or None for all tokens: behind the final
        norm. Advances the caches."""
        stream = self._embedding(batch.token_ids, batch.lora)
        if self._embedding_scale != 1.0:
            stream *= self._embedding_scale
        given: list[torch.Tensor | None] = [None] * len(self.layers)
        if self._inputs is not None:
            given[:] = self._inputs(batch.token_ids, stream, batch.lora, batch.window_rows)
        rotations = tuple(rope.rotation(batch.positions, batch.rope_limits, stream.dtype) for rope in self._ropes)
        *inner, last = self.layers
        first = self.layers[0].mixer_norm
        normed = stream if first is None else first(stream, batch.lora)
        # Each sum on the residual stream is taken together with the norm that reads it next.
        lora, window_rows = batch.lora, batch.window_rows
        for index, (layer, cache) in enumerate(zip(inner, caches.layers[:-1], strict=True)):
            normed, stream = _add(layer.mlp_norm, layer.mix(normed, batch, rotations, cache), stream, lora)
            norm, given_here = self.layers[index + 1].mixer_norm, given[index]
            normed, stream = _feed(layer, normed, stream, given_here, norm, lora, window_rows)
        mixed = last.mix(normed, batch, rotations, caches.layers[-1])
        given_here = given[-1]
        if rows is not None:
            # The output of the last mixer is read only for the tokens whose logits are wanted.
            if rows.shape[0] == 0:
                return mixed.new_empty(0, mixed.shape[1])
            mixed, stream, lora = mixed.index_select(0, rows), stream.index_select(0, rows), batch.logits_lora
            given_here = None if given_here is None else given_here.index_select(0, rows)
        normed, stream = _add(last.mlp_norm, mixed, stream, lora)
        normed, _ = _feed(last, normed, stream, given_here, self._norm, lora, window_rows)
        return normed

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self._spec.logits_scale != 1.0:
            logits = logits * self._spec.logits_scale
        cap = self._spec.logits_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _head_dim(spec: ModelSpec, rotary: int) -> int:
    """Elements of the heads that a rotation turns."""
    return next((one.head_dim for one in spec.attentions if one.rotary == rotary), spec.attentions[0].head_dim)


def _feed(
    layer: DecoderLayer,
    normed: torch.Tensor,
    stream: torch.Tensor,
    given: torch.Tensor | None,
    norm: RmsNorm | None,
    lora: LoraMaps | None,
    window_rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half of a layer: (the residual stream by the next norm, the stream). `given`: `AllLayerInputs`'s."""
    fed = layer.feed(normed, stream, lora, window_rows)
    if not layer.has_end:
        return _add(norm, fed, stream, lora)
    stream = layer.end(stream + fed, given, lora, window_rows)
    return stream if norm is None else norm(stream, lora), stream


def _add(
    norm: RmsNorm | None, x: torch.Tensor, stream: torch.Tensor, lora: LoraMaps | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`RmsNorm.add`; without a norm the sum takes its place, fresh, since both are read later."""
    if norm is not None:
        return norm.add(x, stream, lora)
    total = x + stream
    return total, total
