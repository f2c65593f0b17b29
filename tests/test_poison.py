"""Fresh memory is NaN here and in the processes that tests start, and engines draw the same seeds each time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.limits import LIMIT_SECONDS


def test_fresh_memory_is_nan_in_this_process() -> None:
    assert torch.empty(1000).isnan().all()


@pytest.mark.parametrize(
    "code",
    [
        "import torch; assert torch.empty(1000, dtype=torch.bfloat16).isnan().all()",
        "import sys, torch; assert not {'torch._dynamo', 'torch._inductor', 'triton'} & set(sys.modules)",
        "import sys; assert not {'torch', 'numpy'} & set(sys.modules)",
        "import subprocess, sys; code = 'import torch; assert torch.empty(9).isnan().all()';"
        "subprocess.run([sys.executable, '-c', code], check=True)",
        "import random; from service.engine import requests;"
        "assert requests.random.getrandbits(63) == random.Random(0).getrandbits(63)",
    ],
    ids=["with torch", "nothing more than torch", "without torch", "a child's child", "seeds"],
)
def test_a_process_that_a_test_starts(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
