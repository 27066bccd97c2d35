"""Labels in other units, of other signs, frames or atoms are named with the factor; good data raise no warning."""

import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.data import atomic_numbers
from sane_sets import formic_acid, labelled, write_set
from write_systems import write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.data import open_systems
from deepmd_muon.data.checks import labels
from deepmd_muon.data.checks.close_atoms import close_pairs
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.checks.near_pairs import NearPairs
from deepmd_muon.data.frames import Frames

EXAMPLES = Path(__file__).parents[3] / "examples"
COPPER, WATER = EXAMPLES / "cu_emt" / "data" / "train", EXAMPLES / "water_xtb" / "data" / "train"
BOHR, HARTREE, KCAL = 0.529177, 27.2114, 23.0605


def changed(folder, source, change, only=None, remove=()):
    """Copy a data set and change the arrays of its systems, or of one."""
    shutil.copytree(source, folder)
    for system in sorted(folder.iterdir()):
        if only in (None, system.name):
            arrays = {
                path.stem: np.load(path).astype(float)
                for path in (system / "set.000").glob("*.npy")
            }
            change(arrays)
            for name, values in arrays.items():
                np.save(system / "set.000" / f"{name}.npy", values)
    return suspicions(open_systems(str(folder)))


def scaled(**factors):
    def change(arrays):
        for name, factor in factors.items():
            if name in arrays:
                arrays[name] = arrays[name] * factor

    return change


def of_systems(found):
    return {sentence.split(": ")[0].rsplit("/", 1)[-1] for sentence in found}


def test_good_data_raise_no_suspicion():
    assert suspicions(open_systems([str(COPPER.parent)])) == []
    assert suspicions(open_systems([str(WATER.parent)])) == []


def test_threads_say_the_same_in_the_same_order(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for k in range(8):
        atoms = 20 + 5 * k
        coord = rng.uniform(0.0, 9.0, (3, atoms * 3))
        arrays = {
            "coord": coord,
            "energy": rng.normal(size=3),
            "force": rng.normal(size=(3, atoms * 3)),
        }
        arrays["box"] = np.tile(np.eye(3).ravel() * 9.0, (3, 1))
        write_npy(tmp_path / f"s{k}", rng.integers(0, 2, atoms).tolist(), [arrays], ["O", "H"])
    found = {}
    for cores in (1, 16):
        monkeypatch.setattr(labels, "worker_count", lambda cores=cores: cores)
        found[cores] = suspicions(open_systems(str(tmp_path)))
    assert len(found[1]) >= 8
    assert found[16] == found[1]


ENERGY_AND_FORCE = [
    ({"energy": KCAL}, "energies in kcal/mol", KCAL),
    ({"energy": 1 / HARTREE}, "energies in Hartree", 1 / HARTREE),
    ({"energy": -1.0}, "opposite sign", -1.0),
    ({"force": KCAL}, "forces in kcal/mol", 1 / KCAL),
    ({"force": BOHR / HARTREE}, "forces in Hartree/Bohr", HARTREE / BOHR),
    ({"force": -1.0}, "opposite sign", -1.0),
    ({"energy": 1 / HARTREE, "force": BOHR / HARTREE}, "all in Hartree", 1 / BOHR),
    ({"energy": 1 / 8}, "energies per atom", 1 / 8),
]


@pytest.mark.parametrize(("factors", "words", "factor"), ENERGY_AND_FORCE)
def test_energies_are_compared_with_the_work_of_forces(tmp_path, factors, words, factor):
    found = changed(tmp_path / "data", COPPER, scaled(**factors))
    (sentence,) = [s for s in found if "triclinic8" in s and "energies are" in s]
    assert words in sentence
    assert float(sentence.split("energies are ")[1].split()[0]) == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize(
    "factors", [{"energy": KCAL}, {"energy": -1.0}, {"force": KCAL}, {"energy": 1 / HARTREE}]
)
def test_the_same_for_frames_of_a_liquid_far_apart(tmp_path, factors):
    found = changed(tmp_path / "data", WATER, scaled(**factors))
    sentences = [s for s in found if "energies are" in s]
    assert sentences
    factor = factors.get("energy", 1.0) / factors.get("force", 1.0)
    for sentence in sentences:
        assert float(sentence.split("energies are ")[1].split()[0]) == pytest.approx(
            factor, rel=0.4
        )


@pytest.mark.parametrize("source", [COPPER, WATER])
@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"energy": KCAL, "force": KCAL, "virial": KCAL}, "kcal/mol"),
        ({"energy": 1 / HARTREE, "force": BOHR / HARTREE, "virial": 1 / HARTREE}, "Hartree"),
        ({"coord": 1 / BOHR, "box": 1 / BOHR}, "Bohr"),
        ({"coord": 1 / BOHR}, "Å"),
        ({"coord": 0.1}, "nm"),
        ({"coord": 0.1, "box": 0.1}, "nm"),
    ],
)
def test_units_of_the_whole_set(tmp_path, source, factors, words):
    found = changed(tmp_path / "data", source, scaled(**factors))
    assert any(words in sentence for sentence in found), found


