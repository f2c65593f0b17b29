"""Feed-forwards, which work on each token of a layer alone, as data; see `spec` for the model around them. Torch-free.

Each says which projections it has (`linears`, `expert_linears`), and which tensors beside them (`tensors`). Names are
relative to the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.activation import Activation
from service.models.spec.layer_parts import Linear, Shapes, named, split_input


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
class MoeSpec:
    """A mixture of experts: each token has the weighted sum of those few of them that its router chose, and perhaps
    the output of an expert of all tokens, times the sigmoid of a gate if it has one.

    num_chosen   experts of a token
    size         width of each expert
    normalises   the weights of a token's experts add up to 1, before `scale`
    scale        of the weights
    correction   tensor [num_experts] that is added to the router's probabilities for the choice alone; they are the
                 sigmoids of logits that are computed in float32. None: a softmax of logits in the model's dtype
    bias         of the router
    activation   of the experts' gates
    interleaved  experts are stored in one tensor for gate and up, [num_experts, hidden_size, 2 * size], columns of gate
                 and of up by turns, and one for down, [num_experts, size, hidden_size], and have biases
    shared       the expert of all tokens; None: there is none
    shared_gate  its gate's module; None: it has no gate
    """

    num_experts: int
    num_chosen: int
    size: int
    normalises: bool
    scale: float = 1.0
    correction: str | None = None
    bias: bool = False
    activation: Activation = "silu"
    interleaved: bool = False
    shared: MlpSpec | None = None
    name: str = "mlp"
    router: str = "gate"
    experts: str = "experts"
    shared_gate: str | None = "shared_expert_gate"

    @property
    def modules(self) -> tuple[str, str]:
        """The experts', and their router's."""
        return f"{self.name}.{self.experts}", f"{self.name}.{self.router}"

    @property
    def routers(self) -> tuple[str, ...]:
        """The router of the experts, if adapters bind to it."""
        return (f"{self.name}.{self.router}",) if self.correction is None else ()

    @property
    def packed_tensors(self) -> tuple[str, str]:
        """Tensors of all experts: of gate and up, and of down."""
        experts = f"{self.name}.{self.experts}"
        return f"{experts}.gate_up_proj", f"{experts}.down_proj"

    def packed_shapes(self, hidden_size: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of `packed_tensors`, where they are not interleaved."""
        return (self.num_experts, 2 * self.size, hidden_size), (self.num_experts, hidden_size, self.size)

    def linears(self, hidden_size: int) -> tuple[Linear, ...]:
        """The router, but an exact one; those of the expert of all tokens, and its gate if it has one."""
        router = f"{self.name}.{self.router}"
        linears: tuple[Linear, ...] = ()
        if self.correction is None:
            linears = (Linear(router, "mlp", hidden_size, {router: self.num_experts}, self.bias),)
        if self.shared is None:
            return linears
        if self.shared_gate is None:
            return (*linears, *self.shared.linears(hidden_size))
        gate = f"{self.name}.{self.shared_gate}"
        return (*linears, *self.shared.linears(hidden_size), Linear(gate, "mlp", hidden_size, {gate: 1}))

    def expert_linears(self, hidden_size: int) -> tuple[Linear, Linear]:
        """Gate and up of all experts; and down."""
        experts = self.modules[0]
        gate_up, down = {f"{experts}.gate_proj": self.size, f"{experts}.up_proj": self.size}, f"{experts}.down_proj"
        return (
            Linear(f"{experts}.gate_up_proj", "experts", hidden_size, gate_up),
            Linear(down, "experts", self.size, {down: hidden_size}),
        )

    def tensors(self, hidden_size: int, *, is_packed: bool) -> Shapes:
        """Tensors of checkpoints beside the projections: an exact router's weight and correction, and the experts in
        `packed_tensors`, or else one by one."""
        router: Shapes = {}
        if self.correction is not None:
            router[f"{self.name}.{self.router}.weight"] = (self.num_experts, hidden_size)
            router[f"{self.name}.{self.correction}"] = (self.num_experts,)
        if self.interleaved:
            biases = (f"{name}_bias" for name in self.packed_tensors)
            router |= {name: shape[:2] for name, shape in zip(biases, self.packed_shapes(hidden_size), strict=True)}
            shapes = ((one, columns, rows) for one, rows, columns in self.packed_shapes(hidden_size))
            return router | dict(zip(self.packed_tensors, shapes, strict=True))
        if is_packed:
            return router | dict(zip(self.packed_tensors, self.packed_shapes(hidden_size), strict=True))
        into, out = (self.size, hidden_size), (hidden_size, self.size)
        return router | {
            f"{self.name}.{self.experts}.{expert}.{part}.weight": shape
            for expert in range(self.num_experts)
            for part, shape in (("gate_proj", into), ("up_proj", into), ("down_proj", out))
        }


FeedForward = MlpSpec | MoeSpec
