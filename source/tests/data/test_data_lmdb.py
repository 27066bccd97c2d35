"""LMDB databases in deepmd-kit's format: what is read, what is written, and what damage is found."""

import json
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from deepmd_kit_program import needs_deepmd_kit, python
from lmdb_databases import array, database, frame, lmdb, msgpack, with_changed_bits
from write_systems import make_arrays, write_npy

from deepmd_muon.cli.main import main
from deepmd_muon.data import (
    DataError,
    SystemFormatError,
    SystemNotFoundError,
    TypeMapError,
    open_systems,
)
from deepmd_muon.data.checks.digest import fingerprint
from deepmd_muon.data.stores import lmdb_store
from deepmd_muon.data.stores.lmdb_file import LmdbFile
from deepmd_muon.data.stores.storage import HandleCache

EXAMPLES = Path(__file__).parents[3] / "examples"


def decoded(entry):
    return np.frombuffer(entry["data"], dtype=entry["type"]).reshape(entry["shape"])


def test_frames_are_sorted_into_systems_by_source_size_and_cell(tmp_path):
    frames = [
        frame([0, 1, 1], 0),
        frame([0, 1, 1, 1], 1),
        frame([0, 1, 1], 2, cell=False),
        frame([0, 1, 1], 3),
        frame([1, 0, 1], 4),
    ]
    path = database(tmp_path / "d.lmdb", frames, frame_system_ids=[0, 0, 0, 0, 1])
    water, larger, bare, other = open_systems(path, ["H", "O"])
    assert [s.name for s in (water, larger, bare, other)] == [f"{path}#{k}" for k in range(4)]
    assert [(s.nframes, s.natoms, s.pbc, s.mixed) for s in (water, larger, bare, other)] == [
        (2, 3, True, False),
        (1, 4, True, False),
        (1, 3, False, False),
        (1, 3, True, False),
    ]
    read = water.frames([1, 0])
    assert read.atype.tolist() == [[1, 0, 0]] * 2
    for row, k in enumerate((3, 0)):
        np.testing.assert_array_equal(read.coord[row], decoded(frames[k]["coords"]))
        np.testing.assert_array_equal(read.force[row], decoded(frames[k]["forces"]))
        assert read.energy[row] == decoded(frames[k]["energies"])
        np.testing.assert_array_equal(read.box[row], np.eye(3) * 6.0)
    assert read.virial is None
    assert (
        len(open_systems(path, patterns=["fcc*"])) == 4
    )  # as in deepmd-kit, patterns are for folders
    assert other.frames([0]).atype.tolist() == [[0, 1, 0]]


def test_other_types_of_atoms_labels_and_names(tmp_path):
    virials = array(np.arange(9.0).reshape(3, 3))
    more = {"atomic_ener": array([1.0, 2.0, 3.0]), "fparam": array([7.0])}
    frames = [
        frame([0, 1, -1], 0, virials=virials, find_force=0.0, find_coord=0),
        frame([1, 1, 0], 1, cells=array(np.zeros(9)), **more),
        frame([1, 0, 0], 2, energies=-2.5, orig="cp2k"),
    ]
    mixed, bare = open_systems(database(tmp_path / "d.lmdb", frames), ["O", "H"])
    assert mixed.mixed
    assert not bare.pbc
    read = mixed.frames([0, 1])
    assert read.atype.tolist() == [[0, 1, -1], [1, 0, 0]]
    assert read.energy[1] == -2.5
    assert read.virial[0].tolist() == list(range(9))
    assert read.present("virial").tolist() == [True, False]
    assert read.present("force").tolist() == [False, True]
    assert bare.frames([0]).atom_ener.tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(TypeMapError, match="H"):
        open_systems(str(tmp_path / "d.lmdb"), ["O"])


