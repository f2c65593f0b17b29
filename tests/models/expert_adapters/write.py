"""Writes the adapters beside this file with the PEFT of its environment: experts of two tensors, as transformers holds
them, trained by `target_parameters`; and beside each what PEFT adds to the weights when it merges.

    pip install --no-deps --target /tmp/peft-0.18.1 peft==0.18.1
    PYTHONPATH=/tmp/peft-0.18.1 python tests/models/expert_adapters/write.py [CASE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
RANK = 2
# Experts, hidden width, and their own width; where gate and up together, or the experts alone, are as wide as the
# hidden states, shapes do not tell inputs from outputs.
SIZES = {"odd": (3, 8, 5), "wide": (3, 8, 4), "square": (3, 8, 8), "gpt-oss": (3, 8, 8), "gpt-oss-4": (3, 8, 8)}


class Experts(torch.nn.Module):
    """The experts of a layer."""

    def __init__(self, num: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(num, 2 * width, hidden))
        self.down_proj = torch.nn.Parameter(torch.zeros(num, hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class TransposedExperts(torch.nn.Module):
    """The experts of a layer of gpt-oss."""

    def __init__(self, num: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(num, hidden, 2 * width))
        self.down_proj = torch.nn.Parameter(torch.zeros(num, width, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def nested(path: str, inner: torch.nn.Module) -> torch.nn.Module:
    """A module around `inner`, at this path."""
    outer = inner
    for name in reversed(path.split(".")):
        outer = torch.nn.ModuleDict({name: outer})
    return outer


def write(name: str, sizes: tuple[int, int, int]) -> None:
    """One adapter and its deltas."""
    torch.manual_seed(0)
    path = "model.layers.0.mlp.experts"
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=3, target_modules=[], target_parameters=targets)
    experts = (TransposedExperts if name.startswith("gpt-oss") else Experts)(*sizes)
    if name == "gpt-oss":
        experts.is_transposed = True  # as transformers 5 tells PEFT, and transformers 4 does not
    model = peft.get_peft_model(nested(path, experts), config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(torch.randn(parameter.shape).bfloat16())
    directory = HERE / f"{peft.__version__}-{name}"
    model.save_pretrained(str(directory))
    (directory / "README.md").unlink(missing_ok=True)
    tensors = load_file(directory / "adapter_model.safetensors")
    merged = model.merge_and_unload()
    experts = merged.get_submodule(path)
    deltas = {"gate_up": experts.gate_up_proj.detach(), "down": experts.down_proj.detach()}
    save_file({key: tensor.contiguous() for key, tensor in deltas.items()}, directory / "deltas.safetensors")
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    fields = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(fields, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    for case in sys.argv[1:] or SIZES:
        write(case, SIZES[case])
