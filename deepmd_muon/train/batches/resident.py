"""Training data on the device: frames and neighbour lists of whole systems, gathered by frame number inside a step.

Positions, cells, labels and neighbour lists of a small data set take some hundred megabytes, less than a step's
intermediate tensors. Kept on the GPU they cost the host nothing per step but drawing the frame numbers, in the
loader's own order, for a thousand steps at once.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import (
    DataLoader,
    Frames,
    NeighborCache,
    NeighborList,
    Plan,
    System,
    group_limits,
    widen_sections,
    worker_count,
)
from deepmd_muon.data.frames import LABELS
from deepmd_muon.model import Structures
from deepmd_muon.model.nn import triton_support
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.streamed import bounds_of, padded_widths

log = logging.getLogger(__name__)

# Frames that are read at once.
_CHUNK = 16
# Batches whose frame numbers are copied to the device at once.
_AHEAD = 1024
# Data sets of at most this size have their neighbours found ahead, which takes a few seconds of all threads.
_AHEAD_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class _Order:
    """Where the atoms of a batch of some frames stand when they are sorted by type; the same for all such batches.

    Attributes
    ----------
    atype, order, sorted_type, sorted_frame
        As `Structures` has them.
    atom
        Number of each sorted atom within its frame `(nreal,)`.
    first
        Number of the first atom of its frame in the batch `(nreal, 1)`.
    type_counts
        Sorted atoms of each type.
    """

    atype: Tensor
    order: Tensor
    sorted_type: Tensor
    sorted_frame: Tensor
    atom: Tensor
    first: Tensor
    type_counts: tuple[int, ...]


class ResidentSystem:
    """All frames of some systems on a device, one system after the other.

    Parameters
    ----------
    systems
        With the same atoms and labels in every frame, so that their batches share a CUDA graph.
    cache
        Builds neighbour lists, or has them.
    ntypes
        Number of types of the model.
    device
        Where the tensors live.
    """

    def __init__(self, systems: Sequence[System], cache: NeighborCache, ntypes: int, device: torch.device) -> None:
        system = systems[0]
        self.name = system.name
        self.natoms = system.natoms
        self._ntypes = ntypes
        self._device = device
        self._atype = system.types(np.arange(1))[0].astype(np.int64)
        frames, neighbors = _read(systems, cache)
        arrays = {name: getattr(frames, name) for name in ("coord", "box", *LABELS)}
        given = {name: np.asarray(values, dtype=np.float64) for name, values in arrays.items() if values is not None}
        # All numbers of a frame side by side, so that a batch of them is gathered at once.
        self._shapes = {name: values.shape[1:] for name, values in given.items()}
        packed = np.concatenate([values.reshape(len(values), -1) for values in given.values()], axis=1)
        self._packed = torch.from_numpy(packed).to(device)
        self._sections = neighbors.sections
        self._inner = bounds_of(neighbors.inner.swapaxes(0, 1))
        # One row an atom, so that the rows of a batch are gathered in sorted order at once.
        self._index = torch.from_numpy(neighbors.index).to(device).flatten(0, 1)
        self._shift = torch.from_numpy(neighbors.shift).to(device).flatten(0, 1) if frames.box is not None else None
        self._orders: dict[int, _Order] = {}

    def prepare(self, nframes: int) -> None:
        """Sort the atoms of batches of this many frames, on the host, before a step that reads one."""
        if nframes in self._orders:
            return
        atype = np.tile(self._atype, (nframes, 1))
        flat = atype.reshape(-1)
        order = np.argsort(flat, kind="stable")
        order = order[np.count_nonzero(flat < 0) :]
        frame = order // self.natoms
        type_counts = tuple(np.bincount(flat[order], minlength=self._ntypes).tolist())

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

        self._orders[nframes] = _Order(
            atype=on_device(atype),
            order=on_device(order),
            sorted_type=on_device(flat[order]),
            sorted_frame=on_device(frame),
            atom=on_device(order % self.natoms),
            first=on_device((frame * self.natoms)[:, None].astype(np.int32)),
            type_counts=type_counts,
        )

    def gather(self, numbers: Tensor) -> TrainingBatch:
        """Return the batch of some frames; every operation runs on the device.

        Parameters
        ----------
        numbers
            Frame numbers `(nframes,)`, int64; `prepare` must have seen as many.
        """
        nframes = numbers.shape[0]
        order = self._orders[nframes]
        found = self._unpacked(self._packed.index_select(0, numbers))
        neighbor, shift = self._neighbors(numbers, order)
        nreal = neighbor.shape[0]
        structures = Structures(
            atype=order.atype,
            order=order.order,
            sorted_type=order.sorted_type,
            sorted_frame=order.sorted_frame,
            coord=found.pop("coord"),
            box=found.pop("box", None),
            neighbor=neighbor,
            shift=shift,
            sections=self._sections,
            type_counts=order.type_counts,
            filled=np.repeat(np.array(self._sections)[:, None], nreal, axis=1),
            inner=np.repeat(self._inner[:, None], nreal, axis=1),
        )
        labels: dict[str, Tensor | None] = {name: found.get(name) for name in LABELS}
        real = np.tile(self._atype >= 0, (nframes, 1))
        mask = None if real.all() else order.atype >= 0
        return TrainingBatch(structures, labels, mask, self.name, self.atoms(nframes), self.present(nframes))

    def _unpacked(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the content of the rows of some frames, by name."""
        parts = rows.split([math.prod(shape) for shape in self._shapes.values()], dim=1)
        return {name: part.view(-1, *shape) for part, (name, shape) in zip(parts, self._shapes.items(), strict=True)}

    def _neighbors(self, numbers: Tensor, order: _Order) -> tuple[Tensor, Tensor | None]:
        """Return neighbours and cell translations of the sorted atoms of some frames."""
        if triton_support.usable(self._device):
            from deepmd_muon.train.batches.gather_kernel import gather_neighbors

            return gather_neighbors(self._index, self._shift, numbers, order.sorted_frame, order.atom, self.natoms)
        row = numbers.index_select(0, order.sorted_frame) * self.natoms + order.atom
        index = self._index.index_select(0, row)
        neighbor = torch.where(index < 0, index, index + order.first).long()
        return neighbor, None if self._shift is None else self._shift.index_select(0, row)

    def atoms(self, nframes: int) -> np.ndarray:
        """Real atoms of each of some frames."""
        return np.full(nframes, int(np.count_nonzero(self._atype >= 0)))

    def present(self, nframes: int) -> dict[str, np.ndarray]:
        """Which of some frames have each label: all or none."""
        return {name: np.full(nframes, name in self._shapes) for name in LABELS}


