"""Where optimizer state lives: in host memory, and of replicas cut into parts (ZeRO-1)."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from example_rules import BRAKE, SOAP
from sharded_cases import (
    SETTINGS,
    SHAPES,
    Twins,
    as_captured,
    assert_same_bits,
    counted_traffic,
    drawn,
    finished_step,
    fits,
    layouts,
    make_replicas,
    mesh_of,
    named_mesh,
    place,
    refused,
)
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from deepmd_muon.optim import AdamConfig, AdamWConfig, HybridMuon
from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.errors import (
    GradientPlacementError,
    MissingGradientError,
    PlanMismatchError,
    ReshardedParameterError,
    ShardingError,
    UnsupportedTransportError,
)
from deepmd_muon.optim.sharded import ShardedSettings, elements, repeated
from deepmd_muon.optim.sharded.bucket import Bucket
from deepmd_muon.optim.sharded.transport import Exchange
from deepmd_muon.optim.state.schema import ALL_MOMENTS


@on_ranks(2, 3, 8)
def offloaded():
    """Moments in host memory change no bit on any layout, also without some gradients."""
    kinds = ("even", "rest") if dist.get_world_size() < 4 else ("even",)
    for (name, mesh, placements), kind in itertools.product(layouts(), kinds):
        shapes = [shape for shape in SHAPES[kind] if fits(shape, placements)]
        twins = Twins(
            shapes, mesh_of(mesh), placements, many={"offload": True, "offload_bytes": 600}
        )
        twins.step()
        twins.step()
        twins.optimizers[1].offload(False)
        twins.step()
        states = twins.optimizers[1].state.values()
        on_device = [
            weakref.ref(local_of(x))
            for state in states
            for k, x in state.items()
            if k in ALL_MOMENTS
        ]
        twins.optimizers[1].offload()
        assert on_device
        assert all(moment() is None for moment in on_device)
        twins.step()
        try:
            twins.assert_equal()
        except AssertionError as error:
            raise AssertionError(f"{name}, {kind}: {error}") from error
    mesh = mesh_of((dist.get_world_size(),))
    for settings in ({}, {"nesterov": False}):
        sharded = ShardedSettings(bucket_bytes=1, slots=2)
        twins = Twins(
            SHAPES["even"] + [(6, 8, 16)],
            mesh,
            [Shard(0)],
            sharded=sharded,
            many={"offload": True},
            **settings,
        )
        twins.step()
        twins.step(without=(1, 3))
        twins.step(nowhere=(0, 4))
        twins.step(without=(1,), nowhere=(2,))
        twins.assert_equal(1e-6)


# How the work of replicas is shared, and more of the optimizer's arguments.
SHARES = [
    ({"replication": "spread"}, {}),
    ({"bucket_bytes": 1, "slots": 1, "free_gradients": True}, {"offload": True}),
    ({"replication": "repeat"}, {}),
    (
        {"replication": "repeat", "free_gradients": True},
        {"offload": True, "offload_bytes": 2000},
    ),
]
RULES = [
    {},
    {"magma_muon": False, "nesterov": False},
    {"normuon": True, "cautious_decay": True},
    {"normuon": True, "layout": "in_out", "magma_muon": False},
    {**SOAP, "magma_muon": False},
    BRAKE,
    {"rules": ["ema_nesterov"], "magma_muon": False},
]


@on_ranks(2, 3, 8)
def cut_state():
    """Replicas with cut state equal one process and each other, also without some gradients."""
    shapes = [(7, 6), (13,), (2, 3), *SHAPES["even"], (6, 8, 16)]
    for settings, (sharded, more) in itertools.product(RULES, SHARES):
        told = dist.group.WORLD
        replicas = make_replicas(shapes, told, sharded, more, on_nonfinite="skip", **settings)
        replicas.step()
        replicas.step(nowhere=(0, 1))
        replicas.step(without=() if "repeat" in sharded.values() else (2, 4))
        replicas.assert_equal(1e-5 if settings.get("rules") or settings.get("normuon") else 1e-6)
        for q in replicas.many:
            copies = [torch.empty_like(q) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, q.detach())
            assert all(torch.equal(copies[0], other) for other in copies)
        before = replicas.bits()
        for q in replicas.many:
            q.grad = torch.full_like(q, torch.nan if dist.get_rank() else 1.0)
        replicas.optimizers[1].step()
        assert_same_bits(replicas.bits(), before)


@on_ranks(2, 3, 8)
def cut_state_where_rounding_is_the_same():
    """Bitwise, except in three parts; 16-bit parameters are rounded once."""
    mesh = mesh_of((dist.get_world_size(),))
    shapes = [*SHAPES["even"], (256,)]
    for replication, settings in itertools.product(("spread", "repeat"), RULES[:2]):
        replicas = make_replicas(shapes, mesh, {"replication": replication}, **settings)
        gathers = bool(replicas.optimizers[1].plan.domains[0].gathered_bytes)
        assert gathers == (replication == "repeat")
        for _ in range(3):
            replicas.step()
        replicas.assert_equal(0.0 if dist.get_world_size() != 3 else 1e-6)
    replicas = make_replicas(shapes, mesh, dtype=torch.bfloat16)
    replicas.step()
    replicas.step()
    replicas.assert_equal(2**-8)


@on_ranks(2, 8)
def schedules():
    """Numbers that schedulers change reach all parts of the step, and so do a rule and a state."""
    mesh = mesh_of((dist.get_world_size(),))
    for replication in ("repeat", "spread"):
        shapes = [*SHAPES["even"], (16,)]
        replicas = make_replicas(shapes, mesh, {"replication": replication}, vector_route="adamw")
        for number in (0.95, 0.85, 0.9):
            for optimizer in replicas.optimizers:
                (group,) = optimizer.param_groups
                group |= {"momentum": number, "weight_decay": number, "adam_betas": (number, 0.99)}
            replicas.step()
        replicas.assert_equal(1e-6)
        for optimizer in replicas.optimizers:
            optimizer.param_groups[0]["normuon"] = True
        replicas.step()
        for optimizer in replicas.optimizers:
            for state in optimizer.state.values():
                state |= {key: 2 * state[key] for key in ALL_MOMENTS if key in state}
        replicas.step()
        replicas.assert_equal(1e-6)


@on_ranks(2, 8)
def momenta_gathered_early():
    """`prefetch` changes no bit, whatever comes between it and the step."""
    mesh = mesh_of((dist.get_world_size(),))
    told = {"replication": "repeat"}
    early, late = (make_replicas(SHAPES["even"], mesh, told, on_nonfinite="skip") for _ in "12")
    gathers = []
    gather = elements.all_gather

    def counting(*args, **options):
        gathers.append(args)
        return gather(*args, **options)

    def same():
        for p, q in zip(early.many, late.many, strict=True):
            assert torch.equal(p, q)
            states = (each.optimizers[1].state[x] for each, x in ((early, p), (late, q)))
            assert all(
                torch.equal(local_of(x), local_of(y))
                for x, y in zip(*map(dict.values, states), strict=True)
            )

    def between(what):
        optimizer = early.optimizers[1]
        if what == "twice":
            optimizer.prefetch()
        elif what == "saved on one rank" and dist.get_rank() == 0:
            optimizer.state_dict()
        elif what == "loaded":
            optimizer.load_state_dict(optimizer.state_dict())
        elif what == "frozen":
            early.many[0].requires_grad_(False)
            optimizer.state_dict()
            early.many[0].requires_grad_(True)

    early.optimizers[1].prefetch()  # before the first step there is nothing to start
    for what in ("nothing", "twice", "saved on one rank", "loaded", "frozen", "nothing"):
        for each in (early, late):
            each.step()
        same()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeated, "all_gather", counting)
            early.optimizers[1].prefetch()
        assert len(gathers) == 1, what
        gathers.clear()
        between(what)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated, "all_gather", counting)
        for each in (early, late):
            each.step()
        assert len(gathers) == 1  # of the other optimizer
    same()
    states = early.optimizers[1].state.values()
    momenta = [weakref.ref(local_of(x["momentum_buffer"])) for x in states]
    early.optimizers[1].offload()
    assert all(momentum() is None for momentum in momenta)


@on_ranks(2, 8)
def cut_state_takes_a_part_of_the_memory():
    """Moments take 1/W of the memory where sizes divide, and at most a row more elsewhere."""
    world = dist.get_world_size()
    replicas = make_replicas([(48, 96), (12, 6, 24), (4800,), (world + 1, 1000)], mesh_of((world,)))
    replicas.step()
    one, many = replicas.optimizers
    for p, q in zip(replicas.one, replicas.many, strict=True):
        for key, x in one.state[p].items():
            if key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
                part = many.state[q][key].to_local().numel()
                divides = any(n % world == 0 for n in x.shape[: None if x.ndim > 1 else 1])
                assert part == x.numel() // world if divides else part <= 2 * x.numel() // world
    assert many.plan.parameters[0].state_layout.ranks == tuple(range(world))
    assert "state on mesh" in str(many.plan.parameters[0])
    before = dict(many.state)
    fresh = many.fresh_state()
    assert list(many.state.items()) == list(before.items())
    assert (
        fresh["w0"]["momentum_buffer"].to_local().shape
        == before[replicas.many[0]]["momentum_buffer"].to_local().shape
    )


@on_ranks(2, 3, 8)
def cut_state_collectives():
    """Two all-to-alls a bucket with the plan's bytes, and one all-gather for the Adam routes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes = [*(3 * SHAPES["even"]), (11,), (5,)]
    vectors = sum(-(-n // world) for n in (11, 5))
    for sharded in ({"bucket_bytes": 5000}, {"replication": "repeat"}):
        replicas = make_replicas(shapes, mesh_of((world,)), sharded)
        replicas.step()
        with counted_traffic() as (sent, gathered):
            replicas.step()
        plan = replicas.optimizers[1].plan
        (domain,) = plan.domains
        sizes = [part.numel() for part in gathered]
        if "bucket_bytes" in sharded:
            assert len(sent) == 2 * domain.n_buckets > 2
            assert sum(sent) == domain.bytes_sent(plan.settings)[rank]
            assert sizes == [vectors]
        else:
            assert not sent
            assert sizes == [domain.gathered_bytes // 4, vectors]
            assert domain.bytes_sent(plan.settings)[rank] == 4 * sizes[0] * (world - 1)


@on_ranks(4, 8)
def cut_state_with_further_domains():
    """All ranks gather momenta even if some of them exchange pieces of further matrices."""
    world = dist.get_world_size()
    half = world // 2
    has_expert = dist.get_rank() >= half
    mesh = named_mesh((2, half), ("replica", "data"))["data"]
    placements = [Shard(0)]
    random = torch.Generator("cpu").manual_seed(4)
    shapes = {f"w{i}": shape for i, shape in enumerate([*SHAPES["even"], (7,)])}
    shapes["expert"] = (24, 16)
    for settings, many in (
        ({}, {}),
        ({"free_gradients": True}, {"offload": True, "offload_bytes": 2000}),
    ):
        whole = {name: nn.Parameter(drawn(random, shape)) for name, shape in shapes.items()}
        local = {name: nn.Parameter(p.detach().clone()) for name, p in whole.items()}
        del local["expert"]
        if has_expert:
            expert = place(whole["expert"].detach(), mesh, placements)
            local["expert"] = nn.Parameter(expert)
        one = HybridMuon(whole.items(), **SETTINGS)
        optimizer = HybridMuon(
            local.items(),
            **SETTINGS,
            replicas=mesh_of((world,)),
            sharded=ShardedSettings(state="sharded", **settings),
            **many,
        )
        domains = optimizer.plan.domains
        assert [domain.gathered_bytes > 0 for domain in domains] == [True, False][: len(domains)]
        assert len(domains) == 1 + has_expert
        for step in range(3):
            for name, p in whole.items():
                p.grad = drawn(random, p.shape)
                if name in local:
                    is_expert = name == "expert"
                    local[name].grad = (
                        place(p.grad, mesh, placements) if is_expert else p.grad.clone()
                    )
            if step == 1:
                optimizer.prefetch()
            one.step()
            with as_captured() if step == 2 and not many else contextlib.nullcontext():
                optimizer.step()
            matrices = [p for p in local.values() if p.ndim > 1]
            assert all((p.grad is None) == bool(settings) for p in matrices)
        for name, p in local.items():
            expected = [whole[name], *one.state[whole[name]].values()]
            for x, y in zip(expected, [p, *optimizer.state[p].values()], strict=True):
                if isinstance(y, DTensor):
                    x = place(x.detach(), y.device_mesh, y.placements).to_local()
                    y = y.to_local().to(x.device)
                torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-6)


@on_ranks(2, 8)
def states_move_between_ways():
    """Loading in the same processes: cut into whole and back, bitwise, also through a deep copy."""
    shapes = [*SHAPES["even"], *SHAPES["mixed"]]
    mesh = mesh_of((dist.get_world_size(),))
    first = make_replicas(shapes, mesh)
    first.step()
    first.step()
    cut = first.optimizers[1].state_dict()
    whole = {
        **cut,
        "state": {
            i: {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in values.items()}
            for i, values in cut["state"].items()
        },
    }
    for state, offload in itertools.product((cut, whole), (False, True)):
        second = make_replicas(shapes, mesh, many={"offload": offload})
        for optimizer in second.optimizers:
            optimizer.load_state_dict(state)
        second.many = second.optimizers[1].param_groups[0]["params"]
        for p, q in zip(second.one + second.many, 2 * first.one, strict=True):
            p.data.copy_(q)
        second.random.set_state(first.random.get_state())
        if offload:
            second.optimizers[1], second.many = copy.deepcopy((second.optimizers[1], second.many))
        second.step()
        second.assert_equal(1e-6)


@on_ranks(2, 8)
def cut_state_preflight():
    """What cannot be stepped is refused on all ranks, before any byte moves."""
    world = dist.get_world_size()

    def refuses(error, match, optimizer):
        refused(optimizer, [], error, match, without=("all_to_all_single", "all_reduce"))

    # There is no backend for this device.
    p = nn.Parameter(torch.empty(4, 4, device="meta"))
    p.grad = torch.empty_like(p)
    spread = HybridMuon(
        [("w", p)], replicas=dist.group.WORLD, sharded=ShardedSettings(replication="spread")
    )
    refuses(UnsupportedTransportError, r"no backend for meta tensors.*initialise it with", spread)
    # A parameter, or its gradient, moves to another device between steps.
    for sharded in (False, True):
        if sharded:
            p = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh_of((world,)), [Shard(0)]))
            optimizer = HybridMuon([("w", p)])
            moved = DTensor.from_local(
                torch.ones(2, 4, device="meta"), mesh_of((world,)), [Shard(0)]
            )
        else:
            p = nn.Parameter(torch.ones(2 * world, 4))
            told = ShardedSettings(state="sharded")
            optimizer = HybridMuon([("w", p)], replicas=mesh_of((world,)), sharded=told)
            moved = torch.ones(2 * world, 4, device="meta")
        p.grad = p.detach().clone()
        optimizer.step()
        p.grad = None
        torch.utils.swap_tensors(p, nn.Parameter(moved))
        p.grad = p.detach().clone()
        here = torch.get_default_device()
        refuses(
            ReshardedParameterError,
            rf"'w' of shape \(\d+, 4\).*moved from {here} to meta",
            optimizer,
        )
    p = nn.Parameter(torch.ones(4 * world, 4))
    optimizer = HybridMuon(
        [("w", p)], replicas=dist.group.WORLD, sharded=ShardedSettings(state="sharded")
    )
    p.grad = DTensor.from_local(torch.ones(4, 4), mesh_of((world,)), [Shard(0)])
    refuses(
        GradientPlacementError, "'w'.*its gradient is a DTensor and the parameter is not", optimizer
    )


