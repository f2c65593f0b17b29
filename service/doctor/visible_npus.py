"""The NPUs that a process is set to see, compared with the device nodes that exist. Not verified on an NPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

from service.doctor.host import Host
from service.doctor.report import Finding

NAME = "ASCEND_RT_VISIBLE_DEVICES"


def visible_npus(host: Host, device_type: str) -> Iterator[Finding]:
    """Findings on values for which CANN would silently offer no NPU, or another number than was meant."""
    value = host.environment.get(NAME)
    if value is None or device_type != "npu":
        return
    if not value.strip():
        yield Finding("error", "no-visible-device", f"{NAME} is empty: it hides every NPU.",
                      "Unset it, or name devices, such as 0.")  # fmt: skip
        return
    names = [name.strip() for name in value.split(",")]
    if not all(re.fullmatch("[0-9]+", name) for name in names) or len(set(names)) < len(names):
        yield Finding(
            "error", "visible-devices-wrong", f"{NAME}={value} is not a list of different numbers, such as 0,1.",
            "Name NPUs by their numbers; ASCEND_VISIBLE_DEVICES, which also knows ranges, is read by "
            "ascend-docker-runtime alone.",
        )  # fmt: skip
        return
    num_nodes = sum(bool(re.fullmatch("/dev/davinci[0-9]+", node)) for node in host.device_nodes)
    absent = [name for name in names if int(name) >= num_nodes]
    if absent and num_nodes:
        yield Finding(
            "warning", "visible-device-absent",
            f"{NAME}={value} names NPU {', '.join(absent)}, and there are {num_nodes} here: NPUs are counted from 0 "
            "among those whose /dev/davinci* are here, whatever the host calls them.",
            "Count from 0, or unset it: a container has no other NPUs than it was given.",
        )  # fmt: skip
