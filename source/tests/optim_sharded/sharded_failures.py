"""Gradients that are missing or not finite, steps that are refused, a rank that dies."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from sharded_cases import SHAPES, Twins, finished_step, mesh_of, named_mesh, place, refused
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from deepmd_muon.optim import HybridMuon, NonFiniteGradientError
from deepmd_muon.optim.errors import (
    GradientPlacementError,
    MissingGradientError,
    PartialPlacementError,
    PlanMismatchError,
    ReshardedParameterError,
    ShardingError,
    UnsupportedTransportError,
)
from deepmd_muon.optim.sharded import ShardedSettings, step
from deepmd_muon.optim.sharded.agreement import StepComparison


@on_ranks(2, 3, 8)
def missing_gradients():
    """A gradient missing on one rank counts as zero; missing everywhere, the block is left alone."""
    mesh = mesh_of((dist.get_world_size(),))
    for magma in (True, False):
        twins = Twins(SHAPES["even"], mesh, [Shard(0)], magma_muon=magma)
        twins.step()
        twins.step(without=(1, 3))
        twins.step(nowhere=(0, 4))
        twins.step(without=(1,), nowhere=(2,))
        twins.assert_equal(1e-6)


WAYS = {
    "repeated": (ShardedSettings(replication="repeat"), ("weight", "bias")),
    "spread": (ShardedSettings(replication="spread"), ("weight", "bias")),
    "cut state": (ShardedSettings(state="sharded", replication="spread"), ("bias",)),
    "gathered momenta": (
        ShardedSettings(state="sharded", replication="repeat"),
        ("weight", "bias"),
    ),
}


def ones(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None


@on_ranks(2, 8)
def gradients_that_do_not_agree():
    """What does not travel must have a gradient on all ranks or on none: all ranks say so, and nothing changes."""
    mesh, last = mesh_of((dist.get_world_size(),)), dist.get_world_size() - 1
    for sharded, names in WAYS.values():
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = HybridMuon(model.named_parameters(), lr=0.1, replicas=mesh, sharded=sharded)
        for missing in names:
            ones(model)
            optimizer.step()
            if dist.get_rank() == last:
                getattr(model, missing).grad = None
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(MissingGradientError, match=f"{missing}' of shape"):
                finished_step(optimizer)
            if not model.weight.is_cuda:
                assert all(
                    torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True)
                )
            getattr(model, missing).grad = None
            finished_step(optimizer)  # on no rank: it is left alone


@on_ranks(2, 8)
def gradients_compared_late():
    """Read a step later, as on a GPU, a difference is told by whatever comes next, on all ranks; then it is over."""
    mesh, last = mesh_of((dist.get_world_size(),)), dist.get_world_size() - 1
    for what, (sharded, _) in itertools.product(
        ("step", "state_dict", "load", "freeze", "magma", "add", "copy"), WAYS.values()
    ):
        model = nn.Linear(8, 8)
        optimizer = HybridMuon(model.named_parameters(), lr=0.1, replicas=mesh, sharded=sharded)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                step, "StepComparison", lambda *args, **_: StepComparison(*args, late=True)
            )
            ones(model)
            optimizer.step()
        state = optimizer.state_dict()
        ones(model)
        if dist.get_rank() == last:
            model.bias.grad = None
        optimizer.step()  # nobody knows yet
        ones(model)

        def act(what=what, optimizer=optimizer, model=model, state=state):
            if what == "step":
                optimizer.step()
            elif what == "state_dict":
                optimizer.state_dict()
            elif what == "load":
                optimizer.load_state_dict(state)
            elif what == "add":
                optimizer.add_param_group({"params": [("v", nn.Parameter(torch.ones(2)))]})
            elif what == "copy":
                copy.deepcopy(optimizer)
            else:
                if what == "freeze":
                    model.weight.requires_grad_(False)
                optimizer.param_groups[0]["magma_muon"] &= what != "magma"
                optimizer.step()

        with pytest.raises(MissingGradientError, match=r"last step.*'bias' of shape"):
            act()
        act()
        optimizer.step()


@on_ranks(2, 4, 8)
def gradients_on_several_meshes():
    """A difference among some of the ranks ends the step of all; parts without replicas may lack their gradient."""
    world = dist.get_world_size()
    mesh = named_mesh((world // 2, 2), ("dp", "ep"))
    weight = nn.Parameter(place(torch.ones(16, 16), mesh, [Replicate(), Shard(0)]))
    bias = nn.Parameter(place(torch.ones(6), mesh["ep"], [Replicate()]))
    experts = nn.Parameter(place(torch.ones(6), mesh["ep"], [Shard(0)]))
    optimizer = HybridMuon([("w", weight), ("bias", bias), ("experts", experts)], lr=0.1)

    def gradients():
        for p in (weight, bias, experts):
            p.grad = torch.ones_like(p)

    gradients()
    if dist.get_rank() == 0:
        experts.grad = None
    optimizer.step()
    assert torch.equal(experts.to_local(), torch.ones(3)) == (dist.get_rank() == 0)
    gradients()
    if dist.get_rank() == 0:
        bias.grad = None
    with pytest.raises(MissingGradientError, match="'bias' of shape"):
        finished_step(optimizer)
    gradients()
    if dist.get_rank() < 2:
        bias.grad = None  # on all ranks that have this one
    finished_step(optimizer)
    gradients()
    if dist.get_rank() % 2 == 0:
        weight.grad = None  # on all ranks with this shard: it counts as zero
    finished_step(optimizer)
    if world > 2:
        gradients()
        if dist.get_rank() == 0:
            weight.grad = None
        with pytest.raises(MissingGradientError, match="'w' of shape"):
            finished_step(optimizer)


@on_ranks(2, 4, 8)
def parameters_that_do_not_agree():
    """Ranks that train other parameters are told the first difference, on all ranks, before anything changes."""
    mesh = mesh_of((dist.get_world_size(),))
    expected = {
        "another": r"rank 0: '0.bias' .*; rank 1: '1.weight'",
        "one more": r"rank 0: '1.bias' .*; rank 1: nothing more",
    }
    for (sharded, _), (what, match) in itertools.product(WAYS.values(), expected.items()):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        if what == "another":
            model[int(dist.get_rank() != 1)].bias.requires_grad_(False)
        elif dist.get_rank() == 1:
            model[1].bias.requires_grad_(False)
        optimizer = HybridMuon(model.named_parameters(), lr=0.1, replicas=mesh, sharded=sharded)
        ones(model)
        refused(optimizer, list(model.parameters()), PlanMismatchError, match)


@on_ranks(2, 8)
def nonfinite_gradients():
    """One rank's NaN: all ranks skip, or all raise with the same name, and nothing has changed."""
    mesh = mesh_of((dist.get_world_size(),))
    for policy in ("skip", "error"):
        twins = Twins(SHAPES["even"] + [(7,)], mesh, [Shard(0)], on_nonfinite=policy)
        twins.step()
        optimizer, before = twins.optimizers[1], [p.to_local().clone() for p in twins.many]
        state = [
            x.to_local().clone() for p in twins.many for x in optimizer.state[p].values() if x.ndim
        ]
        for p in twins.many:
            p.grad = p.detach().clone()
        if dist.get_rank() == 0:
            twins.many[2].grad.to_local()[0, 0] = torch.nan
        raised = pytest.raises(NonFiniteGradientError, match="'w2'")
        with contextlib.nullcontext() if policy == "skip" else raised:
            optimizer.step()
        after = [x.to_local() for p in twins.many for x in optimizer.state[p].values() if x.ndim]
        for x, y in zip(before + state, [p.to_local() for p in twins.many] + after, strict=True):
            assert torch.equal(x, y)
        twins.step()
        twins.assert_equal()


