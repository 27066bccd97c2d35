"""Frames of all training systems on a device, one after the other: positions, cells, types and labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, NeighborCache, System, worker_count
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, LABELS
from deepmd_muon.data.neighbors.far_atoms import MAX_LENGTH
from deepmd_muon.data.neighbors.lists import SAME_PLACE
from deepmd_muon.model.neighbors.atoms import Atoms, Cells
from deepmd_muon.model.neighbors.search import count_neighbors

# Atoms that are read at once, and reads that wait for the device.
_CHUNK_ATOMS = 1 << 16
_WAITING = 16


@dataclass(frozen=True)
class Composition:
    """What frames of one composition have in common.

    Attributes
    ----------
    counts
        Atoms of each type `(ntypes,)`.
    periodic
        Whether the frames have cells.
    neighbors, total
        Most neighbours of an atom: of each type `(ntypes,)`, and of all types.
    inner
        Most neighbours within each shorter cut-off `(ninner,)`.
    """

    counts: np.ndarray
    periodic: bool
    neighbors: np.ndarray
    total: int
    inner: np.ndarray


class FrameStore:
    """All frames of some systems on a device, the atoms of each sorted by type.

    A last frame without atoms and labels stands for none.

    Parameters
    ----------
    systems
        Read once, here.
    cache
        Says which neighbours the model reads, for their counts.
    device
        Where the tensors live.

    Attributes
    ----------
    compositions
        Of the frames.
    group, natoms
        Composition and number of atoms of every frame `(nframes + 1,)`, on the host.
    present
        Which frames have each label `(nframes + 1,)`, on the host; without labels that no frame has.
    offset
        Number of the first frame of each system.
    coord, atype
        Positions `(natoms of all, 3)` [Å] and types of all atoms.
    first, kinds
        First atom and composition of every frame `(nframes + 1,)`.
    counts, starts
        Atoms of each type, and how many atoms stand before them, of every composition `(ncompositions, ntypes)`.
    cells
        Of all frames; None where none is periodic.
    of_frames, of_atoms
        Labels by name, `(nframes + 1, width)` and `(natoms of all, width)`; zeros where a frame has none.
    fparam, aparam
        Frame parameters `(nframes + 1, numb_fparam)` and atomic parameters `(natoms of all, numb_aparam)`, or None.
    found
        Which frames have a label `(nframes + 1,)`, by name.

    Raises
    ------
    NeighborError
        When two atoms lie at the same place, or a cell or position is impossible; names frame and system.
    """

    def __init__(self, systems: Sequence[System], cache: NeighborCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self.offset = np.cumsum([0, *(system.nframes for system in systems)])
        nframes = int(self.offset[-1])
        self.nframes = nframes
        self.group = np.zeros(nframes + 1, dtype=np.int64)
        self.natoms = np.zeros(nframes + 1, dtype=np.int64)
        labels = sorted({name for system in systems for name in system.labels}, key=[*LABELS].index)
        self.present = {name: np.zeros(nframes + 1, dtype=bool) for name in labels}
        self._kinds: dict[tuple[bytes, bool], int] = {}
        places = sum(_atoms_of(system) for system in systems)

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.of_frames = {name: zeros(nframes + 1, width) for name, width in FRAME_LABELS.items() if name in labels}
        self.of_atoms = {name: zeros(places, width) for name, width in ATOM_LABELS.items() if name in labels}
        # All systems carry the same parameters, or none.
        wanted = systems[0].parameters
        self.fparam = zeros(nframes + 1, wanted.fparam) if wanted.fparam else None
        self.aparam = zeros(places, wanted.aparam) if wanted.aparam else None
        self.coord = zeros(places, 3)
        self.atype = zeros(places, dtype=torch.int64)
        self.first = zeros(nframes + 1, dtype=torch.int64)
        self.cells: Cells | None = None
        if any(system.pbc for system in systems):
            # Those of frames without a cell move nothing.
            images = torch.ones(nframes + 1, 3, dtype=torch.int32, device=device)
            self.cells = Cells(zeros(nframes + 1, 3, 3), zeros(nframes + 1, 3, 3), zeros(nframes + 1, 3), images)
        # Most neighbours of an atom of each frame: of each type, of all, within shorter cut-offs.
        self._most = zeros(nframes, cache.ntypes + 1 + len(cache.inner), dtype=torch.int32)
        self._nearest = zeros(nframes)
        self._read(systems)
        self._refuse_same_places(systems)
        self.group[-1] = self._kind_of(np.zeros(cache.ntypes, dtype=np.int64), periodic=False)
        self.kinds = torch.from_numpy(self.group).to(device)
        self.compositions = self._compositions()
        counts = np.stack([kind.counts for kind in self.compositions])
        self.counts = torch.from_numpy(counts).to(device)
        self.starts = torch.from_numpy(counts.cumsum(1) - counts).to(device)
        self.found = {name: torch.from_numpy(flags).to(device) for name, flags in self.present.items()}

    def _read(self, systems: Sequence[System]) -> None:
        """Copy all frames to the device, in order; threads read ahead of it."""
        done = 0
        for number, chunk, frames in _read_ahead(systems):
            system = systems[number]
            order = np.argsort(np.where(frames.atype < 0, 1 << 30, frames.atype), axis=1, kind="stable")
            atype = np.take_along_axis(frames.atype, order, 1)
            natoms = (atype >= 0).sum(1)
            here = slice(int(self.offset[number] + chunk[0]), int(self.offset[number] + chunk[-1]) + 1)
            self.natoms[here] = natoms
            self.first[here] = torch.from_numpy(done + natoms.cumsum() - natoms).to(self._device)
            mine = slice(done, done + int(natoms.sum()))
            done = mine.stop
            real = atype >= 0
            coord = np.take_along_axis(frames.coord, order[..., None], 1)
            self.atype[mine] = torch.from_numpy(atype[real].astype(np.int64)).to(self._device)
            self.coord[mine] = torch.from_numpy(coord[real]).to(self._device)
            self._take_labels(frames, order, real, here, mine)
            if self.fparam is not None and frames.fparam is not None:
                self.fparam[here] = torch.from_numpy(frames.fparam).to(self._device)
            if self.aparam is not None and frames.aparam is not None:
                values = np.take_along_axis(frames.aparam, order[..., None], 1)
                self.aparam[mine] = torch.from_numpy(values[real]).to(self._device)
            cells = None
            self._refuse_impossible(system, chunk, frames)
            if self.cells is not None and system.pbc:
                box = torch.from_numpy(np.asarray(frames.box, dtype=np.float64))
                cells = Cells.of(box.to(self._device), self._cache.rcut)
                for target, source in zip(self.cells, cells, strict=True):
                    target[here] = source
            self._count(coord, atype, natoms, cells, here)
            kinds, inverse = np.unique(frames.type_counts(self._cache.ntypes), axis=0, return_inverse=True)
            numbers = np.array([self._kind_of(kind, periodic=system.pbc) for kind in kinds])
            self.group[here] = numbers[inverse.reshape(-1)]

    def _take_labels(self, frames: Frames, order: np.ndarray, real: np.ndarray, here: slice, mine: slice) -> None:
        for name, present in self.present.items():
            present[here] = frames.present(name)
            values = getattr(frames, name)
            if values is None:
                continue
            values = np.where(present[here].reshape(-1, *(1,) * (values.ndim - 1)), values, 0.0)
            if name in self.of_frames:
                self.of_frames[name][here] = torch.from_numpy(values.reshape(len(values), -1)).to(self._device)
            else:
                values = np.take_along_axis(values.reshape(*order.shape, -1), order[..., None], 1)
                self.of_atoms[name][mine] = torch.from_numpy(values[real]).to(self._device)

    def _count(
        self, coord: np.ndarray, atype: np.ndarray, natoms: np.ndarray, cells: Cells | None, here: slice
    ) -> None:
        """Count the neighbours of some frames."""
        nframes, width = atype.shape
        sizes = torch.from_numpy(natoms).to(self._device)
        places = torch.arange(nframes * width, device=self._device)
        frame = torch.where(places % width < sizes.repeat_interleave(width), places // width, nframes)
        atoms = Atoms(
            torch.from_numpy(coord.reshape(-1, 3)).to(self._device),
            torch.from_numpy(atype.reshape(-1).astype(np.int64)).to(self._device),
            sizes,
            width,
            cells,
        )
        radii = [self._cache.rcut, *(short for short, _ in self._cache.inner)]
        of_types, shorter, nearest = count_neighbors(atoms, places, frame, radii, self._cache.ntypes)
        most = torch.cat([of_types, of_types.sum(1, keepdim=True), shorter], 1)
        self._most[here] = most.view(nframes, width, -1).amax(1).int()
        self._nearest[here] = nearest.view(nframes, width).amin(1)

    def _kind_of(self, counts: np.ndarray, *, periodic: bool) -> int:
        """Return the number of a composition."""
        return self._kinds.setdefault((counts.astype(np.int64).tobytes(), periodic), len(self._kinds))

    def _compositions(self) -> list[Composition]:
        """Return all compositions with what their frames need."""
        ntypes, width = self._cache.ntypes, self._most.shape[1]
        index = self.kinds[:-1].unsqueeze(1).expand(-1, width)
        most = self._most.new_zeros(len(self._kinds), width).scatter_reduce(0, index, self._most, "amax").cpu().numpy()
        return [
            Composition(
                np.frombuffer(key, dtype=np.int64).copy(), periodic, row[:ntypes], int(row[ntypes]), row[ntypes + 1 :]
            )
            for (key, periodic), row in zip(self._kinds, most.astype(np.int64), strict=True)
        ]

    def _refuse_same_places(self, systems: Sequence[System]) -> None:
        """Raise what the search on the host raises where two atoms lie at the same place."""
        wrong = torch.nonzero(self._nearest < SAME_PLACE**2)[:1]
        if len(wrong):
            frame = int(wrong[0, 0])
            number = int(np.searchsorted(self.offset, frame, side="right")) - 1
            system, row = systems[number], frame - int(self.offset[number])
            self._cache.frame(system, row, system.frames([row]), 0)

    def _refuse_impossible(self, system: System, chunk: np.ndarray, frames: Frames) -> None:
        """Raise what the search on the host raises of frames that look impossible."""
        size = np.abs(frames.coord).max(axis=(1, 2), initial=0.0)
        odd = ~(size <= MAX_LENGTH)
        if system.pbc and frames.box is not None:
            volume, length = np.abs(np.linalg.det(frames.box)), np.abs(frames.box).max(axis=(1, 2))
            odd |= ~((volume > 1e-6 * length**3) & (length <= MAX_LENGTH))
        for row in np.flatnonzero(odd):
            self._cache.frame(system, int(chunk[row]), frames, int(row))


def _atoms_of(system: System) -> int:
    """Count the atoms of all frames, padding left out."""
    if not system.mixed:
        return int((system.types(np.arange(1)) >= 0).sum()) * system.nframes
    return sum(int((system.types(chunk) >= 0).sum()) for chunk in _chunks(system))


def _chunks(system: System) -> Iterator[np.ndarray]:
    """Yield the numbers of all frames, some at a time."""
    size = max(1, _CHUNK_ATOMS // max(1, system.natoms))
    for first in range(0, system.nframes, size):
        yield np.arange(first, min(first + size, system.nframes))


def _read_ahead(systems: Sequence[System]) -> Iterator[tuple[int, np.ndarray, Frames]]:
    """Yield all frames in order with the number of their system; threads read some of them ahead."""
    with ThreadPoolExecutor(worker_count(), thread_name_prefix="deepmd_muon-frames") as pool:
        waiting: deque[tuple[int, np.ndarray, Future[Frames]]] = deque()
        for number, system in enumerate(systems):
            for chunk in _chunks(system):
                waiting.append((number, chunk, pool.submit(system.frames, chunk)))
                if len(waiting) > _WAITING:
                    first = waiting.popleft()
                    yield first[0], first[1], first[2].result()
        for left, chunk, frames in waiting:
            yield left, chunk, frames.result()


def store_bytes(systems: Sequence[System]) -> int:
    """Estimate the memory of systems on a device [bytes]."""
    total = 0
    for system in systems:
        atoms = sum(width for name, width in ATOM_LABELS.items() if name in system.labels)
        frames = sum(width for name, width in FRAME_LABELS.items() if name in system.labels)
        atoms, frames = atoms + system.parameters.aparam, frames + system.parameters.fparam
        total += system.nframes * 8 * (system.natoms * (4 + atoms) + frames + 24 * system.pbc + 2)
    return total
