# SPDX-License-Identifier: Apache-2.0
"""How a call of a layer whose ranks have the same tokens is computed: where rows of the products
lie (`layout`), and what adds up the partial sums of slices (`reduce`).

The names are those of the paper on layouts under tensor parallelism. `docs/tensor_parallel.md` says
what each is here, and what the costs are made of. Must not depend on engines, nor on how ranks
talk.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

from moeos import _runtime
from moeos.config.config import MoEConfig
from moeos.config.element_formats import FORMATS
from moeos.config.sizes import NARROW_ROWS
from moeos.partition.rates import H200, DeviceRates

Layout = Literal["auto", "expert_major", "expert_major_persistent", "token_major", "gathered"]
"""Where GEMM0 reads rows, and where rows between GEMM0 and GEMM1 lie."""

Reduce = Literal["auto", "fused", "after"]
"""What adds up partial sums: the kernel, or torch.distributed after it."""

REDUCES: tuple[Reduce, ...] = get_args(Reduce)

_COPIES: tuple[Layout, ...] = ("expert_major", "expert_major_persistent")
"""Layouts that permute rows into the order of experts. The paper distinguishes the two by GEMM1's
kernel; here one persistent kernel computes both GEMMs."""

_BY_INDEX: tuple[Layout, ...] = ("token_major", "gathered")
"""Layouts in which GEMM0 reads a rank's own tokens where the caller left them."""

LAYOUTS: tuple[Layout, ...] = get_args(Layout)

GATHERED_ROWS, GATHERED_COLUMNS = 128, 256
"""Rows and columns of a part of a product whose rows are copied by index; the rows fill a tile."""
STEP_BYTES = 128
"""Bytes of a row in one step."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The caller's wishes for a layer; "auto" leaves a choice to the costs.

    Attributes:
        layout: where rows of the products lie.
        reduce: what adds up partial sums.
        rates: the numbers of the GPU by which costs are computed.
    """

    layout: Layout = "auto"
    reduce: Reduce = "auto"
    rates: DeviceRates = H200

    @property
    def name(self) -> str:
        """The arguments that say it, as errors and agreements have them; "" where none does."""
        given = (("layout", self.layout), ("reduce", self.reduce))
        return "".join(f", {name}={value!r}" for name, value in given if value != "auto")

    def in_place_tokens(self, cfg: MoEConfig) -> int:
        """The most tokens of a call in which a rank that is alone reads them where the caller left
        them (Geometry's `in_place_tokens`). `cfg`: of a slice.
        """
        if self.layout in _COPIES:
            return 0
        if self.layout in _BY_INDEX:
            return int(_runtime.IN_PLACE_TOKENS)
        tokens = 0
        while tokens < _runtime.IN_PLACE_TOKENS and gathers(self.rates, cfg, tokens + 1):
            tokens += 1
        return tokens

    def gathers_rows(self, cfg: MoEConfig, alone: bool) -> bool:
        """Whether a rank's own rows are read by index, in calls of any number of tokens
        (Geometry's `gathers_rows`). `alone`: whether a rank has whole experts, and all of them.

        Couriers copy the rows of other ranks anyway: with slices on two ranks nothing was gained.
        """
        if self.layout == "auto":
            return alone and reads_rows_as_they_are(cfg) and saves_by_gathering(self.rates, cfg)
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
"""The policy whose calls follow the costs."""


def require_policy(layout: object, reduce: object) -> Policy:
    """The policy of a layer's arguments. Raises `ValueError` for unknown values."""
    if layout not in LAYOUTS:
        allowed = " or ".join(map(repr, LAYOUTS))
        raise ValueError(f"layout is {layout!r}; it must be {allowed}")
    if reduce not in REDUCES:
        allowed = " or ".join(map(repr, REDUCES))
        raise ValueError(f"reduce is {reduce!r}; it must be {allowed}")
    return Policy(layout, reduce)


# --- What calls cost: seconds of one rank, by the rates of its GPU ---


