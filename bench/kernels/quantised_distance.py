"""How far answers of quantised weights are from those of bfloat16 ones: perplexity of a text, and divergence of logits.

    python -m bench.kernels.quantised_distance --model-dir data/smollm2 [--text FILE ...] [--windows 8]
                                             [--calibration FILE ...] [--json FILE]

data/smollm2 as `python -m examples.smollm2 data/smollm2` writes it; any directory in floats will do. Only the layers'
projections are quantised, each from its bfloat16 values, and all else is computed in float32, so that rows differ by
their weights alone; "bfloat16 arithmetic" is the same weights computed in bfloat16. Text: the pages in docs/, by
default, in windows of 512 tokens that begin evenly spread. AWQ and GPTQ choose by what projections of the unquantised
model read of a further text, --calibration.

    perplexity     of all tokens but each window's first
    KL             of a token's next-token distribution from that of bfloat16 weights, in nats: mean, and 99 of 100
    same token     share of tokens whose likeliest next token stays
    weights        relative error of the projections, root of the mean square
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from kernels.linear.quantised import E2M1, Quantised, dequantise, pack_nibbles, quantise
from service.models.checkpoint.checkpoint import TensorSource, open_checkpoint
from service.models.loader import LoadedModel, load_model
from service.text.tokenizer import TextTokenizer
from tests.support.engine.hand_steps import HandDriver

WINDOW = 512
BLOCK = 16
GROUP = 64
# Projections that read the same inputs.
INPUTS = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"), **dict.fromkeys(("gate_proj", "up_proj"), "gate_up")}
ARITHMETIC = "bfloat16 arithmetic"
# From a weight in float32 to the values that its codes stand for; or these, by name.
Form = Callable[[torch.Tensor], torch.Tensor]
Values = Mapping[str, torch.Tensor]


def integers(bits: int, group: int, *, symmetric: bool) -> Form:
    """Rounded to the nearest, without what AWQ and GPTQ do to lose less."""

    def values(weight: torch.Tensor) -> torch.Tensor:
        grouped = weight.unflatten(1, (-1, group))
        return _snapped(grouped, *_grid(grouped, bits, symmetric), bits).flatten(1)

    return values


def _grid(grouped: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [..., 1] of the values of a group [..., group]."""
    low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-8).half().float()
    return scales, (-low / scales).round()


def _snapped(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int) -> torch.Tensor:
    return (((values / scales).round() + zeros).clamp(0, 2**bits - 1) - zeros) * scales


