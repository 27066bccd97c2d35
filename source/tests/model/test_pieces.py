"""Ways of cutting an interval: plain integers, without networks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepmd_muon.model.descriptor.pieces import (
    GRID,
    MOST,
    finest,
    halved,
    lengths,
    padded,
    places,
    refined,
    uniform,
)


@st.composite
def cuts(draw):
    pieces = uniform(8)
    for _ in range(draw(st.integers(0, 60))):
        sizes = lengths(pieces)
        possible = [i for i, size in enumerate(sizes) if size > 1]
        pieces = halved(pieces, [draw(st.sampled_from(possible))])
    return pieces


def assert_valid(pieces):
    sizes = lengths(pieces)
    assert len(pieces) in range(16, MOST + 1, 16)
    assert pieces[0] == 0
    assert sum(sizes) == GRID
    assert all(
        size & (size - 1) == 0 and start % size == 0
        for start, size in zip(pieces, sizes, strict=True)
    )


@given(st.lists(cuts(), min_size=1, max_size=4))
def test_the_finest_lie_within_all(several):
    several = [padded(pieces) for pieces in several]
    found = finest(several)
    if found:
        assert_valid(found)
        assert all(set(pieces) <= set(found) for pieces in several)
    else:
        assert len(set().union(*several)) > MOST
    assert finest([several[0]]) == several[0]
    assert finest([*several, ()]) == ()


@pytest.mark.parametrize("where", [0, 300, 1023])
def test_pieces_are_refined_where_the_error_is_large(where):
    def errors(pieces):
        each = zip(pieces, lengths(pieces), strict=True)
        return torch.tensor(
            [size if start <= where < start + size else 0.01 for start, size in each]
        )

    found = refined(errors, 4.0)
    assert_valid(found)
    sizes = dict(zip(found, lengths(found), strict=True))
    assert sizes[where // 4 * 4] == 4
    assert max(sizes.values()) >= 64
    assert refined(errors, 0.5) == ()  # shorter than a cell
    assert refined(lambda pieces: torch.full((len(pieces),), torch.nan), 1.0) == ()
    assert refined(lambda pieces: torch.tensor(lengths(pieces)), 4.0) == ()  # 256 pieces


@given(cuts())
def test_places(pieces):
    cells, spans = places(pieces, torch.float64, torch.device("cpu"))
    for number, (start, size) in enumerate(zip(pieces, lengths(pieces), strict=True)):
        assert (cells[start : start + size] == number).all()
        assert spans[number].tolist() == [start, 1 / size]
