"""Train an adapter of your own for the bundled base and upload it: `python -m examples.train_your_own`.

Copy this file, write another `answer`, and give it another name. Training takes about a minute on two cores; the upload
needs a running server (`make serve`) and is left out with `--no-upload`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from examples.bundled_jobs import ALL_LINEAR, prompts
from examples.train_adapters import exact_matches, load_base, pair_batch
from examples.train_base import BASE_DIR
from examples.training import Schedule, device_of_choice, fit

STEPS, BATCH_ROWS, RANK = 100, 20, 8


def answer(prompt: str) -> str:
    """What your adapter is to say: here, the words of the prompt as a list with a dot before each."""
    return "\n".join(f"* {word}" for word in prompt.split())


def batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless training batches of (prompt, answer) pairs."""
    source = prompts("my own job", held_out=False)
    while True:
        ids, labels = pair_batch(
            [(prompt, answer(prompt)) for prompt, _ in zip(source, range(BATCH_ROWS), strict=False)]
        )
        yield ids.to(device), labels.to(device)


def upload(directory: Path, name: str, url: str) -> None:
    """Send the two files of a PEFT directory to the server and ask the new adapter something."""
    files = {
        "adapter_config": (directory / "adapter_config.json").read_bytes(),
        "adapter_model": (directory / "adapter_model.safetensors").read_bytes(),
    }
    reply = httpx.post(f"{url}/v1/adapters", data={"name": name}, files=files, timeout=60)
    print(f"upload: {reply.status_code}", "" if reply.is_success else reply.text)
    reply.raise_for_status()
    question = {"model": name, "messages": [{"role": "user", "content": "lamp tiger moss"}], "temperature": 0}
    said = httpx.post(f"{url}/v1/chat/completions", json=question, timeout=60).raise_for_status().json()
    print(said["choices"][0]["message"]["content"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="bullets", help="the adapter's name on the server (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("data/bullets"), help="where to save it (default: %(default)s)"
    )
    parser.add_argument("--url", default=os.environ.get("MULTILORA_URL", "http://127.0.0.1:8000"), help="the server")
    parser.add_argument("--no-upload", action="store_true", help="only train and save")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    device = device_of_choice()
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(ALL_LINEAR), task_type="CAUSAL_LM")
    model = get_peft_model(load_base(BASE_DIR, device), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=7e-3, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    fit(model, batches(device), (optimizer,), Schedule(STEPS, warmup_steps=15), arguments.name)
    cases = [(prompt, answer(prompt)) for prompt, _ in zip(prompts("mine", held_out=True), range(100), strict=False)]
    print(f"{sum(exact_matches(model, cases, device))} of 100 held-out prompts answered exactly")
    model.save_pretrained(str(arguments.out))
    print(f"saved to {arguments.out}")
    if not arguments.no_upload:
        upload(arguments.out, arguments.name, arguments.url)


if __name__ == "__main__":
    main()
