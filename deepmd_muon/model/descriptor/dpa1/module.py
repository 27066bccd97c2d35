"""The descriptor of DPA-1 (Zhang et al., arXiv:2208.08236): `se_atten` and `se_atten_v2`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from deepmd_muon.model.descriptor.dpa1.attention import Gates, NeighborAttention
from deepmd_muon.model.descriptor.dpa1.embedding import Embedding
from deepmd_muon.model.descriptor.dpa1.geometry import geometry
from deepmd_muon.model.descriptor.dpa1.settings import DPA1Settings, SeAttenV2Settings
from deepmd_muon.model.descriptor.environment import Environment, Reach, environment
from deepmd_muon.model.descriptor.interface import Described, describe_by_autograd
from deepmd_muon.model.nn import layers
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.four_passes import run
from deepmd_muon.model.nn.networks import Network, NetworkCollection, SeedPath, dtype_of
from deepmd_muon.model.nn.type_embedding import TABLE, TypeEmbedding, rows_of
from deepmd_muon.model.structures import EMPTY, Structures

GROUP = 16  # atoms that a CPU describes at once


class Neighborhood(NamedTuple):
    """The environment of every atom, column by column.

    If a mean is subtracted, empty slots are not zero; a last column then represents all empty slots of its atom.

    Attributes
    ----------
    rows
        Standardised environment rows `(nreal, ncolumns, 4)`.
    weight
        How many slots a column stands for `(nreal, ncolumns)`.
    real
        Where a column holds a neighbour `(nreal, ncolumns)`.
    kind
        Type of the neighbour `(nreal, ncolumns)`; deepmd-kit gives empty slots that of the frame's first atom.
    switch
        Switch of every neighbour, 0 without `(nreal, ncolumns)`; None where nothing is multiplied by it.
    direction
        Vectors to the neighbours `(nreal, ncolumns, 3)`; see `geometry`.
    """

    rows: torch.Tensor
    weight: torch.Tensor
    real: torch.Tensor
    kind: torch.Tensor
    switch: torch.Tensor | None
    direction: torch.Tensor


class AttentionBlock(torch.nn.Module):
    """The content of deepmd-kit's `descriptor.se_atten`: statistics, attention and embedding nets."""

    mean: torch.Tensor
    stddev: torch.Tensor

    def __init__(
        self, settings: DPA1Settings | SeAttenV2Settings, ntypes: int, slots: int, stream: SeedPath
    ) -> None:
        super().__init__()
        dtype = dtype_of(settings.precision)
        types = settings.tebd_dim * (1 if settings.type_one_side else 2)
        strip = settings.tebd_input_mode == "strip"
        self.register_buffer("mean", torch.zeros(ntypes, slots, 4, dtype=dtype))
        self.register_buffer("stddev", torch.ones(ntypes, slots, 4, dtype=dtype))
        self.dpa1_attention = NeighborAttention(settings, stream.child(0))

        def network(n_in: int, place: int) -> NetworkCollection:
            widths, start = (n_in, *settings.neuron), stream.child(place)
            return NetworkCollection(
                [Network(widths, None, timestep=settings.resnet_dt, dtype=dtype, stream=start)]
            )

        self.filter_layers = network(1 if strip else 1 + types, 1)
        self.filter_layers_strip = network(types, 2) if strip else None


