"""Mixers across the tokens of a layer, as data; see `spec` for the model around it. Torch-free.

Each says which projections it has (`linears`), which tensors beside them (`tensors`), the norms among these that
adapters may replace (`norms`), and its state of a sequence (`states`). Names are relative to the layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from adapters.layout import Group

# Shapes of tensors as checkpoints hold them, by name.
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Linear:
    """A product of a layer that adapters bind to; names are relative to the layer.

    slices  widths of the outputs by module, in the order in which they are packed: each has a weight [width,
            in_features] and, where `has_bias`, a bias [width]
    splits  slices that some trainers have as several modules: widths of these by name, in the order of the slice's rows
    """

    name: str
    group: Group
    in_features: int
    slices: Mapping[str, int]
    has_bias: bool = False
    splits: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MixerState:
    """A tensor that a mixer remembers between steps, as lines of `shape`.

    per         how a step advances it. "token": it appends a line for each of its tokens, in blocks of the paged cache,
                and leaves the lines before. "sequence": it reads and overwrites the one line that a sequence has in its
                slot, whatever the number of its tokens; a sequence's first step reads none.
    in_float32  whatever the model computes in; else in the model's dtype
    """

    name: str
    per: Literal["token", "sequence"]
    shape: tuple[int, ...]
    in_float32: bool = False


def named(parent: str, modules: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, int]:
    """Widths of outputs by module: one for each size, or one module for all of them."""
    if len(modules) == 1:
        return {f"{parent}.{modules[0]}": sum(sizes)}
    return {f"{parent}.{module}": size for module, size in zip(modules, sizes, strict=True)}


def split_input(
    parent: str, inputs: tuple[str, ...], split: tuple[str, ...], sizes: tuple[int, ...]
) -> dict[str, dict[str, int]]:
    """`Linear.splits` of one module for all `sizes`; nothing where each size has a module of its own."""
    return {f"{parent}.{inputs[0]}": named(parent, split, sizes)} if len(inputs) == 1 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention; needs no state but cached keys and values.

    inputs           modules that yield queries, keys and values, in this order: three, or one for all; two where the
                     keys, before their norm and rotation, are the values too; one where only queries are needed
    cache_of         index of the layer whose cached keys and values this one reads; None: it has its own
    split            modules of queries, keys and values, which some trainers have in the place of one for all
    scale            of the scores
    rotary           which of the model's rotations turns queries and keys
    turns_neighbours rotation turns elements 2i and 2i + 1 of a head together, not i and i + half; heads have no norms
    sliding_window   number of latest tokens a query sees, itself included; None: all of them
    score_cap        scores come out as cap * tanh(score / cap); None: as they are
    has_sinks        each query head has a sink (`kernels.paged_attention.ops`), the tensor "sinks"
    head_norms       modules of the norms of each query and each key head before rotation
    norms_values     each value head is normed, without a weight
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
    split: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    input_bias: bool = False
    output_bias: bool = False
    rotary: int = 0
    turns_neighbours: bool = False
    sliding_window: int | None = None
    score_cap: float | None = None
    has_sinks: bool = False
    head_norms: tuple[str, ...] | None = None
    norms_values: bool = False
    cache_of: int | None = None
    whole_norms: tuple[str, str] | None = None
    has_output_gate: bool = False

    @property
    def values_are_keys(self) -> bool:
        """Whether one module yields both."""
        return len(self.inputs) == 2

    @property
    def query_size(self) -> int:
        """Columns of the queries, their gates included."""
        return self.num_heads * self.head_dim * (2 if self.has_output_gate else 1)

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def norms(self) -> dict[str, int]:
        """Widths of the norms that adapters may replace, by module."""
        return {f"{self.name}.{norm}": self.head_dim for norm in self.head_norms or ()}

    @property
    def tensors(self) -> Shapes:
        """Tensors of checkpoints beside the projections."""
        sizes = (self.num_heads * self.head_dim, self.kv_size)
        whole = {f"{self.name}.{norm}": size for norm, size in zip(self.whole_norms or (), sizes, strict=False)}
        norms: Shapes = {f"{norm}.weight": (size,) for norm, size in (self.norms | whole).items()}
        return norms | ({f"{self.name}.sinks": (self.num_heads,)} if self.has_sinks else {})

    @property
    def states(self) -> tuple[MixerState, ...]:
        """Keys and values of each token, unless another layer has them."""
        if self.cache_of is not None:
            return ()
        return tuple(MixerState(name, "token", (self.num_kv_heads, self.head_dim)) for name in ("k", "v"))

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Queries, keys and values; and what reads the heads."""
        sizes: tuple[int, ...] = (self.query_size, self.kv_size, self.kv_size)
        if self.cache_of is not None or self.values_are_keys:
            sizes = sizes[: len(self.inputs)]
        inputs, out = named(self.name, self.inputs, sizes), f"{self.name}.{self.output}"
        splits = split_input(self.name, self.inputs, self.split, sizes) if self.cache_of is None else {}
        return (
            Linear(f"{self.name}.qkv_proj", "attention", hidden_size, inputs, self.input_bias, splits),
            Linear(out, "attention", self.num_heads * self.head_dim, {out: hidden_size}, self.output_bias),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated short convolution over `size` channels; its state is the last `width` - 1 inputs of a sequence."""

    size: int
    width: int
    bias: bool
    name: str = "conv"

    @property
    def norms(self) -> dict[str, int]:
        """Widths of the norms that adapters may replace: there are none."""
        return {}

    @property
    def tensors(self) -> Shapes:
        """Tensors of checkpoints beside the projections."""
        bias: Shapes = {f"{self.name}.conv.bias": (self.size,)} if self.bias else {}
        return {f"{self.name}.conv.weight": (self.size, 1, self.width)} | bias

    @property
    def states(self) -> tuple[MixerState, ...]:
        """The convolution's."""
        return (MixerState("lines", "sequence", (self.width - 1, self.size)),)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Both gates and the convolution's input; and what reads the gated result."""
        into, out = f"{self.name}.in_proj", f"{self.name}.out_proj"
        return (
            Linear(into, "operator", hidden_size, {into: 3 * self.size}, self.bias),
            Linear(out, "operator", self.size, {out: hidden_size}, self.bias),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A gated delta net: a short convolution with silu over queries, keys and values, then a matrix of state for each
    value head (`kernels.gated_delta.ops`). Its state is both, per sequence.

    inputs  modules of what the convolution reads, of the output's gate, and of the two gates of the state, b and a
    split   modules of queries, keys and values, which some trainers have in the place of the first of the inputs
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    name: str = "linear_attn"
    inputs: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    split: tuple[str, ...] = ("in_proj_q", "in_proj_k", "in_proj_v")

    @property
    def key_size(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Columns of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def norms(self) -> dict[str, int]:
        """Widths of the norms that adapters may replace: there are none."""
        return {}

    @property
    def tensors(self) -> Shapes:
        """Tensors of checkpoints beside the projections."""
        return {
            f"{self.name}.conv1d.weight": (self.size, 1, self.width),
            f"{self.name}.A_log": (self.num_value_heads,),
            f"{self.name}.dt_bias": (self.num_value_heads,),
            f"{self.name}.norm.weight": (self.value_dim,),
        }

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Columns of each of the inputs."""
        return (self.size, self.value_size, self.num_value_heads, self.num_value_heads)

    @property
    def states(self) -> tuple[MixerState, ...]:
        """The convolution's, and a matrix for each value head."""
        return (
            MixerState("lines", "sequence", (self.width - 1, self.size)),
            MixerState("matrices", "sequence", (self.num_value_heads, self.key_dim, self.value_dim), in_float32=True),
        )

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """All inputs; and what reads the gated norm."""
        inputs, out = named(self.name, self.inputs, self.input_sizes), f"{self.name}.out_proj"
        sizes = (self.key_size, self.key_size, self.value_size)
        splits = split_input(self.name, self.inputs[:1], self.split, sizes)
        return (
            Linear(f"{self.name}.in_proj", "operator", hidden_size, inputs, splits=splits),
            Linear(out, "operator", self.value_size, {out: hidden_size}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec:
    """A state-space layer: a short convolution with silu over x, B and C, then a matrix of state for each head
    (`kernels.mamba2.ops`), and a gated norm by groups. Its state is both, per sequence. One module yields the gate, x,
    B, C and the steps.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    width: int
    conv_bias: bool
    bias: bool
    name: str = "mamba"

    @property
    def inner_size(self) -> int:
        """Columns of x, and of the gate."""
        return self.num_heads * self.head_dim

    @property
    def size(self) -> int:
        """Channels of the convolution."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """Columns of the gate, of what the convolution reads, and of the steps."""
        return (self.inner_size, self.size, self.num_heads)

    @property
    def norms(self) -> dict[str, int]:
        """Widths of the norms that adapters may replace: there are none."""
        return {}

    @property
    def tensors(self) -> Shapes:
        """Tensors of checkpoints beside the projections."""
        shapes: Shapes = {f"{self.name}.{name}": (self.num_heads,) for name in ("A_log", "dt_bias", "D")}
        if self.conv_bias:
            shapes[f"{self.name}.conv1d.bias"] = (self.size,)
        shapes[f"{self.name}.conv1d.weight"] = (self.size, 1, self.width)
        return shapes | {f"{self.name}.norm.weight": (self.inner_size,)}

    @property
    def states(self) -> tuple[MixerState, ...]:
        """The convolution's, and a matrix for each head."""
        return (
            MixerState("lines", "sequence", (self.width - 1, self.size)),
            MixerState("matrices", "sequence", (self.num_heads, self.state_size, self.head_dim), in_float32=True),
        )

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """All inputs; and what reads the gated norm."""
        into, out = f"{self.name}.in_proj", f"{self.name}.out_proj"
        return (
            Linear(into, "operator", hidden_size, {into: sum(self.input_sizes)}, self.bias),
            Linear(out, "operator", self.inner_size, {out: hidden_size}, self.bias),
        )


Mixer = AttentionSpec | ShortConvSpec | GatedDeltaSpec | Mamba2Spec