def stress_for_virial(unit):
    def change(arrays):
        if "box" in arrays:
            arrays["virial"] = -unit * arrays["virial"] / volume(arrays)

    return change


@pytest.mark.parametrize("source", [COPPER, WATER])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled(virial=-1.0), "virials of the opposite sign"),
        (stress_for_virial(1.0), "stress in eV/Å³"),
        (stress_for_virial(1602.18), "stress in kbar"),
    ],
)
def test_virials_are_compared_with_those_of_the_forces(tmp_path, source, change, words):
    found = changed(tmp_path / "data", source, change)
    assert all("virials are" in sentence for sentence in found), found
    assert any(words in sentence for sentence in found), found


def volume(arrays):
    return np.abs(np.linalg.det(arrays["box"].reshape(-1, 3, 3)))[:, None]


def rolled(arrays):
    """Give every frame the forces of another one."""
    arrays["force"] = np.roll(arrays["force"], 7, axis=0)


def permuted(arrays):
    force = arrays["force"].reshape(len(arrays["force"]), -1, 3)
    arrays["force"] = np.roll(force, 1, axis=1).reshape(len(force), -1)


@pytest.mark.parametrize("source", [COPPER, WATER])
@pytest.mark.parametrize("change", [rolled, permuted])
def test_forces_of_other_frames_or_atoms(tmp_path, source, change):
    found = changed(tmp_path / "data", source, change)
    assert of_systems(found) == {system.name for system in source.iterdir()}
    assert all("forces" in sentence for sentence in found)


def fractional(arrays):
    if "box" in arrays:
        frames = len(arrays["box"])
        coord, box = arrays["coord"].reshape(frames, -1, 3), arrays["box"].reshape(-1, 3, 3)
        arrays["coord"] = (coord @ np.linalg.inv(box)).reshape(frames, -1)


@pytest.mark.parametrize("source", [COPPER, WATER])
def test_fractional_positions(tmp_path, source):
    found = changed(tmp_path / "data", source, fractional)
    assert of_systems(found) == {s.name for s in source.iterdir() if not (s / "nopbc").exists()}
    assert all("fractional" in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (scaled(energy=KCAL), "factor 23"),
        (scaled(energy=KCAL, force=KCAL, virial=KCAL), "23"),
        (scaled(force=-1.0, energy=-1.0), "opposite sign"),
        (scaled(coord=1 / BOHR, box=1 / BOHR), "Bohr"),
    ],
)
def test_one_system_of_three(tmp_path, change, words):
    found = changed(tmp_path / "data", WATER, change, only="350K")
    assert of_systems(found) == {"350K"}
    assert any(words in sentence for sentence in found), found


