"""A batch of structures in the model's form: atoms sorted by type, neighbours as flat indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.model.errors import ModelError

# Two values in place of a neighbour. To DPA-1 they differ: deepmd-kit standardises empty rows of
# the environment, while rows of excluded pairs stay zero.
EMPTY = -1  # an empty slot
HIDDEN = -2  # a neighbour that the descriptor excludes


class Frames(Protocol):
    """Frames as arrays; shapes as in `Structures.from_numpy`."""

    @property
    def coord(self) -> np.ndarray:
        """Positions [Å]."""

    @property
    def atype(self) -> np.ndarray:
        """Types, −1 for padding."""

    @property
    def box(self) -> np.ndarray | None:
        """Cell vectors [Å], None without periodicity."""

    @property
    def frame_parameters(self) -> np.ndarray | None:
        """All parameters of frames, None without any."""

    @property
    def atomic_parameters(self) -> np.ndarray | None:
        """All parameters of atoms, None without any."""


class Neighbors(Protocol):
    """Neighbour lists of frames; shapes as in `Structures.from_numpy`."""

    @property
    def index(self) -> np.ndarray:
        """Neighbour's atom in its frame, −1 for an empty slot."""

    @property
    def shift(self) -> np.ndarray:
        """Cell translations."""

    @property
    def sections(self) -> tuple[int, ...]:
        """Column widths."""

    @property
    def inner(self) -> np.ndarray:
        """Leading columns within shorter cut-offs."""


