"""From a Hugging Face directory to a model that runs."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from adapters.layout import BaseLayout
from kernels.platform import in_use
from service.models.checkpoint.checkpoint import OpenTensors, TensorSource, compare, open_checkpoint
from service.models.families import model_spec
from service.models.heap import trim_heap
from service.models.layers.decoder import Decoder
from service.models.layers.weights import Weights, WeightsKind
from service.models.layouts import layout_in
from service.models.spec.config_json import ModelError, read_config
from service.models.spec.model_spec import ModelSpec
from service.models.spec.quantisation import Quantisation, quantisation_of

log = logging.getLogger(__name__)

# The part of a CPU's free memory that weights may take in floats.
_FLOATS_SHARE = 0.75
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready to run, and what it is.

    dtype             of activations and caches
    num_weight_bytes  memory that the weights take, as they are held
    """

    model: Decoder
    spec: ModelSpec
    layout: BaseLayout
    dtype: torch.dtype
    device: torch.device
    num_weight_bytes: int


def load_model(
    model_dir: Path,
    *,
    dtype: str = "auto",
    weights: WeightsKind = "auto",
    device: str = "cpu",
    rounds_prompts: bool = False,
    open_tensors: OpenTensors = open_checkpoint,
    free_bytes: int | None = None,
) -> LoadedModel:
    """Load the checkpoint in `model_dir`. Raises ModelError with one sentence that names what is wrong with it.

    dtype         "float32", "bfloat16", "float16", or "auto": the checkpoint's, but float32 for a float16 one on a CPU
    weights       of layers: "auto": as the checkpoint has them; "bf16": in the model's dtype; else quantised so
    rounds_prompts
                  products of prompts round inputs to float8 where weights are: `kernels.linear.ops.round_prompts`
    open_tensors  gives the tensors; config.json is read from `model_dir` in any case
    free_bytes    of a CPU; where floats take too much of it, codes are held though they are slower; None: enough
    """
    started = time.monotonic()
    spec = model_spec(read_config(model_dir))
    layout = layout_in(model_dir)
    with open_tensors(model_dir) as checkpoint:
        compute_dtype, reason = choose_dtype(dtype, device, spec, checkpoint)
        found = compare(spec, checkpoint)
        _refuse(found.faults)
        loading = Weights(
            checkpoint,
            spec,
            layout,
            compute_dtype,
            torch.device(device),
            weights,
            rounds_prompts=rounds_prompts,
            saves_memory=_is_short(spec, checkpoint, compute_dtype, free_bytes),
        )
        model = Decoder(loading, spec)
    trim_heap()
    log.info("computing in %s, %s", str(compute_dtype).removeprefix("torch."), reason)
    if found.not_served:
        parts = ", ".join(f"{prefix}*" for prefix in found.not_served)
        log.info("parts of the checkpoint that are not served: %s", parts)
    if found.warning is not None:
        log.warning("%s", found.warning)
    seconds = time.monotonic() - started
    log.info("loaded %s: %.1f MiB of weights in %.2f s", spec.model_type, loading.num_bytes / 2**20, seconds)
    _say_codes(loading, quantisation_of(read_config(model_dir)), weights)
    if rounds_prompts:
        _say_rounding(loading)
    return LoadedModel(model, spec, layout, compute_dtype, torch.device(device), loading.num_bytes)


def choose_dtype(wanted: str, device: str, spec: ModelSpec, checkpoint: TensorSource) -> tuple[torch.dtype, str]:
    """The model's dtype on this device, and why, as the end of a sentence. Raises ModelError if it is not served."""
    has_bfloat16 = torch.device(device).type != "npu" or in_use(torch.device(device)).native_bfloat16
    if wanted != "auto":
        if wanted not in _DTYPES:
            raise ModelError(f"the dtype {wanted!r} is not served; choose auto, {', '.join(_DTYPES)}")
        if wanted == "bfloat16" and not has_bfloat16:
            raise ModelError("this NPU does not compute in bfloat16; choose --dtype float16 or auto")
        return _DTYPES[wanted], "as asked for"
    stored = spec.checkpoint_dtype or checkpoint.dtype(f"{spec.prefix}embed_tokens.weight")
    if stored not in _DTYPES:
        raise ModelError(f"the checkpoint's dtype {stored!r} is not served; name one of {', '.join(_DTYPES)} instead")
    if stored == "float16" and torch.device(device).type == "cpu":
        return torch.float32, "since the checkpoint's float16 is slow on a CPU (--dtype float16 insists on it)"
    if stored == "bfloat16" and not has_bfloat16:
        return torch.float16, "since this NPU does not compute in the checkpoint's bfloat16"
    return _DTYPES[stored], "the checkpoint's dtype"


def _is_short(spec: ModelSpec, checkpoint: TensorSource, dtype: torch.dtype, free_bytes: int | None) -> bool:
    """Whether floats on a CPU would leave caches and adapters less than a quarter of the free memory."""
    if free_bytes is None:
        return False
    held = dtype if dtype == torch.bfloat16 and in_use(torch.device("cpu")).native_bfloat16 else torch.float32
    values = sum(math.prod(shape) for shape in spec.tensors(checkpoint).values())
    return values * held.itemsize > free_bytes * _FLOATS_SHARE


def _say_codes(loading: Weights, quantisation: Quantisation | None, weights: WeightsKind) -> None:
    rest = loading.num_codes - loading.num_held_codes
    if loading.num_codes:
        why = f", {rest} dequantised, since this device has no kernel for their codes, or a slower one" if rest else ""
        if loading.saves_memory:
            why += "; floats would take most of the free memory"
        log.info("quantised weights: %d in their codes%s", loading.num_held_codes, why)
    if rest and loading.saves_memory and loading.dtype != torch.bfloat16:
        log.warning("--dtype bfloat16 would hold weights of 4-bit integers in their codes, in an eighth of the memory")
    if quantisation is None:
        return
    if weights not in ("auto", "bf16"):
        method = quantisation.method
        log.warning("--weights %s is for floats: what the checkpoint has in codes keeps these (%s)", weights, method)
    if quantisation.static_inputs:
        log.info("the checkpoint's scales of activations are left: these are not rounded, or on NPUs by token")


def _say_rounding(loading: Weights) -> None:
    """Raises ModelError where no product rounds."""
    if not loading.num_rounding:
        raise ModelError(
            "--fp8-activations needs weights in float8 with a scale for each output, not for blocks, and "
            "computation in bfloat16, and no projection has these here: serve without it, or with --weights fp8"
        )
    others = len(loading.projections) - loading.num_rounding
    log.info(
        "fp8 activations: in steps of many tokens %d projections round their inputs, %d others do not",
        loading.num_rounding,
        others,
    )


def _refuse(faults: tuple[str, ...]) -> None:
    """Raises ModelError with the first of them, if any."""
    if faults:
        more = f" (and {len(faults) - 1} more: see `multilora doctor`)"
        raise ModelError(faults[0] + (more if len(faults) > 1 else ""))
