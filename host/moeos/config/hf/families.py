# SPDX-License-Identifier: Apache-2.0
"""The supported model families: one row for each, and nothing else.

A row names the fields of a transformers config that a layer needs, what the family's code does
whatever the config says, which values of a field have no rule here, which layers have experts, and
in which layouts they are stored. `hf_config.py` follows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moeos.config.hf import layouts
from moeos.config.hf.layouts import Layout, SharedLayout


@dataclasses.dataclass(frozen=True)
class Read:
    """Where a config has a number or a flag.

    Attributes:
        names: of the field; the first that is there counts. Several names come from versions of one
            family or from transformers' aliases.
        default: what its absence means, and null if the field is no size: transformers' default;
            `...` if it must be there.
    """

    names: tuple[str, ...]
    default: Any = ...


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """The shared experts of a family's blocks, which a layer computes as one MLP.

    Attributes:
        layouts: of its files, then of transformers' modules, where these differ.
        width: elements between the two matrices of one; 0: there is none.
        count: how many there are, whose widths the MLP has together; None: one.
        gate: a sigmoid of the token weighs them.
    """

    layouts: tuple[SharedLayout, ...]
    width: Read
    count: Read | None = None
    gate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The row of one family, or of several that store and compute their blocks alike.

    Attributes:
        said: what users call its models.
        model_types: of their configs.
        layouts: of their files, then of transformers' modules.
        reads: a field of `MoEConfig`, and where it is.
        rules: fields of `MoEConfig` that the family's code decides.
        activations: what the field of the activation may say, and what it is here; empty where the
            family's code does not read it.
        activation_names: of this field.
        works: other fields that may change what a block computes, and the values that are what is
            computed here. Absent and null are.
        experts_in: names a rule in `hf_config`, which says which layers have experts.
        shared: the shared experts; None where there are none.
        shared_names: what their names begin with, below a block's prefix: a caller that computes
            the shared experts may ignore these.
        routing: of `MoEConfig`; "caller" where no rule here routes as the model does.
        hashed_in: the type of layers whose experts a table chooses, by tokens' numbers; these have
            routing "ids" and no selection bias.
        groups_if: a field, and what it says where experts are chosen by groups; None: they are.
        blocks: what a layer calls the module of the experts, in files and among transformers'
            modules; "" is the layer itself.
        stems: what stands before "layers." there, in a model of text alone.
        predicts: the field that says how many layers follow the model's own, to predict further
            tokens; these have experts. None: there are none of that kind.
        latent: a field with the size that experts read and return, where the router reads `hidden`.
            Then routing is "caller", and the caller also computes the projections and the shared
            experts, which read what the router does.
    """

    said: str
    model_types: tuple[str, ...]
    layouts: tuple[Layout, ...]
    reads: Mapping[str, Read]
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    activation_names: tuple[str, ...] = ("hidden_act",)
    works: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    experts_in: str = "every"
    shared: SharedExperts | None = None
    shared_names: tuple[str, ...] = ()
    routing: str = "layer"
    hashed_in: str | None = None
    groups_if: tuple[str, str] | None = None
    blocks: tuple[str, ...] = ("mlp",)
    stems: tuple[str, ...] = ("model.",)
    predicts: str | None = None
    latent: str | None = None


_SWIGLU = {"silu": "swiglu", "swish": "swiglu"}
_FP32 = {"router_dtype": "float32"}
_SPARSE_MOE = ("block_sparse_moe", "mlp")
_PREDICTS = "num_nextn_predict_layers"


def _reads(
    hidden: int, intermediate: tuple[tuple[str, ...], Any], **others: Read
) -> dict[str, Read]:
    return {"hidden": Read(("hidden_size",), hidden), "intermediate": Read(*intermediate), **others}


def _deepseek(
    hidden: int, intermediate: int, experts: int | None, top_k: int | None, **others: Read
) -> dict[str, Read]:
    """DeepSeek-V3's names, which many use; None: a config must have it."""
    return _reads(
        hidden,
        (("moe_intermediate_size",), intermediate),
        experts=Read(("n_routed_experts", "num_local_experts", "num_experts"), _or_must(experts)),
        top_k=Read(("num_experts_per_tok",), _or_must(top_k)),
        **others,
    )


