"""Cases that run on several ranks, the same function on every rank, and assert on each."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from spawn_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from deepmd_muon.optim import CaptureError, HybridMuon
from deepmd_muon.optim.dtensors import local_of
from deepmd_muon.optim.sharded import ShardedSettings, agreement, elements, repeated
from deepmd_muon.optim.sharded import step as sharded_step
from deepmd_muon.optim.sharded.layout import held_runs, total
from deepmd_muon.optim.sharded.params import layout_of
from deepmd_muon.optim.state.schema import ALL_MOMENTS

SHAPES = {
    "even": [(16, 16)] * 3 + [(16, 48), (48, 16)],
    "uneven": [(5, 7), (7, 5), (18, 4), (1, 9), (2, 3), (9, 1, 2)],
    "experts": [(6, 8, 16), (5, 4, 12), (1, 3, 3)],
    "mixed": [(7,), (3, 4), (), (5, 2, 3)],
}
SHAPES["rest"] = (
    SHAPES["uneven"] + SHAPES["experts"] + SHAPES["mixed"]
)  # in one optimizer, which costs a third
SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
# Rules whose products round otherwise in other batches, by the first of their settings.
ROUNDED = {"deepmd_kit_arithmetic": 1e-3, "rules": 1e-5}
ON_GPUS = 1e-5  # kernels of one process and of buckets add in other orders


def slack_of(optimizer):
    """Return how far GPUs may differ; decompositions of SOAP's matrices magnify rounding."""
    return ON_GPUS * (
        100 if any("soap_muon" in group["rules"] for group in optimizer.param_groups) else 1
    )


def refused(optimizer, params, error, match, *, without=("all_to_all_single",)):
    """Assert that a step raises on this rank, changes nothing and uses none of some collectives."""
    before = [local_of(p.detach()).clone() for p in params]
    with pytest.MonkeyPatch.context() as patch:
        for name in without:
            patch.setattr(dist, name, None)
        with pytest.raises(error, match=match):
            optimizer.step()
    for p, x in zip(params, before, strict=True):
        assert torch.equal(local_of(p.detach()), x)


def finished_step(optimizer):
    """Step, and wait for what ranks find out about it."""
    optimizer.step()
    optimizer.state_dict()


@functools.cache
def mesh_of(shape):
    return init_device_mesh(torch.get_default_device().type, shape)


@functools.cache
def named_mesh(shape, names):
    return init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)


def drawn(random, shape, dtype=torch.float32):
    """Draw the same numbers on all devices."""
    x = torch.randn(
        shape, generator=random, dtype=torch.promote_types(dtype, torch.float32), device="cpu"
    )
    return x.to(torch.get_default_device(), dtype)


def assert_same(x, y):
    """Assert that results of the same numbers agree, on a CPU to the last bit."""
    tolerance = ON_GPUS if x.is_cuda else 0.0
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def layouts():
    """Yield name, mesh shape and placements of every layout for this number of ranks.

    Four ranks have meshes of two axes only: those of one are tested on two and on three.
    """
    world = dist.get_world_size()
    if world != 4:
        yield "Shard(0)", (world,), [Shard(0)]
        yield "Shard(1)", (world,), [Shard(1)]
        yield "Replicate", (world,), [Replicate()]
    if world % 2 == 0 and world > 2:
        half = world // 2
        yield "HSDP", (2, half), [Replicate(), Shard(0)]
        yield "HSDP, replicas inside", (half, 2), [Shard(0), Replicate()]
        yield "FSDP × TP", (half, 2), [Shard(0), Shard(1)]
        yield "two axes on one dim", (half, 2), [Shard(0), Shard(0)]
        yield "strided", (half, 2), [_StridedShard(0, split_factor=2), Shard(0)]


def place(x, mesh, placements):
    """Cut a full tensor as the plan says that this rank holds it."""
    # Vectors have no columns to shard: torch 2.15 refuses to read such a placement.
    placements = [
        Replicate() if isinstance(kind, Shard) and kind.dim >= x.ndim else kind
        for kind in placements
    ]
    local = x
    for dim, index in enumerate(_held_indices(x.shape, mesh, tuple(placements))):
        local = local.index_select(dim, index)
    options = {"run_check": False, "shape": x.shape, "stride": x.contiguous().stride()}
    return DTensor.from_local(local.contiguous(), mesh, placements, **options)


