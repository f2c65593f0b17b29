"""The one table of tolerances: absolute and relative, by dtype. Never loosened for one machine or one test."""

from __future__ import annotations

import torch

# Comparison of an op with its float64 reference, relative to the size of the reference's values.
OP: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
}

# States of the delta rule behind a prompt of bfloat16 inputs whose keys are much alike, against float64: root of the
# mean square, of that of the states. Factors of TF32 that are rounded give 0.002, and such that are cut off 0.005.
DELTA_STATE_RMS = 3e-3

# Logits of a whole tiny model (standard deviation about 1) against transformers (+ PEFT) computing in the same dtype:
# largest absolute difference, and root of the mean square. In half precision both sides are rounded, each in its own
# order; the bounds are twice the distance of transformers' own logits from its float32 ones (bfloat16: 0.15, 0.025).
LOGITS: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 4e-2,
    torch.bfloat16: 3e-1,
}
LOGITS_RMS: dict[torch.dtype, float] = {
    torch.float32: 1e-5,
    torch.float16: 6e-3,
    torch.bfloat16: 5e-2,
}
# Families whose rounding is larger by nature, by the same rule. Qwen3.5: what its delta nets put out is normed, also
# where it is next to nothing since a query meets no key (transformers' own distance: 0.49, 0.045).
_OF_FAMILY: dict[tuple[str, torch.dtype], tuple[float, float]] = {
    ("qwen3_5_text", torch.bfloat16): (0.98, 9e-2),
    # The same with weights in FP8 (transformers' own distance from float64: 1.5e-4).
    ("qwen3_5_text-fp8", torch.float32): (3e-4, 1e-5),
    # Inputs of projections next to the border between two codes of float8 get the other one (0.557, 0.119).
    ("llama-fp8-activations", torch.bfloat16): (1.11, 0.238),
    # A token next to the border between two experts goes to the other one (transformers' own distance: 3.06, 0.186).
    ("qwen3_5_moe_text", torch.bfloat16): (6.1, 0.37),
    ("gpt_oss", torch.bfloat16): (1.4, 0.12),  # the same (0.69, 0.059)
    # Twice the layers, and inputs of each (transformers' own distance: 0.356, 0.0495).
    ("gemma4_text", torch.bfloat16): (0.71, 0.1),
    ("glm4_moe", torch.bfloat16): (2.3, 0.12),  # the same (1.17, 0.059)
    # Logits of standard deviation 2 (transformers' own distance: 0.238, 0.030).
    ("granitemoehybrid", torch.bfloat16): (0.47, 6e-2),
}


def logits_bounds(model_type: str, dtype: torch.dtype) -> tuple[float, float]:
    """`LOGITS` and `LOGITS_RMS` of a family."""
    return _OF_FAMILY.get((model_type, dtype), (LOGITS[dtype], LOGITS_RMS[dtype]))
