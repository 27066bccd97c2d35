"""Potentials for TorchSim (`torch-sim-atomistic`): its `ModelInterface` by the batched force call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepmd_muon.data.elements import NUMBERS
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.systems import DynamicsError
from deepmd_muon.infer.predictor import Predictor

try:
    from torch_sim.models.interface import ModelInterface
except ImportError as error:
    raise ImportError(
        "DeepPotTorchSim needs TorchSim: install the package torch-sim-atomistic (0.3)"
    ) from error


class DeepPotTorchSim(ModelInterface):
    """A checkpoint or frozen file as a model of TorchSim, with energies, forces and stresses in float64.

    Neighbour lists are reused as long as TorchSim evaluates the same atoms.

    Parameters
    ----------
    model
        A `Predictor`, or the path of a checkpoint or frozen file.
    device
        Device of the computation, if `model` is a path.
    skin
        As in `ForceField`.
    """

    def __init__(
        self, model: Predictor | str, *, device: str | None = None, skin: float = 1.0
    ) -> None:
        super().__init__()
        predictor = model if isinstance(model, Predictor) else Predictor(model, device=device)
        self._force_field = ForceField(predictor, skin)
        self._device, self._dtype = predictor.device, torch.float64
        self._compute_stress = self._compute_forces = True
        self._memory_scales_with = "n_atoms_x_density"
        types = torch.full((len(NUMBERS) + 1,), -1, dtype=torch.int64)
        for number, name in enumerate(predictor.type_map):
            if name in NUMBERS:
                types[NUMBERS[name]] = number
        self._types = types.to(self._device)

    def forward(self, state: Any, **_: Any) -> dict[str, torch.Tensor]:
        """Return energy (nsystems,) [eV], forces (natoms, 3) [eV/Å] and stress (nsystems, 3, 3) [eV/Å³].

        Raises
        ------
        DynamicsError
            When an element is not in the type map, or a system is periodic along some axes only.
        """
        given = state if isinstance(state, Mapping) else vars(state) | {"pbc": state.pbc}
        position, owner = given["positions"], given["system_idx"]
        types = self._types[given["atomic_numbers"]]
        if (types < 0).any():
            unknown = sorted(set(given["atomic_numbers"][types < 0].tolist()))
            names = {number: name for name, number in NUMBERS.items()}
            raise DynamicsError(
                f"the potential knows {', '.join(self._force_field.predictor.type_map)}; these atoms hold "
                f"{', '.join(names[number] for number in unknown)}"
            )
        # Cell vectors are columns in TorchSim.
        cell = given.get("row_vector_cell", given["cell"].transpose(1, 2)).double()
        periodic = torch.as_tensor(given.get("pbc", True)).reshape(-1)
        if periodic.any() and not periodic.all():
            raise DynamicsError(
                "systems that are periodic along some axes only are not supported: widen the cell"
            )
        nsystems = cell.shape[0]
        counts = torch.bincount(owner, minlength=nsystems)
        within = (
            torch.arange(len(owner), device=owner.device)
            - (torch.cumsum(counts, 0) - counts)[owner]
        )
        coord = position.new_zeros((nsystems, int(counts.max()), 3), dtype=torch.float64)
        atype = torch.full(coord.shape[:2], -1, dtype=torch.int64, device=coord.device)
        coord[owner, within], atype[owner, within] = position.double(), types
        found = self._force_field(coord, cell.contiguous() if bool(periodic.any()) else None, atype)
        out = {"energy": found.energy, "forces": found.force[owner, within]}
        if bool(periodic.any()):
            virial = found.virial.view(-1, 3, 3)
            out["stress"] = (
                -0.5 * (virial + virial.mT) / torch.linalg.det(cell).abs()[:, None, None]
            )
        else:
            out["stress"] = torch.zeros_like(cell)
        return {name: value.to(position.dtype) for name, value in out.items()}
