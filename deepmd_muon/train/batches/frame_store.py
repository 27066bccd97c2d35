"""Frames of training systems on a device, one after the other: positions, cells, types and labels.

Data that fit their budget stay: each frame has its slot, and is read once, before a batch needs it.
Other data pass through: the frames of the next batches replace earlier ones. A chunk of frames is
uploaded and its neighbours are counted on a separate stream, so that steps which have been launched
go on meanwhile.

- The *number* of a frame counts over all systems; `offset` has the first number of each system.
- The *slot* of a frame is its row in the tensors of frames. Its atoms are adjacent rows of the
  tensors of atoms, from `first_atom` on.
- Frames with the same atoms of each type and the same periodicity have the same *composition*.
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
#: Names of values that belong to atoms; others belong to frames.
PER_ATOM = frozenset(["coord", "atype", "aparam", *ATOM_LABELS])
# Volume of a cell over the cube of its largest component. Cells up to this ratio are *flat*: the
# host checks them. It rejects ratios up to 1e-12, and cells with too many images.
_FLAT = 1e-6


class Room(NamedTuple):
    """Capacity of a store for data that pass through."""

    frames: int
    atoms: int


@dataclass(frozen=True)
class Chunk:
    """Some frames, packed one after the other, the atoms of each sorted by type.

    Attributes
    ----------
    numbers
        Of the frames `(nframes,)`, counted over all systems.
    values
        By name as in `FrameStore.tensors`, rows of frames or atoms; a label, its "has_…" or a "box"
        [Å] may be left out if no frame has it. Also "periodic": which frames have cells.
    flat
        Numbers of the frames whose cell is so flat that the host checks it.
    """

    numbers: np.ndarray
    values: dict[str, np.ndarray]
    flat: np.ndarray

    @property
    def natoms(self) -> np.ndarray:
        """Atoms of each frame without padding `(nframes,)`."""
        return self.values["natoms"]


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
        Device of the tensors; an attribute, too.
    room
        Capacity for data that pass through; None keeps all data.

    Attributes
    ----------
    stays
        Whether all data are kept.
    offset
        Number of the first frame of each system `(nsystems + 1,)`; the last entry is `nframes`.
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
        The last slot; the number of slots for frames, too.
    tensors
        By name. Of every slot `(missing + 1, …)`: "first_atom", "natoms", "type_counts" (atoms of
        each type), labels and "fparam" of frames, and "has_…" for each label; of every atom
        `(atoms, …)`: the names in `PER_ATOM`. Zeros if a frame lacks a label.
    cells
        Of all slots; None if no system is periodic.
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
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.stays = room is None

        # The first number and, of data that stay, the first atom of each system.
        nframes = np.array([system.nframes for system in systems], dtype=np.int64)
        self._natoms = np.array([system.natoms for system in systems], dtype=np.int64)
        self.offset = np.concatenate([[0], nframes.cumsum()])
        self._first_atom = np.concatenate([[0], (nframes * self._natoms).cumsum()])
        self.nframes = int(self.offset[-1])
        if room is None:
            room = Room(frames=self.nframes, atoms=int(self._first_atom[-1]))

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
        self._compositions: dict[bytes, int] = {}  # by type counts and periodicity

        # The tensors.
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.missing = room.frames
        slots = room.frames + 1
        self.tensors = {
            "coord": zeros(room.atoms, 3),
            "atype": zeros(room.atoms, dtype=torch.int64),
            "first_atom": zeros(slots, dtype=torch.int64),
            "natoms": zeros(slots, dtype=torch.int64),
            "type_counts": zeros(slots, ntypes, dtype=torch.int32),
        }
        widths = {name: LABELS[name] for name in label_names}
        for name in label_names:
            self.tensors[f"has_{name}"] = zeros(slots, dtype=torch.bool)
        parameters = systems[0].parameters  # all systems have the same
        widths |= {"fparam": parameters.of_frame, "aparam": parameters.of_atom}
        for name, width in widths.items():
            if width:
                self.tensors[name] = zeros(room.atoms if name in PER_ATOM else slots, width)
        self.cells: Cells | None = None
        if any(system.pbc for system in systems):
            images = torch.ones(slots, 3, dtype=torch.int32, device=device)
            self.cells = Cells(zeros(slots, 3, 3), zeros(slots, 3, 3), zeros(slots, 3), images)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Write frames into their slots; data that pass through replace all that was there.

        Raises
        ------
        NeighborError
            When two atoms are at the same place, a cell is impossible, or an atom has more
            neighbours than the search on a device takes; it names frame and system.
        """
        next_slot = 0
        next_atom = 0
        for chunk in chunks:
            for number in chunk.flat:
                self._check_on_host(int(number))
            if self.stays:
                slots = chunk.numbers
                systems = system_of(chunk.numbers, self.offset)
                rows_in_system = chunk.numbers - self.offset[systems]
                first_atom = self._first_atom[systems] + rows_in_system * self._natoms[systems]
            else:
                slots = next_slot + np.arange(len(chunk.numbers))
                first_atom = next_atom + _starts(chunk.natoms)
                next_slot += len(slots)
                next_atom += int(chunk.natoms.sum())
            # Uploads run beside launched steps. Writes wait for these steps, which may read the old
            # values.
            with self._side_stream():
                writes = self._upload(chunk, slots, first_atom)
            for write in writes:
                write.target.index_copy_(
                    0, self._used_now(write.rows), self._used_now(write.values)
                )

    def slots_of(self, numbers: np.ndarray, window: np.ndarray) -> np.ndarray:
        """Return the slots of frames; `window` has all numbers of the last `take`, rising."""
        return numbers if self.stays else np.searchsorted(window, numbers)

    def kinds_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the kind of each frame: equal numbers for equal composition and labels."""
        kinds: np.ndarray = self.composition[numbers].astype(np.int64)
        # Append one binary digit for each label.
        for present in self.present.values():
            kinds = 2 * kinds + present[numbers]
        return kinds

    def select(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of a tensor: slots of a tensor of frames, else atoms."""
        return self.tensors[name].index_select(0, rows)

    def note_cut_lists(self) -> None:
        """Record in the cache that its `sel` cuts neighbour lists, if it does."""
        ntypes = self.cache.ntypes
        max_neighbors = self.max_neighbors.max(0)
        self.cache.note_most(max_neighbors[:ntypes], int(max_neighbors[ntypes]))

    def copy_to(self, target: Tensor, values: np.ndarray) -> None:
        """Copy an array of the host to a tensor after all launched work, without waiting for it."""
        with self._side_stream():
            uploaded = self._on_device(values)
        target.copy_(self._used_now(uploaded))

    # ----- two streams ---------------------------------------------------------------------------

    def _on_device(self, values: np.ndarray) -> Tensor:
        """Copy an array on the current stream."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Launch on a separate stream; later work of the current stream waits for it.

        The separate stream does not wait for the current one, whose work may still write the
        tensors of the store. Work in the `with` block must not read their values.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _used_now(self, tensor: Tensor) -> Tensor:
        """Keep the memory of a tensor of the side stream until the current stream has read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    # ----- writing -------------------------------------------------------------------------------

    def _upload(self, chunk: Chunk, slots: np.ndarray, first_atom: np.ndarray) -> list[_Write]:
        """Copy a chunk to the device and count its neighbours; return what is to be written."""
        rows_of_frames = self._on_device(slots)
        rows_of_atoms = self._on_device(
            np.repeat(first_atom, chunk.natoms) + _within_frames(chunk.natoms)
        )
        values = {name: self._on_device(array) for name, array in chunk.values.items()}
        values["first_atom"] = self._on_device(first_atom)
        writes = []
        for name, target in self.tensors.items():  # on the side stream: only their shapes are read
            rows = rows_of_atoms if name in PER_ATOM else rows_of_frames
            if name not in values:  # a frame without the label may replace one with it
                values[name] = target.new_zeros(len(rows), *target.shape[1:])
            writes.append(_Write(target, rows, values[name]))
        cells = None
        if self.cells is not None:
            # The cell of a frame without one is zero and moves nothing.
            if "box" not in values:
                values["box"] = values["coord"].new_zeros(len(slots), 3, 3)
            cells = Cells.of_some(values["box"], self.cache.rcut)
            for target, new in zip(self.cells, cells, strict=True):
                writes.append(_Write(target, rows_of_frames, new))
        packed = Atoms(
            coord=values["coord"],
            atype=values["atype"],
            counts=values["natoms"],
            natoms=0,  # not used: frames of a chunk are not padded to one number of places
            cells=cells,
        )
        self._count(chunk, packed)
        return writes

    # ----- counting neighbours -------------------------------------------------------------------

    def _count(self, chunk: Chunk, packed: Atoms) -> None:
        """Count the neighbours of a chunk and record them by composition; waits for the count."""
        ntypes = self.cache.ntypes
        max_neighbors = np.zeros((len(chunk.numbers), self.max_neighbors.shape[1]), dtype=np.int64)
        n_edges = np.zeros(len(chunk.numbers), dtype=np.int64)
        nearest_squared = np.full(len(chunk.numbers), np.inf)
        # Frames of similar sizes together, by powers of two: each is padded to the largest.
        size_class = np.frexp(chunk.natoms)[1]
        for one_class in np.unique(size_class[chunk.natoms > 0]):
            rows = np.flatnonzero(size_class == one_class)
            counted = self._count_rows(chunk, packed, rows)
            max_neighbors[rows] = counted.max_neighbors
            n_edges[rows] = counted.n_edges
            nearest_squared[rows] = counted.nearest_squared
        same_place = np.flatnonzero(nearest_squared < SAME_PLACE**2)
        if len(same_place):
            self._check_on_host(int(chunk.numbers[same_place[0]]))
        of_all_types = max_neighbors[:, ntypes]
        if of_all_types.max(initial=0) > MOST_NEIGHBORS:
            worst = int(of_all_types.argmax())
            system, row = self._frame(int(chunk.numbers[worst]))
            raise NeighborError(
                f"{system.name}: frame {row}: an atom has {of_all_types[worst]} neighbours within "
                f"{self.cache.rcut} Å, and training on a GPU takes at most {MOST_NEIGHBORS}: "
                "look at the positions, or use a smaller cut-off"
            )
        shortest = float(np.sqrt(nearest_squared.min(initial=np.inf)))
        if shortest < self.cache.rcut:
            self.shortest = min(self.shortest, shortest)
        self._record(chunk, max_neighbors, n_edges)

    def _count_rows(self, chunk: Chunk, packed: Atoms, rows: np.ndarray) -> _Counted:
        """Count the neighbours of the frames in `rows` of a chunk, padded to the largest one."""
        natoms = chunk.natoms[rows]
        width = int(natoms.max())
        # Of every atom of these frames (natoms.sum(),): its frame among them, its row in the chunk,
        # and its place among the padded frames.
        frame_of_atom = np.repeat(np.arange(len(rows)), natoms)
        within_frame = _within_frames(natoms)
        frame = self._on_device(frame_of_atom)
        source = self._on_device(np.repeat(_starts(chunk.natoms)[rows], natoms) + within_frame)
        place = self._on_device(frame_of_atom * width + within_frame)

        n_places = len(rows) * width
        frame_rows = self._on_device(rows)
        padded = Atoms(
            coord=packed.coord.new_zeros(n_places, 3).index_copy_(0, place, packed.coord[source]),
            atype=packed.atype.new_full((n_places,), -1).index_copy_(
                0, place, packed.atype[source]
            ),
            counts=packed.counts[frame_rows],
            natoms=width,
            cells=None if packed.cells is None else packed.cells.select(frame_rows),
        )
        radii = [self.cache.rcut, *(radius for radius, _ in self.cache.inner)]
        of_types, shorter, squared = count_neighbors(
            padded, order=place, frame=frame, radii=radii, ntypes=self.cache.ntypes
        )

        # (natoms.sum(), columns of `FrameStore.max_neighbors`)
        counts = torch.cat([of_types, of_types.sum(1, keepdim=True), shorter], 1).long()
        index = frame.unsqueeze(1).expand_as(counts)
        max_neighbors = counts.new_zeros(len(rows), counts.shape[1])
        max_neighbors = max_neighbors.scatter_reduce(0, index, counts, "amax")
        n_edges = counts.new_zeros(len(rows)).index_add(0, frame, counts[:, self.cache.ntypes])
        nearest_squared = squared.new_full((len(rows),), torch.inf)
        nearest_squared = nearest_squared.scatter_reduce(0, frame, squared, "amin")
        return _Counted(
            max_neighbors=max_neighbors.cpu().numpy(),
            n_edges=n_edges.cpu().numpy(),
            nearest_squared=nearest_squared.cpu().numpy(),
        )

    def _record(self, chunk: Chunk, max_neighbors: np.ndarray, n_edges: np.ndarray) -> None:
        """Record labels, composition, size and neighbours of frames."""
        for name, present in self.present.items():
            present[chunk.numbers] = chunk.values.get(f"has_{name}", False)
        # (nframes, ntypes + 1): atoms of each type, and 1 with a cell.
        keys = np.column_stack([chunk.values["type_counts"], chunk.values["periodic"]])
        unique, inverse = np.unique(keys, axis=0, return_inverse=True)
        n_known = len(self._compositions)
        composition_of_key = np.array(
            [
                self._compositions.setdefault(key.tobytes(), len(self._compositions))
                for key in unique
            ]
        )
        new = unique[composition_of_key >= n_known]
        self.type_counts = np.concatenate([self.type_counts, new[:, :-1]])
        self.periodic = np.concatenate([self.periodic, new[:, -1] > 0])
        uncounted = np.zeros((len(new), self.max_neighbors.shape[1]), dtype=np.int64)
        self.max_neighbors = np.concatenate([self.max_neighbors, uncounted])
        self.max_edges = np.concatenate([self.max_edges, uncounted[:, 0]])
        composition = composition_of_key[inverse.reshape(-1)]
        self.composition[chunk.numbers] = composition
        self.natoms[chunk.numbers] = chunk.natoms
        np.maximum.at(self.max_neighbors, composition, max_neighbors)
        np.maximum.at(self.max_edges, composition, n_edges)

    def _frame(self, number: int) -> tuple[System, int]:
        """Return the system of a frame, and its row there."""
        owner = int(system_of(np.array(number), self.offset))
        return self._systems[owner], number - int(self.offset[owner])

    def _check_on_host(self, number: int) -> None:
        """Search a suspicious frame's neighbours on the host, whose errors name the fault.

        If the host accepts the frame (a flat cell with few images), the run goes on with it.
        """
        system, row = self._frame(number)
        self.cache.frame(system, row, frames=system.frames([row]), row=0)


