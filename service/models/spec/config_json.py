"""Reading config.json: what all families check alike. Torch-free.

Anything that could not be honoured (another activation, say) is a `ModelError`, before weights are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapters.files.git_lfs import is_lfs_pointer


class ModelError(ValueError):
    """The base model cannot be served; the message is one sentence that names what is wrong with it."""


Config = Mapping[str, Any]
# Files of a checkpoint that are read; others may be left unfetched.
_USED = ("*config.json", "tokenizer.json", "chat_template*", "model*.safetensors*", "*.gguf")

# Types of the fields that readers calculate with as they stand; null is their default, and other fields are checked
# where they are read.
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config", "per_layer_config")
_LISTS = (
    "layer_types",
    "mlp_only_layers",
    "full_attn_idxs",
    "no_rope_layers",
    "attn_layer_indices",
    "layers_block_type",
    "time_step_limit",
)
_FLAGS = (
    *("attention_bias", "mlp_bias", "conv_bias", "tie_word_embeddings", "tie_embedding", "use_sliding_window"),
    *("norm_topk_prob", "block_auto_adjust_ff_dim", "attn_output_gate", "use_qk_norm", "use_double_wide_mlp"),
    *("attention_k_eq_v", "enable_moe_block", "mamba_conv_bias", "mamba_proj_bias"),
)
_TEXTS = ("dtype", "torch_dtype")
# What is made once for each, so that a false number would take all memory.
_WHOLE_NUMBERS = (
    *("num_hidden_layers", "max_window_layers", "first_k_dense_replace", "num_nextn_predict_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"),
)
_MOST = 1 << 16
_NUMBERS = (
    *("rms_norm_eps", "norm_eps", "rope_theta", "rope_local_base_freq", "max_position_embeddings"),
    *("original_max_position_embeddings", "query_pre_attn_scalar", "block_ffn_dim_multiplier", "embedding_multiplier"),
    *("attention_multiplier", "residual_multiplier", "logits_scaling"),
)


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a checkpoint; end-of-sequence ids that only generation_config.json names are merged in, and what
    only files of ModelOpt and msmodelslim say: the algorithm; the kinds of tensors, the first bias of a norm, and a
    rotation. Raises ModelError, also for files of the checkpoint that are Git LFS pointers."""
    _refuse_lfs_pointers(model_dir)
    config = _read_json(model_dir / "config.json")
    described = sorted(model_dir.glob("quant_model_description*.json"))
    if described and not config.get("quantization_config"):
        written = _read_json(described[0])
        tensors = {tensor: str(kind) for tensor, kind in written.items() if "." in tensor}
        bias = next((tensor for tensor in tensors if tensor.endswith(("norm.bias", "norm.module.bias"))), None)
        kinds = sorted(set(tensors.values()))
        optional = written.get("optional")
        rotation = optional.get("quarot") if isinstance(optional, dict) else None
        facts = {"kinds": kinds, "norm_bias": bias, "rotation": rotation}
        config["quantization_config"] = {"quant_method": "msmodelslim", **facts}
    if (model_dir / "hf_quant_config.json").is_file() and not config.get("quantization_config"):
        algorithm = _read_json(model_dir / "hf_quant_config.json").get("quantization")
        if isinstance(algorithm, dict) and algorithm.get("quant_algo"):
            config["quantization_config"] = {**algorithm, "quant_method": "modelopt"}
    if (model_dir / "generation_config.json").is_file():
        generation = _read_json(model_dir / "generation_config.json")
        # Models with a vision tower name them beside text_config, which then counts, or only in it.
        inner = config.get("text_config") if config.get("eos_token_id") is None else None
        given = _token_ids(inner if isinstance(inner, dict) else config, "eos_token_id")
        if added := _token_ids(generation, "eos_token_id"):
            config["eos_token_id"] = list(dict.fromkeys((*given, *added)))
    return config


def completed(config: Config, defaults: Config, *, nullable: tuple[str, ...] = ()) -> dict[str, Any]:
    """config with what transformers assumes where it is silent. null stands for the default, but in `nullable` fields,
    where it means "none"."""
    return {**defaults, **{k: v for k, v in config.items() if v is not None or k in nullable}}


def check_kinds(config: Config) -> None:
    """Raises ModelError for a field of another type than its readers expect."""
    kinds = (
        ("an object", _OBJECTS, lambda value: isinstance(value, dict)),
        ("a list", _LISTS, lambda value: isinstance(value, list)),
        ("a text", _TEXTS, lambda value: isinstance(value, str)),
        ("true or false", _FLAGS, lambda value: isinstance(value, bool)),
        ("a number above 0", _NUMBERS, is_positive_number),
        (f"an integer from 0 to {_MOST}", _WHOLE_NUMBERS, _is_whole_number),
    )
    for kind, names, is_so in kinds:
        for name in names:
            value = config.get(name)
            if value is not None and not is_so(value):
                raise ModelError(f"config.json must give {name} as {kind}, or leave it out, and has {value!r:.80}")


