"""The page on own data with files as programs leave them, from `dp init` to a report and a verdict."""

from pathlib import Path

import numpy as np
import pytest
import vasp_files
from ase import Atoms, units
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.db import connect
from ase.io import read, write

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems

pytestmark = pytest.mark.slow
NFRAMES = 20


def crystals():
    """Return rattled crystals of eight copper atoms with labels of EMT."""
    frames = []
    for seed in range(NFRAMES):
        atoms = bulk("Cu", a=3.6).repeat(2)
        atoms.rattle(0.08, seed=seed)
        atoms.calc = EMT()
        atoms.get_forces()
        frames.append(atoms)
    return frames


def vasp(folder, version):
    """Write OUTCAR and vasprun.xml of a pair of atoms; return the energies."""
    steps = []
    for distance in np.random.default_rng(version).uniform(2.1, 2.7, NFRAMES).round(5):
        pair = Atoms(
            "Cu2", [[0, 0, 0], [distance, 0, 0]], cell=[9, 9, 9], pbc=True, calculator=EMT()
        )
        steps.append(
            vasp_files.Step(
                round(pair.get_potential_energy(), 8),
                5,
                5e-5,
                distance=distance,
                force=pair.get_forces()[1, 0],
            )
        )
    folder.mkdir()
    (folder / "OUTCAR").write_text(vasp_files.outcar(steps, version))
    (folder / "vasprun.xml").write_text(vasp_files.vasprun(steps, version))
    (folder / "INCAR").write_text("IBRION = 0\n")
    return [step.energy for step in steps], []


def vasp5(folder):
    """Write a run of VASP 5."""
    return vasp(folder, 5)


def vasp6(folder):
    """Write a run of VASP 6."""
    return vasp(folder, 6)


def cp2k(folder):
    """Write a trajectory in CP2K's files and units, with the cell in the input."""
    return cp2k_run(folder, [1.0] * NFRAMES)


def cp2k_npt(folder):
    """Write a trajectory of cells that vary, each on a line of CP2K's file of cells."""
    return cp2k_run(folder, np.linspace(0.99, 1.02, NFRAMES))


def cp2k_run(folder, scales):
    """Write positions, forces, energies, the input, and cells if they are scaled; return the energies."""
    folder.mkdir()
    frames = crystals()
    for atoms, scale in zip(frames, scales, strict=True):
        atoms.set_cell(scale * atoms.cell, scale_atoms=True)
    for name in ("pos", "frc"):
        with (folder / f"copper-{name}-1.xyz").open("w") as file:
            for step, atoms in enumerate(frames):
                energy = atoms.get_potential_energy() / units.Hartree
                rows = atoms.positions
                if name == "frc":
                    rows = atoms.get_forces() * units.Bohr / units.Hartree
                file.write(f"{len(atoms):8d}\n i = {step}, time = {step}.0, E = {energy:.10f}\n")
                file.writelines(f" Cu {x:.10f} {y:.10f} {z:.10f}\n" for x, y, z in rows)
    vectors = zip("ABC", frames[0].cell[:], strict=True)
    lines = "\n".join(f"  {axis} {' '.join(map(str, vector))}" for axis, vector in vectors)
    ensemble = "NVT" if len(set(scales)) == 1 else "NPT_I"
    (folder / "md.inp").write_text(
        f"&MOTION\n &MD\n  ENSEMBLE {ensemble}\n &END MD\n&END MOTION\n"
        f"&SUBSYS\n &CELL\n{lines}\n &END CELL\n&END SUBSYS\n"
    )
    if ensemble == "NPT_I":
        cells = [
            f"{step} {step}.0 {' '.join(f'{x:.10f}' for x in atoms.cell[:].ravel())} {atoms.cell.volume:.10f}"
            for step, atoms in enumerate(frames)
        ]
        (folder / "copper-1.cell").write_text("\n".join(["# Step Time [fs] Ax [Angstrom]", *cells]))
    return [atoms.get_potential_energy() for atoms in frames], []


def mace(folder):
    """Write clusters with charges, which shift their energies, and a free atom, with MACE's names."""
    folder.mkdir()
    frames = [Atoms("Cu")]
    energies = [4.0]
    frames[0].info["config_type"] = "IsolatedAtom"
    frames[0].arrays["REF_forces"] = np.zeros((1, 3))
    for number, crystal in enumerate(crystals()):
        cluster = Atoms("Cu4", crystal.positions[:4], calculator=EMT())
        energies.append(cluster.get_potential_energy() + 0.5 * (number % 2))
        frame = Atoms("Cu4", cluster.positions)
        frame.arrays["REF_forces"] = cluster.get_forces()
        frames.append(frame)
    for number, (frame, energy) in enumerate(zip(frames, energies, strict=True)):
        frame.info |= {"REF_energy": energy, "total_charge": number % 2}
    write(folder / "all.xyz", frames, format="extxyz")
    return energies, ["--frame-parameters", "total_charge"]


def database(folder):
    """Write the same clusters into a database of ASE, charges as key-value pairs of rows."""
    energies, options = mace(folder)
    frames = read(folder / "all.xyz", index=":")
    (folder / "all.xyz").unlink()
    with connect(folder / "all.db") as rows:
        for atoms, energy in zip(frames, energies, strict=True):
            forces = atoms.arrays["REF_forces"]
            atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
            rows.write(atoms, total_charge=atoms.info["total_charge"])
    return energies, options


@pytest.mark.parametrize("write_files", [vasp5, vasp6, cp2k, cp2k_npt, mace, database])
def test_from_files_of_a_program_to_a_report(tmp_path, monkeypatch, capsys, write_files):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.delenv("DP_BACKEND", raising=False)
    energies, options = write_files(Path("run"))
    data = str(next(Path("run").glob("all.*"), "run"))
    words = ["--rcut", "4.0", "--steps", "40", "--models", "2"]
    assert main(["init", data, *words, *options]) == 0
    split = open_systems(["split/train", "split/valid"])
    found = [system.frames(np.arange(system.nframes)).energy for system in split]
    np.testing.assert_allclose(sorted(np.concatenate(found)), sorted(energies), atol=1e-7)

    assert main(["--pt", "train", "input.json"]) == 0
    monkeypatch.chdir("model-2")
    assert main(["--pt", "train", "input.json"]) == 0
    monkeypatch.chdir(tmp_path)
    model = ["-m", "model.ckpt.pt"]
    assert main(["--pt", "test", *model, "--valid-data", "input.json", "--plot", "parity.png"]) == 0
    models = [*model, "model-2/model.ckpt.pt"]
    assert main(["--pt", "model-devi", *models, "-s", "split/valid", "-o", "devi.out"]) == 0
    n_valid = sum(system.nframes for system in open_systems("split/valid"))
    rows = [line for line in Path("devi.out").read_text().splitlines() if line[0] != "#"]
    assert len(rows) == n_valid
    checked = ["--temperature", "300", "--time", "0.05", "--copies", "2"]
    capsys.readouterr()
    # 1: the verdict is FAILS, as may be of forty steps.
    command = ["check", "model.ckpt.pt", "--train-data", "input.json", *checked, "--probes", "1"]
    assert main(["--pt", *command]) in (0, 1)
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("model.ckpt.pt: "))
    verdict = line.split()[1]
    assert verdict in ("HOLDS", "DOUBTFUL", "FAILS")
    assert main(["--pt", "report", "input.json", *checked]) == 0
    page = Path("report.html").read_text()
    assert any(word in page for word in ("HOLDS", "DOUBTFUL", "FAILS"))
    assert "split/valid" in page
