"""LMDB frames of one layout are decoded together: the values and errors are those of the decoding one by one."""

import tempfile
import tracemalloc
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmdb_databases import array, database, frame, msgpack

from deepmd_muon.data import DataError, SystemFormatError, open_systems
from deepmd_muon.data.stores import lmdb_frames, lmdb_store
from deepmd_muon.data.stores.lmdb_frames import FrameDecoder, FrameLayout, decode_frame

# Frames of one natoms that a program could write: some have equal lengths and differ in their bytes beside the values.
SEEDS = st.integers(0, 3)
BOUNDED = st.sampled_from([np.float64, np.float32])


def in_bytes(entry):
    return {key if isinstance(key, bytes) else key.encode(): value for key, value in entry.items()}


@st.composite
def frames(draw):
    """A frame, packed: of another writer, with other labels, flags, cells, extra fields, or damaged."""
    natoms = draw(st.sampled_from([2, 2, 2, 3]))
    seed = draw(SEEDS)
    rng = np.random.default_rng(seed)
    types = rng.integers(draw(st.sampled_from([0, 0, 0, -1])), 2, natoms)
    one = frame(types, seed, cell=draw(st.integers(0, 4)) > 0)
    kind = draw(BOUNDED)
    one["coords"] = array(rng.uniform(0, 5, (natoms, 3)), kind)
    energies = [
        array(rng.normal()),
        array([rng.normal()]),
        array([seed]),
        float(rng.normal()),
        seed,
    ]
    changes = {
        "energies": st.sampled_from(energies),
        "cells": st.sampled_from(
            [array(np.zeros((3, 3))), array(np.eye(3) * 7.0), array(np.eye(3), np.float32)]
        ),
        "forces": st.sampled_from(
            [array(rng.normal(size=(natoms, 3))), array(np.full((natoms, 3), np.nan))]
        ),
        "virials": st.just(array(rng.normal(size=9))),
        "find_force": st.sampled_from([0.0, 1.0, 0, array([0.0]), array([1.0])]),
        "find_box": st.sampled_from([0.0, 1.0]),
        "atomic_ener": st.just(array(rng.normal(size=natoms))),
        "aparam": st.just(array(rng.normal(size=2 * natoms))),
        "fparam": st.sampled_from([array([0.5]), array([float(seed)]), array(np.zeros(0))]),
        "atom_numbs": st.sampled_from([[1, 1], [2, 0], [127, 0], [200, 0], [True, False], [-1, 3]]),
        "orig": st.sampled_from(
            [array(rng.normal(size=3)), array([1, 2, 3]), in_bytes(array([4.0, 5.0, 6.0]))]
        ),
        "note": st.sampled_from(["ab", "cd", b"ef", None, {"data": "no bytes"}]),
        "energy": st.just(array([rng.normal()])),
    }
    for name in draw(st.lists(st.sampled_from(sorted(changes)), max_size=2, unique=True)):
        one[name] = draw(changes[name])
    if draw(st.integers(0, 9)) == 0:
        one = {
            key: in_bytes(value) if isinstance(value, dict) else value for key, value in one.items()
        }
    if draw(st.integers(0, 9)) == 0:
        one = {key.encode(): value for key, value in one.items()}
    return msgpack.packb(one, use_bin_type=True)


@st.composite
def cut_or_changed(draw):
    """A frame with a byte changed somewhere, or cut."""
    raw = bytearray(draw(frames()))
    where = draw(st.integers(0, len(raw) - 1))
    raw[where] = draw(st.integers(0, 255))
    return bytes(raw[:where] if draw(st.booleans()) else raw)


def as_plain(frame):
    return {name: (values.dtype.kind, repr(values.tolist())) for name, values in frame.items()}


@given(st.lists(frames(), min_size=1, max_size=30))
def test_every_frame_is_decoded_as_it_is_alone(raws):
    decoder = FrameDecoder("s")
    for _ in range(2):  # with layouts found on the way, and known before
        found = {}
        for block in decoder.blocks(range(len(raws)), raws):
            for k, row in enumerate(block.rows.tolist()):
                assert row not in found
                found[row] = as_plain({name: values[k] for name, values in block.columns.items()})
        assert [found[row] for row in range(len(raws))] == [
            as_plain(decode_frame("s", "", raw)) for raw in raws
        ]


