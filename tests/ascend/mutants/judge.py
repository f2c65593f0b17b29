"""Whether the gate notices that a kernel was changed: its launches one after another, until one of them is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import resource
import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch

from tests.ascend.gate import checks, compiler, linalg_cpu
from tests.ascend.gate.cases import REQUIRED_TARGETS, Case
from tests.ascend.mutants.changes import Mutant, kernels_with
from tests.ascend.registry import CASES

# Those in which the gate's kernels are.
MODULES: tuple[ModuleType, ...] = tuple(dict.fromkeys(sys.modules[case.kernel.fn.__module__] for case in CASES))
# A launch takes seconds of computing, and so does each process that it starts; what takes so long has lost its way out
# of a loop. Seconds of a clock would be up for good kernels too where much else is at work.
LAUNCH_CPU_SECONDS = 120
_LARGE = {
    "far",
    "long",
    "mixed",
    "large ranks",
    "qwen3.5",
    "qwen3.5 qkv",
    "qwen3.5 0.8B",
    "qwen3.5 2B",
    "qwen3.5 9B",
    "qwen3.5 27B",
    "sequences that begin with a tile",
}
# The last two say nothing of the gate: the compiler refused the change, or ended for a reason that is not the change's.
SURVIVED, NOT_COMPILED, NOT_JUDGED = "survived", "did not compile", "the compiler died"


def source_of(module: ModuleType) -> str:
    """The module's text."""
    assert module.__file__ is not None
    return Path(module.__file__).read_text()


def judge(module: ModuleType, mutant: Mutant, launch_name: str = "") -> str:
    """Verdict of the gate on the mutant: `SURVIVED`, `NOT_COMPILED`, `NOT_JUDGED`, or how it was caught.

    In a process of its own, and no fork of this one: threads that do not exist there, or pytest's signal handlers,
    would hang or end it for reasons that are not the mutant's.

    launch_name  judge by launches of this name alone
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        path = Path(directory) / "mutant.py"
        path.write_text(mutant.source)
        arguments = (module.__name__, mutant.function, mutant.kind, launch_name, path, sender)
        # A daemon, so that nobody waits for it at the end of this process if a test's time limit interrupts this.
        process = context.Process(target=_judge, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            verdict: str = receiver.recv()
        except EOFError:
            process.join()
            # A signal's: one that ends by itself without a verdict has not judged.
            assert process.exitcode is not None and process.exitcode < 0, f"the judge ended with {process.exitcode}"
            verdict = f"ended with {process.exitcode}"
        finally:
            process.kill()  # it has said all; what its libraries do at their end may take its time
            process.join()
    return verdict


def _judge(module_name: str, function: str, kind: str, launch_name: str, path: Path, sender: Connection) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler.CACHE = linalg_cpu.CACHE = path.parent
    changed = _imported(path)
    launches = _launches(sys.modules[module_name], function, kind)
    sender.send(_verdict(changed, [one for one in launches if launch_name in ("", one[2])]))


def _verdict(changed: ModuleType, launches: list[tuple[str, Case, str]]) -> str:
    for name, case, launch_name in launches:
        kernel = getattr(changed, name)
        _limit_cpu()
        try:
            _run(dataclasses.replace(case, kernel=kernel), launch_name)
        except compiler.CompileError as error:
            return NOT_COMPILED if error.stage != "device" else f"{launch_name}: {error}"[:200]
        except compiler.CompilerDied:
            return NOT_JUDGED
        except Exception as error:  # whatever the gate would fail with
            return f"{launch_name}: {type(error).__name__}: {' '.join(str(error).split())}"[:200]
    return SURVIVED


def _limit_cpu() -> None:
    """End this process, or one that it starts, once it has computed for too long from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + LAUNCH_CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _launches(module: ModuleType, function: str, kind: str) -> list[tuple[str, Case, str]]:
    """The gate's launches of kernels that have the change, those that are likely to show it or are small first."""
    affected = kernels_with(function, source_of(module))
    launches = [one for one in launches_of(module) if one[0] in affected]
    if kind == "32 bits":
        launches.sort(key=lambda one: one[2] != "far")
    return launches


def launches_of(module: ModuleType) -> list[tuple[str, Case, str]]:
    """(kernel, case, launch) for all launches of a module's kernels; those judged by bytes are large, so last."""
    small, large = [], []
    for case in (one for one in CASES if one.kernel.fn.__module__ == module.__name__):
        for launch_name, make in case.launches.items():
            is_large = getattr(make, "keywords", {}).get("judge_traffic") or launch_name in _LARGE
            (large if is_large else small).append((case.kernel.fn.__name__, case, launch_name))
    return small + large


def _run(case: Case, launch_name: str) -> None:
    """The gate's tests of one launch, but for the compilers of further chips."""
    launch = case.launches[launch_name]()
    compiled = checks.compile_launch(case, launch, REQUIRED_TARGETS[0])
    checks.check_fits(case, compiled)
    checks.check_loops(case, compiled)
    counts = checks.run_simulated(case, launch, compiled)
    checks.check_values(launch)
    checks.check_scalars(launch, counts)
    checks.check_traffic(launch, counts)
    checks.check_time(case, launch_name, launch, counts)
    # Last, since stock MLIR and clang take longest; on fresh outputs, as those of the simulated run are right already.
    launch = case.launches[launch_name]()
    checks.run_on_cpu(case, launch, compiled, "reverse")
    checks.check_values(launch)


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutant"] = module
    spec.loader.exec_module(module)
    return module
