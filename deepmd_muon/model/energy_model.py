"""The energy model: descriptor and fitting net to energies, forces and virial."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from deepmd_muon.model.descriptor.interface import (
    Described,
    Interpolated,
    Recomputing,
    Standardised,
    Table,
    Tabulated,
)
from deepmd_muon.model.descriptor.pieces import Pieces, finest
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.fitting.interface import Conditioned
from deepmd_muon.model.nn import triton_support
from deepmd_muon.model.nn.layers import linear
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.model.settings import DEFAULT_ALPHA, ModelSettings, model_settings
from deepmd_muon.model.short_range import PairTable, edge_slope
from deepmd_muon.model.structures import EMPTY, HIDDEN, Structures
from deepmd_muon.setting import InvalidSettingError


class AtomicModel(torch.nn.Module):
    """Descriptor, fitting net and energy bias, under deepmd-kit's names."""

    out_bias: torch.Tensor
    out_std: torch.Tensor

    def __init__(self, settings: ModelSettings, seed: int | Sequence[int] | None) -> None:
        super().__init__()
        type_map, describe, fit = settings.type_map, settings.descriptor, settings.fitting_net
        self.register_buffer("out_bias", torch.zeros(1, len(type_map), 1, dtype=torch.float64))
        self.register_buffer("out_std", torch.ones(1, len(type_map), 1, dtype=torch.float64))
        self.descriptor = DESCRIPTORS.module(describe)(describe, type_map, seed)
        make_fitting = FITTING_NETS.module(fit)
        self.fitting_net = make_fitting(
            fit, type_map, self.descriptor.dim_out, describe.one_fitting_net, seed
        )


