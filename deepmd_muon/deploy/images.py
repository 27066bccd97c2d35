"""Neighbour search of frozen files for calls with a cell instead of a neighbour list; TorchScript."""

import torch


def with_images(
    coord: torch.Tensor, kind: torch.Tensor, box: torch.Tensor, rcut: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one frame's atoms in their cell, followed by the periodic images that may lie within their cut-off.

    Parameters
    ----------
    coord
        `(nloc, 3)` [Å], inside the cell or not.
    kind
        Types `(nloc,)`.
    box
        Cell vectors as rows `(3, 3)` [Å].
    rcut
        Cut-off [Å].

    Returns
    -------
    tuple
        Positions `(nall, 3)`, types `(nall,)` and the atom that each is an image of `(nall,)`.
    """
    inverse = torch.linalg.inv(box)
    fraction = coord @ inverse
    fraction = fraction - fraction.floor()
    reach = (
        rcut * inverse.square().sum(0).sqrt()
    )  # of the cut-off, in units of the distance between opposite faces
    # Also catches a cell without volume, whose inverse holds infinities. 1e6 images take hundreds of MB.
    if not bool(reach.clamp(min=0.5).prod() < 125000.0):
        raise ValueError(
            "the cell is too flat: an atom has more than a million images within the cut-off"
        )
    steps: list[torch.Tensor] = []
    for axis in range(3):
        most = int(reach[axis].ceil())
        steps.append(torch.arange(-most, most + 1, device=coord.device))
    shifts = torch.cartesian_prod(steps[0], steps[1], steps[2])
    shifts = shifts[(shifts != 0).any(1)].to(coord.dtype)
    moved = fraction.unsqueeze(0) + shifts.unsqueeze(1)
    near = ((moved > -reach) & (moved < 1.0 + reach)).all(2)
    images = moved[near] @ box
    owner = torch.arange(coord.shape[0], device=coord.device)
    owners = torch.cat([owner, owner.expand(shifts.shape[0], -1)[near]])
    return torch.cat([fraction @ box, images]), kind[owners], owners


def all_pairs(coord: torch.Tensor, nloc: int, rcut: float, step: int = 512) -> torch.Tensor:
    """Return the atoms within the cut-off of each of the first `nloc` atoms `(nloc, nnei)`, −1 in empty slots.

    `step` bounds the memory: the distances of this many atoms to all others are held at once.
    """
    lists: list[torch.Tensor] = []
    width = 0
    for first in range(0, nloc, step):
        here = coord[first : min(first + step, nloc)]
        square = (here[:, :1] - coord[:, 0]).square_()
        square += (here[:, 1:2] - coord[:, 1]).square_()
        square += (here[:, 2:] - coord[:, 2]).square_()
        inside = square < rcut * rcut
        inside.diagonal(first).fill_(False)
        rank = inside.cumsum(1)
        most = int(rank[:, -1].max())
        row, column = inside.nonzero().unbind(1)
        listed = torch.full([here.shape[0], most], -1, dtype=torch.int64, device=coord.device)
        lists.append(listed.index_put_((row, rank[row, column] - 1), column))
        width = max(width, most)
    padded = [
        torch.nn.functional.pad(listed, [0, width - listed.shape[1]], value=-1.0)
        for listed in lists
    ]
    return (
        torch.cat(padded)
        if len(padded) > 0
        else torch.empty([0, 0], dtype=torch.int64, device=coord.device)
    )
