# SPDX-License-Identifier: Apache-2.0
"""The adapter for transformers: `set_experts_implementation("moeos")` runs a model's experts.

transformers lets a function take the place of what an experts module computes, and a class the
place of how ranks that share the experts exchange tokens. `register` names both "moeos". Where a
plan of tensor parallelism cuts experts, a class in the place of transformers' own has moeos add up
what slices make. This file must not depend on how ranks communicate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import all_gather
from torch.distributed.tensor import DTensor, Shard

from moeos.compile import kernel_shape
from moeos.config.config import MoEConfig
from moeos.config.element_formats import BLOCK, FORMATS, ActivationFormat
from moeos.engines.twin import engine as twin
from moeos.integrations import formula_of, shared, transformers_quantized, transformers_weights
from moeos.layer.experts import Experts
from moeos.partition.slicing import Parallel
from moeos.system.process import Home
from moeos.world.world import check_deadline

VERSION = "5.24.0"
"""The version of transformers whose interfaces this was written for."""

OLDEST = "5.23"
"""The oldest one that has them."""

try:
    import transformers  # noqa: F401 - what is missing is one thing, and what is too old another
except ImportError as error:
    raise shared.missing("transformers", "transformers", VERSION) from error
try:
    from transformers.distributed import tensor_parallel
    from transformers.distributed.expert_parallel import (
        EPImplementation,
        EPImplementationInterface,
    )
    from transformers.distributed.tensor_parallel import MoeExpertsParallel
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    from moeos.integrations import transformers_mxfp4
except ImportError as error:
    raise ImportError(
        f"moeos.integrations.transformers needs transformers {OLDEST} or newer, and this is "
        f"{importlib.metadata.version('transformers')}: pip install 'transformers>={OLDEST}'"
    ) from error

NAME = shared.NAME
"""The name of the implementations."""

reset = shared.reset

MAX_TOKENS = 8192
"""The most tokens of a rank in one call, where `register` does not say."""

WHERE = "transformers with moeos"

_WORKS = {
    True: "'silu' and 'gelu_pytorch_tanh' do, clamped or not, and gpt-oss'",
    False: "'relu2', 'relu', 'silu', 'gelu' and 'gelu_pytorch_tanh' do",
}
"""Activations, by whether the experts are gated."""

_SAID_IN = ("hidden_act", "hidden_activation", "mlp_hidden_act")
"""The attributes of configs that hold the name of the activation."""

_DTYPES = {"cpu": twin.DTYPES, "cuda": kernel_shape.DTYPES}
"""The dtypes that moeos computes with, by device."""

_OF_SLICES = "moe_tp_experts"
"""The name in tensor-parallel plans for experts of which ranks hold slices."""

_READY = "_moeos_ready"
"""The attribute of a module in which its `_Ready` lies, and all that moeos sets. No dictionary by
module could have it: Dynamo does not guard keys of a `WeakKeyDictionary` (torch 2.13), so that a
graph computes every module as the first one; and with keys of `id` each layer needs a graph."""


@dataclasses.dataclass(frozen=True)
class _Options:
    max_tokens: int = MAX_TOKENS
    deadline: float = shared.SERVER_DEADLINE
    activation_format: ActivationFormat | None = None


_options = _Options()


def register(
    max_tokens: int = MAX_TOKENS,
    deadline: float = shared.SERVER_DEADLINE,
    activation_format: ActivationFormat | None = None,
) -> None:
    """Makes "moeos" an experts implementation and an implementation of expert parallelism.

    Then `model.set_experts_implementation("moeos")` has this process alone compute the experts,
    also under a launcher; and `DistributedConfig(..., ep_implementation="moeos")` the ranks of the
    mesh "ep" together. With the first, `tp_size` without `ep_size` gives each rank a slice of every
    expert, and moeos adds up what these make. docs/integrations.md says what is refused. May be
    called again: the last call counts, from each model's next call on.

    Args:
        max_tokens: the most tokens that one rank may pass in one call; sizes all buffers. A longer
            batch is cut into several calls where a process is alone or ranks have slices, and
            refused elsewhere.
        deadline: seconds that a rank waits for another one in a call.
        activation_format: of `MoEConfig`. "fp8_group128" rounds tokens, and makes a model whose
            experts are in no format raise in its first call.

    Raises:
        TypeError, ValueError: an argument is none that any model could be computed with.
    """
    global _options
    try:
        check_deadline(deadline)
        MoEConfig(  # of any model that may have the activation format
            hidden=BLOCK,
            intermediate=BLOCK,
            experts=1,
            top_k=1,
            max_tokens=max_tokens,
            weight_format="fp8_block128",
            activation_format=activation_format,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{WHERE}, register: {error}") from None
    _options = _Options(max_tokens, deadline, activation_format)
    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, experts_forward)
    EPImplementationInterface.register(NAME, MoeosEP)
    styles: Any = vars(tensor_parallel)["ALL_PARALLEL_STYLES"]  # which it does not export by type
    styles.register(_OF_SLICES, MoeosSlices())
    transformers_mxfp4.register()


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What an experts module computes, by this process alone: [S, H] -> [S, H]."""
    return _call(self, None, hidden_states, top_k_index, top_k_weights)


