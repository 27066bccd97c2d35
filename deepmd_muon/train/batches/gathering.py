"""Gather a batch inside a step, by operations of the device alone, from the frames stored there.

The slots of the frames come from a table on the device. The atoms of a batch are sorted by type, and unused
places of a type belong to extra frames behind all others, which have no labels.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data.frames import LABELS, PARAMETERS
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import Atoms, Sections
from deepmd_muon.model.neighbors.search import find_neighbors
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.frame_store import FrameStore
from deepmd_muon.train.batches.shapes import Shape


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
            return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(
                store.coord.device
            )

        form = sections._replace(widths=shape.widths, capacity=shape.capacity)
        self._places = _Places(
            on_device(kind), on_device(rank), on_device(order), on_device(frame), form
        )
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
            atype = torch.nn.functional.pad(
                torch.where(real, atype, -1), (0, 0, 0, self._spare), value=-1
            )
            order, frame = self._sorted(store.counts.index_select(0, numbers).long())
        cells = store.cells.select(numbers) if shape.periodic and store.cells is not None else None
        atoms = Atoms(coord.view(-1, 3), atype.flatten(), natoms, shape.natoms, cells)
        neighbor, shift = find_neighbors(atoms, order, frame, places.sections)
        box = (
            None
            if cells is None
            else torch.nn.functional.pad(cells.box, (0, 0, 0, 0, 0, self._spare))
        )
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
        return TrainingBatch(structures, labels, real, feed.origin, feed.atoms, feed.present)

    def _of_atoms(
        self, values: Tensor, source: Tensor, real: Tensor | None, *, spare: bool = False
    ) -> Tensor:
        """Return values of atoms `(frames, natoms, width)`, zero where there is none."""
        found = values.index_select(0, source).view(self.shape.frames, self.shape.natoms, -1)
        if real is None:
            return found
        found = torch.where(real.unsqueeze(2), found, 0.0)
        return torch.nn.functional.pad(found, (0, 0, 0, 0, 0, self._spare)) if spare else found

    def _parameters(
        self, numbers: Tensor, source: Tensor, real: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
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

    def _labels(
        self, numbers: Tensor, source: Tensor, real: Tensor | None
    ) -> dict[str, Tensor | None]:
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
        return {
            name: self.store.present[name][self.numbers] if name in self.store.present else none
            for name in LABELS
        }

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        present = self.present
        return float(self.atoms[np.logical_and.reduce([present[name] for name in needed])].sum())

    def read(self) -> TrainingBatch:
        """Gather the batch."""
        return self.gathering(self.table.read()[: self.gathering.shape.frames], self)


class SlotTable:
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
