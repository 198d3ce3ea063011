# SPDX-License-Identifier: Apache-2.0
"""What the loader is to fill in in a compiled kernel."""

from __future__ import annotations

import io

from elftools.elf.elffile import ELFFile


def relocations(cubin: bytes) -> list[tuple[str, int, str]]:
    """Of code and of words that code reads: section, kind, and whose."""
    file = ELFFile(io.BytesIO(cubin))
    names = [symbol.name for symbol in file.get_section_by_name(".symtab").iter_symbols()]
    return [
        (section.name, relocation["r_info_type"], names[relocation["r_info_sym"]])
        for section in file.iter_sections("SHT_RELA")
        if "debug" not in section.name
        for relocation in section.iter_relocations()
    ]
