"""Magma's alignment of many blocks at once is the cosine of each, whatever its scale, length and neighbours."""

from __future__ import annotations

import pytest
import torch

from deepmd_muon.optim.rules import magma

SHAPES = [(1, 700), (3, 64), (1, 64), (2, 64), (1, 1), (4, 700), (5, 33), (1, 64)]


def pairs(dtype, scale):
    torch.manual_seed(1)
    m = [scale * torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    g = [0.3 * x + scale * torch.randn_like(x) for x in m]
    return [x.to(dtype) for x in m], [x.to(dtype) for x in g]


def by_definition(m, g):
    m, g = (x.double() / x.double().abs().amax(dim=1, keepdim=True) for x in (m, g))
    return ((m * g).sum(dim=1) / (m.norm(dim=1) * g.norm(dim=1))).float()


@pytest.mark.parametrize("at_a_time", [50, 200, 2**18])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float32, 1.0), (torch.float32, 1e-30), (torch.float32, 1e30)]
    + [(torch.float64, scale) for scale in (1.0, 1e-200, 1e200, 1e-300)],
)
def test_alignments_are_cosines(dtype, scale, at_a_time, monkeypatch):
    monkeypatch.setattr(magma, "_AT_A_TIME_CPU", at_a_time)
    m, g = pairs(dtype, scale)
    kept = [x.clone() for x in (*m, *g)]
    found = magma.Magma().measure_whole(m, g)
    for x, y, cosines in zip(m, g, found, strict=True):
        assert cosines.dtype == torch.float32
        torch.testing.assert_close(cosines, by_definition(x, y), rtol=2e-6, atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip((*m, *g), kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_and_not_numbers_stay_in_their_block(dtype):
    """Both have no direction: the cosine is 0 (the update of the latter is NaN, its score is not)."""
    m, g = pairs(dtype, 1.0)
    expected = magma.Magma().measure_whole(m, g)
    m[1][0] = 0.0
    m[5][2, 3] = torch.nan
    found = magma.Magma().measure_whole(m, g)
    expected[1][0] = expected[5][2] = 0.0
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_a_score_does_not_depend_on_its_neighbours():
    """Scores of several ranks' blocks come out bitwise as those of one process."""
    torch.manual_seed(2)
    scores, cosines = torch.rand(37), 2.0 * torch.rand(37) - 1.0
    (together,) = magma.Magma().advance([], {magma.SCORE: [scores]}, [cosines])[magma.SCORE]
    apart = magma.Magma().advance([], {magma.SCORE: scores.split(1)}, cosines.split(1))[magma.SCORE]
    assert torch.equal(together, torch.cat(apart))
    (factors,) = magma.Magma().factors([], {"magma_score": [together]})
    single = magma.Magma().factors([], {"magma_score": apart})
    assert torch.equal(factors, torch.cat(single))
    torch.testing.assert_close(factors.flatten(), 0.1 + 0.9 * together)
