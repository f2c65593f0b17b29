"""The probes themselves: right implementations pass in every dtype, wrong ones of many kinds do not."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.contract import Contract
from kernels.lora import cpu as lora
from kernels.lora.ascend.tiles import choose
from kernels.lora.cuda.configs import config_for
from kernels.paged_attention import sdpa
from kernels.paged_attention.cache_layout import is_heads_first
from kernels.platform import (
    FEW_TOKENS,
    IMPLEMENTATIONS,
    BackendError,
    contract,
    detect,
    implementation,
    in_use,
    installed,
)
from kernels.probe.cases.registry import cases_of
from kernels.probe.cases.tensors import Place
from kernels.probe.child import DEVICE_IS_LOST
from kernels.probe.isolated import ProbeWork, probe_apart, with_reports
from kernels.probe.op_reports import OpReport, Trial
from kernels.probe.probe_process import ProbeProcess
from kernels.probe.run import candidates, probe, report_of, try_op
from kernels.rotary_kv import reference as rotary_kv
from kernels.sampling import cpu as sampling
from kernels.shapes import ProbeShapes
from tests.doctor.conftest import BROKEN_OPS, ROOT
from tests.support.limits import LIMIT_SECONDS
from tests.support.npu.fake_npu import NO_TRITON, UPSTREAM, made_up_npu

CPU = torch.device("cpu")
SHAPES = ProbeShapes(sliding_window=4096)


@pytest.mark.parametrize("op", sorted({op for table in IMPLEMENTATIONS.values() for op in table}))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_op_has_cases_that_all_its_cpu_implementations_pass(op: str, dtype: str) -> None:
    shapes = dataclasses.replace(SHAPES, dtype=dtype)
    assert cases_of(op, shapes)
    for own in IMPLEMENTATIONS["cpu"][op]:
        others = set(IMPLEMENTATIONS["cpu"][op]) - {own}
        trials = list(try_op(detect("cpu"), CPU, op, shapes, excluded=others))
        assert [(trial.case, trial.status) for trial in trials] == [(case, "ok") for case in cases_of(op, shapes)]


def test_a_model_s_own_sizes_are_probed() -> None:
    """Of an 8B model with windows, and of one without convolutions."""
    large = ProbeShapes(
        dtype="bfloat16", hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128,
        block_size=128, sliding_window=4096, conv_width=0,
    )  # fmt: skip
    platform = detect("cpu")
    reports = {report.op: report for report in probe(platform, CPU, large, ops={"lora", "linear", "causal_conv1d"})}
    assert reports["lora"].used == reports["linear"].used == "cpu"
    assert reports["causal_conv1d"].trials == ()


@pytest.mark.parametrize("hidden_size", [256, 4096])
def test_steps_of_each_size_are_probed(hidden_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each accelerator has kernels or tiles of its own: an NPU for few and many tokens, a GPU for one too."""
    sizes: list[tuple[int, int]] = []

    def recorded(x: Any, out: Any, stack: Any, maps: Any, **options: Any) -> None:
        sizes.append((maps.num_tokens, x.shape[1]))
        lora.lora_linear(x, out, stack, maps, **options)

    module = ModuleType("kernels.lora.recording")
    vars(module).update({name: value for name, value in vars(lora).items() if not name.startswith("__")})
    vars(module)["lora_linear"] = recorded
    monkeypatch.setitem(sys.modules, module.__name__, module)
    platform = detect("cpu").with_fallback("lora", "recording", "for the test")
    shapes = dataclasses.replace(SHAPES, hidden_size=hidden_size)
    assert {trial.status for trial in try_op(platform, CPU, "lora", shapes)} == {"ok"}
    assert {choose(*size, num_vector_cores=40, on_chip_bytes=192 * 1024).name for size in sizes} == {"few", "many"}
    assert len({config_for("any", num_tokens) for num_tokens, _ in sizes}) == 3


@pytest.mark.parametrize("block_size", [1, 2, 4, 7, 16, 128])
@pytest.mark.parametrize("op", ["paged_attention", "rotary_kv"])
def test_blocks_of_any_size_are_probed(op: str, block_size: int) -> None:
    trials = list(try_op(detect("cpu"), CPU, op, dataclasses.replace(SHAPES, block_size=block_size)))
    assert [trial.status for trial in trials] == ["ok"] * len(cases_of(op, SHAPES))