@functools.cache
def _held_indices(shape, mesh, placements):
    """Return for each dimension the indices of a full tensor that this rank holds."""
    options = {
        "run_check": False,
        "shape": shape,
        "stride": torch.empty(shape, device="meta").stride(),
    }
    layout = layout_of(DTensor.from_local(torch.empty(0), mesh, placements, **options), None)
    runs = [held_runs(size, dim, layout, mesh.get_coordinate()) for dim, size in enumerate(shape)]
    return [
        torch.tensor([i for run in held for i in range(*run)], dtype=torch.long) for held in runs
    ]


def fits(shape, placements):
    return all(isinstance(p, Replicate) or p.dim < len(shape) for p in placements)


class Twins:
    """The same parameters in one process and on all ranks, stepped with the same gradients.

    Parameters
    ----------
    mesh, placements
        How the parameters are cut on the ranks; without them the ranks have replicas.
    many
        Further arguments of the optimizer on the ranks.
    """

    def __init__(
        self,
        shapes,
        mesh=None,
        placements=None,
        dtype=torch.float32,
        sharded=None,
        many=None,
        **settings,
    ):
        self.random = torch.Generator("cpu").manual_seed(5)
        self.mesh, self.placements = mesh, placements
        self.one = [nn.Parameter(drawn(self.random, s, dtype)) for s in shapes]
        self.many = [nn.Parameter(self.cut(p.detach())) for p in self.one]
        ways = (self.one, {}), (self.many, {"sharded": sharded, **(many or {})})
        self.optimizers = [
            HybridMuon(
                [(f"w{i}", p) for i, p in enumerate(params)], **{**SETTINGS, **settings}, **more
            )
            for params, more in ways
        ]

    def cut(self, x):
        """Return what this rank holds of a full tensor."""
        return x.clone() if self.placements is None else place(x, self.mesh, self.placements)

    def step(self, *, without=(), nowhere=(), captured=False):
        """Step both; `without` have no gradient on rank 0, zeros in one process there."""
        for i, (p, q) in enumerate(zip(self.one, self.many, strict=True)):
            grad = drawn(self.random, p.shape, p.dtype)
            if i in without:
                grad = grad * (1 - self.held_by_first(p))
            p.grad = None if i in nowhere else grad
            has_none = i in nowhere or (i in without and dist.get_rank() == 0)
            q.grad = None if has_none else self.cut(grad)
        for optimizer, way in zip(self.optimizers, (False, captured), strict=True):
            with as_captured() if way else contextlib.nullcontext():
                optimizer.step()

    def held_by_first(self, p):
        """Return ones where rank 0 holds an element, and zeros elsewhere."""
        ones = torch.ones_like(p)
        if self.placements is None:
            return ones
        mine = place(ones, self.mesh, self.placements).to_local() * (dist.get_rank() == 0)
        whole = {"shape": p.shape, "stride": p.stride()}
        parts = DTensor.from_local(mine, self.mesh, self.placements, run_check=False, **whole)
        return parts.full_tensor()

    @functools.cached_property
    def exact(self):
        """Whether the last bit must agree: torch rounds otherwise in a remainder of fewer than 8."""
        if self.placements is None:
            return False
        layouts = [(q.shape, layout_of(q, None)) for q in self.many]
        sizes = [
            math.prod(total(held_runs(size, dim, layout, place)) for dim, size in enumerate(shape))
            for shape, layout in layouts
            for place in layout.places().values()
        ]
        return all(size % 8 == 0 for size in sizes)

    def assert_equal(self, tolerance=None):
        """Compare the parts of weights and state that this rank holds."""
        one, many = self.optimizers
        tolerance = (0.0 if self.exact else 1e-6) if tolerance is None else tolerance
        tolerance = max(tolerance, slack_of(one)) if self.one[0].is_cuda else tolerance
        if self.placements is not None:
            self.assert_state_is_in_order()
        for i, (p, q) in enumerate(zip(self.one, self.many, strict=True)):
            assert one.state[p].keys() == many.state[q].keys()
            pairs = {"weight": (p, q)} | {
                key: (x, many.state[q][key]) for key, x in one.state[p].items()
            }
            for key, (x, y) in pairs.items():
                assert (y.shape, y.dtype) == (x.shape, x.dtype)
                self.check_layout(key, q, y)
                if key.startswith("soap") and p.is_cuda and self.placements is not None:
                    continue  # decompositions on other numbers of GPUs magnify rounding
                # torch cannot gather an uneven _StridedShard.
                expected = x.detach()
                if isinstance(y, DTensor):
                    expected = place(expected, y.device_mesh, y.placements).to_local()
                rtol = tolerance if key in ("weight", *ALL_MOMENTS) else 0
                torch.testing.assert_close(
                    local_of(y).to(expected.device),  # moments may live in host memory
                    expected,
                    rtol=rtol,
                    atol=tolerance,
                    msg=lambda text, i=i, key=key: f"w{i}, {key}: {text}",
                )

    def check_layout(self, key, q, y):
        """Moments are cut as their parameter is; those of replicas are in parts."""
        if key not in ALL_MOMENTS:
            return
        if self.placements is not None:
            assert y.placements == q.placements
        elif self.optimizers[1].sharded.state == "sharded":
            assert isinstance(y, DTensor) == (q.ndim > 0)

    def assert_state_is_in_order(self):
        """Ranks that gather state one tensor after the other need the same order."""
        many = self.optimizers[1]
        muon = {
            id(p): entry.name
            for p, entry in zip(self.many, many.routing, strict=True)
            if entry.route == "muon"
        }
        assert [muon[id(p)] for p in many.state if id(p) in muon] == list(muon.values())

    def bits(self):
        """Return copies of this rank's weights and state."""
        state = self.optimizers[1].state
        kept = [local_of(x).clone() for q in self.many for x in state[q].values()]
        return [*(local_of(q.detach()).clone() for q in self.many), *kept]


