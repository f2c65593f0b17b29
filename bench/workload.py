"""The benchmark's model, adapters and requests: random weights, fixed seed, made once under `bench/out/`."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "out"
NUM_ADAPTERS = 8
RANK = 16
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 12, 8, 128
# What a family has beside the sizes that all share; of Qwen3.5 a smaller model, three delta nets for each attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 1024, "num_hidden_layers": NUM_LAYERS, "intermediate_size": 3072},
    "qwen3_5_text": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1536,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: dict[str, list[str]] = {
    "qwen3": _TARGETS,
    "qwen3_5_text": [*_TARGETS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"],
}
VOCABULARY = 32_000
SEED = 20_26


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request; `adapter` is an index, always answered with exactly `num_output_tokens`."""

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    adapter: int


def requests(num_requests: int = 32) -> list[BenchRequest]:
    """Prompts of 16-256 and outputs of 16-128 tokens, uniform; adapters in turn, so all are in use together."""
    rng = random.Random(SEED)
    return [
        BenchRequest(
            prompt_token_ids=tuple(rng.randrange(300, VOCABULARY) for _ in range(rng.randint(16, 256))),
            num_output_tokens=rng.randint(16, 128),
            adapter=index % NUM_ADAPTERS,
        )
        for index in range(num_requests)
    ]


def adapter_name(index: int) -> str:
    return f"adapter-{index}"


def kv_bytes_per_token(dtype: str) -> int:
    """Keys and values of one token in all layers of the model."""
    return 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * {"float32": 4, "bfloat16": 2}[dtype]


def make_model(dtype: str, family: str = "qwen3") -> Path:
    """A model of `FAMILIES` with eight adapters of all projections beside it; returns its directory."""
    root = OUT / f"{family}-{dtype}"
    if (root / "complete").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    _write_base(root / "base", dtype, family)
    for index in range(NUM_ADAPTERS):
        _write_adapter(root, index, dtype, family)
    (root / "complete").touch()
    return root


def _write_base(directory: Path, dtype: str, family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        family,
        **FAMILIES[family],
        num_attention_heads=16,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype=getattr(torch, dtype),
    )
    AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).save_pretrained(directory)
    _write_tokenizer(directory)


def _write_tokenizer(directory: Path) -> None:
    """Requests carry token ids; the server still wants a tokenizer that covers the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{index}": index for index in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"})
    )


def _write_adapter(root: Path, index: int, dtype: str, family: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED + 1 + index)
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=getattr(torch, dtype))
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS[family]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    model.save_pretrained(str(root / adapter_name(index)))
