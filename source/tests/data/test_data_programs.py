"""Files of other programs: recognized by their first lines, or read in a named format of ASE or dpdata."""

import gzip
import sys

import numpy as np
import pytest
import vasp_files

from deepmd_muon.cli.main import main
from deepmd_muon.data import DataError, SystemFormatError, SystemNotFoundError, open_systems
from deepmd_muon.label_keys import Reading

ase_io = pytest.importorskip("ase.io")
open_with_compression = pytest.importorskip("ase.io.formats").open_with_compression
dpdata = pytest.importorskip("dpdata", minversion="1.1")
STEPS = [vasp_files.Step(-3.0, 5, 5e-5), vasp_files.Step(-3.1, 5, 5e-5)]


@pytest.fixture
def labelled():
    """Two frames of a molecule of three atoms and two elements, as dpdata holds them."""
    rng = np.random.default_rng(4)
    data = {
        "atom_names": ["H", "O"],
        "atom_numbs": [2, 1],
        "atom_types": np.array([1, 0, 0]),
        "orig": np.zeros(3),
        "cells": np.tile(9.0 * np.eye(3), (2, 1, 1)),
        "coords": rng.uniform(0.0, 9.0, (2, 3, 3)),
        "energies": np.array([-1.5, -2.5]),
        "forces": rng.normal(size=(2, 3, 3)),
        "virials": rng.normal(size=(2, 3, 3)),
    }
    return dpdata.LabeledSystem(data=data)


