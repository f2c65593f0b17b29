"""The gate notices small changes of the kernels: some that it once missed, and a few drawn at random.

Hundreds are tried by `python -m tests.ascend.mutants`, which takes an hour.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernels import ascend_relaunch, triton_launch
from kernels.causal_conv1d import triton_ascend as conv
from kernels.gated_delta import triton_ascend_decode as delta
from kernels.gated_delta import triton_ascend_prepare as prepare
from kernels.gated_delta import triton_ascend_walk as walk
from kernels.lora import triton_ascend as lora_host
from kernels.lora.ascend import kernels as lora
from kernels.lora_window import triton_ascend as window_host
from kernels.lora_window import triton_ascend_kernels as window
from kernels.rotary_kv import triton_ascend as rotary_host
from tests.ascend.gate import linalg_cpu
from tests.ascend.mutants.__main__ import drawn
from tests.ascend.mutants.changes import Mutant, mutants_of
from tests.ascend.mutants.judge import NOT_COMPILED, NOT_JUDGED, SURVIVED, judge, source_of

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not linalg_cpu.available(), reason="NOT EXECUTED: mlir-19-tools or clang-19 is missing"),
]
NUM_DRAWN = 3
SCALING = "tl.load(scalings + slice_index * num_places + place)"
SCALING_OF_SEGMENT = SCALING.replace("place)", "segment)")
ADDED = "deltas += tl.where((members == t)[:, None], delta[None, :], 0.0)"


def found(module: ModuleType, function: str, before: str, after: str) -> Mutant:
    mutants = mutants_of(source_of(module))
    return next(one for one in mutants if (one.function, one.before, one.after) == (function, before, after))


def in_statement(module: ModuleType, function: str, before: str, after: str, statement: str) -> Mutant:
    """A mutant of an expression that stands in several statements, in this one."""
    of_change = (function, before, after, statement)
    mutants = mutants_of(source_of(module))
    return next(one for one in mutants if (one.function, one.before, one.after, one.statement) == of_change)


def replaced(module: ModuleType, function: str, before: str, after: str) -> Mutant:
    """A mutant that no change of one place makes."""
    source = source_of(module)
    assert before in source
    return Mutant(function, "text", 0, before, after, lambda: source.replace(before, after))


MISSED = {
    "a scaling by segment": (
        lora, "packed", replaced(lora, "lora_shrink_few", SCALING, SCALING_OF_SEGMENT), "h_ptr"
    ),
    "a scaling by segment on the cube": (
        lora, "packed", replaced(lora, "lora_shrink_many", SCALING, SCALING_OF_SEGMENT), "h_ptr"
    ),
    "a window's scaling by segment": (
        window, "packed", replaced(window, "lora_expand_window_few", SCALING, SCALING_OF_SEGMENT), "product_ptr"
    ),
    "deltas rounded after each block of ranks": (
        lora, "cancelling",
        replaced(lora, "lora_expand_few", ADDED,
                 f"deltas = (deltas + {ADDED.partition('= ')[2]}).to(out_ptr.dtype.element_ty).to(tl.float32)"),
        "out_ptr",
    ),
    # Two cores work on the head and the state of a sequence that begins with the second one's tile.
    "a neighbour's sequence": (
        conv, "sequences that begin with a tile", found(conv, "conv_prefill", "starts < stop", "starts <= stop"),
        "a race",
    ),
    # What the next chunk's core adds meanwhile is lost.
    "a neighbour's columns": (
        lora, "odd sizes",
        replaced(lora, "lora_expand_few", "store_delta(delta, here, inside, OVERWRITE)",
                 "store_delta(tl.where(inside, delta, 0.0), here, first_column + columns < 777, OVERWRITE)"), "a race",
    ),
    "32-bit offsets of x": (lora, "far", found(lora, "lora_shrink_few", "tl.cast(t, tl.int64)", "t"), "far"),
    "32-bit offsets of out": (lora, "far", found(lora, "lora_expand_few", "begin.to(tl.int64)", "begin"), "far"),
    "32-bit offsets of rows": (lora, "far", found(lora, "load_b", "row.to(tl.int64)", "row"), "far"),
    "32-bit offsets of states": (conv, "far", found(conv, "conv_update", "source.to(tl.int64)", "source"), "far"),
    "32-bit offsets of a boundary's state": (
        conv, "far", found(conv, "conv_prefill", "kept_line.to(tl.int64)", "kept_line"), "far"
    ),
    "a state that is not kept": (
        conv, "prefix cache, not kept",
        found(conv, "conv_update", "(target > NULL_LINE) & (target != pad_slot)", "target != pad_slot"), "not kept",
    ),
    "a prompt's state that is not kept": (
        conv, "not kept",
        found(conv, "conv_prefill", "(target > NULL_LINE) & (target != pad_slot)", "target != pad_slot"), "states",
    ),
    "large ranks of a second tile": (
        lora, "two tiles",
        found(lora, "lora_shrink_few", "tl.cdiv(num_tokens, T) * num_slices", "num_slices"), "h_ptr",
    ),
    "a window's first row": (
        window, "first rows",
        in_statement(window, "swiglu_window_few", "0", "1", "first_row = tl.maximum(first_row, 0)"), "Mismatch",
    ),
    "what lies behind the gates of a last token": (
        delta, "qwen3.5 27B",
        found(delta, "gates_of_heads", "tl.load(a_ptr + heads, mask=is_head, other=0.0)", "tl.load(a_ptr + heads)"),
        "out of bounds",
    ),
    "what lies behind the gates of a last row": (
        prepare, "a tail of one token", found(prepare, "column_of", "heads < NUM_HEADS", "heads <= NUM_HEADS"),
        "out of bounds",
    ),
    "a state on the null line": (
        delta, "padding", found(delta, "gated_delta_decode", "line > NULL_LINE", "line >= NULL_LINE"), "states",
    ),
    "queries without a size": (
        walk, "zeros", found(walk, "gated_delta_walk", "tl.sum(q * q, 0) + 1e-06", "tl.sum(q * q, 0)"), "Mismatch",
    ),
    # Right, but what belongs to later groups is read for nothing.
    "tokens of later groups": (
        lora, "two groups",
        found(lora, "lora_expand_few", "tl.minimum(end - begin - group, group_tokens)", "end - begin - group"),
        "bytes moved",
    ),
    "a window's tokens of later groups": (
        window, "three groups",
        found(window, "lora_expand_window_few", "tl.minimum(end - begin - group, group_tokens)", "end - begin - group"),
        "bytes moved",
    ),
    "empty sequences behind the last token": (
        conv, "empty sequences behind the last token",
        found(conv, "conv_prefill", "tl.minimum(end_token, num_real_tokens)", "end_token"), "scalar loads of one core",
    ),
}  # fmt: skip


# Changes of what the host keeps of launches, which test_relaunch.py alone can see: an NPU's launches are made up there.
HOST = {
    "a launch kept for both modes": (lora_host, "sizes_of(x, out), overwrite)", "sizes_of(x, out))"),
    "addresses kept for all groups": (lora_host, "_STEP_MAPS, group", "_STEP_MAPS, 0"),
    "a launch kept for all numbers of segments": (lora_host, "*sizes_of(*tensors))", ")"),
    "a linear launch kept for all strides": (
        lora_host, "sizes_of(x, out), overwrite)", "x.shape, out.shape, out.dtype, overwrite)"
    ),
    "a window's launch kept for all strides": (window_host, "sizes_of(product))", "product.shape, product.dtype)"),
    "a gate's launch kept for all strides": (
        window_host, "sizes_of(product, out))", "sizes_of(out))"
    ),
    "a rotation kept for all types of weights": (rotary_host, "sizes_of(*tensors), eps", "sizes_of(*tensors[:3]), eps"),
    "a rotation into the first call's q": (rotary_host, "following=_TENSORS[1:]", "following=_TENSORS[1:2]"),
    "a workspace that is freed": (triton_launch, "self._outgrown.append(buffer)", "pass"),
    "the first launch's stream for ever": (
        ascend_relaunch, "return lambda: stream_of(device)", "return (lambda stream: lambda: stream)(stream_of(device))"
    ),
}  # fmt: skip
# Imports the changed text under the module's name, then runs pytest.
_RUN_CHANGED = """
import sys
from importlib.util import spec_from_file_location
class Changed:
    @staticmethod
    def find_spec(name, *_):
        return spec_from_file_location(name, sys.argv[2]) if name == sys.argv[1] else None
