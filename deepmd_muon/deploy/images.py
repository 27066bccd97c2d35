"""Neighbour search of frozen files for calls without a neighbour list; TorchScript."""

import torch
from torch import Tensor


def with_images(
    coord: Tensor, kind: Tensor, box: Tensor, rcut: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one frame's atoms in their cell, then the images that may be within their cut-off.

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
    # The cut-off in units of the distances between opposite faces.
    reach = rcut * inverse.square().sum(0).sqrt()
    # Also catches a cell without volume, whose inverse holds infinities. 1e6 images take hundreds
    # of MB.
    if not bool(reach.clamp(min=0.5).prod() < 125000.0):
        raise ValueError(
            "the cell is too flat: an atom has more than a million images within the cut-off"
        )
    axis_shifts: list[Tensor] = []
    for axis in range(3):
        largest = int(reach[axis].ceil())
        axis_shifts.append(torch.arange(-largest, largest + 1, device=coord.device))
    shifts = torch.cartesian_prod(axis_shifts[0], axis_shifts[1], axis_shifts[2])
    shifts = shifts[(shifts != 0).any(1)].to(coord.dtype)
    shifted = fraction.unsqueeze(0) + shifts.unsqueeze(1)  # (shifts, nloc, 3)
    near = ((shifted > -reach) & (shifted < 1.0 + reach)).all(2)
    images = shifted[near] @ box
    owner = torch.arange(coord.shape[0], device=coord.device)
    owners = torch.cat([owner, owner.expand(shifts.shape[0], -1)[near]])
    return torch.cat([fraction @ box, images]), kind[owners], owners


def all_pairs(coord: Tensor, nloc: int, rcut: float, step: int = 512) -> Tensor:
    """Return the atoms within the cut-off of each of the first `nloc` atoms `(nloc, nnei)`.

    Empty slots hold −1.

    `step` bounds the memory: the distances of this many atoms to all others are held at once.
    """
    if nloc == 0:
        return torch.empty([0, 0], dtype=torch.int64, device=coord.device)
    lists: list[Tensor] = []
    width = 0
    for begin in range(0, nloc, step):
        centres = coord[begin : min(begin + step, nloc)]
        square = (centres[:, :1] - coord[:, 0]).square_()
        square += (centres[:, 1:2] - coord[:, 1]).square_()
        square += (centres[:, 2:] - coord[:, 2]).square_()
        inside = square < rcut * rcut
        inside.diagonal(begin).fill_(False)
        rank = inside.cumsum(1)
        largest = int(rank[:, -1].max())
        row, column = inside.nonzero().unbind(1)
        listed = torch.full([centres.shape[0], largest], -1, dtype=torch.int64, device=coord.device)
        lists.append(listed.index_put_((row, rank[row, column] - 1), column))
        width = max(width, largest)
    padded = [
        torch.nn.functional.pad(listed, [0, width - listed.shape[1]], value=-1.0)
        for listed in lists
    ]
    return torch.cat(padded)
