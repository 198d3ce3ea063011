# SPDX-License-Identifier: Apache-2.0
"""A compiled layer on the GPU is one graph, and computes and launches what the layer does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from moeos import World
from moeos.call import custom_op
from moeos.compile.jit import KERNEL
from moeos.world import virtual
from tests.gpu.cases import CASES, call_on_gpu, why_not
from tests.layers import draw_call, draw_given_call, draw_weights

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs"),
    pytest.mark.usefixtures("kernels"),
]

CFG = CASES["swiglu-1-rank"].cfg
WEIGHTS = draw_weights(CFG)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_computes_the_same_with_one_kernel_a_call(backend: str) -> None:
    given = call_on_gpu(draw_given_call(CFG, 200, 0))
    count = torch.tensor([150], dtype=torch.int32, device="cuda")

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        traced = torch.compile(layer, fullgraph=True, backend=backend)
        assert torch.equal(traced(given.x), layer(given.x))
        assert torch.equal(traced(given.x, tokens=count), layer(given.x, tokens=count))
        assert torch.equal(given(traced), given(layer))  # type: ignore[arg-type]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            traced(given.x)
        device = [event.name for event in trace.events() if event.device_type == DeviceType.CUDA]
        assert device.count(KERNEL) == 1
        if backend == "inductor":  # which needs no copies to keep the order of calls
            assert device == [KERNEL]
        layer.check()

    virtual.run(rank_main, ranks=1, backend="cuda", deadline=10.0)


def test_a_layer_between_other_modules_is_compiled_into_one_graph() -> None:
    class Block(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(CFG.hidden, dtype=CFG.dtype, device="cuda")
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = x + self.layer(self.norm(x))
            return y

    def rank_main(world: World) -> None:
        block = Block(WEIGHTS.layer(world))
        traced = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
        with torch.no_grad():
            for tokens in (200, 3, 300):
                x = call_on_gpu(draw_call(CFG, tokens, tokens)).x
                assert torch.equal(traced(x), block(x))

    virtual.run(rank_main, ranks=1, backend="cuda", deadline=10.0)


def test_the_operator_is_as_its_schema_and_its_fake_say() -> None:
    given = call_on_gpu(draw_given_call(CFG, 20, 0))

    def rank_main(world: World) -> None:
        layer = WEIGHTS.layer(world)
        parameters = (layer.w1, layer.b1, layer.w2, layer.b2, None, layer.gate.weight, None)
        arguments = (layer._order, layer.experts.key, given.x, given.ids, given.weights, None)
        schema = torch.ops.moeos.forward.default._schema
        positional = sum(not argument.kwarg_only for argument in schema.arguments)
        others = (None,) * (positional - len(arguments) - len(parameters))
        given_all = (*arguments, *parameters, *others)
        torch.library.opcheck(custom_op.forward, given_all, {"pairs": CFG.top_k})

    virtual.run(rank_main, ranks=1, backend="cuda", deadline=10.0)
