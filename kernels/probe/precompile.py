"""Parallel compilation of a probe's kernels before it runs: one after the other, they take half a minute."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace

import torch

from kernels.compile_ahead import Variant, asked_for, can_compile_ahead, fill_cache, is_cached
from kernels.platform import Platform, installed
from kernels.probe.cases.registry import Case, cases_of
from kernels.probe.cases.tensors import Place
from kernels.probe.run import candidates
from kernels.shapes import ProbeShapes

log = logging.getLogger(__name__)

# They look up what kernels have computed, which is whatever memory held where nothing is launched. Their kernels are
# few.
_LEFT_OUT = ("sampling", "experts")
# Has kernels in every model, and its cases take no time to prepare.
_FIRST = "rms_norm"


def compile_ahead_of(platform: Platform, device: torch.device, ops: Collection[str], shapes: ProbeShapes) -> None:
    """Fill Triton's cache with what the cases of the ops launch on the implementations that are tried first.

    Nothing is launched. Where the cache has the kernels of one small case it is taken to have all, as it does after a
    start with this model.
    """
    if not can_compile_ahead(device.type):
        return
    variants: dict[Variant, None] = {}
    try:
        for call in _calls(platform, device, ops, shapes):
            asked = asked_for(call)
            if asked and not variants and all(is_cached(variant) for variant in asked):
                return
            variants.update(dict.fromkeys(asked))
        fill_cache(list(variants))
    except Exception:  # no more than a matter of time
        log.warning("kernels are compiled one after the other", exc_info=True)


def _calls(
    platform: Platform, device: torch.device, ops: Collection[str], shapes: ProbeShapes
) -> Iterator[Callable[[], None]]:
    for op in sorted(ops, key=lambda op: op != _FIRST):
        if op not in _LEFT_OUT:
            first = candidates(platform, op)[0]
            serving = replace(platform, implementations={**platform.implementations, op: first}, regimes={})
            for case in cases_of(op, shapes).values():
                yield functools.partial(_call, serving, device, case, shapes)


def _call(serving: Platform, device: torch.device, case: Case, shapes: ProbeShapes) -> None:
    """Run the case without launching. Its errors are ignored: the probe will raise them again."""
    place = Place(device, shapes.torch_dtype, shapes.torch_row_dtype)
    with suppress(Exception), installed(serving, device.type), torch.inference_mode():
        case(shapes, place)()
