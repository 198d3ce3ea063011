# SPDX-License-Identifier: Apache-2.0
"""gpt-oss' experts in MXFP4, as a checkpoint of transformers has them, for moeos to compute.

transformers' own module for them has kernels of its own and no interface. Where a model asks for
moeos, the quantiser of this file puts another module in its place, whose parameters are the
checkpoint's: codes and scales stay as they are. Elsewhere it is transformers' quantiser. This file
must not depend on how the experts compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from moeos.config.element_formats import MX_GROUP
from moeos.integrations.shared import NAME


class MoeosMxfp4Experts(nn.Module):
    """gpt-oss' experts, whose parameters are called and laid out as a checkpoint's are. moeos
    computes them, whatever the model's experts implementation is.
    """

    has_gate, has_bias, has_post_expert_norm = True, True, False
    is_transposed, is_concatenated = False, False  # rows of gate and up lie in turn
    _is_expert_parallel = False
    _apply_gate = GptOssExperts._apply_gate

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.num_experts = config.num_local_experts
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit
        hidden, inner = config.hidden_size, config.intermediate_size
        for name, rows, columns in (
            ("gate_up_proj", 2 * inner, hidden),
            ("down_proj", hidden, inner),
        ):
            groups = (self.num_experts, rows, columns // MX_GROUP)
            codes = torch.zeros(*groups, MX_GROUP // 2, dtype=torch.uint8)
            scales = torch.zeros(groups, dtype=torch.uint8)
            bias = torch.zeros(groups[:2])
            for end, tensor in (("blocks", codes), ("scales", scales), ("bias", bias)):
                parameter = nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"{name}_{end}", parameter)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y: Tensor = ALL_EXPERTS_FUNCTIONS[NAME](self, hidden_states, top_k_index, top_k_weights)
        return y


class Mxfp4Quantizer(Mxfp4HfQuantizer):
    """That of transformers for MXFP4, but for models that ask for moeos and come in MXFP4."""

    _keeps = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self._environment = args, kwargs  # which matters for models that do not ask for moeos

    def _process_model_before_weight_loading(
        self, model: Any, use_kernels: bool = False, **kwargs: Any
    ) -> None:
        self._keeps = (
            self.pre_quantized and not self.quantization_config.dequantize and asks(model.config)
        )
        if self._keeps:
            self._replace(model)
            return
        theirs: Any = super()
        args, others = self._environment
        theirs.validate_environment(*args, **others)
        theirs._process_model_before_weight_loading(model, use_kernels=use_kernels, **kwargs)

    def _replace(self, model: Any) -> None:
        kept = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        for name, module in list(model.named_modules()):
            if isinstance(module, GptOssMLP) and should_convert_module(f"{name}.experts", kept):
                with torch.device("meta"):
                    module.set_submodule("experts", MoeosMxfp4Experts(model.config))

    def get_load_operations(self) -> dict[str, Any]:
        theirs: Any = super()
        return {} if self._keeps else theirs.get_load_operations()


def asks(config: Any) -> bool:
    """Whether a model of this config asks for moeos."""
    parallel = getattr(config, "distributed_config", None)
    return NAME in (config._experts_implementation, getattr(parallel, "ep_implementation", None))


def register() -> None:
    """Puts the quantiser in the place of transformers' own."""
    AUTO_QUANTIZER_MAPPING["mxfp4"] = Mxfp4Quantizer
