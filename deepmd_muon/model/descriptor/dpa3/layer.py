"""One layer of DPA-3: its parameters under deepmd-kit's names, and how it updates nodes, edges and angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.angles import Angles
from deepmd_muon.model.descriptor.dpa3.edges import Edges
from deepmd_muon.model.descriptor.dpa3.geometry import AnglePlan, Incoming
from deepmd_muon.model.descriptor.dpa3.settings import RepflowSettings
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import Activation
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Layer, SeedPath


@dataclass(frozen=True)
class Graph:
    """Edges and angles of a batch, and their functions of positions.

    Attributes
    ----------
    neighbor
        Number of each neighbour among the sorted atoms `(nreal, nnei)`, int64; any atom in empty slots.
    incoming
        The edges by neighbour, where kernels use them.
    edge_weight
        Switch over the edge scale `(nreal, nnei)`; 0 in empty slots.
    direction
        Standardised x·w/r² times w over the root of the edge scale `(nreal, nnei, 3)`; 0 in empty slots.
    plan
        Storage order of angles.
    angle_weight
        Angular switch of the edges in angles, over the fourth root of the angle scale `(nslots,)`, so that products of
        two are over its root; 0 in empty slots.
    in_angle
        Which of these edges take part in angles `(nslots,)`.
    """

    neighbor: Tensor
    incoming: Incoming | None
    edge_weight: Tensor
    direction: Tensor
    plan: AnglePlan
    angle_weight: Tensor
    in_angle: Tensor


class Features(NamedTuple):
    """Nodes `(nreal, n_dim)`, edges `(nreal, nnei, e_dim)`, angles `(nangles, a_dim)`."""

    node: Tensor
    edge: Tensor
    angle: Tensor | None


class Wanted(NamedTuple):
    """Which features later layers still use; the others are not computed."""

    edge: bool
    angle: bool


class RepflowLayer(torch.nn.Module):
    """Updates all features from their values before the layer.

    Every linear layer on the features of several things side by side is split by their rows in its matrix: the part
    of an atom is computed once an atom and then gathered.
    """

    def __init__(
        self,
        repflow: RepflowSettings,
        activation: Activation,
        *,
        dtype: torch.dtype,
        stream: SeedPath,
    ) -> None:
        super().__init__()
        self.repflow, self.activation = repflow, activation
        n, e, a = repflow.n_dim, repflow.e_dim, repflow.a_dim
        pair = 2 * n + e

        def linear(n_in: int, n_out: int, place: int, *, bias: bool = True) -> Layer:
            own = stream.child(place)
            return Layer(n_in, n_out, timestep=False, dtype=dtype, stream=own, bias=bias)

        def residual(width: int, *place: int) -> torch.nn.Parameter:
            if repflow.update_residual_init == "const":
                return torch.nn.Parameter(
                    torch.full((width,), repflow.update_residual, dtype=dtype)
                )
            generator = stream.child(*place).generator()
            drawn = torch.empty(width, dtype=dtype).normal_(
                0.0, repflow.update_residual, generator=generator
            )
            return torch.nn.Parameter(drawn)

        trained = repflow.update_style == "res_residual"
        self.node_self_mlp = linear(n, n, 0)
        self.node_sym_linear = linear((n + e) * repflow.axis_neuron, n, 2)
        self.node_edge_linear = linear(pair, repflow.message, 4)
        self.edge_self_linear = linear(pair, e, 6)
        n_residual = []
        if trained:
            n_residual = [residual(n, 1), residual(n, 3)]
            n_residual += [residual(n, 5, head) for head in range(repflow.n_multi_edge_message)]
        e_residual = [residual(e, 7)] if trained else []
        a_residual = []
        self.a_compress_n_linear: Layer | None = None
        self.a_compress_e_linear: Layer | None = None
        if repflow.linear_compression:
            self.a_compress_n_linear = linear(n, repflow.angle_node, 8, bias=False)
            self.a_compress_e_linear = linear(e, repflow.angle_edge, 9, bias=False)
        if repflow.update_angle:
            self.edge_angle_linear1 = linear(repflow.angle_input, e, 10)
            self.edge_angle_linear2 = linear(e, e, 11)
            self.angle_self_linear = linear(repflow.angle_input, a, 13)
            if trained:
                e_residual.append(residual(e, 12))
                a_residual.append(residual(a, 14))
        self.n_residual = torch.nn.ParameterList(n_residual)
        self.e_residual = torch.nn.ParameterList(e_residual)
        self.a_residual = torch.nn.ParameterList(a_residual)

    def forward(
        self, features: Features, graph: Graph, wanted: Wanted, *, force: bool, overlap: bool = True
    ) -> Features:
        """Return the features after the layer; see `Wanted` for those returned as they came.

        With `sequential_update`, nodes need all of them.

        With `overlap`, a GPU computes angles beside edges. A layer that is computed again in backward passes must not:
        it would start on the stream of the first operation that asks, and others would not wait for it.
        """
        if self.repflow.sequential_update:
            return self._one_after_another(features, graph, force=force)
        angle, reduced = features.angle, None
        with triton_support.Branches(features.node.device, 2 if overlap else 1) as branches:
            if wanted.edge and angle is not None:
                branches.lend(1, *features, *graph.plan.tensors, graph.angle_weight)
                with branches.chain(1):
                    reduced, angle = self._angles(
                        features, graph, force=force, message=True, update=wanted.angle
                    )
                branches.take(reduced, angle)
            message, update, moment = self._edges(
                features, graph, force=force, message=True, update=wanted.edge
            )
            node = self._nodes(features.node, message, moment, force=force)
        if update is None:
            return Features(node, features.edge, features.angle)
        return Features(
            node, self._edge_features(features.edge, graph, update, reduced, force=force), angle
        )

    def _one_after_another(self, features: Features, graph: Graph, *, force: bool) -> Features:
        """Return the features after the layer with `sequential_update`."""
        node = features.node
        _, update, _ = self._edges(features, graph, force=force, message=False, update=True)
        assert update is not None
        edge = torch.addcmul(features.edge, update, self.e_residual[0])
        before = features._replace(edge=edge)
        _, angle = self._angles(before, graph, force=force, message=False, update=True)
        before = before._replace(angle=angle)
        reduced, _ = self._angles(before, graph, force=force, message=True, update=False)
        of_angles = self._update_by_angles(edge, graph, reduced)
        after = before._replace(edge=torch.addcmul(edge, of_angles, self.e_residual[1]))
        message, _, moment = self._edges(after, graph, force=force, message=True, update=False)
        return after._replace(node=self._nodes(node, message, moment, force=force))

    def _edges(
        self, features: Features, graph: Graph, *, force: bool, message: bool, update: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the message of all edges to their centre, the update of the edges, and H (see `edges`).

        Without `message` it has no features; without `update` it is None.
        """
        n, e = self.repflow.n_dim, self.repflow.e_dim
        layers = [self.node_edge_linear] if message else []
        if update:
            layers.append(self.edge_self_linear)
        width = self.repflow.message if message else 0
        centre, other, own = torch.cat([layer.matrix for layer in layers], 1).split([n, n, e])
        p = torch.addmm(torch.cat([layer.tensors.bias for layer in layers]), features.node, centre)
        table = torch.cat([torch.mm(features.node, other), features.node], 1)
        given = features.edge, p, table, graph.edge_weight, graph.direction, own
        passes = Edges(graph.neighbor, self.activation, width, graph.incoming)
        messages, updates, moment = run(passes, *given, force=force)
        return messages, updates, moment

    def _nodes(self, node: Tensor, message: Tensor, moment: Tensor, *, force: bool) -> Tensor:
        """Return the nodes after the layer, from the messages side by side, which are added as they are, and H."""
        f = self.activation.value
        repflow = self.repflow
        plain = [part.contiguous() for part in message.split(repflow.n_dim, dim=1)]
        if kernels_fit(node, self.activation):
            from deepmd_muon.model.descriptor.dpa3.kernels.nodes import Nodes

            alpha, step_sizes = _residual_weights(
                repflow.update_style, self.n_residual, node, 2 + len(plain)
            )
            passes = Nodes(
                activation=self.activation,
                alpha=alpha,
                axis=repflow.axis_neuron,
                edge_columns=repflow.e_dim,
            )
            weights = (*self.node_self_mlp.tensors[:2], *self.node_sym_linear.tensors[:2])
            out: Tensor
            (out,) = run(passes, node, moment, *plain, *weights, *step_sizes, force=force)
            return out
        symmetric = [
            torch.bmm(part[..., : repflow.axis_neuron].transpose(1, 2), part).flatten(1) / 3.0
            for part in moment.split([repflow.e_dim, repflow.n_dim], dim=2)
        ]
        updates = [
            f(_apply(self.node_self_mlp, node)),
            f(_apply(self.node_sym_linear, torch.cat(symmetric, 1))),
            *plain,
        ]
        return _residual_sum(repflow.update_style, node, updates, self.n_residual)

    def _angles(
        self, features: Features, graph: Graph, *, force: bool, message: bool, update: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the message of all angles to their first edge `(nslots, e_dim)`, and the angles after the layer.

        Without `message` it has no features; without `update` the angles come back as they are.
        """
        repflow = self.repflow
        of_node, edges = repflow.angle_node, repflow.angle_edge
        layers = [self.edge_angle_linear1] if message else []
        if update:
            layers.append(self.angle_self_linear)
        matrix = torch.cat([layer.matrix for layer in layers], 1)
        own, centre, second, first = matrix.split([repflow.a_dim, of_node, edges, edges])
        bias = torch.cat([layer.tensors.bias for layer in layers])
        node = features.node[:, :of_node]
        if self.a_compress_n_linear is not None:
            node = torch.mm(features.node, self.a_compress_n_linear.matrix)
        per_atom = torch.addmm(bias, node, centre)
        seen = repflow.e_dim if self.a_compress_e_linear is not None else edges
        if graph.plan.padded:  # slices add up in backward passes without atomic operations
            slots, width = graph.plan.blocks[0].width, features.edge.shape[1:]
            cut = torch.nn.functional.pad(features.edge, (0, seen - width[1], 0, slots - width[0]))
            edge = self._compressed(cut.flatten(0, 1))
            u = (
                torch.mm(edge, first).view(-1, slots, matrix.shape[1]) + per_atom.unsqueeze(1)
            ).flatten(0, 1)
        else:
            edge = features.edge.flatten(0, 1)[:, :seen].index_select(0, graph.plan.slot)
            edge = self._compressed(edge)
            u = torch.addmm(per_atom.index_select(0, graph.plan.atom), edge, first)
        t = torch.mm(edge, second)
        assert features.angle is not None
        carry, (residual,) = _residual_weights(
            repflow.update_style, self.a_residual, features.angle
        )
        passes = Angles(graph.plan, self.activation, repflow.e_dim if message else 0, carry)
        given = features.angle, u, t, graph.angle_weight, own, residual if update else None
        reduced, angle = run(passes, *given, force=force)
        return reduced, angle if update else features.angle

    def _compressed(self, edge: Tensor) -> Tensor:
        """Return the features of edges `(n, e_dim)` that angles see, by the linear map if there is one."""
        if self.a_compress_e_linear is None:
            return edge
        return torch.mm(edge, self.a_compress_e_linear.matrix)

    def _edge_features(
        self, edge: Tensor, graph: Graph, update: Tensor, reduced: Tensor | None, *, force: bool
    ) -> Tensor:
        """Return the edges after the layer, from their update and the messages of the angles."""
        style, residuals = self.repflow.update_style, self.e_residual
        if reduced is None:
            return _residual_sum(style, edge, [update], residuals)
        if (
            self.repflow.smooth_edge_update
            and graph.plan.padded
            and kernels_fit(edge, self.activation)
        ):
            from deepmd_muon.model.descriptor.dpa3.kernels.edge_sums import EdgeSum

            carry, rho = _residual_weights(style, residuals, edge, 2)
            passes = EdgeSum(self.activation, alpha=carry, near=graph.plan.blocks[0].width)
            out: Tensor
            (out,) = run(
                passes,
                edge,
                update,
                reduced,
                *self.edge_angle_linear2.tensors[:2],
                *rho,
                force=force,
            )
            return out
        of_angles = self._update_by_angles(edge, graph, reduced)
        return _residual_sum(style, edge, [update, of_angles], residuals)

    def _update_by_angles(self, edge: Tensor, graph: Graph, reduced: Tensor) -> Tensor:
        """Return the update of the edges by the messages of the angles."""
        f = self.activation.value
        rows, linear, slot = edge.flatten(0, 1), self.edge_angle_linear2, graph.plan.slot
        if self.repflow.smooth_edge_update:  # an edge without angles takes zero as message
            rest = f(linear.tensors.bias).expand_as(rows)
            of_angles = rest.index_copy(0, slot, f(_apply(linear, reduced)))
        else:  # or its own features
            message = torch.where(graph.in_angle.unsqueeze(1), reduced, rows.index_select(0, slot))
            of_angles = f(_apply(linear, rows.index_copy(0, slot, message)))
        return of_angles.view_as(edge)


def kernels_fit(x: Tensor, activation: Activation) -> bool:
    """Return whether kernels can be used on features x, and know the activation."""
    return activation.formula is not None and x.numel() > 0 and triton_support.usable(x.device)


def _apply(layer: Layer, x: Tensor) -> Tensor:
    return torch.addmm(layer.tensors.bias, x, layer.matrix)


def _residual_sum(
    style: str, x: Tensor, updates: list[Tensor], residuals: torch.nn.ParameterList
) -> Tensor:
    """Return x with its updates added: weighted by trained vectors, averaged, or incremented."""
    if style == "res_residual":
        for weight, update in zip(residuals, updates, strict=True):
            x = torch.addcmul(x, update, weight)
        return x
    total = updates[0]
    for update in updates[1:]:
        total = total + update
    if style == "res_avg":
        return (x + total) / math.sqrt(len(updates) + 1)
    return x + total / math.sqrt(len(updates))


def _residual_weights(
    style: str, residuals: torch.nn.ParameterList, x: Tensor, count: int = 1
) -> tuple[float, list[Tensor]]:
    """Return α and ρ of x′ = α·x + Σ ρ∘u: the residual sum of features x `(…, width)` with `count` updates u."""
    if style == "res_residual":
        return 1.0, list(residuals)
    factor = 1.0 / math.sqrt(count + 1 if style == "res_avg" else count)
    return factor if style == "res_avg" else 1.0, [x.new_full(x.shape[-1:], factor)] * count