class EnergyModel(torch.nn.Module):
    """Maps structures to energies [eV], forces [eV/Å] and virial [eV].

    Attributes
    ----------
    settings
        The settings of the model.
    type_map
        Element symbol of every type.
    neighbors
        The neighbour list it reads.
    ntypes
        Number of types.
    short_range
        The table of `use_srtab`, None without one.
    excluded
        Which pairs of types are not neighbours, bool `(ntypes, ntypes)`; None where all are.
    counted
        1 for types whose atoms have an energy, 0 for others `(ntypes,)`; None where all have.
    """

    excluded: torch.Tensor | None
    counted: torch.Tensor | None

    def __init__(self, settings: ModelSettings, seed: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.settings = settings
        self.type_map = settings.type_map
        self.ntypes = len(self.type_map)
        self.neighbors = settings.descriptor.neighbors()
        self.atomic_model = AtomicModel(settings, seed)
        self._conditioned = isinstance(self.atomic_model.fitting_net, Conditioned)
        self.short_range: PairTable | None = None
        if settings.use_srtab is not None:
            assert settings.sw_rmin is not None
            assert settings.sw_rmax is not None
            switch, alpha = (
                (settings.sw_rmin, settings.sw_rmax),
                settings.smin_alpha or DEFAULT_ALPHA,
            )
            self.short_range = PairTable(
                settings.use_srtab, self.ntypes, self.neighbors.rcut, switch, alpha
            )
        pairs, atoms = settings.pair_exclude_types, settings.atom_exclude_types
        own = (
            () if self.by_type else getattr(settings.descriptor, "exclude_types", ())
        )  # columns by type: its own work
        excluded = torch.zeros(self.ntypes, self.ntypes, dtype=torch.int64)
        for mark, given in ((HIDDEN, own), (EMPTY, pairs)):
            for one, other in given:
                excluded[one, other] = excluded[other, one] = mark
        counted = torch.ones(self.ntypes, dtype=torch.float64)
        counted[list(atoms)] = 0.0
        self.register_buffer("excluded", excluded if excluded.any() else None, persistent=False)
        self.register_buffer("counted", counted if atoms else None, persistent=False)

    @property
    def rcut(self) -> float:
        """Cut-off radius [Å]."""
        return self.neighbors.rcut

    @property
    def sel(self) -> tuple[int, ...]:
        """Neighbour slots: one number for each type when `by_type`, else one for all."""
        return self.neighbors.sel

    @property
    def by_type(self) -> bool:
        """Whether the neighbour columns have to be grouped by type."""
        return self.neighbors.by_type

    def forward(
        self, structures: Structures, *, force: bool = True, virial: bool = True
    ) -> dict[str, torch.Tensor]:
        """Predict a batch; every output is differentiable once with respect to the parameters.

        Parameters
        ----------
        structures
            The batch; its neighbour columns must be grouped as `by_type` says.
        force
            Whether to compute forces. Without them the pass costs less than half.
        virial
            Whether to compute the virial; needs `force`.

        Returns
        -------
        dict
            `energy (nframes,)`, `atom_energy (nframes, natoms)` (0 for padding), and as asked
            `force (nframes, natoms, 3)` = −dE/dR and `virial (nframes, 9)` = −Σ dE/dr_ij ⊗ r_ij, all float64.
        """
        self._check(structures)
        structures = self.seen(structures)
        edges = edge_vectors(structures)
        model = self.atomic_model
        described: Described = model.descriptor(structures, edges, force=force)
        sorted_energy, adjoint, table_slope = self._fit(
            structures, described.descriptor, edges, force=force
        )
        shape = structures.atype.shape
        atom_energy = sorted_energy.new_zeros(shape.numel()).index_copy_(
            0, structures.order, sorted_energy
        )
        atom_energy = atom_energy.view(shape)
        out = {"energy": atom_energy.sum(1), "atom_energy": atom_energy}
        if not force:
            return out
        assert described.pullback is not None
        assert adjoint is not None
        slope = described.pullback(adjoint)
        if table_slope is not None:
            slope = slope + table_slope
        natoms, order, neighbor = (
            structures.nframes * structures.natoms,
            structures.order,
            structures.neighbor,
        )
        if virial and not slope.requires_grad and _sums_by_kernels(slope.device):
            from deepmd_muon.model.descriptor.environment_kernels import force_and_virial

            given = slope, edges, order, neighbor, structures.nframes, structures.natoms
            force_of_atoms, out["virial"] = force_and_virial(*given)
        else:
            force_of_atoms = forces_of(slope, order, neighbor, natoms)
            if virial:
                out["virial"] = _virial(structures, slope, edges)
        out["force"] = force_of_atoms.view(structures.coord.shape)
        return out

    def _fit(
        self, structures: Structures, descriptor: torch.Tensor, edges: torch.Tensor, *, force: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the energy of every sorted atom, bias included, its derivative by the descriptor, and the table's.

        The table adds the last to dE/dr_ij `(nreal, nnei, 3)`; it is None without a table or without forces.
        """
        net: Any = self.atomic_model.fitting_net
        given = {}
        if self._conditioned and (parameters := net.parameters_of(structures)) is not None:
            given["parameters"] = parameters
        energy, adjoint = net(descriptor, structures.type_counts, force=force, **given)
        slope = None
        if self.short_range is not None:
            if self.short_range.problem:
                raise ModelError(self.short_range.problem)
            kinds = torch.where(structures.neighbor >= 0, structures.neighbor_type, -1)
            blend = self.short_range(edges, structures.sorted_type, kinds)
            share = 1.0 - blend.weight
            if adjoint is not None:
                slope = edge_slope(blend, energy, edges)
                adjoint = share.unsqueeze(1).to(adjoint.dtype) * adjoint
            energy = share * energy + blend.weight * blend.energy
        energy = energy + self.atomic_model.out_bias[0, :, 0][structures.sorted_type]
        if self.counted is None:
            return energy, adjoint, slope
        weight = self.counted[structures.sorted_type]
        if adjoint is not None:
            adjoint = adjoint * weight.unsqueeze(1).to(adjoint.dtype)
        return energy * weight, adjoint, None if slope is None else slope * weight.view(-1, 1, 1)

    def seen(self, structures: Structures) -> Structures:
        """Return the batch with `EMPTY` or `HIDDEN` slots in place of neighbours of an excluded pair of types.

        The slots stay where they are: as in deepmd-kit, `sel` counts excluded neighbours.
        """
        if self.excluded is None:
            return structures
        mark = self.excluded[
            structures.sorted_type.unsqueeze(1), structures.neighbor_type.clamp(min=0)
        ]
        marked = (mark < 0) & (structures.neighbor >= 0)
        return dataclasses.replace(
            structures, neighbor=torch.where(marked, mark, structures.neighbor)
        )

    @property
    def pieces(self) -> Pieces:
        """Pieces of the interpolation that training steps use, where the descriptor knows one; else none."""
        return self.atomic_model.descriptor.pieces if self.can_interpolate else ()

    @pieces.setter
    def pieces(self, pieces: Pieces) -> None:
        if self.can_interpolate:
            self.atomic_model.descriptor.pieces = pieces

    @cached_property  # asking a protocol costs tens of microseconds, and every step asks
    def can_interpolate(self) -> bool:
        """Whether the descriptor knows how to interpolate its networks."""
        return isinstance(self.atomic_model.descriptor, Interpolated)

    def recompute_layers(self) -> bool:
        """Compute layers of the descriptor again in backward passes; False where it knows no such layers."""
        descriptor = self.atomic_model.descriptor
        if isinstance(descriptor, Recomputing):
            descriptor.recompute = True
            return True
        return False

    def wanted_pieces(self, batches: Iterable[Structures]) -> Pieces:
        """Return the `pieces` for the present weights and batches like these; it waits for the device."""
        descriptor = self.atomic_model.descriptor
        if not isinstance(descriptor, Interpolated):
            return ()
        return finest(
            descriptor.pieces_for(batch, edge_vectors(batch)) for batch in map(self.seen, batches)
        )

    def tabulate(self, batch: Structures, nearest: float = math.inf) -> Table | None:
        """Return a table of the descriptor's networks, where it knows tables, for batches like this one.

        Atoms may come as near as `nearest` [Å].
        """
        descriptor, seen = self.atomic_model.descriptor, self.seen(batch)
        return (
            descriptor.tabulate(seen, edge_vectors(seen), nearest)
            if isinstance(descriptor, Tabulated)
            else None
        )

    @contextlib.contextmanager
    def using(self, table: Table | None) -> Iterator[None]:
        """Predict by a table within the context."""
        descriptor = self.atomic_model.descriptor
        if not isinstance(descriptor, Tabulated):
            yield
            return
        descriptor.table = table
        try:
            yield
        finally:
            descriptor.table = None

    def set_statistics(self, mean: torch.Tensor, stddev: torch.Tensor) -> None:
        """Set the descriptor's standardisation, values `(ntypes, 4)` from `environment_statistics`.

        A descriptor without statistics of the data stays unchanged.
        """
        descriptor = self.atomic_model.descriptor
        if isinstance(descriptor, Standardised) and descriptor.needs_statistics:
            descriptor.set_statistics(mean, stddev)

    def set_energy_bias(self, bias: torch.Tensor | Sequence[float]) -> None:
        """Set the energy per atom of each type `(ntypes,)` [eV] that is added to the fitting net's output."""
        values = torch.as_tensor(bias, dtype=torch.float64)
        if values.numel() != self.ntypes:
            raise ModelError(f"the energy bias needs {self.ntypes} values, found {values.numel()}")
        self.atomic_model.out_bias.copy_(values.reshape(1, -1, 1))

    def _check(self, structures: Structures) -> None:
        wanted = self.ntypes if self.by_type else 1
        if len(structures.sections) != wanted:
            raise ModelError(
                f"the model needs {wanted} neighbour sections, found {len(structures.sections)}"
            )
        if len(structures.type_counts) != self.ntypes:
            raise ModelError(
                f"the model has {self.ntypes} types, the batch {len(structures.type_counts)}"
            )


def edge_vectors(structures: Structures) -> torch.Tensor:
    """Return r_ij = coord[j] + S·box − coord[i] `(nreal, nnei, 3)` [Å]; arbitrary in empty slots."""
    if triton_support.usable(structures.coord.device):
        from deepmd_muon.model.descriptor import environment_kernels

        atoms = structures.coord, structures.box, structures.order, structures.sorted_frame
        return environment_kernels.edge_vectors(*atoms, structures.neighbor, structures.shift)
    coord = structures.coord.reshape(-1, 3)
    neighbor = structures.neighbor.clamp(min=0)
    edges = coord.index_select(0, neighbor.view(-1)).view(*neighbor.shape, 3)
    edges = edges - coord[structures.order].unsqueeze(1)
    if structures.box is None or structures.shift is None:
        return edges
    box = structures.box[structures.sorted_frame]
    return torch.baddbmm(edges, structures.shift.to(box.dtype), box)


def forces_of(
    slope: torch.Tensor, order: torch.Tensor, neighbor: torch.Tensor, natoms: int
) -> torch.Tensor:
    """Return −dE/dR `(natoms, 3)` from dE/dr_ij `(nreal, nnei, 3)`: r_ij grows with atom j and shrinks with atom i.

    Other arguments as in `Structures`. Sums of kernels have an order that varies.
    """
    if _sums_by_kernels(slope.device):
        from deepmd_muon.model.descriptor import environment_kernels

        scatter, gather = environment_kernels.scatter, environment_kernels.gather
        return linear(partial(scatter, natoms=natoms), gather, slope, order, neighbor)
    return linear(partial(_scatter, natoms=natoms), _gather, slope, order, neighbor)


def _sums_by_kernels(device: torch.device) -> bool:
    """Return whether kernels may sum over edges, in an order that varies."""
    return triton_support.usable(device) and not torch.are_deterministic_algorithms_enabled()


def _scatter(
    slope: torch.Tensor, order: torch.Tensor, neighbor: torch.Tensor, natoms: int
) -> torch.Tensor:
    flat = slope.new_zeros(natoms, 3).index_add_(0, order, slope.sum(1))
    return flat.index_add_(0, neighbor.clamp(min=0).view(-1), slope.reshape(-1, 3), alpha=-1)


def _gather(cotangent: torch.Tensor, order: torch.Tensor, neighbor: torch.Tensor) -> torch.Tensor:
    """Apply the transpose of `_scatter`; arbitrary in empty slots, where dE/dr_ij is 0 whatever the parameters."""
    there = cotangent.index_select(0, neighbor.clamp(min=0).view(-1)).view(*neighbor.shape, 3)
    return cotangent.index_select(0, order).unsqueeze(1) - there


def _virial(structures: Structures, slope: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    """−Σ dE/dr_ij ⊗ r_ij per frame."""
    per_atom = torch.bmm(slope.transpose(1, 2), edges).reshape(-1, 9)
    zeros = slope.new_zeros(structures.nframes, 9)
    return zeros.index_add_(0, structures.sorted_frame, per_atom, alpha=-1)


def build_model(
    section: ModelSettings | Mapping[str, Any], seed: int | Sequence[int] | None = None
) -> EnergyModel:
    """Build the model that a `model` section describes.

    Parameters
    ----------
    section
        The settings, or their plain form as a normalised input and a checkpoint hold it.
    seed
        Start of the random stream of weights whose section has `seed` null; None draws fresh entropy.

    Raises
    ------
    ModelError
        When a type is not registered or a setting cannot be used.
    """
    settings = section if isinstance(section, ModelSettings) else model_settings(section)
    if not settings.type_map:
        raise ModelError(
            "type_map names no type; only dp train finds it in the data where an input leaves it out"
        )
    try:
        return EnergyModel(settings, seed)
    except InvalidSettingError as error:
        raise ModelError(str(error)) from error
