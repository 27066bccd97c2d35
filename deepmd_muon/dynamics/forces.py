"""One force call for many structures, with checkpoints or frozen files.

`ForceField` divides the structures into blocks that fit into memory. If the device finds neighbours
itself, a block has a `DeviceCall` with lists that are reused. `ForceField.launch` then evaluates all
structures without the host, and may be captured in a CUDA graph. Otherwise the host finds the
neighbours in every call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames
from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.systems import DynamicsError
from deepmd_muon.infer.device_call import DenseError, DeviceCall, fits
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model.nn.graphs import GraphMemory


@dataclass(frozen=True)
class Forces:
    """The results of a force call, float64 on the device."""

    energy: Tensor  # (nsystems,) [eV]
    force: Tensor  # (nsystems, natoms, 3) [eV/Å]; zero for padding
    virial: Tensor  # (nsystems, 9): −volume·stress, row-major [eV]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Energy, force and virial."""
        return self.energy, self.force, self.virial

    def clone(self) -> Forces:
        """Return a copy."""
        return Forces(*(x.clone() for x in self.tensors))

    def take(self, forces: Forces) -> None:
        """Write other results in place."""
        for target, source in zip(self.tensors, forces.tensors, strict=True):
            target.copy_(source)


@dataclass
class _Block:
    """Structures that are evaluated at once."""

    rows: slice
    call: DeviceCall | None  # None if the host has to find the neighbours
    box: Tensor | None = None  # their cells in the last call


