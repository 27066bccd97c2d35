"""LMDB databases in deepmd-kit's format, sound or not, written by the tests themselves."""

import numpy as np
import pytest

from deepmd_muon.data.stores.lmdb_store import METADATA

lmdb = pytest.importorskip("lmdb")
msgpack = pytest.importorskip("msgpack")


def array(values, dtype=None):
    values = np.asarray(values, dtype=dtype)
    return {"type": str(values.dtype), "shape": list(values.shape), "data": values.tobytes()}


def frame(types, seed=0, *, cell=True, **others):
    """A frame as deepmd-kit's converters write it."""
    rng = np.random.default_rng(seed)
    n = len(types)
    found = {
        "atom_types": array(types, np.int32),
        "coords": array(rng.uniform(0, 5, (n, 3))),
        "energies": array(rng.normal()),
        "forces": array(rng.normal(size=(n, 3)), np.float32),
    }
    if cell:
        found["cells"] = array(np.eye(3) * 6.0)
    return {**found, **others}


def with_changed_bits(sound, chance, changes):
    """The file `sound` with single bits changed: in headers of pages and nodes, which stand at both ends of a page."""
    found = bytearray(sound)
    for _ in range(changes):
        page = chance.randrange(len(sound) // 4096)
        place = chance.choice([chance.randrange(200), 4095 - chance.randrange(200)])
        found[page * 4096 + place] ^= 1 << chance.randrange(8)
    return bytes(found)


def database(path, frames, **metadata):
    """Write a database as it is given, sound or not."""
    path.mkdir()
    with (
        lmdb.open(str(path), map_size=1 << 26) as environment,
        environment.begin(write=True) as transaction,
    ):
        for number, one in enumerate(frames):
            packed = one if isinstance(one, bytes) else msgpack.packb(one, use_bin_type=True)
            transaction.put(format(number, "012d").encode(), packed)
        meta = {"nframes": len(frames), "frame_idx_fmt": "012d", "type_map": ["O", "H"], **metadata}
        transaction.put(METADATA, msgpack.packb({k: v for k, v in meta.items() if v is not None}))
    return str(path)
