"""What stands between the base products of a layer: one launch an op, against the same ops in plain torch.

    python -m bench.kernels.dense [--json FILE]

Sizes are those of an 8B-shaped llama in bfloat16. Each op by itself, with arguments that the L2 cache does not hold,
and a layer: its four products (cuBLAS) with everything but attention between them. Before a row is timed, it is
compared with plain torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from bench.kernels.timing import num_sets, time_graph
from kernels.platform import detect, installed
from kernels.rms_norm.ops import add_rms_norm
from kernels.rotary_kv.ops import rotary_kv
from kernels.swiglu.ops import swiglu

HIDDEN, INTERMEDIATE, NUM_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
NUM_TOKENS = (1, 64, 512, 4096)
QKV_WIDTH = (NUM_HEADS + 2 * KV_HEADS) * HEAD_DIM
OPS = ("rms_norm", "rotary_kv", "swiglu")
TOLERANCE = 3e-2
BYTES_PER_TOKEN = 2 * (4 * HIDDEN + 3 * QKV_WIDTH + 3 * INTERMEDIATE)

Call = Callable[[], tuple[torch.Tensor, ...]]


class Layer:
    """Arguments of one layer's ops for so many tokens."""

    def __init__(self, num_tokens: int, weights: dict[str, torch.Tensor]) -> None:
        self._num_tokens, self._weights = num_tokens, weights
        self._x, self._residual = random(num_tokens, HIDDEN), random(num_tokens, HIDDEN)
        self._qkv, self._gate_up = random(num_tokens, QKV_WIDTH), random(num_tokens, 2 * INTERMEDIATE)
        angles = random(num_tokens, 1, HEAD_DIM // 2).float().repeat(1, 1, 2)
        self._cos, self._sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        num_blocks = num_tokens // BLOCK_SIZE + 2
        self._caches = [random(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(2)]
        self._slots = torch.randperm((num_blocks - 1) * BLOCK_SIZE, device="cuda")[:num_tokens] + BLOCK_SIZE

    def ops(self) -> dict[str, Call]:
        return {
            "add + norm": self._norm,
            "rotation + cache write": lambda: self._rotate(None),
            "the same, heads normed": lambda: self._rotate(self._weights["heads"]),
            "silu * mul": lambda: (swiglu(self._gate_up),),
        }

    def run(self) -> torch.Tensor:
        """A layer without attention, whose place q takes."""
        normed, _ = add_rms_norm(self._x, self._residual, self._weights["norm"], 1e-5)
        q = self._rotated(functional.linear(normed, self._weights["qkv"]), None)
        mixed = functional.linear(q.reshape(self._num_tokens, -1), self._weights["o"])
        normed, _ = add_rms_norm(mixed, self._residual, self._weights["norm"], 1e-5)
        return functional.linear(swiglu(functional.linear(normed, self._weights["gate_up"])), self._weights["down"])

    def products(self) -> None:
        """The products of `run` alone."""
        for x, name in ((self._x, "qkv"), (self._x, "o"), (self._x, "gate_up")):
            functional.linear(x, self._weights[name])
        functional.linear(self._gate_up[:, :INTERMEDIATE], self._weights["down"])

    def _norm(self) -> tuple[torch.Tensor, ...]:
        return add_rms_norm(self._x, self._residual, self._weights["norm"], 1e-5)

    def _rotate(self, head_weight: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return self._rotated(self._qkv, head_weight), *self._caches

    def _rotated(self, qkv: torch.Tensor, head_weight: torch.Tensor | None) -> torch.Tensor:
        heads = qkv.view(self._num_tokens, -1, HEAD_DIM)
        maps = self._cos, self._sin, *self._caches, self._slots
        return rotary_kv(heads, *maps, head_weight=head_weight, eps=1e-6)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def weights() -> dict[str, torch.Tensor]:
    shapes = {"qkv": (QKV_WIDTH, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN),
              "down": (HIDDEN, INTERMEDIATE)}  # fmt: skip
    matrices = {name: random(*shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    return {**matrices, "norm": random(HIDDEN), "heads": random(NUM_HEADS + KV_HEADS, HEAD_DIM)}


def measure(num_tokens: int, names: tuple[str, ...], held: dict[str, torch.Tensor]) -> dict[str, float]:
    """Microseconds with these implementations of OPS."""
    platform = detect("cuda")
    for op, name in zip(OPS, names, strict=True):
        platform = platform.with_fallback(op, name, "for the measurement")
    layers = [Layer(num_tokens, held) for _ in range(num_sets(BYTES_PER_TOKEN * num_tokens))]
    with installed(platform), torch.inference_mode():
        found = {name: time_graph([layer.ops()[name] for layer in layers]) for name in layers[0].ops()}
        found["a layer without attention"] = time_graph([layers[0].run])
        found["its products alone"] = time_graph([layers[0].products])
    return found


def check(num_tokens: int, held: dict[str, torch.Tensor]) -> None:
    """Each op of the device against plain torch, on equal arguments."""
    results = []
    for names in (("triton_cuda",) * len(OPS), ("reference",) * len(OPS)):
        platform = detect("cuda")
        for op, name in zip(OPS, names, strict=True):
            platform = platform.with_fallback(op, name, "for the comparison")
        torch.manual_seed(0)
        with installed(platform), torch.inference_mode():
            calls = Layer(num_tokens, held).ops().values()
            results.append([result.clone() for call in calls for result in call()])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=TOLERANCE, rtol=TOLERANCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    held, rows = weights(), []
    print("| tokens | op | plain torch, us | one launch, us | ratio |\n|---|---|---|---|---|")
    for num_tokens in NUM_TOKENS:
        check(num_tokens, held)
        plain = measure(num_tokens, ("reference",) * len(OPS), held)
        ours = measure(num_tokens, ("triton_cuda",) * len(OPS), held)
        for name, before in plain.items():
            rows.append({"num_tokens": num_tokens, "name": name, "plain": before, "ours": ours[name]})
            print(
                f"| {num_tokens} | {name} | {before:.1f} | {ours[name]:.1f} | {ours[name] / before:.2f} |", flush=True
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
