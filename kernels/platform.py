"""Which device this is, how large it is, and which implementation serves each op there. Data in one place.

An implementation is named after its module: `kernels/<op>/<implementation>.py`, with what it states about itself
(`kernels/contract.py`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, ModuleType

import torch

from kernels.ascend_chips import chip_of
from kernels.contract import Contract, combined

log = logging.getLogger(__name__)

# The products of a CPU take rows as they are: ranks of 4, the least that people train with, pay for no others. Less
# would leave ranges of equal ranks at uneven distances, which a batch has to gather.
CPU_ROW_ALIGNMENT = 4

DEVICE_NODES = Path("/dev")

# Wished-for implementation of each op by device type, and what else is known there.
IMPLEMENTATIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cpu": {
        "lora": ("cpu", "reference"),
        "lora_window": ("reference",),
        "causal_conv1d": ("cpu", "reference"),
        "gated_delta": ("any_device", "reference"),
        "mamba2": ("any_device", "reference"),
        "experts": ("any_device", "reference"),
        "expert_lora": ("any_device", "reference"),
        "paged_attention": ("sdpa", "reference"),
        "linear": ("cpu", "reference"),
        "sampling": ("cpu", "reference"),
        "rms_norm": ("reference",),
        "rotary_kv": ("cpu", "reference"),
        "row_scatter": ("reference",),
        "swiglu": ("reference",),
    },
    "cuda": {
        "lora": ("triton_cuda", "any_device", "reference"),
        "lora_window": ("triton_cuda", "reference"),
        "causal_conv1d": ("triton_cuda", "any_device", "reference"),
        "gated_delta": ("triton_cuda", "any_device", "reference"),
        "mamba2": ("any_device", "reference"),
        "experts": ("triton_cuda", "grouped", "any_device", "reference"),
        "expert_lora": ("triton_cuda", "any_device", "reference"),
        "paged_attention": ("triton_cuda", "sdpa", "reference"),
        "linear": ("triton_cuda", "reference"),
        "sampling": ("triton_cuda", "any_device", "reference"),
        "rms_norm": ("triton_cuda", "reference"),
        "rotary_kv": ("triton_cuda", "reference"),
        "row_scatter": ("triton_cuda", "reference"),
        "swiglu": ("triton_cuda", "reference"),
    },
    "npu": {
        "lora": ("triton_ascend", "any_device", "reference"),
        "lora_window": ("triton_ascend", "reference"),
        "causal_conv1d": ("triton_ascend", "any_device", "reference"),
        "gated_delta": ("triton_ascend", "triton_ascend_vector", "any_device", "reference"),
        "mamba2": ("any_device", "reference"),
        "experts": ("npu", "any_device", "reference"),
        "expert_lora": ("triton_ascend", "any_device", "reference"),
        "paged_attention": ("npu_heads_first", "npu", "gathered", "reference"),
        "linear": ("npu", "reference"),
        "sampling": ("any_device", "reference"),
        "rms_norm": ("npu", "reference"),
        "rotary_kv": ("triton_ascend", "npu", "reference"),
        "row_scatter": ("reference",),
        "swiglu": ("npu", "reference"),
    },
}


# Regimes of an op that may be served by another implementation than decode steps, which are every op's own regime (""):
# one that does not work for prompts, or for windows, keeps what it is good at. By the probe's cases.
REGIME_OF_CASE: Mapping[str, str] = {
    "lora_linear_many": "many",
    "causal_conv1d_prefill": "prefill",
    "gated_delta_prefill": "prefill",
    "paged_attention": "mixed",
    "paged_attention_window_decode": "window",
    "paged_attention_window": "mixed_window",
}
# For people.
REGIMES: Mapping[str, str] = {
    "": "decode steps",
    "many": "steps of many tokens",
    "prefill": "prompts",
    "mixed": "steps with prompts",
    "window": "decode steps with windows",
    "mixed_window": "steps with prompts and windows",
}
# Implementations of attention for which caches lie head by head (`kernels/paged_attention/cache_layout.py`). Caches lie
# one way, so that these serve all regimes or none.
HEADS_FIRST = frozenset({"npu_heads_first"})
# Most elements of the keys of one layer's cache that an implementation of attention takes, where it has such a limit.
MAX_CACHE_ELEMENTS: Mapping[str, int] = {"npu_heads_first": 2**31 - 1, "npu": 2**31 - 1}
# Ops and implementations of captured steps on an NPU.
DECODE_REGIMES = ("", "window")
# LoRA's kernels for few tokens serve so many, those for many tokens the rest.
FEW_TOKENS: Mapping[str, int] = {"npu": 64, "cuda": 128, "cpu": 128}


class BackendError(ValueError):
    """A device or an implementation was asked for that this machine does not have."""


@dataclass(frozen=True, slots=True)
class Platform:
    """One device as the ops see it.

    device          torch device type: "cpu", "cuda" or "npu"
    kind            the vendor's name of the chip; picks the launch table
    num_cores       cores that a persistent grid fills (streaming multiprocessors, vector cores, threads)
    on_chip_bytes   memory one program may plan for (shared memory, unified buffer); 0 where that means nothing
    row_alignment   an adapter's row range starts at, and is as long as, a multiple of this
    implementations op -> name of the implementation that serves it
    fallbacks       one sentence for each reason why ops are not served by the wished-for implementation
    passed_over     op -> why the table's first choice was passed over before anything was probed, a sentence
    native_bfloat16 whether bfloat16 matrix products run at full speed
    regimes         "op/regime" -> implementation, where it is not that of `implementations`
    batch_invariant whether a token's numbers are the same whatever else is in its step (`kernels/batch_invariant`)
    """

    device: str
    kind: str
    num_cores: int
    on_chip_bytes: int
    row_alignment: int
    implementations: Mapping[str, str]
    fallbacks: tuple[str, ...] = field(default=())
    passed_over: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    native_bfloat16: bool = True
    regimes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    batch_invariant: bool = field(default=False, kw_only=True)

    def with_fallback(
        self, op: str, implementation: str, reason: str | None, regimes: Mapping[str, str] = MappingProxyType({})
    ) -> Platform:
        """This platform with `op` served by another implementation.

        reason   one sentence that names the op; None: it was served by a fallback, of a model before, and is no more
        regimes  of the op -> implementation, where it is another one still
        """
        others = {key: name for key, name in self.regimes.items() if key.partition("/")[0] != op}
        own = {f"{op}/{regime}": name for regime, name in regimes.items()}
        return replace(
            self,
            implementations=MappingProxyType({**self.implementations, op: implementation}),
            fallbacks=self.fallbacks if reason is None else (*self.fallbacks, reason),
            regimes=MappingProxyType({**others, **own}),
        )

    def serving(self, op: str, regime: str = "") -> str:
        """Name of the implementation."""
        return self.regimes.get(f"{op}/{regime}", self.implementations[op])

    def regimes_of(self, op: str) -> tuple[str, ...]:
        """The op's own, and those that are served by another implementation."""
        return ("", *(name.partition("/")[2] for name in self.regimes if name.partition("/")[0] == op))

    @property
    def window_rows(self) -> bool:
        """Whether the rows of A stand behind the base weights, so that the base product can yield h.

        Only where weights are held as they are, and a kernel adds the expand to such a product.
        """
        return self.implementations["linear"] != "cpu" and self.implementations["lora_window"] != "reference"

    @property
    def swaps_at_once(self) -> bool:
        """Whether one launch has rows of all projections of a group change places; else it takes as long as steps."""
        return self.implementations["row_scatter"] != "reference"

    @property
    def kv_heads_first(self) -> bool:
        """Whether a block of the paged caches lies head by head, and not token by token."""
        return self.implementations["paged_attention"] in HEADS_FIRST

    @property
    def max_cache_elements(self) -> int | None:
        """Most elements of the keys of one layer's paged cache; None: any number."""
        serving = {self.serving("paged_attention", regime) for regime in self.regimes_of("paged_attention")}
        return min((MAX_CACHE_ELEMENTS[name] for name in serving & MAX_CACHE_ELEMENTS.keys()), default=None)

    def row_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype in which LoRA rows are held beside a model of `model_dtype`.

        A CPU holds them in float32: exact, without a conversion in every step, and, for products as small as these,
        faster even where the CPU has bfloat16 instructions.
        """
        return torch.float32 if self.device == "cpu" else model_dtype


def implementation(op: str, device: torch.device, regime: str = "") -> ModuleType:
    """The module that serves `op` on `device` in this process; the op's own for a regime that no other serves."""
    name = op
    if regime and f"{op}/{regime}" in in_use(device).regimes:
        name = f"{op}/{regime}"
    module = _modules.get((name, device.type))
    if module is None:
        module = importlib.import_module(f"kernels.{op}.{in_use(device).serving(op, regime)}")
        _modules[name, device.type] = module
    return module


