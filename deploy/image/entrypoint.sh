#!/usr/bin/env bash
# Sets CANN's environment where CANN is installed, and becomes the command. In a running container:
# `docker exec NAME multilora-entrypoint multilora doctor`.
set -euo pipefail

ascend=${ASCEND_INSTALL_PATH:-/usr/local/Ascend}

# CANN's scripts read variables that may be unset and may end with a failed test: neither must end this script.
source_if_present() {
    [ -e "$1" ] || return 0
    set +eu
    # shellcheck disable=SC1090
    source "$@"
    set -eu
}

# What compiled kernels depend on beyond Triton's own key: CANN and its compiler.
cann_identity() {
    {
        readlink -f "$ASCEND_HOME_PATH"
        find -L "$ASCEND_HOME_PATH" -maxdepth 4 -type f \
            \( -name version.info -o -name version.cfg -o -name 'ascend_*_install.info' \) -print0 | sort -z | xargs -0r sha256sum
        find -L "$(command -v bishengir-compile || echo "$ASCEND_HOME_PATH")" -maxdepth 0 -type f -printf '%s %T@\n'
    } | sha256sum | cut -d' ' -f1
}

wipe_stale_kernels() {
    local stamp=$TRITON_CACHE_DIR/.cann identity
    identity=$(cann_identity)
    if ! mkdir -p "$TRITON_CACHE_DIR" || ! [ -w "$TRITON_CACHE_DIR" ]; then
        echo "multilora: user $(id -u) may not write the kernel cache $TRITON_CACHE_DIR; change the volume's owner" >&2
        exit 1
    fi
    [ "$(cat "$stamp" 2>/dev/null)" = "$identity" ] && return
    if [ -n "$(find "$TRITON_CACHE_DIR" -mindepth 1 -print -quit)" ]; then
        echo "multilora: CANN has changed; compiled kernels are dropped" >&2
        find "$TRITON_CACHE_DIR" -mindepth 1 -delete
    fi
    echo "$identity" >"$stamp"
}

if [ -n "${PYTORCH_ALLOC_CONF:-}" ] && [ -n "${PYTORCH_NPU_ALLOC_CONF:-}" ]; then
    echo "multilora: PYTORCH_ALLOC_CONF and PYTORCH_NPU_ALLOC_CONF are both set, which torch_npu refuses; unset one" >&2
    exit 1
fi

# What suits a process that drives an NPU; whatever the container was given goes first. docs/ascend.md has the reasons.
set_defaults() {
    local allocator
    export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE-1}" OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"
    export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF-1}"
    [ -n "${PYTORCH_ALLOC_CONF:-}" ] || export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF-expandable_segments:True}"
    [ -z "${LD_PRELOAD+set}" ] || return 0
    for allocator in "/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2" /usr/lib64/libjemalloc.so.2; do
        if [ -e "$allocator" ]; then
            export LD_PRELOAD="$allocator"
            break
        fi
    done
}

toolkit=$ascend/ascend-toolkit/set_env.sh
if [ -e "$toolkit" ]; then
    driver=$ascend/driver/lib64
    export LD_LIBRARY_PATH="$driver:$driver/common:$driver/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    source_if_present "$toolkit"
    : "${ASCEND_HOME_PATH:=$ascend/ascend-toolkit/latest}"
    if ! [ -d "$ASCEND_HOME_PATH" ]; then
        echo "multilora: ASCEND_HOME_PATH is $ASCEND_HOME_PATH, which is no directory; it must name the installed CANN" >&2
        exit 1
    fi
    source_if_present "$ASCEND_HOME_PATH/share/info/ascendnpu-ir/bin/set_env.sh"
    # Without the argument the script would ask the installed torch which C++ ABI it has; torch 2.13 has the new one.
    source_if_present "$ascend/nnal/atb/set_env.sh" --cxx_abi=1
    [ -z "${TRITON_CACHE_DIR:-}" ] || wipe_stale_kernels
    set_defaults
fi

exec "$@"
