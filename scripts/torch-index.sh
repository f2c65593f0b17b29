#!/usr/bin/env bash
# Prints the package index to take torch from, nothing for pip's own: torch-index.sh PYTHON CONSTRAINTS
#
#   TORCH_INDEX=URL   decides, if it is set
#
# PyPI's torch for Linux is a CUDA build of several GB. Where no NVIDIA GPU is, the index of torch's CPU builds is asked
# for the version of CONSTRAINTS, once and for at most 20 seconds; not every network lets one reach it.
set -euo pipefail

cpu_index=https://download.pytorch.org/whl/cpu

if [ -n "${TORCH_INDEX:-}" ]; then
    echo "$TORCH_INDEX"
    exit
fi
if [ -e /proc/driver/nvidia ] || { command -v nvidia-smi && timeout 10 nvidia-smi -L; } >/dev/null 2>&1; then
    echo "torch: pip's own build, for the NVIDIA GPU of this machine" >&2
    exit
fi
wanted=$(sed -n 's/^torch==//p' "$2")+cpu
versions=$(timeout 20 "$1" -m pip --disable-pip-version-check --timeout 5 --retries 0 \
    index versions --index-url "$cpu_index" torch 2>/dev/null) || versions=
if [[ " ${versions//,/ } " == *" $wanted "* ]]; then
    echo "torch: $wanted, the CPU build, with the index $cpu_index (TORCH_INDEX names another)" >&2
    echo "$cpu_index"
else
    echo "torch: pip's own build, several GB: $cpu_index is not reached, or lacks $wanted" >&2
fi
