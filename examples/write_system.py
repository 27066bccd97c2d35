"""Writes labelled frames as DeePMD systems, npy folders and HDF5 groups alike, and splits trajectories by time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np


@dataclass(frozen=True)
class LabelledSystem:
    """Frames of one composition with their labels.

    Attributes
    ----------
    atype : np.ndarray
        Index into `type_map` of every atom, shape ``(natoms,)``.
    type_map : tuple of str
        Chemical symbols.
    coord : np.ndarray
        Positions [Å], shape ``(nframes, natoms, 3)``.
    box : np.ndarray or None
        Cell vectors as rows [Å], shape ``(nframes, 3, 3)``; None for an open system.
    energy : np.ndarray
        Total energies [eV], shape ``(nframes,)``.
    force : np.ndarray
        Forces [eV/Å], shape ``(nframes, natoms, 3)``.
    virial : np.ndarray or None
        Virials −dE/dε [eV], shape ``(nframes, 3, 3)``; None for an open system.
    """

    atype: np.ndarray
    type_map: tuple[str, ...]
    coord: np.ndarray
    box: np.ndarray | None
    energy: np.ndarray
    force: np.ndarray
    virial: np.ndarray | None

    def frames(self, chosen: slice) -> LabelledSystem:
        """Return the chosen frames as a system of their own."""
        return LabelledSystem(
            atype=self.atype,
            type_map=self.type_map,
            coord=self.coord[chosen],
            box=None if self.box is None else self.box[chosen],
            energy=self.energy[chosen],
            force=self.force[chosen],
            virial=None if self.virial is None else self.virial[chosen],
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of ``set.000`` in DeePMD's flat shapes.

        Coordinates and forces are float32, as everything else would double the file for digits that no model
        resolves. The caller rounds the coordinates *before* computing labels, so that this costs nothing.
        """
        nframes = len(self.energy)
        arrays = {
            "coord": self.coord.reshape(nframes, -1).astype(np.float32),
            "energy": self.energy.reshape(nframes).astype(np.float64),
            "force": self.force.reshape(nframes, -1).astype(np.float32),
        }
        if self.box is not None:
            arrays["box"] = self.box.reshape(nframes, 9).astype(np.float64)
        if self.virial is not None:
            arrays["virial"] = self.virial.reshape(nframes, 9).astype(np.float64)
        return arrays


def write_npy(folder: Path, system: LabelledSystem) -> None:
    """Write a system as a DeePMD npy folder (``type.raw``, ``type_map.raw``, ``set.000/*.npy``)."""
    numbers = folder / "set.000"
    numbers.mkdir(parents=True, exist_ok=True)
    (folder / "type.raw").write_text("".join(f"{t}\n" for t in system.atype))
    (folder / "type_map.raw").write_text("".join(f"{symbol}\n" for symbol in system.type_map))
    if system.box is None:
        (folder / "nopbc").touch()
    for name, array in system.arrays().items():
        np.save(numbers / f"{name}.npy", array)


def write_hdf5(path: Path, systems: dict[str, LabelledSystem]) -> None:
    """Write several systems into one HDF5 file, one group each, with the names of the npy folders inside.

    Parameters
    ----------
    path
        The file; an existing one is replaced.
    systems
        Group name, such as ``train/300K``, to system.
    """
    with h5py.File(path, "w") as file:
        for name, system in systems.items():
            group = file.create_group(name)
            group["type.raw"] = np.asarray(system.atype, dtype=np.int64)
            group["type_map.raw"] = np.array([symbol.encode() for symbol in system.type_map])
            if system.box is None:
                # deepmd-kit asks only whether the name exists
                group["nopbc"] = True
            for key, array in system.arrays().items():
                group[f"set.000/{key}.npy"] = array


def write_all(out: Path, hdf5: Path, systems: dict[str, LabelledSystem]) -> None:
    """Write the same systems as npy folders below `out` and as groups of the file `hdf5`."""
    for name, system in systems.items():
        write_npy(out / name, system)
    write_hdf5(hdf5, systems)


def time_blocks(nframes: int, train: float, valid: float) -> tuple[slice, slice]:
    """Cut a trajectory into a training block at its start and a validation block at its end.

    Neighbouring frames of a trajectory are near copies of each other; the frames between the blocks belong to
    neither, so that no validation frame has such a neighbour in training.

    Parameters
    ----------
    nframes
        Length of the trajectory.
    train, valid
        Fractions of it; their sum must stay below 1.

    Returns
    -------
    tuple of slice
        Training and validation frames.

    Raises
    ------
    ValueError
        When a block would be empty or no gap would be left.
    """
    ntrain, nvalid = round(train * nframes), round(valid * nframes)
    if min(ntrain, nvalid) < 1 or ntrain + nvalid >= nframes:
        raise ValueError(
            f"{nframes} frames cut into {ntrain} for training and {nvalid} for validation leave an empty block "
            "or no gap; take more frames or smaller fractions"
        )
    return slice(0, ntrain), slice(nframes - nvalid, nframes)


def nearest_rms_distance(frames: LabelledSystem, others: LabelledSystem) -> np.ndarray:
    """Return how far each frame is from its nearest one among `others`.

    The distance of two frames is the root mean square over atoms of the displacement [Å], nearest periodic
    image of an orthorhombic cell, common translation removed, atoms compared by their index: frames of one
    trajectory keep the identity of their atoms.

    Returns
    -------
    np.ndarray
        Distances [Å], shape ``(len(frames.energy),)``.
    """
    nearest = np.empty(len(frames.energy))
    for k, coord in enumerate(frames.coord):
        shift = others.coord - coord
        shift = shift - shift.mean(axis=1, keepdims=True)
        if others.box is not None:
            lengths = np.diagonal(others.box, axis1=1, axis2=2)[:, None, :]
            shift = shift - lengths * np.round(shift / lengths)
        nearest[k] = np.sqrt((shift**2).sum(axis=2).mean(axis=1)).min()
    return nearest