def test_a_system_travels_to_another_process_and_is_opened_twice(tmp_path):
    path = database(tmp_path / "d.lmdb", [frame([0, 1], k) for k in range(5)])
    (system,) = open_systems(path)
    # deepmd-kit takes fields whose keys are bytes, too.
    in_bytes = {key.encode(): value for key, value in array([1.5]).items()}
    (other,) = open_systems(database(tmp_path / "bytes.lmdb", [frame([0, 1], energies=in_bytes)]))
    assert other.frames([0]).energy.tolist() == [1.5]
    (again,) = open_systems(path)
    copy = pickle.loads(pickle.dumps(system))
    for other in (again, copy):
        np.testing.assert_array_equal(other.frames([4, 1]).coord, system.frames([4, 1]).coord)
    assert fingerprint(copy) == fingerprint(system)
    with (
        lmdb.open(path, map_size=1 << 26) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"more", bytes(10_000))
    with pytest.raises(SystemFormatError, match="changed"):
        system.frames([0])


def test_files_of_dpdata_are_read(tmp_path):
    dpdata = pytest.importorskip("dpdata", minversion="1.1")  # which needs lmdb 2
    a = make_arrays(3, 8, 1, ("energy", "force", "virial"))
    b = make_arrays(2, 3, 2, ("energy", "force"))
    folders = [
        write_npy(tmp_path / "a", [0, 1] * 4, [a], ("O", "H")),
        write_npy(tmp_path / "b", [1, 0, 1], [b], ("H", "O"), nopbc=True),
    ]
    systems = dpdata.MultiSystems(
        *(dpdata.LabeledSystem(folder, fmt="deepmd/npy") for folder in folders)
    )
    systems.to("deepmd/lmdb", str(tmp_path / "d.lmdb"))
    theirs = {
        system.natoms: system for system in open_systems(str(tmp_path / "d.lmdb"), ["H", "O"])
    }
    for folder in folders:
        (ours,) = open_systems(folder, ["H", "O"])
        # dpdata sorts atoms by type.
        order = np.argsort(ours.frames([0]).atype[0], kind="stable")
        other = np.argsort(theirs[ours.natoms].frames([0]).atype[0], kind="stable")
        every = np.arange(ours.nframes)
        a, b = ours.frames(every), theirs[ours.natoms].frames(every)
        np.testing.assert_allclose(a.coord[:, order], b.coord[:, other], atol=1e-12)
        np.testing.assert_allclose(a.force[:, order], b.force[:, other], atol=1e-12)
        np.testing.assert_allclose(a.energy, b.energy, rtol=1e-12)
        assert (a.box is None) == (b.box is None)
        if a.virial is not None:
            np.testing.assert_allclose(a.virial, b.virial, atol=1e-12)


DAMAGE = {
    "nframes": ({"nframes": 10**15}, "nframes"),
    "format": ({"frame_idx_fmt": "999999999d"}, "frame_idx_fmt"),
    "type_map": ({"type_map": [1, 2]}, "type_map"),
    "systems": ({"frame_system_ids": [0]}, "frame_system_ids"),
}


@pytest.mark.parametrize("metadata", DAMAGE)
def test_metadata_that_make_no_sense_are_named(tmp_path, metadata):
    change, word = DAMAGE[metadata]
    with pytest.raises(SystemFormatError, match=word) as raised:
        open_systems(database(tmp_path / "d.lmdb", [frame([0, 1])] * 3, **change))
    assert raised.value.file == "__metadata__"


