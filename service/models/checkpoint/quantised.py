"""From a quantised module's tensors, as tools store them, to `Quantised`; see docs/quantised.md for the formats.

Each layout says which tensor of a module only it has, which tensors it needs and in which shapes, and how they are
read. Shapes are checked by headers, before any tensor is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kernels.linear.quantised import E2M1, Quantised, in_flat_blocks, pack_nibbles
from service.models.checkpoint.headers import FLOATS, Header, Sizes
from service.models.spec.config_json import ModelError
from service.models.spec.quantisation import Quantisation

_INT32 = ("I32",)
MXFP4_BLOCK = 32
# Behind the name of a tensor of all experts, instead of behind a module's.
EXPERT_SUFFIXES = ("_blocks", "_scales")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the nibble of output n is, in a word of eight outputs


@dataclass(frozen=True, slots=True)
class Layout:
    """
    sign   suffix of the tensor that only this layout has
    check  raises ModelError for headers that do not fit
    read   the weight of the tensors by suffix; may raise ModelError
    known  suffixes of a module's further tensors
    """

    sign: str
    check: Callable[[Sizes], None]
    read: Callable[[Sizes, Mapping[str, torch.Tensor]], Quantised]
    known: tuple[str, ...]


def find_layout(headers: Mapping[str, Header], config: Quantisation) -> str | None:
    """How the module whose tensors these are is stored; None: as it is. Raises ModelError where config.json says
    otherwise."""
    found = [name for name, layout in LAYOUTS.items() if _has(name, layout, headers)]
    allowed = [name for name in found if name in config.layouts]
    if found and not allowed:
        raise ModelError(
            f"{LAYOUTS[found[0]].sign} is of the format {found[0]}, and config.json names the method {config.method}: "
            "take both from one download"
        )
    return allowed[0] if allowed else None


def check(layout: str, sizes: Sizes) -> None:
    """Raises ModelError for headers that do not fit the layout, the weight's size or config.json."""
    LAYOUTS[layout].check(sizes)


