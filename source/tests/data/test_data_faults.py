"""Data that are damaged, of another kind or changed while in use are refused by file; nothing is read in silence."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import h5py
import numpy as np
import pytest
import write_systems
from write_systems import make_arrays, write_hdf5, write_npy

from deepmd_muon.data import System, SystemFormatError, TypeMapError, open_systems
from deepmd_muon.data.stores import npy_store
from deepmd_muon.data.stores.npy_store import npy_stores
from deepmd_muon.data.stores.storage import HandleCache

TYPES = [0, 1, 0, 1]


@pytest.fixture
def folder(tmp_path):
    """Write three frames of four atoms; return the folder of its only set."""
    write_npy(tmp_path / "sys", TYPES, [make_arrays(3, 4)])
    return tmp_path / "sys/set.000"


def read(path):
    (system,) = open_systems(str(path))
    return system.frames(range(system.nframes))


def refused(path, file):
    with pytest.raises(SystemFormatError) as error:
        read(path)
    assert error.value.file.endswith(file)
    assert "\n" not in str(error.value)
    return error.value.problem


DTYPES = ["complex128", "bool", "datetime64[s]", "timedelta64[s]", "U8", "S8", [("x", "f8")], "V8"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["coord", "energy", "force", "box"])
def test_values_that_are_no_real_numbers_are_refused(folder, name, dtype):
    shape = np.load(folder / f"{name}.npy").shape
    np.save(folder / f"{name}.npy", np.zeros(shape, dtype=dtype))
    assert "expected real numbers" in refused(folder.parent, f"{name}.npy")


@pytest.mark.parametrize("dtype", ["f2", "f4", ">f8", "i4", "u1", "longdouble"])
def test_real_numbers_of_any_width_are_taken(folder, dtype):
    np.save(folder / "energy.npy", np.array([1, 2, 3], dtype=dtype))
    assert read(folder.parent).energy.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_file_cut_within_its_last_page_is_refused(folder, cut):
    os.truncate(folder / "force.npy", (folder / "force.npy").stat().st_size - cut)
    assert "truncated" in refused(folder.parent, "force.npy")


def write_fifo(path):
    path.unlink()
    os.mkfifo(path)


def write_archive(path):
    np.savez(path.with_suffix(".npz"), np.zeros(3))
    path.with_suffix(".npz").replace(path)


def write_header(path):
    """A header that describes more dimensions than can be parsed."""
    header = (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': " + b"(" * 3000 + b")" * 3000 + b"}"
    )
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)


def write_huge(path):
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 1152921504606846976)}\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(100))


def write_objects(path):
    np.save(path, np.array([{}, {}, {}], dtype=object), allow_pickle=True)


def write_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "write",
    [write_fifo, write_archive, write_header, write_huge, write_objects, write_folder, Path.unlink],
)
def test_rejects_non_arrays(folder, write):
    write(folder / "coord.npy")
    refused(folder.parent, "coord.npy")


def test_positions_without_an_axis_and_lengths_out_of_range(folder):
    np.save(folder / "coord.npy", np.float64(3.0))
    assert "one number" in refused(folder.parent, "coord.npy")
    arrays = make_arrays(3, 4)
    np.save(folder / "coord.npy", arrays["coord"])
    np.save(folder / "box.npy", arrays["box"] * 1e200)
    assert "check the units" in refused(folder.parent, "box.npy")


@pytest.mark.parametrize("value", [0.7, 2.0**40, -3.0])
def test_types_of_mixed_systems_are_whole_numbers_in_range(folder, value):
    types = np.tile(TYPES, (3, 1)).astype(float)
    np.save(folder / "real_atom_types.npy", types)
    assert read(folder.parent).atype.tolist() == [TYPES] * 3
    types[2, 1] = value
    np.save(folder / "real_atom_types.npy", types)
    refused(folder.parent, "real_atom_types.npy")


@pytest.mark.parametrize(
    "text", ["0 1 0 1e300", "0 1 0 nan", "0 1 0 4294967296", "0 1 0 -2147483649", "0 1 0 \u0663.5"]
)
def test_types_beyond_int32_are_refused(folder, text):
    (folder.parent / "type.raw").write_text(text, encoding="utf-8")
    assert "one integer per atom" in refused(folder.parent, "type.raw")


def test_names_that_are_there_twice_or_no_text(folder):
    names = folder.parent / "type_map.raw"
    names.write_text("A A")
    with pytest.raises(TypeMapError, match=r"\['A'\] more than once"):
        read(folder.parent)
    names.write_bytes(b"\xff\xfe A")
    assert "UTF-8" in refused(folder.parent, "type_map.raw")
    names.unlink()
    os.mkfifo(names)
    assert "not a regular file" in refused(folder.parent, "type_map.raw")


@pytest.mark.parametrize("file", ["coord.npy", "type.raw", "type_map.raw"])
def test_a_disk_that_fails_is_reported_with_the_file(folder, monkeypatch, file):
    """As the system's errors of reading, its error names no file."""
    read_at = os.preadv

    def read_or_fail(handle, *arguments):
        if os.readlink(f"/proc/self/fd/{handle}").endswith(file):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_at(handle, *arguments)

    monkeypatch.setattr(os, "preadv", read_or_fail)
    assert "Input/output error" in refused(folder.parent, file)


