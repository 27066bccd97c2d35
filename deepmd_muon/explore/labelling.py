"""Label structures in several processes.

Each label has a file, so that a kill or a failure loses none.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from deepmd_muon.data.errors import DataError
from deepmd_muon.data.stores.ase_reading import read_images
from deepmd_muon.data.writing import write_images
from deepmd_muon.explore.calculator import Answer, CalculatorChoice, Job, Structure, serve
from deepmd_muon.explore.settings import ExploreError, LabelSettings
from deepmd_muon.progress import tracked

log = logging.getLogger(__name__)

# Time between two looks at the clock while processes compute [s].
_POLL_INTERVAL = 1.0
# Time between reports of a structure that is still computed [s].
_REPORT_INTERVAL = 600.0
# Time for a process to end by itself, so that its calculator can close files and programs [s].
_GRACE = 10.0


@dataclass(frozen=True)
class Labelled:
    """The outcome of labelling, by the structures' numbers."""

    done: Mapping[int, Any]  # labelled `ase.Atoms`
    too_large: tuple[int, ...]  # structures with too large forces
    failed: Mapping[int, str]  # reasons


def read_xyz(path: Path) -> list[Any]:
    """Read all structures of an extended XYZ file, as `ase.Atoms`.

    Raises
    ------
    ExploreError
        When the file is not one.
    """
    try:
        return read_images(path)
    except DataError as error:
        raise ExploreError(f"{error}: remove the folder of this round to repeat it") from error


def calculator_of(settings: LabelSettings) -> CalculatorChoice:
    """Return the calculator that settings choose."""
    return CalculatorChoice(settings.calculator, dict(settings.arguments or {}))


def try_calculator(choice: CalculatorChoice, time_limit: float) -> None:
    """Make a calculator in another process, as for labelling, and end it.

    Raises
    ------
    ExploreError
        When it cannot be made, crashes, or takes longer than `time_limit` [s].
    """
    ((_, answer),) = answers_of({0: Job(choice)}, workers=1, time_limit=time_limit)
    if isinstance(answer, str):
        raise ExploreError(f"{choice.prefix}calculator: {choice.name} cannot be made: {answer}")


def label_all(images: Sequence[Any], settings: LabelSettings, folder: Path) -> Labelled:
    """Label structures that have no file in `folder` yet, and write `NNNN.xyz` for each.

    `images` are `ase.Atoms` without labels; the files keep their `info`. The next call tries
    structures that failed again.

    Raises
    ------
    ExploreError
        When more than `most_failed` of the structures could not be labelled, or a file in `folder`
        does not hold labels of its structure. Labels that were made stay.
    """
    from ase.calculators.singlepoint import SinglePointCalculator

    labels = {k: _read_label(_label_file(folder, k), atoms) for k, atoms in enumerate(images)}
    waiting = [k for k, atoms in labels.items() if atoms is None]
    if len(waiting) < len(images):
        log.info(
            "%d of %d structures are labelled already", len(images) - len(waiting), len(images)
        )
    jobs = {k: _job(images[k], settings) for k in waiting}
    failed: dict[int, str] = {}
    answers = answers_of(jobs, workers=settings.workers, time_limit=settings.time_limit)
    for k, answer in tracked(answers, "labels", total=len(jobs)):
        if isinstance(answer, str):
            failed[k] = answer
            log.warning("structure %d has no label: %s", k, answer)
            timed_out = sum(isinstance(reason, _TimeOut) for reason in failed.values())
            if timed_out > settings.most_failed * len(images):
                break  # each of the others could take as long
            continue
        atoms = images[k].copy()
        atoms.calc = SinglePointCalculator(atoms, **answer)
        write_images([atoms], _label_file(folder, k))
        labels[k] = _read_label(_label_file(folder, k), atoms)
    if len(failed) > settings.most_failed * len(images):
        number, reason = next(iter(sorted(failed.items())))
        raise ExploreError(
            f"{settings.calculator} failed for {len(failed)} of {len(images)} structures "
            f"(structure {number}: {reason}); other labels stay in {folder}: mend the calculator "
            "and run the command again, or raise labels/most_failed"
        )
    done = {}
    too_large = []
    for k, atoms in labels.items():
        if atoms is None:
            continue
        force = np.linalg.norm(atoms.get_forces(), axis=1).max(initial=0.0)
        if force > settings.largest_force:
            too_large.append(k)
        else:
            done[k] = atoms
    return Labelled(done, tuple(too_large), dict(sorted(failed.items())))


def _label_file(folder: Path, k: int) -> Path:
    return folder / f"{k:04d}.xyz"


