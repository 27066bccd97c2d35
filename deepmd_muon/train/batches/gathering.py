"""Gather batches of one shape from a frame store, by operations of the device alone.

A batch is padded to its shape. Each of its frames has `shape.natoms` *places*, its atoms first. The
*sorted atoms* list the places of all atoms by type, and in a type by frame: `shape.counts` of each
type. Frames without atoms and labels fill a shape:

- the *missing frame*, the last slot of the store, where a batch has fewer frames than its shape;
- *spare frames*, which only the batch has, after all others. Their places fill the sorted atoms
  where a batch has fewer atoms of a type than its shape.

For example, a shape of 2 frames, 3 places, and 4 atoms of type A and 2 of type B. The frames A A B
and A B have one A less:

    frame     |    0    |    1    | 2 spare | 3 spare  |
    place     | 0  1  2 | 3  4  5 | 6  7  8 | 9 10 11  |
    type      | A  A  B | A  B  − | −  −  − | −  −  −  |

    sorted atom     0  1  2  3  4  5
    type            A  A  A  A  B  B
    number in type  0  1  2  3  0  1
    place           0  1  3  9  2  4
    frame           0  0  1  3  0  1

The place of sorted atom k, if the batch lacks it, is the k-th place of the spare frames.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import group_limits
from deepmd_muon.data.frames import LABELS
from deepmd_muon.model import Structures
from deepmd_muon.model.neighbors.atoms import MOST_NEIGHBORS, Atoms, Sections
from deepmd_muon.model.neighbors.search import find_neighbors
from deepmd_muon.train.batches.batch import upload
from deepmd_muon.train.batches.frame_chunks import PER_ATOM
from deepmd_muon.train.batches.frame_store import FrameStore
from deepmd_muon.train.batches.shapes import Shape


class RealAtoms(NamedTuple):
    """Which places of a batch have an atom, and its row in the store's tensors of atoms."""

    natoms: Tensor  # atoms of each frame (frames,)
    source: Tensor  # row in the store of each place (frames · natoms,); 0 without an atom
    mask: Tensor | None  # (frames, natoms); None if all places have an atom


class Gathering:
    """Makes batches of one shape from a store.

    All frames of a shape with a `composition` have the same atoms and fill it. Their sorted atoms
    are known from the shape, and there are no spare frames. Otherwise they are computed for each
    batch.

    CUDA graphs read its tensors, so it must live as long as they do.

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

        # Of each sorted atom (nsorted,): its type, and its number in this type.
        nsorted = sum(shape.counts)
        atom_type = np.repeat(np.arange(len(shape.counts)), shape.counts)
        type_starts = np.cumsum((0, *shape.counts[:-1]))
        number = np.arange(nsorted) - np.repeat(type_starts, shape.counts)
        # And its place and frame. Without a composition, these are spare ones, and `_sort` replaces
        # them for the atoms that a batch has.
        if shape.composition is not None:
            self._n_spare = 0
            per_frame = np.array(shape.counts) // max(1, shape.frames)  # atoms of each type
            n_of_type = np.maximum(per_frame[atom_type], 1)
            frame = number // n_of_type
            first_of_type = (np.cumsum(per_frame) - per_frame)[atom_type]  # in a frame
            place = frame * shape.natoms + first_of_type + number % n_of_type
        else:
            self._n_spare = -(-nsorted // max(1, shape.natoms))
            place = shape.frames * shape.natoms + np.arange(nsorted)
            frame = place // max(1, shape.natoms)
        self._type = upload(atom_type.astype(np.int64), store.device)
        self._number = upload(number.astype(np.int64), store.device)
        self._place = upload(place.astype(np.int64), store.device)
        self._frame = upload(frame.astype(np.int64), store.device)

        # On the host, `Structures.filled` (nsections, nsorted) and `inner` (ninner, nsorted).
        # Bounds of the shape take the place of each atom's counts: lists are full up to their
        # width, and within the shorter cut-offs up to `Shape.inner`.
        self._filled = np.repeat(np.array(shape.widths)[:, None], nsorted, axis=1)
        self._inner = np.repeat(np.array(shape.inner, dtype=np.int64)[:, None], nsorted, axis=1)

    def find_real(self, slots: Tensor) -> RealAtoms:
        """Return which places have an atom, for frames in slots `(frames of the shape,)`, int64."""
        natoms = self._store.select("natoms", slots)
        place_in_frame = torch.arange(self.shape.natoms, device=slots.device)
        first_atom = self._store.select("first_atom", slots)
        source = first_atom.unsqueeze(1) + place_in_frame  # (frames, natoms)
        if self.shape.composition is not None:
            return RealAtoms(natoms, source.flatten(), mask=None)
        mask = place_in_frame < natoms.unsqueeze(1)
        return RealAtoms(natoms, torch.where(mask, source, 0).flatten(), mask)

    def structures(self, slots: Tensor, real: RealAtoms) -> Structures:
        """Return the structures of the batch, spare frames included, with their neighbours."""
        store = self._store
        shape = self.shape
        coord = self._with_spare(self._of_atoms("coord", real))
        atype = store.select("atype", real.source).view(shape.frames, shape.natoms)
        place = self._place
        frame = self._frame
        if real.mask is not None:
            atype = torch.where(real.mask, atype, -1)
            atype = torch.nn.functional.pad(atype, (0, 0, 0, self._n_spare), value=-1)
            place, frame = self._sort(store.select("type_counts", slots).long())
        cells = None
        box = None
        if shape.periodic and store.cells is not None:
            cells = store.cells.select(slots)
            box = self._with_spare(cells.box)
        atoms = Atoms(coord.view(-1, 3), atype.flatten(), real.natoms, shape.natoms, cells)
        neighbor, shift = find_neighbors(atoms, place, frame, self._sections)
        fparam = None
        if "fparam" in store.tensors:
            fparam = self._with_spare(store.select("fparam", slots))
        aparam = None
        if "aparam" in store.tensors:
            aparam = self._with_spare(self._of_atoms("aparam", real))
        return Structures(
            atype=atype,
            order=place,
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

    def labels(self, slots: Tensor, real: RealAtoms) -> dict[str, Tensor | None]:
        """Return the labels as `TrainingBatch` has them, without spare frames.

        Labels that no frame has are left out. `find_` tells which frames have a partial one.
        """
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

    def _of_atoms(self, name: str, real: RealAtoms) -> Tensor:
        """Return values of atoms `(frames, natoms, width)`; zeros in places without an atom."""
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
        """Return place and frame of every sorted atom `(nsorted,)`, without a composition.

        `counts` are the atoms of each type `(frames, ntypes)`.
        """
        # Atoms of each type up to the end of each frame. In the example of this file, A: 2, 3.
        ends = counts.cumsum(0)  # (frames, ntypes)
        # The frame of atom r of a type follows the frames at whose end there are at most r.
        n_before = (self._number >= ends.index_select(1, self._type)).sum(0)  # (nsorted,)
        is_atom = n_before < self.shape.frames
        frame = n_before.clamp(max=self.shape.frames - 1)
        # In its frame, atom r is at: first place of the type, counts.cumsum(1) − counts, plus r,
        # minus the atoms of the type in earlier frames, ends − counts. The counts cancel.
        first_less_earlier = (counts.cumsum(1) - ends)[frame, self._type]
        place = frame * self.shape.natoms + first_less_earlier + self._number
        return torch.where(is_atom, place, self._place), torch.where(is_atom, frame, self._frame)
