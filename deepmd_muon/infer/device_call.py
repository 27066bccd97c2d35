"""Energy, forces and virial of moving structures, computed on the device alone: one CUDA graph a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.errors import NeighborError
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

#: Most atoms of a structure for which comparing all pairs, once in many steps, costs less than the host's lists.
MOST_ATOMS = 100_000
# Most compositions whose graphs are kept.
_MOST_CALLS = 8
# Most launches of one call, each with more room than the one before.
_TRIES = 8


class DenseError(NeighborError):
    """An atom has more neighbours than the device sorts: the host has to find them."""


class DeviceCall:
    """The force call of structures of fixed types.

    `launch` does all work on the device. A kernel rebuilds the lists of a structure if an atom has crossed half the
    skin, and otherwise returns at once. The neighbours within the cut-off are then sorted from the lists, and the model
    is evaluated. The sizes of lists, and the range of tables in place of embedding nets, are those of earlier positions
    with a margin. Kernels note what does not fit; `settled` reads these notes and makes room, and the caller launches
    again.

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
        Results `(nframes,)`, `(nframes, 9)` [eV], `(nframes, natoms, 3)` [eV/Å], `(nframes, natoms)` [eV], float64;
        the next launch overwrites them.
    version
        Number of changes of sizes. After each, a graph that contains `launch` has to be recorded again.
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
        self._model, self._atype, self._memory = model, atype, memory
        self.lists = SkinLists(model.neighbors, model.ntypes, atype, periodic, skin)
        shapes = (nframes,), (nframes, 9), (nframes, natoms, 3), (nframes, natoms)
        sizes = [int(np.prod(shape)) for shape in shapes]
        self._results = torch.zeros(sum(sizes), dtype=torch.float64, device=atype.device)
        parts = [
            part.view(shape) for part, shape in zip(self._results.split(sizes), shapes, strict=True)
        ]
        self.energy, self.virial, self.force, self.atom_energy = parts
        pinned = atype.is_cuda
        self._host = torch.zeros_like(self._results, device="cpu", pin_memory=pinned)
        self._given = torch.zeros(nframes, natoms, 3, dtype=torch.float64, pin_memory=pinned)
        self._shapes, self._ends = shapes, np.cumsum(sizes)[:-1]
        self._parameters: dict[str, Tensor | None] = {}
        self._box: np.ndarray | None = None
        self._cells: tuple[Tensor, int] | None = None
        self._table: Table | None = None
        self._nearest = math.inf  # least distance of atoms that a table was too short for [Å]
        # Inference tensors have no version counter.
        self._weights = [weight for weight in model.parameters() if not weight.is_inference()]
        self._tabulated = 0
        self._ready = False
        self._replayed = Replayed(self.launch, memory)
        self.version = 0

    def launch(self) -> None:
        """Evaluate the present positions; all work is on the device."""
        structures = replace(
            self.lists.find(),
            fparam=self._parameters.get("fparam"),
            aparam=self._parameters.get("aparam"),
        )
        with torch.no_grad(), self._model.using(self._table):
            found = self._model(structures, force=True, virial=True)
        torch.cat(
            [found[name].flatten() for name in ("energy", "virial", "force", "atom_energy")],
            out=self._results,
        )

    def place(self, coord: Tensor, box: Tensor | None) -> None:
        """Write positions `(nframes, natoms, 3)` and cells `(nframes, 3, 3)` [Å], tensors on the device.

        Cells are checked only if `box` is another tensor than before, or was changed in place.

        Raises
        ------
        NeighborError
            When a new cell has no volume; a `DenseError` where the host has to find the neighbours.
        """
        self.lists.coord.copy_(coord)
        if box is not None and (
            self._cells is None or self._cells[0] is not box or self._cells[1] != box._version
        ):
            self._check_cells(coord.cpu().numpy(), box.cpu().numpy())
            self.lists.set_cells(box)
            self._cells = box, box._version
        self.prepare()

    def predict(
        self,
        coord: np.ndarray,
        box: np.ndarray | None,
        fparam: np.ndarray | None,
        aparam: np.ndarray | None,
    ) -> Prediction:
        """Predict positions and cells on the host; shapes as in `place`, parameters as in `Structures`.

        Raises
        ------
        NeighborError
            As `find_pairs`, with the number of the frame; a `DenseError` where the host has to find the neighbours.
        """
        self._given.numpy()[...] = coord
        self.lists.coord.copy_(self._given, non_blocking=True)
        if box is not None and (self._box is None or not np.array_equal(box, self._box)):
            self._check_cells(coord, box)
            self.lists.set_cells(torch.from_numpy(np.ascontiguousarray(box)).to(self._atype.device))
            self._box = box.copy()
        for name, values in (("fparam", fparam), ("aparam", aparam)):
            given = (
                None
                if values is None
                else torch.from_numpy(np.ascontiguousarray(values)).to(self._atype.device)
            )
            if (own := self._parameters.get(name)) is not None and given is not None:
                own.copy_(given)
            elif own is not given:
                self._parameters[name] = given
                self._changed()
        self._repeated(self._read)
        found = np.split(self._host.numpy().copy(), self._ends)
        energy, virial, force, atom_energy = (
            x.reshape(s) for x, s in zip(found, self._shapes, strict=True)
        )
        return Prediction(energy=energy, virial=virial, force=force, atom_energy=atom_energy)

    def evaluate(self, coord: Tensor, box: Tensor | None) -> None:
        """Write the results of positions and cells on the device; see `place` and `predict`."""
        self.place(coord, box)
        self._repeated(self.needed)

    def _read(self) -> list[int]:
        """Copy all results to the host; wait for the notes and return them."""
        self._host.copy_(self._results, non_blocking=True)
        return self.needed()

    def _repeated(self, read: Callable[[], list[int]]) -> None:
        """Launch until everything fits."""
        for _ in range(_TRIES):
            self.prepare()
            self._replayed()
            if self.settled(read()):
                return
        raise NeighborError(
            f"the neighbour lists did not fit after {_TRIES} launches with growing sizes"
        )

    def needed(self) -> list[int]:
        """Wait for the device, and return its notes on all launches since sizes last changed, for `settled`."""
        found: list[int] = self.lists.needed.tolist()
        return found

    def settled(self, needed: list[int]) -> bool:
        """Return whether the last results are right; else make room, for the caller to launch again.

        Raises
        ------
        NeighborError
            When positions of a structure are not finite or two atoms lie at the same place; `frame` is its number.
        """
        if needed[NOT_FINITE] or needed[AT_SAME_PLACE]:
            # They may have moved apart since, or the caller went back to earlier positions: then no fault is found.
            for note in (NOT_FINITE, AT_SAME_PLACE):
                self.lists.needed[note] = 0
            self._find_fault(everywhere=bool(needed[AT_SAME_PLACE]))
        near, grown = needed[TOO_NEAR], self.lists.grow(needed)
        if near:
            # The least distance of all launches: at the present positions atoms may be farther apart.
            self._nearest = min(self._nearest, NEARNESS / near)
            self.lists.needed[TOO_NEAR] = 0
        if near or grown:
            self._changed()
            return False
        return True

    def discard(self) -> None:
        """Forget the last launches, whose results do not count, with the lists that they made."""
        self.lists.forget()

    def prepare(self) -> None:
        """Choose sizes and tables for the present positions and weights, if missing or outdated; launches need them.

        torch's version counters reveal changes of weights, but not those by a replayed graph.

        Raises
        ------
        NeighborError
            As `predict`.
        """
        weights = 0 if self._table is None else sum(weight._version for weight in self._weights)
        if self._ready and weights == self._tabulated:
            return
        if self._ready:
            self._changed()
        if not self.lists.prepare():
            self._find_fault()
            raise DenseError(
                f"an atom has more than {MOST_NEIGHBORS} neighbours within the cut-off and the skin"
            )
        self.lists.nearest.zero_()
        self._table = self._model.tabulate(self.lists.find(), self._nearest)
        if self._table is None:
            self._nearest = math.inf  # the next one need not reach as far
        self._tabulated = (
            0 if self._table is None else sum(weight._version for weight in self._weights)
        )
        self.lists.nearest.fill_(0.0 if self._table is None else self._table.nearest**2)
        self._ready = True

    def _changed(self) -> None:
        self.version += 1
        self._ready = False
        self._replayed = Replayed(self.launch, self._memory)

    def _check_cells(self, coord: np.ndarray, box: np.ndarray) -> None:
        for k, (points, cell) in enumerate(zip(coord, box, strict=True)):
            if cell.any():
                try:
                    check_geometry(points, cell, self._model.rcut, np.arange(len(points)))
                except NeighborError as error:
                    raise NeighborError(error.problem, k) from error

    def _find_fault(self, *, everywhere: bool = True) -> None:
        """Check positions on the host, of all structures or only of those with one that is not finite.

        Raise a NeighborError for the first fault.
        """
        coord, atype = self.lists.coord.cpu().numpy(), self._atype.cpu().numpy()
        box = None if self.lists.cells is None else self.lists.cells.box.cpu().numpy()
        finite = np.isfinite(coord).all((1, 2))
        for k in range(len(coord)) if everywhere else np.flatnonzero(~finite).tolist():
            cell = None if box is None or not box[k].any() else box[k]
            try:
                find_pairs(coord[k], cell, atype[k], self._model.rcut)
            except NeighborError as error:
                raise NeighborError(error.problem, k) from error


