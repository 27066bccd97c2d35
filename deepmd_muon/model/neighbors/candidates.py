"""Neighbour lists in two steps: candidates within cut-off and skin, and from them the list.

Results equal those of `search` at every call as long as no atom has moved by more than half the
skin since its structure's candidates were found. On a GPU, `kernels` does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepmd_muon.model.neighbors.atoms import (
    AT_SAME_PLACE,
    FIRST_WIDTH,
    NEARNESS,
    NOT_FINITE,
    ROOM,
    SAME_PLACE,
    TOO_NEAR,
    Atoms,
    Candidates,
    Sections,
)
from deepmd_muon.model.neighbors.search import (
    Images,
    columns_of,
    compare_all,
    gather_rows,
    in_sections,
)
from deepmd_muon.model.nn import triton_support


def mark_stale(
    stale: Tensor, needed: Tensor, coord: Tensor, reference: Tensor, limit_squared: float
) -> None:
    """Mark structures that need new candidates, and note whether all positions are finite.

    Parameters
    ----------
    stale
        `(nframes,)`, int32, written: 1 if an atom has moved farther than the root of `limit_squared`.
    needed
        See `Candidates`; its entry NOT_FINITE is raised.
    coord, reference
        Positions, and positions to measure from `(nframes, natoms, 3)` [Å].
    limit_squared
        [Å²]
    """
    if triton_support.usable(coord.device):
        from deepmd_muon.model.neighbors import kernels

        kernels.mark_stale(stale, needed, coord, reference, limit_squared)
        return
    displacement_squared = (coord - reference).square().sum(-1)
    stale.copy_((~(displacement_squared <= limit_squared)).any(1))  # negated: NaN is stale, too
    needed[NOT_FINITE].logical_or_(~coord.isfinite().all())


def refer(reference: Tensor, built: Tensor, coord: Tensor, stale: Tensor) -> None:
    """Keep the positions of stale structures, and count their lists in `built` `(nframes,)`."""
    if triton_support.usable(coord.device):
        from deepmd_muon.model.neighbors import kernels

        kernels.refer(reference, built, coord, stale)
        return
    built.add_(stale)
    reference.copy_(torch.where(stale[:, None, None] > 0, coord, reference))


def renew(
    candidates: Candidates, atoms: Atoms, order: Tensor, frame: Tensor, stale: Tensor, reach: float
) -> None:
    """Find the candidates of stale structures, and write them in place.

    Parameters
    ----------
    candidates
        Receives the result; its `needed` says how much room was missing.
    atoms
        The structures; their cells were prepared for `reach`.
    order, frame
        As in `find_neighbors`.
    stale
        Which structures are searched, from `mark_stale`.
    reach
        Cut-off and skin [Å].
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        kernels.renew(candidates, atoms, order, frame, stale=stale, reach=reach)
        return
    images = compare_all(atoms, order, frame)
    nframes = atoms.counts.shape[0]
    room = candidates.place.shape[1]
    renewed = (frame < nframes) & (stale[frame.clamp(max=nframes - 1)] > 0)
    near = images.squared < reach**2
    columns = columns_of(near, room)
    n_missing = room - columns.shape[1]
    place = torch.nn.functional.pad(images.place.gather(1, columns), (0, n_missing))
    candidates.place.copy_(torch.where(renewed[:, None], place.int(), candidates.place))
    if candidates.shift is not None:
        shift = gather_rows(images.shift, columns)
        shift = torch.nn.functional.pad(shift, (0, 0, 0, n_missing))
        candidates.shift.copy_(torch.where(renewed[:, None, None], shift, candidates.shift))
    number = near.sum(1).int()
    candidates.number.copy_(torch.where(renewed, number, candidates.number))
    _raise_needed(candidates, ROOM, torch.where(renewed & (number > room), number, 0))


