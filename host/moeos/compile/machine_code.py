# SPDX-License-Identifier: Apache-2.0
"""Reads a kernel's machine code, a cubin, and makes the one change in it.

A cubin is an ELF file. Must not depend on layers, nor on the compiler's options.
"""

from __future__ import annotations

import io
import struct

from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

HANDLE, ADDRESS = 35, 2
"""Kinds of relocations of 64 bits in code for sm_90, as ptxas emits them: of a kernel's handle, and
of an address."""

_INFO = struct.Struct("<2I")  # r_info of a relocation (Elf64_Rela): kind, symbol
_INFO_AT = 8  # after r_offset


def instruction_bytes(cubin: bytes, kernel: str) -> int:
    """How many bytes a kernel's instructions are.

    Raises `ValueError` if the file has no such kernel.
    """
    symbols = _symbols(ELFFile(io.BytesIO(cubin)))
    return int(symbols.get_symbol(_names(symbols).index(kernel))["st_size"])


def with_address(cubin: bytes, teller: str, kernel: str) -> bytes:
    """`cubin`, changed so that `teller` finds where the instructions of `kernel` begin.

    `teller` is a kernel that asks for its own address. In PTX a kernel's address is a handle, for
    launches from the device, so ptxas has `teller` read a word which the loader fills in for a
    relocation of that kind, with 0 where there are no such launches. Here the relocation becomes
    one of the kind that tells debuggers where functions lie, and names `kernel`. `kernel` does not
    ask itself: ptxas gives a kernel whose address is read more registers and a tenth more code.

    Code in which there is no such relocation stays as it is; there `teller` finds 0.
    """
    file = ELFFile(io.BytesIO(cubin))
    names = _names(_symbols(file))
    changed = bytearray(cubin)
    for section in file.iter_sections("SHT_RELA"):
        assert isinstance(section, RelocationSection)
        for index, relocation in enumerate(section.iter_relocations()):
            if relocation["r_info_type"] == HANDLE and names[relocation["r_info_sym"]] == teller:
                at = section["sh_offset"] + index * section["sh_entsize"] + _INFO_AT
                _INFO.pack_into(changed, at, ADDRESS, names.index(kernel))
    return bytes(changed)


def _symbols(file: ELFFile) -> SymbolTableSection:
    section = file.get_section_by_name(".symtab")
    assert isinstance(section, SymbolTableSection)
    return section


def _names(symbols: SymbolTableSection) -> list[str]:
    return [symbol.name for symbol in symbols.iter_symbols()]
