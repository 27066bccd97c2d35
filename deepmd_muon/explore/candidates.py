"""Structures of a potential's own dynamics that may be labelled, and their choice.

A structure is a candidate if it leaves the training data, or if models disagree on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from deepmd_muon.data import Frames, System
from deepmd_muon.data.errors import NeighborError
from deepmd_muon.data.neighbors.lists import Pairs
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.integrators import Barostat, Langevin, Snapshot, simulate
from deepmd_muon.dynamics.systems import Systems, usual_time_step
from deepmd_muon.explore.fingerprints import Fingerprints
from deepmd_muon.explore.settings import DynamicsSettings, ExploreError, SelectionSettings
from deepmd_muon.infer.model_deviation import deviation_of_force
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.progress import tracked
from deepmd_muon.stability.angles import Angles
from deepmd_muon.stability.check import HOTTER, ROOM_TEMPERATURE, WIDER, data_temperature
from deepmd_muon.stability.coverage import Coverage, pairs_of
from deepmd_muon.stability.snapshots import Snapshots
from deepmd_muon.stability.trajectories import starts

# Candidates of one trajectory are thinned to this many times those that may be chosen from it.
_SPARE = 8


@dataclass(frozen=True)
class Candidate:
    """A structure that may be labelled."""

    frame: Frames  # one frame without labels
    copy: int  # number of the trajectory
    time: float  # in the trajectory [ps]
    temperature: float  # of the dynamics [K]
    pressure: float | None  # of the dynamics [GPa]; None with a constant cell
    strain: float  # of the start, relative
    closest: float  # smallest ratio of a distance to the shortest of its pair in the data
    deviation: float | None  # largest of a force between models [eV/Å]; None with one model
    reason: str  # why it is a candidate, in words
    fingerprint: np.ndarray  # see `Fingerprints`


@dataclass(frozen=True)
class TrainingData:
    """The training data, as candidates are compared with them."""

    systems: Sequence[System]
    coverage: Coverage
    angles: Angles
    fingerprints: Fingerprints


@dataclass
class Drawn:
    """The results of a round's dynamics."""

    candidates: list[Candidate] = field(default_factory=list)
    copies: int = 0  # number of trajectories
    blow_ups: int = 0  # trajectories that blew up
    departed: int = 0  # structures that left the data, also those that are no candidates
    followed: float = 0.0  # time over all trajectories [ps]


@dataclass(frozen=True)
class _Conditions:
    """Conditions of the copies, each `(ncopies,)`."""

    temperature: np.ndarray  # [K]
    pressure: np.ndarray  # [GPa]; NaN with a constant cell
    strain: np.ndarray


