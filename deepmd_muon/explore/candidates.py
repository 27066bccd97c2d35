"""Structures of a potential's own dynamics that leave the training data, or on which models disagree; their choice."""

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
from deepmd_muon.stability.angles import Angles
from deepmd_muon.stability.check import HOTTER, ROOM_TEMPERATURE, WIDER, data_temperature
from deepmd_muon.stability.coverage import Coverage, pairs_of
from deepmd_muon.stability.snapshots import Snapshots
from deepmd_muon.stability.trajectories import starts

# Candidates of one trajectory are thinned to this many times those that may be chosen from it.
_KEPT = 8


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
    deviation: (
        float | None
    )  # largest deviation of a force between models [eV/Å]; None with one model
    reason: str  # why it is a candidate, in words
    fingerprint: np.ndarray  # see `Fingerprints`


@dataclass
class Drawn:
    """The results of a round's dynamics: candidates, trajectories, those that blew up, time followed in all [ps]."""

    candidates: list[Candidate] = field(default_factory=list)
    copies: int = 0
    blow_ups: int = 0
    departed: int = 0
    followed: float = 0.0


@dataclass(frozen=True)
class _Conditions:
    """Of each copy `(ncopies,)`: temperature [K], pressure [GPa] or NaN, strain."""

    temperature: np.ndarray
    pressure: np.ndarray
    strain: np.ndarray


def draw(
    predictors: Sequence[Predictor],
    systems: Sequence[System],
    coverage: Coverage,
    angles: Angles,
    fingerprints: Fingerprints,
    dynamics: DynamicsSettings,
    selection: SelectionSettings,
    seed: int,
) -> Drawn:
    """Run dynamics with the first model and collect candidates.

    Raises
    ------
    ExploreError
        When the model cannot follow a single structure of the data, as when its weights are spoiled.
    """
    conditions = _conditions(predictors[0], systems, dynamics)
    count = len(conditions.temperature)
    type_map = predictors[0].type_map
    start = Systems.from_frames(starts(systems, count, seed), type_map, predictors[0].device)
    stretch = torch.tensor(1.0 + conditions.strain, device=start.coord.device)[:, None, None]
    start = replace(
        start, coord=stretch * start.coord, box=None if start.box is None else stretch * start.box
    )
    kelvin = torch.tensor(conditions.temperature)
    start = start.heated(kelvin, torch.Generator().manual_seed(seed))
    time_step = dynamics.time_step or usual_time_step(
        type_map[k] for pair in coverage.pairs for k in pair
    )
    run = simulate(
        ForceField(predictors[0]),
        start,
        max(1, round(1000.0 * dynamics.time / time_step)),
        time_step,
        thermostat=Langevin(kelvin, dynamics.friction),
        barostat=Barostat(torch.tensor(conditions.pressure), kelvin)
        if dynamics.pressures
        else None,
        every=dynamics.every,
        seed=seed,
    )
    watch = _Watch(predictors, coverage, angles, fingerprints, conditions, selection, time_step)
    for snapshot in run:
        watch.look(snapshot)
        if len(watch.gone) == count:
            break
    if not watch.drawn.followed:
        raise ExploreError(
            f"the model follows none of {count} structures of the data ({watch.first_loss}): its weights may be "
            "spoiled; begin with another checkpoint (models)"
        )
    return watch.finished(count)


