"""DPA-3 for TorchScript: autograd inside the file gives forces.

Between layers, ranks exchange the features of nodes. `layer` explains the formulas.
"""

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.dpa3.geometry import COSINE_SCALE, DISTANCE_GUARD, weigh
from deepmd_muon.model.descriptor.dpa3.layer import RepflowLayer, join
from deepmd_muon.model.descriptor.dpa3.module import DPA3
from deepmd_muon.model.nn.networks import Layer
from deepmd_muon.model.scripted.dense import Act, Dense, act_of, add_product, product, value_of
from deepmd_muon.model.scripted.exchange import BORDER_OP, declare_operators, neighbor_rows
from deepmd_muon.model.scripted.near import Near, Request


class Tape(NamedTuple):
    """The graph from edge vectors to descriptor."""

    vectors: Tensor
    descriptor: Tensor


class Switch(NamedTuple):
    """The arguments of `geometry.weigh`."""

    start: float
    end: float
    exponential: bool


class Split(NamedTuple):
    """A linear layer whose input is several features next to each other.

    Attributes
    ----------
    blocks
        The rows of its matrix by feature. Of an edge: centre, neighbour, edge. Of an angle: angle,
        centre, second edge, first edge.
    bias
        Added once.
    """

    blocks: list[Tensor]
    bias: Tensor


class Residual(NamedTuple):
    """x′ = carry·x + Σ weights[k]∘u_k."""

    carry: float
    weights: Tensor


class LayerWeights(NamedTuple):
    """The weights of one `RepflowLayer`; outputs of `edge` and `angle` start with the messages."""

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

    Angles belong to the first columns: `angle_weight` and `in_angle` are `(ncentre, nslots)`.
    """

    edge_weight: Tensor
    direction: Tensor
    angle_weight: Tensor
    in_angle: Tensor


class Features(NamedTuple):
    """The features that layers update."""

    node: Tensor  # (ncentre, n_dim)
    edge: Tensor  # (ncentre, nnei, e_dim)
    angle: Tensor  # (ncentre, nslots, nslots, a_dim)


class Geometry(NamedTuple):
    """The functions of positions that the layers start from."""

    graph: Graph
    radial: Tensor  # (ncentre, nnei): the number that an edge starts from
    cosine: Tensor  # (ncentre, nslots, nslots), scaled: the number that an angle starts from


# ----- functions of the program ------------------------------------------------------------------


def add_updates(residual: Residual, x: Tensor, updates: list[Tensor]) -> Tensor:
    """Return features with their updates added."""
    x = x * residual.carry
    for index in range(len(updates)):
        x = torch.addcmul(x, updates[index], residual.weights[index])
    return x


def rows_product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x·matrix, from x `(…, n)`."""
    rows = product(x.reshape([-1, matrix.shape[0]]), matrix)
    out: Tensor = rows.unflatten(0, list(x.shape[:-1]))
    return out


def apply_dense(layer: Dense, x: Tensor) -> Tensor:
    """Return x·matrix + bias."""
    return rows_product(x, layer.matrix) + layer.bias


def take_outputs(split: Split, start: int, end: int) -> Split:
    """Return the layer that computes some outputs of a split layer."""
    return Split([block[:, start:end] for block in split.blocks], split.bias[start:end])


def sum_over_angles(y: Tensor, graph: Graph) -> Tensor:
    """Return the messages of angles to their first edge `(ncentre, nslots, features)`.

    They are Σ_k s_j·s_k·y_jk, from y `(ncentre, nslots, nslots, features)`.
    """
    s = graph.angle_weight
    return torch.matmul(s[:, None, None, :], y).squeeze(2) * s.unsqueeze(2)


# ----- the program -------------------------------------------------------------------------------


