"""Change the Ascend kernels in small ways, one at a time, and count how many changes the gate notices.

    .venv-ascend/bin/python -m tests.ascend.mutants [--count 200] [--seed 0] [--processes 2] [--minutes 60]
        [--ops lora_window gated_delta]

Draws mutants of the gate's kernels, or of those of some ops alone, all kinds in turn, until `--count` of them have
compiled; prints each that survived, and whether `equivalent.py` lists it with a reason. Ends with 1 if fewer than 95 %
of those that are not listed were caught. Takes seconds for each that is caught and minutes for one that survives.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import ModuleType

from tests.ascend.mutants.changes import Mutant, mutants_of
from tests.ascend.mutants.equivalent import reason_for
from tests.ascend.mutants.judge import MODULES, NOT_COMPILED, NOT_JUDGED, SURVIVED, judge, source_of

FEWEST_CAUGHT = 0.95


def drawn(seed: int, modules: Iterable[ModuleType] = MODULES) -> Iterator[tuple[ModuleType, Mutant]]:
    """All mutants in random order, module after module and kind after kind, so that rare kinds come early too."""
    of_kinds: dict[tuple[str, str], list[tuple[ModuleType, Mutant]]] = defaultdict(list)
    for module in modules:
        for mutant in mutants_of(source_of(module)):
            of_kinds[module.__name__, mutant.kind].append((module, mutant))
    for mutants in of_kinds.values():
        random.Random(seed).shuffle(mutants)
    for round_ in itertools.zip_longest(*of_kinds.values()):
        yield from (one for one in round_ if one is not None)


def main() -> int:
    """Print survivors and the share that was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0)
    ops = {module: module.__name__.split(".")[1] for module in MODULES}
    parser.add_argument("--ops", nargs="+", choices=set(ops.values()), help="mutants of these ops' kernels alone")
    chosen = parser.parse_args()
    deadline, caught, equivalent, survived, judged = time.monotonic() + 60 * chosen.minutes, 0, 0, 0, 0
    mutants = drawn(chosen.seed, [module for module, op in ops.items() if not chosen.ops or op in chosen.ops])
    running: dict[Future[str], Mutant] = {}
    with ThreadPoolExecutor(chosen.processes) as pool:
        while True:
            while len(running) < min(chosen.processes, chosen.count - judged) and time.monotonic() < deadline:
                drawn_next = next(mutants, None)
                if drawn_next is None:
                    break
                module, mutant = drawn_next
                running[pool.submit(judge, module, mutant)] = mutant
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                mutant, verdict = running.pop(future), future.result()
                if verdict in (NOT_COMPILED, NOT_JUDGED):
                    if verdict == NOT_JUDGED:
                        print(f"     {mutant}\n       {verdict}: not counted", flush=True)
                    continue
                judged += 1
                reason = reason_for(mutant) if verdict == SURVIVED else None
                caught += verdict != SURVIVED
                equivalent += reason is not None
                survived += verdict == SURVIVED and reason is None
                print(f"{judged:4} {mutant}\n       {verdict}{f', equivalent: {reason}' if reason else ''}", flush=True)
    share = caught / max(1, caught + survived)
    print(
        f"{judged} judged, {caught} caught ({share:.1%} of those that change anything), {equivalent} equivalent, ",
        end="",
    )
    print(f"{survived} survived", flush=True)
    return int(share < FEWEST_CAUGHT)


if __name__ == "__main__":
    sys.exit(main())
