from pathlib import Path

import h5py
import numpy as np
import pytest

from deepmd_muon.data import open_systems

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WATER = ("300K", "350K", "420K")
COPPER = {"fcc32": 32, "triclinic8": 8, "cluster13": 13}
SYSTEMS = [
    *(("water_xtb", f"{part}/{name}") for part in ("train", "valid") for name in WATER),
    *(("cu_emt", f"{part}/{name}") for part in ("train", "valid") for name in COPPER),
]


def load(example, system):
    folder = EXAMPLES / example / "data" / system
    return {path.stem: np.load(path) for path in sorted((folder / "set.000").glob("*.npy"))}


def types(example, system):
    return np.loadtxt(EXAMPLES / example / "data" / system / "type.raw", dtype=int)


@pytest.mark.parametrize(("example", "system"), SYSTEMS)
def test_shapes_and_precisions(example, system):
    arrays, natoms = load(example, system), len(types(example, system))
    nframes = len(arrays["energy"])
    expected = {
        "coord": ((nframes, 3 * natoms), np.float32),
        "energy": ((nframes,), np.float64),
        "force": ((nframes, 3 * natoms), np.float32),
    }
    if "cluster" not in system:
        expected |= {"box": ((nframes, 9), np.float64), "virial": ((nframes, 9), np.float64)}
    assert {name: (a.shape, a.dtype.type) for name, a in arrays.items()} == expected
    assert nframes >= 10
    assert all(np.isfinite(a).all() for a in arrays.values())


@pytest.mark.parametrize(("example", "system"), SYSTEMS)
def test_hdf5_holds_the_npy_arrays(example, system):
    with h5py.File(EXAMPLES / example / f"{example}.hdf5") as file:
        group = file[system]
        stored = {Path(name).stem: data[()] for name, data in group["set.000"].items()}
        np.testing.assert_array_equal(group["type.raw"][()], types(example, system))
        symbols = [symbol.decode() for symbol in group["type_map.raw"]]
        open_boundary = "nopbc" in group
    arrays = load(example, system)
    assert stored.keys() == arrays.keys()
    for name, array in arrays.items():
        assert stored[name].dtype == array.dtype
        np.testing.assert_array_equal(stored[name], array, err_msg=name)
    folder = EXAMPLES / example / "data" / system
    assert symbols == (folder / "type_map.raw").read_text().split()
    assert open_boundary == (folder / "nopbc").exists() == ("cluster" in system)


@pytest.mark.parametrize("example", ["water_xtb", "cu_emt"])
def test_package_reads_both_forms_alike(example):
    folder, file = EXAMPLES / example / "data", EXAMPLES / example / f"{example}.hdf5"
    names = [system for owner, system in SYSTEMS if owner == example]
    assert (
        len(open_systems([str(folder)], None)) == len(open_systems([str(file)], None)) == len(names)
    )
    for name in names:
        (npy,) = open_systems([str(folder / name)], None)
        (hdf5,) = open_systems([f"{file}#/{name}"], None)
        assert (npy.natoms, npy.nframes, npy.pbc, npy.labels) == (
            hdf5.natoms,
            hdf5.nframes,
            hdf5.pbc,
            hdf5.labels,
        )
        chosen = np.arange(npy.nframes)
        ours, theirs = npy.frames(chosen), hdf5.frames(chosen)
        np.testing.assert_array_equal(ours.coord, theirs.coord)
        np.testing.assert_array_equal(ours.energy, theirs.energy)
        np.testing.assert_array_equal(ours.force, theirs.force)


@pytest.mark.parametrize("system", [name for example, name in SYSTEMS if example == "water_xtb"])
def test_water_is_liquid_water(system):
    arrays, atype = load("water_xtb", system), types("water_xtb", system)
    molecules = (atype == 0).sum()
    np.testing.assert_array_equal(atype, np.tile([0, 1, 1], molecules))
    box = arrays["box"].reshape(-1, 3, 3)
    np.testing.assert_array_equal(box, np.broadcast_to(np.eye(3) * box[0, 0, 0], box.shape))
    density = molecules * 18.01528 / (0.602214 * box[0, 0, 0] ** 3)
    assert density == pytest.approx(1.0, abs=1e-3)
    molecule = arrays["coord"].astype(float).reshape(-1, molecules, 3, 3)
    bonds = np.linalg.norm(molecule[:, :, 1:] - molecule[:, :, :1], axis=-1)
    # no molecule has dissociated or exchanged a proton
    assert 0.75 < bonds.min() < bonds.mean() < 1.05
    assert bonds.max() < 1.4
    # a lone GFN1-xTB molecule has -156.967 eV; the liquid is bound by a fraction of an eV
    per_molecule = arrays["energy"] / molecules
    assert -157.6 < per_molecule.min() < per_molecule.max() < -156.6
    force = arrays["force"].reshape(len(per_molecule), -1, 3)
    assert np.abs(force).max() < 15.0
    np.testing.assert_allclose(force.sum(axis=1), 0.0, atol=1e-4)
    virial = arrays["virial"].reshape(-1, 3, 3)
    np.testing.assert_allclose(virial, virial.transpose(0, 2, 1), atol=1e-9)
    # a GPa is 4.5 eV in this box
    assert np.abs(virial).max() < 40.0


def water_blocks(name):
    """Training and validation positions ``(nframes, molecules, 3, 3)`` and the box length."""
    train, valid = load("water_xtb", f"train/{name}"), load("water_xtb", f"valid/{name}")
    molecules = train["coord"].shape[1] // 9
    shape = (-1, molecules, 3, 3)
    return (
        train["coord"].astype(float).reshape(shape),
        valid["coord"].astype(float).reshape(shape),
        train["box"][0, 0],
    )


