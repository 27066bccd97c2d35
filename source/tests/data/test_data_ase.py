"""Labels of files that ASE reads: their names, the energy that belongs to the forces, convergence, periodicity."""

import logging
from pathlib import Path

import numpy as np
import pytest
import vasp_files

from deepmd_muon.cli.main import main
from deepmd_muon.data import SystemFormatError, open_systems, with_parameters
from deepmd_muon.data.frames import Parameters
from deepmd_muon.data.stores.molecular_codes import orca_convergence
from deepmd_muon.data.stores.vasp_steps import read_outcar
from deepmd_muon.label_keys import LabelKeys, Reading
from deepmd_muon.setting import InvalidSettingError

ase = pytest.importorskip("ase")
SinglePointCalculator = pytest.importorskip("ase.calculators.singlepoint").SinglePointCalculator
VASP = Path(ase.__file__).parent / "test" / "testdata" / "vasp"
needs_vasp = pytest.mark.skipif(
    not (VASP / "vasprun_pstress.xml").is_file(), reason="this ASE comes without its test data"
)
FORCES = np.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def _messages(caplog):
    caplog.set_level(logging.INFO, "deepmd_muon")


def write_xyz(path, *comments, force="forces", lattice=True):
    """Write frames of two copper atoms, one for every comment."""
    cell = 'Lattice="9 0 0 0 9 0 0 0 9" ' if lattice else ""
    rows = [
        f"Cu {2.5 * k} 0 0" + ("" if force is None else " {:g} {:g} {:g}".format(*FORCES[k]))
        for k in range(2)
    ]
    columns = "species:S:1:pos:R:3" + ("" if force is None else f":{force}:R:3")
    for number, comment in enumerate(comments):
        mode = "a" if number else "w"
        with path.open(mode) as file:
            file.write("\n".join(["2", f"{cell}Properties={columns} {comment}", *rows, ""]))
    return str(path)


@pytest.mark.parametrize(
    "energy",
    ["energy", "Energy", "REF_energy", "ref_energy", "dft_energy", "DFT_Energy", "TotEnergy"],
)
@pytest.mark.parametrize(
    "force", ["forces", "force", "Forces", "REF_forces", "dft_force", "forces_DFT"]
)
def test_usual_names_are_recognized(tmp_path, energy, force):
    (system,) = open_systems(write_xyz(tmp_path / "a.xyz", f"{energy}=-3.5", force=force))
    frames = system.frames([0])
    assert frames.energy.tolist() == [-3.5]
    np.testing.assert_array_equal(frames.force[0], FORCES)


@pytest.mark.parametrize("name", ["virial", "REF_virial", "REF_virials", "dft_virial"])
def test_virials_and_stresses_have_their_signs(tmp_path, name):
    values = " ".join(str(v) for v in (1, 2, 3, 2, 4, 5, 3, 5, 6))
    (system,) = open_systems(write_xyz(tmp_path / "a.xyz", f'energy=1 {name}="{values}"'))
    assert system.frames([0]).virial.tolist() == [[1, 2, 3, 2, 4, 5, 3, 5, 6]]
    stress = name.replace("virials", "stress").replace("virial", "stress")
    (system,) = open_systems(write_xyz(tmp_path / "b.xyz", f'energy=1 {stress}="{values}"'))
    expected = -729.0 * np.array([[1, 2, 3, 2, 4, 5, 3, 5, 6]])
    np.testing.assert_allclose(system.frames([0]).virial, expected)


@pytest.mark.parametrize(("name", "factor"), [("stress", -729), ("virial", 1)])
def test_six_numbers_of_a_tensor_have_the_order_of_ase(tmp_path, name, factor):
    matrix = factor * np.array([[1.0, 6, 5], [6, 2, 4], [5, 4, 3]])
    for key in (name, f"REF_{name}"):
        (system,) = open_systems(write_xyz(tmp_path / "a.xyz", f'energy=1 {key}="1 2 3 4 5 6"'))
        np.testing.assert_allclose(system.frames([0]).virial, [matrix.ravel()])


