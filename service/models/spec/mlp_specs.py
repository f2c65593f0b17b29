"""Feed-forwards, which work on each token of a layer alone, as data; see `spec` for the model around them. Torch-free.

Each says which projections it has (`linears`, `expert_linears`), and which tensors beside them (`tensors`). Names are
relative to the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.shapes import Activation
from service.models.spec.mixer_specs import Linear, Shapes, named, split_input


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """output(activation(gate(x)) * up(x)).

    inputs  modules of gate and up, or one for both
    split   modules of gate and up, which some trainers have in the place of one for both
    packed  what the one product of both is called
    """

    size: int
    name: str = "mlp"
    inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    split: tuple[str, ...] = ("gate_proj", "up_proj")
    packed: str = "gate_up_proj"
    output: str = "down_proj"
    bias: bool = False
    activation: Activation = "silu"

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms of hidden states inside: there are none."""
        return ()

    @property
    def routers(self) -> tuple[str, ...]:
        """Routers of experts: there are none."""
        return ()

    @property
    def packed_tensors(self) -> tuple[str, ...]:
        """Tensors of all experts: there are none."""
        return ()

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """Gate and up; and down."""
        down = f"{self.name}.{self.output}"
        sizes = (self.size, self.size)
        gate_up, splits = named(self.name, self.inputs, sizes), split_input(self.name, self.inputs, self.split, sizes)
        return (
            Linear(f"{self.name}.{self.packed}", "mlp", hidden_size, gate_up, self.bias, splits),
            Linear(down, "mlp", self.size, {down: hidden_size}, self.bias),
        )

    def tensors(self, hidden_size: int, *, is_packed: bool) -> Shapes:  # noqa: ARG002
        """Tensors of checkpoints beside the projections: none."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How experts read the residual stream itself, beside an expert of all tokens that reads the layer's norm of it.

    norm, end_norm   norms of the experts' input and of their sum
    shared_end_norm  norm of the output of the expert of all tokens
    router_scale     tensor [hidden_size], factors of the router's input, which is normed and divided by the square root
                     of its width
    expert_scales    tensor [num_experts], factors of the weights of a token's experts
    """

    norm: str
    end_norm: str
    shared_end_norm: str
    router_scale: str
    expert_scales: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts: each token has the weighted sum of those few of them that its router chose, and perhaps
    the output of an expert of all tokens, times the sigmoid of a gate if it has one.

    num_chosen   experts of a token
    size         width of each expert
    normalises   the weights of a token's experts add up to 1, before `scale`
    scale        of the weights
    router_inner  module of the router that some trainers have in the place of the router itself
    correction   tensor [num_experts] that is added to the router's probabilities for the choice alone; they are the
                 sigmoids of logits that are computed in float32, by an exact router. None: a softmax of logits in the
                 model's dtype
    bias         of the router
    activation   of the experts' gates
    interleaved  experts are stored in one tensor for gate and up, [num_experts, hidden_size, 2 * size], columns of gate
                 and of up by turns, and one for down, [num_experts, size, hidden_size], and have biases
    shared       the expert of all tokens; None: there is none
    shared_gate  its gate's module; None: it has no gate
    stream       None: all experts and the router read the same
    """

    num_experts: int
    num_chosen: int
    size: int
    normalises: bool
    scale: float = 1.0
    router_inner: str | None = None
    correction: str | None = None
    bias: bool = False
    activation: Activation = "silu"
    interleaved: bool = False
    shared: MlpSpec | None = None
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared_gate: str | None = "mlp.shared_expert_gate"
    stream: StreamSpec | None = None

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms of hidden states inside."""
        stream = self.stream
        return () if stream is None else (stream.norm, stream.end_norm, stream.shared_end_norm)

    @property
    def routers(self) -> tuple[str, ...]:
        """The router of the experts."""
        return (self.router,)

    @property
    def packed_tensors(self) -> tuple[str, str]:
        """Tensors of all experts: of gate and up, and of down."""
        return f"{self.experts}.gate_up_proj", f"{self.experts}.down_proj"

    def packed_shapes(self, hidden_size: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of `packed_tensors`, where they are not interleaved."""
        return (self.num_experts, 2 * self.size, hidden_size), (self.num_experts, hidden_size, self.size)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The router; those of the expert of all tokens, and its gate if it has one."""
        outputs = {self.router: self.num_experts}
        splits = {} if self.router_inner is None else {self.router: {self.router_inner: self.num_experts}}
        router = Linear(self.router, "mlp", hidden_size, outputs, self.bias, splits)
        if self.shared is None:
            return (router,)
        if self.shared_gate is None:
            return (router, *self.shared.linears(hidden_size))
        gate = Linear(self.shared_gate, "mlp", hidden_size, {self.shared_gate: 1})
        return (router, *self.shared.linears(hidden_size), gate)

    def expert_linears(self, hidden_size: int) -> tuple[Linear, Linear]:
        """Gate and up of all experts; and down."""
        both, down = self.packed_tensors
        gate_up = {f"{self.experts}.gate_proj": self.size, f"{self.experts}.up_proj": self.size}
        return (
            Linear(both, "experts", hidden_size, gate_up),
            Linear(down, "experts", self.size, {down: hidden_size}),
        )

    def tensors(self, hidden_size: int, *, is_packed: bool) -> Shapes:
        """Tensors of checkpoints beside the projections: the router's correction, scales of experts, and the experts in
        `packed_tensors`, or else one by one."""
        router: Shapes = {}
        if self.stream is not None:
            router |= {self.stream.router_scale: (hidden_size,), self.stream.expert_scales: (self.num_experts,)}
        if self.correction is not None:
            router[self.correction] = (self.num_experts,)
        if self.interleaved:
            biases = (f"{name}_bias" for name in self.packed_tensors)
            router |= {name: shape[:2] for name, shape in zip(biases, self.packed_shapes(hidden_size), strict=True)}
            shapes = ((one, columns, rows) for one, rows, columns in self.packed_shapes(hidden_size))
            return router | dict(zip(self.packed_tensors, shapes, strict=True))
        if is_packed:
            return router | dict(zip(self.packed_tensors, self.packed_shapes(hidden_size), strict=True))
        into, out = (self.size, hidden_size), (hidden_size, self.size)
        return router | {
            f"{self.experts}.{expert}.{part}.weight": shape
            for expert in range(self.num_experts)
            for part, shape in (("gate_proj", into), ("up_proj", into), ("down_proj", out))
        }


FeedForward = MlpSpec | MoeSpec