class ForceField:
    """A potential for the structures of one run; call `reset` before a run with other atoms.

    Parameters
    ----------
    predictor
        The potential and its device; `Predictor.batch_atoms` atoms are computed at once.
    skin
        Neighbour lists on a device contain pairs up to the cut-off plus `skin` [Å]. They are
        rebuilt when an atom has moved by half of it. Results do not depend on it.

    Attributes
    ----------
    memory
        Memory of the graphs that contain `launch`; None without graphs.
    """

    def __init__(self, predictor: Predictor, skin: float = 1.0) -> None:
        if not skin >= 0.0:
            raise DynamicsError(f"skin must be 0 Å or more; found {skin}")
        if predictor.parameters.required:
            raise DynamicsError(
                "the model reads frame or atomic parameters (numb_fparam, numb_aparam), and a "
                "ForceField has no values for them: use DeepPotCalculator, or give the model a "
                "default_fparam"
            )
        self.predictor = predictor
        self.skin = skin
        self.memory: GraphMemory | None = None
        self._blocks: list[_Block] = []
        self._atype: Tensor | None = None  # types of the blocks
        # The last tensor of types that equalled `_atype`, with its version counter.
        self._checked_types: tuple[Tensor, int] | None = None
        self._box: Tensor | None = None  # cells of the last call
        self._prepared = 0

    @property
    def device(self) -> torch.device:
        """The device of positions and results."""
        return self.predictor.device

    @property
    def rcut(self) -> float:
        """Cut-off radius [Å]."""
        return float(self.predictor.model.rcut)

    @property
    def lists_built(self) -> int:
        """Lists of single structures that the device has built since the last `reset`."""
        return sum(int(call.lists.built.sum()) for _, call in self._device_calls)

    def reset(self) -> None:
        """Forget all neighbour lists."""
        self._blocks = []
        self._atype = None
        self._checked_types = None
        self._box = None

    def __call__(self, coord: Tensor, box: Tensor | None, atype: Tensor) -> Forces:
        """Evaluate structures; shapes as in `Systems`.

        Raises
        ------
        NeighborError
            When positions of a structure are not finite or two atoms coincide; `frame` is its
            number.
        """
        if not self._has_types(atype):
            self._prepare(atype, periodic=box is not None)
        if box is not self._box and box is not None:
            # Lists do not compare a tensor of cells again that they have seen, so slice it once
            # only.
            self._box = box
            for block in self._blocks:
                block.box = box[block.rows]
        results = []
        for block in self._blocks:
            block_box = None if box is None else block.box
            with _counting_from(block.rows.start):
                results.append(self._evaluate(block, coord[block.rows], block_box))
        return _joined(results)

    # ----- calls on the device alone -------------------------------------------------------------

    def launchable(self, box: Tensor | None, atype: Tensor) -> bool:
        """Return whether `launch` may be called.

        The last call must have had these structures, with all lists on the device.
        """
        on_device = all(block.call is not None for block in self._blocks)
        return on_device and (box is None or self._box is box) and self._has_types(atype)

    @property
    def version(self) -> int:
        """A number that changes when graphs that contain `launch` must be recorded again."""
        return self._prepared + sum(call.version for _, call in self._device_calls)

    @property
    def _device_calls(self) -> list[tuple[slice, DeviceCall]]:
        return [(block.rows, block.call) for block in self._blocks if block.call is not None]

    def launch(self, coord: Tensor) -> Forces:
        """Evaluate the structures of the last call at other positions in the same cells.

        The work is done by the device alone. The next launch may overwrite the results. They are
        valid only if `settled` returns True.
        """
        calls = self._device_calls
        for rows, call in calls:
            call.lists.coord.copy_(coord[rows])
            call.launch()
        return _joined([_results_of(call) for _, call in calls])

    def settled(self) -> bool:
        """Wait for the device; return whether all results since the last call are right.

        If not, enlarge the lists that were too small. Graphs that contain `launch` must then be
        recorded again.

        Raises
        ------
        NeighborError
            As for a call; also if the host must find the neighbours.
        """
        all_right = True
        for rows, call in self._device_calls:
            with _counting_from(rows.start):
                all_right &= call.settled(call.needed())
                call.prepare()
        return all_right

    def discard(self) -> None:
        """Discard all launches since the last call, with the lists that they built."""
        for _, call in self._device_calls:
            call.discard()

    # ----- neighbour lists -----------------------------------------------------------------------

    def _has_types(self, atype: Tensor) -> bool:
        """Return whether the blocks have these types.

        Wait for the device only if the tensor is new.
        """
        if self._atype is None or self._atype.shape != atype.shape:
            return False
        if atype.is_inference():  # without a version counter
            return torch.equal(self._atype, atype)
        if self._checked_types is not None:
            tensor, version = self._checked_types
            if tensor is atype and version == atype._version:
                return True
        if not torch.equal(self._atype, atype):
            return False
        self._checked_types = (atype, atype._version)
        return True

    def _prepare(self, atype: Tensor, *, periodic: bool) -> None:
        """Divide structures into blocks, with new lists."""
        type_map = self.predictor.model.type_map
        if int(atype.max()) >= len(type_map):
            raise DynamicsError(
                f"type {int(atype.max())} found, but the model has types {tuple(type_map)}"
            )
        nsystems, natoms = atype.shape
        count = max(1, self.predictor.batch_atoms // max(1, natoms))
        self._prepared += 1_000_000  # more than versions of single calls can add
        self._blocks = []
        self._box = None
        for start in range(0, nsystems, count):
            rows = slice(start, min(start + count, nsystems))
            call = self._device_call(atype[rows].contiguous(), periodic=periodic)
            self._blocks.append(_Block(rows, call))
        self._atype = atype.clone()
        self._checked_types = None

    def _device_call(self, atype: Tensor, *, periodic: bool) -> DeviceCall | None:
        """Return the call of a block; None if the host has to find the neighbours."""
        model = self.predictor.resident
        if model is None or not fits(atype.cpu().numpy()):
            return None
        if self.device.type == "cuda" and self.memory is None and not model.why_not_captured:
            self.memory = GraphMemory()
        return DeviceCall(model, atype, periodic, self.skin, self.memory)

    # ----- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, block: _Block, coord: Tensor, box: Tensor | None) -> Forces:
        if block.call is not None:
            try:
                block.call.evaluate(coord, box)
                return _results_of(block.call).clone()  # the next call overwrites them
            except DenseError:
                block.call = None
        assert self._atype is not None
        frames = Frames(
            atype=self._atype[block.rows].cpu().numpy().astype(np.int32),
            coord=coord.detach().cpu().numpy(),
            box=None if box is None else box.cpu().numpy(),
        )
        prediction = self.predictor.evaluate_on_host(frames)
        results = (prediction.energy, prediction.force, prediction.virial)
        return Forces(*(torch.from_numpy(values).to(coord.device) for values in results))


def _results_of(call: DeviceCall) -> Forces:
    return Forces(energy=call.energy, force=call.force, virial=call.virial)


def _joined(results: list[Forces]) -> Forces:
    """Return the results of all structures; a single one is not copied."""
    if len(results) == 1:
        return results[0]
    return Forces(
        energy=torch.cat([forces.energy for forces in results]),
        force=torch.cat([forces.force for forces in results]),
        virial=torch.cat([forces.virial for forces in results]),
    )


@contextlib.contextmanager
def _counting_from(first: int) -> Iterator[None]:
    """Add the number of the first structure to the numbers of structures in errors."""
    try:
        yield
    except NeighborError as error:
        if error.frame is None:
            raise
        raise NeighborError(error.problem, first + error.frame) from error
