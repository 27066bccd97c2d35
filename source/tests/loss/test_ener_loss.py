"""The ener loss against values that deepmd-kit 3.2.0 computed, and against its own definition."""

import gzip
import io
from pathlib import Path

import pytest
import torch

from deepmd_muon.loss import EnergyLoss, LossError

FIXTURE = torch.load(
    io.BytesIO(gzip.decompress(Path(__file__).with_name("deepmd_kit_loss.pt.gz").read_bytes())), weights_only=True
)
CASES = list(FIXTURE["cases"])


def given():
    prediction = {
        "energy": FIXTURE["prediction"]["energy"].reshape(-1),
        "atom_energy": FIXTURE["prediction"]["atom_energy"].squeeze(-1),
        "force": FIXTURE["prediction"]["force"],
        "virial": FIXTURE["prediction"]["virial"],
    }
    label = {key: value.squeeze(-1) for key, value in FIXTURE["label"].items()}
    label["atom_pref"] = label["atom_pref"][:, ::3]
    return prediction, label


@pytest.mark.parametrize("kind", ["whole", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_same_values(name, kind):
    case = FIXTURE["cases"][name]
    prediction, label = given()
    mask = FIXTURE["padded_atype"] >= 0 if kind == "padded" else None
    value, metrics = EnergyLoss(**case["settings"])(prediction, label, 0.3, 5, mask)
    torch.testing.assert_close(value, case[kind]["loss"], rtol=1e-13, atol=0)
    for key, wanted in case[kind]["metrics"].items():
        torch.testing.assert_close(metrics[key], wanted, rtol=1e-13, atol=0, msg=key)
    assert set(metrics) == set(case[kind]["metrics"])


def test_prefactor_follows_the_learning_rate():
    loss = EnergyLoss(start_pref_e=0.02, limit_pref_e=1.0)
    assert loss.prefactor("e", 1.0) == pytest.approx(0.02)
    assert loss.prefactor("e", 0.0) == pytest.approx(1.0)
    assert loss.prefactor("e", 0.25) == pytest.approx(1.0 - 0.98 * 0.25)
    assert loss.prefactor("f", torch.tensor(0.5)).item() == pytest.approx(500.5)


@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
def test_missing_labels_contribute_nothing(name):
    settings = FIXTURE["cases"][name]["settings"]
    prediction, label = given()
    only = {"energy": label["energy"], "force": None}
    value, metrics = EnergyLoss(**settings)(prediction, only, 0.3, 5)
    silent = {key: 0.0 for key in settings if "_pref_" in key and not key.endswith("_pref_e")}
    alone, _ = EnergyLoss(**{**settings, **silent})(prediction, label, 0.3, 5)
    torch.testing.assert_close(value, alone)
    kind = "mae" if name == "mae" else "rmse"
    assert metrics[f"{kind}_f"].isnan()
    assert metrics[f"{kind}_v"].isnan()
    assert metrics[f"{kind}_e"].isfinite()


def test_default_prefactors_of_atoms_are_one():
    prediction, label = given()
    settings = {"start_pref_pf": 1.0, "limit_pref_pf": 1.0, "start_pref_e": 0.0, "start_pref_f": 0.0}
    del label["atom_pref"]
    value, _ = EnergyLoss(**settings, use_default_pf=True)(prediction, label, 1.0, 5)
    torch.testing.assert_close(value, (prediction["force"] - label["force"]).square().mean())
    value, metrics = EnergyLoss(**settings)(prediction, label, 1.0, 5)
    assert value == 0
    assert metrics["rmse_pf"].isnan()


def test_a_term_needs_both_prefactors():
    loss = EnergyLoss(start_pref_v=1.0, limit_pref_v=0.0, start_pref_ae=0.1, limit_pref_ae=0.2)
    assert not loss.has("v")
    assert not loss.needs_virial
    assert loss.has("ae")
    assert loss.needs_force


def test_gradient_reaches_every_prediction():
    prediction, label = given()
    leaves = {key: value.clone().requires_grad_() for key, value in prediction.items()}
    for name in CASES:
        value, metrics = EnergyLoss(**FIXTURE["cases"][name]["settings"])(leaves, label, 0.3, 5)
        assert not any(m.requires_grad for m in metrics.values())
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        reached = {key for key, g in zip(leaves, gradients, strict=True) if g is not None and g.abs().sum() > 0}
        assert reached >= {"force", "virial", "atom_energy"}
        assert ("energy" in reached) == (name != "coefficients")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_func": "rmse"}, "'mse' or 'mae'"),
        ({"f_use_norm": True}, "f_use_norm needs"),
        ({"use_huber": True, "loss_func": "mae"}, "use_huber"),
        ({"use_huber": True, "relative_f": 0.1}, "use_huber"),
        ({"use_huber": True, "start_pref_pf": 1.0, "limit_pref_pf": 1.0}, "use_huber"),
        ({"huber_delta": (0.1, 0.2)}, "three"),
    ],
)
def test_contradictions_are_refused(settings, words):
    with pytest.raises(LossError, match=words):
        EnergyLoss(**settings)
