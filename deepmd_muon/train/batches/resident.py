"""Batches that steps gather from frames on the device, drawn and read ahead on the host.

The host draws batches in *windows*: up to a thousand of them, or fewer if frames have to be read
first. Threads read the frames of the next windows meanwhile. The slots of the frames of a window
(see `frame_store`) are in a table on the device. A step reads its row of the table and gathers its
batch by operations of the device alone.

Batches are padded to a few shapes (`shapes`). One CUDA graph serves one shape, or one tuple of
shapes if a step accumulates batches. A frame of a batch has `natoms` *places*, its atoms first. The
*sorted atoms* list the places of all atoms by type, and in a type by frame.

Two kinds of frames without atoms and labels fill a shape:

- the *missing frame*, the last slot of the store, where a batch has fewer frames than its shape;
- *spare frames*, which only the batch has, after all others. Their places fill the sorted atoms
  where a batch has fewer atoms of a type than its shape.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import DataLoader, Plan, System, group_limits, worker_count
from deepmd_muon.data.frames import LABELS, PARAMETERS, Frames
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Sections
from deepmd_muon.model.neighbors.search import find_neighbors
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.frame_store import (
    PER_ATOM,
    Chunk,
    FrameStore,
    Room,
    cut_into_chunks,
    read_chunk,
    store_bytes,
    system_of,
)
from deepmd_muon.train.batches.shapes import Shape, Shapes
from deepmd_muon.train.batches.streamed import INNER_STEP, SECTION_STEP

log = logging.getLogger(__name__)

# Batches of a window, at most.
_AHEAD = 1024
# Atoms of a window if its frames have to be read: the first one is small, so that a run begins
# soon.
_FIRST_ATOMS = 1 << 16
_WINDOW_ATOMS = 1 << 18
# Windows that are read ahead of the one in use.
_READ_AHEAD = 2
#: Threads that read. Most of their work holds the interpreter's lock, so more threads would only
#: delay each other and the thread that takes the steps.
READERS = 2
#: Cost of all data, in atoms, up to which they are read before the first step: a second or two.
AT_ONCE = 1 << 22
# Reading a frame and a system takes as long as so many atoms more.
_FRAME_COST = 64
_SYSTEM_COST = 1024
#: For frames with more atoms, the device's search over all pairs is slower than the host's search.
MOST_ATOMS = 20_000
# Room for the neighbours of all atoms together is a multiple of this.
_EDGE_STEP = 256
# The search has room for at least two to this power neighbours of an atom.
_LEAST_CAPACITY_EXPONENT = 4
# What `FrameStore` keeps of a frame; a batch gathered on the device would lack anything else.
_KEPT = frozenset({"atype", "coord", "box", *LABELS, *PARAMETERS})


def why_not_on_device(systems: Sequence[System]) -> str | None:
    """Return why the host must make the batches of some systems; None if the device can."""
    unknown = sorted({field.name for field in dataclasses.fields(Frames)} - _KEPT)
    if unknown:
        return f"frames have {', '.join(unknown)}, which the device does not keep"
    largest = max(systems, key=lambda system: system.natoms)
    if largest.natoms > MOST_ATOMS:
        return f"{largest.name} has {largest.natoms} atoms"
    return None


class _Window(NamedTuple):
    """Batches that are drawn together."""

    plans: list[Plan]
    batches: list[np.ndarray]  # numbers of the frames of each, counted over all systems
    to_read: np.ndarray  # numbers of the frames that have to be read, in rising order (nframes,)
    chunks: list[Future[Chunk]]  # these frames, being read


class _DrawnBatch(NamedTuple):
    plan: Plan
    numbers: np.ndarray  # of its frames
    needed: Shape  # the least shape that holds it


class ResidentBatches:
    """Batches of a loader gathered on the device, in the loader's order.

    Data within the budget [bytes] are read once and stay; larger ones pass through, window after
    window.
    """

    def __init__(self, loader: DataLoader, device: torch.device, budget: int = 1 << 30) -> None:
        self._loader = loader
        cache = loader.cache
        self._natoms = np.array([system.natoms for system in loader.systems])
        per_step = loader.batches_per_step
        # A window has whole steps: the table is written between steps.
        self._most_batches = max(1, _AHEAD // per_step) * per_step
        room = None
        if store_bytes(loader.systems, cache.ntypes) > budget:
            # A window ends with the step that exceeds its atoms.
            atoms = _WINDOW_ATOMS + per_step * loader.most_frames * int(self._natoms.max())
            room = Room(frames=min(atoms, self._most_batches * loader.most_frames), atoms=atoms)
        self._store = FrameStore(loader.systems, cache, device, room)
        # Frames whose reading has begun.
        self._requested = np.zeros(self._store.nframes, dtype=bool)
        self._shapes = Shapes()
        self._gatherings: dict[Shape, Gathering] = {}
        self._table = SlotTable(self._most_batches, loader.most_frames, self._store)
        self._readers = ThreadPoolExecutor(
            min(READERS, worker_count()), thread_name_prefix="deepmd_muon-frames"
        )
        self._drawn: deque[_DrawnBatch] = deque()  # of the current window
        self._next_windows: deque[_Window] = deque()
        self._n_windows = 0  # drawn so far
        self._last_reads = False  # whether the window drawn last has frames to read
        # Batches to hand out before the second window is drawn. Drawing and reading it would delay
        # the first step, so the second step does it.
        self._until_look_ahead = 0
        self._logged = False
        self._read_first()

    def next(self) -> ResidentFeed:
        """Return the next batch."""
        if not self._drawn:
            self._begin_window()
        elif self._until_look_ahead:
            self._until_look_ahead -= 1
            if not self._until_look_ahead:
                self._look_ahead()
        drawn = self._drawn.popleft()
        self._loader.advance()
        shape = self._shapes.of(drawn.needed)
        if shape not in self._gatherings:
            self._gatherings[shape] = Gathering(self._store, shape)
        return ResidentFeed(
            gathering=self._gatherings[shape],
            origin=Origin.of(self._loader.systems, drawn.plan),
            table=self._table,
            numbers=drawn.numbers,
            store=self._store,
        )

    def close(self) -> None:
        """End the threads that read."""
        self._readers.shutdown(wait=True, cancel_futures=True)

    # ----- windows -------------------------------------------------------------------------------

    def _read_first(self) -> None:
        """Read small data whole, or a fixed sample, which gives the shapes of most batches."""
        store = self._store
        n_read = store.nframes
        largest = int(self._natoms.max())
        cost = n_read * (largest + _FRAME_COST) + len(self._natoms) * _SYSTEM_COST
        if not store.stays or cost > AT_ONCE:
            fitting = min(_FIRST_ATOMS, len(store.tensors["coord"])) // largest
            n_read = min(n_read, max(1, fitting), store.missing)
        numbers = np.arange(n_read) * store.nframes // n_read  # evenly spread
        self._requested[numbers] = True
        for chunk in self._read(numbers):
            store.take([chunk.result()])

    def _read(self, numbers: np.ndarray) -> list[Future[Chunk]]:
        """Begin to read frames, in rising order."""
        if not len(numbers):
            return []
        systems = self._loader.systems
        offset = self._store.offset
        ntypes = self._loader.cache.ntypes
        return [
            self._readers.submit(read_chunk, systems, offset, chunk_numbers, ntypes)
            for chunk_numbers in cut_into_chunks(systems, offset, numbers)
        ]

    def _draw(self) -> _Window:
        """Draw the batches of a window, and begin to read their frames."""
        store = self._store
        loader = self._loader
        most_atoms = _WINDOW_ATOMS if self._n_windows else _FIRST_ATOMS
        self._n_windows += 1
        plans: list[Plan] = []
        batches: list[np.ndarray] = []
        to_read = [np.zeros(0, dtype=np.int64)]
        atoms = 0
        while len(plans) < self._most_batches and atoms < most_atoms:
            for _ in range(loader.batches_per_step):
                plan = loader.draw()
                numbers = np.concatenate([rows + store.offset[k] for k, rows in plan.parts])
                plans.append(plan)
                batches.append(numbers)
                # Data that pass through are read again for each window.
                new = numbers[~self._requested[numbers]] if store.stays else numbers
                self._requested[new] = True
                to_read.append(new)
                atoms += int(self._natoms[system_of(new, store.offset)].sum())
        unique = np.unique(np.concatenate(to_read))
        self._last_reads = bool(len(unique))
        return _Window(plans, batches, to_read=unique, chunks=self._read(unique))

    def _begin_window(self) -> None:
        """Begin the next window: write its frames and slots, and add shapes for its batches."""
        is_first = not self._n_windows
        window = self._next_windows.popleft() if self._next_windows else self._draw()
        self._store.take([chunk.result() for chunk in window.chunks])
        self._store.note_cut_lists()
        needed = self._needed_shapes(window.batches)
        self._shapes.learn(needed)
        self._table.write(
            [self._store.slots_of(numbers, window.to_read) for numbers in window.batches]
        )
        self._drawn.extend(map(_DrawnBatch, window.plans, window.batches, needed))
        per_step = self._loader.batches_per_step
        has_second_step = len(self._drawn) > per_step
        if is_first and has_second_step:
            self._until_look_ahead = per_step
        else:
            self._look_ahead()
        if not self._logged:
            self._logged = True
            self._log(needed)

    def _look_ahead(self) -> None:
        """Draw the next windows, until one has nothing to read or `_READ_AHEAD` wait."""
        while self._last_reads and len(self._next_windows) < _READ_AHEAD:
            self._next_windows.append(self._draw())

    def _log(self, needed: Sequence[Shape]) -> None:
        shapes = [self._shapes.of(shape) for shape in needed]
        places = sum(sum(shape.counts) for shape in shapes)
        atoms = sum(sum(shape.counts) for shape in needed)
        log.info(
            "training data %s the device: %d frames, batches of %d shapes, "
            "%.0f %% of their atoms are padding",
            "live on" if self._store.stays else "pass through",
            self._store.nframes,
            len(set(shapes)),
            100.0 * (1.0 - atoms / max(1, places)),
        )

    # ----- what batches need ---------------------------------------------------------------------

    def _needed_shapes(self, batches: Sequence[np.ndarray]) -> list[Shape]:
        """Return `shape_of` each batch, computed once for all of one kind and number of frames."""
        sizes = [len(numbers) for numbers in batches]
        kinds = self._store.kinds_of(np.concatenate(batches))
        starts = np.cumsum([0, *sizes[:-1]])
        lowest_kinds = np.minimum.reduceat(kinds, starts).tolist()
        highest_kinds = np.maximum.reduceat(kinds, starts).tolist()
        shape_of_kind: dict[tuple[int, int], Shape] = {}
        shapes = []
        for numbers, lowest, highest in zip(batches, lowest_kinds, highest_kinds, strict=True):
            if lowest != highest:  # frames of several kinds
                shapes.append(shape_of(self._store, numbers))
                continue
            key = (len(numbers), lowest)
            if key not in shape_of_kind:
                shape_of_kind[key] = shape_of(self._store, numbers)
            shapes.append(shape_of_kind[key])
        return shapes


def shape_of(store: FrameStore, numbers: np.ndarray) -> Shape:
    """Return the least shape that holds a batch of frames."""
    cache = store.cache
    ntypes = cache.ntypes
    limits = group_limits(cache.sel, cache.by_type, ntypes)
    compositions, n_frames = np.unique(store.composition[numbers], return_counts=True)
    max_neighbors = store.max_neighbors[compositions].max(0)
    widths = max_neighbors[:ntypes] if cache.by_type else max_neighbors[ntypes : ntypes + 1]
    bounds = np.array([count for _, count in cache.inner], dtype=np.int64)
    inner = np.minimum(max_neighbors[ntypes + 1 :], bounds)
    present = {name: flags[numbers] for name, flags in store.present.items()}
    labels = frozenset(name for name, flags in present.items() if flags.any())
    edges = int((store.max_edges[compositions] * n_frames).sum()) if cache.bound_edges else 0
    return Shape(
        frames=len(numbers),
        natoms=int(store.natoms[numbers].max()),
        counts=tuple((store.type_counts[compositions] * n_frames[:, None]).sum(0).tolist()),
        widths=tuple(np.minimum(_round_up(widths, SECTION_STEP), limits).tolist()),
        inner=tuple(_round_up(inner, INNER_STEP).tolist()),
        periodic=bool(store.periodic[compositions].any()),
        labels=labels,
        partial=frozenset(name for name in labels if not present[name].all()),
        composition=int(compositions[0]) if len(compositions) == 1 else None,
        capacity=1 << max(_LEAST_CAPACITY_EXPONENT, int(max_neighbors[ntypes] - 1).bit_length()),
        edges=-(-edges // _EDGE_STEP) * _EDGE_STEP,
    )


def _round_up(numbers: np.ndarray, step: int) -> np.ndarray:
    rounded: np.ndarray = -(-numbers // step) * step
    return rounded


@dataclass(frozen=True)
class ResidentFeed:
    """A batch that a step gathers from the slots it reads in the table."""

    gathering: Gathering
    origin: Origin
    table: SlotTable
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
        stored = self.store.present
        return {name: stored[name][self.numbers] if name in stored else none for name in LABELS}

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        present = self.present
        return float(self.atoms[np.logical_and.reduce([present[name] for name in needed])].sum())

    def read(self) -> TrainingBatch:
        """Gather the batch, and advance the row of the table on the device.

        So every feed must be read once, in order, before the next window begins.
        """
        gathering = self.gathering
        slots = self.table.read()[: gathering.shape.frames]
        real = gathering.find_real(slots)
        return TrainingBatch(
            structures=gathering.structures(slots, real),
            labels=gathering.labels(slots, real),
            mask=real.mask,
            origin=self.origin,
            atoms=self.atoms,
            present=self.present,
        )


class SlotTable:
    """Slots of the frames of a window's batches on the device, one row for each batch.

    Rows are filled up with the slot of the missing frame.
    """

    def __init__(self, rows: int, width: int, store: FrameStore) -> None:
        self._store = store
        self._row = torch.zeros(1, dtype=torch.int64, device=store.device)
        self._table = torch.zeros(rows, width, dtype=torch.int64, device=store.device)

    def write(self, batches: Sequence[np.ndarray]) -> None:
        """Take the slots of these batches, on the host."""
        values = np.full((len(batches), self._table.shape[1]), self._store.missing, dtype=np.int64)
        for row, slots in enumerate(batches):
            values[row, : len(slots)] = slots
        self._store.copy_to(self._table[: len(batches)], values)
        self._row.zero_()

    def read(self) -> Tensor:
        """Return the slots of the next batch, and advance the row, on the device.

        The host does not know the row, so batches must be read once each, in order.
        """
        slots = self._table.index_select(0, self._row)[0]
        self._row.add_(1)
        return slots


class _Real(NamedTuple):
    """Which places of a batch have an atom, and its row in the store's tensors of atoms."""

    natoms: Tensor  # atoms of each frame (frames,)
    source: Tensor  # row in the store of each place (frames · natoms,); 0 without an atom
    mask: Tensor | None  # (frames, natoms); None if all places have an atom


