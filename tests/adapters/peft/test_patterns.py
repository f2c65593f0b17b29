"""Targets and patterns match what PEFT matches; hostile expressions are stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from adapters.errors import Malformed
from adapters.peft import target_patterns
from adapters.peft.config import parse_config
from adapters.peft.target_patterns import pattern_values, targeted
from tests.support.adapter_files import config_bytes
from tests.support.tiers import examples

PATHS = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 2, 11)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "conv.in_proj")
] + ["model.embed_tokens", "lm_head"]
LINEAR = PATHS[:-2]


def peft_targets(**fields: Any) -> set[str]:
    config = LoraConfig(**fields)
    return {path for path in PATHS if check_target_module_exists(config, path) is True or _is_match(config, path)}


def _is_match(config: LoraConfig, path: str) -> bool:
    found = check_target_module_exists(config, path)
    return bool(found) and type(found).__name__ != "_ExcludedModule"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "lm_head", "nothing"]},
        {"target_modules": ["layers.1.self_attn.q_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "down_proj"]},
        {"target_modules": ["proj"]},
        {"target_modules": ["self_attn"]},
        {"target_modules": ["q_proj", "in_proj"], "layers_to_transform": [1, 11]},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 1},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "k_proj"], "layers_to_transform": [2]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "k_proj"], "modules_to_save": ["layers.1", "proj", "model.embed_tokens"]},
        {"target_modules": r".*(proj|embed_tokens|lm_head)", "modules_to_save": ["mlp", "embed_tokens", "head"]},
        {"target_modules": r".*\.(q_proj|down_proj)"},
        {"target_modules": r"model\.layers\.[0-1]\..*q_proj"},
        {"target_modules": r".*q_proj|lm_head"},
        {"target_modules": "lm_head"},
        {"target_modules": "model.layers.1.self_attn.q_proj"},
        {"target_modules": r"^(?!.*layers\.0).*(?:q_proj|k_proj)$"},
        {"target_modules": r"(?i).*Q_PROJ"},
        {"target_modules": r".*q_pro"},
    ],
    ids=str,
)
def test_targets_are_those_of_peft(fields: dict[str, Any]) -> None:
    ours = targeted(parse_config(config_bytes(**fields)), PATHS, LINEAR)
    assert ours == peft_targets(**fields)


def test_all_linear_means_the_linear_layers_without_the_head() -> None:
    config = parse_config(config_bytes(target_modules="All-Linear", exclude_modules=["k_proj"]))
    assert targeted(config, PATHS, LINEAR) == {path for path in LINEAR if "k_proj" not in path}


keys = st.lists(
    st.sampled_from(
        [
            "q_proj",
            "self_attn.q_proj",
            "self.attn.q.proj",
            "layers.1.self_attn.q_proj",
            "model.layers.1.mlp.down_proj",
            "proj",
            "_proj",
            "1.self_attn.k_proj",
            "lm_head",
            "model.lm_head",
            "",
            r"layers\.1\..*",
            r"^model\.layers\.0\..*q_proj",
            r".*\.k_proj",
            r"(q|k)_proj",
            r"q_proj|lm_head",
            r"layers\.\d+\.mlp\.down_proj",
        ]
    ),
    unique=True,
    max_size=5,
)


@settings(max_examples=examples(25), deadline=None)
@given(keys)
def test_pattern_keys_are_chosen_as_peft_chooses_them(chosen: list[str]) -> None:
    ours = pattern_values(chosen, PATHS, "rank_pattern")
    theirs = {path: get_pattern_key(chosen, path) for path in PATHS}
    assert {path: ours.get(path, path) for path in PATHS} == theirs


@pytest.mark.parametrize("pattern", ["(", "*x", "(?P<a>x)(?P<a>y)", "[z-a]", "(?(9)a|b)", "a{2,1}"])
def test_broken_expressions_are_refused(pattern: str) -> None:
    with pytest.raises(Malformed, match=r"target_modules holds a regular expression that is not valid"):
        targeted(parse_config(config_bytes(target_modules=pattern)), PATHS, LINEAR)
    with pytest.raises(Malformed, match="rank_pattern"):
        pattern_values([pattern], PATHS, "rank_pattern")


@pytest.mark.parametrize("pattern", [r"(([a-z_.0-9])+)+!", r"(a|b|.)*(.*)*(.*)*!", r".*.*.*.*.*.*.*.*.*.*.*.*.*.*!"])
def test_expressions_that_never_end_are_stopped(pattern: str) -> None:
    for fields in ({"target_modules": pattern}, {"target_modules": PATHS, "exclude_modules": pattern}):
        with pytest.raises(Malformed, match="takes too long to match; write it more simply"):
            targeted(parse_config(config_bytes(**fields)), PATHS, LINEAR)
    with pytest.raises(Malformed, match=r"rank_pattern.*takes too long to match; write it more simply"):
        pattern_values([pattern], PATHS, "rank_pattern")


def test_an_expression_has_time_for_every_module_of_a_large_model() -> None:
    """As Unsloth writes it for all linear layers of an eighty-layer model: a fiftieth of the time that it may take."""
    parts = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    leaves = "(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    pattern = rf"(?:.*?(?:vision|image|visual|language|text).*?{parts}.*?{leaves}.*?)"
    pattern += rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.{parts}\.{leaves})"
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj", "input_layernorm")
    paths = [f"model.layers.{layer}.{name}" for layer in range(80) for name in names]
    found = targeted(parse_config(config_bytes(target_modules=pattern)), paths, [])
    assert found == {path for path in paths if path.endswith("proj")}


def test_the_child_is_confined_and_knows_nothing_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It answers with what it is and has, instead of with what it matches."""
    monkeypatch.setenv("MULTILORA_API_KEYS", "a-secret")
    (tmp_path / "spying_child.py").write_text(
        """
import os
from adapters.peft import pattern_child
status = open("/proc/self/status")
def spy(*job):
    try:
        opened = bool(open("/etc/passwd"))
    except OSError:
        opened = False
    status.seek(0)
    seccomp = [line.split()[1] for line in status if line.startswith("Seccomp:")]
    return {"broken": 0, "why": str((opened, seccomp, "a-secret" in os.environ.values()))}
pattern_child.matches = spy
os._exit(pattern_child.main())
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(target_patterns, "_CHILD", "spying_child")
    with pytest.raises(Malformed, match=r"\(\(False, \['2'\], False\)\)"):
        pattern_values(["a|b"], PATHS, "rank_pattern")


@pytest.mark.parametrize(
    "pattern", ["model.layers.1.self_attn.q_proj", "......lm_head", ".......", "lm.head", "lm_hea"]
)
def test_a_name_alone_matches_as_the_expression_that_it_is(pattern: str) -> None:
    found = targeted(parse_config(config_bytes(target_modules=pattern)), PATHS, LINEAR)
    assert found == {path for path in PATHS if re.fullmatch(pattern, path)}


def test_hundreds_of_plain_keys_need_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_patterns, "_CHILD", "no.such.module")
    found = pattern_values([path.removeprefix("model.") for path in PATHS], PATHS, "rank_pattern")
    assert len(found) == len(PATHS)
