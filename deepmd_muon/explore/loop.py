"""The rounds of `dp explore`: draw, choose, label, train on, check."""

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
from deepmd_muon.data.writing import write_images
from deepmd_muon.explore.candidates import Candidate, choose, draw
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
from deepmd_muon.files import whole_file
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
        """Do all rounds that are left.

        Returns
        -------
        int
            0 when the last check is good enough (or with "never"), 1 when it is not, `WAITS` when labels are awaited;
            otherwise the status of a training that was stopped by a signal.

        Raises
        ------
        ExploreError
            When a round cannot be done; what is done stays, and the next command goes on.
        """
        self.base = BaseInput(self.place / self.settings.input)
        self.folder = (self.place / self.settings.folder).absolute()
        if (labels := self.settings.labels) is not None:  # before the long work begins
            try_calculator(calculator_of(labels), labels.time_limit)
        models = [checkpoint_path(self.place / name).absolute() for name in self.settings.models]
        with held(self.folder):
            self._checked(self._round(0), models)
            for number in range(1, self.settings.rounds + 1):
                here = self._round(number)
                finished = here.done().check is not None
                if self._enough(number - 1) and not finished:
                    break
                if not self._draw(here, models):
                    break
                if status := self._label(here) or self._train(here, models):
                    return status
                models = self._models(number)
                self._checked(here, models)
            return self._end()

    def _end(self) -> int:
        rounds = (self._round(number).done() for number in range(self.settings.rounds + 1))
        begun = list(itertools.takewhile(lambda done: done.begun, rounds))
        lines = table_of(begun)
        with whole_file(self.folder / "rounds.txt") as file:
            file.write(("\n".join(lines) + "\n").encode())
        for line in lines:
            self.say(line)
        last = max(number for number, done in enumerate(begun) if done.check is not None)
        models = ", ".join(map(str, self._models(last) if last else self.settings.models))
        if self.settings.check.enough == "never" or self._enough(last):
            self.say(f"done after round {last}: {models}")
            return 0
        self.say(
            f"the check of {models} is not good enough after {last} rounds: raise rounds and run the command again"
        )
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
        wanted = self.settings.check.enough
        check = self._round(number).done().check
        return wanted != "never" and check is not None and Verdict[check.verdict] <= Verdict[wanted]

    def _systems(self, number: int, type_map: Sequence[str]) -> list[System]:
        """Open the data of the models that round `number` begins with."""
        own, new = self.base.systems(self._added(number), type_map)
        return own + new

    def _origin_of_draw(self, here: Round, models: Sequence[Path]) -> dict[str, Any]:
        return {
            **_of_models(models),
            **self._of_data(here.number),
            **flat(thaw(self.settings.dynamics), "dynamics"),
            **flat(thaw(self.settings.selection), "selection"),
        }

    def _origin_of_labels(self, here: Round, settings: LabelSettings) -> dict[str, Any]:
        return {
            _name(here.candidates): hash_of(here.candidates),
            "labels/calculator": settings.calculator,
            **flat(thaw(settings.arguments or {}), "labels/arguments"),
            "labels/stress": settings.stress,
            "labels/largest_force": settings.largest_force,
        }

    def _origin_of_training(self, here: Round, models: Sequence[Path]) -> dict[str, Any]:
        return {
            **_of_models(models),
            **self._of_data(here.number + 1),
            **self.base.origin(),
            **flat(thaw(self.settings.training), "training"),
        }

    def _origin_of_check(self, here: Round, models: Sequence[Path]) -> dict[str, Any]:
        check = self.settings.check
        return {
            **_of_models(models[:1]),
            **self._of_data(here.number + 1),
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
        own, _ = self.base.systems((), self.base.type_map)
        return hash_of_words(content_digest(own).systems)

    def _draw(self, here: Round, models: Sequence[Path]) -> bool:
        """Write the structures that the round labels, if that is not done; return whether there are any."""
        settings = self.settings
        here.begin("draw", self._origin_of_draw(here, models))
        if here.done().draw is not None:
            return True
        predictors = [Predictor(path) for path in models]
        type_map = predictors[0].type_map
        for path, predictor in zip(models, predictors, strict=True):
            if predictor.type_map != type_map:
                raise ExploreError(
                    f"{path} has types {predictor.type_map}, {models[0]} has {type_map}"
                )
        systems = self._systems(here.number, type_map)
        if settings.dynamics.pressures and not any(system.pbc for system in systems):
            raise ExploreError(
                "dynamics/pressures need cells, and no frame of the data has one: leave them out"
            )
        coverage = coverage_of(systems, type_map, float(predictors[0].model.rcut))
        angles, fingerprints = angles_of(systems, coverage), Fingerprints(coverage, systems)
        self.say(f"round {here.number}: dynamics with {models[0]}")
        seed = settings.dynamics.seed + here.number
        drawn = draw(
            predictors,
            systems,
            coverage,
            angles,
            fingerprints,
            settings.dynamics,
            settings.selection,
            seed,
        )
        chosen = choose(drawn.candidates, fingerprints.known, settings.selection)
        if not chosen:
            self.say(
                f"round {here.number}: {drawn.copies} trajectories ({drawn.followed:.3g} ps in all, {drawn.blow_ups} "
                f"blew up) have no structure to label; {drawn.departed} left the data, all of them too far. Other "
                "dynamics (temperatures, time, copies) or a smaller selection/closest would find more"
            )
            return False
        write_images(
            [_atoms(candidate, type_map, here.number) for candidate in chosen], here.candidates
        )
        here.note(
            "draw",
            DrawRecord(
                copies=drawn.copies,
                blow_ups=drawn.blow_ups,
                followed=drawn.followed,
                candidates=drawn.departed,
                chosen=len(chosen),
            ),
        )
        self.say(
            f"round {here.number}: {drawn.blow_ups} of {drawn.copies} trajectories blew up; {len(chosen)} of "
            f"{drawn.departed} structures that left the data are chosen: {here.candidates}"
        )
        return True

    def _label(self, here: Round) -> int:
        """Label the structures, or wait for labels, if that is not done; return the exit status."""
        settings = self.settings.labels
        done = here.done().labels is not None
        if settings is None:
            if not done and not here.labelled.exists():
                self.say(
                    f"label the structures of {here.candidates} with the method of your data, write them to "
                    f"{here.labelled} (extended XYZ with energy and forces, or any form that training reads), and run "
                    "the command again"
                )
                return WAITS
            here.begin("labels", {_name(here.labelled): hash_of(here.labelled)})
            if not done:
                here.note("labels", _counted(here))
            return 0
        here.begin("labels", self._origin_of_labels(here, settings))
        if done:
            return 0
        images = read_xyz(here.candidates)
        self.say(f"round {here.number}: {settings.calculator} labels {len(images)} structures")
        found = label_all(images, settings, here.labels)
        listed = [f"{k:04d}: force above {settings.largest_force:g} eV/Å" for k in found.too_large]
        listed += [f"{k:04d}: {reason}" for k, reason in found.failed.items()]
        with whole_file(here.folder / "failed.txt") as file:
            file.write("".join(f"{line}\n" for line in sorted(listed)).encode())
        if not found.done:
            raise ExploreError(
                f"no structure is left to train on: {len(found.too_large)} have forces above "
                f"{settings.largest_force:g} eV/Å, {len(found.failed)} failed "
                f"({here.folder / 'failed.txt'}): raise labels/largest_force or selection/closest"
            )
        write_images(list(found.done.values()), here.labelled)
        here.note("labels", LabelsRecord(labelled=len(found.done), failed=len(listed)))
        return 0

    def _train(self, here: Round, models: Sequence[Path]) -> int:
        """Train every model on, from the weights of the round before, if that is not done; return the exit status."""
        here.begin("training", self._origin_of_training(here, models))
        if here.done().training is not None:
            return 0
        before = _force_error(models[0], here.labelled)
        added = self._added(here.number + 1)
        own, new = self.base.systems(added, Predictor(models[0]).type_map)
        for member, source in enumerate(models):
            if (here.model(member) / "done").exists():
                continue
            self.say(
                f"round {here.number}: training model_{member} on {sum(s.nframes for s in own + new)} frames"
            )
            content = write_input(
                self.base, added, (len(own), len(new)), self.settings.training, member, here.number
            )
            if status := train_on(
                here.model(member), content, self.settings.training.start, source
            ):
                self.say("the training was stopped: run the command again to go on")
                return status
            with whole_file(here.model(member) / "done") as file:
                file.write(b"")
        after = _force_error(self._models(here.number)[0], here.labelled)
        here.note("training", TrainingRecord(error_before=before, error_after=after))
        return 0

    def _checked(self, here: Round, models: Sequence[Path]) -> None:
        """Check the first model on all data, if that is not done; keep the report."""
        current = here.begin("check", self._origin_of_check(here, models))
        if current and here.done().check is not None:
            return
        settings = self.settings.check
        predictor = Predictor(models[0])
        if isinstance(predictor.model, FrozenModel):
            raise ExploreError(
                f"{models[0]} is a frozen file, which cannot be trained on: name its checkpoint (models)"
            )
        systems = self._systems(here.number + 1, predictor.type_map)
        chosen = CheckSettings(settings.temperature, time=settings.time, copies=settings.copies)
        found = check_models([str(models[0])], [predictor], systems, chosen)
        here.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(here.folder / "check.txt") as file:
            file.write(("\n".join(text_of(found)) + "\n").encode())
        with whole_file(here.folder / "check.json") as file:
            file.write(json.dumps(values_of(found), allow_nan=False).encode())
        (model,) = found.models
        worst = ", ".join(
            f"{item.name} {item.verdict.name}" for item in model.items if item.verdict
        )
        here.note("check", CheckRecord(verdict=found.verdict.name, summary=worst or "holds"))
        self.say(f"round {here.number}: check: {worst or 'holds'} ({here.folder / 'check.txt'})")


def _of_models(models: Sequence[Path]) -> dict[str, Any]:
    """Return the hash of each model."""
    return {f"model {member}": hash_of(path) for member, path in enumerate(models)}


def _name(path: Path) -> str:
    """Return the name of a file of a round, such as round_1/labelled.xyz."""
    return f"{path.parent.name}/{path.name}"


def _counted(here: Round) -> LabelsRecord:
    """Return how many structures another program labelled, and how many it left out; warn of lost atoms."""
    labelled, sizes = 0, set()
    for system in open_systems(str(here.labelled)):
        frames = system.frames(np.arange(system.nframes))
        labelled += int((frames.present("energy") | frames.present("force")).sum())
        sizes |= set((frames.atype >= 0).sum(1).tolist())
    if not labelled:
        raise ExploreError(
            f"{here.labelled} holds no frame with labels: label the structures and try again"
        )
    if others := sorted(sizes - {len(atoms) for atoms in read_xyz(here.candidates)}):
        log.warning(
            "%s holds frames of %s atoms, and no structure of %s has as many: label each with all its atoms",
            here.labelled,
            ", ".join(map(str, others)),
            here.candidates,
        )
    draw = here.done().draw
    assert draw is not None  # the stage before this one
    return LabelsRecord(labelled=labelled, failed=max(0, draw.chosen - labelled))


def _force_error(path: Path, labelled: Path) -> float | None:
    """Return the root mean square error of a force component [eV/Å]; None where frames have no forces."""
    predictor = Predictor(path)
    square, count = 0.0, 0
    for system in open_systems(str(labelled), predictor.type_map):
        frames = system.frames(np.arange(system.nframes))
        if frames.force is None:
            continue
        known = frames.present("force")[:, None] & (frames.atype >= 0)
        difference = (predictor.evaluate(frames).force - frames.force)[known]
        square, count = square + float((difference**2).sum()), count + difference.size
    return (square / count) ** 0.5 if count else None


def _atoms(candidate: Candidate, type_map: Sequence[str], number: int) -> Any:
    """Return a candidate as `ase.Atoms`, with its history in `info`."""
    from ase import Atoms

    frame = candidate.frame
    real = frame.atype[0] >= 0
    box = frame.cell(0)
    atoms = Atoms(
        [type_map[k] for k in frame.atype[0][real]],
        positions=frame.coord[0][real],
        cell=box,
        pbc=box is not None,
    )
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
