"""A batch in the layout of deepmd-kit's modules: frames of equally many atoms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.structures import Structures


class Layout(NamedTuple):
    """Atoms, neighbours and edges of a batch, frame by frame.

    Only parameters of frames need frames. Otherwise all atoms of the batch form a single one, in
    the order of `Structures`: an atom reads nothing of its frame but its neighbours, and each
    neighbour comes with its vector. Then no atom is padding, and nothing has to be moved.

    Attributes
    ----------
    atype
        Types `(nframes, natoms)`, int64, −1 for padding.
    neighbor
        Each neighbour as `frame · natoms + atom` `(nframes · natoms, nnei)`; below 0 for none.
    edges
        r_ij, like `neighbor`, `(nframes · natoms, nnei, 3)` [Å], float64.
    sections
        Widths of the column groups of `neighbor`.
    fparam, charge_spin, aparam, spin
        Parameters of frames, their charge and spin, parameters of atoms and their spins; None
        without.
    place
        Where the sorted atoms of `Structures` are `(nreal,)`; None if they are all atoms, in order.
    slots
        Flat numbers of the slots of `neighbor` that may hold one `(nslots,)`; None for all. In a
        batch that a graph can hold, their number is `Structures.edges`.
    """

    atype: Tensor
    neighbor: Tensor
    edges: Tensor
    sections: tuple[int, ...]
    fparam: Tensor | None
    charge_spin: Tensor | None
    aparam: Tensor | None
    spin: Tensor | None
    place: Tensor | None
    slots: Tensor | None

    def sorted_values(self, values: Tensor) -> Tensor:
        """Return values `(nframes · natoms,)` in the order of the sorted atoms `(nreal,)`."""
        return values if self.place is None else values.index_select(0, self.place)


def lay_out(structures: Structures, edges: Tensor, *, numb_fparam: int, numb_aparam: int) -> Layout:
    """Return a batch in deepmd-kit's layout.

    Parameters
    ----------
    structures
        The batch.
    edges
        Its edge vectors `(nreal, nnei, 3)`.
    numb_fparam
        How many of its frame parameters come before charge and spin.
    numb_aparam
        How many of its atomic parameters come before the spins.
    """
    if structures.fparam is None:
        return _single_frame(structures, edges, numb_aparam)
    order = structures.order
    fparam, charge_spin = structures.fparam.tensor_split([numb_fparam], dim=1)
    n_places = structures.atype.numel()
    neighbor = order.new_full((n_places, structures.neighbor.shape[1]), -1)
    all_edges = edges.new_zeros(n_places, *edges.shape[1:])
    aparam, spin = _split(structures.aparam, numb_aparam)
    return Layout(
        atype=structures.atype,
        neighbor=neighbor.index_copy(0, order, structures.neighbor),
        edges=all_edges.index_copy(0, order, edges),
        sections=structures.sections,
        fparam=fparam if fparam.shape[1] else None,
        charge_spin=charge_spin if charge_spin.shape[1] else None,
        aparam=aparam,
        spin=spin,
        place=order,
        slots=_used_slots(structures, order),
    )


def _split(of_atoms: Tensor | None, numb_aparam: int) -> tuple[Tensor | None, Tensor | None]:
    """Return parameters of atoms and their spins; None without."""
    if of_atoms is None:
        return None, None
    aparam, spin = of_atoms.tensor_split([numb_aparam], dim=2)
    return (aparam if aparam.shape[2] else None), (spin if spin.shape[2] else None)


def _single_frame(structures: Structures, edges: Tensor, numb_aparam: int) -> Layout:
    order = structures.order
    # Atoms are numbered by frame and place; here they have their rank in the sorted list.
    rank = order.new_zeros(structures.atype.numel())
    rank = rank.index_copy(0, order, torch.arange(len(order), device=order.device))
    neighbor = structures.neighbor
    in_list = rank.index_select(0, neighbor.clamp(min=0).view(-1)).view_as(neighbor)
    of_atoms = structures.aparam
    if of_atoms is not None:
        of_atoms = of_atoms.flatten(0, 1).index_select(0, order).unsqueeze(0)
    aparam, spin = _split(of_atoms, numb_aparam)
    return Layout(
        atype=structures.sorted_type.unsqueeze(0),
        neighbor=torch.where(neighbor >= 0, in_list, neighbor),
        edges=edges,
        sections=structures.sections,
        fparam=None,
        charge_spin=None,
        aparam=aparam,
        spin=spin,
        place=None,
        slots=_used_slots(structures),
    )


def _used_slots(structures: Structures, place: Tensor | None = None) -> Tensor | None:
    """Return `Layout.slots`: those that the host knows, or as many as can have a neighbour."""
    width = structures.neighbor.shape[1]
    slots = _bounded_slots(structures) if structures.edges else _filled_slots(structures)
    if slots is None or place is None:
        return slots
    atom = slots.div(width, rounding_mode="floor")
    return place.index_select(0, atom) * width + slots % width


def _bounded_slots(structures: Structures) -> Tensor | None:
    """Return the slots with a neighbour, then empty ones; on the device, for a fixed number."""
    is_empty = structures.neighbor.flatten() < 0
    if structures.edges is None or structures.edges >= len(is_empty):
        return None
    return is_empty.to(torch.uint8).sort(stable=True).indices[: structures.edges]


def _filled_slots(structures: Structures) -> Tensor | None:
    """Return the slots that may have a neighbour in a batch which the host made."""
    n_used = structures.filled.sum(axis=0)
    n_slots = structures.neighbor.numel()
    if len(structures.sections) > 1 or n_used.sum() == n_slots:
        return None
    if structures.neighbor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph cannot copy the numbers from the host
    width = structures.neighbor.shape[1]
    # Slots of an atom are consecutive, from `atom · width` on.
    first_used = np.cumsum(n_used) - n_used
    skipped = np.repeat(np.arange(len(n_used)) * width - first_used, n_used)
    return torch.from_numpy(skipped + np.arange(len(skipped))).to(structures.neighbor.device)


def nearest_first(layout: Layout, rcut: float, *, sort: bool) -> Layout:
    """Return the batch without neighbours beyond the cut-off, which skin lists have.

    With `sort`, each row of `neighbor` and `edges` begins with the nearest neighbour and ends with
    the empty slots. Message-passing descriptors of deepmd-kit read only the first columns.
    """
    distance = torch.linalg.vector_norm(layout.edges.detach(), dim=2)
    inside = (layout.neighbor >= 0) & (distance <= rcut)
    neighbor = torch.where(inside, layout.neighbor, -1)
    if not sort:
        return layout._replace(neighbor=neighbor)
    columns = torch.where(inside, distance, torch.inf).argsort(dim=1, stable=True)
    edges = layout.edges.gather(1, columns.unsqueeze(2).expand(-1, -1, 3))
    return layout._replace(neighbor=neighbor.gather(1, columns), edges=edges)
