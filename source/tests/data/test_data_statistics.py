"""Energy per type and the file of statistics."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from write_systems import make_arrays, write_npy

from deepmd_muon.data import (
    DataError,
    Parameters,
    StatFile,
    data_fingerprint,
    energy_bias,
    open_systems,
)


def test_bias_is_found_exactly_when_energies_are_sums():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 20, (30, 3))
    bias = np.array([-431.2, -13.6, 2.5])
    np.testing.assert_allclose(energy_bias(counts, counts @ bias), bias, rtol=1e-12)


def test_bias_solves_the_normal_equations():
    rng = np.random.default_rng(1)
    counts, energies = rng.integers(1, 20, (30, 3)), rng.standard_normal(30)
    bias = energy_bias(counts, energies[:, None])
    np.testing.assert_allclose(counts.T @ (counts @ bias - energies), 0, atol=1e-10)


def test_one_composition_gets_the_smallest_solution():
    """Water only: (64, 128) atoms, so the bias lies along the composition; absent types get zero."""
    counts = np.array([[64, 128, 0]] * 5)
    energies = np.full(5, -466.0 * 64)
    bias = energy_bias(counts, energies)
    np.testing.assert_allclose(bias, -466.0 / 5 * np.array([1, 2, 0]), atol=1e-9)


def test_fixed_energies_stay():
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 20, (30, 3))
    counts_before = counts.copy()
    energies = counts @ np.array([-4.0, -1.0, 3.0])
    bias = energy_bias(counts, energies, fixed=np.array([np.nan, -1.0, np.nan]))
    np.testing.assert_allclose(bias, [-4, -1, 3], rtol=1e-12)
    bias = energy_bias(counts, energies, fixed=np.array([np.nan, 5.0, np.nan]))
    rest = energies - 5.0 * counts[:, 1]
    first, last = np.linalg.lstsq(counts[:, [0, 2]].astype(float), rest, rcond=None)[0]
    np.testing.assert_allclose(bias, [first, 5.0, last], rtol=1e-10)
    np.testing.assert_array_equal(counts, counts_before)
    bias = energy_bias(counts, energies, fixed=np.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(bias, [1, 2, 3])


def test_rcond_cuts_small_directions():
    counts = np.array([[10, 10], [10, 11], [11, 10]])
    energies = counts @ np.array([1.0, 3.0])
    np.testing.assert_allclose(energy_bias(counts, energies), [1, 3])
    assert abs(np.diff(energy_bias(counts, energies, rcond=0.5))[0]) < 0.2


def test_bias_shapes_are_checked():
    with pytest.raises(DataError, match="do not fit 3 energies"):
        energy_bias(np.ones((2, 2)), np.ones(3))
    with pytest.raises(DataError, match=r"expected \(2,\)"):
        energy_bias(np.ones((3, 2)), np.ones(3), fixed=np.ones(3))


KEY = {"rcut": 6.0, "type_map": ["O", "H"], "data": "abc"}


def test_entries_come_back_for_the_same_key_only(tmp_path):
    file = StatFile(tmp_path / "below" / "stat.hdf5")
    assert file.load(KEY) is None
    mean = np.random.default_rng(0).standard_normal((2, 4))
    file.save(KEY, {"mean": mean, "bias": np.array([1.0])})
    file.save({**KEY, "rcut": 7.0}, {"mean": mean + 1})
    again = StatFile(tmp_path / "below" / "stat.hdf5")
    found = again.load(dict(reversed(KEY.items())))
    assert set(found) == {"mean", "bias"}
    np.testing.assert_array_equal(found["mean"], mean)
    np.testing.assert_array_equal(again.load({**KEY, "rcut": 7.0})["mean"], mean + 1)
    assert again.load({**KEY, "data": "abd"}) is None
    again.save(KEY, {"mean": mean * 2})
    assert set(file.load(KEY)) == {"mean"}
    assert [p.name for p in (tmp_path / "below").iterdir()] == ["stat.hdf5"]


def test_what_others_keep_is_left_alone(tmp_path):
    path = tmp_path / "stat.hdf5"
    with h5py.File(path, "w") as file:
        file["O H/bias_atom_energy"] = [1.0, 2.0]
    StatFile(path).save(KEY, {"mean": np.zeros(3)})
    with h5py.File(path) as file:
        assert file["O H/bias_atom_energy"][()].tolist() == [1.0, 2.0]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = StatFile(tmp_path / "stat.hdf5")
    file.save(KEY, {"mean": np.zeros(3)})
    before = file.path.read_bytes()
    with pytest.raises(TypeError):
        file.save(KEY, {"mean": np.array([object()])})
    assert file.path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_changed_numbers_and_lost_checksums_are_found(tmp_path):
    file = StatFile(tmp_path / "stat.hdf5")
    file.save(KEY, {"mean": np.arange(3.0)})
    with h5py.File(file.path, "r+") as content:
        (entry,) = content["deepmd_muon"].values()
        entry["mean"][1] = 1.5
    with pytest.raises(DataError, match=r"stat\.hdf5.*checksum"):
        file.load(KEY)
    with h5py.File(file.path, "r+") as content:
        (entry,) = content["deepmd_muon"].values()
        del entry.attrs["sha256"]
    with pytest.raises(DataError, match="damaged"):
        file.load(KEY)


def test_strings_in_place_of_numbers_are_not_read(tmp_path):
    file = StatFile(tmp_path / "stat.hdf5")
    file.save(KEY, {"mean": np.arange(3.0)})
    with h5py.File(file.path, "r+") as content:
        (entry,) = content["deepmd_muon"].values()
        del entry["mean"]
        entry["mean"] = ["a", "b"]
    with pytest.raises(DataError, match=r"stat\.hdf5.*mean"):
        file.load(KEY)


def test_no_statistics_file(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        StatFile(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match="not an HDF5 file"):
        StatFile(tmp_path / "text").load(KEY)


def test_frames_without_energy_are_left_out_of_the_bias():
    counts = np.array([[1, 2], [2, 1], [5, 5], [3, 4]])
    energies = counts @ np.array([-3.0, 1.5])
    energies[2] = np.nan
    np.testing.assert_allclose(energy_bias(counts, energies), [-3.0, 1.5], atol=1e-12)
    bias = energy_bias(counts, energies, np.array([-3.0, np.nan]))
    np.testing.assert_allclose(bias, [-3.0, 1.5], atol=1e-12)


NFRAMES, NATOMS = 6, 4


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return make_arrays(NFRAMES, NATOMS, labels=("energy", "force", "virial")) | {
        "fparam": rng.standard_normal((NFRAMES, 2)),
        "aparam": rng.standard_normal((NFRAMES, NATOMS)),
        "real_atom_types": rng.integers(0, 2, (NFRAMES, NATOMS)),
    }


@pytest.fixture(scope="module")
def fingerprints_of(tmp_path_factory):
    """A function that gives the fingerprints of a mixed-type system: of all frames, of each."""
    folder = tmp_path_factory.mktemp("fingerprints") / "sys"

    def fingerprints(arrays):
        write_npy(folder, [0] * NATOMS, [arrays])
        systems = [system.with_parameters(Parameters(2, 1)) for system in open_systems(str(folder))]
        of_frames = [data_fingerprint(systems, [np.array([k])]) for k in range(NFRAMES)]
        return data_fingerprint(systems), of_frames

    return fingerprints


@pytest.fixture(scope="module")
def expected(fingerprints_of, arrays):
    return fingerprints_of(arrays)


@given(data=st.data())
def test_a_change_of_any_number_changes_the_fingerprint(fingerprints_of, arrays, expected, data):
    name = data.draw(st.sampled_from(sorted(arrays)))
    frame = data.draw(st.integers(0, NFRAMES - 1))
    values = arrays[name].copy()
    row = values.reshape(NFRAMES, -1)[frame]
    place = data.draw(st.integers(0, row.size - 1))
    row[place] = 1 - row[place] if name == "real_atom_types" else np.nextafter(row[place], 9.0)
    whole, of_frames = fingerprints_of({**arrays, name: values})
    assert whole != expected[0]
    same = [new == old for new, old in zip(of_frames, expected[1], strict=True)]
    assert same == [k != frame for k in range(NFRAMES)]


def test_elements_exchanged_in_every_frame_change_the_fingerprint(
    fingerprints_of, arrays, expected
):
    exchanged = {**arrays, "real_atom_types": 1 - arrays["real_atom_types"]}
    assert fingerprints_of(exchanged)[0] != expected[0]
