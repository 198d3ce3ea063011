# SPDX-License-Identifier: Apache-2.0
"""How models store the router and the experts of a block: one row a layout, and nothing else.
Shared experts have rows of their own: their names do not follow from those of the others.

A row says names, which way matrices lie and in which order their rows are. It is read by
`names.py`, which finds the row of a block, and by `block.py`, which follows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

SELECTION_BIASES = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "moe_statics.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "experts.e_score_correction_bias",
    "expert_bias",
    "gate.expert_bias",
    "router.e_score_correction_bias",
)
"""Where families keep the bias of the selection, below a block's prefix."""

HASHED = {
    "gate.tid2eid": "its experts are looked up by the caller: pass ignore=['gate.tid2eid'], and "
    "topk_ids with weigh=True in each call"
}

_OF_LATENT = (
    "the caller projects: pass fc1_latent_proj's output as x, and topk_ids and topk_weights from "
    "the model's gate; give the layer's output to fc2_latent_proj; load with "
    "ignore=['gate.', 'fc1_latent_proj.', 'fc2_latent_proj.', 'shared_experts.']"
)
LATENT = {
    f"{name}_latent_proj.{part}": _OF_LATENT
    for name in ("fc1", "fc2")
    for part in ("weight", "bias")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a block's tensors are, below its prefix. `{}` in a name is an expert's number.

    Attributes:
        name: of the row; two rows with one name are stored alike but for their router.
        first: the matrices whose rows, in this order, are an expert's w1: gate, then up; or one
            matrix that has both; or one without a gate.
        second: the matrix w2.
        first_biases, second_bias: of these, in the same order; none where the layout has none.
        gated: `first` has gate rows.
        transposed: an unquantised matrix is [inputs, outputs] and no [outputs, inputs].
        interleaved: gate rows and up rows take turns, gate first.
        router: the router's weight [E, H].
        router_bias: what is added to its logits, or None.
        selection_biases: where the bias of the selection may be.
        expert_scale: what multiplies the weight of each expert, or None.
        router_scale: the router reads x / experts_norm · router_scale / sqrt(H) for the x that the
            experts read; None where it reads x.
        experts_norm: see `router_scale`.
        zero_experts_padded: the matrices of `first` have rows for the zero experts, too; where
            experts are stored one by one, they may.
        scope: what the names of the block's own tensors begin with; () is every name.
        formats: names of the rows of `formats.FORMATS` in which it is found.
        callers: names of tensors that the layer has no rule for, and what to do with them.
    """

    name: str
    first: tuple[str, ...]
    second: str
    first_biases: tuple[str, ...] = ()
    second_bias: str | None = None
    gated: bool = True
    transposed: bool = False
    interleaved: bool = False
    router: str = "gate.weight"
    router_bias: str | None = None
    selection_biases: tuple[str, ...] = SELECTION_BIASES
    expert_scale: str | None = None
    router_scale: str | None = None
    experts_norm: str | None = None
    zero_experts_padded: bool = False
    scope: tuple[str, ...] = ()
    formats: tuple[str, ...] = (
        *("plain", "fp8_blocks", "codes_of_8_bits", "int8_asymmetric", "nvfp4", "nvfp4_packed"),
        *("mxfp4_packed", "integers", "integers_asymmetric"),
    )
    callers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def stacked(self) -> bool:
        """One tensor holds all experts."""
        return "{}" not in self.second

    @property
    def matrices(self) -> tuple[str, ...]:
        return (*self.first, self.second)

    @property
    def biases(self) -> tuple[str, ...]:
        return () if self.second_bias is None else (*self.first_biases, self.second_bias)

    @property
    def reading(self) -> tuple[object, ...]:
        """What makes two rows different for the same names."""
        return (
            *(self.first, self.second, self.transposed, self.interleaved),
            *(self.router, self.router_bias, self.zero_experts_padded, self.router_scale),
        )


_SPLIT = Layout(
    name="one tensor an expert, gate_proj",
    first=("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight"),
    second="experts.{}.down_proj.weight",
    first_biases=("experts.{}.gate_proj.bias", "experts.{}.up_proj.bias"),
    second_bias="experts.{}.down_proj.bias",
)
_STACKED = Layout(
    name="stacked",
    first=("experts.gate_up_proj",),
    second="experts.down_proj",
    first_biases=("experts.gate_up_proj_bias",),
    second_bias="experts.down_proj_bias",
    formats=("plain", "fp8_blocks", "codes_of_8_bits"),
)


def _with_router(layout: Layout, router: str, **changes: object) -> Layout:
    return dataclasses.replace(layout, router=router, **changes)  # type: ignore[arg-type]


SPLIT = _SPLIT
STACKED = _STACKED
NUMBERED = Layout(
    name="one tensor an expert, w1",
    first=("experts.{}.w1.weight", "experts.{}.w3.weight"),
    second="experts.{}.w2.weight",
)
DEEPSEEK_V4_FILES = dataclasses.replace(
    NUMBERED,
    name="one tensor an expert, w1, gate.bias for the selection",
    selection_biases=("gate.bias",),
    formats=("plain", "fp8_blocks", "scaled_blocks"),
    callers=HASHED,
)
DEEPSEEK_V4_MODULES = dataclasses.replace(STACKED, callers=HASHED)
SPLIT_WITH_ROUTER = _with_router(SPLIT, "router.weight")
STACKED_WITH_ROUTER = _with_router(STACKED, "router.weight")
HUNYUAN_FILES = _with_router(SPLIT, "gate.wg.weight")
HUNYUAN_MODULES = _with_router(STACKED, "gate.wg.weight")
LONGCAT_FILES = _with_router(SPLIT, "router.classifier.weight", zero_experts_padded=True)
LONGCAT_MODULES = _with_router(STACKED, "router.classifier.weight", zero_experts_padded=True)
GRANITE_FILES = Layout(
    name="stacked, linear",
    first=("input_linear.weight",),
    second="output_linear.weight",
    router="router.layer.weight",
    formats=("plain",),
)
GEMMA4 = _with_router(
    STACKED,
    "router.proj.weight",
    expert_scale="router.per_expert_scale",
    router_scale="router.scale",
    experts_norm="pre_feedforward_layernorm_2.weight",
    scope=("router.", "experts.", "pre_feedforward_layernorm_2."),
)
LLAMA4 = dataclasses.replace(
    STACKED, name="stacked, transposed", transposed=True, router="router.weight", formats=("plain",)
)
GPT_OSS = dataclasses.replace(
    STACKED,
    name="stacked, transposed, interleaved",
    transposed=True,
    interleaved=True,
    router="router.weight",
    router_bias="router.bias",
    formats=("plain",),
)
GPT_OSS_MXFP4 = dataclasses.replace(
    GPT_OSS, name="stacked, interleaved, MXFP4", transposed=False, formats=("mxfp4",)
)
NEMOTRON_FILES = Layout(
    name="one tensor an expert, no gate",
    first=("experts.{}.up_proj.weight",),
    second="experts.{}.down_proj.weight",
    gated=False,
    callers=LATENT,
)
NEMOTRON_MODULES = Layout(
    name="stacked, no gate",
    first=("experts.up_proj",),
    second="experts.down_proj",
    gated=False,
    callers=LATENT,
    formats=("plain", "fp8_blocks", "codes_of_8_bits"),
)

LAYOUTS: tuple[Layout, ...] = (
    *(SPLIT, STACKED, NUMBERED, DEEPSEEK_V4_FILES, DEEPSEEK_V4_MODULES),
    *(SPLIT_WITH_ROUTER, STACKED_WITH_ROUTER, HUNYUAN_FILES, HUNYUAN_MODULES),
    *(LONGCAT_FILES, LONGCAT_MODULES, GRANITE_FILES, GEMMA4, LLAMA4),
    *(GPT_OSS, GPT_OSS_MXFP4, NEMOTRON_FILES, NEMOTRON_MODULES),
)
"""All layouts; the first of those that read a block alike is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedLayout:
    """Where a block's shared experts are: one MLP, whose matrices are [outputs, inputs].

    Attributes:
        first: the matrices whose rows, in this order, are w1: gate, then up; or one matrix that has
            both; or one without a gate.
        second: the matrix w2.
        gated: `first` has gate rows.
        gate: what the sigmoid weighs the MLP's output by, [1, H], in the models that have it.
        beside: the names are not below the block's prefix, but below that of the module around it.
        formats: names of the rows of `formats.FORMATS` in which it is found.
    """

    first: tuple[str, ...]
    second: str
    gated: bool = True
    gate: str | None = None
    beside: bool = False
    formats: tuple[str, ...] = _SPLIT.formats

    @property
    def matrices(self) -> tuple[str, ...]:
        return (*self.first, self.second)


def _shared_in(module: str, gate: str | None = None) -> SharedLayout:
    return SharedLayout(
        first=(f"{module}.gate_proj.weight", f"{module}.up_proj.weight"),
        second=f"{module}.down_proj.weight",
        gate=gate,
    )


SHARED_EXPERTS = _shared_in("shared_experts")
SHARED_EXPERT = _shared_in("shared_expert", "shared_expert_gate.weight")
SHARED_MLP = _shared_in("shared_mlp")
SHARED_NUMBERED = SharedLayout(
    first=("shared_experts.w1.weight", "shared_experts.w3.weight"),
    second="shared_experts.w2.weight",
    formats=DEEPSEEK_V4_FILES.formats,
)
SHARED_FUSED = SharedLayout(
    first=("shared_experts.gate_up_proj.weight",), second="shared_experts.down_proj.weight"
)
SHARED_NO_GATE = SharedLayout(
    first=("shared_experts.up_proj.weight",),
    second="shared_experts.down_proj.weight",
    gated=False,
)
SHARED_BESIDE = SharedLayout(
    first=("shared_mlp.input_linear.weight",),
    second="shared_mlp.output_linear.weight",
    beside=True,
)

SHARED: tuple[SharedLayout, ...] = (
    *(SHARED_EXPERTS, SHARED_EXPERT, SHARED_MLP, SHARED_NUMBERED),
    *(SHARED_FUSED, SHARED_NO_GATE, SHARED_BESIDE),
)
"""All layouts of shared experts; the first that lacks the fewest names is taken."""
