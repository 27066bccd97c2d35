"""Digests of the contents of systems, by which the processes of a run see that they read the same data."""

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
    share: float  # part of the frames that was read, the chance to see a difference in one of them; 1 for all


def content_digest(systems: Sequence[System], most_bytes: int = MOST_BYTES) -> ContentDigest:
    """Hash types, positions, cells and labels of systems, wherever the files lie and in whatever form.

    Of data larger than `most_bytes`, read all energies, and the first, the last and a random sample of the frames of
    each system, the same on every machine.
    """
    total = sum(system.nframes * _frame_bytes(system) for system in systems)
    share = min(1.0, most_bytes / max(1, total))
    return ContentDigest(
        tuple(_digest(system, share, number) for number, system in enumerate(systems)), share
    )


def _frame_bytes(system: System) -> int:
    """Bytes of positions, forces and what is small beside them."""
    return 8 * (6 * system.natoms + 19)


def _digest(system: System, share: float, seed: int) -> str:
    numbers = np.arange(system.nframes)
    if share == 1.0:
        return frames_digest(system, numbers)
    count = math.ceil(share * system.nframes)
    drawn = np.random.Generator(np.random.PCG64([0, seed])).choice(
        system.nframes, count, replace=False
    )
    numbers = np.unique([0, *drawn.tolist(), system.nframes - 1])
    return f"{system.fingerprint()} {frames_digest(system, numbers)}"  # all energies, at least


def frames_digest(system: System, numbers: np.ndarray) -> str:
    """Hash all that a system says of some of its frames, by their numbers."""
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
