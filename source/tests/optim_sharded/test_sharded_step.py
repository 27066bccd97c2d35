"""The step on several ranks equals the step of one process: one spawn per number of ranks carries all cases."""

from __future__ import annotations

import functools
import gc
import weakref

import forked
import pytest
import sharded_agreement  # noqa: F401  # registers its cases
import sharded_cases  # noqa: F401  # registers its cases
import sharded_failures
import sharded_masters  # noqa: F401  # registers its cases
import sharded_models
import sharded_phases
import sharded_qk_clip  # noqa: F401  # registers its cases
import sharded_rules  # noqa: F401  # registers its cases
import sharded_state  # noqa: F401  # registers its cases
import torch
import torch.distributed as dist
from spawn_ranks import cases_on, free_port, join, run_cases
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepmd_muon.optim.sharded.process_groups import group_of

# Where a state is saved, and where it is restored.
MOVES = [
    ((2, "ddp"), (4, "hsdp")),
    ((2, "zero"), (4, "zero")),
    ((4, "hsdp"), (2, "zero")),
    ((4, "zero"), (2, "ddp")),
]
MOVES_OF_THREE = [
    ((2, "fsdp"), (3, "offload")),
    ((2, "ddp"), (3, "zero")),
    ((3, "zero"), (1, "alone")),
    ((3, "offload"), (1, "alone")),
    ((2, "zero16"), (3, "zero16")),
    ((3, "zero16"), (2, "fsdp16")),
    ((4, "ddp16"), (3, "zero16")),
]


def cases_of(kind, world, moves, folder):
    """Return the cases that save ("save") or restore ("load") on this number of ranks."""
    cases = []
    for source, target in moves:
        ranks, way = source if kind == "save" else target
        if ranks == world:
            path = folder / f"{source[1]}{source[0]}_{target[1]}{target[0]}"
            path.mkdir(exist_ok=True)
            function = getattr(sharded_models, kind)
            cases.append((f"{kind} {path.name}", functools.partial(function, path, way=way)))
    return cases


def run(world, cases, device="cpu"):
    failures, seconds = run_cases(world, cases, device)
    print({name: round(took, 1) for name, took in seconds.items()})
    assert not failures, "\n\n".join(
        f"{name}, rank {rank}: {text}" for (name, rank), text in failures.items()
    )
    assert list(seconds) == [name for name, _ in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.mark.parametrize(
    "world",
    [
        2,
        4,
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.slow),
    ],
)
def test_ranks_together_equal_one_process(world, folder):
    saves = cases_of("save", world, MOVES, folder)  # for the next test
    run(world, cases_on(world) + saves)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus_together_equal_one(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    phases = sharded_phases.profiled_step
    run(world, [case for case in cases_on() if case[1] is not phases], "cuda")


@pytest.mark.parametrize("world", [2, 4])
def test_states_restart_on_other_ranks(world, folder):
    """Saved on W ranks, every tensor comes back bitwise on W′ others, and the next step is one process's."""
    loads = cases_of("load", world, MOVES, folder)
    if not (folder / "zero4_ddp2" / "full.pt").exists():
        pytest.skip("needs the states that the test above saves")
    assert loads
    run(world, loads)


@pytest.mark.slow
def test_states_of_three_ranks_restart_on_others(tmp_path):
    for kind in ("save", "load"):
        for world in (1, 2, 3, 4):
            cases = cases_of(kind, world, MOVES_OF_THREE, tmp_path)
            if cases:
                run(world, cases)


def test_process_groups_are_remembered_as_long_as_the_default_group():
    def begin():
        dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        return group_of((0, 1), torch.device("cpu")), weakref.ref(dist.group.WORLD)

    first, world = begin()
    try:
        assert group_of((0, 1), torch.device("cpu")) is first
        assert group_of((0, 1, 2, 3), torch.device("cpu")) is world()
        assert first is not world()
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert world() is None
    second, _ = begin()
    try:
        assert second is not first
        assert dist.get_process_group_ranks(second) == [0, 1]
    finally:
        dist.destroy_process_group()


def test_a_group_of_some_ranks_is_not_split_off_a_world_bound_to_a_device():
    """A split needs all ranks: those outside the group would not come."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        device = torch.device("cuda:0")
        dist.group.WORLD.bound_device_id = device
        assert group_of((0, 1), torch.device("cpu")).bound_device_id is None
        assert dist.group.WORLD.bound_device_id == device
    finally:
        dist.destroy_process_group()


def test_a_dead_rank_ends_the_others_with_an_error():
    context = forked.context()
    queue = context.SimpleQueue()
    port = free_port()
    ranks = [
        context.Process(
            target=join, args=(rank, 2, port, sharded_failures.die_in_the_middle, queue)
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert ranks[1].exitcode == 7
    assert queue.get().startswith("RuntimeError")
