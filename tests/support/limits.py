"""How long tests and benchmarks wait for what must come. None waits so long where all is well, however slow the machine
is.
"""

from __future__ import annotations

LIMIT_SECONDS = 600.0
