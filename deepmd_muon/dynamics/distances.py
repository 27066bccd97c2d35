"""Vectors between near atoms of all structures of a run, found on its device."""

from __future__ import annotations

from typing import NamedTuple

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

# Width of the shell whose pairs are stored, so that few snapshots need a new search [Å].
_SKIN = 1.0


def may_search(device: torch.device) -> bool:
    """Return whether a device searches for pairs.

    Without kernels, it would hold all pairs of atoms at once.
    """
    return triton_support.usable(device)


class NearPairs(NamedTuple):
    """Pairs of atoms, both ways; atoms are numbered through all structures."""

    i: Tensor  # (npairs,)
    j: Tensor  # (npairs,)
    vector: Tensor  # (npairs, 3): from i to j [Å]


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
        self._rcut = rcut
        self._ntypes = ntypes
        self._on_device = on_device
        self._lists: SkinLists | None = None
        self._atype: Tensor | None = None  # types of `_lists`

    def of(self, systems: Systems, mask: np.ndarray) -> NearPairs:
        """Return the pairs of at least the structures of a mask `(nsystems,)`.

        Vectors may be longer than the cut-off. Atoms at the same place have a vector of length 0 or
        nearly so.
        """
        pairs = self._search(systems) if self._on_device else None
        if pairs is None:
            pairs = self._search_on_host(systems, mask)
        i, j, shift = pairs
        flat = systems.coord.reshape(-1, 3)
        vector = flat[j] - flat[i]
        if shift is not None and systems.box is not None:
            cell = systems.box[i // systems.atype.shape[1]]
            vector = vector + (shift.double()[:, None] @ cell)[:, 0]
        return NearPairs(i, j, vector)

    def _search(self, systems: Systems) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return atoms and cell translations of pairs; None if the device cannot search."""
        if self._atype is None or not torch.equal(self._atype, systems.atype):
            self._atype = systems.atype
            self._lists = None
            if fits(systems.atype.cpu().numpy()):
                self._lists = SkinLists(
                    # `pairs` are read before they are sorted into sections, so `sel` does not
                    # matter.
                    NeighborRequest(self._rcut, (1,), by_type=False),
                    self._ntypes,
                    systems.atype,
                    systems.box is not None,
                    _SKIN,
                )
        lists = self._lists
        if lists is None:
            return None
        lists.coord.copy_(systems.coord)
        if systems.box is not None:
            lists.set_cells(systems.box)
        return lists.pairs() if lists.prepare() else None

    def _search_on_host(self, systems: Systems, mask: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        frames = systems.frames()
        natoms = systems.atype.shape[1]
        # One empty array each, so that there is something to concatenate.
        i = [np.zeros(0, dtype=np.int64)]
        j = [np.zeros(0, dtype=np.int64)]
        shift = [np.zeros((0, 3), dtype=np.int32)]
        for k in np.flatnonzero(mask).tolist():
            first_atom = k * natoms
            try:
                pairs = find_pairs(frames.coord[k], frames.cell(k), frames.atype[k], self._rcut)
            except NeighborError:
                # A pair of an atom with itself: a distance of 0 marks the structure.
                i.append(np.array([first_atom]))
                j.append(np.array([first_atom]))
                shift.append(np.zeros((1, 3), dtype=np.int32))
                continue
            i.append(pairs.real[pairs.i] + first_atom)
            j.append(pairs.real[pairs.j] + first_atom)
            shift.append(pairs.shift.reshape(-1, 3))
        device = systems.coord.device
        return (
            torch.from_numpy(np.concatenate(i)).to(device),
            torch.from_numpy(np.concatenate(j)).to(device),
            torch.from_numpy(np.concatenate(shift)).to(device),
        )
