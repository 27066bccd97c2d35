"""Statistics of the data: mean and deviation of the environment rows, and the length of descriptors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from deepmd_muon.model.descriptor.interface import Standardised
from deepmd_muon.model.energy_model import EnergyModel, edge_vectors
from deepmd_muon.model.structures import Structures

ABSENT_DEVIATION = 0.1  # deepmd-kit's deviation of a type that the data do not contain
LEAST_DEVIATION = 0.01  # deepmd-kit's, whatever `data_stat_protect` says
# Slots of a batch up to which several threads spend more time waiting for each other than computing.
_FEW_SLOTS = 1 << 18
# Slots for which a thread computes environments at once: more do not fit its part of the caches. The same for a GPU and
# its memory.
_PART_SLOTS, _GPU_SLOTS = 1 << 16, 1 << 22


@torch.no_grad()
def environment_statistics(
    model: EnergyModel, batches: Iterable[Structures]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the standardisation of a descriptor's environment per centre type, as deepmd-kit does.

    Every slot of `sel` counts, empty ones and excluded pairs as zero. The radial component has its own mean and
    deviation; the three angular ones have mean zero and one deviation in common.

    Parameters
    ----------
    model
        Gives cutoff, switch, slots and excluded pairs.
    batches
        Sampled structures.

    Returns
    -------
    tuple
        mean `(ntypes, 4)` and stddev `(ntypes, 4)`, float64, for `EnergyModel.set_statistics`; 0 and 1 for a
        descriptor that standardises nothing.
    """
    descriptor = model.atomic_model.descriptor
    if not isinstance(descriptor, Standardised) or not descriptor.needs_statistics:
        return torch.zeros(model.ntypes, 4, dtype=torch.float64), torch.ones(
            model.ntypes, 4, dtype=torch.float64
        )
    slots = sum(model.sel)
    device = model.atomic_model.out_bias.device
    count = torch.zeros(model.ntypes, dtype=torch.float64, device=device)
    sums = torch.zeros(model.ntypes, 4, dtype=torch.float64, device=device)
    squares = torch.zeros(model.ntypes, 4, dtype=torch.float64, device=device)
    for structures in map(model.seen, batches):
        count += slots * torch.tensor(structures.type_counts, dtype=torch.float64, device=device)
        with _threads_for(structures.neighbor.numel()):
            slots_at_once = (
                _PART_SLOTS * torch.get_num_threads() if device.type == "cpu" else _GPU_SLOTS
            )
            for part in _parts(structures, slots_at_once):
                rows = descriptor.environment(part, edge_vectors(part)).rows
                used = descriptor.used_slots(part)
                if used is not None:
                    rows = rows * used.unsqueeze(-1)
                _add_by_type(sums, rows.sum(1), part)
                _add_by_type(squares, rows.square().sum(1), part)
    sums = torch.cat([sums[:, :1], sums[:, 1:].mean(1, keepdim=True)], dim=1)
    squares = torch.cat([squares[:, :1], squares[:, 1:].mean(1, keepdim=True)], dim=1)
    n = count.clamp(min=1.0).unsqueeze(1)
    mean = sums / n
    deviation = (squares / n - mean.square()).clamp(min=0.0).sqrt().clamp(min=LEAST_DEVIATION)
    deviation = torch.where(count.unsqueeze(1) > 0, deviation, ABSENT_DEVIATION)
    radial, angular = mean[:, :1], deviation[:, 1:].expand(-1, 3)
    return torch.cat([radial, torch.zeros_like(angular)], 1), torch.cat(
        [deviation[:, :1], angular], 1
    )


def _add_by_type(sums: torch.Tensor, rows: torch.Tensor, part: Structures) -> None:
    """Add rows of the sorted atoms of a batch to the sums of their types `(ntypes, …)`, in a fixed order."""
    if rows.device.type == "cpu":
        sums.index_add_(
            0, part.sorted_type, rows
        )  # atom by atom: the size of parts changes nothing
    else:
        sums += torch.stack([mine.sum(0) for mine in rows.split(list(part.type_counts))])


@torch.no_grad()
def descriptor_length(model: EnergyModel, batches: Iterable[Structures]) -> float:
    """Return the root-mean-square length of the atoms' descriptors, with the model's present weights.

    Parameters
    ----------
    model
        Gives the descriptor.
    batches
        Sampled structures on the model's device; 0 without any atom.
    """
    squares, count = 0.0, 0
    for structures in map(model.seen, batches):
        with _threads_for(structures.neighbor.numel()):
            rows = model.atomic_model.descriptor(
                structures, edge_vectors(structures), force=False
            ).descriptor
            squares += float(rows.double().square().sum())
            count += len(rows)
    return math.sqrt(squares / max(count, 1))


def _parts(structures: Structures, slots: int) -> Iterator[Structures]:
    """Yield a batch with so many neighbour slots of its sorted atoms at a time, and with at least one atom."""
    natoms, width = structures.neighbor.shape
    step = max(1, slots // max(1, width))
    if natoms <= step:
        yield structures
        return
    ends = np.cumsum(structures.type_counts)
    for first in range(0, natoms, step):
        mine = slice(first, first + step)
        yield dataclasses.replace(
            structures,
            order=structures.order[mine],
            sorted_type=structures.sorted_type[mine],
            sorted_frame=structures.sorted_frame[mine],
            neighbor=structures.neighbor[mine],
            shift=None if structures.shift is None else structures.shift[mine],
            type_counts=tuple(np.diff(ends.clip(first, first + step), prepend=first).tolist()),
            filled=structures.filled[:, mine],
            inner=structures.inner[:, mine],
        )


@contextlib.contextmanager
def _threads_for(slots: int) -> Iterator[None]:
    """Compute with one thread of torch where there is little to do, within the context.

    A Python thread that uses torch for the first time within the context keeps to one thread afterwards.
    """
    threads = torch.get_num_threads()
    if slots > _FEW_SLOTS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
