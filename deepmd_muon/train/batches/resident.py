"""Batches that steps gather from frames on the device (`gathering`), drawn and read ahead on the host.

The host draws batches in windows: up to a thousand of them, or fewer where frames have to be read first. Threads read
the frames of the next windows meanwhile. Batches are padded to a few shapes (`shapes`), each with one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from deepmd_muon.data import DataLoader, Plan, System, group_limits, worker_count
from deepmd_muon.data.frames import LABELS, PARAMETERS, Frames
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Sections
from deepmd_muon.train.batches.frame_reader import Chunk, pieces, read_chunk
from deepmd_muon.train.batches.frame_store import FrameStore, store_bytes
from deepmd_muon.train.batches.gathering import Gathering, ResidentFeed, SlotTable
from deepmd_muon.train.batches.shapes import Shape, Shapes
from deepmd_muon.train.batches.streamed import INNER_STEP, SECTION_STEP

log = logging.getLogger(__name__)

# Batches of a window, at most.
_AHEAD = 1024
# Atoms of a window whose frames have to be read: the first one is small, so that a run begins soon.
_FIRST_ATOMS, _WINDOW_ATOMS = 1 << 16, 1 << 18
# Windows that are read ahead of the one in use.
_READ_AHEAD = 2
#: Threads that read. Most of their work holds the interpreter's lock, so more threads would only delay each other
#: and the thread that takes the steps.
READERS = 2
#: Cost of all data, in atoms, up to which they are read before the first step: a second or two.
AT_ONCE = 1 << 22
# Cost of a frame and of a system beside their atoms: reading them takes as long as so many atoms.
_FRAME_COST, _SYSTEM_COST = 64, 1024
#: From so many atoms in a frame on, the device's search over all pairs is slower than the host's search.
MOST_ATOMS = 20_000
# What `FrameStore` keeps of a frame; a batch gathered on the device would lack anything else.
_KEPT = frozenset({"atype", "coord", "box", *LABELS, *PARAMETERS})


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
    """Batches of a loader gathered on the device, in the loader's order.

    Data within the budget [bytes] are read once and stay; larger ones pass through, window after window.
    """

    def __init__(self, loader: DataLoader, device: torch.device, budget: int = 1 << 30) -> None:
        self._loader = loader
        cache = loader.cache
        self._sizes = np.array([system.natoms for system in loader.systems])
        stays = store_bytes(loader.systems, cache.ntypes) <= budget
        each = loader.batches_per_step
        self._rows = (
            max(1, _AHEAD // each) * each
        )  # the table is written between steps, not within one
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
        self._numbers = SlotTable(self._rows, loader.most_frames, self._store)
        self._readers = ThreadPoolExecutor(
            min(READERS, worker_count()), thread_name_prefix="deepmd_muon-frames"
        )
        self._windows: deque[_Window] = deque()
        self._begun = 0
        self._reads = False  # whether the present window had frames to read
        self._waiting = 0  # batches to hand out before the windows after the first one are drawn
        self._plans: deque[tuple[Plan, np.ndarray, Shape]] = deque()
        self._logged = False
        self._read_first()

    def next(self) -> ResidentFeed:
        """Return the next batch."""
        if not self._plans:
            self._turn()
        elif self._waiting:
            self._waiting -= 1
            if not self._waiting:
                self._look_ahead()
        plan, numbers, wanted = self._plans.popleft()
        self._loader.advance()
        shape = self._shapes.of(wanted)
        if shape not in self._gatherings:
            self._gatherings[shape] = Gathering(self._store, shape, self._sections)
        origin = Origin.of(self._loader.systems, plan)
        return ResidentFeed(self._gatherings[shape], origin, self._numbers, numbers, self._store)

    def close(self) -> None:
        """End the threads that read."""
        self._readers.shutdown(wait=True, cancel_futures=True)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_first(self) -> None:
        """Read small data whole; of larger data a fixed sample, which gives the shapes of most batches."""
        store = self._store
        number = store.nframes
        cost = number * (int(self._sizes.max()) + _FRAME_COST) + len(self._sizes) * _SYSTEM_COST
        if not store.stays or cost > AT_ONCE:
            number = min(
                number, max(1, min(_FIRST_ATOMS, len(store.coord)) // int(self._sizes.max()))
            )
        numbers = np.arange(number) * store.nframes // number
        self._asked[numbers] = True
        for chunk in self._read(numbers):
            store.take([chunk.result()])

    def _read(self, numbers: np.ndarray) -> list[Future[Chunk]]:
        """Begin to read frames, in rising order."""
        store, systems = self._store, self._loader.systems
        parts = pieces(systems, store.offset, numbers) if len(numbers) else ()
        ntypes = self._loader.cache.ntypes
        return [
            self._readers.submit(read_chunk, systems, store.offset, part, ntypes) for part in parts
        ]

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
                    atoms += int(
                        self._sizes[np.searchsorted(store.offset, new, side="right") - 1].sum()
                    )
        frames = np.unique(np.concatenate(wanted)) if wanted else window.frames
        return _Window(window.plans, window.batches, frames, self._read(frames))

    def _turn(self) -> None:
        """Begin the next window: write its frames and their slots, and extend the shapes to its batches."""
        first = not self._begun
        window = self._windows.popleft() if self._windows else self._draw()
        self._reads = bool(window.chunks)
        self._store.take([chunk.result() for chunk in window.chunks])
        self._note_cut_lists()
        wanted = self._shapes_of(window.batches)
        self._shapes.learn(wanted)
        self._numbers.write(
            [self._store.slots_of(numbers, window.frames) for numbers in window.batches]
        )
        self._plans.extend(zip(window.plans, window.batches, wanted, strict=True))
        # Drawing and reading later windows would delay the first step.
        each = self._loader.batches_per_step
        self._waiting = each if first and len(self._plans) > each else 0
        if not self._waiting:
            self._look_ahead()
        if not self._logged:
            self._logged = True
            self._tell([self._shapes.of(shape) for shape in wanted], wanted)

    def _look_ahead(self) -> None:
        """Draw the windows after the present one, until one has nothing to read."""
        while len(self._windows) < _READ_AHEAD and (
            self._windows[-1].chunks if self._windows else self._reads
        ):
            self._windows.append(self._draw())

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
        """Record in the cache that `sel` cuts neighbour lists."""
        cache = self._loader.cache
        most = self._store.most.max(0)
        cache.note_most(most[: cache.ntypes], int(most[cache.ntypes]))

    def _shapes_of(self, batches: Sequence[np.ndarray]) -> list[Shape]:
        """Return what each batch needs, found once for all of one composition and number of frames."""
        sizes = [len(numbers) for numbers in batches]
        kinds = self._store.kinds_of(np.concatenate(batches))
        starts = np.cumsum([0, *sizes[:-1]])
        least, most = np.minimum.reduceat(kinds, starts), np.maximum.reduceat(kinds, starts)
        known: dict[tuple[int, int], Shape] = {}
        found = []
        for numbers, size, kind, last in zip(
            batches, sizes, least.tolist(), most.tolist(), strict=True
        ):
            if kind != last:
                found.append(self._shape_of(numbers))
                continue
            if (size, kind) not in known:
                known[size, kind] = self._shape_of(numbers)
            found.append(known[size, kind])
        return found

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


def why_not_on_device(systems: Sequence[System]) -> str | None:
    """Return why batches of some systems must be made on the host; None when the device can make them."""
    others = sorted({field.name for field in dataclasses.fields(Frames)} - _KEPT)
    if others:
        return f"frames have {', '.join(others)}, which the device does not keep"
    large = max(systems, key=lambda system: system.natoms)
    return f"{large.name} has {large.natoms} atoms" if large.natoms > MOST_ATOMS else None
