"""Where `sel` cuts lists, models predict what deepmd-kit's do."""

import itertools

import numpy as np
import pytest
import torch
from corners import DESCRIPTORS, corner_model
from deepmd_kit_program import MARKS, python
from test_neighbor_search import CELLS

from deepmd_muon.data.neighbors.lists import find_pairs
from deepmd_muon.infer import Predictor
from deepmd_muon.model.deepmd_kit import to_deepmd_kit

pytestmark = MARKS

# deepmd-kit's own models on structures of a file, one after the other.
PROGRAM = """
import sys
import numpy as np
from deepmd.infer import DeepPot
given, model, found = np.load(sys.argv[1]), DeepPot(sys.argv[2]), {}
for name in {key.partition(":")[2] for key in given}:
    box = given.get("box:" + name)
    found["energy:" + name], found["force:" + name], found["virial:" + name] = model.eval(
        given["coord:" + name], box, given["atype:" + name]
    )[:3]
np.savez(sys.argv[3], **found)
"""
DENSE = {
    **CELLS,
    "dense": np.diag([5.0, 5.0, 5.0]),
    "flat and skewed": np.array([[9.0, 0.0, 0.0], [3.0, 8.0, 0.0], [1.0, -1.0, 2.3]]),
}
# The first two cell vectors in the other order: the same lattice, of the other handedness.
SWAPPED = [1, 0, 2]


def structure(name, seed):
    """Return positions, some of them outside of the cell, and types: an atom in 5 to 8 Å³, so that lists are cut."""
    box, rng = DENSE[name], np.random.default_rng([seed, *name.encode()])
    cell = np.diag([5.0] * 3) if box is None else box
    natoms = max(2, round(abs(np.linalg.det(cell)) / (5.0 + seed % 4)))
    places = rng.random((1, 3))
    while len(places) < natoms:  # add the farthest of some draws, so that atoms keep apart
        drawn = rng.random((60, 3))
        apart = drawn[:, None] - places
        apart = np.linalg.norm((apart - np.round(apart) * (box is not None)) @ cell, axis=2).min(1)
        places = np.concatenate([places, drawn[apart.argmax()][None]])
    return (places + rng.integers(-2, 3, places.shape) * (box is not None)) @ cell, rng.integers(
        0, 3, natoms
    )


def cut_lists(coord, box, atype, model):
    """Return how many lists of neighbours are cut, and whether a cut parts two at the same distance.

    The images of an atom itself lie at equal distances on both sides; which of them is kept is chance.
    """
    pairs, limits = find_pairs(coord, box, atype, model.rcut), np.array(model.sel)
    cut, parted = 0, False
    for atom in range(len(coord)):
        mine = np.flatnonzero(pairs.i == atom)
        mine = mine[np.argsort(pairs.distance[mine], kind="stable")]
        distance, kinds = pairs.distance[mine], atype[pairs.j[mine]]
        near, of_kind = distance[: limits.sum()], kinds[: limits.sum()]
        lists = [(distance, limits.sum())]
        lists += [(near[of_kind == t], n) for t, n in enumerate(limits)] if model.by_type else []
        lists += [(near[near < rcut], n) for rcut, n in model.neighbors.inner]
        cut += sum(len(x) > n for x, n in lists)
        parted |= any(len(x) > n and x[n] - x[n - 1] < 1e-8 for x, n in lists)
    return cut, parted


@pytest.mark.parametrize("name", DESCRIPTORS)
def test_cut_lists_are_those_of_deepmd_kit(tmp_path, name):
    """Each lattice is given as a right-handed and as a left-handed cell; deepmd-kit 3.2.0 takes both."""
    model = corner_model(name, "float64")
    torch.save(
        {"model": to_deepmd_kit(model, {"lr": 1e-3, "step": 0}), "optimizer": {}},
        tmp_path / "model.ckpt.pt",
    )
    given, arrays, cut = {}, {}, 0
    for cell, box in DENSE.items():
        found = (structure(cell, seed) for seed in itertools.count())
        counted = ((coord, atype, cut_lists(coord, box, atype, model)) for coord, atype in found)
        clear = (each for each in counted if not each[2][1])
        for number, (coord, atype, (cuts, _)) in enumerate(itertools.islice(clear, 2)):
            cut += cuts
            for order in ["given"] if box is None else ["given", "swapped"]:
                label, placed = (
                    f"{cell} {number} {order}",
                    box if order == "given" else box[SWAPPED],
                )
                given[label] = coord, placed, atype
                arrays |= {f"coord:{label}": coord.reshape(1, -1), f"atype:{label}": atype}
                arrays |= {} if box is None else {f"box:{label}": placed.reshape(1, 9)}
    assert cut > 15
    np.savez(tmp_path / "given.npz", **arrays)
    python("-c", PROGRAM, "given.npz", "model.ckpt.pt", "found.npz", folder=tmp_path)
    theirs, predictor = np.load(tmp_path / "found.npz"), Predictor(model)
    for label, structure_of_label in given.items():
        ours, wanted = predictor.predict(*structure_of_label), theirs[f"force:{label}"]
        assert np.abs(ours.force - wanted).max() <= 1e-10 * max(1.0, np.abs(wanted).max()), label
        np.testing.assert_allclose(ours.energy, theirs[f"energy:{label}"].ravel(), rtol=1e-12)
        virial = theirs[f"virial:{label}"]
        assert np.abs(ours.virial - virial).max() <= 1e-10 * max(1.0, np.abs(virial).max()), label
