"""Frame and atomic parameters and excluded types: numbers of deepmd-kit 3.2.0, forces, invariances, frozen files."""

import numpy as np
import pytest
import torch
from model_batches import HERE, batch_of, read_fixture, stored_model

from deepmd_muon.deploy.compress import compress, restored
from deepmd_muon.deploy.freeze import freeze
from deepmd_muon.infer import Predictor
from deepmd_muon.infer.errors import PredictionInputError
from deepmd_muon.model import ModelError, build_model

FIXTURE = read_fixture(HERE / "parameters.pt.gz")
CASES = list(FIXTURE["cases"])
KINDS = [*FIXTURE["structures"], "default"]
DESCRIPTORS = ("se_e2_a", "dpa1", "dpa3")


def load(name):
    return stored_model(FIXTURE, name)


def data_for(model, kind):
    """Return structures with the parameters that a model reads; "default" leaves those of the frame out."""
    data = dict(FIXTURE["structures"]["triclinic" if kind == "default" else kind])
    fitting = model.settings.fitting_net
    for name, number in (("fparam", fitting.numb_fparam), ("aparam", fitting.numb_aparam)):
        data[name] = data[name][..., :number].contiguous() if number else None
    return data | ({"fparam": None} if kind == "default" else {})


def predict(predictor, data):
    box, given = data["box"], [data["coord"], data["atype"], data["fparam"], data["aparam"]]
    coord, atype, fparam, aparam = (None if x is None else x.numpy() for x in given)
    return predictor.predict(coord, None if box is None else box.numpy(), atype, fparam, aparam)


