"""`python -m adapters.peft.pattern_child`: matches strangers' regular expressions for `adapters.peft.target_patterns`,
and ends.

Reads [seconds, method, [pattern...], [text...]] from its input; writes for each pattern the indices of the texts that
it matches, or which pattern is broken and why. A timer of the kernel ends it in the middle of a match, since nobody
handles its signal; memory is bounded by its address space; files, network and other processes are out of its reach.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Any

from adapters.isolation.confinement import confine

_MAX_BYTES = 512 << 20


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


def main() -> None:
    """Answer one request. Confinement that the kernel lacks is reported by the long-lived confined children."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    seconds, method, patterns, texts = json.load(sys.stdin)
    confine()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    json.dump(matches(method, patterns, texts), sys.stdout)


if __name__ == "__main__":
    main()
