"""PEFT's own mixed-adapter generation as a line-driven process: `run BATCH_SIZE` on stdin, seconds on stdout.

The requests are sorted by output length, then prompt length, so that a batch wastes as little as possible; each batch
generates as many tokens as its longest request asks for. Only the tokens asked for count.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.workload import NUM_ADAPTERS, BenchRequest, adapter_name, requests


def load(root: Path, dtype: str) -> torch.nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=getattr(torch, dtype))
    model = PeftModel.from_pretrained(base, root / adapter_name(0), adapter_name=adapter_name(0))
    for index in range(1, NUM_ADAPTERS):
        model.load_adapter(root / adapter_name(index), adapter_name=adapter_name(index))
    # Adapters are loaded in float32 unless told otherwise; the same dtype as the base is what a user would run.
    return model.to(getattr(torch, dtype)).eval()


def generate(model: torch.nn.Module, batch: list[BenchRequest]) -> None:
    width = max(len(request.prompt_token_ids) for request in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, width - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
        mask[row, width - len(request.prompt_token_ids) :] = 1
    num_new = max(request.num_output_tokens for request in batch)
    output = model.generate(  # type: ignore[operator]
        input_ids=ids,
        attention_mask=mask,
        adapter_names=[adapter_name(request.adapter) for request in batch],
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        pad_token_id=0,
    )
    assert output.shape == (len(batch), width + num_new)


def run(model: torch.nn.Module, batch_size: int) -> float:
    work = sorted(requests(), key=lambda request: (request.num_output_tokens, len(request.prompt_token_ids)))
    start = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(work), batch_size):
            generate(model, work[first : first + batch_size])
    return time.perf_counter() - start


def main() -> None:
    root, dtype, num_threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(num_threads)
    model = load(root, dtype)
    with torch.inference_mode():  # what is set up lazily belongs to no run
        generate(model, [replace(request, num_output_tokens=4) for request in requests()[:8]])
    print("ready", flush=True)
    for line in sys.stdin:
        command, batch_size = line.split()
        assert command == "run", command
        print(run(model, int(batch_size)), flush=True)


if __name__ == "__main__":
    main()
