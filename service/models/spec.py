"""A base model as data: what `families/<name>.py` reads out of a config.json. Torch-free.

Everything else follows from it: the projections that adapters bind to, the tensors that are read, what is allocated per
slot and per cached token, and the shapes that kernels are tried at. Names are those of transformers' module tree,
relative to the module around them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.swiglu.activation import Activation
from service.models.rope_facts import RopeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention; needs no state but cached keys and values.

    inputs           modules that yield queries, keys and values, in this order: three, or one for all
    scale            of the scores
    rotary           which of the model's rotations turns queries and keys
    sliding_window   number of latest tokens a query sees, itself included; None: all of them
    score_cap        scores come out as cap * tanh(score / cap); None: as they are
    head_norms       modules of the norms of each query and each key head before rotation
    whole_norms      modules of the norms of all queries and of all keys of a token, taken together, before rotation
    has_output_gate  the query module yields for each head its query, then a gate: the head's output is multiplied with
                     the gate's sigmoid
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    name: str = "self_attn"
    inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    input_bias: bool = False
    output_bias: bool = False
    rotary: int = 0
    sliding_window: int | None = None
    score_cap: float | None = None
    head_norms: tuple[str, str] | None = None
    whole_norms: tuple[str, str] | None = None
    has_output_gate: bool = False

    @property
    def query_size(self) -> int:
        """Columns of the queries, their gates included."""
        return self.num_heads * self.head_dim * (2 if self.has_output_gate else 1)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated short convolution over `size` channels; its state is the last `width` - 1 inputs of a sequence."""

    size: int
    width: int
    bias: bool
    name: str = "conv"

    @property
    def fixed(self) -> tuple[str, ...]:
        """What adapters cannot change."""
        return (f"{self.name}.conv",)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net: a short convolution with silu over queries, keys and values, then a matrix of state for each
    value head (`kernels.gated_delta.ops`). Its state is both, per sequence.

    inputs  modules of what the convolution reads, of the output's gate, and of the two gates of the state, b and a
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    name: str = "linear_attn"
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    @property
    def value_size(self) -> int:
        """Columns of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def fixed(self) -> tuple[str, ...]:
        """What adapters cannot change."""
        return tuple(f"{self.name}.{part}" for part in ("conv1d", "A_log", "dt_bias", "norm"))

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Columns of each of the inputs."""
        return (self.size, self.value_size, self.num_value_heads, self.num_value_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """output(activation(gate(x)) * up(x)).

    inputs  modules of gate and up, or one for both
    packed  what the one product of both is called
    """

    size: int
    name: str = "mlp"
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    packed: str = "gate_up_proj"
    output: str = "down_proj"
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: each token has the weighted sum of those few of them that its router chose, and perhaps
    what an expert of all tokens says, times the sigmoid of a gate.

    num_chosen   experts of a token
    size         width of each expert
    normalises   the weights of a token's experts add up to 1
    shared       the expert of all tokens; None: there is none
    shared_gate  its gate's module
    """

    num_experts: int
    num_chosen: int
    size: int
    normalises: bool
    shared: MlpSpec | None = None
    name: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    shared_gate: str = "shared_expert_gate"

    @property
    def unadapted(self) -> tuple[str, ...]:
        """Modules that adapters cannot bind to yet."""
        return f"{self.name}.{self.router}", f"{self.name}.{self.experts}"


FeedForward = MlpSpec | MoeSpec
Mixer = AttentionSpec | ShortConvSpec | GatedDeltaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What mixes the tokens, then what works on each token. Each reads the residual stream, normed where a module is
    named for it, and is added to it; normed before that where a module is named for it (`..._end_norm`)."""

    mixer: Mixer
    mlp: FeedForward
    mixer_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    mixer_end_norm: str | None = None
    mlp_end_norm: str | None = None


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
    def convs(self) -> tuple[ShortConvSpec | GatedDeltaSpec, ...]:
        """Mixers that keep the last inputs of a convolution."""
        return tuple(layer.mixer for layer in self.layers if not isinstance(layer.mixer, AttentionSpec))

    @property
    def deltas(self) -> tuple[GatedDeltaSpec, ...]:
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaSpec))

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
        return len(self.attentions) < len(self.layers)

    @property
    def widest_projection(self) -> int:
        """Columns of the widest product in a layer; of experts, what all of a token hold between them."""
        sizes = [2 * mlp.size for mlp in self.mlps]
        sizes += [moe.num_chosen * (moe.size + self.hidden_size) for moe in self.moes]
        sizes += [attention.query_size + 2 * attention.kv_size for attention in self.attentions]
        sizes += [sum(delta.input_sizes) for delta in self.deltas]
        sizes += [3 * conv.size for conv in self.convs if isinstance(conv, ShortConvSpec)]
        return max(sizes)

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model is made for: some scalings of the rotation stretch the context by their factor."""
        return min((self._context_of(rope) for rope in self.rotations), default=self.max_position_embeddings)

    @property
    def longest_context_tokens(self) -> int:
        """What the operator may allow: with linear scaling, some config.json give the context before the stretching,
        others the one after it, and nothing tells which."""
        linear = [rope.factor for rope in self.rotations if rope.kind == "linear"]
        if linear and len(self.rotations) == 1:
            return int(self.max_position_embeddings * max(linear[0], 1.0))
        return self.context_tokens

    @property
    def needs_rope_limits(self) -> bool:
        """Whether `StepBatch.rope_limits` has to be filled: some scalings depend on a request's own limit."""
        return any(rope.depends_on_limit for rope in self.rotations)

    def _context_of(self, rope: RopeFacts) -> int:
        if rope.kind == "dynamic":
            return int(self.max_position_embeddings * rope.factor)
        if rope.kind == "yarn":
            return max(self.max_position_embeddings, int(rope.original_max_position_embeddings * rope.factor))
        return self.max_position_embeddings
