"""Choose structures that are far from the training data and from each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepmd_muon.explore.candidates import Candidate
from deepmd_muon.explore.settings import SelectionSettings


def choose(candidates: Sequence[Candidate], known: np.ndarray, settings: SelectionSettings) -> list[Candidate]:
    """Return candidates by farthest-point sampling: each is the one farthest from the data and those chosen before.

    Parameters
    ----------
    candidates
        Structures with fingerprints.
    known
        Fingerprints of training frames `(nframes, nbins)`.
    settings
        How many in all, and from one trajectory.
    """
    if not candidates:
        return []
    vectors = np.stack([candidate.fingerprint for candidate in candidates])
    distance = np.full(len(candidates), np.inf)
    for row in known:
        np.minimum(distance, np.linalg.norm(vectors - row, axis=1), out=distance)
    copies = np.array([candidate.copy for candidate in candidates])
    chosen: list[int] = []
    while len(chosen) < settings.frames and np.isfinite(distance).any():
        k = int(np.where(np.isfinite(distance), distance, -1.0).argmax())
        if distance[k] <= 0.0:
            break
        chosen.append(k)
        np.minimum(distance, np.linalg.norm(vectors - vectors[k], axis=1), out=distance)
        distance[k] = -np.inf
        if (copies[chosen] == copies[k]).sum() >= settings.per_copy:
            distance[copies == copies[k]] = -np.inf
    return [candidates[k] for k in chosen]
