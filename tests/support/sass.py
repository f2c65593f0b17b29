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
_REGISTER = re.compile(r"\bUR(\d+)\b")
_ADDRESS_BITS = {"USGXT": "0xe", "ULOP3": "0x3fff"}  # instruction that cuts the 14 bits out, and its operand


def disassemble(cubin: bytes) -> str:
    """Machine code as text, by the disassembler that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def foreign_descriptors(sass: str) -> list[str]:
    """The wgmma instructions with a descriptor that does not come from a cut-out address, in the order of the code.

    Made for the LoRA kernels, whose descriptors are computed once, in uniform registers, ahead of loops: it follows the
    last instruction of the text that wrote a register. Of kernels that pass them through other registers (the paged
    attention) it names instructions that are right.
    """
    holds_address: dict[int, bool] = {}
    found = []
    for opcode, operands in _INSTRUCTION.findall(sass):
        name = opcode.split(".")[0]
        registers = [int(number) for number in _REGISTER.findall(operands)]
        if name == "HGMMA":
            # Four registers, left and right descriptor; the left is unused where that operand is in registers.
            first = registers[0] + (2 if re.match(r"R\d+, R\d+,", operands) else 0)
            if not all(holds_address.get(register) for register in range(first, registers[0] + 4, 2)):
                found.append(f"{opcode} {operands.strip()}")
        elif operands.startswith("UR"):
            is_cut_out = _ADDRESS_BITS.get(name, "none") in operands
            is_moved = name != "R2UR" and any(holds_address.get(register) for register in registers[1:])
            holds_address[registers[0]] = is_cut_out or is_moved
            if ".64" in opcode or ".WIDE" in opcode:
                holds_address[registers[0] + 1] = False
    return found