@given(
    frames(), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=3)
)
def test_frames_that_fit_a_layout_are_decoded_without_error(raw, changes):
    """Whatever bytes differ: a frame that fits is one that `decode_frame` takes, with the same values."""
    layout = FrameLayout.of(raw, decode_frame("s", "", raw))
    if layout is None:
        return
    other = bytearray(raw)
    for where, value in changes:
        other[where % len(other)] = value
    whole = np.frombuffer(bytes(other), np.uint8)[None]
    if layout.fits(whole).all():
        found = {name: values[0] for name, values in layout.columns(whole).items()}
        assert as_plain(found) == as_plain(decode_frame("s", "", bytes(other)))


def two_datas(first, second):
    """An encoded energy whose keys are bytes, and beside them a text key that nobody reads."""
    return {**in_bytes(array([first])), "data": np.array([second]).tobytes()}


# Frames of equal length that are decoded in different ways, or not at all.
PAIRS = {
    "cell": ({"cells": array(np.eye(3))}, {"cells": array(np.zeros((3, 3)))}),
    "no cell": ({"cells": array(np.zeros((3, 3)))}, {"cells": array(np.eye(3))}),
    "flag": ({"find_force": 1.0}, {"find_force": 0.0}),
    "flag in an array": ({"find_force": array([1.0])}, {"find_force": array([0.0])}),
    "no flag in an array": ({"find_force": array([0.0])}, {"find_force": array([1.0])}),
    "dtype": (
        {"energies": array([1.0])},
        {"energies": {"type": "float32", "shape": [2], "data": bytes(8)}},
    ),
    "shape": (
        {"energies": array([1.0])},
        {"energies": {"type": "float64", "shape": [2], "data": bytes(8)}},
    ),
    "name": ({"virials": array(np.arange(9.0))}, {"virialz": array(np.arange(9.0))}),
    "twice": ({"energy": array([2.0])}, {"energy": array([3.0])}),
    "two keys": ({"energies": two_datas(1.0, 1.0)}, {"energies": two_datas(1.0, 3.0)}),
    "number": ({"energies": 1.5}, {"energies": [1 << 20, 1 << 10]}),
    "text": ({"note": "ab"}, {"note": ["a"]}),
}


@pytest.mark.parametrize("case", PAIRS)
def test_frames_of_equal_length_that_are_decoded_in_different_ways(case):
    first, second = (frame([0, 1], **changes) for changes in PAIRS[case])
    assert_decoded_as_alone(
        [msgpack.packb(one, use_bin_type=True) for one in (first, first, second)]
    )


def test_counts_of_atoms_whose_bytes_have_another_meaning_are_refused():
    raw = msgpack.packb(frame([0, 1], atom_numbs=[1, 5]), use_bin_type=True)
    other, damaged = (
        raw.replace(b"\x92\x01\x05", b"\x92" + counts) for counts in (b"\x03\x04", b"\x03\xcc")
    )
    assert_decoded_as_alone([raw, raw, other])
    assert_decoded_as_alone([raw, other, damaged])
    # A program may write small numbers in two bytes; 0xCC announces one byte, 0xCD two.
    raw, other, damaged = (
        raw.replace(b"\x92\x01\x05", b"\x92" + counts)
        for counts in (b"\xcc\x05\xcc\x06", b"\xcc\x05\xcc\x07", b"\xcc\x05\xcd\x06")
    )
    assert_decoded_as_alone([raw, raw, other])
    assert_decoded_as_alone([raw, other, damaged])


