"""Frame and atomic parameters in every kind of data: what systems read, what they refuse, what conversions keep."""

import pickle

import numpy as np
import pytest
from write_systems import make_arrays, write_hdf5, write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.data import (
    DataError,
    DataLoader,
    Frames,
    NeighborCache,
    Parameters,
    SystemFormatError,
    data_fingerprint,
    open_systems,
    with_parameters,
)

WANTED = Parameters(2, 3)


def arrays_of(nframes, natoms, seed, parameters=("fparam", "aparam")):
    rng = np.random.default_rng(100 + seed)
    found = {
        "fparam": rng.normal(size=(nframes, 2)),
        "aparam": rng.normal(size=(nframes, 3 * natoms)),
    }
    return make_arrays(nframes, natoms, seed) | {name: found[name] for name in parameters}


def test_systems_carry_what_they_are_asked_for(tmp_path):
    arrays = arrays_of(4, 5, 1)
    paths = [
        write_npy(tmp_path / "npy", [0, 1, 0, 0, 1], [arrays]),
        write_hdf5(tmp_path / "data.hdf5", "a", [0, 1, 0, 0, 1], [arrays]),
    ]
    for system in open_systems(paths):
        assert system.frames([0]).fparam is None
        read = pickle.loads(pickle.dumps(system.with_parameters(WANTED))).frames([3, 1])
        np.testing.assert_array_equal(read.fparam, arrays["fparam"][[3, 1]])
        np.testing.assert_array_equal(read.aparam, arrays["aparam"].reshape(4, 5, 3)[[3, 1]])
        only = (
            system.with_parameters(Parameters(aparam=3))
            .part(1, 3)
            .with_types(["B", "A"])
            .frames([0])
        )
        assert only.fparam is None
        np.testing.assert_array_equal(only.aparam[0], arrays["aparam"].reshape(4, 5, 3)[1])


def test_one_value_a_frame_needs_no_axis_of_its_own(tmp_path):
    arrays = make_arrays(3, 2) | {"fparam": np.array([1.0, 2.0, 3.0])}
    alone = make_arrays(1, 2) | {"fparam": np.array([7.0, 8.0])}  # a set of one frame
    (system,) = open_systems(write_npy(tmp_path / "a", [0, 1], [arrays]))
    assert system.with_parameters(Parameters(fparam=1)).frames([0, 2]).fparam.tolist() == [
        [1.0],
        [3.0],
    ]
    (system,) = open_systems(write_npy(tmp_path / "b", [0, 1], [alone]))
    assert system.with_parameters(Parameters(fparam=2)).frames([0]).fparam.tolist() == [[7.0, 8.0]]


def test_a_default_stands_for_frames_without(tmp_path):
    sets = [arrays_of(2, 3, 1, ()), arrays_of(2, 3, 2, ("fparam",))]
    (system,) = open_systems(write_npy(tmp_path / "a", [0, 1, 0], sets))
    with_default = system.with_parameters(Parameters(2, 0, (0.5, -1.0)))
    found = with_default.frames([0, 3, 1]).fparam
    np.testing.assert_array_equal(found, [[0.5, -1.0], sets[1]["fparam"][1], [0.5, -1.0]])
    np.testing.assert_array_equal(with_default.frames([0, 1]).fparam, [[0.5, -1.0]] * 2)
    with pytest.raises(SystemFormatError, match=r"set.000/fparam.npy: missing.*default_fparam"):
        system.with_parameters(Parameters(2))
    other = system.with_parameters(Parameters(2, 0, (0.5, -2.0)))
    assert data_fingerprint([with_default]) != data_fingerprint([other])


