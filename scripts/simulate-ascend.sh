#!/usr/bin/env bash
# Runs one launch of each Triton kernel for Ascend NPUs in the chip simulator of CANN's public image, on an x86-64
# machine with docker and without an NPU. Written without docker at hand: NOT RUN YET. Send what it prints.
#
#   CANN_IMAGE=NAME   image, quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11 unless given
#   SOC=NAME          chip, Ascend910B4 unless given (`ls $ASCEND_HOME_PATH/tools/simulator` in the image names others)
#   TORCH_INDEX_URL   index of torch's CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."

image=${CANN_IMAGE:-quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11}
soc=${SOC:-Ascend910B4}
index=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
out=${OUT:-simulated}
mkdir -p "$out"

docker run --rm --platform linux/amd64 -v "$PWD:/multilora:ro" -v "$PWD/$out:/out" -e SOC="$soc" -e INDEX="$index" \
    "$image" bash -c '
    set -eo pipefail
    source /usr/local/Ascend/ascend-toolkit/set_env.sh
    bishengir=/usr/local/Ascend/ascend-toolkit/latest/share/info/ascendnpu-ir/bin/set_env.sh
    if [ -f "$bishengir" ]; then source "$bishengir"; fi
    cp -r /multilora /work && cd /work
    python3 -m venv --system-site-packages /venv && . /venv/bin/activate
    pip install -q --no-deps -c constraints-npu.txt --index-url "$INDEX" torch
    pip install -q -c constraints-npu.txt torch_npu pybind11 pyyaml numpy hypothesis pytest transformers msgspec
    pip uninstall -q -y triton triton-ascend || true
    pip install -q --no-deps -c constraints-npu.txt triton-ascend
    python deploy/image/patch_triton_ascend.py
    export TRITON_CACHE_DIR=/tmp/triton LD_LIBRARY_PATH="$ASCEND_HOME_PATH/tools/simulator/$SOC/lib:$LD_LIBRARY_PATH"
    # Without msprof the kernels run in the simulator all the same, where its libraries come first; it adds the cycles.
    msprof op simulator --soc-version="$SOC" --output=/out python -m tests.ascend.simulate | tee /out/kernels.txt
'
echo "simulate-ascend: results in $out/kernels.txt, cycles beside it"
