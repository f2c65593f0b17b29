"""Every kernel that goes through the gate. A new kernel adds its module's CASES here."""

from __future__ import annotations

from tests.ascend.cases import (
    conv_cases,
    expert_lora_cases,
    gated_delta_cases,
    gated_delta_chunk_cases,
    gated_delta_prefill_cases,
    lora_cases,
    rotary_cases,
    window_cases,
)
from tests.ascend.gate.cases import Case

CASES: list[Case] = [
    *lora_cases.CASES,
    *conv_cases.CASES,
    *rotary_cases.CASES,
    *expert_lora_cases.CASES,
    *window_cases.CASES,
    *gated_delta_cases.CASES,
    *gated_delta_chunk_cases.CASES,
    *gated_delta_prefill_cases.CASES,
]
