"""Take a Triton kernel through the Ascend tool chain without an NPU, a driver or CANN.

triton-ascend's front end turns the kernel into linalg, the AscendNPU IR compiler takes that down to device IR with
planned on-chip memory. The last step (object code) needs CANN and is the one failure that is expected here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_VENV = Path(sys.prefix)
_BINARIES = _VENV / "compiler" / "ascendnpuir" / "bin"
# Results by content; scripts/test-ascend.sh empties it where no cache is to be trusted.
CACHE = _VENV / "gate-cache"
# Raised whenever the command lines below change, so that old cached results are not taken for new ones.
_CACHE_VERSION = "1"
# For each of MLIR's tools: else it starts as many threads as there are cores, in each of as many workers, which on a
# large machine are more than a container may have.
ONE_THREAD = "--mlir-disable-threading"
# A log without a complaint of the first kind, or with one of the second, tells of this machine and not of the kernel.
_COMPLAINT = re.compile(r"error: (?!External hivmc)|LLVM ERROR|overflow, requires|Stack dump|PLEASE submit|Assertion")
_SHORTAGE = re.compile(r"out of memory|bad_alloc|Cannot allocate memory|No space left|Resource temporarily unavailable")
_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class CompileError(Exception):
    """The tool chain refused a kernel. `stage` is "triton", "linalg" or "device"; `crashed` means that it died."""

    def __init__(self, stage: str, message: str, *, crashed: bool = False) -> None:
        super().__init__(f"[{stage}] {message}")
        self.stage = stage
        self.crashed = crashed


class CompilerDied(Exception):
    """The device compiler ended for a reason that says nothing of the kernel: it was killed, or short of memory."""


@dataclass(frozen=True)
class Specialised:
    """A kernel's signature as Triton's just-in-time compiler would derive it from example arguments."""

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: Any
    runtime: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one chip.

    linalg          what the front end made (executed on the CPU by linalg_cpu)
    device          the final device IR in generic form (read by report, executed by simulator)
    printed_ub_bits unified-buffer use that the Ascend950 compiler prints; None for the others
    """

    target: str
    linalg: str
    device: str
    printed_ub_bits: int | None


def is_ascend950(target: str) -> bool:
    """Whether the chip has a compiler of its own (other vector units, other memory sizes)."""
    return target.startswith("Ascend950")


def specialise(kernel: Any, arguments: dict[str, Any]) -> Specialised:
    """Signature, constants and divisibility hints for example arguments, by the rules of Triton 3.2's `jit`."""
    from triton.backends.ascend.compiler import AscendAttrsDescriptor

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[int, int] = {}
    for parameter in kernel.params:
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize:
                hints[parameter.num] = 16
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            constants[parameter.name] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                hints[parameter.num] = 16
    attributes = AscendAttrsDescriptor.from_hints(hints)
    return Specialised(signature, constants, attributes, tuple(signature))


