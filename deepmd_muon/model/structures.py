"""A batch of structures in the model's form: atoms sorted by type, neighbours as flat indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from deepmd_muon.model.errors import ModelError

#: In place of a neighbour: an empty slot, and a neighbour that the descriptor excludes. To DPA-1 they differ:
#: deepmd-kit standardises empty rows of the environment, while rows of excluded pairs stay zero.
EMPTY, HIDDEN = -1, -2


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
    def fparam(self) -> np.ndarray | None:
        """Frame parameters, None without any."""

    @property
    def aparam(self) -> np.ndarray | None:
        """Atomic parameters, None without any."""


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
    """Atoms, cells and neighbours of `nframes` structures, prepared so that no step reads a number from the GPU.

    Real atoms (`atype >= 0`) of all frames form one list, stably sorted by type. Everything with a leading
    `nreal` follows that list, while atom numbers stored inside count `frame · natoms + atom`.

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
        Atom number of each neighbour `(nreal, nnei)`, int64, `EMPTY` for an empty slot; below 0 for any without.
    shift
        Cell translations S of each neighbour `(nreal, nnei, 3)`: r_ij = coord[j] + S·box − coord[i]; None without box.
    sections
        Widths of the column groups of `neighbor`, one per neighbour type (a single one when types are mixed).
    type_counts
        How many sorted atoms each type has, on the host.
    filled
        How many leading columns of each section hold all neighbours of a sorted atom `(len(sections), nreal)`,
        on the host.
    inner
        How many leading columns of a sorted atom lie within each shorter cut-off that the descriptor asked for
        `(ninner, nreal)`, on the host; in a batch of fixed shapes a bound, the same for all atoms.
    fparam
        Frame parameters `(nframes, numb_fparam)`, float64, or None.
    aparam
        Atomic parameters `(nframes, natoms, numb_aparam)`, float64, or None.
    """

    coord: torch.Tensor
    atype: torch.Tensor
    box: torch.Tensor | None
    order: torch.Tensor
    sorted_type: torch.Tensor
    sorted_frame: torch.Tensor
    neighbor: torch.Tensor
    shift: torch.Tensor | None
    sections: tuple[int, ...]
    type_counts: tuple[int, ...]
    filled: np.ndarray
    inner: np.ndarray
    fparam: torch.Tensor | None = None
    aparam: torch.Tensor | None = None

    @property
    def nframes(self) -> int:
        """Number of structures in the batch."""
        return self.coord.shape[0]

    @property
    def natoms(self) -> int:
        """Atoms in a frame, padding included."""
        return self.coord.shape[1]

    @property
    def neighbor_type(self) -> torch.Tensor:
        """Type of each neighbour `(nreal, nnei)`; that of the first atom in slots without."""
        return self.atype.reshape(-1)[self.neighbor.clamp(min=0)]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Structures:
        """Return the batch with every tensor on `device`."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)

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
            Index of each neighbour within its frame `(nframes, natoms, nnei)`, −1 for an empty slot; a step is
            fastest when the empty slots of a section come last.
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
            When a type lies outside the model's, or `sections` do not fit `neighbor`.
        """
        flat_type = np.asarray(atype, dtype=np.int64).reshape(-1)
        if sum(sections) != neighbor.shape[2]:
            raise ModelError(
                f"sections {tuple(sections)} do not add up to {neighbor.shape[2]} columns"
            )
        if flat_type.size and flat_type.max() >= ntypes:
            raise ModelError(
                f"atom type {flat_type.max()} found, but the model has {ntypes} types (0 … {ntypes - 1})"
            )
        if box is not None and shift is None:
            raise ModelError(
                "a periodic batch needs the cell translations `shift` of its neighbours"
            )
        host = _sort_by_type(coord, flat_type.reshape(atype.shape), box, neighbor, shift)
        for name, values in (("fparam", fparam), ("aparam", aparam)):
            host[name] = None if values is None else np.asarray(values, dtype=np.float64)
        tensors: dict[str, Any] = {
            name: None
            if value is None
            else torch.from_numpy(np.ascontiguousarray(value)).to(device)
            for name, value in host.items()
        }
        real = np.split(host["neighbor"] >= 0, np.cumsum(sections)[:-1], axis=1)
        type_counts = np.bincount(host["sorted_type"], minlength=ntypes).tolist()
        number = np.arange(1, neighbor.shape[2] + 1, dtype=np.int32)  # of 32 bits: half the memory
        last = [np.max(there * number[: there.shape[1]], axis=1, initial=0) for there in real]
        counts = np.zeros((0, len(host["order"])), dtype=np.int64)
        if inner is not None:
            counts = (
                inner.swapaxes(0, 1)
                .reshape(inner.shape[1], atype.size)[:, host["order"]]
                .astype(np.int64)
            )
        filled = np.array(last, dtype=np.int64)
        return cls(
            **tensors,
            sections=tuple(sections),
            type_counts=tuple(type_counts),
            filled=filled,
            inner=counts,
        )

    @classmethod
    def of(
        cls, frames: Frames, neighbors: Neighbors, ntypes: int, device: torch.device | str = "cpu"
    ) -> Structures:
        """Return the batch of frames and neighbour lists as the data package makes them; see `from_numpy`."""
        return cls.from_numpy(
            frames.coord,
            frames.atype,
            frames.box,
            neighbors.index,
            neighbors.shift,
            neighbors.sections,
            ntypes,
            device,
            neighbors.inner,
            frames.fparam,
            frames.aparam,
        )


def _sort_by_type(
    coord: np.ndarray,
    atype: np.ndarray,
    box: np.ndarray | None,
    neighbor: np.ndarray,
    shift: np.ndarray | None,
) -> dict[str, Any]:
    """Return the arrays behind the tensors of `Structures`: real atoms of all frames, sorted by type."""
    nframes, natoms = atype.shape
    flat_type = atype.reshape(-1)
    order = np.argsort(flat_type, kind="stable")
    order = order[np.count_nonzero(flat_type < 0) :]
    frame = order // natoms
    chosen = neighbor.reshape(nframes * natoms, -1).take(order, axis=0)
    numbers = chosen + (frame * natoms)[:, None]
    np.putmask(numbers, chosen < 0, -1)
    return {
        "coord": np.asarray(coord, dtype=np.float64),
        "atype": atype,
        "box": None if box is None else np.asarray(box, dtype=np.float64),
        "order": order,
        "sorted_type": flat_type[order],
        "sorted_frame": frame,
        "neighbor": numbers,
        "shift": None
        if box is None or shift is None
        else shift.reshape(nframes * natoms, -1, 3).take(order, axis=0),
    }