def test_all_problems_are_told_at_once(tmp_path):
    good, wide = arrays_of(2, 3, 1), arrays_of(2, 3, 3)
    wide["aparam"] = wide["aparam"][:, :-1]
    paths = [
        write_npy(tmp_path / name, [0, 1, 0], [arrays])
        for name, arrays in {
            "good": good,
            "bare": arrays_of(2, 3, 2, ("aparam",)),
            "wide": wide,
        }.items()
    ]
    systems = open_systems(paths)
    with pytest.raises(DataError) as error:
        with_parameters(systems, WANTED)
    text = str(error.value)
    for word in (
        "2 of 3 systems",
        "bare",
        "set.000/fparam.npy",
        "wide",
        "set.000/aparam.npy",
        "(2, 9)",
        "(2, 8)",
    ):
        assert word in text, text
    assert f"{tmp_path}/good" not in text
    assert [system.name for system in with_parameters(systems, Parameters())] == paths
    spoiled = arrays_of(2, 3, 1)
    spoiled["fparam"][1, 0] = np.nan
    (system,) = open_systems(write_npy(tmp_path / "nan", [0, 1, 0], [spoiled]))
    with pytest.raises(SystemFormatError, match=r"fparam.npy: value that is not finite in frame 1"):
        system.with_parameters(WANTED).frames([1])


def test_mixed_types_and_batches_of_several_systems(tmp_path):
    mixed = arrays_of(2, 4, 5)
    mixed["real_atom_types"] = np.array([[0, 1, 1, -1], [1, 0, 0, 1]])
    paths = [
        write_npy(tmp_path / "mixed", [0] * 4, [mixed]),
        write_npy(tmp_path / "small", [0, 1], [arrays_of(3, 2, 6)]),
    ]
    systems = with_parameters(open_systems(paths), WANTED)
    loader = DataLoader(systems, "mixed:4", cache=NeighborCache(3.0, (20, 20), True), seed=1)
    frames = loader.next().frames
    assert (frames.fparam.shape, frames.aparam.shape) == ((4, 2), (4, 4, 3))
    parts = Frames.concatenate([system.frames([1]) for system in systems])
    np.testing.assert_array_equal(parts.aparam[0], mixed["aparam"].reshape(2, 4, 3)[1])
    assert not parts.aparam[1, 2:].any()
    np.testing.assert_array_equal(parts.rows(slice(1, 2)).fparam, parts.fparam[1:])


@pytest.mark.parametrize("target", ["npy", "out.hdf5", "out.lmdb", "out.xyz"])
def test_a_conversion_keeps_parameters(target, tmp_path):
    for module in {"out.lmdb": ("lmdb", "msgpack"), "out.xyz": ("ase",)}.get(target, ()):
        pytest.importorskip(module)
    names = ("H", "O")
    paths = [
        write_npy(
            tmp_path / "in" / "a", [0, 1, 0], [arrays_of(2, 3, 1), arrays_of(1, 3, 2, ())], names
        ),
        write_npy(tmp_path / "in" / "b", [0, 1], [arrays_of(2, 2, 3, ("fparam",))], names),
    ]
    assert main(["convert-data", *paths, str(tmp_path / target), "-v", "ERROR"]) == 0
    before = [s.with_all_parameters().frames(range(s.nframes)) for s in open_systems(paths, names)]
    after = [s.with_all_parameters() for s in open_systems(str(tmp_path / target), names)]
    wanted = {frames.nframes: frames for frames in before}
    for system in after:
        found = system.frames(range(system.nframes))
        expected = wanted[system.nframes]
        rows = np.argsort(found.energy)[
            np.argsort(np.argsort(expected.energy))
        ]  # sets may come in another order
        found = system.frames(rows)
        np.testing.assert_allclose(found.fparam, expected.fparam, rtol=1e-7, equal_nan=True)
        assert found.present("fparam").tolist() == expected.present("fparam").tolist()
        if expected.aparam is None:
            assert found.aparam is None
        else:
            np.testing.assert_allclose(found.aparam, expected.aparam, rtol=1e-7, equal_nan=True)
    assert sorted(system.nframes for system in after) == [2, 3]


