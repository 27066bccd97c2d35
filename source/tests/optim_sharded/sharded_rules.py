"""NorMuon, cautious decay and rules of a third party on several ranks equal one process in every layout and view."""

from __future__ import annotations

import example_rules
import recent_rules  # noqa: F401  # registers them
import torch
import torch.distributed as dist
from sharded_cases import SETTINGS, SHAPES, Twins, every_layout, make_replicas, mesh_of
from sharded_models import fsdp2_models
from spawn_ranks import on_ranks
from torch.distributed.tensor import DTensor, Replicate, Shard

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.dtensors import full_tensor
from deepmd_muon.optim.sharded import ShardedSettings

BOTH = {"normuon": True, "cautious_decay": True}
SOAP = {**example_rules.SOAP, "magma_muon": False}
NORMS = example_rules.BRAKE
COLUMNS = {"normuon": True, "layout": "in_out", "magma_muon": False}


@on_ranks(2, 3, 4, 8)
def rules_in_every_layout():
    """On four ranks each rule runs on the layouts that differ for it; eight, in the slow tests, run all."""
    four = dist.get_world_size() == 4
    every_layout(options=(BOTH,))
    every_layout(
        names=("FSDP × TP", "strided") if four else None, kinds=("rest",), options=(COLUMNS,)
    )
    every_layout(kinds=("rest",) if four else ("even", "rest"), options=(SOAP,))
    every_layout(names=("HSDP", "FSDP × TP") if four else None, kinds=("rest",), options=(NORMS,))
    for rules in (["muown"], ["mars", "contra", "ema_nesterov"]):
        options = {"rules": rules, "magma_muon": False, "weight_decay": 0.0}
        every_layout(names=("strided", "HSDP"), kinds=("rest",), options=(options,))


@on_ranks(2, 8)
def rules_of_views():
    """Folded dimensions, fused weights cut along and across neurons, experts; buckets of one block."""
    views = (
        {"muon_mode": "flat"},
        {"muon_mode": "2d", "expert_patterns": ["w0", "w1"]},
        {"splits": ["w0: rows (1+2)*2+rest", "w1: columns rest+3+8", "w2: columns 1*2+rest"]},
        {"conv_patterns": ["w0", "w1"], "splits": ["w0: rows 2"]},
    )
    small = ShardedSettings(bucket_bytes=1, slots=2, replication="spread")
    for view in views:
        for settings, names in (
            (BOTH, ("Shard(0)", "HSDP", "strided")),
            (COLUMNS, ("Shard(1)", "FSDP × TP")),
            (SOAP, ("strided", "FSDP × TP")),
        ):
            every_layout(
                names=names, kinds=("experts",), options=({**settings, **view},), sharded=small
            )


@on_ranks(2, 3, 8)
def rows_of_replicas_live_with_the_parts_of_their_momenta():
    ranks = mesh_of((dist.get_world_size(),))
    replicas = make_replicas([(5, 96), (96, 5)], ranks, **BOTH)
    replicas.step()
    wide, tall = (replicas.optimizers[1].state[q]["second_moment_of_rows"] for q in replicas.many)
    assert not isinstance(wide, DTensor)  # its momentum is cut along columns
    assert tall.to_local().shape[0] == -(-96 // dist.get_world_size())


@on_ranks(2, 8)
def rules_without_some_gradients():
    for placements in ([Shard(0)], [Shard(1)]):  # replicas must agree
        for settings in (BOTH, SOAP):
            mesh = mesh_of((dist.get_world_size(),))
            twins = Twins(SHAPES["even"], mesh, placements, many={"offload": True}, **settings)
            twins.step()
            twins.step(without=(1, 3), nowhere=(2,))
            twins.step()
            twins.assert_equal(1e-5)


@on_ranks(2, 8)
def master_weights():
    """Masters of one process, in the layout of the parameters: exchanged, gathered, offloaded; gradients missing."""
    mesh, settings = (
        mesh_of((dist.get_world_size(),)),
        {"master_weights": True, "lr": 1e-3, "adam_patterns": ["w4"]},
    )
    for placements, many in (([Shard(0)], {}), ([Shard(1)], {"offload": True})):
        twins = Twins(SHAPES["even"], mesh, placements, dtype=torch.bfloat16, many=many, **settings)
        twins.step()
        twins.step(without=(1,), nowhere=(2,))
        twins.step()
        twins.assert_equal()
        for p, q in zip(twins.one, twins.many, strict=True):
            one, several = (
                o.state[x]["master_weight"] for o, x in zip(twins.optimizers, (p, q), strict=True)
            )
            assert several.to_local().shape == q.to_local().shape
            torch.testing.assert_close(full_tensor(several), one, rtol=0, atol=3e-5)
            assert torch.equal(full_tensor(several).bfloat16(), full_tensor(q.detach()))
            if many.get("offload"):
                assert "master_weight" in twins.optimizers[1]._host_memory._offloaded[q]
    spread = {"sharded": ShardedSettings(replication="spread")}
    replicas = make_replicas(
        SHAPES["even"], dist.group.WORLD, many=spread, dtype=torch.bfloat16, **settings
    )
    replicas.step()
    replicas.step()
    for p, q in zip(replicas.one, replicas.many, strict=True):
        one, several = (
            o.state[x]["master_weight"] for o, x in zip(replicas.optimizers, (p, q), strict=True)
        )
        torch.testing.assert_close(several, one, rtol=0, atol=3e-5)


@on_ranks(2, 4, 8)
def rows_live_with_their_elements():
    """A rank keeps the moments of the rows that it has, and no others."""
    world = dist.get_world_size()
    for placements, rows in (([Shard(0)], 24 // world), ([Shard(1)], 24), ([Replicate()], 24)):
        twins = Twins([(24, 24)], mesh_of((world,)), placements, **BOTH)
        twins.step()
        (state,) = twins.optimizers[1].state.values()
        x = state["second_moment_of_rows"]
        assert x.shape == (24, 1)
        assert x.to_local().shape == (rows, 1)


@on_ranks(2, 8)
def rules_migrate():
    """Views change on all ranks as on one process: state in parts is gathered, averaged and cut again."""
    world = dist.get_world_size()
    now = {"muon_mode": "flat", "splits": ["w1: columns 4+12"], "on_route_change": "migrate"}
    for placements in ([Shard(0)], [Shard(1)]):
        for settings in (BOTH, {**BOTH, "layout": "in_out"}, SOAP):
            twins = Twins([(6, 8, 16), (16, 16)], mesh_of((world,)), placements, **settings)
            twins.step()
            for i, params in enumerate((twins.one, twins.many)):
                again = HybridMuon(
                    [(f"w{k}", p) for k, p in enumerate(params)], **{**SETTINGS, **settings, **now}
                )
                again.load_state_dict(twins.optimizers[i].state_dict())
                twins.optimizers[i] = again
            twins.step()
            twins.assert_equal(1e-5)


@on_ranks(2, 8)
def rules_of_models():
    fsdp2_models(**BOTH)
