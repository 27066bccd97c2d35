"""Interpolated embedding nets against the nets themselves."""

import numpy as np
import pytest
import torch
from corners import UNEVEN
from model_batches import batch_of, make_batch, pull_back, section
from model_changes import is_single, model_with, settings_of

from deepmd_muon.coverage import Coverage
from deepmd_muon.model import build_model
from deepmd_muon.model.descriptor.pieces import lengths, uniform
from deepmd_muon.model.descriptor.se_e2_a import interpolation
from deepmd_muon.model.descriptor.se_e2_a.module import SeE2A
from deepmd_muon.model.edges import edge_vectors


def batch(nframes=2, natoms=12):
    rng = np.random.default_rng(5)
    coord = rng.uniform(0.0, 7.0, (nframes, natoms, 3))
    atype = np.tile(np.arange(natoms) % 2, (nframes, 1))
    atype[0, -1] = -1  # padding
    box = np.tile(np.array([[7.0, 0, 0], [1.0, 7.5, 0], [0, 0.5, 6.5]]), (nframes, 1, 1))
    return make_batch(coord, atype, box, 4.0, [40, 30], widths=(38, 30))


def model(**descriptor):
    fitting_net = {"precision": descriptor.get("precision", "default")}
    built = build_model(section(descriptor=descriptor, fitting_net=fitting_net))
    mean = torch.tensor([[0.05, 0, 0, 0], [0.07, 0, 0, 0]], dtype=torch.float64)
    built.set_statistics(mean, torch.full((2, 4), 0.15, dtype=torch.float64))
    return built


@pytest.fixture(autouse=True)
def _small_batches_count(monkeypatch):
    monkeypatch.setattr(interpolation, "EDGES_PER_NODE", 0)


def results(built, structures, pieces):
    built.pieces = pieces
    built.zero_grad()
    out = built(structures)
    weights = torch.linspace(0.5, 1.5, out["force"].numel(), dtype=torch.float64)
    pull_back({**out, "force": out["force"].flatten() * weights})
    gradient = torch.cat([p.grad.flatten().double() for p in built.parameters()])
    return out["energy"].detach(), out["force"].detach(), out["virial"].detach(), gradient


@pytest.mark.parametrize("pieces", [uniform(16), uniform(64), UNEVEN], ids=["16", "64", "uneven"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"type_one_side": False},
        {"exclude_types": [[0, 1]]},
        {"activation_function": "gelu", "resnet_dt": True, "neuron": [5, 5, 10]},
        {"precision": "float32"},
        {"set_davg_zero": True, "env_protection": 0.01},
    ],
    ids=lambda settings: ",".join(settings) or "default",
)
def test_interpolated_model_equals_the_exact_one(settings, pieces):
    built, structures = model(**settings), batch()
    single = settings.get("precision") == "float32"
    for name, wanted, found in zip(
        ("energy", "force", "virial", "gradient"),
        results(built, structures, ()),
        results(built, structures, pieces),
        strict=True,
    ):
        error = float((found - wanted).norm() / wanted.norm())
        assert error < (1e-5 if single else 1e-9), f"{name}: {error:.1e}"


def batch_of_eight(built):
    """Two open frames of eight atoms."""
    coord = np.random.default_rng(5).uniform(0.0, 4.0, (2, 8, 3))
    atype = np.tile(np.arange(8) % 2, (2, 1))
    return batch_of(built, {"coord": coord, "atype": atype, "box": None})


EVERY_SETTING = settings_of("se_e2_a")


@pytest.mark.parametrize("name", [name for name in EVERY_SETTING if name.startswith("descriptor")])
def test_each_setting_is_refused_or_interpolated(name):
    built = model_with(EVERY_SETTING[name])
    built.requires_grad_(True)  # `trainable` does not change how nets are evaluated
    structures = batch_of_eight(built)
    wanted, found = results(built, structures, ()), results(built, structures, uniform(64))
    # Where a derivative of the activation jumps, 64 pieces are not exact.
    exact = 1e-4 if is_single(EVERY_SETTING[name]) else 1e-5 if "silut" in name else 1e-7
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) < exact * float(other.norm())


def test_a_setting_that_interpolation_does_not_know_is_refused(monkeypatch):
    known = SeE2A.interpolation_covers.settings - {"resnet_dt"}
    monkeypatch.setattr(SeE2A, "interpolation_covers", Coverage(known))
    plain = model_with(EVERY_SETTING["nothing"])
    changed = model_with(EVERY_SETTING["descriptor: resnet_dt True"])
    for built, interpolates in ((plain, True), (changed, False)):
        structures = batch_of_eight(built)
        assert bool(built.wanted_pieces([structures])) == interpolates
        assert (built.tabulate(structures) is not None) == interpolates
        wanted, found = results(built, structures, ()), results(built, structures, uniform(2))
        assert torch.equal(found[1], wanted[1]) != interpolates


def test_forces_are_the_derivative_of_the_interpolated_energy():
    built, structures = model(), batch(1)
    built.pieces = UNEVEN
    coord, step = structures.coord.clone(), 1e-5
    out = built(structures)
    for atom, axis in ((0, 0), (3, 1), (7, 2)):
        energies = []
        for sign in (1, -1):
            structures.coord.copy_(coord)
            structures.coord[0, atom, axis] += sign * step
            energies.append(built(structures)["energy"].item())
        structures.coord.copy_(coord)
        slope = (energies[0] - energies[1]) / (2 * step)
        assert out["force"][0, atom, axis].item() == pytest.approx(-slope, rel=1e-6, abs=1e-8)