class DPA1(torch.nn.Module):
    """D_i = (RᵀG/N)ᵀ(RᵀG_axis/N), the type's vector behind it.

    G = attention(embedding(s, types)) is a row for each neighbour, R their standardised environment rows, N = sel.
    Arguments as in `Descriptor`.
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
        self.axis, self.width = settings.axis_neuron, settings.neuron[-1]
        self.dim_out = self.width * self.axis + (
            settings.tebd_dim if settings.concat_output_tebd else 0
        )
        self.activation = activation(settings.activation_function)
        ntypes, dtype = len(type_map), dtype_of(settings.precision)
        stream = SeedPath(seed if settings.seed is None else settings.seed)
        self.se_atten = AttentionBlock(settings, ntypes, self.slots, stream.child(1))
        bias, width = settings.use_tebd_bias, settings.tebd_dim
        self.type_embedding = TypeEmbedding(
            ntypes, width, bias=bias, dtype=dtype, stream=stream.child(2)
        )
        self.requires_grad_(settings.trainable)
        if not settings.trainable_ln:
            for layer in self.se_atten.dpa1_attention.attention_layers:
                layer.attn_layer_norm.requires_grad_(False)

    def set_statistics(self, mean: torch.Tensor, stddev: torch.Tensor) -> None:
        """Standardise environment rows by these values `(ntypes, 4)`; `set_davg_zero` leaves the mean alone."""
        block = self.se_atten
        if not self.settings.set_davg_zero:
            block.mean.copy_(mean[:, None, :].expand_as(block.mean))
        block.stddev.copy_(stddev[:, None, :].expand_as(block.stddev))

    def environment(self, structures: Structures, edges: torch.Tensor) -> Environment:
        """Environment of every edge, not standardised."""
        return environment(edges, structures.neighbor, self.reach)

    def used_slots(self, structures: Structures) -> None:
        """Every slot counts."""

    def forward(
        self, structures: Structures, edges: torch.Tensor, *, force: bool = True
    ) -> Described:
        """Describe every atom; see `Descriptor`."""
        if edges.device.type != "cpu":
            return describe_by_autograd(
                lambda leaf: self._describe(structures, leaf, force=force), edges, force=force
            )
        groups = group_atoms(structures)
        back = torch.argsort(torch.cat([rows for rows, _ in groups]))

        def describe(leaf: torch.Tensor) -> torch.Tensor:
            """Describe the atoms group by group: the tensors of few atoms stay in the processor's cache."""
            parts = [
                self._describe(part, leaf[rows, : part.neighbor.shape[1]], force=force)
                for rows, part in groups
            ]
            return torch.cat(parts)[back]

        return describe_by_autograd(describe, edges, force=force)

    def _describe(
        self, structures: Structures, edges: torch.Tensor, *, force: bool
    ) -> torch.Tensor:
        near = self._neighborhood(structures, edges)
        table = self.type_embedding()
        features = self._embed(near, structures.sorted_type, table, force=force)
        if self.settings.attn_layer:
            gates = self._gates(near, structures)
            features = self.se_atten.dpa1_attention(
                features, gates, force=force, recompute=self.recompute
            )
        weighted = near.rows * near.weight.unsqueeze(-1)
        a = torch.bmm(weighted.transpose(1, 2), features) / self.slots
        d = torch.bmm(a.transpose(1, 2), a[:, :, : self.axis]).flatten(1)
        return (
            torch.cat([d, rows_of(table, structures.sorted_type)], dim=1)
            if self.settings.concat_output_tebd
            else d
        )

    def _neighborhood(self, structures: Structures, edges: torch.Tensor) -> Neighborhood:
        """Return the environment in the precision of the parameters."""
        block, own, real = self.se_atten, self.settings, structures.neighbor >= 0
        dtype, atoms = block.mean.dtype, structures.sorted_type
        mean, inverse = block.mean[:, 0][atoms], (1.0 / block.stddev[:, 0])[atoms]
        given = edges, structures.neighbor, mean, inverse, self.reach
        rows, direction, switch = geometry(*given, own.smooth_type_embedding)
        kind, weight = structures.neighbor_type, real.to(dtype)
        if own.set_davg_zero:
            return Neighborhood(rows, weight, real, kind, switch, direction)
        empty = (self.slots - (structures.neighbor != EMPTY).sum(1, keepdim=True)).to(dtype)
        first = structures.atype[structures.sorted_frame, 0].clamp(min=0).unsqueeze(1)
        return Neighborhood(
            torch.cat([rows, (-mean * inverse).unsqueeze(1)], dim=1),
            torch.cat([weight, empty], dim=1),
            torch.nn.functional.pad(real, (0, 1)),
            torch.cat([kind, first], dim=1),
            None if switch is None else torch.nn.functional.pad(switch, (0, 1)),
            torch.nn.functional.pad(direction, (0, 0, 0, 1)),
        )

    def _embed(
        self, near: Neighborhood, centre: torch.Tensor, table: torch.Tensor, *, force: bool
    ) -> torch.Tensor:
        """Return the features of every column `(nreal, ncolumns, width)` before attention.

        In the first layer, the products with type vectors are made once for each type. See `four_passes.run` for
        `force`.
        """
        first, *others = self.se_atten.filter_layers[0].tensors
        copies, f = self.se_atten.filter_layers[0].copies, self.activation
        radial, strip, width = (
            near.rows[..., :1],
            self.settings.tebd_input_mode == "strip",
            self.settings.tebd_dim,
        )
        inputs = [radial]  # what a residual first layer adds
        if strip:
            start = first.bias.expand(*near.kind.shape, -1)
        else:
            start = rows_of(table @ first.matrix[1 : 1 + width] + first.bias, near.kind)
            if copies[0]:
                inputs.append(rows_of(table, near.kind))
            if not self.settings.type_one_side:
                start = start + rows_of(table @ first.matrix[1 + width :], centre).unsqueeze(1)
                if copies[0]:
                    inputs.append(
                        rows_of(table, centre).unsqueeze(1).expand(-1, near.kind.shape[1], -1)
                    )
        if copies[0]:
            value = f.value(start + radial * first.matrix[0])
            x = value if first.idt is None else value * first.idt
            if copies[0]:
                x = x + torch.cat(inputs * copies[0], dim=-1)
            found = layers.plain_values(f, copies[1:], x.flatten(0, 1), others)
        else:
            passes, weights = Embedding(f, copies[1:]), self.se_atten.filter_layers[0].flat[3:]
            (found,) = run(
                passes,
                radial.flatten(0, 1),
                start.flatten(0, 1),
                first.matrix[0],
                *weights,
                force=force,
            )
        features = found.view(*near.kind.shape, self.width)
        if not strip:
            return features
        gate = self._type_gate(near.kind, centre, table)
        if near.switch is not None:
            gate = gate * near.switch.unsqueeze(-1)
        return features * (1.0 + gate)

    def _type_gate(
        self, kind: torch.Tensor, centre: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Return the output of the net of the types `(nreal, ncolumns, width)`, computed once for each pair."""
        assert self.se_atten.filter_layers_strip is not None
        network, ntypes = self.se_atten.filter_layers_strip[0], len(table)
        place, given = kind, table
        if not self.settings.type_one_side:
            place = centre.unsqueeze(1) * ntypes + kind
            given = torch.cat(
                [table.repeat(ntypes, 1), table.repeat_interleave(ntypes, dim=0)], dim=1
            )
        return rows_of(
            layers.plain_values(self.activation, network.copies, given, network.tensors), place
        )

    def _gates(self, near: Neighborhood, structures: Structures) -> Gates:
        """Return the mask and factors of the attention weights."""
        real, dtype = near.real, near.rows.dtype
        columns = structures.neighbor.shape[1]
        switch, direction, after = None, near.direction, real.to(dtype).unsqueeze(2)
        if near.switch is not None:
            switch = after = near.switch.unsqueeze(2) * near.switch.unsqueeze(1)
        if self.settings.attn_dotr and switch is None:
            after = torch.bmm(
                after * direction, direction.transpose(1, 2)
            )  # less work than a factor of the product
        elif self.settings.attn_dotr:
            after = after * torch.bmm(direction, direction.transpose(1, 2))
        # In smooth attention an empty slot has a score, too; only the column that stands for all of them is hidden.
        hidden = (
            ~real
            if switch is None
            else torch.arange(real.shape[1], device=real.device).expand_as(real) >= columns
        )
        # Half of the least number, so that adding a score cannot reach minus infinity.
        mask = (
            torch.zeros_like(near.weight)
            .masked_fill(hidden, torch.finfo(dtype).min / 2)
            .unsqueeze(1)
        )
        return Gates(mask, after, switch, 0 if switch is None else self.slots - columns)


def group_atoms(structures: Structures) -> list[tuple[torch.Tensor, Structures]]:
    """Return groups of atoms with about as many neighbours, each without the columns that none of its atoms fills.

    Returns
    -------
    list of tuples
        Places of a group's atoms in the list of all `(natoms of the group,)`, and the batch with these atoms alone
        in everything that `DPA1` reads of it.
    """
    filled = structures.filled[0]
    groups = []
    for places in np.split(np.argsort(filled, kind="stable"), range(GROUP, len(filled), GROUP)):
        columns = max(int(filled[places].max(initial=0)), min(1, structures.neighbor.shape[1]))
        rows = torch.from_numpy(places)
        part = dataclasses.replace(
            structures,
            neighbor=structures.neighbor[rows, :columns],
            sorted_type=structures.sorted_type[rows],
            sorted_frame=structures.sorted_frame[rows],
        )
        groups.append((rows, part))
    return groups