class ScriptedDPA3(torch.nn.Module):
    """Descriptor of a frozen file; see `deepmd_muon.model.scripted.interface`."""

    #: The settings that this form has.
    covers = Coverage(
        frozenset(
            {
                "concat_output_tebd",
                "activation_function",
                "precision",
                "trainable",
                "seed",
                "use_tebd_bias",
                "exclude_types",
                "env_protection",
                "repflow/e_rcut",
                "repflow/e_rcut_smth",
                "repflow/e_sel",
                "repflow/a_rcut",
                "repflow/a_rcut_smth",
                "repflow/a_sel",
                "repflow/n_dim",
                "repflow/e_dim",
                "repflow/a_dim",
                "repflow/nlayers",
                "repflow/axis_neuron",
                "repflow/a_compress_rate",
                "repflow/a_compress_e_rate",
                "repflow/a_compress_use_split",
                "repflow/fix_stat_std",
                "repflow/skip_stat",
                "repflow/update_angle",
                "repflow/update_style",
                "repflow/update_residual",
                "repflow/update_residual_init",
                "repflow/smooth_edge_update",
                "repflow/edge_init_use_dist",
                "repflow/use_exp_switch",
                "repflow/use_dynamic_sel",
                "repflow/sel_reduce_factor",
                "repflow/n_multi_edge_message",
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
    table: Tensor
    scale: Tensor
    edge_matrix: Tensor
    edge_bias: Tensor
    angle_matrix: Tensor

    def __init__(self, module: DPA3) -> None:
        super().__init__()
        declare_operators(BORDER_OP)
        settings = module.settings
        repflow = settings.repflow
        block = module.repflows
        n_slots, self.angle_slots = repflow.slots
        self.edge_scale, self.angle_scale = repflow.scales
        self.axis = repflow.axis_neuron
        self.n_dim = repflow.n_dim
        self.message = repflow.message
        self.one_after_another = repflow.sequential_update
        self.protection = settings.env_protection
        self.start_from_length = repflow.edge_init_use_dist
        self.with_angles = repflow.update_angle
        self.smooth = repflow.smooth_edge_update
        self.append_types = settings.concat_output_tebd
        self.act = act_of(settings.activation_function)
        self.edge_switch = Switch(repflow.e_rcut_smth, repflow.e_rcut, repflow.use_exp_switch)
        self.angle_switch = Switch(repflow.a_rcut_smth, repflow.a_rcut, repflow.use_exp_switch)
        with torch.no_grad():
            table = module.type_embedding().detach().clone()
            last = repflow.nlayers - 1
            self.layers = []
            for index, layer in enumerate(block.layers):
                assert isinstance(layer, RepflowLayer)
                update_edge = repflow.sequential_update or index < last
                update_angle = repflow.sequential_update or index < last - 1
                self.layers.append(
                    layer_weights(layer, update_edge=update_edge, update_angle=update_angle)
                )
        self.request = Request(
            rcut=repflow.e_rcut, sel=[n_slots], by_type=False, sort=True, ntypes=len(table)
        )
        self.register_buffer("table", table)
        self.register_buffer("scale", 1.0 / block.stddev.detach()[:, 0].double())
        self.register_buffer("edge_matrix", block.edge_embd.matrix.detach()[0].clone())
        self.register_buffer("edge_bias", block.edge_embd.tensors.bias.detach().clone())
        self.register_buffer("angle_matrix", block.angle_embd.matrix.detach().clone())

    @torch.jit.export
    def describe(self, near: Near) -> tuple[Tensor, Tape]:
        """Return D `(ncentre, dim_out)` and the tape."""
        vectors = near.vectors.detach().requires_grad_(True)
        geometry = self._geometry(near, vectors)
        types = self.table[near.kind]
        edge = geometry.radial.unsqueeze(-1) * self.edge_matrix + self.edge_bias
        if not self.start_from_length:
            edge = value_of(self.act, edge)
        features = Features(
            node=value_of(self.act, types),
            edge=edge,
            angle=geometry.cosine.unsqueeze(-1) * self.angle_matrix[0],
        )
        for index in range(len(self.layers)):
            weights = self.layers[index]
            if self.one_after_another:
                features = self._update_one_after_another(weights, near, geometry.graph, features)
            else:
                features = self._update_at_once(weights, near, geometry.graph, features)
        descriptor = features.node
        if self.append_types:
            descriptor = torch.cat([descriptor, types], 1)
        return descriptor.detach(), Tape(vectors, descriptor)

    def _update_at_once(
        self, weights: LayerWeights, near: Near, graph: Graph, features: Features
    ) -> Features:
        """Return the features after a layer that updates all from those before it."""
        edge = features.edge
        angle = features.angle
        y, neighbors = self._edge_values(weights.edge, near, features)
        node = self._update_nodes(weights, graph, features, y[..., : self.message], neighbors)
        if y.shape[2] > self.message:
            updates = [y[..., self.message :]]
            if self.with_angles:
                e_dim = edge.shape[2]
                angle_y = self._angle_values(weights.angle, graph, features)
                message = sum_over_angles(angle_y[..., :e_dim], graph)
                if angle_y.shape[3] > e_dim:
                    angle = add_updates(weights.angle_residual, angle, [angle_y[..., e_dim:]])
                updates.append(self._update_by_angles(weights, graph, edge, message))
            edge = add_updates(weights.edge_residual, edge, updates)
        return Features(node=node, edge=edge, angle=angle)

    def _update_one_after_another(
        self, weights: LayerWeights, near: Near, graph: Graph, features: Features
    ) -> Features:
        """Return the features after a layer; see `RepflowLayer._one_after_another`."""
        node = features.node
        angle = features.angle
        e_dim = features.edge.shape[2]
        edge_update = take_outputs(weights.edge, self.message, weights.edge.bias.shape[0])
        y, _ = self._edge_values(edge_update, near, features)
        edge = torch.addcmul(features.edge, y, weights.edge_residual.weights[0])
        angle_update = take_outputs(weights.angle, e_dim, weights.angle.bias.shape[0])
        y = self._angle_values(angle_update, graph, Features(node, edge, angle))
        angle = add_updates(weights.angle_residual, angle, [y])
        angle_message = take_outputs(weights.angle, 0, e_dim)
        y = self._angle_values(angle_message, graph, Features(node, edge, angle))
        update = self._update_by_angles(weights, graph, edge, sum_over_angles(y, graph))
        edge = torch.addcmul(edge, update, weights.edge_residual.weights[1])
        features = Features(node, edge, angle)
        edge_message = take_outputs(weights.edge, 0, self.message)
        y, neighbors = self._edge_values(edge_message, near, features)
        node = self._update_nodes(weights, graph, features, y, neighbors)
        return Features(node, edge, angle)

    def _edge_values(self, split: Split, near: Near, features: Features) -> tuple[Tensor, Tensor]:
        """Return a layer's activations of all edges, and the nodes of neighbours.

        Their shapes are `(ncentre, nnei, features)` and `(ncentre, nnei, n_dim)`.
        """
        centre_rows, neighbor_matrix, edge_rows = split.blocks
        node = features.node
        p = add_product(split.bias, node, centre_rows)
        table = torch.cat([product(node, neighbor_matrix), node], 1)
        gathered = neighbor_rows(table, near)
        n_outputs = edge_rows.shape[1]
        z = rows_product(features.edge, edge_rows) + p.unsqueeze(1) + gathered[..., :n_outputs]
        return value_of(self.act, z), gathered[..., n_outputs:]

    def _angle_values(self, split: Split, graph: Graph, features: Features) -> Tensor:
        """Return a layer's activations of all angles `(ncentre, nslots, nslots, features)`."""
        angle_rows, centre_rows, second_rows, first_rows = split.blocks
        edge = features.edge[:, : graph.in_angle.shape[1], : first_rows.shape[0]]
        node = features.node[:, : centre_rows.shape[0]]
        centre_term = product(node, centre_rows) + split.bias
        u = rows_product(edge, first_rows) + centre_term.unsqueeze(1)
        t = rows_product(edge, second_rows)
        z = rows_product(features.angle, angle_rows) + u.unsqueeze(2) + t.unsqueeze(1)
        y: Tensor = value_of(self.act, z)
        return y

    def _update_nodes(
        self,
        weights: LayerWeights,
        graph: Graph,
        features: Features,
        y: Tensor,
        neighbors: Tensor,
    ) -> Tensor:
        """Return the nodes after a layer.

        y are the edges' activations for messages, `neighbors` the nodes of neighbours.
        """
        message = torch.bmm(graph.edge_weight.unsqueeze(1), y).squeeze(1)
        across = graph.direction.transpose(1, 2)
        moments = [torch.bmm(across, features.edge), torch.bmm(across, neighbors)]
        squares = [
            torch.bmm(moment[..., : self.axis].transpose(1, 2), moment).flatten(1) / 3.0
            for moment in moments
        ]
        updates = [
            value_of(self.act, apply_dense(weights.node_self, features.node)),
            value_of(self.act, apply_dense(weights.node_symmetric, torch.cat(squares, 1))),
        ]
        updates.extend(message.split(self.n_dim, 1))
        return add_updates(weights.node_residual, features.node, updates)

    def _update_by_angles(
        self, weights: LayerWeights, graph: Graph, edge: Tensor, message: Tensor
    ) -> Tensor:
        """Return the update of every edge by messages of angles `(ncentre, nslots, e_dim)`.

        See `RepflowLayer._update_by_angles`.
        """
        linear = weights.edge_from_angle
        n_slots = message.shape[1]
        if self.smooth:
            without = value_of(self.act, linear.bias.unsqueeze(0)).unsqueeze(0)
            without = without.expand(edge.shape[0], edge.shape[1] - n_slots, -1)
            return torch.cat([value_of(self.act, apply_dense(linear, message)), without], 1)
        message = torch.where(graph.in_angle.unsqueeze(2), message, edge[:, :n_slots])
        message = torch.cat([message, edge[:, n_slots:]], 1)
        update: Tensor = value_of(self.act, apply_dense(linear, message))
        return update

    def _geometry(self, near: Near, vectors: Tensor) -> Geometry:
        """Return the graph, and the numbers that edges and angles start from."""
        dtype = self.table.dtype
        edge_switch = self.edge_switch
        angle_switch = self.angle_switch
        empty = near.neighbor < 0
        # Empty slots get a harmless distance; their weight is 0.
        edges = torch.where(empty.unsqueeze(-1), edge_switch.end, vectors)
        distance = edges.square().sum(-1).sqrt()
        weight = weigh(distance, edge_switch.start, edge_switch.end, edge_switch.exponential)
        weight = weight.masked_fill(empty, 0.0)
        scale = self.scale[near.kind].unsqueeze(1)
        protected = distance + self.protection
        per_distance = weight / protected
        direction = edges * (per_distance / protected).unsqueeze(-1) * scale[..., 1:]
        radial = distance if self.start_from_length else per_distance * scale[..., 0]
        # Slots for angles: up to the last column in which some atom has a neighbour near enough.
        is_near = (distance.detach() < angle_switch.end) & ~empty
        columns = is_near.any(0).nonzero()
        n_slots = 0 if columns.numel() == 0 else min(int(columns.max()) + 1, self.angle_slots)
        near_distance = distance[:, :n_slots]
        in_angle = is_near[:, :n_slots]
        angle_weight = weigh(
            near_distance, angle_switch.start, angle_switch.end, angle_switch.exponential
        )
        angle_weight = angle_weight.masked_fill(~in_angle, 0.0)
        unit = edges[:, :n_slots] / (near_distance + self.guard).unsqueeze(-1)
        cosine = torch.bmm(unit, unit.transpose(1, 2)) * self.cosine_scale
        graph = Graph(
            edge_weight=(weight / self.edge_scale).to(dtype),
            direction=(direction * weight.unsqueeze(-1) * self.edge_scale**-0.5).to(dtype),
            angle_weight=(angle_weight * self.angle_scale**-0.25).to(dtype),
            in_angle=in_angle,
        )
        return Geometry(graph=graph, radial=radial.to(dtype), cosine=cosine.to(dtype))

    @torch.jit.export
    def pullback(self, adjoint: Tensor, tape: Tape) -> Tensor:
        """Return dE/dr_ij `(ncentre, nnei, 3)` from dE/dD `(ncentre, dim_out)`."""
        outputs: list[Tensor | None] = [adjoint]
        slope = torch.autograd.grad([tape.descriptor], [tape.vectors], outputs)[0]
        assert slope is not None
        return slope


# ----- from a trained model ----------------------------------------------------------------------


def layer_weights(layer: RepflowLayer, *, update_edge: bool, update_angle: bool) -> LayerWeights:
    """Return copies of a layer's weights, without those of features that no later layer uses."""
    repflow = layer.repflow
    n = repflow.n_dim
    e = repflow.e_dim
    none = torch.zeros(0, dtype=layer.node_self_mlp.matrix.dtype)
    edge_layers = [layer.node_edge_linear]
    if update_edge:
        edge_layers.append(layer.edge_self_linear)
    angle = Split([none, none, none, none], none)
    edge_from_angle = Dense(none, none, None, 0)
    if repflow.update_angle:
        angle = _angle_split(layer, update_angle)
        edge_from_angle = _dense(layer.edge_angle_linear2)
    style = repflow.update_style
    n_node_updates = 2 + repflow.n_multi_edge_message
    n_edge_updates = 2 if repflow.update_angle else 1
    return LayerWeights(
        node_self=_dense(layer.node_self_mlp),
        node_symmetric=_dense(layer.node_sym_linear),
        edge=_split(edge_layers, [n, n, e]),
        angle=angle,
        edge_from_angle=edge_from_angle,
        node_residual=_residual(style, layer.n_residual, n_node_updates, none.new_empty(n)),
        edge_residual=_residual(style, layer.e_residual, n_edge_updates, none.new_empty(e)),
        angle_residual=_residual(style, layer.a_residual, 1, none.new_empty(repflow.a_dim)),
    )


def _angle_split(layer: RepflowLayer, update_angle: bool) -> Split:
    """Return the layer on angles, linear compression multiplied into its matrix."""
    repflow = layer.repflow
    layers = [layer.edge_angle_linear1]
    if update_angle:
        layers.append(layer.angle_self_linear)
    edge_columns = repflow.angle_edge
    split = _split(layers, [repflow.a_dim, repflow.angle_node, edge_columns, edge_columns])
    if layer.a_compress_n_linear is None or layer.a_compress_e_linear is None:
        return split
    angle_rows, centre_rows, second_rows, first_rows = split.blocks
    node_map = layer.a_compress_n_linear.matrix.detach()
    edge_map = layer.a_compress_e_linear.matrix.detach()
    blocks = [angle_rows, node_map @ centre_rows, edge_map @ second_rows, edge_map @ first_rows]
    return Split(blocks, split.bias)


def _dense(layer: Layer) -> Dense:
    """Return copies of a linear layer's matrix and bias."""
    return Dense(layer.matrix.detach().clone(), layer.tensors.bias.detach().clone(), None, 0)


def _split(layers: list[Layer], rows: list[int]) -> Split:
    """Join layers with the same input and split their matrix by rows."""
    matrix, bias = join(layers)
    return Split([block.contiguous() for block in matrix.split(rows)], bias)


def _residual(style: str, trained: torch.nn.ParameterList, count: int, like: Tensor) -> Residual:
    """Return how `count` updates are added to features like `like` `(width,)`.

    By trained vectors, averaged, or incremented; see `layer._residual_coefficients`.
    """
    if style == "res_residual":
        weights = [weight.detach().clone() for weight in trained]
        return Residual(1.0, torch.stack(weights) if weights else like.new_empty(0))
    if style == "res_avg":
        carry = 1 / math.sqrt(count + 1)
        factor = carry
    else:
        carry = 1.0
        factor = 1 / math.sqrt(count)
    return Residual(carry, like.new_full((count, len(like)), factor))
