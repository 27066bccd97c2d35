"""Frames packed for a device: each frame's atoms sorted by type, without padding, in the order of the frames."""

import numpy as np
import pytest
from write_systems import make_arrays, write_npy

from deepmd_muon.data import open_systems
from deepmd_muon.train.batches.frame_store import read_chunk

# Types of each of four frames of five atoms, and of a fixed order.
TYPES = {
    "equal and sorted": [[0, 0, 1, 1, 2]] * 4,
    "equal": [[2, 0, 1, 0, 1]] * 4,
    "equal and padded": [[2, 0, -1, 0, -1]] * 4,
    "different": [[2, 0, 1, 0, 1], [0, 0, 1, 1, 2], [1, 1, 1, 1, 1], [2, -1, 0, -1, 1]],
}


@pytest.mark.parametrize(
    ("case", "mixed"),
    [*((case, True) for case in TYPES), ("equal", False), ("equal and sorted", False)],
)
def test_atoms_are_packed_in_order_of_their_types(tmp_path, case, mixed):
    types = np.array(TYPES[case])
    arrays = make_arrays(4, 5, labels=("energy", "force", "atom_ener"))
    if mixed:
        arrays["real_atom_types"] = types
    path = write_npy(tmp_path / "s", types[0] if not mixed else [0] * 5, [arrays], ("A", "B", "C"))
    systems = open_systems([path], ("A", "B", "C"))
    numbers = np.array([0, 2, 3])
    chunk = read_chunk(systems, np.array([0, 4]), numbers, 3)
    coord, force, atype, own = [], [], [], []
    for k in numbers:
        order = [atom for kind in range(3) for atom in range(5) if types[k, atom] == kind]
        atype += [types[k, atom] for atom in order]
        coord += [arrays["coord"][k].reshape(5, 3)[atom] for atom in order]
        force += [arrays["force"][k].reshape(5, 3)[atom] for atom in order]
        own += [arrays["atom_ener"][k][atom] for atom in order]
    np.testing.assert_array_equal(chunk.values["atype"], atype)
    np.testing.assert_array_equal(chunk.values["coord"], coord)
    np.testing.assert_array_equal(chunk.values["force"], force)
    np.testing.assert_array_equal(chunk.values["atom_ener"][:, 0], own)
    np.testing.assert_array_equal(chunk.values["energy"][:, 0], arrays["energy"][numbers])
    assert chunk.natoms.tolist() == [(types[k] >= 0).sum() for k in numbers]
    assert chunk.values["type_counts"].tolist() == [
        [(types[k] == kind).sum() for kind in range(3)] for k in numbers
    ]
