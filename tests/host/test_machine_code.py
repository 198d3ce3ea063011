"""What is read off a compiled kernel, and what is changed in it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from moeos import jit, machine_code
from moeos.jit import compile_file, compile_kernel
from tests.host.kernel_shapes import shape


@pytest.fixture(scope="module")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The small layer's kernel."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    return compile_kernel(shape(), tmp_path_factory.mktemp("cache")).cubin


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


def test_the_size_is_that_of_all_instructions(cubin: bytes) -> None:
    text = ELFFile(io.BytesIO(cubin)).get_section_by_name(f".text.{jit.KERNEL}")
    assert machine_code.instruction_bytes(cubin, jit.KERNEL) == text.data_size
    assert machine_code.instruction_bytes(cubin, jit.KERNEL) > 100_000


def test_a_kernel_that_is_not_there_has_no_size(cubin: bytes) -> None:
    with pytest.raises(ValueError, match="moeos_backward"):
        machine_code.instruction_bytes(cubin, "moeos_backward")


def test_one_word_is_the_address_of_the_kernel_and_none_a_handle(cubin: bytes) -> None:
    """By this compiler; another may make otherwise, and then nothing is prefetched."""
    found = relocations(cubin)
    asked = [section for section, kind, of in found if of == jit.KERNEL]
    assert asked == [".rela.nv.constant4"]
    assert (asked[0], machine_code.ADDRESS, jit.KERNEL) in found
    assert machine_code.HANDLE not in [kind for _, kind, _ in found]


def test_code_that_asks_for_no_handle_is_left_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="install the test extra for NVRTC")
    clock = compile_file("kernels/clock.cu", "sm_90")
    assert machine_code.with_address(clock, "moeos_clock", "moeos_clock") == clock