def test_charge_and_spin_are_read_completed_and_kept(tmp_path):
    """Frames without the file have the default; fparam comes first in what a model reads."""
    charge_spin = np.array([[1.0, 2.0], [-1.0, 0.0]])
    sets = [arrays_of(2, 3, 1, ("fparam",)), arrays_of(2, 3, 2, ("fparam",))]
    sets[0]["charge_spin"] = charge_spin
    path = write_npy(tmp_path / "npy", [0, 1, 1], sets, ["H", "O"])
    wanted = Parameters(fparam=2, charge_spin=2, default_charge_spin=(0.0, 1.0))
    assert wanted.of_frame == 4
    assert wanted.required
    (system,) = with_parameters(open_systems(path), wanted)
    frames = system.frames(range(4))
    expected = np.concatenate([charge_spin, [[0.0, 1.0]] * 2])
    np.testing.assert_array_equal(frames.charge_spin, expected)
    np.testing.assert_array_equal(frames.frame_parameters[:, 2:], expected)
    np.testing.assert_array_equal(frames.frame_parameters[:, :2], frames.fparam)
    with pytest.raises(DataError, match="default_chg_spin"):
        with_parameters(open_systems(path), wanted._replace(default_charge_spin=None))
    for output in ("data.xyz", "data.hdf5", "data.lmdb"):
        pytest.importorskip({"data.xyz": "ase", "data.hdf5": "h5py"}.get(output, "lmdb"))
        assert main(["convert-data", path, str(tmp_path / output)]) == 0
        converted = open_systems(str(tmp_path / output))
        frames = [part.with_parameters(wanted).frames(range(part.nframes)) for part in converted]
        read = np.concatenate([part.charge_spin for part in frames])
        assert sorted(read.tolist()) == sorted(expected.tolist())


def spins_of(arrays, seed):
    """The arrays with spins and magnetic forces of all atoms."""
    random = np.random.default_rng(seed)
    shape = arrays["coord"].shape
    return arrays | {name: random.normal(size=shape) for name in ("spin", "force_mag")}


@pytest.mark.parametrize("kind", ["npy", "out.hdf5", "out.lmdb", "out.xyz"])
def test_spins_and_magnetic_forces_are_read_from_all_stores(kind, tmp_path):
    """Sets without them are refused, or have zeros if the model allows it."""
    for module in {"out.lmdb": ("lmdb", "msgpack"), "out.xyz": ("ase",)}.get(kind, ()):
        pytest.importorskip(module)
    arrays = spins_of(make_arrays(2, 3), 1)
    path = write_npy(tmp_path / "in", [0, 1, 0], [arrays], ("Ni", "O"))
    assert main(["convert-data", path, str(tmp_path / kind), "-v", "ERROR"]) == 0
    (system,) = open_systems(str(tmp_path / kind), ("O", "Ni"))
    assert {"energy", "force", "force_mag"} <= system.labels
    wanted = Parameters(spin=3)
    frames = system.with_parameters(wanted).frames([1])
    for name in ("spin", "force_mag"):
        expected = arrays[name][1:].reshape(1, 3, 3)
        np.testing.assert_allclose(getattr(frames, name), expected, rtol=1e-7)
    np.testing.assert_array_equal(frames.atomic_parameters, frames.spin)
    longest = np.linalg.norm(arrays["spin"].reshape(2, 3, 3), axis=2).max()
    assert system.with_parameters(wanted).longest_spin() == pytest.approx(longest, rel=1e-7)


def test_missing_spins_are_named_or_zero(tmp_path):
    mixed = spins_of(make_arrays(2, 4), 1)
    mixed["real_atom_types"] = np.array([[0, 1, 1, -1], [1, 0, 0, 1]])
    paths = [
        write_npy(tmp_path / "mixed", [0] * 4, [mixed]),
        write_npy(tmp_path / "bare", [0, 1], [make_arrays(3, 2)]),
    ]
    systems = open_systems(paths)
    with pytest.raises(DataError, match="the spin of each atom"):
        with_parameters(systems, Parameters(spin=3))
    ready = with_parameters(systems, Parameters(spin=3, default_spin=(0.0, 0.0, 0.0), aparam=0))
    frames = Frames.concatenate([system.frames([1]) for system in ready])
    np.testing.assert_array_equal(frames.spin[0], mixed["spin"].reshape(2, 4, 3)[1])
    assert not frames.spin[1].any()
    assert frames.present("force_mag").tolist() == [True, False]


def test_one_number_of_a_frame_named_spin_is_no_spin_of_atoms(tmp_path):
    arrays = make_arrays(2, 3) | {"spin": np.array([[1.0], [2.0]])}
    (system,) = open_systems(write_npy(tmp_path / "a", [0, 1, 0], [arrays]))
    assert system.with_all_parameters().frames([0]).spin is None
    with pytest.raises(SystemFormatError, match=r"spin\.npy"):
        system.with_parameters(Parameters(spin=3))
