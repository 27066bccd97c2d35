"""Neighbour search on the device, inside a step, without the host.

The list of the data package (`deepmd_muon.data.neighbors`) and this one hold the same neighbours in
the same sections, nearest first. Distances that differ by less than single precision resolves may
change places. On a GPU, `kernels` does the same; its docstring has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
        Place and structure of each atom to search for `(nrows,)`, int64. A row with a structure
        beyond the last has no neighbours.
    sections
        The list's form; an atom must not have more than `capacity` neighbours.

    Returns
    -------
    tuple
        Places of neighbours `(nrows, nnei)`, int64, −1 for an empty slot, and their cell
        translations `(nrows, nnei, 3)`, int32; None without cells.
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        return kernels.find(atoms, order, frame, sections)
    neighbor, shift = in_sections(compare_all(atoms, order, frame), atoms, sections)
    return neighbor, None if atoms.cells is None else shift


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
        Neighbours of each type within the first radius `(nrows, ntypes)`, neighbours of all types
        within each further radius `(nrows, len(radii) − 1)`, both int32, and the squared distance
        of the nearest neighbour `(nrows,)` [Å²].
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        return kernels.count(atoms, order, frame, radii, ntypes)
    images = compare_all(atoms, order, frame)
    squared = images.squared
    nrows = len(order)
    within = squared < radii[0] ** 2
    kinds = atoms.atype[images.place].clamp(min=0)
    type_counts = torch.zeros(nrows, ntypes, dtype=torch.int32, device=squared.device)
    type_counts.scatter_add_(1, kinds, within.int())
    shorter_counts = type_counts.new_zeros(nrows, len(radii) - 1)
    for k, radius in enumerate(radii[1:]):
        shorter_counts[:, k] = (squared < radius**2).sum(1)
    if squared.shape[1] == 0:
        return type_counts, shorter_counts, squared.new_full((nrows,), torch.inf)
    return type_counts, shorter_counts, squared.min(1).values


class Images(NamedTuple):
    """Images of atoms, each next to the atom of its row."""

    squared: Tensor  # (nrows, nimages) float64: squared distances [Å²]; infinite for unused entries
    place: Tensor  # (nrows, nimages) int64: places of the atoms
    shift: Tensor  # (nrows, nimages, 3) int32: translations [cells]


def compare_all(atoms: Atoms, order: Tensor, frame: Tensor) -> Images:
    """Compare some atoms with all images that may be near; arguments as in `find_neighbors`."""
    nframes = atoms.counts.shape[0]
    exists = frame < nframes
    # Rows without an atom read one that exists, and are masked at the end.
    frame = frame.clamp(max=nframes - 1)
    order = torch.where(exists, order, 0)

    n_images = [1, 1, 1] if atoms.cells is None else atoms.cells.images.amax(0).tolist()
    axes = (torch.arange(n, device=order.device) for n in n_images)
    codes = torch.cartesian_prod(*axes).view(-1, 3)
    atom = torch.arange(atoms.natoms, device=order.device).repeat_interleave(len(codes))
    codes = codes.repeat(atoms.natoms, 1)  # (nimages, 3), as `atom` (nimages,)
    place = (frame * atoms.natoms).unsqueeze(1) + atom
    vector = atoms.coord[place] - atoms.coord[order].unsqueeze(1)  # (nrows, nimages, 3)
    is_image = (atom < atoms.counts[frame].unsqueeze(1)) & exists.unsqueeze(1)
    shift = torch.zeros_like(vector)
    if atoms.cells is not None:
        cells = atoms.cells.select(frame)
        fraction = torch.einsum("afx,axk->afk", vector, cells.inverse)
        shift = (-cells.reach.unsqueeze(1) - fraction - MARGIN).ceil() + codes
        # The largest cell decides the number of codes: others need fewer.
        is_image &= (codes < cells.images.unsqueeze(1)).all(-1)
        vector = vector + torch.einsum("afk,akx->afx", shift, cells.box)
    is_image &= ~((place == order.unsqueeze(1)) & (shift == 0.0).all(-1))  # not the atom itself
    squared = vector.square().sum(-1).masked_fill(~is_image, torch.inf)
    return Images(squared, place, shift.int())


def in_sections(images: Images, atoms: Atoms, sections: Sections) -> tuple[Tensor, Tensor]:
    """Sort images within the cut-off into sections, the nearest first.

    Return places `(nrows, nnei)`, −1 for an empty slot, and translations `(nrows, nnei, 3)`.
    """
    squared = images.squared.masked_fill(images.squared >= sections.rcut**2, torch.inf)
    squared, rank = squared.float().sort(dim=1, stable=True)
    place = images.place.gather(1, rank)
    shift = images.shift.gather(1, rank.unsqueeze(2).expand_as(images.shift))
    squared[:, sections.n_nearest :] = torch.inf
    places = []
    shifts = []
    for kind, width in enumerate(sections.widths):
        in_section = squared.isfinite()
        if sections.by_type:
            in_section = in_section & (atoms.atype[place] == kind)
        columns = columns_of(in_section, width)
        is_filled = in_section.gather(1, columns)
        section_place = torch.where(is_filled, place.gather(1, columns), -1)
        section_shift = gather_rows(shift, columns) * is_filled.unsqueeze(2)
        n_missing = width - columns.shape[1]
        places.append(torch.nn.functional.pad(section_place, (0, n_missing), value=-1))
        shifts.append(torch.nn.functional.pad(section_shift, (0, 0, 0, n_missing)))
    return torch.cat(places, 1), torch.cat(shifts, 1)


def columns_of(mask: Tensor, width: int) -> Tensor:
    """Return `width` columns of each row, at most: those where `mask` is true first, in order."""
    return (~mask).to(torch.uint8).sort(dim=1, stable=True).indices[:, :width]


def gather_rows(values: Tensor, columns: Tensor) -> Tensor:
    """Gather vectors `(nrows, ncolumns, 3)` by columns `(nrows, width)`."""
    return values.gather(1, columns.unsqueeze(2).expand(-1, -1, 3))
