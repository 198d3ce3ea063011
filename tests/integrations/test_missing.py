# SPDX-License-Identifier: Apache-2.0
"""Adapters without their libraries, which are no dependencies of moeos."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import pytest

from tests import programs

LIBRARIES = {
    **dict.fromkeys(("vllm", "vllm_experts", "vllm_quantized"), "vllm"),
    "torchtitan": "torchtitan",
    "sglang": "sglang",
}
"""Adapter -> what it needs."""


@pytest.mark.parametrize("adapter", LIBRARIES)
def test_an_adapter_without_its_library_says_what_is_missing(adapter: str) -> None:
    library = LIBRARIES[adapter]
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(
        ImportError, match=rf"moeos.integrations.{library} needs {library}.*written for"
    ):
        importlib.import_module(f"moeos.integrations.{adapter}")


def test_the_package_of_adapters_imports_without_any_library() -> None:
    importlib.import_module("moeos.integrations")


def test_servers_find_the_plugins_by_their_entry_points() -> None:
    for group, module in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
        found = importlib.metadata.entry_points(group=group, name="moeos")
        assert {point.value for point in found} == {f"moeos.integrations.{module}:register"}


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("transformers", "needs transformers, which cannot be imported here; install it"),
        ("transformers.distributed.expert_parallel", "needs transformers 5.23 or newer, and this"),
    ],
)
def test_the_adapter_for_transformers_says_what_is_missing_or_too_old(gone: str, said: str) -> None:
    ended = programs.ended(
        f"import sys; sys.modules[{gone!r}] = None; import moeos.integrations.transformers"
    )
    assert ended.returncode == 1
    assert f"ImportError: moeos.integrations.transformers {said}" in ended.stderr
