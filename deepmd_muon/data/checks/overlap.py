"""Frames that validation data share with training data."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.checks.structures import structure_keys, tolerance
from deepmd_muon.data.frames import evenly_spread
from deepmd_muon.data.system import System

# Validation frames that are compared, atoms of training frames and systems that are read, at most:
# a second or two of work.
_FRAMES = 512
_ATOMS = 4_000_000
_SYSTEMS = 8192
# Atoms of frames that are read at a time.
_CHUNK_ATOMS = 1 << 18


def shared_frames(train: Sequence[System], valid: Sequence[System]) -> tuple[int, int]:
    """Count validation frames that are also training frames.

    Systems at the same place share all frames. Of other systems, a sample of validation frames is
    compared with all training frames, in large data with a sample of them. A frame with atoms that
    are shifted together, or moved by cell vectors, is the same frame. All systems have the same
    type map.

    Returns
    -------
    tuple
        The shared frames among the validation frames that were compared, and the number compared.
    """
    places = {_place(system) for system in train}
    at_same_place = sum(system.nframes for system in valid if _place(system) in places)
    elsewhere = [system for system in valid if _place(system) not in places]
    if not elsewhere:
        return at_same_place, at_same_place
    train_atoms = sum(system.nframes * system.natoms for system in train)
    train_keys = _keys(train, _ATOMS / train_atoms)
    train_keys = train_keys[np.argsort(train_keys[:, 0])]

    n_shared = 0
    n_compared = 0
    share = _FRAMES / sum(system.nframes for system in elsewhere)
    for system in elsewhere[:: -(-len(elsewhere) // _FRAMES)]:
        keys = _keys([system], share)
        within = tolerance(system.natoms)
        # Candidates of each key are the training keys in order from `begin` to `end`.
        begins = np.searchsorted(train_keys[:, 0], keys[:, 0] - within)
        ends = np.searchsorted(train_keys[:, 0], keys[:, 0] + within)
        for key, begin, end in zip(keys, begins, ends, strict=True):
            near = np.abs(train_keys[begin:end] - key) <= within
            n_shared += bool(near.all(axis=1).any())
        n_compared += len(keys)
    return at_same_place + n_shared, at_same_place + n_compared


def _place(system: System) -> tuple[str, str]:
    """Return the real path of a system and its group in that file."""
    path, _, group = system.name.partition("#")
    return os.path.realpath(path), group.strip("/")


def _keys(systems: Sequence[System], share: float) -> np.ndarray:
    """Return the structure keys of a share of the frames, evenly spread, (nframes, 6)."""
    keys = []
    for system in systems[:: -(-len(systems) // _SYSTEMS)]:
        count = max(1, round(min(1.0, share) * system.nframes))
        numbers = evenly_spread(system.nframes, count)
        chunks = system.chunks(_CHUNK_ATOMS, numbers)
        keys += [structure_keys(system.structures(chunk)) for chunk in chunks]
    return np.concatenate(keys)