def contract(op: str, device: torch.device, regimes: Sequence[str] | None = None) -> Contract:
    """The contract of the module that serves `op` on `device`; the combined one where several modules do.

    regimes  those of the op that matter; None: all
    """
    named = in_use(device).regimes_of(op)
    wanted = [regime for regime in named if regimes is None or regime in regimes]
    modules = dict.fromkeys(implementation(op, device, regime) for regime in wanted)
    return combined([module.CONTRACT for module in modules])


def in_use(device: torch.device) -> Platform:
    """The platform that serves tensors on `device` in this process: the installed one, else what `detect` finds."""
    return _installed.get(device.type) or detect(str(device))


def install(platform: Platform, device_type: str | None = None) -> None:
    """Let `platform` serve all tensors on its kind of device in this process, which uses one device of a kind.

    device_type  serve tensors there instead: lets tests run an NPU's path on a CPU
    """
    _installed[device_type or platform.device] = platform
    _modules.clear()


@contextmanager
def installed(platform: Platform, device_type: str | None = None) -> Iterator[None]:
    """`install` for the length of a block."""
    kind = device_type or platform.device
    before = _installed.get(kind)
    install(platform, kind)
    try:
        yield
    finally:
        if before is None:
            del _installed[kind]
            _modules.clear()
        else:
            install(before, kind)