def test_only_steps_that_train_interpolate():
    built, structures = model(activation_function="relu"), batch()
    exact = built(structures)["energy"].detach()
    built.pieces = uniform(16)
    assert float((built(structures)["energy"].detach() - exact).abs().max()) > 1e-9
    with torch.no_grad():
        torch.testing.assert_close(built(structures)["energy"], exact, rtol=1e-14, atol=0)


def test_evaluate_and_spread_are_transposes():
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(2, 9, 4, dtype=torch.float64, generator=generator)
    edges = interpolation.cut(rows, rows[:, 0], UNEVEN, (4, 5), (4, 6))
    product = torch.randn(
        2, 4, edges.terms, dtype=torch.float64, generator=generator, requires_grad=True
    )
    moved = torch.randn(rows.shape, dtype=torch.float64, generator=generator)
    slope = interpolation.evaluate(edges, product)
    (back,) = torch.autograd.grad(slope, product, moved)
    assert float((slope * moved).sum()) == pytest.approx(float((product * back).sum()), rel=1e-11)
    torch.testing.assert_close(back, interpolation.spread_reference(edges, moved))


def test_the_tail_tells_the_error():
    built, structures = model().requires_grad_(False), batch()
    descriptor = built.atomic_model.descriptor
    (nets,) = descriptor.networks()
    for scale in (1.0, 1.5, 1.5):  # each on top of the ones before
        with torch.no_grad():
            for p in nets[0].parameters():
                p.mul_(scale)
        standard = descriptor._standardised(structures, edge_vectors(structures), None)
        rows = standard.rows
        edges = interpolation.cut(
            rows, standard.empty, uniform(16), structures.sections, descriptor.sel
        )
        found = interpolation.coefficients(
            nets, descriptor.activation, edges.intervals, edges.pieces
        )
        s = rows[:, : structures.sections[0], 0].flatten()
        exact, _ = interpolation.layers.values(
            descriptor.activation, nets[0].copies, s[:, None], nets[0].tensors
        )
        cell, basis, _ = interpolation._edge_basis(edges)
        terms = found.unflatten(0, (-1, interpolation.ORDERS))[cell.view(rows.shape[:2]) % (2 * 16)]
        features = torch.einsum("aem,aemf->aef", basis, terms)[:, : structures.sections[0]].flatten(
            0, 1
        )
        error = float((features - exact).abs().max() / exact.abs().max())
        assert error <= max(10.0 * float(interpolation.tails(found, 16).max()), 1e-13)


@pytest.mark.parametrize(
    ("scale", "activation", "wanted"),
    [
        (1.0, "tanh", 16),
        (2.0, "tanh", 32),
        (3.0, "tanh", 32),
        (6.0, "tanh", 64),
        (1.0, "relu", 0),
        (1e3, "tanh", 0),
    ],
)
def test_tuning_takes_as_many_pieces_as_the_networks_need(scale, activation, wanted):
    built = model(activation_function=activation)
    with torch.no_grad():
        for p in built.atomic_model.descriptor.sea.parameters():
            p.mul_(scale)
    batches = [batch(1, 6), batch()]
    built.pieces = built.wanted_pieces(batches)
    assert len(built.pieces) == wanted
    assert built.wanted_pieces(batches) == built.pieces


def test_pieces_are_short_where_the_networks_bend():
    """Networks of a trained model bend in a small part of the interval: equal pieces would all be as short."""
    built, structures = model(), batch()
    with torch.no_grad():
        for network in built.atomic_model.descriptor.networks()[0]:
            network.layers[0].matrix.mul_(12.0)
            bias = network.layers[0].bias
            bias.copy_(-18.0 * torch.linspace(0.9, 1.1, bias.numel()).view_as(bias))
    built.pieces = built.wanted_pieces([structures])
    sizes = lengths(built.pieces)
    assert min(sizes) < 16 <= 64 <= max(sizes)
    exact = results(built, structures, ())
    for wanted, found in zip(
        exact, results(built, structures, built.wanted_pieces([structures])), strict=True
    ):
        assert float((found - wanted).norm() / wanted.norm()) < 1e-7


def test_pieces_stay_while_they_suffice():
    built, structures = model(), batch()
    built.pieces = first = built.wanted_pieces([structures])
    parameters = list(built.atomic_model.descriptor.sea.parameters())

    def scaled(factor):
        with torch.no_grad():
            torch._foreach_mul_(parameters, factor)
        return built.wanted_pieces([structures])

    assert scaled(1.02) == first
    built.pieces = uniform(64)
    assert len(built.wanted_pieces([structures])) == 16  # fewer suffice
    built.pieces = first
    assert len(scaled(3.0)) > 16


def test_small_batches_stay_exact(monkeypatch):
    monkeypatch.setattr(interpolation, "EDGES_PER_NODE", 4)
    built, structures = model(activation_function="relu"), batch()
    exact = built(structures)["energy"].detach()
    built.pieces = uniform(16)  # 24 atoms with 68 slots: fewer than 4 edges for each of 512 nodes
    assert torch.equal(built(structures)["energy"].detach(), exact)
