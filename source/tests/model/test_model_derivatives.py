"""The handwritten derivatives against autograd, which defines them."""

import numpy as np
import pytest
import torch
from model_batches import make_batch, read_fixture, section

from deepmd_muon.model import build_model
from deepmd_muon.model.descriptor.environment import edge_derivative, environment
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.descriptor.se_e2_a import embedding
from deepmd_muon.model.descriptor.se_e2_a.embedding import (
    SumInputs,
    Sums,
    contract,
    plan_blocks,
    pull_contraction,
)
from deepmd_muon.model.edges import edge_vectors, forces_of
from deepmd_muon.model.fitting.ener.module import energy_and_slope
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.four_passes import run_with_pullback
from deepmd_muon.model.nn.networks import Network, Stream

REFERENCE = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "linear": lambda h: h,
    "relu": torch.relu,
    "relu6": torch.nn.functional.relu6,
    "softplus": torch.nn.functional.softplus,
    "gelu": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "gelu_tf": lambda h: torch.nn.functional.gelu(h, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("name", [*REFERENCE, "silut:0.5", "custom_silu"])
def test_activation_and_its_derivatives(name):
    f = activation(name)
    h = torch.cat(
        [torch.linspace(-9, 9, 401, dtype=torch.float64) + 1e-3, torch.tensor([25.0]).double()]
    )
    h.requires_grad_()
    value = f.value(h)
    if name in REFERENCE:
        torch.testing.assert_close(value, REFERENCE[name](h))
    (slope,) = torch.autograd.grad(value.sum(), h, create_graph=True)
    curvature = (
        torch.autograd.grad(slope.sum(), h)[0] if slope.requires_grad else torch.zeros_like(h)
    )
    with torch.no_grad():
        ours, keep = f(h.detach().clone())
        torch.testing.assert_close(ours, value, rtol=1e-12, atol=4e-16)
        torch.testing.assert_close(f.value_of(keep), value, rtol=1e-12, atol=4e-16)
        torch.testing.assert_close(f.slope(keep), slope, rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(
            f.curvature(keep, f.slope(keep)), curvature, rtol=1e-8, atol=1e-12
        )
        tangent, x = torch.randn_like(h), torch.randn_like(h)
        torch.testing.assert_close(f.times_slope(keep, x), slope * x, rtol=1e-10, atol=1e-12)
        cotangent = torch.randn(2, 1, h.numel(), dtype=torch.float64)
        wanted = torch.stack(
            [slope * cotangent[0] + curvature * tangent * cotangent[1], slope * cotangent[1]]
        )
        f.pull_back_(keep[None], tangent[None], cotangent)
        torch.testing.assert_close(cotangent, wanted, rtol=1e-8, atol=1e-12)


def plain_network(x, layers, copies, f):
    """The layers as their definition says, for autograd."""
    for (matrix, bias, idt), kind in zip(layers, copies, strict=True):
        y = f.value(x @ matrix + bias)
        y = y if idt is None else y * idt
        x = y + torch.cat([x] * kind, dim=-1) if kind else y
    return x


@pytest.mark.parametrize("name", ["tanh", "gelu", "sigmoid"])
@pytest.mark.parametrize("widths", [(1, 3, 6, 6), (1, 1, 2, 5), (1, 4)])
@pytest.mark.parametrize("timestep", [False, True])
@pytest.mark.parametrize(
    "device", ["cpu", "meta"]
)  # how to split the work; it is done on the CPU in both cases
def test_sums_over_edges(name, widths, timestep, device, monkeypatch):
    monkeypatch.setattr(embedding, "CPU_BLOCK_ROWS", 10)  # several blocks, the last one shorter
    f = activation(name)
    network = Network(widths, None, timestep=timestep, dtype=torch.float64, stream=Stream(5))
    parameters = list(network.parameters())
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    atoms, edges, sel, width = 5, 4, 7, widths[-1]
    counts = np.array([2, 4, 0, 3, 4])
    real = torch.arange(edges) < torch.from_numpy(counts)[:, None]
    empty = random(atoms, 4)
    rows = torch.where(real[..., None], random(atoms, edges, 4), empty[:, None])
    mix, weight = random(atoms, 4, width), random(atoms, edges, 4) * real[..., None]

    def plain():
        every = torch.cat([rows, empty[:, None].expand(atoms, sel - edges, 4)], 1)
        a = torch.einsum(
            "nec,nem->ncm", every, plain_network(every[..., :1], network.tensors, network.copies, f)
        )
        s = rows[..., 0].clone().requires_grad_()
        g = plain_network(s.unsqueeze(-1), network.tensors, network.copies, f)
        a_bar = mix * a.square()  # any function of A that depends on it again
        by_s = torch.autograd.grad(
            (rows * torch.einsum("nem,ncm->nec", g, a_bar.detach())).sum(), s, create_graph=True
        )[0]
        # by_s must depend on Ā too: linear in it, so repeat the derivative with Ā attached
        unit = torch.stack(
            [torch.autograd.grad(g[..., m].sum(), s, create_graph=True)[0] for m in range(width)],
            dim=-1,
        )
        by_s_attached = torch.einsum("nec,ncm,nem->ne", rows, a_bar, unit)
        torch.testing.assert_close(by_s_attached, by_s)
        spread_rows = torch.einsum("nem,ncm->nec", g, a_bar)
        spread_rows = torch.cat(
            [spread_rows[..., :1] + by_s_attached.unsqueeze(-1), spread_rows[..., 1:]], dim=-1
        )
        return a, spread_rows * real[..., None]

    def ours():
        plans = plan_blocks(counts, edges, torch.device(device))
        assert (len(plans) > 1) == (device == "cpu")
        sums = Sums(plans, sel, f, network.copies, force=True, trace=True)
        (a,), pull = run_with_pullback(sums, SumInputs(rows, empty, network.tensors))
        return a, pull(mix * a.square())[0] * real[..., None]

    results = [plain(), ours()]
    for value, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    gradients = [
        torch.autograd.grad((a * mix).sum() + (e * weight).sum(), parameters) for a, e in results
    ]
    for value, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["tanh", "silu", "linear"])
@pytest.mark.parametrize(
    ("widths", "timestep"), [((5, 6, 6, 12), True), ((5, 7), False), ((5, 5), True), ((5,), False)]
)
def test_energy_and_slope(name, widths, timestep):
    f = activation(name)
    network = Network(widths, 1, timestep=timestep, dtype=torch.float64, stream=Stream(6))
    x = torch.randn(
        3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True
    )
    flat = [t for layer in network.tensors for t in layer if t is not None]
    holes = [t is not None for layer in network.tensors for t in layer]

    def function(x, *given):
        tensors = iter(given)
        return energy_and_slope(
            f, network.copies, (3,), x, *[next(tensors) if there else None for there in holes]
        )

    energy, slope = function(x, *flat)
    hidden = plain_network(x, network.tensors[:-1], network.copies, f)
    wanted = hidden @ network.tensors[-1].matrix + network.tensors[-1].bias
    torch.testing.assert_close(energy, wanted)
    torch.testing.assert_close(
        slope, torch.autograd.grad(wanted.sum(), x)[0], rtol=1e-12, atol=1e-13
    )
    assert torch.autograd.gradcheck(function, (x, *flat), atol=1e-7)


def test_energy_and_slope_of_several_networks():
    f, widths, counts = activation("tanh"), (5, 6, 6), (2, 0, 3)
    networks = [
        Network(widths, 1, timestep=True, dtype=torch.float64, stream=Stream(6).child(number))
        for number in range(3)
    ]
    x = torch.randn(
        5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True
    )
    flat = [[t for layer in network.tensors for t in layer] for network in networks]
    mix = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def joined(energies, slopes):
        return (torch.cat(energies) * mix[0, :, :1]).sum() + (torch.cat(slopes) * mix[1]).sum()

    together = energy_and_slope(f, networks[0].copies, counts, x, *flat[0], *flat[1], *flat[2])
    apart = [
        energy_and_slope(f, networks[0].copies, (rows.shape[0],), rows, *tensors)
        for rows, tensors in zip(x.split(counts), flat, strict=True)
    ]
    leaves = [x, *(p for network in networks for p in network.parameters())]
    found = torch.autograd.grad(joined(*([part] for part in together)), leaves)
    wanted = torch.autograd.grad(joined(*zip(*apart, strict=True)), leaves)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


def test_contraction():
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    d_bar = torch.randn(2, 5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    d = contract(a, 3)
    torch.testing.assert_close(d, a.transpose(1, 2) @ a[:, :, :3])
    plain = (a.transpose(1, 2) @ a[:, :, :3] * d_bar).sum()
    torch.testing.assert_close(pull_contraction(a, d_bar), torch.autograd.grad(plain, a)[0])
    assert torch.autograd.gradcheck(lambda x: contract(x, 3), (a,))
    assert torch.autograd.gradcheck(pull_contraction, (a, d_bar))


def test_edge_derivative_is_the_transposed_jacobian():
    edges = torch.randn(
        2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    ).mul_(2.0)
    edges.requires_grad_()
    neighbor = torch.zeros(2, 3, dtype=torch.int64)
    neighbor[1, 2] = -1
    env = environment(edges, neighbor, Reach(rcut=4.0, rcut_smth=0.5, protection=0.1))
    adjoint = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    factor = torch.rand(2, 4, dtype=torch.float64)
    wanted = torch.autograd.grad((env.rows * factor[:, None] * adjoint).sum(), edges)[0]
    jacobian = env.jacobian._replace(stored=tuple(part.detach() for part in env.jacobian.stored))
    torch.testing.assert_close(
        edge_derivative(adjoint, factor, jacobian), wanted, rtol=1e-11, atol=1e-12
    )
    assert (wanted[1, 2] == 0).all()
    assert torch.autograd.gradcheck(lambda a: edge_derivative(a, factor, jacobian), (adjoint,))


def test_forces_are_the_transposed_differences():
    neighbor, order = torch.tensor([[1, 3, -1], [0, 2, 1]]), torch.tensor([2, 0])
    slope = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    flat = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    edges = flat[neighbor.clamp(min=0)] - flat[order][:, None]
    forces = forces_of(slope, order, neighbor, 4)
    torch.testing.assert_close(forces, -torch.autograd.grad((edges * slope).sum(), flat)[0])
    assert torch.autograd.gradcheck(lambda x: forces_of(x, order, neighbor, 4), (slope,))


def test_blocks_do_not_change_the_result(monkeypatch):
    data = read_fixture()["structures"]["orthorhombic"]
    model = build_model(section())
    batch = make_batch(data["coord"], data["atype"], data["box"], model.rcut, model.sel)
    results = []
    for rows in (1, 100, 10**9):
        monkeypatch.setattr(embedding, "CPU_BLOCK_ROWS", rows)
        model.zero_grad()
        out = model(batch)
        (out["force"].square().sum() + out["energy"].sum()).backward()
        results.append((out["force"], [p.grad.clone() for p in model.parameters()]))
    for force, gradients in results[1:]:
        torch.testing.assert_close(force, results[0][0], rtol=1e-12, atol=1e-13)
        for ours, wanted in zip(gradients, results[0][1], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-11)


def test_losses_of_energy_or_force_alone():
    data = read_fixture()["structures"]["open"]
    model = build_model(section())
    batch = make_batch(data["coord"], data["atype"], None, model.rcut, model.sel)

    def gradients(value):
        return torch.autograd.grad(value, list(model.parameters()), allow_unused=True)

    energy_only = gradients(model(batch, force=False)["energy"].sum())
    for ours, wanted in zip(energy_only, gradients(model(batch)["energy"].sum()), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-13)
    both = gradients(model(batch)["energy"].sum() + model(batch)["force"].square().sum())
    force_only = gradients(model(batch)["force"].square().sum())
    for total, a, b in zip(both, energy_only, force_only, strict=True):
        torch.testing.assert_close(total, a + b, rtol=1e-10, atol=1e-11)


def test_edge_vectors_reach_the_image():
    data = read_fixture()["structures"]["tiny"]
    batch = make_batch(data["coord"], data["atype"], data["box"], 4.0, (40, 30))
    lengths = edge_vectors(batch).norm(dim=-1)[batch.neighbor >= 0]
    assert lengths.max() < 4.0
    assert lengths.min() > 0.9
