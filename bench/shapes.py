"""Models of a known shape with random weights, made where they are used: nothing of them is ever on disk but their
config.json, unless `write_checkpoint` is asked for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from service.models.checkpoint.checkpoint import OpenTensors, TensorSource
from service.models.families import model_spec
from service.models.spec.config_json import read_config

BUNDLED = Path(__file__).parents[1] / "service" / "bundled" / "base"
SEED = 20_26
_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, named as in config.json; `others` are further fields of it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    model_type: str = "llama"
    others: tuple[tuple[str, Any], ...] = (("architectures", ("LlamaForCausalLM",)),)


_QWEN3_5: tuple[tuple[str, Any], ...] = (
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}),
)
_TINY_DELTA_NETS = (
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
    ("linear_key_head_dim", 16),
    ("linear_value_head_dim", 16),
)
_EXPERTS = (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", ()))
_QWEN3_30B = (("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768))
_TINY_EXPERTS = (("num_experts", 8), ("num_experts_per_tok", 2), ("moe_intermediate_size", 32))

# "bundled" is the repository's own model, with its own weights.
SHAPES: dict[str, Shape | None] = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128_256, 131_072),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, 131_072, tie_word_embeddings=True),
    "200m": Shape(1024, 3072, 12, 16, 8, 128, 32_000, 4096, tie_word_embeddings=True),  # as of `bench.workload`
    "tiny": Shape(64, 128, 2, 4, 2, 16, 512, 1024),
    "qwen3_5-9b": Shape(4096, 12_288, 32, 16, 4, 256, 248_320, 262_144, model_type="qwen3_5_text", others=_QWEN3_5),
    "qwen3_5-tiny": Shape(
        *(64, 128, 4, 4, 2, 16, 512, 1024), model_type="qwen3_5_text", others=(*_QWEN3_5, *_TINY_DELTA_NETS)
    ),
    "qwen3-30b-a3b": Shape(
        *(2048, 6144, 48, 32, 4, 128, 151_936, 40_960), model_type="qwen3_moe", others=(*_EXPERTS, *_QWEN3_30B)
    ),
    "qwen3_moe-tiny": Shape(
        *(64, 128, 2, 4, 2, 16, 512, 1024), model_type="qwen3_moe", others=(*_EXPERTS, *_TINY_EXPERTS)
    ),
    "bundled": None,
}


class RandomTensors:
    """Tensors of whatever shape is asked for: norms are ones, all else is normal. One seed and one order of the
    questions give the same numbers on the same kind of device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_tied: bool, seed: int = SEED) -> None:
        self._device, self._dtype, self._is_tied = device, dtype, is_tied
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: object, /) -> bool:
        return not (self._is_tied and name == "lm_head.weight")

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Fresh, on the device."""
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        if len(shape) == 1:
            return tensor.fill_(1.0 if "norm" in name else 0.0)
        return tensor.normal_(std=_STANDARD_DEVIATION, generator=self._generator)

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `tensor`: none is quantised."""
        return self.tensor(name, shape)

    def dtype(self, name: str) -> str:  # noqa: ARG002
        return str(self._dtype).removeprefix("torch.")

    def fault(self, name: str, shape: tuple[int, ...]) -> None:
        """Every tensor is as it is asked for."""

    def others(self, names: Iterable[str]) -> list[str]:  # noqa: ARG002
        return []


def opener(shape: Shape, device: str, dtype: torch.dtype) -> OpenTensors:
    """Gives random tensors of this dtype on this device, the same each time."""

    @contextmanager
    def open_random(_: Path) -> Iterator[TensorSource]:
        yield RandomTensors(torch.device(device), dtype, is_tied=shape.tie_word_embeddings)

    return open_random


def write_outside(directory: Path, shape: Shape, dtype: torch.dtype) -> None:
    """What an engine reads of a model beside its tensors: config.json, a tokenizer, and a checkpoint that names a dtype
    and holds no numbers."""
    _write_config(directory, shape, dtype)
    _write_tokenizer(directory, shape.vocab_size)
    save_file({"model.embed_tokens.weight": torch.empty(0, dtype=dtype)}, directory / "model.safetensors")


def _write_config(directory: Path, shape: Shape, dtype: torch.dtype) -> None:
    config: dict[str, Any] = {"hidden_act": "silu"}
    sizes = asdict(shape)
    del sizes["others"]
    config |= sizes | {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "bos_token_id": None, "eos_token_id": 0}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config | dict(shape.others), indent=1))


def write_checkpoint(directory: Path, shape: Shape, device: str, dtype: torch.dtype) -> None:
    """What `opener` gives, as a checkpoint of one file for each layer, for servers that run as processes; with a
    tokenizer whose tokens are bytes and, from 256 on, made-up words."""
    _write_config(directory, shape, dtype)
    spec = model_spec(read_config(directory))
    source = RandomTensors(torch.device(device), dtype, is_tied=shape.tie_word_embeddings)
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, size in spec.tensors(source).items():
        layer, _, _ = name.removeprefix(spec.layer_prefix).partition(".")
        files.setdefault(layer if name.startswith(spec.layer_prefix) else "rest", {})[name] = size
    weight_map: dict[str, str] = {}
    for layer, shapes in files.items():
        name = f"layer-{layer}.safetensors"
        tensors = {key: source.tensor(key, size).cpu() for key, size in shapes.items()}
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _write_tokenizer(directory, shape.vocab_size)


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġword{index}" for index in range(vocab_size - len(letters))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(letters + words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
