"""Neighbour lists of many structures that the host builds and reuses.

Lists contain the pairs within the cut-off plus a skin. The list of a structure is rebuilt when one
of its atoms has moved by half the skin, or its cell has changed. `PairLists` serve models of
checkpoints, `GhostLists` frozen files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.errors import NeighborError, naming_frame
from deepmd_muon.data.neighbors.lists import find_pairs, group_limits
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


class _Pairs(NamedTuple):
    """Pairs of atoms, both ways; atoms are numbered through all structures."""

    i: Tensor  # (npairs,)
    j: Tensor  # (npairs,)
    shift: Tensor  # (npairs, 3): cell translations of j

    def take(self, rows: Tensor) -> _Pairs:
        """Return the pairs of some rows."""
        return _Pairs(self.i[rows], self.j[rows], self.shift[rows])


class _HostLists:
    """The pairs of all structures within the cut-off and a skin.

    Parameters
    ----------
    rcut
        Cut-off [Å].
    atype
        Types `(nframes, natoms)` on the device, −1 for padding.
    skin
        Added to the cut-off of the stored pairs [Å].
    """

    def __init__(self, rcut: float, atype: Tensor, skin: float) -> None:
        self.reused = Reused(skin, atype)
        self._reach = rcut + skin
        self._atype = atype
        self._frames: list[_Pairs | None] = [None] * atype.shape[0]
        self._joined: tuple[_Pairs, Tensor] | None = None

    def _find(self, coord: Tensor, box: Tensor | None) -> tuple[_Pairs, Tensor]:
        """Return the pairs and the structure of each; the same tuple until a list is built.

        Raises
        ------
        NeighborError
            When neighbours cannot be found; `frame` is the number of the structure.
        """
        stale = self.reused.stale(coord, box)
        for k in stale:
            self._frames[k] = self._search(coord, box, k)
        if stale or self._joined is None:
            frames = [frame for frame in self._frames if frame is not None]
            pairs = _Pairs(*map(torch.cat, zip(*frames, strict=True)))
            self._joined = (pairs, pairs.i // self._atype.shape[1])
        return self._joined

    def _search(self, coord: Tensor, box: Tensor | None, k: int) -> _Pairs:
        """Find the pairs of one structure."""
        cell = None if box is None else box[k].cpu().numpy()
        if cell is not None and not cell.any():
            cell = None
        atype = self.reused.host_atype[k]
        with self.reused.building(k):
            pairs = find_pairs(coord[k].detach().cpu().numpy(), cell, atype, self._reach)
        first_atom = k * coord.shape[1]
        shift = pairs.shift.astype(np.float64).reshape(-1, 3)
        return _Pairs(
            i=torch.from_numpy(pairs.real[pairs.i] + first_atom).to(coord.device),
            j=torch.from_numpy(pairs.real[pairs.j] + first_atom).to(coord.device),
            shift=torch.from_numpy(shift).to(coord.device),
        )


# ----- models of checkpoints ---------------------------------------------------------------------


class PairLists(_HostLists):
    """Neighbour lists for models of checkpoints, as `Structures`.

    At every call they equal the lists of `data.build_neighbors`: pairs beyond the cut-off are
    omitted, and of more than `sel` neighbours only the nearest remain.

    Parameters
    ----------
    model
        The model.
    atype, skin
        As for `_HostLists`.
    """

    def __init__(self, model: EnergyModel, atype: Tensor, skin: float) -> None:
        super().__init__(model.rcut, atype, skin)
        self._model = model
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
        """Return the batch at these positions; errors as in `_find`."""
        pairs, frame = self._find(coord, box)
        flat = coord.reshape(-1, 3)
        edge = flat[pairs.j] - flat[pairs.i]
        if box is not None:
            edge = edge + (pairs.shift[:, None, :] @ box[frame])[:, 0]
        square = edge.square().sum(-1)
        near = torch.nonzero(square < self._model.rcut**2).flatten()
        return self._sort_into_rows(coord, box, pairs.take(near), square[near])

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


class GhostLists(_HostLists):
    """Neighbour lists for frozen files, which evaluate all structures as one system."""

    def __init__(self, rcut: float, atype: Tensor, skin: float) -> None:
        super().__init__(rcut, atype, skin)
        types = atype.reshape(-1)
        self._atoms = torch.nonzero(types >= 0).flatten()  # real atoms
        # The number of each atom among the real ones; rows of padding are never read.
        self._number = torch.empty_like(types)
        self._number[self._atoms] = torch.arange(len(self._atoms), device=types.device)
        self._united: tuple[_Pairs, Union] | None = None

    def union(self, coord: Tensor, box: Tensor | None) -> Union:
        """Return the atoms and images at these positions; errors as in `_find`."""
        pairs, frame = self._find(coord, box)
        if self._united is None or self._united[0] is not pairs:
            self._united = (pairs, self._unite(pairs, frame, box))
        return self._united[1]

    def _unite(self, pairs: _Pairs, frame: Tensor, box: Tensor | None) -> Union:
        """Give each image of an atom that is some atom's neighbour a number of its own."""
        nloc = len(self._atoms)
        natoms = self._atype.shape[1]
        neighbor = self._number[pairs.j]
        owner = self._atoms
        offset = pairs.shift.new_zeros(nloc, 3)
        beyond = torch.nonzero(pairs.shift.any(1)).flatten()  # pairs with an image
        if box is not None and len(beyond):
            key = frame[beyond]
            for axis in range(3):  # images are numbered by structure, translation and atom
                values, code = torch.unique(pairs.shift[beyond, axis], return_inverse=True)
                key = key * len(values) + code
            key = key * natoms + pairs.j[beyond] % natoms
            keys, image = torch.unique(key, return_inverse=True)
            neighbor[beyond] = nloc + image
            some_pair = torch.empty_like(keys)  # with each image
            some_pair[image] = beyond
            owner = torch.cat([owner, pairs.j[some_pair]])
            translation = pairs.shift[some_pair, None] @ box[frame[some_pair]]
            offset = torch.cat([offset, translation[:, 0]])
        row = self._number[pairs.i]
        order = torch.argsort(row, stable=True)
        row = row[order]
        column = _rank_in_group(row, nloc)
        width = int(column.max()) + 1 if len(column) else 0
        table = torch.full((nloc, width), -1, dtype=torch.int64, device=row.device)
        table[row, column] = neighbor[order]
        return Union(
            owner=owner,
            offset=offset,
            neighbor=table,
            mapping=self._number[owner],
            frame=owner // natoms,
        )
