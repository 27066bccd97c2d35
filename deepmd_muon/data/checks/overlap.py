"""Frames that validation data share with training data."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.checks.structures import structure_keys, tolerance
from deepmd_muon.data.system import System

# Validation frames compared, atoms of training frames read, and systems opened, at most: a second or two of work.
_FRAMES, _ATOMS, _SYSTEMS = 512, 4_000_000, 8192
_CHUNK_ATOMS = 1 << 18


def shared_frames(train: Sequence[System], valid: Sequence[System]) -> tuple[int, int]:
    """Count validation frames that are also training frames, among those looked at, and the frames looked at.

    Systems at the same place share all frames. Of the others, a sample of validation frames is compared with all
    training frames, in large data with a sample of these: a frame whose atoms are shifted together, or moved by cell
    vectors, is the same frame. All have the same type map.
    """
    places = {_place(system) for system in train}
    same = sum(system.nframes for system in valid if _place(system) in places)
    others = [system for system in valid if _place(system) not in places]
    if not others:
        return same, same
    known = _keys(train, _ATOMS / sum(system.nframes * system.natoms for system in train))
    known = known[np.argsort(known[:, 0])]
    found = looked = 0
    share = _FRAMES / sum(system.nframes for system in others)
    for system in others[:: -(-len(others) // _FRAMES)]:
        keys = _keys([system], share)
        within = tolerance(system.natoms)
        first, end = (
            np.searchsorted(known[:, 0], keys[:, 0] + shift) for shift in (-within, within)
        )
        near = (
            np.abs(known[a:b] - row) <= within for a, b, row in zip(first, end, keys, strict=True)
        )
        found += sum(bool(rows.all(axis=1).any()) for rows in near)
        looked += len(keys)
    return same + found, same + looked


def _place(system: System) -> tuple[str, str]:
    path, _, group = system.name.partition("#")
    return os.path.realpath(path), group.strip("/")


def _keys(systems: Sequence[System], share: float) -> np.ndarray:
    """Return the structure keys of a share of the frames of systems, evenly spread, (nframes, 6)."""
    parts = []
    for system in systems[:: -(-len(systems) // _SYSTEMS)]:
        count = max(1, round(min(1.0, share) * system.nframes))
        chosen = np.unique(np.linspace(0, system.nframes - 1, count).astype(int))
        step = max(1, _CHUNK_ATOMS // system.natoms)
        blocks = (chosen[first : first + step] for first in range(0, len(chosen), step))
        parts += [structure_keys(system.structures(block)) for block in blocks]
    return np.concatenate(parts)