@dataclass(frozen=True)
class Structures:
    """Atoms, cells and neighbours of `nframes` structures.

    They are prepared so that no step reads a number from the GPU. Real atoms (`atype >= 0`) of all
    frames form one list, stably sorted by type. Everything with a leading `nreal` follows that
    list, while atom numbers stored inside count `frame · natoms + atom`.

    Attributes
    ----------
    coord
        Positions `(nframes, natoms, 3)` [Å], float64.
    atype
        Types `(nframes, natoms)`, int64, −1 for padding.
    box
        Cell vectors as rows `(nframes, 3, 3)` [Å], or None without periodicity.
    order
        Atom number of every sorted atom `(nreal,)`, int64.
    sorted_type, sorted_frame
        Type and frame of every sorted atom `(nreal,)`, int64.
    neighbor
        Atom number of each neighbour `(nreal, nnei)`, int64, `EMPTY` for an empty slot; below 0 for
        any without.
    shift
        Cell translations S of each neighbour `(nreal, nnei, 3)`: r_ij = coord[j] + S·box −
        coord[i]; None without box.
    sections
        Widths of the column groups of `neighbor`, one per neighbour type (a single one when types
        are mixed).
    type_counts
        How many sorted atoms each type has, on the host.
    filled
        How many leading columns of each section hold all neighbours of a sorted atom
        `(len(sections), nreal)`, on the host.
    inner
        How many leading columns of a sorted atom lie within each shorter cut-off that the
        descriptor asked for `(ninner, nreal)`, on the host; in a batch of fixed shapes a bound, the
        same for all atoms.
    fparam
        Frame parameters `(nframes, numb_fparam)`, float64, or None. Charge and spin are two more
        columns, if the model embeds them.
    aparam
        Atomic parameters `(nframes, natoms, numb_aparam)`, float64, or None. The spin vector is three
        more columns, if the model reads it.
    edges
        Bound of the neighbours of all atoms together, on the host; None for the number of slots.
    """

    coord: Tensor
    atype: Tensor
    box: Tensor | None
    order: Tensor
    sorted_type: Tensor
    sorted_frame: Tensor
    neighbor: Tensor
    shift: Tensor | None
    sections: tuple[int, ...]
    type_counts: tuple[int, ...]
    filled: np.ndarray
    inner: np.ndarray
    fparam: Tensor | None = None
    aparam: Tensor | None = None
    edges: int | None = None

    @property
    def nframes(self) -> int:
        """Number of structures in the batch."""
        return self.coord.shape[0]

    @property
    def natoms(self) -> int:
        """Atoms in a frame, padding included."""
        return self.coord.shape[1]

    @property
    def neighbor_type(self) -> Tensor:
        """Type of each neighbour `(nreal, nnei)`; any type in slots without."""
        # The first atom, whose type empty slots get, may be padding.
        return self.atype.clamp(min=0).reshape(-1)[self.neighbor.clamp(min=0)]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Structures:
        """Return the batch with every tensor on `device`."""
        on_device: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                on_device[field.name] = value.to(device, non_blocking=non_blocking)
        return replace(self, **on_device)

    @classmethod
    def from_numpy(  # noqa: PLR0913 - the arrays of a batch
        cls,
        coord: np.ndarray,
        atype: np.ndarray,
        box: np.ndarray | None,
        neighbor: np.ndarray,
        shift: np.ndarray | None,
        sections: Sequence[int],
        ntypes: int,
        device: torch.device | str = "cpu",
        inner: np.ndarray | None = None,
        fparam: np.ndarray | None = None,
        aparam: np.ndarray | None = None,
    ) -> Structures:
        """Sort and flatten a batch given frame by frame.

        Parameters
        ----------
        coord, atype, box, sections, fparam, aparam
            As in `Structures`; padding atoms, of type −1, must come without neighbours.
        neighbor
            Index of each neighbour within its frame `(nframes, natoms, nnei)`, −1 for an empty
            slot; a step is fastest when the empty slots of a section come last.
        shift
            Cell translations `(nframes, natoms, nnei, 3)`, integers; ignored without `box`.
        ntypes
            Number of types of the model.
        device
            Device of the tensors.
        inner
            How many leading columns lie within each shorter cut-off `(nframes, ninner, natoms)`.

        Raises
        ------
        ModelError
            If the model does not have a type, or `sections` do not fit `neighbor`.
        """
        atype = np.asarray(atype, dtype=np.int64)
        if sum(sections) != neighbor.shape[2]:
            raise ModelError(
                f"sections {tuple(sections)} do not add up to {neighbor.shape[2]} columns"
            )
        if atype.size and atype.max() >= ntypes:
            raise ModelError(
                f"atom type {atype.max()} found, but the model has {ntypes} types "
                f"(0 … {ntypes - 1})"
            )
        if box is not None and shift is None:
            raise ModelError(
                "a periodic batch needs the cell translations `shift` of its neighbours"
            )
        nframes, natoms = atype.shape
        order = _order_by_type(atype)
        sorted_type = atype.reshape(-1)[order]
        sorted_frame = order // natoms
        # From the index in a frame to frame·natoms + index.
        index_in_frame = neighbor.reshape(nframes * natoms, -1).take(order, axis=0)
        flat_neighbor = index_in_frame + (sorted_frame * natoms)[:, None]
        np.putmask(flat_neighbor, index_in_frame < 0, EMPTY)
        sorted_shift = None
        if box is not None and shift is not None:
            sorted_shift = shift.reshape(nframes * natoms, -1, 3).take(order, axis=0)
        sorted_inner = np.zeros((0, len(order)), dtype=np.int64)
        if inner is not None:
            # (nframes, ninner, natoms) → (ninner, nframes·natoms) → (ninner, nreal)
            flat_inner = inner.swapaxes(0, 1).reshape(inner.shape[1], atype.size)
            sorted_inner = flat_inner[:, order].astype(np.int64)

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)

        def float64_tensor(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else tensor(np.asarray(values, dtype=np.float64))

        return cls(
            coord=tensor(np.asarray(coord, dtype=np.float64)),
            atype=tensor(atype),
            box=float64_tensor(box),
            order=tensor(order),
            sorted_type=tensor(sorted_type),
            sorted_frame=tensor(sorted_frame),
            neighbor=tensor(flat_neighbor),
            shift=None if sorted_shift is None else tensor(sorted_shift),
            sections=tuple(sections),
            type_counts=tuple(np.bincount(sorted_type, minlength=ntypes).tolist()),
            filled=_count_filled(flat_neighbor, sections),
            inner=sorted_inner,
            fparam=float64_tensor(fparam),
            aparam=float64_tensor(aparam),
        )

    @classmethod
    def of(
        cls, frames: Frames, neighbors: Neighbors, ntypes: int, device: torch.device | str = "cpu"
    ) -> Structures:
        """Return the batch of the frames and neighbour lists of `deepmd_muon.data`."""
        return cls.from_numpy(
            frames.coord,
            frames.atype,
            frames.box,
            neighbor=neighbors.index,
            shift=neighbors.shift,
            sections=neighbors.sections,
            ntypes=ntypes,
            device=device,
            inner=neighbors.inner,
            fparam=frames.frame_parameters,
            aparam=frames.atomic_parameters,
        )


def _order_by_type(atype: np.ndarray) -> np.ndarray:
    """Return the numbers of all real atoms, stably sorted by type; padding comes first and goes."""
    flat_type = atype.reshape(-1)
    order = np.argsort(flat_type, kind="stable")
    return order[np.count_nonzero(flat_type < 0) :]


def _count_filled(neighbor: np.ndarray, sections: Sequence[int]) -> np.ndarray:
    """Return `Structures.filled`: in each section, the last column with a neighbour, from 1."""
    is_real = np.split(neighbor >= 0, np.cumsum(sections)[:-1], axis=1)
    column = np.arange(1, neighbor.shape[1] + 1, dtype=np.int32)  # 32 bits: half the memory
    last = [np.max(real * column[: real.shape[1]], axis=1, initial=0) for real in is_real]
    return np.array(last, dtype=np.int64)
