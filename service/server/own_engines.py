"""The engines of a server's own, as its settings have them. Imports little, since they start before all else."""

from __future__ import annotations

import msgspec

from service.cluster.devices import environment_of
from service.cluster.engines import Engines
from service.engine.ipc.client import EngineClient
from service.machine import may_find_accelerator, num_usable_cpus
from service.settings import Settings

# Another process may free an engine's device or memory, and nobody restarts a server whose other engines serve.
_REST_SECONDS = 60.0


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
