"""The models with adapters against transformers + PEFT, unmerged: mixed ranks and targets, all in one step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from adapters.layout import BaseLayout
from adapters.memory.row_pool import RowPool
from adapters.memory.slab import HostAdapter, pack
from kernels.lora.ops import call_count
from kernels.platform import Platform, detect, installed
from service.engine.model.padding import StepSizes
from service.engine.step.inputs import StepInputs
from service.engine.step.maps import BASE, ChunkInput, InputLimits, adapter_order
from service.models.layers.caches import allocate_caches
from service.models.loader import LoadedModel, load_model
from tests.support.models.quantised_models import make_quantised_online
from tests.support.models.tiny_models import (
    FAMILIES,
    LINEAR_MODULES,
    VOCAB_SIZE,
    WITH_EXPERTS,
    load_oracle,
    make_adapter,
    make_tiny_model,
    make_wrongly_tied_model,
)
from tests.support.npu.triton_interpreter import multiply_bfloat16, round_floats
from tests.tolerances import LOGITS, LOGITS_RMS, logits_bounds

EMBEDDINGS = ["embed_tokens", "lm_head"]
# Per adapter: rank and which of the family's modules it targets.
TARGETS: dict[str, tuple[int, slice | list[str]]] = {
    "all": (5, slice(None)),
    "first": (16, slice(0, 1)),
    "middle": (3, slice(2, 4)),
    "last": (33, slice(-2, None)),
    "embeddings": (4, EMBEDDINGS),
}
DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZE, PROMPT_TOKENS = 4, 22


def read_peft(directory: Path, layout: BaseLayout, dtype: torch.dtype) -> HostAdapter:
    """The adapter as the row pool takes it; of its config only r and lora_alpha are read."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    scaling = config["lora_alpha"] / config["r"]
    weights = {}
    for projection in layout.projections:
        names = ("lora_embedding_A", "lora_embedding_B")
        if projection.kind == "linear":
            names = ("lora_A.weight", "lora_B.weight")
        for module in (piece.module for piece in projection.slices):
            a, b = (tensors.pop(f"base_model.model.{module}.{name}", None) for name in names)
            if a is not None and b is not None:
                weights[module] = (a, b.t(), scaling)
    assert not tensors, f"nothing took {list(tensors)}"
    return pack(layout, directory.name, weights, dtype)


@dataclass
class Served:
    """A model with its adapters resident, and what PEFT says about the same prompts.

    window_rows  of every step
    """

    loaded: LoadedModel
    pool: RowPool
    prompts: dict[str, list[int]]
    expected: dict[str, torch.Tensor]
    window_rows: int