def fits(system: System) -> bool:
    """Return whether every frame of a system has the same atoms and labels."""
    return not system.mixed and system.uniform_labels


def resident_bytes(system: System, width: int) -> int:
    """Estimate the memory of a system on the device with neighbour lists of some width [bytes]."""
    labels = sum(values for name, values in (("energy", 1), ("virial", 9)) if name in system.labels)
    atoms = 3 + 3 * ("force" in system.labels) + sum(name.startswith("atom_") for name in system.labels)
    a_frame = 8 * (9 + labels + system.natoms * atoms) + system.natoms * width * 7
    return system.nframes * a_frame


def _read(systems: Sequence[System], cache: NeighborCache) -> tuple[Frames, NeighborList]:
    """Return all frames with their neighbours, the sections as wide as the fullest frame needs."""
    limits = group_limits(cache.sel, cache.by_type, cache.ntypes)

    def read(job: tuple[System, int]) -> tuple[Frames, NeighborList]:
        system, first = job
        numbers = np.arange(first, min(first + _CHUNK, system.nframes))
        frames = system.frames(numbers)
        return frames, cache.batch(system, numbers, frames)

    jobs = [(system, first) for system in systems for first in range(0, system.nframes, _CHUNK)]
    cache.wait()
    # Neighbours are searched for outside of Python's lock.
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="deepmd_muon-resident") as pool:
        parts, lists = map(list, zip(*pool.map(read, jobs), strict=True))
    widest = [max(widths) for widths in zip(*(part.sections for part in lists), strict=True)]
    widths = padded_widths(widest, limits)
    wide = [widen_sections(part, widths) for part in lists]
    joined = (np.concatenate([getattr(part, name) for part in wide]) for name in ("index", "shift", "inner"))
    index, shift, inner = joined
    return Frames.concatenate(parts), NeighborList(index, shift, widths, inner)


@dataclasses.dataclass(frozen=True)
class ResidentFeed:
    """A batch that a step gathers from the frame numbers it finds in the table.

    `layout` names the group of systems and the number of frames.
    """

    system_on_device: ResidentSystem
    system: str
    numbers: _NumberTable
    nframes: int
    layout: Hashable

    @property
    def atoms(self) -> np.ndarray:
        """Real atoms of each frame, on the host."""
        return self.system_on_device.atoms(self.nframes)

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        present = self.system_on_device.present(1)
        return float(self.atoms.sum()) if all(present[name][0] for name in needed) else 0.0

    def read(self) -> TrainingBatch:
        """Gather the batch."""
        return self.system_on_device.gather(self.numbers.read()[: self.nframes])


