"""The graph descriptor DPA-3: nodes, edges and angles that message each other over layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa3.geometry import (
    DISTANCE_GUARD,
    cosines,
    plan_angles,
    sort_by_neighbor,
    weigh,
)
from deepmd_muon.model.descriptor.dpa3.layer import Features, Graph, RepflowLayer, Wanted
from deepmd_muon.model.descriptor.dpa3.settings import DPA3Settings
from deepmd_muon.model.descriptor.environment import Environment, environment
from deepmd_muon.model.descriptor.interface import Described, describe_by_autograd
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.networks import Layer, SeedPath, dtype_of, run_layer
from deepmd_muon.model.nn.type_embedding import TABLE, TypeEmbedding, rows_of
from deepmd_muon.model.structures import Structures


class Repflows(torch.nn.Module):
    """The content of deepmd-kit's `descriptor.repflows`: statistics, embeddings and layers."""

    mean: Tensor
    stddev: Tensor

    def __init__(self, settings: DPA3Settings, ntypes: int, stream: SeedPath) -> None:
        super().__init__()
        repflow = settings.repflow
        dtype = dtype_of(settings.precision)
        shape = (ntypes, repflow.slots[0], 4)
        self.register_buffer("mean", torch.zeros(shape, dtype=dtype))
        self.register_buffer("stddev", torch.full(shape, repflow.fix_stat_std or 1.0, dtype=dtype))
        self.edge_embd = Layer(
            1, repflow.e_dim, timestep=False, dtype=dtype, stream=stream.child(0)
        )
        self.angle_embd = Layer(
            1, repflow.a_dim, timestep=False, bias=False, dtype=dtype, stream=stream.child(1)
        )
        f = activation(settings.activation_function)
        layers = stream.child(1)
        self.layers = torch.nn.ModuleList(
            RepflowLayer(repflow, f, dtype=dtype, stream=layers.child(index))
            for index in range(repflow.nlayers)
        )


class Geometry(NamedTuple):
    """The functions of positions that the layers start from."""

    graph: Graph
    radial: Tensor  # (nreal, nnei): the number that an edge starts from
    cosine: Tensor  # (nangles,), scaled: the number that an angle starts from


