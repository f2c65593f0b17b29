"""Constants of Ascend chips that the chips do not report themselves. Data; not verified on an NPU.

On-chip sizes are those that bishengir's description of its targets states (`bishengir-opt --hacc-append-device-spec`).
"""

from __future__ import annotations

from dataclasses import dataclass

_KIB = 2**10


@dataclass(frozen=True, slots=True)
class Chip:
    """Chips whose names begin with `prefix`.

    unified_buffer_bytes  memory of one vector core, which a program of a Triton kernel may plan for; 0: not known
    num_vector_cores      of the smallest such chip, should the driver not tell; 1: not known
    has_triton            triton-ascend 3.2.0 compiles for it
    has_bfloat16          bfloat16 is computed in
    """

    prefix: str
    unified_buffer_bytes: int
    num_vector_cores: int
    has_triton: bool
    has_bfloat16: bool


# The longest prefix that fits counts.
_CHIPS = (
    Chip("Ascend910B", 192 * _KIB, 40, has_triton=True, has_bfloat16=True),  # Atlas A2
    Chip("Ascend910_93", 192 * _KIB, 40, has_triton=True, has_bfloat16=True),  # Atlas A3
    Chip("Ascend910_95", 248 * _KIB, 56, has_triton=False, has_bfloat16=True),  # an early name of the 950
    Chip("Ascend950", 248 * _KIB, 56, has_triton=False, has_bfloat16=True),
    Chip("Ascend910", 0, 1, has_triton=False, has_bfloat16=False),  # the first generation
    Chip("Ascend310", 0, 1, has_triton=False, has_bfloat16=False),  # 310P too
)
# A chip that is not known yet is newer than these.
_UNKNOWN = Chip("", 192 * _KIB, 40, has_triton=False, has_bfloat16=True)


def chip_of(name: str) -> Chip:
    """The chip that torch_npu calls `name`, such as "Ascend910B4" or "Ascend910_9392"."""
    fitting = [chip for chip in _CHIPS if name.lower().startswith(chip.prefix.lower())]
    return max(fitting, key=lambda chip: len(chip.prefix), default=_UNKNOWN)
