"""The descriptor of DPA-1 (Zhang et al., arXiv:2208.08236): `se_atten` and `se_atten_v2`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.descriptor.dpa1.attention import Gates, NeighborAttention
from deepmd_muon.model.descriptor.dpa1.embedding import Embedding, Inputs
from deepmd_muon.model.descriptor.dpa1.geometry import geometry
from deepmd_muon.model.descriptor.dpa1.settings import DPA1Settings, SeAttenV2Settings
from deepmd_muon.model.descriptor.environment import Environment, environment
from deepmd_muon.model.descriptor.interface import Described, describe_by_autograd
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.nn import layers
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Network, NetworkCollection, SeedPath, dtype_of
from deepmd_muon.model.nn.type_embedding import TABLE, TypeEmbedding, rows_of
from deepmd_muon.model.structures import EMPTY, Structures

GROUP = 16  # atoms that a CPU describes at once


class Neighborhood(NamedTuple):
    """The environment of every atom, column by column.

    If a mean is subtracted, empty slots are not zero; a last column then represents all empty slots
    of its atom.

    Attributes
    ----------
    rows
        Standardised environment rows `(nreal, ncolumns, 4)`.
    weight
        How many slots a column represents `(nreal, ncolumns)`.
    real
        Whether a column has a neighbour `(nreal, ncolumns)`.
    kind
        Type of the neighbour `(nreal, ncolumns)`. deepmd-kit gives empty slots the type of the
        frame's first atom.
    switch
        Switch of every neighbour, 0 in empty slots `(nreal, ncolumns)`; None if nothing is
        multiplied by it.
    direction
        D, vectors to the neighbours `(nreal, ncolumns, 3)`; see `geometry`.
    """

    rows: Tensor
    weight: Tensor
    real: Tensor
    kind: Tensor
    switch: Tensor | None
    direction: Tensor


class DPA1(torch.nn.Module):
    """D_i = (RᵀG/N)ᵀ(RᵀG_axis/N), followed by the type's vector.

    R has the standardised environment rows of all neighbours, G = attention(embedding(s, types))
    their features, and N = sel. Arguments as in `Descriptor`.
    """

    needs_statistics = True
    recompute = False
    type_axes: ClassVar[Mapping[str, int]] = {
        "se_atten.mean": 0,
        "se_atten.stddev": 0,
        f"type_embedding.{TABLE}": 0,
    }

    def __init__(
        self,
        settings: DPA1Settings | SeAttenV2Settings,
        type_map: Sequence[str],
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        (self.slots,) = settings.neighbors().sel
        self.reach = Reach(settings.rcut, settings.rcut_smth, settings.env_protection)
        self.axis = settings.axis_neuron
        self.width = settings.neuron[-1]
        self.dim_out = self.width * self.axis
        if settings.concat_output_tebd:
            self.dim_out += settings.tebd_dim
        self.activation = activation(settings.activation_function)
        stream = SeedPath(seed if settings.seed is None else settings.seed)
        self.se_atten = AttentionBlock(settings, len(type_map), self.slots, stream.child(1))
        self.type_embedding = TypeEmbedding(
            len(type_map),
            settings.tebd_dim,
            bias=settings.use_tebd_bias,
            dtype=dtype_of(settings.precision),
            stream=stream.child(2),
        )
        self.requires_grad_(settings.trainable)
        if not settings.trainable_ln:
            for layer in self.se_atten.dpa1_attention.attention_layers:
                layer.attn_layer_norm.requires_grad_(False)

    def set_statistics(self, mean: Tensor, stddev: Tensor) -> None:
        """Standardise environment rows by these values `(ntypes, 4)`.

        With `set_davg_zero` the mean stays 0.
        """
        block = self.se_atten
        if not self.settings.set_davg_zero:
            block.mean.copy_(mean[:, None, :].expand_as(block.mean))
        block.stddev.copy_(stddev[:, None, :].expand_as(block.stddev))

    def environment(self, structures: Structures, edges: Tensor) -> Environment:
        """Environment of every edge, not standardised."""
        return environment(edges, structures.neighbor, self.reach)

    def used_slots(self, structures: Structures) -> None:
        """Every slot counts."""

    def forward(self, structures: Structures, edges: Tensor, *, force: bool = True) -> Described:
        """Describe every atom; see `Descriptor`."""
        if edges.device.type != "cpu":
            return describe_by_autograd(
                lambda leaf: self._describe(structures, leaf, force=force), edges, force=force
            )
        groups = group_atoms(structures)
        original_order = torch.argsort(torch.cat([rows for rows, _ in groups]))

        def describe(leaf: Tensor) -> Tensor:
            """Describe the atoms group by group: tensors of few atoms stay in the cache."""
            descriptors = [
                self._describe(group, leaf[rows, : group.neighbor.shape[1]], force=force)
                for rows, group in groups
            ]
            return torch.cat(descriptors)[original_order]

        return describe_by_autograd(describe, edges, force=force)

    def _describe(self, structures: Structures, edges: Tensor, *, force: bool) -> Tensor:
        near = self._neighborhood(structures, edges)
        table = self.type_embedding()
        features = self._embed(near, structures.sorted_type, table, force=force)
        if self.settings.attn_layer:
            gates = self._gates(near, structures)
            features = self.se_atten.dpa1_attention(
                features, gates, force=force, recompute=self.recompute
            )
        weighted = near.rows * near.weight.unsqueeze(-1)
        a = torch.bmm(weighted.transpose(1, 2), features) / self.slots  # (nreal, 4, width)
        descriptor = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        if not self.settings.concat_output_tebd:
            return descriptor
        return torch.cat([descriptor, rows_of(table, structures.sorted_type)], dim=1)

    def _neighborhood(self, structures: Structures, edges: Tensor) -> Neighborhood:
        """Return the environment in the precision of the parameters."""
        block = self.se_atten
        atoms = structures.sorted_type
        real = structures.neighbor >= 0
        dtype = block.mean.dtype
        mean = block.mean[:, 0][atoms]
        inverse = (1.0 / block.stddev[:, 0])[atoms]
        rows, direction, switch = geometry(
            edges,
            structures.neighbor,
            mean=mean,
            inverse=inverse,
            reach=self.reach,
            with_switch=self.settings.smooth_type_embedding,
        )
        near = Neighborhood(
            rows=rows,
            weight=real.to(dtype),
            real=real,
            kind=structures.neighbor_type,
            switch=switch,
            direction=direction,
        )
        if self.settings.set_davg_zero:
            return near
        n_empty = (self.slots - (structures.neighbor != EMPTY).sum(1, keepdim=True)).to(dtype)
        first_type = structures.atype[structures.sorted_frame, 0].clamp(min=0).unsqueeze(1)
        return Neighborhood(
            rows=torch.cat([rows, (-mean * inverse).unsqueeze(1)], dim=1),
            weight=torch.cat([near.weight, n_empty], dim=1),
            real=torch.nn.functional.pad(real, (0, 1)),
            kind=torch.cat([near.kind, first_type], dim=1),
            switch=None if switch is None else torch.nn.functional.pad(switch, (0, 1)),
            direction=torch.nn.functional.pad(direction, (0, 0, 0, 1)),
        )

    def _embed(self, near: Neighborhood, centre: Tensor, table: Tensor, *, force: bool) -> Tensor:
        """Return the features of every column before attention `(nreal, ncolumns, width)`.

        See `four_passes.run` for `force`.
        """
        network = self.se_atten.filter_layers[0]
        first_layer = network.tensors[0]
        radial = near.rows[..., :1]
        start, type_vectors = self._type_terms(near, centre, table)
        if network.copies[0]:
            # A residual first layer adds its input, which `Embedding` does not know.
            value = self.activation.value(start + radial * first_layer.matrix[0])
            x = value if first_layer.idt is None else value * first_layer.idt
            inputs = [radial, *type_vectors]
            x = x + torch.cat(inputs * network.copies[0], dim=-1)
            features = layers.plain_values(
                self.activation, network.copies[1:], x.flatten(0, 1), network.tensors[1:]
            )
        else:
            (features,) = run(
                Embedding(self.activation, network.copies[1:]),
                Inputs(
                    s=radial.flatten(0, 1),
                    start=start.flatten(0, 1),
                    w=first_layer.matrix[0],
                    later_layers=network.tensors[1:],
                ),
                force=force,
            )
        features = features.view(*near.kind.shape, self.width)
        if self.se_atten.filter_layers_strip is None:
            return features
        gate = self._type_gate(near.kind, centre, table)
        if near.switch is not None:
            gate = gate * near.switch.unsqueeze(-1)
        return features * (1.0 + gate)

    def _type_terms(
        self, near: Neighborhood, centre: Tensor, table: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return what the first layer adds to its radial product, and the type vectors it reads.

        The products with type vectors are computed once for each type. The vectors
        `(nreal, ncolumns, tebd_dim)` are only made for a residual layer.
        """
        network = self.se_atten.filter_layers[0]
        first_layer = network.tensors[0]
        if self.settings.tebd_input_mode == "strip":
            return first_layer.bias.expand(*near.kind.shape, -1), []
        width = self.settings.tebd_dim
        type_vectors = []
        start = rows_of(table @ first_layer.matrix[1 : 1 + width] + first_layer.bias, near.kind)
        if network.copies[0]:
            type_vectors.append(rows_of(table, near.kind))
        if not self.settings.type_one_side:
            start = start + rows_of(table @ first_layer.matrix[1 + width :], centre).unsqueeze(1)
            if network.copies[0]:
                vectors = rows_of(table, centre).unsqueeze(1)
                type_vectors.append(vectors.expand(-1, near.kind.shape[1], -1))
        return start, type_vectors

    def _type_gate(self, kind: Tensor, centre: Tensor, table: Tensor) -> Tensor:
        """Return the output of the net of the types `(nreal, ncolumns, width)`.

        It is computed once for each type or pair of types.
        """
        assert self.se_atten.filter_layers_strip is not None
        network = self.se_atten.filter_layers_strip[0]
        ntypes = len(table)
        index = kind
        inputs = table
        if not self.settings.type_one_side:
            index = centre.unsqueeze(1) * ntypes + kind
            neighbors = table.repeat(ntypes, 1)
            centres = table.repeat_interleave(ntypes, dim=0)
            inputs = torch.cat([neighbors, centres], dim=1)
        outputs = layers.plain_values(self.activation, network.copies, inputs, network.tensors)
        return rows_of(outputs, index)

    def _gates(self, near: Neighborhood, structures: Structures) -> Gates:
        """Return the mask and factors of the attention weights."""
        real = near.real
        dtype = near.rows.dtype
        listed = structures.neighbor.shape[1]
        direction = near.direction
        if near.switch is None:
            switch = None
            unlisted = 0
            hidden = ~real
            factor = real.to(dtype).unsqueeze(2)
            if self.settings.attn_dotr:
                # less work than a factor of the product
                factor = torch.bmm(factor * direction, direction.transpose(1, 2))
        else:
            switch = near.switch.unsqueeze(2) * near.switch.unsqueeze(1)
            unlisted = self.slots - listed
            # Empty slots have scores, too; only the column of all empty slots is hidden.
            hidden = (torch.arange(real.shape[1], device=real.device) >= listed).expand_as(real)
            factor = switch
            if self.settings.attn_dotr:
                factor = factor * torch.bmm(direction, direction.transpose(1, 2))
        # Half of the lowest number, so that adding a score cannot reach minus infinity.
        masked_score = torch.finfo(dtype).min / 2
        mask = torch.zeros_like(near.weight).masked_fill(hidden, masked_score).unsqueeze(1)
        return Gates(mask=mask, factor=factor, switch=switch, unlisted=unlisted)


