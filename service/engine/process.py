"""The engine process: `python -m service.engine.process FD`, started by `client.py` with one end of a socket pair.

Threads: the main one steps the engine and writes; one reads the socket into an inbox; one reads adapters from disk, and
lives only while there are any to read.
Threads of a matrix product on a CPU: as many as are found fastest by timing decode steps at the start. Each waits for
the slowest, and on a core that another process has, that one waits for its turn: beside busy neighbours fewer threads
are many times as fast. How busy a machine is shows in no number that holds in a container too.
Life: the parent's death ends it, by the end of the stream and, should the reader be stuck, by the kernel's
parent-death signal. SIGINT and SIGTERM reach a whole process group but are the parent's to judge, so they are ignored
here. Nothing needs to be put away on kill -9: the engine only reads the store.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from adapters.errors import AdapterError
from kernels.child_process import die_with_parent
from kernels.probe.probe_process import ProbeProcess
from service import logs
from service.engine.ipc.config import EngineOptions
from service.engine.ipc.messages import (
    Drain,
    Fatal,
    Finished,
    FromEngine,
    Pause,
    Ping,
    Resume,
    Sampling,
    Sleep,
    Stats,
    Submit,
    ToEngine,
)
from service.engine.ipc.wire import EngineSide
from service.machine import may_find_accelerator, num_usable_cpus
from service.models.heap import bound_product_caches, keep_freed_memory, trim_heap
from service.models.spec.config_json import ModelError

if TYPE_CHECKING:
    from service.engine.engine import Engine


# Timed steps of one number of threads, beside one that starts the threads.
NUM_STEPS = 9
# No more steps of a number once they have taken so long; a first step as long as the second figure stands alone.
LIMIT_SECONDS, LONE_SECONDS = 0.15, 1.0
# More threads must be faster by this much: the API process wants to run, too.
MIN_GAIN = 1.05
# Sequences of a timed step, as of a server with some work; and most steps of a sequence before it begins anew.
NUM_SEQUENCES, MAX_STEPS = 8, 128


def candidates(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return [*powers, most]


def choose_num_threads(
    most: int, set_num_threads: Callable[[int], None], step: Callable[[], None], clock: Callable[[], float]
) -> int:
    """Time `step` with 1, 2, 4 ... `most` threads, and leave the number set that was fastest.

    From few to many, since too many can take a hundred times as long, and only as long as more are faster. A number's
    time is the median of its steps; a step as long as all steps of the best number before is proof enough.
    """
    best, best_seconds = 1, float("inf")
    for number in candidates(most):
        set_num_threads(number)
        seconds = _time(step, clock, best_seconds * NUM_STEPS)
        log.debug("a decode step with %d threads: %.2f ms", number, seconds * 1e3)
        if seconds * MIN_GAIN > best_seconds:
            break
        best, best_seconds = number, seconds
    set_num_threads(best)
    return best


def _time(step: Callable[[], None], clock: Callable[[], float], enough_seconds: float) -> float:
    """Median seconds of a step. The first one starts the threads: it counts only where there is time for no other."""
    seconds: list[float] = []
    started = clock()
    while len(seconds) <= NUM_STEPS:
        before = clock()
        step()
        seconds.append(clock() - before)
        is_first = len(seconds) == 1
        if clock() - started >= (LONE_SECONDS if is_first else LIMIT_SECONDS):
            break
        if not is_first and seconds[-1] >= enough_seconds:
            break
    return statistics.median(seconds[1:] or seconds)


class DecodeStep:
    """Calls are decode steps of a few base sequences; `end` forgets them. For an engine that nobody else steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_sequences = min(NUM_SEQUENCES, engine.config.max_sequences)
        capacity = engine.kv_capacity_tokens // self._num_sequences
        self._max_tokens = min(engine.capacity.max_model_len_tokens, capacity, MAX_STEPS) - 1

    def __call__(self) -> None:
        if self._engine.num_requests == 0:
            sampling = Sampling(max_tokens=max(self._max_tokens, 1), temperature=0.0, ignore_eos=True)
            for index in range(self._num_sequences):
                self._engine.submit(Submit(f"step-{index}", (0,), sampling))
            self._engine.step()
        self._engine.step()

    def end(self) -> None:
        for index in range(self._num_sequences):
            self._engine.abort(f"step-{index}")
        self._engine.forget_history()


log = logging.getLogger("multilora.engine")

TRIM_INTERVAL_SECONDS = 5.0
SHUTTING_DOWN = "The server is shutting down."


