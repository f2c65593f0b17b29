"""What every implementation of the table has: the functions that its op's `ops.py` calls, alike, and a contract.

Read from the source, since some import what only an NPU's machine has.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernels.platform import IMPLEMENTATIONS

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
FUNCTIONS = {
    "lora": ("lora_shrink", "lora_expand", "lora_linear", "lora_embedding"),
    "lora_window": ("lora_expand_window", "swiglu_window"),
    "causal_conv1d": ("prefill", "update"),
    "gated_delta": ("prefill", "decode"),
    "experts": ("pack_experts", "experts"),
    "expert_lora": ("expert_lora",),
    "mamba2": ("prefill", "decode"),
    "paged_attention": ("paged_attention",),
    "linear": ("pack_weight", "linear"),
    "sampling": ("new_state", "sample"),
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "rotary_kv": ("rotary_kv",),
    "row_scatter": ("prepare", "scatter_rows", "swap_rows"),
    "swiglu": ("swiglu",),
}
ALL = sorted({(op, name) for table in IMPLEMENTATIONS.values() for op, names in table.items() for name in names})


def functions_of(op: str, implementation: str) -> dict[str, ast.arguments]:
    tree = ast.parse((KERNELS / op / f"{implementation}.py").read_text())
    return {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("op", "implementation"), ALL)
def test_functions_are_those_of_the_reference(op: str, implementation: str) -> None:
    """By name and position; further arguments, for tuning, have defaults."""
    found, reference = functions_of(op, implementation), functions_of(op, "reference")
    for name in FUNCTIONS[op]:
        own, right = found[name], reference[name]
        assert [one.arg for one in own.args] == [one.arg for one in right.args]
        keywords, defaults = [one.arg for one in own.kwonlyargs], own.kw_defaults
        known = [one.arg for one in right.kwonlyargs]
        assert keywords[: len(known)] == known
        assert all(default is not None for default in defaults[len(known) :])


@pytest.mark.parametrize(("op", "implementation"), ALL)
def test_each_states_its_contract(op: str, implementation: str) -> None:
    """One that launches Triton kernels says what it compiles, and how it is warmed up."""
    tree = ast.parse((KERNELS / op / f"{implementation}.py").read_text())
    stated = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["CONTRACT"]
    ]
    assert len(stated) == 1 and isinstance(stated[0], ast.Call) and ast.unparse(stated[0].func) == "Contract"
    if implementation.startswith("triton_"):
        assert {"warm_up", "compiled_count"} <= {keyword.arg for keyword in stated[0].keywords}
