"""adapter_config.json: understood as PEFT understands it, or refused by the name of the setting."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from adapters.errors import AdapterError, Malformed, Unsupported
from adapters.peft import config
from adapters.peft.config import AdapterConfig, parse_config
from tests.support.adapter_files import config_bytes
from tests.support.tiers import examples


def test_every_setting_of_peft_has_been_decided() -> None:
    """A new PEFT brings new settings; each is read, inert or refused on purpose."""
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    decided = config.KNOWN | config.INERT | config.NOT_SUPPORTED.keys()
    assert fields - decided == set()


def test_what_peft_writes_by_default_is_accepted() -> None:
    fields = LoraConfig(r=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM", lora_dropout=0.1).to_dict()
    fields["target_modules"] = list(fields["target_modules"])
    assert parse_config(json.dumps(fields).encode()) == AdapterConfig(
        rank=8,
        alpha=8.0,
        peft_version=fields["peft_version"],
        use_rslora=False,
        rank_pattern={},
        alpha_pattern={},
        target_modules=("q_proj", "v_proj"),
        exclude_modules=(),
        layers_to_transform=None,
        layers_pattern=(),
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": None},
        {"bias": "some"},
        {"use_dora": True, "lora_bias": True},
        {"megatron_config": {"a": 1}},
        {"layer_replication": [[0, 2]]},
        {"alora_invocation_tokens": [1, 2], "use_dora": True},
        {"lora_B_layout": "x"},
        {"use_qalora": True},
        {"arrow_config": {"top_k": 1}},
        {"kasa_config": {"beta": 1}},
        {"monteclora_config": {"num_samples": 2}},
        {"use_bdlora": {"nblocks": 2}},
        {"velora_config": {"num_groups": 2}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": 3},
        {"task_type": "TOKEN_CLS"},
        {"task_type": ["CAUSAL_LM"]},
        {"peft_type": "ADALORA"},
        {"peft_type": "LOHA"},
        {"peft_type": "lora"},
        {"peft_type": None},
        {"a_setting_of_tomorrow": True},
        {"a_setting_of_tomorrow": 0.5},
    ],
    ids=str,
)
def test_what_changes_the_computation_is_refused_by_name(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    with pytest.raises(Unsupported, match=name):
        parse_config(config_bytes(**fields))


def test_parameters_alone_may_be_adapted() -> None:
    """PEFT's way to experts whose weights are no modules."""
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = parse_config(config_bytes(target_modules=None, target_parameters=names))
    assert set(config.target_parameters) == set(names) and not config.target_modules


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_dropout": 0.5},
        {"inference_mode": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": False},
        {"modules_to_save": []},
        {"modules_to_save": None},
        {"fan_in_fan_out": True},
        {"base_model_name_or_path": "../../etc/passwd"},
        {"loftq_config": {"bits": 4}},
        {"a_setting_of_tomorrow": False},
        {"a_setting_of_tomorrow": None},
        {"unsloth_fixed": True},
        {"qalora_group_size": 16},
        {"rank_pattern": None, "alpha_pattern": None},
        {"layers_to_transform": []},
    ],
    ids=str,
)
def test_training_only_settings_mean_the_same_adapter(fields: dict[str, Any]) -> None:
    assert parse_config(config_bytes(**fields)) == parse_config(config_bytes())


@pytest.mark.parametrize(
    "fields",
    [
        {"alora_invocation_tokens": []},
        {"trainable_token_indices": [1, 1]},
        {"trainable_token_indices": {"lm_head": ["x"]}},
        {"alora_invocation_tokens": [-1]},
        {"r": 0},
        {"r": -1},
        {"r": True},
        {"r": "8"},
        {"r": 8.0},
        {"r": 1 << 40},
        {"lora_alpha": "8"},
        {"lora_alpha": None},
        {"lora_alpha": 10**400},
        {"lora_alpha": True},
        {"use_rslora": 1},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": "x"}},
        {"rank_pattern": {f"m{index}": 1 for index in range(5000)}},
        {"target_modules": None},
        {"target_modules": []},
        {"target_modules": ""},
        {"target_modules": [1]},
        {"target_modules": [""]},
        {"target_modules": {"q_proj": 1}},
        {"exclude_modules": 3},
        {"layers_to_transform": [-1]},
        {"layers_to_transform": "1"},
        {"layers_to_transform": [True]},
        {"target_modules": ".*q_proj", "layers_to_transform": [1]},
        {"target_modules": "all-linear", "layers_pattern": "layers"},
        {"layers_pattern": [f"layers{i}" for i in range(17)]},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_impossible_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(Malformed, match=list(fields)[-1]):
        parse_config(config_bytes(**fields))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"null", b"{", b'{"r":1,"r":2}', b"\xff", b'{"r":Infinity}', b"[" * 99_999]
)
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(Malformed, match="cannot be read"):
        parse_config(text)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(config.KNOWN | set(config.NOT_SUPPORTED) | {"new"})), any_json, max_size=4)
)
def test_any_values_are_parsed_or_refused(fields: dict[str, Any]) -> None:
    with suppress(AdapterError):
        assert isinstance(parse_config(config_bytes(**fields)), AdapterConfig)


def test_a_configuration_of_mlx_is_named_as_such() -> None:
    mlx = {"fine_tune_type": "lora", "num_layers": 8, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}}
    with pytest.raises(Unsupported, match=r"of MLX .*lora_alpha its scale \* rank"):
        parse_config(json.dumps(mlx).encode())
