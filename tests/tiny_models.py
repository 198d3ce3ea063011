# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of each family of `moeos.config.hf.families`, by transformers' own code.

Each row builds a model of one layer, or of as many as its family needs to have a layer with
experts. A test compares its block with the layer that `from_hf` makes of its config and its
tensors. Weights are rounded to the layer's dtype and kept in float64, as in `tests.huggingface`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from moeos import MoEConfig
from moeos.config.hf.families import FAMILIES
from tests.huggingface import _SMALL_ATTENTION, _SMALL_MODEL

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 16, 4


@dataclasses.dataclass(frozen=True)
class Tiny:
    """How transformers makes a small model of a family.

    Attributes:
        family: its name in the table.
        model: of the class, without "ForCausalLM".
        sizes: what its config calls the sizes.
        others: of its config.
        layer: which of its layers has experts.
        block: of a layer's modules; "" is the layer itself.
        file_prefix: of the block in files, where it differs from that of modules.
        config: the config's class, where it is called otherwise.
        cls: the model's class, where it is called otherwise.
        vision: the config of the part that sees, in a model that has one beside the text model.
        ignore: what the caller has of a block, beside what all of the family have.
    """

    family: str
    model: str
    sizes: dict[str, Any]
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    layer: int = 0
    block: str = "mlp"
    file_prefix: str | None = None
    config: str | None = None
    cls: str | None = None
    vision: dict[str, Any] | None = None
    ignore: tuple[str, ...] = ()


def _named(intermediate: str, experts: str, top_k: str = "num_experts_per_tok") -> dict[str, Any]:
    return {intermediate: INTERMEDIATE, experts: EXPERTS, top_k: TOP_K}


_MIXTRAL = _named("intermediate_size", "num_local_experts")
_QWEN = _named("moe_intermediate_size", "num_experts")
_DEEPSEEK = _named("moe_intermediate_size", "n_routed_experts")
_GROUPS = {"n_group": 4, "topk_group": 2}
_INDEXER = {"index_n_heads": 1, "index_head_dim": 16, "index_topk": 4}
_LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 1}
_DEEPSEEK_V4 = {
    "layer_types": ["sliding_attention"],
    "swiglu_limit": 1.0,
    "head_dim": 16,
    "q_lora_rank": 8,
    "o_lora_rank": 8,
    "o_groups": 1,
    **_INDEXER,
}
_NEMOTRON = {
    "layers_block_type": ["moe"],
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 2.5,
    "head_dim": 16,
    **_GROUPS,
}

