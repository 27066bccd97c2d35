"""Neighbour lists of many structures that the host builds and reuses.

Lists contain the pairs within the cut-off plus a skin. The list of a structure is rebuilt when one
of its atoms has moved by half the skin, or its cell has changed. `PairLists` serve models of
checkpoints, `GhostLists` frozen files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.errors import NeighborError, naming_frame
from deepmd_muon.data.neighbors.lists import find_pairs, group_limits, with_ghosts
from deepmd_muon.model import EnergyModel, Structures


class Reused:
    """Decides when lists must be rebuilt."""

    def __init__(self, skin: float, atype: Tensor) -> None:
        self.skin = skin
        self.atype = atype
        self.host_atype = atype.cpu().numpy()
        self.built = 0  # number of lists of single structures built so far
        self._coord: Tensor | None = None  # positions for which the lists were built
        self._box: Tensor | None = None

    def stale(self, coord: Tensor, box: Tensor | None) -> list[int]:
        """Return the structures whose lists must be built.

        Store the positions for which they are built.
        """
        if self._coord is None:
            stale = list(range(coord.shape[0]))
            self._coord = coord.clone()
            self._box = None if box is None else box.clone()
        else:
            square = (coord - self._coord).square().sum(-1).amax(1)
            # Not "square > …": NaN must reach the search for neighbours, whose error names the
            # atom.
            outdated = ~(square <= (0.5 * self.skin) ** 2)
            if box is not None and self._box is not None:
                outdated = outdated | (box != self._box).flatten(1).any(1)
            stale = torch.nonzero(outdated).flatten().tolist()
            if stale:
                self._coord[stale] = coord[stale]
                if box is not None and self._box is not None:
                    self._box[stale] = box[stale]
        self.built += len(stale)
        return stale

    @contextmanager
    def building(self, k: int) -> Iterator[None]:
        """Add the structure's number to an error; the next call then rebuilds all lists."""
        try:
            with naming_frame(k):
                yield
        except NeighborError:
            self._coord = None
            raise


class _HostFrame(NamedTuple):
    """One structure as arrays."""

    coord: np.ndarray
    box: np.ndarray | None
    atype: np.ndarray


def _host_frame(reused: Reused, coord: Tensor, box: Tensor | None, k: int) -> _HostFrame:
    cell = None if box is None else box[k].cpu().numpy()
    if cell is not None and not cell.any():
        cell = None
    return _HostFrame(coord[k].detach().cpu().numpy(), cell, reused.host_atype[k])


# ----- models of checkpoints ---------------------------------------------------------------------


class _Pairs(NamedTuple):
    """Pairs of atoms; atoms are numbered through all structures."""

    i: Tensor  # (npairs,)
    j: Tensor  # (npairs,)
    shift: Tensor  # (npairs, 3): cell translations of j

    def take(self, rows: Tensor) -> _Pairs:
        """Return the pairs of some rows."""
        return _Pairs(self.i[rows], self.j[rows], self.shift[rows])


