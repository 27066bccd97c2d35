"""The whole check: coverage, scans and dynamics of each model, with a verdict, a reason and a next step each."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepmd_muon.data import System
from deepmd_muon.data.elements import MASSES
from deepmd_muon.dynamics.forces import ForceField
from deepmd_muon.dynamics.systems import BOLTZMANN
from deepmd_muon.infer.model_deviation import deviation_of_force
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.stability.angles import Angles, angles_of
from deepmd_muon.stability.coverage import Coverage, StabilityError, coverage_of
from deepmd_muon.stability.curves import Verdict
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
#: Lighter atoms weigh this much in the dynamics [u]: hydrogen allows twice the time step, and no average of positions
#: depends on masses (Feenstra, Hess and Berendsen, J. Comput. Chem. 20, 786 (1999)).
LIGHTEST = 4.0
#: Assumed of data whose forces tell no temperature [K].
ROOM_TEMPERATURE = 300.0
#: Dynamics hotter than this [K] run at a temperature that the user gives only: the forces of rattled or strained frames
#: look like thousands of kelvins.
HOTTEST_ASSUMED = 2000.0
# Ratios of a distance to the shortest of the data: below the first dynamics left the data, below the second far. Hotter
# atoms come closer in a sound potential, too: bonds of 300 K by 3 % at 450 K.
_CLOSER, _FAR_CLOSER = 0.9, 0.75
#: Angles farther beyond those of the data are new [degrees].
WIDER = 10.0
# Change of the total energy of an atom [kT].
_DRIFT, _WILD_DRIFT = 0.05, 0.5
# Models disagree more on their dynamics than on the data by this factor and this force [eV/Å].
_DISAGREE, _DISAGREE_FORCE = 3.0, 0.2
#: Length of the dynamics where none is given [ps].
CPU_TIME, GPU_TIME = 2.0, 5.0
# Atoms times steps: a minute on one core for a small se_e2_a.
_CPU_WORK, _GPU_WORK = 400_000, 25_000_000


@dataclass(frozen=True)
class CheckSettings:
    """The settings of a check."""

    temperature: float | None = (
        None  # of the dynamics [K]; None takes `HOTTER` times the temperature of the data
    )
    time_step: float = 1.0  # [fs]; atoms lighter than `LIGHTEST` weigh that much
    time: float | None = None  # length of the dynamics [ps]; None takes `CPU_TIME` or `GPU_TIME`
    # Number of structures; None takes 4 to 16 (to 64 on a GPU), more than 4 where a small model takes a minute.
    copies: int | None = None
    probes: int = 3  # paths in place of each pair and kind
    seed: int = 0  # of frames, paths and velocities

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        given = {
            "--temperature [K]": self.temperature,
            "--time-step [fs]": self.time_step,
            "--time [ps]": self.time,
        }
        for name, value in given.items():
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
    """A verdict with its reason, and what to do next where it does not hold."""

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
    """All that was found; `data_temperature` is None where it was not estimated [K]."""

    coverage: Coverage
    angles: Angles
    data_temperature: float | None
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
        When the data hold nothing to check, or a model predicts numbers that are not finite for them, or needs frame or
        atomic parameters, or when the data look so hot that the user has to give a temperature.
    NeighborError
        When neighbours of a frame cannot be found.
    """
    for name, predictor in zip(names, predictors, strict=True):
        if predictor.parameters.required:
            raise StabilityError(
                f"{name} reads frame or atomic parameters (numb_fparam, numb_aparam), which scans and dynamics have no "
                "values for: dp check takes models without them, or with a default_fparam"
            )
    type_map = predictors[0].type_map
    coverage = coverage_of(
        systems, type_map, max(float(predictor.model.rcut) for predictor in predictors)
    )
    angles = angles_of(systems, coverage)
    some = starts(systems, 8, settings.seed)
    forces = []
    for name, predictor in zip(names, predictors, strict=True):
        found = predictor.evaluate(some)
        if wrong := found.not_finite:
            raise StabilityError(
                f"{' and '.join(wrong)} that {name} predicts for frames of the data are not finite: the weights of the "
                "model are spoiled; check an earlier checkpoint"
            )
        forces.append(found.force)
    disagreement = float(deviation_of_force(np.stack(forces)).max())
    kelvin_of_data, temperature = _temperature(predictors[0], systems, settings)
    checked = []
    for name, predictor in zip(names, predictors, strict=True):
        log.info("%s: scans and dynamics at %.0f K", name, temperature)
        kt = BOLTZMANN * temperature
        in_data = any(system.natoms == 2 and not system.pbc for system in systems)
        curves = scan_dimers(predictor, coverage, kt, in_data=in_data)
        curves += scan_in_place(
            predictor, coverage, systems, kt, probes=settings.probes, seed=settings.seed
        )
        dynamics = _dynamics(predictor, coverage, angles, systems, temperature, settings)
        items = [
            _of_coverage(coverage, dynamics),
            _of_angles(angles, dynamics),
            *_of_scans(coverage, curves),
            _of_dynamics(dynamics),
        ]
        if len(predictors) > 1:
            items.append(_of_agreement(predictors, dynamics, disagreement))
        checked.append(ModelCheck(name, tuple(items), tuple(curves), dynamics))
    return Check(coverage, angles, kelvin_of_data, tuple(checked))


