# SPDX-License-Identifier: Apache-2.0
"""MoEConfig: what it accepts, what it derives, and how it is read and compared."""

import dataclasses
import math
import pickle
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeos.config.config import MoEConfig, digest_differences

REQUIRED: dict[str, Any] = {"hidden": 256, "intermediate": 512, "experts": 16, "top_k": 2}


def config(**changes: Any) -> MoEConfig:
    return MoEConfig(**(REQUIRED | changes))


def test_defaults_are_those_of_the_documented_layer() -> None:
    cfg = config()
    assert dataclasses.asdict(cfg) == REQUIRED | {
        "activation": "swiglu",
        "dtype": torch.bfloat16,
        "router_dtype": None,
        "max_tokens": 1024,
        "scoring": "softmax",
        "renormalize": True,
        "capacity_factor": None,
        "row_map": None,
        "routed_scaling": 1.0,
        "selection_bias": False,
        "expert_groups": 1,
        "top_groups": 1,
        "group_score": "top2_sum",
        "swiglu_limit": None,
        "swiglu_clamp": "before",
        "gate_up": "concatenated",
        "transposed": False,
        "swiglu_alpha": None,
        "bias": False,
        "routing": "layer",
        "family": None,
        "router_bias": False,
        "expert_scale": False,
        "apply_router_weight_on_input": False,
        "zero_experts": 0,
        "shared_experts": 0,
        "shared_intermediate": 0,
        "shared_gate": False,
        "weight_format": None,
        "activation_format": None,
        "rounding": None,
        "rounding_tile": 128,
        "shared_weight_format": None,
        "save": "nothing",
        "saved_rows": None,
        "result_format": None,
    }


