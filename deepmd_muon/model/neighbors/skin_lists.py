"""Neighbour lists of moving structures, built and reused on the device without the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.descriptor.settings import NeighborRequest
from deepmd_muon.model.neighbors.atoms import (
    FIRST_WIDTH,
    MOST_NEIGHBORS,
    ROOM,
    Atoms,
    Candidates,
    Cells,
    Sections,
)
from deepmd_muon.model.neighbors.candidates import lay_out, mark_stale, refer, renew
from deepmd_muon.model.neighbors.search import count_neighbors
from deepmd_muon.model.structures import Structures

# Room beyond what is needed, and what it is a multiple of: few changes of density then need other shapes.
_SPARE, _STEP = 1.1, 8


@dataclass(frozen=True)
class Room:
    """Sizes of lists, which follow from what was needed so far.

    Attributes
    ----------
    candidates
        Atoms within cut-off and skin.
    widths
        Columns of each section.
    inner
        Bounds of the neighbours within each shorter radius.
    """

    candidates: int
    widths: tuple[int, ...]
    inner: tuple[int, ...]


class SkinLists:
    """Lists of structures of fixed types; positions and cells are written into its tensors.

    Parameters
    ----------
    request
        The list that the model reads.
    ntypes
        Number of types of the model.
    atype
        Types `(nframes, natoms)` on the device; −1 for padding, which comes last.
    periodic
        Whether a structure has a cell.
    skin
        Distance beyond the cut-off that the candidates cover [Å].

    Attributes
    ----------
    coord
        Positions `(nframes, natoms, 3)` [Å], float64; write them before `find`.
    cells
        Cells; `set_cells` writes them.
    nearest
        As in `Candidates`; 0 until the caller sets it.
    built
        Lists that were built for each structure `(nframes,)`, int64.
    """

    def __init__(
        self, request: NeighborRequest, ntypes: int, atype: Tensor, periodic: bool, skin: float
    ) -> None:
        nframes, natoms = atype.shape
        device = atype.device
        self._rcut, self._skin, self._inner = request.rcut, skin, request.inner
        self._atype, self._by_type, self._ntypes = atype, request.by_type, ntypes
        self._limits = tuple(request.sel) if request.by_type else (sum(request.sel),)
        flat = atype.reshape(-1)
        order = torch.argsort(flat, stable=True)
        self._order = order[int((flat < 0).sum()) :]
        self._kind, self._frame = flat[self._order], self._order // max(1, natoms)
        self._counts = tuple(torch.bincount(self._kind, minlength=ntypes).tolist())
        self._sizes = (atype >= 0).sum(1)
        self.coord = torch.zeros(nframes, natoms, 3, dtype=torch.float64, device=device)
        self._reference = torch.full_like(self.coord, torch.inf)
        self._stale = torch.zeros(nframes, dtype=torch.int32, device=device)
        self.nearest = torch.zeros(1, dtype=torch.float64, device=device)
        self.cells: Cells | None = None
        if periodic:
            self.cells = Cells.of_some(
                torch.zeros(nframes, 3, 3, dtype=torch.float64, device=device), self._reach
            )
        self.built = torch.zeros(nframes, dtype=torch.int64, device=device)
        self._candidates: Candidates | None = None
        self._entries = self.entries(request)
        self._room: Room | None = None

    @staticmethod
    def entries(request: NeighborRequest) -> int:
        """Return how many entries `needed` has."""
        return FIRST_WIDTH + (len(request.sel) if request.by_type else 1) + len(request.inner)

    @property
    def _reach(self) -> float:
        return self._rcut + self._skin

    @property
    def needed(self) -> Tensor:
        """What did not fit since `prepare` or `grow`; int32, zeros where all did."""
        assert self._candidates is not None
        return self._candidates.needed

    def set_cells(self, box: Tensor) -> None:
        """Take cells `(nframes, 3, 3)` [Å], zeros for none; structures whose cell changes get new lists."""
        assert self.cells is not None
        changed = (box != self.cells.box).flatten(1).any(1)
        for own, new in zip(self.cells, Cells.of_some(box, self._reach), strict=True):
            own.copy_(new)
        self._reference.masked_fill_(changed[:, None, None], torch.inf)

    def forget(self) -> None:
        """Forget all lists, and what did not fit."""
        self.needed.zero_()
        self._reference.fill_(torch.inf)

    def prepare(self) -> bool:
        """Choose sizes by the present positions, once; False where an atom has more neighbours than can be sorted."""
        if self._room is None:
            within, short, _ = self._count([self._rcut, *(radius for radius, _ in self._inner)])
            all_in_skin = self._count([self._reach])[0].sum(1)
            widths = within if self._by_type else within.sum(1, keepdim=True)
            counts = all_in_skin[:, None], widths, short
            self._make(*(x.amax(0).tolist() if len(x) else [0] * x.shape[1] for x in counts))
        assert self._room is not None
        return self._room.candidates <= MOST_NEIGHBORS

    def _count(self, radii: list[float]) -> tuple[Tensor, Tensor, Tensor]:
        return count_neighbors(self._atoms, self._order, self._frame, radii, self._ntypes)

    def grow(self, needed: list[int]) -> bool:
        """Make room for what did not fit; False where all did, so that the last lists are whole.

        Parameters
        ----------
        needed
            The values of `needed`.
        """
        room, end = self._room, FIRST_WIDTH + len(self._limits)
        assert room is not None
        widths = [
            min(x, most) for x, most in zip(needed[FIRST_WIDTH:end], self._limits, strict=True)
        ]
        inner = [min(x, self._most_inner(k)) for k, x in enumerate(needed[end:])]
        before = (room.candidates, *room.widths, *room.inner)
        if all(x <= own for x, own in zip((needed[ROOM], *widths, *inner), before, strict=True)):
            return False
        self._make([needed[ROOM]], widths, inner)
        return True

    def _most_inner(self, k: int) -> int:
        return min(self._inner[k][1], self._limits[0])

    def _make(self, candidates: list[int], widths: list[int], inner: list[int]) -> None:
        """Allocate lists with room for these numbers and for the earlier ones."""
        before = self._room or Room(0, (0,) * len(self._limits), (0,) * len(self._inner))

        def roomy(number: int, had: int) -> int:
            return max(had, _STEP, -(-int(_SPARE * number) // _STEP) * _STEP if number > had else 0)

        self._room = Room(
            roomy(candidates[0], before.candidates),
            tuple(
                min(roomy(x, own), most)
                for x, own, most in zip(widths, before.widths, self._limits, strict=True)
            ),
            tuple(
                min(roomy(x, own), self._most_inner(k))
                for k, (x, own) in enumerate(zip(inner, before.inner, strict=True))
            ),
        )
        nreal, device = len(self._order), self._atype.device
        most = self._room.candidates
        self._candidates = Candidates(
            torch.zeros(nreal, most, dtype=torch.int32, device=device),
            None
            if self.cells is None
            else torch.zeros(nreal, most, 3, dtype=torch.int32, device=device),
            torch.zeros(nreal, dtype=torch.int32, device=device),
            torch.zeros(self._entries, dtype=torch.int32, device=device),
            self.nearest,
            self._room.inner,
        )
        self._reference.fill_(torch.inf)
        self._filled = np.repeat(np.array(self._room.widths)[:, None], nreal, axis=1)
        self._bounds = np.repeat(np.array(self._room.inner, dtype=np.int64)[:, None], nreal, axis=1)

    @property
    def _atoms(self) -> Atoms:
        return Atoms(
            self.coord.view(-1, 3),
            self._atype.view(-1),
            self._sizes,
            self._atype.shape[1],
            self.cells,
        )

    def _renewed(self) -> Candidates:
        """Return the candidates at the present positions; `needed` tells whether they had room."""
        assert self._candidates is not None
        mark_stale(
            self._stale,
            self._candidates.needed,
            self.coord,
            self._reference,
            (0.5 * self._skin) ** 2,
        )
        refer(self._reference, self.built, self.coord, self._stale)
        renew(self._candidates, self._atoms, self._order, self._frame, self._stale, self._reach)
        return self._candidates

    def pairs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all pairs within cut-off and skin, each both ways; it waits for the device, and makes room.

        Returns
        -------
        tuple
            Atoms i and j `(npairs,)`, numbered through all structures, pairs of one i together; translations of j
            `(npairs, 3)` [cells], None without cells.
        """
        found = self._renewed()
        while self.grow(found.needed.tolist()):
            found = self._renewed()
        row, column = torch.nonzero(
            torch.arange(found.place.shape[1], device=found.number.device) < found.number[:, None],
            as_tuple=True,
        )
        shift = None if found.shift is None else found.shift[row, column]
        return self._order[row], found.place[row, column].long(), shift

    def find(self) -> Structures:
        """Return the structures at the present positions with their neighbours; all work is on the device."""
        assert self._room is not None
        candidates, atoms = self._renewed(), self._atoms
        limit = sum(self._limits)
        sections = Sections(
            self._rcut, self._room.widths, self._by_type, min(limit, MOST_NEIGHBORS), 0
        )
        radii = [radius for radius, _ in self._inner]
        neighbor, shift = lay_out(candidates, atoms, self._order, self._frame, sections, radii)
        return Structures(
            coord=self.coord,
            atype=self._atype,
            box=None if self.cells is None else self.cells.box,
            order=self._order,
            sorted_type=self._kind,
            sorted_frame=self._frame,
            neighbor=neighbor,
            shift=shift,
            sections=self._room.widths,
            type_counts=self._counts,
            filled=self._filled,
            inner=self._bounds,
        )
