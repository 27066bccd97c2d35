"""The input of a neighbour search: structures side by side, cells, and the form of the list."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Neighbours that a program of the kernels sorts, at most.
MOST_NEIGHBORS = 4096
#: Atoms nearer than this are at the same place [Å].
SAME_PLACE = 1e-6
#: Margin for the rounding of translations [cells].
MARGIN = 1e-9

# Entries of `Candidates.needed`.
#: Room that the candidates of an atom need.
ROOM = 0
#: 1 if two atoms are at the same place.
AT_SAME_PLACE = 1
#: 1 if a position is not finite.
NOT_FINITE = 2
#: `NEARNESS` over the least distance, rounded up, if its square is below `too_near_squared`.
TOO_NEAR = 3
#: The first of the widths of sections; the bounds of shorter radii follow them.
FIRST_WIDTH = 4
#: Scale of TOO_NEAR [Å]: an integer that resolves a distance of 1 Å to 0.1 %.
NEARNESS = 1000.0


class Cells(NamedTuple):
    """Cells of some structures, prepared for the search.

    Attributes
    ----------
    box, inverse
        Cell vectors as rows [Å] and the inverse matrix [1/Å] `(nframes, 3, 3)`.
    reach
        Cut-off radius divided by the distance between opposite faces `(nframes, 3)`.
    images
        How many translations along each cell vector may bring an atom within the cut-off `(nframes,
        3)`, int32.
    """

    box: Tensor
    inverse: Tensor
    reach: Tensor
    images: Tensor

    @classmethod
    def of(cls, box: Tensor, rcut: float) -> Cells:
        """Prepare cells `(nframes, 3, 3)` [Å], float64."""
        # By cross products: `torch.linalg.inv` takes 0.2 s to load a library.
        a, b, c = box.unbind(1)
        columns = [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)]
        inverse = torch.stack(columns, 2)
        volume = (a * inverse[..., 0]).sum(1)
        inverse = inverse / volume[:, None, None]
        reach = rcut * torch.linalg.vector_norm(inverse, dim=1)
        images = ((2.0 * reach + 2.0 * MARGIN).floor() + 1.0).int()
        return cls(box, inverse, reach, images)

    @classmethod
    def of_some(cls, box: Tensor, rcut: float) -> Cells:
        """Prepare cells, zeros for a structure without a cell: its atoms have one image each."""
        periodic = box.flatten(1).any(1)[:, None]
        unit = torch.eye(3, dtype=box.dtype, device=box.device)
        cells = cls.of(torch.where(periodic.unsqueeze(2), box, unit), rcut)
        return cls(
            box=torch.where(periodic.unsqueeze(2), cells.box, 0.0),
            inverse=torch.where(periodic.unsqueeze(2), cells.inverse, 0.0),
            reach=torch.where(periodic, cells.reach, 0.0),
            images=torch.where(periodic, cells.images, 1),
        )

    def select(self, numbers: Tensor) -> Cells:
        """Return the cells of some structures."""
        return Cells(*(tensor.index_select(0, numbers) for tensor in self))


class Atoms(NamedTuple):
    """Structures side by side.

    Attributes
    ----------
    coord
        Positions `(nframes · natoms, 3)` [Å], float64. A structure has `natoms` places; its atoms
        come first.
    atype
        Types `(nframes · natoms,)`, int64.
    counts
        Atoms of each structure `(nframes,)`, int64.
    natoms
        Places of a structure.
    cells
        None if no structure has a cell.
    """

    coord: Tensor
    atype: Tensor
    counts: Tensor
    natoms: int
    cells: Cells | None


class Sections(NamedTuple):
    """Which neighbours a list keeps, and where.

    Attributes
    ----------
    rcut
        Cut-off radius [Å].
    widths
        Columns of each section: one section a type, or one for all.
    by_type
        Whether sections are types.
    n_nearest
        How many neighbours of all types, the nearest first, enter sections, as in deepmd-kit.
    capacity
        Most neighbours of an atom.
    """

    rcut: float
    widths: tuple[int, ...]
    by_type: bool
    n_nearest: int
    capacity: int


class Candidates(NamedTuple):
    """Atoms within cut-off and skin of some atoms, kept until an atom has moved too far.

    Attributes
    ----------
    place
        Places of the candidates `(nrows, room)`, int32; only the first `number` count.
    shift
        Their cell translations `(nrows, room, 3)`, int32; None without cells.
    number
        Candidates of each atom `(nrows,)`, int32; more than the room if that is too small.
    needed
        What did not fit, int32; zeros if all did. Its entries are named above.
    too_near_squared
        Squared distance below which atoms are too near for the reader of the list `(1,)` [Å²],
        float64.
    shorter_bounds
        Bounds of the neighbours within each shorter radius.
    """

    place: Tensor
    shift: Tensor | None
    number: Tensor
    needed: Tensor
    too_near_squared: Tensor
    shorter_bounds: tuple[int, ...]