class MoeosEP(EPImplementation):
    """Experts that the ranks of the mesh "ep" hold, each of them E / P, and compute together.

    Ranks of the mesh "tp" hold one batch: each passes its part on, and all gather the results.
    """

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        _refuse(experts)
        own = transformers_weights.weights_of(experts)
        transformers_quantized.format_of(experts, own, _where(experts))
        self._module = experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[S, H] -> [S, H]. Collective over "ep"."""
        group = self.ep_mesh.get_group()
        ranks = self.tp_mesh.size()
        if ranks == 1:
            return _call(self._module, group, hidden_states, top_k_index, top_k_weights)
        part = _Part.of(self.tp_mesh, hidden_states.shape[0])
        _require_room(self._module, part.most)
        mine: Tensor = _call(
            self._module,
            group,
            _Own.apply(part, hidden_states),  # type: ignore[no-untyped-call]
            part.own(top_k_index),
            _Own.apply(part, top_k_weights),  # type: ignore[no-untyped-call]
        )
        whole: Tensor = _Whole.apply(part, mine)  # type: ignore[no-untyped-call]
        return whole


class MoeosSlices(MoeExpertsParallel):
    """Experts of which each rank of the mesh "tp" holds a slice, by transformers' own plan.

    The ranks hold one batch. Where the model's experts are moeos', moeos adds up the slices'
    outputs and gradients: each rank has those of all tokens, as with transformers' own experts.
    """

    def install_forward(self, module: Any, mesh: Any) -> Any:
        by_transformers = cast(Any, super()).install_forward(module, mesh).forward

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            """[S, H] -> [S, H]. Collective over "tp"."""
            given = (hidden_states, top_k_index, top_k_weights)
            if module.config._experts_implementation != NAME:
                whole: Tensor = by_transformers(*given)
                return whole
            _require_slices(module, mesh)
            x, ids, weights = (one.to_local() if isinstance(one, DTensor) else one for one in given)
            with cast(Any, self).context_around_forward(module, mesh):
                return _call(module, _group_of(mesh), x, ids, weights, "tensor")

        module.forward = forward
        return module


def _group_of(mesh: Any) -> Any:
    """The group of the ranks that have one batch."""
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def _require_slices(module: Any, mesh: Any) -> None:
    """`ValueError` for slices of quantized experts, whose scales transformers leaves whole, and for
    packed ones of gates and ups in turn: halves of these are no gates and ups of one slice.
    """
    works = "ep_size = tp_size does, with ep_implementation='moeos'"
    if transformers_weights.scale_names_of(module):
        what = "tp_size for quantized experts"
        raise shared.refusal(_where(module), what, mesh.size(), works)
    if not module.has_gate or module.is_concatenated:
        return
    for name, weight in module.named_parameters(recurse=False):
        packed = [part for part in getattr(weight, "placements", ()) if _is_packed(part)]
        if packed:
            works = f"a tp_plan of 'rowwise', or where rows are outputs 'colwise', does; or {works}"
            raise shared.refusal(_where(module), f"placements of {name}", packed, works)


def _is_packed(placement: Any) -> bool:
    """Whether a rank has a part of each half of a tensor."""
    return getattr(placement, "split_factor", 1) > 1


class _Part(NamedTuple):
    """Which rows of a batch that ranks share are this rank's; no rank has more than `most`."""

    group: Any
    ranks: int
    rows: int
    first: int
    end: int
    most: int

    @classmethod
    def of(cls, mesh: Any, rows: int) -> _Part:
        rank, ranks = mesh.get_local_rank(), mesh.size()
        return cls(mesh.get_group(), ranks, rows, *shared.part(rows, rank, ranks))

    def own(self, whole: Tensor) -> Tensor:
        return whole[self.first : self.end]

    def gather(self, mine: Tensor) -> Tensor:
        """The rows of all ranks. Collective."""
        padded = mine.new_zeros(self.most, mine.shape[-1])
        padded[: self.end - self.first] = mine
        whole = padded.new_empty(self.ranks, *padded.shape)
        all_gather(list(whole.unbind()), padded, group=self.group)
        return whole.flatten(0, 1)[: self.rows]


