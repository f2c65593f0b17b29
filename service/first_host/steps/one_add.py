"""`python -m service.first_host.steps.one_add DEVICE`: one addition there, and a line of it; else an error's last
line.
"""

from __future__ import annotations

import sys

from adapters.isolation.child_process import die_with_parent


def main(device: str) -> None:
    die_with_parent()
    # Only now: with torch comes a device's own package, which takes seconds, and may not return.
    import torch

    from kernels.platform import detect, prepare

    prepare(device)
    detect(device)
    ones = torch.ones(16, device=device)
    assert (ones + ones).cpu().tolist() == [2.0] * 16, "1 + 1 is not 2 on this device"
    print(f"1 + 1 is 2 on {device}")


if __name__ == "__main__":
    main(sys.argv[1])