@pytest.mark.parametrize(
    "names", [("energies", "energy"), ("energy", "energies"), ("energy", b"energies")]
)
def test_a_field_that_occurs_twice(names):
    """msgpack keeps a repeated key in its first place, with its last value."""

    def raw(values):
        fields = [
            *frame([0, 1]).items(),
            *((name, array([value])) for name, value in zip(names, values, strict=True)),
        ]
        fields = [
            (key, value)
            for k, (key, value) in enumerate(fields)
            if k >= len(fields) - 2 or key != "energies"
        ]
        fields.insert(1, ("energies", array([values[0]])))
        packed = b"".join(
            msgpack.packb(part, use_bin_type=True) for field in fields for part in field
        )
        return bytes([0x80 | len(fields)]) + packed

    assert_decoded_as_alone([raw((2.0, 2.0)), raw((2.0, 2.0)), raw((2.0, 3.0))])
    assert_decoded_as_alone([raw((2.0, 2.0)), raw((4.0, 2.0)), raw((2.0, 3.0))])


def assert_decoded_as_alone(raws):
    """Compare three frames, of which the last may be damaged, with those decoded one by one."""
    assert len({len(raw) for raw in raws}) == 1
    expected = [plain_or_error(raw) for raw in raws]
    found = {}
    try:
        for block in FrameDecoder("s").blocks([0, 0, 0], raws):
            for k, row in enumerate(block.rows.tolist()):
                found[row] = as_plain({name: values[k] for name, values in block.columns.items()})
    except SystemFormatError as error:
        found[2] = str(error)
    assert [found[row] for row in range(3)] == expected


def plain_or_error(raw):
    try:
        return as_plain(decode_frame("s", "frame 0", raw))
    except SystemFormatError as error:
        return str(error)


def read(system, numbers):
    """Values of frames, or the message of the error."""
    try:
        frames = system.frames(numbers)
    except DataError as error:
        return str(error)
    return {
        name: None if values is None else values.tolist() for name, values in vars(frames).items()
    }


def outcome(path, requests, *, together):
    """What a database gives for requests of frames of its systems."""
    alone = mock.patch.object(FrameDecoder, "_learn", return_value=None)
    found = []
    with nullcontext() if together else alone:
        try:
            systems = open_systems(path, ["O", "H"])
        except DataError as error:
            return [str(error)]
        for system in systems:
            system = system.with_all_parameters()
            found.append((system.nframes, system.natoms, system.pbc, system.mixed, system.labels))
            found += [read(system, np.array(numbers) % system.nframes) for numbers in requests]
    return found


@given(
    st.lists(frames() | frames() | frames() | cut_or_changed(), min_size=2, max_size=12),
    st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=12), min_size=1, max_size=3),
    st.booleans(),
)
def test_databases_give_the_values_and_errors_of_frames_read_one_by_one(raws, requests, large):
    with tempfile.TemporaryDirectory() as folder:
        nlocs = [2] * len(raws)
        path = database(Path(folder) / "d.lmdb", raws, **({"frame_nlocs": nlocs} if large else {}))
        sampled = {"_MAX_READ_WHOLE": 0, "_SAMPLE": 2} if large else {}
        with mock.patch.multiple(lmdb_store, **sampled) if sampled else nullcontext():
            assert repr(outcome(path, requests, together=True)) == repr(
                outcome(path, requests, together=False)
            )


def decodings(path, monkeypatch):
    """Read all frames of a database, and count those decoded alone."""
    alone = []
    for module in (lmdb_store, lmdb_frames):
        monkeypatch.setattr(module, "decode_frame", lambda *a: alone.append(a) or decode_frame(*a))
    systems = open_systems(path, ["O", "H"])
    read = [system.frames(np.arange(system.nframes)) for system in systems]
    return len(alone), read


