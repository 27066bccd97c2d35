"""The whole check: coverage, scans and dynamics of each model.

Each part ends in an `Item`: a verdict, a reason and a next step.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepmd_muon.data import Frames, System
from deepmd_muon.data.elements import MASSES
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.systems import BOLTZMANN
from deepmd_muon.infer.model_deviation import deviation_of_force
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.stability.angles import Angles, angles_of
from deepmd_muon.stability.coverage import Coverage, StabilityError, coverage_of
from deepmd_muon.stability.curves import Verdict
from deepmd_muon.stability.frame_parameters import at_frame_parameters
from deepmd_muon.stability.scans import SHORTEST, Curve, scan_dimers, scan_in_place
from deepmd_muon.stability.trajectories import (
    Trajectories,
    estimate_temperature,
    run_dynamics,
    starts,
)

log = logging.getLogger(__name__)

#: Dynamics start so many times hotter than the data.
HOTTER = 1.5
#: Lighter atoms weigh this much in the dynamics [u]. Hydrogen then allows twice the time step, and
#: no average of positions depends on masses (Feenstra, Hess and Berendsen, J. Comput. Chem. 20, 786
#: (1999)).
LIGHTEST = 4.0
#: Assumed temperature of data whose forces tell none [K].
ROOM_TEMPERATURE = 300.0
#: Hotter dynamics need a temperature from the user [K]: the forces of rattled or strained frames
#: look like thousands of kelvins.
HOTTEST_ASSUMED = 2000.0
#: Angles farther beyond those of the data are new [degrees].
WIDER = 10.0
#: Length of the dynamics if none is given [ps].
CPU_TIME = 2.0
GPU_TIME = 5.0

# Ratio of a distance to the shortest of the data below which dynamics left the data. Hotter atoms
# come closer in a sound potential, too: bonds of 300 K by 3 % at 450 K.
_CLOSER = 0.9
# The same, far from the data.
_FAR_CLOSER = 0.75
# Change of the total energy of an atom that makes a run doubtful [kT].
_DRIFT = 0.05
# The same, and the run fails.
_WILD_DRIFT = 0.5
# Models disagree if forces deviate more on their dynamics than on the data by this factor,
_DISAGREEMENT_RATIO = 3.0
# and by more than this [eV/Å].
_DISAGREEMENT = 0.2

_LABEL_FRAMES = "label frames of these dynamics and train on them"


class _Budget(NamedTuple):
    """Size of the dynamics on a kind of device."""

    time: float  # [ps]
    work: int  # atoms · steps of all copies: a minute for a small se_e2_a
    max_copies: int


_CPU_BUDGET = _Budget(time=CPU_TIME, work=400_000, max_copies=16)
_GPU_BUDGET = _Budget(time=GPU_TIME, work=25_000_000, max_copies=64)


@dataclass(frozen=True)
class CheckSettings:
    """The settings of a check."""

    # Of the dynamics [K]; None takes `HOTTER` times the temperature of the data.
    temperature: float | None = None
    time_step: float = 1.0  # [fs]; atoms lighter than `LIGHTEST` weigh that much
    time: float | None = None  # length of the dynamics [ps]; None takes `CPU_TIME` or `GPU_TIME`
    # Number of structures. None takes 4 to 16 (to 64 on a GPU): more than 4 if a small model does
    # them in a minute.
    copies: int | None = None
    probes: int = 3  # paths in place of each pair and kind
    seed: int = 0  # of frames, paths and velocities
    # Frame parameters of models that read some; None takes those of most frames.
    fparam: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        numbers = {
            "--temperature [K]": self.temperature,
            "--time-step [fs]": self.time_step,
            "--time [ps]": self.time,
        }
        for name, value in numbers.items():
            if value is not None and not (value > 0.0 and math.isfinite(value)):
                raise StabilityError(f"{name} must be above 0; found {value:g}")
        if (self.copies is not None and self.copies < 1) or self.probes < 1:
            raise StabilityError(
                f"--copies and --probes must be 1 or more; found {self.copies} and {self.probes}"
            )
        if self.seed < 0:
            raise StabilityError(f"--seed must be 0 or more; found {self.seed}")


@dataclass(frozen=True)
class Item:
    """A verdict with its reason, and what to do next if it does not hold."""

    name: str
    verdict: Verdict
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class ModelCheck:
    """The results of one model."""

    model: str
    items: tuple[Item, ...]
    curves: tuple[Curve, ...]
    dynamics: Trajectories

    @property
    def verdict(self) -> Verdict:
        """The worst of the items."""
        return max(item.verdict for item in self.items)


@dataclass(frozen=True)
class Check:
    """The results of all models, and of the data they were compared with."""

    coverage: Coverage
    angles: Angles
    data_temperature: float | None  # [K]; None if it was not estimated
    models: tuple[ModelCheck, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of the models."""
        return max(model.verdict for model in self.models)


