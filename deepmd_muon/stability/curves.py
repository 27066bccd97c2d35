"""Faults of an energy along a path: holes, false minima, missing repulsion, kinks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

#: A path must cross a barrier of this many kT before a hole. At a rate of 1e13/s · exp(−10), a pair
#: crosses it every two nanoseconds. At two thirds of the temperature, where the potential is to be
#: used, the factor is exp(−15), and a pair crosses it every 300.
BARRIER = 10.0
# A minimum behind this many kT is only listed.
_SAFE = 30.0
# Shallower dips are noise of the potential [kT].
_DIP = 2.0


class Verdict(IntEnum):
    """How far a property can be trusted; the larger the worse."""

    holds = 0
    doubtful = 1
    fails = 2


@dataclass(frozen=True)
class Feature:
    """Something on a curve that physics does not have."""

    # What it is. A hole is a minimum that is deeper than the structures of the data.
    kind: Literal["hole", "false minimum", "no repulsion", "kink", "not finite"]
    distance: float  # where [Å]
    depth: float  # energy of the barrier above the minimum; of a kink, the jump [eV]
    barrier: float  # energy of the barrier above the lowest known point of the path [eV]
    verdict: Verdict  # how bad it is


@dataclass(frozen=True)
class _Path:
    """A path from the lowest point inside the data on; arrays are `(n,)`."""

    distance: np.ndarray  # [Å]
    energy: np.ndarray  # above the first point [eV]
    slope: np.ndarray  # dE/d(distance) [eV/Å]
    outside: np.ndarray  # which points have distances that the data do not hold
    barrier: np.ndarray  # highest energy up to each point [eV]
    kt: float  # [eV]


def features_of(
    distance: np.ndarray, energy: np.ndarray, slope: np.ndarray, outside: np.ndarray, kt: float
) -> list[Feature]:
    """Return the features of a path that begins at a structure of the data.

    Parameters
    ----------
    distance
        Distances of the pair `(n,)`, which fall or rise [Å].
    energy
        Energies `(n,)` [eV].
    slope
        dE/d(distance) by the forces `(n,)` [eV/Å].
    outside
        Which points have distances that the data do not hold `(n,)`.
    kt
        Thermal energy of the dynamics to come [eV].
    """
    wrong = ~(np.isfinite(energy) & np.isfinite(slope))
    if wrong.any():
        return [
            Feature(
                kind="not finite",
                distance=float(distance[wrong.argmax()]),
                depth=np.inf,
                barrier=0.0,
                verdict=Verdict.fails,
            )
        ]
    inside = np.flatnonzero(~outside)
    start = int(inside[energy[inside].argmin()]) if len(inside) else 0
    above = energy[start:] - energy[start]
    path = _Path(
        distance=distance[start:],
        energy=above,
        slope=slope[start:],
        outside=outside[start:],
        barrier=np.maximum.accumulate(above),
        kt=kt,
    )
    features = [*_minimum(path), *_kinks(path)]
    if not any(feature.kind == "hole" for feature in features):
        features += _missing_repulsion(path)
    return features


def _missing_repulsion(path: _Path) -> list[Feature]:
    """Return the feature of a path inwards that meets no barrier outside the data.

    Outwards, bonds may break at little cost.
    """
    inwards = len(path.distance) > 1 and path.distance[-1] < path.distance[0]
    barrier = float(path.barrier[-1])
    if not inwards or not path.outside.any() or barrier >= BARRIER * path.kt:
        return []
    return [
        Feature(
            kind="no repulsion",
            distance=float(path.distance[-1]),
            depth=barrier - float(path.energy[-1]),
            barrier=barrier,
            verdict=Verdict.fails,
        )
    ]


def _minimum(path: _Path) -> list[Feature]:
    """Return the minimum outside the data that is reached most easily, and the deepest of these."""
    energy = path.energy
    barrier = path.barrier
    kt = path.kt
    depth = barrier - energy
    padded = np.concatenate([[np.inf], energy, [np.inf]])
    is_minimum = (energy <= padded[:-2]) & (energy < padded[2:])
    minima = np.flatnonzero(is_minimum & path.outside & (depth > max(_DIP * kt, 0.05)))
    if not len(minima):
        return []

    def rank(k: int) -> tuple[bool, bool, float, float]:
        """Order minima behind low barriers first, then holes, then by barrier and depth."""
        return barrier[k] >= BARRIER * kt, energy[k] > 0.0, barrier[k], -depth[k]

    k = min(minima.tolist(), key=rank)
    is_hole = bool(energy[k] < 3.0 * kt)
    if barrier[k] < BARRIER * kt:
        verdict = Verdict.fails if is_hole else Verdict.doubtful
    elif is_hole and barrier[k] < _SAFE * kt:
        verdict = Verdict.doubtful
    else:
        verdict = Verdict.holds
    return [
        Feature(
            kind="hole" if is_hole else "false minimum",
            distance=float(path.distance[k]),
            depth=float(depth[k]),
            barrier=float(barrier[k]),
            verdict=verdict,
        )
    ]


def _kinks(path: _Path) -> list[Feature]:
    """Return the largest jump of the energy within reach that the forces do not explain."""
    if len(path.distance) < 2:
        return []
    kt = path.kt
    step = np.diff(path.distance)
    expected = 0.5 * step * (path.slope[1:] + path.slope[:-1])  # trapezoidal rule
    jump = np.abs(np.diff(path.energy) - expected)
    # The rule is wrong by step³·slope''/12.
    allowed = 0.25 * np.abs(step * np.diff(path.slope)) + 0.2 * kt
    # On the steep side of a hole points are too far apart to tell.
    reached = (path.barrier[:-1] < BARRIER * kt) & (path.energy[1:] > -3.0 * kt)
    jump = np.where((jump > allowed) & reached, jump, 0.0)
    k = int(jump.argmax())
    if not jump[k]:
        return []
    return [
        Feature(
            kind="kink",
            distance=float(path.distance[k + 1]),
            depth=float(jump[k]),
            barrier=float(path.barrier[k + 1]),
            verdict=Verdict.fails if jump[k] > 3.0 * kt else Verdict.doubtful,
        )
    ]
