"""Frames of training systems on a device, one after the other: positions, cells, types and labels.

Data that fit their budget stay: each frame has a slot of its own, and is read once, before a batch needs it. Other
data pass through: the frames of the next batches fill the slots anew. A chunk of frames is uploaded and its neighbours
are counted on a stream of its own, so that steps which have been launched go on meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import NeighborCache, NeighborError, System
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, LABELS
from deepmd_muon.data.neighbors.lists import SAME_PLACE
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Cells
from deepmd_muon.model.neighbors.search import count_neighbors
from deepmd_muon.train.batches.frame_reader import Chunk

_T = TypeVar("_T")


class FrameStore:
    """Frames of some systems on a device, the atoms of each sorted by type.

    A last slot without atoms and labels stands for a missing frame.

    Parameters
    ----------
    systems
        Where the frames are.
    cache
        Says which neighbours the model reads, for their counts.
    device
        Device of the tensors.
    room
        Capacity in frames and atoms for data that pass through; None keeps all data.

    Attributes
    ----------
    offset
        Number of the first frame of each system `(nsystems + 1,)`.
    group, natoms
        Composition and atoms of every frame `(nframes,)`, on the host, once it has been read.
    present
        Which frames have each label `(nframes,)`, on the host; without labels that no system has.
    of_kind, periodic
        Atoms of each type `(ncompositions, ntypes)`, and which compositions have cells `(ncompositions,)`.
    most
        Largest number of neighbours of an atom, so far, in frames of a composition: of each type, of all types,
        and within each shorter cut-off `(ncompositions, ntypes + 1 + ninner)`.
    missing
        The last slot.
    coord, atype
        Positions [Å] and types of all atoms.
    first, sizes, counts
        First atom, atoms, and atoms of each type of every slot, `(nslots + 1,)` and `(nslots + 1, ntypes)`.
    cells
        Of all slots; None where no system is periodic.
    of_frames, of_atoms
        Labels by name, `(nslots + 1, width)` and `(natoms of all, width)`; zeros where a frame has none.
    parameters
        Values of "fparam" `(nslots + 1, numb_fparam)` and "aparam" `(natoms of all, numb_aparam)`.
    found
        Which slots have a label `(nslots + 1,)`, by name.
    """

    def __init__(
        self,
        systems: Sequence[System],
        cache: NeighborCache,
        device: torch.device,
        room: tuple[int, int] | None = None,
    ) -> None:
        self._systems, self._cache, self._device = systems, cache, device
        sizes = np.array([system.nframes for system in systems], dtype=np.int64)
        widths = np.array([system.natoms for system in systems], dtype=np.int64)
        self.offset = np.concatenate([[0], sizes.cumsum()])
        self._base = np.concatenate([[0], (sizes * widths).cumsum()])
        self._widths = widths
        self.nframes = int(self.offset[-1])
        self.stays = room is None
        slots, places = (self.nframes, int(self._base[-1])) if room is None else room
        ntypes = cache.ntypes
        labels = sorted({name for system in systems for name in system.labels}, key=[*LABELS].index)

        self.group = np.full(self.nframes, -1, dtype=np.int32)
        self.natoms = np.zeros(self.nframes, dtype=np.int32)
        self.present = {name: np.zeros(self.nframes, dtype=bool) for name in labels}
        self.of_kind = np.zeros((0, ntypes), dtype=np.int64)
        self.periodic = np.zeros(0, dtype=bool)
        self.most = np.zeros((0, ntypes + 1 + len(cache.inner)), dtype=np.int64)
        self._kinds: dict[tuple[bytes, bool], int] = {}

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.missing = slots
        self.coord = zeros(places, 3)
        self.atype = zeros(places, dtype=torch.int64)
        self.first = zeros(slots + 1, dtype=torch.int64)
        self.sizes = zeros(slots + 1, dtype=torch.int64)
        self.counts = zeros(slots + 1, ntypes, dtype=torch.int32)
        self.of_frames = {
            name: zeros(slots + 1, width) for name, width in FRAME_LABELS.items() if name in labels
        }
        self.of_atoms = {
            name: zeros(places, width) for name, width in ATOM_LABELS.items() if name in labels
        }
        self.found = {name: zeros(slots + 1, dtype=torch.bool) for name in labels}
        wanted = systems[0].parameters  # those of all
        shapes = {"fparam": (slots + 1, wanted.fparam), "aparam": (places, wanted.aparam)}
        self.parameters = {name: zeros(*shape) for name, shape in shapes.items() if shape[1]}
        self.cells: Cells | None = None
        if any(system.pbc for system in systems):
            images = torch.ones(slots + 1, 3, dtype=torch.int32, device=device)
            self.cells = Cells(
                zeros(slots + 1, 3, 3), zeros(slots + 1, 3, 3), zeros(slots + 1, 3), images
            )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Write frames into their slots; where data pass through, over all that was there.

        Two atoms at the same place, an impossible cell or position, or an atom with more neighbours than the search on
        a device takes are a NeighborError that names frame and system.
        """
        slot = place = 0
        for chunk in chunks:
            for number in chunk.doubtful:
                self._refuse(int(number))
            if self.stays:
                slots, first = chunk.numbers, self._place_of(chunk.numbers)
            else:
                slots = slot + np.arange(len(chunk.numbers))
                first = place + chunk.natoms.cumsum() - chunk.natoms
                slot, place = slot + len(slots), place + len(chunk.atype)
            with self._beside():
                values = self._upload(chunk, slots, first)
            self._write(values)

    def slots_of(self, numbers: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """Return the slots of frames; `taken` are those of the last `take`, in rising order."""
        return numbers if self.stays else np.searchsorted(taken, numbers)

    def kinds_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the kind of each frame: equal numbers for equal composition and labels."""
        kinds: np.ndarray = self.group[numbers].astype(np.int64)
        for flags in self.present.values():
            kinds = 2 * kinds + flags[numbers]
        return kinds

    def move(self, values: np.ndarray, target: Tensor) -> None:
        """Copy an array of the host to a tensor, after all launched work; the host does not wait for that work."""
        with self._beside():
            moved = self._moved(values)
        target.copy_(self._kept(moved))

    def _moved(self, values: np.ndarray) -> Tensor:
        """Return an array of the host on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Launch on a separate stream; later work of the current stream waits for it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Keep the memory of a tensor of the other stream until the current stream has read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def _place_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the first atom of frames that stay."""
        owners = np.searchsorted(self.offset, numbers, side="right") - 1
        places: np.ndarray = (
            self._base[owners] + (numbers - self.offset[owners]) * self._widths[owners]
        )
        return places

    def _upload(
        self, chunk: Chunk, slots: np.ndarray, first: np.ndarray
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Copy a chunk to the device and count its neighbours; return targets, rows and values for `_write`."""
        moved = self._moved
        starts = chunk.natoms.cumsum() - chunk.natoms
        within = np.arange(len(chunk.atype)) - np.repeat(starts, chunk.natoms)
        rows, atoms = moved(slots), moved(np.repeat(first, chunk.natoms) + within)
        coord, atype, sizes = (
            moved(chunk.coord),
            moved(chunk.atype),
            moved(chunk.natoms.astype(np.int64)),
        )
        values = [(self.coord, atoms, coord), (self.atype, atoms, atype), (self.sizes, rows, sizes)]
        values += [
            (self.first, rows, moved(first)),
            (self.counts, rows, moved(chunk.counts.astype(np.int32))),
        ]
        for name, present in self.present.items():
            flags = chunk.present.get(name, np.zeros(len(slots), dtype=bool))
            present[chunk.numbers] = flags
            values.append((self.found[name], rows, moved(flags)))
            target, where = (
                (self.of_frames, rows) if name in FRAME_LABELS else (self.of_atoms, atoms)
            )
            label = chunk.labels.get(name)
            found = coord.new_zeros(len(where), LABELS[name]) if label is None else moved(label)
            values.append((target[name], where, found))
        for name, given in chunk.parameters.items():
            values.append(
                (self.parameters[name], rows if name == "fparam" else atoms, moved(given))
            )
        cells = None
        if self.cells is not None:
            cells = self._cells_of(chunk)
            values += [
                (target, rows, source) for target, source in zip(self.cells, cells, strict=True)
            ]
        self._count(chunk, Atoms(coord, atype, sizes, 0, cells))
        return values

    def _write(self, values: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        for target, rows, source in values:
            self._kept(rows)
            target.index_copy_(0, rows, self._kept(source))

    def _cells_of(self, chunk: Chunk) -> Cells:
        """Return the cells of frames; those of frames without one move nothing."""
        vectors = np.zeros((len(chunk.numbers), 3, 3)) if chunk.box is None else chunk.box
        return Cells.of_some(self._moved(vectors), self._cache.rcut)

    def _count(self, chunk: Chunk, packed: Atoms) -> None:
        """Count the neighbours of a chunk and record them by composition; waits for the count."""
        ntypes = self._cache.ntypes
        most = np.zeros((len(chunk.numbers), self.most.shape[1]), dtype=np.int64)
        least = np.full(len(chunk.numbers), np.inf)
        # Frames of similar sizes together: each is padded to the largest.
        sizes = np.frexp(chunk.natoms)[1]
        for size in np.unique(sizes[chunk.natoms > 0]):
            rows = np.flatnonzero(sizes == size)
            most[rows], least[rows] = self._counted(chunk, packed, rows)
        for row in np.flatnonzero(least < SAME_PLACE**2)[:1]:
            self._refuse(int(chunk.numbers[row]))
        if most[:, ntypes].max(initial=0) > MOST_NEIGHBORS:
            row = int(most[:, ntypes].argmax())
            system, number = self._frame(int(chunk.numbers[row]))
            raise NeighborError(
                f"{system.name}: frame {number}: an atom has {most[row, ntypes]} neighbours within "
                f"{self._cache.rcut} Å, and training on a GPU takes at most {MOST_NEIGHBORS}: "
                "look at the positions, or use a smaller cut-off"
            )
        self._learn(chunk, most)

    def _counted(
        self, chunk: Chunk, packed: Atoms, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Count the neighbours of some frames of a chunk.

        Returns
        -------
        tuple
            Most of an atom, as a row of `most` `(nrows, …)`, and the least squared distance `(nrows,)` [Å²].
        """
        natoms, width = chunk.natoms[rows], int(chunk.natoms[rows].max())
        frame = np.repeat(np.arange(len(rows)), natoms)
        within = np.arange(len(frame)) - np.repeat(natoms.cumsum() - natoms, natoms)
        source = np.repeat((chunk.natoms.cumsum() - chunk.natoms)[rows], natoms) + within
        here, taken, owner = map(self._moved, (frame * width + within, source, frame))
        coord = packed.coord.new_zeros(len(rows) * width, 3).index_copy_(
            0, here, packed.coord[taken]
        )
        atype = packed.atype.new_full((len(rows) * width,), -1).index_copy_(
            0, here, packed.atype[taken]
        )
        numbers = self._moved(rows)
        cells = None if packed.cells is None else packed.cells.select(numbers)
        atoms = Atoms(coord, atype, packed.counts[numbers], width, cells)
        radii = [self._cache.rcut, *(short for short, _ in self._cache.inner)]
        of_types, shorter, nearest = count_neighbors(atoms, here, owner, radii, self._cache.ntypes)
        counted = torch.cat([of_types, of_types.sum(1, keepdim=True), shorter], 1).long()
        index = owner.unsqueeze(1).expand_as(counted)
        most = counted.new_zeros(len(rows), counted.shape[1]).scatter_reduce(
            0, index, counted, "amax"
        )
        least = nearest.new_full((len(rows),), torch.inf).scatter_reduce(0, owner, nearest, "amin")
        return most.cpu().numpy(), least.cpu().numpy()

    def _learn(self, chunk: Chunk, most: np.ndarray) -> None:
        """Record composition, size and neighbours of frames."""
        rows = np.concatenate([chunk.counts, chunk.periodic[:, None]], axis=1)
        kinds, inverse = np.unique(rows, axis=0, return_inverse=True)
        known = len(self._kinds)
        numbers = np.array(
            [
                self._kinds.setdefault((kind[:-1].tobytes(), bool(kind[-1])), len(self._kinds))
                for kind in kinds
            ]
        )
        new = kinds[numbers >= known]
        self.of_kind = np.concatenate([self.of_kind, new[:, :-1]])
        self.periodic = np.concatenate([self.periodic, new[:, -1] > 0])
        self.most = np.concatenate(
            [self.most, np.zeros((len(new), self.most.shape[1]), dtype=np.int64)]
        )
        group = numbers[inverse.reshape(-1)]
        self.group[chunk.numbers] = group
        self.natoms[chunk.numbers] = chunk.natoms
        np.maximum.at(self.most, group, most)

    def _frame(self, number: int) -> tuple[System, int]:
        owner = int(np.searchsorted(self.offset, number, side="right")) - 1
        return self._systems[owner], number - int(self.offset[owner])

    def _refuse(self, number: int) -> None:
        """Raise the error that the neighbour search on the host raises for a frame."""
        system, row = self._frame(number)
        self._cache.frame(system, row, system.frames([row]), 0)


def store_bytes(systems: Sequence[System], ntypes: int) -> int:
    """Return the memory of all frames of systems on a device [bytes]."""
    labels = {name for system in systems for name in system.labels}
    wanted = systems[0].parameters
    atom = 4 + wanted.aparam + sum(width for name, width in ATOM_LABELS.items() if name in labels)
    frame = 2 + wanted.fparam + 0.5 * ntypes + 0.125 * len(labels)
    frame += sum(width for name, width in FRAME_LABELS.items() if name in labels)
    frame += 22.5 * any(system.pbc for system in systems)
    return int(8 * sum(system.nframes * (system.natoms * atom + frame) for system in systems))
