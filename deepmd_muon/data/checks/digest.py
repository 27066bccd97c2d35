"""Digests of the contents of systems: the processes of a run compare them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.frames import ATOM_PARAMETERS, FRAME_PARAMETERS
from deepmd_muon.data.system import System

MOST_BYTES = 64 << 20
"""Every frame counts of data up to this size: a few tenths of a second [bytes]."""
_CHUNK = 1 << 22  # frames read at once [bytes]


@dataclasses.dataclass(frozen=True)
class ContentDigest:
    """The result of `content_digest`."""

    systems: tuple[str, ...]  # hash of each system
    # Part of the frames that was read, 1 for all: the chance to see a difference in one of them.
    share: float


def content_digest(systems: Sequence[System], most_bytes: int = MOST_BYTES) -> ContentDigest:
    """Hash types, positions, cells and labels of systems, wherever the files are and in any form.

    Of data larger than `most_bytes`, read all energies, and the first, the last and a random sample
    of the frames of each system, the same on every machine.
    """
    total = sum(system.nframes * _frame_bytes(system) for system in systems)
    share = min(1.0, most_bytes / max(1, total))
    digests = [_digest(system, share, seed) for seed, system in enumerate(systems)]
    return ContentDigest(tuple(digests), share)


def _frame_bytes(system: System) -> int:
    """Bytes of positions, forces and the small arrays of a frame."""
    return 8 * (6 * system.natoms + 19)


def _digest(system: System, share: float, seed: int) -> str:
    if share == 1.0:
        return frames_digest(system, np.arange(system.nframes))
    count = math.ceil(share * system.nframes)
    rng = np.random.Generator(np.random.PCG64([0, seed]))
    sample = rng.choice(system.nframes, count, replace=False)
    numbers = np.unique([0, *sample.tolist(), system.nframes - 1])
    return f"{fingerprint(system)} {frames_digest(system, numbers)}"


def fingerprint(system: System) -> str:
    """Hash types, shapes, all energies and frame parameters, the first and the last structure.

    The place and the form of the files do not count.
    """
    facts = (system.natoms, system.nframes, system.type_map, system.pbc, system.mixed)
    digest = hashlib.sha256(repr(facts).encode())
    all_frames = np.arange(system.nframes)
    both_ends = all_frames[[0, -1]]
    structures = system.structures(both_ends)
    arrays = [
        None if system.mixed else structures.atype[0],
        structures.coord,
        structures.box,
        system.read_label("energy", all_frames),
        *(system.read_parameter(name, all_frames) for name in FRAME_PARAMETERS),
        *(system.read_parameter(name, both_ends) for name in ATOM_PARAMETERS),
    ]
    for array in arrays:
        if array is not None:
            digest.update(array.tobytes())
    return digest.hexdigest()


def frames_digest(system: System, numbers: np.ndarray) -> str:
    """Hash everything that a system says about some of its frames, by their numbers."""
    facts = (
        system.natoms,
        system.nframes,
        system.type_map,
        system.pbc,
        system.mixed,
        sorted(system.labels),
    )
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    step = max(1, _CHUNK // _frame_bytes(system))
    for start in range(0, len(numbers), step):
        frames = system.frames(numbers[start : start + step])
        for field in dataclasses.fields(frames):
            values = getattr(frames, field.name)
            digest.update(f"{field.name} {values is not None} ".encode())
            if values is not None:
                digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