def _temperature(
    predictor: Predictor, systems: Sequence[System], settings: CheckSettings
) -> tuple[float | None, float]:
    """Return the temperature of the data, None if not known, and that of the dynamics [K]."""
    if settings.temperature is not None:
        return None, settings.temperature
    found = data_temperature(
        predictor,
        systems,
        "--temperature (dp explore: check/temperature and dynamics/temperatures)",
    )
    return found, HOTTER * (found or ROOM_TEMPERATURE)


def data_temperature(predictor: Predictor, systems: Sequence[System], setting: str) -> float | None:
    """Estimate the temperature of data [K] for dynamics up to `HOTTER` times as hot.

    Return None, and say so in the log, where the forces tell none: `ROOM_TEMPERATURE` takes its place.

    Raises
    ------
    StabilityError
        When the dynamics would be hotter than `HOTTEST_ASSUMED`; the message asks for `setting`.
    """
    kelvin = estimate_temperature(ForceField(predictor), systems)
    if kelvin is None:
        log.warning(
            "the forces of the data tell no temperature; dynamics run at up to %.0f K: give yours with %s",
            HOTTER * ROOM_TEMPERATURE,
            setting,
        )
    elif HOTTER * kelvin > HOTTEST_ASSUMED:
        raise StabilityError(
            f"the forces of the data look like {kelvin:.0f} K, and dynamics would start at {HOTTER * kelvin:.0f} K; "
            "rattled or strained frames look as hot as that without being so: give the highest temperature [K] that "
            f"you need with {setting}"
        )
    return kelvin


def _dynamics(
    predictor: Predictor,
    coverage: Coverage,
    angles: Angles,
    systems: Sequence[System],
    temperature: float,
    settings: CheckSettings,
) -> Trajectories:
    masses = np.maximum([MASSES.get(name, math.nan) for name in coverage.type_map], LIGHTEST)
    on_gpu = predictor.device.type == "cuda"
    picoseconds = settings.time or (GPU_TIME if on_gpu else CPU_TIME)
    steps = max(1, round(1000.0 * picoseconds / settings.time_step))
    atoms = sum(system.natoms for system in systems) / len(systems)
    work = (_GPU_WORK if on_gpu else _CPU_WORK) / (atoms * steps)
    copies = settings.copies or min(max(4, int(work)), 64 if on_gpu else 16)
    start = starts(systems, copies, settings.seed)
    return run_dynamics(
        ForceField(predictor),
        start,
        coverage,
        angles,
        masses=masses.tolist(),
        temperature=temperature,
        time_step=settings.time_step,
        steps=steps,
        seed=settings.seed,
    )


def _of_coverage(coverage: Coverage, dynamics: Trajectories) -> Item:
    """Judge whether dynamics stayed at distances that the data hold."""
    known = f"{coverage.used} of {coverage.nframes} frames"
    present = sorted({k for pair in coverage.pairs for k in pair})
    absent = [
        f"{coverage.type_map[a]}-{coverage.type_map[b]}" for a in present for b in present if a <= b
    ]
    absent = [
        name for name in absent if name not in {coverage.name(pair) for pair in coverage.pairs}
    ]
    closest = [(dynamics.reached[pair] / coverage.shortest[pair], pair) for pair in coverage.pairs]
    ratio, pair = min(closest)
    gone = len(dynamics.departures)
    seen = f"{coverage.name(pair)} came to {dynamics.reached[pair]:.2f} Å, {coverage.shortest[pair]:.2f} Å in the data"
    if ratio < _CLOSER:
        verdict = Verdict.fails if ratio < _FAR_CLOSER else Verdict.doubtful
        return Item(
            "coverage",
            verdict,
            f"{seen} ({known})",
            "label frames of these dynamics and train on them",
        )
    if unknown := [d for d in dynamics.departures if not np.isfinite(d.shortest)] or absent:
        first = unknown[0]
        name = first if isinstance(first, str) else first.pair
        reason = f"no frame holds {name} within the cut-off of {coverage.rcut:g} Å"
        return Item("coverage", Verdict.doubtful, reason, f"add frames with {name} near each other")
    far = [d for d in dynamics.departures if d.distance > d.shortest]
    if 2 * len(far) > dynamics.copies:
        first_gap = far[0]
        reason = f"{len(far)} of {dynamics.copies} copies reached distances that no frame has, the first "
        reason += f"{first_gap.pair} at {first_gap.distance:.2f} Å after {first_gap.time:.2f} ps"
        return Item(
            "coverage", Verdict.doubtful, reason, "label frames of these dynamics and train on them"
        )
    left = f"; {gone} of {dynamics.copies} copies left them a little" if gone else ""
    return Item("coverage", Verdict.holds, f"dynamics stayed near the data{left}: {seen}")