@on_ranks(2, 8)
def gradient_scaler():
    """What torch.amp.GradScaler sets: gradients are unscaled, and one rank's overflow leaves the step out on all."""
    mesh = mesh_of((dist.get_world_size(),))
    twins = Twins([*SHAPES["even"], (7,)], mesh, [Shard(0)])
    twins.step()
    before = [p.to_local().clone() for p in twins.many]
    for p in twins.many:
        p.grad = p.detach().clone()
    twins.optimizers[1].found_inf = torch.tensor(float(dist.get_rank() == 0))
    twins.optimizers[1].step()
    assert all(torch.equal(x, p.to_local()) for x, p in zip(before, twins.many, strict=True))
    for optimizer in twins.optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    twins.step()
    twins.assert_equal(1e-6)


@on_ranks(2, 4, 8)
def preflight():
    """What cannot be exchanged is refused by name on all ranks, before any byte moves."""
    world = dist.get_world_size()
    mesh = mesh_of((world,))

    def fresh(**settings):
        return Twins([(8, 6), (6, 4)], mesh, [Shard(0)], **settings)

    def refuses(error, match, twins):
        refused(twins.optimizers[1], twins.many, error, match)

    def gradients(twins):
        for p in twins.many:
            p.grad = p.detach().clone()
        return twins.many[0], place(torch.ones(8, 6), mesh, [Shard(0)])

    twins = fresh()
    p, _ = gradients(twins)
    p.grad = DTensor.from_local(torch.ones(8, 6), mesh, [Partial()], run_check=False)
    refuses(
        PartialPlacementError,
        r"'w0' of shape \(8, 6\) on mesh \d: Shard\(0\): its gradient is \(Partial",
        twins,
    )
    p.grad = place(torch.ones(8, 6), mesh, [Shard(1)])
    refuses(GradientPlacementError, r"'w0'.*its gradient is \(Shard\(dim=1\),\)", twins)
    gradients(twins)
    twins.optimizers[1].step()
    p.grad = None
    moved = nn.Parameter(place(torch.ones(8, 6), mesh, [Shard(1)]))
    torch.utils.swap_tensors(p, moved)
    p.grad = place(torch.ones(8, 6), mesh, [Shard(1)])
    refuses(ReshardedParameterError, r"'w0'.*Shard\(0\): it is \(Shard\(dim=1\),\) now", twins)
    twins.optimizers[1].add_param_group(
        {"params": [("v", nn.Parameter(torch.ones(2)))]}
    )  # plans anew
    refuses(
        ReshardedParameterError,
        r"'w0'.*Shard\(1\): its momentum_buffer is \(Shard\(dim=0\),\).*save and load",
        twins,
    )

    uneven = fresh()
    p, _ = gradients(uneven)
    if dist.get_rank() == 1:
        p.grad = place(torch.ones(8, 6), mesh, [Shard(1)])
    expected = r"'w0'.*its gradient is \(Shard\(dim=1\),\)"
    refuses(
        GradientPlacementError,
        expected if dist.get_rank() == 1 else f"rank 1 cannot step: .*\n.*{expected}",
        uneven,
    )
    gradients(uneven)
    uneven.optimizers[1].step()
    vector = nn.Parameter(place(torch.ones(8), mesh, [Shard(0)]))  # in no plan
    layout = Replicate() if dist.get_rank() == 1 else Shard(0)
    vector.grad = place(torch.ones(8), mesh, [layout])
    refused(HybridMuon([("v", vector)]), [vector], GradientPlacementError, "'v'.*its gradient is")

    small = nn.Parameter(
        DTensor.from_local(torch.zeros(4, 6).to(torch.float8_e4m3fn), mesh, [Shard(0)])
    )
    with pytest.raises(UnsupportedTransportError, match=r"'w8'.*float8_e4m3fn cannot be stepped"):
        HybridMuon([("w8", small)])

    gathered = nn.Parameter(place(torch.ones(16, 6), mesh, [Shard(0)]))
    for replicas, p in ((None, gathered), (mesh, nn.Parameter(torch.ones(16, 6)))):
        with pytest.raises(ShardingError, match=r"'qkv'.* in 2 groups.* leave out replicas"):
            HybridMuon([("qkv", p)], splits=["qkv: rows 8+4+4 in 2 groups"], replicas=replicas)

    different = fresh(momentum=0.9, schedule="8+2" if dist.get_rank() else "keller-jordan")
    gradients(different)
    expected = (
        r"ranks 0 and 1 do not take the same step; rank 0: w0: .*5 steps.*; rank 1: w0: .*10 steps"
    )
    refuses(PlanMismatchError, expected, different)