sys.meta_path.insert(0, Changed)
import pytest
sys.exit(pytest.main(sys.argv[3:]))
"""


def relaunch_tests(module: ModuleType, source: str, directory: Path) -> int:
    """Exit status of test_relaunch.py with another text of a module."""
    changed = directory / "changed.py"
    changed.write_text(source)
    tests = Path(__file__).with_name("test_relaunch.py")
    arguments = [module.__name__, str(changed), str(tests), "-q", "-x", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-c", _RUN_CHANGED, *arguments],
        capture_output=True,
        check=False,
        cwd=Path(__file__).parents[2],
    ).returncode


def test_relaunches_are_right_where_nothing_is_changed(tmp_path: Path) -> None:
    """The control: unchanged code passes, so a mutant is caught for its change alone."""
    assert relaunch_tests(lora_host, source_of(lora_host), tmp_path) == pytest.ExitCode.OK


@pytest.mark.parametrize("name", HOST)
def test_a_mutant_of_a_kept_launch_is_caught(name: str, tmp_path: Path) -> None:
    module, before, after = HOST[name]
    source = source_of(module)
    assert before in source
    assert relaunch_tests(module, source.replace(before, after), tmp_path) == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("name", MISSED)
def test_a_mutant_that_was_missed_once_is_caught(name: str) -> None:
    module, launch_name, mutant, why = MISSED[name]
    assert why in judge(module, mutant, launch_name)


def test_a_judge_that_cannot_begin_has_caught_nothing() -> None:
    broken = Mutant("conv_update", "text", 0, "", "", lambda: "raise OSError")
    with pytest.raises(AssertionError, match="the judge ended with 1"):
        judge(conv, broken)


def test_a_compiler_that_dies_has_caught_nothing() -> None:
    """As where memory is short: that says nothing of the mutant."""
    died = (
        "\nfrom tests.ascend.gate import checks, compiler\n"
        "def died(*_):\n    raise compiler.CompilerDied('killed')\n"
        "checks.compile_kernel = died\n"
    )
    killed = Mutant("conv_update", "text", 0, "", "", lambda: source_of(conv) + died)
    assert judge(conv, killed) == NOT_JUDGED


def test_mutants_that_are_drawn_at_random_are_caught() -> None:
    verdicts = (judge(module, mutant) for module, mutant in drawn(seed=1))
    compiled = (verdict for verdict in verdicts if verdict not in (NOT_COMPILED, NOT_JUDGED))
    assert SURVIVED not in itertools.islice(compiled, NUM_DRAWN)
