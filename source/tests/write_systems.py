"""Small systems on disk, written by the tests themselves."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

WIDTHS = {
    "energy": 1,
    "virial": 9,
    "force": 3,
    "force_mag": 3,
    "weight": 1,
    "atom_ener": 1,
    "atom_pref": 1,
    "atom_ener_coeff": 1,
}
OF_ATOMS = ("force", "force_mag", "atom_ener", "atom_pref", "atom_ener_coeff")


def make_arrays(nframes, natoms, seed=0, labels=("energy", "force"), scale=6.0):
    """Random frames in a nearly cubic cell, as arrays in DeePMD's shapes."""
    rng = np.random.default_rng(seed)
    box = np.eye(3) * scale + rng.uniform(-0.3, 0.3, (nframes, 3, 3))
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3)[:natoms] / 4
    coord = (grid + rng.uniform(-0.05, 0.05, (nframes, natoms, 3))) @ box
    arrays = {"coord": coord.reshape(nframes, 3 * natoms), "box": box.reshape(nframes, 9)}
    for label in labels:
        width = WIDTHS[label] * (natoms if label in OF_ATOMS else 1)
        values = rng.standard_normal((nframes, width))
        if label == "weight":
            values = np.abs(values)
        arrays[label] = values[:, 0] if label == "energy" else values
    return arrays


def write_npy(root: Path, types, sets, type_map=("A", "B"), nopbc=False):
    """Write a system as a folder; `sets` are dicts of arrays."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "type.raw").write_text("\n".join(str(t) for t in types) + "\n")
    if type_map is not None:
        (root / "type_map.raw").write_text("\n".join(type_map) + "\n")
    if nopbc:
        (root / "nopbc").touch()
    for k, arrays in enumerate(sets):
        folder = root / f"set.{k:03d}"
        folder.mkdir(exist_ok=True)
        for name, values in arrays.items():
            if not (nopbc and name == "box"):
                np.save(folder / f"{name}.npy", values)
    return str(root)


def write(kind: str, folder: Path, types, sets, **options):
    """Write a system into a folder as `npy` files or into an `hdf5` file; return what opens it."""
    if kind == "npy":
        return write_npy(folder / "sys", types, sets, **options)
    return write_hdf5(folder / "sys.hdf5", "deep/sys", types, sets, **options)


def write_hdf5(path: Path, group, types, sets, type_map=("A", "B"), nopbc=False, **options):
    """Write the same system as a group of an HDF5 file."""
    with h5py.File(path, "a") as file:
        root = file.require_group(group) if group else file
        root["type.raw"] = np.asarray(types)
        if type_map is not None:
            root["type_map.raw"] = np.array(list(type_map), dtype=h5py.string_dtype())
        if nopbc:
            root["nopbc"] = np.array(1)
        for k, arrays in enumerate(sets):
            for name, values in arrays.items():
                root.create_dataset(f"set.{k:03d}/{name}.npy", data=values, **options)
    return f"{path}#/{group}"
