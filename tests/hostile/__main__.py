"""Hostile input, as much of it as there is time for: `make test-hostile`.

    python -m tests.hostile                       # the long form: at most 15 minutes on two cores
    python -m tests.hostile --cases=300 --runs=0  # the short form, of the normal tests

Hypothesis makes --cases values for each target that takes values, atheris --runs inputs for each that takes bytes, each
of those in a process of its own. Ends with 1 for an exception that nobody caught, for a file that was written outside
the stores, and for memory that grows.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS_PER_FUZZER = 100
MAX_GROWTH_BYTES = 24 << 20
_CHUNKS = 8


def resident_bytes() -> int:
    """What this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tell(name: str, by: str, count: int, seconds: float, growth_bytes: int) -> None:
    """A row of the table."""
    print(f"| {name} | {by} | {count:,} | {seconds:.0f} s | {growth_bytes / (1 << 20):+.1f} MiB |", flush=True)


def run_values(root: Path, num_cases: int, seed: int) -> int:
    """Everything that Hypothesis is good for; the number of cases."""
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(root / "hypothesis")
    sys.dont_write_bytecode = True
    import hypothesis

    from tests.hostile.targets import Target, Targets, writes_outside

    targets, total = Targets(root), 0
    hook, written = writes_outside(root)

    def one_chunk(target: Target, chunk: int, size: int) -> int:
        count = 0

        @hypothesis.seed(seed + chunk)
        @hypothesis.settings(
            max_examples=size, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(target.values)
        def check(value: object) -> None:
            nonlocal count
            count += 1
            target.check(value)

        check()
        return count

    chosen = [target for target in targets.all().values() if target.values is not None]
    for target in chosen:
        for value in target.found:
            target.check(value)
        one_chunk(target, _CHUNKS, 20)  # what is imported and cached at the first use is no growth
    sys.addaudithook(hook)
    for target in chosen:
        started, held, count = time.monotonic(), list[int](), 0
        for chunk in range(_CHUNKS):
            count += one_chunk(target, chunk, max(1, num_cases // _CHUNKS))
            held.append(resident_bytes())
        growth = held[-1] - held[_CHUNKS // 2 - 1]
        total += count
        tell(target.name, "Hypothesis", count, time.monotonic() - started, growth)
        assert growth <= MAX_GROWTH_BYTES, f"{target.name}: {growth} bytes more in the last half"
    targets.close()
    assert not written, f"written outside the stores: {written[:5]}"
    return total


def run_bytes(num_runs: int, seed: int) -> int:
    """Everything that atheris is good for, where it is installed; the number of inputs."""
    if not num_runs:
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: bytes are not tried.", flush=True)
        return 0
    from tests.hostile.targets import Targets

    with tempfile.TemporaryDirectory() as root:
        targets = Targets(Path(root))
        names = [target.name for target in targets.all().values() if target.seeds]
        targets.close()
    return sum(run_fuzzer(name, num_runs, seed) for name in names)


def run_fuzzer(name: str, num_runs: int, seed: int) -> int:
    """One target in a process of its own, which atheris ends."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz", name, f"-runs={num_runs}", f"-seed={seed or 1}",
         f"-max_total_time={SECONDS_PER_FUZZER}", "-print_final_stats=1", "-rss_limit_mb=1024", "-max_len=4096"],
        capture_output=True, text=True, errors="replace", check=False, timeout=SECONDS_PER_FUZZER * 6,
    )  # fmt: skip
    assert done.returncode == 0, f"{name}: {(done.stdout + done.stderr)[-6000:]}"
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stdout + done.stderr))
    growth = int(re.findall(r"grew by (-?\d+) bytes", done.stdout)[-1])
    count = int(stats["number_of_executed_units"])
    tell(name, "atheris", count, time.monotonic() - started, growth)
    assert growth <= MAX_GROWTH_BYTES, f"{name}: {growth} bytes more in the last half"
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description="Hostile input of all kinds.")
    parser.add_argument("--cases", type=int, default=4000, help="of each target that takes values")
    parser.add_argument("--runs", type=int, default=32_000, help="of each target that takes bytes")
    parser.add_argument("--seed", type=int, default=None, help="of all choices; another one each time by default")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(1, 1 << 30) if given.seed is None else given.seed
    print(f"seed {seed}\n| Tried | By | Cases | Time | Memory, last half |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="hostile-") as root:
        total = run_values(Path(root), given.cases, seed)
    total += run_bytes(given.runs, seed)
    print(f"{total:,} cases; 0 uncaught exceptions, 0 files outside the stores, memory flat", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
