"""The neighbourhoods that a scripted descriptor reads, from an MD program's neighbour list."""

from typing import NamedTuple

import torch
from torch import Tensor


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
        Number of each neighbour `(ncentre, nnei)`, −1 for an empty slot. Empty slots are at the end
        of a section, or anywhere if pairs of types are excluded.
    sections
        Column widths: one for each neighbour type, or one for all.
    vectors
        r_ij `(ncentre, nnei, 3)` [Å], arbitrary in empty slots.
    types
        Types of all atoms `(natoms,)`.
    first_type
        Type of the first atom of each centre's frame `(ncentre,)`.
    place
        Row of every atom, or of the atom it is an image of, among the centres `(natoms,)`; for
        message passing.
    nlocal
        Number of atoms that are not ghosts.
    comm
        Arguments of `deepmd::border_op`, or nothing.
    """

    centre: Tensor
    kind: Tensor
    counts: list[int]
    neighbor: Tensor
    sections: list[int]
    vectors: Tensor
    types: Tensor
    first_type: Tensor
    place: Tensor
    nlocal: int
    comm: dict[str, Tensor]


class Request(NamedTuple):
    """The neighbours that a descriptor reads; see `NeighborRequest`.

    Attributes
    ----------
    rcut
        Cut-off [Å].
    sel
        Largest numbers of neighbours; the nearest stay. With `by_type` one number for each type,
        applied to the sum(sel) nearest neighbours; else one number.
    by_type
        Group neighbours by their type.
    sort
        Order the neighbours of a section by distance; otherwise only a section with too many is
        ordered.
    ntypes
        Number of types.
    """

    rcut: float
    sel: list[int]
    by_type: bool
    sort: bool
    ntypes: int


def sort_by_type(kind: Tensor, crowd: Tensor) -> Tensor:
    """Return the order of atoms `(nreal,)` by type, then by number of neighbours.

    Atoms of negative type are left out.
    """
    order = torch.argsort(crowd, stable=True)
    order = order[torch.argsort(kind[order], stable=True)]
    return order[int((kind < 0).sum()) :]


def neighbors_within(
    coord: Tensor,
    types: Tensor,
    centre: Tensor,
    listed: Tensor,
    request: Request,
) -> tuple[Tensor, list[int], Tensor]:
    """Select the neighbours that a descriptor reads from a longer, unordered list.

    Parameters
    ----------
    coord
        Positions of all atoms `(natoms, 3)` [Å].
    types
        Types of all atoms `(natoms,)`; atoms of negative type are nobody's neighbours.
    centre
        Number of every centre `(ncentre,)`.
    listed
        Numbers of atoms near each centre `(ncentre, n)`, −1 for an empty entry.
    request
        What the descriptor reads.

    Returns
    -------
    tuple
        `neighbor`, `sections` and `vectors` of `Near`.
    """
    atoms = listed.clamp(min=0)
    x, y, z = coord[centre].unsqueeze(1).unbind(2)
    # One component after the other: a third of the memory.
    square = (coord[:, 0][atoms] - x).square_()
    square += (coord[:, 1][atoms] - y).square_()
    square += (coord[:, 2][atoms] - z).square_()
    kind = types[atoms]
    within = (listed >= 0) & (square < request.rcut * request.rcut) & (kind >= 0)
    slots = 0  # TorchScript knows no sum() of a list
    for limit in request.sel:
        slots += limit
    if request.by_type and within.numel() > 0 and int(within.sum(1).max()) > slots:
        # deepmd-kit selects the nearest of all types before it counts types.
        nearest = _nearest_columns(within, square, slots)
        is_nearest = torch.zeros_like(within, dtype=torch.int64)
        is_nearest.scatter_add_(1, nearest.clamp(min=0), (nearest >= 0).long())
        within = is_nearest > 0
    columns: list[Tensor] = []
    sections: list[int] = []
    for group in range(len(request.sel)):
        inside = within & (kind == group) if request.by_type else within
        limit = request.sel[group]
        section = _nearest_columns(inside, square, limit) if request.sort else _columns(inside)
        if section.shape[1] > limit:  # too many: the nearest stay
            section = _nearest_columns(inside, square, limit)
        columns.append(section)
        sections.append(section.shape[1])
    joined = torch.cat(columns, 1)
    neighbor = listed.gather(1, joined.clamp(min=0)).masked_fill_(joined < 0, -1)
    vectors = coord[neighbor.clamp(min=0)] - coord[centre].unsqueeze(1)
    return neighbor, sections, vectors


def _columns(inside: Tensor) -> Tensor:
    """Return the columns of the True entries of each row in order, then −1 `(rows, n)`."""
    rank = inside.cumsum(1)
    width = 0 if inside.numel() == 0 else int(rank[:, -1].max())
    row, column = inside.nonzero().unbind(1)
    out = torch.full([inside.shape[0], width], -1, dtype=torch.int64, device=inside.device)
    return out.index_put_((row, rank[row, column] - 1), column)


def _nearest_columns(inside: Tensor, square: Tensor, limit: int) -> Tensor:
    """Return the columns of at most `limit` True entries of each row, nearest first, then −1."""
    distance, column = torch.where(inside, square, torch.inf).sort(dim=1, stable=True)
    width = 0 if inside.numel() == 0 else min(limit, int(inside.sum(1).max()))
    distance = distance[:, :width]
    return torch.where(torch.isinf(distance), -1, column[:, :width])
