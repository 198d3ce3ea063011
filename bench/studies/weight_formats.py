# SPDX-License-Identifier: Apache-2.0
"""What weights in FP8 and 4 bits gain and cost, against BF16 weights; and tokens in FP8 with such
weights.

    torchrun --nproc-per-node 2 -m bench.studies.weight_formats --out FILE CONFIG ...

Each CONFIG is a layer's TOML file without a format, whose sizes fit all of them. The layer and its
copies in each format take the same tokens in turn.
"""

from __future__ import annotations

import functools
from typing import Any

import moeos
from bench import study
from bench.studies import options
from bench.study import Case, Study
from moeos.config.element_formats import NAMES

TOKENS = (1, 8, 128, 512, 2048, 8192)
PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {name: {"weight_format": name} for name in NAMES}
VARIANTS |= {
    f"{name} by FP8": {"weight_format": name, "activation_format": "fp8_group128"} for name in NAMES
}
"""Fields of a config, by what a table calls them."""


def make(one: Study, cfg: moeos.MoEConfig) -> options.Measure:
    """A layer's measurement."""
    plain = moeos.MoELayer(cfg, one.world).requires_grad_(False)
    layers = {PLAIN: plain}
    for name, formats in VARIANTS.items():
        layers[name] = moeos.quantize(plain, **formats)

    def measure(tokens: int) -> Case:
        x = options.drawn(one, cfg, tokens)
        exact = plain(x)
        return {
            "distances": {name: study.distance(layer(x), exact) for name, layer in layers.items()},
            "seconds": one.timed(
                {name: functools.partial(layer, x) for name, layer in layers.items()}, tokens
            ),
        }

    return measure


if __name__ == "__main__":
    options.start("weight_formats", TOKENS, make, ({}, *VARIANTS.values()))
