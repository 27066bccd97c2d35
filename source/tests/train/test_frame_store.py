"""Frames packed for a device: each frame's atoms sorted by type, without padding, in the order of the frames."""

import numpy as np
import pytest
import torch
from write_systems import make_arrays, write_npy

from deepmd_muon.data import NeighborCache, open_systems
from deepmd_muon.train.batches.frame_chunks import Numbering, read_chunk
from deepmd_muon.train.batches.frame_store import FrameStore, Room
from deepmd_muon.train.batches.gathering import Gathering
from deepmd_muon.train.batches.shapes import Shape

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
    chunk = read_chunk(Numbering(systems), numbers, 3)
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


def store_of(paths, room=None):
    systems = open_systems(paths, ("A", "B"))
    cache = NeighborCache(4.0, [9, 9], by_type=True, ntypes=2)
    return FrameStore(systems, cache, torch.device("cpu"), room)


def rows_of_frames(store):
    """Return the first row and the number of atoms of each slot."""
    return list(
        zip(store.tensors["first_atom"].tolist(), store.tensors["natoms"].tolist(), strict=True)
    )


def test_slots_and_rows_of_the_example(tmp_path):
    """Two frames of three atoms in one system, and one of two atoms in the next."""
    paths = [
        write_npy(tmp_path / "a", [0, 0, 1], [make_arrays(2, 3)], ("A", "B")),
        write_npy(tmp_path / "b", [0, 1], [make_arrays(1, 2)], ("A", "B")),
    ]
    store = store_of(paths)
    assert store.numbering.first.tolist() == [0, 2, 3]
    system, row = store.numbering.locate(2)
    assert (system.natoms, row) == (2, 0)
    store.take([read_chunk(store.numbering, np.arange(3), 2)])
    assert store.missing == 3
    assert rows_of_frames(store) == [(0, 3), (3, 3), (6, 2), (0, 0)]

    passing = store_of(paths, Room(frames=2, atoms=5))
    taken = np.array([1, 2])
    passing.take([read_chunk(passing.numbering, taken, 2)])
    assert passing.slots_of(np.array([2, 1]), taken).tolist() == [1, 0]
    assert rows_of_frames(passing) == [(0, 3), (3, 2), (0, 0)]


def test_sorted_atoms_of_the_example(tmp_path):
    """The frames A A B and A B have one A less than their shape."""
    arrays = make_arrays(2, 3)
    arrays["real_atom_types"] = np.array([[0, 0, 1], [1, 0, -1]])
    store = store_of([write_npy(tmp_path / "s", [0] * 3, [arrays], ("A", "B"))])
    store.take([read_chunk(store.numbering, np.arange(2), 2)])
    shape = Shape(
        frames=2, natoms=3, counts=(4, 2), widths=(8, 8), inner=(), periodic=store.cells is not None
    )
    gathering = Gathering(store, shape)
    slots = torch.arange(2)
    structures = gathering.structures(slots, gathering.find_real(slots))
    nothing = [-1, -1, -1]
    assert structures.atype.tolist() == [[0, 0, 1], [0, 1, -1], nothing, nothing]
    assert structures.sorted_type.tolist() == [0, 0, 0, 0, 1, 1]
    assert structures.order.tolist() == [0, 1, 3, 9, 2, 4]
    assert structures.sorted_frame.tolist() == [0, 0, 1, 3, 0, 1]
