"""Layout of quantised weights on NVIDIA GPUs, and launch configurations of products by bits of a code and tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from kernels.linear.quantised import Quantised


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile of products.

    block_out     outputs, at least 64
    block_tokens  tokens, at least 16
    stages        blocks of inputs in flight
    """

    block_out: int
    block_tokens: int
    num_warps: int
    stages: int


# Words of a block of inputs for each output, at most, by bits of a code; fixed when a weight is packed.
MAX_WORDS = {8: 32, 4: 16}
# Fewest inputs of a product: one code of so many words, or two neighbouring ones.
MIN_INPUTS = 16
# Most tokens of a step whose codes are dequantised in registers; more take a dequantised copy of some rows at a time.
MAX_TOKENS = 256
# Programs for each core that the inputs of a narrow weight are split for, the outputs of one by which they are counted,
# and the fewest blocks of one. None depends on the tokens, so that sums have the same order in every step.
PROGRAMS_PER_CORE = 2
SPLIT_OUT = 64
MIN_BLOCKS = 4

# Not "int8": a kernel that is compiled ahead would get Triton's type of that name for the constant.
_FORMS = {torch.float8_e4m3fn: "fp8", torch.int8: "i8", torch.uint8: "i4"}
# Every type of 16 bits holds it less a code, and with the power of two beside it.
_MAX_ZERO_POINT = 127

# For steps of up to so many tokens, ascending: of weights whose inputs are split, and of others.
TABLE = {
    16: (TileConfig(64, 16, 4, 4), TileConfig(128, 16, 4, 5)),
    32: (TileConfig(64, 32, 4, 4), TileConfig(128, 32, 4, 4)),
    64: (TileConfig(64, 64, 4, 4), TileConfig(128, 64, 4, 3)),
    128: (TileConfig(128, 128, 8, 3), TileConfig(128, 128, 8, 3)),
    256: (TileConfig(128, 128, 8, 3), TileConfig(128, 128, 8, 3)),
}


def configs_for(num_tokens: int, splits: int) -> tuple[TileConfig, ...]:
    """Configurations for a step of up to MAX_TOKENS tokens, of which `config_for` chooses one."""
    split, whole = next(configs for most, configs in TABLE.items() if num_tokens <= most)
    return (split, replace(split, stages=3)) if splits > 1 else (whole,)


