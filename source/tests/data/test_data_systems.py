"""Systems are read as they were written, from every format, and what is wrong with them is said."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from write_systems import make_arrays, write, write_hdf5, write_npy

from deepmd_muon.data import (
    Frames,
    Parameters,
    System,
    SystemFormatError,
    SystemNotFoundError,
    TypeMapError,
    data_fingerprint,
    open_systems,
    with_common_types,
)
from deepmd_muon.data.checks.digest import fingerprint
from deepmd_muon.data.frames import LABELS
from deepmd_muon.data.stores import npy_store, storage
from deepmd_muon.data.stores.hdf5_store import HDF5Store
from deepmd_muon.data.stores.npy_store import npy_stores
from deepmd_muon.data.stores.storage import HandleCache

TYPES = [1, 0, 0, 1]


def check_frames(frames: Frames, sets, indices, natoms=4):
    """Compare frames with the arrays they were written from."""
    joined = {name: np.concatenate([s[name] for s in sets]) for name in sets[0]}
    shapes = {
        "coord": (-1, natoms, 3),
        "box": (-1, 3, 3),
        "energy": (-1,),
        "weight": (-1,),
        "force": (-1, natoms, 3),
        "force_mag": (-1, natoms, 3),
        "virial": (-1, 9),
    }
    for name, values in joined.items():
        expected = values[indices].reshape(shapes.get(name, (-1, natoms)))
        np.testing.assert_array_equal(getattr(frames, name), expected, err_msg=name)
        assert getattr(frames, name).dtype == np.float64


@pytest.mark.parametrize("kind", ["npy", "hdf5", "hdf5 compressed"])
def test_frames_of_several_sets_in_any_order(tmp_path, kind):
    sets = [make_arrays(n, 4, seed=n, labels=tuple(LABELS)) for n in (5, 1, 3)]
    options = {"chunks": True, "compression": "gzip"} if "compressed" in kind else {}
    (system,) = open_systems([write(kind, tmp_path, TYPES, sets, **options)])
    assert (system.natoms, system.nframes, system.pbc, system.mixed) == (4, 9, True, False)
    assert system.labels == set(LABELS)
    for indices in ([0], [8, 0, 5, 5, 2], list(range(9)), [6, 7], [5]):
        frames = system.frames(indices)
        check_frames(frames, sets, indices)
        np.testing.assert_array_equal(frames.atype, [TYPES] * len(indices))
    with pytest.raises(IndexError, match="frames 0 to 8"):
        system.frames([9])


def test_folders_are_read_without_importing_torch_or_what_other_files_need(tmp_path):
    write_npy(tmp_path / "s", TYPES, [make_arrays(2, 4)])
    code = "import sys; from deepmd_muon.data import open_systems; open_systems(sys.argv[1]); print(*sys.modules)"
    words = [sys.executable, "-c", code, str(tmp_path / "s")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not {"h5py", "ase", "torch", "vesin"} & set(done.stdout.split())


def test_float32_files_and_single_frames_without_frame_axis(tmp_path):
    arrays = make_arrays(1, 4)
    flat = {name: values.astype(np.float32).reshape(-1) for name, values in arrays.items()}
    flat["energy"] = flat["energy"].reshape(())
    path = write_npy(tmp_path / "sys", TYPES, [flat])
    (system,) = open_systems(path)
    check_frames(system.frames([0]), [{k: v.astype(np.float32) for k, v in arrays.items()}], [0])


SHAPES = {  # of arrays for 5 frames of 4 atoms, in which deepmd-kit's dp test finds the same values
    "energy": [(5, 1), (1, 5), (5, 1, 1)],
    "force": [(60,), (20, 3), (1, 60), (1, 20, 3), (5, 4, 3)],
    "virial": [(45,), (15, 3), (5, 3, 3), (1, 1, 45)],
    "box": [(15, 3), (45,)],
    "fparam": [(10,), (1, 5, 2)],
    "aparam": [(1, 20), (20,), (20, 1), (5, 4, 1)],
}


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_frames_may_share_an_axis_with_their_values(tmp_path, kind):
    arrays = make_arrays(5, 4, labels=("energy", "force", "virial")) | {
        "fparam": np.arange(10.0).reshape(5, 2),
        "aparam": np.arange(20.0).reshape(5, 4),
    }

    def opened(folder, changed):
        folder.mkdir()
        first = make_arrays(2, 4, labels=()) | small
        (system,) = open_systems([write(kind, folder, TYPES, [first, changed])])
        return system.with_parameters(Parameters(2, 1)).with_types(["B", "A"])

    small = {"fparam": np.ones((2, 2)), "aparam": np.ones((2, 4))}
    plain = opened(tmp_path / "plain", arrays).frames([6, 3, 1, 2])
    for name, shapes in SHAPES.items():
        for k, shape in enumerate(shapes):
            order = "F" if k == 1 else "C"  # the order in the file is not that of the axes
            values = np.asarray(arrays[name].reshape(shape), order=order)
            found = opened(tmp_path / f"{name}{k}", arrays | {name: values}).frames([6, 3, 1, 2])
            expected = getattr(plain, name)
            np.testing.assert_array_equal(getattr(found, name), expected, f"{name} {shape}")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("force", (3, 20)),
        ("force", (4, 15)),
        ("force", (10, 6)),
        ("energy", (1, 5, 2)),
        ("coord", (60,)),
    ],
)
def test_rejects_arrays_whose_axes_do_not_tell_the_frames(tmp_path, name, shape):
    arrays = make_arrays(5, 4) | {name: np.ones(shape)}
    with pytest.raises(SystemFormatError) as error:
        open_systems(write_npy(tmp_path / "s", TYPES, [arrays]))
    assert str(shape) in str(error.value) or name == "coord"


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_a_label_of_some_sets_is_there_for_their_frames(tmp_path, kind):
    first = make_arrays(3, 4, labels=("energy", "force", "virial"))
    second = make_arrays(2, 4, seed=1, labels=("energy", "atom_ener"))
    path = write(kind, tmp_path, TYPES, [first, second])
    (system,) = open_systems(path)
    assert system.labels == {"energy", "force", "virial", "atom_ener"}
    both = system.frames([4, 1, 0])
    for label, expected in {
        "energy": [True, True, True],
        "force": [False, True, True],
        "virial": [False, True, True],
        "atom_ener": [True, False, False],
        "atom_pref": [False, False, False],
    }.items():
        np.testing.assert_array_equal(both.present(label), expected, err_msg=label)
    np.testing.assert_array_equal(both.force[1:], first["force"][[1, 0]].reshape(2, 4, 3))
    assert np.isnan(both.force[0]).all()
    np.testing.assert_array_equal(both.atom_ener[0], second["atom_ener"][1])
    # Frames of one set look as if there were no other.
    assert system.frames([0, 2]).labels == {"energy", "force", "virial"}
    assert system.frames([3, 4]).labels == {"energy", "atom_ener"}
    assert fingerprint(system) == fingerprint(open_systems(path)[0])


def test_runs_of_frames_with_the_same_labels(tmp_path):
    energies_only = make_arrays(2, 4, labels=("energy",))
    sets = [make_arrays(3, 4), energies_only, energies_only]
    (system,) = open_systems(write_npy(tmp_path / "sys", TYPES, sets))
    frames = system.frames([0, 1, 3, 6, 2, 4])
    runs = list(frames.runs())
    assert runs == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)]
    parts = [frames.rows(run) for run in runs]
    assert [part.labels for part in parts] == [{"energy", "force"}, {"energy"}] * 2
    np.testing.assert_array_equal(np.concatenate([part.energy for part in parts]), frames.energy)
    assert list(parts[0].runs()) == [slice(0, 2)]


def test_atomic_spelling_of_atom_labels(tmp_path):
    arrays = make_arrays(3, 4, labels=("atom_ener",))
    arrays["atomic_ener"] = arrays.pop("atom_ener")
    (system,) = open_systems(write_npy(tmp_path / "sys", TYPES, [arrays]))
    np.testing.assert_array_equal(system.frames([2]).atom_ener, arrays["atomic_ener"][[2]])


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_nopbc_has_no_box(tmp_path, kind):
    (system,) = open_systems(write(kind, tmp_path, TYPES, [make_arrays(2, 4)], nopbc=True))
    assert not system.pbc
    assert system.frames([1]).box is None


def test_search_of_folders_and_files(tmp_path):
    arrays = make_arrays(2, 4)
    for name in ("x/b", "x/a/deeper", "x/a"):
        write_npy(tmp_path / name, TYPES, [arrays])
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "x" / "loop").symlink_to(tmp_path / "x")
    write_hdf5(tmp_path / "d.hdf5", "g/two", TYPES, [arrays])
    write_hdf5(tmp_path / "d.hdf5", "one", TYPES, [arrays])
    file = f"{tmp_path}/d.hdf5"
    names = [s.name for s in open_systems([f"{tmp_path}/link", file, f"{file}#/g", f"{file}#one"])]
    folders = [f"{tmp_path}/link/{name}" for name in ("a", "a/deeper", "b")]
    assert names == [*folders, *[f"{file}#/g/two", f"{file}#/one"] * 2]
    write_hdf5(tmp_path / "root.hdf5", "", TYPES, [arrays])
    (system,) = open_systems(f"{tmp_path}/root.hdf5")
    check_frames(system.frames([1]), [arrays], [1])


def test_paths_without_systems(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no data")
    write_hdf5(tmp_path / "d.hdf5", "one", TYPES, [make_arrays(2, 4)])
    for path, message in [
        (f"{tmp_path}/none", "does not exist"),
        (f"{tmp_path}/empty", "type.raw"),
        (f"{tmp_path}/file", "neither a folder, an HDF5 file nor a file that ASE reads"),
        (f"{tmp_path}/d.hdf5#/two", r"no group /two; it has \['one'\]"),
        (f"{tmp_path}/none.hdf5#/two", "does not exist"),
    ]:
        with pytest.raises(SystemNotFoundError, match=message):
            open_systems([path])
    with pytest.raises(SystemNotFoundError, match="no systems given"):
        open_systems([])


# -- types -----------------------------------------------------------------------------------------------------


def test_type_map_is_translated(tmp_path):
    path = write_npy(tmp_path / "sys", [0, 1, 1, 0], [make_arrays(2, 4)], type_map=("O", "H"))
    (system,) = open_systems(path, ["H", "C", "O"])
    assert system.type_map == ("H", "C", "O")
    np.testing.assert_array_equal(system.frames([0, 1]).atype, [[2, 0, 0, 2]] * 2)
    assert open_systems(path)[0].type_map == ("O", "H")
    with pytest.raises(TypeMapError, match=re.escape("['H']")):
        open_systems(path, ["O", "C"])


def test_types_without_names_are_taken_as_they_are(tmp_path):
    path = write_npy(tmp_path / "sys", [0, 2, 1, 0], [make_arrays(2, 4)], type_map=None)
    (system,) = open_systems(path)
    assert system.type_map is None
    (named,) = open_systems(path, ["X", "Y", "Z"])
    np.testing.assert_array_equal(named.frames([0]).atype, [[0, 2, 1, 0]])
    with pytest.raises(SystemFormatError, match=r"expected types from 0 to 1 .* found 0 to 2"):
        open_systems(path, ["X", "Y"])


def test_mixed_types_translate_by_frame(tmp_path):
    arrays = make_arrays(3, 4)
    arrays["real_atom_types"] = np.array([[0, 1, 1, -1], [1, 0, -1, -1], [1, 1, 1, 1]])
    path = write_npy(tmp_path / "sys", [0] * 4, [arrays], type_map=("O", "H"))
    (system,) = open_systems(path, ["H", "O"])
    assert system.mixed
    np.testing.assert_array_equal(system.frames([2, 0]).atype, [[0, 0, 0, 0], [1, 0, 0, -1]])
    np.testing.assert_array_equal(system.frames([0, 1, 2]).type_counts(2), [[2, 1], [1, 1], [4, 0]])
    arrays["real_atom_types"][1, 1] = 2
    write_npy(tmp_path / "sys", [0] * 4, [arrays], type_map=("O", "H"))
    (system,) = open_systems(path, ["H", "O"])
    message = r"real_atom_types\.npy: expected types from -1 to 1"
    with pytest.raises(SystemFormatError, match=message):
        system.frames([1])


@pytest.mark.parametrize("mixed", [False, True])
def test_only_elements_of_atoms_must_be_in_the_type_map(tmp_path, mixed):
    arrays = make_arrays(3, 4)
    if mixed:
        arrays["real_atom_types"] = np.array([[2, 0, 2, -1], [2, 2, 0, -1], [0, 0, 2, 2]])
    path = write_npy(tmp_path / "sys", [2, 0, 2, 2], [arrays], type_map=("O", "C", "H", "Na"))
    (system,) = open_systems(path, ["H", "O"])
    expected = [[0, 1, 0, -1], [0, 0, 1, -1], [1, 1, 0, 0]] if mixed else [[0, 1, 0, 0]] * 3
    np.testing.assert_array_equal(system.frames([0, 1, 2]).atype, expected)
    (named,) = open_systems(path)
    np.testing.assert_array_equal(named.with_types(["H", "O"]).types(np.arange(3)), expected)
    for type_map in (["O", "C", "Na"], ["H"]):
        lacking = [name for name in ("O", "H") if name not in type_map]
        with pytest.raises(TypeMapError, match=re.escape(f"atoms of {lacking}")):
            open_systems(path, type_map)


def test_a_frame_of_padding_only_is_refused(tmp_path):
    arrays = make_arrays(3, 4)
    arrays["real_atom_types"] = np.array([[0, 1, 1, -1], [-1] * 4, [1, 1, 1, 1]])
    (system,) = open_systems(write_npy(tmp_path / "sys", [0] * 4, [arrays]))
    assert system.frames([0, 2]).nframes == 2
    with pytest.raises(SystemFormatError, match=r"real_atom_types\.npy: frame 1 has no atoms"):
        system.frames([0, 1])


def test_mixed_systems_need_names_and_all_sets(tmp_path):
    arrays = make_arrays(3, 4)
    mixed = {**arrays, "real_atom_types": np.zeros((3, 4), int)}
    path = write_npy(tmp_path / "nameless", [0] * 4, [mixed], type_map=None)
    with pytest.raises(TypeMapError, match=r"type_map\.raw"):
        open_systems(path)
    with pytest.raises(SystemFormatError, match=r"set\.001/real_atom_types\.npy: missing"):
        open_systems(write_npy(tmp_path / "half", [0] * 4, [mixed, arrays]))


def test_systems_get_the_elements_of_all_when_nobody_gives_a_type_map(tmp_path):
    for name, names in {"a": ("O", "H"), "b": ("O",), "c": ("H", "O"), "d": None}.items():
        write_npy(tmp_path / name, [0] * 4, [make_arrays(2, 4)], type_map=names)
    a, b, c, d = open_systems([f"{tmp_path}/{name}" for name in "abcd"])
    common = with_common_types([a, b, c])
    assert [system.type_map for system in common] == [("O", "H")] * 3
    assert [int(system.types(np.array([0]))[0, 0]) for system in common] == [0, 0, 1]
    assert with_common_types([a, b, d])[2].type_map == ("O", "H")
    assert with_common_types([d])[0].type_map is None
    with pytest.raises(TypeMapError, match=r"d has no type_map\.raw.*give the type map"):
        with_common_types([a, c, d])


# -- what is wrong ---------------------------------------------------------------------------------------------


def write_broken(tmp_path, change):
    arrays = make_arrays(5, 4)
    change(arrays)
    return write_npy(tmp_path / "broken", TYPES, [make_arrays(2, 4), arrays])


@pytest.mark.parametrize(
    ("change", "file", "found"),
    [
        (lambda a: a.update(energy=a["energy"][:4]), "energy.npy", "(4,)"),
        (lambda a: a.update(coord=a["coord"][:, :9]), "coord.npy", "(5, 9)"),
        (lambda a: a.update(force=a["force"][:, :6]), "force.npy", "(5, 6)"),
        (lambda a: a.update(box=a["box"][:, :3]), "box.npy", "(5, 3)"),
    ],
)
def test_wrong_shapes_name_system_file_expected_and_found(tmp_path, change, file, found):
    path = write_broken(tmp_path, change)
    with pytest.raises(SystemFormatError) as error:
        open_systems(path)
    message = str(error.value)
    assert path in message
    assert f"set.001/{file}" in message
    assert "expected shape (5, " in message
    assert f"found {found}" in message
    assert error.value.file == f"set.001/{file}"
    assert str(pickle.loads(pickle.dumps(error.value))) == message


def test_missing_box_hints_at_nopbc(tmp_path):
    path = write_broken(tmp_path, lambda a: a.pop("box"))
    with pytest.raises(SystemFormatError, match=r"box\.npy: missing; .* nopbc"):
        open_systems(path)


def test_truncated_npy_names_both_sizes(tmp_path):
    path = write_broken(tmp_path, lambda a: None)
    file = tmp_path / "broken" / "set.001" / "force.npy"
    file.write_bytes(file.read_bytes()[:-100])
    message = r"force\.npy: truncated: .*\(5, 12\) .*\(480 bytes\), 380 bytes"
    with pytest.raises(SystemFormatError, match=message):
        open_systems(path)
    file.write_bytes(b"junk")
    with pytest.raises(SystemFormatError, match=r"force\.npy: cannot be read as an npy array"):
        open_systems(path)


def test_bytes_after_the_array_of_an_npy_file(tmp_path):
    path = write_broken(tmp_path, lambda a: None)
    file = tmp_path / "broken" / "set.001" / "force.npy"
    with file.open("ab") as stream:  # as two numpy.save into one file
        np.save(stream, np.zeros((5, 12)))
    with pytest.raises(SystemFormatError, match=r"force\.npy: \d+ bytes follow the array"):
        open_systems(path)


@pytest.mark.parametrize("shape", [(-5, -12), (-5, 12), (5, -1, -12)])
def test_negative_sizes_of_an_npy_file(tmp_path, shape):
    path = write_broken(tmp_path, lambda a: None)
    file = tmp_path / "broken" / "set.001" / "force.npy"
    header = np.lib.format.header_data_from_array_1_0(np.zeros((5, 12)))
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {**header, "shape": shape})
        stream.write(bytes(480))
    with pytest.raises(SystemFormatError, match=r"force\.npy: .*negative size"):
        open_systems(path)


def test_truncated_hdf5(tmp_path):
    file = tmp_path / "d.hdf5"
    write_hdf5(file, "one", TYPES, [make_arrays(50, 4)])
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SystemFormatError, match="cannot be opened as HDF5"):
        open_systems(str(file))


def test_values_that_are_not_finite_are_refused(tmp_path):
    path = write_broken(tmp_path, lambda a: a["force"].__setitem__((3, 1), np.nan))
    (system,) = open_systems(path)
    assert system.frames([0, 4]).nframes == 2
    message = r"set\.001/force\.npy: value that is not finite in frame 3"
    with pytest.raises(SystemFormatError, match=message):
        system.frames([4, 5])


@pytest.mark.parametrize("text", ["", "0 1 x 1", "0 1.5 0 1"])
def test_bad_type_raw(tmp_path, text):
    path = write_npy(tmp_path / "sys", TYPES, [make_arrays(2, 4)])
    (tmp_path / "sys" / "type.raw").write_text(text)
    with pytest.raises(SystemFormatError, match=r"type\.raw: expected one integer per atom"):
        open_systems(path)


def test_system_without_sets_or_frames(tmp_path):
    path = write_npy(tmp_path / "none", TYPES, [])
    with pytest.raises(SystemFormatError, match=r"set\.\*"):
        open_systems(path)
    path = write_npy(tmp_path / "zero", TYPES, [make_arrays(0, 4)])
    with pytest.raises(SystemFormatError, match="no frames"):
        open_systems(path)
    sets = [make_arrays(0, 4), make_arrays(3, 4)]
    (system,) = open_systems(write_npy(tmp_path / "some", TYPES, sets))
    check_frames(system.frames([2, 0]), sets[1:], [2, 0])


# -- laziness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_systems_pickle_without_handles(tmp_path, kind):
    sets = [make_arrays(4, 4)]
    (system,) = open_systems(write(kind, tmp_path, TYPES, sets))
    system.frames([0])
    copy = pickle.loads(pickle.dumps(system))
    assert len(copy._store._handles) == 0
    check_frames(copy.frames([3, 1]), sets, [3, 1])


def _energy_in_child(system, queue):
    queue.put(system.frames([2]).energy.tolist())


def test_forked_children_open_their_own_file(tmp_path):
    sets = [make_arrays(4, 4)]
    (system,) = open_systems(write_hdf5(tmp_path / "d.hdf5", "s", TYPES, sets))
    system.frames([0])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_energy_in_child, args=(system, queue))
    child.start()
    assert queue.get() == [sets[0]["energy"][2]]
    child.join(30)
    check_frames(system.frames([1]), sets, [1])


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_few_handles_suffice(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(npy_store, "_FEW_BYTES", 0)
    sets = [make_arrays(3, 4, seed=k) for k in range(4)]
    handles = HandleCache(maxsize=2)
    path = write(kind, tmp_path, TYPES, sets)
    if kind == "npy":
        system = System(npy_stores(path, handles)[0])
    else:
        system = System(HDF5Store(*path.split("#/"), handles))
    indices = [11, 0, 7, 3, 4]
    for _ in range(3):
        check_frames(system.frames(indices), sets, indices)
    assert 1 <= len(handles) <= 2


def test_few_values_of_npy_files_are_kept_within_a_bound(tmp_path, monkeypatch):
    sets = [make_arrays(3, 4, seed=k) for k in range(4)]
    monkeypatch.setattr(storage, "_MAX_VALUE_BYTES", 6 * storage._ARRAY_OVERHEAD)
    handles = HandleCache()
    write_npy(tmp_path / "sys", TYPES, sets)
    systems = [System(npy_stores(str(tmp_path / "sys"), handles)[0]) for _ in range(2)]
    indices = [11, 0, 7, 3, 4]
    for system in systems * 2:
        check_frames(system.frames(indices), sets, indices)
        kept = [values.nbytes for values in handles._values.values()]
        assert 1 < len(kept) < 6
        assert handles._nbytes == sum(kept) + storage._ARRAY_OVERHEAD * len(kept)
    assert len(handles) == 0


def test_hdf5_reads_only_the_rows_asked_for(tmp_path, monkeypatch):
    nframes = 400
    (system,) = open_systems(write_hdf5(tmp_path / "d.hdf5", "s", TYPES, [make_arrays(nframes, 4)]))
    rows = []
    original = h5py.Dataset.__getitem__

    def counting(self, key, *args, **kwargs):
        values = original(self, key, *args, **kwargs)
        if self.name.endswith("coord.npy"):
            rows.append(np.size(values) // 12)
        return values

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counting)
    system.frames([7, 390, 20])
    assert rows == [1, 1, 1]
    rows.clear()
    system.frames([12, 10, 11, 14])
    assert rows == [5]


def test_fingerprint_follows_the_data_not_the_place(tmp_path):
    arrays = make_arrays(5, 4)
    here = open_systems(write_npy(tmp_path / "here", TYPES, [arrays]))
    there = open_systems(write_hdf5(tmp_path / "d.hdf5", "there", TYPES, [arrays]))
    assert data_fingerprint(here) == data_fingerprint(there)
    for change in ({"energy": arrays["energy"] + 1e-9}, {"coord": arrays["coord"] * 1.001}):
        other = open_systems(write_npy(tmp_path / "other", TYPES, [{**arrays, **change}]))
        assert data_fingerprint(other) != data_fingerprint(here)


def test_example_data_are_the_same_in_both_formats():
    folder = Path(__file__).parents[3] / "examples" / "cu_emt"
    npy, hdf5 = open_systems(str(folder / "data")), open_systems(str(folder / "cu_emt.hdf5"))
    assert [s.name.rpartition("data/")[2] for s in npy] == [s.name.partition("#/")[2] for s in hdf5]
    for one, other in zip(npy, hdf5, strict=True):
        assert fingerprint(one) == fingerprint(other)
        assert one.labels == other.labels >= {"energy", "force"}
        a, b = one.frames([3, 0, 7]), other.frames([3, 0, 7])
        np.testing.assert_array_equal(a.coord, b.coord)
        np.testing.assert_array_equal(a.force, b.force)


# -- joining ---------------------------------------------------------------------------------------------------


def test_concatenate_pads_atoms_and_keeps_all_labels(tmp_path):
    of_two = make_arrays(2, 2, labels=("energy", "virial"))
    of_four = make_arrays(3, 4, labels=("energy", "force"))
    (small,) = open_systems(write_npy(tmp_path / "s", [0, 1], [of_two]))
    (large,) = open_systems(write_npy(tmp_path / "l", TYPES, [of_four], nopbc=True))
    first, second = small.frames([1]), large.frames([0, 2])
    both = Frames.concatenate([first, second])
    np.testing.assert_array_equal(both.atype, [[0, 1, -1, -1], TYPES, TYPES])
    np.testing.assert_array_equal(both.coord[0], np.vstack([first.coord[0], np.zeros((2, 3))]))
    np.testing.assert_array_equal(both.coord[1:], second.coord)
    np.testing.assert_array_equal(both.energy, np.concatenate([first.energy, second.energy]))
    np.testing.assert_array_equal(both.box, np.concatenate([first.box, np.zeros((2, 3, 3))]))
    assert both.labels == {"energy", "force", "virial"}
    np.testing.assert_array_equal(both.present("force"), [False, True, True])
    np.testing.assert_array_equal(both.force[1:], second.force)
    np.testing.assert_array_equal(both.present("virial"), [True, False, False])
    np.testing.assert_array_equal(both.virial[0], first.virial[0])
    turned = Frames.concatenate([second, first])
    np.testing.assert_array_equal(turned.present("force"), [True, True, False])
    assert turned.force.shape == (3, 4, 3)
    assert Frames.concatenate([second]) is second


def test_types_that_occur_again_are_parsed_once(tmp_path):
    from deepmd_muon.data import system as module

    module._parse_types.cache_clear()
    sets = [make_arrays(1, 2)]
    places = [write_npy(tmp_path / str(k), [0, 1], sets, ("A", "B")) for k in range(4)]
    plain, turned = open_systems(places), open_systems(places[:1], ["B", "A"])
    assert module._parse_types.cache_info().misses == 1
    for system, expected in ((plain[3], [0, 1]), (turned[0], [1, 0])):
        types = system.frames([0]).atype
        np.testing.assert_array_equal(types, [expected])
        types[:] = 7  # a copy: other systems keep theirs
        np.testing.assert_array_equal(system.types(np.arange(1)), [expected])
