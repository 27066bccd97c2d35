"""Label structures in several processes, one file a structure, so that a kill or a failure loses no label."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_muon.data.writing import write_images
from deepmd_muon.explore.calculator import Structure, begin, label
from deepmd_muon.explore.settings import ExploreError, LabelSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Labelled:
    """The outcome of labelling, by the structures' numbers."""

    done: Mapping[int, Any]  # labelled `ase.Atoms`
    too_large: tuple[int, ...]  # those whose forces are too large
    failed: Mapping[int, str]  # reasons


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


def label_all(images: Sequence[Any], settings: LabelSettings, folder: Path) -> Labelled:
    """Label structures that have no file in `folder` yet, and write `NNNN.xyz` for each.

    `images` are `ase.Atoms` without labels, whose `info` is kept. Structures that failed are tried again by the next
    call.

    Raises
    ------
    ExploreError
        When more than `most_failed` of the structures could not be labelled. Labels that were made stay.
    """
    from ase.calculators.singlepoint import SinglePointCalculator

    waiting = [k for k in range(len(images)) if not _place(folder, k).exists()]
    if len(waiting) < len(images):
        log.info(
            "%d of %d structures are labelled already", len(images) - len(waiting), len(images)
        )
    failed: dict[int, str] = {}
    for k, found in _results(images, waiting, settings):
        if isinstance(found, str):
            failed[k] = found
            log.warning("structure %d has no label: %s", k, found)
            continue
        atoms = images[k].copy()
        atoms.calc = SinglePointCalculator(atoms, **found)
        write_images([atoms], _place(folder, k))
    if len(failed) > settings.most_failed * len(images):
        number, reason = next(iter(sorted(failed.items())))
        raise ExploreError(
            f"{settings.calculator} failed for {len(failed)} of {len(images)} structures (structure {number}: "
            f"{reason}); other labels stay in {folder}: mend the calculator and run the command again, or raise "
            "labels/most_failed"
        )
    done, large = {}, []
    for k in (k for k in range(len(images)) if k not in failed):
        (atoms,) = read_xyz(_place(folder, k))
        if np.linalg.norm(atoms.get_forces(), axis=1).max(initial=0.0) > settings.largest_force:
            large.append(k)
        else:
            done[k] = atoms
    return Labelled(done, tuple(large), dict(sorted(failed.items())))


def _place(folder: Path, k: int) -> Path:
    return folder / f"{k:04d}.xyz"


def _results(
    images: Sequence[Any], waiting: Sequence[int], settings: LabelSettings
) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield structures and their labels, or why they have none, as they come.

    Each process is a pool of its own: where one crashes, its structure is known, and the others go on.
    """
    queue = iter(waiting)
    pools = [_pool() for _ in range(min(settings.workers, len(waiting)))]
    running: dict[Future[dict[str, Any] | str], tuple[int, int]] = {}
    try:
        for lane, k in zip(range(len(pools)), queue, strict=False):
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
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _pool() -> ProcessPoolExecutor:
    # Not forked: this process may hold threads and a GPU.
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=begin)


def _submit(
    pool: ProcessPoolExecutor, atoms: Any, settings: LabelSettings
) -> Future[dict[str, Any] | str]:
    cell = atoms.cell.array if atoms.pbc.all() else None
    structure = Structure(tuple(atoms.get_chemical_symbols()), atoms.positions, cell)
    arguments = dict(settings.arguments or {})
    return pool.submit(label, settings.calculator, arguments, structure, stress=settings.stress)
