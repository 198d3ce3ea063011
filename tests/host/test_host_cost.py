# SPDX-License-Identifier: Apache-2.0
"""What an eager call on a GPU makes its host do, with an engine whose driver is a stand-in."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

import moeos
from moeos import World
from moeos.config.config import MoEConfig
from moeos.engines import calls
from moeos.engines.base import CallTensors
from moeos.engines.cuda import driver as cuda_driver
from moeos.engines.cuda.engine import CudaEngine
from moeos.engines.cuda.records import HostFailure
from moeos.engines.cuda.workspace import CudaWorkspace
from moeos.layer import experts, layer
from moeos.partition.placement import Placement
from moeos.partition.slicing import Slicing
from moeos.world import virtual
from moeos.world.faults import LayerFaults
from moeos.world.world import SharedMemory
from tests.host.engines.cuda import test_arguments as test_cuda_arguments
from tests.layers import config

STREAM = 7
TOKENS = 8
LAYERS = 48
"""The layers of a model, which share one `Experts`."""
CFG = config(dtype=torch.bfloat16, hidden=256, intermediate=128, max_tokens=TOKENS)
MOST_FUNCTIONS = 42
"""Of Python that a call may enter, in any of its ways."""


class StandInFailure(HostFailure):
    """The host's memory without CUDA, which pins it."""

    def __init__(self) -> None:
        self._words = torch.zeros(16, dtype=torch.int32).numpy()
        self._looked_at = memoryview(self._words)
        self._order = threading.Lock()