class AttentionBlock(torch.nn.Module):
    """The content of deepmd-kit's `descriptor.se_atten`: statistics, attention, embedding nets."""

    mean: Tensor
    stddev: Tensor

    def __init__(
        self, settings: DPA1Settings | SeAttenV2Settings, ntypes: int, slots: int, stream: SeedPath
    ) -> None:
        super().__init__()
        dtype = dtype_of(settings.precision)
        types_width = settings.tebd_dim * (1 if settings.type_one_side else 2)
        strip = settings.tebd_input_mode == "strip"
        self.register_buffer("mean", torch.zeros(ntypes, slots, 4, dtype=dtype))
        self.register_buffer("stddev", torch.ones(ntypes, slots, 4, dtype=dtype))
        self.dpa1_attention = NeighborAttention(settings, stream.child(0))

        def network(n_in: int, child: int) -> NetworkCollection:
            net = Network(
                (n_in, *settings.neuron),
                None,
                timestep=settings.resnet_dt,
                dtype=dtype,
                stream=stream.child(child),
            )
            return NetworkCollection([net])

        self.filter_layers = network(1 if strip else 1 + types_width, 1)
        self.filter_layers_strip = network(types_width, 2) if strip else None


def group_atoms(structures: Structures) -> list[tuple[Tensor, Structures]]:
    """Return groups of atoms with about as many neighbours.

    Returns
    -------
    list of tuples
        The numbers of a group's atoms among all `(natoms of the group,)`, and the batch with these
        atoms alone in everything that `DPA1` reads of it. Columns that no atom of the group fills
        are left out.
    """
    filled = structures.filled[0]
    by_neighbors = np.argsort(filled, kind="stable")
    groups = []
    for atoms in np.split(by_neighbors, range(GROUP, len(filled), GROUP)):
        # At least one column, if the batch has any.
        fewest = min(1, structures.neighbor.shape[1])
        columns = max(int(filled[atoms].max(initial=0)), fewest)
        rows = torch.from_numpy(atoms)
        group = dataclasses.replace(
            structures,
            neighbor=structures.neighbor[rows, :columns],
            sorted_type=structures.sorted_type[rows],
            sorted_frame=structures.sorted_frame[rows],
        )
        groups.append((rows, group))
    return groups