class PairLists:
    """Neighbour lists for models of checkpoints, as `Structures`.

    At every call they equal the lists of `data.build_neighbors`: pairs beyond the cut-off are
    omitted, and of more than `sel` neighbours only the nearest remain.

    Parameters
    ----------
    model
        The model.
    atype
        Types `(nframes, natoms)` on the device, −1 for padding.
    skin
        Added to the cut-off of the stored pairs [Å].
    """

    def __init__(self, model: EnergyModel, atype: Tensor, skin: float) -> None:
        self.reused = Reused(skin, atype)
        self._model = model
        self._atype = atype
        self._frames: list[_Pairs | None] = [None] * atype.shape[0]
        self._joined: tuple[_Pairs, Tensor] | None = None  # pairs of all structures; their frames
        types = atype.reshape(-1)
        order = torch.argsort(types, stable=True)
        self._order = order[int((types < 0).sum()) :]  # real atoms, sorted by type
        self._sorted_type = types[self._order]
        self._row = torch.empty_like(types)  # row of each atom in the sorted lists
        self._row[self._order] = torch.arange(len(self._order), device=types.device)
        self._type_counts = tuple(
            torch.bincount(self._sorted_type, minlength=model.ntypes).tolist()
        )
        limits = group_limits(model.sel, model.by_type, model.ntypes)
        self._limits = torch.from_numpy(limits).to(types.device)  # (ngroups,)

    def structures(self, coord: Tensor, box: Tensor | None) -> Structures:
        """Return the batch at these positions.

        Raises
        ------
        NeighborError
            When neighbours cannot be found; `frame` is the number of the structure.
        """
        stale = self.reused.stale(coord, box)
        for k in stale:
            self._frames[k] = self._search(coord, box, k)
        if stale or self._joined is None:
            self._joined = self._join()
        pairs, frame = self._joined
        flat = coord.reshape(-1, 3)
        edge = flat[pairs.j] - flat[pairs.i]
        if box is not None:
            edge = edge + (pairs.shift[:, None, :] @ box[frame])[:, 0]
        square = edge.square().sum(-1)
        near = torch.nonzero(square < self._model.rcut**2).flatten()
        return self._sort_into_rows(coord, box, pairs.take(near), square[near])

    def _search(self, coord: Tensor, box: Tensor | None, k: int) -> _Pairs:
        frame = _host_frame(self.reused, coord, box, k)
        with self.reused.building(k):
            pairs = find_pairs(*frame, self._model.rcut + self.reused.skin)
        first_atom = k * coord.shape[1]
        shift = pairs.shift.astype(np.float64).reshape(-1, 3)
        return _Pairs(
            i=torch.from_numpy(pairs.real[pairs.i] + first_atom).to(coord.device),
            j=torch.from_numpy(pairs.real[pairs.j] + first_atom).to(coord.device),
            shift=torch.from_numpy(shift).to(coord.device),
        )

    def _join(self) -> tuple[_Pairs, Tensor]:
        frames = [frame for frame in self._frames if frame is not None]
        device = self._atype.device
        lengths = torch.tensor([len(frame.i) for frame in frames], device=device)
        number = torch.repeat_interleave(torch.arange(len(frames), device=device), lengths)
        return _Pairs(*map(torch.cat, zip(*frames, strict=True))), number

    def _sort_into_rows(
        self, coord: Tensor, box: Tensor | None, pairs: _Pairs, square: Tensor
    ) -> Structures:
        """Sort pairs into rows of neighbours, nearest first in each group.

        The result is that of `data.neighbors.lists`. `square` are squared distances `(npairs,)`
        [Å²].
        """
        n_groups = len(self._limits)
        n_real = len(self._order)
        if self._model.by_type:  # of all types, the nearest stay first
            nearest = _by_distance(self._row[pairs.i], square)
            rank = _rank_in_group(self._row[pairs.i[nearest]], n_real)
            nearest = nearest[rank < self._limits.sum()]
            pairs = pairs.take(nearest)
            square = square[nearest]
            group = self._atype.reshape(-1)[pairs.j]
        else:
            group = torch.zeros_like(pairs.j)

        # Each atom has a section of its row for each group of types; one section is one slot.
        slot = self._row[pairs.i] * n_groups + group
        order = _by_distance(slot, square)
        rank = _rank_in_group(slot[order], n_real * n_groups)
        counts = torch.bincount(slot, minlength=n_real * n_groups)
        filled = torch.minimum(counts.view(n_real, n_groups), self._limits)
        widths = filled.amax(0)
        offset = torch.cumsum(widths, 0) - widths
        within_limit = rank < self._limits[group[order]]
        column = (offset[group[order]] + rank)[within_limit]
        order = order[within_limit]
        row = self._row[pairs.i[order]]
        sections = tuple(widths.tolist())
        neighbor = torch.full((n_real, sum(sections)), -1, dtype=torch.int64, device=slot.device)
        neighbor[row, column] = pairs.j[order]
        shift = None
        if box is not None:
            shift = torch.zeros((*neighbor.shape, 3), dtype=torch.int32, device=slot.device)
            shift[row, column] = pairs.shift[order].to(torch.int32)
        return Structures(
            coord=coord,
            atype=self._atype,
            box=box,
            order=self._order,
            sorted_type=self._sorted_type,
            sorted_frame=self._order // coord.shape[1],
            neighbor=neighbor,
            shift=shift,
            sections=sections,
            type_counts=self._type_counts,
            filled=filled.T.cpu().numpy(),
            inner=self._count_inner(pairs.i, square),
        )

    def _count_inner(self, i: Tensor, square: Tensor) -> np.ndarray:
        """Count the neighbours within each inner cut-off of the model `(ncutoffs, n_real)`."""
        inner = self._model.neighbors.inner
        counted = np.zeros((len(inner), len(self._order)), dtype=np.int64)
        for k, (rcut, limit) in enumerate(inner):
            rows = self._row[i[square < rcut**2]]
            counts = torch.bincount(rows, minlength=len(self._order))
            counted[k] = counts.clamp(max=min(limit, int(self._limits[0]))).cpu().numpy()
        return counted


def _by_distance(group: Tensor, square: Tensor) -> Tensor:
    """Return the order of pairs by group, and by distance in each group."""
    order = torch.argsort(square, stable=True)
    return order[torch.argsort(group[order], stable=True)]