def test_comments_of_xyz_files_may_name_a_program(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text(
        '2\nProperties=species:S:1:pos:R:3 energy=-1.5 source="ABACUS v3.2"\nH 0 0 0\nH 0.8 0 0\n'
    )
    (system,) = open_systems(str(path))
    assert system.frames([0]).energy.tolist() == [-1.5]


@pytest.mark.parametrize(
    ("text", "name", "ending"),
    [
        ("outcar", "vasp-out", ""),
        ("vasprun", "vasp-xml", ""),
        ("outcar", "vasp-out", ".bz2"),
        ("vasprun", "vasp-xml", ".gz"),
        ("vasprun", "vasp-xml", ".xz"),
    ],
)
def test_files_of_vasp_may_have_any_name_and_be_compressed(tmp_path, text, name, ending):
    plain = tmp_path / "plain"
    plain.write_text(getattr(vasp_files, text)(STEPS))
    expected = ase_io.read(plain, format=name, index=":")
    path = tmp_path / "run" / f"run1{ending}"
    path.parent.mkdir()
    with open_with_compression(path, "wb") as file:
        file.write(plain.read_bytes())
    for place in (path, path.parent):
        (system,) = open_systems(str(place))
        frames = system.frames([0, 1])
        energies = [atoms.get_potential_energy() for atoms in expected]
        np.testing.assert_allclose(frames.energy, energies)
        np.testing.assert_allclose(frames.force, [atoms.get_forces() for atoms in expected])


@pytest.mark.parametrize("content", ["half", "selective"])
def test_the_structure_next_to_an_outcar_changes_nothing(tmp_path, content):
    """A killed run leaves half a CONTCAR; atoms that it fixes keep their forces."""
    (tmp_path / "OUTCAR").write_text(vasp_files.outcar(STEPS))
    lines = ["Cu", "1.0", "9 0 0", "0 9 0", "0 0 9", "Cu", "2", "Selective dynamics", "Direct"]
    lines += ["0 0 0 F F F", "0.27 0 0 F F F"]
    text = "\n".join(lines[:4] if content == "half" else lines)
    (tmp_path / "CONTCAR").write_text(text)
    (system,) = open_systems(str(tmp_path / "OUTCAR"))
    forces = system.frames([0, 1]).force
    np.testing.assert_allclose(forces[:, 1, 0], [step.force for step in STEPS])


def test_compressed_files_that_dpdata_would_read_are_refused(tmp_path, labelled):
    path = tmp_path / "output.data"
    labelled.to("n2p2", str(path))
    compressed = tmp_path / "output.data.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(SystemNotFoundError, match=r"n2p2.*decompress"):
        open_systems(str(compressed))


def test_dpdata_reads_what_ase_does_not(tmp_path, labelled):
    path = tmp_path / "renamed.txt"
    labelled.to("n2p2", str(path))
    expected = dpdata.LabeledSystem(str(path), fmt="n2p2").data
    for name in (None, "n2p2", "N2P2"):
        (system,) = open_systems(str(path), ["O", "H"], reading=Reading(format=name))
        frames = system.frames([0, 1])
        assert frames.atype.tolist() == [[0, 1, 1]] * 2
        np.testing.assert_array_equal(frames.coord, expected["coords"])
        np.testing.assert_array_equal(frames.box, expected["cells"])
        np.testing.assert_array_equal(frames.energy, expected["energies"])
        np.testing.assert_array_equal(frames.force, expected["forces"])


@pytest.mark.parametrize("name", ["deepmd/npy", "deepmd/npy/mixed", "deepmd/hdf5", "deepmd/lmdb"])
def test_spins_that_dpdata_wrote_are_converted(name, tmp_path, labelled):
    """dpdata names them `spins` and `force_mags`."""
    pytest.importorskip({"deepmd/hdf5": "h5py", "deepmd/lmdb": "lmdb"}.get(name, "dpdata"))
    pytest.importorskip("dpdata.plugins.deepmd").register_spin()
    rng = np.random.default_rng(5)
    expected = {key: rng.normal(size=(2, 3, 3)) for key in ("spins", "force_mags")}
    system = dpdata.LabeledSystem(data=labelled.data | expected)
    path = str(tmp_path / "from_dpdata")
    in_groups = name.endswith(("mixed", "lmdb"))
    (dpdata.MultiSystems(system) if in_groups else system).to(name, path)
    output = str(tmp_path / "data")
    assert main(["convert-data", path, output, "--format", name]) == 0
    (converted,) = open_systems(output)
    frames = converted.with_all_parameters().frames([0, 1])
    # The atoms may be sorted.
    order = np.argsort(np.abs(frames.coord[0, :, None] - system["coords"][0]).sum(2), axis=1)[:, 0]
    for values, key in ((frames.spin, "spins"), (frames.force_mag, "force_mags")):
        np.testing.assert_allclose(values, expected[key][:, order], rtol=1e-7)


ABACUS = {
    "INPUT": "INPUT_PARAMETERS\nsuffix ABACUS\nnspin 4\n",
    "STRU": """ATOMIC_SPECIES
Fe 55.845 Fe.upf
O 15.999 O.upf

LATTICE_CONSTANT
1.8897261246

LATTICE_VECTORS
0 4 0
4 0 0
0 0 -4

ATOMIC_POSITIONS
Direct

Fe
0.0
2
0.0 0.0 0.0 1 1 1
0.5 0.5 0.1 1 1 1

O
0.0
1
0.5 0.0 0.5 1 1 1
""",
    "OUT.ABACUS/running_scf.log": """ WELCOME TO ABACUS v3.9
 Total Magnetism (uB)
 ---------------------------------------------
    Fe  0.1  0.2  3.0
    Fe -0.3  0.4 -3.1
    O   0.0  0.01 0.02
 ---------------------------------------------
 Magnetic force (eV/uB)
 ---------------------------------------------
    Fe  0.5  0.6 -1.2
    Fe -0.7  0.8  1.3
    O   0.0  0.0  0.0
 ---------------------------------------------
 TOTAL-FORCE (eV/Angstrom)
 ---------------------------------------------
    Fe1  0.1  0.2  0.3
    Fe2 -0.1 -0.1 -0.1
    O1   0.0 -0.1 -0.2
 ---------------------------------------------
 !FINAL_ETOT_IS -10.5 eV
 final etot is -10.5 eV
""",
}


def test_spins_of_a_calculation_that_dpdata_reads_are_converted(tmp_path):
    for name, text in ABACUS.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = [str(tmp_path / "run"), str(tmp_path / "data"), "--format", "abacus/scf"]
    assert main(["convert-data", *words]) == 0
    (system,) = open_systems(str(tmp_path / "data"), ["O", "Fe"])
    frames = system.with_all_parameters().frames([0])
    assert frames.atype.tolist() == [[1, 1, 0]]
    assert frames.spin[0].tolist() == [[0.1, 0.2, 3.0], [-0.3, 0.4, -3.1], [0.0, 0.01, 0.02]]
    assert frames.force_mag[0].tolist() == [[0.5, 0.6, -1.2], [-0.7, 0.8, 1.3], [0.0] * 3]
    assert frames.energy.tolist() == [-10.5]
    assert frames.force[0, 0].tolist() == [0.1, 0.2, 0.3]


def test_dpdata_converts_units_that_ours_refuses(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text(
        "2\nenergy=-1.0 energy-unit=hartree Properties=species:S:1:pos:R:3:force:R:3 "
        'Lattice="9 0 0 0 9 0 0 0 9"\nCu 0 0 0 0.1 0 0\nCu 2.5 0 0 -0.1 0 0\n'
    )
    with pytest.raises(DataError, match="--format quip/gap/xyz"):
        open_systems(str(path))
    (system,) = open_systems(str(path), reading=Reading(format="quip/gap/xyz"))
    assert system.frames([0]).energy.tolist() == pytest.approx([-27.2113862], abs=1e-6)


def test_a_named_format_of_ase_overrides_the_name_of_a_file(tmp_path):
    path = tmp_path / "strange.traj"
    path.write_text("1\nenergy=-3.5 Properties=species:S:1:pos:R:3\nCu 0 0 0\n")
    with pytest.raises(SystemNotFoundError, match="--format"):
        open_systems(str(path))
    (system,) = open_systems(str(path), reading=Reading(format="extxyz"))
    assert system.frames([0]).energy.tolist() == [-3.5]


def test_an_unknown_format_names_similar_ones(tmp_path):
    path = tmp_path / "a.out"
    path.write_text("text\n")
    with pytest.raises(DataError, match="cp2k/output"):
        open_systems(str(path), reading=Reading(format="cp2k-output"))
    with pytest.raises(SystemNotFoundError, match=r"pwmat/movement.*formats"):
        open_systems(str(path), reading=Reading(format="pwmat/movement"))
    with pytest.raises(SystemFormatError, match="no frame"):
        open_systems(str(path), reading=Reading(format="cp2k/output"))
    with pytest.raises(SystemNotFoundError, match="does not exist"):
        open_systems(str(tmp_path / "other"), reading=Reading(format="cp2k/output"))


def test_without_dpdata_the_error_names_format_and_package(tmp_path, labelled, monkeypatch):
    path = tmp_path / "run.txt"
    labelled.to("n2p2", str(path))
    monkeypatch.setitem(sys.modules, "dpdata.format", None)
    with pytest.raises(DataError, match=r"n2p2.*pip install dpdata"):
        open_systems(str(path))


def test_a_dpdata_that_ignores_units_is_refused(tmp_path, labelled, monkeypatch):
    path = tmp_path / "run.txt"
    labelled.to("n2p2", str(path))
    monkeypatch.setattr(dpdata, "__version__", "1.0.1")
    with pytest.raises(DataError, match=r"1\.0\.1.*dpdata>=1\.1"):
        open_systems(str(path))


def test_a_folder_that_dpdata_reads_whole_says_its_format(tmp_path):
    (tmp_path / "OUT.ABACUS").mkdir()
    (tmp_path / "OUT.ABACUS" / "running_scf.log").write_text("   WELCOME TO ABACUS v3.2\n")
    with pytest.raises(SystemNotFoundError, match="--format abacus/scf"):
        open_systems(str(tmp_path))
