"""The lines of doc/data.md convert data as it says."""

import re
from pathlib import Path

import numpy as np
import pytest

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems

PAGE = (Path(__file__).parents[3] / "doc" / "data.md").read_text()

OUTCAR = """ TITEL  = PAW_PBE Cu 22Jun2005
   NELM   =     60
   NWRITE =      2
   ions per type =               {natoms}
----------------------------------------- Iteration    1(   1)  ---------------------------------------
  FORCE on cell =-STRESS in cart. coord.  units (eV):
  Direction    XX          YY          ZZ          XY          YZ          ZX
{terms}
  in kB  {kilobar}
 VOLUME and BASIS-vectors are now :
 -----------------------------------------------------------------------------
  energy-cutoff  :      400.00
  volume of cell :      {volume:.2f}
      direct lattice vectors                 reciprocal lattice vectors
{cell}
 POSITION                                       TOTAL-FORCE (eV/Angst)
 -----------------------------------------------------------------------------------
{rows}
 -----------------------------------------------------------------------------------
  free  energy   TOTEN  =  {energy:16.8f} eV
"""


def outcar(atoms):
    """Return the parts of an OUTCAR that dpdata reads; VASP prints pressure, in kilobar."""
    from ase.units import GPa

    rows = np.hstack([atoms.positions, atoms.get_forces()])
    pressure = -10 * atoms.get_stress()[[0, 1, 2, 5, 3, 4]] / GPa  # xx yy zz xy yz zx
    return OUTCAR.format(
        natoms=len(atoms),
        terms="\n".join(["  term     0.0"] * 12),
        volume=atoms.get_volume(),
        kilobar=" ".join(f"{x:.8f}" for x in pressure),
        cell="\n".join(" ".join(f"{x:.9f}" for x in [*vector, 0, 0, 0]) for vector in atoms.cell),
        rows="\n".join(" ".join(f"{x:.9f}" for x in row) for row in rows),
        energy=atoms.get_potential_energy(),
    )


def test_the_page_converts_extended_xyz_and_vasp(tmp_path, monkeypatch):
    pytest.importorskip("dpdata", minversion="1.1")  # earlier ones do not read ASE's columns
    pytest.importorskip("ase")
    from ase.build import bulk
    from ase.calculators.emt import EMT
    from ase.io import write

    frames = []
    for k, length in enumerate((3.5, 3.6, 3.7)):
        atoms = bulk("Cu", "fcc", a=length, cubic=True)
        atoms.rattle(0.1, seed=k)
        atoms.calc = EMT()
        atoms.get_stress()
        frames.append(atoms)
    monkeypatch.chdir(tmp_path)
    write("train.xyz", frames, columns=["symbols", "positions", "forces"])
    Path("OUTCAR").write_text(outcar(frames[0]))
    (commands,) = re.findall(
        r"^<!-- tested: test_data_page.py -->\n```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
    )
    for command in commands.splitlines():
        assert main(command.split()[1:]) == 0

    for folder, expected in (("data/from_xyz", frames), ("data/from_vasp", frames[:1])):
        (system,) = open_systems(folder, ["Ag", "Cu"])
        assert system.nframes == len(expected)
        read = system.frames(np.arange(system.nframes))
        for k, atoms in enumerate(expected):
            virial = -atoms.get_volume() * atoms.get_stress(voigt=False)
            assert (read.atype[k] == 1).all()
            assert read.energy[k] == pytest.approx(atoms.get_potential_energy(), abs=1e-6)
            np.testing.assert_allclose(read.coord[k], atoms.positions, atol=1e-6)
            np.testing.assert_allclose(read.force[k], atoms.get_forces(), atol=1e-6)
            np.testing.assert_allclose(read.virial[k].reshape(3, 3), virial, atol=1e-5)
