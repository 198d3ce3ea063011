# SPDX-License-Identifier: Apache-2.0
"""Worlds on GPUs from process groups: `torchrun --nproc-per-node 2 -m tests.gpu.groups`.

With 4 GPUs they are two worlds of two as well, by rows and by columns. Every rank draws the weights
of all experts and compares its outputs with the float64 reference. `test_groups.py` starts it where
there are several GPUs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moeos
from moeos import World
from moeos.engines.cuda.peers import Peers
from moeos.system.errors import PeerTimeout
from tests.gpu.cases import (
    DEADLINE,
    RankLayer,
    assert_matches,
    draw_routed_call,
    draw_weights_on_gpu,
)
from tests.layers import config

CFG = config(
    dtype=torch.bfloat16, hidden=512, intermediate=384, experts=16, top_k=4, max_tokens=300
)


def main() -> None:
    """Runs every check in turn; all ranks run the same ones."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    checks: list[Callable[[int, int], None]] = [
        check_kinds_of_groups,
        check_a_device_of_another_thread,
        check_memory_is_given_back,
        check_worlds_at_once,
        check_one_world_with_remote_peers,
    ]
    if size >= 4:
        checks.append(check_two_worlds_of_two)
    for check in [*checks, check_a_killed_rank]:
        began = time.monotonic()
        if rank == 0:
            print(f"{check.__name__}:", flush=True)
        check(rank, size)
        if check is not check_a_killed_rank:
            dist.barrier()
        if rank == 0:
            print(f"  right ({time.monotonic() - began:.1f} s)", flush=True)
    sys.stdout.flush()
    os._exit(0)  # NCCL would wait for the rank that was killed


def use(world: World, seed: int = 0, calls: int = 5) -> None:
    """A layer of a world computes what it should, and the same again and again."""
    torch.manual_seed(seed)
    weights = draw_weights_on_gpu(CFG)
    layer = RankLayer(weights, world)
    call = draw_routed_call(weights, 200 - 7 * world.rank, seed + world.rank)
    first = layer(call)
    assert_matches(weights, call, first, f"rank {world.rank} of {world.size}, seed {seed}")
    assert all(torch.equal(layer(call), first) for _ in range(calls))
    layer.engine.check()


def check_kinds_of_groups(rank: int, size: int) -> None:
    """NCCL's group, gloo's, a turned subgroup, a mesh's dimension, and a store."""
    groups = [
        dist.group.WORLD,
        dist.new_group(list(range(size)), backend="gloo"),
        dist.new_group(list(range(size)), backend="nccl"),
        init_device_mesh("cuda", (size,), mesh_dim_names=("ep",))["ep"],
    ]
    for seed, group in enumerate(groups):
        with moeos.init("cuda", group=group, deadline=DEADLINE) as world:
            assert (world.size, world.backend) == (size, "cuda")
            use(world, seed)
            assert not Peers.find(world, torch.device("cuda", rank)).by_nvshmem
    store = dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())
    with moeos.init("cuda", rank=size - 1 - rank, size=size, store=store) as world:
        use(world, 9)


def check_a_device_of_another_thread(rank: int, size: int) -> None:
    """A world's device is the one that is given, whichever is current later."""
    device = torch.device("cuda", (rank + 1) % size)
    with (
        torch.cuda.device(device),
        moeos.init("cuda", group=dist.group.WORLD, deadline=DEADLINE) as world,
    ):
        assert world.device == torch.device("cuda", rank)  # that the group is bound to
    with moeos.init("cuda", group=dist.group.WORLD, device=device, deadline=DEADLINE) as world:
        assert world.device == device
        with torch.cuda.device(device):
            use(world)
        layer = moeos.MoELayer(CFG, world)  # another device is the current one
        assert layer.w1.device == layer.gate.weight.device == device
        x = torch.randn(50, CFG.hidden, dtype=CFG.dtype, device=device)
        y = layer(x)
        with torch.cuda.device(device):
            assert torch.equal(layer(x), y)
        layer.check()
        assert y.device == device
        assert y.isfinite().all()


def check_memory_is_given_back(rank: int, size: int) -> None:
    """World after world, to 64 MiB of what was free before."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    for seed in range(4):
        with moeos.init("cuda", group=dist.group.WORLD, deadline=DEADLINE) as world:
            use(world, seed)
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    lost = free - torch.cuda.mem_get_info()[0]
    print(f"  rank {rank}: {lost} bytes lost by 4 worlds", flush=True)
    assert lost < 1 << 26, f"rank {rank} lost {lost} bytes"


def check_worlds_at_once(rank: int, size: int) -> None:
    """Two worlds of the same GPUs, used in turn, and closed in another order on each rank."""
    worlds = [moeos.init("cuda", group=dist.group.WORLD, deadline=DEADLINE) for _ in range(2)]
    for seed in range(3):
        for world in worlds:
            use(world, seed)
    for world in worlds if rank % 2 else worlds[::-1]:
        world.close()


def check_one_world_with_remote_peers(rank: int, size: int) -> None:
    """The second one is refused by name; beside it, one of direct peers works."""

    def remote() -> World:
        return moeos.init("cuda", group=dist.group.WORLD, deadline=DEADLINE, ranks_per_node=1)

    with remote() as first:
        use(first, 1)
        with remote() as second, pytest.raises(RuntimeError, match="of an open world already"):
            RankLayer(draw_weights_on_gpu(CFG), second)
        with moeos.init("cuda", group=dist.group.WORLD, deadline=DEADLINE) as direct:
            use(direct, 2)
        use(first, 3)
    dist.barrier()
    with remote() as again:
        use(again, 4)


def check_two_worlds_of_two(rank: int, size: int) -> None:
    """Rows and columns of 2 x 2; then one world fails while the other works on."""
    ranks = [0, 1, 2, 3]
    mesh = init_device_mesh("cuda", (size // 2, 2), mesh_dim_names=("dp", "ep"))
    pairs = [dist.new_group(ranks[:2]), dist.new_group(ranks[2:])]
    columns = moeos.init("cuda", group=mesh["dp"], deadline=DEADLINE)
    if rank in ranks:
        world = moeos.init("cuda", group=pairs[rank // 2], deadline=DEADLINE)
        use(world, 1)
        use(columns, 2)
        weights = draw_weights_on_gpu(CFG)
        layer = RankLayer(weights, world)
        call = draw_routed_call(weights, 100, 5)
        if rank < 2:
            if rank == 1:
                call.x[3, 4] = torch.nan
            layer(call)
            with pytest.raises(moeos.NumericalError, match="token 3 on rank 1"):
                layer.engine.check()
        else:
            for seed in range(5):
                use(world, seed)
        world.close()
    use(columns, 3)
    columns.close()


def check_a_killed_rank(rank: int, size: int) -> None:
    """The last rank leaves without a word, with its memory mapped by the others."""
    world = moeos.init("cuda", group=dist.group.WORLD, deadline=3.0)
    weights = draw_weights_on_gpu(CFG)
    layer = RankLayer(weights, world)
    call = draw_routed_call(weights, 100, rank)
    layer(call)
    layer.engine.check()
    world.control.barrier()
    if rank == size - 1:
        os._exit(0)
    layer(call)
    with pytest.raises(PeerTimeout, match=f"rank {size - 1}"):
        layer.engine.check()
    world.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
