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
    """Return outputs, their adjoints, and gradients of a loss on both: what the four passes compute.

    `positions` are the inputs that depend on positions: they get adjoints. `weights` are the inputs
    that get gradients, most of `positions` among them. `derive` calculates the adjoints (pass 2);
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
    """Return what `with_gradients` does, of the angles between `width` neighbours of each atom.

    With `tail` the angles are updated: y has A columns behind the M of the message, and a′ is an
    output. `reach` has how many neighbours of each atom have a weight.
    """
    draw = Draw(dtype, device)
    n_y = n_m + n_a if tail else n_m
    n_slots = atoms * width
    has_weight = _first_slots(atoms, width, reach, device)
    slots = torch.arange(n_slots, device=device)
    plan = AnglePlan((AngleBlock(atoms, width),), slots, slots // width, padded=True)
    plan = plan.within(has_weight.flatten())

    a = draw.leaf(n_slots * width, n_a)
    u = draw.leaf(n_slots, n_y)
    t = draw.leaf(n_slots, n_y)
    s = draw.leaf(n_slots)
    weight = draw.leaf(n_a, n_y, scale=0.3)
    residual = draw.leaf(n_a) if tail else None
    passes = angles.Angles(plan, activation(curve), n_m, 0.7)
    terms = AngleTerms(a, u, t, s * has_weight.flatten())
    message, a_new = run(passes, angles.AngleInputs(terms, weight, residual), force=force)
    # Kernels leave a′ of other pairs undefined: it is multiplied by 0.
    pairs = (has_weight[:, :, None] & has_weight[:, None, :]).view(-1, 1)
    outputs = [message] if a_new is None else [message, a_new * pairs]
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
    """Return what `with_gradients` does, of the edges in `width` slots of each atom.

    With `tail` the edges are updated: y has 4 columns behind the M of the message, and y[M:] is an
    output. `reach` has how many slots of each atom hold a neighbour.
    """
    draw = Draw(dtype, device)
    n_y = n_m + 4 if tail else n_m
    neighbor = torch.randint(0, atoms, (atoms, width), generator=draw.generator).to(device)
    has_edge = _first_slots(atoms, width, reach, device)
    neighbor = torch.where(has_edge, neighbor, 0)

    weight = draw.leaf(n_e, n_y, scale=0.3)
    e = draw.leaf(atoms, width, n_e)
    p = draw.leaf(atoms, n_y)
    table = draw.leaf(atoms, n_y + n_v)
    w = draw.leaf(atoms, width)
    h = draw.leaf(atoms, width, 3)
    terms = EdgeTerms(e, p, table, w * has_edge, h * has_edge.unsqueeze(-1))
    passes = edges.Edges(neighbor, activation(curve), n_m, sort_by_neighbor(neighbor, ~has_edge))
    message, update, moment = run(passes, edges.EdgeInputs(terms, weight), force=force)
    outputs = [message, moment]
    if update is not None:
        # Kernels store f(z) or 0 in empty slots: it is multiplied by 0.
        outputs.append(update * has_edge.unsqueeze(-1))
    return with_gradients(
        draw, outputs, [e, p, table, w, h], [weight, e, p, table], force=force, derive=derive
    )


def _first_slots(atoms, width, reach, device):
    """Return which slots are used (atoms, width): the first ones, as many as `reach` says, or all."""
    n_used = torch.tensor(reach or [width] * atoms, device=device)
    return torch.arange(width, device=device) < n_used[:, None]


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
    out = layer._new_nodes(x, torch.cat(messages, dim=1), moment, force=force)
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
    out = layer._new_edges(e, graph, u, m, force=force)
    weights = [e, u, m, *layer.edge_angle_linear2.parameters(), *layer.e_residual]
    return with_gradients(draw, [out], [e, u, m], weights, force=force, derive=derive)


def distance(found, wanted):
    """Return the largest relative error in norm."""
    pairs = [(x.detach().cpu().double(), y.cpu()) for x, y in zip(found, wanted, strict=True)]
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)
