"""Numbers that frames of the same structure share, wherever their atoms are shifted or wrapped."""

from __future__ import annotations

import numpy as np

from deepmd_muon.data.frames import Frames

#: Copies differ by the rounding of float32 and of text, a random error of each coordinate [Å].
ROUNDING = 2e-5
# Keys change by up to this factor more than positions: types weigh 1 to 2, and cells are skewed.
_FACTOR = 4.0
# Coordinates of copies differ by less [Å].
_SAME_PLACE = 10.0 * ROUNDING


def structure_keys(frames: Frames) -> np.ndarray:
    """Return numbers that shifts of all atoms and moves by cell vectors do not change.

    With a cell, they are sizes of structure factors at small reciprocal vectors, with a weight for
    every type, and two numbers of the cell; without one, sums over the distances from the centre,
    and the sum of the weights. They are `(nframes, 6)` [Å].
    """
    weights = _weights(frames)
    keys = np.zeros((frames.nframes, 6))
    if frames.box is None:
        total = weights.sum(axis=1).clip(1e-300)
        centre = np.einsum("fa,fac->fc", weights, frames.coord) / total[:, None]
        distance = np.sqrt(((frames.coord - centre[:, None]) ** 2).sum(axis=-1))
        keys[:, 0] = (weights * distance).sum(axis=1)
        keys[:, 1] = (weights**2 * distance).sum(axis=1)
        keys[:, 2] = (weights * distance**2 / (1.0 + distance)).sum(axis=1)
        keys[:, 3] = (distance * (weights > 0)).max(axis=1, initial=0.0)
        keys[:, 4] = total
        return keys
    flat = np.abs(np.linalg.det(frames.box)) < 1e-9
    box = np.where(flat[:, None, None], np.eye(3), frames.box)
    length = np.cbrt(np.abs(np.linalg.det(box)))
    phase = 2.0 * np.pi * (frames.coord @ np.linalg.inv(box))
    wave = np.cos(phase) + 1j * np.sin(phase)  # (nframes, natoms, 3); complex exp is slower
    for axis in range(3):
        keys[:, axis] = np.abs((weights * wave[..., axis]).sum(axis=1))
    diagonal = weights * wave[..., 0] * wave[..., 1] * wave[..., 2]
    keys[:, 3] = np.abs(diagonal.sum(axis=1))
    keys[:, :4] *= length[:, None] / (2.0 * np.pi)
    metric = (box @ box.transpose(0, 2, 1)).reshape(-1, 9) / length[:, None]
    # Two sums of the nine numbers with weights that are always the same.
    keys[:, 4:] = metric @ np.random.default_rng(1).uniform(0.5, 1.0, (9, 2))
    return keys


def tolerance(natoms: int) -> float:
    """Return by how much the keys of copies may differ [Å]."""
    return float(_FACTOR * ROUNDING * np.sqrt(natoms))


def same_structure(frames: Frames) -> np.ndarray:
    """Return which frames are frame 0 after a shift of all atoms and moves by cell vectors.

    Symmetric copies may have the same keys, but are other structures.
    """
    same = (frames.atype == frames.atype[:1]).all(axis=1)
    displacements = frames.coord - frames.coord[:1]
    real = frames.atype[0] >= 0
    if frames.box is None:
        displacements = displacements - displacements[:, real].mean(axis=1, keepdims=True)
    else:
        same &= np.abs(frames.box - frames.box[:1]).max(axis=(1, 2)) < _SAME_PLACE
        fractions = displacements @ np.linalg.inv(frames.box[0])
        fractions -= fractions[:, real.argmax(), None].copy()
        displacements = (fractions - np.round(fractions)) @ frames.box[0]
    return np.asarray(
        same & (np.abs(displacements[:, real]).max(axis=(1, 2), initial=0.0) < _SAME_PLACE)
    )


def _weights(frames: Frames) -> np.ndarray:
    """Return a weight of every atom by its type, between 1 and 2; 0 for padding."""
    # The golden ratio spreads the weights of types evenly.
    weights = 1.0 + (frames.atype + 1) * 0.6180339887 % 1.0
    return np.asarray(np.where(frames.atype < 0, 0.0, weights))
