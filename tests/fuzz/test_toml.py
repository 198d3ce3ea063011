# SPDX-License-Identifier: Apache-2.0
"""TOML files whose tables are wrong: a config or a suite, or an error that names file and key.

That a file is TOML is the business of tomllib, which parses it.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench import suites
from moeos.cli.shared.settings import read_settings
from moeos.config.config import MoEConfig
from moeos.config.limits import MAX_EXPERTS
from moeos.system.files import MAX_LINE_DOTS, MAX_TOML_BYTES, read_toml
from tests.fuzz.outcomes import examples, make_no_file, read_well

CONFIG = {
    "hidden": "256",
    "intermediate": "512",
    "experts": "16",
    "top_k": "2",
    "activation": '"swiglu"',
    "dtype": '"bfloat16"',
    "router_dtype": '"float32"',
    "max_tokens": "128",
    "scoring": '"softmax"',
    "renormalize": "true",
    "capacity_factor": "1.25",
    "row_map": '"ragged"',
    "routed_scaling": "1.0",
    "selection_bias": "false",
    "expert_groups": "1",
    "top_groups": "1",
    "group_score": '"max"',
    "swiglu_limit": "7.0",
    "swiglu_clamp": '"after"',
    "gate_up": '"concatenated"',
    "transposed": "false",
    "swiglu_alpha": "1.702",
    "bias": "false",
    "router_bias": "true",
    "expert_scale": "true",
    "apply_router_weight_on_input": "false",
    "zero_experts": "0",
    "shared_experts": "1",
    "shared_intermediate": "64",
    "shared_gate": "true",
    "weight_format": '"fp8_block128"',
    "activation_format": '"fp8_group128"',
    "shared_weight_format": '"fp8_block128"',
    "result_format": '"fp8_group128"',
}
RUN = {"tokens": "7", "iterations": "3", "vary_tokens": "true", "text": '["*.md"]'}
SUITE = {
    "rounds": "3",
    "warm_up_rounds": "1",
    "full_ranks": "4",
    "tokens": "[0, 1, 8]",
    "zipf_exponent": "1.2",
    "zipf_tokens": "[8]",
    "lone_token": "true",
}
SHAPE = {"name": '"a"', "layer": "{ hidden = 64, intermediate = 64, experts = 8, top_k = 2 }"}

SPECIAL = (
    *("0", "-1", "1", "8", "2147483640", "2147483648", "4294967296", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775809", "1" + "0" * 400, "1" + "0" * 5000),
    *("0x" + "f" * 5000, "0o7", "0b1", "1_000", "08", "--1"),
    *("nan", "-nan", "inf", "-inf", "1e400", "1e300", "-0.0", "5e-324", "1e-300", "1.5", "1.2e-6"),
    *("true", "false", "[]", "{}", '""', "''", '"bfloat16"', '"float64"', '"swigelu"', "[1, 2]"),
    *("[[]]", '{ a = { b = "c" } }', "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "99:99:99"),
    *('"\\u0000"', '"../../../etc/passwd"', '"/"', '"\\u001b[2J"', '"""\na\nb"""', '"\\ud800"'),
    *('"' + "x" * 100_000 + '"', "[" * 2000, "[" * 300 + "]" * 300, "{a=" * 2000, "", "="),
)
values = st.one_of(
    st.sampled_from(SPECIAL),
    st.integers().map(str),
    st.floats().map(repr),
    st.text(max_size=20).map(json.dumps),
)
keys = st.one_of(
    st.sampled_from([*CONFIG, *RUN, *SUITE, *SHAPE, "hiden", "run", "shapes", "a.b", '"a\\nb"']),
    st.text(max_size=12).map(json.dumps),
    st.just("k" * 100_000),
)


@st.composite
def tables(draw: st.DrawFn, valid: dict[str, str]) -> str:
    """The lines of a table with up to three keys that are changed, gone, or not its own."""
    lines = dict(valid)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        kind = draw(st.sampled_from(["value", "missing", "unknown"]))
        key = draw(st.sampled_from(sorted(valid)))
        if kind == "missing":
            lines.pop(key, None)
        else:
            lines[key if kind == "value" else draw(keys)] = draw(values)
    return "".join(f"{key} = {value}\n" for key, value in lines.items())


@examples(60)
@given(layer=tables(CONFIG), run=st.one_of(st.just(""), tables(RUN)))
def test_a_changed_config_is_read_or_refused_by_name(tmp_path: Path, layer: str, run: str) -> None:
    path = tmp_path / "layer.toml"
    text = layer + (f"[run]\n{run}" if run else "")
    path.write_text(text, encoding="utf-8", errors="replace")
    if read_well("TOML configs", lambda: MoEConfig.from_toml(path), [str(path)]):
        # What is wrong in [run] is told by its own reader, of the same file.
        read_well("TOML [run]", lambda: read_settings(path), [str(path)])


@pytest.mark.parametrize("key", [*CONFIG, *(f"run.{name}" for name in RUN)])
def test_a_value_of_any_other_kind_is_refused_under_its_keys_name(tmp_path: Path, key: str) -> None:
    path = tmp_path / "layer.toml"
    name = key.removeprefix("run.")
    for value in SPECIAL:
        layer, run = dict(CONFIG), dict(RUN)
        (run if key.startswith("run.") else layer)[name] = value
        text = "".join(f"{k} = {v}\n" for k, v in layer.items()) + "[run]\n"
        path.write_text(text + "".join(f"{k} = {v}\n" for k, v in run.items()))

        def read() -> None:
            MoEConfig.from_toml(path)
            read_settings(path)

        # A value that is no TOML has a line and a column instead of a key, or none at the end.
        names = [f"{path}: {name}", f"{path}: not a TOML file", f"{path}: run has", *PARTNERS[key]]
        read_well("TOML values", read, names)


# What does not fit may be told of either of two keys.
PARTNERS: dict[str, list[str]] = {key: [] for key in [*CONFIG, *(f"run.{name}" for name in RUN)]}
PARTNERS |= {
    "experts": ["top_k is", "expert_groups is"],
    "apply_router_weight_on_input": ["top_k is"],
    "activation": ["swiglu_limit is", "swiglu_alpha is"],
    "expert_groups": ["top_groups is", "top_k is"],
    "top_groups": ["top_k is"],
    "shared_experts": ["shared_intermediate is", "shared_gate is"],
    "weight_format": ["hidden is", "intermediate is"],
    "activation_format": ["weight_format is", "hidden is", "intermediate is"],
    "result_format": ["activation_format is"],
}


@examples(50)
@given(head=tables(SUITE), shapes=st.lists(tables(SHAPE), min_size=1, max_size=2))
@example(head="rounds = 3\nfull_ranks = 1\nshapes = [5]\n", shapes=[])
@example(
    head="rounds = 3\nfull_ranks = 1\nshapes = [{name = 'a', layer = {dtype = []}}]", shapes=[]
)
def test_a_changed_suite_is_read_or_refused_by_name(
    tmp_path: Path, head: str, shapes: list[str]
) -> None:
    path = tmp_path / "suite.toml"
    named = (shape.replace('"a"', f'"{place}"') for place, shape in enumerate(shapes))
    text = head + "".join(f"[[shapes]]\n{shape}" for shape in named)
    path.write_text(text, encoding="utf-8", errors="replace")
    read_well("TOML suites", lambda: suites.shapes(path), [str(path), str(tmp_path), "/"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("top_k = 2", 'top_k = 2, dtype = "f"', "dtype is 'f'"),
        ("top_k = 2", "top_k = 2, dtype = [1]", r"dtype is \[1\]"),
        ("top_k = 2", "top_k = 2, hiden = 1", "unknown key 'hiden'"),
        (", top_k = 2", "", "missing key top_k"),
        ("zipf_exponent = 1.2", "zipf_exponent = nan", "zipf_exponent is nan"),
        ("zipf_exponent = 1.2", "zipf_exponent = 1e9", "zipf_exponent is 1000000000.0"),
    ],
)
def test_a_suites_mistake_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = "".join(f"{key} = {value}\n" for key, value in SUITE.items())
    text += "[[shapes]]\n" + "".join(f"{key} = {value}\n" for key, value in SHAPE.items())
    path = tmp_path / "suite.toml"
    path.write_text(text)
    suites.shapes(path)
    path.write_text(text.replace(old, new))
    with pytest.raises((ValueError, TypeError), match=f"{re.escape(str(path))}: {said}"):
        suites.shapes(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"#" * (MAX_TOML_BYTES + 1), "larger than"),
        (b".".join([b"a"] * 100_000) + b" = 1", f"line 1 has more than {MAX_LINE_DOTS} dots"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = 9223372036854775808", "a has an integer of more than 64 bits"),
        (b"[a]\nb = [{ c = 9223372036854775808 }]", "a has an integer of more than 64 bits"),
        (b"a = 1" + b"0" * 5000, "not a TOML file"),
    ],
    ids=["size", "dots", "depth", "integer", "nested-integer", "digits"],
)
def test_what_would_cost_the_parser_too_much_is_refused(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "layer.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{said}"):
        read_toml(path)


@pytest.mark.parametrize("kind", ["pipe", "device", "endless device", "folder", "loop", "memory"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = make_no_file(tmp_path / "layer.toml", kind)
    for read in (MoEConfig.from_toml, read_settings, suites.shapes):
        assert not read_well("TOML no files", lambda read=read: read(path), [str(path)])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("experts", MAX_EXPERTS + 1, MAX_EXPERTS),
        ("max_tokens", 2**31, 2**31 - 1),
        ("hidden", 2**31, 2**31 - 1),
        ("routed_scaling", 1e39, "3.4028235e[+]38"),
        ("routed_scaling", 1e-39, "1.1754944e-38"),
        ("swiglu_limit", 10**400, "float32"),
        ("capacity_factor", math.inf, "finite"),
    ],
)
def test_numbers_that_the_runtime_cannot_hold_are_refused(
    name: str, value: Any, limit: object
) -> None:
    fields: dict[str, Any] = {"hidden": 8, "intermediate": 8, "experts": 4, "top_k": 1}
    with pytest.raises(ValueError, match=f"^{name} is .*{limit}"):
        MoEConfig(**(fields | {name: value}))
