"""Tiny models quantised by hand, as the formats' own packing code has it, each beside its dequantised twin.

Codes and scales are drawn first and the weight follows from them, by arithmetic in float32 that shares nothing with the
product's: the twin in `dequantised/` is the truth, for transformers too (`tiny_models.load_oracle`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.tiny_models import DEQUANTISED, make_tiny_model

Tensors = dict[str, torch.Tensor]
# A module's tensors by suffix, and the float32 weight that they stand for.
Stored = tuple[Tensors, torch.Tensor]
GROUP = 8
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
# Quantiles of the normal distribution, as bitsandbytes has them.
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [rows, columns / codes of a word] of codes [rows, columns]: code `order[k]` of a word in its k-th bits."""
    num = 32 // bits
    grouped = codes.numpy().astype(np.uint32).reshape(codes.shape[0], -1, num)
    packed = np.zeros(grouped.shape[:2], np.uint32)
    for k in range(num):
        packed |= grouped[:, :, (order or range(num))[k]] << np.uint32(k * bits)
    return torch.from_numpy(packed.view(np.int32).copy())


def _integers(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = False) -> tuple[torch.Tensor, ...]:
    """(codes [out, in], zeros [out, groups], scales float16 [out, groups]) near the weight."""
    grouped = weight.view(weight.shape[0], -1, group)
    top = 2**bits - 1
    low, high = grouped.amin(-1), grouped.amax(-1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).half()
    zeros = (-low / scales.float()).round().clamp(1, top)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.view_as(weight), zeros, scales


