"""Frozen files as models of metatomic (`metatomic-torch`)."""

import os

# metatomic compares annotations with these.
from typing import Any, Dict, List, Optional  # noqa: UP035

import torch
from torch import Tensor

from deepmd_muon.data.elements import NUMBERS, types_of_numbers
from deepmd_muon.infer.frozen import FrozenModel

try:
    from metatensor.torch import Labels, TensorBlock, TensorMap
    from metatomic.torch import (
        AtomisticModel,
        ModelCapabilities,
        ModelMetadata,
        ModelOutput,
        System,
    )
except ImportError as error:
    raise ImportError(
        "export_metatomic needs metatomic: install the package metatomic-torch"
    ) from error


class MetatomicPotential(torch.nn.Module):
    """The energy of whole systems; it finds neighbours by comparing all pairs.

    Parameters
    ----------
    program
        The program of a frozen file.
    type_map
        Element symbols of its types.
    """

    types: Tensor

    def __init__(self, program: torch.nn.Module, type_map: tuple[str, ...]) -> None:
        super().__init__()
        self.program: Any = program
        self.register_buffer("types", torch.tensor(types_of_numbers(type_map)))

    def forward(
        self,
        systems: List[System],  # noqa: UP006
        outputs: Dict[str, ModelOutput],  # noqa: UP006
        selected_atoms: Optional[Labels] = None,  # noqa: UP045
    ) -> Dict[str, TensorMap]:  # noqa: UP006
        """Return "energy" of every system [eV], with gradients by positions and cell.

        The program returns the energy E, forces F and virial W as values, without a graph. The
        expression

            E − F·δx + δh·h⁻ᵀ(xᵀF − W)

        with changes δx of positions and δh of the cell h, both 0, has the value and the gradients
        of the energy.
        """
        results: dict[str, TensorMap] = {}
        if "energy" not in outputs:
            return results
        if selected_atoms is not None:
            raise ValueError("this potential computes whole systems: selected_atoms cannot be used")
        energies: list[Tensor] = []
        for system in systems:
            types = self.types[system.types.to(torch.int64)]
            if bool((types < 0).any()):
                raise ValueError(
                    "the system holds an element that is not in the potential's type map"
                )
            periodic = bool(system.pbc.all())
            if bool(system.pbc.any()) and not periodic:
                raise ValueError(
                    "systems that are periodic along some axes only are not supported: widen the "
                    "cell"
                )
            # `x` and `h` are constants; their differences from the inputs are 0 but have gradients.
            x = system.positions.detach()
            h = system.cell.detach()
            output = self.program.forward(
                x.unsqueeze(0),
                types.unsqueeze(0),
                h.unsqueeze(0) if periodic else None,
                None,
                None,
                False,
                None,
            )
            force = output["force"][0]
            energy = output["energy"].view([]).to(x.dtype)
            energy = energy - ((system.positions - x) * force).sum()
            if periodic:
                moment = torch.mm(x.t(), force) - output["virial"].view(3, 3)
                slope = torch.linalg.solve(h.t(), moment)
                energy = energy + ((system.cell - h) * slope).sum()
            energies.append(energy)
        device = systems[0].positions.device
        block = TensorBlock(
            values=torch.stack(energies).unsqueeze(1),
            samples=Labels(
                ["system"],
                torch.arange(len(systems), dtype=torch.int32, device=device).unsqueeze(1),
            ),
            components=torch.jit.annotate(list[Labels], []),
            properties=Labels(["energy"], torch.zeros([1, 1], dtype=torch.int32, device=device)),
        )
        key = Labels(["_"], torch.zeros([1, 1], dtype=torch.int32, device=device))
        results["energy"] = TensorMap(keys=key, blocks=[block])
        return results


def export_metatomic(frozen: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    """Write a frozen file as a model of metatomic, in float64 for CPUs and CUDA.

    Parameters
    ----------
    frozen
        A file of `dp freeze` or `dp compress` whose types are elements.
    output
        The model, ".pt".

    Raises
    ------
    CheckpointError
        When the file cannot be read as a potential.
    """
    model = FrozenModel(frozen, "cpu")
    passes_messages = bool(model.program.has_message_passing())
    capabilities = ModelCapabilities(
        outputs={"energy": ModelOutput(unit="eV", sample_kind="system")},
        atomic_types=[NUMBERS[name] for name in model.type_map],
        interaction_range=float("inf") if passes_messages else model.rcut,
        length_unit="angstrom",
        supported_devices=["cpu", "cuda"],
        dtype="float64",
    )
    potential = MetatomicPotential(model.program, model.type_map).eval()
    metadata = ModelMetadata(name=f"DeePMD potential of {' '.join(model.type_map)}")
    AtomisticModel(potential, metadata, capabilities).save(str(output))
