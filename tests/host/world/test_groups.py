# SPDX-License-Identifier: Apache-2.0
"""A world from a process group, a mesh's dimension or a store; several worlds in one process."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moeos
from moeos.system.errors import ConfigMismatch, PeerTimeout
from moeos.world import process_groups
from moeos.world.control import StoreControl
from tests.host.world.test_heap import at
from tests.nightly import all_but
from tests.processes import ForkedRanks, free_port, shared_memory, torchrun_environment

Store = Any


def in_processes(function: Callable[[int], Any], size: int, seconds: float = 90.0) -> list[Any]:
    """`function(rank)` in forked processes with a gloo group of all of them."""
    port = free_port()

    def live(rank: int) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        try:
            return function(rank)
        finally:
            leave_last(dist.group.WORLD.get_group_store(), rank, size)

    return ForkedRanks(live, size).ended(seconds)


def leave_last(store: Store, rank: int, size: int) -> None:
    """Rank 0, which holds the store, leaves behind the others."""
    store.set(f"through/{rank}", "")
    while rank == 0 and not store.check([f"through/{peer}" for peer in range(size)]):
        time.sleep(0.01)


def test_ranks_of_a_group_may_wait_and_note_differently() -> None:
    def live(rank: int) -> Any:
        group = dist.group.WORLD
        with moeos.init("twin", group=group, deadline=20.0 + rank, trace_events=rank) as world:
            return layer_matches(world, 1)

    assert in_processes(live, 2) == [True, True]


NOT_OF_A_LAUNCHER = [
    {},
    {"WORLD_SIZE": "2"},  # as programs set it for themselves
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # of a batch script, which is a world of one
    {"PMIX_RANK": "7"},  # of how many no variable tells
]


@pytest.mark.parametrize("variables", NOT_OF_A_LAUNCHER, ids=str)
def test_without_a_launcher_the_default_group_of_torch_tells_the_ranks(
    variables: dict[str, str],
) -> None:
    def live(rank: int) -> Any:
        os.environ.update(variables)
        with moeos.init("twin", deadline=20.0) as world:
            assert world.group is not None
            return world.rank, world.size, world.group.ranks, layer_matches(world, 1)

    assert in_processes(live, 2) == [(rank, 2, (0, 1), True) for rank in range(2)]


def test_a_world_of_one_is_asked_for_by_a_store_where_torch_has_a_default_group() -> None:
    def live(rank: int) -> Any:
        with moeos.init("twin", rank=0, size=1, store=dist.HashStore()) as world:
            return world.rank, world.size

    assert in_processes(live, 2) == [(0, 1)] * 2


def of_mpirun(rank: int, size: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        # One process of a launcher that has started the others itself, and hands its variables on.
        (lambda rank: of_mpirun(0, 1), "mpirun it is rank 0 of 1"),
        (lambda rank: torchrun_environment(0, 1, 1), "torchrun it is rank 0 of 1"),
        (
            lambda rank: {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            "srun it is rank 0 of 1",
        ),
        # A part of what a launcher has started.
        (lambda rank: of_mpirun(rank + 2, 4), "mpirun it is rank {rank_and_2} of 4"),
        # The ranks in another order.
        (lambda rank: torchrun_environment(1 - rank, 2, 1), "torchrun it is rank {other} of 2"),
    ],
    ids=["mpirun", "torchrun", "srun", "a part", "order"],
)
def test_a_launcher_that_contradicts_torchs_default_group_is_named_with_the_remedy(
    variables: Callable[[int], dict[str, str]], said: str
) -> None:
    def live(rank: int) -> Any:
        os.environ.update(variables(rank))
        with pytest.raises(ValueError, match="pass the group whose ranks are meant") as raised:
            moeos.init("twin")
        with moeos.init("twin", group=dist.group.WORLD, deadline=20.0) as world:  # the remedy
            return str(raised.value), world.rank, world.control.allgather(rank)

    for rank, (message, place, every) in enumerate(in_processes(live, 2)):
        wanted = said.format(rank_and_2=rank + 2, other=1 - rank)
        assert message == (
            f"torch.distributed has rank {rank} of 2 in this process, but by the variables of "
            f"{wanted}: pass the group whose ranks are meant, such as "
            "moeos.init(group=torch.distributed.group.WORLD)"
        )
        assert (place, every) == (rank, [0, 1])


def test_a_launcher_that_agrees_with_torchs_default_group_tells_the_ranks() -> None:
    port = free_port()

    def live(rank: int) -> Any:
        os.environ.update(torchrun_environment(rank, 2, port))
        with moeos.init("twin", deadline=20.0) as world:
            return world.rank, world.size, layer_matches(world, 1)

    assert in_processes(live, 2) == [(rank, 2, True) for rank in range(2)]


def raised_by(outcomes: list[Any], kind: type[Exception]) -> str:
    """The one message that all outcomes are errors with."""
    assert [type(one) for one in outcomes] == [kind] * len(outcomes), outcomes
    assert len({str(one) for one in outcomes}) == 1, outcomes
    return str(outcomes[0])


def exchanged(world: moeos.World, mark: int = 0) -> list[int]:
    """What all ranks of a world have written into their heaps, as this one reads it."""
    heap = world.allocate_heap(4096)
    at(heap.addresses[world.rank], 0).value = 10 * mark + world.rank + 1
    world.control.barrier()
    return [at(address, 0).value for address in heap.addresses]


def test_a_group_tells_the_ranks_of_a_world_and_their_order() -> None:
    def live(rank: int) -> Any:
        reversed_pair = dist.new_group([2, 1])
        with moeos.init("twin", group=dist.group.WORLD) as all_ranks:
            seen = [(all_ranks.rank, all_ranks.size, exchanged(all_ranks))]
            if rank in (1, 2):
                with moeos.init("twin", group=reversed_pair, deadline=20.0) as pair:
                    seen.append((pair.rank, pair.size, pair.control.allgather(rank)))
        return seen, dist.get_rank(reversed_pair) if rank in (1, 2) else None

    for rank, (seen, place) in enumerate(in_processes(live, 3)):
        assert seen[0] == (rank, 3, [1, 2, 3])
        if rank > 0:
            order = [1, 2] if place == rank - 1 else [2, 1]
            assert seen[1] == (place, 2, order)


def test_a_dimension_of_a_mesh_is_a_world_and_a_whole_mesh_is_refused_by_its_names() -> None:
    def live(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        with pytest.raises(ValueError, match="group is a DeviceMesh") as raised:
            moeos.init("twin", group=mesh)
        with moeos.init("twin", group=mesh["ep"]) as world:
            return str(raised.value), world.control.allgather(rank)

    outcomes = in_processes(live, 4)
    assert {message for message, _ in outcomes} == {
        "group is a DeviceMesh of 2 dimensions ('dp', 'ep') and shape (2, 2): pass one of them, "
        "such as mesh['ep']"
    }
    assert [ranks for _, ranks in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_process_that_is_no_member_of_a_group_is_told_so() -> None:
    def live(rank: int) -> Any:
        alone = dist.new_group([0])
        with moeos.init("twin", group=alone) as world:
            return world.size

    member, other = in_processes(live, 2)
    assert member == 1
    assert isinstance(other, ValueError)
    assert str(other) == (
        "group is GroupMember.NON_GROUP_MEMBER: this process, rank 1 of 2, is no member of it; "
        "make the call only where the group's ranks are"
    )


def test_a_group_whose_store_torch_does_not_show_broadcasts_the_address_of_one() -> None:
    def live(rank: int) -> Any:
        process_groups._store_of = lambda group: None
        group = dist.new_group([2, 0, 1])
        with moeos.init("twin", group=group) as first, moeos.init("twin", group=group) as second:
            return exchanged(first), exchanged(second, 1)

    assert in_processes(live, 3) == [([1, 2, 3], [11, 12, 13])] * 3


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            lambda rank: {"backend": "cude" if rank == 1 else "twin"},
            ValueError,
            "rank 1: backend is 'cude'; allowed: 'auto', 'twin', 'cuda'; did you mean 'cuda'?",
        ),
        (
            lambda rank: {"backend": "twin", "ranks_per_node": None if rank else 1},
            ConfigMismatch,
            "ranks_per_node must be the same on all ranks, but they differ: rank 0: 1; "
            "ranks 1, 2: None",
        ),
        (
            lambda rank: {"backend": "twin", "trace_events": -1 if rank == 2 else 0},
            ValueError,
            "rank 2: trace_events is -1; allowed: 0 to 65536",
        ),
        (
            lambda rank: {"backend": "twin", "device": "cuda:0"},
            ValueError,
            "device is 'cuda:0', but backend=\"twin\" computes on the CPU: leave device out, or "
            'use backend="cuda"',
        ),
    ],
    ids=["backend", "ranks_per_node", "trace_events", "device"],
)
def test_ranks_of_a_group_that_disagree_all_hear_of_the_argument_and_its_values(
    arguments: Callable[[int], dict[str, Any]], kind: type[Exception], message: str
) -> None:
    def live(rank: int) -> None:
        moeos.init(group=dist.group.WORLD, **arguments(rank))

    assert raised_by(in_processes(live, 3), kind) == message


def test_ranks_that_pass_different_groups_name_who_did_not_come() -> None:
    def live(rank: int) -> None:
        pair = dist.new_group([0, 1])
        moeos.init("twin", group=pair if rank == 0 else dist.group.WORLD, deadline=2.0)

    outcomes = in_processes(live, 3)
    assert [type(one) for one in outcomes] == [PeerTimeout] * 3
    assert "rank 0 of 2 waited 2 s for the start of a world: rank 1 did not" in str(outcomes[0])
    for error in outcomes[1:]:  # the first to wait so long tells the other
        assert "of 3 waited 2 s for the start of a world: rank 0 did not arrive" in str(error)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"group": 3}, TypeError, "group is 3; it must be a process group of torch.distributed"),
        ({"rank": 0}, ValueError, "size is None; rank, size and store are given together"),
        (
            {"rank": 0, "size": 2, "store": "tcp"},
            TypeError,
            "store is 'tcp'; it must be a store of torch.distributed, such as a TCPStore",
        ),
        (
            {"rank": 2, "size": 2, "store": dist.HashStore()},
            ValueError,
            "rank is 2; allowed with size 2: 0 to 1",
        ),
        (
            {"rank": 0, "size": 0, "store": dist.HashStore()},
            ValueError,
            "size is 0; allowed: 1 to 1048576",
        ),
        (
            {"rank": "0", "size": 1, "store": dist.HashStore()},
            TypeError,
            "rank is '0'; it must be an integer",
        ),
        ({"device": "gpu"}, ValueError, "device is 'gpu', which PyTorch does not know"),
    ],
)
def test_what_is_no_place_in_a_world_is_refused_with_its_name_and_value(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        moeos.init("twin", **arguments)


def stores(kind: str, folder: Path, port: int) -> Callable[[int, int], Store]:
    """What makes a rank's store."""

    def tcp(rank: int, size: int) -> Store:
        return dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)

    def file(rank: int, size: int) -> Store:
        return dist.FileStore(str(folder / "store"), size)

    def prefix(rank: int, size: int) -> Store:
        return dist.PrefixStore("mine", dist.PrefixStore("of all", tcp(rank, size)))

    return {"tcp": tcp, "file": file, "prefix": prefix}[kind]


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix"])
def test_ranks_meet_in_any_store_again_and_again(kind: str, tmp_path: Path) -> None:
    make = stores(kind, tmp_path, free_port())

    def live(rank: int) -> Any:
        store = make(rank, 3)
        seen = []
        for mark in range(3):
            with moeos.init("twin", rank=rank, size=3, store=store) as world:
                seen.append(exchanged(world, mark))
        with (
            moeos.init("twin", rank=rank, size=3, store=store) as one,
            moeos.init("twin", rank=rank, size=3, store=store) as two,
        ):
            seen.append(exchanged(one, 3))
            seen.append(exchanged(two, 4))
        leave_last(store, rank, 3)
        return seen

    expected = [[10 * mark + 1, 10 * mark + 2, 10 * mark + 3] for mark in range(5)]
    assert ForkedRanks(live, 3).ended(90) == [expected] * 3


