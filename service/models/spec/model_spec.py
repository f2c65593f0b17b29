"""A base model as data: what `families/<name>.py` reads out of a config.json. Torch-free.

Everything else follows from it: the projections that adapters bind to, the tensors that are read, what is allocated per
slot and per cached token, and the shapes that kernels are tried at. Names are those of transformers' module tree,
relative to the module around them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from service.models.spec.mixer_specs import (
    AttentionSpec,
    GatedDeltaSpec,
    Linear,
    Mamba2Spec,
    Mixer,
    Shapes,
    ShortConvSpec,
)
from service.models.spec.mlp_specs import FeedForward, MlpSpec, MoeSpec, StreamSpec
from service.models.spec.rope_facts import RopeFacts

__all__ = [
    "AttentionSpec",
    "FeedForward",
    "GatedDeltaSpec",
    "LayerInputs",
    "LayerSpec",
    "Mamba2Spec",
    "Mixer",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "ShortConvSpec",
    "StreamSpec",
]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of each layer beside the residual stream: `size` elements by token id, plus as many of the embedding.

    vocab_size  rows of the table by token id
    """

    size: int
    vocab_size: int

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Products of a layer: the gate of its inputs, and what brings them to the residual stream."""
        gate, projection = "per_layer_input_gate", "per_layer_projection"
        return (
            Linear(gate, "mlp", hidden_size, {gate: self.size}),
            Linear(projection, "mlp", self.size, {projection: hidden_size}),
        )

    def model_linear(self, hidden_size: int, num_layers: int) -> Linear:
        """The product that yields the inputs of all layers from the embedding."""
        name = "per_layer_model_projection"
        return Linear(name, "mlp", hidden_size, {name: num_layers * self.size})

    def model_tensors(self, num_layers: int) -> Shapes:
        """Tensors of the model beside it."""
        return {
            "embed_tokens_per_layer.weight": (self.vocab_size, num_layers * self.size),
            "per_layer_projection_norm.weight": (self.size,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A mixer across tokens, then a feed-forward on each token. Each reads the residual stream, normed where a norm's
    name is given, and is added to it, normed once more where an `..._end_norm` is named.

    inputs  added behind the feed-forward, gated by the residual stream
    scalar  tensor [1] that the residual stream is multiplied with at the end of the layer
    """

    mixer: Mixer
    mlp: FeedForward
    mixer_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    mixer_end_norm: str | None = None
    mlp_end_norm: str | None = None
    inputs: LayerInputs | None = None
    inputs_norm: str = "post_per_layer_input_norm"
    scalar: str | None = None

    @property
    def norms(self) -> tuple[str, ...]:
        """Modules of the norms of the hidden states."""
        of_inputs = None if self.inputs is None else self.inputs_norm
        each = (self.mixer_norm, self.mixer_end_norm, self.mlp_norm, self.mlp_end_norm, of_inputs)
        return (*(norm for norm in each if norm is not None), *self.mlp.norms)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """All products that adapters bind to, in the order of the forward pass; names are relative to the layer."""
        of_inputs = () if self.inputs is None else self.inputs.linears(hidden_size)
        return (*self.mixer.linears(hidden_size), *self.mlp.linears(hidden_size), *of_inputs)

    def tensors(self, hidden_size: int, *, has_packed_experts: bool) -> Shapes:
        """All tensors of the layer as checkpoints hold them; names are relative to the layer."""
        shapes: Shapes = {f"{norm}.weight": (hidden_size,) for norm in self.norms}
        for linear in self.linears(hidden_size):
            for module, size in linear.slices.items():
                shapes[f"{module}.weight"] = (size, linear.in_features)
                if linear.has_bias:
                    shapes[f"{module}.bias"] = (size,)
        if self.scalar is not None:
            shapes[self.scalar] = (1,)
        return shapes | self.mixer.tensors | self.mlp.tensors(hidden_size, is_packed=has_packed_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The base model.

    prefix               before the names of its modules, "model." say
    rotations            of queries and keys, by position: attention layers say which is theirs
    final_norm           before the head
    zero_centred_norms   norms multiply with 1 + weight, and are rounded once
    exact_norms          norms are rounded once, behind the product with their weight
    embedding_scale, residual_scale, logits_scale
                         factors of the embedded tokens, of what is added to the residual stream, of the logits
    logits_cap           logits come out as cap * tanh(logits / cap); None: as they are
    tie_word_embeddings  the head is the token embedding, unless the checkpoint holds a head of other values
    max_position_embeddings
                         as config.json says; `context_tokens` is the longest sequence
    unused               beginnings of tensors' names that belong to parts of the model that are not served
    checkpoint_dtype     what config.json says, e.g. "bfloat16"; None where it is silent
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    rotations: tuple[RopeFacts, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None
    prefix: str = "model."
    final_norm: str = "norm"
    zero_centred_norms: bool = False
    exact_norms: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_cap: float | None = None
    unused: tuple[str, ...] = ()

    @property
    def layer_inputs(self) -> LayerInputs | None:
        """Those that all layers have, or None."""
        return self.layers[0].inputs

    @property
    def redundant(self) -> tuple[str, ...]:
        """Beginnings of tensors' names that checkpoints may hold for keys and values that another layer has."""
        layers = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        names = [
            f"{self.layer_prefix}{index}.{mixer.name}."
            for index, mixer in layers
            if isinstance(mixer, AttentionSpec) and mixer.cache_of is not None
        ]
        return tuple(name + part for name in names for part in ("k_", "v_"))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_prefix(self) -> str:
        """Before the index of a layer."""
        return f"{self.prefix}layers."

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    @property
    def convs(self) -> tuple[ShortConvSpec | GatedDeltaSpec | Mamba2Spec, ...]:
        """Mixers that keep the last inputs of a convolution."""
        return tuple(layer.mixer for layer in self.layers if not isinstance(layer.mixer, AttentionSpec))

    @property
    def deltas(self) -> tuple[GatedDeltaSpec, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaSpec))

    @property
    def mambas(self) -> tuple[Mamba2Spec, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Mamba2Spec))

    @property
    def mlps(self) -> tuple[MlpSpec, ...]:
        """Gated layers of all tokens, the experts of all tokens among them."""
        found = (layer.mlp.shared if isinstance(layer.mlp, MoeSpec) else layer.mlp for layer in self.layers)
        return tuple(mlp for mlp in found if mlp is not None)

    @property
    def moes(self) -> tuple[MoeSpec, ...]:
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeSpec))

    @property
    def has_states(self) -> bool:
        """Whether sequences have states of a fixed size, beside cached keys and values."""
        return any(state.per == "sequence" for layer in self.layers for state in layer.mixer.states)

    @property
    def widest_projection(self) -> int:
        """Columns of the widest product in a layer; of experts, what all of a token hold between them."""
        sizes = [moe.num_chosen * (moe.size + self.hidden_size) for moe in self.moes]
        sizes += [sum(linear.slices.values()) for layer in self.layers for linear in layer.linears(self.hidden_size)]
        return max(sizes)

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model is made for: some scalings of the rotation stretch the context by their factor."""
        return min((self._context_of(rope) for rope in self.rotations), default=self.max_position_embeddings)

    @property
    def longest_context_tokens(self) -> int:
        """The longest context that the operator may allow. With linear scaling, config.json may give the context before
        or after stretching, and nothing says which."""
        linear = [rope.factor for rope in self.rotations if rope.kind == "linear"]
        if linear and len(self.rotations) == 1:
            return int(self.max_position_embeddings * max(linear[0], 1.0))
        return self.context_tokens

    def rope_class(self, length_limit: int) -> tuple[int, ...]:
        """Requests whose length limits have one class rotate equal positions alike."""
        longest = self.max_position_embeddings
        return tuple(rope.class_of(length_limit, longest) for rope in self.rotations if rope.depends_on_limit)

    @property
    def needs_rope_limits(self) -> bool:
        """Whether `StepBatch.rope_limits` has to be filled: some scalings depend on a request's own limit."""
        return any(rope.depends_on_limit for rope in self.rotations)

    def tensors(self, stored: Container[str]) -> Shapes:
        """Every tensor that is read of a checkpoint which holds the tensors `stored`: experts may be stored all in one
        or one by one, and a tied head may be stored or not."""
        shapes: Shapes = {f"{self.prefix}embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        if self.layer_inputs is not None:
            linear = self.layer_inputs.model_linear(self.hidden_size, self.num_layers)
            shapes[f"{self.prefix}{linear.name}.weight"] = (linear.slices[linear.name], linear.in_features)
            beside = self.layer_inputs.model_tensors(self.num_layers)
            shapes |= {self.prefix + name: shape for name, shape in beside.items()}
        for index, layer in enumerate(self.layers):
            prefix = f"{self.layer_prefix}{index}."
            has_packed_experts = any(prefix + name in stored for name in layer.mlp.packed_tensors)
            of_layer = layer.tensors(self.hidden_size, has_packed_experts=has_packed_experts)
            shapes |= {prefix + name: shape for name, shape in of_layer.items()}
        shapes[f"{self.prefix}{self.final_norm}.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings or "lm_head.weight" in stored:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _context_of(self, rope: RopeFacts) -> int:
        if rope.kind == "dynamic":
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return max(self.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
        return self.max_position_embeddings
