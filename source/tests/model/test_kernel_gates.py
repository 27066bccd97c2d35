"""With each setting changed, a gate of kernels says no, or the kernels give the results of torch's operations.

`test_model_kernels.py` starts the interpreter's process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed (pip install deepmd-muon[gpu])", allow_module_level=True)

from kernel_backends import DEVICE, on_each_backend, passed_in_interpreter
from loss_changes import LOSS_EXAMPLES
from model_batches import batch_of
from model_changes import DESCRIPTORS, is_single, model_with, settings_of
from settings_changes import changes_of

from deepmd_muon.coverage import Coverage
from deepmd_muon.loss import ComparedAtoms
from deepmd_muon.loss.ener import module as ener
from deepmd_muon.loss.ener.module import EnergyLoss
from deepmd_muon.loss.ener.settings import EnerLossSettings
from deepmd_muon.model.nn import triton_support
from deepmd_muon.setting import setting

# Four atoms near each other, one aside.
COORD = np.array([[0.0, 0, 0], [1.1, 0.2, 0], [0.3, 1.3, 0.1], [0.2, -0.1, 1.5], [2.4, 1.9, 0.3]])
PLAIN = {"start_pref_v": 2.0, "limit_pref_v": 3.0}
OF_ATOMS = dict.fromkeys(("atom_ener", "atom_pref", "atom_ener_coeff"), (3, 4))
SHAPES = {"energy": (3,), "force": (3, 4, 3), "virial": (3, 9), **OF_ATOMS}
TYPE_MAP = ("O", "H")


def random_tensors(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE)
        for name, shape in shapes.items()
    }
    return {name: x.abs() if name == "atom_pref" else x for name, x in drawn.items()}


def loss_results(loss, labels, *, fused, monkeypatch):
    """Return the loss, its metrics, and the gradients of the predictions."""
    monkeypatch.setattr(triton_support, "usable", lambda _: fused)
    shapes = {key: SHAPES[key] for key in ("energy", "force", "virial")}
    prediction = random_tensors({**shapes, "atom_energy": (3, 4)}, 1)
    for value in prediction.values():
        value.requires_grad_()
    fraction = torch.tensor(0.3, dtype=torch.float64, device=DEVICE)
    atoms = ComparedAtoms(torch.tensor([[1, 0, 0, 0]] * 3, device=DEVICE))
    value, metrics = loss(prediction, labels, fraction, atoms)
    by_kernels = "Fused" in type(value.grad_fn).__name__
    assert by_kernels == (fused and loss.fits_kernels(prediction, labels))
    value.backward()
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in prediction.items()
    }
    return {"loss": value.detach(), **metrics, **gradients}, by_kernels


def kernels_take(loss, labels, monkeypatch):
    """Return whether the kernels compute this loss, whose results must be those of torch's operations then."""
    wanted, _ = loss_results(loss, labels, fused=False, monkeypatch=monkeypatch)
    found, by_kernels = loss_results(loss, labels, fused=True, monkeypatch=monkeypatch)
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
    return by_kernels


@on_each_backend
@pytest.mark.parametrize("coefficients", [False, True])
def test_each_setting_of_the_loss_is_refused_or_computed(coefficients, monkeypatch):
    labels = random_tensors(SHAPES, 2)
    if not coefficients:
        del labels["atom_ener_coeff"]
    taken = {}
    for name, changes in changes_of(EnerLossSettings(**PLAIN), LOSS_EXAMPLES).items():
        loss = EnergyLoss(EnerLossSettings(**PLAIN | changes), TYPE_MAP)
        taken[name] = kernels_take(loss, labels, monkeypatch)
    assert taken["intensive_ener_virial True"]
    assert taken["start_pref_e 0.014"]
    assert taken["enable_atom_ener_coeff True"] != coefficients
    assert not any(taken[name] for name in ("loss_func mae", "use_huber True", "relative_f 0.7"))


