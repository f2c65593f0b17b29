"""The child's side of `adapters.isolation.bounded_child`: it bounds and confines itself, then answers jobs.

Time is bounded by a kernel timer on the process's own time whose signal has no handler, memory by its address space.
Files, network and other processes are out of its reach as far as its kernel allows that without privileges. That is
Linux only: Landlock denies the file system, TCP, and other processes' sockets and signals; seccomp leaves the system
calls for computing and for reading and writing open files. Both hold until the process ends: seccomp for all its
threads, Landlock for the calling thread and those that it starts.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = 3  # exit code
# Bytes that a process's jobs may take, all together, beside what there is at its start.
MAX_NEW_BYTES = 512 << 20

# ---- Landlock: the same numbers on every architecture

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_VERSION_FLAG = 1
# Rights over files by the version that knows them first: thirteen, then refer, truncate, ioctl_dev.
_FS_RIGHTS = ((5, (1 << 16) - 1), (3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))
_TCP_BIND_AND_CONNECT = 0b11  # since version 4
_OTHERS_SOCKETS_AND_SIGNALS = 0b11  # since version 6

# ---- seccomp

_SET_NO_NEW_PRIVS = 38
_SET_FILTER, _FOR_ALL_THREADS = 1, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM

# (what audit calls the architecture, number of seccomp itself, numbers of: read, write, close, lseek, fstat, mmap,
# mprotect, munmap, mremap, brk, madvise, rt_sigaction, rt_sigprocmask, rt_sigreturn; sigaltstack, sched_yield, getpid,
# gettid, exit, exit_group, futex, gettimeofday, clock_gettime, clock_getres, restart_syscall, getrandom, setitimer,
# getitimer)
_SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E,
        317,
        "0 1 3 8 5 9 10 11 25 12 28 13 14 15 131 24 39 186 60 231 202 96 228 229 219 318 38 36",
    ),
    "aarch64": (
        0xC00000B7,
        277,
        "63 64 57 62 80 222 226 215 216 214 233 134 135 139 132 124 172 178 93 94 98 169 113 114 128 278 103 102",
    ),
}


def serve(answer: Callable[[bytes], dict[str, Any]], *, max_seconds: float) -> int:
    """Answer jobs until the parent ends, or one has taken too much. Returns the exit code, for `os._exit`: a job may
    have left little memory for the interpreter's clean-up, and there is nothing to save.

    max_seconds  of processor time for one job
    """
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they reach the whole process group; the parent judges them
        signal.signal(ignored, signal.SIG_IGN)
    _bound_memory()
    sys.stdout.buffer.write(json.dumps(confine()).encode() + b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        try:
            # As it is, since the parent's other requests wait while this is read: escapes are two to six times as long.
            encoded = json.dumps(answer(line), ensure_ascii=False).encode(errors="surrogatepass") + b"\n"
        except MemoryError:  # nobody knows what is left of the child
            return OUT_OF_MEMORY
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(encoded)
        sys.stdout.buffer.flush()
    return 0


def _bound_memory() -> None:
    """Limit the address space to MAX_NEW_BYTES more than now, and disable core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = num_pages * resource.getpagesize() + MAX_NEW_BYTES
    bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))


def confine() -> list[str]:
    """From now on this process opens no file, starts no process and reaches no network: it computes, and uses the files
    that are open. Returns what of this the kernel does not do, each as a few words; empty where all of it holds.

    Whatever is to be imported must have been: modules are files.
    """
    missing = []
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if not _restrict_files(libc):
            missing.append("no Landlock: what this user may read, it may read")
        _limit_resources()
        if not _restrict_calls(libc):
            missing.append("no seccomp: it may open sockets and start processes")
    except (AttributeError, OSError):  # no such C library
        _limit_resources()
        missing.append("neither Landlock nor seccomp")
    return missing


def _limit_resources() -> None:
    """Before seccomp, which refuses to change them. The three standard files stay open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def _restrict_files(libc: ctypes.CDLL) -> bool:
    """A Landlock domain without any rule: nothing is allowed."""
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    if version < 1:
        return False
    rights = next(rights for since, rights in _FS_RIGHTS if version >= since)
    fields = [rights, _TCP_BIND_AND_CONNECT, _OTHERS_SOCKETS_AND_SIGNALS][: 1 + (version >= 4) + (version >= 6)]
    ruleset = struct.pack(f"{len(fields)}Q", *fields)
    file = libc.syscall(_CREATE_RULESET, ruleset, len(ruleset), 0)
    if file < 0:
        return False
    try:
        return bool(libc.syscall(_RESTRICT_SELF, file, 0) == 0)
    finally:
        os.close(file)


def _restrict_calls(libc: ctypes.CDLL) -> bool:
    """A filter that refuses every system call but those listed, with EPERM, to all threads that there are."""
    known = _SYSTEM_CALLS.get(platform.machine())
    if known is None:
        return False
    architecture, seccomp, numbers = known[0], known[1], [int(number) for number in known[2].split()]
    refuse_at = len(numbers) + 3
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 0, refuse_at - 2, architecture),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        *((_JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    return bool(libc.syscall(seccomp, _SET_FILTER, _FOR_ALL_THREADS, ctypes.byref(program)) == 0)