def _rank_in_group(group: Tensor, n_groups: int) -> Tensor:
    """Return the number of each pair in its group; `group` is sorted."""
    counts = torch.bincount(group, minlength=n_groups)
    start = torch.cumsum(counts, 0) - counts
    return torch.arange(len(group), device=group.device) - start[group]


# ----- frozen files ------------------------------------------------------------------------------


class _FrameGhosts(NamedTuple):
    """Real atoms of one structure, then their images."""

    owner: Tensor  # (nall,): atom of each
    offset: Tensor  # (nall, 3): from the atom to its image [Å]
    neighbor: Tensor  # (nloc, nnei): numbers among these atoms and images, −1 in empty slots

    @property
    def nloc(self) -> int:
        """Number of real atoms."""
        return self.neighbor.shape[0]


class Union(NamedTuple):
    """All structures as one system of a frozen file: all real atoms, then all images."""

    owner: Tensor  # (nall,): atom `frame · natoms + atom` of each
    offset: Tensor  # (nall, 3): from the atom to its image [Å]
    neighbor: Tensor  # (nloc, nnei): numbers in this system, −1 in empty slots
    mapping: Tensor  # (nall,): real atom of each
    frame: Tensor  # (nall,): structure of each

    @property
    def nloc(self) -> int:
        """Number of real atoms."""
        return self.neighbor.shape[0]


class GhostLists:
    """Neighbour lists for frozen files, which evaluate all structures as one system.

    Parameters
    ----------
    rcut
        Cut-off [Å].
    atype, skin
        As for `PairLists`.
    """

    def __init__(self, rcut: float, atype: Tensor, skin: float) -> None:
        self.reused = Reused(skin, atype)
        self._reach = rcut + skin
        self._natoms = atype.shape[1]
        self._frames: list[_FrameGhosts | None] = [None] * atype.shape[0]
        self._joined: Union | None = None

    def union(self, coord: Tensor, box: Tensor | None) -> Union:
        """Return the atoms and images at these positions; errors as in `PairLists.structures`."""
        stale = self.reused.stale(coord, box)
        for k in stale:
            self._frames[k] = self._search(coord, box, k)
        if stale or self._joined is None:
            self._joined = self._join()
        return self._joined

    def _search(self, coord: Tensor, box: Tensor | None, k: int) -> _FrameGhosts:
        frame = _host_frame(self.reused, coord, box, k)
        with self.reused.building(k):
            ghosted = with_ghosts(*frame, self._reach)
        offset = ghosted.coord - frame.coord[ghosted.owner]
        return _FrameGhosts(
            owner=torch.from_numpy(ghosted.owner).to(coord.device),
            offset=torch.from_numpy(offset).to(coord.device),
            neighbor=torch.from_numpy(ghosted.neighbor).to(coord.device),
        )

    def _join(self) -> Union:
        frames = [frame for frame in self._frames if frame is not None]
        nloc = sum(frame.nloc for frame in frames)
        max_neighbors = max(frame.neighbor.shape[1] for frame in frames)
        owners = []
        numbers = []
        neighbors = []
        first_atom = 0
        first_image = nloc
        for k, frame in enumerate(frames):
            # Number atoms and images of the structure as those of the union.
            table = frame.neighbor
            is_atom = table < frame.nloc
            renumbered = torch.where(is_atom, table + first_atom, table - frame.nloc + first_image)
            renumbered = torch.where(table < 0, -1, renumbered)
            padding = (0, max_neighbors - table.shape[1])
            neighbors.append(torch.nn.functional.pad(renumbered, padding, value=-1))
            owners.append(frame.owner + k * self._natoms)
            numbers.append(torch.full_like(frame.owner, k))
            first_atom += frame.nloc
            first_image += len(frame.owner) - frame.nloc
        nlocs = [frame.nloc for frame in frames]
        owner = _atoms_before_images(owners, nlocs)
        # The real atom of each `frame · natoms + atom`; rows of padding are never read.
        real = torch.empty(len(frames) * self._natoms, dtype=torch.int64, device=owner.device)
        real[owner[:nloc]] = torch.arange(nloc, device=owner.device)
        return Union(
            owner=owner,
            offset=_atoms_before_images([frame.offset for frame in frames], nlocs),
            neighbor=torch.cat(neighbors),
            mapping=real[owner],
            frame=_atoms_before_images(numbers, nlocs),
        )


def _atoms_before_images(rows: Sequence[Tensor], nlocs: Sequence[int]) -> Tensor:
    """Join rows of all structures: real atoms of all of them, then images."""
    atoms = [x[:nloc] for x, nloc in zip(rows, nlocs, strict=True)]
    images = [x[nloc:] for x, nloc in zip(rows, nlocs, strict=True)]
    return torch.cat([*atoms, *images])
