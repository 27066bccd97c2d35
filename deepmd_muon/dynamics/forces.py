"""One force call for many structures, with checkpoints or frozen files and reused neighbour lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepmd_muon.data.errors import NeighborError
from deepmd_muon.dynamics.pairs import GhostLists, PairLists
from deepmd_muon.dynamics.systems import DynamicsError
from deepmd_muon.infer.device_call import DenseError, DeviceCall, fits
from deepmd_muon.infer.frozen import FrozenModel
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn.graphs import GraphMemory

Lists = PairLists | GhostLists | DeviceCall


@dataclass(frozen=True)
class Forces:
    """The results of a force call, float64 on the device."""

    energy: torch.Tensor  # `(nsystems,)` [eV]
    force: torch.Tensor  # `(nsystems, natoms, 3)` [eV/Å]; zero for padding
    virial: torch.Tensor  # −volume·stress `(nsystems, 9)` [eV], row-major

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Energy, force and virial."""
        return self.energy, self.force, self.virial

    @property
    def largest(self) -> torch.Tensor:
        """The largest force on an atom of each structure `(nsystems,)` [eV/Å]."""
        return self.force.square().sum(-1).amax(1).sqrt()

    def clone(self) -> Forces:
        """Return a copy."""
        return Forces(*(x.clone() for x in self.tensors))

    def take(self, other: Forces) -> None:
        """Write other results in place."""
        for own, given in zip(self.tensors, other.tensors, strict=True):
            own.copy_(given)


