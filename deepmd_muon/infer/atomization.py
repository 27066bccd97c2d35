"""Errors of atomization energies: frames against the isolated atoms of the same data or of others."""

from __future__ import annotations

import numpy as np

from deepmd_muon.data import Frames
from deepmd_muon.data.isolated_atoms import are_isolated
from deepmd_muon.infer.metrics import Errors, ErrorSum
from deepmd_muon.infer.prediction import Prediction


class AtomizationErrors:
    """Collects the errors of energies until those of all isolated atoms are known.

    Parameters
    ----------
    ntypes
        Types of the model.
    rcut
        Its cut-off radius [Å].
    """

    def __init__(self, ntypes: int, rcut: float) -> None:
        self._ntypes = ntypes
        self._rcut = rcut
        self._of_atoms: dict[int, list[float]] = {}  # errors [eV] by type
        self._counts: list[np.ndarray] = []  # atoms of each type, (nframes, ntypes)
        self._errors: list[np.ndarray] = []  # of energies, (nframes,) [eV]

    def of_other_frames(self) -> AtomizationErrors:
        """Return a collector for other data, which knows the isolated atoms of these."""
        other = AtomizationErrors(self._ntypes, self._rcut)
        other._of_atoms = {kind: [*errors] for kind, errors in self._of_atoms.items()}
        return other

    def add(self, reference: Frames, prediction: Prediction) -> None:
        """Take the energies of some frames."""
        if reference.energy is None:
            return
        errors = prediction.energy - reference.energy
        isolated = are_isolated(reference, self._rcut)
        for types, error in zip(reference.atype[isolated], errors[isolated], strict=True):
            self._of_atoms.setdefault(int(types.max()), []).append(float(error))
        self._counts.append(reference.type_counts(self._ntypes)[~isolated])
        self._errors.append(errors[~isolated])

    def errors(self) -> Errors:
        """Return the errors per atom of frames whose elements all have an isolated atom."""
        of_atoms = np.full(self._ntypes, np.nan)
        for kind, errors in self._of_atoms.items():
            of_atoms[kind] = np.mean(errors)
        if not self._of_atoms or not self._counts:
            return {}
        counts = np.concatenate(self._counts)
        of_frames = np.concatenate(self._errors)
        is_known = ~(counts[:, np.isnan(of_atoms)] > 0).any(axis=1)
        if not is_known.any():
            return {}
        counts = counts[is_known]
        difference = of_frames[is_known] - counts @ np.nan_to_num(of_atoms)
        return {"atomization_per_atom": ErrorSum.of(difference / counts.sum(axis=1))}
