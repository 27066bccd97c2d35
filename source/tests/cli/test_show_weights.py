"""`dp show weights`: spectra and updates of a checkpoint, against definitions and a step of the optimizer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from example_rules import BRAKE, SOAP

from deepmd_muon.cli.main import main
from deepmd_muon.model import build_model
from deepmd_muon.model.deepmd_kit import to_deepmd_kit
from deepmd_muon.optim import HybridMuon
from deepmd_muon.show.spectra import PictureError, plot_spectra, rank, stable_rank
from deepmd_muon.show.weights import _parameters

SECTION = {
    "type_map": ["O", "H"],
    "descriptor": {
        "type": "se_e2_a",
        "sel": [8, 8],
        "rcut": 4.0,
        "neuron": [4, 8],
        "axis_neuron": 2,
        "seed": 1,
    },
    "fitting_net": {"neuron": [6, 6], "seed": 1},
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(optimizer_of):
    """A checkpoint after three steps of constant gradients, and its model and optimizer."""
    model = build_model(SECTION)
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    for _ in range(3):
        step(model, optimizer, grads)
    content = {
        "model": to_deepmd_kit(model, {"step": 2, "lr": 1e-3}),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, "model.ckpt-3.pt")
    return model, optimizer, grads


def step(model, optimizer, grads):
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad.clone()
    optimizer.step()


def rms(x):
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {},
            {"scaling": "rectangular", "magma_muon": False},
            {"normuon": True, "magma_muon": False},
        ),
        *(
            {**SOAP, "magma_muon": False},
            {**BRAKE, "magma_muon": False},
        ),
    ],
    ids=["deepmd", "rectangular", "normuon", "soap", "brake"],
)
def test_updates_are_those_of_the_next_step_without_a_gradient(settings):
    """Without Nesterov and with a gradient equal to the momentum, the next momentum points where the last one does."""

    def hybrid(model):
        return HybridMuon(
            model.named_parameters(), lr=1e-3, weight_decay=0.0, nesterov=False, **settings
        )

    model, optimizer, grads = make(hybrid)
    shown = {
        p.name: p for p in _parameters(torch.load("model.ckpt-3.pt", weights_only=True), Path("x"))
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, grads)
    routes = {entry.name: entry for entry in optimizer.routing}
    assert list(shown) == list(routes)
    for name, p in model.named_parameters():
        found = shown[name]
        assert found.route == routes[name].route
        assert found.rms == pytest.approx(rms(before[name]))
        # Constant gradients: Adam's moments stay; Magma's score still moves towards that of an aligned momentum.
        allowed = 0.1 if found.route == "muon" and not settings else 1e-3
        assert found.update == pytest.approx(rms(p.detach() - before[name]), rel=allowed), name
        if found.route == "muon":
            np.testing.assert_allclose(
                found.weights[0], np.linalg.svd(before[name].numpy())[1], rtol=1e-10
            )
            momentum = optimizer.state[p]["momentum_buffer"].double().numpy()
            ratio = found.momenta[0] / np.linalg.svd(momentum)[1]
            np.testing.assert_allclose(ratio, ratio[0], rtol=1e-5)


def test_the_page_has_a_line_for_every_parameter_and_a_picture(capsys):
    model, optimizer, _ = make(lambda model: HybridMuon(model.named_parameters(), lr=1e-3))
    assert main(["show", "weights", "model.ckpt-3.pt"]) == 0
    shown = capsys.readouterr().out
    names = {name for name, _ in model.named_parameters()}
    assert {line.split()[0] for line in shown.splitlines() if line} >= names
    assert "muon: " in shown
    assert Path("weights.png").read_bytes()[:4] == b"\x89PNG"
    state = optimizer.state_dict()
    content = torch.load("model.ckpt-3.pt", weights_only=True)
    torch.save({**content, "optimizer": {**state, "state": {}}}, "bare.pt")
    assert main(["show", "weights", "bare.pt", "-o", "bare.pdf"]) == 0
    assert "no state" in capsys.readouterr().out
    del content["optimizer"]
    torch.save(content, "weights_only.pt")
    assert main(["show", "weights", "weights_only.pt"]) == 2
    assert "no optimizer state" in capsys.readouterr().err


def test_adams_checkpoints_are_shown_too(capsys):
    model, optimizer, grads = make(
        lambda model: torch.optim.Adam(model.named_parameters(), lr=1e-3)
    )
    shown = {
        p.name: p for p in _parameters(torch.load("model.ckpt-3.pt", weights_only=True), Path("x"))
    }
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, grads)
    for name, p in model.named_parameters():
        assert shown[name].route == "adam"
        assert shown[name].update == pytest.approx(rms(p.detach() - before[name]), rel=1e-3)
    assert main(["show", "weights", "model.ckpt-3.pt"]) == 0
    assert "adam: " in capsys.readouterr().out


def test_ranks():
    assert stable_rank(np.array([2.0, 2.0, 0.0])) == pytest.approx(2.0)
    assert stable_rank(np.zeros(2)) == 0.0
    assert rank(np.array([1.0, 1e-2, 1e-4])) == 2
    with pytest.raises(PictureError, match="matrix"):
        plot_spectra([], "x.png")
