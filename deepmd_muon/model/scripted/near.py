"""The neighbourhoods that a scripted descriptor reads, from the neighbour list that an MD program hands over."""

from typing import NamedTuple

import torch


class Near(NamedTuple):
    """Some centre atoms, sorted by type, and their neighbours within the cut-off.

    Atom numbers count all atoms handed over, ghosts included.

    Attributes
    ----------
    centre
        Number of every centre `(ncentre,)`.
    kind
        Its type `(ncentre,)`.
    counts
        How many centres each type has.
    neighbor
        Number of each neighbour `(ncentre, nnei)`, −1 for an empty slot. Empty slots end a section, unless pairs of
        types are excluded: then they may stand anywhere.
    sections
        Column widths: one for each neighbour type, or one for all.
    vectors
        r_ij `(ncentre, nnei, 3)` [Å], arbitrary in empty slots.
    types
        Types of all atoms `(natoms,)`.
    first_type
        Type of the first atom of each centre's frame `(ncentre,)`.
    place
        Row of every atom, or of the atom it is an image of, among the centres `(natoms,)`; for message passing.
    nlocal
        Number of atoms that are not ghosts.
    comm
        Arguments of `deepmd::border_op`, or nothing.
    """

    centre: torch.Tensor
    kind: torch.Tensor
    counts: list[int]
    neighbor: torch.Tensor
    sections: list[int]
    vectors: torch.Tensor
    types: torch.Tensor
    first_type: torch.Tensor
    place: torch.Tensor
    nlocal: int
    comm: dict[str, torch.Tensor]


class Request(NamedTuple):
    """The neighbours that a descriptor reads; see `NeighborRequest`.

    Attributes
    ----------
    rcut
        Cut-off [Å].
    sel
        Most neighbours kept, the nearest ones: for each type when `by_type`, of the sum(sel) nearest ones; else one
        number.
    by_type
        Group neighbours by their type.
    sort
        Order the neighbours of a section by distance; otherwise only a section with too many is ordered.
    ntypes
        Number of types.
    """

    rcut: float
    sel: list[int]
    by_type: bool
    sort: bool
    ntypes: int


def sort_by_type(kind: torch.Tensor, crowd: torch.Tensor) -> torch.Tensor:
    """Return the order of atoms by type, then by their number of neighbours `(nreal,)`; none of negative type."""
    order = torch.argsort(crowd, stable=True)
    order = order[torch.argsort(kind[order], stable=True)]
    return order[int((kind < 0).sum()) :]


def _first_columns(inside: torch.Tensor) -> torch.Tensor:
    """Return the columns of the True entries of each row, in order, −1 behind them `(rows, most True in a row)`."""
    rank = inside.cumsum(1)
    width = 0 if inside.numel() == 0 else int(rank[:, -1].max())
    row, column = inside.nonzero().unbind(1)
    out = torch.full([inside.shape[0], width], -1, dtype=torch.int64, device=inside.device)
    return out.index_put_((row, rank[row, column] - 1), column)


def _nearest_columns(inside: torch.Tensor, square: torch.Tensor, most: int) -> torch.Tensor:
    """Return the result of `_first_columns`, nearest first and at most `most` a row."""
    far = torch.where(inside, square, torch.inf)
    distance, column = far.sort(dim=1, stable=True)
    width = 0 if inside.numel() == 0 else min(most, int(inside.sum(1).max()))
    distance, column = distance[:, :width], column[:, :width]
    return torch.where(torch.isinf(distance), -1, column)


def neighbors_within(
    coord: torch.Tensor,
    types: torch.Tensor,
    centre: torch.Tensor,
    listed: torch.Tensor,
    request: Request,
) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Select the neighbours that a descriptor reads from a list that may hold more of them, in any order.

    Parameters
    ----------
    coord
        Positions of all atoms `(natoms, 3)` [Å].
    types
        Types of all atoms `(natoms,)`; negative ones are nobody's neighbours.
    centre
        Number of every centre `(ncentre,)`.
    listed
        Numbers of atoms near each centre `(ncentre, n)`, −1 for an empty entry.
    request
        The rows to keep.

    Returns
    -------
    tuple
        `neighbor`, `sections` and `vectors` of `Near`.
    """
    there = listed >= 0
    atoms = listed.clamp(min=0)
    x, y, z = coord[centre].unsqueeze(1).unbind(2)
    square = (coord[:, 0][atoms] - x).square_()
    square += (coord[:, 1][atoms] - y).square_()
    square += (coord[:, 2][atoms] - z).square_()
    kind = types[atoms]
    there = there & (square < request.rcut * request.rcut) & (kind >= 0)
    total = 0
    for most in request.sel:
        total += most
    if request.by_type and there.numel() > 0 and int(there.sum(1).max()) > total:
        # deepmd-kit keeps the nearest of all types before it counts types.
        nearest = _nearest_columns(there, square, total)
        kept = torch.zeros_like(there, dtype=torch.int64).scatter_add_(
            1, nearest.clamp(min=0), (nearest >= 0).long()
        )
        there = kept > 0
    columns: list[torch.Tensor] = []
    sections: list[int] = []
    for group in range(len(request.sel)):
        inside = there & (kind == group) if request.by_type else there
        most = request.sel[group]
        chosen = _nearest_columns(inside, square, most) if request.sort else _first_columns(inside)
        if chosen.shape[1] > most:
            chosen = _nearest_columns(inside, square, most)
        columns.append(chosen)
        sections.append(chosen.shape[1])
    joined = torch.cat(columns, 1)
    empty = joined < 0
    neighbor = listed.gather(1, joined.clamp(min=0)).masked_fill_(empty, -1)
    vectors = coord[neighbor.clamp(min=0)] - coord[centre].unsqueeze(1)
    return neighbor, sections, vectors
