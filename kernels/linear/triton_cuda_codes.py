"""Codes of quantised weights in kernels of NVIDIA GPUs: conversions in registers, and products with them."""

# Triton's functions are untyped.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, no-redef, assignment"
# ruff: noqa: RUF005

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
# One byte each of the values of four codes, from a table of 16 in $2 to $5. $1 has three bits of each code, which
# choose among eight bytes; $6 has the fourth, which chooses between two such choices.
_BYTES = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $2, $3, $1;
prmt.b32 b, $4, $5, $1;
lop3.b32 $0, a, b, $6, 0xd8;
}""")
_PERMUTE = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
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
def _exact(words, zeros, x, INDEX: tl.constexpr, FORM: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Code INDEX of each word, less the zero point of its column: values that the dtype of x holds.

    zeros  int32 [columns] as OFFSETS "zeros" has them; other forms do not read them
    """
    dtype: tl.constexpr = x.dtype
    if FORM == "i4":
        if IS_INTERPRETED:
            power = BFLOAT16_POWER if dtype == tl.bfloat16 else FLOAT16_POWER
            zero_points = (_of_half(zeros, dtype) + power)[:, None]
            values = (_code(words, INDEX, FORM).to(tl.float32) + zero_points).to(dtype)
        else:
            if dtype == tl.bfloat16:
                asm: tl.constexpr = _HIGH_BFLOAT16 if INDEX % 2 else _LOW_BFLOAT16
            else:
                asm: tl.constexpr = _HIGH_FLOAT16 if INDEX % 2 else _LOW_FLOAT16
            operands = [words, 0x4400 + 0x1111 * (INDEX // 2), zeros[:, None]]
            values = tl.inline_asm_elementwise(asm, "=r,r,r,r,r,r,r", operands, x.dtype, is_pure=True, pack=2)
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
def _of_half(zeros, dtype: tl.constexpr):
    """float32 of zero points as OFFSETS "zeros" has them."""
    return zeros.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _looked_up(words, TABLE: tl.constexpr, PAIR: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """int32: the values of codes 2 * PAIR and 2 * PAIR + 1 of each word in its halves, the low one first. Neighbouring
    pairs share all but the last instruction.

    TABLE  of `TiledCodes`. A constant: Triton keeps a product's operand in registers where it comes from one load
    """
    if IS_INTERPRETED:
        pairs = tl.zeros_like(words)
        for index in tl.static_range(2):
            code = (words >> (8 * PAIR + 4 * index)) & 15
            for place in tl.static_range(16):
                value = (TABLE >> (8 * place) & 255) | (TABLE >> (128 + 8 * place) & 255) << 8
                pairs |= tl.where(code == place, value, 0) << (16 * index)
    else:
        low_bits, high_bit = words & 0x77777777, (words >> 3) & 0x11111111
        if PAIR >= 2:
            low_bits, high_bit = low_bits >> 16, high_bit >> 16
        is_high = _permuted(0xFF00 + tl.zeros_like(words), 0, high_bit)
        low = _table_bytes(low_bits, TABLE, is_high)
        high = _table_bytes(low_bits, TABLE >> 128, is_high)
        pairs = _permuted(low, high, 0x5140 if PAIR % 2 == 0 else 0x7362)
    return pairs


@triton.jit
def _permuted(low, high, selector):
    operands = [low, high, selector]
    return tl.inline_asm_elementwise(_PERMUTE, "=r,r,r,r", operands, tl.int32, is_pure=True, pack=1)


@triton.jit
def _table_bytes(low_bits, TABLE: tl.constexpr, is_high):
    first: tl.constexpr = TABLE & 0xFFFFFFFF
    second: tl.constexpr = (TABLE >> 32) & 0xFFFFFFFF
    third: tl.constexpr = (TABLE >> 64) & 0xFFFFFFFF
    fourth: tl.constexpr = (TABLE >> 96) & 0xFFFFFFFF
    operands = [low_bits, first, second, third, fourth, is_high]
    return tl.inline_asm_elementwise(_BYTES, "=r,r,r,r,r,r,r", operands, tl.int32, is_pure=True, pack=1)


@triton.jit
def _halves(pairs, dtype: tl.constexpr):
    """int32 [columns, words] -> [columns, 2 * words] of a dtype of 16 bits, each low half before the high one."""
    low = pairs.to(tl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, high).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def _behind(left, right):
    """[columns, inputs] each -> [columns, 2 * inputs], without moving anything between threads."""
    return tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def _concatenated(parts, COUNT: tl.constexpr):
    """[columns, inputs] each -> one behind the other; COUNT is 1, 2, 4 or 8."""
    if COUNT == 1:
        whole = parts[0]
    elif COUNT == 2:
        whole = _behind(parts[0], parts[1])
    else:
        whole = _behind(_behind(parts[0], parts[1]), _behind(parts[2], parts[3]))
        if COUNT == 8:
            rest = _behind(_behind(parts[4], parts[5]), _behind(parts[6], parts[7]))
            whole = _behind(whole, rest)
    return whole


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
        values += ((_of_half(tl.load(offsets_ptr + place, mask=mask, other=0), dtype) + power) * scale)[:, None]
    return values


@triton.jit
def inputs(x_ptr, token, token_end, stride, first, in_features, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    """[tokens, BLOCK] of x from input `first` on; zero past the last one. Tokens past the last one are others again,
    which takes fewer registers than zeros; of few tokens they are zero, since the same places of the L2 cache would be
    read by all programs."""
    position = first + tl.arange(0, BLOCK)
    places = x_ptr + (token % token_end)[:, None].to(tl.int64) * stride + position[None, :]
    if token.shape[0] <= 16:
        mask = (token < token_end)[:, None]
        if not IS_EVEN:
            mask = mask & (position[None, :] < in_features)
        x = tl.load(places, mask=mask, other=0.0)
    elif IS_EVEN:
        x = tl.load(places)
    else:
        x = tl.load(places, mask=position[None, :] < in_features, other=0.0)
    return x


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
    token,
    token_end,
    column_read,
    first_block,
    last_block,
    x_stride,
    in_features,
    out_features,
    num_groups,
    dtype: tl.constexpr,
    FORM: tl.constexpr,
    TABLE: tl.constexpr,
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
    PAIRED: tl.constexpr = FORM == "table"
    # Codes of a word that one product takes: it is the more efficient the more inputs it has.
    OF_PRODUCT: tl.constexpr = CODES_OF_GROUP if SCALES_PRODUCTS and GROUP > 0 else CODES
    NUM_PARTS: tl.constexpr = OF_PRODUCT // 2 if PAIRED else OF_PRODUCT
    total = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
    zeros = tl.zeros((BLOCK_OUT,), tl.int32)
    word_places = codes_ptr + column_read[:, None].to(tl.int64) * WORDS + tl.arange(0, WORDS)[None, :]
    block_size = out_features.to(tl.int64) * WORDS
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        words = tl.load(word_places + block * block_size)
        for product in tl.static_range(CODES // OF_PRODUCT):
            first = (block * CODES + product * OF_PRODUCT) * WORDS
            x = inputs(x_ptr, token, token_end, x_stride, first, in_features, OF_PRODUCT * WORDS, IS_EVEN)
            place = column_read
            if GROUP > 0:
                place += tl.minimum(first // GROUP, num_groups - 1) * out_features
            if SCALES_PRODUCTS and FORM == "i4":
                zeros = tl.load(offsets_ptr + place)
            parts = ()
            for index in tl.static_range(product * NUM_PARTS, (product + 1) * NUM_PARTS):
                if PAIRED:
                    part = _halves(_looked_up(words, TABLE, index, IS_INTERPRETED), dtype)
                elif SCALES_PRODUCTS:
                    part = _exact(words, zeros, x, index, FORM, IS_INTERPRETED)
                else:
                    values = dequantised(
                        words,
                        scales_ptr,
                        offsets_ptr,
                        None,
                        (block * CODES + index) * WORDS,
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
                    part = values.to(dtype)
                parts = parts + (part,)
            values = _concatenated(parts, NUM_PARTS)
            if SCALES_PRODUCTS and GROUP > 0:
                scale = _scale(scales_ptr + place)
                total = tl.fma(tl.dot(values, tl.trans(x)), scale[:, None], total)
            else:
                total = tl.dot(values, tl.trans(x), total)
    if SCALES_PRODUCTS and GROUP == 0:
        total *= _scale(scales_ptr + column_read)[:, None]
    return total
