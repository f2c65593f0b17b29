"""Which rotary position embedding a config.json asks for, in its old spelling and in its new one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service.models.errors import ModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_NEEDS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Parameters of the rotation; those that the kind does not use keep their defaults.

    theta                 base of the wavelengths
    factor                how far the context was stretched
    original_max_position_embeddings
                          context before stretching, in tokens (llama3, yarn)
    low_freq_factor, high_freq_factor
                          llama3: bounds of the smoothed band of wavelengths
    attention_factor      yarn: factor of cosine and sine; None = derived from factor, mscale and mscale_all_dim
    beta_fast, beta_slow  yarn: rotations that bound the ramp
    truncate              yarn: round the bounds of the ramp to whole dimensions
    """

    kind: RopeKind
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def rope_facts(config: Mapping[str, Any]) -> RopeFacts:
    """Read `rope_parameters` (new) or `rope_scaling` and `rope_theta` (old). Raises ModelError.

    `config` gives `rope_theta` (its family's default, if need be) and `max_position_embeddings`.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(
            f"config.json gives {field} by layer type ({', '.join(nested)}); served is one rotation for all layers"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _NEEDS:
        raise ModelError(f"config.json asks for the rope type {kind!r}; served are {', '.join(_NEEDS)}")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = int(original or config["max_position_embeddings"])
    if kind == "yarn" and "factor" in rope and rope["factor"] is None:  # what transformers takes it for
        rope = {**rope, "factor": config["max_position_embeddings"] / original}
    missing = [key for key in _NEEDS[kind] if rope.get(key) is None]
    if missing:
        raise ModelError(f"config.json asks for the rope type {kind!r} without {', '.join(missing)}")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"config.json rotates only {partial} of each head (partial_rotary_factor); served is 1")
    return RopeFacts(
        kind=kind,
        theta=float(rope.get("rope_theta") or config["rope_theta"]),
        factor=float(rope.get("factor") or 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 1.0),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
    )