class _Counted(NamedTuple):
    """Neighbours of some frames."""

    max_neighbors: np.ndarray  # of an atom, as a row of `FrameStore.max_neighbors`; (nrows, …)
    n_edges: np.ndarray  # neighbours of all atoms together; (nrows,)
    nearest_squared: np.ndarray  # squared distance of the nearest two atoms [Å²]; (nrows,)


def store_bytes(systems: Sequence[System], ntypes: int) -> int:
    """Return the memory of all frames of systems on a device [bytes]."""
    labels = {name for system in systems for name in system.labels}
    parameters = systems[0].parameters
    # In numbers of 8 bytes.
    atom = 3 + 1 + parameters.of_atom  # coord, atype, aparam
    atom += sum(width for name, width in ATOM_LABELS.items() if name in labels)
    # first_atom, natoms, fparam, type_counts (int32), has_… (bool)
    frame = 1 + 1 + parameters.of_frame + 0.5 * ntypes + 0.125 * len(labels)
    frame += sum(width for name, width in FRAME_LABELS.items() if name in labels)
    if any(system.pbc for system in systems):
        frame += 9 + 9 + 3 + 1.5  # box, inverse, reach, images (int32) of `Cells`
    return int(8 * sum(system.nframes * (system.natoms * atom + frame) for system in systems))


