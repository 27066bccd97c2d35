"""The energy model: descriptor and fitting net to energies, forces and virial."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
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
from deepmd_muon.model.edges import edge_vectors, force_and_virial
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.fitting.interface import Conditioned
from deepmd_muon.model.interface import EnergyModel
from deepmd_muon.model.registry import DESCRIPTORS, FITTING_NETS
from deepmd_muon.model.settings import (
    DEFAULT_ALPHA,
    HostedSettings,
    ModelSettings,
    model_settings,
)
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
    if isinstance(settings, HostedSettings):
        from deepmd_muon.model.hosted.module import HostedModel

        return HostedModel(settings, seed)
    try:
        return DescriptorModel(settings, seed)
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


class DescriptorModel(EnergyModel):
    """An energy model of this package: a descriptor of each atom's neighbours and a fitting net.

    Attributes
    ----------
    short_range
        The table of `use_srtab`, None without one.
    excluded
        `EMPTY` or `HIDDEN` for pairs of types that are not neighbours, else 0
        `(ntypes, ntypes)`, int64; None if all are neighbours.
    """

    excluded: Tensor | None

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
    def missing_file(self) -> str | None:
        """The problem with the file of `use_srtab`."""
        return None if self.short_range is None else self.short_range.problem

    # ----- prediction ----------------------------------------------------------------------------

    def forward(
        self, structures: Structures, *, force: bool = True, virial: bool = True
    ) -> dict[str, Tensor]:
        """Predict a batch; see `EnergyModel`."""
        self.check_batch(structures)
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
        return out | force_and_virial(structures, edges, slope, virial=virial)

    def mark_excluded(self, structures: Structures) -> Structures:
        """Return the batch with `EMPTY` or `HIDDEN` slots for excluded pairs of types.

        The slots keep their places: as in deepmd-kit, `sel` counts excluded neighbours.
        """
        if self.excluded is None:
            return structures
        # (nreal, nnei); slots without neighbour have the type of some atom, and keep what they
        # hold.
        mark = self.excluded[structures.sorted_type.unsqueeze(1), structures.neighbor_type]
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

    @property
    def out_bias(self) -> Tensor:
        """Energy that is added to each atom of a type `(1, ntypes, 1)` [eV]."""
        bias: Tensor = self.atomic_model.out_bias
        return bias

    # ----- what a training run may share or order ------------------------------------------------

    @property
    def statistics_owner(self) -> object:
        """The descriptor, which branches may share."""
        return self.atomic_model.descriptor

    def early_parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters of the fitting net."""
        return set(self.atomic_model.fitting_net.parameters())


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
