"""Numbers of deepmd-kit 3.2.0, read from the fixture that make_deepmd_kit_fixtures.py wrote."""

import numpy as np
import pytest
import torch
from model_batches import make_batch, read_fixture

from deepmd_muon.loss import build_loss
from deepmd_muon.model import build_model, environment_statistics
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, from_deepmd_kit, to_deepmd_kit

FIXTURE = read_fixture()
CASES = list(FIXTURE["cases"])
KINDS = list(FIXTURE["structures"])


def load(name):
    settings, state = from_deepmd_kit(FIXTURE["cases"][name]["state"])
    model = build_model(settings)
    model.load_state_dict(state)
    return model


def batch_for(model, kind, **more):
    data = FIXTURE["structures"][kind]
    return make_batch(data["coord"], data["atype"], data["box"], model.rcut, model.sel, **more)


# In the tiny cell an atom's images at +S and −S are equally far: which one a short sel keeps is rounding.
PAIRS = [(name, kind) for name in CASES for kind in KINDS if (name, kind) != ("truncated", "tiny")]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_same_numbers(name, kind):
    model = load(name)
    out = model(batch_for(model, kind))
    expected = FIXTURE["cases"][name]["outputs"][kind]
    # deepmd-kit's float32 models take differences of float32 coordinates, ours of float64 ones
    relative, absolute = (2e-5, 2e-4) if name == "float32" else (1e-10, 1e-8)
    torch.testing.assert_close(out["energy"], expected["energy"], rtol=relative, atol=0)
    torch.testing.assert_close(out["atom_energy"], expected["atom_energy"], rtol=relative, atol=0)
    torch.testing.assert_close(out["force"], expected["force"], rtol=0, atol=absolute)
    torch.testing.assert_close(out["virial"], expected["virial"], rtol=0, atol=absolute)
    assert expected["force"].abs().max() > 1e-3  # so that the comparison says something


@pytest.mark.parametrize("name", ["one_side", "pair_nets", "exclude_one_side"])
def test_full_width_columns_give_the_same(name):
    model = load(name)
    narrow, full = model(batch_for(model, "triclinic")), model(batch_for(model, "triclinic", widths=model.sel))
    for key, value in narrow.items():
        torch.testing.assert_close(value, full[key], rtol=1e-12, atol=1e-12)


def test_without_forces_the_energy_is_the_same():
    for name in CASES:
        model = load(name)
        batch = batch_for(model, "orthorhombic")
        with torch.no_grad():
            alone = model(batch, force=False)
        assert set(alone) == {"energy", "atom_energy"}
        torch.testing.assert_close(
            alone["energy"], model(batch)["energy"], rtol=1e-6 if name == "float32" else 1e-13, atol=0
        )


@pytest.mark.parametrize("name", [n for n in CASES if "gradients" in FIXTURE["cases"][n]])
def test_same_gradient_of_the_loss(name):
    model = load(name)
    wanted = FIXTURE["cases"][name]["gradients"]
    prediction = model(batch_for(model, "orthorhombic"))
    natoms = prediction["atom_energy"].shape[1]
    value, _ = build_loss(wanted["settings"])(prediction, wanted["label"], wanted["lr_fraction"], natoms)
    torch.testing.assert_close(value, wanted["loss"], rtol=1e-11, atol=0)
    value.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert set(ours) == set(wanted["parameters"])
    for key, gradient in wanted["parameters"].items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-9, atol=1e-11 * gradient.abs().max().item(), msg=key)
    assert deepmd_kit_parameter_names(model) == wanted["order"]


def test_twenty_steps_of_adam_follow_deepmd_kit():
    (name,) = (n for n in CASES if "followed" in FIXTURE["cases"][n])
    model = load(name)
    given, followed = FIXTURE["cases"][name]["gradients"], FIXTURE["cases"][name]["followed"]
    batch, loss = batch_for(model, "orthorhombic"), build_loss(given["settings"])
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert len(followed) == 20
    assert followed[-1] < 0.9 * followed[0]
    for expected in followed:
        adam.zero_grad()
        value, _ = loss(model(batch), given["label"], given["lr_fraction"], batch.natoms)
        assert value.item() == pytest.approx(expected, rel=1e-9)
        value.backward()
        adam.step()


@pytest.mark.parametrize("name", CASES)
def test_same_statistics(name):
    model = load(name)
    sea = model.atomic_model.descriptor.sea
    wanted_mean, wanted_std = sea.mean.clone(), sea.stddev.clone()
    sea.stddev.fill_(torch.nan)
    mean, stddev = environment_statistics(model, [batch_for(model, kind) for kind in KINDS])
    model.set_statistics(mean, stddev)
    tolerance = 1e-6 if name == "float32" else 1e-12
    torch.testing.assert_close(sea.mean, wanted_mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(sea.stddev, wanted_std, rtol=tolerance, atol=tolerance)
    assert (wanted_mean[:, :, 0] != 0).all() == (name != "vacuum")


@pytest.mark.parametrize("name", CASES)
def test_state_dict_round_trip(name):
    model = load(name)
    theirs = FIXTURE["cases"][name]["state"]
    ours = to_deepmd_kit(model, {"lr": 1e-3, "step": 7})
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if key != "_extra_state":
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value)
    assert ours["_extra_state"]["train_infos"] == {"lr": 1e-3, "step": 7}
    params, wanted = ours["_extra_state"]["model_params"], theirs["_extra_state"]["model_params"]
    for part in ("descriptor", "fitting_net"):
        assert params[part] == {k: v for k, v in wanted[part].items() if k in params[part]}
    assert set(wanted) - set(params) == set()


def test_frames_of_a_batch_do_not_mix():
    model = load("one_side")
    data = FIXTURE["structures"]["orthorhombic"]
    both = model(batch_for(model, "orthorhombic"))
    for f in range(2):
        alone = make_batch(
            data["coord"][f : f + 1], data["atype"][f : f + 1], data["box"][f : f + 1], model.rcut, model.sel
        )
        for key, value in model(alone).items():
            torch.testing.assert_close(value[0], both[key][f], rtol=1e-12, atol=1e-12)


def test_padding_atoms_are_no_atoms():
    model = load("pair_nets")
    data = FIXTURE["structures"]["open"]
    coord, atype = data["coord"].numpy(), data["atype"].numpy()
    padded_coord = np.insert(coord, [3, 15], 0.0, axis=1)
    padded_type = np.insert(atype, [3, 15], -1, axis=1)
    plain = model(make_batch(coord, atype, None, model.rcut, model.sel))
    padded = model(make_batch(padded_coord, padded_type, None, model.rcut, model.sel))
    torch.testing.assert_close(padded["energy"], plain["energy"], rtol=1e-13, atol=0)
    torch.testing.assert_close(padded["virial"], plain["virial"], rtol=1e-12, atol=1e-12)
    real = torch.from_numpy(padded_type[0] >= 0)
    torch.testing.assert_close(padded["force"][:, real], plain["force"], rtol=1e-12, atol=1e-12)
    assert (padded["force"][:, ~real] == 0).all()
    assert (padded["atom_energy"][:, ~real] == 0).all()
