"""Seconds from the start of a server to `/ready` on a device, with an empty kernel cache and with a filled one.

python -m bench.steps.kernel_cache [--device cuda] [--shape 8b] [--layers 2] [--starts 2] [--json FILE]

All budgets are the server's own. With few layers hardly any time goes into reading weights, and the kernels are those
of the whole model; what it takes to capture steps before `/ready` grows with the layers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.shapes import SHAPES, write_checkpoint
from tests.support.http.server_process import start_server

# Where Triton keeps compiled kernels.
_CACHE_VARIABLE = "TRITON_CACHE_DIR"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.steps.kernel_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=[name for name, shape in SHAPES.items() if shape], default="8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--starts", type=int, default=2, help="with the filled cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go too")
    arguments = parser.parse_args()
    result = measure(arguments.device, arguments.shape, arguments.layers, arguments.starts)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    for index, start in enumerate(result["starts"]):
        cache = "a filled" if index else "an empty"
        beyond = start["seconds"] - start["weights_seconds"]
        print(f"ready after {start['seconds']:.1f} s with {cache} kernel cache, {beyond:.1f} beyond the weights;")
        print(f"    {start['engine']}")


def measure(device: str, shape_name: str, num_layers: int, num_starts: int) -> dict[str, list[dict[str, Any]]]:
    """The first start compiles; the others find what it has compiled."""
    shape = SHAPES[shape_name]
    assert shape is not None, "a shape, so that the number of layers can be chosen"
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(scratch) / "model"
        model_dir.mkdir()
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        write_checkpoint(model_dir, replace(shape, num_hidden_layers=num_layers), device, dtype)
        os.environ[_CACHE_VARIABLE] = str(Path(scratch) / "kernels")
        starts = [_start(model_dir, Path(scratch) / f"start-{index}", device) for index in range(1 + num_starts)]
    return {"starts": starts}


def _start(model_dir: Path, work_dir: Path, device: str) -> dict[str, Any]:
    """Seconds until ready, of these to load the weights (beside the probe of the ops), and the engine's own account."""
    decided: dict[str, Any] = dict.fromkeys(("num_threads", "kv_bytes", "adapter_row_bytes", "host_tier_bytes"))
    begin = time.perf_counter()
    server = start_server(model_dir, work_dir, device=device, **decided)
    seconds = time.perf_counter() - begin
    server.stop()
    weights = re.search(r"of weights in ([\d.]+) s", server.log)
    engine = re.search(r"the engine started in .*", server.log)
    assert weights is not None and engine is not None
    return {"seconds": seconds, "weights_seconds": float(weights[1]), "engine": engine[0]}


if __name__ == "__main__":
    main()
