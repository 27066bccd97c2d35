"""The graph descriptor DPA-3: nodes, edges and angles that message each other over layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from deepmd_muon.model.descriptor.dpa3.edges import incoming_for_kernels
from deepmd_muon.model.descriptor.dpa3.geometry import DISTANCE_GUARD, cosines, plan_angles, weigh
from deepmd_muon.model.descriptor.dpa3.layer import Features, Graph, RepflowLayer, Wanted
from deepmd_muon.model.descriptor.dpa3.settings import DPA3Settings
from deepmd_muon.model.descriptor.environment import Environment, Reach, environment
from deepmd_muon.model.descriptor.interface import Described, describe_by_autograd
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.networks import Layer, SeedPath, dtype_of, run_layer
from deepmd_muon.model.nn.type_embedding import TABLE, TypeEmbedding, rows_of
from deepmd_muon.model.structures import Structures


class Repflows(torch.nn.Module):
    """The content of deepmd-kit's `descriptor.repflows`: statistics, first embeddings and layers."""

    mean: torch.Tensor
    stddev: torch.Tensor

    def __init__(self, settings: DPA3Settings, ntypes: int, stream: SeedPath) -> None:
        super().__init__()
        repflow, dtype = settings.repflow, dtype_of(settings.precision)
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


class DPA3(torch.nn.Module):
    """D_i: the features of node i after all layers, beside the vector of its type when `concat_output_tebd`.

    Static and dynamic selection differ in the scale of sums alone: both compute on the real neighbours. Arguments as in
    `Descriptor`.
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
        dtype = dtype_of(settings.precision)
        stream = SeedPath(seed if settings.seed is None else settings.seed)
        self.repflows = Repflows(settings, len(type_map), stream.child(1))
        self.type_embedding = TypeEmbedding(
            len(type_map),
            repflow.n_dim,
            bias=settings.use_tebd_bias,
            dtype=dtype,
            stream=stream.child(2),
        )
        self.dim_out = repflow.n_dim * (2 if settings.concat_output_tebd else 1)
        self.activation = activation(settings.activation_function)
        self.needs_statistics = repflow.fix_stat_std == 0.0
        self.requires_grad_(settings.trainable)

    def environment(self, structures: Structures, edges: torch.Tensor) -> Environment:
        """Environment of every edge, not standardised; statistics are always those of the quintic switch."""
        repflow = self.settings.repflow
        reach = Reach(repflow.e_rcut, repflow.e_rcut_smth, self.settings.env_protection)
        return environment(edges, structures.neighbor, reach)

    def used_slots(self, structures: Structures) -> torch.Tensor | None:
        """Return None: every slot counts."""
        return None

    def set_statistics(self, mean: torch.Tensor, stddev: torch.Tensor) -> None:
        """Divide environment rows by these deviations `(ntypes, 4)`; their mean stays 0."""
        self.repflows.stddev.copy_(stddev[:, None, :].expand_as(self.repflows.stddev))

    def forward(
        self, structures: Structures, edges: torch.Tensor, *, force: bool = True
    ) -> Described:
        """Describe every atom; see `Descriptor`."""
        return describe_by_autograd(
            lambda leaf: self._describe(structures, leaf, force=force), edges, force=force
        )

    def _describe(
        self, structures: Structures, edges: torch.Tensor, *, force: bool
    ) -> torch.Tensor:
        repflow, f = self.settings.repflow, self.activation.value
        empty = structures.neighbor < 0
        edges = torch.where(empty.unsqueeze(-1), repflow.e_rcut, edges)
        distance = edges.square().sum(-1).sqrt()
        weight = weigh(
            distance, repflow.e_rcut_smth, repflow.e_rcut, repflow.use_exp_switch
        ).masked_fill(empty, 0.0)
        graph, cosine, radial = self._graph(structures, edges, distance, weight)
        types = rows_of(self.type_embedding(), structures.sorted_type)
        start = self.repflows.edge_embd
        edge = radial.unsqueeze(-1) * start.matrix[0] + start.tensors.bias
        features = Features(
            f(types),
            edge if repflow.edge_init_use_dist else f(edge),
            cosine.unsqueeze(1) * self.repflows.angle_embd.matrix if repflow.update_angle else None,
        )
        last = repflow.nlayers - 1
        for index, layer in enumerate(self.repflows.layers):
            wanted = Wanted(edge=index < last, angle=index < last - 1)
            given = {
                "graph": graph,
                "wanted": wanted,
                "force": force,
                "overlap": not self.recompute,
            }
            whole = functools.partial(layer, **given)
            features = run_layer(whole, features, recompute=self.recompute)
        return (
            torch.cat([features.node, types], 1)
            if self.settings.concat_output_tebd
            else features.node
        )

    def _graph(
        self,
        structures: Structures,
        edges: torch.Tensor,
        distance: torch.Tensor,
        weight: torch.Tensor,
    ) -> tuple[Graph, torch.Tensor, torch.Tensor]:
        """Return the graph, the cosine of every angle and the number that every edge starts from."""
        repflow, dtype = self.settings.repflow, self.repflows.mean.dtype
        edge_scale, angle_scale = repflow.scales
        scale = (1.0 / self.repflows.stddev[:, 0].double())[structures.sorted_type].unsqueeze(1)
        protected = distance + self.settings.env_protection
        per_distance = weight / protected
        direction = edges * (per_distance / protected).unsqueeze(-1) * scale[..., 1:]
        radial = distance if repflow.edge_init_use_dist else per_distance * scale[..., 0]
        plan = plan_angles(structures.inner[0], edges.shape[1], edges.device)
        near = distance.flatten().index_select(0, plan.slot)
        # some slots may hold farther neighbours, or none
        rank = plan.slot % max(edges.shape[1], 1)
        in_angle = (near < repflow.a_rcut) & (rank < repflow.slots[1])
        in_angle &= structures.neighbor.flatten().index_select(0, plan.slot) >= 0
        angle_weight = weigh(
            near, repflow.a_rcut_smth, repflow.a_rcut, repflow.use_exp_switch
        ).masked_fill(~in_angle, 0.0)
        unit = edges.flatten(0, 1).index_select(0, plan.slot) / (near + DISTANCE_GUARD).unsqueeze(
            -1
        )
        place = structures.order.new_zeros(
            structures.atype.numel()
        )  # of each atom among the sorted ones
        place[structures.order] = torch.arange(len(structures.order), device=place.device)
        neighbor = place[structures.neighbor.clamp(min=0)]
        graph = Graph(
            neighbor=neighbor,
            incoming=incoming_for_kernels(neighbor, structures.neighbor < 0),
            edge_weight=(weight / edge_scale).to(dtype),
            direction=(direction * weight.unsqueeze(-1) * edge_scale**-0.5).to(dtype),
            plan=plan.within(in_angle),
            angle_weight=(angle_weight * angle_scale**-0.25).to(dtype),
            in_angle=in_angle,
        )
        return graph, cosines(unit, plan).to(dtype), radial.to(dtype)
