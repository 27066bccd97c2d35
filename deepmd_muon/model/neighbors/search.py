"""Neighbour search on the device, inside a step, without the host.

The list of the data package (`deepmd_muon.data.neighbors`) and this one hold the same neighbours in the same sections,
nearest first; distances that differ by less than single precision resolves may change places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.model.neighbors.atoms import MARGIN, Atoms, Sections
from deepmd_muon.model.nn import triton_support


def find_neighbors(
    atoms: Atoms, order: Tensor, frame: Tensor, sections: Sections
) -> tuple[Tensor, Tensor | None]:
    """Return the neighbours of some atoms.

    Parameters
    ----------
    atoms
        The structures.
    order, frame
        Place and structure of each atom to search for `(nreal,)`, int64; atoms of a structure beyond the last have no
        neighbours.
    sections
        The list's form; an atom must not have more than `capacity` neighbours.

    Returns
    -------
    tuple
        Places of neighbours `(nreal, nnei)`, int64, −1 for an empty slot, and their cell translations
        `(nreal, nnei, 3)`, int32; None without cells.
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        return kernels.find(atoms, order, frame, sections)
    return in_sections(*all_candidates(atoms, order, frame), atoms, sections)


def count_neighbors(
    atoms: Atoms, order: Tensor, frame: Tensor, radii: Sequence[float], ntypes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Count the neighbours of some atoms; arguments as in `find_neighbors`.

    Parameters
    ----------
    radii
        Radii to count within [Å], the cut-off of `atoms.cells` first.

    Returns
    -------
    tuple
        Neighbours of each type within the first radius `(nreal, ntypes)`, those of all types within each further one
        `(nreal, len(radii) − 1)`, both int32, and the squared distance of the nearest neighbour `(nreal,)` [Å²].
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        return kernels.count(atoms, order, frame, radii, ntypes)
    square, other, _ = all_candidates(atoms, order, frame)
    within = square < radii[0] ** 2
    kinds = atoms.atype[other].clamp(min=0)
    counts = torch.zeros(len(order), ntypes, dtype=torch.int32, device=square.device)
    counts.scatter_add_(1, kinds, within.int())
    further = [(square < radius**2).sum(1) for radius in radii[1:]]
    shorter = torch.stack(further, 1).int() if further else counts.new_zeros(len(order), 0)
    nearest = square.min(1).values if square.shape[1] else square.new_full((len(order),), torch.inf)
    return counts, shorter, nearest


def all_candidates(atoms: Atoms, order: Tensor, frame: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared distance, place and translation of all images that may be near; infinite for unused entries."""
    nframes = atoms.counts.shape[0]
    inside, here = frame < nframes, frame.clamp(max=nframes - 1)
    own = torch.where(inside, order, 0)
    images = [1, 1, 1] if atoms.cells is None else atoms.cells.images.amax(0).tolist()
    code = torch.cartesian_prod(*(torch.arange(n, device=order.device) for n in images)).view(-1, 3)
    local = torch.arange(atoms.natoms, device=order.device).repeat_interleave(len(code))
    code = code.repeat(atoms.natoms, 1)
    other = (here * atoms.natoms).unsqueeze(1) + local
    vector = atoms.coord[other] - atoms.coord[own].unsqueeze(1)
    real = (local < atoms.counts[here].unsqueeze(1)) & inside.unsqueeze(1)
    shift = torch.zeros_like(vector)
    if atoms.cells is not None:
        cells = atoms.cells.select(here)
        along = torch.einsum("afx,axk->afk", vector, cells.inverse)
        shift = (-cells.reach.unsqueeze(1) - along - MARGIN).ceil() + code
        real &= (code < cells.images.unsqueeze(1)).all(-1)
        vector = vector + torch.einsum("afk,akx->afx", shift, cells.box)
    real &= ~((other == own.unsqueeze(1)) & (shift == 0.0).all(-1))
    square = vector.square().sum(-1).masked_fill(~real, torch.inf)
    return square, other, shift.int()


def in_sections(
    square: Tensor, other: Tensor, shift: Tensor, atoms: Atoms, sections: Sections
) -> tuple[Tensor, Tensor | None]:
    """Sort candidates, given by squared distance, place and translation, into sections, the nearest first."""
    square, rank = (
        square.masked_fill(square >= sections.rcut**2, torch.inf).float().sort(dim=1, stable=True)
    )
    other, shift = other.gather(1, rank), shift.gather(1, rank.unsqueeze(2).expand_as(shift))
    square[:, sections.most :] = torch.inf
    columns, translations = [], []
    for kind, width in enumerate(sections.widths):
        wanted = square.isfinite()
        if sections.by_type:
            wanted = wanted & (atoms.atype[other] == kind)
        first = (~wanted).to(torch.uint8).sort(dim=1, stable=True).indices[:, :width]
        kept = wanted.gather(1, first)
        missing = width - first.shape[1]
        places = torch.where(kept, other.gather(1, first), -1)
        found = shift.gather(1, first.unsqueeze(2).expand(-1, -1, 3)) * kept.unsqueeze(2)
        columns.append(torch.nn.functional.pad(places, (0, missing), value=-1))
        translations.append(torch.nn.functional.pad(found, (0, 0, 0, missing)))
    return torch.cat(columns, 1), None if atoms.cells is None else torch.cat(translations, 1)
