"""A batch in the layout of deepmd-kit's modules: frames of equally many atoms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.structures import Structures


class FrameBatch(NamedTuple):
    """Atoms and their neighbours, frame by frame.

    A batch with frame parameters keeps its frames. Otherwise, all sorted atoms form a single frame
    without padding: each neighbour comes with its vector, and an atom reads nothing else of its
    frame.

    Attributes
    ----------
    atype
        Types `(nframes, natoms)`, int64, −1 for padding.
    neighbor
        Each neighbour as `frame · natoms + atom` `(nframes · natoms, nnei)`; below 0 in an empty
        slot.
    vectors
        r_ij of each slot `(nframes · natoms, nnei, 3)` [Å], float64.
    sections
        Widths of the column groups of `neighbor`.
    fparam, charge_spin
        Parameters of frames, their charge and spin `(nframes, …)`; None without.
    aparam, spin
        Parameters of atoms, their spins `(nframes, natoms, …)`; None without.
    order
        Atom number of every sorted atom `(nreal,)`; None in a single frame, which is sorted.
    used_slots
        Positions in the flattened `neighbor` that may hold a neighbour `(nslots,)`; None for all.
        In a batch that a graph can hold, their number is fixed: `Structures.edges`, or with virtual
        atoms 2·atoms + 4·edges. Only DPA-4, which reads edges, uses them.
    """

    atype: Tensor
    neighbor: Tensor
    vectors: Tensor
    sections: tuple[int, ...]
    fparam: Tensor | None
    charge_spin: Tensor | None
    aparam: Tensor | None
    spin: Tensor | None
    order: Tensor | None
    used_slots: Tensor | None

    def sorted_values(self, values: Tensor) -> Tensor:
        """Return values `(nframes · natoms,)` in the order of the sorted atoms `(nreal,)`."""
        return values if self.order is None else values.index_select(0, self.order)


def lay_out(
    structures: Structures, vectors: Tensor, *, numb_fparam: int, numb_aparam: int
) -> FrameBatch:
    """Return a batch in deepmd-kit's layout.

    Parameters
    ----------
    structures
        The batch.
    vectors
        Its r_ij `(nreal, nnei, 3)`.
    numb_fparam
        Width of its frame parameters before charge and spin.
    numb_aparam
        Width of its atomic parameters before the spins.
    """
    if structures.fparam is None:
        return _single_frame(structures, vectors, numb_aparam)
    order = structures.order
    n_atoms = structures.atype.numel()
    nnei = structures.neighbor.shape[1]
    slots = _used_slots(structures)
    if slots is not None:  # from the rows of sorted atoms to those of atom numbers
        row = slots.div(nnei, rounding_mode="floor")
        slots = order.index_select(0, row) * nnei + slots % nnei
    fparam, charge_spin = _split_columns(structures.fparam, numb_fparam)
    aparam, spin = _split_columns(structures.aparam, numb_aparam)
    return FrameBatch(
        atype=structures.atype,
        neighbor=order.new_full((n_atoms, nnei), -1).index_copy(0, order, structures.neighbor),
        vectors=vectors.new_zeros(n_atoms, nnei, 3).index_copy(0, order, vectors),
        sections=structures.sections,
        fparam=fparam,
        charge_spin=charge_spin,
        aparam=aparam,
        spin=spin,
        order=order,
        used_slots=slots,
    )


def _single_frame(structures: Structures, vectors: Tensor, numb_aparam: int) -> FrameBatch:
    """Return all sorted atoms as one frame."""
    order = structures.order
    # In the single frame, the number of an atom is its rank among the sorted atoms.
    rank = order.new_zeros(structures.atype.numel())
    rank = rank.index_copy(0, order, torch.arange(len(order), device=order.device))
    neighbor = structures.neighbor
    neighbor_rank = rank.index_select(0, neighbor.clamp(min=0).view(-1)).view_as(neighbor)
    atomic_parameters = structures.aparam
    if atomic_parameters is not None:
        atomic_parameters = atomic_parameters.flatten(0, 1).index_select(0, order).unsqueeze(0)
    aparam, spin = _split_columns(atomic_parameters, numb_aparam)
    return FrameBatch(
        atype=structures.sorted_type.unsqueeze(0),
        neighbor=torch.where(neighbor >= 0, neighbor_rank, neighbor),
        vectors=vectors,
        sections=structures.sections,
        fparam=None,
        charge_spin=None,
        aparam=aparam,
        spin=spin,
        order=None,
        used_slots=_used_slots(structures),
    )


def _split_columns(x: Tensor | None, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Split the last axis after `width` columns; None for a part without columns."""
    if x is None:
        return None, None
    first, second = x.tensor_split([width], dim=-1)
    return (first if first.shape[-1] else None), (second if second.shape[-1] else None)


def _used_slots(structures: Structures) -> Tensor | None:
    """Return `FrameBatch.used_slots` as positions in `structures.neighbor`."""
    neighbor = structures.neighbor  # (nreal, nnei)
    if structures.edges:
        if structures.edges >= neighbor.numel():
            return None
        # Stays on the device and has a fixed length: slots with a neighbour, then empty ones.
        is_empty = neighbor.flatten() < 0
        return is_empty.to(torch.uint8).sort(stable=True).indices[: structures.edges]
    if len(structures.sections) > 1:
        return None  # DPA-4 has a single section
    (n_filled,) = structures.filled  # (nreal,)
    if n_filled.sum() == neighbor.numel():
        return None
    if neighbor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph cannot copy the numbers from the host
    slots = np.flatnonzero(np.arange(neighbor.shape[1]) < n_filled[:, None])
    return torch.from_numpy(slots).to(neighbor.device)


def within_cutoff(batch: FrameBatch, rcut: float, *, nearest_first: bool = False) -> FrameBatch:
    """Return the batch without neighbours beyond the cut-off, which skin lists have.

    With `nearest_first`, each row of `neighbor` and `vectors` is sorted by distance and ends with
    the empty slots: message-passing descriptors of deepmd-kit read only the first columns.
    `used_slots` keeps the positions before sorting, since edges are never sorted.
    """
    distance = torch.linalg.vector_norm(batch.vectors.detach(), dim=2)
    inside = (batch.neighbor >= 0) & (distance <= rcut)
    neighbor = torch.where(inside, batch.neighbor, -1)
    if not nearest_first:
        return batch._replace(neighbor=neighbor)
    columns = torch.where(inside, distance, torch.inf).argsort(dim=1, stable=True)
    vectors = batch.vectors.gather(1, columns.unsqueeze(2).expand(-1, -1, 3))
    return batch._replace(neighbor=neighbor.gather(1, columns), vectors=vectors)
