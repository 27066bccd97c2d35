"""The vector in which replicas average their gradients."""

import pytest
import ranks_in_threads
import torch
import torch.distributed as dist
from small_models import SE_E2_A, section_of
from torch import nn

from deepmd_muon.model import build_model
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.strategy import gradient_sum
from deepmd_muon.train.strategy.gradient_sum import ROW, GradientSum
from deepmd_muon.train.strategy.replicated import Replicated

SHAPES = {
    "short": [(3,), (2, 5)],
    "a whole row": [(1000,), (24,)],
    "an empty gradient": [(7,), (0, 4), (5,)],
    "longer than a copy": [(300, 200), (11,)],
}
TAIL = torch.tensor([2.5, 0.0, 1.0], dtype=torch.float64)


def with_gradients(shapes, seed=0):
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    for number, p in enumerate(params):
        p.grad = torch.randn(
            p.shape, generator=torch.Generator().manual_seed(seed + number), dtype=torch.float64
        )
    return params


@pytest.mark.parametrize("case", SHAPES)
def test_gradients_and_their_norm_are_those_of_the_parameters(case, monkeypatch):
    monkeypatch.setattr(gradient_sum, "_SHORT_COPY", 1 << 10)
    params = with_gradients(SHAPES[case])
    ranks = Ranks(torch.device("cpu"))
    mean = GradientSum(ranks, params, len(TAIL)).finish(TAIL)
    assert torch.equal(mean.tail, TAIL)
    assert all(
        torch.equal(mine.view_as(p), p.grad) for mine, p in zip(mean.gradients, params, strict=True)
    )
    assert mean.rows.shape[1] == ROW
    strategy = Replicated.__new__(Replicated)
    strategy.ranks, strategy.model = ranks, nn.ParameterList(params)
    reduced = strategy._reduced(mean)
    whole = torch.cat([p.grad.reshape(-1) for p in params])
    torch.testing.assert_close(reduced.norm, whole.norm(), rtol=1e-14, atol=0.0)
    assert float(reduced.loss) == 2.5


def test_gradients_of_several_dtypes_and_strides_are_packed_in_the_widest():
    narrow, turned = (
        nn.Parameter(torch.zeros(3, 5)),
        nn.Parameter(torch.zeros(6, 4, dtype=torch.float64)),
    )
    narrow.grad, turned.grad = torch.randn(3, 5), torch.randn(4, 6, dtype=torch.float64).T
    mean = GradientSum(Ranks(torch.device("cpu")), [narrow, turned], 2).finish(torch.ones(2))
    assert {x.dtype for x in (mean.rows, *mean.gradients, mean.tail)} == {torch.float64}
    assert torch.equal(mean.gradients[0].view(3, 5), narrow.grad.double())
    assert torch.equal(mean.gradients[1].view(6, 4), turned.grad)


@pytest.mark.parametrize("missing", [None, 0, 1])
@pytest.mark.parametrize("begun", [True, False])
def test_early_gradients_are_summed_in_the_backward_pass(begun, missing, monkeypatch):
    """Two steps of two ranks; on `missing` one early parameter has no gradient, so its sum starts after the pass."""
    early, found, calls, original = 2, {}, {0: [], 1: []}, dist.all_reduce

    def counted(values, **options):
        calls[dist.get_rank()].append(len(values))
        return original(values, **options)

    monkeypatch.setattr(dist, "all_reduce", counted)

    def work(rank):
        params = [
            nn.Parameter(torch.full((n,), 0.5 + n + rank, dtype=torch.float64))
            for n in (600, 500, 3)
        ]
        summed = GradientSum(Ranks(torch.device("cpu"), rank, 2), params, 1, early)
        steps = found[rank] = []
        for step in range(2):
            for p in params:
                p.grad = None
            if begun:
                summed.begin()
            first = params[0].detach() if rank == missing else params[0]
            value = (
                (1.0 + step) * params[2].prod() * (first.square().sum() + params[1].square().sum())
            )
            value.backward()
            launched, sums = summed._wait_for_early is not None, len(calls[rank])
            mine = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
            mean = summed.finish(value.detach().reshape(1))
            assert len(calls[rank]) - sums == (1 if launched or not begun else 2)
            steps.append((launched, value.detach(), mine, mean))
            assert not any(p._post_accumulate_grad_hooks for p in params)

    with ranks_in_threads.Ranks(2) as ranks:
        ranks.together(work)
    for step in range(2):
        both = [found[rank][step] for rank in range(2)]
        gradients = [
            torch.stack(each).mean(0)
            for each in zip(*(mine for _, _, mine, _ in both), strict=True)
        ]
        for rank, (launched, _, _, mean) in enumerate(both):
            assert launched == (begun and rank != missing)
            assert all(map(torch.equal, mean.gradients, gradients))
            assert float(mean.tail) == float(both[0][1] + both[1][1])
            assert mean.rows.norm() == pytest.approx(float(torch.cat(gradients).norm()), rel=1e-14)


class Fails(torch.autograd.Function):
    """A function whose gradient cannot be computed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *_):
        raise MemoryError("no room")


def test_a_pass_that_fails_leaves_nothing_behind():
    """Not the sum that it has started, and no hooks: the next step counts its own gradients."""
    found = {}

    def work(rank):
        params = [nn.Parameter(torch.full((2,), 1.0 + rank, dtype=torch.float64)) for _ in range(2)]
        summed = GradientSum(Ranks(torch.device("cpu"), rank, 2), params, 1, 1)
        strategy = Replicated.__new__(Replicated)
        strategy._gradient_sums = {None: summed}
        with pytest.raises(MemoryError), strategy.overlapping():
            (Fails.apply(params[1]).sum() + params[0].sum()).backward()
        assert not any(p._post_accumulate_grad_hooks for p in params)
        for p in params:
            p.grad = None
        (7.0 * params[0].sum() + params[1].sum()).backward()
        found[rank] = summed.finish(torch.zeros(1, dtype=torch.float64)).gradients

    with ranks_in_threads.Ranks(2) as ranks:
        ranks.together(work)
    for first, second in found.values():
        assert first.tolist() == [7.0, 7.0]
        assert second.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("neuron", "first"), [([12, 12], True), ([2], False)])
def test_the_larger_fitting_nets_are_summed_early(neuron, first):
    """Small ones are summed with the descriptor's parameters. Those without a gradient are not summed at all."""
    found = {}

    def work(rank):
        model = build_model(section_of(SE_E2_A, {"neuron": neuron}))
        strategy = Replicated.__new__(Replicated)
        strategy.ranks, strategy.model = Ranks(torch.device("cpu"), rank, 2), model
        for name, p in model.named_parameters():
            p.grad = None if name.endswith("bias") else torch.ones_like(p)
        found[rank] = strategy._agree_on_sum(None), model

    with ranks_in_threads.Ranks(2) as ranks:
        ranks.together(work)
    for summed, model in found.values():
        names = {p: name for name, p in model.named_parameters()}
        early, late = ([names[p] for p in some] for some in (summed._early, summed._late))
        assert {"fitting_net" in name for name in early} == ({True} if first else set())
        assert {"fitting_net" in name for name in late} == ({False} if first else {True, False})
        assert sorted(early + late) == sorted(
            name for name in names.values() if not name.endswith("bias")
        )
