"""Paths and files that once hung the reader of data: FIFOs, circles of links, counts beyond a file's end."""

import gzip
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from deepmd_muon.argcheck import InputError, load
from deepmd_muon.data import SystemFormatError, SystemNotFoundError, open_systems

SYSTEM = Path(__file__).parents[3] / "examples" / "cu_emt" / "data" / "valid" / "cluster13"


@pytest.mark.parametrize("name", ["sys", "s.xyz", "s.hdf5", "s.hdf5#/a"])
def test_a_fifo_is_no_system(tmp_path, name):
    os.mkfifo(tmp_path / name.partition("#")[0])
    with pytest.raises(SystemNotFoundError, match="FIFO"):
        open_systems(str(tmp_path / name))


def test_a_fifo_in_a_folder_is_no_database(tmp_path):
    (tmp_path / "s.lmdb").mkdir()
    os.mkfifo(tmp_path / "s.lmdb" / "data.mdb")
    with pytest.raises((SystemFormatError, SystemNotFoundError), match=r"s\.lmdb"):
        open_systems(str(tmp_path / "s.lmdb"))


@pytest.mark.parametrize("count", ["99999999999", "+99999999999", "99_999_999_999", "0" * 70])
@pytest.mark.parametrize("before", ["", "1\n\nCu 0 0 0\n", "1\n\nCu 0 0 0\nVEC1 1 0 0\n", "0\n\n"])
def test_a_count_beyond_the_end_of_an_xyz_file_is_refused(tmp_path, before, count):
    (tmp_path / "s.extxyz").write_text(f"{before}{count}\n\nCu 0 0 0\n")
    with pytest.raises((SystemFormatError, SystemNotFoundError), match=r"s\.extxyz"):
        open_systems(str(tmp_path / "s.extxyz"))


def test_a_pattern_crosses_circles_of_links_once(tmp_path):
    shutil.copytree(SYSTEM, tmp_path / "data" / "a" / "b" / "cluster13")
    for number in range(4):
        (tmp_path / "data" / "a" / f"up{number}").symlink_to("..")
        (tmp_path / "data" / "a" / "b" / f"here{number}").symlink_to(".")
    for pattern in ("data/**", "data/**/cluster*", "**/cluster13", "data/**/b/**/cluster13"):
        (system,) = open_systems(str(tmp_path / pattern))
        assert system.name.startswith(str(tmp_path / "data"))
        assert system.nframes == 10


def test_relative_patterns_keep_their_names(tmp_path, monkeypatch):
    shutil.copytree(SYSTEM, tmp_path / "data" / "cluster13")
    shutil.copytree(SYSTEM, tmp_path / "data" / ".hidden" / "cluster13")
    monkeypatch.chdir(tmp_path)
    for pattern in ("**/cluster13", "data/**/cluster13", "data/*"):
        assert [system.name for system in open_systems(pattern)] == ["data/cluster13"]


@pytest.mark.parametrize("count", ["999999999999", "12"])
def test_more_atoms_than_the_file_holds(tmp_path, count):
    pytest.importorskip("ase")
    frame = 'Lattice="6 0 0 0 6 0 0 0 6" Properties=species:S:1:pos:R:3 energy=1\nO 0 0 0\n'
    (tmp_path / "s.xyz").write_text(f"1\n{frame}{count}\n{frame}")
    with pytest.raises((SystemFormatError, SystemNotFoundError), match=r"s\.xyz"):
        open_systems(str(tmp_path / "s.xyz"))


def test_a_hexadecimal_number_beyond_what_python_prints(tmp_path):
    (tmp_path / "i.yaml").write_text("a: 0x" + "f" * 5000)
    with pytest.raises(InputError, match="6021 digits"):
        load(tmp_path / "i.yaml")


def test_a_small_file_that_decompresses_to_very_much(tmp_path, monkeypatch):
    path = tmp_path / "bomb.xyz.gz"
    path.write_bytes(gzip.compress(b"1\n\nO 0 0 0\n" + b" " * (80 << 20), 1))
    with pytest.raises(SystemFormatError, match=r"bomb.xyz.gz: more than \d+ MiB"):
        open_systems(str(path))
    monkeypatch.setattr("deepmd_muon.data.stores.ase_reading._ALWAYS_FITS", 0)
    path.write_bytes(gzip.compress(b"2\n\nO 0 0 0\nO 0 0 1\n"))
    assert open_systems(str(path))[0].natoms == 2


def test_an_atom_count_of_a_compressed_file(tmp_path):
    path = tmp_path / "s.xyz.gz"
    path.write_bytes(gzip.compress(b"999999999\n\nO 0 0 0\n"))
    with pytest.raises(SystemFormatError, match="999999999 atoms"):
        open_systems(str(path))


def _write_hdf5(path, **options):
    with h5py.File(path, "w") as file:
        file["type.raw"] = [0, 0]
        file.create_dataset("type_map.raw", data=["Cu"], dtype=h5py.string_dtype(), **options)
        file["set.000/coord.npy"], file["set.000/box.npy"] = (
            np.arange(6.0)[None],
            9 * np.eye(3).reshape(1, 9),
        )
        file["set.000/energy.npy"] = [-1.0]


@pytest.mark.parametrize("options", [{}, {"chunks": (1,)}, {"maxshape": (None,)}])
@pytest.mark.parametrize("place", ["object", "free"])
def test_a_damaged_heap_of_strings(tmp_path, options, place):
    path = tmp_path / "s.hdf5"
    _write_hdf5(path, **options)
    (system,) = open_systems(str(path))
    assert system.type_map == ("Cu",)
    content = bytearray(path.read_bytes())
    first = content.index(b"GCOL") + 16
    # HDF5 2.0 never ends at either: the header and the length of an object overflow, or free space has no length.
    if place == "object":
        content[first + 8 : first + 16] = (2**64 - 16).to_bytes(8, "little")
    else:
        content[first : first + 16] = bytes(16)
    path.write_bytes(content)
    with pytest.raises(SystemFormatError, match=r"s\.hdf5.*type_map\.raw.*heap"):
        open_systems(str(path))


def test_a_heap_of_strings_may_end_with_the_file(tmp_path):
    """It does where the names are written last; such files were called damaged."""
    path = tmp_path / "s.hdf5"
    with h5py.File(path, "w") as file:
        file["type.raw"] = [0, 0]
        file["set.000/coord.npy"] = np.arange(6.0)[None]
        file["nopbc"] = 1
        file["type_map.raw"] = np.array(["Cu"], dtype=h5py.string_dtype())
    content = path.read_bytes()
    heap = content.index(b"GCOL")
    assert heap + int.from_bytes(content[heap + 8 : heap + 16], "little") == len(content)
    assert open_systems(str(path))[0].type_map == ("Cu",)


def test_filtered_and_strange_objects_in_hdf5(tmp_path):
    _write_hdf5(tmp_path / "s.hdf5", chunks=(1,), compression="gzip")
    assert open_systems(str(tmp_path / "s.hdf5"))[0].type_map == ("Cu",)
    with h5py.File(tmp_path / "s.hdf5", "r+") as file:
        del file["type.raw"]
        file["type.raw"] = np.array([file.ref, file.ref], dtype=h5py.ref_dtype)
    with pytest.raises(SystemFormatError, match="numbers or text"):
        open_systems(str(tmp_path / "s.hdf5"))