def test_headers_may_have_any_case_and_come_from_windows(tmp_path):
    path = Path(write_xyz(tmp_path / "a.xyz", "Energy=-3.5"))
    text = path.read_text().replace("Lattice", "lattice").replace("Properties", "PROPERTIES")
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    (system,) = open_systems(str(path))
    frames = system.frames([0])
    assert frames.box.tolist() == [(9 * np.eye(3)).tolist()]
    np.testing.assert_array_equal(frames.force[0], FORCES)


@pytest.mark.parametrize(("stress", "warns"), [("1 0 0 0 1 0 0 0 1", True), ("0 " * 9, False)])
def test_a_stress_without_periodic_directions_is_told(tmp_path, caplog, stress, warns):
    open_systems(write_xyz(tmp_path / "a.xyz", f'energy=1 pbc="F F F" stress="{stress}"'))
    assert any("not periodic" in message for message in caplog.messages) == warns


@pytest.mark.parametrize("name", ["Cu1", "29"])
def test_names_that_are_no_elements_are_told(tmp_path, name):
    path = Path(write_xyz(tmp_path / "a.xyz", "energy=1"))
    path.write_text(path.read_text().replace("Cu", name))
    with pytest.raises(SystemFormatError, match=rf"element '{name}'"):
        open_systems(str(path))


def test_files_of_ipi_are_refused(tmp_path):
    path = tmp_path / "simulation.pos_0.xyz"
    header = "# CELL(abcABC): 9 9 9 90 90 90 Step: 0 Bead: 0 positions{atomic_unit}  cell{angstrom}"
    path.write_text(f"1\n{header}\nH 0 0 0\n")
    with pytest.raises(SystemFormatError, match=r"i-PI.*positions\{atomic_unit\}"):
        open_systems(str(path))


@pytest.mark.parametrize("columns", ["id type", "id type element"])
def test_types_of_lammps_are_no_elements(tmp_path, columns):
    path = tmp_path / "a.lammpstrj"
    lines = ["TIMESTEP", 0, "NUMBER OF ATOMS", 1, "BOX BOUNDS pp pp pp", *(3 * ["0 9"])]
    text = "".join(f"{'' if line in (0, 1, '0 9') else 'ITEM: '}{line}\n" for line in lines)
    element = " Cu" if "element" in columns else ""
    path.write_text(f"{text}ITEM: ATOMS {columns} x y z fx fy fz\n1 1{element} 0 0 0 1 2 3\n")
    if not element:
        with pytest.raises(SystemFormatError, match=r"types and no elements"):
            open_systems(str(path))
        return
    (system,) = open_systems(str(path))
    assert system.type_map == ("Cu",)
    assert system.frames([0]).force.tolist() == [[[1, 2, 3]]]


def test_text_without_frames_asks_for_a_format(tmp_path):
    (tmp_path / "job.out").write_text("no output of a known program\n")
    with pytest.raises(SystemFormatError, match=r"no frames .*--format"):
        open_systems(tmp_path / "job.out")


@pytest.mark.parametrize("form", ["db", "json"])
def test_rows_of_a_database_have_words_and_calculators(tmp_path, caplog, form):
    connect = pytest.importorskip("ase.db").connect
    path = str(tmp_path / f"a.{form}")
    with connect(path) as database:
        for charge, calculator in ((0, "gpaw"), (1, "gpaw"), (1, "aims")):
            atoms = ase.Atoms("Cu2", [[0, 0, 0], [2.5, 0, charge]])
            atoms.calc = SinglePointCalculator(atoms, energy=-3.0, forces=FORCES)
            atoms.calc.name = calculator
            database.write(atoms, charge=charge, dft_energy=7.0)
    systems = open_systems(path, reading=Reading(frame_parameters=("charge",)))
    (system,) = with_parameters(systems, Parameters(fparam=1))
    frames = system.frames([0, 1, 2])
    assert frames.fparam.tolist() == [[0], [1], [1]]
    assert frames.energy.tolist() == [-3, -3, -3]  # dft_energy is not the calculator's
    assert system.origin(2).words["calculator"] == "aims"
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "gpaw (2 frames), aims (1 frames)" in warning.getMessage()


def test_names_of_predictions_are_left_alone_with_a_warning(tmp_path, caplog):
    names = "REF_energy=-3.5 mace_energy=9"
    (system,) = open_systems(write_xyz(tmp_path / "a.xyz", names, force="mace_forces"))
    assert system.labels == {"energy"}
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "mace_forces" in warning.getMessage()
    assert "mace_energy" not in warning.getMessage()
    assert any("energy from REF_energy" in message for message in caplog.messages)


