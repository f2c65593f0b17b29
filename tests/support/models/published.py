"""Sizes of published models, as in their config.json: these tell the gate for Ascend what it judges. Torch-free.

Left out is what changes no tensor's shape, and rotations that are stretched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.models.families import model_spec
from service.models.spec.model_spec import AttentionSpec, ModelSpec


def _config(
    family: str, layers: int, hidden: int, inner: int, heads: tuple[int, int], vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **others,
    }


_LFM2_ATTENDS = {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
_TIED = {"tie_word_embeddings": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3-8B": _config("llama", 32, 4096, 14_336, (32, 8), 128_256),
    "Mistral-7B-v0.3": _config("mistral", 32, 4096, 14_336, (32, 8), 32_768),
    "Mixtral-8x7B": _config("mixtral", 32, 4096, 14_336, (32, 8), 32_000),
    "Qwen2.5-7B": _config("qwen2", 28, 3584, 18_944, (28, 4), 152_064),
    "Qwen3-8B": _config("qwen3", 36, 4096, 12_288, (32, 8), 151_936, head_dim=128),
    "Qwen3-30B-A3B": _config(
        *("qwen3_moe", 48, 2048, 6144, (32, 4), 151_936),
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "LFM2-350M": _config("lfm2", 16, 1024, 6656, (16, 8), 65_536, **_TIED, **_LFM2_ATTENDS),
    "LFM2-1.2B": _config("lfm2", 16, 2048, 12_288, (32, 8), 65_536, **_TIED, **_LFM2_ATTENDS),
    "Phi-4-mini": _config("phi3", 32, 3072, 8192, (24, 8), 200_064, partial_rotary_factor=0.75, **_TIED),
    "gemma-2-9b": _config("gemma2", 42, 3584, 14_336, (16, 8), 256_000, head_dim=256, **_TIED),
    "gemma-3-4b": _config("gemma3_text", 34, 2560, 10_240, (8, 4), 262_208, head_dim=256, **_TIED),
    "gemma-4-E2B": _config(
        *("gemma4_text", 35, 1536, 6144, (8, 1), 262_144),
        head_dim=256,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        **_TIED,
    ),
    "gemma-4-26B-A4B": _config(
        *("gemma4_text", 30, 2816, 2112, (16, 8), 262_144),
        head_dim=256,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        **_TIED,
    ),
    "SmolLM3-3B": _config("smollm3", 36, 2048, 11_008, (16, 4), 128_256, **_TIED),
    "Olmo-3-7B": _config("olmo3", 32, 4096, 11_008, (32, 32), 100_278),
    "granite-3.3-8b": _config("granite", 40, 4096, 12_800, (32, 8), 49_159, **_TIED),
    "granite-4.0-h-tiny": _config(
        *("granitemoehybrid", 40, 1536, 512, (12, 4), 100_352),
        layer_types=["attention" if index in (5, 15, 25, 35) else "mamba" for index in range(40)],
        num_local_experts=64,
        num_experts_per_tok=6,
        shared_intermediate_size=1024,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        **_TIED,
    ),
    "granite-4.0-micro": _config(
        *("granitemoehybrid", 40, 2560, 8192, (40, 8), 100_352),
        layer_types=["attention"] * 40,
        num_local_experts=0,
        shared_intermediate_size=8192,
        position_embedding_type="rope",
        **_TIED,
    ),
    "Bamba-9B": _config("bamba", 32, 4096, 14_336, (32, 8), 128_256, attn_layer_indices=[9, 18, 27], mamba_d_state=128),
    "glm-4-9b-chat-hf": _config("glm", 40, 4096, 13_696, (32, 2), 151_552),
    "GLM-4-9B-0414": _config("glm4", 40, 4096, 13_696, (32, 2), 151_552),
    "GLM-4.5-Air": _config(
        *("glm4_moe", 46, 4096, 10_944, (96, 8), 151_552), head_dim=128, attention_bias=True, partial_rotary_factor=0.5
    ),
    "gpt-oss-20b": _config("gpt_oss", 24, 2880, 2880, (64, 8), 201_088, head_dim=64, num_local_experts=32),
    "Ministral-3-8B": _config("ministral3", 34, 4096, 14_336, (32, 8), 131_072),
    "Qwen3.5-0.8B": _config("qwen3_5_text", 24, 1024, 3584, (8, 2), 248_320, linear_num_value_heads=16, **_TIED),
    "Qwen3.5-2B": _config("qwen3_5_text", 24, 2048, 6144, (8, 2), 248_320, linear_num_value_heads=16, **_TIED),
    "Qwen3.5-4B": _config("qwen3_5_text", 32, 2560, 9216, (16, 4), 248_320, **_TIED),
    "Qwen3.5-9B": _config("qwen3_5_text", 32, 4096, 12_288, (16, 4), 248_320),
    "Qwen3.5-27B": _config("qwen3_5_text", 64, 5120, 17_408, (24, 4), 248_320, linear_num_value_heads=48),
    "Qwen3.5-35B-A3B": _config("qwen3_5_moe_text", 40, 2048, 6144, (16, 2), 248_320),
}


@dataclass(frozen=True, slots=True)
class Heads:
    """What the kernel of rotation and cache write sees of a model's attention.

    rotary_dim        of `head_dim` columns, how many are turned
    is_normed         each query and key head is normed before
    has_exact_weight  the norms' weights are float32 whatever the model computes in
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    is_normed: bool
    has_exact_weight: bool

    @property
    def form(self) -> tuple[int, int, bool, bool]:
        """What the kernel is compiled for, but for the numbers of heads."""
        return self.head_dim, self.rotary_dim, self.is_normed, self.has_exact_weight


def spec_of(model: str) -> ModelSpec:
    """Of a model in the table."""
    return model_spec(PUBLISHED[model])


def product_of(model: str, name: str) -> tuple[int, list[int]]:
    """Columns of the input and of each output of the first product in the model's layers that the layout calls `name`,
    relative to its layer."""
    spec = spec_of(model)
    products = (one for layer in spec.layers for one in layer.linears(spec.hidden_size) if one.name == name)
    product = next(products)
    return product.in_features, list(product.slices.values())


def delta_heads_of(model: str) -> tuple[int, int, int, int]:
    """Key heads, value heads, and their sizes, of the model's delta nets."""
    delta = spec_of(model).deltas[0]
    return delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim


def heads_of(model: str) -> Heads:
    """Of the model's first attention."""
    spec = spec_of(model)
    attention: AttentionSpec = spec.attentions[0]
    is_normed = attention.head_norms is not None
    return Heads(
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        spec.rotations[attention.rotary].rotary_dim(attention.head_dim),
        is_normed,
        has_exact_weight=is_normed and (spec.zero_centred_norms or spec.exact_norms),
    )