# ---- wrong on purpose


def a_key_too_few(q: Any, k: Any, v: Any, maps: Any, **options: Any) -> None:
    """Does not see the last key of each longer sequence."""
    lens = tuple(kv_len - 1 if kv_len > 7 else kv_len for kv_len in maps.kv_lens)
    sdpa.paged_attention(q, k, v, dataclasses.replace(maps, kv_lens=lens), **options)


def a_window_too_wide(q: Any, k: Any, v: Any, maps: Any, *, sliding_window: int | None, **options: Any) -> None:
    """Off by one in the window alone."""
    wider = None if sliding_window is None else sliding_window + 1
    sdpa.paged_attention(q, k, v, maps, sliding_window=wider, **options)


def a_window_too_narrow(q: Any, k: Any, v: Any, maps: Any, *, sliding_window: int | None, **options: Any) -> None:
    """Off by one the other way."""
    narrower = None if sliding_window is None else sliding_window - 1
    sdpa.paged_attention(q, k, v, maps, sliding_window=narrower, **options)


def a_key_too_few_of_long_ones(q: Any, k: Any, v: Any, maps: Any, **options: Any) -> None:
    """Does not see the last key of long sequences, where each key weighs little."""
    lens = tuple(kv_len - 1 if kv_len > 100 else kv_len for kv_len in maps.kv_lens)
    sdpa.paged_attention(q, k, v, dataclasses.replace(maps, kv_lens=lens), **options)


def for_single_tokens(wrong: Callable[..., None]) -> Callable[..., None]:
    """Wrong in a step of decode tokens only."""

    def attend(q: Any, k: Any, v: Any, maps: Any, **options: Any) -> None:
        (wrong if len(q) == len(maps.kv_lens) else sdpa.paged_attention)(q, k, v, maps, **options)

    attend.__name__ = f"{wrong.__name__}_for_single_tokens"
    return attend


def no_window_for_single_tokens(
    q: Any, k: Any, v: Any, maps: Any, *, sliding_window: int | None, **options: Any
) -> None:
    """Forgets the window in a step of decode tokens only."""
    is_decode = len(q) == len(maps.kv_lens)
    sdpa.paged_attention(q, k, v, maps, sliding_window=None if is_decode else sliding_window, **options)


def the_next_block(q: Any, k: Any, v: Any, maps: Any, **options: Any) -> None:
    """Reads a block that nobody has written."""
    tables = tuple((*blocks[:-1], 5) for blocks in maps.block_tables)
    sdpa.paged_attention(q, k, v, dataclasses.replace(maps, block_tables=tables), **options)


def a_rank_too_few(x: Any, out: Any, stack: Any, maps: Any, **options: Any) -> None:
    """Leaves the last rank of each adapter out."""
    ranks = [[max(rank - 1, 0) for rank in row] for row in stack.host_ranks]
    lora.lora_linear(x, out, dataclasses.replace(stack, host_ranks=ranks), maps, **options)


def nothing_for_many_tokens(x: Any, out: Any, stack: Any, maps: Any, **options: Any) -> None:
    """Adds nothing in a large step."""
    if maps.num_tokens <= 64:
        lora.lora_linear(x, out, stack, maps, **options)


def nothing_for_one_token(x: Any, out: Any, stack: Any, maps: Any, **options: Any) -> None:
    """Adds nothing in a step of one token."""
    if maps.num_tokens > 1:
        lora.lora_linear(x, out, stack, maps, **options)


def base_tokens_written(x: Any, out: Any, stack: Any, maps: Any, **options: Any) -> None:
    """Changes the rows of base tokens."""
    lora.lora_linear(x, out, stack, maps, **options)
    out[-1] += 1.0


def a_slot_too_many(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slots: Any, *norm: Any) -> Any:
    """Writes the slot behind its last one as well."""
    rotary_kv.rotary_kv(qkv[-2:-1], cos[-2:-1], sin[-2:-1], k_cache, v_cache, slots[-2:-1] + 1, *norm)
    return rotary_kv.rotary_kv(qkv, cos, sin, k_cache, v_cache, slots, *norm)


def padding_written(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slots: Any, *norm: Any) -> Any:
    """Takes -1 for the last slot of the cache."""
    numbers = qkv.nan_to_num()
    return rotary_kv.rotary_kv(numbers, cos, sin, k_cache, v_cache, slots % k_cache[..., 0, 0].numel(), *norm)