@torch.inference_mode()
def peft_logits(
    model_dir: Path,
    adapter_dirs: dict[str, Path],
    prompts: dict[str, list[int]],
    dtype: torch.dtype,
    change: Callable[[Any], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Logits [tokens, vocabulary] by adapter name; "base" is the model without any.

    change  is done to the base model before
    """
    base = load_oracle(model_dir, dtype)
    if change is not None:
        change(base)
    logits = {"base": base(torch.tensor([prompts["base"]])).logits[0].float()}
    model: PeftModel | None = None
    for name, directory in adapter_dirs.items():
        if model is None:
            model = PeftModel.from_pretrained(base, directory, adapter_name=name)
        else:
            model.load_adapter(str(directory), adapter_name=name)
        model.set_adapter(name)
        logits[name] = model(torch.tensor([prompts[name]])).logits[0].float()
    return logits


SETTINGS = {
    **{f"{family}-{dtype}": (family, dtype, make_tiny_model, False) for dtype in DTYPES for family in FAMILIES},
    **{family: (family, torch.float32, make_tiny_model, False) for family in WITH_EXPERTS},
    "qwen3-wrongly-tied": ("qwen3", torch.float32, make_wrongly_tied_model, False),
    # With biases, and with convolutions; the rows behind the base weights.
    "qwen2-windows": ("qwen2", torch.float32, make_tiny_model, True),
    "lfm2-windows": ("lfm2", torch.float32, make_tiny_model, True),
}


def windowed(device: str) -> Platform:
    """A platform that has windows: a CPU whose weights are held as they are, its kernels interpreted."""
    platform = detect(device)
    if device == "cpu":
        for op, name in (("linear", "reference"), ("lora_window", "triton_cuda")):
            platform = platform.with_fallback(op, name, f"{op} as on a GPU")
    assert platform.window_rows
    return platform


@pytest.fixture(scope="module", params=SETTINGS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[Served]:
    with installed(windowed(device)) if SETTINGS[request.param][3] else nullcontext():
        yield make_served(*SETTINGS[request.param], tmp_path_factory.mktemp("served"), device)


def make_served(
    family: str,
    dtype: torch.dtype,
    make_model: Callable[..., Path],
    has_windows: bool,
    root: Path,
    device: str,
    change: Callable[[Any], None] | None = None,
    **loading: Any,
) -> Served:
    model_dir = make_model(family, root / "model", dtype=dtype)
    loaded = load_model(model_dir, device=device, **loading)
    # PEFT holds the rows of a half-precision model in float32, as we do on a CPU.
    row_dtype = detect(device).row_dtype(dtype)
    rows_behind = loaded.model.rows_behind if has_windows else None
    pool = RowPool(loaded.layout, 4 << 20, dtype=row_dtype, device=loaded.device, rows_behind=rows_behind)
    adapter_dirs = {}
    for seed, (name, (rank, targets)) in enumerate(TARGETS.items()):
        modules = targets if isinstance(targets, list) else LINEAR_MODULES[family][targets]
        adapter_dirs[name] = make_adapter(model_dir, root / name, rank=rank, target_modules=modules, seed=seed)
        assert pool.load(name, read_peft(adapter_dirs[name], loaded.layout, row_dtype))
        pool.pin(name)
    loaded.model.bind_rows(pool)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB_SIZE, (PROMPT_TOKENS,), generator=generator).tolist()
    prompts = dict.fromkeys([*TARGETS, "base"], tokens)
    window_rows = pool.rows_end(pool.resident()) if has_windows else 0
    return Served(loaded, pool, prompts, peft_logits(model_dir, adapter_dirs, prompts, dtype, change), window_rows)


def assert_equals_peft(served: Served, logits: dict[str, torch.Tensor], family: str | None = None) -> None:
    """Within the tolerances of the model's family, or of another."""
    largest, rms = bounds_of(served) if family is None else logits_bounds(family, served.loaded.dtype)
    for name, expected in served.expected.items():
        torch.testing.assert_close(logits[name], expected, atol=largest, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert (logits[name] - expected).square().mean().sqrt() < rms, name


def bounds_of(served: Served) -> tuple[float, float]:
    return logits_bounds(served.loaded.spec.model_type, served.loaded.dtype)


def run(served: Served, chunk_starts: list[dict[str, int]]) -> dict[str, torch.Tensor]:
    """Logits of all tokens by name; step i runs [chunk_starts[i][name], chunk_starts[i + 1][name]) of every prompt."""
    loaded = served.loaded
    names = [*chunk_starts[0]]
    num_blocks = -(-PROMPT_TOKENS // BLOCK_SIZE)
    caches = allocate_caches(
        loaded.spec, 1 + num_blocks * len(names), BLOCK_SIZE, 1 + len(names), loaded.dtype, loaded.device
    )
    num_tokens = PROMPT_TOKENS * len(names)
    inputs = StepInputs(
        InputLimits(
            token_budget=num_tokens,
            max_sequences=len(names),
            max_blocks=num_blocks,
            max_logits_rows=num_tokens,
            block_size=BLOCK_SIZE,
            num_groups=len(loaded.layout.groups),
            has_conv=loaded.spec.has_states,
            has_length_limits=False,
            device=loaded.device,
        )
    )
    # Slot 1 + i is of the i-th name.
    table = np.arange(1 - num_blocks, 1 + num_blocks * len(names), dtype=np.int32).reshape(1 + len(names), num_blocks)
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for starts, ends in zip(chunk_starts, [*chunk_starts[1:], dict.fromkeys(names, PROMPT_TOKENS)], strict=True):
        chunks, running = [], [name for name in names if ends[name] > starts[name]]
        for name in running:
            place = served.pool.place_of(name) if name != "base" else BASE
            tokens = served.prompts[name][starts[name] : ends[name]]
            first_rows = served.pool.first_rows(place) if place != BASE else ()
            slot = 1 + names.index(name)
            begins = starts[name] == 0
            chunks.append(ChunkInput(tokens, starts[name], slot, len(tokens), slot, begins, place, first_rows))
        order = adapter_order(chunks)
        ordered = [chunks[i] for i in order]
        num_step_tokens = sum(len(chunk.token_ids) for chunk in ordered)
        has_lora = any(chunk.place != BASE for chunk in ordered)
        sizes = StepSizes(num_step_tokens, len(ordered), num_step_tokens, num_blocks, False, has_lora)
        blocks = [tuple(table[chunk.slot].tolist()) for chunk in ordered]
        batch, _ = inputs.fill(ordered, table, blocks, sizes)
        batch = replace(batch, window_rows=served.window_rows)
        out = loaded.model.forward(batch, caches)
        for i, part in zip(order, out.split([chunk.num_logits for chunk in ordered]), strict=True):
            logits[running[i]].append(part.float().cpu())
    return {name: torch.cat(parts) for name, parts in logits.items()}


def test_each_adapter_changes_the_output_and_all_differ(served: Served) -> None:
    names = list(served.expected)
    for i, first in enumerate(names):
        for second in names[:i]:
            difference = (served.expected[first] - served.expected[second]).abs().max()
            assert difference > 2 * LOGITS[served.loaded.dtype], f"{first} and {second} say the same"


def test_one_step_of_all_adapters_equals_peft(served: Served) -> None:
    assert_equals_peft(served, run(served, [dict.fromkeys(served.prompts, 0)]))


def test_chunks_and_decode_steps_of_mixed_adapters_equal_peft(served: Served) -> None:
    names = list(served.prompts)
    # Each sequence starts elsewhere, then all of them decode side by side.
    steps = [{name: min(i * (5 + k), 15) for k, name in enumerate(names)} for i in range(4)]
    steps += [dict.fromkeys(names, position) for position in range(16, PROMPT_TOKENS)]
    assert_equals_peft(served, run(served, steps))


def test_a_step_without_adapters_calls_no_lora_op(served: Served) -> None:
    before = call_count()
    logits = run(served, [{"base": 0}, {"base": 9}])
    assert call_count() == before
    torch.testing.assert_close(logits["base"], served.expected["base"], atol=bounds_of(served)[0], rtol=0)
    run(served, [{"base": 0, "first": 0}])
    assert call_count() > before


@pytest.mark.wide
def test_prompts_of_rounded_inputs_under_adapters(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `--fp8-activations`, as PEFT over base layers whose inputs are rounded; few tokens are not."""
    pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
    from kernels.linear import triton_cuda

    if device == "cpu":
        multiply_bfloat16(monkeypatch)
        round_floats(monkeypatch)
    monkeypatch.setattr(triton_cuda, "MAX_TOKENS", 100)
    make_model, dtype = partial(make_quantised_online, "fp8"), torch.bfloat16
    with installed(detect(device).with_fallback("linear", "triton_cuda", "as on a GPU")), caplog.at_level("INFO"):
        loading: dict[str, Any] = {"weights": "fp8", "rounds_prompts": True}
        served = make_served("llama", dtype, make_model, False, tmp_path, device, change=round_inputs, **loading)
        assert "12 projections round their inputs, 1 others do not" in caplog.text
        rounded = run(served, [dict.fromkeys(served.prompts, 0)])
        exact = run(served, [{"base": 0}])["base"]
        one = next(part for part in served.loaded.layout.projections if part.name.endswith("down_proj"))
        a, b = torch.randn(120, one.in_features), torch.randn(120, one.slices[0].out_features)
        others = (served.loaded, load_model(tmp_path / "model", weights="fp8", device=device))
        norms = [other.model.delta_squares(one.name, 0, a.to(device), b.to(device), 1.0) for other in others]
        assert torch.equal(*norms), "magnitudes are of the weights, whatever a prompt's products round"
    assert_equals_peft(served, rounded, "llama-fp8-activations")
    for name, logits in rounded.items():
        assert name == min(served.expected, key=lambda one: distance(logits, served.expected[one]))
    plain = peft_logits(tmp_path / "model", {}, served.prompts, dtype)["base"]
    assert distance(exact, plain) < LOGITS_RMS[dtype] < distance(rounded["base"], plain)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean().sqrt())


def round_inputs(base: Any) -> None:
    """Have the projections of layers read their inputs in float8, with a scale for each token."""

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values = inputs[0].float()
        scales = values.abs().amax(-1, keepdim=True) / 448
        return ((values / scales).to(torch.float8_e4m3fn).float().mul(scales).to(inputs[0].dtype), *inputs[1:])

    for name, module in base.named_modules():
        if ".layers." in name and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_nan_weights_of_one_adapter_harm_no_neighbour(family: str, tmp_path: Path, device: str) -> None:
    """Chunks and decode steps, bit by bit: what a later token reads of the states is what it would be otherwise."""
    served = make_served(family, torch.float32, make_tiny_model, False, tmp_path, device)
    names = list(served.prompts)
    steps = [{name: min(i * (5 + k), 15) for k, name in enumerate(names)} for i in range(4)]
    steps += [dict.fromkeys(names, position) for position in range(16, PROMPT_TOKENS)]
    before = run(served, steps)
    adapter = read_peft(tmp_path / "all", served.loaded.layout, torch.float32)
    for one in adapter.slices.values():
        one.a.fill_(torch.nan)
        one.b.fill_(torch.nan)
    served.pool.unpin("all")
    served.pool.drop("all")
    assert served.pool.load("all", adapter)
    after = run(served, steps)
    assert bool(after["all"].isnan().all())
    for name in names:
        assert name == "all" or torch.equal(after[name], before[name]), name
