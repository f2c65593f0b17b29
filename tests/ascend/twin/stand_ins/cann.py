"""Stub CANN libraries, made where and when they are needed, so that the real torch_npu can be imported without CANN.

The wheel's libraries name functions of CANN that are defined nowhere else. Each becomes a C function that returns 0
("success"), and the libraries of CANN that the wheel asks for are loaded under their own names before the wheel is.
Nothing of an NPU works then, and none is there; what works is everything that knows no device: operator schemas, shape
functions on meta tensors, and implementations registered for the CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Functions that must say more than "success".
_SPECIAL = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B4"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return ""; }',
}


def provide_stub_cann() -> None:
    """Let this process and its children import torch_npu: build the stubs, unless CANN or stubs of a parent are there.

    They live in a temporary folder, on LD_LIBRARY_PATH, as long as this process.
    """
    package = Path(_origin("torch_npu")).parent
    # What `import torch_npu` loads; plug-ins that it loads later, on demand, stay away.
    own = [*package.glob("_C.*.so"), *(package / "lib" / f"lib{name}.so" for name in _LOADED_AT_IMPORT)]
    absent, present = _dependencies(own)
    if not absent:
        return
    symbols = sorted(_symbols(own, "--undefined-only") - _symbols([*own, *present], "--defined-only"))
    folder = Path(tempfile.mkdtemp(prefix="stub-cann-"))
    atexit.register(_remove, folder, os.getpid())
    for library in _build(folder, symbols, sorted(absent)):
        # For this process, whose search path is settled: a library is found by its name once it is loaded.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    # For its children.
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = str(folder) + (os.pathsep + before if before else "")


def _build(folder: Path, symbols: list[str], sonames: list[str]) -> list[Path]:
    """All functions go into the first library, the others are empty."""
    source, empty = folder / "cann.c", folder / "empty.c"
    source.write_text("".join(f"{_SPECIAL.get(name, f'int {name}(void) {{ return 0; }}')}\n" for name in symbols))
    empty.write_text("")
    compiler = next((name for name in _COMPILERS if shutil.which(name)), None)
    assert compiler, f"the stubs need a C compiler: one of {', '.join(_COMPILERS)}"
    for code, soname in zip([source, *(empty for _ in sonames[1:])], sonames, strict=True):
        options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}"]
        subprocess.run([compiler, *options, "-o", str(folder / soname), str(code)], check=True)
    return [folder / soname for soname in sonames]


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder)


_COMPILERS = ("gcc", "clang", "clang-19")
_LOADED_AT_IMPORT = ("torch_npu", "npu_profiler", "tensorpipe")


def _origin(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return spec.origin


def _dependencies(libraries: list[Path]) -> tuple[set[str], list[Path]]:
    """Names of the libraries that are needed and nowhere to be found, and the paths of those that are there."""
    torch_libraries = Path(_origin("torch")).parent / "lib"
    folders = [str(torch_libraries), *(str(library.parent) for library in libraries)]
    search_path = os.pathsep.join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])
    absent, present = set(), {Path(sys.executable).resolve()}
    for library in [*libraries, Path(sys.executable).resolve()]:
        listed = subprocess.run(
            ["ldd", str(library)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "LD_LIBRARY_PATH": search_path},
        ).stdout
        absent |= set(re.findall(r"(\S+) => not found", listed))
        present |= {Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+)", listed, re.MULTILINE)}
    return absent, sorted(present)


def _symbols(libraries: list[Path], which: str) -> set[str]:
    """Dynamic symbols without their versions; weak ones are no need."""
    names = set()
    for library in libraries:
        listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            *_, kind, name = line.split()
            if not (which == "--undefined-only" and kind in "wv"):
                names.add(name.partition("@")[0])
    return names