def _or_must(default: int | None) -> Any:
    return ... if default is None else default


def _grouped(
    scaling: float, groups: int, top_groups: int, renormalize: bool = True
) -> dict[str, Read]:
    return {
        "renormalize": Read(("norm_topk_prob",), renormalize),
        "routed_scaling": Read(("routed_scaling_factor",), scaling),
        "expert_groups": Read(("n_group",), groups),
        "top_groups": Read(("topk_group",), top_groups),
    }


_NOAUX = {"scoring": "sigmoid", "selection_bias": True, **_FP32}
_NOAUX_WORKS = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
_SPLIT_AND_STACKED = (layouts.SPLIT, layouts.STACKED)


def _shared_experts(
    width: int,
    count: tuple[str, int] | None = ("n_shared_experts", 1),
    *,
    field: str = "moe_intermediate_size",
    layouts: tuple[SharedLayout, ...] = (layouts.SHARED_EXPERTS,),
) -> dict[str, Any]:
    """The shared experts of a family that stores them as `shared_experts`."""
    number = None if count is None else Read((count[0],), count[1])
    shared = SharedExperts(layouts, Read((field,), width), number)
    return {"shared": shared, "shared_names": ("shared_experts.",)}


def _shared_expert(width: int, field: str, *, gate: bool) -> dict[str, Any]:
    """The shared expert of a family that stores one, as `shared_expert`."""
    shared = SharedExperts((layouts.SHARED_EXPERT,), Read((field,), width), gate=gate)
    names = ("shared_expert.", "shared_expert_gate.") if gate else ("shared_expert.",)
    return {"shared": shared, "shared_names": names}


def _granite_shared(width: int) -> SharedExperts:
    """Granite's shared experts lie next to the MoE block, whose name they do not have."""
    return SharedExperts((layouts.SHARED_BESIDE,), Read(("shared_intermediate_size",), width))


_QWEN_SHARED = "shared_expert_intermediate_size"


def _qwen(
    hidden: int, intermediate: int, experts: int, top_k: int, renormalize: bool | None
) -> dict[str, Read]:
    rule = {} if renormalize is None else {"renormalize": Read(("norm_topk_prob",), renormalize)}
    return _reads(
        hidden,
        (("moe_intermediate_size",), intermediate),
        experts=Read(("num_experts", "num_local_experts"), experts),
        top_k=Read(("num_experts_per_tok",), top_k),
        **rule,
    )


def _local(hidden: int, intermediate: int, experts: int, top_k: int) -> dict[str, Read]:
    """Mixtral's names."""
    return _reads(
        hidden,
        (("intermediate_size",), intermediate),
        experts=Read(("num_local_experts", "num_experts"), experts),
        top_k=Read(("num_experts_per_tok",), top_k),
    )


_OAI = {
    "swiglu_alpha": Read(("swiglu_alpha",), 1.702),
    "swiglu_limit": Read(("swiglu_limit",), 7.0),
}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "swiglu_limit": (),
    "swiglu_limits": (),
    "swiglu_alpha": (),
    "moe_latent_size": (),
    "zero_expert_num": (0,),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1.0,),
}
"""Fields that change what a block computes, and the values with which they do not: in a family that
neither reads nor knows them, they may have no others."""

FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        said="Mixtral",
        model_types=("mixtral",),
        blocks=_SPARSE_MOE,
        layouts=(layouts.NUMBERED, layouts.STACKED),
        reads=_local(4096, 14336, 8, 2),
        activations=_SWIGLU,
    ),
    "qwen2_moe": Family(
        said="Qwen2-MoE",
        model_types=("qwen2_moe",),
        layouts=_SPLIT_AND_STACKED,
        reads=_qwen(2048, 1408, 60, 4, False),
        activations=_SWIGLU,
        experts_in="every_nth",
        **_shared_expert(5632, _QWEN_SHARED, gate=True),
    ),
    "qwen3_moe": Family(
        said="Qwen3-MoE",
        model_types=("qwen3_moe",),
        layouts=_SPLIT_AND_STACKED,
        reads=_qwen(2048, 768, 128, 8, False),
        activations=_SWIGLU,
        experts_in="every_nth",
    ),
    "qwen3_next": Family(
        said="Qwen3-Next",
        model_types=("qwen3_next",),
        layouts=_SPLIT_AND_STACKED,
        reads=_qwen(2048, 512, 512, 10, True),
        activations=_SWIGLU,
        experts_in="every_nth",
        **_shared_expert(512, _QWEN_SHARED, gate=True),
    ),
    "qwen3_5_moe": Family(
        said="Qwen3.5-MoE",
        model_types=("qwen3_5_moe_text",),
        layouts=_SPLIT_AND_STACKED,
        reads=_qwen(2048, 512, 256, 8, None),
        activations=_SWIGLU,
        **_shared_expert(512, _QWEN_SHARED, gate=True),
    ),
    "olmoe": Family(
        said="OLMoE",
        model_types=("olmoe",),
        layouts=_SPLIT_AND_STACKED,
        reads={
            **_local(2048, 2048, 64, 8),
            "renormalize": Read(("norm_topk_prob",), False),
        },
        activations=_SWIGLU,
    ),
    "deepseek_v2": Family(
        said="DeepSeek-V2",
        model_types=("deepseek_v2",),
        layouts=_SPLIT_AND_STACKED,
        reads={**_deepseek(4096, 1407, 64, None), **_grouped(1.0, 1, 1)},
        rules={"renormalize": False, "group_score": "max", **_FP32},
        activations=_SWIGLU,
        works={
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
        groups_if=("topk_method", "group_limited_greedy"),
        experts_in="after_first",
        **_shared_experts(1407, ("n_shared_experts", 2)),
    ),
    "deepseek_v3": Family(
        said="DeepSeek-V3, Kimi-K2",
        model_types=("deepseek_v3", "kimi_k2"),
        predicts=_PREDICTS,
        layouts=_SPLIT_AND_STACKED,
        reads={**_deepseek(7168, 2048, 256, 8), **_grouped(2.5, 8, 4)},
        rules=_NOAUX,
        activations=_SWIGLU,
        works=_NOAUX_WORKS,
        experts_in="after_first",
        **_shared_experts(2048),
    ),
    "deepseek_v32": Family(
        said="DeepSeek-V3.2",
        model_types=("deepseek_v32",),
        predicts=_PREDICTS,
        layouts=_SPLIT_AND_STACKED,
        reads={**_deepseek(7168, 2048, 256, 8), **_grouped(2.5, 8, 4)},
        rules=_NOAUX,
        activations=_SWIGLU,
        works=_NOAUX_WORKS,
        experts_in="by_type",
        **_shared_experts(2048),
    ),
    "deepseek_v4": Family(
        said="DeepSeek-V4",
        model_types=("deepseek_v4",),
        blocks=("ffn", "mlp"),
        stems=("", "model."),
        predicts=_PREDICTS,
        layouts=(layouts.DEEPSEEK_V4_FILES, layouts.DEEPSEEK_V4_MODULES),
        reads={
            **_deepseek(4096, 2048, 256, 6),
            "routed_scaling": Read(("routed_scaling_factor",), 1.5),
            "swiglu_limit": Read(("swiglu_limit",), 10.0),
            "scoring": Read(("scoring_func",), "sqrtsoftplus"),
        },
        rules={"selection_bias": True, **_FP32},
        activations=_SWIGLU,
        works={"norm_topk_prob": (True,)},
        experts_in="by_type",
        hashed_in="hash_moe",
        **_shared_experts(2048, layouts=(layouts.SHARED_NUMBERED, layouts.SHARED_EXPERTS)),
    ),
    "glm4_moe": Family(
        said="GLM-4.5, GLM-4.6",
        model_types=("glm4_moe",),
        predicts=_PREDICTS,
        layouts=_SPLIT_AND_STACKED,
        reads={**_deepseek(4096, 1408, 128, 8), **_grouped(1.0, 1, 1)},
        rules=_NOAUX,
        activations=_SWIGLU,
        works=_NOAUX_WORKS,
        experts_in="after_first",
        **_shared_experts(1408),
    ),
    "glm_moe_dsa": Family(
        said="GLM-5",
        model_types=("glm_moe_dsa",),
        predicts=_PREDICTS,
        layouts=_SPLIT_AND_STACKED,
        reads={**_deepseek(6144, 2048, 256, 8), **_grouped(2.5, 1, 1)},
        rules=_NOAUX,
        activations=_SWIGLU,
        works=_NOAUX_WORKS,
        experts_in="by_type",
        **_shared_experts(2048),
    ),
    "dots1": Family(
        said="dots.llm1",
        model_types=("dots1",),
        layouts=_SPLIT_AND_STACKED,
        reads={**_deepseek(4608, 1408, None, None), **_grouped(1.0, 1, 1, renormalize=False)},
        rules=_NOAUX,
        activations=_SWIGLU,
        works=_NOAUX_WORKS,
        experts_in="after_first",
        **_shared_experts(1408, ("n_shared_experts", 0)),
    ),
    "gpt_oss": Family(
        said="gpt-oss",
        model_types=("gpt_oss",),
        layouts=(layouts.GPT_OSS_MXFP4, layouts.GPT_OSS),
        reads={**_local(2880, 2880, 128, 4), **_OAI},
        rules={"activation": "swigluoai", "bias": True, "router_bias": True},
    ),
    "llama4": Family(
        said="Llama-4",
        model_types=("llama4_text",),
        blocks=("feed_forward",),
        layouts=(layouts.LLAMA4,),
        reads=_local(5120, 8192, 16, 1),
        rules={"scoring": "sigmoid", "renormalize": False, "apply_router_weight_on_input": True},
        activations=_SWIGLU,
        experts_in="listed",
        **_shared_expert(8192, "intermediate_size", gate=False),
    ),
    "minimax_m2": Family(
        said="MiniMax-M2",
        model_types=("minimax_m2",),
        blocks=_SPARSE_MOE,
        layouts=(layouts.NUMBERED, layouts.STACKED),
        reads=_local(3072, 1536, 256, 8),
        rules={"scoring": "sigmoid", "selection_bias": True},
        activations=_SWIGLU,
        works={"scoring_func": ("sigmoid",), "use_routing_bias": (True,)},
    ),
    "minimax_m3": Family(
        said="MiniMax-M3",
        model_types=("minimax_m3_vl_text",),
        blocks=_SPARSE_MOE,
        layouts=(layouts.NUMBERED, layouts.STACKED),
        reads={
            **_local(6144, 3072, 128, 4),
            **_OAI,
            "routed_scaling": Read(("routed_scaling_factor",), 2.0),
        },
        rules={"activation": "swigluoai", "scoring": "sigmoid", "selection_bias": True},
        works={"scoring_func": ("sigmoid",), "use_routing_bias": (True,)},
        experts_in="by_type",
        **_shared_experts(
            3072,
            None,
            field="shared_intermediate_size",
            layouts=(layouts.SHARED_EXPERTS, layouts.SHARED_FUSED),
        ),
    ),
    "ernie4_5_moe": Family(
        said="ERNIE-4.5",
        model_types=("ernie4_5_moe",),
        layouts=_SPLIT_AND_STACKED,
        reads=_reads(
            2560,
            (("moe_intermediate_size",), 1536),
            experts=Read(("moe_num_experts", "num_experts"), 64),
            top_k=Read(("moe_k", "num_experts_per_tok"), 6),
        ),
        rules={"selection_bias": True, **_FP32},
        activations=_SWIGLU,
        works={"use_bias": (False,)},
        experts_in="between",
        **_shared_experts(1536, ("moe_num_shared_experts", 2)),
    ),
    "hunyuan_v1_moe": Family(
        said="Hunyuan",
        model_types=("hunyuan_v1_moe",),
        layouts=(layouts.HUNYUAN_FILES, layouts.HUNYUAN_MODULES),
        reads=_reads(
            4096,
            (("moe_intermediate_size", "intermediate_size"), 11008),
            experts=Read(("num_experts", "num_local_experts"), 1),
            top_k=Read(("moe_topk", "num_experts_per_tok"), 1),
        ),
        rules=_FP32,
        activations=_SWIGLU,
        works={
            "norm_topk_prob": (True,),
            "moe_drop_tokens": (False,),
            "moe_layer_num_skipped": (0,),
        },
        shared=SharedExperts((layouts.SHARED_MLP,), Read(("intermediate_size",), 11008)),
        shared_names=("shared_mlp.",),
    ),
    "granitemoe": Family(
        said="Granite",
        model_types=("granitemoe", "granitemoeshared"),
        blocks=_SPARSE_MOE,
        layouts=(layouts.GRANITE_FILES, layouts.STACKED_WITH_ROUTER),
        reads=_local(4096, 11008, 8, 2),
        activations=_SWIGLU,
        shared=_granite_shared(0),
    ),
    "granitemoehybrid": Family(
        said="Granite-4",
        model_types=("granitemoehybrid",),
        blocks=_SPARSE_MOE,
        layouts=(layouts.GRANITE_FILES, layouts.STACKED_WITH_ROUTER),
        reads=_local(4096, 11008, 8, 2),
        activations=_SWIGLU,
        shared=_granite_shared(1024),
    ),
    "jamba": Family(
        said="Jamba",
        model_types=("jamba",),
        blocks=("feed_forward",),
        layouts=(layouts.SPLIT_WITH_ROUTER, layouts.STACKED_WITH_ROUTER),
        reads=_local(4096, 14336, 16, 2),
        rules={"renormalize": False},
        activations=_SWIGLU,
        experts_in="periodic",
    ),
    "phimoe": Family(
        said="Phi-3.5-MoE",
        model_types=("phimoe",),
        blocks=_SPARSE_MOE,
        layouts=(layouts.NUMBERED, layouts.STACKED_WITH_ROUTER),
        reads=_local(4096, 6400, 16, 2),
        activations=_SWIGLU,
        routing="caller",
    ),
    "longcat_flash": Family(
        said="LongCat-Flash",
        model_types=("longcat_flash",),
        layouts=(layouts.LONGCAT_FILES, layouts.LONGCAT_MODULES),
        reads=_reads(
            6144,
            (("expert_ffn_hidden_size", "moe_intermediate_size"), 2048),
            experts=Read(("n_routed_experts", "num_local_experts"), 512),
            top_k=Read(("moe_topk", "num_experts_per_tok"), 12),
            routed_scaling=Read(("routed_scaling_factor",), 6.0),
            zero_experts=Read(("zero_expert_num",), 256),
        ),
        rules={"renormalize": False, "selection_bias": True, **_FP32},
        activations=_SWIGLU,
        works={
            "router_bias": (False,),
            "norm_topk_prob": (False,),
            "zero_expert_type": ("identity",),
        },
    ),
    "nemotron_h": Family(
        said="Nemotron-H",
        model_types=("nemotron_h",),
        blocks=("mixer",),
        stems=("backbone.", "model."),
        layouts=(layouts.NEMOTRON_FILES, layouts.NEMOTRON_MODULES),
        reads={**_deepseek(4096, 7688, 8, 2), **_grouped(1.0, 1, 1)},
        rules=_NOAUX,
        activations={"relu2": "relu2", "silu": "silu", "relu": "relu", "gelu": "gelu"},
        activation_names=("mlp_hidden_act",),
        works={"mlp_bias": (False,)},
        latent="moe_latent_size",
        experts_in="by_pattern",
        **_shared_experts(
            7688,
            None,
            field="moe_shared_expert_intermediate_size",
            layouts=(layouts.SHARED_NO_GATE,),
        ),
    ),
    "gemma4": Family(
        said="Gemma-4",
        model_types=("gemma4_text",),
        blocks=("",),
        layouts=(layouts.GEMMA4,),
        reads=_reads(
            2304,
            (("moe_intermediate_size",), ...),
            experts=Read(("num_experts",)),
            top_k=Read(("top_k_experts",)),
        ),
        rules={"expert_scale": True, **_FP32},
        activations={"gelu_pytorch_tanh": "geglu_tanh"},
        activation_names=("hidden_activation", "hidden_act"),
        works={"enable_moe_block": (True,)},
    ),
}
"""The families by the name in a config's `family`."""

BY_MODEL_TYPE = {
    model_type: name for name, family in FAMILIES.items() for model_type in family.model_types
}
