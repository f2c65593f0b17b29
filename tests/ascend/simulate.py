"""One launch of each kernel of the gate on the NPU of this process: `python -m tests.ascend.simulate`, as
scripts/simulate-ascend.sh runs it in CANN's simulator. Not run yet: neither CANN nor an NPU was at hand.

The gate executes what the open compiler makes; here the closed last step (hivmc) makes object code, and the simulator
of the chip executes it, waits within a core included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.ascend.gate.cases import Case, Launch
from tests.ascend.gate.checks import check_values
from tests.ascend.registry import CASES

# Small launches with odd sizes, where a kernel has such.
_PREFERRED = ("odd sizes", "packed", "odd", "short last part")


def chosen() -> Iterator[tuple[Case, str]]:
    """Each kernel once, in the launch that it is judged by here."""
    seen = set()
    for case in CASES:
        if case.name not in seen:
            seen.add(case.name)
            yield case, next((name for name in _PREFERRED if name in case.launches), next(iter(case.launches)))


def moved(launch: Launch, to: Callable[[torch.Tensor], torch.Tensor]) -> Launch:
    """The launch with all tensors elsewhere, memory by memory, so that strides and offsets stay; tables of addresses
    name what is there."""
    memories: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def there(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memories:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            memories[storage.data_ptr()] = whole, to(whole)
        _, whole = memories[storage.data_ptr()]
        return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def readdressed(values: torch.Tensor) -> torch.Tensor:
        changed = values.clone()
        for old, new in memories.values():
            is_in = (values >= old.data_ptr()) & (values < old.data_ptr() + old.numel())
            changed = torch.where(is_in, values - old.data_ptr() + new.data_ptr(), changed)
        return changed

    reachable = {name: there(tensor) for name, tensor in launch.reachable.items()}
    arguments = dict(launch.arguments)
    tables = [name for name in launch.maps if getattr(arguments.get(name), "dtype", None) == torch.int64]
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor) and name not in tables:
            arguments[name] = there(value)
    for name in tables:
        arguments[name] = there(readdressed(launch.arguments[name]))
    return replace(launch, arguments=arguments, reachable=reachable)


def run(case: Case, launch: Launch, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Launch it there; raises AssertionError where the outputs are not what the gate expects."""
    elsewhere = moved(launch, to)
    case.kernel[elsewhere.grid](**elsewhere.arguments, **case.options)
    check_values(moved(elsewhere, lambda memory: memory.cpu()))


def main() -> int:
    """The exit code: how many kernels were wrong."""
    import torch_npu  # noqa: F401 - registers the device

    num_wrong = 0
    for case, name in chosen():
        try:
            run(case, case.launches[name](), lambda tensor: tensor.npu())
            print(f"ok     {case.name}: {name}", flush=True)
        except Exception as error:
            num_wrong += 1
            print(f"WRONG  {case.name}: {name}: {type(error).__name__}: {str(error).strip()[:500]}", flush=True)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
