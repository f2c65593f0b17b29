"""The model families that are served: one file of data each. Torch-free.

A family's `read` makes a `ModelSpec` of a parsed config.json, and raises ModelError for what could not be honoured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from service.models.families import (
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    lfm2,
    llama,
    mistral,
    olmo3,
    qwen,
    qwen3_5,
)
from service.models.gguf_file import CONTROL_TOKEN, GgufFile
from service.models.spec.config_json import ModelError, check_kinds
from service.models.spec.model_spec import ModelSpec
from service.models.spec.quantisation import quantisation_of

_READERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = MappingProxyType(
    {
        "llama": llama.read,
        "mistral": mistral.read,
        "qwen2": qwen.read,
        "qwen3": qwen.read_3,
        "qwen3_moe": qwen.read_3_moe,
        "lfm2": lfm2.read,
        "phi3": llama.read_phi3,
        "gemma2": gemma.read,
        "gemma3_text": gemma.read_3,
        "smollm3": llama.read_smollm3,
        "olmo3": olmo3.read,
        "granite": granite.read,
        "granitemoehybrid": granite.read_hybrid,
        "bamba": granite.read_bamba,
        "glm": glm.read,
        "glm4": glm.read_sandwiched,
        "glm4_moe": glm.read_moe,
        "gpt_oss": gpt_oss.read,
        "mixtral": mistral.read_mixtral,
        "ministral3": mistral.read_ministral,
        "mistral3": mistral.read_whole,
        "qwen2_vl": qwen.read_whole,
        "qwen2_5_vl": qwen.read_whole_2_5,
        "qwen3_vl": qwen.read_whole_3,
        "qwen3_vl_moe": qwen.read_whole_3_moe,
        "glm4v": glm.read_whole,
        "glm46v": glm.read_whole,
        "lfm2_vl": lfm2.read_whole,
        "gemma3": gemma.read_whole_3,
        "gemma4": gemma4.read_whole,
        "gemma4_text": gemma4.read,
        "qwen3_5": qwen3_5.read_whole,
        "qwen3_5_text": qwen3_5.read_text,
        "qwen3_5_moe": qwen3_5.read_whole_moe,
        "qwen3_5_moe_text": qwen3_5.read_text_moe,
    }
)
FAMILIES = tuple(_READERS)
__all__ = ["FAMILIES", "PRE_TOKENIZERS", "config_of_gguf", "model_spec"]


def model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The model that `config` (a parsed config.json) describes. Raises ModelError."""
    family = config.get("model_type")
    read = _READERS.get(str(family))
    if read is None:
        raise ModelError(f"config.json names the model_type {family!r}; served are {', '.join(FAMILIES)}")
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        check_kinds(part)
    quantisation_of(config)
    spec = read(config)
    if not spec.attentions:
        raise ModelError("config.json has no attention layer; served are models with at least one")
    for window in (attention.sliding_window for attention in spec.attentions):
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ModelError(f"config.json must give sliding_window as a positive integer or null, and has {window!r}")
    return spec


# Architectures that llama.cpp calls as transformers does, and whether it has the rows of queries and keys in the order
# of pairs that are rotated together.
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Mistral's since Nemo, which cuts words where a capital follows small letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """A tokenizer of byte-level BPE, but for its tokens.

    pattern         cuts texts; None: into words, with digits one by one
    ignores_merges  a word that is a token needs no merges
    adds_bos        where the file does not say, as llama.cpp has it: converters left that to the name
    normalizer      of texts, by the name of tokenizers
    """

    pattern: str | None
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizer: str | None = None


_OF_LLAMA_3 = PreTokenizer(_WORDS % "{1,3}", ignores_merges=True, adds_bos=True)
# By `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": PreTokenizer(None),
    "llama-bpe": _OF_LLAMA_3,
    "llama3": _OF_LLAMA_3,
    "qwen2": PreTokenizer(_WORDS % "", normalizer="NFC"),
    "deepseek-r1-qwen": PreTokenizer(_WORDS % ""),
    "tekken": PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
}
# Control tokens that end an answer, as llama.cpp finds them: the file names one of a model's.
_ENDINGS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")


def _usual(config: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata that is served with these values alone."""
    sizes = dict.fromkeys(("rope.dimension_count", "attention.value_length"), config["head_dim"])
    absent = ("attention.sliding_window", "attention.scale", "attention.clamp_kqv", "rope.scale_linear", "logit_scale")
    named = {f"{config['model_type']}.{name}": value for name, value in (sizes | dict.fromkeys(absent)).items()}
    named |= {f"{config['model_type']}.{name}": 1.0 for name in ("rope.scaling.factor", "rope.scaling.attn_factor")}
    return {f"{config['model_type']}.attention.causal": True, **named}


def _endings(file: GgufFile) -> list[int]:
    """Ids of the tokens that end an answer."""
    named = (file.facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = zip(file.fact("tokenizer.ggml.tokens"), file.fact("tokenizer.ggml.token_type"), strict=True)
    found = [at for at, (text, kind) in enumerate(tokens) if kind == CONTROL_TOKEN and text in _ENDINGS]
    return list(dict.fromkeys((*(token_id for token_id in named if token_id is not None), *found)))


def config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """Raises ModelError for what is not served."""
    architecture = file.fact("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"the GGUF file is of the architecture {architecture!r}; served are {', '.join(_ARCHITECTURES)}: give the "
            "model's Hugging Face directory"
        )

    def fact(name: str) -> Any:
        return file.fact(f"{architecture}.{name}")

    hidden_size, num_heads = fact("embedding_length"), fact("attention.head_count")
    config = {
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": len(file.fact("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.facts.get(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": file.facts.get(f"{architecture}.attention.key_length", hidden_size // max(num_heads, 1)),
        "max_position_embeddings": fact("context_length"),
        "rms_norm_eps": float(f"{fact('attention.layer_norm_rms_epsilon'):.6g}"),  # GGUF has it in float32
        "rope_theta": float(file.facts.get(f"{architecture}.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _endings(file),
        "quantization_config": {"quant_method": "gguf", "has_paired_rows": _ARCHITECTURES[architecture]},
    }
    if file.rope_factors:  # of Llama 3: the same for each length
        rope = {"rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0, "rope_theta": config["rope_theta"]}
        both = {name: list(file.rope_factors) for name in ("short_factor", "long_factor")}
        config["rope_parameters"] = rope | both
    if file.facts.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise ModelError("the GGUF file scales its rotation, which is not served: give the model's own directory")
    biases = () if architecture == "qwen2" else sorted(name for name in file.tensors if name.endswith(".bias"))
    if biases:
        raise ModelError(f"the GGUF file has {biases[0]}, and {architecture} is served without biases from GGUF")
    changed = [name for name, usual in _usual(config).items() if file.facts.get(name, usual) != usual]
    if changed:
        raise ModelError(f"the GGUF file has a {changed[0]}, which is not served: give the model's own directory")
    if file.facts.get(f"{architecture}.expert_count", 0):
        raise ModelError("the GGUF file has experts, which are not served from GGUF: give the model's own directory")
    return config
