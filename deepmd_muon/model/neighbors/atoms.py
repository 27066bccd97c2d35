"""The input of a search for neighbours: structures side by side, their cells, and the form of the list."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Neighbours that a program of the kernels sorts, at most.
MOST_NEIGHBORS = 4096
#: Atoms nearer than this lie at the same place [Å].
SAME_PLACE = 1e-6
#: Entries of `Candidates.needed`: room for candidates; 1 where atoms lie at the same place; 1 where a position is not
#: finite; `NEARNESS` over the least distance, rounded up, where atoms are nearer than `Candidates.nearest`; the widths
#: of sections; the bounds of shorter radii.
ROOM, AT_SAME_PLACE, NOT_FINITE, TOO_NEAR, FIRST_WIDTH = range(5)
#: Scale of such an entry [Å]: the largest integer is that of the least distance, to 0.1 % at 1 Å.
NEARNESS = 1000.0
#: Rounding of translations [cells].
MARGIN = 1e-9


class Cells(NamedTuple):
    """Cells of some structures, prepared for the search.

    Attributes
    ----------
    box, inverse
        Cell vectors as rows [Å] and the inverse matrix [1/Å] `(nframes, 3, 3)`.
    reach
        Cut-off radius divided by the distance between opposite faces `(nframes, 3)`.
    images
        How many translations along each cell vector may bring an atom within the cut-off `(nframes, 3)`, int32.
    """

    box: Tensor
    inverse: Tensor
    reach: Tensor
    images: Tensor

    @classmethod
    def of(cls, box: Tensor, rcut: float) -> Cells:
        """Prepare cells `(nframes, 3, 3)` [Å], float64."""
        a, b, c = box.unbind(1)
        inverse = torch.stack(
            [torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)], 2
        )
        inverse = (
            inverse / (a * inverse[..., 0]).sum(1)[:, None, None]
        )  # a library's `inv` takes 0.2 s to load
        reach = rcut * torch.linalg.vector_norm(inverse, dim=1)
        return cls(box, inverse, reach, ((2.0 * reach + 2.0 * MARGIN).floor() + 1.0).int())

    @classmethod
    def of_some(cls, box: Tensor, rcut: float) -> Cells:
        """Prepare cells of which some are zeros: their structures have no cell, and nothing moves their atoms."""
        periodic = box.flatten(1).any(1)[:, None]
        unit = torch.eye(3, dtype=box.dtype, device=box.device)
        cells = cls.of(torch.where(periodic.unsqueeze(2), box, unit), rcut)
        box, inverse = (
            torch.where(periodic.unsqueeze(2), x, 0.0) for x in (cells.box, cells.inverse)
        )
        return cls(
            box,
            inverse,
            torch.where(periodic, cells.reach, 0.0),
            torch.where(periodic, cells.images, 1),
        )

    def select(self, numbers: Tensor) -> Cells:
        """Return the cells of some structures."""
        return Cells(*(x.index_select(0, numbers) for x in self))


class Atoms(NamedTuple):
    """Structures side by side.

    Attributes
    ----------
    coord
        Positions `(nframes · natoms, 3)` [Å], float64; those of a structure come first among its `natoms` places.
    atype
        Types `(nframes · natoms,)`, int64.
    counts
        Atoms of each structure `(nframes,)`, int64.
    natoms
        Places of a structure.
    cells
        None without periodicity.
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
    most
        The nearest neighbours of all types that are kept before sections are cut, as in deepmd-kit.
    capacity
        Most neighbours of an atom.
    """

    rcut: float
    widths: tuple[int, ...]
    by_type: bool
    most: int
    capacity: int


class Candidates(NamedTuple):
    """Atoms within cut-off and skin of some atoms, kept until an atom has moved too far.

    Attributes
    ----------
    place
        Places of the candidates `(nreal, room)`, int32; only the first `number` count.
    shift
        Their cell translations `(nreal, room, 3)`, int32; None without cells.
    number
        Candidates of each atom `(nreal,)`, int32; more than the room where that is too small.
    needed
        What did not fit, int32; zeros where all did. Its entries are named above.
    nearest
        Squared distance below which atoms are too near for the reader of the list `(1,)` [Å²], float64.
    inner
        Bounds of the neighbours within each shorter radius.
    """

    place: Tensor
    shift: Tensor | None
    number: Tensor
    needed: Tensor
    nearest: Tensor
    inner: tuple[int, ...]
