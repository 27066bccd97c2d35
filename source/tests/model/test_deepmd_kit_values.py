"""Numbers of deepmd-kit 3.2.0, read from the fixtures that make_*_fixtures.py wrote."""

import pytest
import torch
from model_batches import HERE, batch_of, read_fixture, stored_model

from deepmd_muon.argcheck import InputError, normalize
from deepmd_muon.loss import ComparedAtoms, build_loss
from deepmd_muon.model import ForeignModelError, build_model, environment_statistics
from deepmd_muon.model.deepmd_kit import deepmd_kit_parameter_names, from_deepmd_kit, to_deepmd_kit

FIXTURES = {
    kind: read_fixture(HERE / f"{kind}.pt.gz") for kind in ("se_e2_a", "dpa1", "dpa3", "parameters")
}
CASES = [(kind, name) for kind, fixture in FIXTURES.items() for name in fixture["cases"]]
WITH_GRADIENT = [
    (kind, name) for kind, name in CASES if "gradients" in FIXTURES[kind]["cases"][name]
]
FOLLOWED = [(kind, name) for kind, name in CASES if "followed" in FIXTURES[kind]["cases"][name]]
# Relative tolerances of energies, absolute ones of forces and virials, and both for float32.
# deepmd-kit's float32 models take differences of float32 coordinates, ours of float64 ones.
TOLERANCES = {
    "se_e2_a": (1e-10, 1e-8, 2e-5, 2e-4),
    "dpa1": (1e-10, 1e-8, 1e-5, 1e-5),
    "dpa3": (1e-12, 1e-13, 1e-5, 1e-5),
    "parameters": (1e-10, 1e-10),
}
# In the tiny cell an atom's images at +S and −S are equally far: which one a short sel keeps is rounding.
PAIRS = [
    (kind, name, structure)
    for kind, name in CASES
    for structure in FIXTURES[kind]["structures"]
    if structure != "rim" and not (name.startswith("truncated") and structure == "tiny")
]
SAMPLED = ("orthorhombic", "triclinic", "tiny", "open")
# Keys of DPA-1 without a default in deepmd-kit's check.
WITHOUT_DEFAULT = {"lmax", "temperature", "stripped_type_embedding", "seed"}


def load(kind, name):
    return stored_model(FIXTURES[kind], name)


def batch_for(model, kind, structure):
    return batch_of(model, FIXTURES[kind]["structures"][structure])


@pytest.mark.parametrize(("kind", "name", "structure"), PAIRS)
def test_same_numbers(kind, name, structure):
    model = load(kind, name)
    out = model(batch_for(model, kind, structure))
    expected = FIXTURES[kind]["cases"][name]["outputs"][structure]
    relative, absolute = TOLERANCES[kind][2:] if name == "float32" else TOLERANCES[kind][:2]
    for key, value in expected.items():
        rtol, atol = (relative, 0) if "energy" in key else (0, absolute)
        torch.testing.assert_close(
            out[key], value, rtol=rtol, atol=atol, msg=lambda words, key=key: f"{key}: {words}"
        )
    few = kind == "dpa3" and structure in ("atom", "tiny")
    assert few or expected["force"].abs().max() > 1e-3  # so that the comparison says something


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, name in CASES if kind in ("dpa1", "dpa3")]
)
def test_same_start_from_the_same_seed(kind, name):
    settings, state = from_deepmd_kit(FIXTURES[kind]["cases"][name]["state"])
    drawn = dict(build_model(settings).named_parameters())
    assert set(drawn) <= set(state)
    for key, value in drawn.items():
        assert value.dtype == state[key].dtype
        # on another processor torch's vectorised normal numbers may differ in the last bits
        torch.testing.assert_close(
            value.detach(), state[key], rtol=1e-6 if name == "float32" else 1e-14, atol=0
        )


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_without_forces_the_energy_is_the_same(kind, name):
    model = load(kind, name)
    batch = batch_for(model, kind, "orthorhombic")
    with torch.no_grad():
        alone = model(batch, force=False)
    assert set(alone) == {"energy", "atom_energy"}
    rtol = 1e-6 if name == "float32" else 1e-13
    torch.testing.assert_close(alone["energy"], model(batch)["energy"], rtol=rtol, atol=0)


@pytest.mark.parametrize(("kind", "name"), WITH_GRADIENT)
def test_same_gradient_of_the_loss(kind, name):
    model = load(kind, name)
    wanted = FIXTURES[kind]["cases"][name]["gradients"]
    batch = batch_for(model, kind, "orthorhombic")
    loss = build_loss(wanted["settings"], model.type_map)
    value, _ = loss(
        model(batch), wanted["label"], wanted["lr_fraction"], ComparedAtoms(batch.atype)
    )
    torch.testing.assert_close(value, wanted["loss"], rtol=1e-11, atol=0)
    value.backward()
    ours = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert set(ours) == set(
        wanted["parameters"]
    )  # the edges and angles of DPA-3's last layer get none
    for key, gradient in wanted["parameters"].items():
        atol = 1e-10 * gradient.abs().max().item()
        torch.testing.assert_close(
            ours[key], gradient, rtol=1e-8 if kind == "parameters" else 1e-9, atol=atol, msg=key
        )
    assert deepmd_kit_parameter_names(model) == wanted["order"]