def test_threads_with_a_store_of_their_process_are_ranks_as_well() -> None:
    import threading

    store, seen = dist.HashStore(), {}

    def live(rank: int) -> None:
        with moeos.init("twin", rank=rank, size=2, store=store) as world:
            seen[rank] = exchanged(world)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {0: [1, 2], 1: [1, 2]}


def test_a_world_leaves_two_numbers_in_a_store_and_nothing_else() -> None:
    import threading

    store = dist.HashStore()

    def live(rank: int) -> None:
        for _ in range(2):
            with moeos.init("twin", rank=rank, size=2, store=store) as world:
                exchanged(world)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.num_keys() == 2
    assert [store.add(f"moeos/worlds/{rank}", 0) for rank in range(2)] == [2, 2]


def test_ranks_that_disagree_on_the_size_of_a_world_hear_it_alike() -> None:
    port = free_port()

    def live(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
        try:
            moeos.init("twin", rank=rank, size=3 if rank else 2, store=store, deadline=20.0)
        finally:
            store.add("heard", 1)
            while rank == 0 and store.add("heard", 0) < 3:  # the others read this rank's store
                time.sleep(0.01)

    message = raised_by(ForkedRanks(live, 3).ended(60), ConfigMismatch)
    assert (
        message == "size must be the same on all ranks, but they differ: rank 0: 2; ranks 1, 2: 3"
    )


def test_a_store_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    """A frozen process holds it, which the kernel goes on to take bytes for."""
    port = free_port()

    def live(rank: int) -> Any:
        store = dist.TCPStore(
            "127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False
        )
        if rank == 0:
            store.get("end")
            return None
        store.set("met", "")
        os.kill(parents[0], signal.SIGSTOP)
        moeos.init("twin", rank=rank, size=2, store=store, deadline=1.0)
        return None

    parents: list[int] = []
    server = ForkedRanks(live, 1)
    pid = server.processes[0].pid
    assert pid is not None
    parents.append(pid)
    client = ForkedRanks(lambda rank: live(1), 1)
    try:
        (error,) = client.ended(60)
    finally:
        server.signal(0, signal.SIGKILL)
        server.ended(30)
    assert isinstance(error, PeerTimeout)
    assert str(error).startswith(
        "rank 1 of 2 had no answer for 1 s from the store that is given, TCPStore"
    )


def test_a_store_that_fails_is_an_error_with_its_words() -> None:
    class Broken(dist.Store):  # type: ignore[misc]
        def add(self, key: str, number: int) -> int:
            raise KeyError("the disk is gone")

    with pytest.raises(PeerTimeout, match="rank 0 of 2 lost the store that is given, Broken"):
        moeos.init("twin", rank=0, size=2, store=Broken())


def test_a_store_that_goes_while_a_world_is_closed_is_asked_once_more_and_not_for_each_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyTorch prints where each of its failures comes from, in thirty lines."""
    asked: list[str] = []

    def gone(key: str) -> bool:
        asked.append(key)
        raise dist.DistNetworkError("Broken pipe")

    control = StoreControl(0, 1, 10.0, dist.HashStore(), where="a store")
    store = SimpleNamespace(add=lambda key, number: 1, delete_key=gone)
    monkeypatch.setattr(control, "_store", store)
    control.close()
    assert len(asked) == 1


CFG = moeos.MoEConfig(
    hidden=32, intermediate=64, experts=8, top_k=2, max_tokens=64, dtype=torch.float32
)


def layer_matches(world: moeos.World, seed: int) -> bool:
    """Whether a layer over a world computes what one rank alone does."""
    torch.manual_seed(seed)
    with moeos.init("twin", rank=0, size=1, store=dist.HashStore()) as alone:
        whole = moeos.MoELayer(CFG, alone)
        weights = {name: torch.randn_like(value) for name, value in whole.state_dict().items()}
        whole.load_state_dict(weights)
        x = torch.randn(world.size, 20, CFG.hidden)
        expected = whole(x[world.rank])
    layer = moeos.MoELayer(CFG, world)
    mine = CFG.experts // world.size
    own = slice(world.rank * mine, (world.rank + 1) * mine)
    layer.load_state_dict(
        {name: value if name.startswith("gate.") else value[own] for name, value in weights.items()}
    )
    return all(torch.allclose(layer(x[world.rank]), expected, atol=1e-5) for _ in range(5))


@pytest.mark.parametrize("first_closed", ["rows", "columns"])
def test_four_processes_are_two_worlds_of_two_by_rows_and_by_columns_at_once(
    first_closed: str,
) -> None:
    """Every process is in two worlds, which are used in turn and closed in any order."""
    before = shared_memory()

    def live(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        worlds = {name: moeos.init("twin", group=mesh[name]) for name in ("rows", "columns")}
        right = [layer_matches(world, seed) for seed, world in enumerate(worlds.values())]
        worlds.pop(first_closed).close()
        (other,) = worlds.values()
        right.append(layer_matches(other, 7))
        other.close()
        return right, sorted(open_memory()), dist.get_world_size()

    assert in_processes(live, 4) == [([True] * 3, [], 4)] * 4
    assert shared_memory() <= before


def open_memory() -> list[str]:
    return re.findall(r"memfd:moeos\S*", Path("/proc/self/maps").read_text())


def test_one_world_fails_while_the_other_of_the_same_job_goes_on() -> None:
    def live(rank: int) -> Any:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        done = dist.new_group([0, 1, 2, 3])
        world = moeos.init("twin", group=pairs[rank // 2], deadline=20.0)
        layer = moeos.MoELayer(CFG, world)
        x = torch.randn(10, CFG.hidden)
        y = layer(x)
        said = ""
        if rank < 2:
            if rank == 1:
                x[3, 4] = torch.nan
            with pytest.raises(moeos.NumericalError) as raised:
                layer(x)
            said = str(raised.value)
        dist.barrier(done)  # from here on the first pair has failed
        if rank >= 2:
            assert all(torch.equal(layer(x), y) for _ in range(20))
            assert layer_matches(world, 3)
        world.close()
        return said

    first, second, *others = in_processes(live, 4)
    assert "token 3 on rank 1" in first
    assert first == second
    assert others == ["", ""]


def test_late_ranks_of_a_subgroup_are_named_by_their_numbers_in_the_job_too() -> None:
    def live(rank: int) -> list[str]:
        pair, done = dist.new_group([1, 2]), dist.new_group([0, 1, 2])
        said = []
        if rank > 0:
            world = moeos.init("twin", group=pair, deadline=2.0)
            layer = moeos.MoELayer(CFG, world).requires_grad_(False)
            x = torch.randn(3, CFG.hidden)
        if rank == 1:
            for wait in (lambda: layer(x), lambda: world.control.barrier("a test")):
                with pytest.raises(PeerTimeout) as raised:
                    wait()
                said.append(str(raised.value))
        dist.barrier(done)
        return said

    _, (call, barrier), _ = in_processes(live, 3)
    names = "; rank 0 of the world is rank 1 of the job, rank 1 of the world is rank 2"
    assert call.startswith("rank 0 waited")
    assert call.endswith("then all ranks may call reset()" + names)
    assert barrier.startswith("rank 0 of 2 waited 2 s for a test: rank 1 did not arrive")
    assert f"{names}. Ranks of this world" in barrier


def end_by(how: str, world: moeos.World) -> None:
    if how == "exception":
        raise KeyError("this rank's")
    number = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
    if how in number:
        os.kill(os.getpid(), number[how])
        time.sleep(60)
    os._exit(3)


@pytest.mark.parametrize(
    "how",
    all_but(
        ["exception", "SIGTERM", "SIGKILL"], ["exception", "SIGINT", "SIGTERM", "SIGKILL", "exit"]
    ),
)
def test_however_a_rank_of_one_world_ends_the_other_goes_on_and_nothing_is_left(how: str) -> None:
    before = shared_memory()
    pids: list[int] = []

    def live(rank: int) -> Any:
        worlds = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        world = moeos.init("twin", group=worlds[rank // 2], deadline=4.0)
        layer = moeos.MoELayer(CFG, world)
        x = torch.randn(10, CFG.hidden)
        y = layer(x)
        world.control.barrier()  # behind it no peer is in that call any more
        if rank == 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with world:
                end_by(how, world)
        if rank == 0:
            with pytest.raises(PeerTimeout):
                layer(x)
            world.close()
            return "lost its peer"
        for _ in range(20):
            assert torch.equal(layer(x), y)
            time.sleep(0.01)
        world.close()
        return "went on"

    port = free_port()

    def start(rank: int) -> Any:
        # The store outlives the ranks here, as torchrun's agent does.
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60)),
            rank=rank,
            world_size=4,
        )
        return live(rank)

    ranks = ForkedRanks(start, 4)
    # After the fork: the ranks would inherit the sockets of a store that already serves, and the
    # epoll set that its thread waits in.
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    pids += [process.pid or 0 for process in ranks.processes]
    outcomes = ranks.ended(90)
    del agent
    assert [outcomes[0], *outcomes[2:]] == ["lost its peer", "went on", "went on"], outcomes
    assert shared_memory() <= before
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