class _Own(torch.autograd.Function):
    """This rank's rows of what ranks share. Backward gathers the gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, part: _Part, whole: Tensor) -> Tensor:
        ctx.part = part
        return part.own(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.part.gather(gradients[0])


class _Whole(torch.autograd.Function):
    """Gathers all rows, of which each rank has some. All ranks compute the same afterwards, so each
    has the gradient.
    """

    @staticmethod
    def forward(ctx: Any, part: _Part, mine: Tensor) -> Tensor:
        ctx.part = part
        return part.gather(mine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, ctx.part.own(gradients[0])


class _Ready:
    """What computes a module's calls, and what it was made for: a key, the functions of the
    module's activation, compared by identity, its numbers and a process. A pickle has none of it.
    """

    def __init__(self, module: Any, key: tuple[Any, ...], experts: Experts) -> None:
        self.key = key
        self.home = Home()
        self.act_fn, self.gate = getattr(module, "act_fn", None), _gate_of(module)
        self.numbers = _numbers_of(module)
        self.experts = experts

    def __reduce__(self) -> Any:
        return _not_ready, ()


def _not_ready() -> None:
    return None


def _call(
    module: Any,
    group: Any,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    parallel: Parallel = "expert",
) -> Tensor:
    """The experts' weighted sum for each token of x [S, H]. Collective over `group`, whose ranks
    hold experts or slices of them, as `parallel` says.
    """
    own = transformers_weights.weights_of(module)
    layout = transformers_weights.layout_of(module, own)
    if layout is None or (layout.transposed and transformers_quantized.is_coded(own.w1)):
        strides = [one.stride() for one in own[:2]]
        works = "contiguous ones do: assign a contiguous copy to each parameter's data"
        raise shared.refusal(_where(module), "strides of the experts' matrices", strides, works)
    dtype = x.dtype if transformers_quantized.is_coded(own.w1) else own.w1.dtype
    forms = tuple(None if one is None else (one.shape, one.stride(), one.dtype) for one in own)
    key = (_options, ids.shape[-1], dtype, parallel, layout, own.w1.device, forms)
    if not _is_ready(module, key):
        if torch.compiler.is_exporting():
            raise shared.refusal(
                _where(module), "the first call", "exported", "a call before torch.export does"
            )
        parts = [one if one is None else one.detach() for one in own]
        detached = transformers_weights.ModuleWeights._make(parts)
        _make_ready_in_a_call_before_torch_compile(module, group, key, detached)
    ready: _Ready = getattr(module, _READY)
    experts = ready.experts
    rows, most = x.shape[:-1].numel(), experts.cfg.max_tokens
    if group is not None and parallel == "expert":  # whose ranks may have unlike numbers
        _require_room(module, rows)
    pieces = max(1, -(-rows // most))
    with _device_of(x):
        if experts.cfg.weight_format is not None:
            own = transformers_quantized.coded(own, experts.cfg.weight_format)
        turned = layout.transposed != module.is_transposed
        y = experts(x, ids, weights, *own, pieces=pieces, turned=turned)
    return y.to(x.dtype)


def _device_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the GPU of x the current one, where a model lies on several."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


@shared.untraced
def _make_ready_in_a_call_before_torch_compile(
    module: Any, group: Any, key: tuple[Any, ...], own: transformers_weights.ModuleWeights
) -> None:
    """Gives a module what its calls need. Collective over `group`. `own`: its tensors, detached."""

    def prepare() -> None:
        ready: _Ready | None = getattr(module, _READY, None)
        if ready is not None and group is not None:  # whose connections a fork has not
            ready.home.require(f"{_where(module)}: the world of rank {ready.experts.world.rank}")
        if not _is_ready(module, key):  # which another thread may have made it
            _, top_k, dtype, parallel, layout, *_ = key
            made = _made(module, group, own, layout, top_k, dtype, parallel)
            setattr(module, _READY, _Ready(module, key, made))

    shared.preparing.run(prepare)


def _is_ready(module: Any, key: tuple[Any, ...]) -> bool:
    """Whether the module has experts for such calls."""
    ready = getattr(module, _READY, None)
    if ready is None or ready.key != key:
        return False
    if ready.act_fn is not getattr(module, "act_fn", None) or ready.gate is not _gate_of(module):
        return False
    return bool(ready.numbers == _numbers_of(module) and ready.home.here)


def _gate_of(module: Any) -> Any:
    """The function by which a module applies its gate: its class's, or one that was set on it."""
    gate = getattr(module, "_apply_gate", None)
    return getattr(gate, "__func__", gate)