def test_an_unknown_name_of_the_stress_is_told(tmp_path, caplog):
    nine = "0.1 0 0 0 0.2 0 0 0 0.3"
    path = write_xyz(tmp_path / "a.xyz", f'energy=1 stresses="{nine}"')
    (system,) = open_systems(path)
    assert system.labels == {"energy", "force"}
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "stresses" in warning.getMessage()
    caplog.clear()
    (system,) = open_systems(path, reading=Reading(LabelKeys(stress="stresses")))
    assert "virial" in system.labels
    open_systems(write_xyz(tmp_path / "b.xyz", f'energy=1 stress="{nine}" mace_stress="{nine}"'))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "comments",
    [
        ("energy=1 REF_energy=2",),
        ("energy=1", "REF_energy=2"),
        ("energy=1 REF_energy=1 free_energy=1",),
    ],
)
def test_two_names_of_a_label_are_ambiguous(tmp_path, comments):
    path = write_xyz(tmp_path / "a.xyz", *comments)
    message = r"REF_energy and energy.*label_keys.*--energy-key"
    with pytest.raises(SystemFormatError, match=message) as error:
        open_systems(path)
    assert error.value.system == path
    systems = open_systems(path, reading=Reading(LabelKeys(energy="REF_energy")))
    assert [system.labels for system in systems] == [{"energy", "force"}]


def test_a_virial_and_a_stress_are_no_ambiguity_unless_both_are_asked_for(tmp_path):
    nine = " ".join(map(str, range(9)))
    path = write_xyz(tmp_path / "a.xyz", f'energy=1 virial="{nine}" stress="1 0 0 0 1 0 0 0 1"')
    virials = [
        open_systems(path, reading=Reading(keys))[0].frames([0]).virial[0]
        for keys in (LabelKeys(), LabelKeys(stress="stress"))
    ]
    assert sorted(virials[0]) == list(range(9))
    np.testing.assert_allclose(virials[1].reshape(3, 3), -729.0 * np.eye(3))
    with pytest.raises(InvalidSettingError, match="excludes"):
        LabelKeys(virial="virial", stress="stress")


def test_a_label_that_is_no_number_is_named(tmp_path):
    with pytest.raises(SystemFormatError, match=r"frame 1.*'none', not numbers"):
        open_systems(write_xyz(tmp_path / "a.xyz", "Energy=1", "Energy=none"))


def test_conversion_refuses_data_without_labels(tmp_path, capsys):
    path = write_xyz(tmp_path / "a.xyz", "mace_energy=1", force=None)
    assert main(["convert-data", path, str(tmp_path / "out")]) == 2
    assert "label_keys" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["convert-data", path, str(tmp_path / "out"), "--unlabelled"]) == 0
    assert main(["convert-data", path, str(tmp_path / "named"), "--energy-key", "mace_energy"]) == 0
    (system,) = open_systems(str(tmp_path / "named"))
    assert system.frames([0]).energy.tolist() == [1.0]


@pytest.mark.parametrize("lattice", [True, False])
def test_partial_periodicity_is_refused(tmp_path, lattice):
    frames = ('energy=1 pbc="T T T"', 'energy=1 pbc="T T F"')
    path = write_xyz(tmp_path / "slab.xyz", *frames, lattice=lattice)
    with pytest.raises(SystemFormatError, match=r'"T T F".*vacuum') as error:
        open_systems(path)
    assert (error.value.system, error.value.file) == (path, "frame 1")
    path = write_xyz(tmp_path / "none.xyz", 'energy=1 pbc="F F F"', lattice=lattice)
    (system,) = open_systems(path)
    assert not system.pbc


def test_frames_that_say_they_did_not_converge_are_left_out(tmp_path, caplog):
    path = write_xyz(tmp_path / "a.xyz", "energy=1 converged=T", "energy=2 converged=F", "energy=3")
    (system,) = open_systems(path)
    assert system.frames([0, 1]).energy.tolist() == [1.0, 3.0]
    assert any("1 of 3 frames" in message and "frames 1)" in message for message in caplog.messages)
    (system,) = open_systems(path, reading=Reading(keep_unconverged=True))
    assert system.nframes == 3
    path = write_xyz(tmp_path / "b.xyz", "energy=1 converged=F")
    with pytest.raises(SystemFormatError, match="keep_unconverged"):
        open_systems(path)


