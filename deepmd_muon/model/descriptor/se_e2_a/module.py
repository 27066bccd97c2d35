"""The smooth two-body embedding descriptor `se_e2_a` (Zhang et al., NeurIPS 2018, arXiv:1805.09003)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.environment import (
    Environment,
    Jacobian,
    Reach,
    edge_derivative,
    environment,
)
from deepmd_muon.model.descriptor.interface import Described, Pullback
from deepmd_muon.model.descriptor.pieces import Pieces
from deepmd_muon.model.descriptor.se_e2_a import interpolation
from deepmd_muon.model.descriptor.se_e2_a.contraction import contract, pull_contraction
from deepmd_muon.model.descriptor.se_e2_a.embedding import Sums, plan_blocks
from deepmd_muon.model.descriptor.se_e2_a.settings import SeE2ASettings
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.activation import activation
from deepmd_muon.model.nn.four_passes import run_with_pullback
from deepmd_muon.model.nn.layers import joined
from deepmd_muon.model.nn.networks import Network, NetworkCollection, Stream, dtype_of
from deepmd_muon.model.structures import Structures


class EmbeddingBlock(torch.nn.Module):
    """The content of deepmd-kit's `descriptor.sea`: statistics and embedding nets."""

    mean: torch.Tensor
    stddev: torch.Tensor

    def __init__(self, settings: SeE2ASettings, sel: tuple[int, ...], stream: Stream) -> None:
        super().__init__()
        dtype = dtype_of(settings.precision)
        ntypes = len(sel)
        nets = ntypes if settings.type_one_side else ntypes * ntypes
        self.register_buffer("mean", torch.zeros(ntypes, sum(sel), 4, dtype=dtype))
        self.register_buffer("stddev", torch.ones(ntypes, sum(sel), 4, dtype=dtype))
        self.filter_layers = NetworkCollection(
            [
                Network(
                    (1, *settings.neuron),
                    None,
                    timestep=settings.resnet_dt,
                    dtype=dtype,
                    stream=stream.child(index),
                )
                for index in range(nets)
            ]
        )