FRAMES = {
    "pickle": (b"\x80\x04\x95cos\nsystem\n", "msgpack"),
    "a list": (msgpack.packb([1, 2]), "map"),
    "deep": (b"\x91" * 5000, "msgpack"),
    "long": (b"\xdd\xff\xff\xff\xff", "msgpack"),
    "no positions": ({"atom_types": array([0])}, "coords"),
    "no types": ({"coords": array([0.0] * 3)}, "atom_types"),
    "objects": (frame([0], energies={"type": "O", "shape": [1], "data": bytes(8)}), "dtype O"),
    "text": (frame([0], energies="low"), "str"),
    "records": (frame([0], energies={"type": "f8,f8", "shape": [1], "data": bytes(16)}), "dtype"),
    "shape": (
        frame([0], coords={"type": "<f8", "shape": [1 << 40, 3], "data": bytes(24)}),
        "shape",
    ),
    "bytes": (frame([0], coords={"type": "<f8", "shape": [3], "data": bytes(23)}), "bytes"),
    "size": (frame([0, 1], forces=array([1.0, 2.0])), "force"),
    "fractions": (frame([0, 1], atom_types=array([0.5, 1.0])), "atom_types"),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames_that_make_no_sense_are_named(tmp_path, case):
    broken, word = FRAMES[case]
    with pytest.raises(SystemFormatError, match=word) as raised:
        open_systems(database(tmp_path / "d.lmdb", [frame([0, 1]), broken]))
    assert raised.value.file.startswith("frame 1")


def test_rejects_databases_without_frames(tmp_path):
    path = Path(database(tmp_path / "d.lmdb", [frame([0, 1])]))
    with lmdb.open(str(tmp_path / "other.lmdb"), map_size=1 << 20) as environment:
        with pytest.raises(SystemFormatError, match="__metadata__"):
            open_systems(str(tmp_path / "other.lmdb"))
        with environment.begin(write=True) as transaction:
            transaction.put(b"0", pickle.dumps([1]))
    with pytest.raises(SystemFormatError, match="deepmd-kit"):
        open_systems(str(tmp_path / "other.lmdb"))
    with pytest.raises(SystemNotFoundError, match=r"none\.lmdb"):
        open_systems(str(tmp_path / "none.lmdb"))
    (path / "data.mdb").write_bytes(bytes(8192))
    with pytest.raises(SystemFormatError, match="not an LMDB"):
        open_systems(str(path))


def test_damaged_copies_raise_errors_and_never_end_the_process(tmp_path):
    """liblmdb ends the process with SIGBUS for every file of this test that is cut."""
    frames = [frame([0, 1] * (1 + 40 * (k % 2)), k) for k in range(60)]
    path = Path(database(tmp_path / "d.lmdb", frames), "data.mdb")
    sound = path.read_bytes()
    for cut in (0, 100, 4096, 9000, len(sound) // 2, len(sound) - 4096):
        path.write_bytes(sound[:cut])
        with pytest.raises(SystemFormatError, match=r"truncated|not an LMDB"):
            open_systems(str(path.parent))
    chance = random.Random(1)
    refused = 0
    for _ in range(150):
        path.write_bytes(with_changed_bits(sound, chance, 20))
        try:
            for system in open_systems(str(path.parent)):
                system.frames(np.arange(system.nframes))
        except DataError:
            refused += 1
    assert refused > 100


def test_missing_packages_are_asked_for_by_name(tmp_path, monkeypatch, capsys):
    path = database(tmp_path / "d.lmdb", [frame([0, 1])])
    monkeypatch.setitem(sys.modules, "lmdb", None)
    assert main(["convert-data", path, str(tmp_path / "folder")]) == 0
    assert main(["convert-data", path, str(tmp_path / "new.lmdb")]) == 2
    assert "pip install lmdb" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(DataError, match="pip install msgpack"):
        open_systems(path)


READ_WITH_DEEPMD_KIT = """
import json, sys
from deepmd.dpmodel.utils.lmdb_data import LmdbDataReader, merge_lmdb
reader = LmdbDataReader(sys.argv[1], ["H", "O"], "mix:64")
frames = [reader[k] for k in range(len(reader))]
names = ("atype", "coord", "box", "energy", "force", "virial")
print("FRAMES" + json.dumps([{n: f[n].reshape(-1).tolist() for n in names if n in f} for f in frames]))
merge_lmdb([sys.argv[1], sys.argv[1]], sys.argv[2])
"""


@needs_deepmd_kit
def test_deepmd_kit_reads_what_we_write_and_we_read_what_it_merges(tmp_path):
    arrays = make_arrays(3, 8, 1, ("energy", "force", "virial"))
    write_npy(tmp_path / "in/a", [0, 1] * 4, [arrays], ("O", "H"))
    write_npy(tmp_path / "in/b", [1, 0, 1], [make_arrays(2, 3, 2)], ("H", "O"))
    ours, merged = str(tmp_path / "ours.lmdb"), str(tmp_path / "merged.lmdb")
    assert main(["convert-data", str(tmp_path / "in"), ours]) == 0
    said = python("-c", READ_WITH_DEEPMD_KIT, ours, merged)
    theirs = json.loads(said.partition("FRAMES")[2].splitlines()[0])
    row = 0
    for system in open_systems(str(tmp_path / "in"), ["H", "O"]):
        frames = system.frames(np.arange(system.nframes))
        for k in range(system.nframes):
            for name in ("coord", "box", "energy", "force", "virial"):
                if (values := getattr(frames, name)) is not None:
                    ours_of = values[k].ravel()
                    np.testing.assert_allclose(theirs[row][name], ours_of, rtol=1e-6, atol=1e-7)
            assert theirs[row]["atype"] == frames.atype[k].tolist()
            row += 1
    assert row == len(theirs) == 5
    counts = sorted((system.natoms, system.nframes) for system in open_systems(merged, ["H", "O"]))
    assert counts == [(3, 2), (3, 2), (8, 3), (8, 3)]


def sampled(tmp_path, monkeypatch, frames, looked=4, **metadata):
    """Open a database as if it were a large one."""
    path = database(tmp_path / "d.lmdb", frames, **metadata)
    monkeypatch.setattr(lmdb_store, "_MAX_READ_WHOLE", 0)
    monkeypatch.setattr(lmdb_store, "_SAMPLE", looked)
    return path, open_systems(path, ["O", "H"])


def test_large_databases_open_from_their_metadata(tmp_path, monkeypatch):
    kinds = [[0, 1, 1], [0, 1], [1, 0, 1]]
    frames = [frame(kinds[k % 3], k) for k in range(90)]
    ids, nlocs = [k % 2 for k in range(90)], [len(kinds[k % 3]) for k in range(90)]
    metadata = {"frame_system_ids": ids, "frame_nlocs": nlocs}
    whole = open_systems(database(tmp_path / "whole.lmdb", frames, **metadata), ["O", "H"])
    looked_at = []
    original = LmdbFile.values

    def values(file, keys):
        looked_at.extend(keys)
        return original(file, keys)

    monkeypatch.setattr(LmdbFile, "values", values)
    _, systems = sampled(tmp_path, monkeypatch, frames, 8, **metadata)
    assert len(looked_at) == 1 + 8  # the metadata, and the frames of the sample
    for ours, theirs in zip(systems, whole, strict=True):
        for name in ("nframes", "natoms", "pbc", "labels"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert not ours.uniform_labels
        every = np.random.default_rng(0).permutation(ours.nframes)
        a, b = ours.frames(every), theirs.frames(every)
        for name in ("atype", "coord", "box", "energy", "force"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert a.virial is None


def test_labels_that_some_frames_lack_are_absent_in_large_databases(tmp_path, monkeypatch):
    virial = {"virials": array(np.arange(9.0))}
    frames = [frame([0, 1], k, **(virial if k % 3 else {})) for k in range(30)]
    _, (system,) = sampled(tmp_path, monkeypatch, frames, frame_nlocs=[2] * 30)
    assert system.labels == {"energy", "force", "virial"}
    assert system.frames(range(30)).present("virial").tolist() == [k % 3 > 0 for k in range(30)]
    assert system.frames([0, 3]).present("energy").all()


def test_separates_frames_with_and_without_cells_in_a_large_database(tmp_path, monkeypatch):
    frames = [frame([0, 1], k, cell=k < 15) for k in range(30)]
    _, systems = sampled(tmp_path, monkeypatch, frames, frame_nlocs=[2] * 30)
    assert [(s.nframes, s.pbc) for s in systems] == [(15, True), (15, False)]


SURPRISES = {
    "atoms": (frame([0, 1, 1]), "3 atoms"),
    "cell": (frame([0, 1], cell=False), "no cell"),
    "value": (frame([0, 1], forces=array(np.full((2, 3), np.nan))), "force"),
}


@pytest.mark.parametrize("case", SURPRISES)
def test_frames_that_contradict_the_metadata_are_named_when_they_are_read(
    tmp_path, monkeypatch, case
):
    odd, word = SURPRISES[case]
    frames = [odd if k == 5 else frame([0, 1], k) for k in range(30)]
    _, (system,) = sampled(tmp_path, monkeypatch, frames, frame_nlocs=[2] * 30)
    assert system.frames([4, 6]).nframes == 2
    with pytest.raises(SystemFormatError, match=word) as raised:
        system.frames([4, 5])
    assert raised.value.file.startswith("frame 5")


def test_a_label_that_was_not_foreseen_is_reported(tmp_path, monkeypatch, caplog):
    frames = [frame([0, 1], k) for k in range(30)]
    frames[5] = frame([0, 1], 5, virials=array(np.arange(9.0)))
    _, (system,) = sampled(tmp_path, monkeypatch, frames, frame_nlocs=[2] * 30)
    system.frames([4, 5])
    system.frames([5])
    (record,) = [record for record in caplog.records if "virial" in record.getMessage()]
    assert record.levelname == "WARNING"


@pytest.mark.parametrize("form", ["012d", "d"])
def test_values_are_those_that_liblmdb_reads(tmp_path, form):
    """Keys in any order, on three levels of pages, with long, short and empty values; some are missing."""
    path = tmp_path / "deep.lmdb"
    rng = np.random.default_rng(1)
    numbers = rng.permutation(np.arange(0, 60_000, 2))
    with lmdb.open(str(path), map_size=1 << 28) as environment:
        with environment.begin(write=True) as transaction:
            for k in numbers.tolist():
                value = b"%d" % k * (900 if k % 1000 == 0 else k % 3)
                transaction.put(format(k, form).encode(), value)
        file = LmdbFile("deep", str(path / "data.mdb"), HandleCache())
        assert file.entries == 30_000
        drawn = rng.integers(0, 60_100, 2000)
        for numbers in (np.arange(3000), np.sort(drawn), drawn):
            keys = [format(k, form).encode() for k in numbers.tolist()] + [b"zzz", b"0 0", b"1_0"]
            with environment.begin() as transaction:
                assert file.values(keys) == [transaction.get(key) for key in keys]
    assert file.values([b""]) == [None]


def test_values_of_damaged_files_are_those_of_their_keys(tmp_path):
    """Whatever bytes of pages change, a value is the one that its key finds alone, or there is an error."""
    values = [b"%d" % k * (900 if k % 7 == 0 else 9) for k in range(300)]
    contents = {b"%012d" % k: value for k, value in enumerate(values)}
    with lmdb.open(str(tmp_path / "d.lmdb")) as environment, environment.begin(write=True) as write:
        for key, value in contents.items():
            write.put(key, value)
    path = tmp_path / "d.lmdb" / "data.mdb"
    sound = path.read_bytes()
    chance = random.Random(2)
    n_errors = n_sound = 0
    for _ in range(60):
        path.write_bytes(with_changed_bits(sound, chance, 10))
        try:
            file = LmdbFile("d", str(path), HandleCache())
        except SystemFormatError:
            continue
        alone = [value_or_error(file, key) for key in contents]
        try:
            together = file.values(list(contents))
        except SystemFormatError:
            n_errors += 1
            assert "error" in alone
            continue
        n_sound += 1
        for one, other, value in zip(alone, together, contents.values(), strict=True):
            # A damaged neighbour may lead the search of one key astray.
            assert other in (one, value) or one in ("error", None)
    assert n_errors > 20
    assert n_sound > 5


def value_or_error(file, key):
    try:
        return file.values([key])[0]
    except SystemFormatError:
        return "error"