def lay_out(
    candidates: Candidates,
    atoms: Atoms,
    order: Tensor,
    frame: Tensor,
    sections: Sections,
    shorter_radii: Sequence[float] = (),
) -> tuple[Tensor, Tensor | None]:
    """Return neighbours and translations at the present positions, as `find_neighbors` does.

    Parameters
    ----------
    candidates
        From `renew`; its `needed` shows where atoms are too near, and which widths and bounds are
        too small.
    atoms, order, frame, sections
        As in `find_neighbors`.
    shorter_radii
        [Å]; `candidates` has a bound of the neighbours within each.
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        return kernels.lay_out(
            candidates, atoms, order, frame, sections=sections, shorter_radii=shorter_radii
        )
    images = _at_present(candidates, atoms, order, frame)
    _note_too_small(candidates, images, atoms, sections, shorter_radii)
    neighbor, shift = in_sections(images, atoms, sections)
    return neighbor, None if atoms.cells is None else shift


def _at_present(candidates: Candidates, atoms: Atoms, order: Tensor, frame: Tensor) -> Images:
    """Return the candidates with their distances at the present positions."""
    nframes = atoms.counts.shape[0]
    room = candidates.place.shape[1]
    exists = frame < nframes
    # Rows without an atom read one that exists, and are masked at the end.
    frame = frame.clamp(max=nframes - 1)
    order = torch.where(exists, order, 0)
    column = torch.arange(room, device=order.device)
    is_candidate = exists[:, None] & (column < candidates.number[:, None])
    place = torch.where(is_candidate, candidates.place, 0).long()
    vector = atoms.coord[place] - atoms.coord[order].unsqueeze(1)  # (nrows, room, 3)
    shift = place.new_zeros(*place.shape, 3)
    if atoms.cells is not None and candidates.shift is not None:
        shift = torch.where(is_candidate.unsqueeze(2), candidates.shift, 0)
        box = atoms.cells.box[frame]
        vector = vector + torch.einsum("afk,akx->afx", shift.double(), box)
    squared = vector.square().sum(-1).masked_fill(~is_candidate, torch.inf)
    return Images(squared, place, shift.int())


def _note_too_small(
    candidates: Candidates,
    images: Images,
    atoms: Atoms,
    sections: Sections,
    shorter_radii: Sequence[float],
) -> None:
    """Raise the entries of `needed` that show too near atoms and too small widths and bounds."""
    squared = images.squared
    rcut_squared = sections.rcut**2
    _raise_needed(candidates, AT_SAME_PLACE, (squared < SAME_PLACE**2).any(1))
    too_near = (squared < candidates.too_near_squared) & (squared < rcut_squared)
    nearness = NEARNESS / squared.clamp(min=SAME_PLACE**2).sqrt() + 1.0
    _raise_needed(candidates, TOO_NEAR, torch.where(too_near, nearness, 0.0).int().amax(1))

    rank = squared.masked_fill(squared >= rcut_squared, torch.inf).argsort(dim=1, stable=True)
    rank = rank[:, : sections.n_nearest]
    is_neighbor = squared.gather(1, rank) < rcut_squared
    kinds = atoms.atype[images.place.gather(1, rank)]
    for section, width in enumerate(sections.widths):
        in_section = is_neighbor & (kinds == section) if sections.by_type else is_neighbor
        total = in_section.sum(1)
        _raise_needed(candidates, FIRST_WIDTH + section, torch.where(total > width, total, 0))
    first_bound = FIRST_WIDTH + len(sections.widths)
    bounds = zip(shorter_radii, candidates.shorter_bounds, strict=True)
    for k, (radius, bound) in enumerate(bounds):
        total = (squared < radius**2).sum(1)
        _raise_needed(candidates, first_bound + k, torch.where(total > bound, total, 0))


def _raise_needed(candidates: Candidates, entry: int, values: Tensor) -> None:
    """Raise an entry of `needed` to the largest of these values `(nrows,)`."""
    needed = candidates.needed[entry : entry + 1]
    if len(values):
        needed.copy_(torch.maximum(needed, values.amax().int()))
