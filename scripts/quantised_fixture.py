"""Weights as the tools that quantise them have them, for tests/models/test_quantised.py.

Needs auto-round 0.16.1, bitsandbytes 0.50.2 and compressed-tensors 0.20.1, which tests do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FILE = Path(__file__).parent.parent / "tests" / "models" / "quantised_fixture.safetensors"
# Blocks of 64 inputs end with the rows, and run across them.
SHAPES = {"flat": (6, 128), "straddling": (10, 40)}


def bitsandbytes_nf4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight in bfloat16, its codes and absmax, nested ones as checkpoints have them, and what they stand for."""
    from bitsandbytes import functional

    found = {f"{name}.weight": weight}
    for nested in (False, True):
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, quant_type="nf4", compress_statistics=nested, quant_storage=torch.uint8
        )
        at = f"{name}.nested" if nested else name
        found |= {f"{at}.stored.weight": codes}
        found |= {f"{at}.stored.weight.{suffix}": part.clone() for suffix, part in state.as_dict(packed=True).items()}
        for dtype in (torch.float32, torch.bfloat16):
            state.dtype = dtype
            found[f"{at}.{dtype}"] = functional.dequantize_4bit(codes, state)
    return found


def compressed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of compressed-tensors: pack-quantized in 4 bits with zero points, and float-quantized."""
    from compressed_tensors.compressors import FloatQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    found: dict[str, torch.Tensor] = {"compressed.weight": weight}
    low, high = weight.view(weight.shape[0], -1, 8).float().aminmax(dim=-1)
    scale = ((high - low) / 15).to(torch.bfloat16)
    zero = (-8 - low / scale.float()).round().clamp(-8, 7).to(torch.int8)
    kinds: dict[str, tuple[Any, dict[str, Any], dict[str, torch.Tensor]]] = {
        "packed": (
            PackedQuantizationCompressor,
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False},
            {"weight_scale": scale, "weight_zero_point": zero},
        ),
        "float": (
            FloatQuantizationCompressor,
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {"weight_scale": (weight.abs().amax(1, keepdim=True).float() / 448).to(torch.bfloat16)},
        ),
    }
    for name, (compressor, arguments, parts) in kinds.items():
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        stored = compressor.compress({"weight": weight, **parts}, scheme)
        found |= {f"{name}.stored.{suffix}": tensor for suffix, tensor in stored.items()}
        found[f"{name}.torch.bfloat16"] = compressor.decompress(dict(stored), scheme)["weight"]
    return found


def auto_round() -> dict[str, torch.Tensor]:
    """Words of any bits, as GPTQ's two versions and AWQ hold them, and what auto-round's modules take them for."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    generator = torch.Generator().manual_seed(1)
    outputs, inputs, group = 32, 64, 16
    num_groups = inputs // group

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    def scales() -> torch.Tensor:
        return (torch.rand(num_groups, outputs, generator=generator) / 64 + 1e-3).half()

    found: dict[str, torch.Tensor] = {}
    for name, kind, bits in (("gptq", qlinear_torch_zp, 4), ("gptq_v2", qlinear_torch, 8)):
        module = kind.QuantLinear(bits, group, inputs, outputs, False, g_idx=True)
        module.qweight, module.qzeros = words(inputs * bits // 32, outputs), words(num_groups, outputs * bits // 32)
        module.scales, module.g_idx = scales(), module.g_idx[torch.randperm(inputs, generator=generator)]
        found |= {f"{name}.stored.{suffix}": tensor for suffix, tensor in module.state_dict().items()}
        found[f"{name}.torch.float16"] = module(torch.eye(inputs, dtype=torch.float16)).t()
    awq = {"qweight": words(inputs, outputs // 8), "qzeros": words(num_groups, outputs // 8), "scales": scales()}
    found |= {f"awq.stored.{suffix}": tensor for suffix, tensor in awq.items()}
    return found | {"awq.torch.float16": dequantize_gemm(*awq.values(), 4, group).t()}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        tensors |= bitsandbytes_nf4(name, torch.randn(shape, generator=generator).to(torch.bfloat16))
    tensors |= compressed(torch.randn(16, 48, generator=generator).to(torch.bfloat16)) | auto_round()
    save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, FILE)


if __name__ == "__main__":
    main()
