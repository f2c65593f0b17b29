"""Tiny random models and adapters in Hugging Face's own layout, written by transformers and PEFT: the tests' truth.

Sizes are awkward on purpose: grouped-query attention, widths that are no power of two, few layers. Weights are large
enough that a wrong number anywhere changes the logits visibly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "lfm2", "phi3", "gemma2", "gemma3_text", "smollm3", "granite"),
    *("olmo3", "qwen3_5_text", "qwen3_moe", "qwen3_5_moe_text", "glm", "glm4", "glm4_moe", "ministral3"),
    *("mixtral", "granitemoehybrid", "gpt_oss", "gemma4_text", "bamba"),
)
# Models of these families with experts beside their dense feed-forwards.
WITH_EXPERTS = ("granitemoehybrid-experts", "gemma4_text-experts")
VOCAB_SIZE = 304
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DEQUANTISED = "dequantised"  # folder, in that of a quantised model, of the same model in floats
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "t"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("e", "r"))

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": PAD_ID,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_BY_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "tie_word_embeddings": False},
    "mistral": {"head_dim": 16, "sliding_window": 24, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True, "num_attention_heads": 4},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "lfm2": {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 24,
        "block_ffn_dim_multiplier": 1.0,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "original_max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "gemma2": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "final_logit_softcapping": 6.0,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 6.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
    },
    "olmo3": {
        "num_attention_heads": 4,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": False,
    },
    "smollm3": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 24,
        "tie_word_embeddings": True,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "tie_word_embeddings": False,
    },
    "glm": {"num_attention_heads": 4, "head_dim": 20, "tie_word_embeddings": False},
    "glm4": {"num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "glm4_moe": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 40,
        "sliding_window": 24,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1500.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 40,
        "sliding_window": 24,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,  # queries grow within the tests' prompts
            "max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        "num_attention_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 88,
        "position_embedding_type": "rope",
        "embedding_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.9,
        "logits_scaling": 0.5,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_chunk_size": 16,
        "tie_word_embeddings": True,
    },
    "bamba": {
        "num_attention_heads": 4,
        "attn_layer_indices": [1],
        "mamba_n_heads": 6,
        "mamba_d_state": 20,
        "mamba_chunk_size": 16,
        "tie_word_embeddings": False,
    },
    "granite": {
        "num_attention_heads": 4,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 0.7,
        "tie_word_embeddings": True,
    },
}
_BY_FAMILY["granitemoehybrid-experts"] = {
    **_BY_FAMILY["granitemoehybrid"],
    "intermediate_size": 24,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}
_BY_FAMILY["gemma4_text-experts"] = {
    **_BY_FAMILY["gemma4_text"],
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 7,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
_ALL = (*FAMILIES, *WITH_EXPERTS)
# Linear modules of a layer, by what they are.
ATTENTION_INPUTS = {family: ["q_proj", "k_proj", "v_proj"] for family in _ALL} | {
    "phi3": ["qkv_proj"],
    "gemma4_text-experts": ["q_proj", "k_proj"],  # in layers that look at everything the keys are the values
}
ATTENTION_OUTPUT = dict.fromkeys(_ALL, "o_proj") | {"lfm2": "out_proj"}
OTHER_MIXERS = dict.fromkeys(_ALL, ()) | {
    "lfm2": ("in_proj",),
    **dict.fromkeys(("bamba", "granitemoehybrid", "granitemoehybrid-experts"), ("in_proj", "out_proj")),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    ),
}
MLP_MODULES = {family: ["gate_proj", "up_proj", "down_proj"] for family in _ALL} | {
    "phi3": ["gate_up_proj", "down_proj"],
    "lfm2": ["w1", "w2", "w3"],
    "glm": ["gate_up_proj", "down_proj"],
    "glm4": ["gate_up_proj", "down_proj"],
    **{family: ["input_linear", "output_linear"] for family in ("granitemoehybrid", "granitemoehybrid-experts")},
    "gemma4_text-experts": ["gate_proj", "up_proj", "down_proj", "router.proj"],
    "gpt_oss": [],
    "gemma4_text": ["gate_proj", "up_proj", "down_proj", "per_layer_input_gate", "per_layer_projection"],
    "glm4_moe": [],  # as qwen3_moe, and the next
    "mixtral": [],
    "qwen3_moe": [],  # PEFT takes the names of dense layers for those of experts too
    "qwen3_5_moe_text": ["gate_proj", "up_proj", "down_proj", "shared_expert_gate"],
}
LINEAR_MODULES = {
    family: [*ATTENTION_INPUTS[family], ATTENTION_OUTPUT[family], *OTHER_MIXERS[family], *MLP_MODULES[family]]
    for family in _ALL
}


def tiny_fields(family: str) -> dict[str, Any]:
    """Fields of config.json that make a model tiny."""
    return {**_COMMON, **_BY_FAMILY[family]}


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The configuration that `make_tiny_model` uses; overrides are fields of config.json."""
    return transformers.AutoConfig.for_model(family.partition("-")[0], **{**tiny_fields(family), **overrides})


_ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.router.weight", "router.proj.weight")


def shake_vectors(model: torch.nn.Module) -> None:
    """Norm weights start as ones and biases as zeros, which would hide them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1 if "norm" in name else 0.3)
            if name.endswith(("gate_up_proj_bias", "down_proj_bias")):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
            if name.endswith("experts.gate_up_proj") and "gpt_oss" in str(type(model)):
                parameter.mul_(8)  # some gates and ups are clamped
            if name.endswith(_ROUTERS):  # the last expert of a token counts little: rounding may change it
                parameter.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(torch.randn_like(buffer), alpha=0.1)
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer), alpha=0.3)


def make_tiny_model(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random model, its tokenizer and its chat template into `directory`; returns `directory`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
        shake_vectors(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(directory)
    return directory


def make_wrongly_tied_model(family: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A random model with a head of its own, whose config.json says that its head is the embedding."""
    make_tiny_model(family, directory, dtype=dtype, tie_word_embeddings=False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return directory


def load_oracle(model_dir: Path, dtype: torch.dtype) -> Any:
    """The model by transformers; one with a vision tower as a whole, and a quantised one's dequantised twin."""
    if (model_dir / DEQUANTISED).is_dir():
        model_dir = model_dir / DEQUANTISED
    config = json.loads((model_dir / "config.json").read_text())
    kind = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    # Versions of transformers that compute gemma2's attention by torch's operator otherwise leave out the scores' cap.
    eager = {"attn_implementation": "eager"} if config.get("attn_logit_softcapping") is not None else {}
    return kind.from_pretrained(model_dir, dtype=dtype, **eager).eval()


def load_classifier(model_dir: Path, num_labels: int, *, has_head_bias: bool = False) -> Any:
    """The model with a score head in the place of its own, whose weights are random."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_dir, num_labels=num_labels, dtype=torch.float32
    )
    if has_head_bias:
        model.score = torch.nn.Linear(model.score.in_features, num_labels, bias=True)
    return model.eval()


def make_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer with a few merges, five special tokens and a chat template; any text round-trips."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def make_adapter(
    model_dir: Path,
    out_dir: Path,
    *,
    rank: int,
    target_modules: list[str] | str,
    seed: int,
    scale_of_b: float = 0.3,
    save_embedding_layers: bool = False,
    num_labels: int | None = None,
    has_head_bias: bool = False,
    load: Callable[[Path, torch.dtype], Any] = load_oracle,
    **lora_config: Any,
) -> Path:
    """Write a PEFT LoRA adapter all of whose weights are random, so that it changes the output; returns `out_dir`.

    `target_modules` as PEFT takes it (list, regular expression, "all-linear"); further LoraConfig fields by name;
    `load` makes the model that is trained of `model_dir`; `num_labels` for a score head of so many instead.
    """
    lora_config.setdefault("lora_alpha", 2 * rank)
    if num_labels is None:
        model = load(model_dir, torch.float32)
        lora_config.setdefault("task_type", "CAUSAL_LM")
    else:
        model = load_classifier(model_dir, num_labels, has_head_bias=has_head_bias)
        lora_config.setdefault("task_type", "SEQ_CLS")
    config = LoraConfig(r=rank, target_modules=target_modules, **lora_config)
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
            elif "lora_" in name:
                is_b = "lora_B" in name or "lora_embedding_B" in name
                scale = scale_of_b * rank**-0.5 if is_b else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif parameter.requires_grad:  # trained as a whole, or a bias of the base
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    peft_model.save_pretrained(str(out_dir), save_embedding_layers=save_embedding_layers)
    return out_dir
