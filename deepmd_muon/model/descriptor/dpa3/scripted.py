"""DPA-3 for TorchScript; forces come from autograd within the file, ranks exchange node features between layers."""

import math
from typing import Final, NamedTuple

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.dpa3.geometry import COSINE_SCALE, DISTANCE_GUARD, weigh
from deepmd_muon.model.descriptor.dpa3.layer import RepflowLayer
from deepmd_muon.model.descriptor.dpa3.module import DPA3
from deepmd_muon.model.nn.networks import Layer
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, add_product, product, value_of
from deepmd_muon.model.scripted.exchange import BORDER_OP, declare_operators, neighbor_rows
from deepmd_muon.model.scripted.near import Near, Request


class Tape(NamedTuple):
    """The graph from edge vectors to descriptor."""

    vectors: torch.Tensor
    descriptor: torch.Tensor


class Switch(NamedTuple):
    """The arguments of `geometry.weigh`."""

    start: float
    end: float
    exponential: bool


class Split(NamedTuple):
    """A linear layer on several things side by side, its matrix split by their rows.

    Attributes
    ----------
    parts
        Of an edge: centre, neighbour, edge. Of an angle: angle, centre, second edge, first edge.
    bias
        Added once.
    """

    parts: list[torch.Tensor]
    bias: torch.Tensor


class Residual(NamedTuple):
    """x′ = carry·x + Σ weights[k]∘u_k."""

    carry: float
    weights: torch.Tensor


class LayerWeights(NamedTuple):
    """The weights of one `RepflowLayer`; messages come first in the outputs of `edge` and `angle`."""

    node_self: Dense
    node_symmetric: Dense
    edge: Split
    angle: Split
    edge_from_angle: Dense
    node_residual: Residual
    edge_residual: Residual
    angle_residual: Residual


class Graph(NamedTuple):
    """Edges and angles and their functions of positions; see `layer.Graph`.

    Angles belong to the first columns: `angle_weight` and `in_angle` `(ncentre, nslots)`.
    """

    edge_weight: torch.Tensor
    direction: torch.Tensor
    angle_weight: torch.Tensor
    in_angle: torch.Tensor


def add_updates(residual: Residual, x: torch.Tensor, updates: list[torch.Tensor]) -> torch.Tensor:
    """Return features with their updates added."""
    x = x * residual.carry
    for index in range(len(updates)):
        x = torch.addcmul(x, updates[index], residual.weights[index])
    return x


def rows_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return x·matrix, from x `(…, n)`."""
    rows: torch.Tensor = product(x.reshape([-1, matrix.shape[0]]), matrix).unflatten(
        0, list(x.shape[:-1])
    )
    return rows


def apply_dense(layer: Dense, x: torch.Tensor) -> torch.Tensor:
    """Return x·matrix + bias."""
    return rows_product(x, layer.matrix) + layer.bias


def update_nodes(
    act: Act,
    weights: LayerWeights,
    node: torch.Tensor,
    plain: list[torch.Tensor],
    moments: list[torch.Tensor],
    axis: int,
) -> torch.Tensor:
    """Return the nodes after a layer.

    `plain` holds the terms that are added as they are, `moments` H of edges and neighbours `(ncentre, 3, width)`.
    """
    symmetric = [
        torch.bmm(part[..., :axis].transpose(1, 2), part).flatten(1) / 3.0 for part in moments
    ]
    updates = [
        value_of(act, apply_dense(weights.node_self, node)),
        value_of(act, apply_dense(weights.node_symmetric, torch.cat(symmetric, 1))),
    ]
    updates.extend(plain)
    return add_updates(weights.node_residual, node, updates)


def columns_of(split: Split, first: int, end: int) -> Split:
    """Return the part of a split layer that computes some of its outputs."""
    return Split([part[:, first:end] for part in split.parts], split.bias[first:end])


def angle_values(
    act: Act,
    split: Split,
    node: torch.Tensor,
    edge: torch.Tensor,
    angle: torch.Tensor,
    graph: Graph,
) -> torch.Tensor:
    """Return a layer's activations of all angles `(ncentre, nslots, nslots, features)`."""
    own, centre, second, first = split.parts
    seen = edge[:, : graph.in_angle.shape[1], : first.shape[0]]
    per_atom = product(node[:, : centre.shape[0]], centre) + split.bias
    u = rows_product(seen, first) + per_atom.unsqueeze(1)
    z = rows_product(angle, own) + u.unsqueeze(2) + rows_product(seen, second).unsqueeze(1)
    values: torch.Tensor = value_of(act, z)
    return values


def sum_over_angles(y: torch.Tensor, graph: Graph) -> torch.Tensor:
    """Return the message of angles to their first edge `(ncentre, nslots, features)`."""
    s = graph.angle_weight
    return torch.matmul(s[:, None, None, :], y).squeeze(2) * s.unsqueeze(2)