def read(layout: str, sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    """The weight of a module whose headers were checked. Raises ModelError for values that cannot be."""
    weight = LAYOUTS[layout].read(sizes, tensors)
    for values in (weight.scales, weight.offsets, weight.table):
        if values is not None and not bool(torch.isfinite(values.float()).all()):
            raise ModelError("a scale is NaN or infinite: download it again")
    if layout not in ("bnb4", "mxfp4") and not bool(weight.scales.all()) and _loses(weight):
        raise ModelError("a scale is 0 over codes that say otherwise: download it again")
    return weight


def _loses(weight: Quantised) -> bool:
    """Whether a scale of 0 stands over codes that are not 0; of 4 bits, over codes that are not all alike: the zero
    point of a group of zeros, by which tools store zero rows, may be any."""
    rows, groups = (weight.scales == 0).nonzero(as_tuple=True)
    codes = weight.codes.view(weight.out_features, weight.scales.shape[1], -1)[rows, groups]
    if weight.codes.dtype != torch.uint8:
        return bool(codes.float().any())
    nibbles = torch.cat((codes & 15, codes >> 4), dim=1)
    return bool((nibbles != nibbles[:, :1]).any())


def _has(name: str, layout: Layout, headers: Mapping[str, Header]) -> bool:
    if layout.sign not in headers:
        return False
    if name in ("fp8", "int8"):
        dtype = headers["weight"].dtype
        has_scale = any(suffix in headers for suffix in _SCALES)
        return dtype == ("I8" if name == "int8" else "F8_E4M3") and has_scale
    return True


# ---- fp8, int8: codes as they are, and scales per tensor, output, group or block


# The last is msmodelslim's of W8A8 without scales of weights: those times the scale of all activations.
_SCALES = ("weight_scale_inv", "weight_scale", "deq_scale")


def _scale_suffix(sizes: Sizes) -> str:
    return next((suffix for suffix in _SCALES if suffix in sizes.headers), "weight_scale")


def _check_scaled(sizes: Sizes) -> None:
    sizes.need("weight", ("F8_E4M3", "I8"), (sizes.outputs, sizes.inputs))
    sizes.check_bits("weight", 8)
    suffix = _scale_suffix(sizes)
    if suffix == "deq_scale":
        sizes.need(suffix, ("F32", "I64"), (sizes.outputs,))
        sizes.need("input_scale", tuple(FLOATS), (1,), ())
    else:
        sizes.need(suffix, (*FLOATS, "F8_E8M0"))
    _block_of(sizes, suffix)
    for offset in ("weight_zero_point", "weight_offset"):
        if offset in sizes.headers:
            sizes.need(offset, (*FLOATS, "I8", "I32"), sizes.headers[suffix].shape)


def _block_of(sizes: Sizes, suffix: str) -> tuple[int, int]:
    """(outputs, inputs) that share a scale. Raises ModelError."""
    shape = sizes.headers[suffix].shape
    # ModelOpt has scales of blocks as [blocks, 1, blocks, 1].
    form = shape[::2] if len(shape) == 4 and shape[1::2] == (1, 1) else shape
    # One axis is of outputs: scales of several modules in one would not say where each ends.
    one_axis = (form[0] if form and form[0] in (1, sizes.outputs) else 0, 1)
    rows, columns = {0: (1, 1), 1: one_axis, 2: form}.get(len(form), (0, 0))
    # Where config.json has blocks: their grid, one scale for all, or one for each output.
    is_grid = sizes.config.block is not None and (rows, columns) not in ((1, 1), (sizes.outputs, 1))
    block = []
    sides = zip((rows, columns), (sizes.outputs, sizes.inputs), sizes.config.block or (0, 0), strict=True)
    for have, size, given in sides:
        if given and have == -(-size // given):
            block.append(given)
        elif not is_grid and (have == 1 or have == size or (have and not given and size % have == 0)):
            block.append(size // have)
        else:
            raise ModelError(
                f"{suffix} has the shape {list(shape)}, which does not divide a weight of {sizes.size} into blocks"
                + (f" of {given} as config.json has them" if given else "")
            )
    return block[0], block[1]


def _read_scaled(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    suffix = _scale_suffix(sizes)
    rows, columns = _block_of(sizes, suffix)
    group = math.gcd(columns, sizes.inputs)

    def spread(values: torch.Tensor) -> torch.Tensor:
        """float32 [outputs, groups]"""
        values = (values.reshape(-1, 1) if values.dim() < 2 else values.flatten(1)).float()
        values = values.repeat_interleave(rows, 0)[: sizes.outputs]
        return values.repeat_interleave(columns // group, 1)[:, : sizes.inputs // group].contiguous()

    stored = tensors[suffix]
    if suffix == "deq_scale":
        # Beside float16 the tool writes the bits of float32 as int64, as its operator takes them.
        bits = stored.view(-1) if stored.dtype == torch.float32 else stored.to(torch.int32).view(torch.float32)
        stored = bits / tensors["input_scale"].float()
    scales = spread(stored)
    zeros = next((tensors[name] for name in ("weight_zero_point", "weight_offset") if name in tensors), None)
    offsets = None if zeros is None or not bool(zeros.any()) else -spread(zeros) * scales
    rounds_inputs = sizes.config.method == "msmodelslim"
    return Quantised(tensors["weight"], scales, offsets, None, group, None, rounds_inputs)


# ---- compressed-tensors' pack-quantized


def _check_packed(sizes: Sizes) -> None:
    bits = _bits_of(sizes, "weight_packed", sizes.headers["weight_packed"].shape, axis=1)
    sizes.check_bits("weight_packed", bits)
    sizes.need("weight_packed", _INT32, (sizes.outputs, sizes.inputs * bits // 32))
    sizes.need("weight_scale", tuple(FLOATS))
    shape = sizes.headers["weight_scale"].shape
    num_groups = shape[1] if len(shape) == 2 else 1
    sizes.check_groups("weight_scale", num_groups)
    sizes.need("weight_scale", tuple(FLOATS), (sizes.outputs, num_groups), *([(1,), (1, 1)] if num_groups == 1 else []))
    if "weight_zero_point" in sizes.headers:
        sizes.need("weight_zero_point", _INT32, (-(-sizes.outputs * bits // 32), num_groups))
    if sizes.config.is_ordered or "weight_g_idx" in sizes.headers:
        sizes.need("weight_g_idx", _INT32, (sizes.inputs,))


def _read_packed(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    words, scales = tensors["weight_packed"], tensors["weight_scale"].float()
    bits = _bits_of(sizes, "weight_packed", tuple(words.shape), axis=1)
    scales = scales.reshape(-1, scales.shape[-1]).expand(sizes.outputs, -1).contiguous()
    zeros: torch.Tensor | float = float(2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        packed = tensors["weight_zero_point"]
        zeros = _unpacked(packed.t().contiguous(), bits).reshape(packed.shape[1], -1)[:, : sizes.outputs].t().float()
    return _integers(words, scales, zeros, bits, tensors.get("weight_g_idx"))


# ---- AWQ and GPTQ: words of eight outputs, and of the inputs


def _check_awq(sizes: Sizes) -> None:
    sizes.need("scales", tuple(FLOATS))
    num_groups = sizes.headers["scales"].shape[0] if sizes.headers["scales"].shape else 0
    sizes.check_groups("scales", num_groups)
    if sizes.outputs % 8:
        raise ModelError(f"qweight packs eight outputs in a word, and the weight has {sizes.outputs}")
    sizes.need("qweight", _INT32, (sizes.inputs, sizes.outputs // 8))
    sizes.need("qzeros", _INT32, (num_groups, sizes.outputs // 8))
    sizes.need("scales", tuple(FLOATS), (num_groups, sizes.outputs))


def _read_awq(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    def outputs(words: torch.Tensor) -> torch.Tensor:
        """uint8 [outputs, rows of the words]"""
        return _unpacked(words, 4)[..., list(_AWQ_ORDER)].reshape(words.shape[0], sizes.outputs).t()

    codes, zeros = outputs(tensors["qweight"]).contiguous(), outputs(tensors["qzeros"]).float()
    scales = tensors["scales"].float().t().contiguous()
    return Quantised(pack_nibbles(codes), scales, -zeros * scales, None, sizes.inputs // scales.shape[1], None)


def _check_gptq(sizes: Sizes) -> None:
    bits = _bits_of(sizes, "qweight", sizes.headers["qweight"].shape, axis=0)
    sizes.check_bits("qweight", bits)
    sizes.need("qweight", _INT32, (sizes.inputs * bits // 32, sizes.outputs))
    sizes.need("scales", tuple(FLOATS))
    num_groups = sizes.headers["scales"].shape[0] if sizes.headers["scales"].shape else 0
    sizes.check_groups("scales", num_groups)
    sizes.need("scales", tuple(FLOATS), (num_groups, sizes.outputs))
    if sizes.outputs * bits % 32:
        raise ModelError(f"qzeros packs {32 // bits} outputs in a word, and the weight has {sizes.outputs}")
    sizes.need("qzeros", _INT32, (num_groups, sizes.outputs * bits // 32))
    if sizes.config.is_ordered or "g_idx" in sizes.headers:
        sizes.need("g_idx", _INT32, (sizes.inputs,))


def _read_gptq(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    words = tensors["qweight"]
    bits = _bits_of(sizes, "qweight", tuple(words.shape), axis=0)
    packed = tensors["qzeros"]
    # The first version stores zeros less 1; the sum is not cut to a code's bits, as in AutoGPTQ.
    zeros = _unpacked(packed, bits).reshape(packed.shape[0], -1).t().float() + sizes.config.zero_shift
    return _integers(words.t(), tensors["scales"].float().t().contiguous(), zeros, bits, tensors.get("g_idx"))


def _bits_of(sizes: Sizes, suffix: str, shape: tuple[int, ...], axis: int) -> int:
    """Bits of a code, of the words along the inputs. Raises ModelError."""
    words = shape[axis] if len(shape) == 2 else 0
    for bits in (4, 8):
        if words * 32 == sizes.inputs * bits:
            return bits
    raise ModelError(
        f"{suffix} has the shape {list(shape)}, which holds a weight of {sizes.size} neither in 4 nor 8 bits"
    )


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., n, codes of a word], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _integers(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | float, bits: int, groups: torch.Tensor | None
) -> Quantised:
    """(codes - zeros) * scales: words int32 [outputs, inputs / codes of a word], scales [outputs, groups], zeros as
    scales; groups [inputs] of inputs where those stand in another order."""
    words = words.contiguous()
    num_inputs = words.shape[1] * 32 // bits
    order = None if groups is None else _order_of(groups, num_inputs // scales.shape[1])
    # Two codes of 4 bits lie in a byte as in `Quantised`.
    codes = words.view(torch.uint8)
    if order is not None:
        codes = _unpacked(words, bits).reshape(-1, num_inputs)[:, order.long()].contiguous()
        codes = pack_nibbles(codes) if bits == 4 else codes
    if bits == 8:
        codes, zeros = (codes ^ 128).view(torch.int8), zeros - 128
    offsets = None if bits == 8 and not torch.is_tensor(zeros) and zeros == 0 else -zeros * scales
    return Quantised(codes, scales, offsets, None, num_inputs // scales.shape[1], order)


def _order_of(groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """int32 [inputs], by group; None where they stand so. Raises ModelError for groups of other sizes."""
    if not bool((groups != -1).any()):  # compressed-tensors has -1 where there is no order
        return None
    order = torch.argsort(groups, stable=True).to(torch.int32)
    if not torch.equal(groups[order.long()].long(), torch.arange(len(groups)) // group):
        raise ModelError(f"g_idx has groups that are not of {group} inputs each, which is not served")
    return None if torch.equal(order.long(), torch.arange(len(groups))) else order


# ---- bitsandbytes


def _check_bnb4(sizes: Sizes) -> None:
    num = sizes.outputs * sizes.inputs
    if sizes.inputs % 2:
        raise ModelError(f"weight has an odd number of inputs, {sizes.inputs}, in 4 bits, which is not served")
    sizes.need("weight", ("U8", *FLOATS))
    element_bytes = {"BF16": 2, "F16": 2, "F32": 4}.get(sizes.headers["weight"].dtype, 1)
    sizes.need("weight", ("U8", *FLOATS), (num // 2 // element_bytes, 1), (1, num // 2 // element_bytes))
    sizes.need("weight.quant_map", ("F32",), (16,))
    _quant_state(sizes)
    if "weight.nested_absmax" in sizes.headers:
        sizes.need("weight.absmax", ("U8",))
        sizes.need("weight.nested_absmax", ("F32",))
        sizes.need("weight.nested_quant_map", ("F32",), (256,))
    else:
        sizes.need("weight.absmax", ("F32",))
    for suffix in ("weight.absmax", "weight.nested_absmax"):
        if len(shape := sizes.headers[suffix].shape if suffix in sizes.headers else (0,)) != 1:
            raise ModelError(f"{suffix} has the shape {list(shape)}, and must have one axis")


def _quant_state(sizes: Sizes) -> str:
    """Suffix of what bitsandbytes says of the weight, as JSON. Raises ModelError."""
    found = [suffix for suffix in sizes.headers if suffix.startswith("weight.quant_state.bitsandbytes__")]
    if len(found) != 1:
        raise ModelError("weight.quant_state is missing")
    return found[0]


def _read_bnb4(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    suffix = _quant_state(sizes)
    try:
        state = json.loads(bytes(tensors[suffix].tolist()))
        block, shape = int(state["blocksize"]), tuple(state["shape"])
        nested = int(state["nested_blocksize"]) if "nested_blocksize" in state else 0
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelError(f"{suffix} is no JSON of bitsandbytes: {error!r}") from error
    if shape != (sizes.outputs, sizes.inputs) or not 1 <= block <= 4096:
        raise ModelError(f"{suffix} is of a weight of {list(shape)}, and config.json calls for {sizes.size}")
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        steps = tensors["weight.nested_absmax"]
        if nested < 1 or steps.numel() != -(-absmax.numel() // nested):
            raise ModelError(f"weight.nested_absmax has another number of values than for {nested} blocks each")
        steps = steps[torch.arange(absmax.numel()) // nested]
        absmax = tensors["weight.nested_quant_map"][absmax.long()] * steps + offset
    packed = tensors["weight"].contiguous().view(torch.uint8).reshape(sizes.outputs, sizes.inputs // 2)
    swapped = packed >> 4 | packed << 4  # bitsandbytes has the even input in the high nibble
    if absmax.numel() != -(-swapped.numel() * 2 // block):
        few = "few" if absmax.numel() * block < swapped.numel() * 2 else "many"
        raise ModelError(f"weight.absmax has too {few} values: download it again")
    return in_flat_blocks(swapped, absmax, tensors["weight.quant_map"], block)


def _check_bnb8(sizes: Sizes) -> None:
    sizes.need("weight", ("I8",), (sizes.outputs, sizes.inputs))
    sizes.need("SCB", ("F32",), (sizes.outputs,))


def _read_bnb8(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:  # noqa: ARG001
    if "weight_format" in tensors and bool(tensors["weight_format"].any()):
        raise ModelError("weight_format is not rows: an old bitsandbytes saved codes in tiles, which is not served")
    return Quantised(tensors["weight"], (tensors["SCB"] / 127)[:, None], None, None, tensors["weight"].shape[1], None)


# ---- MXFP4: experts of a layer in one tensor, in blocks of 32 inputs with a power of two each


def _check_mxfp4(sizes: Sizes) -> None:
    num_blocks = sizes.inputs // MXFP4_BLOCK
    if sizes.inputs % MXFP4_BLOCK:
        raise ModelError(f"blocks of {MXFP4_BLOCK} inputs do not divide {sizes.inputs}, which is not served")
    shape = (sizes.experts, sizes.outputs, num_blocks)
    sizes.need("_blocks", ("U8",), (*shape, MXFP4_BLOCK // 2))
    sizes.need("_scales", ("U8",), shape)


def _read_mxfp4(sizes: Sizes, tensors: Mapping[str, torch.Tensor]) -> Quantised:
    codes = tensors["_blocks"].reshape(-1, sizes.inputs // 2)
    scales = tensors["_scales"].reshape(len(codes), -1).view(torch.float8_e8m0fnu)
    return Quantised(codes, scales, None, torch.tensor(E2M1), MXFP4_BLOCK, None)


_SCALED = ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_offset")
# For rounded activations, which are not rounded here.
_LEFT = (
    *("input_scale", "input_offset", "deq_scale", "quant_bias", "input_zero_point", "input_global_scale"),
    *("activation_scale", "input_scale_ub"),
)
_SCALED_KNOWN = (*_SCALED, *_LEFT, "weight_shape")
_BNB4 = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))

LAYOUTS: dict[str, Layout] = {
    "bnb4": Layout("weight.absmax", _check_bnb4, _read_bnb4, (*_BNB4, *_STATES)),
    "bnb8": Layout("SCB", _check_bnb8, _read_bnb8, ("weight", "SCB", "weight_format")),
    "packed": Layout(
        "weight_packed",
        _check_packed,
        _read_packed,
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", *_LEFT),
    ),
    "awq": Layout("qweight", _check_awq, _read_awq, ("qweight", "qzeros", "scales")),
    "gptq": Layout("qweight", _check_gptq, _read_gptq, ("qweight", "qzeros", "scales", "g_idx")),
    "mxfp4": Layout("_blocks", _check_mxfp4, _read_mxfp4, EXPERT_SUFFIXES),
    "fp8": Layout("weight", _check_scaled, _read_scaled, _SCALED_KNOWN),
    "int8": Layout("weight", _check_scaled, _read_scaled, _SCALED_KNOWN),
}
SUFFIXES = tuple(dict.fromkeys(s for name, layout in LAYOUTS.items() if name != "mxfp4" for s in layout.known))