def _read_label(path: Path, image: Any) -> Any | None:
    """Return the labelled structure of a file; None if there is no file.

    Raises
    ------
    ExploreError
        When the file is damaged, or holds another structure.
    """
    from ase.calculators.calculator import PropertyNotImplementedError

    if not path.exists():
        return None
    remedy = "remove the file, so that the structure is labelled again"
    try:
        images = read_images(path)
    except DataError as error:
        raise ExploreError(f"{error}: {remedy}") from error
    if len(images) != 1:
        raise ExploreError(f"{path} holds {len(images)} structures, not one: {remedy}")
    (atoms,) = images
    same_symbols = atoms.get_chemical_symbols() == image.get_chemical_symbols()
    if not same_symbols or not np.allclose(atoms.positions, image.positions, atol=1e-6):
        raise ExploreError(f"{path} holds another structure than candidates.xyz: {remedy}")
    try:
        energy = np.asarray(atoms.get_potential_energy())
        forces = np.asarray(atoms.get_forces())
    except (PropertyNotImplementedError, RuntimeError) as error:  # the latter without a calculator
        raise ExploreError(f"{path} lacks energy or forces: {remedy}") from error
    are_numbers = energy.dtype.kind in "fiu" and forces.dtype.kind in "fiu"
    if not are_numbers or energy.ndim or forces.shape != atoms.positions.shape:
        raise ExploreError(f"{path} has labels that are not numbers of the right shape: {remedy}")
    if not np.isfinite(energy + forces).all():
        raise ExploreError(f"{path} has an energy or a force that is not finite: {remedy}")
    return atoms


def _job(atoms: Any, settings: LabelSettings) -> Job:
    cell = atoms.cell.array if atoms.pbc.all() else None
    structure = Structure(tuple(atoms.get_chemical_symbols()), atoms.positions, cell)
    return Job(calculator_of(settings), structure, settings.stress)


class _TimeOut(str):
    """The reason why a structure has no label: its time was over."""

    __slots__ = ()


def answers_of(
    jobs: Mapping[int, Job], *, workers: int, time_limit: float
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Do jobs in several processes.

    Yield their numbers with labels or the reasons why there are none.

    A process that crashes, or takes longer than `time_limit` [s] for a job, is replaced. The others
    continue.

    Raises
    ------
    ExploreError
        When a job cannot be done because its settings are wrong.
    """
    queue = iter(jobs.items())
    lanes = [_Lane(time_limit) for _ in range(min(workers, len(jobs)))]
    try:
        for lane in lanes:
            lane.take(next(queue, None))
        while busy := [lane for lane in lanes if lane.number is not None]:
            handles = [handle for lane in busy for handle in lane.handles]
            wait(handles, timeout=_POLL_INTERVAL)
            for lane in busy:
                answer = lane.answer()
                if answer is None:
                    continue
                if isinstance(answer, ExploreError):
                    raise answer
                assert lane.number is not None
                yield lane.number, answer
                lane.take(next(queue, None))
    finally:
        for lane in lanes:
            lane.end()


class _Lane:
    """A process that does one job after another, and its replacement after a crash."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self.number: int | None = None  # of the job that is done; None for an idle process
        self._begin = 0.0
        self._start()

    def _start(self) -> None:
        # Not forked: this process may hold threads and a GPU.
        context = multiprocessing.get_context("spawn")
        self._jobs, far_end = context.Pipe()
        self._process = context.Process(target=serve, args=(far_end,))
        self._process.start()
        far_end.close()  # so that the pipe ends with the process

    @property
    def handles(self) -> tuple[Any, int]:
        """Handles to wait on: one becomes ready when the process answers or ends."""
        return self._jobs, self._process.sentinel

    def take(self, job: tuple[int, Job] | None) -> None:
        """Begin a job; without one, the process is idle."""
        self.number = None
        if job is None:
            return
        self.number, content = job
        self._begin = monotonic()
        self._reported = self._begin
        with suppress(BrokenPipeError):  # it has just crashed, which `answer` finds
            self._jobs.send(content)

    def answer(self) -> Answer | None:
        """Return the answer to the present job; None while it is computed."""
        if self._jobs.poll():
            with suppress(EOFError, ConnectionError):
                answer: Answer = self._jobs.recv()
                return answer
        now = monotonic()
        if not self._process.is_alive():
            status = self._process.exitcode
            self._kill()
            self._start()
            return f"the process that computed it crashed (exit status {status})"
        if now - self._begin > self._time_limit:
            self._kill()
            self._start()
            return _TimeOut(f"no label after {self._time_limit:g} s; its process was stopped")
        if now - self._reported > _REPORT_INTERVAL:
            self._reported = now
            log.info(
                "structure %d has been computed for %.0f min", self.number, (now - self._begin) / 60
            )
        return None

    def _kill(self) -> None:
        """End the process and all programs that it started."""
        self._jobs.close()
        if self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # if it does not lead its group yet
        self._process.join()

    def end(self) -> None:
        """End the process: an idle one by itself, a busy one at once."""
        if self.number is None:
            self._jobs.close()
            self._process.join(_GRACE)
        self._kill()