def check_models(
    names: Sequence[str],
    predictors: Sequence[Predictor],
    systems: Sequence[System],
    settings: CheckSettings,
) -> Check:
    """Check models near the structures of systems, whose types index the models' type map.

    Raises
    ------
    StabilityError
        When the data hold nothing to check, a model predicts numbers that are not finite for them
        or needs atomic parameters, or the data look so hot that the user has to give a
        temperature.
    NeighborError
        When neighbours of a frame cannot be found.
    """
    systems = at_frame_parameters(names, predictors, systems, settings.fparam)
    rcut = max(float(predictor.model.rcut) for predictor in predictors)
    coverage = coverage_of(systems, predictors[0].type_map, rcut)
    angles = angles_of(systems, coverage)
    frames = starts(systems, 8, settings.seed)
    disagreement = _disagreement_on_data(names, predictors, frames)
    if settings.temperature is None:
        kelvin_of_data = data_temperature(
            predictors[0],
            systems,
            "--temperature (dp explore: check/temperature and dynamics/temperatures)",
        )
        temperature = HOTTER * (kelvin_of_data or ROOM_TEMPERATURE)
    else:
        kelvin_of_data = None
        temperature = settings.temperature
    models = []
    for name, predictor in zip(names, predictors, strict=True):
        log.info("%s: scans and dynamics at %.0f K", name, temperature)
        kt = BOLTZMANN * temperature
        has_dimers = any(system.natoms == 2 and not system.pbc for system in systems)
        curves = scan_dimers(predictor, coverage, kt, in_data=has_dimers)
        curves += scan_in_place(
            predictor, coverage, systems, kt, probes=settings.probes, seed=settings.seed
        )
        trajectories = _run_dynamics(
            predictor,
            systems,
            coverage=coverage,
            angles=angles,
            temperature=temperature,
            settings=settings,
        )
        items = [
            _judge_coverage(coverage, trajectories),
            _judge_angles(angles, trajectories),
            *_judge_scans(coverage, curves),
            _judge_dynamics(trajectories),
        ]
        if len(predictors) > 1:
            items.append(_judge_agreement(predictors, trajectories, disagreement))
        models.append(
            ModelCheck(model=name, items=tuple(items), curves=tuple(curves), dynamics=trajectories)
        )
    return Check(
        coverage=coverage,
        angles=angles,
        data_temperature=kelvin_of_data,
        models=tuple(models),
    )


def _disagreement_on_data(
    names: Sequence[str], predictors: Sequence[Predictor], frames: Frames
) -> float:
    """Return the largest deviation of the models' forces on frames of the data [eV/Å]."""
    forces = []
    for name, predictor in zip(names, predictors, strict=True):
        prediction = predictor.evaluate(frames)
        if prediction.not_finite:
            raise StabilityError(
                f"{' and '.join(prediction.not_finite)} that {name} predicts for frames of the "
                "data are not finite: the weights of the model are spoiled; check an earlier "
                "checkpoint"
            )
        forces.append(prediction.force)
    return float(deviation_of_force(np.stack(forces)).max())


def data_temperature(predictor: Predictor, systems: Sequence[System], setting: str) -> float | None:
    """Estimate the temperature of data [K] for dynamics up to `HOTTER` times as hot.

    Return None, and say so in the log, if the forces tell no temperature. `ROOM_TEMPERATURE` then
    takes its place.

    Raises
    ------
    StabilityError
        When the dynamics would be hotter than `HOTTEST_ASSUMED`; the message asks for `setting`.
    """
    kelvin = estimate_temperature(ForceField(predictor), systems)
    if kelvin is None:
        log.warning(
            "the forces of the data tell no temperature; dynamics run at up to %.0f K: give yours "
            "with %s",
            HOTTER * ROOM_TEMPERATURE,
            setting,
        )
    elif HOTTER * kelvin > HOTTEST_ASSUMED:
        raise StabilityError(
            f"the forces of the data look like {kelvin:.0f} K, and dynamics would start at "
            f"{HOTTER * kelvin:.0f} K; rattled or strained frames look as hot as that without "
            f"being so: give the highest temperature [K] that you need with {setting}"
        )
    return kelvin


