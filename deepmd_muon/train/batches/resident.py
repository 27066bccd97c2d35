"""Batches that steps gather from frames on the device.

| | host, between steps | device, in a step |
|---|---|---|
| once a window (`windows`) | write frames into the store, and the slots of all batches into a table | |
| once a batch, `ResidentBatches.next` | choose the shape that the batch is padded to | |
| once a batch, `ResidentFeed.read` | | take the next row of the table, and gather these slots |

A batch is padded to one of a few shapes (`shapes`). A step is recorded in a CUDA graph for each
shape, or tuple of shapes if it accumulates batches. Each replay of a graph gathers another batch,
because reading the table advances its row.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import DataLoader, Plan, System
from deepmd_muon.data.frames import LABELS, PARAMETERS, Frames
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.frame_store import FrameStore, store_bytes
from deepmd_muon.train.batches.gathering import Gathering
from deepmd_muon.train.batches.shapes import Shape, Shapes
from deepmd_muon.train.batches.windows import WindowReader, most_batches, room_for_window

log = logging.getLogger(__name__)

#: For frames with more atoms, the device's search over all pairs is slower than the host's search.
MOST_ATOMS = 20_000
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


class _DrawnBatch(NamedTuple):
    """A batch of the current window before it is handed out."""

    plan: Plan
    numbers: np.ndarray  # of its frames
    needed: Shape  # the least shape that holds it


class ResidentBatches:
    """Batches of a loader gathered on the device, in the loader's order.

    Data whose frames need at most `budget` [bytes] of the device's memory are read once and stay.
    Larger ones pass through, window after window.
    """

    def __init__(self, loader: DataLoader, device: torch.device, budget: int = 1 << 30) -> None:
        self._loader = loader
        stays = store_bytes(loader.systems, loader.cache.ntypes) <= budget
        self._store = FrameStore(
            loader.systems, loader.cache, device, room=None if stays else room_for_window(loader)
        )
        self._table = SlotTable(most_batches(loader), loader.most_frames, self._store)
        self._shapes = Shapes()
        self._gatherings: dict[Shape, Gathering] = {}
        self._windows = WindowReader(loader, self._store)
        self._drawn: deque[_DrawnBatch] = deque()  # of the current window, not yet handed out
        self._n_handed_out = 0
        # This records the sizes of frames. Where data pass through, it keeps only them: each `take`
        # replaces the frames of the one before.
        for chunk in self._windows.read_sample():
            self._store.take([chunk.result()])

    def next(self) -> ResidentFeed:
        """Return the next batch."""
        if not self._drawn:
            self._begin_window()
        elif self._n_handed_out == self._loader.batches_per_step:
            # The second step begins. Drawing further windows earlier would have delayed the first.
            self._windows.look_ahead()
        drawn = self._drawn.popleft()
        self._n_handed_out += 1
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
        self._windows.close()

    def _begin_window(self) -> None:
        """Begin the next window: write its frames and slots, and add shapes for its batches."""
        is_first = not self._n_handed_out
        window = self._windows.next()
        self._store.take([chunk.result() for chunk in window.chunks])
        self._store.sizes.note_cut_lists()
        needed = self._store.sizes.shapes_of(window.batches)
        self._shapes.learn(needed)
        self._table.write(
            [self._store.slots_of(numbers, window.to_read) for numbers in window.batches]
        )
        self._drawn.extend(map(_DrawnBatch, window.plans, window.batches, needed))
        has_second_step = len(self._drawn) > self._loader.batches_per_step
        if not (is_first and has_second_step):  # else `next` does it in the second step
            self._windows.look_ahead()
        if is_first:
            self._log(needed)

    def _log(self, needed: Sequence[Shape]) -> None:
        """Log the shapes of the first window, and how much of their sorted atoms is padding."""
        shapes = [self._shapes.of(shape) for shape in needed]
        padded_atoms = sum(sum(shape.counts) for shape in shapes)
        atoms = sum(sum(shape.counts) for shape in needed)
        log.info(
            "training data %s the device: %d frames, batches of %d shapes, "
            "%.0f %% of their atoms are padding",
            "live on" if self._store.stays else "pass through",
            self._store.numbering.nframes,
            len(set(shapes)),
            100.0 * (1.0 - atoms / max(1, padded_atoms)),
        )


@dataclass(frozen=True)
class ResidentFeed:
    """A batch that a step gathers from the slots it reads in the table."""

    gathering: Gathering
    origin: Origin
    table: SlotTable
    numbers: np.ndarray  # of its frames, for the sizes that the host knows
    store: FrameStore

    @property
    def layout(self) -> Hashable:
        """The shape: batches of one shape share a graph."""
        return self.gathering.shape

    @property
    def atoms(self) -> np.ndarray:
        """Real atoms of each frame, on the host."""
        natoms: np.ndarray = self.store.sizes.natoms[self.numbers]
        return natoms

    @property
    def present(self) -> dict[str, np.ndarray]:
        """Which frames have each label, on the host."""
        none = np.zeros(len(self.numbers), dtype=bool)
        stored = self.store.sizes.present
        return {name: stored[name][self.numbers] if name in stored else none for name in LABELS}

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        present = self.present
        return float(self.atoms[np.logical_and.reduce([present[name] for name in needed])].sum())

    def read(self) -> TrainingBatch:
        """Gather the batch, and advance the row of the table on the device.

        So every feed must be read once, in order, before the next window begins: by this call, or
        by the replay of a graph that has recorded one. Recording does not run it.
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
        """Write the slots of a window's batches, and go back to the first row.

        Steps that have been launched read the old slots.
        """
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
