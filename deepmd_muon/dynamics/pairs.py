"""Pairs of atoms of many structures within cut-off plus skin, reused until an atom has moved by half the skin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from deepmd_muon.data.errors import NeighborError, naming_frame
from deepmd_muon.data.neighbors.lists import find_pairs, group_limits, with_ghosts
from deepmd_muon.model import EnergyModel, Structures


@dataclass(frozen=True)
class _FramePairs:
    """Pairs of one structure: atoms `i` and `j` `(npairs,)`, cell translations `(npairs, 3)`."""

    i: torch.Tensor
    j: torch.Tensor
    shift: torch.Tensor


class Reused:
    """Decides when lists must be rebuilt: when an atom has moved by half the skin, or a cell has changed."""

    def __init__(self, skin: float, atype: torch.Tensor) -> None:
        self.skin = skin
        self.atype = atype
        self.host_atype = atype.cpu().numpy()
        self.built = 0  # number of lists of single structures built so far
        self._coord: torch.Tensor | None = None
        self._box: torch.Tensor | None = None

    def stale(self, coord: torch.Tensor, box: torch.Tensor | None) -> list[int]:
        """Return the structures whose lists must be built, and store the positions for which they are built."""
        if self._coord is None:
            found = list(range(coord.shape[0]))
            self._coord, self._box = coord.clone(), None if box is None else box.clone()
        else:
            moved = (coord - self._coord).square().sum(-1).amax(1)
            # Not "moved > …": NaN must reach the search for neighbours, whose error names the atom.
            old = ~(moved <= (0.5 * self.skin) ** 2)
            if box is not None and self._box is not None:
                old = old | (box != self._box).flatten(1).any(1)
            found = torch.nonzero(old).flatten().tolist()
            if found:
                self._coord[found] = coord[found]
                if box is not None and self._box is not None:
                    self._box[found] = box[found]
        self.built += len(found)
        return found

    @contextmanager
    def building(self, k: int) -> Iterator[None]:
        """Add the structure's number to an error; the next call then rebuilds all lists."""
        try:
            with naming_frame(k):
                yield
        except NeighborError:
            self._coord = None
            raise


