"""What ranks compare: differing routes, settings and replicas are named, local parameters are not compared."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded_cases import drawn, finished_step, mesh_of, named_mesh, place, refused
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.errors import (
    InvalidParameterError,
    PlanMismatchError,
    ReplicaMismatchError,
    ShardingError,
)
from deepmd_muon.optim.qk_clip import QKClip, SeparateQK
from deepmd_muon.optim.sharded import ShardedSettings, agreement, step
from deepmd_muon.optim.sharded.agreement import StepComparison

WAYS = {
    "repeated": ShardedSettings(replication="repeat"),
    "spread": ShardedSettings(replication="spread"),
    "cut state": ShardedSettings(state="sharded"),
}


def random(*shape, seed=0, dtype=torch.float32):
    return drawn(torch.Generator("cpu").manual_seed(seed), shape, dtype)


def gradients(params, seed=5):
    for i, p in enumerate(params):
        grad = random(*p.shape, seed=seed + i, dtype=p.dtype)
        p.grad = place(grad, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else grad


@on_ranks(2, 8)
def fsdp1():
    for original in (True, False):
        device = torch.device(torch.get_default_device())
        model = FullyShardedDataParallel(
            nn.Linear(6, 8), use_orig_params=original, device_id=device
        )
        name = "weight" if original else "_flat_param"
        with pytest.raises(InvalidParameterError, match=rf"'{name}'.*fully_shard"):
            HybridMuon(model.named_parameters())


@on_ranks(2, 8)
def routes():
    """Vectors in parts take part in no comparison of gradients, and no plan names them."""
    mesh, rank = mesh_of((dist.get_world_size(),)), dist.get_rank()
    params = [
        nn.Parameter(place(random(8), mesh, [Shard(0)])),
        nn.Parameter(place(random(8, 6), mesh, [Shard(0)])),
    ]
    pattern = ["a"] if rank == 0 else []
    optimizer = HybridMuon(
        zip("ab", params, strict=True), adamw_patterns=pattern, vector_route="adam"
    )
    gradients(params)
    match = r"rank 0: 'a' of shape .*\(route adamw\); rank 1: 'a' of shape .*\(route adam\)"
    refused(optimizer, params, PlanMismatchError, match)


@on_ranks(2, 8)
def settings():
    """The first step names group, setting and both values."""
    mesh, rank = mesh_of((dist.get_world_size(),)), dist.get_rank()
    for key, ours, theirs in (
        ("lr", 0.1, 0.2),
        ("lr", torch.tensor(0.1), torch.tensor(0.1 + 1e-7)),
        ("weight_decay", 0.0, 0.5),
        ("adam_betas", (0.9, 0.95), (0.9, 0.99)),
        ("vector_route", "adam", "adamw"),
        ("maximize", False, True),
    ):
        for layout in ([Shard(0)], [Replicate()], None):
            values = [random(8, 6), random(8, 8), random(8)]
            params = [nn.Parameter(x if layout is None else place(x, mesh, layout)) for x in values]
            ids = iter("xyz")
            groups = [
                {"params": [(next(ids), params[0])]},
                {
                    "params": [(next(ids), p) for p in params[1:]],
                    key: theirs if rank == 1 else ours,
                },
            ]
            optimizer = HybridMuon(groups, lr=0.3, replicas=mesh if layout is None else None)
            gradients(params)
            if key == "vector_route":
                match = r"rank 0: 'z' of shape .*\(route adam\); rank 1: 'z' .*\(route adamw\)"
            elif key == "adam_betas":
                match = r"rank 0: adam_beta2 .*'y' is 0\.95; rank 1: adam_beta2 .*'y' is 0\.99"
            else:
                first, second = (
                    re.escape(repr(x.item() if hasattr(x, "item") else x)) for x in (ours, theirs)
                )
                match = rf"rank 0: {key} .*'y' is {first}; rank 1: {key} .*'y' is {second}\."
            refused(optimizer, params, PlanMismatchError, match)


@on_ranks(2, 8)
def settings_later():
    """A setting that changes on one rank is found in the next comparison, and the error comes once."""
    mesh, rank = mesh_of((dist.get_world_size(),)), dist.get_rank()
    for kind, sharded in [*WAYS.items(), ("shards", ShardedSettings())]:
        values = [random(8, 6), random(8)]
        params = [
            nn.Parameter(place(x, mesh, [Shard(0)]) if kind == "shards" else x) for x in values
        ]
        optimizer = HybridMuon(
            zip("xy", params, strict=True),
            lr=0.1,
            replicas=None if kind == "shards" else mesh,
            sharded=sharded,
        )
        group = optimizer.param_groups[0]
        gradients(params)
        with mock.patch.object(agreement, "_STEPS_PER_COMPARISON", 1):
            optimizer.step()
            for key, before, after in (("lr", 0.1, 0.25), ("momentum", 0.95, 0.5)):
                if rank == 1:
                    group[key] = after
                low, high = sorted((before, after))
                with pytest.raises(
                    PlanMismatchError,
                    match=f"{key} of the group of 'x' is {low:g} on one rank and {high:g} on another",
                ):
                    finished_step(optimizer)
                group[key] = before
                finished_step(optimizer)


@on_ranks(2, 8)
def settings_compared_late():
    """As on a GPU: the next step, or state_dict, raises on all ranks."""
    mesh = mesh_of((dist.get_world_size(),))
    for sharded in WAYS.values():
        model = nn.Linear(8, 8)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(random(*p.shape))
        optimizer = HybridMuon(model.named_parameters(), lr=0.1, replicas=mesh, sharded=sharded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                step,
                "StepComparison",
                lambda *args, groups, **_: StepComparison(*args, late=True, groups=groups),
            )
            gradients(model.parameters())
            optimizer.step()
        if dist.get_rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step()  # nobody knows yet
        with pytest.raises(
            PlanMismatchError, match=r"last step.* lr of the group of 'weight' is 0.1 .* 0.3 on"
        ):
            optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 0.3
        optimizer.step()
        optimizer.state_dict()


@on_ranks(2, 4, 8)
def settings_on_other_ranks():
    """Groups of parameters on other ranks may have other settings, names and numbers."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = named_mesh((world // 2, 2), ("dp", "ep"))
    shared = nn.Parameter(place(random(8, 6), mesh, [Replicate(), Shard(0)]))
    bias = nn.Parameter(place(random(6), mesh["ep"], [Replicate()]))
    stage = rank // 2
    groups = [
        {"params": [(f"stage{stage}.bias", bias)], "lr": 0.1 * (stage + 1)},
        {"params": [("w", shared)], "lr": 0.5},
    ]
    optimizer = HybridMuon(groups if stage else groups[::-1], on_nonfinite="skip")
    for _ in range(3):
        gradients([bias, shared])
        optimizer.step()
    if rank == 0:
        next(g for g in optimizer.param_groups if g["lr"] == 0.5)["lr"] = 0.25
    if not shared.is_cuda:
        with pytest.raises(
            PlanMismatchError, match=r"lr of the group of 'w' is 0\.25 on one rank and 0\.5 on"
        ):
            optimizer.step()


