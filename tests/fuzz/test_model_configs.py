# SPDX-License-Identifier: Apache-2.0
"""Configs of models of every kind of wrongness: a layer's config, or an error that names the field.

A config.json is somebody else's file. No native code of moeos reads it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeos.config.config import MoEConfig
from moeos.config.hf.families import FAMILIES, NEUTRAL
from tests.fuzz.outcomes import examples, read_well

LAYERS = (
    *("num_hidden_layers", "mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace"),
    *("moe_layer_freq", "mlp_layer_types", "num_hash_layers", "moe_layers", "moe_layer_interval"),
    *("interleave_moe_layer_step", "moe_layer_start_index", "moe_layer_end_index"),
    *("expert_layer_period", "expert_layer_offset", "layers_block_type", "layer_types"),
    "hybrid_override_pattern",
)
"""What says which layers have experts."""
OTHERS = ("model_type", "text_config", "quantization_config", "dtype", "torch_dtype")
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["silu", "relu2", "softmax", "sparse", "moe", "bfloat16", "fp8"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def fields_of(name: str) -> list[str]:
    """What a family's row, or any, looks at."""
    family = FAMILIES[name]
    read = [field for read in family.reads.values() for field in read.names]
    return [*read, *family.activation_names, *family.works, *NEUTRAL, *LAYERS, *OTHERS]


@examples(100)
@given(name=st.sampled_from(list(FAMILIES)), layer=st.none() | st.integers(-1, 6), data=st.data())
@example(name="jamba", layer=1, data=None)
def test_a_changed_config_is_read_or_refused_by_name(
    name: str, layer: int | None, data: st.DataObject | None
) -> None:
    values: dict[str, Any] = {
        "model_type": FAMILIES[name].model_types[0],
        "num_hidden_layers": 6,
        **{"n_routed_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "top_k_experts": 2},
        **{"moe_intermediate_size": 64, "intermediate_size": 64, "enable_moe_block": True},
    }
    names = fields_of(name)
    changed: list[str] = []
    if data is not None:
        changed = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
    for field in changed:
        values[field] = None if data is None else data.draw(ANYTHING)
    read_well("configs of models", lambda: MoEConfig.from_hf(values, layer), [*names, "layer"])


@pytest.mark.parametrize("layer", ["1", 1.0, True])
def test_a_layer_that_is_no_number_is_refused(layer: Any) -> None:
    with pytest.raises(TypeError, match=r"layer is .*; it must be of type int"):
        MoEConfig.from_hf({"model_type": "mixtral"}, layer)
