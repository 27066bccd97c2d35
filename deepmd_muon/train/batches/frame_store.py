"""Frames of training systems on a device, one after the other: positions, cells, types and labels.

Data that fit their budget stay: each frame has its slot, and is read once, before a batch needs it.
Other data pass through: the frames of the next batches replace earlier ones. A chunk of frames is
uploaded and its neighbours are counted on a separate stream, so that steps which have been launched
go on meanwhile.

A frame is named by its number, counted over all systems. Frames with the same atoms of each type
and the same periodicity have the same composition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, NeighborCache, NeighborError, System
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, LABELS
from deepmd_muon.data.neighbors.lists import SAME_PLACE
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Cells
from deepmd_muon.model.neighbors.search import count_neighbors

#: Atoms that are read at once.
CHUNK_ATOMS = 1 << 16
# Volume of a cell over the cube of its longest vector, below which the neighbour search rejects it.
_FLAT = 1e-6


class Room(NamedTuple):
    """Capacity of a store for data that pass through."""

    frames: int
    atoms: int


class _Write(NamedTuple):
    """Values on the device for some rows of a tensor of the store."""

    target: Tensor
    rows: Tensor
    values: Tensor


class FrameStore:
    """Frames of some systems on a device, the atoms of each sorted by type.

    A last slot without atoms and labels is the missing frame.

    Parameters
    ----------
    systems
        Where the frames are.
    cache
        Says which neighbours the model reads, for their counts; an attribute, too.
    device
        Device of the tensors.
    room
        Capacity for data that pass through; None keeps all data.

    Attributes
    ----------
    offset
        Number of the first frame of each system `(nsystems + 1,)`.
    composition, natoms
        Composition and atoms of every frame `(nframes,)`, on the host, once it has been read.
    present
        Which frames have each label `(nframes,)`, on the host; without labels that no system has.
    type_counts, periodic
        Atoms of each type `(ncompositions, ntypes)`, and which compositions have cells
        `(ncompositions,)`.
    max_neighbors
        Largest number of neighbours of an atom, so far, in frames of a composition: of each type,
        of all types, and within each shorter cut-off `(ncompositions, ntypes + 1 + ninner)`.
    max_edges
        Largest number of neighbours of all atoms together, so far, in a frame of a composition
        `(ncompositions,)`.
    shortest
        Distance of the nearest two atoms so far [Å]; infinite if none are within the cut-off.
    missing
        The last slot.
    coord, atype
        Positions [Å] and types of all atoms.
    first_atom, sizes, counts
        First atom, atoms, and atoms of each type of every slot, `(nslots + 1,)` and `(nslots + 1,
        ntypes)`.
    cells
        Of all slots; None if no system is periodic.
    of_frames, of_atoms
        Labels by name, `(nslots + 1, width)` and `(atoms, width)`; zeros if a frame has none.
    parameters
        Values of "fparam" `(nslots + 1, numb_fparam)` and "aparam" `(atoms, numb_aparam)`.
    has_label
        Which slots have a label `(nslots + 1,)`, by name.
    """

    def __init__(
        self,
        systems: Sequence[System],
        cache: NeighborCache,
        device: torch.device,
        room: Room | None = None,
    ) -> None:
        self._systems = systems
        self.cache = cache
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.stays = room is None

        # Numbers of frames, and places of their atoms if they stay.
        nframes = np.array([system.nframes for system in systems], dtype=np.int64)
        self._widths = np.array([system.natoms for system in systems], dtype=np.int64)
        self.offset = np.concatenate([[0], nframes.cumsum()])
        self._first_place = np.concatenate([[0], (nframes * self._widths).cumsum()])
        self.nframes = int(self.offset[-1])
        if room is None:
            room = Room(frames=self.nframes, atoms=int(self._first_place[-1]))

        # What the host knows of frames and compositions.
        ntypes = cache.ntypes
        labels = {name for system in systems for name in system.labels}
        label_names = [name for name in LABELS if name in labels]
        self.composition = np.full(self.nframes, -1, dtype=np.int32)
        self.natoms = np.zeros(self.nframes, dtype=np.int32)
        self.present = {name: np.zeros(self.nframes, dtype=bool) for name in label_names}
        self.type_counts = np.zeros((0, ntypes), dtype=np.int64)
        self.periodic = np.zeros(0, dtype=bool)
        self.max_neighbors = np.zeros((0, ntypes + 1 + len(cache.inner)), dtype=np.int64)
        self.max_edges = np.zeros(0, dtype=np.int64)
        self.shortest = np.inf
        self._compositions: dict[tuple[bytes, bool], int] = {}

        # The tensors.
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.missing = room.frames
        slots = room.frames + 1
        self.coord = zeros(room.atoms, 3)
        self.atype = zeros(room.atoms, dtype=torch.int64)
        self.first_atom = zeros(slots, dtype=torch.int64)
        self.sizes = zeros(slots, dtype=torch.int64)
        self.counts = zeros(slots, ntypes, dtype=torch.int32)
        self.of_frames = {
            name: zeros(slots, width) for name, width in FRAME_LABELS.items() if name in labels
        }
        self.of_atoms = {
            name: zeros(room.atoms, width) for name, width in ATOM_LABELS.items() if name in labels
        }
        self.has_label = {name: zeros(slots, dtype=torch.bool) for name in label_names}
        widths = systems[0].parameters  # all systems have the same
        self.parameters = {}
        if widths.of_frame:
            self.parameters["fparam"] = zeros(slots, widths.of_frame)
        if widths.of_atom:
            self.parameters["aparam"] = zeros(room.atoms, widths.of_atom)
        self.cells: Cells | None = None
        if any(system.pbc for system in systems):
            images = torch.ones(slots, 3, dtype=torch.int32, device=device)
            self.cells = Cells(zeros(slots, 3, 3), zeros(slots, 3, 3), zeros(slots, 3), images)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Write frames into their slots; data that pass through replace all that was there.

        Raises
        ------
        NeighborError
            When two atoms are at the same place, a cell or position is impossible, or an atom has
            more neighbours than the search on a device takes; it names frame and system.
        """
        next_slot = 0
        next_place = 0
        for chunk in chunks:
            for number in chunk.doubtful:
                self._refuse(int(number))
            if self.stays:
                slots = chunk.numbers
                first_atom = self._places_of(chunk.numbers)
            else:
                slots = next_slot + np.arange(len(chunk.numbers))
                first_atom = next_place + _starts(chunk.natoms)
                next_slot += len(slots)
                next_place += len(chunk.atype)
            with self._side_stream():
                writes = self._upload(chunk, slots, first_atom)
            for write in writes:
                rows = self._used_now(write.rows)
                write.target.index_copy_(0, rows, self._used_now(write.values))

    def slots_of(self, numbers: np.ndarray, window: np.ndarray) -> np.ndarray:
        """Return the slots of frames; `window` are the sorted frames of the last `take`."""
        return numbers if self.stays else np.searchsorted(window, numbers)

    def kinds_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the kind of each frame: equal numbers for equal composition and labels."""
        kinds: np.ndarray = self.composition[numbers].astype(np.int64)
        for present in self.present.values():
            kinds = 2 * kinds + present[numbers]
        return kinds

    def copy_to(self, target: Tensor, values: np.ndarray) -> None:
        """Copy an array of the host to a tensor after all launched work, without waiting for it."""
        with self._side_stream():
            uploaded = self._on_device(values)
        target.copy_(self._used_now(uploaded))

    # ----- two streams ---------------------------------------------------------------------------

    def _on_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Launch on a separate stream; later work of the current stream waits for it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _used_now(self, tensor: Tensor) -> Tensor:
        """Keep the memory of a tensor of the side stream until the current stream has read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    # ----- writing -------------------------------------------------------------------------------

    def _places_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the first atom of frames that stay."""
        owners = system_of(numbers, self.offset)
        row = numbers - self.offset[owners]
        places: np.ndarray = self._first_place[owners] + row * self._widths[owners]
        return places

    def _upload(self, chunk: Chunk, slots: np.ndarray, first_atom: np.ndarray) -> list[_Write]:
        """Copy a chunk to the device and count its neighbours; return what is to be written."""
        on_device = self._on_device
        within_frame = np.arange(len(chunk.atype)) - np.repeat(_starts(chunk.natoms), chunk.natoms)
        rows = on_device(slots)
        places = on_device(np.repeat(first_atom, chunk.natoms) + within_frame)
        coord = on_device(chunk.coord)
        atype = on_device(chunk.atype)
        sizes = on_device(chunk.natoms.astype(np.int64))
        writes = [
            _Write(self.coord, places, coord),
            _Write(self.atype, places, atype),
            _Write(self.sizes, rows, sizes),
            _Write(self.first_atom, rows, on_device(first_atom)),
            _Write(self.counts, rows, on_device(chunk.counts.astype(np.int32))),
        ]
        for name, all_present in self.present.items():
            present = chunk.present.get(name, np.zeros(len(slots), dtype=bool))
            all_present[chunk.numbers] = present
            writes.append(_Write(self.has_label[name], rows, on_device(present)))
            if name in FRAME_LABELS:
                target = self.of_frames[name]
                target_rows = rows
            else:
                target = self.of_atoms[name]
                target_rows = places
            # A frame without the label may replace one with it.
            if name in chunk.labels:
                values = on_device(chunk.labels[name])
            else:
                values = coord.new_zeros(len(target_rows), LABELS[name])
            writes.append(_Write(target, target_rows, values))
        for name, parameter in chunk.parameters.items():
            target_rows = rows if name == "fparam" else places
            writes.append(_Write(self.parameters[name], target_rows, on_device(parameter)))
        cells = None
        if self.cells is not None:
            # The cell of a frame without one is zero and moves nothing.
            box = np.zeros((len(slots), 3, 3)) if chunk.box is None else chunk.box
            cells = Cells.of_some(on_device(box), self.cache.rcut)
            for target, values in zip(self.cells, cells, strict=True):
                writes.append(_Write(target, rows, values))
        self._count(chunk, Atoms(coord, atype, sizes, 0, cells))
        return writes

    # ----- counting neighbours -------------------------------------------------------------------

    def _count(self, chunk: Chunk, packed: Atoms) -> None:
        """Count the neighbours of a chunk and record them by composition; waits for the count."""
        ntypes = self.cache.ntypes
        max_neighbors = np.zeros((len(chunk.numbers), self.max_neighbors.shape[1]), dtype=np.int64)
        n_edges = np.zeros(len(chunk.numbers), dtype=np.int64)
        least_square = np.full(len(chunk.numbers), np.inf)
        # Frames of similar sizes together, by powers of two: each is padded to the largest.
        sizes = np.frexp(chunk.natoms)[1]
        for size in np.unique(sizes[chunk.natoms > 0]):
            rows = np.flatnonzero(sizes == size)
            counted = self._count_rows(chunk, packed, rows)
            max_neighbors[rows] = counted.max_neighbors
            n_edges[rows] = counted.n_edges
            least_square[rows] = counted.least_square
        same_place = np.flatnonzero(least_square < SAME_PLACE**2)
        if len(same_place):
            self._refuse(int(chunk.numbers[same_place[0]]))
        of_all_types = max_neighbors[:, ntypes]
        if of_all_types.max(initial=0) > MOST_NEIGHBORS:
            row = int(of_all_types.argmax())
            system, number = self._frame(int(chunk.numbers[row]))
            raise NeighborError(
                f"{system.name}: frame {number}: an atom has {of_all_types[row]} neighbours within "
                f"{self.cache.rcut} Å, and training on a GPU takes at most {MOST_NEIGHBORS}: "
                "look at the positions, or use a smaller cut-off"
            )
        shortest = float(np.sqrt(least_square.min(initial=np.inf)))
        if shortest < self.cache.rcut:
            self.shortest = min(self.shortest, shortest)
        self._record(chunk, max_neighbors, n_edges)

    def _count_rows(self, chunk: Chunk, packed: Atoms, rows: np.ndarray) -> _Counted:
        """Count the neighbours of some frames of a chunk."""
        natoms = chunk.natoms[rows]
        width = int(natoms.max())
        # Of every real atom of these frames: its frame among them, its place there, and its place
        # in the chunk.
        frame = np.repeat(np.arange(len(rows)), natoms)
        within_frame = np.arange(len(frame)) - np.repeat(_starts(natoms), natoms)
        in_chunk = np.repeat(_starts(chunk.natoms)[rows], natoms) + within_frame
        places = self._on_device(frame * width + within_frame)
        source = self._on_device(in_chunk)
        owner = self._on_device(frame)

        coord = packed.coord.new_zeros(len(rows) * width, 3)
        coord.index_copy_(0, places, packed.coord[source])
        atype = packed.atype.new_full((len(rows) * width,), -1)
        atype.index_copy_(0, places, packed.atype[source])
        numbers = self._on_device(rows)
        cells = None if packed.cells is None else packed.cells.select(numbers)
        atoms = Atoms(coord, atype, packed.counts[numbers], width, cells)
        radii = [self.cache.rcut, *(radius for radius, _ in self.cache.inner)]
        of_types, shorter, nearest = count_neighbors(atoms, places, owner, radii, self.cache.ntypes)

        of_all_types = of_types.sum(1, keepdim=True)
        counts = torch.cat(
            [of_types, of_all_types, shorter], 1
        ).long()  # (atoms, columns of `max_neighbors`)
        index = owner.unsqueeze(1).expand_as(counts)
        max_neighbors = counts.new_zeros(len(rows), counts.shape[1])
        max_neighbors = max_neighbors.scatter_reduce(0, index, counts, "amax")
        n_edges = counts.new_zeros(len(rows)).index_add(0, owner, counts[:, self.cache.ntypes])
        least_square = nearest.new_full((len(rows),), torch.inf)
        least_square = least_square.scatter_reduce(0, owner, nearest, "amin")
        return _Counted(
            max_neighbors=max_neighbors.cpu().numpy(),
            n_edges=n_edges.cpu().numpy(),
            least_square=least_square.cpu().numpy(),
        )

    def _record(self, chunk: Chunk, max_neighbors: np.ndarray, n_edges: np.ndarray) -> None:
        """Record composition, size and neighbours of frames."""
        rows = np.concatenate([chunk.counts, chunk.periodic[:, None]], axis=1)
        unique, inverse = np.unique(rows, axis=0, return_inverse=True)
        n_known = len(self._compositions)
        numbers = np.array(
            [
                self._compositions.setdefault(
                    (row[:-1].tobytes(), bool(row[-1])), len(self._compositions)
                )
                for row in unique
            ]
        )
        new = unique[numbers >= n_known]
        self.type_counts = np.concatenate([self.type_counts, new[:, :-1]])
        self.periodic = np.concatenate([self.periodic, new[:, -1] > 0])
        none = np.zeros((len(new), self.max_neighbors.shape[1]), dtype=np.int64)
        self.max_neighbors = np.concatenate([self.max_neighbors, none])
        self.max_edges = np.concatenate([self.max_edges, none[:, 0]])
        composition = numbers[inverse.reshape(-1)]
        self.composition[chunk.numbers] = composition
        self.natoms[chunk.numbers] = chunk.natoms
        np.maximum.at(self.max_neighbors, composition, max_neighbors)
        np.maximum.at(self.max_edges, composition, n_edges)

    def _frame(self, number: int) -> tuple[System, int]:
        """Return the system of a frame, and its number there."""
        owner = int(system_of(np.array(number), self.offset))
        return self._systems[owner], number - int(self.offset[owner])

    def _refuse(self, number: int) -> None:
        """Raise the error that the neighbour search on the host raises for a frame."""
        system, row = self._frame(number)
        self.cache.frame(system, row, system.frames([row]), 0)


class _Counted(NamedTuple):
    """Neighbours of some frames."""

    max_neighbors: np.ndarray  # of an atom, as a row of `FrameStore.max_neighbors`; (nrows, …)
    n_edges: np.ndarray  # neighbours of all atoms together; (nrows,)
    least_square: np.ndarray  # squared distance of the nearest two atoms [Å²]; (nrows,)


def store_bytes(systems: Sequence[System], ntypes: int) -> int:
    """Return the memory of all frames of systems on a device [bytes]."""
    labels = {name for system in systems for name in system.labels}
    parameters = systems[0].parameters
    # In numbers of 8 bytes: positions and type of an atom; size and first atom of a frame, its
    # counts and cell.
    atom = 4 + parameters.of_atom
    atom += sum(width for name, width in ATOM_LABELS.items() if name in labels)
    frame = 2 + parameters.of_frame + 0.5 * ntypes + 0.125 * len(labels)
    frame += sum(width for name, width in FRAME_LABELS.items() if name in labels)
    if any(system.pbc for system in systems):
        frame += 22.5
    return int(8 * sum(system.nframes * (system.natoms * atom + frame) for system in systems))


# ----- reading frames ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Some frames, packed one after the other, the atoms of each sorted by type.

    Attributes
    ----------
    numbers
        Of the frames `(nframes,)`, counted over all systems.
    natoms, counts
        Atoms of each frame without padding `(nframes,)`, and of each type `(nframes, ntypes)`.
    periodic
        Which frames have cells `(nframes,)`.
    box
        Cell vectors as rows [Å] `(nframes, 3, 3)`, zeros if a frame has none; None if no frame has
        one.
    coord, atype
        Positions [Å] and types of all atoms, `(atoms, 3)` and `(atoms,)`.
    labels
        By name, `(nframes, width)` or `(atoms, width)`; zeros if a frame has none.
    present
        Which frames have each label `(nframes,)`, by name.
    parameters
        Values of "fparam" `(nframes, numb_fparam)` and "aparam" `(atoms, numb_aparam)`.
    doubtful
        Numbers of the frames that the neighbour search rejects because of their cell.
    """

    numbers: np.ndarray
    natoms: np.ndarray
    counts: np.ndarray
    periodic: np.ndarray
    box: np.ndarray | None
    coord: np.ndarray
    atype: np.ndarray
    labels: dict[str, np.ndarray]
    present: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    doubtful: np.ndarray


