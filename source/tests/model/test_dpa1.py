"""What only DPA-1 has: rows just within the cut-off, routes, groups of atoms, rescaled vectors."""

import json
import os
import subprocess
import sys

import pytest
import torch
from dpa1_attention import OPTIONS, attention_of, attention_results, reference_layer
from dpa1_embedding import NETS, assert_same_embedding, embedding_results
from model_batches import HERE, batch_of, pull_back, read_fixture, stored_model

from deepmd_muon.model.descriptor.dpa1 import attention as attention_module
from deepmd_muon.model.descriptor.dpa1 import module
from deepmd_muon.model.descriptor.dpa1.attention import _Rescaled
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.optim import HybridMuon

FIXTURE = read_fixture(HERE / "dpa1.pt.gz")
ROUTES = json.loads((HERE / "dpa1_routes.json").read_text())


@pytest.mark.parametrize("name", [name for name in FIXTURE["cases"] if name != "float32"])
def test_same_numbers_just_within_the_cut_off(name):
    """The switch is 5e-14 there; deepmd-kit computes it from numbers near 1, so its forces are rounded to 1e-3."""
    model = stored_model(FIXTURE, name)
    out = model(batch_of(model, FIXTURE["structures"]["rim"]))
    expected = FIXTURE["cases"][name]["outputs"]["rim"]
    torch.testing.assert_close(out["energy"], expected["energy"], rtol=1e-6, atol=0)
    scale = expected["force"].abs().max().item()
    torch.testing.assert_close(out["force"], expected["force"], rtol=0, atol=0.02 * scale)


def test_the_length_of_descriptors_is_that_of_the_fitting_nets_input():
    model = stored_model(FIXTURE, "two_sides")
    batches = [
        batch_of(model, FIXTURE["structures"][kind])
        for kind in ("orthorhombic", "triclinic", "tiny", "open")
    ]
    taken = []
    handle = model.atomic_model.fitting_net.register_forward_pre_hook(
        lambda _, given: taken.append(given[0].detach())
    )
    for batch in batches:
        model(batch)
    handle.remove()
    expected = torch.cat(taken).double().square().sum(1).mean().sqrt().item()
    assert descriptor_length(model, batches) == pytest.approx(expected, rel=1e-6)
    assert descriptor_length(model, []) == 0.0


@pytest.mark.parametrize("mode", ["2d", "flat", "slice"])
@pytest.mark.parametrize("name", list(ROUTES))
def test_same_routes(name, mode):
    model = stored_model(FIXTURE, name)
    optimizer = HybridMuon(model.named_parameters(), lr=1e-3, muon_mode=mode)
    ours = {
        entry.name: entry.view.batch if entry.route == "muon" else 0 for entry in optimizer.routing
    }
    assert ours == ROUTES[name][mode]
    in_proj = "atomic_model.descriptor.se_atten.dpa1_attention.attention_layers.0.attention_layer.in_proj.matrix"
    assert ours[in_proj] == 1


FIRST_STEP = """
import sys
from dpa1_attention import OPTIONS, attention_of, attention_results
from model_batches import HERE, batch_of, pull_back, read_fixture, stored_model
fixture = read_fixture(HERE / "dpa1.pt.gz")
model = stored_model(fixture, "one_side")
pull_back(model(batch_of(model, fixture["structures"]["tiny"])))
assert "sympy" not in sys.modules
"""


def test_a_first_step_does_not_import_symbolic_shapes():
    """They take 0.3 s of the start-up."""
    beside = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FIRST_STEP], env=beside, check=True)


def test_a_list_of_slots_counts_by_its_sum():
    model = stored_model(FIXTURE, "truncated")
    assert (model.sel, model.by_type) == ((14,), False)
    assert len(model.atomic_model.fitting_net.filter_layers.networks) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("centred", [False, True])
