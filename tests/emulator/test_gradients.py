# SPDX-License-Identifier: Apache-2.0
"""The kernels of a call of gradients on the emulated GPU: gradients are those of the float64
reference, whatever lay in memory before, and whatever a forward call has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moeos import MoEConfig, Placement, _runtime
from moeos.compile.kernel_shape import KernelShape
from moeos.partition.placement import experts_of
from moeos.partition.slicing import WHOLE, Slicing
from tests.emulator.emulated import EmulatedLayer, build
from tests.gradients import FAR_LIMIT, OF_EXPERTS, Gradients, assert_match, drawn
from tests.layers import PREFERENCES, Call, config, draw_given_call, draw_weights
from tests.nightly import all_but
from tests.weight_layouts import in_layout, plain_of

PROCESSORS = 3
PATIENCE = 40

_ON_INPUT = {
    "apply_router_weight_on_input": True,
    "top_k": 1,
    "scoring": "sigmoid",
    "renormalize": False,
}
_SMALL: dict[str, Any] = {"dtype": torch.bfloat16, "max_tokens": 300}
LAYERS: dict[str, tuple[dict[str, Any], int | Placement]] = {
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
    "a capacity, experts anywhere, zero experts, gelu, biases": (
        {
            "activation": "gelu",
            "hidden": 64,
            "intermediate": 64,
            "bias": True,
            "capacity_factor": 1.0,
            "row_map": "capacity",
            "zero_experts": 3,
            "top_k": 3,
        },
        Placement([[6, 1, 3], [0, 7, 4, 2, 5]]),  # type: ignore[arg-type]
    ),
    "weights on inputs": ({"hidden": 64, "intermediate": 64, "bias": True, **_ON_INPUT}, 2),
    "zero experts": ({"hidden": 96, "intermediate": 64, "zero_experts": 2}, 1),
    "experts anywhere, a rank without one": (
        {"hidden": 96, "intermediate": 64, "bias": True},
        Placement([[4, 0, 6, 2], [], [1, 7, 3, 5]]),  # type: ignore[arg-type]
    ),
    "two nodes, biases": ({"hidden": 64, "intermediate": 40, "bias": True}, 2),
    "three ranks, biases": ({"hidden": 64, "intermediate": 72, "bias": True}, 3),
}


REMOTE = ("two nodes, biases",)
"""Of these: each rank reaches the others by puts."""


class EmulatedGradients(EmulatedLayer):
    """Calls of gradients of all ranks of a layer; each writes all that it returns.

    Attributes:
        found: of each rank, what the last call made.
        of_shared: of each rank, d_x_added and d_shared of its calls; None: there are none.
    """

    def __init__(
        self,
        library: Path,
        cfg: MoEConfig,
        where: int | Placement,
        sizes: _runtime.Sizes,
        slicing: Slicing = WHOLE,
    ) -> None:
        weights, (ranks, placement) = draw_weights(cfg), parted(where)
        super().__init__(
            library, weights, ranks, patience=PATIENCE, placement=placement, slicing=slicing
        )
        self._sizes = sizes
        self.of_shared: list[tuple[Tensor, Tensor]] | None = None
        self.found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
        for heap, between in zip(self._heaps, self._between, strict=True):
            heap[-sizes.result_bytes :] = 0xFF  # NaNs
            between.fill_(0xFF)

    def _of_gradients(self, rank: int, call: Call) -> dict[str, Tensor | None]:
        cfg = self._weights.cfg
        mine = self._weights.of_rank(rank, self._ranks, self._placement)
        if self._slicing.cuts:
            mine = self._weights.of_slice(self._slicing, rank, self._ranks)
        own = {"b2": mine.b2, **in_layout(mine)}
        parts = {
            f"d_{name}": torch.full_like(part, torch.nan)
            for name, part in own.items()
            if part is not None
        }
        self.found[rank] = {
            "d_x": torch.full_like(call.x, torch.nan),
            "d_topk_weights": torch.zeros(len(call.x), cfg.slots),
            **parts,
        }
        sent = torch.full((len(call.x), self._sizes.sent_bytes), 0xFF, dtype=torch.uint8)
        first = rank - self._slicing.slice_of(rank) if self._slicing.sums else rank
        shared = {}
        if self.of_shared is not None:
            shared = dict(zip(("d_x_added", "d_shared"), self.of_shared[rank], strict=True))
        return {"out": sent, "d_out": drawn(call, first), **self.found[rank], **shared}

    def gradients(self, calls: Sequence[Call], seed: int) -> list[Gradients]:
        self(calls, seed)
        return [
            plain_of(
                self._weights.cfg,
                {name.removeprefix("d_"): gradient for name, gradient in found.items()},
            )
            for found in self.found
        ]


def parted(where: int | Placement) -> tuple[int, Placement | None]:
    """How many ranks there are, and where experts lie, unless in order."""
    return (where.world_size, where) if isinstance(where, Placement) else (where, None)


def places_of(where: int | Placement) -> int:
    """The most experts of a rank, where a table says which."""
    return where.most if isinstance(where, Placement) else 0


def made(
    cfg: MoEConfig,
    where: int | Placement,
    folder: Path,
    *,
    saves: bool = False,
    remote: bool = False,
    slicing: Slicing = WHOLE,
) -> EmulatedGradients:
    ranks, places = parted(where)[0], places_of(where)
    shape = KernelShape(
        cfg=slicing.cut(cfg),
        world_size=slicing.place(0, ranks)[1],
        slicing=slicing,
        processors=PROCESSORS,
        virtual_ranks=ranks,
        transport="mapped" if remote else "none",
        places=places,
        gradients=True,
    )
    library = build(
        cfg,
        ranks,
        PROCESSORS,
        folder,
        places=places,
        gradients=True,
        saves=saves,
        remote=remote,
        slicing=slicing,
    )
    return EmulatedGradients(library, cfg, where, shape.sizes, slicing)


def draw(
    cfg: MoEConfig,
    tokens: Sequence[int],
    seed: int,
    preference: Callable[[int, int], Tensor] | None = None,
) -> list[Call]:
    favoured = None if preference is None else preference(cfg.experts, len(tokens))
    return [draw_given_call(cfg, count, seed + rank, favoured) for rank, count in enumerate(tokens)]


def check(emulated: EmulatedGradients, calls: Sequence[Call], seed: int) -> None:
    weights = emulated._weights
    found = emulated.gradients(calls, seed)
    wanted = {"x", "topk_weights", *OF_EXPERTS}
    assert_match(weights, calls, found, wanted, placement=emulated._placement)


IN_EVERY_RUN = REMOTE
"""Those of `SAVED` have gradients in every run, too, of ranks that reach each other directly."""


@pytest.mark.parametrize("name", all_but(IN_EVERY_RUN, LAYERS))
def test_gradients_are_the_references(name: str, tmp_path: Path) -> None:
    changes, where = LAYERS[name]
    cfg, ranks = config(**{**_SMALL, **changes}), parted(where)[0]
    emulated = made(cfg, where, tmp_path, remote=name in REMOTE)
    for number, count in enumerate((200, 3, 64, 0)):
        calls = draw(cfg, [max(0, count - 7 * rank) for rank in range(ranks)], 10 * number)
        check(emulated, calls, 10 * number)
    check(emulated, draw(cfg, [150] * ranks, 90, PREFERENCES["one-expert"]), 90)


def rows_sent(cfg: MoEConfig, call: Call, experts: Sequence[int]) -> int:
    """Of a call to the rank that has these experts."""
    assert call.ids is not None
    most = cfg.capacity(len(call.x))
    counts = [int((call.ids == expert).sum()) for expert in experts]
    return sum(count if most is None else min(count, most) for count in counts)


SAVED = ("a capacity, experts anywhere, zero experts, gelu, biases",)
"""It has the capacity map, in which rows of a cell are not those in the order of sending. There
tokens also have zero experts, and pairs that are dropped, of which these must be told apart.
`IN_EVERY_RUN` has a gated activation."""


@pytest.mark.parametrize("name", all_but(SAVED, LAYERS))
def test_what_a_forward_call_saves_is_found(name: str, tmp_path: Path) -> None:
    changes, where = LAYERS[name]
    ranks, placement = parted(where)
    limit = {"swiglu_limit": FAR_LIMIT} if "swiglu_limit" in changes else {}
    cfg = config(**{**_SMALL, **changes, **limit, "save": "preactivation"})
    folders = tmp_path / "forward", tmp_path / "backward"
    for folder in folders:
        folder.mkdir()
    remote = name in REMOTE
    library = build(
        cfg, ranks, PROCESSORS, folders[0], places=places_of(where), saves=True, remote=remote
    )
    forward = EmulatedLayer(
        library, draw_weights(cfg), ranks, patience=PATIENCE, placement=placement
    )
    backward = made(cfg, where, folders[1], saves=True, remote=remote)
    every = cfg.max_tokens * cfg.slots
    one_expert = PREFERENCES["one-expert"]
    cases = ((200, every, None), (3, every, None), (64, 21, None), (150, 133, one_expert))
    for number, (count, of_source, preference) in enumerate(cases):
        calls = draw(cfg, [count - rank for rank in range(ranks)], 10 * number, preference)
        unsaved = torch.full((ranks, of_source, cfg.w1_rows), torch.nan, dtype=cfg.dtype)
        forward.saved = [unsaved.clone() for _ in range(ranks)]
        forward.saved_of_source = backward.saved_of_source = of_source
        forward(calls, number)
        some = []  # ranks that have saved any
        for rank, saved in enumerate(forward.saved):
            assert saved is not None
            experts = experts_of(cfg, rank, ranks, placement)
            sent = [min(of_source, rows_sent(cfg, call, experts)) for call in calls]
            finite = torch.arange(of_source) < torch.tensor(sent)[:, None]
            assert torch.equal(saved.isfinite().all(dim=2), finite)
            assert torch.equal(saved.isfinite().any(dim=2), finite)
            some += [rank] if finite.any() else []
        backward.saved = forward.saved
        check(backward, calls, number)
        backward.saved = [unsaved.clone() for _ in range(ranks)]
        every = backward.gradients(calls, number)
        assert some
        for rank in some:
            # Nothing but saved rows are no numbers: who has used them has none, too.
            assert every[rank]["w2"].isnan().any()
