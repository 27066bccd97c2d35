"""One layer of DPA-3: its parameters under deepmd-kit's names, and its updates of all features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.angles import AngleInputs, Angles
from deepmd_muon.model.descriptor.dpa3.edges import EdgeInputs, Edges
from deepmd_muon.model.descriptor.dpa3.geometry import AnglePlan, Incoming
from deepmd_muon.model.descriptor.dpa3.settings import RepflowSettings
from deepmd_muon.model.descriptor.dpa3.tensors import AngleTerms, EdgeTerms
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
        Number of each neighbour among the sorted atoms `(nreal, nnei)`, int64; any atom in empty
        slots.
    incoming
        The edges sorted by neighbour; None if kernels cannot run.
    edge_weight
        Switch w, divided by the edge scale `(nreal, nnei)`; 0 in empty slots.
    direction
        w²·x/r² of the edge vector x, standardised, divided by the square root of the edge scale
        `(nreal, nnei, 3)`; 0 in empty slots.
    plan
        Storage order of angles.
    angle_weight
        Angular switch s of the edges in angles, divided by the fourth root of the angle scale, so
        that s_j·s_k is divided by its square root `(nslots,)`; 0 in empty slots.
    in_angle
        Which slots of the plan take part in angles `(nslots,)`.

    Angles have their own slots, `nslots` in all (see `AnglePlan`).
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
    """Which features later layers still use; only `sequential_update` computes the others."""

    edge: bool
    angle: bool  # never without edges


class RepflowLayer(torch.nn.Module):
    """Updates all features: x′ = α·x + Σ ρ∘u.

    The updates u read the features before the layer, with `sequential_update` the newest ones.
    `update_style` decides about α and ρ, see `_residual_coefficients`.

    | x        | updates u, with the activation f                 | linear layer         |
    |----------|--------------------------------------------------|----------------------|
    | nodes    | f(linear(node))                                  | `node_self_mlp`      |
    |          | f(linear(symmetrized moment of edges))           | `node_sym_linear`    |
    |          | messages: Σ_j w_j·f(linear(node, node_j, edge_j)) | `node_edge_linear`  |
    | edges j  | f(linear(node, node_j, edge_j))                  | `edge_self_linear`   |
    |          | f(linear(message_j))                             | `edge_angle_linear2` |
    | angles jk | f(linear(angle_jk, node, edge_k, edge_j))       | `angle_self_linear`  |

    message_j = s_j·Σ_k s_k·f(linear(angle_jk, node, edge_k, edge_j)) is from angles, with
    `edge_angle_linear1`.

    A linear layer with several features as input is split by the rows of its matrix, so that the
    product of an atom's or edge's features is computed once and then gathered. Layers with the same
    input are multiplied together, see `join`.
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
        self.repflow = repflow
        self.activation = activation
        n = repflow.n_dim
        e = repflow.e_dim
        a = repflow.a_dim
        edge_input = 2 * n + e

        # `place` selects the stream of random numbers, as in deepmd-kit.
        def linear(n_in: int, n_out: int, place: int, *, bias: bool = True) -> Layer:
            return Layer(
                n_in, n_out, timestep=False, dtype=dtype, stream=stream.child(place), bias=bias
            )

        def residual(width: int, *place: int) -> torch.nn.Parameter:
            step_sizes = torch.full((width,), repflow.update_residual, dtype=dtype)
            if repflow.update_residual_init == "norm":
                generator = stream.child(*place).generator()
                step_sizes.normal_(0.0, repflow.update_residual, generator=generator)
            return torch.nn.Parameter(step_sizes)

        trains_steps = repflow.update_style == "res_residual"
        self.node_self_mlp = linear(n, n, 0)
        self.node_sym_linear = linear((n + e) * repflow.axis_neuron, n, 2)
        self.node_edge_linear = linear(edge_input, repflow.message, 4)
        self.edge_self_linear = linear(edge_input, e, 6)
        n_residual = []
        e_residual = []
        a_residual = []
        if trains_steps:
            n_residual = [residual(n, 1), residual(n, 3)]
            n_residual += [residual(n, 5, head) for head in range(repflow.n_multi_edge_message)]
            e_residual = [residual(e, 7)]
        self.a_compress_n_linear: Layer | None = None
        self.a_compress_e_linear: Layer | None = None
        if repflow.linear_compression:
            self.a_compress_n_linear = linear(n, repflow.angle_node, 8, bias=False)
            self.a_compress_e_linear = linear(e, repflow.angle_edge, 9, bias=False)
        if repflow.update_angle:
            self.edge_angle_linear1 = linear(repflow.angle_input, e, 10)
            self.edge_angle_linear2 = linear(e, e, 11)
            self.angle_self_linear = linear(repflow.angle_input, a, 13)
            if trains_steps:
                e_residual.append(residual(e, 12))
                a_residual.append(residual(a, 14))
        self.n_residual = torch.nn.ParameterList(n_residual)
        self.e_residual = torch.nn.ParameterList(e_residual)
        self.a_residual = torch.nn.ParameterList(a_residual)

    def forward(
        self, features: Features, graph: Graph, wanted: Wanted, *, force: bool, overlap: bool = True
    ) -> Features:
        """Return the features after the layer.

        Parameters
        ----------
        features
            The features before the layer.
        graph
            Edges and angles.
        wanted
            Which features to update; the others come back as they are. With `sequential_update`,
            all are updated, because nodes need them.
        force
            Whether forces follow, see `four_passes.run`.
        overlap
            Whether a GPU computes angles on a second stream, at the same time as edges. A layer
            that is computed again in backward passes must not: autograd starts it when the first
            backward operation needs it, on the stream of this operation, and other streams would
            not wait for it.
        """
        if self.repflow.sequential_update:
            return self._one_after_another(features, graph, force=force)
        angle = features.angle
        angle_message = None
        with triton_support.Branches(features.node.device, 2 if overlap else 1) as branches:
            if wanted.edge and angle is not None:
                branches.lend(1, *features, *graph.plan.tensors, graph.angle_weight)
                with branches.chain(1):
                    angle_message, angle = self._run_angles(
                        features, graph, force=force, with_message=True, with_update=wanted.angle
                    )
                branches.take(angle_message, angle)
            message, update, moment = self._run_edges(
                features, graph, force=force, with_message=True, with_update=wanted.edge
            )
            node = self._new_nodes(features.node, message, moment, force=force)
        edge = features.edge
        if update is not None:
            edge = self._new_edges(edge, graph, update, angle_message, force=force)
        return Features(node=node, edge=edge, angle=angle)

    def _one_after_another(self, features: Features, graph: Graph, *, force: bool) -> Features:
        """Return the features after the layer with `sequential_update`.

        The edges are updated first, then the angles, the edges by angles, and the nodes. Each
        update reads the newest features. The settings require `update_angle`, and "res_residual",
        where α is 1 and ρ are the parameters.
        """
        _, update, _ = self._run_edges(
            features, graph, force=force, with_message=False, with_update=True
        )
        assert update is not None
        edge = torch.addcmul(features.edge, update, self.e_residual[0])
        features = features._replace(edge=edge)
        _, angle = self._run_angles(
            features, graph, force=force, with_message=False, with_update=True
        )
        features = features._replace(angle=angle)
        angle_message, _ = self._run_angles(
            features, graph, force=force, with_message=True, with_update=False
        )
        angle_update = self._update_by_angles(edge, graph, angle_message)
        edge = torch.addcmul(edge, angle_update, self.e_residual[1])
        features = features._replace(edge=edge)
        message, _, moment = self._run_edges(
            features, graph, force=force, with_message=True, with_update=False
        )
        node = self._new_nodes(features.node, message, moment, force=force)
        return features._replace(node=node)

    def _run_edges(
        self,
        features: Features,
        graph: Graph,
        *,
        force: bool,
        with_message: bool,
        with_update: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the results of `edges`: the message to each node, the update of edges, moments.

        They are m `(nreal, heads·n_dim)`, y[M:] `(nreal, nnei, e_dim)` and H `(nreal, 3, e_dim +
        n_dim)` there. Without messages m has 0 columns; without an update y[M:] is None.
        """
        n = self.repflow.n_dim
        layers = [self.node_edge_linear] if with_message else []
        if with_update:
            layers.append(self.edge_self_linear)
        matrix, bias = join(layers)
        centre_rows, neighbor_rows, edge_rows = matrix.split([n, n, self.repflow.e_dim])
        # p, q and the table [q, node] are those of `edges`.
        p = torch.addmm(bias, features.node, centre_rows)
        q = torch.mm(features.node, neighbor_rows)
        table = torch.cat([q, features.node], 1)
        operation = Edges(
            neighbor=graph.neighbor,
            activation=self.activation,
            message_columns=self.repflow.message if with_message else 0,
            incoming=graph.incoming,
        )
        terms = EdgeTerms(e=features.edge, p=p, table=table, w=graph.edge_weight, h=graph.direction)
        message, update, moment = run(operation, EdgeInputs(terms, edge_rows), force=force)
        return message, update, moment

    def _new_nodes(self, node: Tensor, message: Tensor, moment: Tensor, *, force: bool) -> Tensor:
        """Return the nodes after the layer, from messages `(nreal, heads·n_dim)` of edges, and H."""
        repflow = self.repflow
        messages = [m.contiguous() for m in message.split(repflow.n_dim, dim=1)]
        if kernels_fit(node, self.activation):
            return self._new_nodes_by_kernels(node, messages, moment, force=force)
        f = self.activation.value
        symmetrized = [  # per block: edges, nodes
            torch.bmm(h[..., : repflow.axis_neuron].transpose(1, 2), h).flatten(1) / 3.0
            for h in moment.split([repflow.e_dim, repflow.n_dim], dim=2)
        ]
        updates = [
            f(_apply(self.node_self_mlp, node)),
            f(_apply(self.node_sym_linear, torch.cat(symmetrized, 1))),
            *messages,  # without activation: `edges` has applied it
        ]
        return _residual_sum(repflow.update_style, node, updates, self.n_residual)

    def _new_nodes_by_kernels(
        self, node: Tensor, messages: list[Tensor], moment: Tensor, *, force: bool
    ) -> Tensor:
        from deepmd_muon.model.descriptor.dpa3.kernels.residual_sums import (
            ResidualSum,
            ResidualSumInputs,
        )
        from deepmd_muon.model.descriptor.dpa3.kernels.symmetrization import (
            Symmetrization,
            SymmetrizationInputs,
        )

        repflow = self.repflow
        symmetrize = Symmetrization(axis=repflow.axis_neuron, edge_columns=repflow.e_dim)
        (symmetrized,) = run(symmetrize, SymmetrizationInputs(moment), force=force)
        alpha, (self_step, symmetric_step, *message_steps) = _residual_coefficients(
            repflow.update_style, self.n_residual, node, 2 + len(messages)
        )
        operation = ResidualSum(activation=self.activation, alpha=alpha, first_layer_reads_x=True)
        self_weight, self_bias, _ = self.node_self_mlp.tensors
        symmetric_weight, symmetric_bias, _ = self.node_sym_linear.tensors
        inputs = ResidualSumInputs(
            x=node,
            terms=tuple(messages),
            layer_inputs=(symmetrized,),
            weights=(self_weight, symmetric_weight),
            biases=(self_bias, symmetric_bias),
            term_steps=tuple(message_steps),
            layer_steps=(self_step, symmetric_step),
        )
        node_new: Tensor
        (node_new,) = run(operation, inputs, force=force)
        return node_new

    def _run_angles(
        self,
        features: Features,
        graph: Graph,
        *,
        force: bool,
        with_message: bool,
        with_update: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the results m and a′ of `angles`: messages to edges, the angles after the layer.

        Each slot gets a message: `(nslots, e_dim)`, or `(nslots, 0)` without. Without an update the
        angles come back as they are. u and t are the terms of `angles` for the first and second
        edge; u contains the term of the centre.
        """
        repflow = self.repflow
        assert features.angle is not None
        layers = [self.edge_angle_linear1] if with_message else []
        if with_update:
            layers.append(self.angle_self_linear)
        matrix, bias = join(layers)
        # In deepmd-kit's order: the second edge before the first.
        angle_rows, centre_rows, second_rows, first_rows = matrix.split(
            [repflow.a_dim, repflow.angle_node, repflow.angle_edge, repflow.angle_edge]
        )
        node = features.node[:, : repflow.angle_node]
        edge_columns = repflow.angle_edge
        if self.a_compress_n_linear is not None:
            node = torch.mm(features.node, self.a_compress_n_linear.matrix)
            edge_columns = repflow.e_dim  # compressed below
        centre_term = torch.addmm(bias, node, centre_rows)
        if graph.plan.padded:
            # Slices, by `pad`: unlike index_select, its backward needs no atomic additions.
            n_near = graph.plan.blocks[0].width
            _, n_slots, e_dim = features.edge.shape
            # Pairs for the last two axes, columns first; 0, or negative to slice.
            padding = (0, edge_columns - e_dim, 0, n_near - n_slots)
            edge = torch.nn.functional.pad(features.edge, padding).flatten(0, 1)
            edge = self._compressed(edge)
            first_term = torch.mm(edge, first_rows).view(-1, n_near, matrix.shape[1])
            u = (first_term + centre_term.unsqueeze(1)).flatten(0, 1)
        else:
            edge = features.edge.flatten(0, 1)[:, :edge_columns].index_select(0, graph.plan.slot)
            edge = self._compressed(edge)
            u = torch.addmm(centre_term.index_select(0, graph.plan.atom), edge, first_rows)
        t = torch.mm(edge, second_rows)
        alpha, (rho,) = _residual_coefficients(
            repflow.update_style, self.a_residual, features.angle, 1
        )
        operation = Angles(
            plan=graph.plan,
            activation=self.activation,
            message_columns=repflow.e_dim if with_message else 0,
            alpha=alpha,
        )
        inputs = AngleInputs(
            terms=AngleTerms(a=features.angle, u=u, t=t, s=graph.angle_weight),
            weight=angle_rows,
            rho=rho if with_update else None,
        )
        message, angle = run(operation, inputs, force=force)
        return message, angle if with_update else features.angle

    def _compressed(self, edge: Tensor) -> Tensor:
        """Return the features of edges `(rows, …)` that enter angles, after a linear map if any."""
        if self.a_compress_e_linear is None:
            return edge
        return torch.mm(edge, self.a_compress_e_linear.matrix)

    def _new_edges(
        self,
        edge: Tensor,
        graph: Graph,
        update: Tensor,
        angle_message: Tensor | None,
        *,
        force: bool,
    ) -> Tensor:
        """Return the edges after the layer, from their update and the messages of the angles."""
        style = self.repflow.update_style
        if angle_message is None:
            return _residual_sum(style, edge, [update], self.e_residual)
        # Kernels have f(b) as update of an edge without angles (smooth), and find the rows of an
        # atom's leading edges by their number (padded).
        smooth_and_padded = self.repflow.smooth_edge_update and graph.plan.padded
        if smooth_and_padded and kernels_fit(edge, self.activation):
            return self._new_edges_by_kernels(edge, graph, update, angle_message, force=force)
        angle_update = self._update_by_angles(edge, graph, angle_message)
        return _residual_sum(style, edge, [update, angle_update], self.e_residual)

    def _new_edges_by_kernels(
        self, edge: Tensor, graph: Graph, update: Tensor, angle_message: Tensor, *, force: bool
    ) -> Tensor:
        from deepmd_muon.model.descriptor.dpa3.kernels.residual_sums import (
            ResidualSum,
            ResidualSumInputs,
        )

        alpha, (update_step, angle_step) = _residual_coefficients(
            self.repflow.update_style, self.e_residual, edge, 2
        )
        operation = ResidualSum(
            activation=self.activation,
            alpha=alpha,
            n_slots=edge.shape[1],
            n_near=graph.plan.blocks[0].width,
        )
        weight, bias, _ = self.edge_angle_linear2.tensors
        inputs = ResidualSumInputs(
            x=edge.flatten(0, 1),
            terms=(update.flatten(0, 1),),
            layer_inputs=(angle_message,),
            weights=(weight,),
            biases=(bias,),
            term_steps=(update_step,),
            layer_steps=(angle_step,),
        )
        (edge_new,) = run(operation, inputs, force=force)
        return edge_new.view_as(edge)  # type: ignore[no-any-return]

    def _update_by_angles(self, edge: Tensor, graph: Graph, angle_message: Tensor) -> Tensor:
        """Return the update of the edges by the messages of the angles, f(linear(message)).

        It has the shape of `edge` `(nreal, nnei, e_dim)`; messages `(nslots, e_dim)`.
        """
        f = self.activation.value
        linear = self.edge_angle_linear2
        slot = graph.plan.slot
        rows = edge.flatten(0, 1)
        if self.repflow.smooth_edge_update:
            # The message of an edge without angles is 0; its update is f(b).
            update = f(linear.tensors.bias).expand_as(rows)
            update = update.index_copy(0, slot, f(_apply(linear, angle_message)))
        else:
            # The message of an edge without angles is its features.
            in_angle = graph.in_angle.unsqueeze(1)
            message = torch.where(in_angle, angle_message, rows.index_select(0, slot))
            update = f(_apply(linear, rows.index_copy(0, slot, message)))
        return update.view_as(edge)


def join(layers: list[Layer]) -> tuple[Tensor, Tensor]:
    """Return matrix and bias of layers with the same input, the outputs next to each other."""
    matrix = torch.cat([layer.matrix for layer in layers], 1)
    bias = torch.cat([layer.tensors.bias for layer in layers])
    return matrix, bias


def kernels_fit(x: Tensor, activation: Activation) -> bool:
    """Return whether kernels can run on features x, if there are any, and know the activation."""
    return activation.formula is not None and x.numel() > 0 and triton_support.usable(x.device)


def _apply(layer: Layer, x: Tensor) -> Tensor:
    return torch.addmm(layer.tensors.bias, x, layer.matrix)


def _residual_sum(
    style: str, x: Tensor, updates: list[Tensor], step_sizes: torch.nn.ParameterList
) -> Tensor:
    """Return α·x + Σ ρ∘u of the updates u, with the α and ρ of `_residual_coefficients`."""
    if style == "res_residual":
        for step_size, update in zip(step_sizes, updates, strict=True):
            x = torch.addcmul(x, update, step_size)
        return x
    total = updates[0]
    for update in updates[1:]:
        total = total + update
    if style == "res_avg":
        return (x + total) / math.sqrt(len(updates) + 1)
    return x + total / math.sqrt(len(updates))


def _residual_coefficients(
    style: str, step_sizes: torch.nn.ParameterList, x: Tensor, count: int
) -> tuple[float, list[Tensor]]:
    """Return α, and ρ `(width,)` of each of `count` updates of x `(…, width)`.

    res_residual: α = 1, and ρ are the trained step sizes. res_avg: α = ρ = 1/√(count + 1).
    res_incr: α = 1, ρ = 1/√count.
    """
    if style == "res_residual":
        return 1.0, list(step_sizes)
    if style == "res_avg":
        factor = 1.0 / math.sqrt(count + 1)
        return factor, [x.new_full(x.shape[-1:], factor)] * count
    return 1.0, [x.new_full(x.shape[-1:], 1.0 / math.sqrt(count))] * count