def _run_dynamics(
    predictor: Predictor,
    systems: Sequence[System],
    *,
    coverage: Coverage,
    angles: Angles,
    temperature: float,
    settings: CheckSettings,
) -> Trajectories:
    masses = np.maximum([MASSES.get(name, math.nan) for name in coverage.type_map], LIGHTEST)
    if predictor.device.type == "cuda":
        budget = _GPU_BUDGET
    else:
        budget = _CPU_BUDGET
    steps = max(1, round(1000.0 * (settings.time or budget.time) / settings.time_step))
    mean_atoms = sum(system.natoms for system in systems) / len(systems)
    affordable = int(budget.work / (mean_atoms * steps))
    copies = settings.copies or min(max(4, affordable), budget.max_copies)
    return run_dynamics(
        ForceField(predictor),
        starts(systems, copies, settings.seed),
        coverage,
        angles,
        masses=masses.tolist(),
        temperature=temperature,
        time_step=settings.time_step,
        steps=steps,
        seed=settings.seed,
    )


# ----- verdicts ----------------------------------------------------------------------------------


def _judge_coverage(coverage: Coverage, run: Trajectories) -> Item:
    """Judge whether dynamics stayed at distances that the data hold."""
    name = "coverage"
    ratio, pair = min(
        (run.reached[pair] / coverage.shortest[pair], pair) for pair in coverage.pairs
    )
    came = (
        f"{coverage.name(pair)} came to {run.reached[pair]:.2f} Å, "
        f"{coverage.shortest[pair]:.2f} Å in the data"
    )
    if ratio < _CLOSER:
        verdict = Verdict.fails if ratio < _FAR_CLOSER else Verdict.doubtful
        reason = f"{came} ({coverage.used} of {coverage.nframes} frames)"
        return Item(name, verdict, reason, _LABEL_FRAMES)

    # Pairs that dynamics met and the data do not hold; else pairs that no frame has near each
    # other.
    unknown = [event.pair for event in run.departures if not np.isfinite(event.shortest)]
    unknown = unknown or _absent_pairs(coverage)
    if unknown:
        reason = f"no frame holds {unknown[0]} within the cut-off of {coverage.rcut:g} Å"
        advice = f"add frames with {unknown[0]} near each other"
        return Item(name, Verdict.doubtful, reason, advice)

    in_gaps = [event for event in run.departures if event.distance > event.shortest]
    if 2 * len(in_gaps) > run.copies:
        event = in_gaps[0]
        reason = (
            f"{len(in_gaps)} of {run.copies} copies reached distances that no frame has, the first "
            f"{event.pair} at {event.distance:.2f} Å after {event.time:.2f} ps"
        )
        return Item(name, Verdict.doubtful, reason, _LABEL_FRAMES)

    slightly = ""
    if run.departures:
        slightly = f"; {len(run.departures)} of {run.copies} copies left them a little"
    return Item(name, Verdict.holds, f"dynamics stayed near the data{slightly}: {came}")


def _absent_pairs(coverage: Coverage) -> list[str]:
    """Return the pairs of the data's elements that no frame has within the cut-off."""
    types = sorted({k for pair in coverage.pairs for k in pair})
    pairs = itertools.combinations_with_replacement(types, 2)
    return [coverage.name(pair) for pair in pairs if pair not in coverage.pairs]


def _judge_angles(angles: Angles, run: Trajectories) -> Item:
    """Judge whether near neighbours kept angles that the data hold."""
    excess = None if run.angles is None else angles.excess(run.angles)
    if excess is None or run.angles is None:
        return Item("angles", Verdict.holds, "no atom has two near neighbours")
    degrees, triple = excess
    reason = (
        f"{angles.name(triple)} came to {run.angles.range(triple)}°, {angles.range(triple)}° "
        "in the data"
    )
    if degrees > WIDER:
        return Item("angles", Verdict.doubtful, reason, _LABEL_FRAMES)
    return Item(
        "angles", Verdict.holds, f"near neighbours stayed within {WIDER:g}° of the data: {reason}"
    )