@on_ranks(2, 8)
def order_of_a_step():
    """Gathers start before the Adam routes and the bucket before; returns end after the next one."""
    log = []

    def noted(patch, owner, name, what):
        original = getattr(owner, name)

        def call(*args, **options):
            log.append((what, args[1] if what == "send" else None, args[0]))
            return original(*args, **options)

        patch.setattr(owner, name, call)

    for slots in (1, 2, 3, 4):
        sharded = ShardedSettings(bucket_bytes=1500, slots=slots)
        shapes = [(16, 16)] * 3 * dist.get_world_size() + [(7,)]
        twins = Twins(shapes, mesh_of((dist.get_world_size(),)), [Shard(0)], sharded=sharded)
        twins.step()
        optimizer = twins.optimizers[1]
        number = {
            id(b.exchange): k for k, b in enumerate(optimizer._sharded._parts.pipeline.travelling)
        }
        number |= {id(b): k for k, b in enumerate(optimizer._sharded._parts.pipeline.travelling)}
        buckets = len(number) // 2
        log.clear()
        with pytest.MonkeyPatch.context() as patch:
            noted(patch, Exchange, "start", "send")
            noted(patch, elements, "step_elements", "adam")
            noted(patch, Bucket, "assemble", "orthogonalize")
            noted(patch, Bucket, "take_state", "apply")
            for p in twins.many:
                p.grad = p.detach().clone()
            optimizer.step()
        at = {(leg or what, number.get(id(x))): i for i, (what, leg, x) in enumerate(log)}
        assert len(at) == len(log) == 4 * buckets + 1
        assert buckets >= 3
        assert at["adam", None] == min(slots, buckets)
        for k in range(buckets):
            assert at["gather", k] < at["orthogonalize", k] < at["return", k] < at["apply", k]
            if k and slots > 1:
                assert (at["gather", k] < at["orthogonalize", k - 1]) or slots == 2
                assert at["orthogonalize", k] < at["apply", k - 1]
            if k >= slots:  # the slot is free again
                assert at["apply", k - slots] < at["gather", k]


