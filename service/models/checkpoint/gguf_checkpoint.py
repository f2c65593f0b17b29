"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, quantised ones in their codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from kernels.linear.quantised import Quantised, dequantise, pack_nibbles
from service.models.gguf_file import TYPES, StoredTensor, read_gguf
from service.models.spec.config_json import ModelError

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufCheckpoint:
    """See `checkpoint.TensorSource`."""

    def __init__(self, path: Path, *, has_paired_rows: bool) -> None:
        """
        has_paired_rows  those of queries and keys stand in the order of pairs that are rotated together

        Raises ModelError.
        """
        file = read_gguf(path)
        self._path, self._tensors = path, file.tensors
        self._data = {part: np.memmap(part, np.uint8, "r") for part in {one.file for one in file.tensors.values()}}
        self._heads: dict[str, int] = {}
        if has_paired_rows:
            architecture = file.fact("general.architecture")
            num_heads = file.fact(f"{architecture}.attention.head_count")
            num_kv_heads = file.facts.get(f"{architecture}.attention.head_count_kv", num_heads)
            self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}

    def __contains__(self, name: object, /) -> bool:
        return isinstance(name, str) and _stored(name) in self._tensors

    def fault(self, name: str, shape: tuple[int, ...]) -> str | None:
        """As `Checkpoint.fault`."""
        entry = self._tensors.get(_stored(name) or "")
        if entry is None:
            return f"{self._path} has no tensor {_stored(name) or name}: convert the model anew"
        if entry.shape != shape:
            return f"tensor {_stored(name)} of {self._path} has the shape {list(entry.shape)}, not {list(shape)}"
        if len(shape) < 2 and entry.kind not in _DTYPES:
            return f"tensor {_stored(name)} of {self._path} is a vector in {entry.kind}: convert the model anew"
        return None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `Checkpoint.tensor`."""
        weight = self.weight(name, shape)
        return dequantise(weight, torch.float32) if isinstance(weight, Quantised) else weight

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | Quantised:
        """As `Checkpoint.weight`."""
        fault, stored = self.fault(name, shape), _stored(name)
        if fault is not None or stored is None:
            raise ModelError(fault or f"{self._path} has no tensor {name}")
        entry = self._tensors[stored]
        octets = torch.from_numpy(self._data[entry.file][entry.begin : entry.begin + entry.num_bytes].copy())
        order = self._row_order(stored, shape)
        if entry.kind in _DTYPES:
            values = octets.view(_DTYPES[entry.kind]).view(shape)
            return values if order is None else values[order]
        weight = _READERS[entry.kind](octets.view(shape[0], -1, _block_bytes(entry)))
        halves = (weight.scales, weight.offsets)
        if not all(values is None or bool(torch.isfinite(values).all()) for values in halves):
            raise ModelError(f"tensor {stored} of {self._path} has a scale that is NaN or infinite: download it again")
        return weight if order is None else weight.rows(order)

    def dtype(self, name: str) -> str:
        """ "bfloat16" of what is quantised, else the stored one."""
        entry = self._tensors.get(_stored(name) or "")
        if entry is None:
            raise ModelError(f"{self._path} has no tensor {_stored(name) or name}: convert the model anew")
        return str(_DTYPES.get(entry.kind, torch.bfloat16)).removeprefix("torch.")

    def others(self, names: Iterable[str]) -> list[str]:
        """As `Checkpoint.others`."""
        return sorted(set(self._tensors) - {_stored(name) for name in names})

    def _row_order(self, stored: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        heads = next((num for part, num in self._heads.items() if f".{part}." in stored), None)
        if heads is None:
            return None
        return torch.arange(shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _stored(name: str) -> str | None:
    """The file's name of a tensor."""
    if (found := _LAYER.fullmatch(name)) is None:
        return _WHOLE.get(name)
    part = _OF_A_LAYER.get(found[2])
    return None if part is None else f"blk.{found[1]}.{part}.{found[3]}"


def _block_bytes(entry: StoredTensor) -> int:
    return next(num_bytes for kind, _, num_bytes in TYPES.values() if kind == entry.kind)