def _judge_scans(coverage: Coverage, curves: Sequence[Curve]) -> list[Item]:
    """Judge the scans in place, then the dimers."""
    in_place = [curve for curve in curves if curve.kind != "dimer"]
    dimers = [curve for curve in curves if curve.kind == "dimer"]
    return [_judge_paths("scans", coverage, in_place), _judge_paths("dimers", coverage, dimers)]


def _judge_paths(name: str, coverage: Coverage, curves: Sequence[Curve]) -> Item:
    faults = [
        (feature, curve)
        for curve in curves
        for feature in curve.features
        if feature.verdict > Verdict.holds
    ]
    if not faults:
        paths = "1 path" if len(curves) == 1 else f"{len(curves)} paths"
        return Item(name, Verdict.holds, f"{paths} without a hole, kink or lack of repulsion")
    worst, curve = max(faults, key=lambda fault: (fault[0].verdict, fault[0].depth))
    pair = coverage.name(curve.pair)
    n_faulty = sum(curve.verdict > Verdict.holds for curve in curves)
    reason = (
        f"{n_faulty} of {len(curves)} paths, the worst {pair} {curve.kind}: {worst.kind} at "
        f"{worst.distance:.2f} Å, {worst.depth:.2f} eV deep behind {worst.barrier:.2f} eV"
    )
    if worst.kind == "kink":
        advice = (
            "raise sel (dp neighbor-stat) or rcut_smth: the energy must not jump when neighbours "
            "come and go"
        )
    elif worst.kind == "not finite":
        advice = "check an earlier checkpoint"
    else:
        nearest = max(SHORTEST, worst.distance - 0.2)
        advice = f"label frames with {pair} between {nearest:.1f} Å and the data's distances"
    return Item(name, worst.verdict, reason, advice)


def _judge_dynamics(run: Trajectories) -> Item:
    """Judge blow-ups and drift."""
    if run.blow_ups:
        event = min(run.blow_ups, key=lambda blow_up: blow_up.time)
        rate = len(run.blow_ups) / max(run.followed, 1e-3)
        reason = (
            f"{len(run.blow_ups)} of {run.copies} copies blew up ({rate:.2g} a ps), the first "
            f"after {event.time:.3f} ps at {event.element} (atom {event.atom}): {event.reason}"
        )
        advice = (
            "label frames from before the blow-ups, train on them, check again; or a shorter "
            "--time-step"
        )
        return Item("dynamics", Verdict.fails, reason, advice)
    kt = BOLTZMANN * run.temperature
    reason = (
        f"{run.copies} copies ran {run.followed:.3g} ps in all at {run.temperature:.0f} K without "
        f"a blow-up; energy drifted by {1000.0 * run.drift:.2g} meV/atom"
    )
    if run.drift > _DRIFT * kt:
        verdict = Verdict.fails if run.drift > _WILD_DRIFT * kt else Verdict.doubtful
        advice = f"try --time-step {run.time_step / 2:g}; if it drifts as much: sel"
        return Item("dynamics", verdict, reason, advice)
    return Item("dynamics", Verdict.holds, reason)


def _judge_agreement(predictors: Sequence[Predictor], run: Trajectories, on_data: float) -> Item:
    """Judge whether models agree after one model's dynamics as they do on the data."""
    if run.last is None:
        return Item("agreement", Verdict.doubtful, "no copy was left to compare models on")
    forces = [predictor.evaluate(run.last).force for predictor in predictors]
    deviation = float(deviation_of_force(np.stack(forces)).max())
    reason = (
        f"forces of {len(predictors)} models deviate by {deviation:.2g} eV/Å after the dynamics, "
        f"{on_data:.2g} in the data"
    )
    allowed = max(_DISAGREEMENT_RATIO * on_data, _DISAGREEMENT)
    if deviation > allowed or not math.isfinite(deviation):
        advice = "label frames where they disagree (dp model-devi)"
        return Item("agreement", Verdict.doubtful, reason, advice)
    return Item("agreement", Verdict.holds, reason)
