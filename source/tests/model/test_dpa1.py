"""What only DPA-1 has: rows just within the cut-off, routes, groups of atoms, rescaled vectors."""

import json

import pytest
import torch
from model_batches import HERE, batch_of, read_fixture, stored_model

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
    out, expected = model(batch_of(model, FIXTURE["structures"]["rim"])), FIXTURE["cases"][name]["outputs"]["rim"]
    torch.testing.assert_close(out["energy"], expected["energy"], rtol=1e-6, atol=0)
    scale = expected["force"].abs().max().item()
    torch.testing.assert_close(out["force"], expected["force"], rtol=0, atol=0.02 * scale)


def test_the_length_of_descriptors_is_that_of_the_fitting_nets_input():
    model = stored_model(FIXTURE, "two_sides")
    batches = [batch_of(model, FIXTURE["structures"][kind]) for kind in ("orthorhombic", "triclinic", "tiny", "open")]
    taken = []
    handle = model.atomic_model.fitting_net.register_forward_pre_hook(lambda _, given: taken.append(given[0].detach()))
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
    ours = {entry.name: entry.view.batch if entry.route == "muon" else 0 for entry in optimizer.routing}
    assert ours == ROUTES[name][mode]
    in_proj = "atomic_model.descriptor.se_atten.dpa1_attention.attention_layers.0.attention_layer.in_proj.matrix"
    assert ours[in_proj] == 1


def test_a_list_of_slots_counts_by_its_sum():
    model = stored_model(FIXTURE, "truncated")
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
        model = stored_model(FIXTURE, name)
        out = model(batch_of(model, FIXTURE["structures"]["orthorhombic"]))
        (out["energy"].sum() + out["force"].square().sum() + out["virial"].square().sum()).backward()
        found.append([*out.values(), *(p.grad for p in model.parameters())])
    for other in found[:2]:
        for value, wanted in zip(other, found[2], strict=True):
            scale = 0.0 if wanted is None else wanted.abs().max().item()
            torch.testing.assert_close(value, wanted, rtol=1e-11, atol=1e-13 * scale)