def _made(
    module: Any,
    group: Any,
    own: transformers_weights.ModuleWeights,
    layout: transformers_weights.WeightLayout,
    top_k: int,
    dtype: torch.dtype,
    parallel: Parallel,
) -> Experts:
    """The experts of a module's first call, of tokens in `dtype`. Collective over `group`."""
    fields = _refuse(module)
    weight_format = transformers_quantized.format_of(module, own, _where(module))
    device = own.w1.device
    if device.type not in _DTYPES:
        raise shared.refusal(
            _where(module), "the weights' device", str(device), "the CPU and a GPU of NVIDIA do"
        )
    dtypes = _DTYPES[device.type]
    if dtype not in dtypes:
        works = " and ".join(map(str, dtypes))
        whose, remedy = "weights'", "model.to(torch.bfloat16)"
        if weight_format is not None:
            whose, remedy = "tokens'", "from_pretrained(..., dtype=torch.bfloat16)"
        raise shared.refusal(
            _where(module), f"the {whose} dtype on {device}", dtype, f"there {works} do: {remedy}"
        )
    backend = "cuda" if device.type == "cuda" else "twin"
    world = shared.world_of(group, backend, _options.deadline, device)
    slices = world.size if parallel == "tensor" else 1
    inner, hidden = own.w2.shape[1:3] if module.is_transposed else own.w2.shape[2:0:-1]
    if weight_format is not None:
        codes_of_byte = 8 // FORMATS[weight_format].code_bits
        hidden, inner = own.w2.shape[1], own.w2.shape[2:].numel() * codes_of_byte
    try:
        cfg = MoEConfig(
            hidden=hidden,
            intermediate=inner * slices,
            experts=own.w1.shape[0] * (world.size // slices),
            top_k=top_k,
            dtype=dtype,
            max_tokens=_options.max_tokens,
            bias=module.has_bias,
            routing="caller",
            weight_format=weight_format,
            activation_format=_options.activation_format,
            **layout._asdict(),
            **fields,
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_where(module)}: {error}") from None
    works = "ep_size = tp_size, with ep_implementation='moeos', gives each rank whole experts"
    mine = shared.require_slices(_where(module), cfg, parallel, world.size, works)
    if weight_format is not None:
        own = transformers_quantized.coded(own, weight_format)
    if layout.transposed == module.is_transposed:  # else an error would have the shapes of views
        transformers_quantized.check(module, mine, own, _where(module))
    with _device_of(own.w1):
        return shared.experts_of(cfg, world, parallel)


def _require_room(module: Any, rows: int) -> None:
    """`ValueError` for more tokens than one call takes."""
    if rows > _options.max_tokens:
        raise shared.refusal(
            _where(module),
            "tokens of a rank in a call",
            rows,
            f"at most max_tokens do, {_options.max_tokens}: register(max_tokens={rows}) or more on "
            "all ranks",
        )


def _refuse(module: Any) -> dict[str, Any]:
    """The fields of a config that a module's code decides. `ValueError` for what has none."""
    if module.has_post_expert_norm:
        raise shared.refusal(
            _where(module), "has_post_expert_norm", True, "experts without a norm of their own do"
        )
    names = transformers_weights.names_of(module) + transformers_weights.scale_names_of(module)
    for name, weight in module.named_parameters(recurse=False):
        if name not in names:
            raise shared.refusal(
                _where(module), "a parameter", name, f"experts with {', '.join(names)} alone do"
            )
        cut = [part for part in getattr(weight, "placements", ()) if _cuts_experts(part)]
        if cut:
            raise shared.refusal(
                _where(module), f"placements of {name}", cut, "whole experts do: ep_size"
            )
    limits, alphas = _numbers_of(module)
    try:
        return formula_of.fields_of(
            lambda rows: _between(module, rows), module.has_gate, limits, alphas
        )
    except formula_of.NoFormulaError as error:
        said = [name for name in _SAID_IN if getattr(module.config, name, None) is not None]
        called = f" ({said[0]} {getattr(module.config, said[0])!r})" if said else ""
        raise ValueError(
            f"{_where(module)}: the activation{called} is none that moeos has: {error}; "
            f"{_WORKS[module.has_gate]}"
        ) from None


def _between(module: Any, rows: Tensor) -> Tensor:
    """What lies between the two matrices, for gate, then up."""
    if not module.has_gate:
        activated: Tensor = module.act_fn(rows)
        return activated
    inner = rows if module.is_concatenated else shared.interleaved(rows)
    gated: Tensor = module._apply_gate(inner)
    return gated


def _cuts_experts(placement: Any) -> bool:
    return isinstance(placement, Shard) and placement.dim != 0


def _numbers_of(module: Any) -> tuple[tuple[float, ...], ...]:
    """What a module has as its clamp, and as its slope."""
    return tuple(
        tuple(getattr(module, name) for name in names if _is_number(module, name))
        for names in (("limit", "swiglu_limit"), ("alpha", "swiglu_alpha"))
    )


def _is_number(module: Any, name: str) -> bool:
    value = getattr(module, name, None)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _where(module: Any) -> str:
    return f"{WHERE}, {type(module).__name__}"