@on_ranks(2, 3, 8)
def adam_in_parts():
    """torch's Adam and AdamW are the same with state in parts; states load into each other."""
    world = dist.get_world_size()
    shapes = {"a": (8 * world, 4), "b": (7, 3), "c": (world + 1,), "d": (1,), "e": ()}
    random = torch.Generator("cpu").manual_seed(5)
    for config in (AdamConfig(weight_decay=0.1), AdamWConfig(weight_decay=0.1)):
        models = [
            nn.ParameterDict({k: torch.ones(shape) for k, shape in shapes.items()})
            for _ in range(2)
        ]
        optimizers = [config.build(models[0], 0.1), config.build(models[1], 0.1, mesh_of((world,)))]

        def step(nowhere=(), models=models, optimizers=optimizers):
            for key, p in models[0].items():
                p.grad = None if key in nowhere else drawn(random, p.shape)
                models[1][key].grad = None if key in nowhere else p.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert all(q.grad is None for q in models[1].values())
            for key, p in models[0].items():  # torch's vector loops round otherwise in a remainder
                bound = 0.0 if key == "a" else 1e-6
                torch.testing.assert_close(models[1][key], p, rtol=bound, atol=bound)

        step(nowhere=("b",))
        step()
        whole, cut = (optimizer.state_dict() for optimizer in optimizers)
        assert [g["param_names"] for g in whole["param_groups"]] == [
            g["param_names"] for g in cut["param_groups"]
        ]
        for i, (key, p) in enumerate(models[0].items()):
            for name in ("exp_avg", "exp_avg_sq"):
                x, y = whole["state"][i][name], cut["state"][i][name]
                assert isinstance(y, DTensor) == (p.ndim > 0)
                torch.testing.assert_close(
                    y.full_tensor() if p.ndim else y, x, rtol=1e-6, atol=1e-6
                )
                if p.ndim:
                    rows = -(-p.shape[0] // world)
                    assert len(y.to_local()) == max(
                        0, min(rows, p.shape[0] - dist.get_rank() * rows)
                    ), key
        for source in optimizers:
            found = source.state_dict()
            found["state"] = {
                i: {k: x.clone() for k, x in values.items()} for i, values in found["state"].items()
            }
            optimizers[1].load_state_dict(found)
            moments = optimizers[1].state_dict()["state"][0]
            assert moments["exp_avg"].to_local().untyped_storage().nbytes() == 8 * 4 * 4
            step()


@on_ranks(2, 8)
def adam_in_parts_as_users_call_it():
    """Replaced memory, zero_grad, closures and missing gradients are as with whole state."""
    world = dist.get_world_size()
    random = torch.Generator("cpu").manual_seed(6)
    model = nn.ParameterDict(
        {"a": torch.ones(2 * world, 4), "b": torch.ones(3), "c": torch.ones(())}
    )
    models = [model, copy.deepcopy(model)]
    cut = AdamConfig().build(models[1], 0.1, mesh_of((world,)))
    optimizers = [AdamConfig().build(models[0], 0.1), cut]

    def backward():
        for key, p in models[0].items():
            x = drawn(random, p.shape)
            for model in models:
                (model[key] * x).sum().backward()

    def assert_equal():
        for key, p in models[0].items():
            torch.testing.assert_close(models[1][key], p, rtol=1e-6, atol=1e-6)

    def step():
        backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal()

    step()
    for p in models[1].values():
        p.data = p.data.clone()
    step()
    step()
    for keywords in ({}, {"set_to_none": False}):  # a step that is left out
        backward()
        for optimizer in optimizers:
            optimizer.zero_grad(**keywords)
        step()
    for optimizer, model in zip(optimizers, models, strict=True):
        step_with_closure(optimizer, model)
    assert_equal()
    for key in models[1]:
        backward()
        before = [p.detach().clone() for p in models[1].values()]
        if dist.get_rank() == 1:
            models[1][key].grad = None
        with pytest.raises(MissingGradientError, match=f"'{key}' of shape"):
            finished_step(cut)
        if not models[1][key].is_cuda:
            assert all(torch.equal(p, x) for p, x in zip(models[1].values(), before, strict=True))
        for optimizer in optimizers:
            optimizer.zero_grad()
    check_refused_changes(cut, models[1], backward)


def check_refused_changes(cut, model, backward):
    """A copy, a parameter of another dtype and a parameter on one rank alone are refused."""
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ShardingError, match=r"Adam.*cannot be copied.*state_dict"):
            copied(cut)
    backward()
    model["b"].data = model["b"].data.double()
    model["b"].grad = None
    with pytest.raises(
        ReshardedParameterError, match=r"'b' was torch.float32 of .*, and is torch.float64 of shape"
    ):
        cut.step()
    if dist.get_rank() == 0:
        model["d"] = torch.ones(2)
    with pytest.raises(
        PlanMismatchError, match=r"rank 0: 'd' of shape \(2,\); rank 1: nothing more"
    ):
        AdamWConfig().build(model, 0.1, mesh_of((dist.get_world_size(),)))


def step_with_closure(optimizer, model):
    """Step on the squares of all weights, which a closure returns."""

    def squares():
        return sum((p**2).sum() for p in model.values())

    def closure():
        optimizer.zero_grad()
        loss = squares()
        loss.backward()
        return loss.item()

    expected = squares().item()
    assert optimizer.step(closure) == pytest.approx(expected, rel=1e-5)
    optimizer.zero_grad()