class DeviceCalls:
    """The force calls of the compositions that a model has evaluated last.

    Parameters
    ----------
    model
        The model, on its device.
    skin
        As in `DeviceCall`.
    """

    def __init__(self, model: EnergyModel, skin: float = 1.0) -> None:
        self._model, self._skin = model, skin
        self._calls: dict[tuple[bool, tuple[int, ...], bytes], DeviceCall] = {}
        self._memory: GraphMemory | None = None

    def of(self, atype: np.ndarray, device: torch.device, *, periodic: bool) -> DeviceCall | None:
        """Return the force call of structures with types `(nframes, natoms)`; None where the host finds neighbours."""
        if not fits(atype):
            return None
        key = periodic, atype.shape, atype.tobytes()
        call = self._calls.pop(key, None)
        if call is None:
            if device.type == "cuda":
                self._memory = self._memory or GraphMemory()
            types = torch.from_numpy(atype.astype(np.int64)).to(device)
            call = DeviceCall(self._model, types, periodic, self._skin, self._memory)
        self._calls[key] = call
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        return call

    def clear(self) -> None:
        """Free the device memory of all of them."""
        self._calls.clear()


def fits(atype: np.ndarray) -> bool:
    """Return whether the device can find neighbours in structures of these types: not too large, padding last."""
    real = atype >= 0
    return 0 < atype.shape[1] <= MOST_ATOMS and bool(
        real.any() and (real[:, 1:] <= real[:, :-1]).all()
    )
