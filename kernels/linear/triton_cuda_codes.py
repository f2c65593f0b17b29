"""Codes of quantised weights in kernels of NVIDIA GPUs: conversions in registers, and products with them."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef"

from __future__ import annotations

import triton
import triton.language as tl

# Two words' codes to two values of a 16-bit type, by instructions that every lane has: a GPU converts but an eighth of
# its lanes at a time. $3 is the selector of the codes' byte.
#
# e4m3 moved into bfloat16's places is its value times 2^-120.
_FLOAT8 = tl.constexpr("""{
.reg .b32 t, u, v, power, zero;
mov.b32 power, 0x7b807b80;
mov.b32 zero, 0x80008000;
prmt.b32 t, $1, $2, $3;
shr.b32 u, t, 4;
and.b32 v, t, 0x80008000;
lop3.b32 u, u, 0x07f007f0, v, 0xea;
fma.rn.bf16x2 $0, u, power, zero;
}""")
# An integer plus 128 beside the exponent of 2^23 in float32, whose upper half is bfloat16 once 2^23 + 128 is
# subtracted.
_INT8 = tl.constexpr("""{
.reg .b32 a, b, power;
mov.b32 power, 0x4b000000;
prmt.b32 a, $1, power, $3;
prmt.b32 b, $2, power, $3;
sub.rn.f32 a, a, 0f4b000080;
sub.rn.f32 b, b, 0f4b000080;
prmt.b32 $0, a, b, 0x7632;
}""")
# A nibble beside the exponent of 2^7 (bfloat16) or 2^10 (float16), to which the negated zero point with that power is
# added, $5.
_NIBBLE = """{{
.reg .b32 t, one;
mov.b32 one, {one};
prmt.b32 t, $1, $2, $3;
{shift}
lop3.b32 t, t, 0x000f000f, {power}, 0xea;
fma.rn.{type} $0, t, one, $5;
}}"""
_BFLOAT16 = {"one": "0x3f803f80", "power": "0x43004300", "type": "bf16x2"}
_FLOAT16 = {"one": "0x3c003c00", "power": "0x64006400", "type": "f16x2"}
_LOW_BFLOAT16, _HIGH_BFLOAT16, _LOW_FLOAT16, _HIGH_FLOAT16 = (
    tl.constexpr(_NIBBLE.format(**of_type, shift=shift))
    for of_type in (_BFLOAT16, _FLOAT16)
    for shift in ("", "shr.b32 t, t, 4;")
)
# A table of 16 values, their low bytes in $10 to $17 (each twice), their high bytes in $18 to $25. A selector has three
# bits of each code, which choose among eight bytes; the fourth chooses between two such choices.
_LOOK_UP = """
and.b32 m, {word}, 0x77777777;
shr.b32 s, {word}, 3;
and.b32 s, s, 0x11111111;
""" + "".join(
    f"""
{shift}
prmt.b32 k, ones, 0, s;
prmt.b32 l, $10, $12, m;
prmt.b32 t, $14, $16, m;
lop3.b32 l, l, t, k, 0xd8;
prmt.b32 h, $18, $20, m;
prmt.b32 t, $22, $24, m;
lop3.b32 h, h, t, k, 0xd8;
prmt.b32 {{pair}}{half}0, l, h, 0x5140;
prmt.b32 {{pair}}{half}1, l, h, 0x7362;
"""
    for half, shift in (("0", ""), ("1", "shr.b32 m, m, 16; shr.b32 s, s, 16;"))
)
_TABLE = tl.constexpr(
    "{\n.reg .b32 m, s, k, l, h, t, ones, p00, p01, p10, p11, q00, q01, q10, q11;\nmov.b32 ones, 0xff00;\n"
    + _LOOK_UP.format(word="$8", pair="p")
    + _LOOK_UP.format(word="$9", pair="q")
    + "".join(
        f"prmt.b32 ${2 * i}, p{pair}, q{pair}, 0x5410;\nprmt.b32 ${2 * i + 1}, p{pair}, q{pair}, 0x7632;\n"
        for i, pair in enumerate(("00", "01", "10", "11"))
    )
    + "}"
)
_TABLE_OPERANDS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 18))
BFLOAT16_POWER, FLOAT16_POWER = tl.constexpr(128.0), tl.constexpr(1024.0)


@triton.jit
def _code(words, INDEX: tl.constexpr, FORM: tl.constexpr):
    """Code INDEX of each word: an integer, or float8."""
    if FORM == "fp8":
        code = (words >> (8 * INDEX)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    elif FORM == "i8":
        code = (words >> (8 * INDEX)).to(tl.int8)
    else:
        code = (words >> (4 * INDEX)) & 15
    return code


@triton.jit
def _exact(words, zeros, INDEX: tl.constexpr, FORM: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Code INDEX of each word, less the zero point of its column: values that the dtype of `zeros` holds.

    zeros  [columns] as OFFSETS "zeros" has them; of another form, whatever has the dtype
    """
    dtype: tl.constexpr = zeros.dtype
    if FORM == "i4":
        if IS_INTERPRETED:
            power = BFLOAT16_POWER if dtype == tl.bfloat16 else FLOAT16_POWER
            zero_points = (zeros.to(tl.float32) + power)[:, None]
            values = (_code(words, INDEX, FORM).to(tl.float32) + zero_points).to(dtype)
        else:
            if dtype == tl.bfloat16:
                asm: tl.constexpr = _HIGH_BFLOAT16 if INDEX % 2 else _LOW_BFLOAT16
            else:
                asm: tl.constexpr = _HIGH_FLOAT16 if INDEX % 2 else _LOW_FLOAT16
            operands = [words, 0x4400 + 0x1111 * (INDEX // 2), zeros[:, None]]
            values = tl.inline_asm_elementwise(asm, "=r,r,r,r,r,r", operands, zeros.dtype, is_pure=True, pack=2)
    elif IS_INTERPRETED:
        values = _code(words, INDEX, FORM).to(tl.float32).to(dtype)
    elif dtype == tl.float16:
        values = _code(words, INDEX, FORM).to(dtype)
    elif FORM == "fp8":
        operands = [words, 0x4000 + 0x1111 * INDEX]
        values = tl.inline_asm_elementwise(_FLOAT8, "=r,r,r,r,r", operands, tl.bfloat16, is_pure=True, pack=2)
    else:
        operands = [words ^ -2139062144, 0x7440 + INDEX]
        values = tl.inline_asm_elementwise(_INT8, "=r,r,r,r,r", operands, tl.bfloat16, is_pure=True, pack=2)
    return values


@triton.jit
def _looked_up(words, table_ptr, like):
    """Values of all codes of each word, as a tuple, of the dtype of `like`; table_ptr as in the product's kernel."""
    return tl.inline_asm_elementwise(
        _TABLE,
        _TABLE_OPERANDS,
        [
            words,
            tl.load(table_ptr),
            tl.load(table_ptr + 1),
            tl.load(table_ptr + 2),
            tl.load(table_ptr + 3),
            tl.load(table_ptr + 4),
            tl.load(table_ptr + 5),
            tl.load(table_ptr + 6),
            tl.load(table_ptr + 7),
        ],
        (
            like.dtype,
            like.dtype,
            like.dtype,
            like.dtype,
            like.dtype,
            like.dtype,
            like.dtype,
            like.dtype,
        ),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _looked_up_one(words, table_ptr, INDEX: tl.constexpr, dtype: tl.constexpr):
    """Value of code INDEX of each word, in the interpreter."""
    code = (words >> (4 * INDEX)) & 15
    shift = 8 * (code % 4)
    low = (tl.load(table_ptr + code // 4) >> shift) & 255
    high = (tl.load(table_ptr + 4 + code // 4) >> shift) & 255
    return (low | high << 8).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def dequantised(
    words,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    first,
    num_groups,
    out_features,
    column,
    dtype: tl.constexpr,
    INDEX: tl.constexpr,
    FORM: tl.constexpr,
    OFFSETS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """float32 values of code INDEX of each word [columns, inputs], with scales and offsets. `first` is its first
    input, and all are of one group."""
    codes = _code(words, INDEX, FORM)
    values = tl.load(table_ptr + codes) if HAS_TABLE else codes.to(tl.float32)
    mask = column < out_features
    place = column
    if GROUP > 0:
        group = first // GROUP
        mask = mask & (group < num_groups)
        place += group * out_features
    scale = tl.load(scales_ptr + place, mask=mask, other=0.0)
    values *= scale[:, None]
    if OFFSETS == "values":
        values += tl.load(offsets_ptr + place, mask=mask, other=0.0)[:, None]
    elif OFFSETS == "zeros":
        power = BFLOAT16_POWER if dtype == tl.bfloat16 else FLOAT16_POWER
        values += ((tl.load(offsets_ptr + place, mask=mask, other=0.0).to(tl.float32) + power) * scale)[:, None]
    return values


@triton.jit
def inputs(x_ptr, token, stride, first, in_features, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    """[tokens, BLOCK] of x from input `first` on; zero past the last one."""
    position = first + tl.arange(0, BLOCK)
    places = x_ptr + token[:, None].to(tl.int64) * stride + position[None, :]
    if IS_EVEN:
        return tl.load(places)
    return tl.load(places, mask=position[None, :] < in_features, other=0.0)


@triton.jit
def _scale(places):
    """float32 scales; of exponents of powers of two in 8 bits (e8m0), the power."""
    scale = tl.load(places)
    if places.dtype.element_ty == tl.uint8:
        bits = tl.where(scale == 0, 0x00400000, scale.to(tl.int32) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    return scale


@triton.jit
def codes_product(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    table_ptr,
    token_read,
    column_read,
    first_block,
    last_block,
    x_stride,
    in_features,
    out_features,
    num_groups,
    dtype: tl.constexpr,
    FORM: tl.constexpr,
    OFFSETS: tl.constexpr,
    SCALES_PRODUCTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    CODES: tl.constexpr,
    CODES_OF_GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """float32 [columns, tokens]: these columns of the weight by these rows of x, over some blocks of the inputs.
    Arguments are those of `quantised_linear_kernel`."""
    total = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
    word_places = codes_ptr + column_read[:, None].to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
    block_size = out_features.to(tl.int64) * WORDS
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        words = tl.load(word_places + block * block_size)
        first = block * (CODES * WORDS)
        part = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
        scale = tl.zeros((BLOCK_OUT,), tl.float32)
        zeros = tl.zeros((BLOCK_OUT,), dtype)
        if FORM == "table" and not IS_INTERPRETED:
            looked_up = _looked_up(words, table_ptr, zeros)
        for index in tl.static_range(CODES):
            x = inputs(x_ptr, token_read, x_stride, first + index * WORDS, in_features, WORDS, IS_EVEN)
            if SCALES_PRODUCTS:
                if index % CODES_OF_GROUP == 0:
                    place = column_read
                    if GROUP > 0:
                        group = tl.minimum((first + index * WORDS) // GROUP, num_groups - 1)
                        place += group * out_features
                        scale = _scale(scales_ptr + place)
                        part = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
                    if FORM == "i4":
                        zeros = tl.load(offsets_ptr + place)
                if FORM != "table":
                    values = _exact(words, zeros, index, FORM, IS_INTERPRETED)
                elif IS_INTERPRETED:
                    values = _looked_up_one(words, table_ptr, index, dtype)
                else:
                    values = looked_up[index]
                if GROUP > 0:
                    part = tl.dot(values, tl.trans(x), part)
                    if index % CODES_OF_GROUP == CODES_OF_GROUP - 1:
                        total = tl.fma(part, scale[:, None], total)
                else:
                    total = tl.dot(values, tl.trans(x), total)
            else:
                values = dequantised(
                    words,
                    scales_ptr,
                    offsets_ptr,
                    None,
                    first + index * WORDS,
                    num_groups,
                    out_features,
                    column_read,
                    dtype,
                    index,
                    FORM,
                    OFFSETS,
                    GROUP,
                    False,
                )
                total = tl.dot(values.to(dtype), tl.trans(x), total)
    if SCALES_PRODUCTS and GROUP == 0:
        total *= _scale(scales_ptr + column_read)[:, None]
    return total