def _conditions(
    predictor: Predictor, systems: Sequence[System], dynamics: DynamicsSettings
) -> _Conditions:
    temperatures = dynamics.temperatures
    if not temperatures:
        found = data_temperature(predictor, systems, "dynamics/temperatures")
        temperatures = tuple(
            float(f"{factor * (found or ROOM_TEMPERATURE):.3g}") for factor in (1.0, HOTTER)
        )
    pressures = dynamics.pressures or (math.nan,)
    rows = [
        row
        for row in itertools.product(temperatures, pressures, dynamics.strains)
        for _ in range(dynamics.copies)
    ]
    return _Conditions(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


class _Watch:
    """Examines snapshots and keeps candidates."""

    def __init__(
        self,
        predictors: Sequence[Predictor],
        coverage: Coverage,
        angles: Angles,
        fingerprints: Fingerprints,
        conditions: _Conditions,
        selection: SelectionSettings,
        time_step: float,
    ) -> None:
        self.predictors, self.coverage, self.angles, self.fingerprints = (
            predictors,
            coverage,
            angles,
            fingerprints,
        )
        self.snapshots = Snapshots(coverage, angles, predictors[0].device)
        self.conditions, self.selection, self.time_step = conditions, selection, time_step
        self.drawn = Drawn()
        self.gone: set[int] = set()
        self.first_loss = ""
        self.ended: dict[int, float] = {}
        self.kept: dict[int, list[Candidate]] = {}
        self.stride: dict[int, int] = {}
        self.found: dict[int, int] = {}

    def look(self, snapshot: Snapshot) -> None:
        """Add the candidates of one snapshot."""
        time = snapshot.step * self.time_step / 1000.0
        for lost in snapshot.lost:
            self.first_loss = self.first_loss or lost.reason
            self.gone.add(lost.copy)
        copies = snapshot.copies.cpu().numpy()
        hot = snapshot.systems.hot(torch.tensor(self.conditions.temperature[copies]))
        self.gone |= set(copies[hot].tolist())
        frames = snapshot.systems.frames()
        left = np.array([copy not in self.gone for copy in copies.tolist()], dtype=bool)
        rows = np.flatnonzero(left).tolist()
        for copy in copies[rows].tolist():
            self.ended[copy] = time
        self.drawn.followed = sum(self.ended.values())
        compared = self.snapshots.compare(snapshot.systems, left)
        new = compared.departs | (compared.bends > WIDER)
        for row, deviation in zip(rows, self._deviations(frames, rows), strict=True):
            if new[row] or self._disagree(deviation):
                self._add(frames.rows(slice(row, row + 1)), int(copies[row]), time, deviation)

    def _deviations(self, frames: Frames, rows: list[int]) -> list[float | None]:
        if len(self.predictors) < 2 or not rows:
            return [None] * len(rows)
        chosen = frames.rows(rows)
        forces = np.stack([predictor.evaluate(chosen).force for predictor in self.predictors])
        return [float(value) for value in deviation_of_force(forces).max(axis=1)]

    def _disagree(self, deviation: float | None) -> bool:
        return deviation is not None and deviation > self.selection.deviation_low

    def _add(self, frame: Frames, copy: int, time: float, deviation: float | None) -> None:
        coverage, chosen = self.coverage, self.selection
        try:
            pairs = pairs_of(frame, 0, coverage.rcut)
        except NeighborError:
            return
        closest, k = coverage.compare(pairs)
        bend = self._bend(frame, pairs)
        if k is None and not bend and not self._disagree(deviation):
            return
        self.found[copy] = self.found.get(copy, -1) + 1
        self.drawn.departed += 1
        if closest < chosen.closest or (
            deviation is not None and not deviation < chosen.deviation_high
        ):
            return
        stride = self.stride.setdefault(copy, 1)
        if self.found[copy] % stride:
            return
        reason = bend or f"models deviate by {deviation or 0.0:.2f} eV/Å"
        if k is not None:
            types = sorted((int(pairs.types[pairs.i[k]]), int(pairs.types[pairs.j[k]])))
            reason = f"{coverage.name(types)} at {pairs.distance[k]:.2f} Å"
        pressure = float(self.conditions.pressure[copy])
        candidate = Candidate(
            frame=frame,
            copy=copy,
            time=time,
            temperature=float(self.conditions.temperature[copy]),
            pressure=None if math.isnan(pressure) else pressure,
            strain=float(self.conditions.strain[copy]),
            closest=closest,
            deviation=deviation,
            reason=reason,
            fingerprint=self.fingerprints.of(pairs),
        )
        kept = self.kept.setdefault(copy, [])
        kept.append(candidate)
        if len(kept) > _KEPT * chosen.per_copy:
            del kept[1::2]
            self.stride[copy] = 2 * stride

    def _bend(self, frame: Frames, pairs: Pairs) -> str:
        """Return in words the angle that lies farthest beyond the data's; empty where all are known."""
        own = self.angles.empty()
        own.add(frame, 0, pairs)
        excess, triple = self.angles.excess(own) or (0.0, (0, 0, 0))
        if excess <= WIDER:
            return ""
        low, high = own.smallest[triple], own.largest[triple]
        degrees = (
            low
            if self.angles.smallest[triple] - low >= high - self.angles.largest[triple]
            else high
        )
        return f"{self.angles.name(triple)} at {degrees:.0f}°"

    def finished(self, count: int) -> Drawn:
        """Return the results."""
        self.drawn.copies, self.drawn.blow_ups = count, len(self.gone)
        self.drawn.candidates = [
            candidate for copy in sorted(self.kept) for candidate in self.kept[copy]
        ]
        return self.drawn


def choose(
    candidates: Sequence[Candidate], known: np.ndarray, settings: SelectionSettings
) -> list[Candidate]:
    """Return candidates by farthest-point sampling: each is the one farthest from the data and those chosen before.

    `known` are fingerprints of training frames `(nframes, nbins)`.
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