def config_for(num_tokens: int, num_columns: int, splits: int, num_cores: int) -> TileConfig:
    """The configuration for a step of up to MAX_TOKENS tokens. With three stages a core runs three programs at a time,
    with four two."""
    first, *others = configs_for(num_tokens, splits)
    num_programs = -(-num_columns // first.block_out) * -(-num_tokens // first.block_tokens) * splits
    return others[0] if others and num_programs > 2 * num_cores else first


def num_splits(out_features: int, num_blocks: int, num_cores: int) -> int:
    """Programs that share the inputs of a tile: a power of two, unless the blocks are too few."""
    wanted = max(1, PROGRAMS_PER_CORE * num_cores // -(-out_features // SPLIT_OUT))
    return max(1, min(1 << (wanted.bit_length() - 1), num_blocks // MIN_BLOCKS))


@dataclass(frozen=True, slots=True, eq=False)
class TiledCodes:
    """Codes as the kernels read them: the bytes of a tile of outputs and inputs lie together.

    weight  codes int32 [blocks, out, words]: the lowest bits of word w are the code of input w of the block, the next
            those of input words + w, and so on; of a table, two neighbouring codes are inputs 2 * w and 2 * w + 1,
            the next two 2 * words later. Scales and offsets [groups, out]; the rest as it was
    form    of the codes: "fp8", "i8", "i4", or "table", of 4 bits
    zeros   zero points of 4-bit codes instead of offsets, see `_zero_points`
    table   32 bytes as one number: low bytes of the table's values in the compute dtype, then their high bytes
    """

    weight: Quantised
    form: str
    zeros: torch.Tensor | None
    table: int

    @property
    def num_groups(self) -> int:
        return self.weight.scales.shape[0]

    @property
    def bits(self) -> int:
        return 8 if self.form in ("fp8", "i8") else 4

    @property
    def offsets(self) -> torch.Tensor | None:
        """Offsets or zero points, whichever the kernels take."""
        return self.weight.offsets if self.zeros is None else self.zeros

    @property
    def inputs_of_block(self) -> int:
        return self.weight.codes.shape[2] * (32 // self.bits)

    @property
    def scales_products(self) -> bool:
        """Whether a type of 16 bits holds each code less its zero point, or its value in the table."""
        return self.zeros is not None or self.weight.offsets is None

    def constants(self) -> dict[str, Any]:
        """Arguments of both kernels."""
        return {
            "FORM": self.form,
            "OFFSETS": "zeros" if self.zeros is not None else None if self.weight.offsets is None else "values",
            "GROUP": 0 if self.num_groups == 1 else self.weight.group,
            "WORDS": self.weight.codes.shape[2],
            "CODES": 32 // self.bits,
        }

    @property
    def codes_of_group(self) -> int:
        """Neighbouring codes of a word that are of one group wherever a block lies."""
        num_codes, words, group = 32 // self.bits, self.weight.codes.shape[2], self.weight.group
        if self.num_groups == 1 or group % self.inputs_of_block == 0:
            return num_codes
        if self.inputs_of_block % group == 0:
            return group // words
        return 1 if self.weight.table is None else 2


def tiled_codes(weight: Quantised, dtype: torch.dtype) -> TiledCodes | None:
    """The codes laid out anew for products in `dtype`; None in float32, in groups of odd sizes, and with a table and
    offsets."""
    words = _words_of(weight)
    is_narrow = words < (MIN_INPUTS if weight.table is None else MIN_INPUTS // 2)
    if dtype == torch.float32 or is_narrow or (weight.table is not None and weight.offsets is not None):
        return None
    codes = _blocks(weight.codes, words, weight.in_features, are_paired=weight.table is not None)
    zeros = _zero_points(weight, dtype)
    offsets = None if weight.offsets is None or zeros is not None else weight.offsets.t().contiguous()
    form, table = _FORMS[weight.codes.dtype], 0
    if weight.table is not None:
        places = weight.table.to(dtype).view(torch.uint8).view(16, 2).t().flatten()
        form, table = "table", int.from_bytes(bytes(places.tolist()), "little")
    held = replace(weight, codes=codes, scales=weight.scales.t().contiguous(), offsets=offsets)
    return TiledCodes(held, form, zeros, table)


def _blocks(codes: torch.Tensor, words: int, in_features: int, *, are_paired: bool) -> torch.Tensor:
    """Codes [out, ...] -> int32 [blocks, out, words], padded with zeros behind the inputs."""
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1)
        num_codes = 8
    else:
        codes, num_codes = codes.view(torch.uint8), 4
    num_blocks = -(-in_features // (num_codes * words))
    codes = functional.pad(codes, (0, num_blocks * num_codes * words - in_features))
    if are_paired:
        codes = codes.view(-1, num_blocks, num_codes // 2, words, 2).transpose(3, 4)
    parts = codes.reshape(-1, num_blocks, num_codes, words)
    if num_codes == 8:
        parts = parts[:, :, ::2] | parts[:, :, 1::2] << 4
    return parts.permute(1, 0, 3, 2).contiguous().view(torch.int32).squeeze(-1)


def _zero_points(weight: Quantised, dtype: torch.dtype) -> torch.Tensor | None:
    """Zero points of 4-bit codes int32 [groups, out] as the kernels add them: negated, with the power of two by whose
    exponent they read a code, in the compute dtype and in both halves. None where the offsets are not such times the
    scales, to the bit, or codes have a table."""
    if weight.codes.dtype != torch.uint8 or weight.table is not None:
        return None
    power = 128 if dtype == torch.bfloat16 else 1024
    zeros = torch.zeros_like(weight.scales)
    if weight.offsets is not None:
        zeros = torch.where(weight.scales == 0, zeros, weight.offsets / weight.scales).round()
        fit = (zeros <= 0) & (zeros >= -_MAX_ZERO_POINT) & (zeros * weight.scales == weight.offsets)
        if not fit.all():
            return None
    halves = (zeros - power).to(dtype).t().contiguous()
    return halves.unsqueeze(-1).expand(-1, -1, 2).contiguous().view(torch.int32).squeeze(-1)


def _words_of(weight: Quantised) -> int:
    """Words of a block, whose codes at one place have one scale for each output: a power of two that divides the
    group, or of a table half of it."""
    most = MAX_WORDS[4 if weight.codes.dtype == torch.uint8 else 8]
    if weight.group == weight.in_features:
        return most
    power = weight.group & -weight.group
    return min(most, power if weight.table is None else power // 2)