def _value(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """float32 (code - zero) * scale, input by input."""
    return (codes - zeros[:, group_of]) * scales.float()[:, group_of]


def awq(weight: torch.Tensor) -> Stored:
    codes, zeros, scales = _integers(weight, 4, GROUP)
    pack = lambda values: words(values.t().contiguous(), 4, AWQ_NIBBLES)  # noqa: E731
    tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales.t().contiguous()}
    return tensors, _value(codes, zeros, scales, torch.arange(weight.shape[1]) // GROUP)


def _gptq(weight: torch.Tensor, bits: int, group: int, shift: int, group_of: torch.Tensor) -> Stored:
    order = torch.argsort(group_of, stable=True)
    sorted_codes, zeros, scales = _integers(weight[:, order], bits, group)
    codes = torch.empty_like(sorted_codes)
    codes[:, order] = sorted_codes
    tensors = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words((zeros - shift).t().contiguous(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": group_of.to(torch.int32),
    }
    return tensors, _value(codes, zeros, scales, group_of)


def gptq(weight: torch.Tensor) -> Stored:
    return _gptq(weight, 4, GROUP, 1, torch.arange(weight.shape[1]) // GROUP)


def gptq_v2_8bit(weight: torch.Tensor) -> Stored:
    return _gptq(weight, 8, weight.shape[1], 0, torch.zeros(weight.shape[1], dtype=torch.int64))


def gptq_act_order(weight: torch.Tensor) -> Stored:
    """Groups of inputs that stand anywhere, the same for all modules of one input."""
    generator = torch.Generator().manual_seed(weight.shape[1])
    group_of = torch.arange(weight.shape[1]) // GROUP
    return _gptq(weight, 4, GROUP, 1, group_of[torch.randperm(weight.shape[1], generator=generator)])


def packed(weight: torch.Tensor, *, symmetric: bool = True, group_of: torch.Tensor | None = None) -> Stored:
    """compressed-tensors' pack-quantized."""
    group_of = torch.arange(weight.shape[1]) // GROUP if group_of is None else group_of
    order = torch.argsort(group_of, stable=True)
    sorted_codes, zeros, scales = _integers(weight[:, order], 4, GROUP, symmetric=symmetric)
    codes = torch.empty_like(sorted_codes)
    codes[:, order] = sorted_codes
    tensors = {
        "weight_packed": words(codes, 4),
        "weight_scale": scales.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.t().contiguous(), 4).t().contiguous()
        tensors["weight_g_idx"] = group_of.to(torch.int32)
    return tensors, _value(codes, zeros, tensors["weight_scale"], group_of)


def packed_act_order(weight: torch.Tensor) -> Stored:
    generator = torch.Generator().manual_seed(weight.shape[1])
    group_of = (torch.arange(weight.shape[1]) // GROUP)[torch.randperm(weight.shape[1], generator=generator)]
    return packed(weight, symmetric=False, group_of=group_of)


def int8(weight: torch.Tensor) -> Stored:
    """Form of compressed-tensors with a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_channels(weight: torch.Tensor) -> Stored:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_rows(weight: torch.Tensor) -> Stored:
    """As the server quantises while it loads."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_tensor(weight: torch.Tensor) -> Stored:
    scale = (weight.abs().max() / 448).reshape(())
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    return tensors, codes.float() * scale


def fp8_blocks(weight: torch.Tensor) -> Stored:
    """Blocks of 32, the last ones cut."""
    scales = torch.zeros(-(-weight.shape[0] // 32), -(-weight.shape[1] // 32))
    codes, value = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32))
            scales[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            value[block] = codes[block].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, value


def nf4(weight: torch.Tensor, *, nested: bool = False) -> Stored:
    """bitsandbytes: flat blocks of 64, the even input in the high nibble."""
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = flat.abs().amax(1)
    tensors: Tensors = {"weight.absmax": absmax}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    if nested:
        offset = float(absmax.mean())
        steps = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % 256)).view(-1, 256)
        coarse, table = steps.abs().amax(1), torch.linspace(-1, 1, 256)
        indices = ((steps / coarse[:, None] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        absmax = (table[indices.long()] * coarse[:, None]).flatten()[: absmax.numel()] + offset
        indices = indices.flatten()[: absmax.numel()].contiguous()
        tensors = {"weight.absmax": indices, "weight.nested_absmax": coarse, "weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = ((flat / absmax[:, None])[..., None] - NF4).abs().argmin(-1)
    value = (NF4[codes] * absmax[:, None]).flatten()[: weight.numel()].view_as(weight)
    pairs = codes.flatten()[: weight.numel()].view(-1, 2)
    tensors["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8)[:, None]
    text = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors | {"weight.quant_map": NF4.clone()}, value


def nf4_nested(weight: torch.Tensor) -> Stored:
    return nf4(weight, nested=True)


def llm_int8(weight: torch.Tensor) -> Stored:
    scb = weight.abs().amax(1)
    codes = (weight * 127 / scb[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}, codes * (scb / 127)[
        :, None
    ]


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors, with a list of ignored modules."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    fields = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**fields, "format": form, "config_groups": {"group_0": group}}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq"}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Stored], dict[str, Any]]] = {
    "awq": (awq, _AWQ),
    "gptq": (gptq, _GPTQ),
    "gptq_v2_8bit": (gptq_v2_8bit, {**_GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}),
    "gptq_act_order": (gptq_act_order, {**_GPTQ, "desc_act": True}),
    "auto_round": (gptq, {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq"}),
    "packed": (packed, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)),
    "packed_act_order": (packed_act_order, _compressed("pack-quantized", num_bits=4, type="int", actorder="group")),
    "int8": (int8, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8_channels": (fp8_channels, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "fp8_tensor": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8_blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}),
    "nf4": (nf4, _BNB),
    "nf4_nested": (nf4_nested, {**_BNB, "bnb_4bit_use_double_quant": True}),
    "llm_int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def make_quantised(
    form: str, family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a tiny model whose linear layers are quantised, all but routers and the head, into `directory`."""
    quantise, config = FORMATS[form]
    make_tiny_model(family, directory, dtype=dtype, **overrides)
    make_tiny_model(family, directory / DEQUANTISED, dtype=dtype, **overrides)
    stored: Tensors = {}
    plain = load_file(directory / "model.safetensors")
    for name, tensor in list(plain.items()):
        module, _, suffix = name.rpartition(".")
        if suffix in ("gate_up_proj", "down_proj"):  # of all experts: tools quantise them one by one
            values = []
            for index, expert in enumerate(tensor):
                parts = {"down_proj": expert}
                if suffix == "gate_up_proj":
                    parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                made = {part: quantise(weight.float().contiguous()) for part, weight in parts.items()}
                stored |= {
                    f"{module}.{index}.{part}.{key}": t for part, (ts, _) in made.items() for key, t in ts.items()
                }
                values.append(torch.cat([value for _, value in made.values()]))
            plain[name] = torch.stack(values).to(dtype)
        elif ".layers." in name and suffix == "weight" and tensor.dim() == 2 and is_quantised(module, tensor):
            tensors, value = quantise(tensor.float())
            stored |= {f"{module}.{key}": part for key, part in tensors.items()}
            plain[name] = value.to(dtype)
        else:
            stored[name] = tensor
    save_file(
        {k: v.contiguous() for k, v in plain.items()}, directory / DEQUANTISED / "model.safetensors", {"format": "pt"}
    )
    save_file({k: v.contiguous() for k, v in stored.items()}, directory / "model.safetensors", {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return directory


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


def make_mxfp4(family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a tiny gpt-oss whose experts are in MXFP4, as it is published; the twin's are dequantised by
    transformers."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 96, **overrides}
    make_tiny_model(family, directory, dtype=dtype, **sizes)
    make_tiny_model(family, directory / DEQUANTISED, dtype=dtype, **sizes)
    plain, values = load_file(directory / "model.safetensors"), torch.tensor(FP4_VALUES)
    stored: Tensors = {}
    for name, tensor in list(plain.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        blocks = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
        powers = (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil()
        powers[0, :2] = -127  # blocks that are next to nothing
        codes = ((blocks / 2**powers)[..., None] - values).abs().argmin(-1).to(torch.uint8)
        codes[1, :2] = 8  # and of negative zeros
        stored[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = (powers[..., 0] + 127).to(torch.uint8)
        plain[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=dtype)
    for folder, tensors in ((directory / DEQUANTISED, plain), (directory, stored)):
        contiguous = {key: part.contiguous() for key, part in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "quantization_config": MXFP4}))
    return directory


# `--weights`
ONLINE = {"fp8": fp8_rows, "int8": int8, "nf4": nf4}


def make_quantised_online(
    kind: str, family: str, directory: Path, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write a tiny model as it is, and beside it the twin that it becomes when it is quantised while it loads."""
    make_tiny_model(family, directory, dtype=dtype, **overrides)
    make_tiny_model(family, directory / DEQUANTISED, dtype=dtype, **overrides)
    file = directory / DEQUANTISED / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        stays = module.endswith((".gate", "shared_expert_gate", ".router", "router.layer", "router.proj"))
        if ".layers." in name and suffix == "weight" and tensor.dim() == 2 and not stays:
            tensors[name] = ONLINE[kind](tensor.float())[1].to(dtype)
        elif tensor.dim() == 3 and "conv" not in name:  # of all experts
            step = 0 if family != "gpt_oss" else 2 if suffix == "gate_up_proj" else 1
            tensors[name] = torch.stack([_expert_online(kind, one.float(), step) for one in tensor]).to(dtype)
    save_file(tensors, file, {"format": "pt"})
    return directory


def _expert_online(kind: str, weight: torch.Tensor, step: int) -> torch.Tensor:
    """An expert's weight as it becomes: [out, in] with a step of 0, else transposed, its outputs `step` apart."""
    if step == 0:
        return ONLINE[kind](weight)[1]
    order = torch.cat([torch.arange(first, weight.shape[1], step) for first in range(step)])
    return ONLINE[kind](weight.t()[order].contiguous())[1][order.argsort()].t()


def is_quantised(module: str, weight: torch.Tensor) -> bool:
    """Routers and gates stay as they are, and what is too small to pack."""
    return not module.endswith((".gate", "shared_expert_gate")) and weight.shape[0] % 8 == 0 == weight.shape[1] % 8


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def make_gguf(
    kind: str,
    family: str,
    directory: Path,
    *,
    pre: str = "smollm",
    adds_bos: bool | None = None,
    eos: int | None = None,
    tensors_per_part: int = 0,
    **overrides: Any,
) -> Path:
    """Write a tiny model's file by the package gguf, its matrices of the type `kind`, and beside it the dequantised
    twin; returns the file. pre: the pre-tokenizer; adds_bos: None leaves it to that; tensors_per_part: 0 writes one
    file, else the first of several has no tensor."""
    gguf: Any = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64, **overrides}
    made = make_tiny_model(family, directory / DEQUANTISED, **sizes)
    config = json.loads((made / "config.json").read_text())
    tokenizer = json.loads((made / "tokenizer.json").read_text())
    split = {"split_max_tensors": tensors_per_part, "small_first_shard": bool(tensors_per_part)}
    writer = gguf.GGUFWriter(directory / "tiny.gguf", family, **split)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_bos_token_id(config["bos_token_id"])
    if eos is not None:
        writer.add_eos_token_id(eos)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    texts = [*vocab, *(f"<unused {at}>" for at in range(len(vocab), config["vocab_size"]))]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_list(texts)
    writer.add_token_types([3 if text in special else 1 for text in texts])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    if config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama_3_factors(config["rope_parameters"], config["head_dim"]))
    plain = load_file(made / "model.safetensors")
    generator = np.random.default_rng(0)
    for name, tensor in list(plain.items()):
        module, _, suffix = name.rpartition(".")
        values, layer = tensor.numpy(), ""
        if ".layers." in module:
            _, _, layer, module = module.split(".", 3)
        stored = (f"blk.{layer}." if layer else "") + f"{_GGUF_NAMES[module]}.{suffix}"
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(module)
        is_paired = family == "llama" and heads is not None
        if is_paired:  # as llama.cpp's converter has it
            values = values.reshape(config[heads], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            continue
        raw_type = gguf.GGMLQuantizationType[kind]
        octets = _k_blocks(kind, values, generator) if kind in _HALVES else gguf.quantize(values, raw_type)
        writer.add_tensor(stored, octets, raw_dtype=raw_type)
        values = gguf.dequantize(octets, raw_type).astype(np.float32)
        if is_paired:
            values = values.reshape(config[heads], -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        plain[name] = torch.from_numpy(values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(plain, made / "model.safetensors", {"format": "pt"})
    return next(iter(sorted(directory.glob("tiny*.gguf"))))


def _llama_3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    """By which llama.cpp's converter has wavelengths stretched."""
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    context, low, high = (rope[name] for name in _OF_LLAMA_3)
    smooth = (context / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths > context / low, rope["factor"], between)
    return np.where(lengths < context / high, 1, factors).astype(np.float32)


_OF_LLAMA_3 = ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
# Bytes of a block of 256, where its halves are, and their size, for which gguf has no quantisation: blocks of any bits.
_HALVES = {"Q4_K": (144, (0, 2), (2e-4, 1.5e-3)), "Q5_K": (176, (0, 2), (1e-4, 1.5e-3)), "Q6_K": (210, (208,), (3e-5,))}


def _k_blocks(kind: str, values: Any, generator: Any) -> Any:
    num_bytes, places, sizes = _HALVES[kind]
    rows, columns = values.shape
    blocks = generator.integers(0, 256, (rows, columns // 256, num_bytes), dtype=np.uint8)
    for at, size in zip(places, sizes, strict=True):
        halves = (generator.uniform(0.5, 1.5, blocks.shape[:2]) * size).astype(np.float16)
        blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)
