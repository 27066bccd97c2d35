"""Errors in a report, against numbers that follow from the labels: the potential predicts zeros."""

from types import SimpleNamespace

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from deepmd_muon.data import Parameters, open_systems
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.show.report.errors import compare
from deepmd_muon.show.report.page import Report, page_of


@pytest.fixture
def data(tmp_path):
    """Six frames of two kinds: HO with forces of growing length on H, and one O."""
    path = tmp_path / "frames.xyz"
    frames = []
    for k in range(6):
        symbols = "HO" if k % 2 == 0 else "O"
        atoms = Atoms(symbols, positions=[[0, 0, 1.0], [0, 0, 0]][: len(symbols)])
        forces = np.zeros((len(symbols), 3))
        if symbols == "HO":
            forces[0] = [0, 0.3 * (k + 1), 0.4 * (k + 1)]  # of length 0.5 (k + 1)
        atoms.calc = SinglePointCalculator(atoms, energy=2.0 * len(symbols), forces=forces)
        atoms.info["config_type"] = "IsolatedAtom" if symbols == "O" else "bond & <angle>"
        frames.append(atoms)
    write(path, frames, format="extxyz")
    predictor = SimpleNamespace(
        parameters=Parameters(),
        model=None,
        type_map=("O", "H"),
        evaluate=lambda frames: Prediction.zeros(frames.nframes, frames.natoms),
    )
    return compare(predictor, open_systems(str(path), ("O", "H")), 100, "validation")


def test_errors_of_kinds_elements_and_systems(data):
    assert data.nframes == 6
    kinds = data.by_config_type()
    assert kinds["IsolatedAtom"]["force"].rmse == 0.0
    lengths = 0.5 * np.array([1, 3, 5])
    of_molecules = np.sqrt((lengths**2).sum() / 18)  # three frames of two atoms
    assert kinds["bond & <angle>"]["force"].rmse == pytest.approx(of_molecules)
    assert data.by_element["H"].rmse == pytest.approx(np.sqrt((lengths**2).sum() / 9))
    assert data.by_element["O"].rmse == 0.0
    assert [len(data.by_system), data.total["energy_per_atom"].mae] == [2, 2.0]


def test_worst_frames_are_named_by_file_number_and_atom(data):
    worst = data.worst(2)
    assert [(frame.origin.number, frame.atom, frame.element) for frame in worst] == [
        (4, 0, "H"),
        (2, 0, "H"),
    ]
    assert [frame.force for frame in worst] == pytest.approx([2.5, 1.5])
    assert worst[0].origin.file.endswith("frames.xyz")


def test_a_page_shows_names_as_they_are(data):
    page = page_of(
        Report(
            title="a & <b>",
            facts={"model": "<script>"},
            data={"validation": data},
            panels=[],
            check=None,
            commands={"repeat": "dp --pt report 'my input.json'"},
        )
    )
    assert "a &amp; &lt;b&gt;" in page
    assert "bond &amp; &lt;angle&gt;" in page
    assert "<script>" not in page
    assert "<td class=text>O</td><td>0</td>" in page
