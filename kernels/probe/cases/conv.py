"""Probe cases of the causal convolution: a new sequence, a continued one, decode tokens and padding in one step."""

from __future__ import annotations

import torch

from kernels.causal_conv1d import ops
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

# Per sequence: tokens, state line (-1 is padding), whether it has a state. Lines 0 and 4 are nobody's.
_LENGTHS, _LINES, _CONTINUES = (5, 1, 7, 2, 1), (3, 1, 5, -1, 2), (False, True, True, True, True)
_NUM_LINES = 6
_COLUMNS_BEHIND = 16


def prefill(shapes: ProbeShapes, place: Place) -> Prepared:
    """As the models use it: out = gate_out * conv(gate_in * x), or silu(conv(x))."""
    x, gate_in, gate_out = _inputs(shapes, place, sum(_LENGTHS))
    weight = _weight(shapes, place)
    states = _states(shapes, place, [line for line, goes_on in zip(_LINES, _CONTINUES, strict=True) if goes_on])
    starts = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS) + 1)]
    query_start_loc, lines = place.ints(starts), place.ints(_LINES)
    has_initial_state = torch.tensor(_CONTINUES).to(place.device)

    def call() -> tuple[torch.Tensor, ...]:
        out = ops.causal_conv1d_prefill(
            x,
            weight,
            None,
            states,
            query_start_loc,
            lines,
            has_initial_state,
            gate_in=gate_in,
            gate_out=gate_out,
            activation=_activation(shapes),
            query_starts=starts,
        )
        return out, states

    return call


def update(shapes: ProbeShapes, place: Place) -> Prepared:
    """One token for each of four sequences and one that is padding."""
    x, gate_in, gate_out = _inputs(shapes, place, len(_LINES))
    weight, lines = _weight(shapes, place), place.ints(_LINES)
    states = _states(shapes, place, list(_LINES))

    def call() -> tuple[torch.Tensor, ...]:
        out = ops.causal_conv1d_update(
            x, weight, None, states, lines, gate_in=gate_in, gate_out=gate_out, activation=_activation(shapes)
        )
        return out, states

    return call


def _inputs(
    shapes: ProbeShapes, place: Place, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """x and its two gates, thirds of one packed product; or x alone, the first columns of one."""
    if shapes.conv_size is not None:
        packed = place.put(place.random(num_tokens, shapes.conv_size + _COLUMNS_BEHIND))
        return packed[:, : shapes.conv_size], None, None
    packed = place.random(num_tokens, 3 * shapes.hidden_size)
    if place.wide:
        # The op rounds the gated input to x's dtype, so its truth starts from there.
        gate_in, gate_out, x = packed.to(place.dtype).chunk(3, dim=1)
        return place.put(x * gate_in), None, place.put(gate_out)
    gate_in, gate_out, x = place.put(packed).chunk(3, dim=1)
    return x, gate_in, gate_out


def _activation(shapes: ProbeShapes) -> str | None:
    return None if shapes.conv_size is None else "silu"


def _weight(shapes: ProbeShapes, place: Place) -> torch.Tensor:
    return place.put(place.random(shapes.conv_width, shapes.conv_size or shapes.hidden_size) / shapes.conv_width**0.5)


def _states(shapes: ProbeShapes, place: Place, written: list[int]) -> torch.Tensor:
    """State lines; those not in `written` hold what nobody has written."""
    states = place.fresh(_NUM_LINES, shapes.conv_width - 1, shapes.conv_size or shapes.hidden_size)
    for line in written:
        if line > 0:
            states[line] = place.random(*states.shape[1:])
    return place.put(states)
