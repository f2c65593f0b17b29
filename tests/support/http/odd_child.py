"""A child of `adapters.isolation.bounded_child` that says what it is told to: `odd_child MISSING NUM_JOBS EXIT_CODE`.

MISSING is what its confinement lacks. It answers NUM_JOBS jobs with its process id and ends at the next.
"""

from __future__ import annotations

import json
import os
import sys

missing, num_jobs, exit_code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print(json.dumps([missing] if missing else []), flush=True)
for num_before, _ in enumerate(sys.stdin):
    if num_before == num_jobs:
        os._exit(exit_code)
    print(json.dumps({"pid": os.getpid()}), flush=True)