def test_frames_of_a_writer_are_decoded_together(tmp_path, monkeypatch):
    """Two writers, a cell without size, counts of atoms and unread fields: a layout each, not a layout a frame."""
    rng = np.random.default_rng(0)
    kinds = [
        lambda k: frame([0, 1, 1], k),
        lambda k: frame(rng.integers(0, 2, 3), k, forces=array(rng.normal(size=(3, 3)))),
        lambda k: frame([0, 1, 1], k, cells=array(np.zeros((3, 3))), energies=float(k)),
        lambda k: frame(
            [0, 1, 1, 1], k, atom_numbs=[k % 5, 4 - k % 5], orig=array(rng.normal(size=3))
        ),
    ]
    made = [kinds[k % 4](k) for k in range(200)]
    count, read = decodings(database(tmp_path / "d.lmdb", made), monkeypatch)
    assert count == len(kinds)
    rows = np.concatenate([r.energy for r in read])
    energies = [one["energies"] for one in made]
    expected = [e if isinstance(e, float) else np.frombuffer(e["data"])[0] for e in energies]
    assert sorted(rows) == sorted(expected)


def test_layouts_of_no_use_are_no_longer_looked_for(tmp_path, monkeypatch):
    """Each frame has a text of its own, and so a layout of its own."""
    made = [frame([0, 1], k, sid=format(k, "04d")) for k in range(300)]
    learned = []
    original = FrameLayout.of
    monkeypatch.setattr(FrameLayout, "of", lambda *a: learned.append(a) or original(*a))
    path = database(tmp_path / "d.lmdb", made)
    (system,) = open_systems(path, ["O", "H"])
    energies = [np.frombuffer(one["energies"]["data"])[0] for one in made]
    assert system.frames(np.arange(300)).energy.tolist() == energies
    assert len(learned) <= lmdb_frames._FREE_LAYOUTS + 1


def test_the_first_damaged_frame_of_a_request_is_named(tmp_path, monkeypatch):
    made = [msgpack.packb(frame([0, 1], k)) for k in range(20)]
    made[7] = made[7][:-30]
    made[3] = msgpack.packb(frame([0, 1], forces=array(np.full((2, 3), np.inf))))
    path = database(tmp_path / "d.lmdb", made, frame_nlocs=[2] * 20)
    monkeypatch.setattr(lmdb_store, "_MAX_READ_WHOLE", 0)
    monkeypatch.setattr(lmdb_store, "_SAMPLE", 2)
    (system,) = open_systems(path, ["O", "H"])
    assert system.frames([0, 1, 2, 4, 5, 6, 8]).nframes == 7
    for numbers, first in ([0, 1, 7, 3], 7), ([0, 3, 7], 3), ([19, 7], 7):
        with pytest.raises(SystemFormatError) as raised:
            system.frames(numbers)
        assert raised.value.file.startswith(f"frame {first}")


def test_frames_that_are_read_may_be_changed(tmp_path):
    """The next request for them must not see it, though frames of the last one stay decoded."""
    (system,) = open_systems(
        database(tmp_path / "d.lmdb", [frame([0, 1], k) for k in range(9)]), ["O", "H"]
    )
    first = system.frames(np.arange(9))
    kept = first.coord.copy()
    for values in (first.coord, first.force, first.energy, first.box):
        values += 1.0
    np.testing.assert_array_equal(system.frames(np.arange(9)).coord, kept)


def test_large_requests_are_read_in_parts(tmp_path, monkeypatch):
    path = database(tmp_path / "d.lmdb", [frame([k % 2, 1], k) for k in range(40)])
    (system,) = open_systems(path, ["O", "H"])
    every = np.random.default_rng(0).permutation(40)
    whole = system.frames(every)
    monkeypatch.setattr(lmdb_store, "_MAX_DECODED_ATOMS", 14)
    parts = system.frames(every)
    for name in ("atype", "coord", "box", "energy", "force"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_energies_of_all_frames_need_no_room_for_all_positions(tmp_path, monkeypatch):
    path = database(
        tmp_path / "d.lmdb", [frame([0, 1] * 150, k) for k in range(200)]
    )  # 11 kB a frame
    (system,) = open_systems(path, ["O", "H"])
    monkeypatch.setattr(lmdb_store, "_MAX_DECODED_ATOMS", 3000)
    tracemalloc.start()
    try:
        assert system._store.rows("set.000/energy.npy", np.arange(200), False).shape == (200, 1)
        assert tracemalloc.get_traced_memory()[1] < 1_200_000
    finally:
        tracemalloc.stop()
