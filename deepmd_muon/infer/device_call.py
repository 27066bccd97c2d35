"""Energy, forces and virial of moving structures, computed on the device alone.

A `DeviceCall` evaluates structures of fixed types, one CUDA graph a call. `DeviceCalls` stores the
calls of the types that were evaluated last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.errors import NeighborError, naming_frame
from deepmd_muon.data.neighbors.far_atoms import check_geometry
from deepmd_muon.data.neighbors.lists import find_pairs
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.descriptor.interface import Table
from deepmd_muon.model.neighbors.atoms import (
    AT_SAME_PLACE,
    MOST_NEIGHBORS,
    NEARNESS,
    NOT_FINITE,
    TOO_NEAR,
)
from deepmd_muon.model.neighbors.skin_lists import SkinLists
from deepmd_muon.model.nn.graphs import GraphMemory, Replayed

#: Largest number of atoms of a structure for which the device compares all pairs. Once in many
#: steps, this costs less than the host's lists.
MOST_ATOMS = 100_000
# Largest number of compositions with stored graphs.
_MAX_CALLS = 8
# Largest number of launches of one call. Each has more room than the one before.
_MAX_LAUNCHES = 8


class DenseError(NeighborError):
    """An atom has more neighbours than the device sorts: the host has to find them."""


class _Results(NamedTuple):
    """Views of one row of numbers, in their order."""

    energy: Tensor  # (nframes,) [eV]
    virial: Tensor  # (nframes, 9) [eV]
    force: Tensor  # (nframes, natoms, 3) [eV/Å]
    atom_energy: Tensor  # (nframes, natoms) [eV]

    @classmethod
    def of(cls, row: Tensor, nframes: int, natoms: int) -> _Results:
        """Divide a row of `_Results.size` numbers."""
        shapes = ((nframes,), (nframes, 9), (nframes, natoms, 3), (nframes, natoms))
        sizes = [math.prod(shape) for shape in shapes]
        views = zip(row.split(sizes), shapes, strict=True)
        return cls(*(numbers.view(shape) for numbers, shape in views))

    @staticmethod
    def size(nframes: int, natoms: int) -> int:
        """Return the length of the row."""
        return nframes * (1 + 9 + 3 * natoms + natoms)


class DeviceCall:
    """The force call of structures of fixed types.

    `launch` does all work on the device. A kernel rebuilds the lists of a structure if an atom has
    crossed half the skin, and otherwise returns at once. The neighbours within the cut-off are then
    sorted from the lists, and the model is evaluated.

    The lists have room for the neighbours of earlier positions and a margin. So do the tables in
    place of embedding nets for their distances. Kernels note what does not fit. `settled` reads
    these notes and makes room, and the caller launches again.

    Parameters
    ----------
    model
        The model, on its device.
    atype
        Types `(nframes, natoms)`, int64, on the device; −1 for padding, which comes last.
    periodic
        Whether a structure has a cell.
    skin
        Width of the shell beyond the cut-off that lists include [Å].
    memory
        Memory of captured graphs; None launches kernels one by one.

    Attributes
    ----------
    lists
        Neighbour lists, with the positions.
    energy, virial, force, atom_energy
        Results `(nframes,)`, `(nframes, 9)` [eV], `(nframes, natoms, 3)` [eV/Å], `(nframes,
        natoms)` [eV], float64; the next launch overwrites them.
    version
        Number of changes of sizes. After each, a graph that contains `launch` has to be recorded
        again.
    """

    def __init__(
        self,
        model: EnergyModel,
        atype: Tensor,
        periodic: bool,
        skin: float,
        memory: GraphMemory | None = None,
    ) -> None:
        nframes, natoms = atype.shape
        self._model = model
        self._atype = atype
        self._memory = None if model.why_not_captured else memory
        self.lists = SkinLists(model.neighbors, model.ntypes, atype, periodic, skin)
        # Results are one row of numbers, so that one copy brings all of them to the host.
        size = _Results.size(nframes, natoms)
        pinned = atype.is_cuda
        self._results = torch.zeros(size, dtype=torch.float64, device=atype.device)
        self._host_results = torch.zeros(size, dtype=torch.float64, pin_memory=pinned)
        results = _Results.of(self._results, nframes, natoms)
        self.energy = results.energy
        self.virial = results.virial
        self.force = results.force
        self.atom_energy = results.atom_energy
        self._host_coord = torch.zeros(nframes, natoms, 3, dtype=torch.float64, pin_memory=pinned)
        self._parameters: dict[str, Tensor | None] = {"fparam": None, "aparam": None}
        # Cells of the last call, which are not checked again: of `predict`, and of `place` with the
        # tensor's version counter.
        self._host_box: np.ndarray | None = None
        self._device_box: tuple[Tensor, int] | None = None
        self._table: Table | None = None
        self._nearest = math.inf  # least distance of atoms that a table was too short for [Å]
        # Inference tensors have no version counter.
        self._weights = [weight for weight in model.parameters() if not weight.is_inference()]
        self._table_version = 0  # of the weights in `_table`
        self._ready = False  # whether lists and table have sizes
        self._replayed = Replayed(self.launch, self._memory)
        self.version = 0

    def launch(self) -> None:
        """Evaluate the present positions; all work is on the device."""
        structures = replace(
            self.lists.find(),
            fparam=self._parameters["fparam"],
            aparam=self._parameters["aparam"],
        )
        with torch.no_grad(), self._model.using(self._table):
            output = self._model(structures, force=True, virial=True)
        torch.cat([output[name].flatten() for name in _Results._fields], out=self._results)

    def place(self, coord: Tensor, box: Tensor | None) -> None:
        """Write positions and cells, tensors on the device.

        Shapes are `(nframes, natoms, 3)` and `(nframes, 3, 3)` [Å].
        Cells are checked only if `box` is another tensor than before, or was changed in place.

        Raises
        ------
        NeighborError
            When a new cell has no volume; a `DenseError` if the host has to find the neighbours.
        """
        self.lists.coord.copy_(coord)
        if box is not None:
            checked = self._device_box
            if checked is None or checked[0] is not box or checked[1] != box._version:
                self._check_cells(coord.cpu().numpy(), box.cpu().numpy())
                self.lists.set_cells(box)
                self._device_box = (box, box._version)
        self.prepare()

    def predict(
        self,
        coord: np.ndarray,
        box: np.ndarray | None,
        fparam: np.ndarray | None,
        aparam: np.ndarray | None,
    ) -> Prediction:
        """Predict positions and cells on the host.

        Shapes as in `place`, parameters as in `Structures`.

        Raises
        ------
        NeighborError
            As `find_pairs`, with the number of the frame; a `DenseError` if the host has to find
            the neighbours.
        """
        self._host_coord.numpy()[...] = coord
        self.lists.coord.copy_(self._host_coord, non_blocking=True)
        if box is not None and (self._host_box is None or not np.array_equal(box, self._host_box)):
            self._check_cells(coord, box)
            self.lists.set_cells(self._on_device(box))
            self._host_box = box.copy()
        self._set_parameter("fparam", fparam)
        self._set_parameter("aparam", aparam)
        self._launch_until_settled(self._read)
        nframes, natoms = self._atype.shape
        results = _Results.of(self._host_results.clone(), nframes, natoms)
        return Prediction(
            energy=results.energy.numpy(),
            virial=results.virial.numpy(),
            force=results.force.numpy(),
            atom_energy=results.atom_energy.numpy(),
        )

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._atype.device)

    def _set_parameter(self, name: str, values: np.ndarray | None) -> None:
        old = self._parameters[name]
        if values is None and old is None:
            return
        if values is not None and old is not None:
            old.copy_(self._on_device(values))  # a graph contains its address
            return
        self._parameters[name] = None if values is None else self._on_device(values)
        self._change_sizes()

    def evaluate(self, coord: Tensor, box: Tensor | None) -> None:
        """Write the results of positions and cells on the device; see `place` and `predict`."""
        self.place(coord, box)
        self._launch_until_settled(self.needed)

    def _read(self) -> list[int]:
        """Copy all results to the host; wait for the notes and return them."""
        self._host_results.copy_(self._results, non_blocking=True)
        return self.needed()

    def _launch_until_settled(self, read: Callable[[], list[int]]) -> None:
        for _ in range(_MAX_LAUNCHES):
            self.prepare()
            self._replayed()
            if self.settled(read()):
                return
        raise NeighborError(
            f"the neighbour lists did not fit after {_MAX_LAUNCHES} launches with growing sizes"
        )

    def needed(self) -> list[int]:
        """Wait for the device.

        Return its notes on all launches since sizes last changed, for `settled`.
        """
        notes: list[int] = self.lists.needed.tolist()
        return notes

    def settled(self, needed: list[int]) -> bool:
        """Return whether the last results are right.

        Else make room, for the caller to launch again.

        Raises
        ------
        NeighborError
            When positions of a structure are not finite or two atoms are at the same place; `frame`
            is its number.
        """
        if needed[NOT_FINITE] or needed[AT_SAME_PLACE]:
            # The atoms may have moved apart since, or the caller went back to earlier positions.
            # Then the search below finds no fault.
            for note in (NOT_FINITE, AT_SAME_PLACE):
                self.lists.needed[note] = 0
            self._find_fault(everywhere=bool(needed[AT_SAME_PLACE]))
        too_near = needed[TOO_NEAR]
        grown = self.lists.grow(needed)
        if too_near:
            # The least distance of all launches: at the present positions atoms may be farther
            # apart.
            self._nearest = min(self._nearest, NEARNESS / too_near)
            self.lists.needed[TOO_NEAR] = 0
        if too_near or grown:
            self._change_sizes()
            return False
        return True

    def discard(self) -> None:
        """Discard the last launches, with the lists that they made."""
        self.lists.forget()

    def prepare(self) -> None:
        """Choose sizes and tables for the present positions and weights; launches need them.

        They are chosen if missing or outdated. torch's version counters reveal changes of weights,
        but not those by a replayed graph.

        Raises
        ------
        NeighborError
            As `predict`.
        """
        if self._ready:
            if self._table is None or self._weights_version() == self._table_version:
                return
            self._change_sizes()
        if not self.lists.prepare():
            self._find_fault()
            raise DenseError(
                f"an atom has more than {MOST_NEIGHBORS} neighbours within the cut-off and the skin"
            )
        self.lists.nearest.zero_()  # no distance is too near while the table is made
        self._table = self._model.tabulate(self.lists.find(), self._nearest)
        if self._table is None:
            self._nearest = math.inf  # the next table need not reach as far
            self.lists.nearest.fill_(0.0)
        else:
            self._table_version = self._weights_version()
            self.lists.nearest.fill_(self._table.nearest**2)
        self._ready = True

    def _weights_version(self) -> int:
        return sum(weight._version for weight in self._weights)

    def _change_sizes(self) -> None:
        self.version += 1
        self._ready = False
        self._replayed = Replayed(self.launch, self._memory)

    def _check_cells(self, coord: np.ndarray, box: np.ndarray) -> None:
        for k, (points, cell) in enumerate(zip(coord, box, strict=True)):
            if cell.any():
                with naming_frame(k):
                    check_geometry(points, cell, self._model.rcut, np.arange(len(points)))

    def _find_fault(self, *, everywhere: bool = True) -> None:
        """Raise a NeighborError for the first structure at fault, which the host searches.

        Unless `everywhere`, only structures with positions that are not finite are searched.
        """
        coord = self.lists.coord.cpu().numpy()
        atype = self._atype.cpu().numpy()
        box = None if self.lists.cells is None else self.lists.cells.box.cpu().numpy()
        finite = np.isfinite(coord).all((1, 2))
        for k in range(len(coord)):
            if finite[k] and not everywhere:
                continue
            cell = None if box is None or not box[k].any() else box[k]
            with naming_frame(k):
                find_pairs(coord[k], cell, atype[k], self._model.rcut)


class DeviceCalls:
    """The force calls of the types that a model has evaluated last.

    Parameters
    ----------
    model
        The model, on its device.
    skin
        As in `DeviceCall`.
    """

    def __init__(self, model: EnergyModel, skin: float = 1.0) -> None:
        self._model = model
        self._skin = skin
        # By periodicity, shape and bytes of the types; the last used is the last.
        self._calls: dict[tuple[bool, tuple[int, ...], bytes], DeviceCall] = {}
        self._memory: GraphMemory | None = None

    def of(self, atype: np.ndarray, device: torch.device, *, periodic: bool) -> DeviceCall | None:
        """Return the force call of structures with types `(nframes, natoms)`.

        None if the host has to find the neighbours.
        """
        if not fits(atype):
            return None
        key = (periodic, atype.shape, atype.tobytes())
        call = self._calls.pop(key, None)
        if call is None:
            if device.type == "cuda" and self._memory is None:
                self._memory = GraphMemory()
            types = torch.from_numpy(atype.astype(np.int64)).to(device)
            call = DeviceCall(self._model, types, periodic, self._skin, self._memory)
        self._calls[key] = call
        if len(self._calls) > _MAX_CALLS:
            del self._calls[next(iter(self._calls))]
        return call

    def clear(self) -> None:
        """Free the device memory of all calls."""
        self._calls.clear()


def fits(atype: np.ndarray) -> bool:
    """Return whether the device can find neighbours in structures of these types.

    They must not be too large, and padding must come last.
    """
    is_real = atype >= 0
    padding_last = (is_real[:, 1:] <= is_real[:, :-1]).all()
    return bool(0 < atype.shape[1] <= MOST_ATOMS and is_real.any() and padding_last)