def test_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().hidden = 8  # type: ignore[misc]
    with pytest.raises(TypeError):
        MoEConfig(256, 512, 16, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("value", [-8, 0, 4, 100])
def test_sizes_must_be_positive_multiples_of_8(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; .*multiple of 8"):
        config(**{name: value})


@pytest.mark.parametrize("name", ["experts", "top_k", "max_tokens", "expert_groups", "top_groups"])
@pytest.mark.parametrize("value", [-1, 0])
def test_counts_must_be_at_least_1(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; .*at least 1"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden", 256.0),
        ("hidden", True),
        ("top_k", True),
        ("max_tokens", "1024"),
        ("experts", None),
        ("renormalize", 1),
        ("selection_bias", None),
        ("bias", "no"),
        ("router_bias", 1),
        ("expert_scale", None),
        ("apply_router_weight_on_input", 0),
        ("zero_experts", 2.0),
        ("zero_experts", False),
        ("shared_experts", True),
        ("shared_intermediate", 64.0),
        ("shared_gate", 1),
        ("weight_format", torch.uint8),
        ("activation_format", 8),
        ("shared_weight_format", True),
        ("save", None),
        ("saved_rows", 2.5),
        ("result_format", 1),
        ("swiglu_alpha", "1.702"),
        ("swiglu_clamp", True),
        ("activation", 3),
        ("scoring", None),
        ("row_map", 1),
        ("dtype", "bfloat16"),
        ("capacity_factor", "1.0"),
        ("capacity_factor", True),
        ("routed_scaling", None),
        ("swiglu_limit", "7"),
    ],
)
def test_a_wrong_type_is_a_type_error_that_names_argument_and_value(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is {value!r}; it must be "):
        config(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("activation", "swigelu", "swiglu"),
        ("activation", "gelu_tan", "gelu_tanh"),
        ("scoring", "softmaxx", "softmax"),
        ("row_map", "raged", "ragged"),
        ("group_score", "top2", "top2_sum"),
        ("activation", "swiglu_oai", "swigluoai"),
        ("activation", "geglu_tan", "geglu_tanh"),
        ("scoring", "sqrt_softplus", "sqrtsoftplus"),
        ("swiglu_clamp", "behind", "before"),
        ("gate_up", "interleave", "interleaved"),
        ("weight_format", "FP8", "fp8_block128"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_valid_one(
    name: str, value: str, nearest: str
) -> None:
    with pytest.raises(
        ValueError, match=f"^{name} is {value!r}; .*nearest valid one is {nearest!r}"
    ):
        config(**{name: value})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_only_three_dtypes_are_allowed(dtype: torch.dtype) -> None:
    for allowed in (torch.float32, torch.bfloat16, torch.float16):
        assert config(dtype=allowed).dtype == allowed
    with pytest.raises(ValueError, match=rf"dtype is {dtype}; .*torch.bfloat16"):
        config(dtype=dtype)


def test_a_router_is_float32_or_as_the_layer() -> None:
    assert config().gate_dtype == torch.bfloat16
    assert config(router_dtype=torch.float32).gate_dtype == torch.float32
    assert config(router_dtype=torch.float32).digest() != config().digest()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(ValueError, match=rf"^router_dtype is {dtype}; .*torch\.float32"):
            config(router_dtype=dtype)
    with pytest.raises(TypeError, match=r"^router_dtype is 'float32'; it must be a torch\.dtype"):
        config(router_dtype="float32")


@pytest.mark.parametrize(
    "name", ["capacity_factor", "routed_scaling", "swiglu_limit", "swiglu_alpha"]
)
@pytest.mark.parametrize("value", [0, -1.0, math.inf, -math.inf, math.nan])
def test_factors_must_be_finite_and_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} is {value!r}; .*finite and greater than 0"):
        config(**{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 17}, "top_k is 17; it must be at most experts, 16"),
        (
            {"top_k": 19, "zero_experts": 2},
            "top_k is 19; it must be at most experts + zero_experts, 18",
        ),
        ({"zero_experts": -1}, "zero_experts is -1; it must be at least 0"),
        ({"shared_experts": -1}, "shared_experts is -1; it must be at least 0"),
        (
            {"shared_experts": 1},
            "shared_intermediate is 0; it must be a positive multiple of 8 where "
            "shared_experts is 1",
        ),
        (
            {"shared_experts": 2, "shared_intermediate": 20},
            "shared_intermediate is 20; it must be a positive multiple of 8 where "
            "shared_experts is 2",
        ),
        (
            {"shared_intermediate": 64},
            "shared_intermediate is 64; it must be 0 where shared_experts is 0",
        ),
        ({"shared_gate": True}, "shared_gate is True; it must be False where shared_experts is 0"),
        (
            {"shared_experts": 1 << 20, "shared_intermediate": 1 << 12},
            "shared_experts is 1048576; it must be at most 524287 of 4096 elements each",
        ),
        ({"zero_experts": 1 << 16}, "zero_experts is 65536; it must be at most 65520"),
        (
            {"zero_experts": 2, "expert_groups": 2},
            "zero_experts is 2; it must be 0 with expert_groups: no model has both",
        ),
        (
            {"apply_router_weight_on_input": True},
            "top_k is 2; it must be 1 with apply_router_weight_on_input: a token is multiplied by "
            "one expert's weight",
        ),
        (
            {"apply_router_weight_on_input": True, "top_k": 1, "zero_experts": 2},
            "apply_router_weight_on_input is True; it must be False with zero_experts: no model "
            "has both",
        ),
        (
            {"activation": "relu2", "swiglu_limit": 7.0},
            "swiglu_limit is 7.0; it must be None with activation 'relu2'",
        ),
        (
            {"activation": "gelu", "gate_up": "interleaved"},
            "gate_up is 'interleaved'; it must be 'concatenated' with activation 'gelu'",
        ),
        (
            {"weight_format": "mxfp4", "transposed": True},
            "transposed is True; it must be False with weight_format 'mxfp4', whose codes lie along"
            " inputs",
        ),
        (
            {"weight_format": "mxfp4", "gate_up": "separate"},
            "gate_up is 'separate'; it must be 'concatenated' or 'interleaved' with weight_format "
            "'mxfp4'",
        ),
        (
            {"weight_format": "fp8_block128", "gate_up": "interleaved"},
            "gate_up is 'interleaved'; it must be 'concatenated' with weight_format "
            "'fp8_block128', whose scales belong to blocks",
        ),
        (
            {"swiglu_clamp": "after"},
            "swiglu_clamp is 'after'; it must be 'before' where there is no swiglu_limit",
        ),
        (
            {"activation": "geglu_tanh", "swiglu_alpha": 2.0},
            "swiglu_alpha is 2.0; it must be None with activation 'geglu_tanh'",
        ),
        ({"expert_groups": 3}, "expert_groups is 3; it must be a divisor of experts, 16"),
        (
            {"expert_groups": 2, "top_groups": 3},
            "top_groups is 3; it must be at most expert_groups, 2",
        ),
        (
            {"expert_groups": 8, "top_groups": 2, "top_k": 5},
            "top_k is 5; it must be at most 4, the experts of top_groups groups",
        ),
        (
            {"activation": "relu", "swiglu_limit": 7.0},
            "swiglu_limit is 7.0; it must be None with activation 'relu'",
        ),
        ({"capacity_factor": 1e-7}, "capacity_factor is 1e-07; it must be at least 1e-06"),
        ({"rounding_tile": 64}, "rounding_tile is 64; it must be 128 where rounding is None"),
        ({"rounding": "UP", "rounding_tile": 0}, "rounding_tile is 0; it must be at least 1"),
        (
            {"save": "activation"},
            "save is 'activation'; it must be one of nothing, preactivation; the nearest valid one "
            "is 'preactivation'",
        ),
        ({"saved_rows": 8}, "saved_rows is 8; it must be None where save is 'nothing'"),
        ({"save": "preactivation", "saved_rows": -1}, "saved_rows is -1; it must be at least 0"),
        (
            {"rounding": "NR"},
            "rounding is 'NR'; it must be one of NR-f, SR-f, NR-s, Balance-f, UP, DOWN; the "
            "nearest valid one is 'NR-s'",
        ),
        *(
            (
                {"rounding": "NR-f", name: value},
                f"{name} is {value!r}; it must be {needed!r} with rounding 'NR-f'",
            )
            for name, value, needed in (
                ("routing", "caller", "layer"),
                ("capacity_factor", 2.0, None),
                ("expert_groups", 2, 1),
                ("zero_experts", 2, 0),
            )
        ),
        (
            {"rounding": "NR-f", "apply_router_weight_on_input": True, "top_k": 1},
            "apply_router_weight_on_input is True; it must be False with rounding 'NR-f'",
        ),
        (
            {"rounding": "NR-f", "experts": 4097},
            "experts is 4097; it must be at most 4096 with rounding 'NR-f'",
        ),
        (
            {"rounding": "NR-f", "experts": 64, "top_k": 33},
            "top_k is 33; it must be at most 32 with rounding 'NR-f'",
        ),
    ],
)
def test_arguments_that_do_not_fit_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        config(**changes)


