"""DPA-1 against numbers of deepmd-kit 3.2.0, read from the fixture that make_dpa1_fixtures.py wrote, and as physics."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from model_batches import HERE, make_batch, read_fixture

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.loss import build_loss
from deepmd_muon.model import ForeignModelError, build_model, environment_statistics
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, from_deepmd_kit, to_deepmd_kit
from deepmd_muon.model.descriptor.dpa1 import module
from deepmd_muon.model.descriptor.dpa1.attention import _Rescaled
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.optim import HybridMuon

FIXTURE = read_fixture(HERE / "dpa1.pt.gz")
CASES = list(FIXTURE["cases"])
ROUTES = json.loads((HERE / "dpa1_routes.json").read_text())
KINDS = list(FIXTURE["structures"])
STATISTICS_KINDS = ("orthorhombic", "triclinic", "tiny", "open")
# In the tiny cell an atom's images at +S and −S are equally far: which one a short sel keeps is rounding.
PAIRS = [
    (name, kind)
    for name in CASES
    for kind in KINDS
    if kind != "rim" and not (name.startswith("truncated") and kind == "tiny")
]


def load(name):
    settings, state = from_deepmd_kit(FIXTURE["cases"][name]["state"])
    model = build_model(settings)
    model.load_state_dict(state)
    return model


def batch_for(model, kind, **more):
    data = FIXTURE["structures"][kind]
    return make_batch(data["coord"], data["atype"], data["box"], model.rcut, model.sel, ntypes=model.ntypes, **more)


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_same_numbers(name, kind):
    model = load(name)
    out = model(batch_for(model, kind))
    expected = FIXTURE["cases"][name]["outputs"][kind]
    relative, absolute = (1e-5, 1e-5) if name == "float32" else (1e-10, 1e-8)
    for key, value in expected.items():
        close = {"rtol": relative, "atol": 0} if "energy" in key else {"rtol": 0, "atol": absolute}
        torch.testing.assert_close(out[key], value, **close, msg=lambda words, key=key: f"{key}: {words}")
    assert expected["force"].abs().max() > 1e-3


@pytest.mark.parametrize("name", [name for name in CASES if name != "float32"])
def test_same_numbers_just_within_the_cut_off(name):
    """The switch is 5e-14 there; deepmd-kit computes it from numbers near 1, so its forces are rounded to 1e-3."""
    model = load(name)
    out, expected = model(batch_for(model, "rim")), FIXTURE["cases"][name]["outputs"]["rim"]
    torch.testing.assert_close(out["energy"], expected["energy"], rtol=1e-6, atol=0)
    scale = expected["force"].abs().max().item()
    torch.testing.assert_close(out["force"], expected["force"], rtol=0, atol=0.02 * scale)


@pytest.mark.parametrize("name", CASES)
def test_same_start_from_the_same_seed(name):
    model = load(name)
    for key, value in build_model(model.settings).named_parameters():
        assert torch.equal(value, model.get_parameter(key)), key


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
        torch.testing.assert_close(ours[key], gradient, rtol=1e-9, atol=1e-10 * gradient.abs().max().item(), msg=key)
    assert deepmd_kit_parameter_names(model) == wanted["order"]


def test_adam_follows_deepmd_kit():
    (name,) = (n for n in CASES if "followed" in FIXTURE["cases"][n])
    model = load(name)
    given = FIXTURE["cases"][name]["gradients"]
    batch, loss = batch_for(model, "orthorhombic"), build_loss(given["settings"])
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for expected in FIXTURE["cases"][name]["followed"]:
        adam.zero_grad()
        value, _ = loss(model(batch), given["label"], given["lr_fraction"], batch.natoms)
        assert value.item() == pytest.approx(expected, rel=1e-6)
        value.backward()
        adam.step()


@pytest.mark.parametrize("name", ["two_sides", "mean", "v2", "truncated"])
def test_same_statistics(name):
    model = load(name)
    block = model.atomic_model.descriptor.se_atten
    wanted_mean, wanted_std = block.mean.clone(), block.stddev.clone()
    block.stddev.fill_(torch.nan)
    model.set_statistics(*environment_statistics(model, [batch_for(model, kind) for kind in STATISTICS_KINDS]))
    torch.testing.assert_close(block.mean, wanted_mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(block.stddev, wanted_std, rtol=1e-12, atol=1e-12)
    assert (wanted_mean[:, :, 0] != 0).all() == (name != "two_sides")


def test_the_length_of_descriptors_is_that_of_the_fitting_nets_input():
    model = load("two_sides")
    batches = [batch_for(model, kind) for kind in STATISTICS_KINDS]
    taken = []
    handle = model.atomic_model.fitting_net.register_forward_pre_hook(lambda _, given: taken.append(given[0].detach()))
    for batch in batches:
        model(batch)
    handle.remove()
    expected = torch.cat(taken).double().square().sum(1).mean().sqrt().item()
    assert descriptor_length(model, batches) == pytest.approx(expected, rel=1e-6)
    assert descriptor_length(model, []) == 0.0


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
    params, wanted = ours["_extra_state"]["model_params"], theirs["_extra_state"]["model_params"]
    missing = {"lmax", "temperature", "stripped_type_embedding", "seed"}  # without a default in deepmd-kit's check
    for part in ("descriptor", "fitting_net"):
        assert set(params[part]) - set(wanted[part]) <= missing
        assert {k: v for k, v in params[part].items() if k in wanted[part]} == {
            k: v for k, v in wanted[part].items() if k in params[part]
        }


@pytest.mark.parametrize("name", ["mean", "smooth_mean", "truncated_smooth"])
def test_columns_without_neighbours_change_nothing(name):
    model = load(name)
    narrow = model(batch_for(model, "triclinic"))
    full = model(batch_for(model, "triclinic", widths=(model.sel[0],)))
    for key, value in narrow.items():
        torch.testing.assert_close(value, full[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["one_side", "smooth_mean", "v2"])
def test_forces_are_derivatives(name):
    model = load(name)
    model.requires_grad_(False)
    batch = batch_for(model, "triclinic")
    force = model(batch)["force"]
    for atom, axis in ((0, 0), (5, 2)):
        shift = torch.zeros_like(batch.coord)
        shift[0, atom, axis] = 1e-4
        up, down = (
            model(dataclasses.replace(batch, coord=batch.coord + sign * shift), force=False)["energy"]
            for sign in (1, -1)
        )
        assert ((down - up) / 2e-4).item() == pytest.approx(force[0, atom, axis].item(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ["two_sides", "smooth_mean", "v2"])
def test_rotation_and_relabelling_change_no_energy(name):
    model = load(name)
    data = FIXTURE["structures"]["triclinic"]
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    order = np.random.default_rng(1).permutation(data["coord"].shape[1])
    plain = model(batch_for(model, "triclinic"))
    coord, box = data["coord"].numpy() @ q, data["box"].numpy() @ q
    turned = model(
        make_batch(coord[:, order], data["atype"].numpy()[:, order], box, model.rcut, model.sel, ntypes=model.ntypes)
    )
    # with a mean, empty slots carry the type of the frame's first atom: as in deepmd-kit, the order then matters
    if name == "smooth_mean":
        turned = model(make_batch(coord, data["atype"], box, model.rcut, model.sel, ntypes=model.ntypes))
        order = np.arange(len(order))
    torch.testing.assert_close(turned["energy"], plain["energy"], rtol=1e-12, atol=0)
    wanted = (plain["force"].detach().numpy() @ q)[:, order]
    np.testing.assert_allclose(turned["force"].detach().numpy(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["one_side", "mean", "smooth", "strip_smooth", "not_normalised"])
def test_isolated_atoms_give_no_nan(name):
    model = load(name)
    alone = make_batch(np.zeros((1, 1, 3)), np.zeros((1, 1), int), None, model.rcut, model.sel, ntypes=model.ntypes)
    for batch in (batch_for(model, "far"), alone):
        out = model(batch)
        model.zero_grad()
        (out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()).backward()
        assert all(value.isfinite().all() for value in out.values())
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert (out["force"] == 0).all()


@pytest.mark.parametrize("name", ["smooth", "v2"])
def test_smooth_through_the_cut_off(name):
    model = load(name)
    coord = np.array([[[0.0, 0, 0], [1.2, 0, 0], [0.3, 1.4, 0], [0, 0, 0]]])
    atype = np.array([[0, 1, 0, 1]])

    def energy(distance):
        coord[0, 3] = [0, 0, distance]
        return model(make_batch(coord, atype, None, model.rcut, model.sel, ntypes=model.ntypes), force=False)["energy"]

    with torch.no_grad():
        inside, outside = energy(model.rcut - 1e-5), energy(model.rcut + 1e-5)
    assert inside.item() == pytest.approx(outside.item(), abs=1e-12)


REFUSED = [
    ("lmax", 2, "angular moments"),
    ("use_econf_tebd", True, "electron configurations"),
    ("attn_mask", True, "masked diagonal"),
]


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_what_only_deepmd_kit_has_is_refused_by_name(key, value, words):
    content = {
        "model": {"type_map": ["O"], "descriptor": {"type": "dpa1", key: value}, "fitting_net": {}},
        "learning_rate": {"type": "exp", "start_lr": 1e-3},
        "loss": {},
        "training": {"training_data": {"systems": ["a"]}, "numb_steps": 1},
    }
    with pytest.raises(InputError) as error:
        normalize(content)
    (problem,) = error.value.problems
    assert problem.path == f"model/descriptor/{key}"
    assert words in problem.message
    state = dict(FIXTURE["cases"]["two_sides"]["state"])
    params = state["_extra_state"]["model_params"]
    state["_extra_state"] = {"model_params": {**params, "descriptor": {**params["descriptor"], key: value}}}
    with pytest.raises(ForeignModelError, match=f"descriptor.{key} is"):
        from_deepmd_kit(state)


@pytest.mark.parametrize("mode", ["2d", "flat", "slice"])
@pytest.mark.parametrize("name", list(ROUTES))
def test_same_routes(name, mode):
    model = load(name)
    optimizer = HybridMuon(model.named_parameters(), lr=1e-3, muon_mode=mode)
    ours = {entry.name: entry.view.batch if entry.route == "muon" else 0 for entry in optimizer.routing}
    assert ours == ROUTES[name][mode]
    in_proj = "atomic_model.descriptor.se_atten.dpa1_attention.attention_layers.0.attention_layer.in_proj.matrix"
    assert ours[in_proj] == 1


def test_a_list_of_slots_counts_by_its_sum():
    model = load("truncated")
    assert (model.sel, model.by_type) == ((14,), False)
    assert len(model.atomic_model.fitting_net.filter_layers.networks) == 1


@pytest.mark.parametrize("centred", [False, True])
def test_rescaling_is_torchs_own_and_its_gradients_are_right(centred):
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    own = torch.nn.functional.layer_norm(x, (5,)) if centred else torch.nn.functional.normalize(x, dim=-1)
    torch.testing.assert_close(_Rescaled.apply(x, 1e-5 if centred else 1e-12, centred)[0], own, rtol=1e-14, atol=1e-14)
    torch.autograd.gradcheck(lambda x: _Rescaled.apply(x, 1e-5, centred), (x,))
    torch.autograd.gradgradcheck(lambda x: _Rescaled.apply(x, 1e-5, centred), (x,))


@pytest.mark.parametrize("name", ["one_side", "mean", "smooth_mean", "v2"])
def test_groups_of_atoms_change_nothing(name, monkeypatch):
    found = []
    for size in (1, 3, 10**6):
        monkeypatch.setattr(module, "GROUP", size)
        model = load(name)
        out = model(batch_for(model, "orthorhombic"))
        (out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()).backward()
        found.append([*out.values(), *(p.grad for p in model.parameters())])
    for other in found[:2]:
        for value, wanted in zip(other, found[2], strict=True):
            scale = 0.0 if wanted is None else wanted.abs().max().item()
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-13 * scale)