def _arrays(
    coord: torch.Tensor, box: torch.Tensor | None, atype: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    cell = None if box is None else box[k].cpu().numpy()
    return (
        coord[k].detach().cpu().numpy(),
        cell if cell is not None and cell.any() else None,
        atype[k],
    )


class PairLists:
    """Neighbour lists for models of checkpoints, as `Structures`.

    At every call they equal those of `data.build_neighbors`: pairs beyond the cut-off are left out, and of more than
    `sel` neighbours the nearest stay. Types are `(nframes, natoms)` on the device, −1 for padding. `skin` [Å] is added
    to the cut-off of the stored pairs.
    """

    def __init__(self, model: EnergyModel, atype: torch.Tensor, skin: float) -> None:
        self.reused = Reused(skin, atype)
        self._model = model
        self._atype = atype
        self._frames: list[_FramePairs | None] = [None] * atype.shape[0]
        self._joined: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        flat = atype.reshape(-1)
        order = torch.argsort(flat, stable=True)
        self._order = order[int((flat < 0).sum()) :]
        self._sorted_type = flat[self._order]
        self._row = torch.empty_like(flat)
        self._row[self._order] = torch.arange(len(self._order), device=flat.device)
        self._counts = tuple(torch.bincount(self._sorted_type, minlength=model.ntypes).tolist())
        limits = group_limits(model.sel, model.by_type, model.ntypes)
        self._limits = torch.from_numpy(limits).to(flat.device)

    def structures(self, coord: torch.Tensor, box: torch.Tensor | None) -> Structures:
        """Return the batch at these positions. Raises NeighborError, with the number of the structure in `frame`."""
        stale = self.reused.stale(coord, box)
        for k in stale:
            self._frames[k] = self._found(coord, box, k)
        if stale or self._joined is None:
            self._joined = self._join()
        i, j, shift, frame = self._joined
        flat = coord.reshape(-1, 3)
        edge = flat[j] - flat[i]
        if box is not None:
            edge = edge + (shift[:, None, :] @ box[frame])[:, 0]
        square = edge.square().sum(-1)
        near = torch.nonzero(square < self._model.rcut**2).flatten()
        return self._laid_out(coord, box, i[near], j[near], shift[near], square[near])

    def _found(self, coord: torch.Tensor, box: torch.Tensor | None, k: int) -> _FramePairs:
        with self.reused.building(k):
            reach = self._model.rcut + self.reused.skin
            pairs = find_pairs(*_arrays(coord, box, self.reused.host_atype, k), reach)
        first = k * coord.shape[1]
        device = coord.device
        return _FramePairs(
            torch.from_numpy(pairs.real[pairs.i] + first).to(device),
            torch.from_numpy(pairs.real[pairs.j] + first).to(device),
            torch.from_numpy(pairs.shift.astype(np.float64).reshape(-1, 3)).to(device),
        )

    def _join(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        frames = [frame for frame in self._frames if frame is not None]
        lengths = torch.tensor([len(frame.i) for frame in frames], device=self._atype.device)
        number = torch.repeat_interleave(torch.arange(len(frames), device=lengths.device), lengths)
        i, j, shift = (
            torch.cat([getattr(frame, name) for frame in frames]) for name in ("i", "j", "shift")
        )
        return i, j, shift, number

    def _laid_out(
        self,
        coord: torch.Tensor,
        box: torch.Tensor | None,
        i: torch.Tensor,
        j: torch.Tensor,
        shift: torch.Tensor,
        square: torch.Tensor,
    ) -> Structures:
        """Sort pairs into rows of neighbours, nearest first in each group, as `data.neighbors.lists` does."""
        groups, nreal = len(self._limits), len(self._order)
        if self._model.by_type:  # of all types, the nearest stay first
            near = torch.argsort(square, stable=True)
            near = near[torch.argsort(self._row[i[near]], stable=True)]
            each = torch.bincount(self._row[i], minlength=nreal)
            place = (
                torch.arange(len(near), device=i.device)
                - (torch.cumsum(each, 0) - each)[self._row[i[near]]]
            )
            near = near[place < self._limits.sum()]
            i, j, shift, square = i[near], j[near], shift[near], square[near]
        group = self._atype.reshape(-1)[j] if self._model.by_type else torch.zeros_like(j)
        slot = self._row[i] * groups + group
        sort = torch.argsort(square, stable=True)
        sort = sort[torch.argsort(slot[sort], stable=True)]
        counts = torch.bincount(slot, minlength=nreal * groups)
        rank = (
            torch.arange(len(slot), device=slot.device)
            - (torch.cumsum(counts, 0) - counts)[slot[sort]]
        )
        kept = torch.minimum(counts.view(nreal, groups), self._limits)
        widths = kept.amax(0)
        offset = torch.cumsum(widths, 0) - widths
        take = rank < self._limits[group[sort]]
        sort, column = sort[take], (offset[group[sort]] + rank)[take]
        row = self._row[i[sort]]
        sections = tuple(widths.tolist())
        neighbor = torch.full((nreal, sum(sections)), -1, dtype=torch.int64, device=slot.device)
        neighbor[row, column] = j[sort]
        asked = self._model.neighbors.inner
        counted = np.zeros((len(asked), nreal), dtype=np.int64)
        for counts_of, (short, most) in zip(counted, asked, strict=True):
            near = torch.bincount(self._row[i[square < short**2]], minlength=nreal)
            counts_of[:] = near.clamp(max=min(most, int(self._limits[0]))).cpu().numpy()
        placed = None
        if box is not None:
            placed = torch.zeros((*neighbor.shape, 3), dtype=torch.int32, device=slot.device)
            placed[row, column] = shift[sort].to(torch.int32)
        return Structures(
            coord=coord,
            atype=self._atype,
            box=box,
            order=self._order,
            sorted_type=self._sorted_type,
            sorted_frame=self._order // coord.shape[1],
            neighbor=neighbor,
            shift=placed,
            sections=sections,
            type_counts=self._counts,
            filled=kept.T.cpu().numpy(),
            inner=counted,
        )


@dataclass(frozen=True)
class _FrameGhosts:
    """Real atoms and images of one structure; offsets [Å] from the atoms to their images."""

    owner: torch.Tensor
    offset: torch.Tensor
    neighbor: torch.Tensor
    nloc: int


@dataclass(frozen=True)
class Union:
    """Structures side by side as one system of a frozen file: all real atoms, then all images."""

    owner: torch.Tensor  # atom `frame · natoms + atom` of each `(nall,)`
    offset: torch.Tensor  # from the atom to its image `(nall, 3)` [Å]
    neighbor: torch.Tensor  # numbers in this system `(nloc, nnei)`, −1 in empty slots
    mapping: torch.Tensor  # real atom of each `(nall,)`
    frame: torch.Tensor  # structure of each `(nall,)`

    @property
    def nloc(self) -> int:
        """Number of real atoms."""
        return self.neighbor.shape[0]


class GhostLists:
    """Neighbour lists for frozen files, with the atoms of all structures side by side; arguments as in `PairLists`."""

    def __init__(self, rcut: float, atype: torch.Tensor, skin: float) -> None:
        self.reused = Reused(skin, atype)
        self._reach = rcut + skin
        self._natoms = atype.shape[1]
        self._frames: list[_FrameGhosts | None] = [None] * atype.shape[0]
        self._joined: Union | None = None

    def union(self, coord: torch.Tensor, box: torch.Tensor | None) -> Union:
        """Return the atoms and images at these positions; errors as in `PairLists.structures`."""
        stale = self.reused.stale(coord, box)
        for k in stale:
            self._frames[k] = self._found(coord, box, k)
        if stale or self._joined is None:
            self._joined = self._join()
        return self._joined

    def _found(self, coord: torch.Tensor, box: torch.Tensor | None, k: int) -> _FrameGhosts:
        points, cell, atype = _arrays(coord, box, self.reused.host_atype, k)
        with self.reused.building(k):
            ghosted = with_ghosts(points, cell, atype, self._reach)
        arrays = ghosted.owner, ghosted.coord - points[ghosted.owner], ghosted.neighbor
        owner, offset, neighbor = (torch.from_numpy(array).to(coord.device) for array in arrays)
        return _FrameGhosts(owner, offset, neighbor, len(ghosted.neighbor))

    def _join(self) -> Union:
        frames = [frame for frame in self._frames if frame is not None]
        nloc = sum(frame.nloc for frame in frames)
        width = max(frame.neighbor.shape[1] for frame in frames)
        local, image = 0, nloc
        owners, offsets, numbers, neighbors = [], [], [], []
        for k, frame in enumerate(frames):
            table, own = frame.neighbor, frame.nloc
            moved = torch.where(table < own, table + local, table - own + image)
            moved = torch.where(table < 0, -1, moved)
            neighbors.append(torch.nn.functional.pad(moved, (0, width - table.shape[1]), value=-1))
            owners.append(frame.owner + k * self._natoms)
            offsets.append(frame.offset)
            numbers.append(torch.full_like(frame.owner, k))
            local += own
            image += len(frame.owner) - own

        def together(parts: list[torch.Tensor]) -> torch.Tensor:
            split = [
                (part[: frame.nloc], part[frame.nloc :])
                for part, frame in zip(parts, frames, strict=True)
            ]
            return torch.cat([part for part, _ in split] + [part for _, part in split])

        owner = together(owners)
        place = torch.empty(len(frames) * self._natoms, dtype=torch.int64, device=owner.device)
        place[owner[:nloc]] = torch.arange(nloc, device=owner.device)
        return Union(
            owner, together(offsets), torch.cat(neighbors), place[owner], together(numbers)
        )