def products(rates: DeviceRates, cfg: MoEConfig, tokens: int) -> float:
    """Both GEMMs of a slice: arithmetic, or reading the weights of the experts that have tokens."""
    rows = cfg.w1_rows + cfg.intermediate
    flops = 2.0 * tokens * cfg.slots * rows * cfg.hidden
    return max(flops / rates.expert_flops(cfg), _weights_read(rates, cfg, tokens, rows))


def _weights_read(rates: DeviceRates, cfg: MoEConfig, tokens: int, rows: int) -> float:
    """Reading `rows` rows of weights of each expert that has tokens, from memory."""
    bits = 8 * cfg.dtype.itemsize
    if cfg.weight_format is not None:
        bits = FORMATS[cfg.weight_format].code_bits
    return _touched(cfg, tokens) * rows * cfg.hidden * bits / 8 / rates.memory_bytes


def _touched(cfg: MoEConfig, tokens: int) -> float:
    """The expected number of experts that have tokens, where routing is even and random."""
    return cfg.experts * (1.0 - float((1.0 - 1.0 / cfg.experts) ** (tokens * cfg.slots)))


def copies(rates: DeviceRates, cfg: MoEConfig, tokens: int, ranks: int = 1) -> float:
    """Copying own rows before GEMM0 reads them: each is written and read once more. `ranks`: the
    ranks that share out the experts evenly, so that one of `ranks` rows is a rank's own.
    """
    moved = 2 * tokens * cfg.slots / ranks * cfg.hidden * cfg.dtype.itemsize
    return rates.dispatch + moved / rates.copied_bytes


