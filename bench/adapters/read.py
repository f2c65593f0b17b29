"""What reading an adapter from the store into host memory takes, which a first token waits for when its adapter is on
disk alone.

    .venv/bin/python -m bench.adapters.read [--shape 8b] [--rank 16] [--stored bfloat16] [--dtype bfloat16]
                                             [--adapters 8] [--pinned] [--threads 4]

Adapters are random, on every projection of the shape; --stored is their dtype in the store, --dtype the engine's. Their
files were just written, so that the system has them in memory. --pinned: into memory that a GPU copies from. Prints a
JSON line: medians of the reads but the first, by the clock and by processor time of all threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from adapters.memory.host_tier import HostTier
from adapters.store.store import AdapterStore
from bench.scale.cluster import write_adapter
from bench.shapes import SHAPES, write_outside
from service.models.layouts import layout_in


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.adapters.read", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=("8b", "1b", "200m", "tiny"), default="8b")
    parser.add_argument("--rank", type=int, default=16)
    for flag in ("--stored", "--dtype"):
        parser.add_argument(flag, choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="that divide the copies of one read")
    given = parser.parse_args()
    shape, dtype, stored = SHAPES[given.shape], getattr(torch, given.dtype), getattr(torch, given.stored)
    assert shape is not None
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "model").mkdir()
        write_outside(root / "model", shape, dtype)
        layout = layout_in(root / "model")
        digests = []
        store = AdapterStore(root / "store", layout, base_name="base")
        for number in range(given.adapters):
            num_bytes = write_adapter(root / f"made-{number}", shape, given.rank, number, stored)
            upload = store.begin()
            upload.add_directory(root / f"made-{number}")
            digests.append(upload.finish(f"adapter-{number}")[0].digest)
        store.close()
        kind = {"dtype": dtype, "is_pinned": given.pinned, "num_threads": given.threads}
        tier = HostTier(root / "store", layout, 3 * num_bytes, **kind)
        clock, processor = [], []
        for digest in digests:
            begun, begun_processor = time.perf_counter(), time.process_time()
            tier.get(digest)
            clock.append(time.perf_counter() - begun)
            processor.append(time.process_time() - begun_processor)
    figures = {
        "megabytes": round(num_bytes / 1e6, 1),
        "seconds": round(statistics.median(clock[1:]), 4),
        "cpu_seconds": round(statistics.median(processor[1:]), 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