def _of_angles(angles: Angles, dynamics: Trajectories) -> Item:
    """Judge whether near neighbours kept angles that the data hold."""
    found = None if dynamics.angles is None else angles.excess(dynamics.angles)
    if found is None:
        return Item("angles", Verdict.holds, "no atom has two near neighbours")
    excess, triple = found
    assert dynamics.angles is not None
    low, high = dynamics.angles.smallest[triple], dynamics.angles.largest[triple]
    known = f"{angles.smallest[triple]:.0f} to {angles.largest[triple]:.0f}"
    reason = f"{angles.name(triple)} came to {low:.0f} to {high:.0f}°, {known}° in the data"
    if excess > WIDER:
        return Item(
            "angles", Verdict.doubtful, reason, "label frames of these dynamics and train on them"
        )
    return Item(
        "angles", Verdict.holds, f"near neighbours stayed within {WIDER:g}° of the data: {reason}"
    )


def _of_scans(coverage: Coverage, curves: Sequence[Curve]) -> list[Item]:
    """Judge the scans in place, then the dimers."""
    items = []
    for name, chosen in (
        ("scans", [curve for curve in curves if curve.kind != "dimer"]),
        ("dimers", [curve for curve in curves if curve.kind == "dimer"]),
    ):
        bad = [
            (f.verdict, f.depth, f, curve)
            for curve in chosen
            for f in curve.features
            if f.verdict > Verdict.holds
        ]
        if not bad:
            paths = "1 path" if len(chosen) == 1 else f"{len(chosen)} paths"
            items.append(
                Item(name, Verdict.holds, f"{paths} without a hole, kink or lack of repulsion")
            )
            continue
        verdict, _, worst, curve = max(bad, key=lambda entry: entry[:2])
        pair = coverage.name(curve.pair)
        reason = f"{sum(c.verdict > Verdict.holds for c in chosen)} of {len(chosen)} paths, the worst {pair}"
        reason += f" {curve.kind}: {worst.kind} at {worst.distance:.2f} Å, {worst.depth:.2f} eV deep behind "
        reason += f"{worst.barrier:.2f} eV"
        advice = f"label frames with {pair} between {max(SHORTEST, worst.distance - 0.2):.1f} Å and the data's distances"
        if worst.kind == "kink":
            advice = "raise sel (dp neighbor-stat) or rcut_smth: the energy must not jump when neighbours come and go"
        elif worst.kind == "not finite":
            advice = "check an earlier checkpoint"
        items.append(Item(name, verdict, reason, advice))
    return items


def _of_dynamics(run: Trajectories) -> Item:
    """Judge blow-ups and drift."""
    followed = run.followed
    if run.blow_ups:
        first = min(run.blow_ups, key=lambda blow_up: blow_up.time)
        reason = (
            f"{len(run.blow_ups)} of {run.copies} copies blew up ({len(run.blow_ups) / max(followed, 1e-3):.2g} a ps), "
            f"the first after {first.time:.3f} ps at {first.element} (atom {first.atom}): {first.reason}"
        )
        advice = "label frames from before the blow-ups, train on them, check again; or a shorter --time-step"
        return Item("dynamics", Verdict.fails, reason, advice)
    kt = BOLTZMANN * run.temperature
    reason = f"{run.copies} copies ran {followed:.3g} ps in all at {run.temperature:.0f} K without a blow-up; "
    reason += f"energy drifted by {1000.0 * run.drift:.2g} meV/atom"
    if run.drift > _DRIFT * kt:
        verdict = Verdict.fails if run.drift > _WILD_DRIFT * kt else Verdict.doubtful
        return Item(
            "dynamics",
            verdict,
            reason,
            f"try --time-step {run.time_step / 2:g}; if it drifts as much: sel",
        )
    return Item("dynamics", Verdict.holds, reason)


def _of_agreement(predictors: Sequence[Predictor], run: Trajectories, in_data: float) -> Item:
    """Judge whether models agree on the last structures of one model's dynamics as they do on the data."""
    if run.last is None:
        return Item("agreement", Verdict.doubtful, "no copy was left to compare models on", "")
    found = float(
        deviation_of_force(np.stack([p.evaluate(run.last).force for p in predictors])).max()
    )
    reason = f"forces of {len(predictors)} models deviate by {found:.2g} eV/Å after the dynamics, {in_data:.2g} in the data"
    if found > max(_DISAGREE * in_data, _DISAGREE_FORCE) or not math.isfinite(found):
        return Item(
            "agreement",
            Verdict.doubtful,
            reason,
            "label frames where they disagree (dp model-devi)",
        )
    return Item("agreement", Verdict.holds, reason)
