"""Files that ASE reads, patterns of paths, conversion between all forms, and signs of wrong units."""

import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from write_systems import make_arrays, write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.data import Frames, SystemFormatError, SystemNotFoundError, open_systems
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.writing import _names
from deepmd_muon.label_keys import LabelKeys, Reading

EXAMPLES = Path(__file__).parents[3] / "examples"
ase = pytest.importorskip("ase")
from ase.build import bulk, molecule  # noqa: E402 (after the skip)
from ase.calculators.emt import EMT  # noqa: E402
from ase.calculators.singlepoint import SinglePointCalculator  # noqa: E402
from ase.io import write  # noqa: E402


@pytest.fixture
def frames():
    """Two copper crystals, a molecule without cell, and a crystal without labels but energy."""
    crystals = [bulk("Cu", "fcc", a=length, cubic=True) * (2, 1, 1) for length in (3.5, 3.6, 3.7)]
    for k, atoms in enumerate(crystals):
        atoms.rattle(0.1, seed=k)
        atoms.calc = EMT()
        atoms.get_stress()
    water = molecule("H2O")
    water.calc = EMT()
    water.get_forces()
    crystals[2].calc = SinglePointCalculator(crystals[2], energy=crystals[2].get_potential_energy())
    return [crystals[0], water, crystals[1], crystals[2]]


def test_extended_xyz_is_read_with_units_and_signs(frames, tmp_path):
    write(tmp_path / "train.xyz", frames)
    copper, water = open_systems(str(tmp_path / "train.xyz"), ["H", "O", "Cu"])
    assert (copper.nframes, copper.natoms, copper.pbc) == (3, 8, True)
    assert (water.nframes, water.natoms, water.pbc) == (1, 3, False)
    assert water.labels == {"energy", "force"}
    read = copper.frames([0, 1, 2])
    assert (read.atype == 2).all()
    assert water.frames([0]).atype.tolist() == [[1, 0, 0]]
    for k, atoms in enumerate((frames[0], frames[2])):
        virial = -atoms.get_volume() * atoms.get_stress(voigt=False)
        assert read.energy[k] == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
        np.testing.assert_allclose(read.coord[k], atoms.positions, atol=1e-7)
        np.testing.assert_allclose(read.box[k], atoms.cell, atol=1e-9)
        np.testing.assert_allclose(read.force[k], atoms.get_forces(), atol=1e-7)
        np.testing.assert_allclose(read.virial[k].reshape(3, 3), virial, atol=1e-6)
    assert read.present("energy").all()
    assert read.present("force").tolist() == [True, True, False]


def test_labels_of_other_names_and_a_virial_are_taken(frames, tmp_path):
    atoms = frames[0].copy()
    virial = np.arange(9.0)
    atoms.info.update(REF_energy=-3.5, REF_virial=virial.reshape(3, 3))
    atoms.arrays["REF_forces"] = np.ones((8, 3))
    write(tmp_path / "train.extxyz", [atoms])
    keys = Reading(LabelKeys("REF_energy", "REF_forces", "REF_virial"))
    (system,) = open_systems([str(tmp_path / "train.extxyz")], None, keys)
    read = system.frames([0])
    assert read.energy.tolist() == [-3.5]
    assert (read.force == 1).all()
    assert read.virial.tolist() == [virial.tolist()]
    (recognized,) = open_systems([str(tmp_path / "train.extxyz")])
    for name in ("energy", "force", "virial"):
        np.testing.assert_array_equal(getattr(recognized.frames([0]), name), getattr(read, name))
    message = r"no frame has .DFT_energy.*REF_energy, REF_forces, REF_virial"
    with pytest.raises(SystemFormatError, match=message):
        open_systems([str(tmp_path / "train.extxyz")], None, Reading(LabelKeys("DFT_energy")))
    # ASE takes the names that it knows away from where they were.
    path = str(tmp_path / "known.xyz")
    write(path, frames[:1])
    keys = Reading(LabelKeys("energy", "forces", stress="stress"))
    known, plain = open_systems(path, None, keys)[0], open_systems(path)[0]
    for name in ("energy", "force", "virial"):
        found, expected = (getattr(system.frames([0]), name) for system in (known, plain))
        np.testing.assert_array_equal(found, expected)


