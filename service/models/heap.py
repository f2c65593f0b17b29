"""The C library's heap, and what else keeps memory without being asked."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20  # glibc takes no larger one
_KEPT_BYTES = 512 << 20
# Sizes for a process whose memory rises and falls with its requests: beyond them a block has pages of its own, which
# return to the system when it is freed, and the free end of the heap returns, too.
_OWN_PAGES_BYTES, _FREE_END_BYTES = 1 << 20, 4 << 20
# Where oneDNN, and torch's way to it, look for how many compiled products they may keep: 1,024 unless told.
_PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MAX_KEPT_PRODUCTS = 128


@cache
def _libc() -> ctypes.CDLL:
    """Once: each makes a class of its own, which only Python's collector frees."""
    return ctypes.CDLL(None)


def keep_freed_memory() -> None:
    """Let what a step frees serve the next step, instead of going back to the system and coming anew, full of zeros.

    glibc maps large blocks one by one, and gives back the free end of its heap, beyond thresholds that depend on what
    the process has freed before: by luck, each activation of each layer costs page faults, a fifth of a step's time.
    Fixed thresholds take the luck out. `trim_heap` still gives everything back: all threads share one heap for that,
    as the free end of another would stay, 16 MiB after each thread that has read an adapter. Call this before other
    threads begin.
    """
    _use_one_heap(_LARGEST_MMAP_THRESHOLD_BYTES, _KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Let what is freed go back to the system: large blocks at once, the rest at the next `trim_heap`.

    Left to itself glibc gives each of several threads a heap, whose free end `trim_heap` does not give back, and raises
    its thresholds to the largest block that was ever freed: a server that had read large bodies and long texts held
    190 MB where 20 were in use, more with each thread that happened to do that. Call this before other threads begin.
    """
    _use_one_heap(_OWN_PAGES_BYTES, _FREE_END_BYTES)


def _use_one_heap(mmap_threshold_bytes: int, trim_threshold_bytes: int) -> None:
    options = getattr(_libc(), "mallopt", None)
    if options is not None:
        options(_M_MMAP_THRESHOLD, mmap_threshold_bytes)
        options(_M_TRIM_THRESHOLD, trim_threshold_bytes)
        options(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps freed blocks of up to 32 MiB for later: after loading, a tenth of the model's size. Other C libraries
    have no such call, and none is made there.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def bound_product_caches() -> None:
    """Let fewer compiled matrix products be kept. Call this before torch is imported.

    On a CPU oneDNN compiles a product anew for each number of tokens, of each shape of weight, which takes 0.2 ms, and
    keeps 0.4 MiB of it: a server whose steps vary in size, as they do under a flood, grew by 430 MiB. What runs again
    and again, decode steps of the present size, is among the last 128.
    """
    for name in _PRODUCT_CACHES:
        os.environ.setdefault(name, str(_MAX_KEPT_PRODUCTS))
