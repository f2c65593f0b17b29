"""Which rotary position embedding a config.json asks for, in its old spelling and in its new one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from service.models.spec.config_json import ModelError, is_positive_number

RopeKind = Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
# Kinds that config.json may name, with their fields; "none" is ours, for layers without positions.
_NEEDS: dict[RopeKind, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
# Old names, of Phi-3 and of Qwen2-VL, whose sections of positions are equal for text, so that it is a plain one.
_OLD_NAMES: dict[str, RopeKind] = {"su": "longrope", "mrope": "default"}
_NUMBERS = (
    *("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
)
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")  # which says as much as leaving them out
_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """Parameters of the rotation; those that the kind does not use keep their defaults.

    theta                 base of the wavelengths
    share                 of each head that is turned, its first elements: (0, 1]. proportional: of its wavelengths, the
                          others being endless
    factor                how far the context was stretched
    original_max_position_embeddings
                          context before stretching, in tokens (llama3, yarn, longrope)
    low_freq_factor, high_freq_factor
                          llama3: bounds of the smoothed band of wavelengths
    attention_factor      yarn: factor of cosine and sine; None = derived from factor, mscale and mscale_all_dim.
                          longrope: the same, derived from factor and context
    beta_fast, beta_slow  yarn: rotations that bound the ramp
    truncate              yarn: round the bounds of the ramp to whole dimensions
    query_beta            queries are multiplied with 1 + query_beta * log(1 + floor(position / original context))
    short_factors, long_factors
                          longrope: what each wavelength is stretched by, for requests within the original context and
                          beyond it
    """

    kind: RopeKind
    theta: float
    share: float = 1.0
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
    query_beta: float = 0.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_limit(self) -> bool:
        """Whether a token's rotation depends on the length limit of its request (`StepBatch.rope_limits`)."""
        return self.kind in ("dynamic", "longrope")

    def class_of(self, length_limit: int, max_position_embeddings: int) -> int:
        """Requests of one class rotate equal positions alike; see `service.models.layers.rope`."""
        if self.kind == "dynamic":
            return max(length_limit, max_position_embeddings)
        return int(length_limit > self.original_max_position_embeddings) if self.kind == "longrope" else 0

    def rotary_dim(self, head_dim: int) -> int:
        """Elements of a head that are turned."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)


def rope_facts(
    config: Mapping[str, Any], layer_type: str | None = None, *, may_turn_a_share: bool = False
) -> RopeFacts:
    """Read `rope_parameters` (new) or `rope_scaling` and `rope_theta` (old). Raises ModelError.

    config      gives `rope_theta` (its family's default, if need be) and `max_position_embeddings`
    layer_type  of a family whose layers may be turned differently: its parameters are taken where they are given so
    may_turn_a_share
                whether the family looks at partial_rotary_factor
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(field) or {}
    if layer_type is not None and isinstance(rope.get(layer_type), dict):
        rope = rope[layer_type]
    if not isinstance(rope, dict):
        raise ModelError(f"config.json must give {field} of a layer type as an object, and has {rope!r:.80}")
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(
            f"config.json gives {field} by layer type ({', '.join(nested)}); served is one rotation for all layers"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = _OLD_NAMES.get(str(kind), kind)
    if not isinstance(kind, str) or kind not in _NEEDS:
        raise ModelError(f"config.json asks for the rope type {kind!r}; served are {', '.join(_NEEDS)}")
    _check_kinds(rope, field)
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = int(original or config["max_position_embeddings"])
    if original < 1:
        raise ModelError("config.json must give original_max_position_embeddings as 1 or more")
    factor = rope.get("factor")
    if factor is None and (kind == "longrope" or (kind == "yarn" and "factor" in rope)):
        factor = config["max_position_embeddings"] / original  # what transformers takes it for
        rope = {**rope, "factor": factor}
    missing = [key for key in _NEEDS[kind] if rope.get(key) is None]
    if missing:
        raise ModelError(f"config.json asks for the rope type {kind!r} without {', '.join(missing)}")
    if kind == "llama3" and rope["low_freq_factor"] == rope["high_freq_factor"]:
        raise ModelError("config.json gives low_freq_factor and high_freq_factor as the same; they bound a band")
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if not isinstance(share, int | float) or not 0 < share <= 1 or (share != 1 and not may_turn_a_share):
        served = "above 0 and at most 1" if may_turn_a_share else "1"
        raise ModelError(f"config.json rotates {share} of each head (partial_rotary_factor); served is {served}")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 0)
    if not theta:
        raise ModelError(f"config.json gives no rope_theta in {field}")
    if kind == "yarn" and theta <= 1.0:
        raise ModelError(f"config.json gives rope_theta {theta:g}; with the rope type 'yarn' it must be above 1")
    return RopeFacts(
        kind=kind,
        theta=theta,
        share=float(share),
        factor=float(factor or 1.0),
        original_max_position_embeddings=original,
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 1.0),
        attention_factor=rope.get("attention_factor"),
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=bool(rope.get("truncate", True)),
        short_factors=tuple(rope.get("short_factor") or ()),
        long_factors=tuple(rope.get("long_factor") or ()),
    )


def _check_kinds(rope: Mapping[str, Any], field: str) -> None:
    """Raises ModelError for a parameter of another kind."""
    for key in _NUMBERS:
        value = rope.get(key)
        if value is None or (value == 0 and key in _MAY_BE_ZERO):
            continue
        if not is_positive_number(value):
            raise ModelError(f"config.json must give {key} in {field} as a number above 0, and has {value!r:.80}")
    for key in _LISTS:
        value = rope.get(key)
        if value is not None and not (isinstance(value, list) and all(map(is_positive_number, value))):
            raise ModelError(
                f"config.json must give {key} in {field} as a list of numbers above 0, and has {value!r:.80}"
            )
