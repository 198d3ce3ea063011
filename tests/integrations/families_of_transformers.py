# SPDX-License-Identifier: Apache-2.0
"""The experts classes of all families that transformers has, found in its source, and small ones.

A class is made with a config that has all names under which families have a size.
"""

from __future__ import annotations

import importlib
import re
import types
from pathlib import Path
from typing import Any

import torch
import transformers

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 8, 2

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)

_NAMED: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "moe_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), INTERMEDIATE),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS
    ),
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "swiglu_limit": 1.0,
    "swiglu_alpha": 1.702,
    "mlp_gate_softcap": 3.0,
    "mlp_up_softcap": 3.0,
    "post_norm_eps": 1e-5,
    "_experts_implementation": "eager",
}


def experts_classes() -> list[type]:
    """All classes with `@use_experts_implementation`."""
    classes = []
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        names = _DECORATED.findall(path.read_text(encoding="utf-8"))
        if names:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            classes += [getattr(module, name) for name in names]
    return classes


def experts_of(cls: type, seed: int = 0) -> Any:
    """A module of the class with random weights."""
    module = cls(types.SimpleNamespace(**_NAMED))
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.requires_grad_(False).normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return module
