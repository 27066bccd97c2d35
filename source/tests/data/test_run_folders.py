"""Folders of calculations as they are: VASP's two outputs, CP2K's trajectories, several runs."""

import gzip
import logging

import numpy as np
import pytest
import vasp_files
from ase import Atoms, units
from ase.cell import Cell
from ase.io import read

from deepmd_muon.data import SystemFormatError, SystemNotFoundError, open_systems

STEPS = [vasp_files.Step(-3.0, 5, 5e-5), vasp_files.Step(-3.1, 5, 5e-5)]
INPUT = "&FORCE_EVAL\n &SUBSYS\n  &CELL\n   {}\n  &END CELL\n &END SUBSYS\n&END FORCE_EVAL\n"


def write_cp2k(folder, numbers, *, forces=True, project="water"):
    """Write steps of a trajectory as CP2K does; return positions [Å], energies [Ha], forces [Ha/Bohr]."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(3)
    shape = (len(numbers), 3, 3)
    positions = rng.uniform(0, 6, shape).round(8)
    atomic_forces = rng.normal(0, 0.02, shape).round(8)
    energies = rng.uniform(-17.3, -17.1, len(numbers)).round(8)
    for name, values in (("pos", positions), ("frc", atomic_forces)):
        if name == "frc" and not forces:
            continue
        with (folder / f"{project}-{name}-1.xyz").open("w") as file:
            for number, energy, rows in zip(numbers, energies, values, strict=True):
                file.write(
                    f"       3\n i = {number:8d}, time = {0.5 * number:12.3f}, E = {energy}\n"
                )
                for symbol, row in zip("OHH", rows, strict=True):
                    file.write(f"  {symbol} {row[0]:.8f} {row[1]:.8f} {row[2]:.8f}\n")
    return positions, energies, atomic_forces


@pytest.mark.parametrize(
    ("section", "cell"),
    [
        ("ABC 6.0 7.0 [angstrom] 8.0", [6, 7, 8, 90, 90, 90]),
        ("ABC 6 7 8 ! as published\n   alpha_beta_gamma 80 95 110", [6, 7, 8, 80, 95, 110]),
        ("A 6 0 0\n   B 0 7 0\n   C 0 0 8\n   PERIODIC XYZ", [6, 7, 8, 90, 90, 90]),
    ],
)
def test_trajectory_of_cp2k_has_forces_and_the_cell_of_its_input(tmp_path, section, cell):
    positions, energies, forces = write_cp2k(tmp_path, [0, 5, 10])
    (tmp_path / "md.inp").write_text(INPUT.format(section))
    for path in (tmp_path, tmp_path / "water-pos-1.xyz"):
        (system,) = open_systems(str(path), ["O", "H"])
        frames = system.frames([0, 1, 2])
        assert frames.atype.tolist() == [[0, 1, 1]] * 3
        np.testing.assert_array_equal(frames.coord, positions)
        np.testing.assert_allclose(frames.energy, energies * units.Hartree, rtol=1e-7)
        np.testing.assert_allclose(frames.force, forces * units.Hartree / units.Bohr, rtol=1e-7)
        expected = Cell.fromcellpar(cell)
        np.testing.assert_allclose(frames.box, [expected[:]] * 3, atol=1e-12)


def test_cells_that_vary_come_from_their_own_file(tmp_path):
    write_cp2k(tmp_path, [0, 1])
    (tmp_path / "md.inp").write_text("&MD\n ENSEMBLE NPT_I\n&END\n" + INPUT.format("ABC 6 6 6"))
    with pytest.raises(SystemNotFoundError, match="MOTION/PRINT/CELL"):
        open_systems(str(tmp_path))
    cells = np.array([6.0 * np.eye(3), 6.5 * np.eye(3)])
    lines = [
        f"{step} {0.5 * step} {' '.join(map(str, cell.ravel()))} {np.linalg.det(cell)}"
        for step, cell in enumerate(cells)
    ]
    (tmp_path / "water-1.cell").write_text("\n".join(["# Step Time Ax", *lines]))
    (system,) = open_systems(str(tmp_path))
    np.testing.assert_array_equal(system.frames([0, 1]).box, cells)


def test_steps_of_restarts_count_once_and_a_cut_frame_does_not(tmp_path, caplog):
    positions, *_ = write_cp2k(tmp_path, [0, 1, 1, 2])
    (tmp_path / "md.inp").write_text(INPUT.format("ABC 9 9 9\n   PERIODIC NONE"))
    path = tmp_path / "water-frc-1.xyz"
    path.write_text(path.read_text()[:-60])
    with caplog.at_level(logging.WARNING):
        (system,) = open_systems(str(tmp_path))
    assert not system.pbc
    np.testing.assert_array_equal(system.frames([0, 1]).coord, positions[[0, 2]])
    assert system.nframes == 2
    assert "cut off" in caplog.text
    assert "1 of 3 steps" in caplog.text


def test_trajectories_say_which_file_they_lack(tmp_path, caplog):
    write_cp2k(tmp_path, [0])
    with pytest.raises(SystemFormatError, match=r"water-1\.cell"):
        open_systems(str(tmp_path / "water-pos-1.xyz"))
    (tmp_path / "water-frc-1.xyz").unlink()
    (tmp_path / "out.log").write_text(
        "".join(f" CELL| Vector {axis} [angstrom]:  9.0 9.5 9.9 |x| = 9\n" for axis in "abc")
    )
    (system,) = open_systems(str(tmp_path / "water-pos-1.xyz"))
    assert system.labels == {"energy"}
    assert "water-frc-1.xyz" in caplog.text
    np.testing.assert_array_equal(system.frames([0]).box[0], [[9.0, 9.5, 9.9]] * 3)


def test_a_run_of_vasp_is_read_once(tmp_path):
    (tmp_path / "OUTCAR").write_text(vasp_files.outcar(STEPS))
    (tmp_path / "vasprun.xml").write_text(vasp_files.vasprun(STEPS))
    (tmp_path / "INCAR").write_text("ENCUT = 400\n")
    compressed = gzip.compress((tmp_path / "vasprun.xml").read_bytes())
    (tmp_path / "vasprun.xml.gz").write_bytes(compressed)
    (system,) = open_systems(str(tmp_path))
    expected = read(tmp_path / "vasprun.xml", index=":")
    np.testing.assert_allclose(
        system.frames([0, 1]).force, [atoms.get_forces() for atoms in expected]
    )
    # A full disk leaves the beginning of vasprun.xml.
    (tmp_path / "vasprun.xml.gz").unlink()
    (tmp_path / "vasprun.xml").write_text(vasp_files.vasprun(STEPS)[:200])
    (system,) = open_systems(str(tmp_path))
    assert system.name.endswith("OUTCAR")
    assert system.nframes == 2


def test_one_of_many_runs_may_be_broken(tmp_path, caplog):
    for name in ("run1", "run2"):
        folder = tmp_path / "all" / name
        folder.mkdir(parents=True)
        (folder / "OUTCAR").write_text(vasp_files.outcar(STEPS))
    unconverged = [vasp_files.Step(-3.0, 60, 0.5)]
    (tmp_path / "all" / "run2" / "OUTCAR").write_text(vasp_files.outcar(unconverged))
    with caplog.at_level(logging.WARNING):
        (system,) = open_systems(str(tmp_path / "all"))
    assert system.name.endswith("run1/OUTCAR")
    assert "left out" in caplog.text
    assert "run2/OUTCAR" in caplog.text
    with pytest.raises(SystemNotFoundError, match="converged"):
        open_systems(str(tmp_path / "all" / "run2"))


def test_folders_of_npy_files_are_not_searched_for_runs(tmp_path):
    system = tmp_path / "system"
    (system / "set.000").mkdir(parents=True)
    (system / "type.raw").write_text("0\n")
    np.save(system / "set.000" / "coord.npy", np.zeros((1, 3)))
    np.save(system / "set.000" / "box.npy", 9 * np.eye(3).reshape(1, 9))
    (tmp_path / "OUTCAR").write_text(vasp_files.outcar(STEPS))
    (only,) = open_systems(str(tmp_path))
    assert only.name == str(system)


def test_a_folder_of_structures_names_the_pattern(tmp_path):
    Atoms("H2", [[0, 0, 0], [0, 0, 0.8]]).write(tmp_path / "a.xyz", format="extxyz")
    with pytest.raises(SystemNotFoundError, match=r"\*\.xyz"):
        open_systems(str(tmp_path))
