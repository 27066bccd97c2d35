"""Settings of the model that change its physics, and the conformance tests with them."""

import numpy as np
import pytest
import torch
from model_batches import make_batch, section

from deepmd_muon.model import build_model
from deepmd_muon.testing import DescriptorChecks

SETTINGS = {
    "one_side": {},
    "pair_nets": {"descriptor": {"type_one_side": False, "resnet_dt": True}},
    # With a mean, energies of excluded pairs jump at the cutoff, as deepmd-kit's do: a neighbour there counts as
    # zero, but the empty slot it leaves behind as the standardised zero row.
    "excluded": {
        "descriptor": {
            "exclude_types": [[0, 1]],
            "activation_function": "gelu",
            "set_davg_zero": True,
        }
    },
    "protected": {
        "descriptor": {"env_protection": 0.1, "set_davg_zero": True},
        "fitting_net": {"atom_ener": [-1.0, -2.0]},
    },
}


class TestSettings(DescriptorChecks):
    @pytest.fixture(autouse=True, params=SETTINGS)
    def _parts(self, request):
        made = section(**SETTINGS[request.param])
        self.descriptor, self.fitting_net = made["descriptor"], made["fitting_net"]

    # test_frozen_settings compares each setting with its program.
    test_a_frozen_file_gives_the_same = None


def predict(model, coord, atype, box, **more):
    with torch.no_grad():
        out = model(make_batch(coord, atype, box, model.rcut, model.sel), **more)
    return {key: value.numpy() for key, value in out.items()}


def test_excluded_types_do_not_see_each_other():
    model = build_model(section(descriptor={"exclude_types": [[0, 1]]}))
    atype = np.array([[0, 1, 1]])
    coord = np.array([[[0.0, 0, 0], [1.2, 0, 0], [0.3, 1.1, 0.2]]])
    moved = coord + np.array([[[0.4, 0.1, -0.2], [0, 0, 0], [0, 0, 0]]])
    before, after = predict(model, coord, atype, None), predict(model, moved, atype, None)
    np.testing.assert_allclose(after["energy"], before["energy"], rtol=1e-14)
    assert (before["force"][0, 0] == 0).all()
    assert np.abs(before["force"][0, 1]).max() > 1e-6


def test_a_lone_atom_in_vacuum_has_its_set_energy():
    zero = section(descriptor={"set_davg_zero": True}, fitting_net={"atom_ener": [-1.0, None]})
    model = build_model(zero)
    model.set_energy_bias([-1.0, -2.0])
    out = predict(model, np.zeros((1, 1, 3)), np.array([[0]]), None)
    assert out["energy"].item() == pytest.approx(-1.0, abs=1e-14)
    assert predict(model, np.zeros((1, 1, 3)), np.array([[1]]), None)[
        "energy"
    ].item() != pytest.approx(-2.0, abs=1e-3)
