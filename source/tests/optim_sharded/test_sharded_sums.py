"""Magma's alignment from pieces equals the alignment of whole blocks."""

from __future__ import annotations

import pytest
import torch

from deepmd_muon.optim.rules.interface import Pieces
from deepmd_muon.optim.rules.magma import Magma, row_sums, sums_of_pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_pieces_together_have_the_blocks_cosine(dtype, scale):
    torch.manual_seed(0)
    m, g = (torch.randn(4, 60, dtype=dtype) * scale for _ in range(2))
    g[2], m[3] = 0, m[3] * 1e-4
    g[:, :20] *= 1e-3
    pieces = [(m[:, a:b], g[:, a:b]) for a, b in ((0, 20), (20, 21), (21, 21), (21, 60))]
    sums = torch.stack([row_sums(*piece, 2**16) for piece in pieces], dim=1)
    torch.testing.assert_close(
        Magma().combine(sums), Magma().measure_whole([m], [g])[0], rtol=1e-6, atol=1e-7
    )
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
