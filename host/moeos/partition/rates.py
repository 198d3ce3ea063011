# SPDX-License-Identifier: Apache-2.0
"""The peak rates of GPUs, by the name of the device: the table by which layouts are chosen.

The H200's numbers are built in (docs/performance.md). `moeos doctor --measure` writes those of
another device into a file in the user's cache folder, which this table reads as well. Must not
depend on what is compared with the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeos.config.config import MoEConfig
from moeos.system import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """The peak rates of one GPU, each measured alone. Rates are per second, times in seconds.

    Attributes:
        device: the GPU whose numbers these are, as CUDA names it.
        blocks: streaming multiprocessors, one block each.
        bf16_flops: FLOP/s of a dense BF16 GEMM, by cuBLAS at 8192 x 8192 x 8192.
        fp8_flops: FLOP/s of a dense FP8 GEMM, likewise.
        memory_bytes: bytes/s that a kernel reads from the GPU's memory.
        link_bytes: bytes/s that it sends to peers over NVLink with plain stores.
        all_reduce_bytes: (ranks, bytes/s): what NCCL's all-reduce sends from each rank. Fewer ranks
            than any here send what the link takes.
        launch: one more kernel on all ranks, NCCL's, from its launch until its first byte has come.
        dispatch: sorting, counting and copying few tokens before GEMM0.
        copied_bytes: bytes/s of rows that are copied, read and written.
        gathered_step: the extra time of a step of a product whose rows are copied by index with
            cp.async, for each full tile of rows and each part of GATHERED_COLUMNS columns.
        gathered_part: the extra time of a part of GEMM0 before the first of its rows is copied from
            x: the kernel looks up which tokens these are, and nothing hides that.
        box: a row of few tokens that is loaded by a box of its own.
        step: a step of GEMM0, during which its rows are loaded.
    """

    device: str
    blocks: int
    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    link_bytes: float
    all_reduce_bytes: tuple[tuple[int, float], ...]
    launch: float
    dispatch: float
    copied_bytes: float
    gathered_step: float
    gathered_part: float
    box: float
    step: float

    def expert_flops(self, cfg: MoEConfig) -> float:
        """Dense FLOP/s in the format of a layer's experts."""
        return self.bf16_flops if cfg.activation_format is None else self.fp8_flops

    def all_reduced(self, ranks: int) -> float:
        """Bytes/s that NCCL's all-reduce sends from each of `ranks` ranks."""
        known = [rate for least, rate in self.all_reduce_bytes if least <= ranks]
        return known[-1] if known else self.link_bytes


H200 = DeviceRates(
    device="NVIDIA H200",
    blocks=132,
    bf16_flops=806e12,
    fp8_flops=1476e12,
    memory_bytes=4.4e12,
    link_bytes=355e9,
    # From tables 1 and 2b of the paper on layouts, so from other machines.
    all_reduce_bytes=((4, 368e9), (8, 470e9)),
    launch=20e-6,
    # Calls of one to eight tokens without a dispatch took 3 to 6 us less.
    dispatch=5e-6,
    # From a fit over layers that were timed with copies and with rows by index.
    copied_bytes=3.4e12,
    gathered_step=0.24e-6,  # from that fit, for GEMM0
    # From that fit. Any value from 0.7 to 2.1 us chooses the same layouts for these layers.
    gathered_part=1.2e-6,
    box=35e-9,  # where loads alone were timed
    step=0.7e-6,  # likewise
)
"""The rates of an H200 as measured."""

MEASURABLE = ("blocks", "bf16_flops", "fp8_flops", "memory_bytes", "link_bytes")
"""The fields of an entry of the file. All others come from fits over timed layers."""

NUMBERS = tuple(field.name for field in dataclasses.fields(DeviceRates) if field.name != "device")
"""The fields by which layouts are chosen."""

FILE_NAME = "device_rates.json"

_BUILT_IN = {H200.device: H200}
_REMEDY = "run `moeos doctor --measure` after you have removed it, or do without it"


def file() -> Path:
    """Where the entries of `moeos doctor --measure` are.

    Raises `FileNotFoundError` for a user without a home directory.
    """
    return files.cache_folder() / FILE_NAME


def rates_of(device: str) -> DeviceRates:
    """The numbers by which a GPU of this name decides.

    An unknown device has those of the H200 as they are: a scaled guess would be no better, because
    what is compared mostly scales alike. `DeviceRates.device` then still says "NVIDIA H200". What
    the file has for the device takes the place of these.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else than such entries.
    """
    known = _BUILT_IN.get(device, H200)
    measured = measured_rates().get(device)
    return known if measured is None else dataclasses.replace(known, device=device, **measured)


def measured_rates() -> dict[str, dict[str, Any]]:
    """The file's entries by device; none where there is no file. Raises as `rates_of` does."""
    try:
        path = file()
        found = files.read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {_REMEDY}", str(path)) from error
    except ValueError as error:
        raise ValueError(f"{error}: {_REMEDY}") from error
    for device, entry in found.items():
        _require_entry(path, device, entry)
    return found


def _require_entry(path: Path, device: str, entry: Any) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: {device!r} holds {entry!r}, and no object: {_REMEDY}")
    for name, value in entry.items():
        kinds = (int,) if name == "blocks" else (int, float)
        if name not in MEASURABLE:
            raise ValueError(f"{path}: {device!r} has {name!r}, which is no rate: {_REMEDY}")
        if type(value) not in kinds or not 0 < value < math.inf:
            kind = "an integer" if name == "blocks" else "a number"
            raise ValueError(
                f"{path}: {name} of {device!r} is {value!r}; it must be {kind} above 0: {_REMEDY}"
            )


def keep(device: str, numbers: Mapping[str, float]) -> Path:
    """Writes a device's entry in place of the one that the file has, and says where it lies.

    Raises `OSError` if the file cannot be written, and as `rates_of` does.
    """
    path = file()
    every = {**measured_rates(), device: dict(numbers)}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(path, json.dumps(every, indent=2, sort_keys=True) + "\n")
    return path
