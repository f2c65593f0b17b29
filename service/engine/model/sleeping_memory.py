"""Memory of the device that an engine gives back while it sleeps, without its process ending: caches, whose contents
are lost, and on a GPU weights and adapter rows, which wait in host memory. It goes with the process.

The tensors stay the same objects, and get other memory later: who keeps an address must forget it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from service.machine import memory_bytes

# Packages whose objects are looked into.
_OURS = ("adapters", "kernels", "service")
# Memory that nobody has touched yet takes longer to touch than to copy to.
_NUM_THREADS = 8


class CannotSleep(RuntimeError):
    """The memory cannot be given back without the process; one sentence."""


class SleepingMemory:
    """The memory of these tensors, from its making until `bring_back`; no step runs meanwhile.

    lost  tensors whose contents nobody wants any more
    kept  tensors whose contents wait in host memory. Raises CannotSleep, with nothing changed, if that has no room
    """

    def __init__(self, lost: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
        self._lost = {storage: storage.nbytes() for storage in _storages(lost)}
        kept_storages = [storage for storage in _storages(kept) if storage not in self._lost]
        needed, free = sum(storage.nbytes() for storage in kept_storages), memory_bytes()[1]
        if needed > free:
            raise CannotSleep(f"weights take {needed} bytes of host memory, of which {free} are free")
        with ThreadPoolExecutor(_NUM_THREADS, "sleep") as pool:
            self._kept = dict(zip(kept_storages, pool.map(_in_host_memory, kept_storages), strict=True))
        for storage in (*self._lost, *self._kept):
            storage.resize_(0)

    def bring_back(self) -> None:
        """Give all tensors their memory again, and what was kept its contents. Raises torch's error if the device has
        too little by now."""
        for storage, num_bytes in self._lost.items():
            storage.resize_(num_bytes)
        for storage, held in self._kept.items():
            storage.resize_(held.nbytes)
            _bytes_of(storage).copy_(held)


def tensors_on(device: torch.device, *roots: object) -> Iterator[torch.Tensor]:
    """All tensors of this type of device, of which an engine has one, that these objects lead to through attributes and
    containers."""
    seen: set[int] = set()
    waiting: list[object] = list(roots)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.device.type == device.type:  # "cuda" is where tensors of "cuda:0" lie
                yield one
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        elif type(one).__module__.partition(".")[0] in _OURS:
            waiting += _attributes(one)


def _attributes(one: object) -> Iterator[Any]:
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(one, name, None)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each memory once."""
    return list({storage.data_ptr(): storage for storage in (one.untyped_storage() for one in tensors)}.values())


def _in_host_memory(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.zeros(storage.nbytes(), dtype=torch.uint8).copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
