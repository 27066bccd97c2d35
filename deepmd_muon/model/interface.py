"""The interface of all energy models: our own, and modules of deepmd-kit behind it."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_muon.model.descriptor.interface import Table
from deepmd_muon.model.descriptor.pieces import Pieces
from deepmd_muon.model.descriptor.settings import NeighborRequest
from deepmd_muon.model.errors import ModelError
from deepmd_muon.model.settings import ModelSettings
from deepmd_muon.model.structures import Structures


class EnergyModel(torch.nn.Module, ABC):
    """Maps structures to energies [eV], forces [eV/Å] and virial [eV].

    `state_dict` and `named_parameters` have deepmd-kit's names without the prefix
    `model.Default.`.

    Attributes
    ----------
    settings
        The settings of the model.
    type_map
        Element symbol of every type.
    ntypes
        Number of types.
    neighbors
        The neighbour list it reads.
    atomic_model
        The parts of the model, named as in deepmd-kit.
    counted
        1 for types whose atoms have an energy, 0 for others `(ntypes,)`; None if all have one.
    fits_own_statistics
        Whether `fit_statistics` replaces the statistics that the trainer measures.
    why_foreign
        Why the model has no form of ours, which a frozen file needs; None if it has one.
    adamw_substrings
        Parts of names of matrices that HybridMuon leaves to AdamW.
    why_not_captured
        Why a CUDA graph cannot hold its steps; None if one can.
    asks_for_compiler
        Whether its section asks for torch's compiler.
    why_not_compiled
        Why torch's compiler shall not fuse the operations of its steps; None if it may.
    """

    settings: ModelSettings
    type_map: tuple[str, ...]
    ntypes: int
    neighbors: NeighborRequest
    atomic_model: Any
    counted: Tensor | None
    fits_own_statistics: bool = False
    why_foreign: str | None = None
    adapters: frozenset[str] = frozenset()
    adamw_substrings: tuple[str, ...] = ()
    why_not_captured: str | None = None
    asks_for_compiler: bool = False
    why_not_compiled: str | None = "the model has kernels of its own"

    @property
    def missing_file(self) -> str | None:
        """The problem with a file that the model reads, unless a checkpoint brings its content."""
        return None

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

    def obsolete_names(self, saved: Collection[str]) -> frozenset[str]:
        """Return the tensors of a checkpoint that the model needs no longer, by name."""
        return frozenset()

    # ----- prediction ----------------------------------------------------------------------------

    @abstractmethod
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
            all float64. A model that reads spins adds `force_mag (nframes, natoms, 3)` = −dE/dspin
            and `mask_mag (nframes, natoms)`, true for magnetic atoms.
        """

    @property
    def lists_depend_on_spins(self) -> bool:
        """Whether neighbour lists have to reach virtual atoms, which spins displace."""
        return False

    def reach_spins(self, longest: float) -> None:
        """Make neighbour lists reach the virtual atoms of all spins up to a length.

        Caches and lists that were made before do not.
        """

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a prediction's float32 products."""
        return contextlib.nullcontext()

    def check_batch(self, structures: Structures) -> None:
        """Refuse a batch of another number of types or of other neighbour columns.

        Raises
        ------
        ModelError
            If the batch was made for another model.
        """
        n_sections = self.ntypes if self.by_type else 1
        if len(structures.sections) != n_sections:
            raise ModelError(
                f"the model needs {n_sections} neighbour sections, found {len(structures.sections)}"
            )
        if len(structures.type_counts) != self.ntypes:
            raise ModelError(
                f"the model has {self.ntypes} types, the batch {len(structures.type_counts)}"
            )

    # ----- statistics of the data ----------------------------------------------------------------

    @property
    @abstractmethod
    def out_bias(self) -> Tensor:
        """Energy that is added to each atom of a type `(1, ntypes, 1)` [eV]."""

    def set_energy_bias(self, bias: Tensor | Sequence[float]) -> None:
        """Set the energy that is added to each atom of a type `(ntypes,)` [eV]."""
        values = torch.as_tensor(bias, dtype=torch.float64)
        if values.numel() != self.ntypes:
            raise ModelError(f"the energy bias needs {self.ntypes} values, found {values.numel()}")
        self.out_bias.copy_(values.reshape(1, -1, 1))

    def set_statistics(self, mean: Tensor, stddev: Tensor) -> None:
        """Set the standardisation of neighbourhoods from `environment_statistics` `(ntypes, 4)`.

        A model without statistics of the data stays unchanged.
        """

    def fit_statistics(self, samples: Sequence[Mapping[str, Tensor]]) -> None:
        """Fit all statistics, the energy bias included, to batches in deepmd-kit's form.

        Only models with `fits_own_statistics` do. A batch has `coord (nframes, natoms, 3)`,
        `atype (nframes, natoms)`, `box (nframes, 9)` or None, `natoms (nframes, 2 + ntypes)`,
        `energy (nframes, 1)` with `find_energy`, and `fparam`, `aparam` if the data have them.
        """
        raise NotImplementedError(f"{type(self).__name__}.fit_statistics")

    def mark_excluded(self, structures: Structures) -> Structures:
        """Return the batch with empty or hidden slots for excluded pairs of types."""
        return structures

    # ----- what a training run may share, order or recompute -------------------------------------

    @property
    def statistics_owner(self) -> object:
        """The part whose statistics branches share if they share it."""
        return self

    def early_parameters(self) -> set[torch.nn.Parameter]:
        """Return the parameters whose gradients a backward pass completes first."""
        return set()

    def recompute_layers(self) -> bool:
        """Compute layers again in backward passes; False if the model cannot."""
        return False

    # ----- interpolation and tables --------------------------------------------------------------

    @property
    def can_interpolate(self) -> bool:
        """Whether training steps can interpolate its networks."""
        return False

    @property
    def pieces(self) -> Pieces:
        """Pieces of the interpolation that training steps use; none without interpolation."""
        return ()

    @pieces.setter
    def pieces(self, pieces: Pieces) -> None:
        """Ignore pieces of a model that interpolates nothing."""

    def wanted_pieces(self, batches: Iterable[Structures]) -> Pieces:
        """Return the `pieces` for the present weights and such batches; it waits for the device."""
        return ()

    def tabulate(self, batch: Structures, nearest: float = math.inf) -> Table | None:
        """Return a table of the descriptor's networks for batches like this one; None without.

        Atoms may come as near as `nearest` [Å].
        """
        return None

    @contextlib.contextmanager
    def using(self, table: Table | None) -> Iterator[None]:
        """Predict by a table in a `with` block."""
        yield