def test_only_swiglu_has_gate_and_up_rows() -> None:
    assert (config().gated, config().w1_rows) == (True, 1024)
    for activation in ("gelu", "gelu_tanh", "silu", "relu", "identity"):
        cfg = config(activation=activation)
        assert (cfg.gated, cfg.w1_rows) == (False, 512)


def test_the_row_map_follows_the_capacity_factor_unless_it_is_set() -> None:
    assert config().resolved_row_map == "ragged"
    assert config(capacity_factor=1.0).resolved_row_map == "capacity"
    assert config(row_map="capacity").resolved_row_map == "capacity"
    assert config(capacity_factor=1.0, row_map="ragged").resolved_row_map == "ragged"


@pytest.mark.parametrize(
    ("factor", "tokens", "capacity"),
    [
        (1.0, 64, 8),
        (1.0, 65, 9),
        (1.0, 0, 0),
        (1.0, 1, 1),
        (100.0, 64, 64),  # never more than the tokens
        (1.1, 80, 11),  # exactly 11, though the nearest double to 1.1 is above it
        (1e-6, 64, 1),
        (4 / 3, 48, 8),
    ],
)
def test_capacity_is_the_exact_ceiling(factor: float, tokens: int, capacity: int) -> None:
    assert config(capacity_factor=factor).capacity(tokens) == capacity