def test_types_swapped_in_one_system(tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(WATER, folder)
    types = folder / "350K" / "type.raw"
    types.write_text(types.read_text().replace("0", "x").replace("1", "0").replace("x", "1"))
    found = suspicions(open_systems(str(folder)))
    assert of_systems(found) == {"350K"}
    assert any("swapped" in sentence for sentence in found), found


def test_periodic_data_marked_as_a_molecule(tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(WATER, folder)
    for system in folder.iterdir():
        (system / "nopbc").touch()
    found = suspicions(open_systems(str(folder)))
    assert of_systems(found) == {"300K", "350K", "420K"}
    assert all("nopbc" in sentence for sentence in found)


def test_two_atoms_at_nearly_one_place(tmp_path):
    def change(arrays):
        arrays["coord"][:, 3:6] = arrays["coord"][:, :3] + 1e-4 / np.sqrt(3)

    (sentence,) = changed(tmp_path / "data", WATER, change, only="420K")
    assert "420K: atoms are 0.0001 Å apart" in sentence


def test_atoms_at_one_place_across_a_face_of_the_cell_beside_padding():
    coord = np.array([[[0.01, 1.0, 1.0], [9.95, 1.0, 1.0], [0.0] * 3, [0.0] * 3]])
    frames = Frames(atype=np.array([[0, 0, -1, -1]]), coord=coord, box=10.0 * np.eye(3)[None])
    assert close_pairs(frames).words(0) == "atoms 0 and 1 are 0.06 Å apart"


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("size", [0.2, 1.0, 3.0])
def test_close_pairs_are_those_of_all_pairs(size, periodic):
    """Cells may be flatter than the limit; positions may be outside of them, and some atoms are padding."""
    random = np.random.default_rng(0)
    nframes = 300
    limit = 0.3
    coord = size * random.uniform(-1.0, 2.0, (nframes, 7, 3))
    atype = np.zeros((nframes, 7), dtype=int)
    atype[::2, 5:] = -1
    box = size * (np.eye(3) + random.normal(0.0, 0.2, (nframes, 3, 3))) if periodic else None
    first, second = np.triu_indices(7, 1)
    apart = coord[:, second] - coord[:, first]
    if box is not None:
        apart -= np.round(apart @ np.linalg.inv(box)) @ box
    distance = np.where(atype[:, second] < 0, np.inf, np.linalg.norm(apart, axis=-1)).min(axis=1)
    assert 1 <= (distance < limit).sum() <= nframes
    expected = np.where(distance < limit, distance, np.inf)
    found = close_pairs(Frames(atype=atype, coord=coord, box=box), limit)
    np.testing.assert_allclose(found.distance, expected, rtol=1e-9, atol=1e-12)


def test_a_primitive_cell_is_not_in_bohr(tmp_path):
    """The nearest chlorine is not in the image whose fractions are nearest."""
    cell = 2.82 * (1.0 - np.eye(3))
    coord = np.array([np.zeros(3), 0.5 * cell.sum(axis=0)])
    arrays = {"coord": coord.reshape(1, 6), "box": cell.reshape(1, 9), "energy": np.zeros((1, 1))}
    write_npy(tmp_path / "salt", [0, 1], [arrays], ["Na", "Cl"])
    assert suspicions(open_systems(str(tmp_path / "salt"))) == []
    arrays |= {name: 2.0 * arrays[name] for name in ("coord", "box")}
    write_npy(tmp_path / "stretched", [0, 1], [arrays], ["Na", "Cl"])
    (sentence,) = suspicions(open_systems(str(tmp_path / "stretched")))
    assert "the closest atoms are 5.64 Å apart" in sentence


def test_atoms_of_a_layer_are_no_pairs_to_look_at():
    fractions = np.stack(np.meshgrid(*[np.arange(20) / 20] * 2, [0.5]), -1).reshape(-1, 3)
    cell = np.diag([50.0, 50.0, 80.0])  # longest along the normal, where all atoms are near
    frames = Frames(np.zeros((1, 400), dtype=int), (fractions @ cell)[None], cell[None])
    tracemalloc.start()
    close_pairs(frames)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 400 * 400  # bytes: not even one for each pair of atoms


def skewed():
    """Copper in lower triangular cells, as LAMMPS and ASE write them."""
    frames = []
    for seed in range(12):
        atoms = bulk("Cu", "fcc", a=3.61).repeat((2, 3, 2))
        atoms.set_cell(atoms.cell.standard_form()[0], scale_atoms=True)
        atoms.rattle(0.08, seed=seed)
        frames.append(atoms)
    return labelled(frames, EMT(), ["Cu"])


def strained(atoms, strain, seed):
    """An alloy in cells whose lengths differ by `strain` from those of `atoms`, sheared by up to 2 %."""
    random = np.random.default_rng(seed)
    frames = []
    for _ in range(12):
        frame = atoms.copy()
        change = (1 + strain) * np.eye(3) + random.uniform(-0.02, 0.02, (3, 3))
        frame.set_cell(frame.cell.array @ change, scale_atoms=True)
        frame.positions += random.normal(0, 0.1, frame.positions.shape)
        frames.append(frame)
    return labelled(frames, EMT(), sorted(set(atoms.symbols), key=atomic_numbers.get))


def alloys(kinds, *elements):
    """Cells of 16 or 32 atoms of ordered alloys."""
    for kind in kinds:
        cubic = bulk("Cu", "fcc", a=3.85, cubic=True)
        if kind == "B2":
            cubic = bulk("Cu", "bcc", a=3.05, cubic=True)
        first = len(cubic) // 2 if kind != "L12" else 1
        cubic.set_chemical_symbols([elements[0]] * first + [elements[1]] * (len(cubic) - first))
        yield cubic.repeat((2, 2, 2))


@pytest.mark.parametrize(
    ("kinds", "strains"), [(("L12", "L12"), (0.12, 0.1)), (("B2", "L12"), (0.25, 0.0))]
)
@pytest.mark.parametrize("elements", [("Cu", "Pd"), ("Cu", "Ag")])
@pytest.mark.parametrize("unit", [1.0, KCAL])
def test_strained_cells(tmp_path, kinds, strains, elements, unit):
    """The pressure does most of the work between them, and the potential of one may know no distance of another."""
    for k, (atoms, strain) in enumerate(zip(alloys(kinds, *elements), strains, strict=True)):
        system = strained(atoms, strain, seed=40 + k)
        system.arrays["energy"] *= unit
        system.write(tmp_path / f"s{k}")
    found = suspicions(open_systems(str(tmp_path)))
    assert not any("swapped" in sentence for sentence in found), found
    of_energies = of_systems(s for s in found if "energies are" in s)
    assert bool(of_energies) == (unit != 1.0), found


@pytest.mark.parametrize("transposed", [False, True])
def test_transposed_cells(tmp_path, transposed):
    system = skewed()
    if transposed:
        box = system.arrays["box"].reshape(-1, 3, 3)
        system.arrays["box"] = box.transpose(0, 2, 1).reshape(-1, 9)
    system.write(tmp_path / "s")
    found = suspicions(open_systems(str(tmp_path)))
    assert ["transposed" in sentence for sentence in found] == [True] * transposed, found


def test_a_cell_without_volume_is_a_suspicion(tmp_path):
    (sentence,) = changed(tmp_path / "data", WATER, scaled(box=0.0), only="300K")
    assert "volume" in sentence


def test_single_atoms_and_frames_without_labels_are_fine(tmp_path):
    for name, natoms in (("one", 1), ("two", 2)):
        arrays = {"coord": 0.3 * np.arange(3.0 * natoms)[None], "force": np.zeros((1, 3 * natoms))}
        arrays |= {"energy": np.zeros(1)} if name == "one" else {}
        write_npy(tmp_path / name, [0] * natoms, [arrays], None, nopbc=True)
    assert suspicions(open_systems(str(tmp_path))) == []
    assert suspicions([]) == []


def test_torques_of_linear_molecules_are_rounding(tmp_path):
    rng = np.random.default_rng(5)
    axis = rng.normal(size=(12, 1, 3))
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    ends = np.array([[[-0.5]], [[0.5]]]).reshape(1, 2, 1)
    coord = axis * ends * rng.uniform(0.9, 1.2, (12, 1, 1))
    force = axis * ends * rng.uniform(2.0, 6.0, (12, 1, 1)) + rng.normal(0, 1e-6, (12, 2, 3))
    arrays = {"coord": coord.reshape(12, 6), "force": force.reshape(12, 6)}
    write_npy(tmp_path / "straight", [0, 1], [arrays], ["O", "H"], nopbc=True)
    assert suspicions(open_systems(str(tmp_path))) == []
    turned = {**arrays, "force": np.roll(force, 1, axis=-1).reshape(12, 6)}
    write_npy(tmp_path / "turned", [0, 1], [turned], ["O", "H"], nopbc=True)
    problems = suspicions(open_systems(str(tmp_path)))
    assert of_systems(problems) == {"turned"}
    assert any("torque" in problem for problem in problems)


def test_virials_that_are_not_symmetric(tmp_path):
    def change(arrays):
        if "virial" in arrays:
            arrays["virial"][:, 1] += 5

    assert of_systems(changed(tmp_path / "data", COPPER, change)) == {"fcc32", "triclinic8"}


def _write_hydrocarbons(folder, wrong=()):
    """Write molecules of C and H, some with H first; their energies are sums over atoms."""
    lone_energies = {"H": -13.6, "C": -1030.0}  # [eV]
    names = []
    for number, symbols in enumerate(
        ["CHHHH", "CCHHHHHH", "CCCCHH", "CCCHHHHHHHH", "CCHH", "HCC", "CCCCCHH", "HHHCC"]
    ):
        elements = list(dict.fromkeys(symbols))
        energy = sum(lone_energies[symbol] for symbol in symbols) * (27.2 if number in wrong else 1)
        coord = np.zeros((2, len(symbols), 3))
        coord[..., 0] = 1.1 * np.arange(len(symbols))  # [Å]
        path = folder / f"{number}"
        types = [elements.index(symbol) for symbol in symbols]
        arrays = {"coord": coord.reshape(2, -1), "energy": np.full(2, energy)}
        write_npy(path, types, [arrays], elements, nopbc=True)
        names.append(str(path))
    return names


def test_energies_are_compared_by_element_not_by_the_number_of_a_type(tmp_path, capsys):
    paths = _write_hydrocarbons(tmp_path)
    (elements, others) = {system.type_map for system in open_systems(paths)}
    assert sorted(elements) == sorted(others) == ["C", "H"]
    assert not [text for text in suspicions(open_systems(paths)) if "per atom" in text]
    assert main(["convert-data", *paths, str(tmp_path / "out")]) == 0
    assert "per atom" not in capsys.readouterr().out


def test_an_energy_that_the_others_contradict_is_named_without_a_type_map(tmp_path, capsys):
    paths = _write_hydrocarbons(tmp_path, wrong=(5,))
    assert main(["convert-data", *paths, str(tmp_path / "out")]) == 0
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "per atom" in line]
    assert warning.startswith(f"warning: {paths[5]}: the energy is")


def test_positions_in_bohr_need_known_elements_or_far_atoms(tmp_path):
    """CP2K's kinds such as Fe1 have no radius: oxygens 2.6 Å apart are not the closest atoms."""
    cell = 4.6 * np.eye(3)
    fractions = np.array([[0, 0, 0], [0.5, 0.5, 0.5], [0.5, 0, 0], [0, 0.5, 0.5]])
    arrays = {
        "coord": (fractions @ cell).reshape(1, -1),
        "box": cell.reshape(1, -1),
        "energy": np.zeros(1),
    }
    named = open_systems(write_npy(tmp_path / "kinds", [0, 0, 1, 1], [arrays], ["Fe1", "O"]))
    assert suspicions(named) == []
    bohr = {**arrays, "coord": arrays["coord"] / BOHR, "box": arrays["box"] / BOHR}
    for names in (["Fe1", "O"], ["Fe", "O"]):
        path = write_npy(tmp_path / f"bohr{names[0]}", [0, 0, 1, 1], [bohr], names)
        (sentence,) = suspicions(open_systems(path))
        assert "Bohr" in sentence


def test_energies_alone_do_not_speak_for_positions_in_bohr(tmp_path):
    """Of two checks the distances speak against it; without elements there is one check."""

    def energies_of_bohr(arrays):
        arrays["energy"] = arrays["energy"].mean() + BOHR * (
            arrays["energy"] - arrays["energy"].mean()
        )

    found = changed(tmp_path / "named", COPPER, energies_of_bohr)
    assert not [sentence for sentence in found if "positions" in sentence]
    for path in tmp_path.rglob("type_map.raw"):
        path.unlink()
    nameless = suspicions(open_systems(str(tmp_path / "named")))
    assert [sentence for sentence in nameless if "positions in Bohr" in sentence]


def test_distances_of_an_order_are_not_compared_if_an_element_is_unknown():
    """A part of the atoms would be compared, another one for each order."""
    two = np.arange(2)
    pairs = NearPairs(
        frame=np.zeros(2, dtype=int),
        i=two,
        j=two + 1,
        vector=np.eye(3)[:2],
        distance=np.ones(2),
    )
    types = np.array([0, 1, 2])
    assert labels._strain(pairs, types, [0.5, 0.5, 0.5]) == 0.0
    assert np.isnan(labels._strain(pairs, types, [0.5, 0.5, np.nan]))


@pytest.mark.parametrize(("explained", "doubted"), [(0.86, False), (0.95, True)])
def test_an_order_that_fits_badly_must_fit_the_distances_much_better(
    tmp_path, monkeypatch, explained, doubted
):
    """With C and an O exchanged, GFN2-xTB's forces of formic acid fit by 0.86 instead of 0.74.

    The distances fit by little better.
    """

    def is_exchanged(types):
        return types.tolist() == [1, 2, 2, 0, 0]

    class Fit(labels.PairFit):
        def __init__(self, frames, pairs):
            super().__init__(frames, pairs)
            self.explained = explained if is_exchanged(frames.atype[0]) else 0.74

    def strain(pairs, types, radii):
        return 0.0109 if is_exchanged(types) else 0.0125

    monkeypatch.setattr(labels, "PairFit", Fit)
    monkeypatch.setattr(labels, "_strain", strain)
    sentences = suspicions(open_systems(str(write_set(formic_acid(), tmp_path))))
    assert any("in the order C O O H H" in sentence for sentence in sentences) == doubted
