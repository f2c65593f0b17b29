"""The C library's heap: kept between steps, given back when told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.limits import LIMIT_SECONDS

_CHILD = """
import ctypes, threading
from pathlib import Path
from service.models.heap import keep_freed_memory, trim_heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def use_and_free():
    block = libc.malloc(SIZE)
    ctypes.memset(block, 1, SIZE)
    libc.free(block)

SIZE = 16 << 20
keep_freed_memory()
before = resident_bytes()
threads = [threading.Thread(target=use_and_free) for _ in range(4)]
for thread in threads:
    thread.start()
    thread.join()
used = resident_bytes()
trim_heap()
print((used - before) / SIZE, (resident_bytes() - before) / SIZE)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="NOT RUN: the heap that is told how to behave is glibc's, and /proc is read"
)
def test_what_threads_have_freed_is_kept_for_the_next_and_goes_back_when_trimmed() -> None:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS
    )
    kept, left = (float(number) for number in child.stdout.split())
    assert 0.9 < kept < 1.5  # one block, that each thread has taken in turn
    assert left < 0.25
