"""Neighbour lists in two steps: candidates within cut-off and skin, and from them the list at the present positions.

Results equal those of `search` at every call as long as no atom has moved by more than half the skin since its
structure's candidates were found.
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
from deepmd_muon.model.neighbors.search import all_candidates, in_sections
from deepmd_muon.model.nn import triton_support


def mark_stale(
    stale: Tensor, needed: Tensor, coord: Tensor, reference: Tensor, limit: float
) -> None:
    """Mark structures that need new candidates; note in `needed` of `Candidates` whether all positions are finite.

    `stale` `(nframes,)`, int32, becomes 1 where an atom has moved from `reference` to `coord`, both
    `(nframes, natoms, 3)` [Å], by more than the root of `limit` [Å²].
    """
    if triton_support.usable(coord.device):
        from deepmd_muon.model.neighbors import kernels

        kernels.mark_stale(stale, needed, coord, reference, limit)
        return
    moved = (coord - reference).square().sum(-1)
    stale.copy_((~(moved <= limit)).any(1))  # NaN is stale, too
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
        Receives the result; `needed` counts what does not fit.
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

        kernels.renew(candidates, atoms, order, frame, stale, reach)
        return
    square, other, shift = all_candidates(atoms, order, frame)
    nframes, room = atoms.counts.shape[0], candidates.place.shape[1]
    wanted = (frame < nframes) & (stale[frame.clamp(max=nframes - 1)] > 0)
    near = square < reach**2
    first = (~near).to(torch.uint8).sort(dim=1, stable=True).indices[:, :room]
    missing = room - first.shape[1]
    place = torch.nn.functional.pad(other.gather(1, first), (0, missing))
    candidates.place.copy_(torch.where(wanted[:, None], place.int(), candidates.place))
    if candidates.shift is not None:
        found = shift.gather(1, first.unsqueeze(2).expand(-1, -1, 3))
        found = torch.nn.functional.pad(found, (0, 0, 0, missing))
        candidates.shift.copy_(torch.where(wanted[:, None, None], found, candidates.shift))
    number = near.sum(1).int()
    candidates.number.copy_(torch.where(wanted, number, candidates.number))
    _note(candidates, ROOM, torch.where(wanted & (number > room), number, 0))


def lay_out(
    candidates: Candidates,
    atoms: Atoms,
    order: Tensor,
    frame: Tensor,
    sections: Sections,
    inner: Sequence[float] = (),
) -> tuple[Tensor, Tensor | None]:
    """Return neighbours and translations at the present positions, as `find_neighbors` does.

    Parameters
    ----------
    candidates
        From `renew`; `needed` shows where atoms are too near, and which widths and bounds are too small.
    atoms, order, frame, sections
        As in `find_neighbors`.
    inner
        Shorter radii [Å], whose neighbours have bounds in `candidates`.
    """
    if triton_support.usable(atoms.coord.device):
        from deepmd_muon.model.neighbors import kernels

        return kernels.lay_out(candidates, atoms, order, frame, sections, inner)
    nframes, room = atoms.counts.shape[0], candidates.place.shape[1]
    inside, here = frame < nframes, frame.clamp(max=nframes - 1)
    own = torch.where(inside, order, 0)
    real = inside[:, None] & (torch.arange(room, device=order.device) < candidates.number[:, None])
    other = torch.where(real, candidates.place, 0).long()
    vector = atoms.coord[other] - atoms.coord[own].unsqueeze(1)
    shift = other.new_zeros(*other.shape, 3)
    if atoms.cells is not None and candidates.shift is not None:
        shift = torch.where(real.unsqueeze(2), candidates.shift, 0)
        vector = vector + torch.einsum("afk,akx->afx", shift.double(), atoms.cells.box[here])
    square = vector.square().sum(-1).masked_fill(~real, torch.inf)
    found = in_sections(square, other, shift.int(), atoms, sections)
    _note(candidates, AT_SAME_PLACE, (square < SAME_PLACE**2).any(1))
    too_near = (square < candidates.nearest) & (square < sections.rcut**2)
    nearness = NEARNESS / square.clamp(min=SAME_PLACE**2).sqrt() + 1.0
    _note(candidates, TOO_NEAR, torch.where(too_near, nearness, 0.0).int().amax(1))
    rank = square.masked_fill(square >= sections.rcut**2, torch.inf).argsort(dim=1, stable=True)[
        :, : sections.most
    ]
    kept, kinds = square.gather(1, rank) < sections.rcut**2, atoms.atype[other.gather(1, rank)]
    for group, width in enumerate(sections.widths):
        total = (kept & (kinds == group) if sections.by_type else kept).sum(1)
        _note(candidates, FIRST_WIDTH + group, torch.where(total > width, total, 0))
    for number, (radius, bound) in enumerate(zip(inner, candidates.inner, strict=True)):
        total = (square < radius**2).sum(1)
        _note(
            candidates,
            FIRST_WIDTH + len(sections.widths) + number,
            torch.where(total > bound, total, 0),
        )
    return found


def _note(candidates: Candidates, place: int, values: Tensor) -> None:
    """Raise an entry of `needed` to the largest of these values `(nreal,)`."""
    entry = candidates.needed[place : place + 1]
    if len(values):
        entry.copy_(torch.maximum(entry, values.amax().int()))
