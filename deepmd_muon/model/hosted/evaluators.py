"""Energies of atoms from the modules of deepmd-kit, called below their neighbour search.

A module reads either edges or a neighbour list. Both hold the r_ij of the batch: no ghost atoms are
searched, and a step never waits for the device.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

from deepmd_muon.model.hosted.layout import FrameBatch, within_cutoff


class Evaluator(Protocol):
    """Calls one kind of module."""

    #: Whether the cut-off applies to a virtual atom itself; else it applies to its atom.
    virtual_by_distance: bool

    def energies(self, batch: FrameBatch) -> Tensor:
        """Return the energy of every atom `(nframes · natoms,)` [eV], float64.

        It is differentiable twice with respect to `batch.vectors`, and 0 for padding.
        """

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which energies and their first derivatives are computed."""


def evaluator_of(module: Any) -> Evaluator:
    """Return the evaluator of a model of deepmd-kit."""
    if hasattr(module, "core_compute"):
        return EdgeEvaluator(module)
    if hasattr(module, "backbone_model"):
        return VirtualAtomEvaluator(module.backbone_model)
    return NeighborListEvaluator(module)


class EdgeEvaluator:
    """DPA-4: a list of edges with a mask."""

    virtual_by_distance = False

    def __init__(self, module: Any) -> None:
        self._module = module

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the module's own context, which may permit TF32."""
        context: contextlib.AbstractContextManager[None] = self._module.tf32_precision_ctx()
        return context

    def energies(self, batch: FrameBatch) -> Tensor:
        """Return the energy of every atom; see `Evaluator`."""
        module = self._module
        nframes, natoms = batch.atype.shape
        neighbor = within_cutoff(batch, module.get_rcut()).neighbor
        device = neighbor.device
        centre = torch.arange(nframes * natoms, device=device).unsqueeze(1)
        sender = neighbor.flatten()
        receiver = centre.expand_as(neighbor).flatten()
        vectors = batch.vectors.reshape(-1, 3)
        if batch.used_slots is not None:
            sender = sender.index_select(0, batch.used_slots)
            receiver = receiver.index_select(0, batch.used_slots)
            vectors = vectors.index_select(0, batch.used_slots)
        edge_index = torch.stack([sender.clamp(min=0), receiver])
        output = module.core_compute(
            coord=vectors.new_zeros(nframes, natoms, 3),  # read for device and dtype alone
            atype=batch.atype,
            edge_index=edge_index,
            edge_vec=vectors,
            edge_scatter_index=edge_index,
            edge_mask=sender >= 0,
            fparam=batch.fparam,
            aparam=batch.aparam,
            charge_spin=module.convert_charge_spin(
                batch.charge_spin, nf=nframes, dtype=vectors.dtype, device=device
            ),
            **({} if batch.spin is None else {"spin": batch.spin}),
            # Forces follow from edges here, without the virials of atoms.
            atomic_output_only=True,
        )
        energy: Tensor = output["energy"].double().flatten()
        return energy


class NeighborListEvaluator:
    """All others: extended coordinates, neighbour list and mapping.

    Each slot gets a ghost atom of its own, at r_ij from its centre. All centres are at the origin:
    nothing reads the distance of two centres.
    """

    virtual_by_distance = True

    def __init__(self, module: Any) -> None:
        self._module = module
        sel = [int(count) for count in module.get_sel()]
        by_type = not module.mixed_types()
        self._section_sizes = sel if by_type else [sum(sel)]
        self._rcut = float(module.get_rcut())
        self._nearest_first = not by_type and module.atomic_model.need_sorted_nlist_for_lower()

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def energies(self, batch: FrameBatch) -> Tensor:
        """Return the energy of every atom; see `Evaluator`."""
        batch = within_cutoff(batch, self._rcut, nearest_first=self._nearest_first)
        nframes, natoms = batch.atype.shape
        neighbor = batch.neighbor.view(nframes, natoms, -1)
        n_ghosts = natoms * neighbor.shape[2]  # in a frame
        device = neighbor.device
        # `neighbor` counts atoms through all frames, `mapping` within each. Ghosts of empty slots
        # are mapped to the first atom.
        atoms = torch.arange(nframes * natoms, device=device).view(nframes, natoms)
        first_atom = atoms[:, :1]
        ghost_owner = (neighbor.flatten(1) - first_atom).clamp(min=0)
        # (nframes, natoms + n_ghosts)
        mapping = torch.cat([atoms - first_atom, ghost_owner], dim=1)
        ghost = natoms + torch.arange(n_ghosts, device=device).view(neighbor.shape[1:])
        nlist = torch.where(neighbor >= 0, ghost, -1)  # (nframes, natoms, nnei)
        vectors = batch.vectors.reshape(nframes, n_ghosts, 3)
        coord = torch.nn.functional.pad(vectors, (0, 0, natoms, 0))  # centres come first, at 0
        atype = batch.atype.gather(1, mapping)
        output = self._module.atomic_model.forward_common_atomic(
            coord,
            atype,
            self._with_sel_slots(coord, atype, nlist, batch.sections),
            mapping=mapping,
            fparam=batch.fparam,
            aparam=batch.aparam,
            charge_spin=batch.charge_spin,
        )
        energy: Tensor = output["energy"].double().flatten()
        return energy

    def _with_sel_slots(
        self, coord: Tensor, atype: Tensor, nlist: Tensor, sections: tuple[int, ...]
    ) -> Tensor:
        """Return the list with as many slots in each section as `sel` says; it has no more.

        Positions and types are for `VirtualAtomEvaluator`.
        """
        parts = nlist.split(list(sections), dim=2)
        padded = [
            torch.nn.functional.pad(part, (0, size - part.shape[2]), value=-1)
            for part, size in zip(parts, self._section_sizes, strict=True)
        ]
        return torch.cat(padded, dim=2) if len(padded) > 1 else padded[0]


class VirtualAtomEvaluator(NeighborListEvaluator):
    """Models with virtual atoms: deepmd-kit chooses the nearest neighbours itself."""

    def _with_sel_slots(
        self, coord: Tensor, atype: Tensor, nlist: Tensor, sections: tuple[int, ...]
    ) -> Tensor:
        """Return the list with the `sel` nearest neighbours."""
        nearest: Tensor = self._module.format_nlist(
            coord, atype, nlist, extra_nlist_sort=self._nearest_first
        )
        return nearest
