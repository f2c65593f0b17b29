"""`python -m adapters.peft.pattern_child`: matches strangers' regular expressions for `adapters.peft.target_patterns`.

A job is [seconds, method, [pattern...], [text...]]; the answer has for each pattern the indices of the texts that it
matches, or says which pattern is broken and why.
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

from adapters.isolation.confinement import serve

# To read a job's texts too, tens of thousands of which may come.
_MAX_SECONDS = 10.0


def matches(method: str, patterns: list[str], texts: list[str]) -> dict[str, Any]:
    """The reply to one request."""
    found = []
    for index, pattern in enumerate(patterns):
        try:
            match = getattr(re.compile(pattern), method)
        except Exception as error:  # not only re.error: OverflowError, RecursionError
            return {"broken": index, "why": str(error)}
        found.append([i for i, text in enumerate(texts) if match(text)])
    return {"found": found}


def _answer(line: bytes) -> dict[str, Any]:
    seconds, method, patterns, texts = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # `serve` stops it
    return matches(method, patterns, texts)


def main() -> int:
    """Returns the exit code."""
    return serve(_answer, max_seconds=_MAX_SECONDS)


if __name__ == "__main__":
    os._exit(main())
