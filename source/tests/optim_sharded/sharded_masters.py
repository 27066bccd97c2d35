"""Master weights of 16-bit replicas whose state is cut into parts (ZeRO-1)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from example_rules import BRAKE, SOAP
from sharded_cases import assert_same_bits, counted_traffic, drawn, make_replicas, mesh_of
from spawn_ranks import on_ranks

from deepmd_muon.optim import HybridMuon
from deepmd_muon.optim.dtensors import full_tensor, local_of
from deepmd_muon.optim.qk_clip import QKClip, SeparateQK
from deepmd_muon.optim.sharded import ShardedSettings

SHAPES = [
    (16, 16),
    (16, 48),
    (48, 16),
    (7, 5),
    (2, 3),
    (6, 8, 16),
    (3, 5, 4),
    (13,),
    (9, 4),
    (),
    (2, 2),
]
SETTINGS = {"lr": 1e-3, "precision": "float32", "adam_patterns": ["w8"], "master_weights": True}
SMALL = {"bucket_bytes": 1, "slots": 1, "free_gradients": True}


def make(sharded=None, many=None, dtype=torch.bfloat16, shapes=SHAPES, **settings):
    settings = {**SETTINGS, "dtype": dtype, **settings}
    return make_replicas(shapes, dist.group.WORLD, sharded, many, **settings)


def masters(replicas, number):
    """Return the masters of one process, or those of all ranks joined."""
    params = replicas.many if number else replicas.one
    return [full_tensor(replicas.optimizers[number].state[p]["master_weight"]) for p in params]


def assert_equal(replicas, tolerance=3e-5):
    """Masters agree with those of one process; weights are the rounded masters, bit for bit."""
    tolerance = max(tolerance, 1e-4) if replicas.many[0].is_cuda else tolerance
    for i, (one, several) in enumerate(
        zip(masters(replicas, 0), masters(replicas, 1), strict=True)
    ):
        assert several.dtype == torch.float32
        state = replicas.optimizers[1].state[replicas.many[i]]
        moment = state.get("momentum_buffer", state.get("exp_avg"))
        assert local_of(state["master_weight"]).shape == local_of(moment).shape
        torch.testing.assert_close(
            several.cpu(), one.cpu(), rtol=0, atol=tolerance, msg=lambda text, i=i: f"w{i}: {text}"
        )
        q = replicas.many[i].detach()
        assert torch.equal(several.to(q.device, q.dtype), q), f"w{i}"
        copies = [torch.empty_like(q) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, q)
        assert all(torch.equal(copies[0], other) for other in copies), f"w{i}"


@on_ranks(2, 3, 8)
def masters_of_replicas():
    """Steps equal those of one process: with rules, views, offloaded, in small buckets."""
    cases = (
        ({}, {}, {}),
        ({"normuon": True, "cautious_decay": True, "magma_muon": False}, SMALL, {"offload": True}),
        ({**SOAP, "magma_muon": False, "nesterov": False}, {}, {}),
        ({"muon_mode": "flat"}, {}, {}),
        (
            {
                "muon_mode": "2d",
                "splits": ["w0: rows 1", "w1: columns rest+16", "w2: columns 1*2+rest"],
            },
            SMALL,
            {},
        ),
        ({"normuon": True}, {}, {"offload": True}),
        (BRAKE, {}, {}),  # reads 16-bit weights, as in one process
    )
    for settings, sharded, many in cases:
        replicas = make(sharded, many, **settings)
        for _ in range(6 if settings else 20):
            replicas.step()
        assert_equal(replicas, 1e-4 if settings is BRAKE else 3e-5)
        if many:
            host = replicas.optimizers[1]._host_memory._offloaded
            assert all("master_weight" in host[q] for q in replicas.many)
        if sharded is SMALL:
            assert all(
                q.grad is None
                for q, entry in zip(replicas.many, replicas.optimizers[1].routing, strict=True)
                if entry.route == "muon"
            )
    replicas = make(dtype=torch.float16)
    for _ in range(3):
        replicas.step()
    assert_equal(replicas)


@on_ranks(2, 3, 8)
def masters_of_replicas_in_collectives():
    """Updates return to their parts, and one all-gather a route carries 16-bit elements."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [*(3 * [(16, 48)]), (11,)]
    total = {}
    for on in (True, False):
        settings = {"shapes": shapes, "master_weights": on, "adam_patterns": []}
        replicas = make({"bucket_bytes": 5000}, **settings)
        replicas.step()
        with counted_traffic() as (sent, gathered):
            replicas.step()
        plan = replicas.optimizers[1].plan
        (domain,) = plan.domains
        assert len(sent) == 2 * domain.n_buckets
        assert sum(sent) == domain.bytes_sent(plan.settings)[rank]
        total[on] = sum(domain.bytes_sent(plan.settings).values())
        sizes = [-(-11 // world), 3 * 48 * 16 // world] if on else [-(-11 // world)]
        assert [part.numel() for part in gathered] == sizes
        assert all(part.dtype == torch.bfloat16 for part in gathered)
    assert total[True] < total[False]


@on_ranks(2, 3, 8)
def masters_of_replicas_without_some_gradients():
    for many in ({}, {"offload": True}):
        replicas = make(many=many, on_nonfinite="skip")
        replicas.step()
        replicas.step(nowhere=(0, 5, 7))
        replicas.step(without=(1, 4))
        before = replicas.bits()
        replicas.step(nowhere=(*range(len(SHAPES)),))
        assert_same_bits(replicas.bits(), before)
        assert_equal(replicas)
        before = replicas.bits()
        replicas.many[1].grad = torch.full_like(
            replicas.many[1], torch.nan if dist.get_rank() else 1.0
        )
        replicas.optimizers[1].step()
        assert_same_bits(replicas.bits(), before)


@on_ranks(2, 8)
def masters_of_replicas_that_are_clipped():
    """QK-clip scales whole weights; parts of masters start again from the clipped weight."""
    clip = QKClip((SeparateQK("layer", "q", "k", 3, 3),), threshold=1.0)
    logits = {"layer": torch.tensor([4.0, 0.5, 9.0])}
    found = []
    for extra in ({}, {"replicas": dist.group.WORLD, "sharded": ShardedSettings(state="sharded")}):
        draw = torch.Generator("cpu").manual_seed(4)
        params = {
            name: torch.nn.Parameter(drawn(draw, (12, 10), torch.bfloat16)) for name in ("q", "k")
        }
        settings = {**SETTINGS, "adam_patterns": []}
        optimizer = HybridMuon(params.items(), qk_clip=clip, **settings, **extra)
        for _ in range(3):
            for p in params.values():
                p.grad = drawn(draw, p.shape, p.dtype)
            optimizer.step(qk_logits=logits)
        for p in params.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        found.append([full_tensor(optimizer.state[p]["master_weight"]) for p in params.values()])
        for p, master in zip(params.values(), found[-1], strict=True):
            assert torch.equal(master.bfloat16(), p)
    for one, several in zip(*found, strict=True):
        torch.testing.assert_close(several, one, rtol=2**-8, atol=3e-5)


@on_ranks(2, 3, 8)
def masters_of_replicas_restart():
    """A restart is bitwise; states without masters or with whole ones load."""
    straight = make()
    for _ in range(3):
        straight.step()
    saved = straight.optimizers[1].state_dict()
    again = make(many={"offload": True})
    again.optimizers[1].load_state_dict(saved)
    for q, old in zip(again.many, straight.many, strict=True):
        q.data.copy_(old)
    again.random.set_state(straight.random.get_state())
    with torch.no_grad():
        for q in (*again.many, *straight.many, *straight.one):
            if q.shape == (16, 48):
                q[0] = 3.0
    for _ in range(3):
        again.step()
        straight.step()
    assert_same_bits(again.bits(), straight.bits())
    assert_equal(straight)
    whole = straight.optimizers[0].state_dict()
    with_whole = make()
    with_whole.optimizers[1].load_state_dict(whole)
    with_whole.optimizers[0].load_state_dict(whole)
    for p, q, old in zip(with_whole.one, with_whole.many, straight.one, strict=True):
        p.data.copy_(old)
        q.data.copy_(old)
    with_whole.step()
    assert_equal(with_whole)
    without, late = make(master_weights=False), make()
    without.step()
    for optimizer, old in zip(late.optimizers, without.optimizers, strict=True):
        optimizer.load_state_dict(old.state_dict())
    for p, q, old in zip(late.one, late.many, without.one, strict=True):
        p.data.copy_(old)
        q.data.copy_(old)
    late.step()
    assert_equal(late)


@on_ranks(2, 4, 8)
def masters_beside_wide_parameters():
    """One optimizer steps 16-bit and float32 replicas, on two axes from four ranks on."""
    world = dist.get_world_size()
    mesh = mesh_of((2, world // 2) if world % 2 == 0 and world > 2 else (world,))
    settings = {**SETTINGS, "weight_decay": 0.1, "adam_patterns": []}
    replicas = make_replicas([(16, 16), (7, 5)], mesh, dtype=torch.bfloat16, **settings)
    both = [*replicas.one], [*replicas.many]
    for params in both:
        params += [torch.nn.Parameter(p.detach().float().t().contiguous()) for p in params]
    options = {"replicas": mesh, "sharded": replicas.optimizers[1].sharded}
    optimizers = [
        HybridMuon([(f"w{i}", p) for i, p in enumerate(params)], **settings, **extra)
        for params, extra in zip(both, ({}, options), strict=True)
    ]
    for number in range(3):
        for params in both:
            draw = torch.Generator("cpu").manual_seed(number)
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw, device="cpu").to(p.device, p.dtype)
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(*both, strict=True):
        assert ("master_weight" in optimizers[1].state[q]) == (q.dtype == torch.bfloat16)
        torch.testing.assert_close(
            q, p, rtol=1e-5 if p.dtype == torch.float32 else 2**-8, atol=1e-5
        )
