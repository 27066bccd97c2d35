"""Bounded samples of data: what runs measure first must not take longer for larger data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from deepmd_muon.data.system import System

Item = TypeVar("Item")
Result = TypeVar("Result")

#: What reading a frame costs in addition to its atoms, in atoms.
FRAME_COST = 24
# Cut-off at which an atom's neighbours count as one atom [Å].
_USUAL_RCUT = 6.0
# Frames in which every type is looked at, as far as the data have them.
_FRAMES_OF_A_TYPE = 16


def frame_costs(systems: Sequence[System], rcut: float | None = None) -> np.ndarray:
    """Return what a frame of each system costs, in atoms `(nsystems,)`.

    Give `rcut` [Å] if neighbours are searched, too.
    """
    volume = 1.0 if rcut is None else max(0.25, (rcut / _USUAL_RCUT) ** 3)
    return np.array([system.natoms * volume + FRAME_COST for system in systems])


def sample_frames(
    systems: Sequence[System],
    max_cost: float,
    rcut: float | None = None,
    candidates: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Draw frames of systems with one type map, the same ones in every process.

    All frames are taken if they cost at most `max_cost`, see `frame_costs`. Otherwise each system
    takes part in proportion to its frames, and each type occurs in some of them; systems that alone
    have a type may be added. `candidates` are the frames of each system that are drawn from, all by
    default. Return the numbers of the frames of each system, ascending.
    """
    if candidates is None:
        counts = np.array([system.nframes for system in systems], dtype=int)
    else:
        counts = np.array([len(numbers) for numbers in candidates], dtype=int)
    costs = frame_costs(systems, rcut)
    stream = np.random.Generator(np.random.PCG64(0))
    drawn_counts = counts
    if counts @ costs > max_cost:
        drawn_counts = _draw_counts(systems, counts, costs, max_cost, stream)
    drawn = []
    for k, (count, number) in enumerate(zip(counts.tolist(), drawn_counts.tolist(), strict=True)):
        rows = np.arange(number)
        # numpy takes 20 µs to draw nothing, and most of many systems give nothing.
        if 0 < number < count:
            rows = np.sort(stream.choice(count, number, replace=False))
        drawn.append(rows if candidates is None else candidates[k][rows])
    return drawn


def sample_with(
    systems: Sequence[System],
    required: Sequence[np.ndarray],
    max_cost: float,
    rcut: float | None = None,
) -> list[np.ndarray]:
    """Draw frames as `sample_frames` does, but take the frames of `required` before others.

    `required` has some frames of each system.
    """
    candidates = [np.arange(system.nframes) for system in systems]
    for k, numbers in enumerate(required):
        if len(numbers):
            candidates[k] = np.delete(candidates[k], numbers)
    cost = float(frame_costs(systems, rcut) @ [len(numbers) for numbers in required])
    drawn = sample_frames(systems, max(max_cost - cost, 0.0), rcut, candidates)
    for k, numbers in enumerate(required):
        if len(numbers):
            drawn[k] = np.sort(np.concatenate([numbers, drawn[k]]))
    return drawn


def _draw_counts(
    systems: Sequence[System],
    counts: np.ndarray,
    costs: np.ndarray,
    max_cost: float,
    stream: np.random.Generator,
) -> np.ndarray:
    """Draw how many frames each system gives `(nsystems,)`.

    A system gives its share, rounded up or down by chance, and at least one frame if one of each
    takes no more than half of the budget.
    """
    has_frames = counts > 0
    cost_of_one_each = float(costs[has_frames].sum())
    one_each = 2 * cost_of_one_each <= max_cost
    budget = max_cost - cost_of_one_each if one_each else max_cost
    expected = counts * (budget / float(counts @ costs))
    drawn = np.floor(expected).astype(int)
    drawn += stream.random(len(counts)) < expected - drawn
    if one_each:
        drawn = drawn + has_frames
    drawn = np.minimum(counts, drawn)

    systems_of: dict[int, list[int]] = {}  # by type of frame 0
    for k in np.flatnonzero(has_frames).tolist():
        types = systems[k].types(np.zeros(1, dtype=np.int64))[0]
        for kind in sorted(set(types.tolist())):
            systems_of.setdefault(kind, []).append(k)
    for kind, members in systems_of.items():
        enough = min(_FRAMES_OF_A_TYPE, int(counts[members].sum()))
        lacking = enough - int(drawn[members].sum())
        if kind < 0 or lacking <= 0:
            continue
        for k in stream.permutation(members).tolist():
            fair_share = -(-_FRAMES_OF_A_TYPE // len(members))
            added = min(lacking, int(counts[k] - drawn[k]), fair_share)
            drawn[k] += added
            lacking -= added
    return np.asarray(drawn)


def packed(
    systems: Sequence[System], numbers: Sequence[np.ndarray], atoms: int
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Yield frames of systems of similar sizes together: small ones are not read one by one.

    A pack has `atoms` atoms at most, padding included; a larger frame is a pack alone. All systems
    of a pack have cells, or none has.
    """
    pack: list[tuple[int, np.ndarray]] = []
    room = 0  # frames that the pack still takes
    pbc = False  # of the pack
    for k in sorted(range(len(systems)), key=lambda k: (systems[k].pbc, -systems[k].natoms)):
        system = systems[k]
        if pack and system.pbc != pbc:
            yield pack
            pack = []
        remaining = numbers[k]
        while len(remaining):
            if not pack:
                room = max(1, atoms // system.natoms)  # the first system of a pack is its largest
                pbc = system.pbc
            taken = remaining[:room]
            pack.append((k, taken))
            remaining = remaining[room:]
            room -= len(taken)
            if not room:
                yield pack
                pack = []
    if pack:
        yield pack


def read_ahead(
    build: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Yield `build(item)` in the order of the items, built ahead by `workers` threads.

    At most so many results wait.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="deepmd_muon-reading") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(build, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
