"""Frames of training systems in tensors on a device: positions, cells, types and labels.

The tensors of frames have a row, the *slot*, for each frame. The tensors of atoms have adjacent
rows for the atoms of a frame, from `first_atom` on. The last slot is the *missing frame*, which has
no atoms and no labels.

Data that fit their budget *stay*: the slot of a frame is its number. For example, with 2 frames of
3 atoms in the first system and 1 frame of 2 atoms in the second one:

| frame | number, slot | rows of its atoms |
|---|---|---|
| 0 of system 0 | 0 | 0 to 2 |
| 1 of system 0 | 1 | 3 to 5 |
| 0 of system 1 | 2 | 6 to 7 |
| missing | slot 3 | none |

Other data *pass through*: each `take` fills the slots from 0 on, and replaces all earlier frames.

`take` uploads frames and counts their neighbours on a separate stream, so that steps which have
been launched go on meanwhile. It records the counts in `FrameSizes`. Steps read the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import NeighborCache, NeighborError, System
from deepmd_muon.data.frames import ATOM_LABELS, FRAME_LABELS, LABELS
from deepmd_muon.data.neighbors.lists import SAME_PLACE
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Cells
from deepmd_muon.train.batches.batch import upload
from deepmd_muon.train.batches.frame_chunks import (
    PER_ATOM,
    Chunk,
    Numbering,
    starts_of,
    within_frames,
)
from deepmd_muon.train.batches.frame_sizes import FrameSizes, NeighborCounts
from deepmd_muon.train.batches.neighbor_counts import count_in_chunk


class Room(NamedTuple):
    """Capacity of a store, without the missing frame."""

    frames: int
    atoms: int  # rows of the tensors of atoms


class FrameStore:
    """Frames of some systems on a device, the atoms of each sorted by type.

    Parameters
    ----------
    systems
        Where the frames are.
    cache
        Says which neighbours the model reads, for their counts; an attribute, too.
    device
        Device of the tensors; an attribute, too.
    room
        Capacity for data that pass through; None for data that stay.

    Attributes
    ----------
    stays
        Whether all frames stay once they have been taken.
    numbering
        The numbers of the frames.
    sizes
        What the host knows of the frames that have been taken.
    room
        Capacity, without the missing frame.
    missing
        Slot of the missing frame.
    tensors
        By name. Of every slot `(slots, …)`: "first_atom", "natoms", "type_counts" (atoms of each
        type), labels and "fparam" of frames, and "has_…" for every label, also those of atoms. Of
        every atom `(atoms, …)`: the names in `PER_ATOM`. Labels and parameters are float64 with an
        axis of values, only those that the data have. Zeros if a frame lacks a label.
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
        self.cache = cache
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.stays = room is None
        self.numbering = Numbering(systems)
        # First atom of each system, if all data are kept.
        atoms_of_systems = np.diff(self.numbering.first) * self.numbering.natoms
        self._first_atom = np.concatenate([[0], atoms_of_systems.cumsum()])
        if room is None:
            room = Room(frames=self.numbering.nframes, atoms=int(self._first_atom[-1]))
        self.room = room
        self.missing = room.frames
        labels = {name for system in systems for name in system.labels}
        label_names = [name for name in LABELS if name in labels]
        self.sizes = FrameSizes(self.numbering.nframes, label_names, cache)

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        slots = room.frames + 1
        self.tensors = {
            "coord": zeros(room.atoms, 3),
            "atype": zeros(room.atoms, dtype=torch.int64),
            "first_atom": zeros(slots, dtype=torch.int64),
            "natoms": zeros(slots, dtype=torch.int64),
            "type_counts": zeros(slots, cache.ntypes, dtype=torch.int32),
        }
        for name in label_names:
            self.tensors[f"has_{name}"] = zeros(slots, dtype=torch.bool)
        parameters = systems[0].parameters  # all systems have the same
        widths = {name: LABELS[name] for name in label_names}
        widths |= {"fparam": parameters.of_frame, "aparam": parameters.of_atom}
        for name, width in widths.items():
            if width:
                self.tensors[name] = zeros(room.atoms if name in PER_ATOM else slots, width)
        self.cells: Cells | None = None
        if any(system.pbc for system in systems):
            self.cells = Cells(
                box=zeros(slots, 3, 3),
                inverse=zeros(slots, 3, 3),
                reach=zeros(slots, 3),
                images=torch.ones(slots, 3, dtype=torch.int32, device=device),
            )

    def select(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of a tensor: slots of a tensor of frames, else atoms."""
        return self.tensors[name].index_select(0, rows)

    def slots_of(self, numbers: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """Return the slots of frames; `taken` has all numbers of the last `take`, rising."""
        return numbers if self.stays else np.searchsorted(taken, numbers)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Write frames into their slots; data that pass through replace all that was there.

        The frames of one call must fit into `room`.

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
                systems = self.numbering.systems_of(chunk.numbers)
                rows_in_system = chunk.numbers - self.numbering.first[systems]
                natoms = self.numbering.natoms[systems]
                first_atom = self._first_atom[systems] + rows_in_system * natoms
            else:
                slots = next_slot + np.arange(len(chunk.numbers))
                first_atom = next_atom + starts_of(chunk.natoms)
                next_slot += len(slots)
                next_atom += int(chunk.natoms.sum())
            with self._side_stream():  # launched steps go on meanwhile
                rows_of_frames = upload(slots, self.device)
                rows_of_atoms = upload(
                    np.repeat(first_atom, chunk.natoms) + within_frames(chunk.natoms), self.device
                )
                values = self._upload(chunk, first_atom)
                cells = self._prepare_cells(values)
                packed = Atoms(
                    coord=values["coord"],
                    atype=values["atype"],
                    counts=values["natoms"],
                    natoms=0,  # not used: packed frames have no common number of places
                    cells=cells,
                )
                counts = count_in_chunk(chunk.natoms, packed, self.cache)
            self._check(chunk, counts)
            self.sizes.record(chunk, counts)
            # On the current stream, so after launched steps, which may read the old values.
            for name, target in self.tensors.items():
                rows = rows_of_atoms if name in PER_ATOM else rows_of_frames
                target.index_copy_(0, self._used_now(rows), self._used_now(values[name]))
            if self.cells is not None and cells is not None:
                for target, new in zip(self.cells, cells, strict=True):
                    target.index_copy_(0, self._used_now(rows_of_frames), self._used_now(new))

    def _upload(self, chunk: Chunk, first_atom: np.ndarray) -> dict[str, Tensor]:
        """Copy the values of a chunk to the device, for all tensors of the store."""
        values = {name: upload(array, self.device) for name, array in chunk.values.items()}
        values["first_atom"] = upload(first_atom, self.device)
        for name, target in self.tensors.items():  # on the side stream: only their shapes are read
            if name not in values:  # a frame without the label may replace one with it
                n_rows = len(values["coord"] if name in PER_ATOM else values["natoms"])
                values[name] = target.new_zeros(n_rows, *target.shape[1:])
        return values

    def _prepare_cells(self, values: dict[str, Tensor]) -> Cells | None:
        """Return the cells of a chunk, as `Cells.of_some`; None if no system is periodic."""
        if self.cells is None:
            return None
        box = values.get("box")
        if box is None:
            box = values["coord"].new_zeros(len(values["natoms"]), 3, 3)
        return Cells.of_some(box, self.cache.rcut)

    def _check(self, chunk: Chunk, counts: NeighborCounts) -> None:
        """Raise NeighborError if atoms are at one place or have too many neighbours.

        The host decides about atoms at one place, in the first frame that seems to have them.
        """
        same_place = np.flatnonzero(counts.nearest_squared < SAME_PLACE**2)
        if len(same_place):
            self._check_on_host(int(chunk.numbers[same_place[0]]))
        of_all_types = counts.max_neighbors[:, self.cache.ntypes]
        if of_all_types.max(initial=0) > MOST_NEIGHBORS:
            worst = int(of_all_types.argmax())
            system, row = self.numbering.locate(int(chunk.numbers[worst]))
            raise NeighborError(
                f"{system.name}: frame {row}: an atom has {of_all_types[worst]} neighbours within "
                f"{self.cache.rcut} Å, and training on a GPU takes at most {MOST_NEIGHBORS}: "
                "look at the positions, or use a smaller cut-off"
            )

    def _check_on_host(self, number: int) -> None:
        """Search a suspicious frame's neighbours on the host, whose errors name the fault.

        If the host accepts the frame (a flat cell with few images), the run goes on with it.
        """
        system, row = self.numbering.locate(number)
        self.cache.frame(system, row, frames=system.frames([row]), row=0)

    # ----- two streams ---------------------------------------------------------------------------

    def copy_to(self, target: Tensor, values: np.ndarray) -> None:
        """Copy an array of the host to a tensor after all launched work, without waiting for it."""
        with self._side_stream():
            uploaded = upload(values, self.device)
        target.copy_(self._used_now(uploaded))

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


def store_bytes(systems: Sequence[System], ntypes: int) -> int:
    """Return the memory of all frames of systems in a `FrameStore` without `room` [bytes]."""
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
