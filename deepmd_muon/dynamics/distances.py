"""Vectors between near atoms of all structures of a run, found on its device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.lists import find_pairs
from deepmd_muon.dynamics.systems import Systems
from deepmd_muon.infer.device_call import fits
from deepmd_muon.model.descriptor.settings import NeighborRequest
from deepmd_muon.model.neighbors.skin_lists import SkinLists
from deepmd_muon.model.nn import triton_support

# Width of the shell whose pairs are kept, so that few snapshots need a new search [Å].
_SKIN = 1.0


def may_search(device: torch.device) -> bool:
    """Return whether a device searches for pairs: without kernels it would hold all pairs of atoms at once."""
    return triton_support.usable(device)


class Distances:
    """Finds pairs of near atoms; reuses its lists while atoms move little.

    Parameters
    ----------
    rcut
        Largest distance [Å].
    ntypes
        Number of types.
    on_device
        Whether the device of the structures searches; else the host does.
    """

    def __init__(self, rcut: float, ntypes: int, *, on_device: bool) -> None:
        self._rcut, self._ntypes, self._on_device = rcut, ntypes, on_device
        self._lists: SkinLists | None = None
        self._atype: Tensor | None = None  # of the lists

    def of(self, systems: Systems, chosen: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs of at least the structures that a mask `(nsystems,)` chooses.

        Returns
        -------
        tuple
            Atoms i and j `(npairs,)`, numbered through all structures, both ways; vectors from i to j `(npairs, 3)`
            [Å], which may be longer than the cut-off. Atoms at the same place have a vector of length 0 or nearly so.
        """
        found = self._searched(systems) if self._on_device else None
        i, j, shift = found or self._of_host(systems, chosen)
        flat = systems.coord.reshape(-1, 3)
        vector = flat[j] - flat[i]
        if shift is not None and systems.box is not None:
            cell = systems.box[i // systems.atype.shape[1]]
            vector = vector + (shift.double()[:, None] @ cell)[:, 0]
        return i, j, vector

    def _searched(self, systems: Systems) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Search on the device; None where it cannot."""
        if self._atype is None or not torch.equal(self._atype, systems.atype):
            self._atype, self._lists = systems.atype, None
            if fits(systems.atype.cpu().numpy()):
                # The pairs are those before they are sorted into sections.
                wanted = NeighborRequest(self._rcut, (1,), by_type=False)
                self._lists = SkinLists(
                    wanted, self._ntypes, systems.atype, systems.box is not None, _SKIN
                )
        lists = self._lists
        if lists is None:
            return None
        lists.coord.copy_(systems.coord)
        if systems.box is not None:
            lists.set_cells(systems.box)
        return lists.pairs() if lists.prepare() else None

    def _of_host(self, systems: Systems, chosen: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        frames, natoms = systems.frames(), systems.atype.shape[1]
        nothing = np.zeros(0, dtype=np.int64)
        parts = [(nothing, nothing, np.zeros((0, 3), dtype=np.int32))]
        for k in np.flatnonzero(chosen).tolist():
            first = k * natoms
            try:
                pairs = find_pairs(frames.coord[k], frames.cell(k), frames.atype[k], self._rcut)
            except NeighborError:  # an atom and itself stand for it
                itself = np.array([first])
                parts.append((itself, itself, np.zeros((1, 3), dtype=np.int32)))
                continue
            parts.append(
                (
                    pairs.real[pairs.i] + first,
                    pairs.real[pairs.j] + first,
                    pairs.shift.reshape(-1, 3),
                )
            )
        i, j, shift = (
            torch.from_numpy(np.concatenate(column)).to(systems.coord.device)
            for column in zip(*parts, strict=True)
        )
        return i, j, shift
