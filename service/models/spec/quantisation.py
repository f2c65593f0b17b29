"""config.json's word on how weights are quantised. Torch-free.

A module's own tensors say whether it is quantised, so lists of ignored modules need no reading. The config says what
tensors cannot: the method, and what would change their meaning. What is not understood is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.models.spec.config_json import ModelError

METHODS = (
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "compressed-tensors",
    "awq",
    "gptq",
    "auto-round",
    "bitsandbytes",
    "mxfp4",
    "msmodelslim",
)
KEYS = ("quantization_config", "compression_config")
# msmodelslim's, whose activations have one scale; the second has scales of tokens for prompts.
_STATIC_KINDS = ("W8A8", "W8A8_MIX")
HELP = "give the directory of the checkpoint that it was made of, in bfloat16, float16 or float32"
# Layout and zero_shift of packing formats.
_AUTO_ROUND = {
    "auto_round:auto_gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0),
}
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """
    method      as config.json has it
    layouts     how quantised modules may be stored: keys of `service.models.checkpoint.quantised.LAYOUTS`
    bits        of a code, those that modules may have; empty: whatever the tensors say
    group       inputs that share a scale, -1 for all; None: whatever the tensors say
    block       (outputs, inputs) that share a scale of fp8; None: the shape of the scales says
    is_ordered  groups are of inputs that stand in another order, which each module gives
    zero_shift  1 where zero points are stored less 1 (GPTQ's first version)
    static_inputs
                it was made for activations rounded by scales that it carries
    """

    method: str
    layouts: tuple[str, ...]
    bits: tuple[int, ...] = ()
    group: int | None = None
    block: tuple[int, int] | None = None
    is_ordered: bool = False
    zero_shift: int = 0
    static_inputs: bool = False


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """How the checkpoint of a parsed config.json is quantised; None: it is not. Raises ModelError."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        for key in KEYS:
            if part.get(key):
                return _read(part[key], key)
    return None


def _read(given: Any, key: str) -> Quantisation:
    if not isinstance(given, dict):
        raise ModelError(f"config.json must give {key} as an object, and has {given!r:.80}")
    if isinstance(given.get("quantization_config"), dict):  # compressed-tensors had it inside compression_config once
        given = given["quantization_config"]
    method = given.get("quant_method", "compressed-tensors" if "config_groups" in given else None)
    readers = {
        **dict.fromkeys(("fp8", "fbgemm_fp8"), _fp8),
        "modelopt": _modelopt,
        "compressed-tensors": _compressed,
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "bitsandbytes": _bitsandbytes,
        "mxfp4": _mxfp4,
        "gguf": _gguf,
        "msmodelslim": _msmodelslim,
    }
    read = readers.get(str(method))
    if read is None:
        raise ModelError(
            f"config.json has a {key} with the quant_method {method!r}; served are {', '.join(METHODS)}: {HELP}"
        )
    return read(given)


def _fp8(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "fmt", ("e4m3", "float8_e4m3fn", None))
    block, is_static = _pair(given.get("weight_block_size")), given.get("activation_scheme") == "static"
    return Quantisation(str(given["quant_method"]), ("fp8",), block=block, static_inputs=is_static)


def _modelopt(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"))
    return Quantisation("modelopt", ("fp8",), block=(128, 128) if given["quant_algo"] == "FP8_PB_WO" else None)


def _compressed(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "quantization_status", ("compressed", "frozen", None))
    for name in ("sparsity_config", "transform_config"):
        inner = given.get(name)
        if inner and not (isinstance(inner, dict) and inner.get("format", "") == "dense"):
            raise ModelError(f"config.json's quantisation has a {name}, which is not served: {HELP}")
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelError("config.json's quantisation must give config_groups as an object of objects")
    formats = [given.get("format"), *(group.get("format") for group in groups.values())]
    bits, blocks, orders = set(), set(), set()
    for name in formats:
        _only({"format": name}, "format", (*_COMPRESSED, None))
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            continue
        kind = (weights.get("num_bits"), weights.get("type", "int"))
        if kind not in ((4, "int"), (8, "int"), (8, "float")):
            raise ModelError(
                f"config.json's quantisation has weights of {kind[0]} bits of the type {kind[1]}; served are int of 4 "
                f"or 8 bits, and float of 8: {HELP}"
            )
        _only(weights, "strategy", ("tensor", "channel", "group", "block", None))
        has_octets = (group.get("format") or given.get("format")) in ("int-quantized", "naive-quantized")
        bits.add(8 if has_octets else int(kind[0]))
        blocks.add(_pair(weights.get("block_structure")))
        orders.add(str(weights.get("actorder")).lower())
    block = blocks.pop() if len(blocks) == 1 else None
    inputs = (group.get("input_activations") for group in groups.values())
    is_static = any(isinstance(one, dict) and not one.get("dynamic", False) for one in inputs)
    layouts = ("fp8", "int8", "packed")
    is_ordered = bool(orders) and orders <= {"group", "true"}
    facts: dict[str, Any] = {"block": block, "is_ordered": is_ordered, "static_inputs": is_static}
    return Quantisation("compressed-tensors", layouts, tuple(sorted(bits)), **facts)


def _awq(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "bits", (4,))
    version = next((given[key] for key in ("version", "format", "checkpoint_format") if given.get(key)), "gemm")
    _only({"version": str(version).lower()}, "version", ("gemm",))
    return Quantisation("awq", ("awq",), (4,), _group(given))


def _gptq(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "bits", (4, 8))
    form = given.get("checkpoint_format") or given.get("format")
    _only({"checkpoint_format": form}, "checkpoint_format", ("gptq", "gptq_v2", None))
    meta = given.get("meta")
    _refuse_rotation(given, meta)
    shift = 0 if form == "gptq_v2" else 1
    # Rules by module change bits and groups: the tensors say them.
    facts: dict[str, Any] = {"zero_shift": shift, "is_ordered": given.get("desc_act") is True}
    if given.get("dynamic"):
        return Quantisation("gptq", ("gptq",), **facts)
    return Quantisation("gptq", ("gptq",), (int(given["bits"]),), _group(given), **facts)


def _auto_round(given: Mapping[str, Any]) -> Quantisation:
    _only(given, "packing_format", tuple(_AUTO_ROUND))
    layout, shift = _AUTO_ROUND[given["packing_format"]]
    return Quantisation("auto-round", (layout,), zero_shift=shift)


def _bitsandbytes(given: Mapping[str, Any]) -> Quantisation:  # noqa: ARG001
    return Quantisation("bitsandbytes", ("bnb4", "bnb8"))


def _mxfp4(given: Mapping[str, Any]) -> Quantisation:  # noqa: ARG001
    """Experts alone, in blocks of 32."""
    return Quantisation("mxfp4", ("mxfp4",))


def _msmodelslim(given: Mapping[str, Any]) -> Quantisation:
    kinds = given.get("kinds", ())
    for kind in kinds:
        _only({"kind of tensors": kind}, "kind of tensors", ("FLOAT", *_STATIC_KINDS, "W8A8_DYNAMIC"))
    _refuse_rotation(given)
    if given.get("norm_bias"):
        raise ModelError(
            f"quant_model_description names {given['norm_bias']}, by which msmodelslim moves outliers of activations; "
            f"that is not served: quantise without anti-outlier, or {HELP}"
        )
    return Quantisation("msmodelslim", ("int8",), static_inputs=any(kind in _STATIC_KINDS for kind in kinds))


def _gguf(given: Mapping[str, Any]) -> Quantisation:  # noqa: ARG001
    """The file's own types say all."""
    return Quantisation("gguf", ())


def _refuse_rotation(*parts: Any) -> None:
    """Adapters are for weights as they were."""
    if any(isinstance(part, dict) and part.get("rotation") for part in parts):
        raise ModelError(f"the checkpoint's quantisation has rotated weights, which are not served: {HELP}")


def _group(given: Mapping[str, Any]) -> int:
    size = given.get("group_size", given.get("q_group_size", 128))
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ModelError(f"config.json's quantisation must give group_size as a positive integer or -1, not {size!r}")
    return size


def _pair(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # as compressed-tensors wrote it once: "128x128"
        value = [int(side) for side in value.split("x") if side.isdecimal()]
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
        raise ModelError(
            f"config.json's quantisation must give a block as two positive integers, and has {value!r:.80}"
        )
    return value[0], value[1]


def _only(given: Mapping[str, Any], name: str, served: tuple[object, ...]) -> None:
    """Raises ModelError for another value of the field; None in `served`: it may be left out."""
    value = given.get(name)
    if isinstance(value, bool) or value not in served:
        named = ", ".join(str(one) for one in served if one is not None)
        raise ModelError(f"config.json's quantisation has the {name} {value!r:.80}; served is {named}: {HELP}")