class Gathering:
    """Makes batches of one shape from a store, by operations of the device alone.

    Graphs read its tensors as long as they exist.

    Parameters
    ----------
    store
        The data.
    shape
        Of the batches.
    """

    def __init__(self, store: FrameStore, shape: Shape) -> None:
        self._store = store
        self.shape = shape
        cache = store.cache
        limits = group_limits(cache.sel, cache.by_type, cache.ntypes)
        self._sections = Sections(
            rcut=cache.rcut,
            widths=shape.widths,
            by_type=cache.by_type,
            n_nearest=int(min(limits.sum(dtype=np.float64), MOST_NEIGHBORS)),
            capacity=shape.capacity,
        )

        # Of each sorted atom: its type, and its number among those of its type (nsorted,).
        nsorted = sum(shape.counts)
        atom_type = np.repeat(np.arange(len(shape.counts)), shape.counts)
        type_starts = np.cumsum((0, *shape.counts[:-1]))
        within_type = np.arange(nsorted) - np.repeat(type_starts, shape.counts)
        if shape.composition is not None:
            # All frames are alike, so place and frame of every sorted atom are known now.
            self._n_spare = 0
            per_frame = np.array(shape.counts) // max(1, shape.frames)  # atoms of each type
            n_of_type = np.maximum(per_frame[atom_type], 1)
            frame = within_type // n_of_type
            first_of_type = (np.cumsum(per_frame) - per_frame)[atom_type]  # in a frame
            order = frame * shape.natoms + first_of_type + within_type % n_of_type
        else:
            # `_sort` computes them for each batch. These are places of the spare frames: `_sort`
            # takes them where the batch has fewer atoms of a type than the shape.
            self._n_spare = -(-nsorted // max(1, shape.natoms))
            order = shape.frames * shape.natoms + np.arange(nsorted)
            frame = order // max(1, shape.natoms)

        def on_device(values: np.ndarray) -> Tensor:
            values = np.ascontiguousarray(values, dtype=np.int64)
            return torch.from_numpy(values).to(store.device)

        self._type = on_device(atom_type)
        self._within_type = on_device(within_type)
        self._order = on_device(order)
        self._frame = on_device(frame)
        # On the host: bounds of the shape take the place of each atom's counts. Lists are full up
        # to their width, and within the shorter cut-offs up to `inner`.
        self._filled = np.repeat(np.array(shape.widths)[:, None], nsorted, axis=1)
        self._inner = np.repeat(np.array(shape.inner, dtype=np.int64)[:, None], nsorted, axis=1)

    def find_real(self, slots: Tensor) -> _Real:
        """Return which places have an atom, for frames in slots `(frames of the shape,)`, int64."""
        natoms = self._store.select("natoms", slots)
        place = torch.arange(self.shape.natoms, device=slots.device)
        source = self._store.select("first_atom", slots).unsqueeze(1) + place  # (frames, natoms)
        if self.shape.composition is not None:
            return _Real(natoms, source.flatten(), mask=None)
        mask = place < natoms.unsqueeze(1)
        return _Real(natoms, torch.where(mask, source, 0).flatten(), mask)

    def structures(self, slots: Tensor, real: _Real) -> Structures:
        """Return the structures of the batch, with their neighbours."""
        store = self._store
        shape = self.shape
        coord = self._with_spare(self._of_atoms("coord", real))
        atype = store.select("atype", real.source).view(shape.frames, shape.natoms)
        order = self._order
        frame = self._frame
        if real.mask is not None:
            atype = torch.where(real.mask, atype, -1)
            atype = torch.nn.functional.pad(atype, (0, 0, 0, self._n_spare), value=-1)
            order, frame = self._sort(store.select("type_counts", slots).long())
        cells = None
        box = None
        if shape.periodic and store.cells is not None:
            cells = store.cells.select(slots)
            box = self._with_spare(cells.box)
        atoms = Atoms(coord.view(-1, 3), atype.flatten(), real.natoms, shape.natoms, cells)
        neighbor, shift = find_neighbors(atoms, order, frame, self._sections)
        fparam = None
        if "fparam" in store.tensors:
            fparam = self._with_spare(store.select("fparam", slots))
        aparam = None
        if "aparam" in store.tensors:
            aparam = self._with_spare(self._of_atoms("aparam", real))
        return Structures(
            atype=atype,
            order=order,
            sorted_type=self._type,
            sorted_frame=frame,
            coord=coord,
            box=box,
            neighbor=neighbor,
            shift=shift,
            sections=shape.widths,
            type_counts=shape.counts,
            filled=self._filled,
            inner=self._inner,
            edges=shape.edges or None,
            fparam=fparam,
            aparam=aparam,
        )

    def _of_atoms(self, name: str, real: _Real) -> Tensor:
        """Return values of atoms `(frames, natoms, width)`, zero if there is none."""
        gathered = self._store.select(name, real.source)
        gathered = gathered.view(self.shape.frames, self.shape.natoms, -1)
        if real.mask is None:
            return gathered
        return torch.where(real.mask.unsqueeze(2), gathered, 0.0)

    def _with_spare(self, values: Tensor) -> Tensor:
        """Add zeros for the spare frames to values `(frames, …)`."""
        if not self._n_spare:
            return values
        padding = [0, 0] * (values.dim() - 1) + [0, self._n_spare]  # the last axis comes first
        return torch.nn.functional.pad(values, padding)

    def _sort(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return place and frame of every sorted atom `(nsorted,)`.

        `counts` are the atoms of each type `(frames, ntypes)`.
        """
        # Before the frame of atom r of a type come the frames at whose end the type has at most r
        # atoms.
        ends = counts.cumsum(0)  # (frames, ntypes)
        n_before = (self._within_type >= ends.index_select(1, self._type)).sum(0)  # (nsorted,)
        is_atom = n_before < self.shape.frames
        frame = n_before.clamp(max=self.shape.frames - 1)
        # The place in the frame is the first one of the type there, cumsum(1) − counts, plus the
        # number r less the atoms of the type in earlier frames, ends − counts.
        first_less_earlier = (counts.cumsum(1) - ends)[frame, self._type]
        order = frame * self.shape.natoms + first_less_earlier + self._within_type
        return torch.where(is_atom, order, self._order), torch.where(is_atom, frame, self._frame)

    def labels(self, slots: Tensor, real: _Real) -> dict[str, Tensor | None]:
        """Return the labels as `TrainingBatch` has them; `find_` tells which frames have one."""
        store = self._store
        labels: dict[str, Tensor | None] = {}
        for name, width in LABELS.items():
            if name not in self.shape.labels:
                continue
            if name in PER_ATOM:
                values = self._of_atoms(name, real)
            else:
                values = store.select(name, slots)
            labels[name] = values if width > 1 else values.squeeze(-1)
            if name in self.shape.partial:
                labels[f"find_{name}"] = store.select(f"has_{name}", slots)
        return labels