def update_angles(
    act: Act,
    weights: LayerWeights,
    node: torch.Tensor,
    edge: torch.Tensor,
    angle: torch.Tensor,
    graph: Graph,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the message of angles to their first edge `(ncentre, nslots, e_dim)`, and the angles after the layer."""
    e_dim = edge.shape[2]
    y = angle_values(act, weights.angle, node, edge, angle, graph)
    reduced = sum_over_angles(y[..., :e_dim], graph)
    if y.shape[3] > e_dim:
        angle = add_updates(weights.angle_residual, angle, [y[..., e_dim:]])
    return reduced, angle


def edge_values(
    act: Act, split: Split, node: torch.Tensor, edge: torch.Tensor, near: Near
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's activations of all edges `(ncentre, nnei, features)`, and the nodes of neighbours."""
    centre, other, own = split.parts
    p = add_product(split.bias, node, centre)
    gathered = neighbor_rows(torch.cat([product(node, other), node], 1), near)
    features = own.shape[1]
    y = value_of(act, rows_product(edge, own) + p.unsqueeze(1) + gathered[..., :features])
    return y, gathered[..., features:]


def edge_from_angles(
    act: Act,
    linear: Dense,
    edge: torch.Tensor,
    reduced: torch.Tensor,
    in_angle: torch.Tensor,
    smooth: bool,
) -> torch.Tensor:
    """Return the update of every edge by its angles; see `RepflowLayer._edge_features`."""
    slots = reduced.shape[1]
    rest = edge.shape[1] - slots
    if smooth:
        others = (
            value_of(act, linear.bias.unsqueeze(0)).unsqueeze(0).expand(edge.shape[0], rest, -1)
        )
        return torch.cat([value_of(act, apply_dense(linear, reduced)), others], 1)
    reduced = torch.where(in_angle.unsqueeze(2), reduced, edge[:, :slots])
    return value_of(act, apply_dense(linear, torch.cat([reduced, edge[:, slots:]], 1)))


class ScriptedDPA3(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    #: The settings that this form has.
    covers = Coverage(
        frozenset(
            {
                *("concat_output_tebd", "activation_function", "precision", "trainable", "seed"),
                *("use_tebd_bias", "exclude_types", "env_protection"),
                *("repflow/e_rcut", "repflow/e_rcut_smth"),
                *("repflow/e_sel", "repflow/a_rcut", "repflow/a_rcut_smth", "repflow/a_sel"),
                *("repflow/n_dim", "repflow/e_dim", "repflow/a_dim", "repflow/nlayers"),
                *("repflow/a_compress_rate", "repflow/a_compress_e_rate"),
                *("repflow/a_compress_use_split", "repflow/axis_neuron", "repflow/fix_stat_std"),
                *("repflow/skip_stat", "repflow/update_angle", "repflow/update_style"),
                *("repflow/update_residual", "repflow/update_residual_init"),
                *("repflow/smooth_edge_update", "repflow/edge_init_use_dist"),
                *("repflow/use_exp_switch", "repflow/use_dynamic_sel"),
                *("repflow/sel_reduce_factor", "repflow/n_multi_edge_message"),
                "repflow/sequential_update",
            }
        )
    )
    message_passing: Final[bool] = True
    guard: Final[float] = DISTANCE_GUARD
    cosine_scale: Final[float] = COSINE_SCALE
    request: Request
    act: Act
    edge_switch: Switch
    angle_switch: Switch
    layers: list[LayerWeights]
    table: torch.Tensor
    scale: torch.Tensor
    edge_matrix: torch.Tensor
    edge_bias: torch.Tensor
    angle_matrix: torch.Tensor

    def __init__(self, module: DPA3) -> None:
        super().__init__()
        declare_operators(BORDER_OP)
        own, repflow, block = module.settings, module.settings.repflow, module.repflows
        self.slots, self.angle_slots = repflow.slots
        self.edge_scale, self.angle_scale = repflow.scales
        self.axis, self.n_dim, self.message = repflow.axis_neuron, repflow.n_dim, repflow.message
        self.one_after_another = repflow.sequential_update
        self.protection = own.env_protection
        self.start_from_length, self.with_angles = repflow.edge_init_use_dist, repflow.update_angle
        self.smooth, self.append_types = repflow.smooth_edge_update, own.concat_output_tebd
        self.act = act_of(own.activation_function)
        self.edge_switch = Switch(repflow.e_rcut_smth, repflow.e_rcut, repflow.use_exp_switch)
        self.angle_switch = Switch(repflow.a_rcut_smth, repflow.a_rcut, repflow.use_exp_switch)
        with torch.no_grad():
            table = module.type_embedding().detach().clone()
            last = repflow.nlayers - 1
            whole = repflow.sequential_update
            self.layers = [
                layer_weights(layer, edge=whole or index < last, angle=whole or index < last - 1)  # type: ignore[arg-type]
                for index, layer in enumerate(block.layers)
            ]
        self.request = Request(repflow.e_rcut, [self.slots], False, True, len(table))
        self.register_buffer("table", table)
        self.register_buffer("scale", 1.0 / block.stddev.detach()[:, 0].double())
        self.register_buffer("edge_matrix", block.edge_embd.matrix.detach()[0].clone())
        self.register_buffer("edge_bias", block.edge_embd.tensors.bias.detach().clone())
        self.register_buffer("angle_matrix", block.angle_embd.matrix.detach().clone())

    @torch.jit.export
    def describe(self, near: Near) -> tuple[torch.Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        vectors = near.vectors.detach().requires_grad_(True)
        graph, angle, radial = self._graph(near, vectors)
        types = self.table[near.kind]
        node = value_of(self.act, types)
        edge = radial.unsqueeze(-1) * self.edge_matrix + self.edge_bias
        if not self.start_from_length:
            edge = value_of(self.act, edge)
        for index in range(len(self.layers)):
            weights = self.layers[index]
            if self.one_after_another:
                node, edge, angle = self._sequential(weights, near, graph, node, edge, angle)
                continue
            y, neighbors = edge_values(self.act, weights.edge, node, edge, near)
            old = node
            node = self._nodes(weights, graph, node, edge, y[..., : self.message], neighbors)
            if y.shape[2] > self.message:
                updates = [y[..., self.message :]]
                if self.with_angles:
                    reduced, angle = update_angles(self.act, weights, old, edge, angle, graph)
                    updates.append(self._by_angles(weights, graph, edge, reduced))
                edge = add_updates(weights.edge_residual, edge, updates)
        descriptor = torch.cat([node, types], 1) if self.append_types else node
        return descriptor.detach(), Tape(vectors, descriptor)

    def _sequential(
        self,
        weights: LayerWeights,
        near: Near,
        graph: Graph,
        node: torch.Tensor,
        edge: torch.Tensor,
        angle: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return nodes, edges and angles after a layer; see `RepflowLayer._one_after_another`."""
        e_dim = edge.shape[2]
        features = weights.edge.bias.shape[0]
        by_itself = columns_of(weights.edge, self.message, features)
        y, neighbors = edge_values(self.act, by_itself, node, edge, near)
        edge = torch.addcmul(edge, y, weights.edge_residual.weights[0])
        update = columns_of(weights.angle, e_dim, weights.angle.bias.shape[0])
        y = angle_values(self.act, update, node, edge, angle, graph)
        angle = add_updates(weights.angle_residual, angle, [y])
        message = columns_of(weights.angle, 0, e_dim)
        y = angle_values(self.act, message, node, edge, angle, graph)
        of_angles = self._by_angles(weights, graph, edge, sum_over_angles(y, graph))
        edge = torch.addcmul(edge, of_angles, weights.edge_residual.weights[1])
        to_nodes = columns_of(weights.edge, 0, self.message)
        y, neighbors = edge_values(self.act, to_nodes, node, edge, near)
        return self._nodes(weights, graph, node, edge, y, neighbors), edge, angle

    def _nodes(
        self,
        weights: LayerWeights,
        graph: Graph,
        node: torch.Tensor,
        edge: torch.Tensor,
        y: torch.Tensor,
        neighbors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the nodes after a layer, from the edges' activations y for them, and the nodes of neighbours."""
        message = torch.bmm(graph.edge_weight.unsqueeze(1), y).squeeze(1)
        across = graph.direction.transpose(1, 2)
        moments = [torch.bmm(across, edge), torch.bmm(across, neighbors)]
        messages = message.split(self.n_dim, 1)
        return update_nodes(self.act, weights, node, messages, moments, self.axis)

    def _by_angles(
        self, weights: LayerWeights, graph: Graph, edge: torch.Tensor, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return the update of every edge by the messages of its angles."""
        return edge_from_angles(
            self.act, weights.edge_from_angle, edge, reduced, graph.in_angle, self.smooth
        )

    def _graph(self, near: Near, vectors: torch.Tensor) -> tuple[Graph, torch.Tensor, torch.Tensor]:
        """Return the graph, the angles `(ncentre, nslots, nslots, a_dim)` and the number every edge starts from."""
        dtype = self.table.dtype
        empty = near.neighbor < 0
        edges = torch.where(empty.unsqueeze(-1), self.edge_switch.end, vectors)
        distance = edges.square().sum(-1).sqrt()
        weight = weigh(
            distance, self.edge_switch.start, self.edge_switch.end, self.edge_switch.exponential
        ).masked_fill(empty, 0.0)
        scale = self.scale[near.kind].unsqueeze(1)
        protected = distance + self.protection
        per_distance = weight / protected
        direction = edges * (per_distance / protected).unsqueeze(-1) * scale[..., 1:]
        radial = distance if self.start_from_length else per_distance * scale[..., 0]
        inside = (distance.detach() < self.angle_switch.end) & ~empty
        last = inside.any(0).nonzero()
        slots = 0 if last.numel() == 0 else min(int(last.max()) + 1, self.angle_slots)
        short, in_angle = distance[:, :slots], inside[:, :slots]
        angle_weight = weigh(
            short, self.angle_switch.start, self.angle_switch.end, self.angle_switch.exponential
        ).masked_fill(~in_angle, 0.0)
        unit = edges[:, :slots] / (short + self.guard).unsqueeze(-1)
        cosine = torch.bmm(unit, unit.transpose(1, 2)) * self.cosine_scale
        graph = Graph(
            (weight / self.edge_scale).to(dtype),
            (direction * weight.unsqueeze(-1) * self.edge_scale**-0.5).to(dtype),
            (angle_weight * self.angle_scale**-0.25).to(dtype),
            in_angle,
        )
        return graph, cosine.to(dtype).unsqueeze(-1) * self.angle_matrix[0], radial.to(dtype)

    @torch.jit.export
    def pullback(self, adjoint: torch.Tensor, tape: Tape) -> torch.Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        outputs: list[torch.Tensor | None] = [adjoint]
        slope = torch.autograd.grad([tape.descriptor], [tape.vectors], outputs)[0]
        assert slope is not None
        return slope


def layer_weights(layer: RepflowLayer, *, edge: bool, angle: bool) -> LayerWeights:
    """Return copies of a layer's weights; `edge` and `angle` say which features later layers still use."""
    repflow = layer.repflow
    n, e = repflow.n_dim, repflow.e_dim
    none = torch.zeros(0, dtype=layer.node_self_mlp.matrix.dtype)
    empty = Split([none, none, none, none], none)
    with_angles = repflow.update_angle
    of_edge = [layer.node_edge_linear, layer.edge_self_linear] if edge else [layer.node_edge_linear]
    angles = empty
    if with_angles:
        of_angle = (
            [layer.edge_angle_linear1, layer.angle_self_linear]
            if angle
            else [layer.edge_angle_linear1]
        )
        edges = repflow.angle_edge
        angles = split(of_angle, [repflow.a_dim, repflow.angle_node, edges, edges])
        if layer.a_compress_n_linear is not None and layer.a_compress_e_linear is not None:
            own, *seen = angles.parts  # of the compressed node and edges
            maps = [layer.a_compress_n_linear.matrix] + [layer.a_compress_e_linear.matrix] * 2
            whole = [map_.detach() @ part for map_, part in zip(maps, seen, strict=True)]
            angles = angles._replace(parts=[own, *whole])
    return LayerWeights(
        dense(layer.node_self_mlp),
        dense(layer.node_sym_linear),
        split(of_edge, [n, n, e]),
        angles,
        dense(layer.edge_angle_linear2) if with_angles else Dense(none, none, None, 0),
        residual(repflow.update_style, layer.n_residual, 2 + repflow.n_multi_edge_message, n, none),
        residual(repflow.update_style, layer.e_residual, 2 if with_angles else 1, e, none),
        residual(repflow.update_style, layer.a_residual, 1, repflow.a_dim, none),
    )


def dense(layer: Layer) -> Dense:
    """Return copies of a linear layer's matrix and bias."""
    return Dense(layer.matrix.detach().clone(), layer.tensors.bias.detach().clone(), None, 0)


def split(layers: list[Layer], rows: list[int]) -> Split:
    """Join layers on the same input and split their matrix by rows."""
    matrix = torch.cat([layer.matrix for layer in layers], 1)
    bias = torch.cat([layer.tensors.bias for layer in layers])
    return Split([part.contiguous() for part in matrix.split(rows)], bias)


def residual(
    style: str, weights: torch.nn.ParameterList, count: int, width: int, like: torch.Tensor
) -> Residual:
    """Return how features and `count` updates are added: by trained vectors, averaged, or incremented."""
    if style == "res_residual":
        trained = [weight.detach().clone() for weight in weights]
        return Residual(1.0, torch.stack(trained) if trained else like)
    carry, factor = (
        (1 / math.sqrt(count + 1),) * 2 if style == "res_avg" else (1.0, 1 / math.sqrt(count))
    )
    return Residual(carry, like.new_full((count, width), factor))
