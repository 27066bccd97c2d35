"""Bounded samples of data: what is measured before the first step must not take longer for larger data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from deepmd_muon.data.system import System

Item = TypeVar("Item")
Found = TypeVar("Found")

#: What reading a frame costs besides its atoms, in atoms.
FRAME_COST = 24
#: Cut-off at which an atom's neighbours count as one [Å].
_USUAL_RCUT = 6.0
# Frames in which every type is looked at, as far as the data have them.
_FRAMES_OF_A_TYPE = 16


def frame_costs(systems: Sequence[System], rcut: float | None = None) -> np.ndarray:
    """Return what a frame of each system costs, in atoms `(nsystems,)`; `rcut` [Å] where its neighbours are found."""
    volume = 1.0 if rcut is None else max(0.25, (rcut / _USUAL_RCUT) ** 3)
    return np.array([system.natoms * volume + FRAME_COST for system in systems])


def sample_frames(
    systems: Sequence[System],
    most: float,
    rcut: float | None = None,
    candidates: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Draw frames of systems with one type map, the same ones in every process; return their numbers, ascending.

    All are taken where their cost, see `frame_costs`, is at most `most`. Otherwise each system takes part in proportion
    to its frames, and each type occurs in some of them; systems that alone have a type may be added. `candidates` are
    the frames of each system that are drawn from, all by default.
    """
    counts = np.array(
        [s.nframes for s in systems] if candidates is None else [len(c) for c in candidates],
        dtype=int,
    )
    costs = frame_costs(systems, rcut)
    stream = np.random.Generator(np.random.PCG64(0))
    wanted = (
        counts if counts @ costs <= most else _drawn_counts(systems, counts, costs, most, stream)
    )
    found = []
    for k, (count, number) in enumerate(zip(counts.tolist(), wanted.tolist(), strict=True)):
        # numpy takes 20 µs to draw nothing, and most of many systems give nothing.
        drawn = 0 < number < count
        chosen = (
            np.sort(stream.choice(count, number, replace=False)) if drawn else np.arange(number)
        )
        found.append(chosen if candidates is None else candidates[k][chosen])
    return found


def sample_with(
    systems: Sequence[System], first: Sequence[np.ndarray], most: float, rcut: float | None = None
) -> list[np.ndarray]:
    """Draw frames as `sample_frames` does, but take those in `first`, which has some of each system, before others."""
    others = [np.arange(s.nframes) for s in systems]
    others = [
        np.delete(every, mine) if len(mine) else every
        for every, mine in zip(others, first, strict=True)
    ]
    left = most - float(frame_costs(systems, rcut) @ [len(mine) for mine in first])
    drawn = sample_frames(systems, max(left, 0.0), rcut, others)
    return [
        np.sort(np.concatenate([a, b])) if len(a) else b for a, b in zip(first, drawn, strict=True)
    ]


def _drawn_counts(
    systems: Sequence[System],
    counts: np.ndarray,
    costs: np.ndarray,
    most: float,
    stream: np.random.Generator,
) -> np.ndarray:
    """Draw how many frames each system gives: its share, rounded up or down by chance; one at least where that fits."""
    there = counts > 0
    lone = float(costs[there].sum())
    share = (
        (most - lone) / float(counts @ costs) if 2 * lone <= most else most / float(counts @ costs)
    )
    expected = counts * share
    drawn = np.floor(expected).astype(int)
    drawn += stream.random(len(counts)) < expected - drawn
    drawn = np.minimum(counts, drawn + (there if 2 * lone <= most else 0))
    systems_of: dict[int, list[int]] = {}
    for k in np.flatnonzero(there).tolist():
        for kind in sorted(set(systems[k].types(np.zeros(1, dtype=np.int64))[0].tolist())):
            systems_of.setdefault(kind, []).append(k)
    for kind, members in systems_of.items():
        lacking = min(_FRAMES_OF_A_TYPE, int(counts[members].sum())) - int(drawn[members].sum())
        if kind < 0 or lacking <= 0:
            continue
        for k in stream.permutation(members).tolist():
            more = min(lacking, int(counts[k] - drawn[k]), -(-_FRAMES_OF_A_TYPE // len(members)))
            drawn[k] += more
            lacking -= more
    return np.asarray(drawn)


def packed(
    systems: Sequence[System], numbers: Sequence[np.ndarray], atoms: int
) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Yield frames of systems of similar sizes together, so that small ones are not gone through one by one.

    A part has `atoms` atoms at most, padding included; a larger frame is a part of its own.
    """
    part: list[tuple[int, np.ndarray]] = []
    room = 0
    order = sorted(range(len(systems)), key=lambda k: (systems[k].pbc, -systems[k].natoms))
    for k, before in zip(order, [None, *order], strict=False):
        mine = numbers[k]
        if before is not None and systems[k].pbc != systems[before].pbc and part:
            yield part
            part = []
        while len(mine):
            if not part:
                room = max(
                    1, atoms // systems[k].natoms
                )  # the first system of a part is its largest
            part.append((k, mine[:room]))
            mine, room = mine[room:], room - len(part[-1][1])
            if not room:
                yield part
                part = []
    if part:
        yield part


def read_ahead(
    build: Callable[[Item], Found], items: Iterable[Item], workers: int
) -> Iterator[Found]:
    """Yield `build(item)` in the order of the items, made ahead by so many threads; as many results wait at most."""
    waiting: deque[Future[Found]] = deque()
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
