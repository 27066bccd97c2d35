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

# Sizes exceed what is needed by a factor, and are multiples of a step, so that few changes of
# density need other shapes.
_SPARE = 1.1
_STEP = 8


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
        self._rcut = request.rcut
        self._skin = skin
        self._inner = request.inner
        self._by_type = request.by_type
        self._ntypes = ntypes
        self._limits = tuple(request.sel) if request.by_type else (sum(request.sel),)
        self._entries = self.entries(request)

        self._atype = atype
        flat = atype.reshape(-1)
        by_type = torch.argsort(flat, stable=True)  # padding, −1, comes first
        n_padding = int((flat < 0).sum())
        self._order = by_type[n_padding:]
        self._kind = flat[self._order]
        self._frame = self._order // max(1, natoms)
        self._type_counts = tuple(torch.bincount(self._kind, minlength=ntypes).tolist())
        self._sizes = (atype >= 0).sum(1)

        self.coord = torch.zeros(nframes, natoms, 3, dtype=torch.float64, device=device)
        self.cells: Cells | None = None
        if periodic:
            no_cells = torch.zeros(nframes, 3, 3, dtype=torch.float64, device=device)
            self.cells = Cells.of_some(no_cells, self._reach)
        self.nearest = torch.zeros(1, dtype=torch.float64, device=device)
        self.built = torch.zeros(nframes, dtype=torch.int64, device=device)
        # Infinitely far away: every structure is stale.
        self._reference = torch.full_like(self.coord, torch.inf)
        self._stale = torch.zeros(nframes, dtype=torch.int32, device=device)
        self._candidates: Candidates | None = None
        self._room: Room | None = None

    @staticmethod
    def entries(request: NeighborRequest) -> int:
        """Return how many entries `needed` has."""
        n_sections = len(request.sel) if request.by_type else 1
        return FIRST_WIDTH + n_sections + len(request.inner)

    @property
    def _reach(self) -> float:
        return self._rcut + self._skin

    @property
    def needed(self) -> Tensor:
        """What did not fit since `prepare` or `grow`, see `Candidates`; int32, zeros if all did."""
        assert self._candidates is not None
        return self._candidates.needed

    def set_cells(self, box: Tensor) -> None:
        """Set the cells `(nframes, 3, 3)` [Å], zeros for none.

        Structures get new lists if their cell has changed.
        """
        assert self.cells is not None
        changed = (box != self.cells.box).flatten(1).any(1)
        # In place: recorded graphs read this memory.
        for tensor, values in zip(self.cells, Cells.of_some(box, self._reach), strict=True):
            tensor.copy_(values)
        self._reference.masked_fill_(changed[:, None, None], torch.inf)

    def forget(self) -> None:
        """Forget all lists, and what did not fit."""
        self.needed.zero_()
        self._reference.fill_(torch.inf)

    def prepare(self) -> bool:
        """Choose sizes by the present positions, once.

        Return false if an atom has more neighbours than can be sorted.
        """
        if self._room is None:
            radii = [self._rcut, *(radius for radius, _ in self._inner)]
            type_counts, inner_counts, _ = self._count(radii)
            skin_counts, _, _ = self._count([self._reach])
            width_counts = type_counts if self._by_type else type_counts.sum(1, keepdim=True)
            self._make(
                candidates=_largest(skin_counts.sum(1, keepdim=True))[0],
                widths=_largest(width_counts),
                inner=_largest(inner_counts),
            )
        assert self._room is not None
        return self._room.candidates <= MOST_NEIGHBORS

    def _count(self, radii: list[float]) -> tuple[Tensor, Tensor, Tensor]:
        return count_neighbors(self._atoms, self._order, self._frame, radii, self._ntypes)

    def grow(self, needed: list[int]) -> bool:
        """Make room for what did not fit; return false if all did: the last lists are whole then.

        Parameters
        ----------
        needed
            The values of `needed`.
        """
        assert self._room is not None
        first_inner = FIRST_WIDTH + len(self._limits)
        # Lists never hold more than the request's limits: missing room beyond them is no fault.
        widths = [
            min(width, limit)
            for width, limit in zip(needed[FIRST_WIDTH:first_inner], self._limits, strict=True)
        ]
        inner = [min(bound, self._inner_limit(k)) for k, bound in enumerate(needed[first_inner:])]
        sizes = (self._room.candidates, *self._room.widths, *self._room.inner)
        needed_sizes = (needed[ROOM], *widths, *inner)
        if all(need <= size for need, size in zip(needed_sizes, sizes, strict=True)):
            return False
        self._make(candidates=needed[ROOM], widths=widths, inner=inner)
        return True

    def _inner_limit(self, k: int) -> int:
        """Return the most neighbours that are counted within a shorter radius."""
        _, limit = self._inner[k]
        return min(limit, self._limits[0])

    def _make(self, candidates: int, widths: list[int], inner: list[int]) -> None:
        """Allocate lists with room for these numbers and for the earlier ones."""
        before = self._room
        if before is None:
            before = Room(0, (0,) * len(self._limits), (0,) * len(self._inner))
        self._room = Room(
            candidates=_with_spare(candidates, before.candidates),
            widths=tuple(
                min(_with_spare(width, size), limit)
                for width, size, limit in zip(widths, before.widths, self._limits, strict=True)
            ),
            inner=tuple(
                min(_with_spare(bound, size), self._inner_limit(k))
                for k, (bound, size) in enumerate(zip(inner, before.inner, strict=True))
            ),
        )
        nrows = len(self._order)
        room = self._room.candidates

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=self._atype.device)

        self._candidates = Candidates(
            place=zeros(nrows, room),
            shift=None if self.cells is None else zeros(nrows, room, 3),
            number=zeros(nrows),
            needed=zeros(self._entries),
            too_near_squared=self.nearest,
            shorter_bounds=self._room.inner,
        )
        self._reference.fill_(torch.inf)
        # `Structures` wants these numbers for every atom; here they are the same for all.
        widths_column = np.array(self._room.widths)[:, None]
        inner_column = np.array(self._room.inner, dtype=np.int64)[:, None]
        self._filled = np.repeat(widths_column, nrows, axis=1)
        self._bounds = np.repeat(inner_column, nrows, axis=1)

    @property
    def _atoms(self) -> Atoms:
        return Atoms(
            coord=self.coord.view(-1, 3),
            atype=self._atype.view(-1),
            counts=self._sizes,
            natoms=self._atype.shape[1],
            cells=self.cells,
        )

    def _renew(self) -> Candidates:
        """Return the candidates at the present positions; `needed` tells whether they had room."""
        assert self._candidates is not None
        mark_stale(
            stale=self._stale,
            needed=self._candidates.needed,
            coord=self.coord,
            reference=self._reference,
            # Two atoms that both move by half the skin come nearer by the whole skin.
            limit_squared=(0.5 * self._skin) ** 2,
        )
        refer(self._reference, self.built, self.coord, self._stale)
        renew(
            candidates=self._candidates,
            atoms=self._atoms,
            order=self._order,
            frame=self._frame,
            stale=self._stale,
            reach=self._reach,
        )
        return self._candidates

    def pairs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all pairs within cut-off and skin, each both ways.

        It waits for the device, and makes room.

        Returns
        -------
        tuple
            Atoms i and j `(npairs,)`, numbered through all structures, pairs of one i together;
            translations of j `(npairs, 3)` [cells], None without cells.
        """
        candidates = self._renew()
        while self.grow(candidates.needed.tolist()):
            candidates = self._renew()
        column = torch.arange(candidates.place.shape[1], device=candidates.number.device)
        is_candidate = column < candidates.number[:, None]
        row, column = torch.nonzero(is_candidate, as_tuple=True)
        shift = None if candidates.shift is None else candidates.shift[row, column]
        return self._order[row], candidates.place[row, column].long(), shift

    def find(self) -> Structures:
        """Return the structures at the present positions with their neighbours.

        All work is on the device.
        """
        assert self._room is not None
        candidates = self._renew()
        sections = Sections(
            rcut=self._rcut,
            widths=self._room.widths,
            by_type=self._by_type,
            n_nearest=min(sum(self._limits), MOST_NEIGHBORS),
            capacity=0,  # not read: the room of the candidates counts
        )
        neighbor, shift = lay_out(
            candidates=candidates,
            atoms=self._atoms,
            order=self._order,
            frame=self._frame,
            sections=sections,
            shorter_radii=[radius for radius, _ in self._inner],
        )
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
            type_counts=self._type_counts,
            filled=self._filled,
            inner=self._bounds,
        )


def _largest(counts: Tensor) -> list[int]:
    """Return the largest number of each column of `(nrows, ncolumns)`; 0 without rows."""
    if not len(counts):
        return [0] * counts.shape[1]
    largest: list[int] = counts.amax(0).tolist()
    return largest


def _with_spare(number: int, size: int) -> int:
    """Return a size for a number: the earlier `size` if it fits, else a larger one with spare."""
    if number <= size:
        return max(size, _STEP)
    return max(_STEP, -(-int(_SPARE * number) // _STEP) * _STEP)
