"""The loader's thread works in order, and is there only while there is work."""

from __future__ import annotations

import functools
import threading
import weakref

import pytest

from service.engine.transient_thread import TransientThread
from tests.support.http.server import wait_for
from tests.support.limits import LIMIT_SECONDS


class _Gate:
    """Work that says when and where it has begun, and ends when told."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.thread = threading.current_thread()

    def __call__(self) -> None:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.go.wait(LIMIT_SECONDS)


def test_work_is_done_in_order_and_the_thread_ends() -> None:
    worker, gate, done = TransientThread("worker"), _Gate(), list[int]()
    worker.submit(gate)
    for number in range(100):
        worker.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert gate.begun.wait(LIMIT_SECONDS)
    gate.go.set()
    gate.thread.join(LIMIT_SECONDS)
    assert not gate.thread.is_alive()
    assert done == list(range(100))
    later = _Gate()
    later.go.set()
    worker.submit(later)
    assert later.begun.wait(LIMIT_SECONDS)
    assert later.thread is not gate.thread


def test_without_a_thread_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done, later = TransientThread("worker"), list[int](), _Gate()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            worker.submit(lambda: done.append(1))
    later.go.set()
    worker.submit(later)
    assert later.begun.wait(LIMIT_SECONDS)
    worker.close()
    assert done == []


def test_closing_drops_what_has_not_begun_and_waits_for_what_has() -> None:
    worker, gate, done = TransientThread("worker"), _Gate(), list[int]()
    worker.submit(gate)
    dropped = weakref.ref(work := functools.partial(done.append, 1))
    worker.submit(work)
    del work
    assert gate.begun.wait(LIMIT_SECONDS)
    closer = threading.Thread(target=worker.close)
    closer.start()
    wait_for(lambda: dropped() is None, "the queue to be empty")
    assert closer.is_alive()
    gate.go.set()
    closer.join(LIMIT_SECONDS)
    assert not closer.is_alive()
    assert not gate.thread.is_alive()
    assert done == []


def test_a_stack_of_its_own_is_nobody_elses() -> None:
    usual = threading.stack_size()
    worker, gate = TransientThread("worker", stack_bytes=1 << 25), _Gate()
    gate.go.set()
    worker.submit(gate)
    assert gate.begun.wait(LIMIT_SECONDS)
    assert threading.stack_size() == usual
    worker.close()