@pytest.mark.parametrize(
    "name", [name for name in CASES if "default" in FIXTURE["cases"][name]["outputs"]]
)
def test_default_parameters_give_deepmd_kits_numbers(name):
    model = load(name)
    out = model(batch_of(model, data_for(model, "default")))
    for key, value in FIXTURE["cases"][name]["outputs"]["default"].items():
        torch.testing.assert_close(out[key].detach(), value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_forces_are_finite_differences_and_virials_strains(kind):
    model = load(f"{kind}-everything")
    data = data_for(model, "triclinic")
    out = {key: value.detach().numpy() for key, value in model(batch_of(model, data)).items()}

    def energy(coord, box):
        return model(batch_of(model, data | {"coord": coord, "box": box}), force=False)[
            "energy"
        ].item()

    def slope(change):
        ends = [energy(*change(factor * 1e-4)) for factor in (-2, -1, 1, 2)]
        return (ends[0] - 8 * ends[1] + 8 * ends[2] - ends[3]) / 12e-4

    for atom, axis in ((0, 0), (2, 1), (5, 2)):  # the second and third have no energy

        def moved(step, atom=atom, axis=axis):
            coord = data["coord"].clone()
            coord[0, atom, axis] += step
            return coord, data["box"]

        assert out["force"][0, atom, axis] == pytest.approx(-slope(moved), abs=1e-9)

    def strained(step):
        strain = torch.eye(3, dtype=torch.float64)
        strain[0, 1] += step
        return data["coord"] @ strain, data["box"] @ strain

    assert out["virial"][0].reshape(3, 3)[0, 1] == pytest.approx(-slope(strained), abs=1e-8)
    assert np.abs(out["force"][0, [2, 5]]).max() > 1e-4
    assert (out["atom_energy"][data["atype"].numpy() == 1] == 0).all()
    assert (out["atom_energy"][data["atype"].numpy() == 0] != 0).all()


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_parameters_follow_their_atoms(kind):
    model = load(f"{kind}-everything")
    data = data_for(model, "orthorhombic")
    out = model(batch_of(model, data))
    # The first atom stays: its type is that of DPA-1's empty slots, as in deepmd-kit.
    others = (
        torch.randperm(data["coord"].shape[1] - 1, generator=torch.Generator().manual_seed(2)) + 1
    )
    order = torch.cat([torch.zeros(1, dtype=torch.int64), others])
    shuffled = data | {key: data[key][:, order] for key in ("coord", "atype", "aparam")}
    rotation = torch.linalg.qr(
        torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    )[0]
    turned = shuffled | {"coord": shuffled["coord"] @ rotation, "box": shuffled["box"] @ rotation}
    same = model(batch_of(model, turned))
    torch.testing.assert_close(same["energy"], out["energy"], rtol=1e-12, atol=0)
    torch.testing.assert_close(same["force"], out["force"][:, order] @ rotation, rtol=0, atol=1e-12)
    swapped = model(batch_of(model, data | {"aparam": data["aparam"].flip(1)}))
    assert (swapped["energy"] - out["energy"]).abs().min() > 1e-6
    hotter = model(batch_of(model, data | {"fparam": data["fparam"].flip(0)}))
    assert (hotter["energy"] - out["energy"]).abs().min() > 1e-6


def test_excluded_pairs_do_not_see_each_other():
    """Of two atoms that are excluded neighbours, each is as if alone; a third one sees both."""
    model = load("dpa3-pairs")
    coord = torch.tensor([[[0.0, 0, 0], [0, 0, 1.4], [0, 0, 30.0]]], dtype=torch.float64)

    def at(*atoms, types):
        data = {"coord": coord[:, list(atoms)], "atype": torch.tensor([types]), "box": None}
        return model(batch_of(model, data))

    both, apart = at(0, 1, types=[0, 1]), at(0, 2, types=[0, 1])
    assert torch.equal(both["energy"], apart["energy"])
    assert not both["force"].any()
    assert at(0, 1, types=[0, 0])["force"].abs().max() > 1e-4


FROZEN = (
    "se_e2_a-mask",
    "dpa1-everything",
    "dpa1-own",
    "dpa3-truncated",
)  # of each descriptor, and of each feature; test_freeze has vacuum energies


@pytest.mark.parametrize(
    "name",
    [name if name in FROZEN else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_frozen_files_give_the_models_numbers(name, tmp_path):
    model = load(name)
    freeze(model, tmp_path / "frozen.pth")
    frozen, own = Predictor(tmp_path / "frozen.pth", device="cpu"), Predictor(model, device="cpu")
    assert frozen.parameters == own.parameters
    for kind in FIXTURE["cases"][name]["outputs"]:
        found, expected = (predict(predictor, data_for(model, kind)) for predictor in (frozen, own))
        for key in ("energy", "atom_energy", "force", "virial"):
            np.testing.assert_allclose(
                getattr(found, key), getattr(expected, key), rtol=1e-11, atol=1e-11, err_msg=key
            )


@pytest.mark.parametrize(
    "name", ["se_e2_a-everything", pytest.param("se_e2_a-vacuum", marks=pytest.mark.slow)]
)
def test_compressed_files_keep_parameters_and_exclusions(name, tmp_path):
    model = load(name)
    freeze(model, tmp_path / "frozen.pth", min_distance=1.0)
    again, distance = restored(tmp_path / "frozen.pth")
    assert distance == 1.0
    net = "atomic_model.fitting_net."
    kept = {key: value for key, value in model.state_dict().items() if key.startswith(net)}
    assert {
        f"{net}fparam_avg",
        f"{net}fparam_inv_std",
        f"{net}aparam_avg",
        f"{net}aparam_inv_std",
    } < set(kept)
    for key, value in kept.items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=1e-15, msg=key)
    compress(again, tmp_path / "small.pth", min_distance=distance)
    for kind in FIXTURE["cases"][name]["outputs"]:
        data = data_for(model, kind)
        found, expected = (
            predict(Predictor(x, device="cpu"), data) for x in (tmp_path / "small.pth", model)
        )
        np.testing.assert_allclose(found.force, expected.force, rtol=0, atol=1e-6)
        np.testing.assert_allclose(found.energy, expected.energy, rtol=0, atol=1e-6)


def test_compressed_dpa1_excludes_pairs(tmp_path):
    model = load("dpa1-own-plain")
    compress(model, tmp_path / "small.pth", min_distance=1.0)
    data = data_for(model, "triclinic")
    found, expected = (
        predict(Predictor(x, device="cpu"), data) for x in (tmp_path / "small.pth", model)
    )
    np.testing.assert_allclose(found.force, expected.force, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.energy, expected.energy, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["model", "file"])
def test_missing_and_wrong_parameters_are_named(kind, tmp_path):
    model = load("se_e2_a-everything")
    source = model
    if kind == "file":
        freeze(model, source := tmp_path / "frozen.pth")
    predictor, data = Predictor(source, device="cpu"), data_for(model, "open")
    for changes, word in (
        ({"fparam": None}, "fparam"),
        ({"aparam": None}, "aparam"),
        ({"fparam": torch.ones(1, 3)}, "fparam"),
        ({"aparam": torch.ones(1, 4, 1)}, "aparam"),
    ):
        with pytest.raises(PredictionInputError, match=word):
            predict(predictor, data | changes)
    with pytest.raises(PredictionInputError, match="no fparam"):
        predict(
            Predictor(load("se_e2_a-aparam"), device="cpu"), data | {"aparam": torch.ones(1, 15, 2)}
        )
    with pytest.raises(ModelError, match="numb_aparam"):
        model(batch_of(model, data | {"aparam": None}))
    one_for_all = predictor.predict(
        data["coord"].numpy(), None, data["atype"].numpy(), [300.0, 2.0], [-2.0]
    )
    spread = {"fparam": torch.tensor([[300.0, 2.0]]), "aparam": torch.full((1, 15, 1), -2.0)}
    assert one_for_all.energy == predict(predictor, data | spread).energy


def test_a_default_needs_a_value_for_each_parameter():
    fitting = {"numb_fparam": 2, "default_fparam": [1.0]}
    section = {
        "type_map": ["O", "H"],
        "descriptor": {"type": "se_e2_a", "sel": [4, 4]},
        "fitting_net": fitting,
    }
    with pytest.raises(ModelError, match="each of the 2 frame parameters"):
        build_model(section)
    with pytest.raises(ModelError, match=r"pair_exclude_types.*type 2"):
        build_model({**section, "fitting_net": {}, "pair_exclude_types": [[0, 2]]})
    with pytest.raises(ModelError, match=r"atom_exclude_types.*type 5"):
        build_model({**section, "fitting_net": {}, "atom_exclude_types": [5]})