@pytest.mark.parametrize("kind", ["npy", "hdf5"])
def test_a_file_that_changes_while_it_is_in_use_is_an_error(tmp_path, kind):
    arrays = make_arrays(300, 4)
    (system,) = open_systems(write_systems.write(kind, tmp_path, TYPES, [arrays]))
    file = tmp_path / ("sys/set.000/force.npy" if kind == "npy" else "sys.hdf5")
    expected = system.frames([5]).force
    kept = tmp_path / "kept"
    shutil.copy2(file, kept)
    os.truncate(file, 4096)  # reading a mapped page beyond would end the process
    with pytest.raises(SystemFormatError, match="has changed while it was in use") as error:
        system.frames([299])
    assert error.value.file == str(file)
    shutil.copy2(kept, file)
    assert np.array_equal(system.frames([5]).force, expected)
    os.utime(file, (1, 1))
    with pytest.raises(SystemFormatError, match="written again"):
        system.frames([299])
    file.unlink()
    with pytest.raises(SystemFormatError, match="No such file"):
        system.frames([299])


KINDS = {
    "scalar": 3.0,
    "empty": h5py.Empty("f8"),
    "text": np.array(["1", "2", "3"], dtype=h5py.string_dtype()),
    "references": np.array([h5py.Reference()] * 3, dtype=h5py.ref_dtype),
    "complex": np.zeros(3, dtype=complex),
    "dangling": h5py.SoftLink("/nowhere"),
    "external": h5py.ExternalLink("none.hdf5", "/x"),
    "circle": h5py.SoftLink("/g/set.000/energy.npy"),
    "group": None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_datasets_of_another_kind_are_refused(tmp_path, kind):
    path = write_hdf5(tmp_path / "s.hdf5", "g", TYPES, [make_arrays(3, 4)])
    with h5py.File(tmp_path / "s.hdf5", "a") as file:
        del file["g/set.000/energy.npy"]
        if kind == "group":
            file.create_group("g/set.000/energy.npy")
        else:
            file["g/set.000/energy.npy"] = KINDS[kind]
    refused(path, "energy.npy")


@pytest.mark.parametrize(
    "value", [h5py.Empty("i4"), np.zeros(4, [("a", "i4")]), np.array(b"\xff\xfe"), np.zeros((2, 2))]
)
def test_types_in_hdf5_of_another_kind_are_refused(tmp_path, value):
    path = write_hdf5(tmp_path / "s.hdf5", "g", TYPES, [make_arrays(3, 5)])
    with h5py.File(tmp_path / "s.hdf5", "a") as file:
        del file["g/type.raw"]
        file["g/type.raw"] = value
    with pytest.raises(SystemFormatError):
        read(path)


def test_a_file_that_another_process_writes_is_said_to_be_locked(tmp_path):
    path = write_hdf5(tmp_path / "s.hdf5", "g", TYPES, [make_arrays(3, 4)])
    held, done = threading.Event(), threading.Event()
    child = os.fork()
    if child == 0:
        with h5py.File(tmp_path / "s.hdf5", "a"):
            (tmp_path / "held").touch()
            while not (tmp_path / "done").exists():
                done.wait(0.01)
        os._exit(0)
    try:
        while not (tmp_path / "held").exists():
            held.wait(0.01)
        assert "open for writing" in refused(path, "s.hdf5")
    finally:
        (tmp_path / "done").touch()
        os.waitpid(child, 0)


def test_an_error_of_the_disk_is_one_of_the_file(tmp_path, monkeypatch):
    """A map of the file would end the process with SIGBUS."""
    (system,) = open_systems(write_npy(tmp_path / "sys", TYPES, [make_arrays(3, 4)]))

    def broken(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    assert len(system.frames([0]).energy) == 1  # of so few values, which were read with the header
    monkeypatch.undo()
    monkeypatch.setattr(npy_store, "_FEW_BYTES", 0)
    (system,) = open_systems(str(tmp_path / "sys"))
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(SystemFormatError) as error:
        system.frames([0])
    assert error.value.file.endswith(".npy")
    assert "Input/output error" in error.value.problem


@pytest.mark.parametrize("order", [[0, 1, 2, 4], [4, 0, 1, 3, 3], [2]], ids=str)
@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("nframes", [5, 400])
def test_rows_are_read_from_where_they_lie(tmp_path, nframes, order, fortran):
    arrays = make_arrays(nframes, 4)
    root = write_npy(tmp_path / "sys", TYPES, [arrays])
    if fortran:
        np.save(tmp_path / "sys/set.000/force.npy", np.asfortranarray(arrays["force"]))
    (system,) = open_systems(root)
    frames = system.frames(order)
    assert np.array_equal(frames.force.reshape(len(order), 12), arrays["force"][order])
    assert np.array_equal(frames.coord.reshape(len(order), 12), arrays["coord"][order])
    assert np.array_equal(frames.energy, arrays["energy"][order])


def test_nothing_is_mapped_and_few_files_are_open(tmp_path):
    for number in range(5):
        write_npy(tmp_path / str(number), TYPES, [make_arrays(400, 4)])
    handles = HandleCache(maxsize=3)
    for store in npy_stores(str(tmp_path), handles):
        System(store).frames([2])
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert len(handles) == 3
    places = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert len([place for place in places if place.startswith(str(tmp_path))]) in (1, 2, 3)


@pytest.mark.parametrize("place", ["a", "b/set.000", "b"])
def test_a_folder_that_cannot_be_listed_is_refused(tmp_path, monkeypatch, place):
    for name in "abc":
        write_npy(tmp_path / "all" / name, TYPES, [make_arrays(3, 4)])
    closed = str(tmp_path / "all" / place)
    for function in ("listdir", "scandir"):
        original = getattr(os, function)

        def listing(path=".", original=original):
            if os.fspath(path) == closed:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), closed)
            return original(path)

        monkeypatch.setattr(os, function, listing)
    with pytest.raises(SystemFormatError, match="cannot be listed"):
        open_systems(str(tmp_path / "all"))