def to_linalg(
    kernel: Any, specialised: Specialised, target: str, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Run the front end: (linalg text, the options that the back end wants to know)."""
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler as ascend
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    chip = GPUTarget("npu", target, 0)
    backend = make_backend(chip)
    defaults: dict[str, Any] = {}
    if is_ascend950(target):
        defaults = {
            "compile_on_910_95": True,
            "multibuffer": False,
            "enable_auto_bind_sub_block": False,
            "enable_select_analysis": True,
        }
    parsed = backend.parse_options(defaults | options)
    metadata = {"target": chip, **parsed.__dict__}
    try:
        source = ASTSource(
            fn=kernel,
            signature=specialised.signature,
            constants=specialised.constants,
            attrs=specialised.attributes,
        )
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(parsed, backend.get_codegen_implementation(), backend.get_module_map(), context)
        module = ascend.make_ttir(module, metadata, parsed)
    except Exception as error:
        raise CompileError("triton", f"{type(error).__name__}: {error}") from error
    try:
        linalg = ascend.ttir_to_linalg(module, metadata, parsed, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise CompileError("linalg", _first_errors(error.stderr.decode(errors="replace"))) from error
    return ascend._parse_linalg_metadata(linalg, metadata)


def compile_kernel(
    kernel: Any, specialised: Specialised, target: str, options: dict[str, Any] | None = None
) -> Compiled:
    """Compile down to planned memory.

    Raises CompileError, also when the kernel wants more on-chip memory than there is; CompilerDied when it was
    killed or lacked memory or disk, which is not cached.
    """
    linalg, metadata = to_linalg(kernel, specialised, target, options or {})
    flags = _device_flags(metadata, target)
    parts = [_CACHE_VERSION, _compiler_version(), target, *flags, linalg]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    directory = CACHE / key
    if not (directory / "finished").exists():
        _run_device_compiler(linalg, flags, target, directory)
    log = (directory / "log").read_text()
    if not (directory / "device.mlir").exists():
        overflow = re.search(
            r"\b(ub|cbuf|l1|l0c|cc|ca|cb) overflow, requires \d+ bits while \d+ bits available", log, re.I
        )
        crashed = overflow is None and ("Stack dump" in log or "PLEASE submit" in log or "Assertion" in log)
        raise CompileError("device", overflow.group(0) if overflow else _first_errors(log), crashed=crashed)
    printed = re.search(r"UB\s+size\s*=\s*(\d+)\s*bits", log)
    device = (directory / "device.mlir").read_text()
    return Compiled(target, linalg, device, int(printed.group(1)) if printed else None)


@functools.cache
def _compiler_version() -> str:
    """Name and version of the compiler's unpacked wheel, and the size of each binary."""
    wheels = sorted(path.name for path in (_VENV / "compiler").glob("*.dist-info"))
    assert wheels, "the compiler's wheel left no record of its version"
    return " ".join([*wheels, *sorted(f"{path.name}:{path.stat().st_size}" for path in _BINARIES.iterdir())])


def _device_flags(metadata: dict[str, Any], target: str) -> list[str]:
    names = {
        "multibuffer": "enable-auto-multi-buffer",
        "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
        "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
        "sync_solver": "enable-hivm-graph-sync-solver",
        "unit_flag": "enable-hivm-unit-flag-sync",
        "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
        "limit_auto_multi_buffer_only_for_local_buffer": "limit-auto-multi-buffer-only-for-local-buffer",
        "set_workspace_multibuffer": "set-workspace-multibuffer",
        "tile_mix_vector_loop": "tile-mix-vector-loop",
        "tile_mix_cube_loop": "tile-mix-cube-loop",
        "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    }
    values = {flag: metadata.get(name) for name, flag in names.items()}
    flags = [f"--{flag}={str(value).lower()}" for flag, value in values.items() if value is not None]
    last = "--enable-print-memory-allocated-size" if is_ascend950(target) else "--enable-hivm-compile=true"
    return [f"--target={target}", *flags, "--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true", last]


def _run_device_compiler(linalg: str, flags: list[str], target: str, directory: Path) -> None:
    """Leave `log`, `finished` and, on success, `device.mlir` in the directory; appears there in one rename."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        _compile_in(work, linalg, flags, target)
        (work / "finished").touch()
        with contextlib.suppress(OSError):  # another process has put the same content there meanwhile
            work.rename(directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile_in(work: Path, linalg: str, flags: list[str], target: str) -> None:
    suffix = "-a5" if is_ascend950(target) else ""
    (work / "kernel.mlir").write_text(linalg)
    command = [str(_BINARIES / f"bishengir-compile{suffix}"), str(work / "kernel.mlir"), *flags]
    run = subprocess.run(
        [*command, ONE_THREAD, f"--save-temps={work}", "-o", str(work / "kernel")],
        capture_output=True,
        text=True,
        check=False,
    )
    log = run.stdout + run.stderr
    final = work / "module.hivm.opt.mlir"
    # Object code needs CANN; that this one step is missing is the only complaint of a successful run.
    reached_the_end = "External hivmc run fails" in log or "Cannot find hivmc" in log
    was_killed = run.returncode < 0 and -run.returncode not in _OWN_SIGNALS
    complains = _COMPLAINT.search(log) is not None
    if was_killed or _SHORTAGE.search(log) or not (complains or (final.exists() and reached_the_end)):
        raise CompilerDied(f"the compiler ended with {run.returncode} and says nothing of the kernel: {log[-400:]}")
    if not complains:
        printer = [str(_BINARIES / f"bishengir-opt{suffix}"), str(final), "--mlir-print-op-generic", ONE_THREAD]
        generic = subprocess.run(printer, capture_output=True, text=True, check=True).stdout
        (work / "device.mlir").write_text(generic)
    (work / "log").write_text(" ".join(command) + "\n" + log)


def _first_errors(log: str) -> str:
    lines = [line for line in log.splitlines() if re.search(r"error:|LLVM ERROR|Assertion", line)]
    lines = [re.sub(r"^.*?error: ", "error: ", line)[:400] for line in lines if "External hivmc" not in line]
    if lines:
        return " | ".join(dict.fromkeys(lines[:4]))
    return "the compiler crashed" if "Stack dump" in log or "PLEASE submit" in log else log.strip()[-400:]


def replace_device(compiled: Compiled, device: str) -> Compiled:
    """The same kernel with other device IR; for tests that the simulator notices a broken one."""
    return dataclasses.replace(compiled, device=device)
