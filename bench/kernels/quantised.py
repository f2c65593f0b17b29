"""Products of quantised weights on a GPU, beside bfloat16 ones of cuBLAS: the four projections of an 8B-shaped layer.

    python -m bench.kernels.quantised [--tokens 1,64,8192] [--forms bf16,tiles,fp8,fp8-rounded,...] [--json FILE]
    python -m bench.kernels.quantised --sweep [--tokens 64] [--forms fp8,int4,nf4]

"tiles" is bfloat16 by our own kernel, "fp8-rounded" for many tokens alone, with `--fp8-activations`. Microseconds of
each projection, with windows for so many adapters of rank 16, and milliseconds of 32 layers; the floor is that of the
bytes at the rate of a copy. Each row is compared with a plain product before it is timed. A
sweep prints the best launch configurations of each projection. Whole steps:

    python -m bench.steps.engine --device cuda --shape 8b --engine weights=fp8
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.kernels.timing import copy_microseconds, num_sets, time_graph
from kernels.compile_ahead import warm_up_ahead
from kernels.linear import ops, triton_cuda
from kernels.linear.ops import PackedWeight, RowsBehind
from kernels.linear.quantised import NF4, Quantised, dequantise
from kernels.linear.triton_cuda_configs import MAX_TOKENS, MAX_WORDS, TileConfig, config_for

# Outputs, inputs, slices.
PROJECTIONS = {"qkv": (6144, 4096, 3), "o": (4096, 4096, 1), "gate_up": (28672, 4096, 2), "down": (4096, 14336, 1)}
NUM_LAYERS, RANK, MAX_ADAPTERS = 32, 16, 64
ADAPTERS = (0, 1, 8, 64)
# Bits of a weight with its scales, for the floor.
BITS = {
    **dict.fromkeys(("bf16", "tiles"), 16.0),
    **dict.fromkeys(("fp8", "fp8-rounded", "int8"), 8.0),
    "int4": 4 + 64 / 128,
    "nf4": 4 + 32 / 64,
}
TOLERANCE = 3e-2
# Outputs, warps and stages.
SWEPT = [
    *((out, warps, stages) for out, warps in ((64, 4), (128, 4), (128, 8)) for stages in (2, 3, 4, 5)),
    *((256, 8, stages) for stages in (2, 3, 4)),
]
SWEPT_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
DEVICE = torch.device("cuda")


def weight_of(form: str, out_features: int, in_features: int) -> PackedWeight:
    """Random values of a form, packed."""
    if form in ("bf16", "tiles"):
        values = torch.randn(out_features, in_features, device=DEVICE).bfloat16() * in_features**-0.5
        return ops.pack_weight(values)
    kind = form.removesuffix("-rounded")
    packed = ops.pack_quantised(quantised(kind, out_features, in_features), None, torch.bfloat16)
    packed = packed if kind == form else ops.round_prompts(packed)
    assert packed.tiled is not None and packed.rounds_prompts == (kind != form), f"{form} is not served here"
    return packed


def quantised(form: str, out_features: int, in_features: int) -> Quantised:
    """Random codes of about normal size."""
    size, shape = in_features**-0.5, (out_features, in_features)
    if form == "fp8":
        codes = torch.randn(shape, device=DEVICE).to(torch.float8_e4m3fn)
        return Quantised(codes, _scales(shape, in_features, size), None, None, in_features, None)
    if form == "int8":
        codes = torch.randint(-127, 128, shape, device=DEVICE, dtype=torch.int8)
        return Quantised(codes, _scales(shape, in_features, size / 64), None, None, in_features, None)
    codes = torch.randint(0, 256, (out_features, in_features // 2), device=DEVICE, dtype=torch.uint8)
    if form == "int4":
        scales = _scales(shape, 128, size / 4)
        return Quantised(codes, scales, -8 * scales, None, 128, None)
    return Quantised(codes, _scales(shape, 64, size), None, torch.tensor(NF4, device=DEVICE), 64, None)


def _scales(shape: tuple[int, int], group: int, size: float) -> torch.Tensor:
    values = torch.rand(shape[0], shape[1] // group, device=DEVICE) * size + size / 2
    return values.half().float()


class Product:
    """One projection in one form, with rows for `MAX_ADAPTERS` adapters behind it, as many times as the cache needs."""

    def __init__(self, form: str, name: str) -> None:
        self.form, self.name = form, name
        self.out_features, self.in_features, self.num_slices = PROJECTIONS[name]
        num_bytes = int(self.out_features * self.in_features * BITS[form] / 8)
        self.weights = []
        for _ in range(num_sets(num_bytes)):
            packed = weight_of(form, self.out_features, self.in_features)
            packed, rows = ops.append_rows(packed, MAX_ADAPTERS * RANK, self.num_slices)
            rows.normal_(std=self.in_features**-0.5)
            self.weights.append(packed)
        self.bytes = num_bytes

    def calls(
        self, num_tokens: int, window_rows: int, config: TileConfig | None = None, splits: int | None = None
    ) -> list[Callable[[], torch.Tensor]]:
        """The product with each copy of the weight."""
        x = torch.randn(num_tokens, self.in_features, device=DEVICE).bfloat16()
        num_columns = self.out_features + window_rows * self.num_slices
        if self.form == "bf16":
            return [functools.partial(ops.linear, x, one, window_rows=window_rows) for one in self.weights]
        if self.form == "tiles":
            splits = splits or triton_cuda.num_splits(self.out_features, self.in_features // 128, _num_cores())
            config = config or config_for(num_tokens, num_columns, splits, _num_cores())
            weights = [as_rows(one) for one in self.weights]
        else:
            weights = self.weights
        product = functools.partial(triton_cuda.linear_window, num_columns=num_columns, config=config, splits=splits)
        return [functools.partial(product, x, one) for one in weights]

    def check(self, num_tokens: int, window_rows: int) -> None:
        """Against a product of the dequantised weight."""
        call = self.calls(num_tokens, window_rows)[0]
        x = call.args[0]  # type: ignore[attr-defined]
        weight = self.weights[0]
        behind = weight.behind
        assert behind is not None
        if self.form.endswith("-rounded"):
            x = rounded_values(x)
        if weight.tiled is None:
            full = behind.data[: self.out_features + window_rows * self.num_slices]
        else:
            values = triton_cuda_values(weight)
            full = torch.cat((values, behind.data[: window_rows * self.num_slices]))
        torch.testing.assert_close(call().float(), x.float() @ full.float().t(), atol=TOLERANCE, rtol=TOLERANCE)

    def floor_us(self, num_tokens: int, window_rows: int, bytes_per_us: float) -> float:
        """Microseconds that reading the bytes takes."""
        rows = 2 * window_rows * self.num_slices * self.in_features
        outputs = 2 * num_tokens * (self.out_features + window_rows * self.num_slices + self.in_features)
        return (self.bytes + rows + outputs) / bytes_per_us


def triton_cuda_values(weight: PackedWeight) -> torch.Tensor:
    """The dequantised weight, some rows at a time."""
    step = 1024
    parts = range(0, weight.out_features, step)
    return torch.cat([triton_cuda.dequantised(weight, at, min(at + step, weight.out_features)).clone() for at in parts])


def rounded_values(x: torch.Tensor) -> torch.Tensor:
    """The inputs that a product with a weight that rounds prompts multiplies, in float32."""
    scales = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scales).to(torch.float8_e4m3fn).float() * scales


def as_rows(weight: PackedWeight) -> PackedWeight:
    """A bfloat16 weight as nothing but rows behind codes for no output."""
    behind = weight.behind
    assert behind is not None
    one = torch.ones(1, 1, device=DEVICE)
    codes = Quantised(torch.zeros(1, 128, dtype=torch.int8, device=DEVICE), one, None, None, 128, None)
    packed = ops.pack_quantised(codes, None, torch.bfloat16)
    rows = RowsBehind(behind.data, None, behind.num_rows, behind.num_slices)
    return replace(packed, out_features=0, in_features=weight.in_features, behind=rows)


@functools.cache
def _num_cores() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def check_dequantised(form: str) -> None:
    """The kernel's values are the reference's to the bit."""
    weight = quantised(form, 320, 4096)
    packed = ops.pack_quantised(weight, None, torch.bfloat16)
    assert torch.equal(triton_cuda_values(packed), dequantise(weight, torch.bfloat16)), f"{form}: other bits"
    x = torch.randn(64, 4096, device=DEVICE).bfloat16()
    whole = ops.linear(x, packed)
    for num_tokens in (1, 16, 33):
        assert torch.equal(ops.linear(x[:num_tokens], packed), whole[:num_tokens]), f"{form}: {num_tokens} tokens"


def is_served(form: str, num_tokens: int) -> bool:
    """Whether the form has a product of its own for so many tokens."""
    return num_tokens > MAX_TOKENS if form.endswith("-rounded") else form != "tiles" or num_tokens <= MAX_TOKENS


def compare(forms: list[str], tokens: list[int], rate: float) -> Iterator[dict[str, Any]]:
    """Rows of the table."""
    products = {form: [Product(form, name) for name in PROJECTIONS] for form in forms}
    windows = {n: [RANK * each for each in ADAPTERS if each <= n] if n <= MAX_TOKENS else [0] for n in tokens}

    def warm() -> None:
        for product in (product for of_form in products.values() for product in of_form):
            for num_tokens, lengths in windows.items():
                if not is_served(product.form, num_tokens):
                    continue
                for window_rows in (lengths[-1], lengths[0]):  # the workspace grows for the longest
                    product.calls(num_tokens, window_rows)[0]()

    warm_up_ahead(warm, "cuda")
    for form in forms:
        if form not in ("bf16", "tiles") and not form.endswith("-rounded"):
            check_dequantised(form)
    for num_tokens, lengths in windows.items():
        for window_rows in lengths:
            for form in forms:
                if not is_served(form, num_tokens):
                    continue
                row: dict[str, Any] = {"tokens": num_tokens, "adapters": window_rows // RANK, "form": form}
                for product in products[form]:
                    product.check(num_tokens, window_rows)
                    row[product.name] = time_graph(product.calls(num_tokens, window_rows))
                    row["floor"] = row.get("floor", 0.0) + product.floor_us(num_tokens, window_rows, rate)
                row["layers_ms"] = NUM_LAYERS * sum(row[name] for name in PROJECTIONS) / 1e3
                row["floor_ms"] = NUM_LAYERS * row.pop("floor") / 1e3
                yield row


def sweep(forms: list[str], num_tokens: int, words: int | None) -> None:
    """The six best configurations of each projection, with codes in blocks of so many words."""
    if words is not None:
        MAX_WORDS.update(dict.fromkeys(MAX_WORDS, words))
    block_tokens = max(16, min(128, 1 << (num_tokens - 1).bit_length()))
    configs = [TileConfig(out, block_tokens, warps, stages) for out, warps, stages in SWEPT]
    failed: set[tuple[str, TileConfig]] = set()
    for form in forms:
        products = [Product(form, name) for name in PROJECTIONS]

        def warm(form: str = form, products: list[Product] = products) -> None:
            for config in configs:
                for product in products:
                    for splits in (1, 2):
                        try:
                            product.calls(num_tokens, 0, config, splits)[0]()
                        except Exception as error:
                            if (form, config) not in failed:
                                print(f"{form} {config}: {type(error).__name__} {str(error)[:80]}")
                            failed.add((form, config))

        warm_up_ahead(warm, "cuda")
        for product in products:
            times = {}
            for config in configs:
                tiles = -(-product.out_features // config.block_out) * -(-num_tokens // block_tokens)
                for splits in SWEPT_SPLITS:
                    is_tried = splits == 1 or (_num_cores() // 2 <= tiles * splits <= 5 * _num_cores())
                    if (form, config) not in failed and is_tried and splits <= max(1, product.in_features // 512):
                        times[config, splits] = time_graph(product.calls(num_tokens, 0, config, splits), 10)
            print(f"\n{form} {product.name}, {num_tokens} tokens")
            for (config, splits), microseconds in sorted(times.items(), key=lambda item: item[1])[:6]:
                print(f"  {microseconds:7.1f} us  splits {splits}  {config}", flush=True)
        del products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1,64,8192")
    parser.add_argument("--forms", default=",".join(BITS))
    parser.add_argument("--sweep", action="store_true", help="launch configurations, for the first of --tokens")
    parser.add_argument("--words", type=int, help="of a sweep: words of a block of codes; default: the table's")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    forms, tokens = options.forms.split(","), [int(one) for one in options.tokens.split(",")]
    with torch.inference_mode():
        if options.sweep:
            sweep(forms, tokens[0], options.words)
            return
        rate = 2 * 200_000_000 / copy_microseconds(200_000_000)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {rate / 1e6:.2f} TB/s")
        print(
            "| tokens | adapters | form |",
            " | ".join(f"{name} us" for name in PROJECTIONS),
            "| 32 layers ms | floor ms |",
        )
        rows = []
        for row in compare(forms, tokens, rate):
            rows.append(row)
            times = " | ".join(f"{row[name]:.1f}" for name in PROJECTIONS)
            head = f"| {row['tokens']} | {row['adapters']} | {row['form']} | {times}"
            print(f"{head} | {row['layers_ms']:.2f} | {row['floor_ms']:.2f} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
