"""How long a test waits for what must come. No test waits so long where all is well, however slow the machine is."""

from bench.limits import LIMIT_SECONDS

__all__ = ["LIMIT_SECONDS"]