TINY: dict[str, Tiny] = {
    "mixtral": Tiny("mixtral", "Mixtral", _MIXTRAL, file_prefix="block_sparse_moe"),
    "qwen2_moe": Tiny("qwen2_moe", "Qwen2Moe", _QWEN, {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": Tiny("qwen3_moe", "Qwen3Moe", _QWEN, {"norm_topk_prob": True}),
    "qwen3_next": Tiny(
        "qwen3_next", "Qwen3Next", _QWEN, {"shared_expert_intermediate_size": 32, **_LINEAR}
    ),
    "qwen3_5_moe": Tiny(
        "qwen3_5_moe",
        "Qwen3_5Moe",
        _QWEN,
        {"shared_expert_intermediate_size": 32, **_LINEAR},
        config="Qwen3_5MoeTextConfig",
    ),
    "olmoe": Tiny("olmoe", "Olmoe", _named("intermediate_size", "num_experts")),
    "deepseek_v2": Tiny(
        "deepseek_v2",
        "DeepseekV2",
        _DEEPSEEK,
        {"topk_method": "group_limited_greedy", **_GROUPS, **_SMALL_ATTENTION},
    ),
    "deepseek_v2_greedy": Tiny(
        "deepseek_v2", "DeepseekV2", _DEEPSEEK, {**_GROUPS, **_SMALL_ATTENTION}
    ),
    "deepseek_v3": Tiny(
        "deepseek_v3",
        "DeepseekV3",
        _DEEPSEEK,
        {"first_k_dense_replace": 0, **_GROUPS, **_SMALL_ATTENTION},
    ),
    "deepseek_v32": Tiny(
        "deepseek_v32",
        "DeepseekV32",
        _DEEPSEEK,
        {"first_k_dense_replace": 0, **_GROUPS, **_SMALL_ATTENTION, **_INDEXER},
    ),
    "glm4_moe": Tiny(
        "glm4_moe", "Glm4Moe", _DEEPSEEK, {"first_k_dense_replace": 0, "head_dim": 16}
    ),
    "glm_moe_dsa": Tiny(
        "glm_moe_dsa",
        "GlmMoeDsa",
        _DEEPSEEK,
        {"first_k_dense_replace": 0, **_SMALL_ATTENTION, **_INDEXER},
    ),
    "dots1": Tiny("dots1", "Dots1", _DEEPSEEK, {"n_shared_experts": 1, "norm_topk_prob": True}),
    "minimax_m2": Tiny(
        "minimax_m2", "MiniMaxM2", _MIXTRAL, {"head_dim": 8}, file_prefix="block_sparse_moe"
    ),
    "ernie4_5_moe": Tiny(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        _named("moe_intermediate_size", "moe_num_experts", "moe_k"),
        {"moe_layer_start_index": 0},
    ),
    "hunyuan_v1_moe": Tiny(
        "hunyuan_v1_moe",
        "HunYuanMoEV1",
        _named("intermediate_size", "num_experts", "moe_topk"),
        {"head_dim": 16},
    ),
    "granitemoe": Tiny("granitemoe", "GraniteMoe", _MIXTRAL, block="block_sparse_moe"),
    "granitemoeshared": Tiny(
        "granitemoe",
        "GraniteMoeShared",
        _MIXTRAL,
        {"shared_intermediate_size": 32},
        block="block_sparse_moe",
    ),
    "granitemoehybrid": Tiny(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        _MIXTRAL,
        {"shared_intermediate_size": 32, "layer_types": ["attention"]},
        block="block_sparse_moe",
    ),
    "jamba": Tiny(
        "jamba",
        "Jamba",
        _named("intermediate_size", "num_experts"),
        {"attn_layer_period": 1, "attn_layer_offset": 0, "num_hidden_layers": 2, **_MAMBA},
        layer=1,
        block="feed_forward",
    ),
    "phimoe": Tiny(
        "phimoe", "Phimoe", _MIXTRAL | {"num_experts_per_tok": 2}, file_prefix="block_sparse_moe"
    ),
    "deepseek_v4": Tiny(
        "deepseek_v4",
        "DeepseekV4",
        _DEEPSEEK,
        {"mlp_layer_types": ["moe"], **_DEEPSEEK_V4},
        file_prefix="ffn",
    ),
    "deepseek_v4_hashed": Tiny(
        "deepseek_v4",
        "DeepseekV4",
        _DEEPSEEK,
        {"mlp_layer_types": ["hash_moe"], **_DEEPSEEK_V4},
        file_prefix="ffn",
        ignore=("gate.tid2eid",),
    ),
    "gpt_oss": Tiny(
        "gpt_oss",
        "GptOss",
        _MIXTRAL | {"intermediate_size": HIDDEN},
        {"swiglu_limit": 1.0, "swiglu_alpha": 1.5, "head_dim": 16},
    ),
    "llama4": Tiny(
        "llama4",
        "Llama4",
        _MIXTRAL | {"intermediate_size": HIDDEN, "num_experts_per_tok": 1},
        {"intermediate_size_mlp": 32, "head_dim": 16},
        block="feed_forward",
        config="Llama4TextConfig",
    ),
    "minimax_m3": Tiny(
        "minimax_m3",
        "MiniMaxM3VL",
        _MIXTRAL,
        {
            "shared_intermediate_size": 32,
            "dense_intermediate_size": 32,
            "swiglu_limit": 1.0,
            "swiglu_alpha": 1.5,
            "head_dim": 8,
        },
        cls="MiniMaxM3SparseForConditionalGeneration",
        vision={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "patch_size": 2,
            "image_size": 4,
        },
        file_prefix="block_sparse_moe",
    ),
    "longcat_flash": Tiny(
        "longcat_flash",
        "LongcatFlash",
        _named("expert_ffn_hidden_size", "n_routed_experts", "moe_topk"),
        {"zero_expert_num": 8, "ffn_hidden_size": 32, "num_hidden_layers": 2, **_SMALL_ATTENTION},
    ),
    "nemotron_h": Tiny(
        "nemotron_h",
        "NemotronH",
        _DEEPSEEK,
        _NEMOTRON,
        block="mixer",
    ),
    "nemotron_h_latent": Tiny(
        "nemotron_h",
        "NemotronH",
        _DEEPSEEK,
        {"moe_latent_size": 32, **_NEMOTRON},
        block="mixer",
        ignore=("gate.", "fc1_latent_proj.", "fc2_latent_proj."),
    ),
    "gemma4": Tiny(
        "gemma4",
        "Gemma4",
        _named("moe_intermediate_size", "num_experts", "top_k_experts"),
        {
            "enable_moe_block": True,
            "head_dim": 16,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention"],
        },
        block="",
        config="Gemma4TextConfig",
    ),
}


@dataclasses.dataclass(frozen=True)
class TinyBlock:
    """A block of a tiny model, and what it computes.

    Attributes:
        row: what made it.
        hf_config: transformers' config.
        config: what `from_hf` makes of it.
        module: the block, in float64.
        around: the module that the block is part of.
        model: the model that it is part of.
        state_dict: the model's tensors under the names of its modules.
        prefix: of the block in it.
    """

    row: Tiny
    hf_config: Any
    config: MoEConfig
    module: nn.Module
    around: nn.Module
    model: PreTrainedModel
    state_dict: dict[str, Tensor]
    prefix: str

    @property
    def ignore(self) -> tuple[str, ...]:
        """What the block has beside the layer."""
        shared = () if self.config.shared_experts else FAMILIES[self.row.family].shared_names
        return (*shared, *self.row.ignore)

    def draw(self, tokens: int, seed: int = 0) -> Tensor:
        """Tokens as the block reads them, [S, its hidden size]."""
        generator = torch.Generator().manual_seed(seed)
        hidden = self.hf_config.get_text_config().hidden_size
        return torch.randn(tokens, hidden, generator=generator)

    def files(self, folder: Path) -> tuple[dict[str, Tensor], str]:
        """The tensors of a checkpoint that the model's own code writes, and the block's prefix."""
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        end = self.row.block if self.row.file_prefix is None else self.row.file_prefix
        layer = f"layers.{self.row.layer}."
        begin = next(name for name in tensors if _is_text(name) and layer in name).split(layer)[0]
        return tensors, f"{begin}{layer}{end}".rstrip(".") + "."

    def layer_input(self, x: Tensor) -> Tensor:
        """What the experts read, for what the block reads: [S, H]."""
        if self.row.family == "gemma4":
            norm: Callable[[Tensor], Tensor] = self.module.pre_feedforward_layernorm_2
            return norm(x.double())
        if self.row.family == "nemotron_h":
            latent: Tensor = self.module.fc1_latent_proj(x.double())
            return latent
        return x.double()

    def output(self, x: Tensor, inputs: Tensor | None = None) -> Tensor:
        """[S, H] -> float64 [S, H], the block's output as `config` has it: with that of shared
        experts if there are some in it, and before a projection that its caller makes.

        `inputs`: what the experts read; None: `layer_input`, as the block has it.
        """
        routed = self._routed_output(x, inputs)
        return routed + self.shared_output(x) if self.config.shared_experts else routed

    def _routed_output(self, x: Tensor, inputs: Tensor | None) -> Tensor:
        x = x.double()
        if self.config.routing == "layer" and self.row.family != "gemma4":
            assert inputs is None or torch.equal(x, inputs.double())
            y = self.module(x.unsqueeze(0))
            y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
            beside = "shared_mlp" in dict(self.around.named_children())
            routed: Tensor = y if beside else y - self.shared_output(x)
            return routed
        read = self.layer_input(x) if inputs is None else inputs.double()
        ids, weights = self.route(x)
        if inputs is not None and self.row.family == "gemma4":
            # The layer's router reads what the experts read, in which the norm's scale is a factor.
            ids, weights = self.route(read / self.module.pre_feedforward_layernorm_2.weight)
        y = self.module.experts(read, ids, weights.double())
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and weights of tokens as the model has them."""
        router = self.module.gate if hasattr(self.module, "gate") else self.module.router
        numbers = (self.token_numbers(len(x)),) if self.config.routing == "ids" else ()
        _, weights, ids = router(x.double(), *numbers)
        return ids, weights

    def routing(self, x: Tensor) -> dict[str, Any]:
        """What a call of the layer needs beside x."""
        if self.config.routing == "layer":
            return {}
        ids, weights = self.route(x)
        if self.config.routing == "ids":
            return {"topk_ids": ids, "weigh": True}
        return {"topk_ids": ids, "topk_weights": weights}

    def token_numbers(self, tokens: int) -> Tensor:
        """What a tokeniser makes of some text."""
        return torch.arange(tokens) % self.hf_config.vocab_size

    def shared_output(self, x: Tensor) -> Tensor:
        """[S, H] -> float64 [S, H], what the shared experts add to the block's output or beside it;
        zeros where there are none.
        """
        x = x.double()
        modules = {**dict(self.around.named_children()), **dict(self.module.named_children())}
        for name in ("shared_experts", "shared_expert", "shared_mlp"):
            if name in modules:
                y: Tensor = modules[name](x.unsqueeze(0)).squeeze(0)
                if "shared_expert_gate" in modules:
                    y = y * modules["shared_expert_gate"](x).sigmoid()
                return y
        return torch.zeros_like(x)


def _is_text(name: str) -> bool:
    return "vision" not in name


def make(name: str, **changes: Any) -> tuple[Any, PreTrainedModel]:
    """The config and the model of a row of `TINY`; `changes` are fields of the config."""
    row = TINY[name]
    options = {"hidden_size": HIDDEN, **_SMALL_MODEL, **row.sizes, **row.others, **changes}
    if row.vision is not None:
        options = {"text_config": options, "vision_config": row.vision}
    config = getattr(transformers, row.config or f"{row.model}Config")(**options)
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    cls = getattr(importlib.import_module(path), row.cls or f"{row.model}ForCausalLM")
    model = cls(config).train(False).requires_grad_(False)
    for path, table in model.named_buffers():
        if path.endswith("tid2eid"):  # of zeros, and a token has no expert twice
            for number, experts in enumerate(table):
                experts.copy_((number + torch.arange(len(experts)) * 5) % EXPERTS)
    model.set_experts_implementation("eager")  # others take no float64
    return config, model


def tiny(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shared: bool = True,
    **changes: Any,
) -> TinyBlock:
    """The block of a row of `TINY`; `changes` are fields of transformers' config; `shared`: of
    `from_hf`.
    """
    row = TINY[name]
    config, model = make(name, **changes)
    end = f"layers.{row.layer}" + (f".{row.block}" if row.block else "")
    path = next(name for name, _ in model.named_modules() if _is_text(name) and name.endswith(end))
    module = model.get_submodule(path)
    around = model.get_submodule(path.rpartition(".")[0])
    _draw_weights(module, dtype, seed)
    if around is not model and hasattr(around, "shared_mlp"):
        _draw_weights(around.shared_mlp, dtype, seed + 1)
    model.double()
    return TinyBlock(
        row=row,
        hf_config=config,
        config=MoEConfig.from_hf(config, row.layer, shared=shared, dtype=dtype),
        module=module,
        around=around,
        model=model,
        state_dict=model.state_dict(),
        prefix=path + ".",
    )


def _draw_weights(module: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Give each matrix rows of norm about 1, and scales numbers about 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not tensor.is_floating_point():
            continue
        if name.endswith("e_score_correction_bias"):  # always float32
            tensor.uniform_(-0.2, 0.2, generator=generator)
            continue
        if name.endswith("scale") or "norm" in name:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        tensor.copy_(tensor.to(dtype))
