# SPDX-License-Identifier: Apache-2.0
"""Makes a layer whose weights are in a format of one whose are not, and numbers of codes again.

This file must not depend on what a format means.
"""

from __future__ import annotations

import dataclasses

import torch

from moeos.call import call_checks
from moeos.config.element_formats import NAMES, ActivationFormat, WeightFormat, dequantize
from moeos.layer.layer import MoELayer


def quantize(
    layer: MoELayer,
    weight_format: WeightFormat,
    activation_format: ActivationFormat | None = None,
    shared_weight_format: WeightFormat | None = None,
    result_format: ActivationFormat | None = None,
) -> MoELayer:
    """A layer of the same world and workspace with the weights of `layer` in a format.

    The gate and the biases are copied as they are, and so are the shared experts unless they have a
    format, too. `layer` stays what it was.
    Collective, as making a layer is. Each expert's matrices are rounded for themselves: what comes
    of one does not depend on the number of ranks.

    Args:
        layer: one without a format, and with weights that have values.
        weight_format, activation_format, shared_weight_format, result_format: as of `MoEConfig`.

    Raises:
        TypeError: `layer` is no MoELayer, or of a class that extends it.
        ValueError: it has a format, or a weight that is not as the layer was made, or
            `weight_format` is none, or one of the four does not fit the sizes or the others; or it
            has slices of experts.
        RuntimeError: the layer was read from a pickle, and has no world yet.
        ConfigMismatch: the ranks' formats differ; the same error on all of them.
    """
    if not isinstance(layer, MoELayer):
        raise TypeError(f"layer is a {type(layer).__name__}; it must be a MoELayer")
    if type(layer) is not MoELayer:
        kind = type(layer).__name__
        raise TypeError(
            f"layer is a {kind}, which extends MoELayer, and quantize makes a plain MoELayer: "
            f"quantize a MoELayer with its weights, and load the state dict of that into a {kind} "
            "whose config has the format"
        )
    cfg = layer.cfg
    if cfg.weight_format is not None:
        raise ValueError(
            f"the layer has weight_format {cfg.weight_format!r}; quantize takes one without a "
            "format: load its weights with MoEConfig.from_hf(..., dequantize=True)"
        )
    if weight_format is None:
        raise ValueError(f"weight_format is None; it must be one of {', '.join(NAMES)}")
    made_of = dataclasses.replace(
        cfg,
        weight_format=weight_format,
        activation_format=activation_format,
        shared_weight_format=shared_weight_format,
        result_format=result_format,
    )
    if layer.experts is None:
        raise RuntimeError(
            "the layer was read from a pickle and has no world: call layer.bind(world) first"
        )
    slicing = layer.experts.slicing
    if slicing.cuts:
        raise ValueError(
            f"the layer has slices of experts, parallel={slicing.parallel!r}, and codes of slices "
            "would not be those of whole matrices: quantize a layer with parallel='expert', and "
            "load its state dict into one with slices"
        )
    _require_values(layer, layer.experts.device)
    placement = layer.placement if layer.experts.can_be_placed else None
    made = MoELayer(made_of, layer.world, layer.experts.workspace, init=False, placement=placement)
    if made.w1.device != layer.w1.device:
        raise ValueError(
            f"quantize makes tensors on {made.w1.device}, and the layer's are on "
            f"{layer.w1.device}: call it outside of torch.device({str(made.w1.device)!r})"
        )
    with torch.no_grad():
        rounded = ["w1", "w2"]
        if shared_weight_format is not None:
            rounded += ["shared_w1", "shared_w2"]
        for name in rounded:
            for number, matrix in enumerate(getattr(layer, name)):
                made.set_matrix(name, number, matrix)
        for name in ("b1", "b2", *call_checks.SHARED):
            if name not in rounded and getattr(made, name) is not None:
                getattr(made, name).copy_(getattr(layer, name))
    made.gate.load_state_dict(layer.gate.state_dict())
    return made


def numbers_of(layer: MoELayer, name: str, which: slice) -> torch.Tensor:
    """What `name`, w1, w2, shared_w1 or shared_w2, of some experts stands for, in float32."""
    cfg = layer.cfg
    every: list[torch.Tensor | None] = [
        getattr(layer, name + end) for end in ("", "_scale", "_scale_2")
    ]
    weight, scale, scale_2 = (None if part is None else part.detach()[which] for part in every)
    assert weight is not None
    if scale is None:
        return weight.float()
    assert cfg.weight_format is not None
    halves = layer._halves(name)
    return dequantize(weight, scale, scale_2, cfg.weight_format, halves, torch.float32)


def _require_values(layer: MoELayer, device: torch.device) -> None:
    """Raises for a weight that is missing, or is not what a call would take."""
    cfg = layer.cfg
    local = len(layer.placement.experts_of(layer.world.rank))
    wanted = (*call_checks.expected_weights(cfg, local), *call_checks.expected_shared(cfg))
    for one in wanted:
        if one is not None:
            given = layer._tensor_of(one.name)
            call_checks.check_weight(device, one, given, "the layer was made with one")
    gate = layer._modules.get("gate")
    for one in call_checks.expected_router(cfg):
        if one is not None:
            given = getattr(gate, one.name.removeprefix("gate."), None)
            call_checks.check_weight(device, one, given, "the layer was made with one")
