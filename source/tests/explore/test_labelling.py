"""Labelling processes that hang are stopped, and files of labels are read with care."""

import os
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import write

from deepmd_muon.explore import labelling
from deepmd_muon.explore.calculator import CalculatorChoice, Job, Structure
from deepmd_muon.explore.labelling import answers_of, label_all, read_xyz
from deepmd_muon.explore.settings import ExploreError, LabelSettings

EMT = "ase.calculators.emt:EMT"


def alive(number):
    """Return whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_structure_that_hangs_is_given_up_and_its_programs_end(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    note = tmp_path / "note"
    # An hour passes as soon as the structure hangs.
    monkeypatch.setattr(labelling, "monotonic", lambda: 3601.0 * note.exists())
    choice = CalculatorChoice("labellers:Hanging", {"note": str(note)})
    sizes = {4: 1, 7: 2, 9: 1}
    jobs = {
        k: Job(choice, Structure(("Cu",) * size, np.arange(3.0 * size).reshape(size, 3), None))
        for k, size in sizes.items()
    }
    answers = dict(answers_of(jobs, workers=1, time_limit=3600.0))
    assert answers[7] == "no label after 3600 s; its process was stopped"
    assert answers[4]["forces"].shape == answers[9]["forces"].shape == (1, 3)
    assert not alive(int(note.read_text()))


def test_if_too_many_hang_the_others_are_not_tried(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    note = tmp_path / "note"
    monkeypatch.setattr(labelling, "monotonic", lambda: 3601.0 * note.exists())
    settings = LabelSettings(
        calculator="labellers:Hanging",
        arguments={"note": str(note)},
        time_limit=3600.0,
        most_failed=0.4,
    )
    images = [molecule("O2"), bulk("Cu")]
    with pytest.raises(ExploreError, match=r"failed for 1 of 2 .*no label after 3600 s"):
        label_all(images, settings, tmp_path / "labels")
    assert not (tmp_path / "labels").exists()


def labelled(image, energy=1.0, **arrays):
    atoms = image.copy()
    results = {"energy": energy, "forces": np.zeros((len(atoms), 3)), **arrays}
    atoms.calc = SinglePointCalculator(
        atoms, **{name: value for name, value in results.items() if value is not None}
    )
    return atoms


def two_frames(image):
    return [labelled(image)] * 2


def another_element(image):
    other = image.copy()
    other.symbols[:] = "Ag"
    return labelled(other)


def another_place(image):
    other = image.copy()
    other.positions += 0.1
    return labelled(other)


DAMAGES = {
    "two frames": two_frames,
    "another element": another_element,
    "another place": another_place,
    "no labels": lambda image: image,
    "no forces": lambda image: labelled(image, forces=None),
    "no energy": lambda image: labelled(image, energy=None),
    "energy of NaN": lambda image: labelled(image, energy=np.nan),
    "forces of NaN": lambda image: labelled(image, forces=np.full((4, 3), np.nan)),
    "a word as energy": lambda image: labelled(image, energy="low"),
    "two energies": lambda image: labelled(image, energy=np.ones(2)),
    "text": "no structure\n",
    "nothing": "",
    "a count beyond the end": "99999999999\n\nCu 0 0 0\n",
    "a count with a sign": "+99999999999\n\nCu 0 0 0\n",
    "a count after vectors": "1\n\nCu 0 0 0\nVEC1 1 0 0\n99999999999\n\nCu 0 0 0\n",
    "a FIFO": None,
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_damaged_label_is_named(tmp_path, name):
    image = bulk("Cu", cubic=True)
    path = tmp_path / "0000.xyz"
    damage = DAMAGES[name]
    if damage is None:
        os.mkfifo(path)
    elif isinstance(damage, str):
        path.write_text(damage)
    else:
        write(path, damage(image), format="extxyz")
    with pytest.raises(ExploreError, match=r"0000\.xyz.*remove the file"):
        label_all([image], LabelSettings(calculator=EMT), tmp_path)
    if not callable(damage):
        with pytest.raises(ExploreError, match=r"0000\.xyz.*remove the folder"):
            read_xyz(path)


def test_labels_that_fit_are_taken(tmp_path):
    image = bulk("Cu", cubic=True)
    write(tmp_path / "0000.xyz", labelled(image, energy=-3.0), format="extxyz")
    result = label_all([image], LabelSettings(calculator=EMT), tmp_path)
    assert result.done[0].get_potential_energy() == -3.0
