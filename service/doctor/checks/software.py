"""Sections on what is installed, what is set, and what is known to go wrong with it."""

from __future__ import annotations

import importlib
import os
import platform
import re
from typing import Any

from service import server_version
from service.doctor.checks.host import read_host
from service.doctor.checks.known import compiler_facts, known_problems
from service.doctor.report import Examination, Section
from service.settings import Settings

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_PREFIXES = ("ASCEND_", "TRITON_", "HCCL_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "KMP_", "MULTILORA_")
_NAMES = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TASK_QUEUE_ENABLE",
    "CPU_AFFINITY_CONF",
    _AUTOLOAD,
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "ATB_HOME_PATH",
    "MALLOC_ARENA_MAX",
    "CC",
    "CXX",
)
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_MAX_VALUE_CHARACTERS = 400  # images set variables of a page, as NVIDIA_REQUIRE_CUDA


def look_at_versions(examination: Examination) -> Section:
    """Everything that is installed, and the known problems."""
    section = Section("versions", "Versions")
    torch_cuda = import_torch(examination)
    host = read_host(torch_cuda, examination.import_errors)
    have = host.distributions
    section.facts = {
        "multilora": server_version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {_release()} {platform.machine()}",
        "torch": have.get("torch"),
        "torch_cuda": host.torch_cuda,
        "torch_npu": have.get("torch_npu"),
        "triton": have.get("triton"),
        "triton_ascend": have.get("triton-ascend"),
        "cann": host.cann,
        "triton_compiler": compiler_facts(host),
        "npu_driver": host.npu_driver,
        "cuda_driver": host.cuda_driver,
        "numpy": have.get("numpy"),
        "safetensors": have.get("safetensors"),
        "tokenizers": have.get("tokenizers"),
    }
    section.findings = known_problems(host, examination.device_type)
    _check_our_packages(section)
    return section


def look_at_environment(examination: Examination) -> Section:
    """Variables that change what is served, or how fast."""
    names = sorted(name for name in os.environ if name in _NAMES or name.startswith(_PREFIXES))
    section = Section("environment", "Environment")
    section.facts = {name: _value(name) for name in names if name != "MULTILORA_API_KEY"}
    known = {f"MULTILORA_{name.upper()}" for name in Settings.model_fields} | {"MULTILORA_URL", "MULTILORA_API_KEY"}
    for name in names:
        if name.startswith("MULTILORA_") and name not in known:
            section.find("note", "unknown-setting", f"{name} is no setting.", "See multilora serve --help.")
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), len(os.sched_getaffinity(0))
    if threads.isdigit() and int(threads) > cores and examination.device_type == "cpu":
        section.find(
            "warning", "too-many-threads",
            f"OMP_NUM_THREADS is {threads}, and this process may use {cores} cores: threads wait for one another.",
            f"Set it to {cores}, or leave it unset.",
        )  # fmt: skip
    return section


def _release() -> str:
    """Numbers of the kernel's version; what follows them is a builder's own."""
    return re.split(r"[^\d.]", platform.release())[0]


def _value(name: str) -> str:
    if any(word in name for word in _SECRET_WORDS):
        return "(set)"
    value = os.environ[name]
    if len(value) <= _MAX_VALUE_CHARACTERS:
        return value
    return f"{value[:_MAX_VALUE_CHARACTERS]}... ({len(value):,} characters)"


def import_torch(examination: Examination) -> str | None:
    """Import torch, then torch_npu by itself: what torch would load on its own says less when it fails. Returns the
    CUDA version that torch was built for."""
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        try:
            import torch
        except Exception as error:
            examination.import_errors["torch"] = _first_line(error)
            return None
        # As the server does: torch by itself unless told not to, `prepare` where an NPU is asked for or looked for.
        if before != "0" or examination.device_type in ("npu", "auto"):
            _import_torch_npu(examination)
        _find_device(examination)
    finally:
        # torch_npu may set it too, and what is started from here must see what the server would.
        if before is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = before
    built_for: Any = torch.version.cuda
    return built_for


def _find_device(examination: Examination) -> None:
    """Resolve the device "auto". It stays where `kernels` is not our package, which is a finding of its own."""
    try:
        from kernels.platform import find_device
    except ImportError:
        return
    examination.device = find_device(examination.device)


def _import_torch_npu(examination: Examination) -> None:
    try:
        importlib.import_module("torch_npu")  # registers the device
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            examination.import_errors["torch_npu"] = _first_line(error)
    except Exception as error:
        examination.import_errors["torch_npu"] = _first_line(error)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _check_our_packages(section: Section) -> None:
    from service.start_check import StartError, check_kernels_package

    try:
        check_kernels_package()
    except StartError as error:
        section.find("error", "kernels-package", str(error))