def system_of(numbers: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the systems of frames, by the numbers `offset` of their first frames."""
    owners: np.ndarray = np.searchsorted(offset, numbers, side="right") - 1
    return owners


def cut_into_chunks(
    systems: Sequence[System], offset: np.ndarray, numbers: np.ndarray, atoms: int = CHUNK_ATOMS
) -> Iterator[np.ndarray]:
    """Cut frames, in rising order, into parts of about so many atoms."""
    sizes = np.array([system.natoms for system in systems])
    natoms = sizes[system_of(numbers, offset)]
    chunk_number = _starts(natoms) // atoms
    yield from np.split(numbers, np.flatnonzero(np.diff(chunk_number)) + 1)


def read_chunk(
    systems: Sequence[System], offset: np.ndarray, numbers: np.ndarray, ntypes: int
) -> Chunk:
    """Read frames, whose numbers rise."""
    return join(
        [
            pack_frames(systems[k], systems[k].frames(rows), rows + offset[k], ntypes)
            for k, rows in by_system(numbers, offset)
        ]
    )


def by_system(numbers: np.ndarray, offset: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the systems of frames, whose numbers rise, each with the frames' numbers there."""
    owners = system_of(numbers, offset)
    for same_system in np.split(numbers, np.flatnonzero(np.diff(owners)) + 1):
        owner = int(system_of(same_system[0], offset))
        yield owner, same_system - offset[owner]


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return where each of some consecutive blocks begins."""
    starts: np.ndarray = sizes.cumsum() - sizes
    return starts


def pack_frames(system: System, frames: Frames, numbers: np.ndarray, ntypes: int) -> Chunk:
    """Pack frames of one system; `numbers` count over all systems."""
    atype = frames.atype
    nframes, width = atype.shape
    # Frames usually have the same types in the same order, and no padding: then rows move as a
    # whole.
    full = bool((atype[0] >= 0).all())
    uniform = full and (not system.mixed or bool((atype == atype[0]).all()))
    rows_to_sort = atype[:1] if uniform else atype
    padding_last = np.where(rows_to_sort < 0, 1 << 30, rows_to_sort)
    order = np.argsort(padding_last, axis=1, kind="stable")
    is_sorted = uniform and bool((np.diff(atype[0]) >= 0).all())
    if uniform:
        real = np.ones_like(atype, dtype=bool)
    else:
        real = np.take_along_axis(atype, order, 1) >= 0
        source = (np.arange(nframes)[:, None] * width + order)[real]  # (atoms,)

    def pack(values: np.ndarray) -> np.ndarray:
        """Return values of the real atoms as rows, each frame's sorted by type `(atoms, width)`."""
        if uniform:
            if not is_sorted:
                values = values.take(order[0], axis=1)
            return values.reshape(-1, values.shape[2])
        packed: np.ndarray = values.reshape(-1, values.shape[2]).take(source, axis=0)
        return packed

    labels = {}
    present = {}
    for name in frames.labels:
        values = getattr(frames, name)
        present[name] = frames.present(name)
        if not present[name].all():
            ones = (1,) * (values.ndim - 1)
            values = np.where(present[name].reshape(-1, *ones), values, 0.0)
        if name in FRAME_LABELS:
            labels[name] = values.reshape(nframes, FRAME_LABELS[name])
        else:
            labels[name] = pack(values.reshape(nframes, width, ATOM_LABELS[name]))
    parameters = {}
    of_frames = frames.frame_parameters
    if of_frames is not None:
        parameters["fparam"] = of_frames
    of_atoms = frames.atomic_parameters
    if of_atoms is not None:
        parameters["aparam"] = pack(of_atoms)
    return Chunk(
        numbers=numbers,
        natoms=real.sum(1),
        counts=frames.type_counts(ntypes),
        periodic=np.full(nframes, system.pbc),
        box=np.asarray(frames.box, dtype=np.float64) if system.pbc else None,
        coord=pack(frames.coord),
        atype=pack(atype[..., None])[:, 0].astype(np.int64),
        labels=labels,
        present=present,
        parameters=parameters,
        doubtful=numbers[_has_flat_cell(system, frames)],
    )


def _has_flat_cell(system: System, frames: Frames) -> np.ndarray:
    """Return which frames the neighbour search rejects because of their cell `(nframes,)`.

    `System` checks the lengths of cell vectors.
    """
    if not system.pbc or frames.box is None:
        return np.zeros(frames.nframes, dtype=bool)
    volume = np.abs(np.linalg.det(frames.box))
    length = np.abs(frames.box).max(axis=(1, 2))
    return np.asarray(~(volume > _FLAT * length**3))  # also NaN


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Return frames of several systems as one chunk."""
    if len(chunks) == 1:
        return chunks[0]

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(chunk, name) for chunk in chunks])

    labels = {}
    present = {}
    for name in sorted({name for chunk in chunks for name in chunk.labels}):
        label_parts = []
        present_parts = []
        for chunk in chunks:
            nframes = len(chunk.numbers)
            if name in chunk.labels:
                label_parts.append(chunk.labels[name])
                present_parts.append(chunk.present[name])
            else:
                n_rows = nframes if name in FRAME_LABELS else len(chunk.atype)
                label_parts.append(np.zeros((n_rows, LABELS[name])))
                present_parts.append(np.zeros(nframes, dtype=bool))
        labels[name] = np.concatenate(label_parts)
        present[name] = np.concatenate(present_parts)
    box = None
    if any(chunk.box is not None for chunk in chunks):
        boxes = [
            np.zeros((len(chunk.numbers), 3, 3)) if chunk.box is None else chunk.box
            for chunk in chunks
        ]
        box = np.concatenate(boxes)
    return Chunk(
        numbers=joined("numbers"),
        natoms=joined("natoms"),
        counts=joined("counts"),
        periodic=joined("periodic"),
        box=box,
        coord=joined("coord"),
        atype=joined("atype"),
        labels=labels,
        present=present,
        # All systems have the same parameters.
        parameters={
            name: np.concatenate([chunk.parameters[name] for chunk in chunks])
            for name in chunks[0].parameters
        },
        doubtful=joined("doubtful"),
    )
