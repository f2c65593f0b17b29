"""Software installed on this host, read without the libraries where these may be broken."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from service.machine import DEVICE_NODES, DEVICES

_DISTRIBUTIONS = ("torch", "torch_npu", "triton", "triton-ascend", "numpy", "safetensors", "tokenizers", "pybind11")
_DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")
_TOOL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Compiler:
    """CANN's compiler of Triton kernels.

    version  "1.2.0"; None where it reports none
    help     all that --help prints
    """

    version: str | None
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts that the known problems are looked for in. None and empty: not there.

    distributions   name -> version of what pip has installed
    triton_dir      directory that `import triton` finds
    device_nodes    /dev nodes of NPUs -> whether this user may open them
    programs        compilers and tools -> path
    compiler        version and help of bishengir-compile; None where it is absent, fails or hangs
    torch_cuda      CUDA version that torch was built for
    import_errors   torch or torch_npu -> why it cannot be imported, one sentence
    """

    python: tuple[int, int] = (sys.version_info.major, sys.version_info.minor)
    machine: str = platform.machine()
    distributions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str | None] = field(default_factory=dict)
    compiler: Compiler | None = None
    device_nodes: Mapping[str, bool] = field(default_factory=dict)
    triton_dir: Path | None = None
    cann: str | None = None
    npu_driver: str | None = None
    cuda_driver: str | None = None
    torch_cuda: str | None = None
    import_errors: Mapping[str, str] = field(default_factory=dict)
    has_libatb: bool = False
    has_imported_torch_npu: bool = False


def read_host(torch_cuda: str | None = None, import_errors: Mapping[str, str] | None = None) -> Host:
    """Look at this machine. Starts no device."""
    environment = dict(os.environ)
    return Host(
        distributions=_distributions(),
        environment=environment,
        programs={name: shutil.which(name) for name in ("clang++", "g++", "bishengir-compile", "npu-smi")},
        compiler=_compiler(),
        device_nodes=_device_nodes(),
        triton_dir=_package_dir("triton"),
        cann=installed_cann(environment),
        npu_driver=_npu_driver(),
        cuda_driver=_cuda_driver(),
        torch_cuda=torch_cuda,
        import_errors=import_errors or {},
        has_libatb=_has_library("libatb.so", environment),
        has_imported_torch_npu="torch_npu" in sys.modules,
    )


def _distributions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _package_dir(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _device_nodes() -> dict[str, bool]:
    nodes = sorted(node for pattern in DEVICE_NODES["npu"] for node in DEVICES.glob(pattern))
    return {str(node): os.access(node, os.R_OK | os.W_OK) for node in nodes}


def installed_cann(environment: Mapping[str, str]) -> str | None:
    """From the toolkit that the environment names, or the usual place."""
    named = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    root = Path(named or "/usr/local/Ascend/ascend-toolkit/latest")
    # The toolkit's own file first, then those of other packages that bring it: what is installed differs by release.
    patterns = ("*/ascend_toolkit_install.info", "ascend_toolkit_install.info", "*/ascend_*_install.info",
                "ascend_*_install.info", "version.cfg", "version.info")  # fmt: skip
    files = (path for pattern in patterns for path in sorted(root.glob(pattern)))
    return next((version for path in files if (version := version_in(path))), None)


def _compiler() -> Compiler | None:
    shown = _output_of("bishengir-compile", "--help")
    found = re.search(r"bishengir-compile\s+([0-9][\w.]*)", _output_of("bishengir-compile", "--version"))
    return Compiler(found.group(1) if found else None, shown) if shown else None


def _npu_driver() -> str | None:
    said = _output_of("npu-smi", "info")
    found = re.search(r"Version:\s*([0-9][\w.]*)", said)
    return found.group(1) if found else version_in(_DRIVER_VERSION_FILE)


def _cuda_driver() -> str | None:
    said = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    return said[0] if said and said[0][0].isdigit() else None


def version_in(path: Path) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"version\w*\s*=\s*\[?[^0-9\n]*([0-9]+\.[0-9][\w.]*)", text, re.IGNORECASE)
    return found.group(1) if found else None


def _output_of(*command: str) -> str:
    """The output of a tool; empty where it is absent, fails or hangs, as a driver's tool may."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _has_library(name: str, environment: Mapping[str, str]) -> bool:
    return any((Path(path) / name).exists() for path in environment.get("LD_LIBRARY_PATH", "").split(":") if path)
