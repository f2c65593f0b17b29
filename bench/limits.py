"""How long benchmarks and tests wait for what must come; where all is well nobody waits so long."""

from __future__ import annotations

LIMIT_SECONDS = 600.0
