"""The C library's heap: kept between steps, given back when told to. What torch keeps of products it has compiled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.limits import LIMIT_SECONDS
from tests.support.models.tiny_models import make_tiny_model

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


# Each of the threads has a heap of its own where the C library may choose, since all are there at once.
_SERVER = """
import ctypes, threading
from pathlib import Path
from service.models.heap import give_back_freed_memory, trim_heap

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def use_and_free(sizes):
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes):
        ctypes.memset(block, 1, size)
    all_have_theirs.wait()
    for block in blocks:
        libc.free(block)

SIZE, SMALL = 16 << 20, 1 << 16
all_have_theirs = threading.Barrier(4)
give_back_freed_memory()
libc.free(libc.malloc(SIZE))
before = resident_bytes()
threads = [threading.Thread(target=use_and_free, args=([SMALL] * (SIZE // SMALL),)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
trim_heap()
print((resident_bytes() - before) / SIZE)
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="NOT RUN: the heap that is told how to behave is glibc's, and /proc is read"
)
def test_what_several_threads_have_freed_goes_back_when_trimmed() -> None:
    child = subprocess.run(
        [sys.executable, "-c", _SERVER], capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS
    )
    assert float(child.stdout) < 0.5


_PRODUCTS = """
import sys
from pathlib import Path
from service.models.heap import bound_product_caches

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

bound_product_caches()
import torch
from kernels.linear import cpu

torch.set_num_threads(1)
with torch.inference_mode():
    weight = cpu.pack_weight(torch.zeros(64, 64), None)
    for num_tokens in range(1, 600):
        cpu.linear(torch.zeros(num_tokens, 64), weight)
        if num_tokens == 200:  # the caches are full
            before = resident_bytes()
print((resident_bytes() - before) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: /proc is read")
def test_products_of_ever_new_sizes_take_no_more_memory() -> None:
    """400 sizes more: unbounded they take 150 MiB."""
    child = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], capture_output=True, text=True, check=True, timeout=LIMIT_SECONDS
    )
    assert int(child.stdout) < 32


_LOADING = """
import sys, threading
from pathlib import Path
import torch
from service.models.loader import load_model

torch.set_num_threads(1)

def anonymous_bytes():
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) << 10

before = most = anonymous_bytes()
is_done = threading.Event()

def watch():
    global most
    while not is_done.wait(0.001):
        most = max(most, anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
loaded = load_model(Path(sys.argv[1]), weights="int8")
is_done.set()
thread.join()
moe = loaded.spec.moes[0]
layer = 2 * 3 * moe.num_experts * moe.size * loaded.spec.hidden_size
print((most - before - loaded.num_weight_bytes) / layer)
"""


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: /proc is read")
def test_experts_that_are_quantised_while_they_load_take_little_more_than_their_codes(tmp_path: Path) -> None:
    """In times of a layer's experts in bfloat16; 1.7 where blocks that are kept lay between those that were freed."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 32, "num_hidden_layers": 4}
    make_tiny_model("gpt_oss", tmp_path, dtype=torch.bfloat16, **sizes)
    child = subprocess.run(
        [sys.executable, "-c", _LOADING, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) < 1
