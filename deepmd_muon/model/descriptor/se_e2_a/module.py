"""The smooth two-body embedding descriptor `se_e2_a` (Zhang et al., arXiv:1805.09003)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_muon.coverage import Coverage
from deepmd_muon.model.descriptor.environment import (
    Environment,
    Jacobian,
    edge_derivative,
    environment,
)
from deepmd_muon.model.descriptor.interface import Described, Pullback
from deepmd_muon.model.descriptor.pieces import Pieces
from deepmd_muon.model.descriptor.reach import Reach
from deepmd_muon.model.descriptor.se_e2_a import interpolation
from deepmd_muon.model.descriptor.se_e2_a.embedding import (
    SumInputs,
    Sums,
    contract,
    plan_blocks,
    pull_contraction,
)
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

    mean: Tensor
    stddev: Tensor

    def __init__(self, settings: SeE2ASettings, sel: tuple[int, ...], stream: Stream) -> None:
        super().__init__()
        dtype = dtype_of(settings.precision)
        ntypes = len(sel)
        self.register_buffer("mean", torch.zeros(ntypes, sum(sel), 4, dtype=dtype))
        self.register_buffer("stddev", torch.ones(ntypes, sum(sel), 4, dtype=dtype))
        networks = [
            Network(
                (1, *settings.neuron),
                None,
                timestep=settings.resnet_dt,
                dtype=dtype,
                stream=stream.child(index),
            )
            for index in range(ntypes if settings.type_one_side else ntypes * ntypes)
        ]
        self.filter_layers = NetworkCollection(networks)


class StandardRows(NamedTuple):
    """Standardised environment rows.

    Attributes
    ----------
    rows
        R `(nreal, nnei, 4)`.
    empty
        R of an empty slot `(nreal, 4)`.
    scale
        dR/drow `(nreal, 4)`.
    jacobian
        The derivative of the rows by the edge vectors.
    """

    rows: Tensor
    empty: Tensor
    scale: Tensor
    jacobian: Jacobian


class SeE2A(torch.nn.Module):
    """D_i = (RᵀG/N)ᵀ(RᵀG_axis/N) with G = embedding(s) and N = sum(sel).

    R are the standardised environment rows. Every slot of `sel` counts, an empty slot with the
    standardised zero row. Arguments as in `Descriptor`.
    """

    needs_statistics = True
    #: The settings that interpolated networks implement, in training steps and in tables for
    #: predictions.
    interpolation_covers = Coverage(
        frozenset(
            {
                "sel",
                "rcut",
                "rcut_smth",
                "env_protection",
                "set_davg_zero",
                "exclude_types",
                "neuron",
                "axis_neuron",
                "activation_function",
                "resnet_dt",
                "type_one_side",
                "precision",
                "trainable",
                "seed",
            }
        )
    )
    #: How training steps cut the interval of an embedding net; without pieces they evaluate it at
    #: every edge.
    pieces: Pieces = ()
    #: Replaces the embedding nets in predictions; made by `tabulate`.
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
        self.slots = sum(self.sel)
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

    def set_statistics(self, mean: Tensor, stddev: Tensor) -> None:
        """Standardise environment rows by these values `(ntypes, 4)`; see `set_davg_zero`."""
        if not self.settings.set_davg_zero:
            self.sea.mean.copy_(mean[:, None, :].expand_as(self.sea.mean))
        self.sea.stddev.copy_(stddev[:, None, :].expand_as(self.sea.stddev))

    def environment(self, structures: Structures, edges: Tensor) -> Environment:
        """Return the environment of every edge, not standardised, with excluded pairs."""
        return environment(edges, structures.neighbor, self.reach)

    def forward(self, structures: Structures, edges: Tensor, *, force: bool = True) -> Described:
        """Describe every atom; see `Descriptor`."""
        for width, sel, name in zip(structures.sections, self.sel, self.type_map, strict=True):
            if width > sel:
                raise ModelError(
                    f"the batch has {width} columns for neighbours of type {name}, more than sel "
                    f"{sel}"
                )
        used = self.used_slots(structures)
        standard = self._standardised(structures, edges, used)
        training = torch.is_grad_enabled()
        sums: _Contractions | _Interpolated
        if self.table is not None and not training:
            sums = _Interpolated(self, structures, standard, self.table)
        elif training and self._interpolation_pays(standard.rows):
            sums = _Interpolated(self, structures, standard)
        else:
            sums = _Contractions(self, structures, standard, force=force)
        a = sums.a

        def pullback(adjoint: Tensor) -> Tensor:
            d_bar = adjoint.view(-1, self.width, self.axis)
            rows_bar = sums.pull(pull_contraction(a, d_bar))
            if used is not None:
                rows_bar = rows_bar * used.unsqueeze(-1)
            return edge_derivative(rows_bar, standard.scale, standard.jacobian)

        return Described(contract(a, self.axis).flatten(1), pullback if force else None)

    def _interpolation_pays(self, rows: Tensor) -> bool:
        """Return whether networks can be interpolated with these settings, faster on this batch."""
        n_edges = rows.shape[0] * rows.shape[1]
        n_networks = len(self.sea.filter_layers.networks)
        return (
            bool(self.pieces)
            and self.interpolation_fits
            and interpolation.pays(n_networks, n_edges, len(self.pieces))
        )

    def _standardised(
        self, structures: Structures, edges: Tensor, used: Tensor | None
    ) -> StandardRows:
        if triton_support.usable(edges.device) and used is None:
            from deepmd_muon.model.descriptor.se_e2_a.kernels import standard_rows

            rows, empty, scale = standard_rows(
                edges,
                structures.neighbor,
                self.reach,
                mean=self.sea.mean,
                stddev=self.sea.stddev,
                kinds=structures.sorted_type,
            )
            jacobian = Jacobian(self.reach, (edges, structures.neighbor))
            return StandardRows(rows, empty, scale, jacobian)
        env = self.environment(structures, edges)
        dtype = self.sea.mean.dtype
        scale_by_type = 1.0 / self.sea.stddev[:, 0]
        empty_by_type = -self.sea.mean[:, 0] * scale_by_type
        empty = empty_by_type[structures.sorted_type]
        scale = scale_by_type[structures.sorted_type]
        rows = torch.addcmul(empty[:, None], env.rows.to(dtype), scale[:, None])
        if used is not None:
            rows = rows * used.unsqueeze(-1).to(dtype)
        return StandardRows(rows, empty, scale, env.jacobian)

    def networks(self) -> list[list[Network]]:
        """Return the networks of all neighbour types, for each centre type unless it is shared."""
        ntypes = len(self.sel)
        nets = self.sea.filter_layers
        if self.one_side:
            return [[nets[neighbor] for neighbor in range(ntypes)]]
        return [
            [nets[neighbor * ntypes + centre] for neighbor in range(ntypes)]
            for centre in range(ntypes)
        ]

    def centres(self, structures: Structures) -> list[slice]:
        """Return the atoms that have each of `networks`."""
        return [slice(None)] if self.one_side else _ranges(structures.type_counts)

    @torch.no_grad()
    def pieces_for(self, structures: Structures, edges: Tensor) -> Pieces:
        """Return the pieces that the present weights need on such a batch; see `Interpolated`."""
        if not self.interpolation_fits:
            return ()
        standard = self._standardised(structures, edges, self.used_slots(structures))
        intervals = interpolation.intervals_of(standard.rows, standard.empty, structures.sections)
        return interpolation.choose_pieces(
            self.networks(), self.activation, intervals, present=self.pieces
        )

    @torch.no_grad()
    def tabulate(
        self, structures: Structures, edges: Tensor, nearest: float
    ) -> interpolation.Table | None:
        """Return a table of the present weights for batches like this one; see `Tabulated`."""
        if not self.interpolation_fits:
            return None
        rcut = self.settings.rcut
        squares = torch.where(structures.neighbor >= 0, edges.square().sum(-1), rcut**2).flatten()
        closest = float(squares.amin().sqrt()) if len(squares) else rcut
        nearest = interpolation.CLOSER * min(nearest, closest)
        # The largest s is that of a neighbour at this distance.
        point = edges.new_tensor([[[nearest, 0.0, 0.0]]])
        neighbor = torch.zeros(1, 1, dtype=torch.int64, device=edges.device)
        largest = environment(point, neighbor, self.reach).rows[0, 0, 0]
        mean = self.sea.mean[:, 0, 0]
        stddev = self.sea.stddev[:, 0, 0]
        # The least s is that of an empty slot, or 0 if a pair of types is excluded.
        low = (-mean / stddev).amin().clamp(max=0.0)
        high = ((largest.to(mean.dtype) - mean) / stddev).amax()
        return interpolation.tabulate(
            self.networks(),
            self.activation,
            torch.stack([low, high]),
            scale=1.0 / self.slots,
            nearest=nearest,
        )

    def used_slots(self, structures: Structures) -> Tensor | None:
        """Return which slots count `(nreal, nnei)`: all but neighbours of excluded pairs."""
        if not self.excluded:
            return None
        used = torch.ones_like(structures.neighbor, dtype=torch.bool)
        atoms = _ranges(structures.type_counts)
        columns = _ranges(structures.sections)
        for centre, neighbor in self.excluded:
            is_neighbor = structures.neighbor[atoms[centre], columns[neighbor]] >= 0
            used[atoms[centre], columns[neighbor]] = ~is_neighbor
        return used


class _Contractions:
    """The `Sums` of every network over its part of the edges.

    Attributes
    ----------
    a
        A = RᵀG/N of every atom `(nreal, 4, M)`, N = sum(sel).
    """

    def __init__(
        self, model: SeE2A, structures: Structures, standard: StandardRows, *, force: bool
    ) -> None:
        self._slots = model.slots
        self._centres = model.centres(structures)
        self._pulls: list[list[Pullback]] = []  # of each neighbour type, for each of the centres
        sums_of_centres: list[Tensor] = []
        for atoms, networks in zip(self._centres, model.networks(), strict=True):
            pulls: list[Pullback] = []
            total: Tensor | None = None
            for kind, columns in enumerate(_ranges(structures.sections)):
                network = networks[kind]
                trains = any(p.requires_grad for p in network.parameters())
                sums = Sums(
                    plans=plan_blocks(
                        structures.filled[kind, atoms],
                        structures.sections[kind],
                        standard.rows.device,
                    ),
                    sel=model.sel[kind],
                    activation=model.activation,
                    copies=network.copies,
                    force=force,
                    trace=torch.is_grad_enabled() and trains,
                )
                inputs = SumInputs(
                    standard.rows[atoms, columns], standard.empty[atoms], network.tensors
                )
                (a,), pull = run_with_pullback(sums, inputs)
                total = a if total is None else total + a
                pulls.append(pull)
            assert total is not None
            sums_of_centres.append(total)
            self._pulls.append(pulls)
        self.a = joined(sums_of_centres) / self._slots

    def pull(self, a_bar: Tensor) -> Tensor:
        """Return dE/drow `(nreal, nnei, 4)` from dE/dA `(nreal, 4, M)`."""
        a_bar = a_bar / self._slots
        rows_of_centres = []
        for atoms, pulls in zip(self._centres, self._pulls, strict=True):
            columns = [pull(a_bar[atoms])[0] for pull in pulls]
            rows_of_centres.append(torch.cat(columns, 1))
        return joined(rows_of_centres)


class _Interpolated:
    """The same sums by interpolated networks, from a table or the present weights."""

    def __init__(
        self,
        model: SeE2A,
        structures: Structures,
        standard: StandardRows,
        table: interpolation.Table | None = None,
    ) -> None:
        sections = structures.sections
        if table is not None:
            self._edges = table.edges(standard.rows, standard.empty, sections, model.sel)
            self._coefficients = list(table.coefficients)
        else:
            self._edges = interpolation.cut(
                standard.rows,
                standard.empty,
                pieces=model.pieces,
                widths=sections,
                sel=model.sel,
            )
            self._coefficients = [
                interpolation.coefficients(
                    networks,
                    model.activation,
                    self._edges.intervals,
                    self._edges.pieces,
                    scale=1.0 / model.slots,
                )
                for networks in model.networks()
            ]
        self._centres = model.centres(structures)
        b = interpolation.expand(self._edges)
        self.a = joined([torch.matmul(b[atoms], c) for atoms, c in self._blocks()])

    def _blocks(self) -> list[tuple[slice, Tensor]]:
        """Return the atoms of each block of coefficients, and C."""
        return list(zip(self._centres, self._coefficients, strict=True))

    def pull(self, a_bar: Tensor) -> Tensor:
        """Return dE/drow `(nreal, nnei, 4)` from dE/dA `(nreal, 4, M)`."""
        p = joined([torch.matmul(a_bar[atoms], c.t()) for atoms, c in self._blocks()])
        return interpolation.evaluate(self._edges, p)


def _ranges(widths: Sequence[int]) -> list[slice]:
    """Return consecutive slices of these widths."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(widths, initial=0))]