def gathered_rows(rates: DeviceRates, cfg: MoEConfig, tokens: int, ranks: int = 1) -> float:
    """Reading own rows by index in GEMM0, in calls of more tokens than are read in place. These
    rows are listed as copied rows are. `ranks`: as of `copies`.

    The extra time of a step is hidden where GEMM0 waits for its weights from memory. That of a part
    is not: nothing is asked of the memory meanwhile.
    """
    rows, touched = tokens * cfg.slots / ranks, _touched(cfg, tokens) / ranks
    wide = -(-cfg.w1_rows // GATHERED_COLUMNS)
    of_few = rows * ranks <= NARROW_ROWS * cfg.experts  # few rows per expert: its tile is narrow
    # The last tile of an expert is half full on average. A narrow one has twice the parts.
    parts = touched * 2 * wide if of_few else (rows / GATHERED_ROWS + touched / 2) * wide
    steps = max(1.0, rows / GATHERED_ROWS * wide / (rates.blocks - 1)) * _steps(cfg, cfg.hidden)
    read = _weights_read(rates, cfg, tokens, cfg.w1_rows) / ranks
    beyond = max(steps * (rates.step + rates.gathered_step), read) - max(steps * rates.step, read)
    return rates.dispatch + parts * rates.gathered_part / (rates.blocks - 1) + beyond


def token_major(rates: DeviceRates, cfg: MoEConfig, tokens: int) -> float:
    """Reading rows by index in both GEMMs; GEMM1's are the rows between the two."""
    second = _gathered_steps(rates, cfg, tokens, cfg.hidden, cfg.intermediate)
    return gathered_rows(rates, cfg, tokens) + second


def boxes(rates: DeviceRates, cfg: MoEConfig, tokens: int) -> float:
    """Reading rows of few tokens in place: what their boxes take beyond a step, in each part of a
    processor. A tile of few tokens may have all of them.
    """
    beyond = max(0.0, tokens * rates.box - rates.step)
    parts = min(cfg.experts, tokens * cfg.slots) * -(-cfg.w1_rows // 128)
    return _steps(cfg, cfg.hidden) * beyond * -(-parts // (rates.blocks - 1))


def _steps(cfg: MoEConfig, depth: int) -> int:
    return -(-depth * cfg.dtype.itemsize // STEP_BYTES)


def _gathered_steps(
    rates: DeviceRates, cfg: MoEConfig, tokens: float, columns: int, depth: int
) -> float:
    """The extra time of the steps of a product with `columns` columns that reads rows by index."""
    parts = tokens * cfg.slots / GATHERED_ROWS * -(-columns // GATHERED_COLUMNS)
    return parts * _steps(cfg, depth) * rates.gathered_step / (rates.blocks - 1)


def saves_by_gathering(rates: DeviceRates, cfg: MoEConfig) -> bool:
    """Whether gathering a rank's own rows saves more in some call than it loses in any other: a
    layer has one layout for calls of all numbers of tokens.
    """
    most = cfg.max_tokens
    counts = {most, *(1 << bit for bit in range(most.bit_length()))}
    saved = [copies(rates, cfg, tokens) - gathered_rows(rates, cfg, tokens) for tokens in counts]
    return max(saved) + min(saved) > 0.0


def reads_rows_as_they_are(cfg: MoEConfig) -> bool:
    """Whether weights and tokens have 16 bits, and products take tokens as they stand. The costs of
    rows read by index were measured on such layers.
    """
    plain = cfg.dtype.itemsize == 2 and cfg.weight_format is None
    return plain and not cfg.apply_router_weight_on_input


def gathers(rates: DeviceRates, cfg: MoEConfig, tokens: int) -> bool:
    """Whether rows of `tokens` tokens are better read in place."""
    return boxes(rates, cfg, tokens) <= copies(rates, cfg, tokens)


def router_flops(cfg: MoEConfig, tokens: int) -> int:
    """Flops of the gate logits."""
    return 2 * tokens * cfg.experts * cfg.hidden


def shared_flops(cfg: MoEConfig, tokens: int) -> int:
    """Flops of the shared experts' products, and of their gate."""
    of_each = cfg.shared_w1_rows + cfg.shared_intermediate
    return 2 * tokens * (cfg.shared_experts * of_each + cfg.shared_gate) * cfg.hidden


def _of_each_token(rates: DeviceRates, cfg: MoEConfig, tokens: int) -> float:
    """Seconds of a token's arithmetic that depends on neither its experts nor the reduction."""
    return (router_flops(cfg, tokens) + shared_flops(cfg, tokens)) / rates.bf16_flops


def fused(rates: DeviceRates, cfg: MoEConfig, tokens: int, slices: int) -> float:
    """Each token's own arithmetic, both GEMMs, and sums that leave as they are made.

    A token's sum is complete when the last of its k experts is: the share u of the GEMMs' time G
    completes a share u^k of the tokens. So the links, whose time is L, end when the last sum that
    they had to wait for is sent: the largest of G u + (1 - u^k) L over u.
    """
    compute, links = (
        products(rates, cfg, tokens),
        _sums_bytes(cfg, tokens, slices) / rates.link_bytes,
    )
    k, before = cfg.slots, _of_each_token(rates, cfg, tokens)
    if k * links <= compute:
        return before + compute
    if k == 1:
        return before + links
    u = float((compute / (k * links)) ** (1 / (k - 1)))
    return before + compute * u + (1.0 - float(u**k)) * links


def after(rates: DeviceRates, cfg: MoEConfig, tokens: int, slices: int) -> float:
    """Each token's own arithmetic, both GEMMs, and an all-reduce after them."""
    computed = _of_each_token(rates, cfg, tokens) + products(rates, cfg, tokens)
    return computed + rates.launch + _sums_bytes(cfg, tokens, slices) / rates.all_reduced(slices)


@functools.lru_cache(maxsize=4096)
def reduces_after(rates: DeviceRates, cfg: MoEConfig, tokens: int, slices: int) -> bool:
    """Whether an all-reduce after the kernel takes less time than sums within. `cfg`: a slice's.

    All ranks find the same answer: it follows from what they have agreed on, such as the rates.
    """
    return after(rates, cfg, tokens, slices) < fused(rates, cfg, tokens, slices)


def _sums_bytes(cfg: MoEConfig, tokens: int, slices: int) -> float:
    """Bytes of partial sums and sums that a rank sends: a reduce-scatter and an all-gather."""
    return 2.0 * tokens * (slices - 1) / slices * cfg.hidden * cfg.dtype.itemsize
