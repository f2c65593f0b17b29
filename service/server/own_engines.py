"""The engines of a server's own, as its settings have them. Imports little, since they start before all else."""

from __future__ import annotations

import os

import msgspec

from service.cluster.engines import Engines
from service.engine.ipc.client import EngineClient
from service.machine import may_find_accelerator, num_usable_cpus
from service.settings import Settings
from service.start_check import StartError

# Variables by which a process sees some of the devices only, NVIDIA's and Ascend's.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
# Another process may free an engine's device or memory, and nobody restarts a server whose other engines serve.
_REST_SECONDS = 60.0


def environment_of(number: int) -> dict[str, str]:
    """Variables that show an engine the device `number`, from 0, of those that this process may use, as its first.
    StartError if the variables here name fewer."""
    return {name: _device(name, number) for name in _VISIBLE}


def _device(variable: str, number: int) -> str:
    here = os.environ.get(variable)
    if here is None:
        return str(number)
    devices = [one.strip() for one in here.split(",") if one.strip()]
    # An empty list hides all devices of that kind from us, and from the engines likewise.
    if not devices:
        return here
    if number >= len(devices):
        raise StartError(
            f"{variable} names {len(devices)} devices, and there are to be {number + 1} engines or more; name more "
            "devices, or set fewer --replicas."
        )
    return devices[number]


def own_engines(settings: Settings) -> EngineClient | Engines:
    """Build the engine clients without starting them. Each of several sees one device: the next of those that this
    process may use."""
    options = settings.engine_options()
    if settings.replicas == 1:
        return EngineClient(options)
    if options.num_threads is None and not may_find_accelerator(options.device):
        options = msgspec.structs.replace(options, num_threads=max(1, num_usable_cpus() // settings.replicas))
    numbers = range(settings.replicas)
    return Engines([EngineClient(options, environment_of(number), _REST_SECONDS) for number in numbers])