@on_ranks(2, 4, 8)
def local_parameters():
    """What each rank has for itself takes this rank's step; its copies elsewhere are the replicas' step."""
    mesh, rank = mesh_of((dist.get_world_size(),)), dist.get_rank()
    clip = QKClip(
        (SeparateQK("attention", "experts.q.weight", "experts.k.weight", 2),), threshold=1.0
    )
    logits = {"attention": torch.tensor([2.0 + rank, 0.5])}
    for sharded in WAYS.values():
        values = {"w": random(8, 6), "b": random(6)}
        for i, key in enumerate(("experts.q.weight", "experts.k.weight", "experts.bias")):
            values[key] = random(*((6, 6) if "weight" in key else (6,)), seed=100 * rank + i)
        found = []
        for together in (True, False):
            params = {name: nn.Parameter(x.clone()) for name, x in values.items()}
            options = (
                {"replicas": mesh, "sharded": sharded, "local_patterns": ["experts.*"]}
                if together
                else {}
            )
            optimizer = HybridMuon(params.items(), lr=0.1, qk_clip=clip, **options)
            for i in range(2):
                for j, (name, p) in enumerate(params.items()):
                    p.grad = random(
                        *p.shape, seed=10 * i + j + (1000 * rank if "experts" in name else 0)
                    )
                optimizer.step(qk_logits=logits)
            found.append(params)
        for name in values:
            torch.testing.assert_close(
                found[0][name], found[1][name], rtol=1e-6, atol=1e-7, msg=name
            )


