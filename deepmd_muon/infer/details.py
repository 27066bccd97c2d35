"""The detail files of `dp test -d PREFIX`, in deepmd-kit's formats.

They hold reference and prediction in the same row.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from deepmd_muon.data import Frames
from deepmd_muon.files import append_to, fresh_file, make_folder_of
from deepmd_muon.infer.metrics import volumes
from deepmd_muon.infer.prediction import Prediction

_KINDS = ("e", "e_peratom", "f", "fm", "v", "v_peratom", "s")
_PAIRS = tuple(f"{row}{column}" for row in "xyz" for column in "xyz")


class DetailFiles:
    """Write the files of `PREFIX` for energies, forces, virials and stresses.

    They are `.e.out`, `.e_peratom.out`, `.f.out`, `.fm.out`, `.v.out`, `.v_peratom.out` and
    `.s.out`. Columns are the data first, then the prediction; rows are frames (atoms in `.f.out`,
    magnetic ones in `.fm.out`, padding left out). Each system begins with a `#` line that names it
    and the columns. A file is written only if some system has its label.

    Parameters
    ----------
    prefix
        Prefix of the file names; files of an earlier test are overwritten.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._titles: dict[str, str] = {}  # of the last rows of each file that has been begun
        make_folder_of(Path(prefix))

    @staticmethod
    def paths(prefix: str) -> list[Path]:
        """Return all files that a prefix may have."""
        return [Path(f"{prefix}.{kind}.out") for kind in _KINDS]

    def add(self, system: str, reference: Frames, prediction: Prediction) -> None:
        """Append some frames of a system."""
        real = reference.atype >= 0
        natoms = real.sum(axis=1)[:, None]
        if reference.energy is not None:
            energies = np.stack([reference.energy, prediction.energy], axis=1)
            self._write("e", system, ("e",), energies)
            self._write("e_peratom", system, ("e",), energies / natoms)
        if reference.force is not None:
            forces = np.concatenate([reference.force[real], prediction.force[real]], axis=1)
            self._write("f", system, ("fx", "fy", "fz"), forces)
        if reference.force_mag is not None and prediction.force_mag is not None:
            magnetic = prediction.mask_mag
            pair = [reference.force_mag[magnetic], prediction.force_mag[magnetic]]
            self._write("fm", system, ("fmx", "fmy", "fmz"), np.concatenate(pair, axis=1))
        if reference.virial is not None and reference.box is not None:
            virials = np.concatenate([reference.virial, prediction.virial], axis=1)
            columns = tuple(f"v{pair}" for pair in _PAIRS)
            self._write("v", system, columns, virials)
            self._write("v_peratom", system, columns, virials / natoms)
            stresses = -virials / volumes(reference.box)[:, None]
            self._write("s", f"{system} (eV/Å³)", tuple(f"s{pair}" for pair in _PAIRS), stresses)

    def _write(self, kind: str, title: str, columns: tuple[str, ...], rows: np.ndarray) -> None:
        names = [f"{source}_{column}" for source in ("data", "pred") for column in columns]
        path = self.paths(self._prefix)[_KINDS.index(kind)]
        # A title holds a path, which may not be UTF-8.
        heading = f"{title}: {' '.join(names)}".encode(errors="backslashreplace").decode()
        header = "" if self._titles.get(kind) == title else heading
        begun = kind in self._titles
        self._titles[kind] = title
        with append_to(path) if begun else fresh_file(path) as file:
            np.savetxt(file, rows, header=header, encoding="utf-8")
