"""Energies of atoms from the modules of deepmd-kit, by their two lower interfaces.

Both take vectors to neighbours instead of positions, so that no ghost atoms are searched, and a
step never waits for the device.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor

from deepmd_muon.model.hosted.layout import Layout, nearest_first


class Form(Protocol):
    """How one kind of module computes energies."""

    def energies(self, layout: Layout) -> Tensor:
        """Return the energy of every atom `(nframes · natoms,)` [eV], float64.

        It is differentiable twice with respect to `layout.edges`, and 0 for padding.
        """

    #: Whether a virtual atom is a neighbour though its atom is beyond the cut-off.
    reaches_beyond: bool

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which energies and their first derivatives are computed."""


def form_of(module: Any) -> Form:
    """Return the form of a model of deepmd-kit."""
    if hasattr(module, "core_compute"):
        return EdgeForm(module)
    if hasattr(module, "backbone_model"):
        return FormattedListForm(module.backbone_model)
    return NeighborListForm(module)


class EdgeForm:
    """DPA-4: a list of edges with a mask."""

    reaches_beyond = False

    def __init__(self, module: Any) -> None:
        self._module = module

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the module's own context, which may permit TF32."""
        context: contextlib.AbstractContextManager[None] = self._module.tf32_precision_ctx()
        return context

    def energies(self, layout: Layout) -> Tensor:
        """Return the energy of every atom; see `Form`."""
        nframes, natoms = layout.atype.shape
        neighbor = nearest_first(layout, self._module.get_rcut(), sort=False).neighbor
        centre = torch.arange(nframes * natoms, device=neighbor.device).unsqueeze(1)
        sender = neighbor.flatten()
        receiver = centre.expand_as(neighbor).flatten()
        vectors = layout.edges.reshape(-1, 3)
        if layout.slots is not None:
            sender = sender.index_select(0, layout.slots)
            receiver = receiver.index_select(0, layout.slots)
            vectors = vectors.index_select(0, layout.slots)
        edge_index = torch.stack([sender.clamp(min=0), receiver])
        module = self._module
        conditions = module.convert_charge_spin(
            layout.charge_spin, nf=nframes, dtype=layout.edges.dtype, device=neighbor.device
        )
        output = module.core_compute(
            coord=layout.edges.new_zeros(nframes, natoms, 3),  # read for device and dtype alone
            atype=layout.atype,
            edge_index=edge_index,
            edge_vec=vectors,
            edge_scatter_index=edge_index,
            edge_mask=sender >= 0,
            fparam=layout.fparam,
            aparam=layout.aparam,
            charge_spin=conditions,
            **({} if layout.spin is None else {"spin": layout.spin}),
            # Forces follow from edges here, without the virials of atoms.
            atomic_output_only=True,
        )
        energy: Tensor = output["energy"].double().flatten()
        return energy


class NeighborListForm:
    """All others: extended coordinates, neighbour list and mapping.

    Every neighbour is a ghost atom of its own, at r_ij from its centre. All centres are at the
    origin: nothing reads the distance of two centres.
    """

    reaches_beyond = True

    def __init__(self, module: Any) -> None:
        self._module = module
        atomic_model = module.atomic_model
        self._by_type = not module.mixed_types()
        self._sel = [int(count) for count in module.get_sel()]
        self._rcut = float(module.get_rcut())
        self._sort = not self._by_type and atomic_model.need_sorted_nlist_for_lower()

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()

    def energies(self, layout: Layout) -> Tensor:
        """Return the energy of every atom; see `Form`."""
        nframes, natoms = layout.atype.shape
        layout = nearest_first(layout, self._rcut, sort=self._sort)
        neighbor = layout.neighbor.view(nframes, natoms, -1)
        nnei = neighbor.shape[2]
        atoms = torch.arange(nframes * natoms, device=neighbor.device).view(nframes, natoms)
        first_atom = atoms[:, :1]
        # Neighbours count from the first frame on, the mapping from the first atom of each; empty
        # slots read that one.
        owner = (neighbor.flatten(1) - first_atom).clamp(min=0)
        mapping = torch.cat([atoms - first_atom, owner], dim=1)
        slot = natoms + torch.arange(natoms * nnei, device=neighbor.device).view(natoms, nnei)
        nlist = torch.where(neighbor >= 0, slot, -1)
        coord = torch.nn.functional.pad(
            layout.edges.reshape(nframes, natoms * nnei, 3), (0, 0, natoms, 0)
        )
        atype = layout.atype.gather(1, mapping)
        output = self._module.atomic_model.forward_common_atomic(
            coord,
            atype,
            self._list(coord, atype, nlist, layout.sections),
            mapping=mapping,
            fparam=layout.fparam,
            aparam=layout.aparam,
            charge_spin=layout.charge_spin,
        )
        energy: Tensor = output["energy"].double().flatten()
        return energy

    def _list(
        self, coord: Tensor, atype: Tensor, nlist: Tensor, sections: tuple[int, ...]
    ) -> Tensor:
        """Return the list with as many slots as `sel`, in each section."""
        limits = self._sel if self._by_type else [sum(self._sel)]
        parts = nlist.split(list(sections), dim=2)
        padded = [
            torch.nn.functional.pad(part, (0, limit - part.shape[2]), value=-1)
            for part, limit in zip(parts, limits, strict=True)
        ]
        return torch.cat(padded, dim=2) if len(padded) > 1 else padded[0]


class FormattedListForm(NeighborListForm):
    """Models with virtual atoms: deepmd-kit chooses the nearest neighbours of each type itself."""

    def _list(
        self, coord: Tensor, atype: Tensor, nlist: Tensor, sections: tuple[int, ...]
    ) -> Tensor:
        """Return the list with the `sel` nearest neighbours."""
        nearest: Tensor = self._module.format_nlist(
            coord, atype, nlist, extra_nlist_sort=self._sort
        )
        return nearest
