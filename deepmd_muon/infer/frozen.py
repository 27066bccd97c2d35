"""Frozen files (`.pth`), of this package or of deepmd-kit, as a function of positions."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.checkpoint_file.archive import ArchiveError
from deepmd_muon.checkpoint_file.errors import CheckpointError
from deepmd_muon.checkpoint_file.frozen_archive import load_program, weights_of
from deepmd_muon.data.errors import naming_frame
from deepmd_muon.data.frames import Parameters
from deepmd_muon.data.neighbors.lists import with_ghosts
from deepmd_muon.files import open_regular
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.model import EnergyModel, build_model
from deepmd_muon.model.deepmd_kit import from_deepmd_kit
from deepmd_muon.model.scripted.exchange import BORDER_OP, TABULATED, declare_operators

SUFFIX = ".pth"
_MAX_RCUT = 100.0  # [Å], as in inputs
# Exceptions of a program, and of results in another form.
_PROGRAM_ERRORS = (RuntimeError, AttributeError, LookupError, TypeError, ValueError)


def is_frozen(path: object) -> bool:
    """Return whether a path has the suffix of a frozen file."""
    return isinstance(path, (str, os.PathLike)) and Path(path).suffix == SUFFIX


class FrozenModel:
    """A TorchScript program with the methods that LAMMPS calls.

    Parameters
    ----------
    path
        The file.
    device
        Where to compute.
    trust
        Run the program even if it calls operators that no potential needs. It may then do anything.

    Attributes
    ----------
    rcut
        Cut-off radius [Å].
    type_map
        Element symbol of every type.
    parameters
        The frame and atomic parameters that the program reads.

    Raises
    ------
    CheckpointError
        When the file cannot be read as a potential.
    """

    def __init__(
        self, path: str | os.PathLike[str], device: torch.device | str, *, trust: bool = False
    ) -> None:
        self._path = path
        self.device = torch.device(device)
        if not Path(path).exists():
            raise CheckpointError(f"there is no frozen model {path}")
        declare_operators(BORDER_OP, *TABULATED)
        try:
            with open_regular(path) as file:
                content = file.read()
            self._program = load_program(content, self.device, trust=trust).eval()
            self.rcut = float(self._program.get_rcut())
            self.type_map = tuple(self._program.get_type_map())
            self.parameters = _parameters_of(self._program)
        except (*_PROGRAM_ERRORS, ArchiveError, OSError, MemoryError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{path} cannot be read as a frozen potential: {reason}"
            ) from error
        if _width(self._program, "has_spin"):
            raise CheckpointError(
                f"{path} reads spins, which frozen files get from LAMMPS or deepmd-kit alone: test "
                "the checkpoint"
            )
        named_types = all(isinstance(name, str) for name in self.type_map)
        if not 0 < self.rcut <= _MAX_RCUT or not named_types:
            raise CheckpointError(
                f"{path} cannot be read as a frozen potential: cut-off {self.rcut:g} Å, types "
                f"{self.type_map}"
            )

    @property
    def program(self) -> torch.jit.ScriptModule:
        """The program in the file."""
        return self._program

    def restored(self) -> EnergyModel | None:
        """Return the model that the file was frozen from.

        None for a file that does not hold its weights.

        Raises
        ------
        CheckpointError
            When the weights are damaged.
        """
        try:
            with open_regular(self._path) as file:
                entry = weights_of(file.read())
            if entry is None:
                return None
            settings, state = from_deepmd_kit(entry)
            model = build_model(settings)
            model.load_state_dict(state)
            return model.to(self.device).eval()
        except (*_PROGRAM_ERRORS, ArchiveError, OSError) as error:
            raise CheckpointError(
                f"{self._path} holds weights that cannot be used: {error}"
            ) from error

    def model_section(self) -> dict[str, Any]:
        """Return the model section as deepmd-kit writes it.

        Raises
        ------
        CheckpointError
            When the file has none.
        """
        try:
            section: dict[str, Any] = json.loads(self._program.get_model_def_script())
        except (AttributeError, ValueError) as error:
            raise CheckpointError(
                "the frozen file does not hold the model section of its checkpoint"
            ) from error
        return section

    def observed_types(self) -> list[str] | None:
        """Return the types whose energy bias is not 0.

        None for a file without `get_observed_type_list`.
        """
        if not hasattr(self._program, "get_observed_type_list"):
            return None
        return list(self._program.get_observed_type_list())

    def predict(
        self,
        coord: np.ndarray,
        box: np.ndarray | None,
        atype: np.ndarray,
        fparam: np.ndarray | None = None,
        aparam: np.ndarray | None = None,
    ) -> Prediction:
        """Evaluate frames one by one; arguments as `Predictor.predict`, with their full shapes."""
        nframes, natoms = atype.shape
        prediction = Prediction.zeros(nframes, natoms)
        for frame in range(nframes):
            cell = None if box is None or not box[frame].any() else box[frame]
            with naming_frame(frame):
                ghosted = with_ghosts(coord[frame], cell, atype[frame], self.rcut)
            owner = ghosted.owner
            nloc = len(ghosted.neighbor)
            if not nloc:
                continue
            real = owner[:nloc]
            local = np.empty(natoms, dtype=np.int64)  # number of each atom among the real ones
            local[real] = np.arange(nloc)
            output = self.forward_lower(
                self._on_device(ghosted.coord),
                self._on_device(atype[frame, owner].astype(np.int64)),
                self._on_device(ghosted.neighbor),
                self._on_device(local[owner]),
                fparam=None if fparam is None else self._on_device(fparam[frame]),
                aparam=None if aparam is None else self._on_device(aparam[frame, real]),
            )
            try:
                values = {
                    name: value.to("cpu", torch.float64).numpy() for name, value in output.items()
                }
                prediction.energy[frame] = values["energy"].item()
                prediction.atom_energy[frame, real] = values["atom_energy"][:, 0]
                prediction.virial[frame] = values["virial"]
                # Forces on images act on their atoms.
                for axis in range(3):
                    prediction.force[frame, :, axis] = np.bincount(
                        owner, weights=values["extended_force"][:, axis], minlength=natoms
                    )
            except _PROGRAM_ERRORS as error:
                raise self._failed(error) from error
        return prediction

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def forward_lower(
        self,
        coord: Tensor,
        atype: Tensor,
        neighbor: Tensor,
        mapping: Tensor,
        fparam: Tensor | None = None,
        aparam: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Call the program for one system, as LAMMPS does.

        Parameters
        ----------
        coord
            Positions of the real atoms, then of their images `(nall, 3)` [Å], float64.
        atype
            Their types `(nall,)`, int64.
        neighbor
            All atoms within the cut-off of each real atom `(nloc, nnei)`, −1 in empty slots; it may
            list more.
        mapping
            Real atom of each `(nall,)`, int64.
        fparam
            Frame parameters, then charge and spin `(Parameters.of_frame,)`, if the model reads some
            and has no default.
        aparam
            Atomic parameters of the real atoms `(nloc, numb_aparam)`, if the model reads some.

        Raises
        ------
        CheckpointError
            When the program fails.
        """
        # By name, and only if present: other programs may not have these arguments.
        parameters: dict[str, Tensor] = {}
        if fparam is not None:
            number = self.parameters.fparam
            columns = {"fparam": fparam[None, :number], "charge_spin": fparam[None, number:]}
            parameters |= {name: values for name, values in columns.items() if values.numel()}
        if aparam is not None:
            parameters["aparam"] = aparam[None]
        try:
            with torch.enable_grad():  # a program may differentiate
                output = self._program.forward_lower(
                    coord[None], atype[None], neighbor[None], mapping[None], **parameters
                )
            return {name: value[0].detach() for name, value in output.items()}
        except torch.OutOfMemoryError:
            raise
        except _PROGRAM_ERRORS as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return CheckpointError(f"{self._path} does not compute like a potential: {reason}")


def _parameters_of(program: torch.jit.ScriptModule) -> Parameters:
    """Return the parameters that a program reads."""
    return Parameters(
        fparam=_width(program, "get_dim_fparam"),
        aparam=_width(program, "get_dim_aparam"),
        default_fparam=_default(program, "default_fparam"),
        charge_spin=_width(program, "get_dim_chg_spin"),
        default_charge_spin=_default(program, "default_chg_spin"),
    )


def _default(program: torch.jit.ScriptModule, name: str) -> tuple[float, ...] | None:
    names = (f"has_{name}", f"get_{name}")
    if not all(hasattr(program, one) for one in names) or not getattr(program, names[0])():
        return None
    values = getattr(program, names[1])()
    return tuple(torch.as_tensor(values).double().cpu().flatten().tolist())


def _width(program: torch.jit.ScriptModule, method: str) -> int:
    return int(getattr(program, method)()) if hasattr(program, method) else 0
