"""The rounds of `dp explore`.

Each round draws structures from dynamics, chooses some, labels them, trains the models on, and
checks the first model. A stage that is done is not repeated: its `Round` records it.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_muon.argcheck.check import check
from deepmd_muon.argcheck.errors import InputError
from deepmd_muon.argcheck.files import read
from deepmd_muon.checkpoint_file.file import checkpoint_path
from deepmd_muon.data import System, open_systems
from deepmd_muon.data.checks.digest import content_digest
from deepmd_muon.data.writing import image_of, write_images
from deepmd_muon.explore.candidates import Candidate, TrainingData, choose, draw
from deepmd_muon.explore.fingerprints import Fingerprints
from deepmd_muon.explore.labelling import calculator_of, label_all, read_xyz, try_calculator
from deepmd_muon.explore.records import (
    CheckRecord,
    DrawRecord,
    LabelsRecord,
    TrainingRecord,
    flat,
    hash_of,
    hash_of_words,
)
from deepmd_muon.explore.rounds import Round, held, table_of
from deepmd_muon.explore.settings import ExploreError, ExploreSettings, LabelSettings
from deepmd_muon.explore.training import CHECKPOINT, BaseInput, train_on, write_input
from deepmd_muon.files import write_text
from deepmd_muon.infer.frozen import FrozenModel
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.section import thaw
from deepmd_muon.stability.angles import angles_of
from deepmd_muon.stability.check import CheckSettings, check_models
from deepmd_muon.stability.coverage import coverage_of
from deepmd_muon.stability.curves import Verdict
from deepmd_muon.stability.report import text_of, values_of

log = logging.getLogger(__name__)

#: Exit status of a command that waits for labels of another program.
WAITS = 3


def load_settings(path: Path) -> ExploreSettings:
    """Read and check an input of `dp explore`, JSON or YAML.

    Raises
    ------
    InputError
        With every problem of the file at once.
    """
    checked = check(ExploreSettings, read(path))
    if checked.settings is None:
        raise InputError(checked.problems, str(path))
    return checked.settings


@dataclass
class Explorer:
    """One run of the command."""

    settings: ExploreSettings  # what to do
    place: Path  # folder of the input file, which its paths are relative to
    say: Callable[[str], None] = print  # takes the lines of the report

    def run(self) -> int:
        """Do all rounds that remain.

        Returns
        -------
        int
            0 if the last check is good enough (or with "never"), 1 if it is not, `WAITS` if labels
            are awaited; otherwise the status of a training that was stopped by a signal.

        Raises
        ------
        ExploreError
            When a round cannot be done. Finished work stays, and the next command continues.
        """
        self.base = BaseInput(self.place / self.settings.input)
        self.folder = (self.place / self.settings.folder).absolute()
        labels = self.settings.labels
        if labels is not None:  # before the long work begins
            try_calculator(calculator_of(labels), labels.time_limit)
        models = [checkpoint_path(self.place / name).absolute() for name in self.settings.models]
        with held(self.folder):
            self._check(self._round(0), models)
            for number in range(1, self.settings.rounds + 1):
                current = self._round(number)
                finished = current.done().check is not None
                # Finished rounds are walked through, too: their settings may have changed since.
                if self._enough(number - 1) and not finished:
                    break
                if not self._draw(current, models):
                    return self._end(exhausted=True)
                status = self._label(current) or self._train(current, models)
                if status:
                    return status
                models = self._models(number)
                self._check(current, models)
            return self._end(exhausted=False)

    def _end(self, *, exhausted: bool) -> int:
        """Write the table of rounds and the result; `exhausted` dynamics found nothing to label."""
        records = (self._round(number).done() for number in range(self.settings.rounds + 1))
        begun = list(itertools.takewhile(lambda record: record.begun, records))
        lines = table_of(begun)
        write_text(self.folder / "rounds.txt", "\n".join(lines) + "\n")
        for line in lines:
            self.say(line)
        last = max(number for number, record in enumerate(begun) if record.check is not None)
        models = ", ".join(map(str, self._models(last) if last else self.settings.models))
        if self.settings.check.enough == "never" or self._enough(last):
            self.say(f"done after round {last}: {models}")
            return 0
        advice = "raise rounds and run the command again"
        if exhausted:
            advice = (
                "and their dynamics found nothing to label: let them go farther (see above), or "
                "add data of your own"
            )
        self.say(f"the check of {models} is not good enough after {last} rounds: {advice}")
        return 1

    def _round(self, number: int) -> Round:
        return Round(self.folder / f"round_{number}", number)

    def _models(self, number: int) -> list[Path]:
        return [
            self._round(number).model(k) / f"{CHECKPOINT}.pt"
            for k in range(len(self.settings.models))
        ]

    def _added(self, number: int) -> list[Path]:
        """Return the files of new frames of the rounds before `number`."""
        return [self._round(k).labelled for k in range(1, number)]

    def _enough(self, number: int) -> bool:
        """Return whether the check of a round is good enough to end."""
        enough = self.settings.check.enough
        check = self._round(number).done().check
        if enough == "never" or check is None:
            return False
        return Verdict[check.verdict] <= Verdict[enough]

    def _systems(self, number: int, type_map: Sequence[str]) -> list[System]:
        """Open the data of the models that round `number` begins with."""
        of_input, new = self.base.systems(self._added(number), type_map)
        return of_input + new

    # ----- what the results of each stage depend on ----------------------------------------------

    def _origin_of_draw(self, current: Round, models: Sequence[Path]) -> dict[str, Any]:
        return {
            **_of_models(models),
            **self._of_data(current.number),
            **flat(thaw(self.settings.dynamics), "dynamics"),
            **flat(thaw(self.settings.selection), "selection"),
        }

    def _origin_of_labels(self, current: Round, settings: LabelSettings) -> dict[str, Any]:
        return {
            _name(current.candidates): hash_of(current.candidates),
            "labels/calculator": settings.calculator,
            **flat(thaw(settings.arguments or {}), "labels/arguments"),
            "labels/stress": settings.stress,
            "labels/largest_force": settings.largest_force,
        }

    def _origin_of_training(self, current: Round, models: Sequence[Path]) -> dict[str, Any]:
        return {
            **_of_models(models),
            **self._of_data(current.number + 1),
            **self.base.origin(),
            **flat(thaw(self.settings.training), "training"),
        }

    def _origin_of_check(self, current: Round, models: Sequence[Path]) -> dict[str, Any]:
        check = self.settings.check
        return {
            **_of_models(models[:1]),
            **self._of_data(current.number + 1),
            "check/temperature": check.temperature,
            "check/time": check.time,
            "check/copies": check.copies,
        }

    def _of_data(self, number: int) -> dict[str, Any]:
        """Return hashes of the data that round `number` begins with."""
        return {
            "the data of the input": self._data_hash,
            **{_name(path): hash_of(path) for path in self._added(number)},
        }

    @functools.cached_property
    def _data_hash(self) -> str:
        of_input, _ = self.base.systems((), self.base.type_map)
        return hash_of_words(content_digest(of_input).systems)

    # ----- the stages ----------------------------------------------------------------------------

    def _draw(self, current: Round, models: Sequence[Path]) -> bool:
        """Write the structures that the round labels, if that is not done.

        Return whether there are any.
        """
        settings = self.settings
        current.begin("draw", self._origin_of_draw(current, models))
        if current.done().draw is not None:
            return True
        predictors = [Predictor(path) for path in models]
        type_map = predictors[0].type_map
        for path, predictor in zip(models, predictors, strict=True):
            if predictor.type_map != type_map:
                raise ExploreError(
                    f"{path} has types {predictor.type_map}, {models[0]} has {type_map}"
                )
        systems = self._systems(current.number, type_map)
        if settings.dynamics.pressures and not any(system.pbc for system in systems):
            raise ExploreError(
                "dynamics/pressures need cells, and no frame of the data has one: leave them out"
            )
        coverage = coverage_of(systems, type_map, float(predictors[0].model.rcut))
        fingerprints = Fingerprints(coverage, systems)
        data = TrainingData(
            systems=systems,
            coverage=coverage,
            angles=angles_of(systems, coverage),
            fingerprints=fingerprints,
        )
        self.say(f"round {current.number}: dynamics with {models[0]}")
        drawn = draw(
            predictors,
            data,
            dynamics=settings.dynamics,
            selection=settings.selection,
            seed=settings.dynamics.seed + current.number,
        )
        candidates = choose(drawn.candidates, fingerprints.known, settings.selection)
        if not candidates:
            reason = "no structure left the data. Hotter or longer dynamics would go farther"
            if drawn.departed:
                reason = (
                    f"{drawn.departed} structures left the data, all of them too far. Other dynamics "
                    "or a smaller selection/closest would find more"
                )
            self.say(
                f"round {current.number}: nothing to label: of {drawn.copies} trajectories "
                f"({drawn.followed:.3g} ps in all, {drawn.blow_ups} blew up) {reason} "
                "(dynamics/temperatures, time, copies)"
            )
            return False
        images = [_atoms(candidate, type_map, current.number) for candidate in candidates]
        write_images(images, current.candidates)
        record = DrawRecord(
            copies=drawn.copies,
            blow_ups=drawn.blow_ups,
            followed=drawn.followed,
            candidates=drawn.departed,
            chosen=len(candidates),
        )
        current.note("draw", record)
        self.say(
            f"round {current.number}: {drawn.blow_ups} of {drawn.copies} trajectories blew up; "
            f"{len(candidates)} of {drawn.departed} structures that left the data are chosen: "
            f"{current.candidates}"
        )
        return True

    def _label(self, current: Round) -> int:
        """Label the structures, or wait for labels, if that is not done; return the exit status."""
        settings = self.settings.labels
        done = current.done().labels is not None
        if settings is None:
            if not done and not current.labelled.exists():
                self.say(
                    f"label the structures of {current.candidates} with the method of your data, "
                    f"write them to {current.labelled} (extended XYZ with energy and forces, or "
                    "any form that training reads), and run the command again"
                )
                return WAITS
            current.begin("labels", {_name(current.labelled): hash_of(current.labelled)})
            if not done:
                current.note("labels", _count_labels(current))
            return 0
        current.begin("labels", self._origin_of_labels(current, settings))
        if done:
            return 0
        images = read_xyz(current.candidates)
        self.say(f"round {current.number}: {settings.calculator} labels {len(images)} structures")
        labelled = label_all(images, settings, current.labels)
        problems = [
            f"{k:04d}: force above {settings.largest_force:g} eV/Å" for k in labelled.too_large
        ]
        problems += [f"{k:04d}: {reason}" for k, reason in labelled.failed.items()]
        write_text(current.folder / "failed.txt", "".join(f"{line}\n" for line in sorted(problems)))
        if not labelled.done:
            raise ExploreError(
                f"no structure is left to train on: {len(labelled.too_large)} have forces above "
                f"{settings.largest_force:g} eV/Å, {len(labelled.failed)} failed "
                f"({current.folder / 'failed.txt'}): raise labels/largest_force or "
                "selection/closest"
            )
        write_images(list(labelled.done.values()), current.labelled)
        record = LabelsRecord(labelled=len(labelled.done), failed=len(problems))
        current.note("labels", record)
        return 0

    def _train(self, current: Round, models: Sequence[Path]) -> int:
        """Train every model on, from the weights of the round before, if that is not done.

        Return the exit status.
        """
        settings = self.settings.training
        current.begin("training", self._origin_of_training(current, models))
        if current.done().training is not None:
            return 0
        error_before = _force_error(models[0], current.labelled)
        added = self._added(current.number + 1)
        of_input, new = self.base.systems(added, Predictor(models[0]).type_map)
        nframes = sum(system.nframes for system in of_input + new)
        for member, source in enumerate(models):
            folder = current.model(member)
            if (folder / "done").exists():
                continue
            self.say(f"round {current.number}: training model_{member} on {nframes} frames")
            content = write_input(
                self.base,
                added,
                (len(of_input), len(new)),
                settings,
                member=member,
                round_=current.number,
            )
            status = train_on(folder, content, settings.start, source)
            if status:
                self.say("the training was stopped: run the command again to go on")
                return status
            # Without this file, the next command continues the training from its checkpoint.
            write_text(folder / "done", "")
        error_after = _force_error(self._models(current.number)[0], current.labelled)
        record = TrainingRecord(error_before=error_before, error_after=error_after)
        current.note("training", record)
        return 0

    def _check(self, current: Round, models: Sequence[Path]) -> None:
        """Check the first model on all data, if that is not done; write the report."""
        up_to_date = current.begin("check", self._origin_of_check(current, models))
        if up_to_date and current.done().check is not None:
            return
        settings = self.settings.check
        predictor = Predictor(models[0])
        if isinstance(predictor.model, FrozenModel):
            raise ExploreError(
                f"{models[0]} is a frozen file, which cannot be trained on: name its checkpoint "
                "(models)"
            )
        systems = self._systems(current.number + 1, predictor.type_map)
        check_settings = CheckSettings(
            settings.temperature, time=settings.time, copies=settings.copies
        )
        result = check_models([str(models[0])], [predictor], systems, check_settings)
        current.folder.mkdir(parents=True, exist_ok=True)
        report = current.folder / "check.txt"
        write_text(report, "\n".join(text_of(result)) + "\n")
        write_text(current.folder / "check.json", json.dumps(values_of(result), allow_nan=False))
        faults = [
            f"{item.name} {item.verdict.name}"
            for item in result.models[0].items
            if item.verdict > Verdict.holds
        ]
        summary = ", ".join(faults) or "holds"
        # After the files: a command that is killed before repeats the check.
        current.note("check", CheckRecord(verdict=result.verdict.name, summary=summary))
        self.say(f"round {current.number}: check: {summary} ({report})")


def _of_models(models: Sequence[Path]) -> dict[str, Any]:
    """Return the hash of each model."""
    return {f"model {member}": hash_of(path) for member, path in enumerate(models)}


def _name(path: Path) -> str:
    """Return the name of a file of a round, such as round_1/labelled.xyz."""
    return f"{path.parent.name}/{path.name}"


def _count_labels(current: Round) -> LabelsRecord:
    """Count the structures that another program labelled and left out; warn of lost atoms."""
    n_labelled = 0
    sizes: set[int] = set()
    for system in open_systems(str(current.labelled)):
        frames = system.frames(np.arange(system.nframes))
        n_labelled += int((frames.present("energy") | frames.present("force")).sum())
        sizes |= set((frames.atype >= 0).sum(1).tolist())
    if not n_labelled:
        raise ExploreError(
            f"{current.labelled} holds no frame with labels: label the structures and try again"
        )
    unexpected = sorted(sizes - {len(atoms) for atoms in read_xyz(current.candidates)})
    if unexpected:
        log.warning(
            "%s holds frames of %s atoms, and no structure of %s has as many: label each with all "
            "its atoms",
            current.labelled,
            ", ".join(map(str, unexpected)),
            current.candidates,
        )
    draw = current.done().draw
    assert draw is not None  # the stage before this one
    return LabelsRecord(labelled=n_labelled, failed=max(0, draw.chosen - n_labelled))


def _force_error(path: Path, labelled: Path) -> float | None:
    """Return the root mean square error of a force component [eV/Å]; None without forces."""
    predictor = Predictor(path)
    square = 0.0
    count = 0
    for system in open_systems(str(labelled), predictor.type_map):
        frames = system.frames(np.arange(system.nframes))
        if frames.force is None:
            continue
        has_force = frames.present("force")[:, None] & (frames.atype >= 0)
        difference = (predictor.evaluate(frames).force - frames.force)[has_force]
        square += float((difference**2).sum())
        count += difference.size
    return (square / count) ** 0.5 if count else None


def _atoms(candidate: Candidate, type_map: Sequence[str], number: int) -> Any:
    """Return a candidate as `ase.Atoms`, with its history in `info`."""
    atoms = image_of(candidate.frame, 0, type_map)
    atoms.info |= {
        "round": number,
        "trajectory": candidate.copy,
        "time_ps": round(candidate.time, 6),
        "temperature_K": candidate.temperature,
        "reason": candidate.reason,
    }
    if candidate.pressure is not None:
        atoms.info["pressure_GPa"] = candidate.pressure
    if candidate.strain:
        atoms.info["strain"] = candidate.strain
    if candidate.deviation is not None:
        atoms.info["deviation"] = candidate.deviation
    return atoms