def heads_not_normed(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slots: Any, *_norm: Any) -> Any:
    """Forgets the norm of the heads."""
    return rotary_kv.rotary_kv(qkv, cos, sin, k_cache, v_cache, slots, None, 0.0)


def another_token(logits: Any, maps: Any, state: Any) -> Any:
    """Off by one in the last row."""
    sampled = sampling.sample(logits, maps, state)
    sampled.token_ids[maps.facts.num_rows - 2] += 1
    return sampled


def a_token_counted_twice(logits: Any, maps: Any, state: Any) -> Any:
    """Right but for the next step."""
    sampled = sampling.sample(logits, maps, state)
    state.add(maps.slots, sampled.token_ids)
    return sampled


def no_random_number_in_a_nucleus(logits: Any, maps: Any, state: Any) -> Any:
    """Draws the first token that is not excluded, where the vocabulary is sorted."""
    if maps.facts.num_ranked == maps.facts.vocab:
        maps = dataclasses.replace(maps, numbers=torch.zeros_like(maps.numbers))
    return sampling.sample(logits, maps, state)


def nan_passed_over(logits: Any, maps: Any, state: Any) -> Any:
    """Takes the largest of the others, as a device's maximum may."""
    return sampling.sample(logits.nan_to_num(nan=-torch.inf), maps, state)


WRONG: list[tuple[str, str, Callable[..., Any]]] = [
    ("paged_attention", "paged_attention", a_key_too_few),
    ("paged_attention", "paged_attention_window", a_window_too_wide),
    ("paged_attention", "paged_attention_window", a_window_too_narrow),
    ("paged_attention", "paged_attention", a_key_too_few_of_long_ones),
    ("paged_attention", "paged_attention_window_decode", for_single_tokens(a_window_too_narrow)),
    ("paged_attention", "paged_attention_window_decode", for_single_tokens(a_window_too_wide)),
    ("paged_attention", "paged_attention_decode", for_single_tokens(a_key_too_few_of_long_ones)),
    ("paged_attention", "paged_attention_window_decode", no_window_for_single_tokens),
    ("paged_attention", "paged_attention", the_next_block),
    ("lora", "lora_linear", a_rank_too_few),
    ("lora", "lora_linear", base_tokens_written),
    ("lora", "lora_linear_many", nothing_for_many_tokens),
    ("lora", "lora_linear_one", nothing_for_one_token),
    ("rotary_kv", "rotary_kv", a_slot_too_many),
    ("rotary_kv", "rotary_kv", padding_written),
    ("rotary_kv", "rotary_kv_normed", heads_not_normed),
    ("sampling", "sample", another_token),
    ("sampling", "sample", a_token_counted_twice),
    ("sampling", "sample_top_p", no_random_number_in_a_nucleus),
    ("sampling", "sample", nan_passed_over),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("op", "case", "wrong"), WRONG, ids=[wrong.__name__ for _, _, wrong in WRONG])