def test_the_free_energy_belongs_to_the_forces(tmp_path, caplog):
    path = write_xyz(tmp_path / "a.xyz", "energy=-2 free_energy=-2.001", "energy=-3 free_energy=-3")
    (system,) = open_systems(path)
    assert system.frames([0, 1]).energy.tolist() == [-2.001, -3.0]
    (message,) = caplog.messages
    assert "0.5 meV per atom" in message
    (system,) = open_systems(path, reading=Reading(LabelKeys(energy="energy")))
    assert system.frames([0, 1]).energy.tolist() == [-2.0, -3.0]
    (alone,) = open_systems(write_xyz(tmp_path / "b.xyz", "free_energy=-4"))
    assert alone.frames([0]).energy.tolist() == [-4.0]


@needs_vasp
def test_vasp_energies_are_totens(caplog):
    (outcar,) = open_systems(str(VASP / "OUTCAR_example_1"))
    assert outcar.frames([0]).energy.tolist() == [-68.22868532]  # "free  energy   TOTEN"
    assert any("0.13 meV per atom" in message for message in caplog.messages)
    (vasprun,) = open_systems(str(VASP / "vasprun_pstress.xml"))
    np.testing.assert_allclose(vasprun.frames([0]).energy, [-20.246959373], rtol=0, atol=1e-8)


@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize("form", ["OUTCAR", "vasprun.xml"])
def test_vasp_frames_that_did_not_converge_are_left_out(tmp_path, caplog, capsys, form, version):
    # VASP 5 writes "EDIFF is reached" after NELM steps, too; its vasprun.xml has another NELM.
    steps = [
        end._replace(ending=ending if version == 6 else vasp_files.REACHED)
        for end, _, ending in vasp_files.ENDS
    ]
    write = vasp_files.outcar if form == "OUTCAR" else vasp_files.vasprun
    path = tmp_path / form
    path.write_text(write(steps, version))
    (system,) = open_systems(str(path))
    converged = [step.energy for step, good, _ in vasp_files.ENDS if good]
    np.testing.assert_allclose(system.frames(np.arange(system.nframes)).energy, converged)
    assert any("2 of 5 frames" in text and "(frames 2, 3)" in text for text in caplog.messages)
    (system,) = open_systems(str(path), reading=Reading(keep_unconverged=True))
    assert system.nframes == 5
    assert main(["convert-data", str(path), str(tmp_path / "out"), "--keep-unconverged"]) == 0
    assert "5 frames" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "converged"),
    [
        (vasp_files.Step(-3.0, 3, 5e-5, ending=vasp_files.HARD_STOP), False),
        (vasp_files.Step(-3.0, vasp_files.NELM, 5e-5, 2e-3), False),  # the second condition of VASP
        (vasp_files.Step(-3.0, vasp_files.NELM, 2e-3, ending=""), False),  # a shortened file
        (vasp_files.Step(-3.0, vasp_files.NELM, 2e-5, ending=""), True),
        (vasp_files.Step(-3.0, 3, 2e-3), True),  # VASP says so before NELM
    ],
)
def test_loops_of_an_outcar(tmp_path, step, converged):
    path = tmp_path / "OUTCAR"
    path.write_text(vasp_files.outcar([step]))
    assert read_outcar(str(path)).converged == [converged]


@pytest.mark.parametrize("form", ["OUTCAR", "vasprun.xml"])
def test_a_single_electronic_step_is_no_convergence(tmp_path, form):
    write = vasp_files.outcar if form == "OUTCAR" else vasp_files.vasprun
    (tmp_path / form).write_text(write([vasp_files.Step(-3.0, 1, 18.25)], most=1))
    with pytest.raises(SystemFormatError, match="no frame converged"):
        open_systems(str(tmp_path / form))