def find_device(wanted: str) -> str:
    """The device that `wanted` names; of "auto" an NPU if torch sees one, else a CUDA device, else the CPU."""
    if wanted != "auto":
        return wanted
    if importlib.util.find_spec("torch_npu") is not None and _sees_npu():
        return "npu"
    if torch.cuda.is_available():
        return "cuda"
    for vendor, nodes in (("Ascend NPU", "davinci[0-9]*"), ("NVIDIA GPU", "nvidia[0-9]*")):
        if any(DEVICE_NODES.glob(nodes)):
            log.warning("This machine has an %s that torch %s does not see; the CPU serves.", vendor, torch.__version__)
    return "cpu"


def _sees_npu() -> bool:
    try:
        return bool(importlib.import_module("kernels.ascend_runtime").torch_npu().npu.is_available())
    except BackendError as error:
        log.warning("%s", error)
        return False


def prepare(device: torch.device | str) -> None:
    """Make `device` ("npu:1"; torch knows that name with torch_npu only) this process's, before anything runs on it.

    The device of a thread is its own: a further thread that submits work calls torch's `set_device` first.

    Raises BackendError if torch_npu is needed and missing. A device that is not there is `detect`'s to refuse.
    """
    kind, _, index = str(device).partition(":")
    if kind == "npu":
        importlib.import_module("kernels.ascend_runtime").prepare(str(device))
    elif kind == "cuda" and index and torch.cuda.is_available():
        torch.cuda.set_device(int(index))


_installed: dict[str, Platform] = {}
_modules: dict[tuple[str, str], ModuleType] = {}


def detect(device: str, wanted: Mapping[str, str] | None = None) -> Platform:
    """Describe the device that `device` ("cpu", "cuda", "cuda:1", "npu:0") names.

    wanted  op -> implementation, for callers that insist on another one than the table's.

    Raises BackendError when the device is absent, an op or implementation is unknown, or a kernel language that was
    asked for is missing. What of the table's own choice is missing, `kernels.probe` finds out.
    """
    return _detect(device, tuple(sorted((wanted or {}).items())))