def test_a_wrong_one_is_found(
    op: str, case: str, wrong: Callable[..., Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = IMPLEMENTATIONS["cpu"][op][0]
    module = ModuleType(f"kernels.{op}.wrong")
    right = vars(importlib.import_module(f"kernels.{op}.{own}"))
    vars(module).update({name: value for name, value in right.items() if not name.startswith("__")})
    functions = {"lora": "lora_linear", "sampling": "sample"}
    setattr(module, functions.get(op, op), wrong)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    platform = detect("cpu").with_fallback(op, "wrong", "for the test")
    assert candidates(platform, op) == ("wrong", *IMPLEMENTATIONS["cpu"][op])
    # Of a true model: faults of single keys show least where blocks and heads are large.
    shapes = dataclasses.replace(SHAPES, dtype=dtype, block_size=128, num_heads=16, num_kv_heads=8, head_dim=128)
    trials = list(try_op(platform, CPU, op, shapes))
    assert (case, "differs") in [(trial.case, trial.status) for trial in trials if trial.implementation == "wrong"]
    assert (trials[-1].implementation, trials[-1].status) == (own, "ok")
    # Nothing of the probe stays behind.
    assert in_use(CPU).implementations[op] == own


@pytest.mark.parametrize(("forgotten", "rule"), [("score_cap", {"score_cap": 50.0}), ("sinks", {"has_sinks": True})])
def test_an_implementation_that_forgets_a_rule_is_found(
    forgotten: str, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap of Gemma 2, which no score of random queries comes near; the sinks of gpt-oss."""

    def forgetting(q: Any, k: Any, v: Any, maps: Any, **options: Any) -> None:
        sdpa.paged_attention(q, k, v, maps, **{**options, forgotten: None})

    module = ModuleType("kernels.paged_attention.wrong")
    vars(module).update({name: value for name, value in vars(sdpa).items() if not name.startswith("__")})
    module.paged_attention = forgetting  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    platform = detect("cpu").with_fallback("paged_attention", "wrong", "for the test")
    shapes = dataclasses.replace(SHAPES, dtype="bfloat16", **rule)
    trials = list(try_op(platform, CPU, "paged_attention", shapes))
    assert [trial.status for trial in trials if trial.implementation == "wrong"][-1] == "differs"
    assert (trials[-1].implementation, trials[-1].status) == ("sdpa", "ok")


# ---- regimes


def fails_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first choice for LoRA that is right for few tokens and raises for many."""
    module = ModuleType("kernels.lora.few_alone")
    vars(module).update({name: value for name, value in vars(lora).items() if not name.startswith("__")})

    def lora_linear(x: torch.Tensor, *arguments: Any, **options: Any) -> None:
        if len(x) > FEW_TOKENS["cpu"]:
            raise RuntimeError("unified buffer overflow")
        lora.lora_linear(x, *arguments, **options)

    module.lora_linear = lora_linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(IMPLEMENTATIONS["cpu"], "lora", ("few_alone", "cpu", "reference"))  # type: ignore[arg-type]


def test_what_fails_for_many_tokens_keeps_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for_many(monkeypatch)
    platform = detect("cpu").with_fallback("lora", "few_alone", "for the test")
    (report,) = (one for one in probe(platform, CPU, SHAPES, ops={"lora"}) if one.op == "lora")
    assert (report.used, dict(report.regimes), report.is_fallback) == ("few_alone", {"many": "cpu"}, True)
    assert report.sentence == (
        "The op lora is served by few_alone, but in steps of many tokens by cpu: few_alone failed in lora_linear_many "
        "(RuntimeError: unified buffer overflow)."
    )
    serving = with_reports(platform, (report,))
    assert serving.fallbacks[-1] == report.sentence
    assert [serving.serving("lora", regime) for regime in ("", "many")] == ["few_alone", "cpu"]
    shapes = dataclasses.replace(SHAPES, conv_width=0, delta=None)
    with installed(serving):
        modules = [implementation("lora", CPU, regime).__name__ for regime in ("", "many", "other")]
        assert modules == ["kernels.lora.few_alone", "kernels.lora.cpu", "kernels.lora.few_alone"]
        for case in cases_of("lora", shapes).values():  # none reaches the kernel that fails
            case(shapes, Place(CPU, torch.float32, torch.float32))()
        assert not contract("lora", CPU).replayable


@pytest.mark.parametrize("broken", ["", "mixed"])
def test_attention_that_caches_are_laid_out_for_serves_all_regimes_or_none(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at how caches lie: those of its own cases head by head, those of the next one's token by token."""
    seen: set[tuple[str, bool]] = set()

    def attend(name: str) -> Any:
        def paged_attention(q: Any, k_cache: Any, v_cache: Any, maps: Any, **options: Any) -> None:
            seen.add((name, is_heads_first(k_cache)))
            if name == "npu_heads_first" and maps.is_decode == (broken == ""):
                raise RuntimeError("561002")
            sdpa.paged_attention(q, k_cache.contiguous(), v_cache.contiguous(), maps, **options)

        return paged_attention

    names = ("npu_heads_first", "npu")
    for name in names:
        module = ModuleType(f"kernels.paged_attention.{name}")
        vars(module).update(CONTRACT=Contract(), paged_attention=attend(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(IMPLEMENTATIONS["cpu"], "paged_attention", (*names, "reference"))  # type: ignore[arg-type]
    platform = detect("cpu").with_fallback("paged_attention", names[0], "for the test")
    assert platform.kv_heads_first
    (report,) = (one for one in probe(platform, CPU, SHAPES, ops={"paged_attention"}) if one.op == "paged_attention")
    assert (report.used, dict(report.regimes)) == ("npu", {})
    assert "served by npu instead of npu_heads_first" in str(report.sentence) and "561002" in str(report.sentence)
    assert not with_reports(platform, (report,)).kv_heads_first
    assert seen == {("npu_heads_first", True), ("npu", False)}
    # Also where what it fails in ends its process, and the next one is told.
    trials = list(try_op(platform, CPU, "paged_attention", SHAPES, excluded=[f"{names[0]}/{broken}"]))
    assert {trial.implementation for trial in trials} == {"npu"}


def test_what_another_model_of_the_process_could_not_use_serves_again() -> None:
    first = next(iter(IMPLEMENTATIONS["cpu"]["lora"]))
    before = detect("cpu").with_fallback("lora", "reference", "not in float32.", {"many": "any_device"})
    (report,) = (one for one in probe(detect("cpu"), CPU, SHAPES, ops={"lora"}) if one.op == "lora")
    serving = with_reports(before, (report,))
    assert [serving.serving("lora", regime) for regime in ("", "many")] == [first, first]


def test_a_regime_that_nothing_serves_stops_the_start() -> None:
    trials = tuple(
        Trial(op="lora", case=case, implementation="cpu", status=status, sentence="why")  # type: ignore[arg-type]
        for case, status in (("lora_linear", "ok"), ("lora_linear_many", "raised"))
    )
    report = report_of("lora", "cpu", detect("cpu"), trials)
    assert (report.used, dict(report.regimes), report.is_served) == ("cpu", {"many": None}, False)
    with pytest.raises(
        BackendError, match=r"^The op lora is served by cpu, but in steps of many tokens by none: why\.$"
    ):
        with_reports(detect("cpu"), (report,))


def test_one_that_dies_in_a_regime_is_passed_over_in_that_one_alone() -> None:
    work = ProbeWork(detect("cpu"), lambda _op, _name: None)
    ok = {"op": "lora", "implementation": "cpu", "status": "ok"}
    for _ in range(2):  # the next process tries again what had passed
        work.take({"begin": "lora", "case": "lora_linear", "implementation": "cpu"})
        work.take({"trial": {**ok, "case": "lora_linear"}})
    work.take({"begin": "lora", "case": "lora_linear_many", "implementation": "cpu"})
    work.blame(SimpleNamespace(hung=False, ending="killed its process with signal 6"))  # type: ignore[arg-type]
    assert work.excluded()["lora"] == ["cpu/many"]
    lora_report = next(report for report in work.reports() if report.op == "lora")
    assert [(trial.case, trial.status) for trial in lora_report.trials] == [
        ("lora_linear", "ok"),
        ("lora_linear_many", "crashed"),
    ]
    left = list(try_op(detect("cpu"), CPU, "lora", SHAPES, excluded=work.excluded()["lora"]))
    assert {trial.implementation for trial in left if trial.case == "lora_linear_many"} == {"reference"}
    assert {trial.implementation for trial in left if trial.case != "lora_linear_many"} == {"cpu"}


# ---- apart, and what follows


class ImpatientProcess(ProbeProcess):
    """One whose silence is long within the broken implementation alone, however slow the machine is."""

    _is_within = False

    def line(self, limit_seconds: float) -> str | None:
        line = super().line(1.0 if self._is_within else max(limit_seconds, LIMIT_SECONDS))
        begun = json.loads(line or "{}")
        self._is_within = (begun.get("implementation"), begun.get("case")) == ("broken_never", "rotary_kv")
        return line


def test_one_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BROKEN_OPS))
    monkeypatch.setenv("BROKEN_OPS", "rotary_kv=never")
    monkeypatch.setitem(IMPLEMENTATIONS["cpu"], "rotary_kv", ("broken_never", "cpu"))  # type: ignore[arg-type]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    platform = detect("cpu").with_fallback("rotary_kv", "broken_never", "for the test")
    started = ImpatientProcess()
    reports = probe_apart(platform, "cpu", SHAPES, process=started, hang_seconds=LIMIT_SECONDS)
    report = {one.op: one for one in reports}["rotary_kv"]
    assert started.hung, "it was the first to probe"
    assert (report.wished, report.used, report.trials[0].status) == ("broken_never", "cpu", "hung")
    assert report.sentence == (
        "The op rotary_kv is served by cpu instead of broken_never: broken_never did not end within 600 s in rotary_kv."
    )


def test_one_that_dies_while_it_compiles_ahead_costs_no_implementation() -> None:
    work = ProbeWork(detect("cpu"), lambda _op, _name: None)
    assert work.compiles_ahead
    work.take({"ahead": True})
    work.blame(SimpleNamespace(hung=False, ending="left the device unusable"))  # type: ignore[arg-type]
    assert (work.compiles_ahead, work.left) == (False, list(detect("cpu").implementations))
    with pytest.raises(BackendError, match=r"^The process that probes the ops left the device unusable\.$"):
        work.blame(SimpleNamespace(hung=False, ending="left the device unusable"))  # type: ignore[arg-type]


# As in a process with a GPU, whose kernels for it end the process that imports them.
_DEADLY_IMPORT = """
import os, sys
import torch
torch.cuda.is_available = lambda: True
class Deadly:
    def find_spec(self, name, path=None, target=None):
        if name == "kernels.lora.triton_cuda":
            os.abort()
sys.meta_path.insert(0, Deadly())
"""


def test_one_that_dies_while_it_gets_ready_costs_no_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_DEADLY_IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    early = ProbeProcess(is_early=True)
    reports = probe_apart(detect("cpu"), "cpu", SHAPES, process=early)
    assert "signal 6" in early.ending, "it has died"
    assert all(report.used == report.wished for report in reports)


def test_what_is_probed_is_compiled_before_once(tmp_path: Path) -> None:
    """In a process of its own, without Triton's interpreter; with the cache filled nothing is asked for again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "ops" / "probe_ahead.py")],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [5]


def test_an_op_that_nothing_serves_stops_the_start() -> None:
    trial = Trial(op="lora", case="lora_linear", implementation="cpu", status="raised", sentence="cpu failed (why)")
    report = OpReport(op="lora", wished="cpu", used=None, trials=(trial,))
    with pytest.raises(BackendError, match=r"^The op lora is not served by any implementation: cpu failed \(why\)\.$"):
        with_reports(detect("cpu"), (report,))


@pytest.mark.parametrize(("triton", "fault"), [("none", NO_TRITON), ("upstream", UPSTREAM)])
def test_what_the_platform_has_passed_over_is_reported_with_its_reason(triton: Any, fault: str) -> None:
    """On an Ascend910B4 without its Triton, where the probe itself finds no fault."""
    with made_up_npu({"name": "Ascend910B4"}, triton):
        platform = detect("npu:0")
    reports = {report.op: report for report in probe(platform, CPU, SHAPES, ops={"lora"})}
    for op in ("lora", "causal_conv1d"):
        assert reports[op].sentence == f"The op {op} is served by any_device instead of triton_ascend: {fault}"
    assert {trial.status for trial in reports["lora"].trials} == {"ok"}
    assert reports["swiglu"].sentence is None
    assert with_reports(platform, tuple(reports.values())).fallbacks == (fault,)
    trial = Trial(op="lora", case="lora_linear", implementation="any_device", status="raised", sentence="it failed")
    sentence = report_of("lora", "triton_ascend", platform, (trial,)).sentence
    assert sentence == f"The op lora is not served by any implementation: {fault[:-1]}; it failed."


def test_one_that_refuses_such_a_model_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a block, of which no small call can tell."""
    module = ModuleType("kernels.paged_attention.choosy")
    vars(module)["paged_attention"] = sdpa.paged_attention
    vars(module)["CONTRACT"] = Contract(
        refuses=lambda shapes: None if shapes.block_size == 128 else f"it takes 128 tokens, not {shapes.block_size}"
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    platform = detect("cpu").with_fallback("paged_attention", "choosy", "for the test")
    trials = list(try_op(platform, CPU, "paged_attention", SHAPES))
    assert (trials[0].status, trials[0].sentence) == (
        "refused",
        "choosy does not serve this model: it takes 128 tokens, not 16",
    )
    assert trials[-1].implementation == "sdpa"
    large = dataclasses.replace(SHAPES, block_size=128)
    assert {trial.status for trial in try_op(platform, CPU, "paged_attention", large)} == {"ok"}


def test_a_lost_device_ends_the_probing_process() -> None:
    """Here one that cannot give back what it has computed."""
    code = "import torch; from kernels.probe.child import require_alive as ask; ask(torch.device({!r}))"
    ends = [subprocess.run([sys.executable, "-c", code.format(name)], cwd=ROOT).returncode for name in ("cpu", "meta")]
    assert ends == [0, DEVICE_IS_LOST]
