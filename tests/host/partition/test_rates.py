# SPDX-License-Identifier: Apache-2.0
"""The table of GPUs: what is built in, the file of what was measured, and what ranks agree on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import moeos
from moeos import World
from moeos.partition import policies, rates
from moeos.partition.rates import H200, rates_of
from moeos.partition.slicing import slicing_of
from moeos.system.errors import ConfigMismatch
from moeos.world import bootstrap, virtual
from tests.layers import config

ENTRY = {"blocks": 132, "bf16_flops": 7.5e14, "link_bytes": 3.0e11}
"""As of a host with several GPUs, of which some rates could not be measured."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moeos"


def test_an_h200_has_what_was_measured_and_an_unknown_gpu_has_the_same() -> None:
    assert rates_of("NVIDIA H200") is H200
    assert rates_of("NVIDIA Unheard Of") is H200  # so that its name says whose numbers these are


def test_what_is_kept_is_read_again_and_takes_the_place_of_the_built_in(folder: Path) -> None:
    assert rates.keep("NVIDIA H100", ENTRY) == folder / "device_rates.json"
    found = rates_of("NVIDIA H100")
    assert found == dataclasses.replace(H200, device="NVIDIA H100", **ENTRY)
    assert json.loads((folder / "device_rates.json").read_text()) == {"NVIDIA H100": ENTRY}
    rates.keep("NVIDIA H200", {"blocks": 131})
    assert rates_of("NVIDIA H100") == found
    assert rates_of("NVIDIA H200") == dataclasses.replace(H200, blocks=131)
    rates.keep("NVIDIA H100", {"memory_bytes": 3e12})
    assert rates_of("NVIDIA H100").link_bytes == H200.link_bytes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "it must hold an object"),
        ('{"NVIDIA H200": 3}', "'NVIDIA H200' holds 3"),
        ('{"NVIDIA H200": {"launch": 1}}', "'launch', which is no rate"),
        ('{"x": {"blocks": 1.5}}', "blocks of 'x' is 1.5; it must be an integer above 0"),
        ('{"x": {"bf16_flops": 0}}', "bf16_flops of 'x' is 0; it must be a number above 0"),
        ('{"x": {"bf16_flops": NaN}}', "bf16_flops of 'x' is nan"),
        ('{"x": {"link_bytes": true}}', "link_bytes of 'x' is True"),
    ],
)
def test_another_file_in_its_place_is_an_error_with_its_path_and_the_remedy(
    folder: Path, text: str, problem: str
) -> None:
    folder.mkdir()
    (folder / "device_rates.json").write_text(text)
    for use in (lambda: rates_of("NVIDIA H200"), lambda: rates.keep("NVIDIA H200", ENTRY)):
        with pytest.raises(ValueError, match="remove") as raised:
            use()
        for words in (str(folder / "device_rates.json"), problem, "moeos doctor --measure"):
            assert words in str(raised.value)
    assert (folder / "device_rates.json").read_text() == text


def test_a_file_that_cannot_be_read_is_an_error_with_its_path_and_the_remedy(
    folder: Path,
) -> None:
    (folder / "device_rates.json").mkdir(parents=True)
    with pytest.raises(OSError, match=r"moeos doctor --measure.*device_rates\.json"):
        rates_of("NVIDIA H200")


def test_few_ranks_reduce_at_the_rate_of_the_link() -> None:
    found = [H200.all_reduced(ranks) for ranks in (2, 3, 4, 7, 8, 64)]
    assert found == [H200.link_bytes, H200.link_bytes, 368e9, 368e9, 470e9, 470e9]


def test_layouts_follow_the_rates_of_the_gpu() -> None:
    cfg = config(
        **{"hidden": 2048, "intermediate": 512, "experts": 256, "top_k": 8, "max_tokens": 2048},
        dtype=torch.bfloat16,
    )
    slicing = slicing_of("expert", "replicated", 1)
    slow = dataclasses.replace(H200, gathered_part=1e-3, box=1e-3)
    assert slicing.by(H200) == slicing
    assert slicing.sizes(cfg, 1)["gathers_rows"] == 1
    assert slicing.by(slow).sizes(cfg, 1)["gathers_rows"] == 0
    assert slicing.by(slow).sizes(cfg, 1)["in_place_tokens"] == 0
    assert policies.copies(slow, cfg, 8) == policies.copies(H200, cfg, 8)


def test_a_layer_decides_by_its_world_s_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(H200, device="NVIDIA H100", blocks=114)
    monkeypatch.setattr(virtual, "rates_on", lambda backend, device: other)

    def run(world: World) -> object:
        layer = moeos.MoELayer(config(), world)
        assert layer.experts is not None
        return layer.experts.slicing.policy.rates

    assert virtual.run(run, 2) == [other, other]


def test_the_twin_decides_as_an_h200_whatever_was_measured() -> None:
    rates.keep("NVIDIA H200", ENTRY)
    assert bootstrap.rates_on("twin", None) is H200


def test_a_gpu_is_looked_up_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rates.keep("NVIDIA H100", ENTRY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    assert bootstrap.rates_on("cuda", torch.device("cuda", 0)).link_bytes == ENTRY["link_bytes"]


@pytest.mark.parametrize("name", rates.NUMBERS)
def test_ranks_with_unlike_numbers_raise_by_the_number_and_the_rank(name: str) -> None:
    value: Any = ((2, 1e9),) if name == "all_reduce_bytes" else 17
    other = dataclasses.replace(H200, device="NVIDIA H100", **{name: value})
    bootstrap.require_same_rates([H200, dataclasses.replace(H200, device="NVIDIA H200 NVL")])
    with pytest.raises(ConfigMismatch) as raised:
        bootstrap.require_same_rates([H200, H200, other])
    text = str(raised.value)
    assert text.isascii()
    for words in (name, "rank 0", "'NVIDIA H200'", "rank 2", "'NVIDIA H100'", "copy", "remove"):
        assert words in text
