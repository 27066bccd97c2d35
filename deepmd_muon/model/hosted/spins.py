"""Spins of atoms in deepmd-kit's two ways: as a vector that a module reads, or as virtual atoms.

An atom i of a magnetic type with the spin s_i has a virtual atom at r_i + scale·s_i, whose type is
that of the atom plus the number of types. Virtual atoms have no energy, but are neighbours of others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_muon.model.hosted.layout import FrameBatch


class SpinTypes(NamedTuple):
    """What a module of deepmd-kit does with the spins of each type.

    Attributes
    ----------
    magnetic
        Whether atoms of a type have a magnetic force `(ntypes,)`; None without spins.
    virtual_scale
        Distance of a virtual atom for a spin of length 1 `(ntypes,)` [Å], float64; None without
        virtual atoms.
    """

    magnetic: Tensor | None = None
    virtual_scale: Tensor | None = None


def spin_types(module: Any) -> SpinTypes:
    """Return how a module of deepmd-kit reads spins."""
    spin = getattr(module, "spin", None)
    if spin is None:
        return SpinTypes()
    if spin.virtual_scale is None:
        return SpinTypes(magnetic=torch.tensor(spin.get_use_spin().tolist()))
    scale = torch.tensor(spin.get_virtual_scale_mask().tolist(), dtype=torch.float64)
    return SpinTypes(magnetic=scale > 0.0, virtual_scale=scale)


def with_virtual_atoms(batch: FrameBatch, scale: Tensor, *, least_distance: float) -> FrameBatch:
    """Return a batch whose frames have their atoms, then a virtual atom for each of them.

    A virtual atom of a type that is not magnetic (scale 0) is a placeholder at its atom:
    deepmd-kit excludes the pairs of its type.

    An atom i and its virtual atom i′, displaced by u_i = scale·s_i, are *partners*. Both have
    1 + 2·nnei slots, with these vectors:

    | centre | partner | neighbour j | virtual atom j′ of j |
    |--------|---------|-------------|----------------------|
    | i      | u_i     | r_ij        | r_ij + u_j           |
    | i′     | −u_i    | r_ij − u_i  | r_ij + u_j − u_i     |

    `order` remains that of the atoms alone.

    Parameters
    ----------
    batch
        The batch; its spins are read.
    scale
        Distance of the virtual atoms of each type for a spin of length 1 `(ntypes,)` [Å].
    least_distance
        Partners that are nearer than this [Å] are no neighbours.
    """
    assert batch.spin is not None
    atype = batch.atype
    nframes, natoms = atype.shape
    neighbor = batch.neighbor.unflatten(0, (nframes, natoms))
    vectors = batch.vectors.unflatten(0, (nframes, natoms))
    u = batch.spin * scale[atype.clamp(min=0)].unsqueeze(-1)  # (nframes, natoms, 3)
    u_i = u.unsqueeze(2)
    u_j = u.view(-1, 3).index_select(0, neighbor.clamp(min=0).flatten()).view(vectors.shape)
    to_virtual = vectors + u_j
    atom_vectors = torch.cat([u_i, vectors, to_virtual], dim=2)
    virtual_vectors = torch.cat([-u_i, vectors - u_i, to_virtual - u_i], dim=2)

    # The number of an atom grows from `frame·natoms + atom` to `frame·2·natoms + atom`; that of its
    # virtual atom is natoms larger.
    old_number = torch.arange(nframes * natoms, device=neighbor.device).view(nframes, natoms, 1)
    first_number = old_number[:, :1]  # frame·natoms
    new_number = old_number + first_number
    is_neighbor = neighbor >= 0
    j = torch.where(is_neighbor, neighbor + first_number, neighbor)
    virtual_j = torch.where(is_neighbor, j + natoms, neighbor)
    is_apart = torch.linalg.vector_norm(u.detach(), dim=2) >= least_distance
    has_partner = ((atype >= 0) & is_apart).unsqueeze(2)
    atom_list = torch.cat([torch.where(has_partner, new_number + natoms, -1), j, virtual_j], dim=2)
    virtual_list = torch.cat([torch.where(has_partner, new_number, -1), j, virtual_j], dim=2)

    slots = batch.used_slots
    if slots is not None:
        slots = _with_virtual_slots(
            slots, new_number.view(-1), natoms=natoms, nnei=neighbor.shape[2]
        )
    virtual_type = torch.where(atype >= 0, atype + len(scale), -1)
    aparam = batch.aparam
    if aparam is not None:
        aparam = torch.cat([aparam, torch.zeros_like(aparam)], dim=1)  # 0 for virtual atoms
    return batch._replace(
        atype=torch.cat([atype, virtual_type], dim=1),
        neighbor=torch.stack([atom_list, virtual_list], dim=1).flatten(0, 2),
        vectors=torch.stack([atom_vectors, virtual_vectors], dim=1).flatten(0, 2),
        sections=(atom_list.shape[2],),
        aparam=aparam,
        spin=None,
        used_slots=slots,
    )


def _with_virtual_slots(slots: Tensor, new_number: Tensor, *, natoms: int, nnei: int) -> Tensor:
    """Return `used_slots` of a batch with virtual atoms.

    Parameters
    ----------
    slots
        `used_slots` of the atoms alone.
    new_number
        Of each atom `(nframes · natoms,)`; that of its virtual atom is `natoms` larger.
    natoms, nnei
        Atoms in a frame and slots of an atom, without virtual atoms.
    """
    width = 1 + 2 * nnei
    partner_slots = torch.cat([new_number, new_number + natoms]) * width
    atom = slots.div(nnei, rounding_mode="floor")
    atom_slots = new_number.index_select(0, atom) * width + 1 + slots % nnei
    neighbor_slots = [
        atom_slots + virtual_centre * natoms * width + virtual_neighbor * nnei
        for virtual_centre in (0, 1)
        for virtual_neighbor in (0, 1)
    ]
    return torch.cat([partner_slots, *neighbor_slots])
