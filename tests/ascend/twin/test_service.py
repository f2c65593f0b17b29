"""The engine on its NPU path, on a CPU: tokens and logits are those of the CPU path and of transformers + PEFT."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kernels.platform import IMPLEMENTATIONS, in_use, installed
from service.engine.ipc.config import EngineConfig, EngineOptions
from service.engine.startup.build import decide, shapes_to_probe
from service.engine.step_records import StepRecord
from service.models.families import model_spec
from service.models.layers.caches import kv_bytes_per_token
from service.models.spec.config_json import read_config
from tests.ascend.twin.stand_ins import stand_ins
from tests.ascend.twin.stand_ins.install import npu_path, npu_platform
from tests.support.engine.engine_parity import (
    BASE,
    Answer,
    Oracle,
    Request,
    World,
    adapter_specs,
    build_engine,
    config_of,
    make_world,
    run_engine,
)
from tests.support.models.quantised_models import make_quantised
from tests.support.models.tiny_models import LINEAR_MODULES, VOCAB_SIZE, make_tiny_model
from tests.tolerances import LOGITS, LOGITS_RMS

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton's interpreter
Record = Callable[[str, object], None]
BLOCK_SIZE = 128
FUSED = ("triton_ascend", "triton_ascend_vector", "npu", "npu_heads_first")
# Of the rotation, whose first choice is a Triton kernel.
SECOND_CHOICES = {"npu_rotary_mul", "npu_scatter_pa_kv_cache"}
# Of W8A8 checkpoints.
ROUNDED = {"npu_dynamic_quant", "npu_quant_matmul", "npu_format_cast"}
OF_EXPERTS = {"npu_moe_init_routing_v2", "npu_grouped_matmul"}
# Heads of 64 elements, as the attention operator wants them; two layers, one of each kind where there are kinds.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "mistral": {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2},  # a window of 24 tokens
    "qwen3": {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "qwen3_moe": {"head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2},  # the second layer has no experts
    "lfm2": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
    },
}
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Adapters of experts, beside those of a family's others, which have attention alone, the head or the embedding.
EXPERT_SPECS: dict[str, dict[str, Any]] = {
    "all": {"rank": 5, "target_modules": LINEAR_MODULES["qwen3_moe"], "target_parameters": PARAMETERS},
    "one": {"rank": 2, "target_modules": ["o_proj"], "target_parameters": PARAMETERS[1:]},
    "rs": {"rank": 8, "target_modules": ["q_proj"], "target_parameters": PARAMETERS, "use_rslora": True},
}


def make_twin_world(family: str, directory: Path) -> World:
    """In float32, with adapters of everything that the family has."""
    specs = adapter_specs(family) | (EXPERT_SPECS if family == "qwen3_moe" else {})
    return make_world(family, directory, "cpu", specs=specs, **SIZES[family])


@dataclass(frozen=True)
class Run:
    """What an engine answered, and how."""

    answers: dict[str, Answer]
    records: list[StepRecord]
    num_preemptions: int
    fallbacks: tuple[str, ...]
    num_calls: dict[str, int]

    def __str__(self) -> str:
        num_tokens, num_calls = sum(record.num_tokens for record in self.records), sum(self.num_calls.values())
        return (
            f"{len(self.answers)} requests, {num_tokens} tokens in {len(self.records)} steps, "
            f"{self.num_preemptions} preempted, {num_calls} calls of torch_npu, each replayed on meta tensors"
        )

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: answer.tokens for name, answer in self.answers.items()}


def make_requests(world: World, num_output: int) -> list[Request]:
    """One for the base and each adapter; some prompts end just before a block does, so that an answer needs another."""
    rng = random.Random(0)
    names = [BASE, *world.adapters]
    lengths = [125 - i if i % 4 == 1 else 7 + 2 * i for i in range(len(names))]
    return [
        Request(f"r{i}", name, tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(length)), num_output)
        for i, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]


def config(world: World, *, num_blocks: int, token_budget: int) -> EngineConfig:
    spec = model_spec(read_config(world.model_dir))
    kv_bytes = num_blocks * BLOCK_SIZE * kv_bytes_per_token(spec, world.dtype)
    return msgspec.structs.replace(
        config_of(world, token_budget=token_budget, max_sequences=8, num_rows=160),
        block_size_tokens=BLOCK_SIZE,
        kv_bytes=kv_bytes,
    )


def run(world: World, requests: list[Request], engine_config: EngineConfig, **sampling: Any) -> Run:
    before = stand_ins.num_calls.copy()
    engine = build_engine(engine_config)
    try:
        # With all adapters on the device, what runs when depends on nothing but the requests.
        first = [Request(f"first {name}", name, (9,), 1) for name in world.adapters]
        run_engine(engine, [request.submit(world) for request in first])
        submits = [request.submit(world, **sampling) for request in requests]
        answers = run_engine(engine, submits, joins_per_step=2)
        stats = engine.stats()
        return Run(
            answers,
            list(engine.step_records),
            stats.num_preemptions,
            in_use(torch.device("cpu")).fallbacks,
            dict(stand_ins.num_calls - before),
        )
    finally:
        engine.close()


def assert_hard(run: Run) -> None:
    """The run held what it is to hold."""
    assert run.fallbacks == ()
    assert run.num_preemptions > 0, "blocks were to run out"
    assert any(r.num_prefill_tokens > 0 and r.num_decode_tokens > 0 for r in run.records), "chunks beside decode tokens"
    assert any(len(r.adapters) >= 3 and r.num_base_tokens > 0 for r in run.records), "adapters beside the base"


@pytest.mark.parametrize("family", SIZES)
def test_float32_gives_the_tokens_of_the_cpu_path(family: str, tmp_path: Path, record_property: Record) -> None:
    world = make_twin_world(family, tmp_path)
    requests = make_requests(world, 8)
    engine_config = config(world, num_blocks=5, token_budget=96)
    expected = run(world, requests, engine_config)
    with npu_path(float32_attention=True):
        twin = run(world, requests, engine_config)
    assert twin.tokens == expected.tokens
    assert all(len(twin.tokens[request.name]) == request.max_tokens for request in requests)
    assert_hard(twin)
    assert expected.num_calls == {}
    others = SECOND_CHOICES | ROUNDED if family == "qwen3_moe" else SECOND_CHOICES | ROUNDED | OF_EXPERTS
    assert twin.num_calls.keys() == stand_ins.STAND_INS.keys() - others
    record_property("twin", f"{family} in float32, {twin}")


@pytest.mark.wide
def test_a_checkpoint_of_msmodelslim_is_multiplied_in_integers(tmp_path: Path) -> None:
    """W8A8 beside adapters, whose rows read what is not rounded; the probe finds nothing against it."""

    def make(family: str, directory: Path, **sizes: Any) -> Path:
        made = make_quantised("int8", family, directory, **sizes)
        config_json = json.loads((made / "config.json").read_text())
        config_json["quantization_config"] = {"quant_method": "msmodelslim"}
        (made / "config.json").write_text(json.dumps(config_json))
        return made

    world = make_world("llama", tmp_path, "cpu", dtype=torch.bfloat16, make_model=make, **SIZES["llama"])
    requests = make_requests(world, 8)
    with npu_path():
        twin = run(world, requests, config(world, num_blocks=5, token_budget=96))
    assert_hard(twin)
    assert all(len(twin.tokens[request.name]) == request.max_tokens for request in requests)
    assert twin.num_calls["npu_format_cast"] >= 8  # of each projection, and the probe's
    assert twin.num_calls["npu_quant_matmul"] == twin.num_calls["npu_dynamic_quant"] >= 8 * len(twin.records)


def test_fallbacks_give_the_tokens_of_the_cpu_path(tmp_path: Path) -> None:
    """What serves a chip without Triton and fused operators."""
    world = make_world("lfm2", tmp_path, "cpu", **SIZES["lfm2"])
    requests = make_requests(world, 8)
    engine_config = config(world, num_blocks=5, token_budget=96)
    expected = run(world, requests, engine_config)
    second = {op: next(name for name in names if name not in FUSED) for op, names in IMPLEMENTATIONS["npu"].items()}
    with installed(dataclasses.replace(npu_platform(), implementations=second), "cpu"):
        twin = run(world, requests, engine_config)
    assert twin.tokens == expected.tokens
    assert twin.num_calls == {}
    assert_hard(twin)


def test_an_operator_that_refuses_is_replaced_and_said_so(tmp_path: Path) -> None:
    """Attention computes in 16 bits, so the probe at the start of a float32 engine finds that it does not work."""
    world = make_world("llama", tmp_path, "cpu", **SIZES["llama"])
    requests = [Request("r", BASE, (9, 8, 7), 3)]
    with npu_path():
        twin = run(world, requests, config(world, num_blocks=5, token_budget=96))
    assert len(twin.fallbacks) == 1
    assert "paged_attention" in twin.fallbacks[0] and "gathered" in twin.fallbacks[0]
    assert len(twin.tokens["r"]) == 3


@pytest.mark.parametrize("family", ["llama", "qwen3", "lfm2"])
def test_bfloat16_logits_are_within_the_tolerances(family: str, tmp_path: Path, record_property: Record) -> None:
    world = make_world(family, tmp_path, "cpu", dtype=torch.bfloat16, **SIZES[family])
    requests = make_requests(world, 8)
    with npu_path():
        twin = run(world, requests, config(world, num_blocks=5, token_budget=96), logprobs=5)
    assert_hard(twin)
    oracle = Oracle(world)
    differences = []
    for request in requests:
        answer = twin.answers[request.name]
        assert len(answer.tokens) == request.max_tokens
        expected = oracle.logits(request.adapter, [*request.prompt, *answer.tokens]).log_softmax(-1)
        for entry, row in zip(answer.logprobs, expected[len(request.prompt) - 1 :], strict=False):
            tokens = [entry.token_id, *(token for token, _ in entry.top)]
            values = torch.tensor([entry.logprob, *(value for _, value in entry.top)])
            differences.append(values - row[tokens])
    difference = torch.cat(differences)
    largest, rms = float(difference.abs().max()), float(difference.square().mean().sqrt())
    record_property("twin", f"{family} in bfloat16, {twin}: log probabilities off by {largest:.2f}, {rms:.3f} rms")
    assert largest <= LOGITS[torch.bfloat16]
    assert rms <= LOGITS_RMS[torch.bfloat16]


def test_a_cache_is_as_large_as_fused_attention_takes_and_no_larger(tmp_path: Path) -> None:
    """Decided before the probe from all free memory: one block more, and the probe would find attention refused."""
    from kernels.paged_attention.npu import refuses

    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model_dir = make_tiny_model("llama", tmp_path / "model", max_position_embeddings=1 << 20, **sizes)
    options = EngineOptions(
        model_dir=str(model_dir),
        store_root=str(tmp_path),
        device="cpu",
        dtype="float16",
        block_size_tokens=BLOCK_SIZE,
        row_bytes=0,
    )
    with npu_path():
        config, _ = decide(options, "cpu", free_bytes=lambda _: 1 << 40)
        shapes = shapes_to_probe(config)
        assert refuses(shapes) is None
        assert "2**31" in (refuses(dataclasses.replace(shapes, num_blocks=shapes.num_blocks + 1)) or "")
