"""The energy model: descriptor and fitting net to energies, forces and virial."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

# ----- the model ---------------------------------------------------------------------------------


def build_model(
    section: ModelSettings | Mapping[str, Any], seed: int | Sequence[int] | None = None
) -> EnergyModel:
    """Build the model that a `model` section describes.

    Parameters
    ----------
    section
        The settings, or their plain form as a normalised input and a checkpoint hold it.
    seed
        Seed of the weights of parts without a `seed` in their section; None draws fresh entropy.

    Raises
    ------
    ModelError
        If a type is not registered or a setting cannot be used.
    """
    settings = section if isinstance(section, ModelSettings) else model_settings(section)
    if not settings.type_map:
        raise ModelError(
            "type_map names no type; "
            "only dp train finds it in the data where an input leaves it out"
        )
    try:
        return EnergyModel(settings, seed)
    except InvalidSettingError as error:
        raise ModelError(str(error)) from error


class AtomicModel(torch.nn.Module):
    """Descriptor, fitting net and energy bias, under deepmd-kit's names."""

    out_bias: Tensor
    out_std: Tensor

    def __init__(self, settings: ModelSettings, seed: int | Sequence[int] | None) -> None:
        super().__init__()
        type_map = settings.type_map
        descriptor = settings.descriptor
        fitting_net = settings.fitting_net
        self.register_buffer("out_bias", torch.zeros(1, len(type_map), 1, dtype=torch.float64))
        self.register_buffer("out_std", torch.ones(1, len(type_map), 1, dtype=torch.float64))
        self.descriptor = DESCRIPTORS.module(descriptor)(descriptor, type_map, seed)
        self.fitting_net = FITTING_NETS.module(fitting_net)(
            fitting_net, type_map, self.descriptor.dim_out, descriptor.one_fitting_net, seed
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
        `EMPTY` or `HIDDEN` for pairs of types that are not neighbours, else 0
        `(ntypes, ntypes)`, int64; None if all are neighbours.
    counted
        1 for types whose atoms have an energy, 0 for others `(ntypes,)`; None if all have one.
    """

    excluded: Tensor | None
    counted: Tensor | None

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
            self.short_range = PairTable(
                settings.use_srtab,
                ntypes=self.ntypes,
                rcut=self.neighbors.rcut,
                switch=(settings.sw_rmin, settings.sw_rmax),
                alpha=settings.smin_alpha or DEFAULT_ALPHA,
            )
        self.register_buffer("excluded", self._excluded_pairs(), persistent=False)
        counted = None
        if settings.atom_exclude_types:
            counted = torch.ones(self.ntypes, dtype=torch.float64)
            counted[list(settings.atom_exclude_types)] = 0.0
        self.register_buffer("counted", counted, persistent=False)

    def _excluded_pairs(self) -> Tensor | None:
        """Return the buffer `excluded`."""
        # A descriptor with columns by type excludes its pairs itself.
        hidden = () if self.by_type else getattr(self.settings.descriptor, "exclude_types", ())
        excluded = torch.zeros(self.ntypes, self.ntypes, dtype=torch.int64)
        # EMPTY comes last: it wins for a pair that is in both settings.
        for mark, pairs in ((HIDDEN, hidden), (EMPTY, self.settings.pair_exclude_types)):
            for i, j in pairs:
                excluded[i, j] = mark
                excluded[j, i] = mark
        return excluded if excluded.any() else None

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

    # ----- prediction ----------------------------------------------------------------------------

    def forward(
        self, structures: Structures, *, force: bool = True, virial: bool = True
    ) -> dict[str, Tensor]:
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
            `energy (nframes,)`, `atom_energy (nframes, natoms)` (0 for padding), and as requested
            `force (nframes, natoms, 3)` = −dE/dR and `virial (nframes, 9)` = −Σ dE/dr_ij ⊗ r_ij,
            all float64.
        """
        self._check(structures)
        structures = self.mark_excluded(structures)
        edges = edge_vectors(structures)
        described: Described = self.atomic_model.descriptor(structures, edges, force=force)
        fitted = self._fit(structures, described.descriptor, edges, force=force)
        shape = structures.atype.shape
        # From sorted atoms back to (nframes, natoms); padding keeps 0.
        atom_energy = fitted.energy.new_zeros(shape.numel())
        atom_energy = atom_energy.index_copy_(0, structures.order, fitted.energy).view(shape)
        out = {"energy": atom_energy.sum(1), "atom_energy": atom_energy}
        if not force:
            return out
        assert described.pullback is not None
        assert fitted.adjoint is not None
        slope = described.pullback(fitted.adjoint)  # dE/dr_ij (nreal, nnei, 3)
        if fitted.table_slope is not None:
            slope = slope + fitted.table_slope
        # These kernels have no derivative: a gradient of the loss takes the other way.
        if virial and not slope.requires_grad and _sums_by_kernels(slope.device):
            from deepmd_muon.model.descriptor.environment_kernels import force_and_virial

            forces, out["virial"] = force_and_virial(
                slope=slope,
                edges=edges,
                order=structures.order,
                neighbor=structures.neighbor,
                nframes=structures.nframes,
                natoms=structures.natoms,
            )
        else:
            forces = forces_of(slope, structures.order, structures.neighbor, shape.numel())
            if virial:
                out["virial"] = _virial(structures, slope, edges)
        out["force"] = forces.view(structures.coord.shape)
        return out

    def _check(self, structures: Structures) -> None:
        n_sections = self.ntypes if self.by_type else 1
        if len(structures.sections) != n_sections:
            raise ModelError(
                f"the model needs {n_sections} neighbour sections, found {len(structures.sections)}"
            )
        if len(structures.type_counts) != self.ntypes:
            raise ModelError(
                f"the model has {self.ntypes} types, the batch {len(structures.type_counts)}"
            )

    def mark_excluded(self, structures: Structures) -> Structures:
        """Return the batch with `EMPTY` or `HIDDEN` slots for excluded pairs of types.

        The slots keep their places: as in deepmd-kit, `sel` counts excluded neighbours.
        """
        if self.excluded is None:
            return structures
        # (nreal, nnei); slots without neighbour have the type of some atom, and keep what they
        # hold.
        mark = self.excluded[
            structures.sorted_type.unsqueeze(1), structures.neighbor_type.clamp(min=0)
        ]
        marked = (mark < 0) & (structures.neighbor >= 0)
        neighbor = torch.where(marked, mark, structures.neighbor)
        return dataclasses.replace(structures, neighbor=neighbor)

    def _fit(
        self, structures: Structures, descriptor: Tensor, edges: Tensor, *, force: bool
    ) -> _Fitted:
        """Return energies of atoms, bias and table included, and their derivatives."""
        fitting_net: Any = self.atomic_model.fitting_net
        options = {}
        if self._conditioned:
            parameters = fitting_net.parameters_of(structures)
            if parameters is not None:
                options["parameters"] = parameters
        energy, adjoint = fitting_net(descriptor, structures.type_counts, force=force, **options)
        table_slope = None
        if self.short_range is not None:
            if self.short_range.problem:
                raise ModelError(self.short_range.problem)
            neighbor_type = torch.where(structures.neighbor >= 0, structures.neighbor_type, -1)
            blend = self.short_range(edges, structures.sorted_type, neighbor_type)
            # E′ = (1 − w)·E + w·T. The descriptor reaches E alone, so that dE/dD gets 1 − w;
            # w and T depend on the edges directly.
            network_weight = 1.0 - blend.weight
            if adjoint is not None:
                table_slope = edge_slope(blend, energy, edges)
                adjoint = network_weight.unsqueeze(1).to(adjoint.dtype) * adjoint
            energy = network_weight * energy + blend.weight * blend.energy
        energy = energy + self.atomic_model.out_bias[0, :, 0][structures.sorted_type]
        if self.counted is not None:
            weight = self.counted[structures.sorted_type]
            energy = energy * weight
            if adjoint is not None:
                adjoint = adjoint * weight.unsqueeze(1).to(adjoint.dtype)
            if table_slope is not None:
                table_slope = table_slope * weight.view(-1, 1, 1)
        return _Fitted(energy, adjoint, table_slope)

    # ----- interpolation, tables and recomputation of the descriptor -----------------------------

    @property
    def pieces(self) -> Pieces:
        """Pieces of the interpolation that training steps use; none if the descriptor has none."""
        return self.atomic_model.descriptor.pieces if self.can_interpolate else ()

    @pieces.setter
    def pieces(self, pieces: Pieces) -> None:
        if self.can_interpolate:
            self.atomic_model.descriptor.pieces = pieces

    @cached_property  # asking a protocol costs tens of microseconds, and every step asks
    def can_interpolate(self) -> bool:
        """Whether the descriptor knows how to interpolate its networks."""
        return isinstance(self.atomic_model.descriptor, Interpolated)

    def wanted_pieces(self, batches: Iterable[Structures]) -> Pieces:
        """Return the `pieces` for the present weights and such batches; it waits for the device."""
        descriptor = self.atomic_model.descriptor
        if not isinstance(descriptor, Interpolated):
            return ()
        return finest(
            descriptor.pieces_for(batch, edge_vectors(batch))
            for batch in map(self.mark_excluded, batches)
        )

    def tabulate(self, batch: Structures, nearest: float = math.inf) -> Table | None:
        """Return a table of the descriptor's networks for batches like this one.

        None if the descriptor has no tables. Atoms may come as near as `nearest` [Å].
        """
        descriptor = self.atomic_model.descriptor
        if not isinstance(descriptor, Tabulated):
            return None
        batch = self.mark_excluded(batch)
        return descriptor.tabulate(batch, edge_vectors(batch), nearest)

    @contextlib.contextmanager
    def using(self, table: Table | None) -> Iterator[None]:
        """Predict by a table in a `with` block."""
        descriptor = self.atomic_model.descriptor
        if not isinstance(descriptor, Tabulated):
            yield
            return
        descriptor.table = table
        try:
            yield
        finally:
            descriptor.table = None

    def recompute_layers(self) -> bool:
        """Compute layers of the descriptor again in backward passes; False if it cannot."""
        descriptor = self.atomic_model.descriptor
        if isinstance(descriptor, Recomputing):
            descriptor.recompute = True
            return True
        return False

    # ----- statistics of the data ----------------------------------------------------------------

    def set_statistics(self, mean: Tensor, stddev: Tensor) -> None:
        """Set the descriptor's standardisation from `environment_statistics` `(ntypes, 4)`.

        A descriptor without statistics of the data stays unchanged.
        """
        descriptor = self.atomic_model.descriptor
        if isinstance(descriptor, Standardised) and descriptor.needs_statistics:
            descriptor.set_statistics(mean, stddev)

    def set_energy_bias(self, bias: Tensor | Sequence[float]) -> None:
        """Set the energy that is added to each atom of a type `(ntypes,)` [eV]."""
        values = torch.as_tensor(bias, dtype=torch.float64)
        if values.numel() != self.ntypes:
            raise ModelError(f"the energy bias needs {self.ntypes} values, found {values.numel()}")
        self.atomic_model.out_bias.copy_(values.reshape(1, -1, 1))


class _Fitted(NamedTuple):
    """Energies of the sorted atoms, and their derivatives; None without forces.

    Attributes
    ----------
    energy
        Energies `(nreal,)` [eV].
    adjoint
        dE/dD, like the descriptor.
    table_slope
        What the table adds to dE/dr_ij `(nreal, nnei, 3)` [eV/Å]; None without a table, too.
    """

    energy: Tensor
    adjoint: Tensor | None
    table_slope: Tensor | None


# ----- edges, forces and virial ------------------------------------------------------------------


def edge_vectors(structures: Structures) -> Tensor:
    """Return r_ij = R_j + S·box − R_i `(nreal, nnei, 3)` [Å]; arbitrary in empty slots."""
    if triton_support.usable(structures.coord.device):
        from deepmd_muon.model.descriptor import environment_kernels

        return environment_kernels.edge_vectors(
            coord=structures.coord,
            box=structures.box,
            order=structures.order,
            frame=structures.sorted_frame,
            neighbor=structures.neighbor,
            shift=structures.shift,
        )
    coord = structures.coord.reshape(-1, 3)
    neighbor = structures.neighbor.clamp(min=0)  # empty slots read atom 0
    edges = coord.index_select(0, neighbor.view(-1)).view(*neighbor.shape, 3)
    edges = edges - coord[structures.order].unsqueeze(1)
    if structures.box is None or structures.shift is None:
        return edges
    box = structures.box[structures.sorted_frame]
    return torch.baddbmm(edges, structures.shift.to(box.dtype), box)


def forces_of(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    """Return −dE/dR `(natoms, 3)` from dE/dr_ij `(nreal, nnei, 3)`; r_ij = R_j − R_i.

    Other arguments as in `Structures`. Kernels sum in an order that varies.
    """
    if _sums_by_kernels(slope.device):
        from deepmd_muon.model.descriptor import environment_kernels

        scatter = partial(environment_kernels.scatter, natoms=natoms)
        return linear(scatter, environment_kernels.gather, slope, order, neighbor)
    return linear(partial(_scatter, natoms=natoms), _gather, slope, order, neighbor)


def _sums_by_kernels(device: torch.device) -> bool:
    """Return whether kernels may sum over edges, in an order that varies."""
    return triton_support.usable(device) and not torch.are_deterministic_algorithms_enabled()


def _scatter(slope: Tensor, order: Tensor, neighbor: Tensor, natoms: int) -> Tensor:
    # −dE/dR_i gets +dE/dr_ij of the edges that start at i, and −dE/dr_ki of those that end there.
    flat = slope.new_zeros(natoms, 3).index_add_(0, order, slope.sum(1))
    return flat.index_add_(0, neighbor.clamp(min=0).view(-1), slope.reshape(-1, 3), alpha=-1)


def _gather(cotangent: Tensor, order: Tensor, neighbor: Tensor) -> Tensor:
    """Apply the transpose of `_scatter`; arbitrary in empty slots.

    Their dE/dr_ij is 0 whatever the parameters, so that nothing reads them.
    """
    of_neighbor = cotangent.index_select(0, neighbor.clamp(min=0).view(-1))
    return cotangent.index_select(0, order).unsqueeze(1) - of_neighbor.view(*neighbor.shape, 3)


def _virial(structures: Structures, slope: Tensor, edges: Tensor) -> Tensor:
    """Return −Σ dE/dr_ij ⊗ r_ij `(nframes, 9)` [eV]."""
    per_atom = torch.bmm(slope.transpose(1, 2), edges).reshape(-1, 9)
    zeros = slope.new_zeros(structures.nframes, 9)
    return zeros.index_add_(0, structures.sorted_frame, per_atom, alpha=-1)