def test_rescaling_of_no_pairs_says_nothing(centred):
    """A batch of lone atoms has none."""
    x = torch.zeros(0, 4, requires_grad=True)
    y, r = _Rescaled.apply(x, 1e-5, centred)
    assert y.shape == (0, 4)
    assert r.shape == (0, 1)
    y.sum().backward()
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize("centred", [False, True])
def test_rescaling_is_torchs_own_and_its_gradients_are_right(centred):
    x = torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    if centred:
        own, epsilon = torch.nn.functional.layer_norm(x, (5,)), 1e-5
    else:
        own, epsilon = torch.nn.functional.normalize(x, dim=-1), 1e-12
    ours = _Rescaled.apply(x, epsilon, centred)[0]
    torch.testing.assert_close(ours, own, rtol=1e-14, atol=1e-14)
    torch.autograd.gradcheck(lambda x: _Rescaled.apply(x, 1e-5, centred), (x,))
    torch.autograd.gradgradcheck(lambda x: _Rescaled.apply(x, 1e-5, centred), (x,))


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("columns", [4, 0])
def test_written_derivatives_of_attention_are_autograds(columns, options, precision, monkeypatch):
    made = attention_of(columns, precision, **options)
    tolerance = 1e-11 if precision == "float64" else 2e-4
    for force in (True, False):
        ours, plain = (
            attention_results(*made, written=written, force=force) for written in (True, False)
        )
        for value, wanted in zip(ours, plain, strict=True):
            scale = max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0)
            torch.testing.assert_close(value, wanted, rtol=0, atol=tolerance * scale)


def test_written_derivatives_of_attention_are_slopes_of_differences():
    """Numerical derivatives of values, and of the adjoints of features and gate by everything that they depend on."""
    attention, features, gates = attention_of(3, layers=1, alone=False)
    weights = list(attention.parameters())

    def value(x, gate, *given):
        named = dict(zip(dict(attention.named_parameters()), given, strict=True))
        return torch.func.functional_call(
            attention, named, (x, gates._replace(factor=gate)), {"force": False}
        )

    def adjoints(x, gate, mix, *given):
        named = dict(zip(dict(attention.named_parameters()), given, strict=True))
        out = torch.func.functional_call(
            attention, named, (x, gates._replace(factor=gate)), {"force": True}
        )
        return torch.autograd.grad((out * mix).sum(), (x, gate), create_graph=True)

    mix = torch.randn(
        features.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    torch.autograd.gradcheck(value, (features, gates.factor, *weights), check_undefined_grad=False)
    torch.autograd.gradcheck(
        adjoints,
        (features, gates.factor, mix.requires_grad_(), *weights),
        check_undefined_grad=False,
    )


def test_written_derivatives_of_attention_have_no_third():
    attention, features, gates = attention_of(4, layers=1)
    out = attention(features, gates, force=True)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="third derivative"):
        torch.autograd.grad(slope.sin().sum(), features, create_graph=True)


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_written_derivatives_of_the_embedding_are_autograds(name, force, precision):
    ours, plain = (
        embedding_results(name, precision, written=written, force=force)
        for written in (True, False)
    )
    assert_same_embedding(ours, plain, precision)


@pytest.mark.parametrize("name", ["one_side", "two_sides", "mean", "truncated"])
@pytest.mark.parametrize("recompute", [False, True])
def test_forces_and_gradients_of_a_model_with_written_attention(name, recompute, monkeypatch):
    """Including fewer slots than neighbours, standardised empty slots and recomputed layers."""
    found = []
    for written in (True, False):
        model = stored_model(FIXTURE, name)
        model.atomic_model.descriptor.recompute = recompute and written
        batch = batch_of(model, FIXTURE["structures"]["triclinic"])
        if not written:
            monkeypatch.setattr(
                attention_module.AttentionLayer,
                "forward",
                lambda layer, features, gates, force: reference_layer(layer, features, gates),
            )
        out = model(batch)
        pull_back(out)
        found.append([*out.values(), *(p.grad for p in model.parameters())])
    for value, wanted in zip(*found, strict=True):
        scale = 0.0 if wanted is None else wanted.abs().max().item()
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12 * scale)


@pytest.mark.parametrize("name", ["one_side", "mean", "smooth_mean", "v2"])
def test_groups_of_atoms_change_nothing(name, monkeypatch):
    found = []
    for size in (1, 3, 10**6):
        monkeypatch.setattr(module, "GROUP", size)
        model = stored_model(FIXTURE, name)
        out = model(batch_of(model, FIXTURE["structures"]["orthorhombic"]))
        pull_back(out)
        found.append([*out.values(), *(p.grad for p in model.parameters())])
    for other in found[:2]:
        for value, wanted in zip(other, found[2], strict=True):
            scale = 0.0 if wanted is None else wanted.abs().max().item()
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-13 * scale)
