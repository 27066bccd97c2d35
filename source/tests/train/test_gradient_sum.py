"""The flat vector in which replicas sum their gradients."""

import pytest
import torch
from torch import nn

from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.strategy import replicated
from deepmd_muon.train.strategy.replicated import Replicated

SIZES = {
    "short": [(3,), (2, 5)],
    "a whole row": [(1000,), (24,)],
    "an empty gradient": [(7,), (0, 4), (5,)],
    "longer than a copy": [(300, 200), (11,)],
}


@pytest.fixture(params=SIZES)
def strategy(request):
    """One rank, whose parameters have gradients."""
    params = nn.ParameterList(torch.zeros(shape, dtype=torch.float64) for shape in SIZES[request.param])
    for number, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    found = Replicated.__new__(Replicated)
    found.ranks, found.model = Ranks(torch.device("cpu")), params
    return found


def test_gradients_and_their_norm_are_those_of_the_parameters(strategy, monkeypatch):
    monkeypatch.setattr(replicated, "_SHORT", 1 << 10)
    grads = [p.grad for p in strategy.model]
    tail = torch.tensor([2.5, 0.0, 1.0], dtype=torch.float64)
    mean, parts, summed = strategy._sum(grads, tail)
    assert torch.equal(summed, tail)
    assert all(torch.equal(part.view_as(g), g) for part, g in zip(parts, grads, strict=True))
    assert len(mean) % replicated._ROW == 0
    reduced = strategy._reduced(mean, summed)
    torch.testing.assert_close(reduced.norm, torch.cat([g.reshape(-1) for g in grads]).norm(), rtol=1e-14, atol=0.0)
    assert float(reduced.loss) == 2.5


def test_gradients_of_several_dtypes_and_strides_are_packed_in_the_widest(strategy):
    narrow, turned = torch.randn(3, 5), torch.randn(4, 6, dtype=torch.float64).T
    mean, parts, summed = strategy._sum([narrow, turned], torch.ones(2))
    assert {x.dtype for x in (mean, *parts, summed)} == {torch.float64}
    assert torch.equal(parts[0].view(3, 5), narrow.double())
    assert torch.equal(parts[1].view(6, 4), turned)
