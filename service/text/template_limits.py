"""What an uploaded chat template may cost: it can loop and grow without end, and one process renders for everybody.

The limits act on the template's own lines, through Python's trace hook of the rendering thread: each line that runs
checks the time and the size of the template's variables. What a single expression can blow up is bounded by the
sandbox (`service.text.chat_template`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2

MAX_SECONDS = 1.0
MAX_ITEMS = 8 << 20
_TEMPLATE_FILE = "<template>"


@contextmanager
def limited(max_seconds: float = MAX_SECONDS, max_items: int = MAX_ITEMS) -> Iterator[None]:
    """Within it, a template that runs longer, or holds a text or list of more items, ends in SecurityError."""
    deadline = time.monotonic() + max_seconds

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
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