def gptq(weight: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Input by input: the error of each is made up for by those behind it, as far as they go together in `squares`, the
    sum of x^T x [inputs, inputs]. In the order of the inputs; damped by a hundredth, as the tools do."""
    damped = squares + 0.01 * squares.diagonal().mean() * torch.eye(len(squares))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    left, values = weight.clone(), torch.empty_like(weight)
    for first in range(0, weight.shape[1], GROUP):
        last = first + GROUP
        scales, zeros = _grid(left[:, first:last], 4, symmetric=False)
        errors = torch.empty(len(weight), GROUP)
        for at in range(first, last):
            values[:, at] = _snapped(left[:, at, None], scales, zeros, 4)[:, 0]
            errors[:, at - first] = (left[:, at] - values[:, at]) / upper[at, at]
            left[:, at:last] -= errors[:, at - first, None] * upper[at, at:last]
        left[:, last:] -= errors @ upper[first:last, last:]
    return values


def awq(weights: Sequence[torch.Tensor], squares: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
    """Projections that read the same inputs: those are scaled by a power of their mean size, the one of twenty with the
    smallest error of the outputs, before the weights are rounded to the nearest."""
    rounded, best, least = integers(4, GROUP, symmetric=False), [*weights], math.inf
    for step in range(20):
        scales = sizes.clamp(min=1e-4) ** (step / 20)
        scales /= (scales.amax() * scales.amin()).sqrt()
        values = [rounded(weight * scales) / scales for weight in weights]
        changes = [value - weight for value, weight in zip(values, weights, strict=True)]
        error = sum(float(((change @ squares) * change).sum()) for change in changes)
        if error < least:
            best, least = values, error
    return best


@torch.inference_mode()
def calibrated(model_dir: Path, windows: Iterable[Sequence[int]]) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of layers by name, as AWQ and as GPTQ choose them for the inputs of transformers' model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    of_layers = ((name, one) for name, one in model.named_modules() if ".layers." in name)
    projections = {name: one for name, one in of_layers if isinstance(one, torch.nn.Linear)}
    squares: dict[str, Any] = dict.fromkeys(projections, 0.0)
    sizes: dict[str, Any] = dict.fromkeys(projections, 0.0)

    def seen(name: str, _: object, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)
        squares[name], sizes[name] = squares[name] + x.t() @ x, sizes[name] + x.abs().sum(0)

    for name, one in projections.items():
        one.register_forward_pre_hook(partial(seen, name))
    for tokens in windows:
        model(torch.tensor([tokens]))
    found: dict[str, dict[str, torch.Tensor]] = {"AWQ": {}, "GPTQ": {}}
    groups: dict[str, list[str]] = {}
    for name in projections:
        module, _, part = name.rpartition(".")
        groups.setdefault(f"{module}.{INPUTS.get(part, part)}", []).append(name)
    for names in groups.values():
        weights = [projections[name].weight for name in names]
        of_awq = awq(weights, squares[names[0]], sizes[names[0]])
        for name, weight, values in zip(names, weights, of_awq, strict=True):
            found["AWQ"][f"{name}.weight"] = values
            found["GPTQ"][f"{name}.weight"] = gptq(weight, squares[name])
    return found


def online(kind: Any) -> Form:
    """As `--weights` has it."""
    return lambda weight: dequantise(quantise(weight, kind), torch.float32)


def fp8_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A scale for each block of 128 outputs and inputs."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, 128, columns, 128)
    scales = (blocks.abs().amax((1, 3), keepdim=True) / 448).clamp(min=1e-12)
    values = ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view_as(padded)
    return values[: weight.shape[0], : weight.shape[1]]


def mxfp4(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.unflatten(1, (-1, 32))
    powers = (blocks.abs().amax(-1) / 6).clamp(min=2.0**-120).log2().ceil()
    table = torch.tensor(E2M1)
    scaled = blocks / 2 ** powers[..., None]
    codes = torch.bucketize(scaled.abs(), (table[1:8] + table[:7]) / 2) + 8 * (scaled < 0)
    packed = Quantised(pack_nibbles(codes.flatten(1).to(torch.uint8)), 2**powers, None, table, 32, None)
    return dequantise(packed, torch.float32)


def gguf(kind: str) -> Form:
    """By the package gguf, which quantises to these."""

    def values(weight: torch.Tensor) -> torch.Tensor:
        import gguf as package

        raw_type = package.GGMLQuantizationType[kind]
        return torch.from_numpy(package.dequantize(package.quantize(weight.numpy(), raw_type), raw_type).copy())

    return values


FORMS: dict[str, Form] = {
    "fp8, a scale for each output (--weights fp8)": online("fp8"),
    "fp8, blocks of 128 x 128": fp8_blocks,
    "int8 (--weights int8)": online("int8"),
    "GGUF Q8_0": gguf("Q8_0"),
    "nf4 (--weights nf4)": online("nf4"),
    "int4, groups of 64, with zeros": integers(4, 64, symmetric=False),
    "int4, groups of 64, symmetric": integers(4, 64, symmetric=True),
    "GGUF Q4_0": gguf("Q4_0"),
    "GGUF Q4_1": gguf("Q4_1"),
    "MXFP4": mxfp4,
}


@dataclass
class Rounded:
    """See `TensorSource`: a checkpoint whose layers' projections have gone through a form."""

    checkpoint: TensorSource
    form: Form | Values
    squares: float = 0.0
    errors: float = 0.0

    def __contains__(self, name: object, /) -> bool:
        return name in self.checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        weight = self.checkpoint.tensor(name, shape).float()
        if ".layers." not in name:
            return weight
        values = self.form[name] if isinstance(self.form, Mapping) else self.form(weight)
        self.squares += float(weight.square().sum())
        self.errors += float((values - weight).square().sum())
        return values


def loaded(model_dir: Path, dtype: str, form: Form | Values | None) -> tuple[LoadedModel, float]:
    """The model, and the relative error of its projections."""
    sources: list[Rounded] = []

    @contextmanager
    def opened(directory: Path) -> Iterator[TensorSource]:
        with open_checkpoint(directory) as checkpoint:
            if form is None:
                yield checkpoint
                return
            sources.append(Rounded(checkpoint, form))
            yield sources[0]

    model = load_model(model_dir, dtype=dtype, open_tensors=opened)
    return model, math.sqrt(sources[0].errors / sources[0].squares) if sources else 0.0


@torch.inference_mode()
def logits_of(model: LoadedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Log probabilities [tokens, vocabulary] of what comes next."""
    driver = HandDriver(model, block_size=BLOCK, num_blocks=WINDOW // BLOCK + 2, num_lines=3)
    logits = driver.step([(driver.sequence(limit=len(tokens)), tokens)], all_logits=True)
    return logits.log_softmax(-1)


def compare(
    reference: Iterable[torch.Tensor], model: LoadedModel, windows: Iterable[Sequence[int]]
) -> dict[str, float]:
    losses, divergences, same = [], [], []
    for expected, tokens in zip(reference, windows, strict=True):
        found = logits_of(model, tokens)
        losses.append(-found[:-1].gather(1, torch.tensor(tokens[1:])[:, None]))
        divergences.append((expected.exp() * (expected - found)).sum(-1))
        same.append(expected.argmax(-1) == found.argmax(-1))
    divergence = torch.cat(divergences).clamp(min=0)
    return {
        "perplexity": float(torch.cat(losses).mean().exp()),
        "kl": float(divergence.mean()),
        "kl_99": float(divergence.quantile(0.99)),
        "same": float(torch.cat(same).float().mean()),
    }


def windows_of(model_dir: Path, texts: Sequence[Path], num: int) -> list[list[int]]:
    tokens = TextTokenizer.load(model_dir).encode("\n\n".join(path.read_text(encoding="utf-8") for path in texts))
    assert len(tokens) >= WINDOW * num, f"the text has {len(tokens)} tokens, of which {WINDOW * num} are wanted"
    step = (len(tokens) - WINDOW) // max(1, num - 1)
    return [list(tokens[first : first + WINDOW]) for first in range(0, num * step, step)][:num]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(Path("docs").glob("*.md")))
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--calibration", type=Path, nargs="+", default=[Path("README.md"), Path("CONTRIBUTING.md")])
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    windows = windows_of(options.model_dir, options.text, options.windows)
    bfloat16, _ = loaded(options.model_dir, "float32", None)
    reference = [logits_of(bfloat16, tokens) for tokens in windows]
    rows = []
    print("| weights | error of weights | perplexity | KL, mean | KL, 99 of 100 | same token |")
    print("|---|---|---|---|---|---|")
    plain: dict[str, Form | Values | None] = {"bfloat16": None, ARITHMETIC: None}
    chosen = calibrated(options.model_dir, windows_of(options.model_dir, options.calibration, options.windows))
    named = {f"{name}, int4, groups of {GROUP}, with zeros": values for name, values in chosen.items()}
    for name, form in (plain | FORMS | named).items():
        dtype = "bfloat16" if name == ARITHMETIC else "float32"
        model, error = loaded(options.model_dir, dtype, form)
        row: dict[str, Any] = {"form": name, "error": error, **compare(reference, model, windows)}
        rows.append(row)
        print(
            f"| {name} | {100 * row['error']:.2f} % | {row['perplexity']:.3f} | {row['kl']:.5f} | {row['kl_99']:.4f} | "
            f"{100 * row['same']:.1f} % |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