@pytest.mark.parametrize(("kind", "name"), FOLLOWED)
def test_twenty_steps_of_adam_follow_deepmd_kit(kind, name):
    model, case = load(kind, name), FIXTURES[kind]["cases"][name]
    given, followed = case["gradients"], case["followed"]
    batch, loss = (
        batch_for(model, kind, "orthorhombic"),
        build_loss(given["settings"], model.type_map),
    )
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    assert len(followed) == 20
    assert followed[-1] < 0.999 * followed[0]
    for expected in followed:
        adam.zero_grad()
        value, _ = loss(
            model(batch), given["label"], given["lr_fraction"], ComparedAtoms(batch.atype)
        )
        assert value.item() == pytest.approx(
            expected, rel=1e-6 if kind in ("dpa1", "parameters") else 1e-9
        )
        value.backward()
        adam.step()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind, name in CASES if kind == "se_e2_a"),
        *(("dpa1", name) for name in ("two_sides", "mean", "v2", "truncated")),
        ("dpa3", "statistics"),
    ],
)
def test_same_statistics(kind, name):
    model = load(kind, name)
    (block,) = (
        part for part in model.atomic_model.descriptor.children() if hasattr(part, "stddev")
    )
    mean, stddev = block.mean.clone(), block.stddev.clone()
    block.stddev.fill_(torch.nan)
    model.set_statistics(
        *environment_statistics(model, [batch_for(model, kind, one) for one in SAMPLED])
    )
    tolerance = 1e-6 if name == "float32" else 1e-12
    torch.testing.assert_close(block.mean, mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(block.stddev, stddev, rtol=tolerance, atol=tolerance)
    assert (mean[:, :, 0] != 0).all() == (name not in ("vacuum", "two_sides", "statistics"))
    assert len(stddev.unique()) > 2  # radial and angular, of two types


def restricted(wanted, keys):
    """Return the part of a section with the keys of another one."""
    return {
        key: restricted(wanted[key], value) if isinstance(value, dict) else wanted[key]
        for key, value in keys.items()
        if key in wanted
    }


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_state_dict_round_trip(kind, name):
    model = load(kind, name)
    theirs = FIXTURES[kind]["cases"][name]["state"]
    ours = to_deepmd_kit(model, {"lr": 1e-3, "step": 7})
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if key != "_extra_state":
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value)
    assert ours["_extra_state"]["train_infos"] == {"lr": 1e-3, "step": 7}
    params, wanted = ours["_extra_state"]["model_params"], theirs["_extra_state"]["model_params"]
    assert set(wanted) <= set(params)
    assert all(params[key] == wanted[key] for key in ("pair_exclude_types", "atom_exclude_types"))
    for part in ("descriptor", "fitting_net"):
        more = set(params[part]) - set(wanted[part])
        assert more <= (
            WITHOUT_DEFAULT if params["descriptor"]["type"].startswith("se_atten") else set()
        )
        assert {key: value for key, value in params[part].items() if key not in more} == restricted(
            wanted[part], params[part]
        )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("se_e2_a", name) for name in ("one_side", "pair_nets", "exclude_one_side")),
        *(("dpa1", name) for name in ("mean", "smooth_mean", "truncated_smooth")),
    ],
)
def test_columns_without_neighbours_change_nothing(kind, name):
    model = load(kind, name)
    data = FIXTURES[kind]["structures"]["triclinic"]
    full = model(batch_of(model, data, widths=model.sel))
    for key, value in model(batch_of(model, data)).items():
        torch.testing.assert_close(value, full[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "name"), [("se_e2_a", "one_side"), ("dpa1", "mean"), ("dpa3", "split")]
)
def test_frames_of_a_batch_do_not_mix(kind, name):
    model = load(kind, name)
    data = FIXTURES[kind]["structures"]["orthorhombic"]
    both = model(batch_of(model, data))
    for f in range(2):
        for key, value in model(
            batch_of(model, {name: x[f : f + 1] for name, x in data.items()})
        ).items():
            torch.testing.assert_close(value[0], both[key][f], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "section", "key", "value", "words"),
    [
        ("dpa1", "", "lmax", 2, "angular moments"),
        ("dpa1", "", "use_econf_tebd", True, "electron configurations"),
        ("dpa1", "", "attn_mask", True, "masked diagonal"),
        ("dpa3", "", "use_econf_tebd", True, "electron configurations"),
        ("dpa3", "", "add_chg_spin_ebd", True, "charge and spin"),
    ],
)
def test_what_only_deepmd_kit_has_is_refused_by_name(kind, section, key, value, words):
    descriptor = {"type": kind, **({"repflow": {}} if kind == "dpa3" else {})}
    (descriptor["repflow"] if section else descriptor)[key] = value
    content = {
        "model": {"type_map": ["O"], "descriptor": descriptor, "fitting_net": {}},
        "learning_rate": {"type": "exp", "start_lr": 1e-3},
        "loss": {},
        "training": {"training_data": {"systems": ["a"]}, "numb_steps": 1},
    }
    with pytest.raises(InputError) as error:
        normalize(content)
    (problem,) = (
        one for one in error.value.problems if one.path == f"model/descriptor{section}/{key}"
    )
    assert words in problem.message
    if kind == "dpa1":
        state = dict(FIXTURES[kind]["cases"]["two_sides"]["state"])
        params = state["_extra_state"]["model_params"]
        state["_extra_state"] = {
            "model_params": {**params, "descriptor": {**params["descriptor"], key: value}}
        }
        with pytest.raises(ForeignModelError, match=f"descriptor.{key} is"):
            from_deepmd_kit(state)