def make_replicas(shapes, told, sharded=None, many=None, **settings):
    """Return twins whose ranks `told` have replicas, and each a part of the state."""
    sharded = ShardedSettings(state="sharded", **(sharded or {}))
    return Twins(shapes, sharded=sharded, many={"replicas": told, **(many or {})}, **settings)


def assert_same_bits(some, others):
    assert len(some) == len(others)
    for x, y in zip(some, others, strict=True):
        assert torch.equal(x.cpu(), y.cpu())  # offloaded or not


@contextlib.contextmanager
def as_captured():
    """Let steps go the way that a CUDA graph records; reading numbers on the host fails."""

    def read(*_):
        raise AssertionError("a captured step read a tensor on the host")

    with pytest.MonkeyPatch.context() as patch:
        for module in (agreement, sharded_step):
            patch.setattr(module, "is_capturing", lambda: True)
        for name in ("tolist", "item", "numpy", "__bool__", "__float__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, read)
        yield


MAGMA_ON_AND_OFF = ({"magma_muon": True}, {"magma_muon": False})


@on_ranks(2, 3, 4, 8)
def every_layout(*, names=None, kinds=("even", "rest"), options=MAGMA_ON_AND_OFF, sharded=None):
    """Steps on every layout equal one process, bitwise where rounding is the same."""
    steps = 3 if dist.get_world_size() == 3 else 2
    for (name, mesh, placements), kind in itertools.product(layouts(), kinds):
        if names and name not in names:
            continue
        shapes = [shape for shape in SHAPES[kind] if fits(shape, placements)]
        for settings in options if kind == "even" else options[:1]:
            twins = Twins(shapes, mesh_of(mesh), placements, sharded=sharded, **settings)
            for _ in range(steps):
                twins.step()
            assert twins.exact or kind != "even" or dist.get_world_size() == 3
            try:
                # Products of 16-bit matrices round otherwise in batches of another size.
                twins.assert_equal(ROUNDED.get(next(iter(settings), "")))
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(f"{name}, {kind}, {settings}: {error}") from error


@on_ranks(2, 3, 4, 8)
def captured_layouts():
    """The way of captured steps gives the bits of the eager one, and reads nothing on the host."""
    settings = {"normuon": True, "on_nonfinite": "skip"}
    ways = ({}, {"replication": "spread", "slots": 1})[: 1 + (dist.get_world_size() == 2)]
    for (name, mesh, placements), more in itertools.product(layouts(), ways):
        shapes = [*SHAPES["even"], (24,), (16, 8, 8)]
        sharded = ShardedSettings(bucket_bytes=4000, **more)
        twins = Twins(shapes, mesh_of(mesh), placements, sharded=sharded, **settings)
        for step in range(2):
            twins.step(captured=step > 0)
        try:
            twins.assert_equal()
        except AssertionError as error:
            raise AssertionError(f"{name}, {more}: {error}") from error
    twins = Twins(SHAPES["even"], mesh_of((dist.get_world_size(),)), [Replicate()])
    with pytest.raises(CaptureError, match="take a step before"):
        twins.step(captured=True)


@on_ranks(2, 4, 8)
def some_ranks_capture():
    """Ranks that replay a recorded step and ranks that step eagerly meet in the same collectives.

    That happens where each rank records the shapes of its own batches.
    """
    for name, mesh, placements in layouts():
        twins = Twins([*SHAPES["even"], (24,)], mesh_of(mesh), placements)
        twins.optimizers[1].agreed_skip = twins.optimizers[1].agreed_gradients = True
        for step in range(4):
            twins.step(captured=step > 0 and (dist.get_rank() + step) % 2 == 0)
        try:
            twins.assert_equal()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@on_ranks(2, 8)
def small_buckets():
    """One block a bucket, one after the other and with several under way."""
    ranks = dist.get_world_size()
    for slots in (1, 3):
        sharded = ShardedSettings(bucket_bytes=1, slots=slots, replication="spread")
        names = ("HSDP",) if ranks == 4 and slots == 1 else None
        every_layout(names=names, kinds=("uneven",), options=({},), sharded=sharded)


@on_ranks(2, 3, 4, 8)
def repeated_work():
    names = ("Replicate", "HSDP", "HSDP, replicas inside")
    kinds = (
        ("even",) if dist.get_world_size() == 4 else ("even", "rest")
    )  # the first is compared bitwise
    for replication in ("spread", "repeat"):
        every_layout(
            names=names,
            kinds=kinds,
            options=({},),
            sharded=ShardedSettings(replication=replication),
        )


@on_ranks(2, 8)
def views_and_settings():
    """Views of every kind, plain momentum, deepmd-kit's arithmetic, maximize."""
    views = (
        {"muon_mode": "flat"},
        {"muon_mode": "2d", "expert_patterns": ["w0", "w1"]},
        {"splits": ["w0: rows 2", "w1: columns 1+3+8", "w2: columns 3"], "magma_muon": False},
        {"splits": ["w0: columns 2"]},
    )
    elementwise = (  # whatever the layout
        {"nesterov": False, "maximize": True, "schedule": "keller-jordan"},
        {"deepmd_kit_arithmetic": True},
        {"lr": torch.tensor(0.02)},
        {"workspace": 1},
    )
    for names, options in (
        (("Shard(0)", "HSDP", "strided"), views),
        (("Shard(0)", "HSDP"), elementwise),
    ):
        for settings in options:
            every_layout(names=names, kinds=("experts",), options=(settings,))


@on_ranks(2, 4, 8)
def groups_dtypes_and_meshes():
    """Groups with their own settings, float64 beside float32, frozen parameters."""
    world = dist.get_world_size()
    mesh = mesh_of((world,))
    random = torch.Generator("cpu").manual_seed(1)
    one, many, places = [], [], []
    for shape, dtype, placements in (
        ((9, 4), torch.float32, [Shard(0)]),
        ((6, 6), torch.float64, [Shard(1)]),
        ((5, 8), torch.float32, [Replicate()]),
        ((4, 4), torch.float32, [Shard(0)]),
        ((8, 6), torch.float32, None),
    ):
        x = drawn(random, shape, dtype)
        one.append(nn.Parameter(x.clone()))
        many.append(nn.Parameter(place(x, mesh, placements) if placements else x.clone()))
        places.append(placements)
    optimizers = []
    for params in (one, many):
        named = [(f"w{i}", p) for i, p in enumerate(params)]
        params[3].requires_grad_(False)
        groups = [
            {"params": named[:2], "lr": 0.1, "magma_muon": False},
            {"params": named[2:], "momentum": 0.5},
        ]
        optimizers.append(HybridMuon(groups, **SETTINGS))
    assert sorted(p.name for p in optimizers[1].plan.parameters) == ["w0", "w1", "w2"]
    for step in range(3):
        if step == 2:
            for params in (one, many):
                params[3].requires_grad_(True)
        for p, q, placements in zip(one, many, places, strict=True):
            grad = drawn(random, p.shape, p.dtype)
            if p.requires_grad:
                p.grad, q.grad = grad, place(grad, mesh, placements) if placements else grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert len(optimizers[1].plan.parameters) == 4
    for p, q, placements in zip(one, many, places, strict=True):
        expected = place(p.detach(), mesh, placements).to_local() if placements else p
        tolerance = ON_GPUS if p.is_cuda else 1e-6 if p.dtype == torch.float32 else 1e-7
        torch.testing.assert_close(
            q.to_local() if placements else q, expected, rtol=tolerance, atol=tolerance
        )


@on_ranks(2, 8)
def bfloat16():
    """Momenta of 16-bit parameters are exchanged and applied in float32, and rounded once."""
    twins = Twins(
        SHAPES["even"], mesh_of((dist.get_world_size(),)), [Shard(0)], dtype=torch.bfloat16
    )
    for _ in range(3):
        twins.step()
    twins.assert_equal()
    assert all(domain.itemsize == 4 for domain in twins.optimizers[1].plan.domains)


@on_ranks(2, 8)
def narrow_wires():
    """16-bit legs differ by what they round: 2⁻⁹ of the update on the way back."""
    mesh = mesh_of((dist.get_world_size(),))
    for sharded, bound in (
        (ShardedSettings(return_dtype="bfloat16"), 2**-8),
        (ShardedSettings(return_dtype="float16"), 2**-11),
        (ShardedSettings(gather_dtype="bfloat16"), 2**-4),
    ):
        twins = Twins(
            SHAPES["even"], mesh, [Shard(0)], sharded=sharded, weight_decay=0.0, magma_muon=False
        )
        before = [p.detach().clone() for p in twins.one]
        twins.step()
        for p, q, start in zip(twins.one, twins.many, before, strict=True):
            update = (p - start).norm()
            error = (q.full_tensor() - p).norm()
            assert 0 < error < bound * update


@on_ranks(2, 3, 8)
def replicas():
    """Plain parameters under DDP: shared or repeated work equals one process on every rank."""
    world = dist.get_world_size()
    for told, replication in itertools.product(
        (mesh_of((world,)), dist.group.WORLD), ("spread", "repeat")
    ):
        random = torch.Generator("cpu").manual_seed(2)
        shapes = SHAPES["uneven"] + SHAPES["mixed"]
        pairs = []
        for extra in ({}, {"replicas": told, "sharded": ShardedSettings(replication=replication)}):
            random.manual_seed(2)
            params = [nn.Parameter(drawn(random, s)) for s in shapes]
            optimizer = HybridMuon(
                [(f"w{i}", p) for i, p in enumerate(params)], **SETTINGS, **extra
            )
            for _ in range(3):
                for p in params:
                    p.grad = drawn(random, p.shape)
                optimizer.step()
            pairs.append(params)
        for p, q in zip(*pairs, strict=True):
            assert_same(p, q)


@on_ranks(2, 8)
def freed_gradients():
    """Gradients are dropped on the way, also where one was missing; the Adam routes keep theirs."""
    for slots in (1, 3):
        sharded = ShardedSettings(free_gradients=True, bucket_bytes=1, slots=slots)
        twins = Twins(
            [*SHAPES["even"], (7,)], mesh_of((dist.get_world_size(),)), [Shard(0)], sharded=sharded
        )
        twins.step()
        twins.step(without=(1,))
        assert [p.grad is None for p in twins.many] == [True] * 5 + [False]
        twins.assert_equal(1e-6)


@contextlib.contextmanager
def counted_traffic():
    """Yield the bytes that this rank sends in all-to-alls, and the parts that it all-gathers."""
    sent, gathered = [], []
    exchange, gather = dist.all_to_all_single, elements.all_gather

    def counting(output, source, output_splits, input_splits, **options):
        away = sum(input_splits) - input_splits[dist.get_rank()]
        sent.append(source.element_size() * away)
        return exchange(output, source, output_splits, input_splits, **options)

    def counting_gather(everything, mine, **options):
        gathered.append(mine)
        return gather(everything, mine, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        for module in (elements, repeated):
            patch.setattr(module, "all_gather", counting_gather)
        yield sent, gathered


@on_ranks(2, 3, 4, 8)
def counted_collectives():
    """One all-to-all per leg and bucket that carries something, with the plan's bytes.

    Only replicas have another collective, which compares their gradients.
    """
    rank = dist.get_rank()
    for (name, mesh, placements), magma in itertools.product(layouts(), (True, False)):
        for replication in ("spread", "repeat")[: 1 + (magma and Replicate() in placements)]:
            sharded = ShardedSettings(bucket_bytes=1000, replication=replication)
            shapes = 2 * SHAPES["even"]
            twins = Twins(shapes, mesh_of(mesh), placements, sharded=sharded, magma_muon=magma)
            twins.step()  # compares the plans
            optimizer = twins.optimizers[1]
            for p in twins.many:
                p.grad = p.detach().clone()
            with counted_traffic() as (sent, gathered), pytest.MonkeyPatch.context() as patch:
                for other in ("all_gather", "all_reduce", "broadcast", "all_gather_into_tensor"):
                    if other != "all_reduce" or Replicate() not in placements:
                        patch.setattr(dist, other, None)
                optimizer.step()
            (domain,) = optimizer.plan.domains
            exchanges = domain.crossing_buckets()
            assert not gathered
            assert len(sent) == len(exchanges["gather"]) + len(exchanges["return"]), name
            assert sum(sent) == domain.bytes_sent(sharded)[rank], name
            if placements == [Shard(0)]:
                assert len(sent) == 2 * domain.n_buckets > 2
            if placements == [Replicate()]:
                assert len(sent) == (domain.n_buckets if replication == "spread" else 0)