def forget_detected() -> None:
    """Look at devices and tables again when they are asked for next: they are others now, as in tests."""
    _detect.cache_clear()


@functools.cache
def _detect(device: str, wanted: tuple[tuple[str, str], ...]) -> Platform:
    device_type = device.partition(":")[0]
    if device_type not in IMPLEMENTATIONS:
        raise BackendError(f"unknown device {device!r}; known are {', '.join(IMPLEMENTATIONS)}")
    implementations = {op: names[0] for op, names in IMPLEMENTATIONS[device_type].items()}
    for op, name in wanted:
        known = IMPLEMENTATIONS[device_type].get(op)
        if known is None:
            raise BackendError(f"unknown op {op!r}; known are {', '.join(implementations)}")
        if name not in known:
            raise BackendError(
                f"op {op!r} has no implementation {name!r} on {device_type}; known are {', '.join(known)}"
            )
        implementations[op] = name
    needs_triton = [op for op, name in wanted if name.startswith("triton_")]
    if needs_triton and importlib.util.find_spec("triton") is None:
        raise BackendError(f"Triton was asked for {', '.join(needs_triton)}, and is not installed")
    describe = {"cpu": _describe_cpu, "cuda": _describe_cuda, "npu": _describe_npu}[device_type]
    return describe(device, MappingProxyType(implementations))


def _describe_cpu(_device: str, implementations: Mapping[str, str]) -> Platform:
    native_bfloat16 = _cpu_has_bfloat16()
    without = "this CPU has no bfloat16 matrix instructions: bfloat16 weights are held and multiplied in float32"
    fallbacks = () if native_bfloat16 else (without,)
    if fallbacks:
        log.info("%s", without)
    return Platform(
        "cpu", "cpu", torch.get_num_threads(), 0, CPU_ROW_ALIGNMENT, implementations, fallbacks, native_bfloat16
    )


def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def _describe_cuda(device: str, implementations: Mapping[str, str]) -> Platform:
    if not torch.cuda.is_available():
        raise BackendError(f"device {device!r} was asked for, but torch sees no CUDA device (is this a CPU build?)")
    properties = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
    return Platform("cuda", properties.name, properties.multi_processor_count, shared_bytes, 16, implementations)


def _describe_npu(device: str, implementations: Mapping[str, str]) -> Platform:
    runtime = importlib.import_module("kernels.ascend_runtime")
    npu = runtime.torch_npu().npu
    if not npu.is_available():
        raise BackendError(
            f"Device {device!r} was asked for, but torch_npu sees no NPU: `npu-smi info` must list one, and a "
            "container needs its /dev/davinci* (see docs/ascend.md)."
        )
    properties = npu.get_device_properties(device)
    chip = chip_of(properties.name)
    num_cores = int(getattr(properties, "vector_core_num", 0) or chip.num_vector_cores)
    fallbacks: tuple[str, ...] = ()
    passed_over: dict[str, str] = {}
    fault = runtime.triton_fault()
    if not chip.has_triton:
        fault = f"Triton kernels are off: triton-ascend {runtime.SERVED_VERSION}x does not serve {properties.name}."
    if fault is not None:
        passed_over = {op: fault for op, name in implementations.items() if name.startswith("triton_")}
        implementations = _without_triton("npu", implementations)
        fallbacks = (fault,)
        log.warning("%s", fault)
    return Platform(
        "npu",
        properties.name,
        num_cores,
        chip.unified_buffer_bytes,
        16,
        implementations,
        fallbacks,
        passed_over=MappingProxyType(passed_over),
        native_bfloat16=chip.has_bfloat16,
    )


def _without_triton(device_type: str, implementations: Mapping[str, str]) -> Mapping[str, str]:
    """The same with the table's next choice for each op that Triton was to serve."""
    table = IMPLEMENTATIONS[device_type]
    return MappingProxyType(
        {
            op: next(other for other in table[op] if not other.startswith("triton_"))
            if name.startswith("triton_")
            else name
            for op, name in implementations.items()
        }
    )
