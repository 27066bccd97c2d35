"""Potentials as models of TorchSim (`torch-sim-atomistic`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.data.elements import NUMBERS, types_of_numbers
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
    """A checkpoint or frozen file as a model of TorchSim, in float64.

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
        # Attributes of TorchSim's interface.
        self._device = predictor.device
        self._dtype = torch.float64
        self._compute_stress = True
        self._compute_forces = True
        self._memory_scales_with = "n_atoms_x_density"
        self._types = torch.tensor(types_of_numbers(predictor.type_map)).to(self._device)

    def forward(self, state: Any, **_: Any) -> dict[str, Tensor]:
        """Return energies, forces and stresses.

        Shapes are (nsystems,) [eV], (natoms, 3) [eV/Å] and (nsystems, 3, 3) [eV/Å³].

        Raises
        ------
        DynamicsError
            When an element is not in the type map, or a system is periodic along some axes only.
        """
        values = state if isinstance(state, Mapping) else vars(state) | {"pbc": state.pbc}
        position = values["positions"]
        system = values["system_idx"]  # of each atom
        types = self._types_of(values["atomic_numbers"])
        # Cell vectors are columns in TorchSim.
        cell = values.get("row_vector_cell", values["cell"].transpose(1, 2)).double()
        periodic_axes = torch.as_tensor(values.get("pbc", True)).reshape(-1)
        periodic = bool(periodic_axes.any())
        if periodic and not periodic_axes.all():
            raise DynamicsError(
                "systems that are periodic along some axes only are not supported: widen the cell"
            )

        # One row of atoms a system, as in `Systems`; TorchSim has all atoms in one row.
        nsystems = cell.shape[0]
        counts = torch.bincount(system, minlength=nsystems)
        start = torch.cumsum(counts, 0) - counts
        column = torch.arange(len(system), device=system.device) - start[system]
        coord = position.new_zeros((nsystems, int(counts.max()), 3), dtype=torch.float64)
        coord[system, column] = position.double()
        atype = torch.full(coord.shape[:2], -1, dtype=torch.int64, device=coord.device)
        atype[system, column] = types

        results = self._force_field(coord, cell.contiguous() if periodic else None, atype)
        if periodic:
            virial = results.virial.view(-1, 3, 3)
            volume = torch.linalg.det(cell).abs()[:, None, None]
            stress = -0.5 * (virial + virial.mT) / volume
        else:
            stress = torch.zeros_like(cell)
        return {
            "energy": results.energy.to(position.dtype),
            "forces": results.force[system, column].to(position.dtype),
            "stress": stress.to(position.dtype),
        }

    def _types_of(self, atomic_numbers: Tensor) -> Tensor:
        types = self._types[atomic_numbers]
        if (types < 0).any():
            unknown = sorted(set(atomic_numbers[types < 0].tolist()))
            names = {number: name for name, number in NUMBERS.items()}
            raise DynamicsError(
                f"the potential knows {', '.join(self._force_field.predictor.type_map)}; these "
                f"atoms hold {', '.join(names[number] for number in unknown)}"
            )
        return types