def draw(
    predictors: Sequence[Predictor],
    data: TrainingData,
    *,
    dynamics: DynamicsSettings,
    selection: SelectionSettings,
    seed: int,
) -> Drawn:
    """Run dynamics with the first model and collect candidates.

    Raises
    ------
    ExploreError
        When the model cannot follow a single structure of the data, as when its weights are
        spoiled.
    """
    predictor = predictors[0]
    conditions = _conditions(predictor, data.systems, dynamics)
    copies = len(conditions.temperature)
    kelvin = torch.tensor(conditions.temperature)
    start = Systems.from_frames(
        starts(data.systems, copies, seed), predictor.type_map, predictor.device
    )
    start = _strained(start, conditions.strain)
    start = start.heated(kelvin, torch.Generator().manual_seed(seed))
    elements = {predictor.type_map[k] for pair in data.coverage.pairs for k in pair}
    time_step = dynamics.time_step or usual_time_step(elements)
    barostat = None
    if dynamics.pressures:
        barostat = Barostat(torch.tensor(conditions.pressure), kelvin)
    steps = max(1, round(1000.0 * dynamics.time / time_step))
    run = simulate(
        ForceField(predictor),
        start,
        steps,
        time_step,
        thermostat=Langevin(kelvin, dynamics.friction),
        barostat=barostat,
        every=dynamics.every,
        seed=seed,
    )
    watch = _Watch(predictors, data, conditions, selection, time_step)
    for snapshot in tracked(run, f"dynamics of {copies} copies", steps // dynamics.every + 1):
        watch.add(snapshot)
        if len(watch.ended) == copies:
            break
    drawn = watch.drawn()
    if not drawn.followed:
        raise ExploreError(
            f"the model follows none of {copies} structures of the data ({watch.first_loss}): its "
            "weights may be spoiled; begin with another checkpoint (models)"
        )
    return drawn


def _strained(systems: Systems, strain: np.ndarray) -> Systems:
    scale = torch.tensor(1.0 + strain, device=systems.coord.device)[:, None, None]
    box = None if systems.box is None else scale * systems.box
    return replace(systems, coord=scale * systems.coord, box=box)


def _conditions(
    predictor: Predictor, systems: Sequence[System], dynamics: DynamicsSettings
) -> _Conditions:
    temperatures = dynamics.temperatures
    if not temperatures:
        kelvin = data_temperature(predictor, systems, "dynamics/temperatures") or ROOM_TEMPERATURE
        # Rounded to three digits, as users write temperatures.
        temperatures = (float(f"{kelvin:.3g}"), float(f"{HOTTER * kelvin:.3g}"))
    combinations = itertools.product(
        temperatures, dynamics.pressures or (math.nan,), dynamics.strains
    )
    rows = np.array(list(combinations), dtype=float).repeat(dynamics.copies, axis=0)
    return _Conditions(temperature=rows[:, 0], pressure=rows[:, 1], strain=rows[:, 2])


@dataclass
class _Collected:
    """Candidates of one trajectory; every `stride`-th structure that left the data is one."""

    candidates: list[Candidate] = field(default_factory=list)
    departed: int = 0
    stride: int = 1

    def add(self, candidate: Candidate, limit: int) -> None:
        """Add a candidate.

        Beyond the limit, drop every second one and take half as many from then on.
        """
        self.candidates.append(candidate)
        if len(self.candidates) > limit:
            del self.candidates[1::2]
            self.stride *= 2


class _Watch:
    """Examines snapshots and collects candidates.

    Attributes
    ----------
    ended
        Trajectories that blew up.
    first_loss
        Why the dynamics dropped the first structure, in words.
    """

    def __init__(
        self,
        predictors: Sequence[Predictor],
        data: TrainingData,
        conditions: _Conditions,
        selection: SelectionSettings,
        time_step: float,
    ) -> None:
        self.ended: set[int] = set()
        self.first_loss = ""
        self._predictors = predictors
        self._data = data
        self._snapshots = Snapshots(data.coverage, data.angles, predictors[0].device)
        self._conditions = conditions
        self._selection = selection
        self._time_step = time_step
        self._followed: dict[int, float] = {}  # time of each trajectory [ps]
        self._collected: dict[int, _Collected] = {}  # of each trajectory

    def add(self, snapshot: Snapshot) -> None:
        """Add the candidates of one snapshot."""
        time = snapshot.step * self._time_step / 1000.0
        for lost in snapshot.lost:
            self.first_loss = self.first_loss or lost.reason
            self.ended.add(lost.copy)
        copies = snapshot.copies.cpu().numpy()
        is_hot = snapshot.systems.hot(torch.tensor(self._conditions.temperature[copies]))
        self.ended |= set(copies[is_hot].tolist())
        runs_on = np.array([copy not in self.ended for copy in copies.tolist()], dtype=bool)
        rows = np.flatnonzero(runs_on).tolist()
        for copy in copies[rows].tolist():
            self._followed[copy] = time
        frames = snapshot.systems.frames()
        compared = self._snapshots.compare(snapshot.systems, runs_on)
        is_new = compared.departs | (compared.bends > WIDER)
        for row, deviation in zip(rows, self._deviations(frames, rows), strict=True):
            if is_new[row] or self._disagree(deviation):
                frame = frames.rows(slice(row, row + 1))
                self._examine(frame, int(copies[row]), time, deviation)

    def _deviations(self, frames: Frames, rows: list[int]) -> list[float | None]:
        """Return the largest deviation of a force in each structure [eV/Å]; None with one model."""
        if len(self._predictors) < 2 or not rows:
            return [None] * len(rows)
        structures = frames.rows(rows)
        forces = [predictor.evaluate(structures).force for predictor in self._predictors]
        return [float(x) for x in deviation_of_force(np.stack(forces)).max(axis=1)]

    def _disagree(self, deviation: float | None) -> bool:
        return deviation is not None and deviation > self._selection.deviation_low

    def _examine(self, frame: Frames, copy: int, time: float, deviation: float | None) -> None:
        """Collect a structure, unless it is too far from the data or its trajectory has many."""
        coverage = self._data.coverage
        selection = self._selection
        try:
            pairs = pairs_of(frame, 0, coverage.rcut)
        except NeighborError:
            return
        closest, k = coverage.compare(pairs)
        bend = self._bend(frame, pairs)
        if k is None and not bend and not self._disagree(deviation):
            return  # by rounding, the device placed a distance in another bin
        collected = self._collected.setdefault(copy, _Collected())
        collected.departed += 1
        if closest < selection.closest:
            return
        if deviation is not None and not deviation < selection.deviation_high:  # also if NaN
            return
        if (collected.departed - 1) % collected.stride:
            return
        if k is not None:
            types = sorted((int(pairs.types[pairs.i[k]]), int(pairs.types[pairs.j[k]])))
            reason = f"{coverage.name(types)} at {pairs.distance[k]:.2f} Å"
        else:
            reason = bend or f"models deviate by {deviation or 0.0:.2f} eV/Å"
        pressure = float(self._conditions.pressure[copy])
        candidate = Candidate(
            frame=frame,
            copy=copy,
            time=time,
            temperature=float(self._conditions.temperature[copy]),
            pressure=None if math.isnan(pressure) else pressure,
            strain=float(self._conditions.strain[copy]),
            closest=closest,
            deviation=deviation,
            reason=reason,
            fingerprint=self._data.fingerprints.of(pairs),
        )
        collected.add(candidate, limit=_SPARE * selection.per_copy)

    def _bend(self, frame: Frames, pairs: Pairs) -> str:
        """Return in words the angle that is farthest beyond those of the data.

        Empty if the data hold all angles.
        """
        angles = self._data.angles
        reached = angles.empty()
        reached.add(frame, 0, pairs)
        excess = angles.excess(reached)
        if excess is None or excess[0] <= WIDER:
            return ""
        _, triple = excess
        low = reached.smallest[triple]
        high = reached.largest[triple]
        below = angles.smallest[triple] - low
        above = high - angles.largest[triple]
        return f"{angles.name(triple)} at {low if below >= above else high:.0f}°"

    def drawn(self) -> Drawn:
        """Return the results."""
        collected = [self._collected[copy] for copy in sorted(self._collected)]
        return Drawn(
            candidates=list(itertools.chain.from_iterable(x.candidates for x in collected)),
            copies=len(self._conditions.temperature),
            blow_ups=len(self.ended),
            departed=sum(x.departed for x in collected),
            followed=sum(self._followed.values()),
        )


def choose(
    candidates: Sequence[Candidate], known: np.ndarray, settings: SelectionSettings
) -> list[Candidate]:
    """Choose candidates by farthest-point sampling.

    Each is the one farthest from the data and from those chosen before. `known` are fingerprints of
    training frames `(nframes, nbins)`.
    """
    if not candidates:
        return []
    vectors = np.stack([candidate.fingerprint for candidate in candidates])
    # To the nearest frame of the data or chosen candidate; −inf for candidates that cannot be
    # chosen.
    distance = np.full(len(candidates), np.inf)
    for row in known:
        np.minimum(distance, np.linalg.norm(vectors - row, axis=1), out=distance)
    copies = np.array([candidate.copy for candidate in candidates])
    numbers: list[int] = []
    while len(numbers) < settings.frames and np.isfinite(distance).any():
        k = int(np.where(np.isfinite(distance), distance, -1.0).argmax())
        if distance[k] <= 0.0:
            break
        numbers.append(k)
        np.minimum(distance, np.linalg.norm(vectors - vectors[k], axis=1), out=distance)
        distance[k] = -np.inf
        if (copies[numbers] == copies[k]).sum() >= settings.per_copy:
            distance[copies == copies[k]] = -np.inf
    return [candidates[k] for k in numbers]
