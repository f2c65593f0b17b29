"""Which cases probe which op. Every op of `kernels.platform.IMPLEMENTATIONS` has at least one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernels.probe.cases import attention, conv, delta, dense, experts, lora, lora_window, row_scatter, sampling
from kernels.probe.cases.tensors import Place, Prepared
from kernels.shapes import ProbeShapes

Case = Callable[[ProbeShapes, Place], Prepared]

# Op -> name of the case, which is the public op's -> case. The cases of an op are tried in order.
_CASES: Mapping[str, Mapping[str, Case]] = {
    "lora": {
        "lora_linear": lora.linear,
        "lora_linear_many": lora.linear_many,
        "lora_linear_one": lora.linear_one,
        "lora_embedding": lora.embedding,
        "lora_shrink": lora.shrink,
        "lora_expand": lora.expand,
    },
    "lora_window": {
        "lora_expand_window": lora_window.expand,
        "lora_expand_window_many": lora_window.expand_many,
        "swiglu_window": lora_window.swiglu,
        "swiglu_window_many": lora_window.swiglu_many,
    },
    "causal_conv1d": {
        "causal_conv1d_prefill": conv.prefill,
        "causal_conv1d_update": conv.update,
    },
    "gated_delta": {"gated_delta_prefill": delta.prefill, "gated_delta_decode": delta.decode},
    "mamba2": {"mamba2_prefill": delta.mamba2_prefill, "mamba2_decode": delta.mamba2_decode},
    "experts": {"experts": experts.experts, "experts_quantised": experts.experts_quantised},
    "expert_lora": {"expert_lora": experts.lora},
    "paged_attention": {
        "paged_attention": attention.attend,
        "paged_attention_decode": attention.attend_decode,
        "paged_attention_window": attention.attend_window,
        "paged_attention_window_decode": attention.attend_window_decode,
    },
    "linear": {"linear": dense.linear, "linear_quantised": dense.linear_quantised},
    "rms_norm": {
        "rms_norm": dense.rms_norm,
        "add_rms_norm": dense.add_rms_norm,
    },
    "rotary_kv": {"rotary_kv": dense.rotary_kv, "rotary_kv_normed": dense.rotary_kv_normed},
    "row_scatter": {"scatter_rows": row_scatter.scatter, "swap_rows": row_scatter.swap},
    "swiglu": {"swiglu": dense.swiglu},
    "sampling": {
        "sample": sampling.sample,
        "sample_top_p": sampling.sample_top_p,
        "sample_greedy": sampling.sample_greedy,
    },
}


def cases_of(op: str, shapes: ProbeShapes) -> Mapping[str, Case]:
    """The cases that a model of these shapes needs of `op`; none where it does not use the op."""
    if op == "causal_conv1d" and shapes.conv_width == 0:
        return {}
    if op == "gated_delta" and shapes.delta is None:
        return {}
    if op == "mamba2" and shapes.mamba2 is None:
        return {}
    if op in ("experts", "expert_lora") and shapes.experts is None:
        return {}
    cases = _CASES[op]
    if op in ("linear", "experts") and not shapes.is_quantised:
        return {name: case for name, case in cases.items() if name == op}
    if shapes.sliding_window is None:
        return {name: case for name, case in cases.items() if not name.startswith("paged_attention_window")}
    return cases
