"""A device for each engine of one server."""

from __future__ import annotations

import os

from service.start_check import StartError

# Variables by which a process sees some of the devices only, NVIDIA's and Ascend's.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


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
