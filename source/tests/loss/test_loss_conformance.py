"""The package's loss passes the conformance tests for losses of other packages."""

import pytest

from deepmd_muon.testing import LossChecks

ALL = {
    f"{end}_pref_{term}": 1.0 for end in ("start", "limit") for term in ("e", "f", "v", "ae", "pf")
}
SETTINGS = {
    "default": {},
    "every term": {**ALL, "enable_atom_ener_coeff": True},
    "relative": {"relative_f": 0.5},
    "absolute errors": {
        "loss_func": "mae",
        "f_use_norm": True,
        "start_pref_v": 1.0,
        "limit_pref_v": 1.0,
    },
    "huber": {"use_huber": True, "huber_delta": 0.5},
}


class TestEnergyLoss(LossChecks):
    @pytest.fixture(autouse=True, params=SETTINGS)
    def _part(self, request, monkeypatch):
        monkeypatch.setenv("DEVICE", "cpu")
        self.loss = {"type": "ener", **SETTINGS[request.param]}