def test_a_dropless_layer_has_no_capacity() -> None:
    assert config().capacity(64) is None
    assert config().capacity_ratio is None


def test_capacity_of_a_negative_number_of_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens is -1; it must be at least 0"):
        config().capacity(-1)


@settings(deadline=None)
@given(
    hundredths=st.integers(1, 1000),
    tokens=st.integers(0, 5000),
    top_k=st.integers(1, 16),
)
def test_capacity_agrees_with_integer_arithmetic_on_the_ratio(
    hundredths: int, tokens: int, top_k: int
) -> None:
    cfg = config(capacity_factor=hundredths / 100, top_k=top_k)
    ratio = cfg.capacity_ratio
    assert ratio == min(Fraction(1), Fraction(hundredths * top_k, 1600))
    expected = min(tokens, -(-hundredths * tokens * top_k // 1600))
    assert cfg.capacity(tokens) == expected
    assert -(-tokens * ratio.numerator // ratio.denominator) == expected


def test_ranks_hold_the_experts_that_torch_chunk_gives_them() -> None:
    assert [config().experts_per_rank(size) for size in (1, 2, 3, 16, 17)] == [16, 8, 6, 1, 1]
    for experts in (1, 2, 9, 16, 60, 384):
        cfg = config(experts=experts, top_k=1)
        for ranks in range(1, 20):
            chunks = [chunk.tolist() for chunk in torch.arange(experts).chunk(ranks)]
            chunks += [[]] * (ranks - len(chunks))
            assert [[*cfg.experts_of(rank, ranks)] for rank in range(ranks)] == chunks
            assert cfg.experts_per_rank(ranks) == len(chunks[0])


def test_a_rank_that_no_world_has_holds_no_experts() -> None:
    for number in (0, -3):
        with pytest.raises(ValueError, match=f"world_size is {number}; it must be at least 1"):
            config().experts_per_rank(number)
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=f"rank is {rank}; it must be at least 0 and below 3"):
            config().experts_of(rank, 3)


def test_configs_that_mean_the_same_layer_have_the_same_digest() -> None:
    assert config().digest() == config(row_map="ragged").digest()
    assert config().digest() == config(family="mixtral").digest()
    assert config(capacity_factor=1).digest() == config(capacity_factor=1.0).digest()
    assert config().digest() == pickle.loads(pickle.dumps(config())).digest()
    assert "\n" not in config().digest()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("hidden", 264, (256, 264)),
        ("intermediate", 8, (512, 8)),
        ("experts", 8, (16, 8)),
        ("top_k", 1, (2, 1)),
        ("activation", "silu", ("swiglu", "silu")),
        ("dtype", torch.float32, ("bfloat16", "float32")),
        ("max_tokens", 1, (1024, 1)),
        ("scoring", "sigmoid", ("softmax", "sigmoid")),
        ("renormalize", False, (True, False)),
        ("row_map", "capacity", ("ragged", "capacity")),
        ("routed_scaling", 2.5, (1.0, 2.5)),
        ("selection_bias", True, (False, True)),
        ("expert_groups", 4, (1, 4)),
        ("swiglu_limit", 7.0, (None, 7.0)),
        ("bias", True, (False, True)),
        ("rounding", "NR-f", (None, "NR-f")),
    ],
)
def test_every_field_that_differs_is_reported_with_both_values(
    name: str, value: Any, shown: tuple[object, object]
) -> None:
    other = config(**{name: value})
    assert config().digest() != other.digest()
    assert digest_differences(config().digest(), other.digest()) == {name: shown}


def test_equal_configs_have_no_differences() -> None:
    assert digest_differences(config().digest(), config().digest()) == {}


def write(folder: Path, text: str) -> Path:
    path = folder / "layer.toml"
    path.write_text(text)
    return path


TOML = "hidden = 256\nintermediate = 512\nexperts = 16\ntop_k = 2\n"


