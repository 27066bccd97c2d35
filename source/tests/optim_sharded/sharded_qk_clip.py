"""QK-clip on several ranks: every layout gives what one process gives, from logits that each rank saw a part of."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from sharded_cases import ON_GPUS, drawn, layouts, mesh_of, place
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from deepmd_muon.optim import HybridMuon, QKClipError
from deepmd_muon.optim.qk_clip import FusedQKV, LatentQK, QKClip, SeparateQK

SHAPES = {
    "q": (24, 10),
    "k": (8, 10),
    "q.bias": (24,),
    "qkv": (40, 10),
    "latent_q": (18, 10),
    "latent_kv": (21, 10),
    "heads": (36, 10),
    "groups": (50, 10),
}
# A part for each head: all queries, then keys and values, whose heads have 2 rows; or key head by key head.
SPLITS = ("heads.weight: rows 4+4+4+4+4+4+4+4+2+2", "groups.weight: rows 5+5+5+5+5+5+5+5+5+5")
CLIP = QKClip(
    (
        SeparateQK("separate", "q.weight", "k.weight", 6, 2),
        FusedQKV("fused", "qkv.weight", 6, 2, interleaved=True),
        LatentQK("latent", "latent_q.weight", "latent_kv.weight", 3, 4, 2, 3),
        FusedQKV("heads", "heads.weight", 6, 2),
        FusedQKV("groups", "groups.weight", 6, 2, interleaved=True),
    ),
    threshold=3.0,
)
LOGITS = {
    "separate": [1.0, 3.5, 6.0, 2.0, -9.0, 30.0],
    "fused": [4.0, 0.0, 5.0, 3.0, 2.0, 1.0],
    "latent": [8.0, 1.0, 4.0],
    "heads": [7.0, 1.0, 2.0, 9.0, 3.0, 4.0],
    "groups": [2.0, 9.0, 2.0, 1.0, 2.0, 5.0],
}


def all_logits():
    return {name: torch.tensor(values) for name, values in LOGITS.items()}


def named(shapes, make):
    return {
        name if "." in name else f"{name}.weight": nn.Parameter(make(shape))
        for name, shape in shapes.items()
    }


def mine(logits):
    """What this rank saw: each head's largest logit on one rank, less elsewhere, nothing on others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    heads = torch.arange(len(logits))
    seen = torch.where(heads % 2 == rank % 2, logits - 1.0, -math.inf)
    return torch.where(heads % world == rank, logits, seen)


def assert_close(x, expected, what):
    rtol, atol = (ON_GPUS, ON_GPUS) if expected.is_cuda else (1e-6, 1e-9)
    assert torch.allclose(x, expected, rtol=rtol, atol=atol), what


def clipped(params, logits, **settings):
    optimizer = HybridMuon(params.items(), 0.02, qk_clip=CLIP, splits=SPLITS, **settings)
    random = torch.Generator("cpu").manual_seed(1)
    for _ in range(2):
        for p in params.values():
            grad = drawn(random, p.shape, p.dtype)
            p.grad = place(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        optimizer.step(qk_logits=logits)
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in params.items()
    }


@on_ranks(2, 8)
def sharded_qk_clip():
    random = torch.Generator("cpu").manual_seed(0)
    values = {shape: drawn(random, shape, torch.float64) for shape in SHAPES.values()}
    logits = all_logits()
    own = {name: mine(x) for name, x in logits.items()}
    expected = clipped(named(SHAPES, lambda shape: values[shape].clone()), logits)
    plain = clipped(
        named(SHAPES, lambda shape: values[shape].clone()),
        own,
        replicas=mesh_of((dist.get_world_size(),)),
    )
    offloaded = named(SHAPES, lambda shape: values[shape].clone())
    results = {"replicas": plain, "offloaded": clipped(offloaded, logits, offload=True)}
    for name, mesh, placements in layouts():
        if all(getattr(placement, "dim", 0) < 2 for placement in placements):
            there = mesh_of(mesh)

            def make(shape, there=there, placements=placements):
                fitting = [
                    p if getattr(p, "dim", 0) < len(shape) else type(p)(0) for p in placements
                ]
                return place(values[shape].clone(), there, fitting)

            results[name] = clipped(named(SHAPES, make), own, offload=name == "Shard(0)")
    assert len(results) > 3
    for kind, found in results.items():
        for name, p in expected.items():
            assert_close(found[name], p, (kind, name))


@on_ranks(2, 8)
def logits_as_dtensors():
    """Heads in uneven and empty shards, whole, or as maxima to be taken give what one process gives."""
    world = dist.get_world_size()
    random = torch.Generator("cpu").manual_seed(0)
    values = {shape: drawn(random, shape, torch.float64) for shape in SHAPES.values()}
    everything = all_logits()
    expected = clipped(named(SHAPES, lambda shape: values[shape].clone()), everything)
    mesh = mesh_of((world,))
    as_dtensors = {
        "heads": {name: place(x.clone(), mesh, [Shard(0)]) for name, x in everything.items()},
        "whole": {name: place(x.clone(), mesh, [Replicate()]) for name, x in everything.items()},
        "maxima": {
            name: DTensor.from_local(mine(x), mesh, [Partial("max")])
            for name, x in everything.items()
        },
    }
    if world == 4:
        grid = mesh_of((2, 2))
        as_dtensors["grid"] = {
            name: place(x.clone(), grid, [Replicate(), Shard(0)]) for name, x in everything.items()
        }
    for kind, logits in as_dtensors.items():
        sharded = named(SHAPES, lambda shape: place(values[shape].clone(), mesh, [Shard(0)]))
        copies = named(SHAPES, lambda shape: values[shape].clone())
        for found in (clipped(sharded, logits), clipped(copies, logits, replicas=mesh)):
            for name, p in expected.items():
                assert_close(found[name], p, (kind, name))


@on_ranks(2, 4, 8)
def unusable_logits_change_nothing():
    mesh = mesh_of((dist.get_world_size(),))
    params = named(SHAPES, lambda shape: torch.ones(shape))
    alone = HybridMuon(params.items(), 0.02, qk_clip=CLIP, splits=SPLITS)
    for p in params.values():
        p.grad = torch.ones_like(p)
    sums = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(QKClipError, match="full_tensor"):
        alone.step(qk_logits={"latent": sums})
    # Each process has its own weights, of which a share of the heads would be clipped here and another there.
    with pytest.raises(QKClipError, match="do not share"):
        alone.step(qk_logits={"latent": place(all_logits()["latent"], mesh, [Shard(0)])})
    assert all(torch.equal(p, torch.ones_like(p)) for p in params.values())
    alone.step(qk_logits={"latent": place(all_logits()["latent"], mesh, [Replicate()])})
    assert not any(torch.equal(p, torch.ones_like(p)) for p in params.values())
