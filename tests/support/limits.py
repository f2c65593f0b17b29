"""How long a test waits for what must come. No test waits so long where all is well, however slow the machine is."""

LIMIT_SECONDS = 300.0
