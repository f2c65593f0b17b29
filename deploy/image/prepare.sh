#!/usr/bin/env bash
# The part of the image that changes least: compiler, user, directories and an empty virtual environment.
#
#   prepare.sh [--compiler] [--jemalloc] [--driver-gid GID]
#
# --compiler    a C++ compiler and Python's headers, which Triton needs at run time; what the base has is not installed
# --jemalloc    an allocator for the host's memory, which the entry point preloads beside an NPU
# --driver-gid  group that owns the device nodes on the host; the user becomes a member. The number alone counts: a base
#               may have the host's name for it, HwHiAiUser, under another number
set -euo pipefail

uid=10001
compiler=false
jemalloc=false
driver_gid=
while [ $# -gt 0 ]; do
    case $1 in
    --compiler) compiler=true ;;
    --jemalloc) jemalloc=true ;;
    --driver-gid) driver_gid=$2 && shift ;;
    *) echo "prepare.sh: unknown argument $1" >&2 && exit 2 ;;
    esac
    shift
done

install_packages() {
    if command -v apt-get >/dev/null; then
        apt-get update
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
        rm -rf /var/lib/apt/lists/*
    elif command -v dnf >/dev/null; then
        dnf install -y --setopt=install_weak_deps=False "$@"
        dnf clean all
    else
        echo "prepare.sh: neither apt-get nor dnf is here to install $*" >&2
        exit 1
    fi
}

# What the base lacks of these; openEuler's images come without some.
install_missing() {
    local missing=() dnf=false
    command -v apt-get >/dev/null || dnf=true
    need() { if $dnf; then missing+=("$2"); else missing+=("$1"); fi; }
    command -v useradd >/dev/null || need passwd shadow
    command -v find >/dev/null || need findutils findutils
    if $compiler; then
        command -v g++ >/dev/null || need g++ gcc-c++
        [ -e "$(python_header)" ] || need python3.11-dev python3-devel
    fi
    if $jemalloc; then need libjemalloc2 jemalloc; fi
    [ ${#missing[@]} -eq 0 ] || install_packages "${missing[@]}"
    if $compiler && ! [ -e "$(python_header)" ]; then
        echo "prepare.sh: $(python_header) is missing, and no package brought it" >&2
        exit 1
    fi
}

python_header() {
    python3.11 -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")'
}

make_user() {
    groupadd --gid $uid multilora
    useradd --uid $uid --gid $uid --create-home --shell /bin/bash multilora
    if [ -n "$driver_gid" ]; then
        getent group "$driver_gid" >/dev/null || groupadd --gid "$driver_gid" ascend-driver
        usermod --append --groups "$(getent group "$driver_gid" | cut -d: -f1)" multilora
    fi
    install -d -o $uid -g $uid /var/lib/multilora /var/lib/multilora/adapters /var/cache/multilora /var/cache/multilora/triton
}

install_missing
make_user
python3.11 -m venv /opt/multilora/venv
