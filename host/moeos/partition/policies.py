# SPDX-License-Identifier: Apache-2.0
"""How a call of a layer whose ranks have the same tokens is computed: where rows of the products
lie (`layout`), and who adds up the partial sums of slices (`reduce`).

The names are those of the paper on layouts under tensor parallelism. `docs/tensor_parallel.md` says
what each is here, and what the costs are made of. This file knows configs and rates, and nothing of
engines or of how ranks talk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

from moeos import _runtime
from moeos.config.config import MoEConfig
from moeos.config.element_formats import FORMATS
from moeos.config.sizes import NARROW_ROWS
from moeos.partition.rates import (
    H200_BLOCKS,
    H200_GEMM_FLOPS,
    H200_LINK_BYTES,
    H200_MEMORY_BYTES,
    expert_rate,
)

Layout = Literal["auto", "expert_major", "expert_major_persistent", "token_major", "gathered"]
"""Where first products read rows, and where rows between the products lie."""

Reduce = Literal["auto", "fused", "after"]
"""Who adds up partial sums: the kernel, or torch.distributed behind it."""

REDUCES: tuple[Reduce, ...] = get_args(Reduce)

_COPIES: tuple[Layout, ...] = ("expert_major", "expert_major_persistent")
"""Rows are copied into the order of experts. The paper tells these two apart by the kernel of the
second product; here both products are one kernel's, which is persistent."""

_BY_INDEX: tuple[Layout, ...] = ("token_major", "gathered")
"""First products read a rank's own tokens where the caller left them."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

ALL_REDUCE_BYTES = {2: 355e9, 4: 368e9, 8: 470e9}
"""What NCCL's all-reduce sends from each rank, bytes/s, by the ranks. With 4 and 8 from the paper's
Tables 1 and 2b, that is from other machines; with 2 at most what the link takes."""
LAUNCH = 20e-6
"""One more kernel on all ranks, NCCL's, from its launch until its first byte has come."""
DISPATCH = 5e-6
"""Sorting, counting and copying before the first product, of few tokens. Calls of one to eight
tokens that do without took 3 to 6 us less."""
COPIED_BYTES = 3.4e12
"""Bytes/s of rows that are copied, read and written, by a fit over layers that were timed with
copies and with rows by index."""
GATHERED_STEP = 0.24e-6
"""What a step of a product takes more where its rows are copied by index, cp.async's, by the same
fit: for each full tile of rows, and each part of so many columns. It was measured of first
products."""
GATHERED_ROWS, GATHERED_COLUMNS = 128, 256
GATHERED_PART = 1.2e-6
"""What a part of a first product takes more before the first of its rows is copied from x: which
tokens these are is looked up, and nothing hides that. Any value from 0.7 to 2.1 us chooses the same
layouts for the layers that were timed."""
BOX = 35e-9
"""A row of few tokens that is loaded by a box of its own, where loads alone were timed."""
STEP = 0.7e-6
"""A step of a first product, beside which its rows are loaded, timed likewise."""
STEP_BYTES = 128
"""Of a row, in a step."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a layer's caller wants; "auto" leaves it to the costs.

    Attributes:
        layout: where rows of the products lie.
        reduce: who adds up partial sums.
    """

    layout: Layout = "auto"
    reduce: Reduce = "auto"

    @property
    def name(self) -> str:
        """The arguments that say it, as errors and agreements have them; "" where none does."""
        given = (("layout", self.layout), ("reduce", self.reduce))
        return "".join(f", {name}={value!r}" for name, value in given if value != "auto")

    def in_place_tokens(self, cfg: MoEConfig) -> int:
        """In calls of up to so many tokens a rank alone reads tokens where the caller left them
        (Geometry's `in_place_tokens`). `cfg`: of a slice.
        """
        if self.layout in _COPIES:
            return 0
        if self.layout in _BY_INDEX:
            return int(_runtime.IN_PLACE_TOKENS)
        tokens = 0
        while tokens < _runtime.IN_PLACE_TOKENS and gathers(cfg, tokens + 1):
            tokens += 1
        return tokens

    def gathers_rows(self, cfg: MoEConfig, alone: bool) -> bool:
        """Whether a rank's own rows are read by index, in calls of any number of tokens
        (Geometry's `gathers_rows`). `alone`: whether a rank has whole experts, and all of them.

        Others' rows take couriers' time anyway: with slices on two ranks nothing was gained.
        """
        if self.layout == "auto":
            return alone and reads_rows_as_they_are(cfg) and saves_by_gathering(cfg)
        return self.layout in _BY_INDEX

    @property
    def orders_between(self) -> bool:
        """Whether rows between the products lie in the order of tokens (Geometry's
        `between_pairs`).
        """
        return self.layout == "token_major"

    def sizes(self, cfg: MoEConfig, alone: bool) -> dict[str, int]:
        """Fields of runtime/words/geometry.def that say it. `cfg`: of a slice; `alone`: as of
        `gathers_rows`.
        """
        return {
            "in_place_tokens": self.in_place_tokens(cfg),
            "gathers_rows": int(self.gathers_rows(cfg, alone)),
            "between_pairs": int(self.orders_between),
        }

    def require_fits(self, sizes: _runtime.Sizes) -> None:
        """Raises `ValueError` where a call of the layer cannot be computed as the caller wants."""
        if self.layout in _BY_INDEX and not sizes.gathers_own_rows:
            raise ValueError(
                f"layout is {self.layout!r}, and what this layer's experts get of a token is not "
                "its row of x as it stands, with activation_format or "
                "apply_router_weight_on_input: leave these out, or pass layout='auto'"
            )
        if self.orders_between and not sizes.between_by_pairs:
            raise ValueError(
                f"layout is {self.layout!r}, by which rows between the products lie in the order "
                "of a rank's own tokens, and here ranks that share out experts send each other "
                "tokens: pass parallel='tensor' without tensor_ranks, or layout='gathered'"
            )


