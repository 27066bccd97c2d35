"""Statistics of the data: deviations of the environment rows, and the length of descriptors."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.descriptor.interface import Standardised
from deepmd_muon.model.edges import edge_vectors
from deepmd_muon.model.energy_model import DescriptorModel
from deepmd_muon.model.interface import EnergyModel
from deepmd_muon.model.structures import Structures

ABSENT_DEVIATION = 0.1  # deepmd-kit's deviation of a type that the data do not contain
LEAST_DEVIATION = 0.01  # deepmd-kit's, whatever `data_stat_protect` says
# Up to this many slots a batch, several threads spend more time waiting for each other than
# computing.
_SINGLE_THREAD_SLOTS = 1 << 18
# Slots whose environments are computed at once: more do not fit a thread's part of the caches, or
# the memory of a GPU.
_SLOTS_PER_THREAD = 1 << 16
_SLOTS_PER_GPU = 1 << 22


@torch.no_grad()
def environment_statistics(
    model: EnergyModel, batches: Iterable[Structures]
) -> tuple[Tensor, Tensor]:
    """Compute the mean and deviation of a descriptor's environment per centre type, as deepmd-kit.

    Every slot of `sel` counts, empty ones and excluded pairs as zero. The radial component has its
    own mean and deviation; the three angular ones have mean zero and one deviation in common.

    Parameters
    ----------
    model
        Gives cutoff, switch, slots and excluded pairs.
    batches
        Sampled structures.

    Returns
    -------
    tuple
        mean `(ntypes, 4)` and stddev `(ntypes, 4)`, float64, for `EnergyModel.set_statistics`; 0
        and 1 for a descriptor that standardises nothing.
    """
    ntypes = model.ntypes
    descriptor = model.atomic_model.descriptor
    if not isinstance(descriptor, Standardised) or not descriptor.needs_statistics:
        neutral_mean = torch.zeros(ntypes, 4, dtype=torch.float64)
        return neutral_mean, torch.ones_like(neutral_mean)
    device = model.atomic_model.out_bias.device
    count = torch.zeros(ntypes, dtype=torch.float64, device=device)
    sums = torch.zeros(ntypes, 4, dtype=torch.float64, device=device)
    squares = torch.zeros(ntypes, 4, dtype=torch.float64, device=device)
    for batch in map(model.mark_excluded, batches):
        type_counts = torch.tensor(batch.type_counts, dtype=torch.float64, device=device)
        count += sum(model.sel) * type_counts
        with _threads_for(batch.neighbor.numel()):
            slots_at_once = _SLOTS_PER_GPU
            if device.type == "cpu":
                slots_at_once = _SLOTS_PER_THREAD * torch.get_num_threads()
            for part in _split(batch, slots_at_once):
                rows = descriptor.environment(part, edge_vectors(part)).rows
                used = descriptor.used_slots(part)
                if used is not None:
                    rows = rows * used.unsqueeze(-1)
                _add_by_type(sums, rows.sum(1), part)
                _add_by_type(squares, rows.square().sum(1), part)
    # The three angular components share their statistics.
    sums = torch.cat([sums[:, :1], sums[:, 1:].mean(1, keepdim=True)], dim=1)
    squares = torch.cat([squares[:, :1], squares[:, 1:].mean(1, keepdim=True)], dim=1)
    number = count.clamp(min=1.0).unsqueeze(1)
    mean = sums / number
    variance = (squares / number - mean.square()).clamp(min=0.0)
    stddev = variance.sqrt().clamp(min=LEAST_DEVIATION)
    stddev = torch.where(count.unsqueeze(1) > 0, stddev, ABSENT_DEVIATION)
    angular_stddev = stddev[:, 1:].expand(-1, 3)
    return (
        torch.cat([mean[:, :1], torch.zeros_like(angular_stddev)], dim=1),
        torch.cat([stddev[:, :1], angular_stddev], dim=1),
    )


def _add_by_type(sums: Tensor, rows: Tensor, part: Structures) -> None:
    """Add a row of each sorted atom to the sums of its type `(ntypes, …)`, in a fixed order."""
    if rows.device.type == "cpu":
        # Atom by atom, so that the size of parts does not change the result.
        sums.index_add_(0, part.sorted_type, rows)
    else:
        rows_by_type = rows.split(list(part.type_counts))
        sums += torch.stack([type_rows.sum(0) for type_rows in rows_by_type])


@torch.no_grad()
def descriptor_length(model: EnergyModel, batches: Iterable[Structures]) -> float:
    """Return the root-mean-square length of descriptors with the model's present weights.

    Parameters
    ----------
    model
        Gives the descriptor.
    batches
        Sampled structures on the model's device; 0 without any atom.
    """
    if not isinstance(model, DescriptorModel):
        return 0.0  # other models show no descriptor
    squares = 0.0
    count = 0
    for batch in map(model.mark_excluded, batches):
        with _threads_for(batch.neighbor.numel()):
            described = model.atomic_model.descriptor(batch, edge_vectors(batch), force=False)
            rows = described.descriptor
            squares += float(rows.double().square().sum())
            count += len(rows)
    return math.sqrt(squares / max(count, 1))


def _split(batch: Structures, slots: int) -> Iterator[Structures]:
    """Yield parts of a batch with at most so many neighbour slots, but at least one sorted atom."""
    natoms, width = batch.neighbor.shape
    step = max(1, slots // max(1, width))
    if natoms <= step:
        yield batch
        return
    type_ends = np.cumsum(batch.type_counts)
    for start in range(0, natoms, step):
        stop = start + step
        atoms = slice(start, stop)
        yield dataclasses.replace(
            batch,
            order=batch.order[atoms],
            sorted_type=batch.sorted_type[atoms],
            sorted_frame=batch.sorted_frame[atoms],
            neighbor=batch.neighbor[atoms],
            shift=None if batch.shift is None else batch.shift[atoms],
            type_counts=tuple(np.diff(type_ends.clip(start, stop), prepend=start).tolist()),
            filled=batch.filled[:, atoms],
            inner=batch.inner[:, atoms],
        )


@contextlib.contextmanager
def _threads_for(slots: int) -> Iterator[None]:
    """Compute small batches with one thread of torch, in a `with` block.

    A Python thread that uses torch for the first time in the block keeps to one thread afterwards.
    """
    threads = torch.get_num_threads()
    if slots > _SINGLE_THREAD_SLOTS or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
