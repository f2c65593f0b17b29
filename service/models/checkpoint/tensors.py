"""A checkpoint's tensors beside those that the specification of its model calls for; only headers are read."""

from __future__ import annotations

from dataclasses import dataclass

from service.models.checkpoint.checkpoint import TensorSource
from service.models.spec.model_spec import ModelSpec

# Rotary frequencies, which some exports carry and nobody needs: they follow from the config. Scales of a cache in 8
# bits and of rounded activations: neither is rounded here.
_REDUNDANT = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
_MOST_NAMES = 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    faults      one sentence for each tensor that is missing, misshapen or of a dtype that is not served
    unexpected  tensors that the model does not use
    not_served  beginnings of the names of what the model knows and leaves, a vision tower's say
    """

    faults: tuple[str, ...]
    unexpected: tuple[str, ...]
    not_served: tuple[str, ...]

    @property
    def warning(self) -> str | None:
        """A sentence on the unexpected tensors; None where there are none."""
        if not self.unexpected:
            return None
        more = len(self.unexpected) - _MOST_NAMES
        names = ", ".join(self.unexpected[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        return f"the model does not use these tensors of the checkpoint: {names}"


def compare(spec: ModelSpec, checkpoint: TensorSource) -> Comparison:
    """Faults of the checkpoint's tensors, of every kind, found before any is read."""
    shapes = spec.tensors(checkpoint)
    faults = (checkpoint.fault(name, shape) for name, shape in shapes.items())
    others = [
        name
        for name in checkpoint.others(shapes)
        if not name.endswith(_REDUNDANT) and not name.startswith(spec.redundant)
    ]
    return Comparison(
        faults=tuple(fault for fault in faults if fault is not None),
        unexpected=tuple(name for name in others if not name.startswith(spec.unused)),
        not_served=tuple(prefix for prefix in spec.unused if any(name.startswith(prefix) for name in others)),
    )
