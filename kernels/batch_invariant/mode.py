"""Batch invariance: a token's numbers do not depend on what else is in its step.

Ops that choose how to reduce by the size of a step would round a token differently beside others. Where the platform is
`batch_invariant`, a step runs within `batch_invariant_mode`, in which torch's matrix products and what else depends on
a tensor's size or a number's place in it are replaced by calls that do not; so no layer knows of it. Implementations
that are no torch calls look at `Platform.batch_invariant` themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.platform import BackendError, Platform, detect, in_use, install
from kernels.shapes import ProbeShapes

# Device type -> the module with its replacements, and implementations of ops that are made for it.
_REPLACEMENTS = {"cpu": "kernels.batch_invariant.cpu", "cuda": "kernels.batch_invariant.cuda"}
_IMPLEMENTATIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": dict.fromkeys(("paged_attention", "gated_delta", "mamba2"), "batch_invariant"),
    "cuda": dict.fromkeys(
        (
            *("lora", "paged_attention", "linear", "sampling", "rms_norm", "rotary_kv", "swiglu", "causal_conv1d"),
            "gated_delta",
        ),
        "triton_cuda",
    ),
}


class _Mode(TorchDispatchMode):
    """Calls the replacement of each torch operator that has one, instead of the operator."""

    def __init__(self, replacements: Mapping[object, Callable[..., Any]]) -> None:
        super().__init__()
        self._replacements = replacements

    def __torch_dispatch__(
        self, func: Any, _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        replacement = self._replacements.get(func)
        return (replacement or func)(*args, **(kwargs or {}))


def batch_invariant_mode(device: torch.device) -> AbstractContextManager[object]:
    """The mode in which a step's passes run; none where the platform is not batch-invariant."""
    if not in_use(device).batch_invariant:
        return nullcontext()
    return _Mode(replacing(device).REPLACEMENTS)


def replacing(device: torch.device) -> ModuleType:
    """The module with the replacements of a device that can be batch-invariant."""
    return importlib.import_module(_REPLACEMENTS[device.type])


def install_batch_invariance(device: str, *, wanted: bool) -> None:
    """Have this process's platform be batch-invariant, or not. Raises BackendError for a device that cannot be."""
    kind = torch.device(device).type
    if wanted and kind not in _REPLACEMENTS:
        raise BackendError(
            f"--batch-invariant is not served on {kind}: its results were never compared there; serve without it."
        )
    if in_use(torch.device(device)).batch_invariant == wanted:
        return
    platform = detect(device)
    if wanted:
        implementations = MappingProxyType({**platform.implementations, **_IMPLEMENTATIONS[kind]})
        platform = replace(platform, implementations=implementations, batch_invariant=True)
    install(platform, kind)


def refuse_model(platform: Platform, shapes: ProbeShapes) -> None:
    """Raises BackendError for a model with layers whose results depend on a step, on a batch-invariant platform."""
    if not platform.batch_invariant or platform.device == "cpu":
        return
    experts = shapes.experts if shapes.is_quantised else None
    layers = {"quantised experts": experts, "state-space layers": shapes.mamba2}
    found = [name for name, sizes in layers.items() if sizes is not None]
    if found:
        raise BackendError(
            f"--batch-invariant is not served on {platform.device} for models with {' and '.join(found)}; serve this "
            "one without it, or on a CPU."
        )


def refuse_fallbacks(platform: Platform) -> None:
    """Raises BackendError where the probe gave a batch-invariant platform other implementations."""
    if not platform.batch_invariant:
        return
    wanted = _IMPLEMENTATIONS[platform.device]
    failed = [op for op, name in wanted.items() if platform.implementations[op] != name]
    if failed or platform.regimes:
        raise BackendError(
            "--batch-invariant needs implementations that failed their probe here: "
            f"{', '.join(failed or platform.regimes)}; serve without it."
        )
