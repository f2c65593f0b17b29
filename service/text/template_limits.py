"""What an uploaded chat template may cost: it can loop and grow without end, and one process renders for everybody.

The limits act on the template's own lines, through Python's trace hook of the rendering thread: each line that runs
checks the time and the size of the template's variables. What a single expression can blow up is bounded by the
sandbox (`service.text.chat_template`) and, whatever it is, by the address space that the process may have meanwhile.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2

MAX_SECONDS = 1.0
MAX_ITEMS = 8 << 20
MAX_NEW_BYTES = 512 << 20
_TEMPLATE_FILE = "<template>"
# The address space belongs to the whole process, so one template at a time runs under its limit.
_one_at_a_time = threading.Lock()
# Where requests render under `limited`: whoever waits for the turn waits here, and holds up no thread that uploads or
# other chats need.
WORKER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-template")


@contextmanager
def limited(max_seconds: float = MAX_SECONDS, max_items: int = MAX_ITEMS) -> Iterator[None]:
    """Within it, a template that runs longer, or holds a text or list of more items, ends in SecurityError, and one
    that takes more than MAX_NEW_BYTES ends in MemoryError. One thread at a time; the others wait."""

    def on_line(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            if time.monotonic() > deadline:
                raise jinja2.exceptions.SecurityError(f"the template takes longer than {max_seconds:g} s")
            for value in frame.f_locals.values():
                if isinstance(value, str | list | tuple | dict) and len(value) > max_items:
                    raise jinja2.exceptions.SecurityError("the template makes too large a text")
        return on_line

    def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
        return on_line if frame.f_code.co_filename == _TEMPLATE_FILE else None

    before = sys.gettrace()
    with _one_at_a_time, _address_space(MAX_NEW_BYTES):
        deadline = time.monotonic() + max_seconds
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(before)


@contextmanager
def _address_space(max_new_bytes: int) -> Iterator[None]:
    """The process gets at most so much more of it, as far as the system says what it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        yield
        return
    wanted = num_pages * resource.getpagesize() + max_new_bytes
    bounds = [bound for bound in (soft, hard, wanted) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