# ----- reading frames ----------------------------------------------------------------------------


def system_of(numbers: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the systems of frames, by the numbers `offset` of their first frames."""
    systems: np.ndarray = np.searchsorted(offset, numbers, side="right") - 1
    return systems


def cut_into_chunks(
    systems: Sequence[System], offset: np.ndarray, numbers: np.ndarray, atoms: int = CHUNK_ATOMS
) -> Iterator[np.ndarray]:
    """Cut frames, in rising order, into parts of about so many atoms."""
    natoms = np.array([system.natoms for system in systems])[system_of(numbers, offset)]
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
    """Yield the systems of frames, whose numbers rise, each with the frames' rows there."""
    systems = system_of(numbers, offset)
    for same_system in np.split(numbers, np.flatnonzero(np.diff(systems)) + 1):
        system = int(system_of(same_system[0], offset))
        yield system, same_system - offset[system]


def _starts(sizes: np.ndarray) -> np.ndarray:
    """Return where each of some consecutive blocks begins."""
    starts: np.ndarray = sizes.cumsum() - sizes
    return starts


def _within_frames(natoms: np.ndarray) -> np.ndarray:
    """Return the index of every atom within its frame `(natoms.sum(),)`."""
    indices: np.ndarray = np.arange(natoms.sum()) - np.repeat(_starts(natoms), natoms)
    return indices


def pack_frames(system: System, frames: Frames, numbers: np.ndarray, ntypes: int) -> Chunk:
    """Pack frames of one system; `numbers` count over all systems."""
    atype = frames.atype
    nframes, natoms = atype.shape
    # Frames usually have the same types in the same order, and no padding: then rows move as a
    # whole.
    full = bool((atype[0] >= 0).all())
    uniform = full and (not system.mixed or bool((atype == atype[0]).all()))
    rows_to_sort = atype[:1] if uniform else atype
    padding_last = np.where(rows_to_sort < 0, 1 << 30, rows_to_sort)
    order = np.argsort(padding_last, axis=1, kind="stable")  # (1 or nframes, natoms)
    if uniform:
        is_sorted = bool((np.diff(atype[0]) >= 0).all())
        real = np.ones_like(atype, dtype=bool)
    else:
        real = np.take_along_axis(atype, order, 1) >= 0
        source = (np.arange(nframes)[:, None] * natoms + order)[real]  # (real atoms,)

    def pack(values: np.ndarray) -> np.ndarray:
        """Return values `(nframes, natoms, width)` of the real atoms, each frame's sorted by type.

        Their shape is `(real atoms, width)`.
        """
        if uniform:
            if not is_sorted:
                values = values.take(order[0], axis=1)
            return values.reshape(-1, values.shape[2])
        packed: np.ndarray = values.reshape(-1, values.shape[2]).take(source, axis=0)
        return packed

    values = {
        "natoms": real.sum(1),
        "type_counts": frames.type_counts(ntypes).astype(np.int32),
        "periodic": np.full(nframes, system.pbc),
        "coord": pack(frames.coord),
        "atype": pack(atype[..., None])[:, 0].astype(np.int64),
    }
    if system.pbc:
        values["box"] = np.asarray(frames.box, dtype=np.float64)
    for name in frames.labels:
        label = getattr(frames, name)
        present = frames.present(name)
        if not present.all():
            ones = (1,) * (label.ndim - 1)
            label = np.where(present.reshape(-1, *ones), label, 0.0)
        values[f"has_{name}"] = present
        if name in PER_ATOM:
            values[name] = pack(label.reshape(nframes, natoms, LABELS[name]))
        else:
            values[name] = label.reshape(nframes, LABELS[name])
    if (of_frames := frames.frame_parameters) is not None:
        values["fparam"] = of_frames
    if (of_atoms := frames.atomic_parameters) is not None:
        values["aparam"] = pack(of_atoms)
    return Chunk(numbers, values, flat=numbers[_has_flat_cell(system, frames)])


def _has_flat_cell(system: System, frames: Frames) -> np.ndarray:
    """Return which frames the host must check because of their cell `(nframes,)`.

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

    def rows_of(chunk: Chunk, name: str, like: np.ndarray) -> np.ndarray:
        """Return the values of a chunk; zeros if it lacks the label or the cells."""
        if name in chunk.values:
            return chunk.values[name]
        n_rows = chunk.natoms.sum() if name in PER_ATOM else len(chunk.numbers)
        return np.zeros((n_rows, *like.shape[1:]), like.dtype)

    examples = {name: array for chunk in chunks for name, array in chunk.values.items()}
    return Chunk(
        numbers=np.concatenate([chunk.numbers for chunk in chunks]),
        values={
            name: np.concatenate([rows_of(chunk, name, like) for chunk in chunks])
            for name, like in examples.items()
        },
        flat=np.concatenate([chunk.flat for chunk in chunks]),
    )
