"""A look at machine code for a fault of ptxas: descriptors of shared memory taken from the wrong register.

On Hopper wgmma (HGMMA in the machine code) finds its operands in shared memory through descriptors in uniform
registers. A descriptor begins with bits 4 to 17 of an address (PTX manual, "Matrix descriptor"), which the code cuts
out once and adds constants to. ptxas of CUDA 12.8 has been seen to add those constants to another value's register
instead, the quotient of a division: the kernel then reads shared memory at random, and faults or computes nonsense.
"""

from __future__ import annotations

import re
import subprocess
import tempfile

from triton import knobs

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);")
# Registers, uniform registers, and places of a thread's stack, where registers that run short are put meanwhile.
_LOCATION = re.compile(r"\bU?R\d+\b|\[R1(?:\+0x[0-9a-f]+)?\]")
_ADDRESS_BITS = {"SGXT": "0xe", "LOP3": "0x3fff"}  # instruction that cuts the 14 bits out, and its operand


def disassemble(cubin: bytes) -> str:
    """Machine code as text, by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def foreign_descriptors(sass: str) -> list[str]:
    """The wgmma instructions with a descriptor that does not come from a cut-out address, in the order of the code.

    Made for the LoRA kernels, whose descriptors are computed once, ahead of loops: it follows the last instruction of
    the text that wrote a register, or a place of the stack that a register was saved in. Of kernels that pass them
    through other memory (the paged attention) it names instructions that are right.
    """
    holds_address: dict[str, bool] = {}
    found = []
    for opcode, operands in _INSTRUCTION.findall(sass):
        name = opcode.split(".")[0]
        locations = _LOCATION.findall(operands)
        if name == "HGMMA":
            # Four registers, left and right descriptor; the left is unused where that operand is in registers.
            uniform = [int(number) for number in re.findall(r"\bUR(\d+)\b", operands)]
            first = uniform[0] + (2 if re.match(r"R\d+, R\d+,", operands) else 0)
            if not all(holds_address.get(f"UR{register}") for register in range(first, uniform[0] + 4, 2)):
                found.append(f"{opcode} {operands.strip()}")
        elif locations and operands.startswith(locations[0]):
            is_cut_out = _ADDRESS_BITS.get(name.removeprefix("U"), "none") in operands
            holds_address[locations[0]] = is_cut_out or any(holds_address.get(source) for source in locations[1:])
            if following := _second_half(opcode, locations[0]):
                holds_address[following] = False
    return found


def _second_half(opcode: str, location: str) -> str | None:
    """The other register that an instruction with a result of 64 bits writes."""
    register = re.fullmatch(r"(U?R)(\d+)", location)
    if register is None or not (".64" in opcode or ".WIDE" in opcode):
        return None
    return f"{register[1]}{int(register[2]) + 1}"
