"""One force call for many structures, with checkpoints or frozen files and reused neighbour lists.

`ForceField` divides the structures into blocks that fit into memory, each with its own lists. If
the device finds neighbours itself, the lists of a block are a `DeviceCall`. `ForceField.launch`
then evaluates all structures without the host, and may be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepmd_muon.data.errors import renumbering_frames
from deepmd_muon.dynamics.pairs import GhostLists, PairLists
from deepmd_muon.dynamics.systems import DynamicsError
from deepmd_muon.infer.device_call import DenseError, DeviceCall, fits
from deepmd_muon.infer.frozen import FrozenModel
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn.graphs import GraphMemory

_Lists = PairLists | GhostLists | DeviceCall


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
    lists: _Lists
    box: Tensor | None = None  # their cells in the last call


class ForceField:
    """A potential for the structures of one run; call `reset` before a run with other atoms.

    Parameters
    ----------
    predictor
        The potential and its device; `Predictor.batch_atoms` atoms are computed at once.
    skin
        Neighbour lists contain pairs up to the cut-off plus `skin` [Å]. They are rebuilt when an
        atom has moved by half of it. Results do not depend on it.

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
                "the model reads parameters of frames or atoms (numb_fparam, numb_aparam) or spins "
                "(model/spin), and a ForceField has no values for them: use DeepPotCalculator, or "
                "give the model a default_fparam"
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
        """Number of neighbour lists of single structures built since the last `reset`."""
        built = 0
        for block in self._blocks:
            lists = block.lists
            if isinstance(lists, DeviceCall):
                built += int(lists.lists.built.sum())
            else:
                built += lists.reused.built
        return built

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
            with renumbering_frames(range(block.rows.start, block.rows.stop)):
                try:
                    forces = self._evaluate(block.lists, coord[block.rows], block_box)
                except DenseError:
                    block.lists = self._host_lists(atype[block.rows])
                    forces = self._evaluate(block.lists, coord[block.rows], block_box)
            results.append(forces)
        return _joined(results)

    # ----- calls on the device alone -------------------------------------------------------------

    def launchable(self, box: Tensor | None, atype: Tensor) -> bool:
        """Return whether `launch` may be called.

        The last call must have had these structures, with all lists on the device.
        """
        on_device = all(isinstance(block.lists, DeviceCall) for block in self._blocks)
        return on_device and (box is None or self._box is box) and self._has_types(atype)

    @property
    def version(self) -> int:
        """A number that changes when graphs that contain `launch` must be recorded again."""
        return self._prepared + sum(call.version for _, call in self._device_calls)

    @property
    def _device_calls(self) -> list[tuple[slice, DeviceCall]]:
        return [
            (block.rows, block.lists)
            for block in self._blocks
            if isinstance(block.lists, DeviceCall)
        ]

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
            with renumbering_frames(range(rows.start, rows.stop)):
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
            block_types = atype[rows].contiguous()
            lists = self._device_call(block_types, periodic=periodic)
            self._blocks.append(_Block(rows, lists or self._host_lists(block_types)))
        self._atype = atype.clone()
        self._checked_types = None

    def _device_call(self, atype: Tensor, *, periodic: bool) -> DeviceCall | None:
        """Return lists on the device; None if the host has to find the neighbours."""
        model = self.predictor.resident
        if model is None or not fits(atype.cpu().numpy()):
            return None
        if self.device.type == "cuda" and self.memory is None and not model.why_not_captured:
            self.memory = GraphMemory()
        return DeviceCall(model, atype, periodic, self.skin, self.memory)

    def _host_lists(self, atype: Tensor) -> PairLists | GhostLists:
        model = self.predictor.model
        if isinstance(model, FrozenModel):
            return GhostLists(model.rcut, atype, self.skin)
        return PairLists(model, atype, self.skin)

    # ----- evaluation ----------------------------------------------------------------------------

    def _evaluate(self, lists: _Lists, coord: Tensor, box: Tensor | None) -> Forces:
        if isinstance(lists, DeviceCall):
            lists.evaluate(coord, box)
            return _results_of(lists).clone()  # the next call overwrites them
        model = self.predictor.model
        if isinstance(lists, GhostLists):
            assert isinstance(model, FrozenModel)
            return _evaluate_frozen(model, lists, coord, box)
        assert isinstance(model, EnergyModel)
        with torch.no_grad():
            output = model(lists.structures(coord, box), force=True, virial=True)
        return Forces(
            energy=output["energy"].detach().double(),
            force=output["force"].detach().double(),
            virial=output["virial"].detach().double(),
        )


def _evaluate_frozen(
    model: FrozenModel, lists: GhostLists, coord: Tensor, box: Tensor | None
) -> Forces:
    """Evaluate the structures as one system, and sum the results of each structure."""
    union = lists.union(coord, box)
    flat = coord.reshape(-1, 3)
    extended = flat[union.owner] + union.offset  # (nall, 3): positions of atoms and images
    types = lists.reused.atype.reshape(-1)[union.owner]
    output = model.forward_lower(extended, types, union.neighbor, union.mapping)
    atom_energy = output["atom_energy"].double()[:, 0]
    pull = output["extended_force"].double()
    energy = coord.new_zeros(len(coord)).index_add_(0, union.frame[: union.nloc], atom_energy)
    force = torch.zeros_like(flat).index_add_(0, union.owner, pull).view_as(coord)
    # −dE/dε: the energy depends only on differences of positions, so every origin gives the same
    # sum.
    per_atom = (pull[:, :, None] * extended[:, None, :]).reshape(-1, 9)
    virial = coord.new_zeros(len(coord), 9).index_add_(0, union.frame, per_atom)
    return Forces(energy=energy, force=force, virial=virial)


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
