"""Whole models on several ranks, and their states: trained, saved, restored."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_cases import SETTINGS, drawn, mesh_of, named_mesh
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from deepmd_muon.optim import HybridMuon, clip_adam_grad_norm_
from deepmd_muon.optim.dtensors import full_tensor
from deepmd_muon.optim.sharded import ShardedSettings


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 3)
        self.experts = nn.Parameter(torch.randn(5, 6, 3) / 5)

    def forward(self, x):
        y = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(y) + torch.einsum("bi,eij->bj", x, self.experts)


def train(model, optimizer, steps, start=0, accumulate=1, clip=0.5):
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            x = drawn(torch.Generator("cpu").manual_seed(100 * step + part), (8, 6), dtype)
            (model(x) - x[:, :3]).square().mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@on_ranks(2, 3, 4, 8)
def fsdp2_models(**more):
    """fully_shard (also per layer, HSDP, over TP) equals one process; every rank sees the same batch."""
    world = dist.get_world_size()

    def fsdp(model):
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh_of((world,)))
        return fully_shard(model, mesh=mesh_of((world,)))

    def dim1(model):
        def dim(p):  # FSDP2 cuts other dimensions than the first only evenly
            return Shard(1) if p.ndim == 2 and p.shape[1] % world == 0 else Shard(0)

        return fully_shard(model, mesh=mesh_of((world,)), shard_placement_fn=dim)

    def hsdp(model):
        return fully_shard(model, mesh=named_mesh((2, world // 2), ("replica", "data")))

    def over_tp(model):
        mesh = named_mesh((world // 2, 2), ("data", "tensor"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        return fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])

    def ddp(model):
        return nn.parallel.DistributedDataParallel(model)

    # Four ranks have meshes of two axes only: those of one are tested on two and on three.
    ways = [fsdp, dim1, ddp] * (world != 4) + [hsdp, over_tp] * (world % 2 == 0 and world > 2)
    settings = {**SETTINGS, "precision": "float64", **more}
    for way, accumulate in [(fsdp, 1)] * (world == 2) + [(way, 2) for way in ways]:
        one, many = Net().double(), way(Net().double())
        first = HybridMuon(one.named_parameters(), **settings)
        second = HybridMuon(
            many.named_parameters(), **settings, replicas=dist.group.WORLD if way is ddp else None
        )
        assert [e.name for e in second.routing] == [e.name for e in first.routing]
        clip = 0 if way is over_tp else 0.5  # torch clips parameters of one mesh only
        train(one, first, 3, accumulate=accumulate, clip=clip)
        train(many, second, 3, accumulate=accumulate, clip=clip)
        assert len(second.plan.domains) == (2 if way is over_tp else 1)
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            full = q.full_tensor() if isinstance(q, DTensor) else q
            bound = (
                1e-8 if p.is_cuda else 1e-10
            )  # Magma scores are float32, and sums are added in another order there
            torch.testing.assert_close(full, p, rtol=0, atol=bound)


def full_state(model, optimizer):
    """Gather weights and state: plain tensors by name and key."""
    found = {}
    for name, p in model.named_parameters():
        values = {"weight": p.detach(), **optimizer.state[p]}
        for key, x in values.items():
            found[name.removeprefix("module."), key] = (
                x.full_tensor() if isinstance(x, DTensor) else x
            ).clone()
    return found


def wrapped(way):
    """Return a model and its optimizer: sharded, under DDP, which 'zero' cuts the state of, or alone.

    A way that ends in 16 has bfloat16 parameters with master weights.
    """
    world, model, narrow = dist.get_world_size(), Net(), way.endswith("16")
    if narrow:
        model, way = model.bfloat16(), way.removesuffix("16")
    if way in ("fsdp", "offload"):
        fully_shard(model, mesh=mesh_of((world,)))
    elif way == "hsdp":
        fully_shard(model, mesh=named_mesh((2, world // 2), ("replica", "data")))
    elif way in ("ddp", "zero"):
        model = nn.parallel.DistributedDataParallel(model)
    told = {"replicas": dist.group.WORLD} if way in ("ddp", "zero") else {}
    sharded = ShardedSettings(state="sharded" if way == "zero" else "replicated")
    # Rules with one number per matrix, with one per row, and without state.
    settings = {
        **SETTINGS,
        **told,
        "normuon": True,
        "cautious_decay": True,
        "master_weights": narrow,
    }
    return model, HybridMuon(
        model.named_parameters(), **settings, sharded=sharded, offload=way == "offload"
    )


def save(folder, way):
    """Train three steps; save through torch.distributed.checkpoint, as one full state dict, and what both hold."""
    model, optimizer = wrapped(way)
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "sharded")
    whole = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    held_by_all = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"held": held_by_all, "whole": whole}, folder / "full.pt")
    dist.barrier()


def load(folder, way):
    """Restore both kinds of state on these ranks: all tensors bitwise, and the next step equals one process's."""
    saved = torch.load(folder / "full.pt", weights_only=True)
    narrow = way.endswith("16")
    one, first = wrapped("alone16" if narrow else "alone")
    one.load_state_dict({name: x for (name, key), x in saved["held"].items() if key == "weight"})
    set_optimizer_state_dict(one, first, saved["whole"])
    for kind in ("sharded", "whole"):
        model, optimizer = wrapped(way)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "sharded")
        if kind == "sharded":
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        else:
            set_model_state_dict(model, weights)
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(model, optimizer, saved["whole"], options=options)
        now = full_state(model, optimizer)
        assert now.keys() == saved["held"].keys()
        for key, x in saved["held"].items():
            assert torch.equal(now[key], x), (kind, key)
        train(model, optimizer, 1, start=3)
        if kind == "sharded":
            train(one, first, 1, start=3)
        after, expected = full_state(model, optimizer), full_state(one, first)
        for key, x in expected.items():
            # bfloat16 gradients are averaged over ranks in bfloat16.
            rtol, atol = (0.02, 2e-3) if narrow else (1e-5, 1e-6)
            torch.testing.assert_close(after[key], x, rtol=rtol, atol=atol)


