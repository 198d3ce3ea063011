# SPDX-License-Identifier: Apache-2.0
"""How a layer's experts are cut over ranks: tensor parallelism, with the same tokens on all ranks
or with tokens of each rank's own.

It knows which part of a tensor a rank holds, and which tokens' sums it writes. Must not depend on
engines, nor on how ranks talk.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, get_args

import torch

from moeos.config.config import MoEConfig
from moeos.config.element_formats import FORMATS, HIDDEN_GROUP
from moeos.partition.placement import Placement
from moeos.partition.policies import AUTO, Layout, Policy, Reduce, reduces_after, require_policy
from moeos.partition.rates import DeviceRates

Parallel = Literal["expert", "tensor", "sharded_tokens"]
"""What ranks share out: whole experts, or slices of each. With "tensor" they have the same tokens.
"""

PARALLELS: tuple[Parallel, ...] = get_args(Parallel)

Output = Literal["replicated", "scattered"]
"""Which tokens a rank of a layer in slices returns: all, or its part."""

_CUT = {"intermediate": "weight_format", "shared_intermediate": "shared_weight_format"}
"""Sizes that are cut, and the formats whose blocks must not be cut. Where tokens are sharded, the
shared experts' size is not cut: a rank holds them whole."""


class Arguments(TypedDict):
    """A layer's arguments for how experts are cut and calls of slices are computed."""

    parallel: Parallel
    tensor_ranks: int
    layout: Layout
    reduce: Reduce