class EngineProcess:
    """Feeds messages to the engine and sends its events."""

    def __init__(self, engine: Engine, side: EngineSide, inbox: queue.SimpleQueue[list[ToEngine]]) -> None:
        self._engine = engine
        self._side = side
        self._inbox = inbox
        self._drain_deadline: float | None = None
        self._refused: list[FromEngine] = []
        self._stats_sent_at = 0.0
        self._stats_are_due = True
        self._trimmed_at = 0.0
        self._trim_is_due = False
        self._num_variants_at_start = _num_variants(engine)

    def run(self) -> None:
        """Until a drain has ended."""
        engine = self._engine
        while not self._is_drained():
            engine.wake.clear()
            self._take_messages()
            num_reads = engine.adapter_loads.num_reads
            messages: list[FromEngine] = [*self._refused, *engine.step()]
            self._refused.clear()
            is_idle = engine.is_idle
            self._stats_are_due |= bool(messages) or not is_idle or engine.adapter_loads.num_reads != num_reads
            if self._stats_are_due and (is_idle or self._stats_are_old()):
                messages.append(self._stats())
                self._stats_are_due, self._stats_sent_at = False, time.monotonic()
            if messages:
                self._side.write(messages)
            if is_idle:
                self._rest()
            else:
                self._trim_is_due = True

    def _stats(self) -> Stats:
        """The engine's, and what was compiled: none of it should be since the start, as a step waits for it."""
        count = _num_variants(self._engine)
        return msgspec.structs.replace(
            self._engine.stats(),
            num_kernel_variants=count,
            num_kernel_variants_after_ready=count - self._num_variants_at_start,
        )

    def _rest(self) -> None:
        """Wait for news. What past steps have freed goes back to the system, now and then; what was not captured before
        the first request is captured."""
        if self._engine.capture_while_idle():
            return
        timeout_seconds = self._seconds_to_deadline()
        if self._trim_is_due:
            left_seconds = self._trimmed_at + TRIM_INTERVAL_SECONDS - time.monotonic()
            if left_seconds <= 0:
                self._engine.trim()
                trim_heap()
                self._trim_is_due, self._trimmed_at = False, time.monotonic()
            else:
                timeout_seconds = left_seconds if timeout_seconds is None else min(left_seconds, timeout_seconds)
        self._engine.wake.wait(timeout_seconds)

    def _take_messages(self) -> None:
        while not self._inbox.empty():
            self._stats_are_due = self._trim_is_due = True
            for message in self._inbox.get():
                self._take(message)

    def _take(self, message: ToEngine) -> None:
        if isinstance(message, Drain):
            self._drain_deadline = time.monotonic() + message.limit_seconds
            self._engine.pauses.end()
        elif isinstance(message, (Submit, Pause, Sleep, Resume)) and self._drain_deadline is not None:
            self._refused.append(Finished(message.request_id, "error", error=SHUTTING_DOWN))
        elif isinstance(message, Pause):
            self._engine.pauses.begin(message)
            self._stats_sent_at = 0.0  # the next Stats goes out with the answer or before it
        elif isinstance(message, Resume):
            self._engine.resume(message.request_id)
            self._stats_sent_at = 0.0
        elif isinstance(message, Sleep):
            self._engine.sleep(message.request_id)
            self._stats_sent_at = 0.0
        elif not isinstance(message, Ping):  # which wants Stats, like every message
            self._engine.handle(message)

    def _stats_are_old(self) -> bool:
        return time.monotonic() - self._stats_sent_at >= self._engine.config.stats_interval_seconds

    def _seconds_to_deadline(self) -> float | None:
        if self._drain_deadline is None:
            return self._engine.pauses.seconds_left
        return 0.0 if self._engine.num_requests == 0 else max(self._drain_deadline - time.monotonic(), 0.0)

    def _is_drained(self) -> bool:
        if self._drain_deadline is None:
            return False
        if self._engine.num_requests and time.monotonic() >= self._drain_deadline:
            self._engine.fail_all(SHUTTING_DOWN)
            self._side.write(self._engine.take_events())
        return self._engine.num_requests == 0


