"""Spins of atoms in deepmd-kit's two ways: as a vector that a module reads, or as virtual atoms.

An atom i of a magnetic type with the spin s_i has a virtual atom at r_i + scale·s_i, whose type is
that of the atom plus the number of types. Virtual atoms have no energy, but are neighbours of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.hosted.layout import Layout


class SpinTypes(NamedTuple):
    """What a module of deepmd-kit does with the spins of each type.

    Attributes
    ----------
    magnetic
        Whether atoms of a type have a magnetic force `(ntypes,)`.
    scale
        Distance of a virtual atom for a spin of length 1 `(ntypes,)` [Å]; None without virtual
        atoms.
    """

    magnetic: Sequence[bool]
    scale: Sequence[float] | None


def spin_types(module: Any) -> SpinTypes | None:
    """Return the spins that a module of deepmd-kit reads; None if it reads none."""
    spin = getattr(module, "spin", None)
    if spin is None:
        return None
    if spin.virtual_scale is None:
        return SpinTypes(spin.get_use_spin().tolist(), None)
    scale = spin.get_virtual_scale_mask().tolist()
    return SpinTypes([x > 0.0 for x in scale], scale)


def with_virtual_atoms(layout: Layout, scale: Tensor, *, nearest: float) -> Layout:
    """Return a batch with a virtual atom for each atom; each frame has all of them last.

    A virtual atom of a type that is not magnetic (scale 0) is a placeholder at its atom:
    deepmd-kit excludes the pairs of its type.

    An atom with `width` slots for neighbours, and its virtual atom, have 1 + 2·width: the first for
    the other one of these two, then `width` for the neighbours of the atom, and as many for the
    virtual atoms of these neighbours. `place` remains that of the atoms before.

    Parameters
    ----------
    layout
        The batch; its spins are read.
    scale
        Distance of the virtual atoms of each type for a spin of length 1 `(ntypes,)` [Å].
    nearest
        An atom and its virtual atom are no neighbours if they are nearer than this [Å].
    """
    assert layout.spin is not None
    nframes, natoms = layout.atype.shape
    shift = layout.spin * scale[layout.atype.clamp(min=0)].unsqueeze(-1)
    shift = shift.view(-1, 1, 3)  # from each atom of the batch to its virtual atom
    edges = layout.edges  # (nframes · natoms, width, 3), like `to_virtual`
    width = edges.shape[1]
    neighbor_shift = shift.view(-1, 3).index_select(0, layout.neighbor.clamp(min=0).view(-1))
    to_virtual = edges + neighbor_shift.view(edges.shape)
    of_atoms = torch.cat([shift, edges, to_virtual], dim=1)
    of_virtual = torch.cat([-shift, edges - shift, to_virtual - shift], dim=1)

    # An atom moves from `frame·natoms + atom` to `frame·2·natoms + atom`; natoms further is its
    # virtual atom.
    old_number = torch.arange(nframes * natoms, device=edges.device).view(-1, 1)
    first_of_frame = old_number.div(natoms, rounding_mode="floor") * natoms
    number = old_number + first_of_frame
    neighbor = layout.neighbor
    present = neighbor >= 0
    atom_neighbor = torch.where(present, neighbor + first_of_frame, neighbor)
    virtual_neighbor = torch.where(present, atom_neighbor + natoms, neighbor)
    is_apart = torch.linalg.vector_norm(shift.detach(), dim=2) >= nearest
    are_neighbors = (layout.atype.view(-1, 1) >= 0) & is_apart  # an atom and its virtual atom
    lists = [
        torch.cat([torch.where(are_neighbors, other, -1), atom_neighbor, virtual_neighbor], dim=1)
        for other in (number + natoms, number)  # as the atom, and as its virtual atom, sees it
    ]

    def frame_by_frame(parts: Sequence[Tensor]) -> Tensor:
        """Join rows of atoms and of virtual atoms `(nframes · natoms, …)`."""
        return torch.stack([x.unflatten(0, (nframes, natoms)) for x in parts], dim=1).flatten(0, 2)

    slots = None
    if layout.slots is not None:
        slots = _slots(layout.slots, number.view(-1), natoms=natoms, width=width)
    virtual_type = torch.where(layout.atype >= 0, layout.atype + len(scale), -1)
    aparam = layout.aparam
    if aparam is not None:
        aparam = torch.cat([aparam, torch.zeros_like(aparam)], dim=1)
    return layout._replace(
        atype=torch.cat([layout.atype, virtual_type], dim=1),
        neighbor=frame_by_frame(lists),
        edges=frame_by_frame([of_atoms, of_virtual]),
        sections=(1 + 2 * width,),
        aparam=aparam,
        spin=None,
        slots=slots,
    )


def _slots(slots: Tensor, number: Tensor, *, natoms: int, width: int) -> Tensor:
    """Return the numbers of slots that may hold a neighbour in the lists with virtual atoms.

    `number` has the new number of each atom `(nframes · natoms,)`; its virtual atom is `natoms`
    further.
    """
    atom = slots.div(width, rounding_mode="floor")
    column = slots % width
    new_width = 1 + 2 * width
    own = torch.cat([number, number + natoms]) * new_width
    of_atom = number.index_select(0, atom) * new_width + 1 + column
    parts = [
        of_atom + virtual_centre * natoms * new_width + virtual_neighbor * width
        for virtual_centre in (0, 1)
        for virtual_neighbor in (0, 1)
    ]
    return torch.cat([own, *parts])