def test_toml_gives_every_kind_of_field(tmp_path: Path) -> None:
    text = TOML + 'dtype = "float16"\nscoring = "sigmoid"\ncapacity_factor = 1\nrenormalize = false'
    expected = config(
        dtype=torch.float16, scoring="sigmoid", capacity_factor=1.0, renormalize=False
    )
    assert MoEConfig.from_toml(write(tmp_path, text)) == expected
    assert MoEConfig.from_toml(str(write(tmp_path, TOML))) == config()
    # As editors on Windows write it.
    assert MoEConfig.from_toml(write(tmp_path, f"\ufeff{TOML}")) == config()


def test_toml_run_table_is_left_to_the_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, TOML + "[run]\ntokens = 5\nanything = true\n")
    assert MoEConfig.from_toml(path) == config()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (TOML + "hiden = 8", ValueError, "unknown key 'hiden'; the nearest valid one is 'hidden'"),
        (TOML + "[rum]\ntokens = 5", ValueError, "unknown key 'rum'; .* 'run'"),
        ("hidden = 256\nexperts = 16", ValueError, "missing key intermediate, top_k"),
        ("hidden = = 256", ValueError, "not a TOML file"),
        (TOML + "run = 5", TypeError, r"run is 5; it must be a table, \[run\]"),
        (TOML + 'max_tokens = "many"', TypeError, "max_tokens is 'many'; .* int"),
        (TOML + "dtype = 16", TypeError, "dtype is 16; it must be a name such as 'bfloat16'"),
        (TOML + 'dtype = "bf16"', ValueError, "dtype is 'bf16'; .*nearest valid one is 'bfloat16'"),
        (TOML + 'scoring = "hardmax"', ValueError, "scoring is 'hardmax'; .*'softmax'"),
        (TOML + "max_tokens = 0", ValueError, "max_tokens is 0; it must be at least 1"),
    ],
)
def test_a_bad_toml_file_is_an_error_that_names_file_and_key(
    tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=rf"layer\.toml: {message}"):
        MoEConfig.from_toml(write(tmp_path, text))


def test_a_toml_file_that_is_not_text_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "layer.toml"
    path.write_bytes(b"hidden = \xff")
    with pytest.raises(ValueError, match=r"layer\.toml: not a TOML file"):
        MoEConfig.from_toml(path)


def test_an_activations_own_numbers_hold_where_a_config_names_none() -> None:
    cfg = config(activation="swigluoai")
    assert (cfg.gated, cfg.resolved_swiglu_limit, cfg.resolved_swiglu_alpha) == (True, 7.0, 1.702)
    assert (
        cfg.digest()
        == config(activation="swigluoai", swiglu_limit=7.0, swiglu_alpha=1.702).digest()
    )
    other = config(activation="swigluoai", swiglu_limit=10, swiglu_alpha=1)
    assert (other.resolved_swiglu_limit, other.resolved_swiglu_alpha) == (10.0, 1.0)
    assert config().resolved_swiglu_limit is None
    assert config(activation="geglu_tanh").w1_rows == 2 * 512
    assert config(activation="relu2").w1_rows == 512


@pytest.mark.parametrize(("activation", "rows"), [("swiglu", 128), ("relu2", 64)])
def test_the_first_matrix_of_a_shared_expert_has_gate_rows_as_that_of_a_routed_one(
    activation: str, rows: int
) -> None:
    cfg = config(shared_experts=2, shared_intermediate=64, activation=activation)
    assert cfg.shared_w1_rows == rows
    assert config().shared_w1_rows == 0


def test_shared_experts_are_part_of_the_digest() -> None:
    other = config(shared_experts=1, shared_intermediate=64, shared_gate=True)
    assert digest_differences(config().digest(), other.digest()) == {
        "shared_experts": (0, 1),
        "shared_intermediate": (0, 64),
        "shared_gate": (False, True),
    }


