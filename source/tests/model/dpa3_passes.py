"""Outputs and derivatives of DPA-3's four operations, by torch's operations or by kernels.

Each `…_results` draws inputs, runs one operation, and returns what `with_gradients` does: a list in
a fixed order, so that two ways to compute it are compared element by element. The caller chooses
the way beforehand, by a patch of `layer.kernels_fit`, `angles._kernels` or `edges._kernels`.
"""

import torch

from deepmd_muon.model.descriptor.dpa3 import angles, edges
from deepmd_muon.model.descriptor.dpa3.geometry import AngleBlock, AnglePlan, sort_by_neighbor
from deepmd_muon.model.descriptor.dpa3.layer import Graph, RepflowLayer
from deepmd_muon.model.descriptor.dpa3.settings import RepflowSettings
from deepmd_muon.model.descriptor.dpa3.tensors import AngleTerms, EdgeTerms
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Stream

CURVE = "silut:1.0"


class Draw:
    """Random tensors, the same in every precision and on every device."""

    def __init__(self, dtype, device):
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(1)

    def __call__(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def leaf(self, *shape, scale=1.0):
        return (scale * self(*shape)).requires_grad_()

    def weighted(self, tensors):
        return sum((x * self(*x.shape)).sum() for x in tensors)


def with_gradients(draw, outputs, positions, weights, *, force, derive):
    """Return outputs, adjoints of `positions`, and gradients of a mixture of both by `weights`.

    `positions` are the inputs that depend on positions, and `weights` all whose gradient is
    compared, with most of `positions` among them. `derive` calculates the adjoints (pass 2);
    without `force` there are none, and passes 2 and 3 do not run.
    """
    energy = draw.weighted(outputs)
    if not force:
        return [*outputs, *torch.autograd.grad(energy, weights)]
    bars = derive(energy, positions)
    loss = draw.weighted(bars) + 0.3 * energy
    return [*outputs, *bars, *torch.autograd.grad(loss, weights)]


def derivative(energy, positions):
    return torch.autograd.grad(energy, positions, create_graph=True)


def angle_results(  # noqa: PLR0913 - the shapes of one pass
    dtype,
    device="cpu",
    *,
    tail,
    width=5,
    atoms=3,
    n_a=6,
    n_m=10,
    curve=CURVE,
    force=True,
    derive=derivative,
    reach=None,
):
    """Return what `with_gradients` does, of the angles.

    `tail`: whether a′ is wanted; `reach`: how many neighbours of each atom have a weight.
    """
    draw, features = Draw(dtype, device), n_m + n_a if tail else n_m
    slots = torch.arange(atoms * width, device=device)
    inside = (
        torch.arange(width, device=device)
        < torch.tensor(reach or [width] * atoms, device=device)[:, None]
    )
    plan = AnglePlan((AngleBlock(atoms, width),), slots, slots // width, padded=True).within(
        inside.flatten()
    )
    a, u, t = (
        draw.leaf(atoms * width**power, n) for power, n in ((2, n_a), (1, features), (1, features))
    )
    s, weight = draw.leaf(atoms * width), draw.leaf(n_a, features, scale=0.3)
    residual = draw.leaf(n_a) if tail else None
    passes = angles.Angles(plan, activation(curve), n_m, 0.7)
    terms = AngleTerms(a, u, t, s * inside.flatten())
    message, updated = run(passes, angles.AngleInputs(terms, weight, residual), force=force)
    pairs = (inside[:, :, None] & inside[:, None, :]).view(-1, 1)
    outputs = [message] if updated is None else [message, updated * pairs]
    weights = [x for x in (a, u, t, weight, residual) if x is not None]
    return with_gradients(draw, outputs, [a, u, t, s], weights, force=force, derive=derive)


def edge_results(  # noqa: PLR0913 - the shapes of one pass
    dtype,
    device="cpu",
    *,
    tail,
    width=5,
    atoms=3,
    n_e=6,
    n_v=7,
    n_m=10,
    curve=CURVE,
    force=True,
    derive=derivative,
    reach=None,
):
    """Return what `with_gradients` does, of the edges.

    `tail`: whether they are updated; `reach`: how many slots of each atom hold a neighbour.
    """
    draw, features = Draw(dtype, device), n_m + 4 if tail else n_m
    neighbor = torch.randint(0, atoms, (atoms, width), generator=draw.generator).to(device)
    weight, e = draw.leaf(n_e, features, scale=0.3), draw.leaf(atoms, width, n_e)
    p, table = draw.leaf(atoms, features), draw.leaf(atoms, features + n_v)
    w, h = draw.leaf(atoms, width), draw.leaf(atoms, width, 3)
    inside = (
        torch.arange(width, device=device)
        < torch.tensor(reach or [width] * atoms, device=device)[:, None]
    )
    neighbor = torch.where(inside, neighbor, 0)
    terms = EdgeTerms(e, p, table, w * inside, h * inside.unsqueeze(-1))
    passes = edges.Edges(neighbor, activation(curve), n_m, sort_by_neighbor(neighbor, ~inside))
    message, update, moment = run(passes, edges.EdgeInputs(terms, weight), force=force)
    outputs = (
        [message, moment] if update is None else [message, moment, update * inside.unsqueeze(-1)]
    )
    return with_gradients(
        draw, outputs, [e, p, table, w, h], [weight, e, p, table], force=force, derive=derive
    )


def small_layer(dtype, device, style, curve):
    """Return a layer for nodes of 9, edges of 6 and angles of 4 features."""
    sizes = {
        "n_dim": 9,
        "e_dim": 6,
        "a_dim": 4,
        "e_sel": 5,
        "a_sel": 3,
        "axis_neuron": 3,
        "update_style": style,
    }
    cutoffs = {"e_rcut": 6.0, "e_rcut_smth": 5.0, "a_rcut": 4.0, "a_rcut_smth": 3.0}
    repflow = RepflowSettings(**sizes, **cutoffs, smooth_edge_update=True)
    return RepflowLayer(repflow, activation(curve), dtype=dtype, stream=Stream(1)).to(device)


def node_results(
    dtype,
    device="cpu",
    *,
    style="res_residual",
    atoms=3,
    force=True,
    curve=CURVE,
    derive=derivative,
    n_messages=1,
):
    """Return what `with_gradients` does, of the nodes of a layer.

    `n_messages`: how many terms are added without activation; `curve`: the activation's name.
    """
    draw, layer = Draw(dtype, device), small_layer(dtype, device, style, curve)
    x, messages, moment = (
        draw.leaf(atoms, 9),
        [draw.leaf(atoms, 9) for _ in range(n_messages)],
        draw.leaf(atoms, 3, 15),
    )
    layer.n_residual.extend(draw.leaf(9) for _ in messages[1:])
    out = layer._nodes(x, torch.cat(messages, dim=1), moment, force=force)
    used = [layer.node_self_mlp, layer.node_sym_linear]
    weights = [
        x,
        *messages,
        moment,
        *(p for part in used for p in part.parameters()),
        *layer.n_residual,
    ]
    return with_gradients(draw, [out], [x, *messages, moment], weights, force=force, derive=derive)


def edge_sum_results(
    dtype,
    device="cpu",
    *,
    style="res_residual",
    atoms=3,
    near=2,
    force=True,
    curve=CURVE,
    derive=derivative,
):
    """Return what `with_gradients` does, of the update of a layer's edges, `near` of 5 with messages from angles."""
    draw, layer = Draw(dtype, device), small_layer(dtype, device, style, curve)
    slot = (
        torch.arange(atoms, device=device)[:, None] * 5 + torch.arange(near, device=device)
    ).flatten()
    plan = AnglePlan((AngleBlock(atoms, near),), slot, slot // 5, padded=True)
    nothing = torch.zeros(0, device=device)
    graph = Graph(nothing, None, nothing, nothing, plan, nothing, nothing)
    e, u, m = draw.leaf(atoms, 5, 6), draw.leaf(atoms, 5, 6), draw.leaf(atoms * near, 6)
    out = layer._edge_features(e, graph, u, m, force=force)
    weights = [e, u, m, *layer.edge_angle_linear2.parameters(), *layer.e_residual]
    return with_gradients(draw, [out], [e, u, m], weights, force=force, derive=derive)


def distance(found, wanted):
    """Return the largest relative error in norm."""
    pairs = [(x.detach().cpu().double(), y.cpu()) for x, y in zip(found, wanted, strict=True)]
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)