def test_steps_of_vasps_force_field_are_no_labels(tmp_path, caplog):
    predicted = vasp_files.force_field_step(-2.9)
    first, second = (vasp_files.Step(energy, 4, 1e-5) for energy in (-3.0, -3.1))
    text = vasp_files.outcar([first])
    head, _, loops = text.partition("--------------------- Iteration")
    text = f"{head}{predicted}--------------------- Iteration{loops}{predicted}{predicted}"
    path = tmp_path / "OUTCAR"
    path.write_text(text + vasp_files.ionic_step(second, 2) + predicted)
    (system,) = open_systems(str(path))
    assert system.frames([0, 1]).energy.tolist() == [-3.0, -3.1]
    assert any("4 ionic steps" in text and "force field" in text for text in caplog.messages)
    path.write_text(head + predicted + predicted)
    with pytest.raises(SystemFormatError, match="all 2 ionic steps are predictions"):
        open_systems(str(path))


def test_steps_of_an_outcar_without_positions_and_killed_steps(tmp_path, caplog):
    steps = [vasp_files.Step(energy, 4, 1e-5) for energy in (-3.0, -3.1, -3.2, -3.3)]
    texts = [vasp_files.ionic_step(step, number) for number, step in enumerate(steps, 1)]
    texts[1] = texts[1].replace(vasp_files.geometry(), "")  # NWRITE = 0
    texts[3] = texts[3][: texts[3].index("  free  energy   TOTEN")]
    path = tmp_path / "OUTCAR"
    path.write_text(vasp_files.outcar([]) + "".join(texts))
    (system,) = open_systems(str(path))
    assert system.frames([0, 1]).energy.tolist() == [-3.0, -3.2]
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "1 ionic steps" in warning.getMessage()


def test_an_outcar_with_many_body_dispersion(tmp_path):
    text = vasp_files.outcar([vasp_files.Step(-3.0, 4, 1e-5)])
    columns = "eV    w/o vdW =       -2.50000000"
    text = text.replace("-3.00000000 eV\n\n", f"-3.00000000 {columns}\n\n")
    text = text.replace("-3.00000000  energy(", f"-3.00000000 {columns}  energy(")
    (tmp_path / "OUTCAR").write_text(text.removesuffix("\n") + f" {columns}\n")
    (system,) = open_systems(str(tmp_path / "OUTCAR"))
    assert system.frames([0]).energy.tolist() == [-3.0]


def _gaussian_step(length, energy, end):
    """Return the lines of two hydrogen atoms in an output of Gaussian."""
    rule = " ---------------------------------------------------------------------\n"
    return (
        f" Input orientation:\n{rule}"
        " Center     Atomic      Atomic             Coordinates (Angstroms)\n"
        f" Number     Number       Type             X           Y           Z\n{rule}"
        "      1          1           0        0.000000    0.000000    0.000000\n"
        f"      2          1           0        0.000000    0.000000    {length:.6f}\n{rule}"
        f"{end} SCF Done:  E(RHF) =  {energy:.11f}     A.U. after    2 cycles\n{rule}"
        " Center     Atomic                   Forces (Hartrees/Bohr)\n"
        f" Number     Number              X              Y              Z\n{rule}"
        "      1        1           0.000000000    0.000000000   -0.010000000\n"
        f"      2        1           0.000000000    0.000000000    0.010000000\n{rule}"
    )


def test_frames_of_gaussian_that_did_not_converge_are_left_out(tmp_path, caplog):
    steps = [
        _gaussian_step(0.74, -1.11675930740, ""),
        _gaussian_step(0.80, -1.10000000001, " >>>>>>>>>> Convergence criterion not met.\n"),
        _gaussian_step(0.78, -1.11000000003, ""),
    ]
    path = tmp_path / "h2.log"
    path.write_text(" Entering Gaussian System, Link 0=g16\n # force hf/sto-3g\n" + "".join(steps))
    (system,) = open_systems(str(path))
    np.testing.assert_allclose(system.frames([0, 1]).coord[:, 1, 2], [0.74, 0.78])
    assert any("1 of 3 frames" in message and "frames 1)" in message for message in caplog.messages)
    assert open_systems(str(path), reading=Reading(keep_unconverged=True))[0].nframes == 3


def test_frames_of_orca_without_convergence_have_no_energy_in_ase():
    atoms = [ase.Atoms("H") for _ in range(3)]
    for frame, energy in zip(atoms, (-1.0, np.nan, None), strict=True):
        frame.calc = SinglePointCalculator(frame, forces=np.zeros((1, 3)), energy=energy)
    assert orca_convergence(atoms) == [True, False, True]