AUTO = Policy()
"""Whose calls follow the costs."""


def require_policy(layout: object, reduce: object) -> Policy:
    """What a layer's arguments say. Raises `ValueError` for others than there are."""
    if layout not in LAYOUTS:
        allowed = " or ".join(map(repr, LAYOUTS))
        raise ValueError(f"layout is {layout!r}; it must be {allowed}")
    if reduce not in REDUCES:
        allowed = " or ".join(map(repr, REDUCES))
        raise ValueError(f"reduce is {reduce!r}; it must be {allowed}")
    return Policy(layout, reduce)


# --- What calls cost: seconds of one rank of H200s ---


def products(cfg: MoEConfig, tokens: int) -> float:
    """Both products of a slice: arithmetic, or the weights of the experts that have tokens."""
    rows = cfg.w1_rows + cfg.intermediate
    flops = 2.0 * tokens * cfg.slots * rows * cfg.hidden
    return max(flops / expert_rate(cfg), _weights_read(cfg, tokens, rows))


def _weights_read(cfg: MoEConfig, tokens: int, rows: int) -> float:
    """So many rows of weights of each expert that has tokens, from memory."""
    bits = 8 * cfg.dtype.itemsize
    if cfg.weight_format is not None:
        bits = FORMATS[cfg.weight_format].code_bits
    return _touched(cfg, tokens) * rows * cfg.hidden * bits / 8 / H200_MEMORY_BYTES


def _touched(cfg: MoEConfig, tokens: int) -> float:
    """Experts that have tokens, by even routing that is random."""
    return cfg.experts * (1.0 - float((1.0 - 1.0 / cfg.experts) ** (tokens * cfg.slots)))


def copies(cfg: MoEConfig, tokens: int, ranks: int = 1) -> float:
    """Own rows that are copied before first products read them: each is written and read once more.
    `ranks`: that share out the experts evenly, so that one of so many rows is a rank's own.
    """
    moved = 2 * tokens * cfg.slots / ranks * cfg.hidden * cfg.dtype.itemsize
    return DISPATCH + moved / COPIED_BYTES