@dataclasses.dataclass(frozen=True)
class PerElementSettings(EnerLossSettings):
    """A loss with a setting that no kernel knows."""

    type: ClassVar[str] = "per_element"

    hydrogen_weight: float = setting(1.0, above=0.0, doc="Weight of the forces on hydrogen.")


class PerElementLoss(EnergyLoss):
    def _force(self, prediction, label, counted):
        is_hydrogen = counted.atoms.atype == self.type_map.index("H")
        weight = torch.where(is_hydrogen, self.settings.hydrogen_weight, 1.0).unsqueeze(-1)
        weighted_prediction = {**prediction, "force": prediction["force"] * weight}
        weighted_label = {**label, "force": label["force"] * weight}
        return super()._force(weighted_prediction, weighted_label, counted)


@on_each_backend
def test_a_setting_that_no_kernel_knows_is_refused(monkeypatch):
    labels = random_tensors(SHAPES, 2)
    del labels["atom_ener_coeff"]
    plain = PerElementSettings(**PLAIN)
    assert kernels_take(PerElementLoss(plain, TYPE_MAP), labels, monkeypatch)
    cases = changes_of(plain, LOSS_EXAMPLES)
    assert "hydrogen_weight 0.7" in cases
    weighted = PerElementLoss(dataclasses.replace(plain, hydrogen_weight=0.7), TYPE_MAP)
    assert not kernels_take(weighted, labels, monkeypatch)


@on_each_backend
def test_the_comparison_sees_a_gate_that_forgets_a_setting(monkeypatch):
    forgetful = Coverage(ener.KERNEL_COVERAGE.settings | {"hydrogen_weight"})
    monkeypatch.setattr(ener, "KERNEL_COVERAGE", forgetful)
    labels = random_tensors(SHAPES, 2)
    del labels["atom_ener_coeff"]
    loss = PerElementLoss(PerElementSettings(**PLAIN, hydrogen_weight=0.7), TYPE_MAP)
    with pytest.raises(AssertionError):
        kernels_take(loss, labels, monkeypatch)


def model_results(settings, *, fused, monkeypatch):
    """Return energy, forces and virial, and the gradient of a loss of them; float64 on the CPU."""
    monkeypatch.setattr(triton_support, "usable", lambda _: fused)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(triton_support, "has_tensor_cores", lambda _: True)
    model = model_with(settings).to(DEVICE)
    coord = np.stack([COORD, 1.03 * COORD])
    frame = np.array([0, 1, 1, 0, 1])
    given = {"coord": coord, "atype": np.stack([frame, frame]), "box": None}
    given["fparam"] = torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=torch.float64)
    given["aparam"] = torch.linspace(-1, 1, 20, dtype=torch.float64).view(2, 5, 2)
    batch = batch_of(model, given).to(DEVICE)
    out = model(batch)
    weights = torch.linspace(0.5, 1.5, out["force"].numel(), dtype=torch.float64).to(DEVICE)
    force = (out["force"].flatten() * weights).square().sum()
    loss = out["energy"].sum() + force + out["virial"].square().sum()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    flat = torch.cat([g.flatten().double() for g in gradients if g is not None])
    results = [*(out[name] for name in ("energy", "force", "virial")), flat]
    return [x.detach().double().cpu() for x in results]


@pytest.mark.slow
@on_each_backend
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_each_setting_of_models_is_computed(kind, monkeypatch):
    for name, settings in settings_of(kind).items():
        if kind != "DPA-1" and name.startswith(("fitting_net", "model")):
            continue  # these do not depend on the descriptor
        wanted = model_results(settings, fused=False, monkeypatch=monkeypatch)
        found = model_results(settings, fused=True, monkeypatch=monkeypatch)
        limit = 2e-5 if is_single(settings) else 1e-11
        for one, other in zip(found, wanted, strict=True):
            assert float((one - other).norm()) <= limit * (float(other.norm()) + 1e-3), name


@pytest.mark.slow
def test_settings_of_models_in_the_interpreter():
    assert passed_in_interpreter(Path(__file__), tier="slow") == len(DESCRIPTORS)