class SeE2A(torch.nn.Module):
    """D_i = (RᵀG/N)ᵀ(RᵀG_axis/N) with G = embedding(s), R the standardised environment rows, N = sum(sel).

    Every slot of `sel` counts, an empty one with the standardised zero row. Arguments as in `Descriptor`.
    """

    needs_statistics = True
    #: The settings that interpolated networks have, in training steps and in tables for predictions.
    interpolation_covers = Coverage(
        frozenset(
            {
                *("sel", "rcut", "rcut_smth", "env_protection", "set_davg_zero", "exclude_types"),
                *("neuron", "axis_neuron", "activation_function", "resnet_dt", "type_one_side"),
                *("precision", "trainable", "seed"),
            }
        )
    )
    #: How training steps cut the interval of an embedding net; without pieces they evaluate it at every edge.
    pieces: Pieces = ()
    #: Stands for the embedding nets in predictions, from `tabulate`.
    table: interpolation.Table | None = None

    def __init__(
        self,
        settings: SeE2ASettings,
        type_map: Sequence[str],
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.sel = settings.neighbors().sel
        self.reach = Reach(settings.rcut, settings.rcut_smth, settings.env_protection)
        self.type_map = tuple(type_map)
        self.axis = settings.axis_neuron
        self.width = settings.neuron[-1]
        self.dim_out = self.width * self.axis
        self.one_side = settings.type_one_side
        self.excluded = frozenset(
            pair for a, b in settings.exclude_types for pair in ((a, b), (b, a))
        )
        self.activation = activation(settings.activation_function)
        self.interpolation_fits = not self.interpolation_covers.uncovered(settings)
        stream = Stream(seed if settings.seed is None else settings.seed).child(0)
        self.sea = EmbeddingBlock(settings, self.sel, stream)
        self.requires_grad_(settings.trainable)

    def set_statistics(self, mean: torch.Tensor, stddev: torch.Tensor) -> None:
        """Standardise environment rows by these values `(ntypes, 4)`; `set_davg_zero` leaves the mean alone."""
        if not self.settings.set_davg_zero:
            self.sea.mean.copy_(mean[:, None, :].expand_as(self.sea.mean))
        self.sea.stddev.copy_(stddev[:, None, :].expand_as(self.sea.stddev))

    def environment(self, structures: Structures, edges: torch.Tensor) -> Environment:
        """Environment of every edge, not standardised; rows of excluded pairs are not removed."""
        return environment(edges, structures.neighbor, self.reach)

    def forward(
        self, structures: Structures, edges: torch.Tensor, *, force: bool = True
    ) -> Described:
        """Describe every atom; see `Descriptor`."""
        for width, sel, name in zip(structures.sections, self.sel, self.type_map, strict=True):
            if width > sel:
                raise ModelError(
                    f"the batch has {width} columns for neighbours of type {name}, more than sel {sel}"
                )
        used = self.used_slots(structures)
        rows, empty_row, scale, jacobian = self._standardised(structures, edges, used)
        given, training = (self, structures, rows, empty_row), torch.is_grad_enabled()
        count, networks = rows.shape[0] * rows.shape[1], len(self.sea.filter_layers.networks)
        parts: _Contractions | _Interpolated
        if self.table is not None and not training:
            parts = _Interpolated(*given, self.table)
        elif (
            self.pieces
            and training
            and self.interpolation_fits
            and interpolation.pays(networks, count, len(self.pieces))
        ):
            parts = _Interpolated(*given)
        else:
            parts = _Contractions(*given, force=force)
        a = parts.gathered

        def pullback(adjoint: torch.Tensor) -> torch.Tensor:
            d_bar = adjoint.view(-1, self.width, self.axis)
            row_adjoint = parts.spread(pull_contraction(a, d_bar))
            if used is not None:
                row_adjoint = row_adjoint * used.unsqueeze(-1)
            return edge_derivative(row_adjoint, scale, jacobian)

        return Described(contract(a, self.axis).flatten(1), pullback if force else None)

    def _standardised(
        self, structures: Structures, edges: torch.Tensor, used: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Jacobian]:
        """Return R `(nreal, nnei, 4)`, R of an empty slot, dR/drow `(nreal, 4)`, and the derivative of the rows."""
        if triton_support.usable(edges.device) and used is None:
            from deepmd_muon.model.descriptor.se_e2_a.kernels import standard_rows

            statistics = self.sea.mean, self.sea.stddev, structures.sorted_type
            found = standard_rows(edges, structures.neighbor, self.reach, *statistics)
            return *found, Jacobian(self.reach, (edges, structures.neighbor))
        env = self.environment(structures, edges)
        dtype = self.sea.mean.dtype
        inverse = 1.0 / self.sea.stddev[:, 0]
        empty_row = (-self.sea.mean[:, 0] * inverse)[structures.sorted_type]
        scale = inverse[structures.sorted_type]
        rows = torch.addcmul(empty_row[:, None], env.rows.to(dtype), scale[:, None])
        if used is not None:
            rows = rows * used.unsqueeze(-1).to(dtype)
        return rows, empty_row, scale, env.jacobian

    def networks(self) -> list[list[Network]]:
        """Return the network of each neighbour type, for each centre type unless all centres share them."""
        ntypes, nets = len(self.sel), self.sea.filter_layers
        if self.one_side:
            return [[nets[other] for other in range(ntypes)]]
        return [
            [nets[other * ntypes + centre] for other in range(ntypes)] for centre in range(ntypes)
        ]

    @torch.no_grad()
    def pieces_for(self, structures: Structures, edges: torch.Tensor) -> Pieces:
        """Return the pieces that the present weights need on such a batch; see `Interpolated`."""
        if not self.interpolation_fits:
            return ()
        used = self.used_slots(structures)
        rows, empty_row, _, _ = self._standardised(structures, edges, used)
        given = self.networks(), self.activation, rows, empty_row, structures.sections, self.sel
        return interpolation.choose_pieces(*given, self.pieces)

    @torch.no_grad()
    def tabulate(
        self, structures: Structures, edges: torch.Tensor, nearest: float
    ) -> interpolation.Table | None:
        """Return a table that stands for the present weights on batches like this one; see `Tabulated`."""
        if not self.interpolation_fits:
            return None
        real, own = structures.neighbor >= 0, self.settings
        distance = torch.where(real, edges.square().sum(-1), own.rcut**2).flatten()
        nearest = interpolation.CLOSER * min(
            nearest, float(distance.amin().sqrt() if len(distance) else own.rcut)
        )
        point = edges.new_tensor([[[nearest, 0.0, 0.0]]])
        neighbor = torch.zeros(1, 1, dtype=torch.int64, device=edges.device)
        largest = environment(point, neighbor, self.reach).rows[0, 0, 0]
        mean, deviation = self.sea.mean[:, 0, 0], self.sea.stddev[:, 0, 0]
        # The s of an empty slot is the least, or 0 where a pair of types is excluded.
        ends = torch.stack(
            [
                (-mean / deviation).amin().clamp(max=0.0),
                ((largest.to(mean.dtype) - mean) / deviation).amax(),
            ]
        )
        return interpolation.tabulate(
            self.networks(), self.activation, ends, 1.0 / sum(self.sel), nearest
        )

    def used_slots(self, structures: Structures) -> torch.Tensor | None:
        """Return which slots count: all but neighbours of an excluded pair of types `(nreal, nnei)`."""
        if not self.excluded:
            return None
        used = torch.ones_like(structures.neighbor, dtype=torch.bool)
        atoms = _ranges(structures.type_counts)
        columns = _ranges(structures.sections)
        for centre, other in self.excluded:
            real = structures.neighbor[atoms[centre], columns[other]] >= 0
            used[atoms[centre], columns[other]] = ~real
        return used


class _Contractions:
    """The `Sums` of every network over its part of the edges.

    Attributes
    ----------
    gathered
        A = RᵀG/N of every atom `(nreal, 4, M)`, N = sum(sel).
    """

    def __init__(
        self,
        model: SeE2A,
        structures: Structures,
        rows: torch.Tensor,
        empty_row: torch.Tensor,
        *,
        force: bool,
    ) -> None:
        self.parts: list[list[tuple[slice, Pullback]]] = []
        atoms = [slice(None)] if model.one_side else _ranges(structures.type_counts)
        totals: list[torch.Tensor] = []
        for here, networks in zip(atoms, model.networks(), strict=True):
            gathered, parts = [], []
            for other, columns in enumerate(_ranges(structures.sections)):
                network = networks[other]
                sums = Sums(
                    plan_blocks(
                        structures.filled[other, here], structures.sections[other], rows.device
                    ),
                    model.sel[other],
                    model.activation,
                    network.copies,
                    force=force,
                    trace=torch.is_grad_enabled()
                    and any(p.requires_grad for p in network.parameters()),
                )
                (out,), pull = run_with_pullback(
                    sums, rows[here, columns], empty_row[here], *network.flat
                )
                gathered.append(out)
                parts.append((here, pull))
            totals.append(sum(gathered[1:], start=gathered[0]))
            self.parts.append(parts)
        self.slots = sum(model.sel)
        self.gathered = joined(totals) / self.slots

    def spread(self, adjoint: torch.Tensor) -> torch.Tensor:
        """Return dE/drow `(nreal, nnei, 4)` from dE/dA `(nreal, 4, M)`."""
        adjoint = adjoint / self.slots
        blocks = [
            torch.cat([pull(adjoint[here])[0] for here, pull in row], 1) for row in self.parts
        ]
        return joined(blocks)


class _Interpolated:
    """The same sums over interpolated networks; see `interpolation`."""

    def __init__(
        self,
        model: SeE2A,
        structures: Structures,
        rows: torch.Tensor,
        empty_row: torch.Tensor,
        table: interpolation.Table | None = None,
    ) -> None:
        atoms = [slice(None)] if model.one_side else _ranges(structures.type_counts)
        if table is not None:
            self.edges = table.edges(rows, empty_row, structures.sections, model.sel)
            coefficients = list(table.coefficients)
        else:
            self.edges = interpolation.cut(
                rows, empty_row, model.pieces, structures.sections, model.sel
            )
            scale, f = 1.0 / sum(model.sel), model.activation
            coefficients = [
                interpolation.coefficients(nets, f, self.edges, scale) for nets in model.networks()
            ]
        self.blocks = list(zip(atoms, coefficients, strict=True))
        expanded = interpolation.expand(self.edges)
        self.gathered = joined([torch.matmul(expanded[here], c) for here, c in self.blocks])

    def spread(self, adjoint: torch.Tensor) -> torch.Tensor:
        """Return dE/drow `(nreal, nnei, 4)` from dE/dA `(nreal, 4, M)`."""
        products = joined([torch.matmul(adjoint[here], c.t()) for here, c in self.blocks])
        return interpolation.evaluate(self.edges, products)


def _ranges(widths: Sequence[int]) -> list[slice]:
    ends = [0]
    for width in widths:
        ends.append(ends[-1] + width)
    return [slice(a, b) for a, b in pairwise(ends)]
