"""The step on several ranks equals the step of one process: one spawn per number of ranks carries all cases."""

from __future__ import annotations

import functools
import gc
import weakref

import forked
import pytest
import sharded_agreement
import sharded_cases
import sharded_failures
import sharded_masters
import sharded_models
import sharded_phases
import sharded_qk_clip
import sharded_rules
import sharded_state
import torch
import torch.distributed as dist
from spawn_ranks import free_port, join, run_cases
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

# Four ranks add meshes of two axes; three, in the slow tests, cut every matrix unevenly. What depends
# on neither is tested on two, and on eight. So a new case that is in none of these sets runs on two,
# four and eight; without meshes of two axes it belongs into NOT_FOR_FOUR.
FOR_THREE = {
    "every layout",
    "captured layouts",
    "repeated work",
    "missing gradients",
    "counted collectives",
    "replicas",
    "models",
    "offloaded",
    "cut state",
    "collectives of cut state",
    "Adam in parts",
    "process groups",
    "rules in every layout",
    "rules of replicas",
    "masters of replicas",
    "memory of masters",
    "collectives of masters",
    "masters without some gradients",
    "restart of masters",
}
NOT_FOR_FOUR = {
    "small buckets",
    "views and settings",
    "offloaded",
    "master weights",
    "QK-clip from DTensors",
    "bfloat16",
    "narrow wires",
    "replicas",
    "freed gradients",
    "missing gradients",
    "gradients that do not agree",
    "gradients compared late",
    "non-finite gradients",
    "gradient scaler",
    "order of a step",
    "cut state",
    "schedules",
    "momenta gathered early",
    "memory of cut state",
    "collectives of cut state",
    "states between ways",
    "preflight of cut state",
    "Adam in parts",
    "Adam in parts, as users call it",
    "profiled step",
    "FSDP1",
    "routes",
    "settings",
    "settings later",
    "settings in rare steps",
    "settings compared late",
    "replicas that differ",
    "rules of replicas",
    "rules without some gradients",
    "rules of bfloat16",
    "rules of views",
    "rules of models",
    "rules migrate",
    "replaced parameters",
    "QK-clip",
    "masters of replicas",
    "a rule of weights of masters",
    "memory of masters",
    "collectives of masters",
    "masters without some gradients",
    "masters with a gradient scaler",
    "clipped masters",
    "restart of masters",
    "small steps of masters",
    "captured masters",
}


# Half of two ranks is one, which exchanges nothing.
NOT_FOR_TWO = {"cut state with further domains"}


def is_for(world, name):
    if world == 3:
        return name in FOR_THREE
    return name not in {2: NOT_FOR_TWO, 4: NOT_FOR_FOUR}.get(world, ())


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
    everything = [
        *sharded_cases.CASES,
        *sharded_failures.CASES,
        *sharded_agreement.CASES,
        *sharded_state.CASES,
        *sharded_masters.CASES,
        *sharded_models.CASES,
        *sharded_qk_clip.CASES,
        *sharded_rules.CASES,
        *sharded_phases.CASES,
    ]
    assert {name for name, _ in everything} >= FOR_THREE | NOT_FOR_FOUR | NOT_FOR_TWO
    run(world, [case for case in everything if is_for(world, case[0])] + saves)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus_together_equal_one(world):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    everything = [
        *sharded_cases.CASES,
        *sharded_failures.CASES,
        *sharded_agreement.CASES,
        *sharded_state.CASES,
        *sharded_masters.CASES,
        *sharded_models.CASES,
        *sharded_qk_clip.CASES,
        *sharded_rules.CASES,
    ]
    run(world, everything, "cuda")


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