@on_ranks(2, 3, 4, 8)
def process_groups():
    """On some of the ranks an optimizer makes one process group, however often it plans anew.

    Rank 0 is in one more group than others: torch names groups by this number.
    """
    world = dist.get_world_size()
    alone = dist.new_group([0])
    assert (dist.get_rank() == 0) == isinstance(alone, dist.ProcessGroup)
    pairs = [[i, world - 1 - i] for i in range(world // 2)]  # no other case has made these
    mine = [group for pair in pairs if (group := dist.new_group(pair)) and dist.get_rank() in pair]
    if not mine:
        return
    (sub,) = mine
    earlier_groups = set(c10d._world.pg_names)
    for sharded in (ShardedSettings(), ShardedSettings(state="sharded")):
        model = nn.Linear(8, 8)
        optimizer = HybridMuon(
            model.named_parameters(),
            replicas=sub,
            sharded=sharded,
            on_nonfinite="skip",
            magma_muon=False,
        )
        for trained in (True, False, True):
            model.bias.requires_grad_(trained)
            for p in model.parameters():
                p.grad = torch.ones_like(p) if p.requires_grad else None
            optimizer.step()
    new_groups = set(c10d._world.pg_names) - earlier_groups
    expected = [dist.get_process_group_ranks(sub)] if world > 2 else []
    assert [dist.get_process_group_ranks(group) for group in new_groups] == expected


def die_in_the_middle():
    """Rank 1 dies between two steps."""
    twins = Twins(SHAPES["even"], mesh_of((dist.get_world_size(),)), [Shard(0)])
    twins.step()
    if dist.get_rank() == 1:
        os._exit(7)
    for p in twins.many:
        p.grad = p.detach().clone()
    twins.optimizers[1].step()