class _NumberTable:
    """Frame numbers of the next batches on the device, read one batch a step."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._table = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self._row = torch.zeros(1, dtype=torch.int64, device=device)

    def write(self, plans: Sequence[Plan], first: np.ndarray) -> None:
        """Take the batches of these plans, on the host; `first` says where the frames of a system begin."""
        values = np.zeros(self._table.shape, dtype=np.int64)
        for row, plan in enumerate(plans):
            ((system, numbers),) = plan.parts
            values[row, : len(numbers)] = numbers + first[system]
        self._table.copy_(torch.from_numpy(values))
        self._row.zero_()

    def read(self) -> Tensor:
        """Return the numbers of the present batch, and move on; on the device."""
        found = self._table.index_select(0, self._row)[0]
        self._row.add_(1)
        return found


class ResidentBatches:
    """Batches of a loader whose systems live on the device.

    Parameters
    ----------
    loader
        Its order of batches is kept; frames are read once, here.
    ntypes
        Number of types of the model.
    device
        Where the data go.
    """

    def __init__(self, loader: DataLoader, ntypes: int, device: torch.device) -> None:
        self._loader = loader
        groups: dict[Hashable, list[int]] = {}
        for number, system in enumerate(loader.systems):
            atoms = system.types(np.arange(1))[0].tobytes()
            groups.setdefault((atoms, system.pbc, tuple(sorted(system.labels))), []).append(number)
        self._group = np.zeros(len(loader.systems), dtype=int)
        self._first = np.zeros(len(loader.systems), dtype=int)
        self._systems: list[ResidentSystem] = []
        for index, members in enumerate(groups.values()):
            systems = [loader.systems[number] for number in members]
            self._systems.append(ResidentSystem(systems, loader.cache, ntypes, device))
            self._group[members] = index
            self._first[members] = np.cumsum([0, *(system.nframes for system in systems[:-1])])
        sizes = [min(size, system.nframes) for size, system in zip(loader.batch_sizes, loader.systems, strict=True)]
        each = loader.batches_per_step
        self._rows = max(1, _AHEAD // each) * each  # the table is written between steps, not within one
        self._numbers = _NumberTable(self._rows, max(sizes), device)
        self._plans: deque[Plan] = deque()

    def next(self) -> ResidentFeed:
        """Return the next batch."""
        if not self._plans:
            self._plans.extend(self._loader.draw() for _ in range(self._rows))
            self._numbers.write(self._plans, self._first)
        ((number, frames),) = self._plans.popleft().parts
        self._loader.advance()
        group = int(self._group[number])
        self._systems[group].prepare(len(frames))
        name = self._loader.systems[number].name
        return ResidentFeed(self._systems[group], name, self._numbers, len(frames), (group, len(frames)))

    def close(self) -> None:
        """Do nothing: no work goes on in the background."""


def why_not_resident(loader: DataLoader, budget: int, steps: int) -> str | None:
    """Say why a loader's data should be streamed instead; None when they can live on the device.

    Parameters
    ----------
    loader
        Of the training data.
    budget
        Bytes that they may take.
    steps
        Length of the run: frames that it will hardly visit are not worth reading.
    """
    if loader.mixes_systems:
        return "batches mix systems"
    odd = [system.name for system in loader.systems if not fits(system)]
    if odd:
        return f"the frames of {odd[0]} differ in atoms or labels"
    frames = sum(system.nframes for system in loader.systems)
    if frames > steps * loader.batches_per_step * max(loader.batch_sizes):
        return f"the run takes fewer than their {frames} frames"
    width = int(np.minimum(group_limits(loader.cache.sel, loader.cache.by_type, loader.cache.ntypes), 1 << 20).sum())
    needed = sum(resident_bytes(system, width) for system in loader.systems)
    return f"they take {needed / 2**20:.0f} MiB" if needed > budget else None


def find_neighbors_ahead(loader: DataLoader, steps: int) -> None:
    """Begin to find the neighbours of a small data set that will live on the device, before it is read there."""
    if why_not_resident(loader, _AHEAD_BYTES, steps) is None:
        loader.cache.fill_ahead(loader.systems)
