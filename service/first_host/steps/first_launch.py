"""`python -m service.first_host.steps.first_launch JSON`: how long the LoRA kernels take to build and run, as one JSON
line.

The request names device and model_dir. TRITON_CACHE_DIR is the caller's, and decides whether anything is built.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from adapters.isolation.child_process import die_with_parent


def main(device_name: str, model_dir: str) -> None:
    die_with_parent()
    # Only now: with torch comes a device's own package, which takes seconds, and may not return.
    import torch

    from kernels.platform import IMPLEMENTATIONS, detect, in_use, install, prepare
    from kernels.probe.cases.lora import linear
    from kernels.probe.cases.test_tensors import Place
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
