"""Points of the parity picture, against numbers by hand."""

import numpy as np

from deepmd_muon.data import Frames
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show.parity import ParityPoints


def add(points, types, energies, predicted, series):
    """Add frames of the same atoms without a cell."""
    nframes = len(energies)
    natoms = len(types)
    frames = Frames(
        atype=np.tile(np.array(types, dtype=np.int32), (nframes, 1)),
        coord=np.zeros((nframes, natoms, 3)),
        box=None,
        energy=np.array(energies),
    )
    prediction = Prediction.zeros(nframes, natoms)
    prediction.energy[:] = predicted
    points.add(frames, prediction, series)


def test_free_atoms_of_one_series_give_atomization_energies_of_all():
    points = ParityPoints(["O", "H", "C"])
    add(points, [0], [-100.0], [-99.0], "training")
    add(points, [1, 1, 0], [-130.0], [-131.0], "training")
    assert "Atomization energy per atom" not in [panel.title for panel in points.panels()]
    add(points, [1], [-10.0, -10.0], [-11.0, -12.0], "training")
    add(points, [0, 1], [-115.0, -114.0], [-116.0, -114.0], "validation")
    add(points, [2, 1], [-70.0], [-70.0], "validation")  # no free carbon
    panel = next(panel for panel in points.panels() if panel.title.startswith("Atomization"))
    # Predicted free atoms: O -99, H -11.5.
    np.testing.assert_allclose(panel.points["training"], [[-10 / 3], [-9 / 3]])
    np.testing.assert_allclose(
        panel.points["validation"], [[-2.5, -2.0], [(-116 + 110.5) / 2, (-114 + 110.5) / 2]]
    )
    alone = ParityPoints(["O", "H", "C"])
    add(alone, [0, 1], [-115.0], [-116.0], "validation")
    alone.add_free_atoms(points)
    panel = next(panel for panel in alone.panels() if panel.title.startswith("Atomization"))
    np.testing.assert_allclose(panel.points["validation"], [[-2.5], [-2.75]])
