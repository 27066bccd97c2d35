"""The ener_spin loss against sums over the magnetic atoms alone, and against the ener loss."""

import pytest
import torch

from deepmd_muon.loss import ComparedAtoms, build_loss

TYPES = ["Ni", "O"]
PREFACTORS = {
    f"{end}_pref_{term}": value
    for term, value in {"e": 0.3, "fr": 2.0, "fm": 5.0, "v": 0.7, "ae": 0.2}.items()
    for end in ("start", "limit")
}
ATYPE = torch.tensor([[0, 1, 0, 1], [0, 1, 1, -1], [1, 1, 1, 1]])  # the last frame is not magnetic
ATOMS = ComparedAtoms(ATYPE, ATYPE >= 0)


def numbers(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "energy": (3,),
        "force": (3, 4, 3),
        "force_mag": (3, 4, 3),
        "virial": (3, 9),
        "atom_energy": (3, 4),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def given():
    label = numbers(2)
    label["atom_ener"] = label.pop("atom_energy")
    return {**numbers(1), "mask_mag": ATYPE == 0}, label


@pytest.mark.parametrize("kind", ["mse", "mae"])
def test_magnetic_forces_count_on_magnetic_atoms(kind):
    prediction, label = given()
    difference = (prediction["force_mag"] - label["force_mag"])[ATYPE == 0]
    expected = difference.square().mean() if kind == "mse" else difference.abs().mean()
    settings = {"type": "ener_spin", **PREFACTORS, "loss_func": kind}
    value, metrics = build_loss(settings, TYPES)(prediction, label, 0.3, ATOMS)
    settings = {key.replace("_fr", "_f"): x for key, x in settings.items() if "_fm" not in key}
    plain, others = build_loss({**settings, "type": "ener"}, TYPES)(prediction, label, 0.3, ATOMS)
    torch.testing.assert_close(value, plain + 5.0 * expected)
    name = "rmse" if kind == "mse" else "mae"
    shown = expected.sqrt() if kind == "mse" else expected
    torch.testing.assert_close(metrics[f"{name}_fm"], shown)
    torch.testing.assert_close(metrics[f"{name}_fr"], others[f"{name}_f"])
    torch.testing.assert_close(metrics["rmse"], value.sqrt())


def test_frames_without_magnetic_forces_have_no_weight():
    """Neither do frames without a label, nor a batch without magnetic atoms."""
    prediction, label = given()
    only = {key: 0.0 if "_fm" not in key else 5.0 for key in PREFACTORS}
    loss = build_loss({"type": "ener_spin", **only}, TYPES)
    assert [term.metric for term in loss.terms] == ["rmse_fm"]
    label["find_force_mag"] = torch.tensor([False, True, True])
    value, _ = loss(prediction, label, 1.0, ATOMS)
    difference = (prediction["force_mag"] - label["force_mag"])[1, :1]
    torch.testing.assert_close(value, 5.0 * difference.square().mean())
    label["find_force_mag"] = torch.tensor([False, False, True])
    force = prediction["force_mag"].requires_grad_()
    value, _ = loss(prediction, label, 1.0, ATOMS)
    assert value.item() == 0.0
    assert not torch.autograd.grad(value, force)[0].any()
    del label["force_mag"]
    value, metrics = loss(prediction, label, 1.0, ATOMS)
    assert value.item() == 0.0
    assert metrics["rmse_fm"].isnan()