def exchange_parameters(model, optimizer, change):
    """Change a model, and put its new parameters into the optimizer's groups as accelerate does."""
    names = {p: name for name, p in model.named_parameters()}
    change(model)
    present = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [present[names[p]] for p in group["params"]]


@on_ranks(2, 8)
def replaced_parameters():
    """Parameters replaced before the first step or after some, in either direction, are stepped as on one process."""
    mesh = mesh_of((dist.get_world_size(),))

    def shard(model):
        for layer in (model.first, model.second, model):
            fully_shard(layer, mesh=mesh)

    settings = {**SETTINGS, "precision": "float64"}
    expected = Net().double()
    one = HybridMuon(expected.named_parameters(), **settings)
    train(expected, one, 4)
    for before, kind in (
        (0, {}),
        (2, {}),
        (2, {"offload": True}),
        (2, {"replicas": mesh, "sharded": ShardedSettings(state="sharded")}),
    ):
        model = Net().double()
        optimizer = HybridMuon(model.named_parameters(), **settings, **kind)
        train(model, optimizer, before)
        exchange_parameters(model, optimizer, shard)
        train(model, optimizer, 4 - before, start=before)
        assert len(optimizer.state) == len(list(model.parameters()))
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), q, rtol=0, atol=1e-8), (before, kind, name)
            for key, value in one.state[q].items():
                found = full_tensor(optimizer.state[p][key])
                assert torch.allclose(found.cpu(), value.cpu(), rtol=1e-5, atol=1e-8), (
                    before,
                    kind,
                    name,
                    key,
                )

    model = Net().double()
    shard(model)
    optimizer = HybridMuon(model.named_parameters(), **settings)
    train(model, optimizer, 2)
    plain = Net().double()
    names = [name for name, _ in plain.named_parameters()]
    plain.load_state_dict({name: p.full_tensor().detach() for name, p in model.named_parameters()})
    present = dict(plain.named_parameters())
    optimizer.param_groups[0]["params"] = [present[name] for name in names]
    train(plain, optimizer, 2, start=2)
    for p, q in zip(plain.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-8)


@on_ranks(2, 4, 8)
def clipped_adam_gradients():
    """The norm and the gradients of one process: parameters cut by FSDP, and replicas."""
    for way in ("fsdp", "hsdp", "ddp") if dist.get_world_size() % 2 == 0 else ("fsdp",):
        one, first = wrapped("alone")
        many, second = wrapped(way)
        x = drawn(torch.Generator("cpu").manual_seed(3), (8, 6), torch.float32)
        for model in (one, many):
            (model(x) - x[:, :3]).square().mean().backward()
        norms = [clip_adam_grad_norm_(optimizer, 0.01) for optimizer in (first, second)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        assert norms[0] > 0.02
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(q.grad), p.grad, rtol=1e-4, atol=1e-7)