@on_ranks(2, 8)
def replicas_that_differ():
    """The first step names parameters whose copies differ; one that has been stepped is not compared again."""
    mesh, rank = mesh_of((dist.get_world_size(),)), dist.get_rank()
    same = {
        "w": random(8, 6),
        "scale": torch.tensor(2.0),
        "wide": random(3, 4, dtype=torch.float64).t(),
    }
    for sharded in WAYS.values():
        for changed in ("w", "scale", "wide", "half"):
            values = {**same, "half": random(5, 3).to(torch.bfloat16)}
            params = {name: nn.Parameter(x.clone()) for name, x in values.items()}
            if rank == 1:
                with torch.no_grad():  # one bit of one element
                    flat = (
                        params[changed].view(())
                        if params[changed].ndim == 0
                        else params[changed][-1:, -1:]
                    )
                    flat.copy_(
                        torch.nextafter(flat.float(), torch.tensor(9.0))
                        if changed != "half"
                        else flat * 1.01
                    )
            optimizer = HybridMuon(params.items(), replicas=mesh, sharded=sharded)
            gradients(params.values())
            refused(
                optimizer,
                list(params.values()),
                ReplicaMismatchError,
                rf"values of '{changed}' differ.*local_patterns",
            )
    # The highest bits of a float64: its sign, and whether it is 2 or 0.
    for copies in ([1.5, -1.5], [0.0, 2.0]):
        wide = nn.Parameter(torch.tensor(copies[min(rank, 1)], dtype=torch.float64))
        optimizer = HybridMuon([("wide", wide)], replicas=mesh)
        gradients([wide])
        refused(optimizer, [wide], ReplicaMismatchError, "values of 'wide' differ")
    w = nn.Parameter(same["w"].clone())
    optimizer = HybridMuon([("w", w)], replicas=mesh)
    gradients([w])
    optimizer.step()
    with torch.no_grad():
        w.mul_(1.0 + 1e-6 * rank)
    v = nn.Parameter(random(4, 4))
    optimizer.add_param_group({"params": [("v", v)]})  # plans anew
    gradients([w, v])
    optimizer.step()
    optimizer.add_param_group({"params": [("u", nn.Parameter(random(4, 4, seed=rank)))]})
    refused(optimizer, [w, v], ReplicaMismatchError, "values of 'u' differ")


@on_ranks(4, 8)
def replicas_on_some_ranks():
    """Copies that differ on two ranks end the step of all ranks that share another parameter."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = named_mesh((world // 2, 2), ("dp", "ep"))
    w = nn.Parameter(place(random(8, 6), mesh, [Replicate(), Shard(0)]))
    b = nn.Parameter(random(6, 6) + (rank == 1))
    optimizer = HybridMuon([("w", w), ("b", b)], replicas=mesh["ep"])
    gradients([w, b])
    match = "values of 'b' differ between ranks \\(0, 1\\)"
    refused(
        optimizer,
        [w, b],
        ReplicaMismatchError,
        match if rank < 2 else f"rank 0 cannot step: the {match}",
    )


@on_ranks(4, 8)
def error_of_some_ranks():
    """Errors of a matrix on two ranks end the step of all ranks that share another parameter."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = named_mesh((world // 2, 2), ("dp", "fsdp"))

    def parameters():
        w = nn.Parameter(place(random(8, 6), mesh["fsdp"], [Shard(0)]))
        b = nn.Parameter(place(random(8), mesh_of((world,)), [Shard(0)]))
        gradients([w, b])
        return w, b

    w, b = parameters()
    optimizer = HybridMuon([("w", w), ("b", b)])
    if rank == 0:
        w.grad = DTensor.from_local(random(8, 6), mesh["fsdp"], [Partial()])
    first = "" if rank == 0 else "rank 0 cannot step.*"
    match = f"(?s){first}'w'.*its gradient is .Partial"
    refused(optimizer, [w, b], ShardingError, match)

    w, b = parameters()
    settings = ShardedSettings(slots=2 if rank == 0 else 3)
    optimizer = HybridMuon([("w", w), ("b", b)], sharded=settings)
    first = "" if rank < 2 else "rank 0 cannot step.*"
    match = f"(?s){first}ranks 0 and 1 do not take the same step.*slots=2.*slots=3"
    refused(optimizer, [w, b], PlanMismatchError, match)


@on_ranks(2, 8)
def state_on_some_ranks():
    """Only rank 1 loads a state: all ranks name the parameter instead of waiting for each other."""
    mesh, rank = mesh_of((dist.get_world_size(),)), dist.get_rank()
    states = []
    for loads in (False, rank == 1):
        params = [nn.Parameter(random(8, 6)), nn.Parameter(random(6))]
        optimizer = HybridMuon(zip("wb", params, strict=True), replicas=mesh)
        if loads:
            optimizer.load_state_dict(states[0])
        gradients(params)
        if not states:
            optimizer.step()
            states.append(optimizer.state_dict())
    refused(optimizer, params, PlanMismatchError, r"rank 0: 'w' .*; rank 1: 'w' .*, with state")
