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


def _xyz_frame(energy, rows=("O 0 0 0 1 0 0", "O 0 0 1 -1 0 0"), columns=":forces:R:3"):
    lattice = 'Lattice="6 0 0 0 6 0 0 0 6"'
    properties = f"Properties=species:S:1:pos:R:3{columns} " if columns is not None else ""
    return "\n".join([str(len(rows)), f"{lattice} {properties}energy={energy}", *rows, ""])


def _energies(path):
    (system,) = open_systems(str(path))
    return system.frames(np.arange(system.nframes)).energy.tolist()


@pytest.mark.parametrize("ending", ["", "\n", " \n\n"])
@pytest.mark.parametrize("between", ["", "\n", "\n  \n", "\r\n"])
def test_empty_lines_between_frames_of_extended_xyz(tmp_path, between, ending):
    pytest.importorskip("ase")
    path = tmp_path / "s.xyz"
    frames = [_xyz_frame(-float(k)) for k in range(10)]
    path.write_bytes((between.join(frames) + ending).encode())
    assert _energies(path) == [-float(k) for k in range(10)]
    packed = tmp_path / "s.xyz.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert _energies(packed) == [-float(k) for k in range(10)]


@pytest.mark.parametrize("between", ["# a note\n", "-1\n", "0x2\n", "9" * 5000 + "\n"])
def test_lines_between_frames_of_extended_xyz_are_refused(tmp_path, between):
    pytest.importorskip("ase")
    path = tmp_path / "s.xyz"
    path.write_text(_xyz_frame(-1) + between + _xyz_frame(-2))
    with pytest.raises(SystemFormatError, match="line 5: expected the number of atoms") as error:
        open_systems(str(path))
    assert error.value.file == "frame 1"


def test_vectors_of_a_cell_follow_the_atoms_of_extended_xyz(tmp_path):
    pytest.importorskip("ase")
    vectors = "VEC1 6 0 0\nVEC2 0 6 0\nVEC3 0 0 6\n"
    path = tmp_path / "s.xyz"
    for between in ("", "\n"):
        path.write_text(f"1\nfirst\nO 0 0 0\n{vectors}{between}1\nsecond\nO 0 0 1\n{vectors}")
        (system,) = open_systems(str(path))
        assert system.nframes == 2
        np.testing.assert_array_equal(system.frames([1]).box[0], 6 * np.eye(3))


def test_columns_of_extended_xyz_without_a_name(tmp_path):
    pytest.importorskip("ase")
    path = tmp_path / "s.xyz"
    path.write_text(_xyz_frame(-1) + _xyz_frame(-2, columns=None))
    with pytest.raises(SystemFormatError, match=r"7 columns, .* names 4 .*:forces:R:3") as error:
        open_systems(str(path))
    assert error.value.file == "frame 1"
    path.write_text(_xyz_frame(-1, columns=":Z:I:1"))
    with pytest.raises(SystemFormatError, match=r"7 columns, .* names 5"):
        open_systems(str(path))
    path.write_text(_xyz_frame(-1, rows=("O 0 0 0", "O 0 0 1"), columns=None))
    (system,) = open_systems(str(path))
    assert system.labels == {"energy"}


@pytest.mark.parametrize(
    ("unit", "ours"),
    [
        ("energy-unit=eV", True),
        ('force_units="eV / Angstrom"', True),
        ("stress_unit=eV/Å^3", True),
        ("energy-unit=hartree", False),
        ("force-unit=kcal/mol/angstrom", False),
        ("stress_unit=GPa", False),
        ("pos_unit=bohr", False),
    ],
)
def test_units_that_extended_xyz_states(tmp_path, unit, ours):
    pytest.importorskip("ase")
    path = tmp_path / "s.xyz"
    path.write_text(_xyz_frame(f"-1 {unit}"))
    if ours:
        assert _energies(path) == [-1.0]
    else:
        with pytest.raises(SystemFormatError, match=unit.split("=")[1]):
            open_systems(str(path))


def test_trajectories_that_were_joined_by_cat(tmp_path):
    ase = pytest.importorskip("ase")
    from ase.io import write

    path = tmp_path / "s.traj"
    write(path, [ase.Atoms("O2", [[0, 0, 0], [0, 0, length]]) for length in (1.0, 1.1)])
    one = path.read_bytes()
    assert open_systems(str(path))[0].nframes == 2
    path.write_bytes(one + one[-100:])  # a run that was killed while it wrote a frame
    assert open_systems(str(path))[0].nframes == 2
    path.write_bytes(one + one)
    with pytest.raises(SystemFormatError, match="second trajectory"):
        open_systems(str(path))


@pytest.mark.parametrize("form", ["xsf", "vasp-xdatcar"])
@pytest.mark.parametrize("between", [b"\n", b"\nhello\n"])
def test_bytes_after_what_other_readers_read(tmp_path, form, between):
    ase = pytest.importorskip("ase")
    from ase.io import write

    cell = np.diag([6.0, 6.0, 6.0])
    frames = [ase.Atoms("O2", [[0, 0, 0], [0, 0, z]], cell=cell, pbc=True) for z in (1.0, 1.1)]
    path = tmp_path / ("XDATCAR" if form == "vasp-xdatcar" else "s.xsf")
    write(path, frames, format=form)
    assert open_systems(str(path))[0].nframes == 2
    path.write_bytes(path.read_bytes() + between + path.read_bytes())
    with pytest.raises(SystemFormatError, match=r"2 frames .*characters follow"):
        open_systems(str(path))
