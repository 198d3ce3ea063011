# SPDX-License-Identifier: Apache-2.0
"""No call imports anything: on a full machine an import takes longer than peers wait."""

from __future__ import annotations

from tests import programs

WATCHED = """
import sys
import torch
from torch.overrides import BaseTorchFunctionMode
import moeos
from tests.layers import config

torch.set_num_threads(1)
SHARED = {"shared_experts": 1, "shared_intermediate": 64}
LAYERS = {
    "plain": (config(), {}),
    "of all parts": (config(bias=True, selection_bias=True, **SHARED), {}),
    "of zero experts": (config(zero_experts=2), {}),
    "of tokens that are split": (config(), {"parallel": "sharded_tokens"}),
    "of slices": (config(), {"parallel": "tensor"}),
}
found = {}

class Watch:
    name = None
    def find_spec(self, name, path=None, target=None):
        if self.name is not None:
            found.setdefault(self.name, []).append(name)

watch = Watch()
sys.meta_path.insert(0, watch)

def rank_main(world):
    for name, (cfg, how) in LAYERS.items():
        layer = moeos.MoELayer(cfg, world, **how).requires_grad_(False)
        x = torch.randn(4, cfg.hidden, generator=torch.Generator().manual_seed(0))
        given = torch.tensor([[0, 1]] * 4, dtype=torch.int32), torch.ones(4, cfg.top_k)
        world.control.barrier("the layers are made")
        watch.name = f"first call {name}"
        layer(x)
        layer(x, *given)
        layer(x, out=torch.empty_like(x))
        with torch.inference_mode():
            layer(x)
        layer.check_inputs(x)
        if name == "plain":
            with BaseTorchFunctionMode():
                watch.name = "a call as an operator"
                layer(x)
        watch.name = f"first training forward {name}"
        y = layer(x.requires_grad_())
        watch.name = f"first backward {name}"
        y.sum().backward()
        layer.requires_grad_()
        watch.name = f"first training forward of weights {name}"
        y = layer(x)
        watch.name = f"first backward of weights {name}"
        y.sum().backward()
        watch.name = f"norms and resets {name}"
        layer.reset()
        watch.name = None
        world.control.barrier("these calls are made")

moeos.virtual.run(rank_main, ranks=2, deadline=60)
assert not found, found
# moeos adds nothing to the import system of the program.
assert not [one for one in sys.meta_path if type(one).__module__.startswith("moeos")]
"""


def test_no_call_of_a_process_imports_anything() -> None:
    ended = programs.ended(WATCHED)
    assert ended.returncode == 0, ended.stderr[-2000:]
