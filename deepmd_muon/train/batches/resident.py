"""Batches gathered inside a step from data that live on the device, their neighbours found there too.

A step reads the numbers of its frames from a table on the device, in the loader's own order, gathers positions and
labels, and finds the neighbours. The host draws the numbers of a thousand batches at once. Batches are padded to a few
shapes (`shapes`), each with one CUDA graph: the atoms of a batch are sorted by type, and the places of a type that no
atom takes belong to frames of their own, behind all others, that no label knows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import DataLoader, Plan, group_limits
from deepmd_muon.data.frames import LABELS
from deepmd_muon.data.sampling.loader import MIXED
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Sections
from deepmd_muon.model.neighbors.search import find_neighbors
from deepmd_muon.train.batches.batch import TrainingBatch
from deepmd_muon.train.batches.frame_store import FrameStore, store_bytes
from deepmd_muon.train.batches.shapes import Shape, Shapes
from deepmd_muon.train.batches.streamed import INNER_STEP, SECTION_STEP

log = logging.getLogger(__name__)

# Batches whose frame numbers are copied to the device at once.
_AHEAD = 1024
#: Atoms of a frame from which on the search on the device, which looks at all pairs, is slower than the host's.
MOST_ATOMS = 20_000


@dataclass(frozen=True)
class _Places:
    """Where the atoms of a batch of some shape stand; tensors that graphs read as long as they exist.

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

        form = sections._replace(widths=shape.widths)
        self._places = _Places(on_device(kind), on_device(rank), on_device(order), on_device(frame), form)
        self._filled = np.repeat(np.array(shape.widths)[:, None], slots, axis=1)
        self._inner = np.repeat(np.array(shape.inner, dtype=np.int64)[:, None], slots, axis=1)

    def __call__(self, numbers: Tensor, feed: ResidentFeed) -> TrainingBatch:
        """Return the batch of some frames `(frames of the shape,)`, int64; a missing one has the last number."""
        store, shape, places = self._store, self.shape, self._places
        kinds = store.kinds.index_select(0, numbers)
        counts = store.counts.index_select(0, kinds)
        natoms = counts.sum(1)
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
            order, frame = self._sorted(kinds, counts)
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
        structures = replace(structures, **self._parameters(numbers, source, real))
        labels = self._labels(numbers, source, real)
        return TrainingBatch(structures, labels, real, feed.system, feed.atoms, feed.present)

    def _of_atoms(self, values: Tensor, source: Tensor, real: Tensor | None, *, spare: bool = False) -> Tensor:
        """Return values of atoms `(frames, natoms, width)`, zero where there is none."""
        found = values.index_select(0, source).view(self.shape.frames, self.shape.natoms, -1)
        if real is None:
            return found
        found = torch.where(real.unsqueeze(2), found, 0.0)
        return torch.nn.functional.pad(found, (0, 0, 0, 0, 0, self._spare)) if spare else found

    def _parameters(self, numbers: Tensor, source: Tensor, real: Tensor | None) -> dict[str, Tensor]:
        """Return `fparam` and `aparam` of `Structures`, zero where there is no atom."""
        found, spare = {}, 0 if real is None else self._spare
        if self._store.fparam is not None:
            found["fparam"] = torch.nn.functional.pad(self._store.fparam.index_select(0, numbers), (0, 0, 0, spare))
        if self._store.aparam is not None:
            found["aparam"] = self._of_atoms(self._store.aparam, source, real, spare=True)
        return found

    def _sorted(self, kinds: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return place and frame of every sorted atom, `(nsorted,)`."""
        places, shape = self._places, self.shape
        ends = counts.cumsum(0)
        before = (places.rank >= ends.index_select(1, places.kind)).sum(0)
        inside = before < shape.frames
        here = before.clamp(max=shape.frames - 1)
        first = (self._store.starts.index_select(0, kinds) - ends + counts)[here, places.kind]
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
    """A batch that a step gathers from the frame numbers it finds in the table."""

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
    """Frame numbers of the next batches on the device, read one batch a step; `missing` fills a batch up."""

    def __init__(self, rows: int, width: int, missing: int, device: torch.device) -> None:
        self._missing = missing
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._table = torch.zeros(rows, width, dtype=torch.int64, device=device)

    def write(self, batches: Sequence[np.ndarray]) -> None:
        """Take the numbers of these batches, on the host."""
        values = np.full(self._table.shape, self._missing, dtype=np.int64)
        for row, numbers in enumerate(batches):
            values[row, : len(numbers)] = numbers
        self._table.copy_(torch.from_numpy(values))
        self._row.zero_()

    def read(self) -> Tensor:
        """Return the numbers of the present batch, and move on; on the device."""
        found = self._table.index_select(0, self._row)[0]
        self._row.add_(1)
        return found


class ResidentBatches:
    """Batches of a loader whose systems live on the device.

    Parameters
    ----------
    loader
        Its order of batches is kept; frames are read once, here.
    device
        Where the data go.
    """

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self._loader = loader
        self._store = FrameStore(loader.systems, loader.cache, device)
        cache = loader.cache
        self._limits = group_limits(cache.sel, cache.by_type, cache.ntypes)
        kinds = self._store.compositions
        most = max(kind.total for kind in kinds)
        total = int(min(self._limits.sum(), most)) if cache.sel is not None else most
        self._sections = Sections(cache.rcut, (), cache.by_type, total, most)
        wanted = np.array([self._columns(kind.neighbors, kind.total) for kind in kinds])
        if (wanted.max(0) > self._limits).any() or most > total:
            cache.dropped += 1
        self._widths = np.minimum(-(-wanted // SECTION_STEP) * SECTION_STEP, self._limits)
        bounds = np.array([count for _, count in cache.inner], dtype=np.int64)
        inner = np.array([np.minimum(kind.inner, bounds) for kind in kinds], dtype=np.int64)
        self._inner = -(-inner // INNER_STEP) * INNER_STEP
        self._shapes = Shapes()
        self._gatherings: dict[Shape, Gathering] = {}
        each = loader.batches_per_step
        self._rows = max(1, _AHEAD // each) * each  # the table is written between steps, not within one
        self._numbers = _NumberTable(self._rows, loader.most_frames, self._store.nframes, device)
        self._plans: deque[tuple[Plan, np.ndarray, Shape]] = deque()
        self._told = False

    def _columns(self, neighbors: np.ndarray, total: int) -> np.ndarray:
        return neighbors if self._loader.cache.by_type else np.array([total])

    def next(self) -> ResidentFeed:
        """Return the next batch."""
        if not self._plans:
            self._draw()
        plan, numbers, wanted = self._plans.popleft()
        self._loader.advance()
        shape = self._shapes.of(wanted)
        if shape not in self._gatherings:
            self._gatherings[shape] = Gathering(self._store, shape, self._sections)
        name = self._loader.systems[plan.parts[0][0]].name if len(plan.parts) == 1 else MIXED
        return ResidentFeed(self._gatherings[shape], name, self._numbers, numbers, self._store)

    def _draw(self) -> None:
        """Draw the next batches, and let the shapes hold them."""
        plans = [self._loader.draw() for _ in range(self._rows)]
        batches = [np.concatenate([n + self._store.offset[k] for k, n in plan.parts]) for plan in plans]
        wanted = [self._shape_of(numbers) for numbers in batches]
        self._shapes.learn(wanted)
        shapes = [self._shapes.of(shape) for shape in wanted]
        self._numbers.write(batches)
        self._plans.extend(zip(plans, batches, wanted, strict=True))
        if not self._told:
            self._told = True
            atoms = sum(sum(shape.counts) for shape in shapes)
            padding = 1.0 - sum(sum(shape.counts) for shape in wanted) / max(1, atoms)
            log.info(
                "training data live on the device: %d frames, batches of %d shapes, %.0f %% of their atoms are padding",
                self._store.nframes,
                len(set(shapes)),
                100.0 * padding,
            )

    def _shape_of(self, numbers: np.ndarray) -> Shape:
        """Return what a batch needs."""
        groups, often = np.unique(self._store.group[numbers], return_counts=True)
        kinds = [self._store.compositions[group] for group in groups]
        counts = sum(kind.counts * n for kind, n in zip(kinds, often, strict=True))
        present = {name: flags[numbers] for name, flags in self._store.present.items()}
        return Shape(
            len(numbers),
            int(self._store.natoms[numbers].max()),
            tuple(np.asarray(counts).tolist()),
            tuple(self._widths[groups].max(0).tolist()),
            tuple(self._inner[groups].max(0).tolist()),
            any(kind.periodic for kind in kinds),
            frozenset(name for name, flags in present.items() if flags.any()),
            frozenset(name for name, flags in present.items() if flags.any() and not flags.all()),
            int(groups[0]) if len(groups) == 1 else None,
        )

    def close(self) -> None:
        """Do nothing: no work goes on in the background."""


def why_not_resident(loader: DataLoader, budget: int) -> str | None:
    """Say why a loader's data should be streamed instead; None when they can live on the device.

    Parameters
    ----------
    loader
        Of the training data.
    budget
        Bytes that they may take.
    """
    large = max(loader.systems, key=lambda system: system.natoms)
    if large.natoms > MOST_ATOMS:
        return f"{large.name} has {large.natoms} atoms"
    cache = loader.cache
    if cache.sel is not None and sum(cache.sel) > MOST_NEIGHBORS:
        return f"sel keeps {sum(cache.sel)} neighbours"
    needed = store_bytes(loader.systems)
    return f"they take {needed / 2**20:.0f} MiB" if needed > budget else None
