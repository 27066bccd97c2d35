"""Every data format passes the conformance tests for formats of other packages."""

import pytest

from deepmd_muon.data import DataError, open_systems, opening, register_format
from deepmd_muon.data.writing import write_extxyz, write_hdf5, write_lmdb, write_npy
from deepmd_muon.testing import DataFormatChecks

FORMATS = {
    "npy": (write_npy, "", 0.0),
    "hdf5": (write_hdf5, ".hdf5", 0.0),
    "lmdb": (write_lmdb, ".lmdb", 0.0),
    "extxyz": (write_extxyz, ".xyz", 1e-7),
}


class TestOurFormats(DataFormatChecks):
    @pytest.fixture(autouse=True, params=FORMATS)
    def _part(self, request):
        self.write, self.ending, self.tolerance = FORMATS[request.param]


def test_an_ending_has_one_reader(monkeypatch):
    monkeypatch.setattr(opening, "_READERS", {})
    register_format(".npz", write_npy)
    register_format(".npz", write_npy)
    with pytest.raises(DataError, match=r"\.npz"):
        register_format(".npz", write_hdf5)
    with pytest.raises(DataError, match="dot"):
        register_format("npz", write_npy)
    assert list(opening._READERS) == [".npz"]
    with pytest.raises(DataError, match="does not exist"):
        open_systems("missing.npz")