def _half(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """float32 [rows, blocks] of the float16 at this byte of each block."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 2, n]: the low nibbles, then the high ones."""
    return torch.stack((octets & 15, octets >> 4), dim=-2)


def _q8_0(blocks: torch.Tensor) -> Quantised:
    codes = blocks[..., 2:].reshape(blocks.shape[0], -1).view(torch.int8)
    return Quantised(codes, _half(blocks, 0), None, None, 32, None)


def _q4_0(blocks: torch.Tensor) -> Quantised:
    scales = _half(blocks, 0)
    codes = _nibbles(blocks[..., 2:]).reshape(blocks.shape[0], -1)
    return Quantised(pack_nibbles(codes), scales, -8 * scales, None, 32, None)


def _q4_1(blocks: torch.Tensor) -> Quantised:
    codes = _nibbles(blocks[..., 4:]).reshape(blocks.shape[0], -1)
    return Quantised(pack_nibbles(codes), _half(blocks, 0), _half(blocks, 2), None, 32, None)


def _bits(octets: torch.Tensor) -> torch.Tensor:
    """[...] -> [..., 8], the lowest first."""
    return octets[..., None] >> torch.arange(8, dtype=torch.uint8) & 1


def _fives(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """int8 [rows, inputs]: codes of 5 bits, whose fifth ones stand at this byte before the nibbles."""
    high = _bits(blocks[..., first : first + 4]).flatten(-2)
    codes = _nibbles(blocks[..., first + 4 :]).flatten(-2) | high << 4
    return codes.to(torch.int8).reshape(blocks.shape[0], -1)


def _q5_0(blocks: torch.Tensor) -> Quantised:
    return Quantised(_fives(blocks, 2) - 16, _half(blocks, 0), None, None, 32, None)


def _q5_1(blocks: torch.Tensor) -> Quantised:
    return Quantised(_fives(blocks, 4), _half(blocks, 0), _half(blocks, 2), None, 32, None)


def _q4_k(blocks: torch.Tensor) -> Quantised:
    """256 values: 8 groups of 32."""
    codes = _nibbles(blocks[..., 16:].reshape(blocks.shape[0], -1, 4, 32)).reshape(blocks.shape[0], -1)
    return Quantised(pack_nibbles(codes), *_scales_and_minima(blocks), None, 32, None)


def _q5_k(blocks: torch.Tensor) -> Quantised:
    """The same with fifth bits: the g-th of a byte is of a value of the g-th group."""
    low = _nibbles(blocks[..., 48:].reshape(blocks.shape[0], -1, 4, 32)).flatten(2, 3)
    codes = low | _bits(blocks[..., 16:48]).transpose(2, 3) << 4
    codes = codes.to(torch.int8).reshape(blocks.shape[0], -1)
    return Quantised(codes, *_scales_and_minima(blocks), None, 32, None)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and offsets [rows, groups] of 8 groups in a block, which have 6 bits each."""
    rows, six = blocks.shape[0], blocks[..., 4:16].int()
    low, middle, high = six[..., :4], six[..., 4:8], six[..., 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), dim=-1)
    minima = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), dim=-1)
    scale, offset = (_half(blocks, at)[..., None] * six for at, six in ((0, scales), (2, minima)))
    return scale.reshape(rows, -1), -offset.reshape(rows, -1)


def _q6_k(blocks: torch.Tensor) -> Quantised:
    """256 values of 6 bits: 16 groups of 16, whose scales have 8."""
    rows = blocks.shape[0]
    low = blocks[..., :128].reshape(rows, -1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), dim=-2).reshape(rows, -1, 2, 4, 32)
    high = blocks[..., 128:192].reshape(rows, -1, 2, 1, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
    codes = ((low | high << 4).to(torch.int8) - 32).reshape(rows, -1)
    scales = _half(blocks, 208)[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return Quantised(codes, scales.reshape(rows, -1), None, None, 16, None)


_READERS: dict[str, Callable[[torch.Tensor], Quantised]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