@dataclasses.dataclass(frozen=True)
class Slicing:
    """Into how many slices the experts of a layer are cut.

    The ranks of a group hold one slice each of the group's experts. Rank r has slice r % slices,
    and is of group r // slices. Groups share out the experts.

    Attributes:
        slices: T, which divides P. 1: experts are whole.
        everywhere: whether each rank returns all tokens that it has been given.
        apart: whether the ranks have tokens of their own.
        policy: how calls are computed.
    """

    slices: int = 1
    everywhere: bool = True
    apart: bool = False
    policy: Policy = AUTO

    @property
    def cuts(self) -> bool:
        """Whether experts are cut at all."""
        return self.slices > 1

    @property
    def sums(self) -> bool:
        """Whether ranks with the same tokens add up each other's sums."""
        return self.cuts and not self.apart

    @property
    def name(self) -> str:
        """What errors and agreements call a layer that is cut so."""
        if self.apart:
            return self._kind
        output = "replicated" if self.everywhere else "scattered"
        return f"{self._kind}, output={output!r}{self.policy.name}"

    @property
    def _kind(self) -> str:
        cut = f", tensor_ranks={self.slices}" if self.cuts else ""
        return f"parallel={self.parallel!r}{cut}"

    def holders(self, ranks: int) -> int:
        """How many of `ranks` ranks hold one slice of all experts: one of each group."""
        return ranks // self.slices

    def holder(self, rank: int) -> int:
        """The number of a rank among the holders of its slice, which is that of its group."""
        return rank // self.slices

    def slice_of(self, rank: int) -> int:
        """Which slice a rank holds."""
        return rank % self.slices

    def place(self, rank: int, ranks: int) -> tuple[int, int]:
        """A rank's number among the ranks that have tokens of their own, and their number."""
        if self.apart:
            return rank, ranks
        return self.holder(rank), self.holders(ranks)

    def placement(self, experts: int, ranks: int) -> Placement:
        """The experts that each rank holds, or has slices of: equal for the ranks of a group."""
        whole = Placement.chunk(experts, self.holders(ranks))
        return Placement(tuple(whole.ranks[self.holder(rank)] for rank in range(ranks)))

    def peers(self, rank: int, ranks: int) -> list[int]:
        """All ranks as the runtime counts them from this one on: first those of its slice."""
        if not self.sums:
            return []
        slices = [(self.slice_of(rank) + behind) % self.slices for behind in range(self.slices)]
        return [peer for number in slices for peer in self.same_slice(number, ranks)]

    def same_slice(self, rank: int, ranks: int) -> list[int]:
        """The ranks with which this one shares out the experts: those of its slice, in order."""
        return list(range(self.slice_of(rank), ranks, self.slices))

    def sums_sent(self, rank: int, ranks: int, tokens: int) -> list[int]:
        """Rows of sums that a rank sends to each rank in a call of `tokens` tokens: partial sums to
        their owner and, where each rank returns all tokens, its own tokens' sums to all.
        """
        sums = len(self._owned(rank, tokens)) if self.everywhere else 0
        return [
            len(self._owned(peer, tokens)) + sums
            if self.sums and self.holder(peer) == self.holder(rank) and peer != rank
            else 0
            for peer in range(ranks)
        ]

    def tokens_of(self, rank: int, rows: int) -> range:
        """The tokens, of `rows`, whose sums this rank writes."""
        return range(rows) if self.everywhere else self._owned(rank, rows)

    def _owned(self, rank: int, rows: int) -> range:
        """The tokens, of `rows`, whose partial sums a rank adds up."""
        each = -(-rows // self.slices)
        mine = self.slice_of(rank)
        return range(min(rows, each * mine), min(rows, each * (mine + 1)))

    def refuse_placement(self) -> None:
        """Raises `ValueError` where experts are cut: a placement has whole experts."""
        if self.cuts:
            raise ValueError(
                f"placement is given, and parallel is {self.parallel!r}: slices of experts lie in "
                "order. Leave it out, or pass parallel='expert'"
            )

    def require_alike(self, others: Sequence[Slicing]) -> None:
        """Raises `ValueError` unless layers that are cut so may share a workspace with these.

        Which rank writes a row of a heap, and when, differs between layers with other slices.
        """
        for other in others:
            if (other.sums, other.sums and other.slices) != (self.sums, self.sums and self.slices):
                raise ValueError(
                    f"the workspace has layers with {other._kind}, and this one has {self._kind}: "
                    "pass workspace=moeos.Workspace(world), which layers of one kind share"
                )

    @property
    def parallel(self) -> Parallel:
        """The argument that says it. One slice is "expert", unless `reduce` is given."""
        if not self.cuts:
            return "expert" if self.policy.reduce == AUTO.reduce else "tensor"
        return "sharded_tokens" if self.apart else "tensor"

    @property
    def arguments(self) -> Arguments:
        """The arguments of a layer that say it, but `output`."""
        return {
            "parallel": self.parallel,
            "tensor_ranks": self.slices,
            "layout": self.policy.layout,
            "reduce": self.policy.reduce,
        }

    def adds_bias(self, rank: int) -> bool:
        """Whether a rank adds b2, which all ranks have whole: one does, to its partial sums."""
        return self.slice_of(rank) == 0

    def pairs(self, cfg: MoEConfig) -> int:
        """The most pairs of a token: where tokens are sharded, each slice of an expert is one."""
        return self._each(cfg.slots)

    def routed_pairs(self, cfg: MoEConfig) -> int:
        """Pairs of a token that has `top_k` experts."""
        return self._each(cfg.top_k)

    def _each(self, experts: int) -> int:
        return experts * (self.slices if self.apart else 1)

    def sizes(self, cfg: MoEConfig, holders: int) -> dict[str, int]:
        """Fields of runtime/words/geometry.def that differ from those of whole experts. `holders`:
        ranks that hold one slice of all experts.
        """
        if self.apart:
            return {"pair_slices": self.slices, "top_k": self.pairs(cfg)}
        own = self.policy.sizes(cfg, alone=holders == 1 and not self.cuts)
        if not self.cuts:
            return own
        return {**own, "slices": self.slices, "sums_everywhere": int(self.everywhere)}

    def by(self, rates: DeviceRates) -> Slicing:
        """This slicing, with costs by these numbers of a GPU."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, rates=rates))

    def may_leave_partials(self, cfg: MoEConfig) -> bool:
        """Whether some call leaves its partial sums. `cfg`: of a slice."""
        if self.policy.reduce == "after":
            return self.sums
        most = cfg.max_tokens
        counts = [most, *(1 << bit for bit in range(most.bit_length()))]
        return any(self.leaves_partials(cfg, rows, counted=False) for rows in counts)

    def leaves_partials(self, cfg: MoEConfig, rows: int, *, counted: bool) -> bool:
        """Whether a call of `rows` rows leaves its partial sums for an all-reduce after it.
        `counted`: whether the device knows how many of the rows are tokens; hosts may pass unlike
        numbers of rows then.
        """
        if not self.sums:
            return False
        if self.policy.reduce != "auto":
            return self.policy.reduce == "after"
        return (
            self.everywhere
            and not counted
            and reduces_after(self.policy.rates, cfg, rows, self.slices)
        )

    def cut(self, cfg: MoEConfig) -> MoEConfig:
        """The config of one slice, as an engine has it.

        Raises `ValueError` where a size does not divide, or slices lack a feature of the layer.
        """
        if not self.cuts:
            return cfg
        for name, unlike in (("zero_experts", 0), ("rounding", None), ("result_format", None)):
            value = getattr(cfg, name)
            if value != unlike:
                raise ValueError(
                    f"{name} is {value!r}; a layer with parallel={self.parallel!r} has none: set "
                    f"{name}={unlike!r}, or make it with parallel='expert'"
                )
        sizes = {}
        for name, of_format in _CUT.items():
            if self.apart and name != "intermediate":
                continue
            size = getattr(cfg, name)
            block = _block(getattr(cfg, of_format), cfg, name)
            if size % (self.slices * block):
                blocks = "" if block == 1 else f", in blocks of {block}"
                raise ValueError(
                    f"{name} is {size}; {self.slices} ranks with parallel={self.parallel!r} take "
                    f"equal slices of it{blocks}: it must be a multiple of {self.slices * block}. "
                    "Pass tensor_ranks that divide it so, or parallel='expert'"
                )
            sizes[name] = size // self.slices
        return dataclasses.replace(cfg, **sizes)

    def part(
        self, tensor: torch.Tensor, whole: torch.Size, part: torch.Size, halves: int, rank: int
    ) -> torch.Tensor:
        """This rank's part of a tensor of shape `whole`: of shape `part`, a view where it can be.

        `halves`: of rows; each half is cut by itself.
        """
        if whole == part:
            return tensor
        dim, count = _cut_dimension(whole, part, halves)
        each = part[dim] // count
        apart = tensor.unflatten(dim, (count, whole[dim] // count))
        mine = self.slice_of(rank)
        cut: torch.Tensor = apart.narrow(dim + 1, mine * each, each).flatten(dim, dim + 1)
        return cut

    def write_part(self, own: torch.Tensor, whole: torch.Tensor, halves: int, rank: int) -> None:
        """Copies this rank's part of a tensor into the whole one."""
        if own.shape == whole.shape:
            whole.copy_(own)
            return
        dim, count = _cut_dimension(whole.shape, own.shape, halves)
        each = own.shape[dim] // count
        apart = whole.unflatten(dim, (count, whole.shape[dim] // count))
        part = apart.narrow(dim + 1, self.slice_of(rank) * each, each)
        part.copy_(own.unflatten(dim, (count, each)))

    def joined(self, parts: Sequence[torch.Tensor], whole: torch.Size, halves: int) -> torch.Tensor:
        """The tensor of shape `whole` of which these are the parts, by slice."""
        part = parts[0].shape
        if part == whole:
            return parts[0]
        dim, count = _cut_dimension(whole, part, halves)
        apart = [tensor.unflatten(dim, (count, part[dim] // count)) for tensor in parts]
        return torch.cat(apart, dim + 1).flatten(dim, dim + 1)


WHOLE = Slicing()
"""The slicing of a layer whose ranks hold whole experts."""


def slicing_of(
    parallel: object,
    output: object,
    ranks: int,
    tensor_ranks: object = None,
    layout: object = "auto",
    reduce: object = "auto",
) -> Slicing:
    """The slicing of a layer's arguments in a world of `ranks` ranks. `tensor_ranks`: how many of
    them hold slices of the same experts; None: all. `layout`, `reduce`: how calls are computed.

    Raises `ValueError` for unknown values.
    """
    policy = require_policy(layout, reduce)
    if parallel not in PARALLELS:
        allowed = " or ".join(map(repr, PARALLELS))
        raise ValueError(f"parallel is {parallel!r}; it must be {allowed}")
    if output not in get_args(Output):
        raise ValueError(f"output is {output!r}; it must be 'replicated' or 'scattered'")
    if parallel != "tensor" and output != "replicated":
        raise ValueError(
            f"output is {output!r}; with parallel={parallel!r} each rank returns its own tokens: "
            "leave it out, or pass parallel='tensor'"
        )
    if parallel != "tensor" and policy.reduce != "auto":
        raise ValueError(
            f"parallel is {parallel!r}{policy.name}; reduce says how ranks with the same tokens "
            "add up: leave it out, or pass parallel='tensor'"
        )
    if parallel == "sharded_tokens" and policy.name:
        raise ValueError(
            f"parallel is {parallel!r}{policy.name}; layout says where ranks with whole experts, "
            "or with the same tokens, read rows: leave it out, or pass parallel='expert' or "
            "'tensor'"
        )
    if policy.reduce == "after" and output != "replicated":
        raise ValueError(
            f"reduce is 'after', and output is {output!r}: what adds up behind the kernel returns "
            "all tokens. Pass output='replicated', or reduce='fused'"
        )
    slices = 1 if parallel == "expert" else ranks
    if tensor_ranks is not None:
        slices = _require_slices(tensor_ranks, ranks, parallel)
    everywhere, apart = output == "replicated", parallel == "sharded_tokens"
    if slices == 1:
        return Slicing(everywhere=everywhere, policy=policy)
    return Slicing(slices, everywhere=everywhere, apart=apart, policy=policy)


def _require_slices(tensor_ranks: object, ranks: int, parallel: object) -> int:
    """Raises `ValueError` unless this many ranks can hold slices of the same experts."""
    if type(tensor_ranks) is not int or tensor_ranks < 1 or ranks % tensor_ranks != 0:
        raise ValueError(
            f"tensor_ranks is {tensor_ranks!r}; it must be a number that divides the "
            f"{ranks} ranks of the world: as many hold an expert, a slice each"
        )
    if parallel == "expert" and tensor_ranks > 1:
        raise ValueError(
            f"tensor_ranks is {tensor_ranks}; with parallel='expert' an expert is whole on a rank: "
            "leave it out, or pass parallel='sharded_tokens'"
        )
    return tensor_ranks


def digest(tensors: Mapping[str, torch.Tensor | None]) -> int:
    """32 bits that differ where tensors on the CPU do."""
    number = 0
    for name, tensor in tensors.items():
        number = zlib.crc32(name.encode(), number)
        if tensor is not None and tensor.numel() > 0:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            number = zlib.crc32(flat.numpy().tobytes(), number)
    return number


def _cut_dimension(whole: torch.Size, part: torch.Size, halves: int) -> tuple[int, int]:
    """The dimension in which a tensor of experts and its slice differ, and how many parts of it are
    cut separately: rows come in halves.
    """
    [dim] = [at for at, (all_, own) in enumerate(zip(whole, part, strict=True)) if all_ != own]
    return dim, halves if dim == 1 else 1


def _block(format_name: str | None, cfg: MoEConfig, name: str) -> int:
    """Columns of w2 that share a scale: a slice has all of them or none."""
    least = 8  # as any I
    if format_name is not None:
        row = FORMATS[format_name]
        least = max(row.columns or 1, row.multiple)
    if name == "intermediate" and cfg.activation_format is not None:
        least = max(least, HIDDEN_GROUP)
    return least
