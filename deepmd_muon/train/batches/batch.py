"""Convert batches of arrays to the tensors that model and loss read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Batch
from deepmd_muon.data.frames import LABELS
from deepmd_muon.data.sampling.loader import Origin
from deepmd_muon.loss import ComparedAtoms
from deepmd_muon.model import Structures

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """Structures with their labels, on the device.

    Attributes
    ----------
    structures
        The input of the model.
    labels
        `energy (nframes,)` [eV], `force (nframes, natoms, 3)` [eV/Å], `virial (nframes, 9)` [eV],
        `atom_ener (nframes, natoms)` [eV], `atom_pref (nframes, natoms)`; None if a system has
        none. If only some frames have a label, `find_energy` etc. (nframes,) tell which; the others
        hold 0.
    mask
        True for real atoms `(nframes, natoms)`; None when no frame carries padding.
    origin
        Where the frames come from.
    atoms
        Real atoms of each frame, on the host.
    present
        Which frames have each label, on the host.
    """

    structures: Structures
    labels: dict[str, Tensor | None]
    mask: Tensor | None
    origin: Origin
    atoms: np.ndarray
    present: dict[str, np.ndarray]

    def labelled_atoms(self, needed: Collection[str]) -> float:
        """Return the number of atoms in frames that have all these labels."""
        has_all = np.logical_and.reduce([self.present[name] for name in needed])
        return float(self.atoms[has_all].sum())

    def compared(self, prediction: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the predictions without those for the last frames, which only pad the batch."""
        if self.mask is None or len(self.mask) == self.structures.nframes:
            return prediction
        return {name: values[: len(self.mask)] for name, values in prediction.items()}

    def compared_atoms(self, counted_types: Tensor | None) -> ComparedAtoms:
        """Return the atoms of the frames that `compared` keeps; real ones of types with energy count.

        `counted_types` is `EnergyModel.counted`.
        """
        atype = self.structures.atype
        if self.mask is not None:
            atype = atype[: len(self.mask)]
        if counted_types is None:
            return ComparedAtoms(atype, self.mask)
        mask = (atype >= 0) & (counted_types[atype.clamp(min=0)] > 0.0)
        return ComparedAtoms(atype, mask)


def to_device(batch: Batch, ntypes: int, device: torch.device) -> TrainingBatch:
    """Convert frames and neighbours of a batch to tensors, for a model of `ntypes` types."""
    frames = batch.frames
    labels: dict[str, Tensor | None] = {}
    present = {name: frames.present(name) for name in LABELS}
    for name, has_label in present.items():
        values = getattr(frames, name)
        if values is not None and not has_label.all():
            values = np.nan_to_num(values)
            labels[f"find_{name}"] = upload(has_label, device)
        labels[name] = None if values is None else upload(values, device)
    real = frames.atype >= 0
    return TrainingBatch(
        structures=Structures.of(frames, batch.neighbors, ntypes, device),
        labels=labels,
        mask=None if real.all() else upload(real, device),
        origin=batch.origin,
        atoms=real.sum(1),
        present=present,
    )


def upload(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device, on its current stream."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def map_tensors(content: T, function: Callable[[Tensor], Tensor]) -> T:
    """Apply a function to every tensor in nested dataclasses, dicts, lists and tuples."""

    def convert(node: Any) -> Any:
        if isinstance(node, Tensor):
            return function(node)
        if dataclasses.is_dataclass(node) and not isinstance(node, type):
            names = [field.name for field in dataclasses.fields(node)]
            return dataclasses.replace(
                node, **{name: convert(getattr(node, name)) for name in names}
            )
        if isinstance(node, dict):
            return {key: convert(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)(map(convert, node))
        return node

    converted: T = convert(content)
    return converted


def tensors_of(content: Any) -> list[Tensor]:
    """Return the tensors in nested dataclasses, dicts, lists and tuples, in a fixed order."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(content, collect)
    return tensors