class DPA3(torch.nn.Module):
    """D_i: the features of node i after all layers, then its type's vector if `concat_output_tebd`.

    Static and dynamic selection differ in the scale of sums alone: both compute on the real
    neighbours. Arguments as in `Descriptor`.
    """

    recompute = False
    type_axes: ClassVar[Mapping[str, int]] = {
        "repflows.mean": 0,
        "repflows.stddev": 0,
        f"type_embedding.{TABLE}": 0,
    }

    def __init__(
        self,
        settings: DPA3Settings,
        type_map: Sequence[str],
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        repflow = settings.repflow
        stream = SeedPath(seed if settings.seed is None else settings.seed)
        self.repflows = Repflows(settings, len(type_map), stream.child(1))
        self.type_embedding = TypeEmbedding(
            len(type_map),
            repflow.n_dim,
            bias=settings.use_tebd_bias,
            dtype=dtype_of(settings.precision),
            stream=stream.child(2),
        )
        self.dim_out = repflow.n_dim * (2 if settings.concat_output_tebd else 1)
        self.activation = activation(settings.activation_function)
        self.needs_statistics = repflow.fix_stat_std == 0.0
        self.requires_grad_(settings.trainable)

    def environment(self, structures: Structures, edges: Tensor) -> Environment:
        """Return the environment of every edge, not standardised.

        Statistics use the quintic switch, whatever switch the layers use.
        """
        repflow = self.settings.repflow
        reach = Reach(repflow.e_rcut, repflow.e_rcut_smth, self.settings.env_protection)
        return environment(edges, structures.neighbor, reach)

    def used_slots(self, structures: Structures) -> Tensor | None:
        """Return None: every slot counts."""
        return None

    def set_statistics(self, mean: Tensor, stddev: Tensor) -> None:
        """Divide environment rows by these deviations `(ntypes, 4)`; their mean stays 0."""
        self.repflows.stddev.copy_(stddev[:, None, :].expand_as(self.repflows.stddev))

    def forward(self, structures: Structures, edges: Tensor, *, force: bool = True) -> Described:
        """Describe every atom; see `Descriptor`."""
        return describe_by_autograd(
            lambda leaf: self._describe(structures, leaf, force=force), edges, force=force
        )

    def _describe(self, structures: Structures, edges: Tensor, *, force: bool) -> Tensor:
        """Return D `(nreal, dim_out)` from edge vectors `(nreal, nnei, 3)` [Å]."""
        repflow = self.settings.repflow
        f = self.activation.value
        geometry = self._geometry(structures, edges)
        types = rows_of(self.type_embedding(), structures.sorted_type)
        edge_embd = self.repflows.edge_embd
        edge = geometry.radial.unsqueeze(-1) * edge_embd.matrix[0] + edge_embd.tensors.bias
        angle = None
        if repflow.update_angle:
            angle = geometry.cosine.unsqueeze(1) * self.repflows.angle_embd.matrix
        features = Features(
            node=f(types),
            edge=edge if repflow.edge_init_use_dist else f(edge),
            angle=angle,
        )
        last = repflow.nlayers - 1
        for index, layer in enumerate(self.repflows.layers):
            update = functools.partial(
                layer,
                graph=geometry.graph,
                wanted=Wanted(edge=index < last, angle=index < last - 1),
                force=force,
                overlap=not self.recompute,
            )
            features = run_layer(update, features, recompute=self.recompute)
        if self.settings.concat_output_tebd:
            return torch.cat([features.node, types], 1)
        return features.node

    def _geometry(self, structures: Structures, edges: Tensor) -> Geometry:
        """Return the graph, and the numbers that edges and angles start from."""
        repflow = self.settings.repflow
        dtype = self.repflows.mean.dtype
        n_slots = edges.shape[1]
        edge_scale, angle_scale = repflow.scales

        empty = structures.neighbor < 0
        # Empty slots get a harmless distance; their weight is 0.
        edges = torch.where(empty.unsqueeze(-1), repflow.e_rcut, edges)
        distance = edges.square().sum(-1).sqrt()
        weight = weigh(distance, repflow.e_rcut_smth, repflow.e_rcut, repflow.use_exp_switch)
        weight = weight.masked_fill(empty, 0.0)
        scale = (1.0 / self.repflows.stddev[:, 0].double())[structures.sorted_type].unsqueeze(1)
        protected = distance + self.settings.env_protection
        per_distance = weight / protected
        direction = edges * (per_distance / protected).unsqueeze(-1) * scale[..., 1:]
        radial = distance if repflow.edge_init_use_dist else per_distance * scale[..., 0]

        plan = plan_angles(structures.inner[0], n_slots, edges.device)
        near = distance.flatten().index_select(0, plan.slot)
        # Some slots of the plan may hold farther neighbours, or none.
        rank = plan.slot % max(n_slots, 1)
        in_angle = (near < repflow.a_rcut) & (rank < repflow.slots[1])
        in_angle &= structures.neighbor.flatten().index_select(0, plan.slot) >= 0
        angle_weight = weigh(near, repflow.a_rcut_smth, repflow.a_rcut, repflow.use_exp_switch)
        angle_weight = angle_weight.masked_fill(~in_angle, 0.0)
        in_plan = edges.flatten(0, 1).index_select(0, plan.slot)
        unit = in_plan / (near + DISTANCE_GUARD).unsqueeze(-1)

        neighbor = _sorted_numbers(structures)
        kernels_run = triton_support.usable(neighbor.device)
        graph = Graph(
            neighbor=neighbor,
            incoming=sort_by_neighbor(neighbor, empty) if kernels_run else None,
            edge_weight=(weight / edge_scale).to(dtype),
            direction=(direction * weight.unsqueeze(-1) * edge_scale**-0.5).to(dtype),
            plan=plan.within(in_angle),
            angle_weight=(angle_weight * angle_scale**-0.25).to(dtype),
            in_angle=in_angle,
        )
        return Geometry(graph=graph, radial=radial.to(dtype), cosine=cosines(unit, plan).to(dtype))


def _sorted_numbers(structures: Structures) -> Tensor:
    """Return the number of each neighbour among the sorted atoms `(nreal, nnei)`.

    It is that of any atom in empty slots.
    """
    order = structures.order
    rank = order.new_zeros(structures.atype.numel())
    rank[order] = torch.arange(len(order), device=order.device)
    return rank[structures.neighbor.clamp(min=0)]
