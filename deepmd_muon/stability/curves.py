"""Faults of an energy along a path: holes, false minima, missing repulsion, kinks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np

#: A path must cross a barrier of this many kT before a hole. By 1e13/s · exp(−10) a pair crosses it every two
#: nanoseconds; at two thirds of the temperature, where the potential is to be used, by exp(−15) every 300.
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


def features_of(
    distance: np.ndarray, energy: np.ndarray, slope: np.ndarray, outside: np.ndarray, kt: float
) -> list[Feature]:
    """Return the features of a path that begins at a structure of the data; arrays are `(n,)`.

    Distances of the pair fall or rise [Å]. `slope` is dE/d(distance) by the forces [eV/Å]. `outside` says which points
    have distances that the data do not hold. `kt` is the thermal energy of the dynamics to come [eV].
    """
    wrong = ~(np.isfinite(energy) & np.isfinite(slope))
    if wrong.any():
        return [Feature("not finite", float(distance[wrong.argmax()]), np.inf, 0.0, Verdict.fails)]
    inside = np.flatnonzero(~outside)
    begin = int(inside[energy[inside].argmin()]) if len(inside) else 0
    above = energy[begin:] - energy[begin]
    where, beyond = distance[begin:], outside[begin:]
    barrier = np.maximum.accumulate(above)
    found = [
        *_minimum(where, above, barrier, beyond, kt),
        *_kinks(where, above, slope[begin:], barrier, kt),
    ]
    # Inwards alone: outwards bonds may break at little cost.
    inwards = len(where) > 1 and where[-1] < where[0] and bool(beyond.any())
    if (
        inwards
        and barrier[-1] < BARRIER * kt
        and not any(feature.kind == "hole" for feature in found)
    ):
        highest = float(barrier[-1])
        found.append(
            Feature(
                "no repulsion", float(where[-1]), highest - float(above[-1]), highest, Verdict.fails
            )
        )
    return found


def _minimum(
    distance: np.ndarray, energy: np.ndarray, barrier: np.ndarray, outside: np.ndarray, kt: float
) -> list[Feature]:
    """Return the minimum outside the data that is reached most easily, and the deepest of these."""
    depth = barrier - energy
    padded = np.concatenate([[np.inf], energy, [np.inf]])
    lowest = (
        (energy <= padded[:-2]) & (energy < padded[2:]) & outside & (depth > max(_DIP * kt, 0.05))
    )
    if not lowest.any():
        return []
    steps = np.flatnonzero(lowest)
    # Holes first, then the smallest barrier, then the depth.
    k = min(
        steps, key=lambda k: (barrier[k] >= BARRIER * kt, energy[k] > 0.0, barrier[k], -depth[k])
    )
    hole = bool(energy[k] < 3.0 * kt)
    if barrier[k] < BARRIER * kt:
        verdict = Verdict.fails if hole else Verdict.doubtful
    else:
        verdict = Verdict.doubtful if hole and barrier[k] < _SAFE * kt else Verdict.holds
    kind: Literal["hole", "false minimum"] = "hole" if hole else "false minimum"
    return [Feature(kind, float(distance[k]), float(depth[k]), float(barrier[k]), verdict)]


def _kinks(
    distance: np.ndarray, energy: np.ndarray, slope: np.ndarray, barrier: np.ndarray, kt: float
) -> list[Feature]:
    """Return the largest jump of the energy that the forces do not explain, where dynamics comes."""
    if len(distance) < 2:
        return []
    step = np.diff(distance)
    # The trapezoidal rule is wrong by step³·slope''/12.
    jump = np.abs(np.diff(energy) - 0.5 * step * (slope[1:] + slope[:-1]))
    allowed = 0.25 * np.abs(step * np.diff(slope)) + 0.2 * kt
    # On the steep side of a hole points are too far apart to tell.
    reached = (barrier[:-1] < BARRIER * kt) & (energy[1:] > -3.0 * kt)
    jump = np.where((jump > allowed) & reached, jump, 0.0)
    k = int(jump.argmax())
    if not jump[k]:
        return []
    verdict = Verdict.fails if jump[k] > 3.0 * kt else Verdict.doubtful
    return [Feature("kink", float(distance[k + 1]), float(jump[k]), float(barrier[k + 1]), verdict)]