def test_what_ase_cannot_read_and_wrong_shapes_are_named(frames, tmp_path):
    atoms = frames[0].copy()
    atoms.info["e"] = np.array([1.0, 2.0])
    write(tmp_path / "two.xyz", [atoms])
    with pytest.raises(SystemFormatError, match="energy"):
        open_systems([str(tmp_path / "two.xyz")], None, Reading(LabelKeys(energy="e")))
    (tmp_path / "notes.txt").write_text("these are no atoms\n")
    with pytest.raises(SystemNotFoundError, match=r"notes\.txt"):
        open_systems([str(tmp_path / "notes.txt")])


def equal(ours, theirs):
    """Compare two systems frame by frame, sorted by energy: sets may come in another order."""
    a, b = (system.frames(np.arange(system.nframes)) for system in (ours, theirs))
    rows = [np.argsort(frames.energy) for frames in (a, b)]
    for field in fields(Frames):
        left, right = (getattr(frames, field.name) for frames in (a, b))
        assert (left is None) == (right is None), field.name
        if left is not None:
            np.testing.assert_allclose(left[rows[0]], right[rows[1]], 0, 2e-6, err_msg=field.name)


@pytest.mark.parametrize("form", ["folder", "all.hdf5", "all.xyz", "all.lmdb"])
def test_a_round_trip_keeps_every_label(frames, tmp_path, form, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write("train.xyz", frames)
    copper = str(EXAMPLES / "cu_emt" / "data" / "valid" / "cluster13")
    assert main(["convert-data", "train.xyz", copper, form, "-t", "Cu", "H", "O"]) == 0
    printed = capsys.readouterr().out
    assert "3 systems, 14 frames" in printed
    assert "Cu8, 3 frames of 8 atoms, periodic, labels energy, force, virial" in printed
    original = open_systems(["train.xyz", copper], ["Cu", "H", "O"])
    converted = open_systems(form, ["Cu", "H", "O"])
    key = lambda system: (system.natoms, system.pbc)  # noqa: E731
    for ours, theirs in zip(sorted(original, key=key), sorted(converted, key=key), strict=True):
        equal(ours, theirs)
    assert main(["convert-data", "train.xyz", form]) == 2
    assert "remove it" in capsys.readouterr().err


def test_patterns_find_systems_in_order():
    found = open_systems([str(EXAMPLES / "cu_emt/data/*/[ft]*")])
    assert ["/".join(Path(s.name).parts[-2:]) for s in found] == [
        *("train/fcc32", "train/triclinic8"),
        *("valid/fcc32", "valid/triclinic8"),
    ]
    assert len(open_systems([str(EXAMPLES / "**/300K")])) == 2
    with pytest.raises(SystemNotFoundError, match="pattern"):
        open_systems([str(EXAMPLES / "nothing*")])


def test_rglob_patterns_choose_folders_below_the_systems():
    def names(folders, *patterns):
        return ["/".join(Path(s.name).parts[-2:]) for s in open_systems(folders, patterns=patterns)]

    data = str(EXAMPLES / "cu_emt" / "data")
    both = [f"{part}/{name}" for part in ("train", "valid") for name in ("fcc32", "triclinic8")]
    assert names(data, "fcc*", "tri*8") == both
    # Two patterns that both fit give a system once, as in deepmd-kit, but in order.
    assert names([f"{data}/valid"], "fcc*", "*32") == ["valid/fcc32"]
    assert names(str(EXAMPLES / "cu_emt"), "train/fcc*") == ["train/fcc32"]
    for folder, pattern, word in (
        (data, "bcc*", "bcc"),
        (data, "set.*", "type.raw"),
        (data, "a**b", "rglob_patterns"),
    ):
        with pytest.raises(SystemNotFoundError, match=word):
            names(folder, pattern)
    with pytest.raises(SystemNotFoundError, match="folders"):
        names(str(EXAMPLES / "cu_emt" / "input.json"), "*")


@pytest.mark.parametrize(
    ("scale", "force", "energy", "word"),
    [
        (0.1, 1.0, 1.0, "nm"),
        (30.0, 1.0, 1.0, "Å apart"),
        (1.0, 1e4, 1.0, "force"),
        (1.0, 1.0, 1e8, "energy"),
        (1.0, 1.0, 1.0, None),
    ],
)
def test_wrong_units_are_suspected(frames, tmp_path, scale, force, energy, word):
    atoms = frames[0]
    other = atoms.copy()
    other.set_cell(atoms.cell * scale, scale_atoms=True)
    results = {
        "energy": atoms.get_potential_energy() + energy * len(atoms),
        "forces": atoms.get_forces() * force,
    }
    other.calc = SinglePointCalculator(other, **results)
    write(tmp_path / "units.xyz", [other])
    (system,) = open_systems(str(tmp_path / "units.xyz"))
    found = suspicions([system])
    assert len(found) == (word is not None)
    if word:
        assert word in found[0]


@pytest.mark.parametrize("form", ["npy", "lmdb"])
@pytest.mark.parametrize("last", [0, 3, 5])
def test_a_killed_conversion_leaves_nothing_that_is_taken_as_whole(tmp_path, form, last):
    source = write_npy(tmp_path / "a", [0, 1, 0, 1], [make_arrays(3, 4)])
    if form == "lmdb":
        pytest.importorskip("lmdb")
        pytest.importorskip("msgpack")
    place = tmp_path / "data" / (f"new.{form}" if form == "lmdb" else "new")
    place.parent.mkdir()
    child = os.fork()
    if not child:
        # The process ends when it has opened as many files below the new place, or puts it in its place.
        opened = []

        def watch(event, given):
            if event in ("open", "os.rename") and str(tmp_path / "data") in str(given[0]):
                opened.append(given[0])
                if len(opened) > last or event == "os.rename":
                    os._exit(9)

        sys.addaudithook(watch)
        main(["convert-data", source, source, str(place)])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not place.exists()
    with pytest.raises(SystemNotFoundError):
        open_systems(str(tmp_path / "data"))
    assert main(["convert-data", source, source, str(place)]) == 0
    assert [path.name for path in place.parent.glob("[!.]*")] == [place.name]


def test_a_name_with_an_at_sign_is_that_of_a_file(tmp_path):
    """ASE takes "300K.xyz" for numbers of frames of a file "Cu"."""
    for name, length in (("Cu", 3.5), ("Cu@300K.xyz", 3.7)):
        write(tmp_path / name, bulk("Cu", "fcc", a=length, cubic=True), format="extxyz")
    (system,) = open_systems(str(tmp_path / "Cu@300K.xyz"))
    assert system.frames([0]).box[0, 0, 0] == pytest.approx(3.7)


def test_names_that_are_no_elements_are_refused_in_extended_xyz(tmp_path, capfd):
    write_npy(tmp_path / "data", [0, 1, 1], [make_arrays(2, 3)], type_map=("Cu", "X9"))
    assert main(["convert-data", str(tmp_path / "data"), str(tmp_path / "data.xyz")]) == 2
    assert "X9 is not an element" in capfd.readouterr().err
    assert not (tmp_path / "data.xyz").exists()


def test_a_cell_that_is_not_finite_is_refused(tmp_path):
    atoms = bulk("Cu", "fcc", a=3.6, cubic=True)
    write(tmp_path / "a.xyz", atoms)
    text = (tmp_path / "a.xyz").read_text()
    (tmp_path / "a.xyz").write_text(text.replace('Lattice="3.6', 'Lattice="nan'))
    with pytest.raises(SystemFormatError, match="not finite"):
        open_systems(str(tmp_path / "a.xyz"))


def test_names_of_many_systems_of_one_composition():
    """The time of naming grew with the square of the number of systems: 40,000 took minutes."""
    water_types = lambda _: np.array([[0, 1, 1]])  # noqa: E731
    water = SimpleNamespace(mixed=False, type_map=("O", "H"), types=water_types)
    mixed = SimpleNamespace(mixed=True)
    found = _names([water, mixed, water, water, mixed])
    assert found == ["O1H2", "mixed", "O1H2.1", "O1H2.2", "mixed.1"]
    begun = time.process_time()
    assert _names([mixed] * 40_000)[-1] == "mixed.39999"
    assert time.process_time() - begun < 5.0
