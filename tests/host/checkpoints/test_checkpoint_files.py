# SPDX-License-Identifier: Apache-2.0
"""A block is read from files only as far as a rank needs it: its own experts and the router."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moeos import MoELayer, World
from moeos.checkpoints import files, load_block, open_tensors
from moeos.config import reference
from moeos.world import virtual
from tests.host.checkpoints.test_checkpoint import PREFIX, config, fused_names, split_names
from tests.host.checkpoints.test_stored_matrices import PREFIX as QUANTISED
from tests.host.checkpoints.test_stored_matrices import config as large
from tests.host.checkpoints.test_stored_matrices import fp8_blocks, fp8_blocks_ue8m0, stacked
from tests.tiny_models import tiny


class _Slice:
    def __init__(self, whole: Any, count: Callable[[Tensor], Tensor]) -> None:
        self._whole = whole
        self._count = count

    def get_shape(self) -> list[int]:
        shape: list[int] = self._whole.get_shape()
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        return self._count(self._whole[index])


class _Counted:
    """A safetensors file that counts what is read of each tensor."""

    def __init__(self, file: Any, read: dict[str, int]) -> None:
        self._file = file
        self._read = read

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        return self._count(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._file.get_slice(name), lambda part: self._count(name, part))

    def _count(self, name: str, tensor: Tensor) -> Tensor:
        self._read[name] = self._read.get(name, 0) + tensor.nbytes
        return tensor


@pytest.fixture(name="read")
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that were read of each tensor of any file that is opened in the test."""
    bytes_of: dict[str, int] = {}
    open_file = files.safe_open

    def counted(*arguments: Any, **others: Any) -> _Counted:
        return _Counted(open_file(*arguments, **others), bytes_of)

    monkeypatch.setattr(files, "safe_open", counted)
    return bytes_of


def sharded(folder: Path, tensors: dict[str, Tensor], shards: int = 3) -> Path:
    """A checkpoint of several files, in which a block's tensors are wherever they happen to be."""
    listed: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = dict(list(tensors.items())[number::shards])
        save_file({key: tensor.contiguous() for key, tensor in mine.items()}, folder / name)
        listed |= dict.fromkeys(mine, name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return index


@pytest.mark.parametrize("names", [split_names, fused_names], ids=["split", "stacked"])
@pytest.mark.parametrize("as_folder", [False, True], ids=["index", "folder"])
def test_a_rank_reads_its_own_experts_and_the_router_of_shards_and_nothing_else(
    names: Any, as_folder: bool, tmp_path: Path, read: dict[str, int]
) -> None:
    block = names(bias=True)
    other = {name.replace(".3.", ".4."): tensor for name, tensor in block.items()}
    index = sharded(tmp_path, block | other)
    tensors = open_tensors(tmp_path if as_folder else index)
    cfg = config(bias=True)
    actual = load_block(cfg, tensors, PREFIX, rank=1, world_size=2)
    expected = load_block(cfg, block, PREFIX, rank=1, world_size=2)
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key
    of_experts = sum(tensor.nbytes for name, tensor in block.items() if "experts" in name)
    gate = PREFIX + "gate.weight"
    assert sum(read.values()) == of_experts // 2 + block[gate].nbytes
    if names is split_names:
        numbers = {name.split("experts.")[1].split(".")[0] for name in read if "experts" in name}
        assert numbers == {"2", "3"}


@pytest.mark.parametrize("how", [fp8_blocks, fp8_blocks_ue8m0])
def test_of_quantised_tensors_of_all_experts_a_rank_reads_its_part(
    how: Any, tmp_path: Path, read: dict[str, int]
) -> None:
    names, _, _ = stacked(how)
    index = sharded(tmp_path, names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = load_block(large(), open_tensors(index), QUANTISED, 2, 4)
        expected = load_block(large(), names, QUANTISED, 2, 4)
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key
    gate = names.pop(QUANTISED + "gate.weight")
    assert sum(read.values()) == sum(part.nbytes for part in names.values()) // 4 + gate.nbytes


def test_a_layer_is_made_of_a_folder_that_transformers_wrote_in_shards(tmp_path: Path) -> None:
    block = tiny("deepseek_v3")
    block.model.float().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    block.model.double()
    x = torch.randn(37, block.config.hidden, generator=torch.Generator().manual_seed(0))

    def rank_main(world: World) -> Tensor:
        layer = MoELayer.from_hf(block.config, world, tmp_path, "model.layers.0.mlp", block.ignore)
        y: Tensor = layer(x)
        return y

    for y in virtual.run(rank_main, ranks=2):
        assert reference.relative_error(y, block.output(x)) <= 1e-5


def test_a_tensor_that_an_index_promises_and_no_file_has_is_named(tmp_path: Path) -> None:
    names = fused_names()
    index = sharded(tmp_path, names)
    listed = json.loads(index.read_text())
    gate = PREFIX + "gate.weight"
    moved = next(
        name for name in listed["weight_map"].values() if name != listed["weight_map"][gate]
    )
    listed["weight_map"][gate] = moved
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=f"{moved} lacks {gate}, which its index says it has"):
        load_block(config(), open_tensors(index), PREFIX, 0, 1)
