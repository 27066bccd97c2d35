"""Draw the batches of a run in windows, and read their frames in threads.

A *window* is some batches whose frames are written to the device together: a thousand, or fewer if
many atoms have to be read for them. While steps use one window, threads read the frames of the next
two. After a window without frames to read, the next one is drawn when it is needed. Once all frames
of data that stay have been read, no window has any to read.

`ResidentBatches` calls `WindowReader`, in the thread that takes the steps:

    read_sample()   before the first step
    next()          when a window begins
    look_ahead()    after that: at once, or in the second step if this is the first window
    close()
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from deepmd_muon.data import DataLoader, Plan, worker_count
from deepmd_muon.train.batches.frame_chunks import Chunk, read_chunk
from deepmd_muon.train.batches.frame_store import FrameStore, Room

# Batches of a window, at most.
_AHEAD = 1024
# A window ends with the step after which at least so many atoms have to be read. The first window is
# small, so that a run begins soon.
_FIRST_ATOMS = 1 << 16
_WINDOW_ATOMS = 1 << 18
# Windows that are read ahead of the one in use.
_READ_AHEAD = 2
#: Threads that read. Most of their work holds the interpreter's lock, so more threads would only
#: delay each other and the thread that takes the steps.
READERS = 2
#: Cost of all data, in atoms, up to which they are read before the first step: a second or two.
AT_ONCE = 1 << 22
# Costs of a frame and of a system, in atoms: reading takes this much longer for each of them.
_FRAME_COST = 64
_SYSTEM_COST = 1024


class Window(NamedTuple):
    """Batches that are drawn together."""

    plans: list[Plan]
    batches: list[np.ndarray]  # numbers of the frames of each batch
    to_read: np.ndarray  # numbers of the frames that have to be read, rising (nframes,)
    chunks: list[Future[Chunk]]  # the frames `to_read`, cut into chunks that threads read


def most_batches(loader: DataLoader) -> int:
    """Return the most batches of a window: whole steps, because slots are written between steps."""
    per_step = loader.batches_per_step
    return max(1, _AHEAD // per_step) * per_step


def room_for_window(loader: DataLoader) -> Room:
    """Return the capacity of a store through which the frames of each window pass."""
    largest = max(system.natoms for system in loader.systems)
    # The last step of a window may exceed its atoms.
    atoms = _WINDOW_ATOMS + loader.batches_per_step * loader.most_frames * largest
    return Room(frames=min(atoms, most_batches(loader) * loader.most_frames), atoms=atoms)


class WindowReader:
    """Draws windows from a loader, and reads the frames that a store needs for them."""

    def __init__(self, loader: DataLoader, store: FrameStore) -> None:
        self._loader = loader
        self._store = store
        self._numbering = store.numbering
        self._most_batches = most_batches(loader)
        self._threads = ThreadPoolExecutor(
            min(READERS, worker_count()), thread_name_prefix="deepmd_muon-frames"
        )
        # Frames whose reading has begun, of data that stay.
        self._requested = np.zeros(self._numbering.nframes, dtype=bool)
        self._waiting: deque[Window] = deque()  # drawn, not yet in use
        self._any_drawn = False
        self._last_reads = False  # whether the window drawn last has frames to read

    def read_sample(self) -> list[Future[Chunk]]:
        """Begin to read small data whole, else a sample, which gives the shapes of most batches.

        The sample is the same in every run. Data that pass through are always sampled.
        """
        store = self._store
        natoms = self._numbering.natoms
        largest = int(natoms.max())
        n_read = self._numbering.nframes
        cost = n_read * (largest + _FRAME_COST) + len(natoms) * _SYSTEM_COST
        if not store.stays or cost > AT_ONCE:
            fitting = min(_FIRST_ATOMS, store.room.atoms) // largest
            n_read = min(n_read, max(1, fitting), store.room.frames)
        numbers = np.arange(n_read) * self._numbering.nframes // n_read  # evenly spread
        self._requested[numbers] = True
        return self._read(numbers)

    def next(self) -> Window:
        """Return the next window."""
        return self._waiting.popleft() if self._waiting else self._draw()

    def look_ahead(self) -> None:
        """Draw later windows, until one has nothing to read or `_READ_AHEAD` wait."""
        while self._last_reads and len(self._waiting) < _READ_AHEAD:
            self._waiting.append(self._draw())

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _draw(self) -> Window:
        """Draw the batches of a window, and begin to read their frames."""
        loader = self._loader
        most_atoms = _WINDOW_ATOMS if self._any_drawn else _FIRST_ATOMS
        self._any_drawn = True
        plans: list[Plan] = []
        batches: list[np.ndarray] = []
        to_read = [np.zeros(0, dtype=np.int64)]
        atoms = 0
        while len(plans) < self._most_batches and atoms < most_atoms:
            for _ in range(loader.batches_per_step):
                plan = loader.draw()
                first = self._numbering.first
                numbers = np.concatenate([first[k] + rows for k, rows in plan.parts])
                plans.append(plan)
                batches.append(numbers)
                # Data that pass through are read again for each window.
                new = numbers[~self._requested[numbers]] if self._store.stays else numbers
                self._requested[new] = True
                to_read.append(new)
                atoms += int(self._numbering.natoms_of(new).sum())
        unique = np.unique(np.concatenate(to_read))
        self._last_reads = bool(len(unique))
        return Window(plans, batches, to_read=unique, chunks=self._read(unique))

    def _read(self, numbers: np.ndarray) -> list[Future[Chunk]]:
        """Begin to read frames, whose numbers rise."""
        if not len(numbers):
            return []
        ntypes = self._loader.cache.ntypes
        return [
            self._threads.submit(read_chunk, self._numbering, chunk_numbers, ntypes)
            for chunk_numbers in self._numbering.cut(numbers)
        ]
