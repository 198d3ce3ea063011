# SPDX-License-Identifier: Apache-2.0
"""Loads that order others, in PTX and in machine code: so that one which is gone is noticed.

ptxas removes a load whose value nobody uses, also one that stands for an acquire.
"""

from __future__ import annotations

import collections
import io
import re

from elftools.elf.elffile import ELFFile

SCOPES = {0b01111: "gpu", 0b10101: "sys"}
"""Of an ordered load through a generic address, by five bits of it, as ptxas writes it for sm_90.
One through an address in shared memory looks like any other."""

_IN_PTX = re.compile(r"\bld\.(?:relaxed|acquire)\.(gpu|sys)\.")
_LOADS = (0x980, 0x981)  # LD and LDG, by the low twelve bits
_SCOPE_AT = 76
_INSTRUCTION = 16  # bytes


def in_ptx(ptx: str) -> collections.Counter[str]:
    """How many there are of each scope."""
    return collections.Counter(_IN_PTX.findall(ptx))


def in_machine_code(cubin: bytes, kernel: str) -> collections.Counter[str]:
    """The same of a kernel's instructions."""
    code = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{kernel}").data()
    found: collections.Counter[str] = collections.Counter()
    for at in range(0, len(code), _INSTRUCTION):
        instruction = int.from_bytes(code[at : at + _INSTRUCTION], "little")
        scope = SCOPES.get(instruction >> _SCOPE_AT & 0b11111)
        if instruction & 0xFFF in _LOADS and scope is not None:
            found[scope] += 1
    return found