def main() -> int:
    """Returns the exit code."""
    die_with_parent()  # on other systems the socket tells of its end
    keep_freed_memory()
    bound_product_caches()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    side = EngineSide(int(sys.argv[1]))
    options = side.read_options()
    if options is None:
        return 0
    logs.configure(options.log_format, options.log_level)
    inbox: queue.SimpleQueue[list[ToEngine]] = queue.SimpleQueue()
    wake: list[threading.Event] = []
    threading.Thread(target=_read, args=(side, inbox, wake), name="reader", daemon=True).start()
    try:
        engine = _start(options)
    except Exception as error:
        if _is_for_operator(error):
            side.write([Fatal(str(error))])  # the parent logs it
        else:
            log.exception("the engine cannot start")
            side.write([Fatal(f"{type(error).__name__}: {error}")])
        return 1
    wake.append(engine.wake)
    side.write([engine.ready(os.getpid())])
    try:
        EngineProcess(engine, side, inbox).run()
    except Exception as error:
        log.exception("the engine cannot go on")
        # Requests of all tenants are answered with it; what the error says may be of one of them.
        side.write([Fatal(f"The engine failed: {type(error).__name__}; its log says more.")])
        return 1
    return 0


def _start(options: EngineOptions) -> Engine:
    """Load and warm up. Imports torch only here, when the reader is already listening for the parent's death."""
    probing = ProbeProcess(is_early=True) if may_find_accelerator(options.device) else None
    try:
        return _warm_engine(options, probing)
    finally:
        if probing is not None:
            probing.end()


def _warm_engine(options: EngineOptions, probing: ProbeProcess | None) -> Engine:
    times = [time.monotonic()]
    # Imported objects stay; the collector would walk through all of them again and again meanwhile.
    gc.disable()
    import torch

    from service.engine.startup.build import build_engine

    gc.freeze()
    gc.enable()
    # torch goes by the cores of the affinity mask and by OMP_NUM_THREADS, and knows no quota.
    most_threads = options.num_threads or min(torch.get_num_threads(), num_usable_cpus())
    torch.set_num_threads(most_threads)
    times.append(time.monotonic())
    engine = build_engine(options, probing=probing)
    times.append(time.monotonic())
    compile_kernels(engine)
    times.append(time.monotonic())
    if options.num_threads is None and engine.capacity.device.type == "cpu":
        step = DecodeStep(engine)
        number = choose_num_threads(most_threads, torch.set_num_threads, step, time.perf_counter)
        step.end()
        log.info("CPU threads: %d of at most %d, by timed decode steps (--num-threads decides)", number, most_threads)
    engine.capture_steps()
    warm_up(engine)
    times.append(time.monotonic())
    parts = ("libraries", "weights, probes and budgets", "kernels", "first steps")
    parts_shown = (f"{part} {end - begin:.1f}" for part, (begin, end) in zip(parts, pairwise(times), strict=True))
    log.info("the engine started in %.1f s: %s", times[-1] - times[0], ", ".join(parts_shown))
    # Objects that live now live on, too.
    gc.collect()
    gc.freeze()
    return engine


def compile_kernels(engine: Engine) -> None:
    """All that steps can need: what is in no cache side by side first, since one after the other it takes minutes."""
    from kernels.compile_ahead import warm_up_ahead

    warm_up_ahead(engine.compile_kernels, engine.config.device.partition(":")[0])


def _num_variants(engine: Engine) -> int:
    from kernels.compile_ahead import num_variants

    return num_variants(engine.capacity.device)


def _is_for_operator(error: Exception) -> bool:
    """Whether the error is one that is foreseen, of the model, the device, the budgets or the store: one sentence that
    says what to change. Where it was raised helps nobody then."""
    platform = sys.modules.get("kernels.platform")  # imports torch, which may be what failed
    kinds = (ModelError, AdapterError) if platform is None else (ModelError, AdapterError, platform.BackendError)
    return isinstance(error, kinds)


def warm_up(engine: Engine) -> None:
    """One full prefill and two decode steps, so that the first request does not pay for what is set up lazily."""
    limit = min(engine.capacity.max_model_len_tokens, engine.kv_capacity_tokens)
    num_prompt = min(engine.config.token_budget, limit - 3)
    if num_prompt < 1:
        return
    sampling = Sampling(max_tokens=3, temperature=1.0, top_p=0.9, ignore_eos=True)
    engine.submit(Submit("warm-up", (0,) * num_prompt, sampling))
    engine.run_until_idle()
    engine.forget_history()


def _read(side: EngineSide, inbox: queue.SimpleQueue[list[ToEngine]], wake: list[threading.Event]) -> None:
    """The reader thread. Without a parent the process ends here, at once."""
    while (messages := side.read()) is not None:
        inbox.put(messages)  # a frame whole: its requests begin in the same step
        for event in wake:
            event.set()
    os._exit(0)


if __name__ == "__main__":
    # Skips the teardown of torch's threads, which can take seconds; everything is written by now.
    code = main()
    logging.shutdown()
    os._exit(code)