def nearest_image(vector, length):
    return vector - length * np.round(vector / length)


@pytest.mark.parametrize("name", WATER)
def test_blocks_stand_further_apart_than_consecutive_frames(name):
    train, valid, length = water_blocks(name)

    def distance(a, b):
        shift = (a - b).reshape(len(b), -1, 3)
        shift = nearest_image(shift - shift.mean(axis=1, keepdims=True), length)
        return np.sqrt((shift**2).sum(axis=2).mean(axis=1))

    consecutive = distance(train[1:], train[:-1])
    nearest = [distance(frame, train).min() for frame in valid]
    assert np.mean(consecutive) < 1.5
    assert min(nearest) > 2.5


@pytest.mark.parametrize("name", WATER)
def test_validation_frames_are_no_copies_with_molecules_renamed(name):
    """Match the molecules of two frames by their oxygen atoms first, and hydrogen atoms in the better order."""
    assign = pytest.importorskip("scipy.optimize").linear_sum_assignment
    train, valid, length = water_blocks(name)
    nearest = np.inf
    for frame in valid[::4]:
        for other in train:
            apart = nearest_image(frame[:, None, 0] - other[None, :, 0], length)
            rows, columns = assign((apart**2).sum(axis=-1))
            same = nearest_image(frame[rows] - other[columns], length)
            swapped = nearest_image(frame[rows] - other[columns][:, [0, 2, 1]], length)
            squares = np.minimum((same**2).sum(axis=(1, 2)), (swapped**2).sum(axis=(1, 2)))
            nearest = min(nearest, np.sqrt(squares.mean() / 3))
    assert nearest > 1.5


@pytest.mark.parametrize("system", [name for example, name in SYSTEMS if example == "cu_emt"])
def test_copper_labels_are_emt(system):
    ase = pytest.importorskip("ase")
    from ase.calculators.emt import EMT
    from ase.stress import voigt_6_to_full_3x3_stress

    arrays = load("cu_emt", system)
    natoms = COPPER[system.split("/")[1]]
    for k, coord in enumerate(arrays["coord"].astype(float)):
        atoms = ase.Atoms(f"Cu{natoms}", positions=coord.reshape(-1, 3))
        if "box" in arrays:
            atoms.set_cell(arrays["box"][k].reshape(3, 3))
            atoms.pbc = True
        atoms.calc = EMT()
        assert atoms.get_potential_energy() == pytest.approx(arrays["energy"][k], abs=1e-8)
        np.testing.assert_allclose(
            arrays["force"][k].reshape(-1, 3), atoms.get_forces(), rtol=0, atol=1e-6
        )
        if "virial" in arrays:
            virial = -atoms.get_volume() * voigt_6_to_full_3x3_stress(atoms.get_stress())
            np.testing.assert_allclose(arrays["virial"][k].reshape(3, 3), virial, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["fcc32", "triclinic8"])
def test_copper_virial_is_minus_the_strain_derivative(name):
    ase = pytest.importorskip("ase")
    from ase.calculators.emt import EMT

    arrays = load("cu_emt", f"valid/{name}")
    cell, coord = arrays["box"][0].reshape(3, 3), arrays["coord"][0].astype(float).reshape(-1, 3)

    def energy(strain):
        deform = np.eye(3) + strain
        atoms = ase.Atoms(f"Cu{len(coord)}", positions=coord @ deform, cell=cell @ deform, pbc=True)
        atoms.calc = EMT()
        return atoms.get_potential_energy()

    step, numeric = 1e-5, np.empty((3, 3))
    for i, j in np.ndindex(3, 3):
        strain = np.zeros((3, 3))
        strain[i, j] += step / 2
        strain[j, i] += step / 2
        numeric[i, j] = -(energy(strain) - energy(-strain)) / (2 * step)
    np.testing.assert_allclose(arrays["virial"][0].reshape(3, 3), numeric, rtol=0, atol=1e-5)


def test_committed_files_stay_small():
    for example, limit in (("water_xtb", 3_000_000), ("cu_emt", 300_000)):
        folder = EXAMPLES / example
        files = [
            folder / f"{example}.hdf5",
            *(path for path in (folder / "data").rglob("*") if path.is_file()),
        ]
        assert sum(path.stat().st_size for path in files) <= limit


def test_the_extended_xyz_of_copper_and_gold_holds_emts_labels():
    pytest.importorskip("ase")
    from ase.calculators.emt import EMT
    from ase.io import read

    frames = read(EXAMPLES / "cu_au_emt" / "all.xyz", ":")
    assert len(frames) == 200
    assert len({frame.symbols.formula.format("hill") for frame in frames}) == 5
    systems = open_systems(str(EXAMPLES / "cu_au_emt" / "all.xyz"))
    assert [system.nframes for system in systems] == [40] * 5
    for number, system in zip(range(7, 200, 40), systems, strict=True):
        frame, stored = frames[number], system.frames(np.array([7]))
        frame.calc = EMT()
        assert stored.energy[0] == pytest.approx(frame.get_potential_energy(), abs=1e-7)
        np.testing.assert_allclose(stored.force[0].reshape(-1, 3), frame.get_forces(), atol=1e-6)
        virial = -frame.get_volume() * frame.get_stress(voigt=False)
        np.testing.assert_allclose(stored.virial[0].reshape(3, 3), virial, atol=1e-5)
