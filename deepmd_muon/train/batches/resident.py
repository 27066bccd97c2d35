"""Batches gathered inside a step from frames that are on the device, their neighbours found there too.

A step reads the slots of its frames from a table on the device, gathers positions and labels, and finds the
neighbours. The host draws batches in windows: up to a thousand of them, or fewer where frames have to be read first.
Threads read the frames of the next windows meanwhile. Batches are padded to a few shapes (`shapes`), each with one CUDA
graph: the atoms of a batch are sorted by type, and the places of a type that no atom takes belong to frames of their
own, behind all others, that no label knows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import DataLoader, Plan, group_limits, worker_count
from deepmd_muon.data.frames import LABELS, PARAMETERS
from deepmd_muon.data.sampling.loader import MIXED
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Sections
from deepmd_muon.model.neighbors.search import find_neighbors
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.frame_reader import Chunk, pieces, read_chunk
from deepmd_muon.train.batches.frame_store import FrameStore, store_bytes
from deepmd_muon.train.batches.shapes import Shape, Shapes
from deepmd_muon.train.batches.streamed import INNER_STEP, SECTION_STEP

log = logging.getLogger(__name__)

# Batches of a window, at most.
_AHEAD = 1024
# Atoms of a window whose frames have to be read: the first one is small, so that a run begins soon.
_FIRST_ATOMS, _WINDOW_ATOMS = 1 << 16, 1 << 18
# Windows that are read ahead of the one in use.
_READ_AHEAD = 2
#: Atoms of all data, each frame as large as the largest, up to which they are read before the first step.
AT_ONCE = 1 << 22
#: Atoms of a frame from which on the search on the device, which looks at all pairs, is slower than the host's.
MOST_ATOMS = 20_000


@dataclass(frozen=True)
class _Places:
    """The places of the atoms of a batch of one shape; graphs read these tensors as long as they exist.

    Attributes
    ----------
    kind, rank
        Type of each place of the sorted list, and its number among those of its type `(nsorted,)`.
    order, frame
        Place and frame of each sorted atom in a batch of one composition `(nsorted,)`; in others, those of places that
        no atom takes.
    sections
        Of the neighbour lists.
    """

    kind: Tensor
    rank: Tensor
    order: Tensor
    frame: Tensor
    sections: Sections


class Gathering:
    """Makes batches of one shape from a store, by operations of the device alone.

    Parameters
    ----------
    store
        The data.
    shape
        Of the batches.
    sections
        Form of the neighbour lists, the widths replaced by those of the shape.
    """

    def __init__(self, store: FrameStore, shape: Shape, sections: Sections) -> None:
        self._store = store
        self.shape = shape
        slots = sum(shape.counts)
        kind = np.repeat(np.arange(len(shape.counts)), shape.counts)
        rank = np.arange(slots) - np.repeat(np.cumsum((0, *shape.counts[:-1])), shape.counts)
        order, frame = np.arange(slots), np.zeros(slots, dtype=np.int64)
        self._spare = 0
        if shape.group is not None:
            each = np.array(shape.counts) // max(1, shape.frames)
            frame, within = rank // np.maximum(each[kind], 1), rank % np.maximum(each[kind], 1)
            order = frame * shape.natoms + (np.cumsum(each) - each)[kind] + within
        else:
            self._spare = -(-slots // max(1, shape.natoms))
            order = shape.frames * shape.natoms + order
            frame = order // max(1, shape.natoms)

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(store.coord.device)

        form = sections._replace(widths=shape.widths, capacity=shape.capacity)
        self._places = _Places(on_device(kind), on_device(rank), on_device(order), on_device(frame), form)
        self._filled = np.repeat(np.array(shape.widths)[:, None], slots, axis=1)
        self._inner = np.repeat(np.array(shape.inner, dtype=np.int64)[:, None], slots, axis=1)

    def __call__(self, numbers: Tensor, feed: ResidentFeed) -> TrainingBatch:
        """Return the batch of the frames in some slots `(frames of the shape,)`, int64."""
        store, shape, places = self._store, self.shape, self._places
        natoms = store.sizes.index_select(0, numbers)
        place = torch.arange(shape.natoms, device=numbers.device)
        source = store.first.index_select(0, numbers).unsqueeze(1) + place
        real = None
        if shape.group is None:
            real = place < natoms.unsqueeze(1)
            source = torch.where(real, source, 0)
        source = source.flatten()
        coord = self._of_atoms(store.coord, source, real, spare=True)
        atype = store.atype.index_select(0, source).view(shape.frames, shape.natoms)
        order, frame = places.order, places.frame
        if real is not None:
            atype = torch.nn.functional.pad(torch.where(real, atype, -1), (0, 0, 0, self._spare), value=-1)
            order, frame = self._sorted(store.counts.index_select(0, numbers).long())
        cells = store.cells.select(numbers) if shape.periodic and store.cells is not None else None
        atoms = Atoms(coord.view(-1, 3), atype.flatten(), natoms, shape.natoms, cells)
        neighbor, shift = find_neighbors(atoms, order, frame, places.sections)
        box = None if cells is None else torch.nn.functional.pad(cells.box, (0, 0, 0, 0, 0, self._spare))
        structures = Structures(
            atype=atype,
            order=order,
            sorted_type=places.kind,
            sorted_frame=frame,
            coord=coord,
            box=box,
            neighbor=neighbor,
            shift=shift,
            sections=shape.widths,
            type_counts=shape.counts,
            filled=self._filled,
            inner=self._inner,
        )
        fparam, aparam = self._parameters(numbers, source, real)
        structures = replace(structures, fparam=fparam, aparam=aparam)
        labels = self._labels(numbers, source, real)
        return TrainingBatch(structures, labels, real, feed.system, feed.atoms, feed.present)

    def _of_atoms(self, values: Tensor, source: Tensor, real: Tensor | None, *, spare: bool = False) -> Tensor:
        """Return values of atoms `(frames, natoms, width)`, zero where there is none."""
        found = values.index_select(0, source).view(self.shape.frames, self.shape.natoms, -1)
        if real is None:
            return found
        found = torch.where(real.unsqueeze(2), found, 0.0)
        return torch.nn.functional.pad(found, (0, 0, 0, 0, 0, self._spare)) if spare else found

    def _parameters(self, numbers: Tensor, source: Tensor, real: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return `fparam` and `aparam` of `Structures`, zero where there is no atom."""
        fparam, aparam = (self._store.parameters.get(name) for name in PARAMETERS)
        if fparam is not None:
            spare = 0 if real is None else self._spare
            fparam = torch.nn.functional.pad(fparam.index_select(0, numbers), (0, 0, 0, spare))
        return fparam, None if aparam is None else self._of_atoms(aparam, source, real, spare=True)

    def _sorted(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return place and frame of every sorted atom `(nsorted,)`, from the atoms of each type `(nframes, ntypes)`."""
        places, shape = self._places, self.shape
        ends = counts.cumsum(0)
        before = (places.rank >= ends.index_select(1, places.kind)).sum(0)
        inside = before < shape.frames
        here = before.clamp(max=shape.frames - 1)
        first = (counts.cumsum(1) - ends)[here, places.kind]
        order = torch.where(inside, here * shape.natoms + first + places.rank, places.order)
        return order, torch.where(inside, here, places.frame)

    def _labels(self, numbers: Tensor, source: Tensor, real: Tensor | None) -> dict[str, Tensor | None]:
        """Return the labels as `TrainingBatch` has them; `find_` tells where one is missing."""
        store, shape = self._store, self.shape
        labels: dict[str, Tensor | None] = {}
        for name, width in LABELS.items():
            if name not in shape.labels:
                continue
            if name in store.of_frames:
                found = store.of_frames[name].index_select(0, numbers)
            else:
                found = self._of_atoms(store.of_atoms[name], source, real)
            labels[name] = found if width > 1 else found.squeeze(-1)
            if name in shape.partial:
                labels[f"find_{name}"] = store.found[name].index_select(0, numbers)
        return labels


@dataclass(frozen=True)
class ResidentFeed:
    """A batch that a step gathers from the slots it finds in the table."""

    gathering: Gathering
    system: str
    table: _NumberTable
    numbers: np.ndarray
    store: FrameStore

    @property
    def layout(self) -> Hashable:
        """The shape: batches of one shape share a graph."""
        return self.gathering.shape

    @property
    def atoms(self) -> np.ndarray:
        """Real atoms of each frame, on the host."""
        natoms: np.ndarray = self.store.natoms[self.numbers]
        return natoms

    @property
    def present(self) -> dict[str, np.ndarray]:
        """Which frames have each label, on the host."""
        none = np.zeros(len(self.numbers), dtype=bool)
        return {name: self.store.present[name][self.numbers] if name in self.store.present else none for name in LABELS}

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        present = self.present
        return float(self.atoms[np.logical_and.reduce([present[name] for name in needed])].sum())

    def read(self) -> TrainingBatch:
        """Gather the batch."""
        return self.gathering(self.table.read()[: self.gathering.shape.frames], self)


class _NumberTable:
    """Slots of the frames of the next batches on the device, read one batch a step; missing frames fill a batch up."""

    def __init__(self, rows: int, width: int, store: FrameStore) -> None:
        self._store = store
        self._row = torch.zeros(1, dtype=torch.int64, device=store.coord.device)
        self._table = torch.zeros(rows, width, dtype=torch.int64, device=store.coord.device)

    def write(self, batches: Sequence[np.ndarray]) -> None:
        """Take the slots of these batches, on the host."""
        values = np.full((len(batches), self._table.shape[1]), self._store.missing, dtype=np.int64)
        for row, slots in enumerate(batches):
            values[row, : len(slots)] = slots
        self._store.move(values, self._table[: len(batches)])
        self._row.zero_()

    def read(self) -> Tensor:
        """Return the slots of the present batch, and move on; on the device."""
        found = self._table.index_select(0, self._row)[0]
        self._row.add_(1)
        return found


@dataclass(frozen=True)
class _Window:
    """Batches that are drawn together.

    Attributes
    ----------
    plans
        What the loader drew.
    batches
        Numbers of the frames of each batch, counted over all systems.
    frames
        The frames that have to be read, in rising order `(nframes,)`.
    chunks
        Those frames, being read.
    """

    plans: list[Plan]
    batches: list[np.ndarray]
    frames: np.ndarray
    chunks: list[Future[Chunk]]


class ResidentBatches:
    """Batches of a loader gathered on the device.

    Data within the budget are read once and stay; larger ones pass through, window after window.

    Parameters
    ----------
    loader
        Its order of batches is kept.
    device
        Where the data go.
    budget
        Bytes that data which stay may take.
    """

    def __init__(self, loader: DataLoader, device: torch.device, budget: int = 1 << 30) -> None:
        self._loader = loader
        cache = loader.cache
        self._sizes = np.array([system.natoms for system in loader.systems])
        stays = store_bytes(loader.systems, cache.ntypes) <= budget
        each = loader.batches_per_step
        self._rows = max(1, _AHEAD // each) * each  # the table is written between steps, not within one
        largest = loader.most_frames * int(self._sizes.max())
        atoms = _WINDOW_ATOMS + each * largest
        room = None if stays else (min(atoms, self._rows * loader.most_frames), atoms)
        self._store = FrameStore(loader.systems, cache, device, room)
        self._asked = np.zeros(self._store.nframes, dtype=bool)
        self._limits = group_limits(cache.sel, cache.by_type, cache.ntypes)
        most = int(min(self._limits.sum(dtype=np.float64), MOST_NEIGHBORS))
        self._sections = Sections(cache.rcut, (), cache.by_type, most, MOST_NEIGHBORS)
        self._shapes = Shapes()
        self._gatherings: dict[Shape, Gathering] = {}
        self._numbers = _NumberTable(self._rows, loader.most_frames, self._store)
        self._readers = ThreadPoolExecutor(worker_count(), thread_name_prefix="deepmd_muon-frames")
        self._windows: deque[_Window] = deque()
        self._begun = 0
        self._plans: deque[tuple[Plan, np.ndarray, Shape]] = deque()
        self._told = False
        self._read_first()

    def next(self) -> ResidentFeed:
        """Return the next batch."""
        if not self._plans:
            self._turn()
        plan, numbers, wanted = self._plans.popleft()
        self._loader.advance()
        shape = self._shapes.of(wanted)
        if shape not in self._gatherings:
            self._gatherings[shape] = Gathering(self._store, shape, self._sections)
        name = self._loader.systems[plan.parts[0][0]].name if len(plan.parts) == 1 else MIXED
        return ResidentFeed(self._gatherings[shape], name, self._numbers, numbers, self._store)

    def close(self) -> None:
        """End the threads that read."""
        self._readers.shutdown(wait=True, cancel_futures=True)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_first(self) -> None:
        """Read small data whole; of others a sample, the same in each run, that says what most batches need."""
        store = self._store
        number = store.nframes
        if not store.stays or number * int(self._sizes.max()) > AT_ONCE:
            number = min(number, max(1, min(_FIRST_ATOMS, len(store.coord)) // int(self._sizes.max())))
        numbers = np.arange(number) * store.nframes // number
        self._asked[numbers] = True
        for chunk in self._read(numbers):
            store.take([chunk.result()])

    def _read(self, numbers: np.ndarray) -> list[Future[Chunk]]:
        """Begin to read frames, in rising order."""
        store, systems = self._store, self._loader.systems
        parts = pieces(systems, store.offset, numbers) if len(numbers) else ()
        ntypes = self._loader.cache.ntypes
        return [self._readers.submit(read_chunk, systems, store.offset, part, ntypes) for part in parts]

    def _draw(self) -> _Window:
        """Draw the batches of a window, and begin to read their frames."""
        store, loader = self._store, self._loader
        room = _WINDOW_ATOMS if self._begun else _FIRST_ATOMS
        self._begun += 1
        window = _Window([], [], np.zeros(0, dtype=np.int64), [])
        atoms, wanted = 0, []
        while len(window.plans) < self._rows and atoms < room:
            for _ in range(loader.batches_per_step):
                plan = loader.draw()
                numbers = np.concatenate([n + store.offset[k] for k, n in plan.parts])
                window.plans.append(plan)
                window.batches.append(numbers)
                new = numbers if not store.stays else numbers[~self._asked[numbers]]
                if len(new):
                    wanted.append(new)
                    self._asked[new] = True
                    atoms += int(self._sizes[np.searchsorted(store.offset, new, side="right") - 1].sum())
        frames = np.unique(np.concatenate(wanted)) if wanted else window.frames
        return _Window(window.plans, window.batches, frames, self._read(frames))

    def _turn(self) -> None:
        """Begin the next window: write its frames and their slots, and let the shapes hold its batches."""
        while len(self._windows) <= _READ_AHEAD:
            self._windows.append(self._draw())
            if not self._windows[-1].chunks:
                break
        window = self._windows.popleft()
        self._store.take([chunk.result() for chunk in window.chunks])
        self._note_cut_lists()
        wanted = [self._shape_of(numbers) for numbers in window.batches]
        self._shapes.learn(wanted)
        self._numbers.write([self._store.slots_of(numbers, window.frames) for numbers in window.batches])
        self._plans.extend(zip(window.plans, window.batches, wanted, strict=True))
        if not self._told:
            self._told = True
            self._tell([self._shapes.of(shape) for shape in wanted], wanted)

    def _tell(self, shapes: Sequence[Shape], wanted: Sequence[Shape]) -> None:
        atoms = sum(sum(shape.counts) for shape in shapes)
        padding = 1.0 - sum(sum(shape.counts) for shape in wanted) / max(1, atoms)
        log.info(
            "training data %s the device: %d frames, batches of %d shapes, %.0f %% of their atoms are padding",
            "live on" if self._store.stays else "pass through",
            self._store.nframes,
            len(set(shapes)),
            100.0 * padding,
        )

    # -- what batches need ---------------------------------------------------------------------------------------

    def _note_cut_lists(self) -> None:
        """Let the cache know that `sel` cuts lists."""
        store, ntypes = self._store, self._loader.cache.ntypes
        columns = store.most[:, :ntypes] if self._loader.cache.by_type else store.most[:, ntypes : ntypes + 1]
        if (columns > self._limits).any() or (store.most[:, ntypes] > self._limits.sum(dtype=np.float64)).any():
            self._loader.cache.dropped = max(1, self._loader.cache.dropped)

    def _shape_of(self, numbers: np.ndarray) -> Shape:
        """Return what a batch needs."""
        store, cache = self._store, self._loader.cache
        groups, often = np.unique(store.group[numbers], return_counts=True)
        most = store.most[groups].max(0)
        columns = most[: cache.ntypes] if cache.by_type else most[cache.ntypes : cache.ntypes + 1]
        bounds = np.array([count for _, count in cache.inner], dtype=np.int64)
        inner = np.minimum(most[cache.ntypes + 1 :], bounds)
        present = {name: flags[numbers] for name, flags in store.present.items()}
        return Shape(
            len(numbers),
            int(store.natoms[numbers].max()),
            tuple((store.of_kind[groups] * often[:, None]).sum(0).tolist()),
            tuple(np.minimum(-(-columns // SECTION_STEP) * SECTION_STEP, self._limits).tolist()),
            tuple((-(-inner // INNER_STEP) * INNER_STEP).tolist()),
            bool(store.periodic[groups].any()),
            frozenset(name for name, flags in present.items() if flags.any()),
            frozenset(name for name, flags in present.items() if flags.any() and not flags.all()),
            int(groups[0]) if len(groups) == 1 else None,
            1 << max(4, int(most[cache.ntypes] - 1).bit_length()),
        )


def why_not_on_device(loader: DataLoader) -> str | None:
    """Say why the batches of a loader must be made on the host; None when the device can make them."""
    large = max(loader.systems, key=lambda system: system.natoms)
    return f"{large.name} has {large.natoms} atoms" if large.natoms > MOST_ATOMS else None