class StandInEngine(CudaEngine):
    """The engine of a layer, made without a device. Attributes: `launches`, streams."""

    def __init__(
        self,
        cfg: MoEConfig,
        world: World,
        shared: SharedMemory,
        placement: Placement | None,
        slicing: Slicing,
    ) -> None:
        assert placement is None
        self._adds_bias = not slicing.cuts
        self._sums, self._left = slicing.sums, False
        self.launches: list[int] = []
        self._world = world
        self._shared = cast(Any, SimpleNamespace(closed=False, failure=StandInFailure(), begun=0))
        self._number = world.number_layer()
        self._identity = calls.identity(self._number)
        self._virtual = False
        self._device = torch.device("cpu", 0)
        self._faults = LayerFaults(world.faults, 0, 0, 4, pinned=False)
        self._launches = cast(Any, SimpleNamespace(stream=STREAM))
        self._shape = cast(Any, SimpleNamespace(cfg=cfg))
        self._holdings = cast(
            Any,
            SimpleNamespace(
                gate=world.gate,
                arguments=test_cuda_arguments.packer_of(cfg),
                launch=None,
                saving=None,
                kernel=SimpleNamespace(launch=lambda stream, launch: self.launches.append(stream)),
            ),
        )


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of the tensor maps that were made, in order."""
    addresses: list[int] = []

    class Driver(test_cuda_arguments.Driver):
        def cuTensorMapEncodeTiled(
            self, kind: Any, dimensions: int, address: int, *rest: Any
        ) -> tuple[int, SimpleNamespace]:
            addresses.append(address)
            return cast(
                "tuple[int, SimpleNamespace]",
                super().cuTensorMapEncodeTiled(kind, dimensions, address, *rest),
            )

    monkeypatch.setattr(cuda_driver, "load", Driver)
    for name, answer in (
        ("_cuda_getDevice", 0),
        ("_cuda_getCurrentRawStream", STREAM),
        ("_cuda_isCurrentStreamCapturing", False),
    ):
        monkeypatch.setattr(torch._C, name, lambda *_, answer=answer: answer, raising=False)
    monkeypatch.setattr(experts, "engine_class", lambda world: StandInEngine)
    return addresses


def ways(world: World, cfg: MoEConfig) -> dict[str, Callable[[int], object]]:
    """The ways to make a call, given its number."""
    layer = moeos.MoELayer(cfg, world)
    experts = moeos.Experts(cfg, world)
    device = layer.w1.device
    x = torch.randn(TOKENS, cfg.hidden, dtype=cfg.dtype, device=device)
    ids = torch.rand(TOKENS, cfg.experts, device=device).topk(cfg.top_k).indices
    narrow = ids.int()
    weights = torch.rand(TOKENS, cfg.top_k, device=device)
    tokens = torch.tensor([TOKENS - 1], dtype=torch.int32, device=device)
    w1, w2 = layer.w1, layer.w2
    others = list(zip(_places(w1), _places(w2), strict=True))
    out, batch = torch.empty_like(x), x.view(2, -1, cfg.hidden)
    engine = experts.engine
    packed = CallTensors(
        x=x,
        out=torch.empty_like(x),
        gate=layer.gate.weight,
        selection_bias=None,
        topk_ids=None,
        topk_weights=None,
        w1=w1,
        b1=None,
        w2=w2,
        b2=None,
    )
    return {
        "layer": lambda n: layer(x),
        "layer, ids of 64 bits": lambda n: layer(x, ids, weights),
        "layer, ids of 32 bits": lambda n: layer(x, narrow, weights),
        "layer, tokens": lambda n: layer(x, tokens=tokens),
        "layer, out": lambda n: layer(x, out=out),
        "layer, a batch of sequences": lambda n: layer(batch),
        "experts": lambda n: experts(x, narrow, weights, w1, w2),
        f"experts of {LAYERS} layers": lambda n: experts(x, narrow, weights, *others[n % LAYERS]),
        "engine": lambda n: engine.forward(packed),
    }


def _places(weight: torch.Tensor) -> list[torch.Tensor]:
    """Weights like this one of many layers, each at an address of its own. They overlap."""
    row = weight.shape[-1]
    room = torch.zeros(weight.numel() + LAYERS * row, dtype=weight.dtype, device=weight.device)
    return [room[n * row :][: weight.numel()].view(weight.shape) for n in range(LAYERS)]


def entered(call: Callable[[], object]) -> list[str]:
    """The functions of Python that a call enters, in order."""
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def test_a_call_enters_few_functions_and_makes_nothing_that_the_one_before_has_made(
    encoded: list[int],
) -> None:
    def rank_main(world: World) -> None:
        for what, call in ways(world, CFG).items():
            with torch.no_grad():
                for number in range(LAYERS):
                    call(number)
                del encoded[:]
                names = entered(lambda call=call: call(3))
            assert len(names) <= MOST_FUNCTIONS, (what, " ".join(names))
            assert encoded == []

    virtual.run(rank_main, ranks=1)


def test_each_call_is_one_launch_and_each_piece_of_it_one(encoded: list[int]) -> None:
    def rank_main(world: World) -> None:
        made = layer.MoELayer(CFG, world).requires_grad_(False)
        assert made.experts is not None
        engine = made.experts.engine
        assert isinstance(engine, StandInEngine)
        x = torch.zeros(TOKENS, CFG.hidden, dtype=CFG.dtype)
        made(x)
        made(torch.cat([x, x]), pieces=3)
        made(x.view(2, 4, -1), out=torch.empty(2, 4, CFG.hidden, dtype=CFG.dtype))
        assert engine.launches == [STREAM] * 5

    virtual.run(rank_main, ranks=1)
    assert encoded


@pytest.mark.parametrize("given", [False, True], ids=["a new tensor", "out"])
def test_a_call_whose_workspace_is_closed_launches_nothing(encoded: list[int], given: bool) -> None:
    def rank_main(world: World) -> None:
        made = layer.MoELayer(CFG, world).requires_grad_(False)
        assert made.experts is not None
        engine = made.experts.engine
        assert isinstance(engine, StandInEngine)
        engine._shared = CudaWorkspace(world, 0)
        engine._shared.close()
        x = torch.zeros(TOKENS, CFG.hidden, dtype=CFG.dtype)
        with pytest.raises(RuntimeError, match="the workspace of this layer is closed"):
            made(x, out=torch.empty_like(x) if given else None)
        assert engine.launches == []

    virtual.run(rank_main, ranks=1)