def test_a_format_is_part_of_the_digest_and_says_what_sizes_it_needs() -> None:
    other = config(weight_format="mxfp4")
    assert digest_differences(config().digest(), other.digest()) == {
        "weight_format": (None, "mxfp4")
    }
    for name, multiple in (("fp8_channel", 16), ("nvfp4", 32)):
        for field in ("hidden", "intermediate"):
            with pytest.raises(
                ValueError,
                match=rf"^{field} is 264; it must be a multiple of {multiple} with weight_format "
                rf"'{name}'$",
            ):
                config(weight_format=name, **{field: 264})
            assert config(weight_format=name, **{field: 9 * multiple})
    with pytest.raises(ValueError, match=r"^weight_format is 'fp8'; it must be one of fp8_bl"):
        config(weight_format="fp8")


def test_an_activation_format_needs_weights_in_codes_and_sizes_of_whole_groups() -> None:
    coded = {"weight_format": "fp8_channel", "activation_format": "fp8_group128"}
    cfg = config(**coded, hidden=384, intermediate=192)
    assert digest_differences(cfg.digest(), config(**coded).digest()).keys() == {
        "hidden",
        "intermediate",
    }
    assert digest_differences(
        config(**coded).digest(), config(weight_format="fp8_channel").digest()
    )
    said = "with activation_format 'fp8_group128'"
    names = "one of fp8_block128, fp8_channel, fp8_tensor, mxfp4, nvfp4, int4_group32"
    for changes, message in (
        ({"weight_format": None}, f"weight_format is None; it must be {names} {said}, or "),
        ({"hidden": 192}, f"hidden is 192; it must be a multiple of 128 {said}"),
        ({"intermediate": 96}, f"intermediate is 96; it must be a multiple of 64 {said}"),
        (
            {"activation_format": "fp8"},
            "activation_format is 'fp8'; it must be one of fp8_group128",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            config(**{**coded, **changes})


def test_a_result_format_needs_an_activation_format() -> None:
    coded = {"weight_format": "fp8_channel", "activation_format": "fp8_group128"}
    cfg = config(**coded, result_format="fp8_group128")
    assert digest_differences(cfg.digest(), config(**coded).digest()).keys() == {"result_format"}
    assert cfg.in_numbers() == config()
    said = "with result_format 'fp8_group128', or result_format None"
    for changes, message in (
        (
            {"activation_format": None},
            f"activation_format is None; it must be one of fp8_group128 {said}",
        ),
        ({"result_format": "bf16"}, "result_format is 'bf16'; it must be one of fp8_group128"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            config(**{**coded, "result_format": "fp8_group128", **changes})


def test_shared_experts_have_the_format_of_the_others_or_none() -> None:
    shared = {"shared_experts": 1, "shared_intermediate": 80}
    coded = {"weight_format": "fp8_channel", "shared_weight_format": "fp8_channel"}
    cfg = config(**shared, **coded)
    assert digest_differences(cfg.digest(), config(**shared, weight_format="fp8_channel").digest())
    for changes, message in (
        (
            {"weight_format": None},
            "shared_weight_format is 'fp8_channel'; it must be None, or weight_format, None",
        ),
        (
            {"weight_format": "mxfp4"},
            "shared_weight_format is 'fp8_channel'; it must be None, or weight_format, 'mxfp4'",
        ),
        (
            {"shared_experts": 0, "shared_intermediate": 0},
            "shared_weight_format is 'fp8_channel'; it must be None where shared_experts is 0",
        ),
        (
            {"shared_intermediate": 88},
            "shared_intermediate is 88; it must be a multiple of 16 with shared_weight_format",
        ),
        ({"shared_weight_format": "fp8"}, "shared_weight_format is 'fp8'; it must be one of fp8_"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            config(**{**shared, **coded, **changes})


def test_zero_experts_are_rows_of_the_router_and_no_experts_of_a_rank() -> None:
    cfg = config(zero_experts=3, top_k=18)
    assert cfg.router_rows == 19
    assert cfg.experts_per_rank(4) == 4


def test_rounding_gives_a_token_twice_as_many_slots() -> None:
    assert [config(top_k=k).slots for k in (1, 2, 16)] == [1, 2, 16]
    assert [config(top_k=k, rounding="UP").slots for k in (1, 2, 8, 9)] == [2, 4, 16, 16]
