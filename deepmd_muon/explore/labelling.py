"""Label structures in several processes, one file a structure, so that a kill or a failure loses no label."""

from __future__ import annotations

import io
import itertools
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_muon.explore.calculator import Structure, begin, label, make_calculator
from deepmd_muon.explore.errors import ExploreError
from deepmd_muon.explore.settings import LabelSettings
from deepmd_muon.files import make_folder_of, whole_file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Labelled:
    """Numbers of structures with a label, those whose forces are too large, and failures with their reasons."""

    done: tuple[int, ...]
    too_large: tuple[int, ...]
    failed: Mapping[int, str]


def write_xyz(images: Sequence[Any], path: Path) -> None:
    """Write `ase.Atoms` as one extended XYZ file, which appears whole or not at all."""
    from ase.io import write

    make_folder_of(path)
    with whole_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8")
        write(text, list(images), format="extxyz")
        text.detach()  # flushed, and open


def read_xyz(path: Path) -> list[Any]:
    """Read all structures of an extended XYZ file.

    Raises
    ------
    ExploreError
        When the file is not one.
    """
    from ase.io import read

    try:
        found = read(path, index=":", format="extxyz")
    except Exception as error:
        raise ExploreError(f"{path} cannot be read as extended XYZ: {error}") from error
    return list(found) if isinstance(found, list) else [found]


def try_calculator(settings: LabelSettings) -> None:
    """Build the calculator once, before the long work begins."""
    make_calculator(settings.calculator, settings.arguments or {})


def label_all(images: Sequence[Any], settings: LabelSettings, folder: Path) -> Labelled:
    """Label structures that have no file in `folder` yet, and write `NNNN.xyz` for each.

    Parameters
    ----------
    images
        `ase.Atoms` without labels; their `info` is kept.
    settings
        Calculator and processes.
    folder
        Where the labels are kept. Structures that failed are tried again by the next call.

    Raises
    ------
    ExploreError
        When more than `most_failed` of the structures could not be labelled. Labels that were made stay.
    """
    from ase.calculators.singlepoint import SinglePointCalculator

    waiting = [k for k in range(len(images)) if not _place(folder, k).exists()]
    if len(waiting) < len(images):
        log.info("%d of %d structures are labelled already", len(images) - len(waiting), len(images))
    failed: dict[int, str] = {}
    for k, found in _results(images, waiting, settings):
        if isinstance(found, str):
            failed[k] = found
            log.warning("structure %d has no label: %s", k, found)
            continue
        atoms = images[k].copy()
        atoms.calc = SinglePointCalculator(atoms, **found)
        write_xyz([atoms], _place(folder, k))
    if len(failed) > settings.most_failed * len(images):
        number, reason = next(iter(sorted(failed.items())))
        raise ExploreError(
            f"{settings.calculator} failed for {len(failed)} of {len(images)} structures (structure {number}: "
            f"{reason}); other labels stay in {folder}: mend the calculator and run the command again, or raise "
            "labels/most_failed"
        )
    done = [k for k in range(len(images)) if k not in failed]
    large = [k for k in done if _largest_force(read_xyz(_place(folder, k))[0]) > settings.largest_force]
    return Labelled(tuple(k for k in done if k not in large), tuple(large), dict(sorted(failed.items())))


def collected(labelled: Labelled, folder: Path) -> list[Any]:
    """Return the labelled structures of a folder."""
    return [read_xyz(_place(folder, k))[0] for k in labelled.done]


def _place(folder: Path, k: int) -> Path:
    return folder / f"{k:04d}.xyz"


def _largest_force(atoms: Any) -> float:
    return float(np.linalg.norm(atoms.get_forces(), axis=1).max(initial=0.0))


def _results(
    images: Sequence[Any], waiting: Sequence[int], settings: LabelSettings
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield structures and their labels, or why they have none, as they come.

    Each process is a pool of its own: where one crashes, its structure is known, and the others go on.
    """
    queue = iter(waiting)
    workers = min(settings.workers, len(waiting))
    with _pools(workers) as pools:
        running: dict[Future[dict[str, Any] | str], tuple[int, int]] = {}
        for lane, k in zip(range(workers), queue, strict=False):
            running[_submit(pools[lane], images[k], settings)] = (lane, k)
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                lane, k = running.pop(future)
                try:
                    found = future.result()
                except BrokenProcessPool:
                    pools[lane] = _pool()
                    found = "the process that computed it crashed"
                yield k, found
                for following in itertools.islice(queue, 1):
                    running[_submit(pools[lane], images[following], settings)] = (lane, following)


@contextmanager
def _pools(count: int) -> Iterator[list[ProcessPoolExecutor]]:
    pools = [_pool() for _ in range(count)]
    try:
        yield pools
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool() -> ProcessPoolExecutor:
    # Not forked: this process may hold threads and a GPU.
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin)


def _submit(pool: ProcessPoolExecutor, atoms: Any, settings: LabelSettings) -> Future[dict[str, Any] | str]:
    cell = atoms.cell.array if atoms.pbc.all() else None
    structure = Structure(tuple(atoms.get_chemical_symbols()), atoms.positions, cell)
    arguments = dict(settings.arguments or {})
    return pool.submit(label, settings.calculator, arguments, structure, stress=settings.stress)
