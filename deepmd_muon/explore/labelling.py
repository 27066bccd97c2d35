"""Label structures in several processes, one file a structure, so that a kill or a failure loses no label."""

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

log = logging.getLogger(__name__)

# Time between two looks at the clock while processes compute [s].
_TICK = 1.0
# Time after which a structure that is still computed is reported, again and again [s].
_LONG = 600.0
# Time for a process to end by itself, so that its calculator can close files and programs [s].
_TO_END = 10.0


@dataclass(frozen=True)
class Labelled:
    """The outcome of labelling, by the structures' numbers."""

    done: Mapping[int, Any]  # labelled `ase.Atoms`
    too_large: tuple[int, ...]  # those whose forces are too large
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
    """Make a calculator in a process of its own, as the labelling processes do, and end it.

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

    `images` are `ase.Atoms` without labels, whose `info` is kept. Structures that failed are tried again by the next
    call.

    Raises
    ------
    ExploreError
        When more than `most_failed` of the structures could not be labelled, or a file in `folder` does not hold
        labels of its structure. Labels that were made stay.
    """
    from ase.calculators.singlepoint import SinglePointCalculator

    labels = {k: _read_label(_place(folder, k), atoms) for k, atoms in enumerate(images)}
    waiting = [k for k, atoms in labels.items() if atoms is None]
    if len(waiting) < len(images):
        log.info(
            "%d of %d structures are labelled already", len(images) - len(waiting), len(images)
        )
    jobs = {k: _job(images[k], settings) for k in waiting}
    failed: dict[int, str] = {}
    for k, answer in answers_of(jobs, workers=settings.workers, time_limit=settings.time_limit):
        if isinstance(answer, str):
            failed[k] = answer
            log.warning("structure %d has no label: %s", k, answer)
            if _hung(failed) > settings.most_failed * len(images):
                break  # each of the others could take as long
            continue
        atoms = images[k].copy()
        atoms.calc = SinglePointCalculator(atoms, **answer)
        write_images([atoms], _place(folder, k))
        labels[k] = _read_label(_place(folder, k), atoms)
    if len(failed) > settings.most_failed * len(images):
        number, reason = next(iter(sorted(failed.items())))
        raise ExploreError(
            f"{settings.calculator} failed for {len(failed)} of {len(images)} structures (structure {number}: "
            f"{reason}); other labels stay in {folder}: mend the calculator and run the command again, or raise "
            "labels/most_failed"
        )
    done, large = {}, []
    for k, atoms in labels.items():
        if atoms is None:
            continue
        if np.linalg.norm(atoms.get_forces(), axis=1).max(initial=0.0) > settings.largest_force:
            large.append(k)
        else:
            done[k] = atoms
    return Labelled(done, tuple(large), dict(sorted(failed.items())))


def _place(folder: Path, k: int) -> Path:
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
    same = atoms.get_chemical_symbols() == image.get_chemical_symbols() and np.allclose(
        atoms.positions, image.positions, atol=1e-6
    )
    if not same:
        raise ExploreError(f"{path} holds another structure than candidates.xyz: {remedy}")
    try:
        energy, forces = map(np.asarray, (atoms.get_potential_energy(), atoms.get_forces()))
    except (PropertyNotImplementedError, RuntimeError) as error:  # the latter without a calculator
        raise ExploreError(f"{path} lacks energy or forces: {remedy}") from error
    numbers = all(value.dtype.kind in "fiu" for value in (energy, forces))
    if not numbers or energy.ndim or forces.shape != atoms.positions.shape:
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


def _hung(failed: Mapping[int, str]) -> int:
    return sum(isinstance(reason, _TimeOut) for reason in failed.values())


def answers_of(
    jobs: Mapping[int, Job], *, workers: int, time_limit: float
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Do jobs in several processes; yield their numbers with labels, or why there are none, as they come.

    If a process crashes, or takes longer than `time_limit` [s] for a job, it is replaced and the others go on.

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
            wait([handle for lane in busy for handle in lane.handles], timeout=_TICK)
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
        self._limit = time_limit
        self.number: int | None = None  # of the job that is done; None for an idle process
        self._begin = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context(
            "spawn"
        )  # not forked: this process may hold threads and a GPU
        self._jobs, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,))
        self._process.start()
        other.close()

    @property
    def handles(self) -> tuple[Any, int]:
        """What becomes ready when the process answers or ends."""
        return self._jobs, self._process.sentinel

    def take(self, job: tuple[int, Job] | None) -> None:
        """Begin a job; without one, the process is idle."""
        self.number = None
        if job is None:
            return
        self.number, content = job
        self._begin = self._reported = monotonic()
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
        if now - self._begin > self._limit:
            self._kill()
            self._start()
            return _TimeOut(f"no label after {self._limit:g} s; its process was stopped")
        if now - self._reported > _LONG:
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
            self._process.join(_TO_END)
        self._kill()
