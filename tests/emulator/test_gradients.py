# SPDX-License-Identifier: Apache-2.0
"""The kernels of a call of gradients on the emulated GPU: gradients are those of the float64
reference, whatever lay in memory before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig, _runtime
from moeos.kernel_shape import KernelShape
from tests.emulator.emulated import EmulatedLayer, build
from tests.gradients import OF_EXPERTS, Gradients, assert_match, drawn
from tests.layers import PREFERENCES, Call, Weights, config, draw_given_call, draw_weights
from tests.nightly import all_but

PROCESSORS = 3
PATIENCE = 40

_SMALL: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 300}
LAYERS: dict[str, tuple[dict[str, Any], int]] = {
    "gated, parts that are not whole": ({"hidden": 96, "intermediate": 160}, 1),
    "gated, whole parts, experts that no token chooses": (
        {"hidden": 256, "intermediate": 128, "experts": 24},
        1,
    ),
    "biases, no gate values": (
        {"activation": "relu2", "hidden": 64, "intermediate": 40, "bias": True},
        1,
    ),
    "two ranks": ({"hidden": 96, "intermediate": 64}, 2),
    "float16, biases, a limit, parts that are not whole": (
        {
            "dtype": torch.float16,
            "activation": "swigluoai",
            "swiglu_limit": 0.5,
            "hidden": 96,
            "intermediate": 160,
            "bias": True,
        },
        1,
    ),
    "two ranks, a capacity, gelu": (
        {
            "activation": "gelu",
            "hidden": 64,
            "intermediate": 64,
            "capacity_factor": 1.0,
            "row_map": "capacity",
        },
        2,
    ),
    "three ranks, biases": ({"hidden": 64, "intermediate": 72, "bias": True}, 3),
}


class EmulatedGradients(EmulatedLayer):
    """Calls of gradients of all ranks of a layer; each writes all that it returns.

    Attributes:
        found: of each rank, what the last call made.
    """

    def __init__(self, library: Path, weights: Weights, ranks: int, sizes: _runtime.Sizes) -> None:
        super().__init__(library, weights, ranks, patience=PATIENCE)
        self._sizes = sizes
        self.found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        for heap, between in zip(self._heaps, self._between, strict=True):
            heap[-sizes.result_bytes :] = 0xFF  # NaNs
            between.fill_(0xFF)

    def _of_gradients(self, rank: int, call: Call) -> dict[str, Tensor | None]:
        cfg = self._weights.cfg
        mine = self._weights.of_rank(rank, self._ranks)
        parts = {
            f"d_{name}": torch.full_like(part, torch.nan)
            for name in OF_EXPERTS
            if (part := getattr(mine, name)) is not None
        }
        self.found[rank] = {
            "d_x": torch.full_like(call.x, torch.nan),
            "d_topk_weights": torch.zeros(len(call.x), cfg.slots),
            **parts,
        }
        sent = torch.full((len(call.x), self._sizes.sent_bytes), 0xFF, dtype=torch.uint8)
        return {"out": sent, "d_out": drawn(call, rank), **self.found[rank]}

    def gradients(self, calls: Sequence[Call], seed: int) -> list[Gradients]:
        self(calls, seed)
        return [
            {name.removeprefix("d_"): gradient for name, gradient in found.items()}
            for found in self.found
        ]


def made(cfg: MoEConfig, ranks: int, folder: Path) -> EmulatedGradients:
    shape = KernelShape(
        cfg=cfg, world_size=ranks, processors=PROCESSORS, virtual_ranks=ranks, gradients=True
    )
    library = build(cfg, ranks, PROCESSORS, folder, gradients=True)
    return EmulatedGradients(library, draw_weights(cfg), ranks, shape.sizes)


def check(
    emulated: EmulatedGradients,
    tokens: Sequence[int],
    seed: int,
    preference: Callable[[int, int], Tensor] | None = None,
) -> None:
    weights = emulated._weights
    favoured = None if preference is None else preference(weights.cfg.experts, len(tokens))
    calls = [
        draw_given_call(weights.cfg, count, seed + rank, favoured)
        for rank, count in enumerate(tokens)
    ]
    found = emulated.gradients(calls, seed)
    wanted = {"x", "topk_weights", *OF_EXPERTS}
    assert_match(weights, calls, found, wanted)


IN_EVERY_RUN = (
    "float16, biases, a limit, parts that are not whole",
    "two ranks, a capacity, gelu",
)
"""Each activation's kind and each type, with biases and without, of one rank and of two."""


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_gradients_are_the_references(name: str, tmp_path: Path) -> None:
    changes, ranks = LAYERS[name]
    emulated = made(config(**{**_SMALL, **changes}), ranks, tmp_path)
    for number, count in enumerate((200, 3, 64, 0)):
        check(emulated, [max(0, count - 7 * rank) for rank in range(ranks)], 10 * number)
    check(emulated, [150] * ranks, 90, PREFERENCES["one-expert"])
