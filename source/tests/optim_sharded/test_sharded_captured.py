"""Captured sharded steps: all ranks are threads on one GPU, whose steps one CUDA graph holds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks_in_threads import Ranks
from sharded_cases import SETTINGS, SHAPES, drawn, fits, layouts, place
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from deepmd_muon.optim import CaptureError, HybridMuon
from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.sharded import ShardedSettings

# Kernels are compiled for few kinds of shapes, which takes the time of these tests.
KINDS = {
    "even": (SHAPES["even"], {}),
    "mixed": (
        [*SHAPES["mixed"], (5, 7), (9, 1, 2)],
        {"normuon": True, "cautious_decay": True, "on_nonfinite": "skip"},
    ),
}


class Side:
    """One rank's parameters of one case, their gradients in memory that stays, and the optimizer."""

    def __init__(self, shapes, cut, device, **settings):
        self.random = torch.Generator("cpu").manual_seed(5)
        self.shapes, self.cut, self.device = shapes, cut, device
        self.params = [nn.Parameter(cut(drawn(self.random, shape))) for shape in shapes]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        settings = {
            **SETTINGS,
            "lr": torch.tensor(0.02, dtype=torch.float64, device=device),
            **settings,
        }
        named = [(f"w{i}", p) for i, p in enumerate(self.params)]
        self.optimizer = HybridMuon(named, capturable=device == "cuda", **settings)

    def give_gradients(self, step):
        for i, (p, shape) in enumerate(zip(self.params, self.shapes, strict=True)):
            random = torch.Generator("cpu").manual_seed(100 * step + i)
            with torch.device(self.device):
                local_of(p.grad).copy_(local_of(self.cut(drawn(random, shape))))
        self.optimizer.param_groups[0]["lr"].fill_(0.02 / (1 + step))

    def tensors(self):
        for i, p in enumerate(self.params):
            yield f"w{i}", local_of(p.detach())
            for key, x in self.optimizer.state[p].items():
                yield f"w{i}.{key}", local_of(x)


def cases(device):
    """Yield the name of every case and two sides that begin alike: every layout, and replicas in three ways."""
    world = dist.get_world_size()
    for name, shape, placements in layouts():
        mesh = init_device_mesh(device, shape)
        for kind, (shapes, settings) in KINDS.items():
            shapes = [each for each in shapes if fits(each, placements)]
            make = lambda mesh=mesh, placements=placements, shapes=shapes, settings=settings: Side(  # noqa: E731
                shapes, lambda x: place(x, mesh, placements), device, **settings
            )
            yield f"{name}, {kind}", make(), make()
    for sharded, agreed in (
        (ShardedSettings(replication="spread", bucket_bytes=2000), False),
        (ShardedSettings(replication="repeat"), True),
        (ShardedSettings(state="sharded", slots=1, replication="spread"), True),
        (ShardedSettings(state="sharded", replication="repeat"), True),
    ):
        for kind, (shapes, settings) in KINDS.items():
            told = {"replicas": dist.group.WORLD, "sharded": sharded, **settings}
            sides = [Side(shapes, torch.clone, device, **told) for _ in range(2)]
            for side in sides:
                side.optimizer.found_inf, side.optimizer.agreed_skip = (
                    torch.zeros((), device=device),
                    agreed,
                )
            yield f"replicas of {world}, {sharded}, {kind}", *sides


def compare(world, device, record):
    """Step one side of every case eagerly and the other by `record`, and compare all bits on every rank."""
    stream = torch.cuda.Stream() if device == "cuda" else None
    with Ranks(world) as ranks:
        found = [[] for _ in range(world)]

        def make(rank):
            with torch.device(device):
                found[rank] += cases(device)

        def eager(rank, step, sides=(1,)):
            for case in found[rank]:
                for side in sides:
                    case[side].give_gradients(step)
                    case[side].optimizer.step()

        def gradients(rank, step):
            for *_, side in found[rank]:
                side.give_gradients(step)

        def same(rank):
            for name, one, other in found[rank]:
                for (key, x), (_, y) in zip(one.tensors(), other.tensors(), strict=True):
                    assert torch.equal(x, y), f"{name}, {key} on rank {rank}"

        ranks.together(make)
        ranks.together(lambda rank: eager(rank, 0, (1, 2)))
        replay = record(
            ranks, stream, lambda rank: [case[2].optimizer.step() for case in found[rank]]
        )
        for step in range(1, 4):
            ranks.together(lambda rank, step=step: eager(rank, step))
            ranks.together(lambda rank, step=step: gradients(rank, step))
            replay()
            ranks.together(same)
        moved = [x.abs().sum() for _, x in found[0][0][1].tensors()]
        assert all(x.isfinite() for x in moved)
        found.clear()


def test_ranks_in_threads_step_alike():
    """The harness of the test below, without a graph."""

    def record(ranks, stream, step):
        return lambda: ranks.together(step)

    compare(2, "cpu", record)


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_captured_step_of_all_ranks_equals_the_eager_one_bitwise(world):
    def record(ranks, stream, step):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            ranks.together(step, stream)

        def replay():
            graph.replay()
            torch.cuda.synchronize()

        return replay

    compare(world, "cuda", record)


@pytest.mark.gpu
def test_captures_of_several_ranks_that_would_go_wrong_are_refused():
    stream = torch.cuda.Stream()
    with Ranks(2) as ranks:
        sides = [None] * 2

        def make(rank):
            with torch.device("cuda"):
                replicas = {
                    "replicas": dist.group.WORLD,
                    "sharded": ShardedSettings(state="sharded"),
                }
                sides[rank] = Side(SHAPES["even"], torch.clone, "cuda", **replicas)

        def step(rank):
            sides[rank].optimizer.step()

        def forget(rank):
            sides[rank].params[0].grad = None

        def captured(message):
            torch.cuda.synchronize()
            with (
                pytest.raises(CaptureError, match=message),
                torch.cuda.graph(
                    torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"
                ),
            ):
                ranks.together(step, stream)
            torch.cuda.synchronize()

        ranks.together(make)
        captured("take one step before")
        ranks.together(step)
        ranks.together(forget)
        captured("have no gradient")
