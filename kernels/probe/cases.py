"""Which cases probe which op. Every op of `kernels.platform.IMPLEMENTATIONS` has at least one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kernels.probe import (
    attention_cases,
    conv_cases,
    delta_cases,
    dense_cases,
    expert_cases,
    lora_cases,
    row_scatter_cases,
    sampling_cases,
    window_cases,
)
from kernels.probe.place import Place
from kernels.probe.prepared import Prepared
from kernels.probe.shapes import ProbeShapes

Case = Callable[[ProbeShapes, Place], Prepared]

# Op -> name of the case, which is the public op's -> case. The cases of an op are tried in order.
_CASES: Mapping[str, Mapping[str, Case]] = {
    "lora": {
        "lora_linear": lora_cases.linear,
        "lora_linear_many": lora_cases.linear_many,
        "lora_linear_one": lora_cases.linear_one,
        "lora_embedding": lora_cases.embedding,
        "lora_shrink": lora_cases.shrink,
        "lora_expand": lora_cases.expand,
    },
    "lora_window": {
        "lora_expand_window": window_cases.expand,
        "lora_expand_window_many": window_cases.expand_many,
        "swiglu_window": window_cases.swiglu,
        "swiglu_window_many": window_cases.swiglu_many,
    },
    "causal_conv1d": {
        "causal_conv1d_prefill": conv_cases.prefill,
        "causal_conv1d_update": conv_cases.update,
    },
    "gated_delta": {"gated_delta_prefill": delta_cases.prefill, "gated_delta_decode": delta_cases.decode},
    "experts": {"experts": expert_cases.experts},
    "paged_attention": {
        "paged_attention": attention_cases.attend,
        "paged_attention_decode": attention_cases.attend_decode,
        "paged_attention_window": attention_cases.attend_window,
        "paged_attention_window_decode": attention_cases.attend_window_decode,
    },
    "linear": {"linear": dense_cases.linear},
    "rms_norm": {
        "rms_norm": dense_cases.rms_norm,
        "add_rms_norm": dense_cases.add_rms_norm,
    },
    "rotary_kv": {"rotary_kv": dense_cases.rotary_kv, "rotary_kv_normed": dense_cases.rotary_kv_normed},
    "row_scatter": {"scatter_rows": row_scatter_cases.scatter, "swap_rows": row_scatter_cases.swap},
    "swiglu": {"swiglu": dense_cases.swiglu},
    "sampling": {
        "sample": sampling_cases.sample,
        "sample_top_p": sampling_cases.sample_top_p,
        "sample_greedy": sampling_cases.sample_greedy,
    },
}


def cases_of(op: str, shapes: ProbeShapes) -> Mapping[str, Case]:
    """The cases that a model of these shapes needs of `op`; none where it does not use the op."""
    if op == "causal_conv1d" and shapes.conv_width == 0:
        return {}
    if op == "gated_delta" and shapes.delta is None:
        return {}
    if op == "experts" and shapes.experts is None:
        return {}
    cases = _CASES[op]
    if shapes.sliding_window is None:
        return {name: case for name, case in cases.items() if not name.startswith("paged_attention_window")}
    return cases