def _is_whole_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def is_positive_number(value: object) -> bool:
    """Whether it is one, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def count(config: Config, key: str) -> int:
    """Raises ModelError unless it is a positive integer that a tensor can have as a size."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelError(f"config.json must give {key} as a positive integer below 2^31, and has {value!r:.80}")
    return value


def attention_sizes(config: Config) -> dict[str, Any]:
    """num_heads, num_kv_heads, head_dim and scale of an `AttentionSpec`, where they are the same in all layers."""
    num_heads = count(config, "num_attention_heads")
    sizes = {"num_key_value_heads": num_heads, "head_dim": count(config, "hidden_size") // num_heads, **config}
    num_kv_heads, head_dim = count(sizes, "num_key_value_heads"), count(sizes, "head_dim")
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"config.json has {num_heads} attention heads of width {head_dim} over {num_kv_heads} key/value heads; "
            "the heads must be a multiple of the key/value heads and their width even"
        )
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5}


def expert_sizes(config: Config) -> dict[str, Any]:
    """num_experts, num_chosen and size of a `MoeSpec`. Raises ModelError."""
    num_experts, num_chosen = count(config, "num_experts"), count(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelError(f"config.json has {num_experts} experts in a layer, and gives a token {num_chosen} of them")
    return {"num_experts": num_experts, "num_chosen": num_chosen, "size": count(config, "moe_intermediate_size")}


def model_sizes(config: Config) -> dict[str, Any]:
    """The fields of a `ModelSpec` that all families spell alike."""
    return {
        "model_type": config["model_type"],
        "vocab_size": count(config, "vocab_size"),
        "hidden_size": count(config, "hidden_size"),
        "max_position_embeddings": count(config, "max_position_embeddings"),
        "norm_eps": float(config["rms_norm_eps"]),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": _endings(config),
        "checkpoint_dtype": config.get("dtype") or config.get("torch_dtype"),
    }


def check_activation(config: Config, served: tuple[str, ...] = ("silu", "swish"), key: str = "hidden_act") -> None:
    """Raises ModelError for another one."""
    activation = config.get(key, served[0])
    if activation not in served:
        raise ModelError(f"config.json asks for the activation {activation!r}; served is {served[0]}")


def layer_types(config: Config, known: tuple[str, ...]) -> list[str]:
    """One of `known` for each layer. Raises ModelError."""
    listed: list[str] = [str(layer_type) for layer_type in config["layer_types"]]
    num_layers = count(config, "num_hidden_layers")
    unknown = sorted(set(listed) - set(known))
    if unknown or len(listed) != num_layers:
        raise ModelError(
            f"config.json must list one of {', '.join(known)} for each of its {num_layers} layers in layer_types, and "
            f"lists {len(listed)}{' with ' + ', '.join(unknown) if unknown else ''}"
        )
    return listed


def late_windows(config: Config) -> list[int | None]:
    """Sliding window of each layer, where use_sliding_window turns them on and layer_types, or max_window_layers before
    that, says in which layers."""
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    if "layer_types" not in config:
        first = config["max_window_layers"]
        return [window if index >= first else None for index in range(count(config, "num_hidden_layers"))]
    return listed_windows(config, window)


def listed_windows(config: Config, window: int | None) -> list[int | None]:
    """Sliding window of each layer, which is `window` in those that layer_types lists for it. Raises ModelError where
    there is none."""
    kinds = layer_types(config, ("full_attention", "sliding_attention"))
    if "sliding_attention" in kinds and window is None:
        raise ModelError(
            "config.json has layers of type sliding_attention, but use_sliding_window is off or sliding_window null"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _endings(config: Config) -> tuple[int, ...]:
    """The end-of-sequence ids that the model can produce: some checkpoints name others, of another size of the family,
    say, or of a tokenizer with more tokens than the model."""
    vocab_size = count(config, "vocab_size")
    return tuple(token_id for token_id in _token_ids(config, "eos_token_id") if 0 <= token_id < vocab_size)


def _token_ids(config: Config, key: str) -> tuple[int, ...]:
    """The token ids of a field; values that are none are left out."""
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return tuple(token_id for token_id in values if isinstance(token_id, int) and not isinstance(token_id, bool))


def _refuse_lfs_pointers(model_dir: Path) -> None:
    for path in sorted(path for pattern in _USED for path in model_dir.glob(pattern) if path.is_file()):
        if is_lfs_pointer(path):
            raise ModelError(
                f"{path} is a Git LFS pointer and not the file: run `git lfs pull` in {model_dir}, or `hf download`"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}, so it is neither a Hugging Face model directory nor a GGUF file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