class ForceField:
    """A potential for the structures of one run; call `reset` before a run with other atoms.

    Parameters
    ----------
    predictor
        The potential and its device; `Predictor.batch_atoms` atoms are computed at once.
    skin
        Neighbour lists contain pairs up to the cut-off plus `skin` [Å]. They are rebuilt when an atom has moved by half
        of it. Results do not depend on it.
    """

    def __init__(self, predictor: Predictor, skin: float = 1.0) -> None:
        if not skin >= 0.0:
            raise DynamicsError(f"skin must be 0 Å or more; found {skin}")
        if predictor.parameters.required:
            raise DynamicsError(
                "the model reads frame or atomic parameters (numb_fparam, numb_aparam), and a ForceField has no values "
                "for them: use DeepPotCalculator, or give the model a default_fparam"
            )
        self.predictor = predictor
        self.skin = skin
        self._lists: list[tuple[slice, Lists]] = []
        self._atype: torch.Tensor | None = None
        self._given: tuple[torch.Tensor, int] | None = (
            None  # the last types that equalled `_atype`, and their version
        )
        #: Memory of the graphs that contain `launch`; None without graphs.
        self.memory: GraphMemory | None = None
        self._box: torch.Tensor | None = None
        self._boxes: list[torch.Tensor] = []
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
        device = [
            int(lists.lists.built.sum())
            for _, lists in self._lists
            if isinstance(lists, DeviceCall)
        ]
        return sum(device) + sum(
            x.reused.built for _, x in self._lists if not isinstance(x, DeviceCall)
        )

    def reset(self) -> None:
        """Forget all neighbour lists."""
        self._lists, self._atype, self._given, self._boxes = [], None, None, []

    def __call__(
        self, coord: torch.Tensor, box: torch.Tensor | None, atype: torch.Tensor
    ) -> Forces:
        """Evaluate structures; shapes as in `Systems`.

        Raises
        ------
        NeighborError
            When positions of a structure are not finite or two atoms coincide; `frame` is its number.
        """
        if not self._same(atype):
            self._prepare(atype, periodic=box is not None)
        if box is not None and (self._box is not box or not self._boxes):
            # The same tensor has the same slices, so that lists do not compare unchanged cells again.
            self._box, self._boxes = box, [box[rows] for rows, _ in self._lists]
        parts = []
        for number, (rows, lists) in enumerate(self._lists):
            part = coord[rows], None if box is None else self._boxes[number]
            with _counted_from(rows.start):
                try:
                    parts.append(self._evaluate(lists, *part))
                except DenseError:
                    self._lists[number] = rows, self._host_lists(atype[rows])
                    parts.append(self._evaluate(self._lists[number][1], *part))
        return _joined(parts)

    def launchable(self, box: torch.Tensor | None, atype: torch.Tensor) -> bool:
        """Return whether `launch` may be called: the last call had these structures, with lists on the device."""
        on_device = all(isinstance(lists, DeviceCall) for _, lists in self._lists)
        return on_device and (box is None or self._box is box) and self._same(atype)

    def _same(self, atype: torch.Tensor) -> bool:
        """Return whether lists are those of such types; it waits for the device only if the tensor is a new one."""
        if self._atype is None or self._atype.shape != atype.shape:
            return False
        if atype.is_inference():  # without a version
            return torch.equal(self._atype, atype)
        if self._given is None or self._given[0] is not atype or self._given[1] != atype._version:
            if not torch.equal(self._atype, atype):
                return False
            self._given = atype, atype._version
        return True

    @property
    def version(self) -> int:
        """A number that changes when graphs that contain `launch` must be recorded again."""
        return self._prepared + sum(call.version for _, call in self._calls)

    @property
    def _calls(self) -> list[tuple[slice, DeviceCall]]:
        return [(rows, lists) for rows, lists in self._lists if isinstance(lists, DeviceCall)]

    def launch(self, coord: torch.Tensor) -> Forces:
        """Evaluate the structures of the last call at other positions in the same cells, by work of the device alone.

        The next launch may overwrite the results, which are valid only if `settled` returns True.
        """
        for rows, call in self._calls:
            call.lists.coord.copy_(coord[rows])
            call.launch()
        return _joined([Forces(call.energy, call.force, call.virial) for _, call in self._calls])

    def settled(self) -> bool:
        """Wait for the device, and return whether all results since the last call are right.

        If not, enlarge the lists that were too small; graphs that contain `launch` must then be recorded again.

        Raises
        ------
        NeighborError
            As for a call; also if the host must find the neighbours.
        """
        whole = True
        for rows, call in self._calls:
            with _counted_from(rows.start):
                whole &= call.settled(call.needed())
                call.prepare()
        return whole

    def discard(self) -> None:
        """Discard all launches since the last call, with the lists that they built."""
        for _, call in self._calls:
            call.discard()

    def _prepare(self, atype: torch.Tensor, *, periodic: bool) -> None:
        model, nsystems = self.predictor.model, atype.shape[0]
        if int(atype.max()) >= len(model.type_map):
            raise DynamicsError(
                f"type {int(atype.max())} found, but the model has types {tuple(model.type_map)}"
            )
        count = max(1, self.predictor.batch_atoms // max(1, atype.shape[1]))
        self._prepared += 1_000_000  # more than versions of single calls can add
        self._lists, self._boxes = [], []
        for start in range(0, nsystems, count):
            rows = slice(start, min(start + count, nsystems))
            lists = self._lists_of(atype[rows].contiguous(), periodic)
            self._lists.append((rows, lists))
        self._atype, self._given = atype.clone(), None

    def _lists_of(self, atype: torch.Tensor, periodic: bool) -> Lists:
        model = self.predictor.resident
        if model is None or not fits(atype.cpu().numpy()):
            return self._host_lists(atype)
        if self.device.type == "cuda":
            self.memory = self.memory or GraphMemory()
        return DeviceCall(model, atype, periodic, self.skin, self.memory)

    def _host_lists(self, atype: torch.Tensor) -> PairLists | GhostLists:
        model = self.predictor.model
        if isinstance(model, FrozenModel):
            return GhostLists(model.rcut, atype, self.skin)
        return PairLists(model, atype, self.skin)

    def _evaluate(self, lists: Lists, coord: torch.Tensor, box: torch.Tensor | None) -> Forces:
        if isinstance(lists, DeviceCall):
            lists.evaluate(coord, box)
            return Forces(lists.energy, lists.force, lists.virial).clone()
        if isinstance(lists, GhostLists):
            return self._of_file(lists, coord, box)
        model = self.predictor.model
        assert isinstance(model, EnergyModel)
        with torch.no_grad():
            output = model(lists.structures(coord, box), force=True, virial=True)
        return Forces(*(output[name].detach().double() for name in ("energy", "force", "virial")))

    def _of_file(self, lists: GhostLists, coord: torch.Tensor, box: torch.Tensor | None) -> Forces:
        """Evaluate the structures side by side as one system, and sum the results of each structure."""
        model = self.predictor.model
        assert isinstance(model, FrozenModel)
        union = lists.union(coord, box)
        flat = coord.reshape(-1, 3)
        extended = flat[union.owner] + union.offset
        types = lists.reused.atype.reshape(-1)[union.owner]
        found = model.forward_lower(extended, types, union.neighbor, union.mapping)
        atomic, pull = found["atom_energy"].double()[:, 0], found["extended_force"].double()
        energy = coord.new_zeros(len(coord)).index_add_(0, union.frame[: union.nloc], atomic)
        force = torch.zeros_like(flat).index_add_(0, union.owner, pull).view_as(coord)
        # −dE/dε: the energy depends only on differences of positions, so every origin gives the same sum.
        per_atom = (pull[:, :, None] * extended[:, None, :]).reshape(-1, 9)
        virial = coord.new_zeros(len(coord), 9).index_add_(0, union.frame, per_atom)
        return Forces(energy, force, virial)


def _joined(parts: list[Forces]) -> Forces:
    """Return the results of all structures; the only part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return Forces(*map(torch.cat, zip(*(part.tensors for part in parts), strict=True)))


@contextlib.contextmanager
def _counted_from(first: int) -> Iterator[None]:
    """Add the number of the first structure to the numbers of structures in errors."""
    try:
        yield
    except NeighborError as error:
        if error.frame is None:
            raise
        raise NeighborError(error.problem, first + error.frame) from error
