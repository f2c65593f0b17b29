"""Problems that others have met before, recognised by their traces, each with its cure.

Facts about Ascend come from the documentation and the issue trackers of torch_npu and triton-ascend; not verified on an
NPU.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from service.doctor.checks.host import Compiler, Host
from service.doctor.report import Finding, Level

_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
_REINSTALL_TRITON = (
    "pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend==3.2.0 pybind11, after all else"
)
# Entries of the runtime that CANN 9 has renamed or removed, by the beginning of their names.
_REMOVED_SYMBOL = "RT_LIMIT_TYPE_SIMT"
_WANTED_DRIVER = (25, 5)


# triton-ascend 3.2 builds as the text of `bishengir-compile --help` has it: whether it has these words.
_NEW_COMPILER, _REG_BASED = "limit-auto-multi-buffer-buffer", "reg-based"
# Versions of the compiler with which the kernels were compiled and checked.
KNOWN_COMPILERS = ("1.2.0",)
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


def compiler_facts(host: Host) -> dict[str, str] | None:
    """The compiler of Triton kernels, and what triton-ascend decides by two searches of its help; None without one."""
    if host.compiler is None:
        return None
    shown = host.compiler.help
    return {
        "bishengir_compile": host.compiler.version or "unknown",
        "known_here": ", ".join(KNOWN_COMPILERS),
        "triton_ascend_takes": "kernel.o" if _NEW_COMPILER in shown else "kernel_reloc.o",
        "triton_ascend_passes": "--reg-based=true" if _REG_BASED in shown else "--enable-hivm-compile=true",
    }


def known_problems(host: Host, device_type: str) -> list[Finding]:
    """Everything recognised on a host that is to serve on `device_type`."""
    return [finding for check in _CHECKS for finding in check(host, device_type)]


def _imports(host: Host, device_type: str) -> Iterator[Finding]:
    for name, error in host.import_errors.items():
        if name == "torch_npu":
            # torch imports it by itself, so every process of the server would fail, for any device.
            cure = f"{_SET_ENV}; to serve without an NPU, set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
            if any(word in error for word in ("libascendcl", "libhccl", "libge_runner", "libgraph", "libacl")):
                error += " CANN's libraries are not on LD_LIBRARY_PATH"
            if device_type == "npu" or host.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
                yield Finding("error", "torch-npu-broken", f"torch_npu cannot be imported: {error}.", cure)
        else:
            yield Finding("error", f"{name}-broken", f"{name} cannot be imported: {error}.", f"Install {name} again.")


def _absent_npu_parts(host: Host, device_type: str) -> Iterator[Finding]:
    if device_type != "npu":
        return
    if "torch_npu" not in host.distributions:
        torch = host.distributions.get("torch", "").partition("+")[0]
        yield Finding(
            "error", "torch-npu-missing", "torch_npu is not installed, so torch knows no NPU.",
            f"pip install torch_npu=={torch or '2.13.0'} beside the CPU build of torch of the same version.",
        )  # fmt: skip
    if host.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Finding(
            "warning", "autoload-off", "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading torch_npu; "
            "multilora loads it where an NPU is asked for, other programs may not.",
            "Unset it where an NPU is to be used.",
        )  # fmt: skip
    if host.cann is None:
        yield Finding(
            # A torch_npu that could be imported has found CANN's libraries.
            "warning" if host.has_imported_torch_npu else "error", "cann-missing",
            "No CANN toolkit was found (ASCEND_HOME_PATH names none).",
            f"Install CANN 9.1.0 or later, or {_SET_ENV}.",
        )  # fmt: skip
    elif _numbers(host.cann) < (9, 1):
        yield Finding(
            "warning", "cann-old",
            f"CANN {host.cann} is older than 9.1.0, the oldest that torch_npu 2.13 is reported to work with; which "
            "CANN 2.13.0 is made for was not found stated (docs/ascend.md).",
            "Install CANN 9.1.0 or later.",
        )  # fmt: skip


def _device_nodes(host: Host, device_type: str) -> Iterator[Finding]:
    if device_type != "npu":
        return
    if not any(re.fullmatch(r"/dev/davinci\d+", node) for node in host.device_nodes):
        yield Finding(
            "error", "no-davinci-node", "There is no /dev/davinci* node: no driver, or a container without devices.",
            "Check npu-smi info on the host; give the container --device /dev/davinci0 --device /dev/davinci_manager "
            "--device /dev/devmm_svm --device /dev/hisi_hdc.",
        )  # fmt: skip
    closed = [node for node, is_open in host.device_nodes.items() if not is_open]
    if closed:
        yield Finding(
            "error", "davinci-access", f"This user may not open {', '.join(closed)}.",
            "Add the user to the driver's group (UserGroup in /etc/ascend_install.info, usually HwHiAiUser); in a "
            "container: --group-add with that group's number.",
        )  # fmt: skip


def _versions(host: Host, device_type: str) -> Iterator[Finding]:
    have = host.distributions
    if "torch" in have and "torch_npu" in have:
        torch, torch_npu = _numbers(have["torch"]), _numbers(have["torch_npu"])
        if torch[:3] != torch_npu[:3]:
            yield Finding(
                _on_npu("error", device_type), "torch-npu-mismatch",
                f"torch_npu {have['torch_npu']} wants torch of the same version, and torch is {have['torch']}.",
                "Install the two in one version.",
            )  # fmt: skip
        if host.torch_cuda is not None:
            yield Finding(
                _on_npu("error", device_type), "torch-cuda-build",
                f"torch {have['torch']} is a CUDA build, which torch_npu refuses and which brings upstream's triton.",
                "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
            )  # fmt: skip
    if device_type == "npu" and host.npu_driver and _numbers(host.npu_driver) < _WANTED_DRIVER:
        yield Finding(
            "note", "npu-driver-old",
            f"The NPU driver is {host.npu_driver}; 25.5.0 or later is asked for (docs/ascend.md).",
            "Update the driver on the host (HDK).",
        )  # fmt: skip


def _triton(host: Host, device_type: str) -> Iterator[Finding]:
    have, level = host.distributions, _on_npu("warning", device_type)
    is_ascend = host.triton_dir is not None and (host.triton_dir / "backends" / "ascend").is_dir()
    if "triton-ascend" in have and not is_ascend:
        yield Finding(
            level, "triton-overwritten",
            "Upstream's triton was installed over triton-ascend: both lie in one directory, and the last one wins.",
            _REINSTALL_TRITON,
        )  # fmt: skip
    elif "triton-ascend" in have and "triton" in have:
        yield Finding(
            level, "triton-twice", "triton and triton-ascend are both installed, in one directory; removing either "
            "breaks the other.", _REINSTALL_TRITON,
        )  # fmt: skip
    if device_type != "npu":
        if device_type == "cuda" and "triton" not in have:
            yield Finding("warning", "triton-missing", "Triton is not installed: ops fall back to plain torch.",
                          "pip install triton, in the version that this torch names.")  # fmt: skip
        return
    if "triton-ascend" not in have:
        yield Finding("warning", "triton-ascend-missing",
                      "triton-ascend is not installed: LoRA and convolution fall back to plain torch. An Atlas 300I "
                      "(310P) has no Triton, and works this way.", _REINSTALL_TRITON)  # fmt: skip
        return
    yield from _triton_ascend(host, is_ascend)


def _triton_ascend(host: Host, is_ascend: bool) -> Iterator[Finding]:
    is_new = _numbers(host.cann or "9") >= (9,)
    if is_ascend and is_new and host.triton_dir is not None and _needs_patch(host.triton_dir):
        yield Finding(
            "warning", "triton-unpatched",
            f"triton-ascend {host.distributions['triton-ascend']} is not patched for CANN 9 and later, which lacks "
            f"{_REMOVED_SYMBOL}*: its first compilation fails.",
            "Run python deploy/image/patch_triton_ascend.py once, as the image has done, then remove the Triton cache "
            "(~/.triton/cache or TRITON_CACHE_DIR).",
        )  # fmt: skip
    if "pybind11" not in host.distributions:
        yield Finding("warning", "pybind11-missing", "triton-ascend needs pybind11, and does not say so.",
                      "pip install pybind11")  # fmt: skip
    if not (host.programs.get("clang++") or host.programs.get("g++")):
        yield Finding("warning", "compiler-missing", "Neither clang++ nor g++ is there; triton-ascend needs one.",
                      "apt-get install g++")  # fmt: skip
    if host.programs.get("bishengir-compile") is None:
        yield Finding("warning", "bishengir-missing",
                      "bishengir-compile is not on the PATH, so triton-ascend finds '0 active drivers'.",
                      f"{_SET_ENV}")  # fmt: skip
    elif host.compiler is None:
        yield Finding("warning", "bishengir-mute",
                      "bishengir-compile --help fails or is empty, which triton-ascend takes for an old compiler.",
                      "Install CANN's Triton compiler again.")  # fmt: skip
    else:
        yield from _compiler(host.compiler)
    if host.environment.get("CC", "").endswith("gcc"):
        yield Finding("warning", "cc-gcc", "CC=gcc makes triton-ascend compile C++ with a C compiler.", "Unset CC.")
    if host.python > (3, 11):
        yield Finding("warning", "python-new", "triton-ascend 3.2.0 has wheels up to Python 3.11.", "Use Python 3.11.")


def _compiler(compiler: Compiler) -> Iterator[Finding]:
    if _REG_BASED in compiler.help:
        yield Finding(
            "warning", "bishengir-reg-based",
            f"The help of bishengir-compile has {_REG_BASED!r}, so triton-ascend passes --reg-based=true, which is for "
            "the Ascend 950: kernels for A2 and A3 may not build.",
            "If the first kernel fails, take CANN 9.1.0.",
        )  # fmt: skip
    if _NEW_COMPILER not in compiler.help:
        yield Finding(
            "warning", "bishengir-old",
            f"The help of bishengir-compile lacks {_NEW_COMPILER!r}, so triton-ascend expects kernel_reloc.o, which "
            "newer compilers do not write.",
            "If the first kernel fails, take CANN 9.1.0.",
        )  # fmt: skip
    if compiler.version is not None and compiler.version not in KNOWN_COMPILERS:
        yield Finding(
            "note", "bishengir-unknown",
            f"bishengir-compile is {compiler.version}, and the kernels were tried with {', '.join(KNOWN_COMPILERS)}.",
            "Run multilora doctor --deep, and send its report.",
        )  # fmt: skip


def _environment(host: Host, device_type: str) -> Iterator[Finding]:
    have = host.environment
    if have.get("PYTORCH_NPU_ALLOC_CONF") and have.get("PYTORCH_ALLOC_CONF"):
        yield Finding(
            "error" if device_type == "npu" else "warning", "alloc-conf-twice",
            "PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF are both set, which torch_npu takes for an error.",
            "Unset one of them.",
        )  # fmt: skip
    if have.get("ASCEND_LAUNCH_BLOCKING") == "1" and device_type == "npu":
        yield Finding("warning", "launch-blocking", "ASCEND_LAUNCH_BLOCKING=1 makes every launch wait for its end.",
                      "Unset it, other than to look for a fault.")  # fmt: skip
    if have.get("TASK_QUEUE_ENABLE") == "0" and device_type == "npu":
        yield Finding("warning", "task-queue-off", "TASK_QUEUE_ENABLE=0 makes every launch slower.", "Unset it.")
    # As triton-ascend reads it; an empty value is off too.
    if have.get("TRITON_ENABLE_TASKQUEUE", "true").lower() not in ("true", "1") and device_type == "npu":
        yield Finding(
            "warning", "triton-task-queue-off",
            "TRITON_ENABLE_TASKQUEUE is off: every launch of a Triton kernel waits for the operators before it and for "
            "its own end.", "Unset it.",
        )  # fmt: skip
    for name in ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "TRITON_DEBUG"):
        if have.get(name) not in (None, "", "0") and device_type != "cpu":
            yield Finding("warning", "triton-debugging", f"{name} is set: Triton's kernels are very slow.",
                          f"Unset {name}.")  # fmt: skip
    cache = have.get("TRITON_CACHE_DIR")
    if cache and device_type != "cpu" and not _is_writable(Path(cache)):
        yield Finding("warning", "triton-cache", "TRITON_CACHE_DIR cannot be written: kernels cannot be compiled.",
                      "Name a directory that this user may write.")  # fmt: skip


def _libatb(host: Host, device_type: str) -> Iterator[Finding]:
    if device_type == "npu" and not host.has_libatb:
        yield Finding("note", "libatb-missing", "libatb.so is not on LD_LIBRARY_PATH. multilora calls no op of it.",
                      "If something else does: source /usr/local/Ascend/nnal/atb/set_env.sh")  # fmt: skip


def _visible_npus(host: Host, device_type: str) -> Iterator[Finding]:
    """Values for which CANN would silently offer no NPU, or another number than was meant."""
    value = host.environment.get(_VISIBLE)
    if value is None or device_type != "npu":
        return
    if not value.strip():
        yield Finding("error", "no-visible-device", f"{_VISIBLE} is empty: it hides every NPU.",
                      "Unset it, or name devices, such as 0.")  # fmt: skip
        return
    names = [name.strip() for name in value.split(",")]
    if not all(re.fullmatch("[0-9]+", name) for name in names) or len(set(names)) < len(names):
        yield Finding(
            "error", "visible-devices-wrong", f"{_VISIBLE}={value} is not a list of different numbers, such as 0,1.",
            "Name NPUs by their numbers; ASCEND_VISIBLE_DEVICES, which also knows ranges, is read by "
            "ascend-docker-runtime alone.",
        )  # fmt: skip
        return
    num_nodes = sum(bool(re.fullmatch("/dev/davinci[0-9]+", node)) for node in host.device_nodes)
    absent = [name for name in names if int(name) >= num_nodes]
    if absent and num_nodes:
        yield Finding(
            "warning", "visible-device-absent",
            f"{_VISIBLE}={value} names NPU {', '.join(absent)}, and there are {num_nodes} here: NPUs are counted from "
            "0 among those whose /dev/davinci* are here, whatever the host calls them.",
            "Count from 0, or unset it: a container has no other NPUs than it was given.",
        )  # fmt: skip


_CHECKS: tuple[Callable[[Host, str], Iterator[Finding]], ...] = (
    _imports,
    _absent_npu_parts,
    _device_nodes,
    _versions,
    _triton,
    _environment,
    _visible_npus,
    _libatb,
)


def _on_npu(level: Level, device_type: str) -> Level:
    """`level` where an NPU is asked for; elsewhere the same is good to know."""
    return level if device_type == "npu" else "note"


def _numbers(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 2.13.0rc1+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _needs_patch(triton_dir: Path) -> bool:
    try:
        return _REMOVED_SYMBOL in (triton_dir / "backends" / "ascend" / "npu_utils.cpp").read_text(errors="replace")
    except OSError:
        return False


def _is_writable(directory: Path) -> bool:
    existing = next((path for path in (directory, *directory.parents) if path.exists()), directory)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False
