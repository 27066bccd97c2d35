"""Magma's alignment is the cosine of each block, whole or in pieces, whatever is beside it."""

from __future__ import annotations

import pytest
import torch

from deepmd_muon.optim.rules import magma
from deepmd_muon.optim.rules.interface import Pieces
from deepmd_muon.optim.rules.magma import Magma, row_sums, sums_of_pieces

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
    found = Magma().measure_whole(m, g)
    for x, y, cosines in zip(m, g, found, strict=True):
        assert cosines.dtype == torch.float32
        torch.testing.assert_close(cosines, by_definition(x, y), rtol=2e-6, atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip((*m, *g), kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_and_not_numbers_stay_in_their_block(dtype):
    """Both have no direction: the cosine is 0 (the update of the latter is NaN, its score is not)."""
    m, g = pairs(dtype, 1.0)
    expected = Magma().measure_whole(m, g)
    m[1][0] = 0.0
    m[5][2, 3] = torch.nan
    found = Magma().measure_whole(m, g)
    expected[1][0] = expected[5][2] = 0.0
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_a_score_does_not_depend_on_its_neighbours():
    """Scores of several ranks' blocks come out bitwise as those of one process."""
    torch.manual_seed(2)
    scores, cosines = torch.rand(37), 2.0 * torch.rand(37) - 1.0
    (together,) = Magma().advance([], {magma.SCORE: [scores]}, [cosines])[magma.SCORE]
    apart = Magma().advance([], {magma.SCORE: scores.split(1)}, cosines.split(1))[magma.SCORE]
    assert torch.equal(together, torch.cat(apart))
    (factors,) = Magma().factors([], {"magma_score": [together]})
    single = Magma().factors([], {"magma_score": apart})
    assert torch.equal(factors, torch.cat(single))
    torch.testing.assert_close(factors.flatten(), 0.1 + 0.9 * together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_pieces_together_have_the_blocks_cosine(dtype, scale):
    torch.manual_seed(0)
    m, g = (torch.randn(4, 60, dtype=dtype) * scale for _ in range(2))
    g[2], m[3] = 0, m[3] * 1e-4
    g[:, :20] *= 1e-3
    pieces = [(m[:, a:b], g[:, a:b]) for a, b in ((0, 20), (20, 21), (21, 21), (21, 60))]
    sums = torch.stack([row_sums(*piece, 2**16) for piece in pieces], dim=1)
    expected = by_definition(m, g).nan_to_num(0.0)
    torch.testing.assert_close(Magma().combine(sums), expected, rtol=1e-6, atol=1e-7)
    assert Magma().combine(sums)[2] == 0


def test_huge_float64_blocks_stay_in_range():
    m, g = (
        torch.full((1, 8), 1e200, dtype=torch.float64),
        torch.full((1, 8), -1e250, dtype=torch.float64),
    )
    sums = torch.stack(
        [row_sums(m[:, :3], g[:, :3], 2**16), row_sums(m[:, 3:], g[:, 3:] / 1e100, 2**16)], dim=1
    )
    assert Magma().combine(sums).item() == pytest.approx(-((3 / 8) ** 0.5))


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1.0), (torch.float64, 1.0), (torch.float64, 1e200)]
)
def test_many_are_summed_as_each(joined, dtype, scale):
    torch.manual_seed(1)
    shapes = [(3, 40), (1, 7), (0, 5), (2, 0), (1, 70000), (5, 1)]
    pairs = [
        (torch.randn(s, dtype=dtype) * scale, torch.randn(s, dtype=dtype) / scale) for s in shapes
    ]
    pairs[0][1][1] = 0.0
    expected = torch.cat([row_sums(*pair, 2**16) for pair in pairs])
    for some in (pairs, pairs[:4]):
        found = sums_of_pieces([Pieces(m, g, m.shape) for m, g in some], joined=joined)
        torch.testing.assert_close(found, expected[: len(found)], rtol=1e-13, atol=1e-13)
    assert Magma().measure([], torch.device("cpu")).shape == (0, 5)
