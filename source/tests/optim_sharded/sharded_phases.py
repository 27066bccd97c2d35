"""What a profiler and the log show of a step on several ranks."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from sharded_cases import mesh_of, place
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from deepmd_muon.optim import HybridMuon


@on_ranks(2, 8)
def profiled_step():
    world = dist.get_world_size()
    mesh = mesh_of((world,))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("deepmd_muon.optim")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        params = {
            name: nn.Parameter(place(torch.randn(shape), mesh, [Shard(0)]))
            for name, shape in {"a.weight": (8, 12), "b.bias": (8,)}.items()
        }
        optimizer = HybridMuon(params.items(), 0.01)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert lines[0].startswith(
        "a.weight: muon 1x8x12, because matrix in mode 'slice'; shape 8x12, placements ("
    )
    assert "S" in lines[0]
    assert "DeviceMesh" in lines[0]
    assert "FLOPs" in lines[-1].splitlines()[-1]
    assert "bytes sent" in lines[-1].splitlines()[-1]
    for p in params.values():
        p.grad = place(torch.ones(p.shape), mesh, [Shard(0)])
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        optimizer.step()
    names = {event.name for event in record.events() if event.name.startswith("HybridMuon.")}
    expected = {"momentum", "gather", "orthogonalize", "update", "return", "adam"}
    (job,) = optimizer.plan.domains[0].jobs
    if dist.get_rank() != job.owner:
        names.add("HybridMuon.orthogonalize")  # it owns no matrix
    assert names == {f"HybridMuon.{name}" for name in expected}, names
