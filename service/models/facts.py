"""What a checkpoint's config.json says about its model, checked and completed with the family's defaults. Torch-free.

Anything that the model files could not honour (an unknown family, another activation, quantised weights, a rope type
that is not implemented) is a `ModelError` here, before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from service.models.errors import ModelError
from service.models.rope_facts import RopeFacts, rope_facts

LayerKind = Literal["attention", "conv"]

# What transformers assumes where config.json is silent.
_LLAMA_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_DEFAULTS,
    "mistral": {
        **_LLAMA_DEFAULTS,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {
        **_LLAMA_DEFAULTS,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        **_LLAMA_DEFAULTS,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "lfm2": {
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 8,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
}
# Elsewhere null stands for the default; here it means "none".
_NULLABLE = ("sliding_window", "block_ffn_dim_multiplier")
FAMILIES = tuple(_DEFAULTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The base model in numbers.

    intermediate_size   width of the feed-forward layers as they are in the checkpoint (lfm2 derives it)
    head_dim            width of one attention head; attention is scaled by head_dim ** -0.5
    max_position_embeddings
                        as config.json says; `context_tokens` is the longest sequence
    layer_kinds         per layer: what mixes the tokens
    sliding_windows     per layer: number of latest tokens a query sees, itself included; None = all of them
    tie_word_embeddings the head is the token embedding, unless the checkpoint holds a head of other values
    qkv_bias, attention_out_bias, mlp_bias, conv_bias
                        which projections have biases; conv_bias covers the convolution and its two projections
    qk_norm             queries and keys are normalised per head before rotation
    conv_width          taps of the short convolution; 0 without convolution layers
    checkpoint_dtype    what config.json says, e.g. "bfloat16"; None where it is silent
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeFacts
    layer_kinds: tuple[LayerKind, ...]
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    conv_width: int
    conv_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str | None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind == "attention")

    @property
    def conv_layers(self) -> tuple[int, ...]:
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind == "conv")

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model is made for: dynamic and yarn scaling stretch the context by their factor."""
        if self.rope.kind == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.kind == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings

    @property
    def longest_context_tokens(self) -> int:
        """What the operator may allow: with linear scaling, some config.json give the context before the stretching,
        others the one after it, and nothing tells which."""
        if self.rope.kind == "linear":
            return int(self.max_position_embeddings * max(self.rope.factor, 1.0))
        return self.context_tokens

    @property
    def needs_rope_limits(self) -> bool:
        """Whether `StepBatch.rope_limits` has to be filled: dynamic RoPE scaling depends on a request's own limit."""
        return self.rope.kind == "dynamic"


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json of a checkpoint; end-of-sequence ids that only generation_config.json names are merged in."""
    config = _read_json(model_dir / "config.json")
    if (model_dir / "generation_config.json").is_file():
        generation = _read_json(model_dir / "generation_config.json")
        eos_token_ids = [*_token_ids(config, "eos_token_id"), *_token_ids(generation, "eos_token_id")]
        config["eos_token_id"] = list(dict.fromkeys(eos_token_ids))
    return config


def model_facts(config: dict[str, Any]) -> ModelFacts:
    """Facts of the model that `config` (a parsed config.json) describes. Raises ModelError."""
    family = config.get("model_type")
    if family not in _DEFAULTS:
        raise ModelError(f"config.json names the model_type {family!r}; served are {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise ModelError("config.json has a quantization_config; quantised checkpoints are not served")
    config = {**_DEFAULTS[family], **{k: v for k, v in config.items() if v is not None or k in _NULLABLE}}
    _check_activation(config)
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    config.setdefault("num_key_value_heads", num_heads)
    config.setdefault("head_dim", hidden_size // num_heads)
    num_kv_heads, head_dim = _count(config, "num_key_value_heads"), _count(config, "head_dim")
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"config.json has {num_heads} attention heads of width {head_dim} over {num_kv_heads} key/value heads; "
            "the heads must be a multiple of the key/value heads and their width even"
        )
    layer_kinds = _layer_kinds(config)
    if "attention" not in layer_kinds:
        raise ModelError("config.json has no attention layer; served are models with at least one")
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelFacts(
        model_type=family,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_count(config, "max_position_embeddings"),
        norm_eps=float(config["norm_eps" if family == "lfm2" else "rms_norm_eps"]),
        rope=rope_facts(config),
        layer_kinds=layer_kinds,
        sliding_windows=_sliding_windows(config),
        tie_word_embeddings=bool(config.get("tie_embedding", config.get("tie_word_embeddings", False))),
        qkv_bias=attention_bias or family == "qwen2",
        attention_out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family in ("qwen3", "lfm2"),
        conv_width=_count(config, "conv_L_cache") if "conv" in layer_kinds else 0,
        conv_bias=bool(config.get("conv_bias", False)) and family == "lfm2",
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_endings(config),
        checkpoint_dtype=config.get("dtype") or config.get("torch_dtype"),
    )


def _check_activation(config: dict[str, Any]) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json asks for the activation {activation!r}; served is silu")


def _count(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json must give {key} as a positive integer, and has {value!r}")
    return value


def _endings(config: dict[str, Any]) -> tuple[int, ...]:
    """The end-of-sequence ids that the model can produce: some checkpoints name others, of another size of the family,
    say, or of a tokenizer with more tokens than the model."""
    vocab_size = _count(config, "vocab_size")
    token_ids = _token_ids(config, "eos_token_id")
    return tuple(token_id for token_id in token_ids if isinstance(token_id, int) and 0 <= token_id < vocab_size)


def _token_ids(config: dict[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _intermediate_size(config: dict[str, Any]) -> int:
    if config["model_type"] != "lfm2":
        return _count(config, "intermediate_size")
    size = _count(config, "block_ff_dim" if "block_ff_dim" in config else "intermediate_size")
    if not config["block_auto_adjust_ff_dim"]:
        return size
    size = int(2 * size / 3)
    if config["block_ffn_dim_multiplier"] is None:
        return size
    multiple = _count(config, "block_multiple_of")
    return multiple * -(-int(config["block_ffn_dim_multiplier"] * size) // multiple)


def _layer_kinds(config: dict[str, Any]) -> tuple[LayerKind, ...]:
    num_layers = _count(config, "num_hidden_layers")
    attention_layers: Collection[int] = range(num_layers)
    if config["model_type"] == "lfm2" and "layer_types" in config:
        layer_types = _layer_types(config, ("conv", "full_attention"))
        attention_layers = [index for index, layer_type in enumerate(layer_types) if layer_type == "full_attention"]
    elif config["model_type"] == "lfm2":
        attention_layers = config.get("full_attn_idxs", attention_layers)
    return tuple("attention" if index in attention_layers else "conv" for index in range(num_layers))


def _sliding_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    family, num_layers = config["model_type"], _count(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if family == "mistral":
        return (window,) * num_layers
    if family not in ("qwen2", "qwen3"):
        return (None,) * num_layers
    if not config.get("use_sliding_window", False):
        window = None
    if "layer_types" not in config:
        return tuple(window if index >= config["max_window_layers"] else None for index in range(num_layers))
    layer_types = _layer_types(config, ("full_attention", "sliding_attention"))
    if "sliding_attention" in layer_types and window is None:
        raise ModelError("config.json has layers of type sliding_attention, but use_sliding_window is off")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _layer_types(config: dict[str, Any], known: tuple[str, ...]) -> list[str]:
    layer_types: list[str] = config["layer_types"]
    unknown = sorted({str(layer_type) for layer_type in layer_types} - set(known))
    if unknown or len(layer_types) != config["num_hidden_layers"]:
        raise ModelError(
            f"config.json must list one of {', '.join(known)} for each of its {config['num_hidden_layers']} layers in "
            f"layer_types, and lists {len(layer_types)}{' with ' + ', '.join(unknown) if unknown else ''}"
        )
    return layer_types


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}, so it is not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
