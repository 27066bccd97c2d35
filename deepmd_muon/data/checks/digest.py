"""Digests of the contents of systems: processes of a run compare them before they train."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np

from deepmd_muon.data.system import System

#: Values of all systems [bytes] up to which every frame counts: a few tenths of a second.
MOST_BYTES = 64 << 20
# Frames read at once [bytes].
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class ContentDigest:
    """The result of `content_digest`."""

    systems: tuple[str, ...]  # hash of each system
    # Part of the frames that was read: the chance to see a difference in one frame.
    share: float


def content_digest(systems: Sequence[System], most_bytes: int = MOST_BYTES) -> ContentDigest:
    """Hash types, positions, cells and labels of systems; places and formats of files do not count.

    Of data larger than `most_bytes`, read all energies, and the first, the last and a random sample
    of the frames of each system, the same on every machine.
    """
    total = sum(system.nframes * _frame_bytes(system) for system in systems)
    share = min(1.0, most_bytes / max(1, total))
    digests = (_digest(system, share, number) for number, system in enumerate(systems))
    return ContentDigest(tuple(digests), share)


def _frame_bytes(system: System) -> int:
    """Return the bytes of positions, forces, cell, energy and virial."""
    return 8 * (6 * system.natoms + 19)


def _digest(system: System, share: float, seed: int) -> str:
    if share == 1.0:
        return frames_digest(system, np.arange(system.nframes))
    count = math.ceil(share * system.nframes)
    stream = np.random.Generator(np.random.PCG64([0, seed]))  # the same on every machine
    drawn = stream.choice(system.nframes, count, replace=False)
    numbers = np.unique([0, *drawn.tolist(), system.nframes - 1])
    # The fingerprint holds all energies.
    return f"{system.fingerprint()} {frames_digest(system, numbers)}"


def frames_digest(system: System, numbers: np.ndarray) -> str:
    """Hash some frames of a system, by their numbers, with all labels."""
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
    for first in range(0, len(numbers), step):
        frames = system.frames(numbers[first : first + step])
        for field in dataclasses.fields(frames):
            values = getattr(frames, field.name)
            digest.update(f"{field.name} {values is not None} ".encode())
            if values is not None:
                digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
