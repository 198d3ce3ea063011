# SPDX-License-Identifier: Apache-2.0
"""Of the stand-in for vLLM: which layers of a checkpoint are not quantised."""

from __future__ import annotations

from collections.abc import Mapping


def is_layer_skipped(
    prefix: str,
    ignored_layers: list[str],
    fused_mapping: Mapping[str, list[str]] | None = None,
    *,
    match_mode: str = "exact",
) -> bool:
    assert match_mode == "exact"
    return prefix in ignored_layers
