"""Memory that was freed goes back, whoever runs the application, and lines about lines are written when it is time."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.logs import RefusalLines
from service.server.app import finish_start
from service.server.gc_tuning import keep_up
from service.settings import Settings
from tests.api.conftest import Checkpoints
from tests.support.blocks import ROOT
from tests.support.http.client_environments import environment
from tests.support.limits import LIMIT_SECONDS

# A thread beside the application, in the middle of whose heap memory was freed: what is above it is in use. Ends the
# process when that has gone back to the system.
_BESIDE = """
import ctypes, gc, os, sys, threading, traceback
from pathlib import Path
from tests.support.http.server_process import wait_for

SIZE, SMALL = 64 << 20, 1 << 16
settings = {"model_dir": Path(sys.argv[1]), "store_dir": Path(sys.argv[2]), "device": "cpu"}

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def look():
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(SMALL) for _ in range(SIZE // SMALL)]
    for block in blocks:
        ctypes.memset(block, 1, SMALL)
    full = resident_bytes()
    for block in blocks[:-1]:
        libc.free(block)
    try:
        wait_for(lambda: resident_bytes() < full - SIZE // 2, "memory to go back")
        print(sys.getswitchinterval(), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)
"""
_SERVE = """
from service.server.serve import serve

# Not while modules are imported: they may fill more than was freed.
threading.Thread(target=lambda: (wait_for(gc.get_freeze_count, "the server to be ready"), look())).start()
serve([f"--{name.replace('_', '-')}={value}" for name, value in {**settings, "port": 0}.items()])
"""
# Without Ray around it, and without an engine that it is told of.
_RAY = """
import asyncio
from types import SimpleNamespace
from service.ray_serve.replicas import Ingress

async def hello(): ...

async def run():
    ingress = object.__new__(Ingress)
    await ingress.__init__(settings, 1, SimpleNamespace(hello=SimpleNamespace(remote=hello)))
    messages = asyncio.Queue()
    messages.put_nowait({"type": "lifespan.startup"})

    async def send(message):
        assert message["type"] == "lifespan.startup.complete", message
        threading.Thread(target=look).start()

    await ingress.__serve_build_asgi_app__()({"type": "lifespan", "state": {}}, messages.get, send)

asyncio.run(run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: the heap is glibc's, and /proc is read")
@pytest.mark.parametrize("form", ["serve", "ray"])
def test_what_was_freed_goes_back_and_threads_that_compute_give_way(
    form: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Python's own switch interval is 5 ms."""
    python, code = (sys.executable, _SERVE) if form == "serve" else (str(environment("ray") / "bin" / "python"), _RAY)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    done = subprocess.run(
        [python, "-c", _BESIDE + code, str(checkpoints.base), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *packages])},
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_SECONDS,
    )
    assert done.stdout, done.stderr
    assert float(done.stdout) < 0.001


def test_lines_left_out_are_told_without_another_refusal(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    lines = RefusalLines(1, lambda: now[0])
    assert [lines.may_write("one") for _ in range(3)] == [True, False, False]
    now[0] += 61

    async def until_told() -> None:
        keeping_up = asyncio.create_task(keep_up(lines))
        async with asyncio.timeout(LIMIT_SECONDS):
            while not caplog.records:
                await asyncio.sleep(0.01)
        keeping_up.cancel()

    with caplog.at_level(logging.WARNING, logger="multilora"):
        asyncio.run(until_told())
    (record,) = caplog.records
    assert vars(record)["fields"] == {"payer": "one", "left_out": 2, "written": 1}


def test_a_process_that_can_start_no_thread_for_a_while_is_kept_up_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.server.gc_tuning._TELL_SECONDS", 0.0)
    num_refused, was_trimmed = [0], threading.Event()
    monkeypatch.setattr("service.server.gc_tuning.trim_heap", was_trimmed.set)

    def refuse(_: threading.Thread) -> None:
        num_refused[0] += 1
        raise RuntimeError("can't start new thread")

    async def until_trimmed() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            keeping_up = asyncio.create_task(keep_up(RefusalLines(1)))
            while not num_refused[0]:
                await asyncio.sleep(0)
        while not was_trimmed.is_set() and not keeping_up.done():
            await asyncio.sleep(0)
        keeping_up.cancel()

    asyncio.run(asyncio.wait_for(until_trimmed(), LIMIT_SECONDS))
    assert was_trimmed.is_set()


def test_the_garbage_collector_passes_by_what_is_there_when_the_server_is_ready() -> None:
    came_late: list[list[int]] = []
    is_walked_through = []

    class Services(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "prepared" and value:
                is_walked_through.append(any(one is came_late[0] for one in gc.get_objects()))
            super().__setattr__(name, value)

    async def wait_ready() -> None:
        came_late.append([1])  # after the application

    services = Services(store=None, pins_changed=asyncio.Event(), settings=Settings())
    try:
        asyncio.run(finish_start(services, SimpleNamespace(wait_ready=wait_ready)))  # type: ignore[arg-type]
    finally:
        gc.unfreeze()
    assert services.prepared
    assert is_walked_through == [False]