def gathered_rows(cfg: MoEConfig, tokens: int, ranks: int = 1) -> float:
    """Own rows that first products read by index, in calls of more tokens than are read in place.
    They are listed as those are that are copied. `ranks`: as of `copies`.

    What a step takes more is hidden where first products wait for their weights from memory. What a
    part takes more is not: nothing is asked of the memory meanwhile.
    """
    rows, touched = tokens * cfg.slots / ranks, _touched(cfg, tokens) / ranks
    wide = -(-cfg.w1_rows // GATHERED_COLUMNS)
    of_few = rows * ranks <= NARROW_ROWS * cfg.experts  # of an expert, so that its tile is narrow
    # The last tile of an expert is half full on average. A narrow one has twice the parts.
    parts = touched * 2 * wide if of_few else (rows / GATHERED_ROWS + touched / 2) * wide
    steps = max(1.0, rows / GATHERED_ROWS * wide / (H200_BLOCKS - 1)) * _steps(cfg, cfg.hidden)
    read = _weights_read(cfg, tokens, cfg.w1_rows) / ranks
    beyond = max(steps * (STEP + GATHERED_STEP), read) - max(steps * STEP, read)
    return DISPATCH + parts * GATHERED_PART / (H200_BLOCKS - 1) + beyond


def token_major(cfg: MoEConfig, tokens: int) -> float:
    """Rows that both products read by index, those of the second one between the two."""
    second = _gathered_steps(cfg, tokens, cfg.hidden, cfg.intermediate)
    return gathered_rows(cfg, tokens) + second


def boxes(cfg: MoEConfig, tokens: int) -> float:
    """Rows of few tokens that are read in place: what their boxes take beyond a step, of each part
    that a processor has. A tile of few tokens may have all of them.
    """
    beyond = max(0.0, tokens * BOX - STEP)
    parts = min(cfg.experts, tokens * cfg.slots) * -(-cfg.w1_rows // 128)
    return _steps(cfg, cfg.hidden) * beyond * -(-parts // (H200_BLOCKS - 1))


def _steps(cfg: MoEConfig, depth: int) -> int:
    return -(-depth * cfg.dtype.itemsize // STEP_BYTES)


def _gathered_steps(cfg: MoEConfig, tokens: float, columns: int, depth: int) -> float:
    """What the steps of a product of so many columns take more where its rows are read by index."""
    parts = tokens * cfg.slots / GATHERED_ROWS * -(-columns // GATHERED_COLUMNS)
    return parts * _steps(cfg, depth) * GATHERED_STEP / (H200_BLOCKS - 1)


def saves_by_gathering(cfg: MoEConfig) -> bool:
    """Whether gathering a rank's own rows saves more in some call than it loses in any other: a
    layer has one layout for calls of all numbers of tokens.
    """
    most = cfg.max_tokens
    counts = {most, *(1 << bit for bit in range(most.bit_length()))}
    saved = [copies(cfg, tokens) - gathered_rows(cfg, tokens) for tokens in counts]
    return max(saved) + min(saved) > 0.0


def reads_rows_as_they_are(cfg: MoEConfig) -> bool:
    """Whether weights and tokens have 16 bits, and products take tokens as they stand. What rows by
    index cost was measured of such layers.
    """
    plain = cfg.dtype.itemsize == 2 and cfg.weight_format is None
    return plain and not cfg.apply_router_weight_on_input


def gathers(cfg: MoEConfig, tokens: int) -> bool:
    """Whether rows of so few tokens are better read in place."""
    return boxes(cfg, tokens) <= copies(cfg, tokens)


def router_flops(cfg: MoEConfig, tokens: int) -> int:
    """Of the gate's logits."""
    return 2 * tokens * cfg.experts * cfg.hidden


def shared_flops(cfg: MoEConfig, tokens: int) -> int:
    """Of the shared experts' products, and of their gate's."""
    of_each = cfg.shared_w1_rows + cfg.shared_intermediate
    return 2 * tokens * (cfg.shared_experts * of_each + cfg.shared_gate) * cfg.hidden


def _of_each_token(cfg: MoEConfig, tokens: int) -> float:
    """Arithmetic that each token has whatever its experts, and whoever adds up."""
    return (router_flops(cfg, tokens) + shared_flops(cfg, tokens)) / H200_GEMM_FLOPS


def fused(cfg: MoEConfig, tokens: int, slices: int) -> float:
    """What each token has, products, and sums that leave as they are made.

    A token's sum is complete when the last of its k experts is: of the products' time, the share u
    completes a share u^k of the tokens. So the links end when the last that they had to wait for is
    sent: the largest of G u + (1 - u^k) L over u.
    """
    compute, links = products(cfg, tokens), _sums_bytes(cfg, tokens, slices) / H200_LINK_BYTES
    k, before = cfg.slots, _of_each_token(cfg, tokens)
    if k * links <= compute:
        return before + compute
    if k == 1:
        return before + links
    u = float((compute / (k * links)) ** (1 / (k - 1)))
    return before + compute * u + (1.0 - float(u**k)) * links


def after(cfg: MoEConfig, tokens: int, slices: int) -> float:
    """What each token has, products, and an all-reduce behind them."""
    known = max((ranks for ranks in ALL_REDUCE_BYTES if ranks <= slices), default=2)
    rate = ALL_REDUCE_BYTES[known]
    computed = _of_each_token(cfg, tokens) + products(cfg, tokens)
    return computed + LAUNCH + _sums_bytes(cfg, tokens, slices) / rate


@functools.lru_cache(maxsize=4096)
def reduces_after(cfg: MoEConfig, tokens: int, slices: int) -> bool:
    """Whether an all-reduce behind the kernel takes less time than sums within. `cfg`: a slice's.

    All ranks find the same: it follows from what they have agreed upon.
    """
    return after(cfg, tokens, slices) < fused(cfg, tokens, slices)


def _sums_bytes(cfg: MoEConfig, tokens: int, slices: int) -> float:
    """Of partial sums and of sums that a rank sends: a reduce-scatter and an all-gather."""
    return 2.0 * tokens * (slices - 1) / slices * cfg.hidden * cfg.dtype.itemsize
