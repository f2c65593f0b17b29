"""The LoRA kernels' first launch, each in a process of its own: `python -m service.doctor.checks.first_launch JSON`.

The request names device and model_dir; the answer is one JSON line. TRITON_CACHE_DIR is the caller's, and decides
whether anything is built.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.child_process import child_environment, die_with_parent
from service.doctor.checks.step_process import StepFailed, StepHost

_FIRST_LAUNCH_SECONDS = 100.0
_TRY = (
    "Where Triton fails on an NPU, build the image with the second set of pins (--build-arg NPU_PINS=2.12, see "
    "docs/ascend.md), which has triton-ascend 3.2.2, and run this command again."
)


def triton(host: StepHost) -> None:
    """The LoRA kernels' first launch in two processes that share a cache, which is empty for the first of them."""
    from kernels.platform import IMPLEMENTATIONS

    module = IMPLEMENTATIONS[host.device_type]["lora"][0]
    host.facts(implementation=module)
    with tempfile.TemporaryDirectory(prefix="multilora-doctor-") as cache:
        for name in ("empty_cache", "full_cache"):
            host.tell(f"first launch with {name.replace('_', ' ')}")
            host.facts(**{name: _first_launch(host, cache)})


def _first_launch(host: StepHost, cache: str) -> dict[str, Any]:
    request = json.dumps({"device": host.device, "model_dir": host.options["model_dir"]})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "service.doctor.checks.first_launch", request],
            env={**child_environment(), "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_FIRST_LAUNCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"The first launch did not end within {_FIRST_LAUNCH_SECONDS:.0f} s. {_TRY}") from error
    if done.returncode != 0:
        last = done.stderr.strip().rpartition("\n")[2][-400:]
        raise StepFailed(f"The first launch ended with exit code {done.returncode} ({last}). {_TRY}")
    facts: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return facts


def main(device_name: str, model_dir: str) -> None:
    die_with_parent()
    # Only now: with torch comes a device's own package, which takes seconds, and may not return.
    import torch

    from kernels.platform import IMPLEMENTATIONS, detect, in_use, install, prepare
    from kernels.probe.cases.lora import linear
    from kernels.probe.cases.tensors import Place
    from kernels.shapes import ProbeShapes
    from service.models.families import model_spec
    from service.models.spec.config_json import read_config

    prepare(device_name)
    detect(device_name)
    device = torch.device(device_name)
    platform = in_use(device)
    wanted = IMPLEMENTATIONS[platform.device]["lora"][0]
    install(replace(platform, implementations={**platform.implementations, "lora": wanted}), device.type)
    spec = model_spec(read_config(Path(model_dir)))
    heads = spec.attentions[0]
    shapes = ProbeShapes(
        dtype="bfloat16" if platform.native_bfloat16 else "float16",
        row_dtype="bfloat16" if platform.native_bfloat16 else "float16",
        hidden_size=spec.hidden_size,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
    )
    call = linear(shapes, Place(device, shapes.torch_dtype, shapes.torch_row_dtype))
    wait = torch.get_device_module(device).synchronize
    seconds = []
    with torch.inference_mode():
        for _ in range(2):
            wait()
            started = time.perf_counter()
            call()
            wait()
            seconds.append(time.perf_counter() - started)
    print(json.dumps({"first_launch_seconds": seconds[0], "second_launch_seconds": seconds[1]}))


if __name__ == "__main__":
    main(**{"device_name" if name == "device" else name: value for name, value in json.loads(sys.argv[1]).items()})
