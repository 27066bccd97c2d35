"""Batches for training, and samples for statistics."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepmd_muon.data.errors import NeighborError, SamplingError
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.cache import (
    CHUNK_ATOMS,
    NeighborCache,
    number_of_types,
    worker_count,
)
from deepmd_muon.data.neighbors.lists import NeighborList, stack_neighbors
from deepmd_muon.data.sampling.atom_budget import AtomBudgetSampler
from deepmd_muon.data.sampling.balance import BalancedOrder, cost_of_frame, distribute
from deepmd_muon.data.sampling.sampler import (
    BatchRule,
    Plan,
    Sampler,
    new_seed,
    system_probabilities,
)
from deepmd_muon.data.sampling.samples import packed, read_ahead, sample_frames
from deepmd_muon.data.system import System

# Systems of a batch, and frames of a system, that a message names.
_SYSTEMS_NAMED, _FRAMES_NAMED = 8, 16


@dataclass(frozen=True)
class Origin:
    """Where the frames of a batch come from: names of systems and numbers of their frames, in the batch's order."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, systems: Sequence[System], plan: Plan) -> Origin:
        """Return the origin of a planned batch."""
        return cls(tuple((systems[k].name, tuple(numbers.tolist())) for k, numbers in plan.parts))

    def __str__(self) -> str:
        """Name systems and frames; of many, the first ones."""
        by_system: dict[str, list[int]] = {}
        for name, numbers in self.parts:
            by_system.setdefault(name, []).extend(numbers)
        words = [
            f"{name} ({_frames_in_words(numbers)})"
            for name, numbers in itertools.islice(by_system.items(), _SYSTEMS_NAMED)
        ]
        more = len(by_system) - len(words)
        return ", ".join([*words, f"{more} more systems"] if more else words)


def _frames_in_words(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_FRAMES_NAMED]))
    if len(numbers) > _FRAMES_NAMED:
        return f"frames {shown}, … of {len(numbers)}"
    return f"frame {shown}" if len(numbers) == 1 else f"frames {shown}"


@dataclass(frozen=True)
class Batch:
    """Frames with their neighbours, and where they come from."""

    frames: Frames
    neighbors: NeighborList
    origin: Origin


class Seats(NamedTuple):
    """The ranks that take a batch in a step."""

    number: int  # how many there are
    mine: int | None  # place of this rank among them; None where it takes no batch


class DataLoader:
    """Endless random batches whose position can be saved, and evenly spread samples.

    Single-threaded and deterministic. With `prefetch`, a background thread builds one batch ahead; the
    batches and `state_dict` are the same. Under data parallelism all ranks hold the same position: rank r of
    N takes batches r, r + N, r + 2N, … of one order. A loader is read by `next` or by `deal`, not by both.

    Parameters
    ----------
    systems : sequence of System
        Where frames come from.
    batch_size : int, str or sequence of int
        See `BatchRule.parse`.
    auto_prob, sys_probs
        See `system_probabilities`.
    seed : int, optional
        Seed of the order; drawn when left out, and saved with the position either way.
    rcut, sel, by_type, cache_bytes
        Settings of the neighbour cache, see `NeighborCache`; not needed with `cache`.
    cache : NeighborCache, optional
        Use this cache, e.g. the one that `neighbor_statistics` has filled.
    prefetch : bool
        Build one batch ahead in a thread.
    rank, world_size : int
        Which of the parallel readers this is.
    batches_per_step : int
        Batches that a reader needs at once: a position lies between such groups.
    balance : bool
        Order batches so that those of a step cost about the same, see `BalancedOrder`, and deal out those of a step
        that takes several by their cost. The order is the same for any number of readers.

    Attributes
    ----------
    systems : tuple of System
        Those in use: ``filter:N`` leaves some out.
    batch_sizes : tuple of int
        Frames of a batch of each system.
    nbatches : tuple of int
        Batches of each system.
    probabilities : ndarray, (nsystems,)
        Probability of each system.
    cache : NeighborCache
        The neighbour lists.
    """

    def __init__(
        self,
        systems: Sequence[System],
        batch_size: int | str | Sequence[int] = "auto",
        *,
        auto_prob: str = "prob_sys_size",
        sys_probs: Sequence[float] | None = None,
        seed: int | None = None,
        rcut: float | None = None,
        sel: Sequence[int] | None = None,
        by_type: bool = True,
        cache_bytes: int = 2 << 30,
        cache: NeighborCache | None = None,
        prefetch: bool = False,
        rank: int = 0,
        world_size: int = 1,
        batches_per_step: int = 1,
        balance: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise SamplingError(f"rank {rank} is not one of {world_size}")
        rule = BatchRule.parse(batch_size)
        self.systems = tuple(systems[k] for k in rule.keep([system.natoms for system in systems]))
        natoms = [system.natoms for system in self.systems]
        self.batch_sizes = rule.frames_per_batch(natoms)
        nframes = [system.nframes for system in self.systems]
        # Batches of several systems draw single frames, so systems count by frames there.
        self.nbatches = tuple(
            n if rule.kind in ("mixed", "mix") else -(-n // b)
            for n, b in zip(nframes, self.batch_sizes, strict=True)
        )
        self.probabilities = system_probabilities(self.nbatches, auto_prob, sys_probs)
        if cache is None:
            if rcut is None:
                raise NeighborError("give rcut and sel, or a NeighborCache")
            cache = NeighborCache(
                rcut, sel, by_type, cache_bytes, max(map(number_of_types, self.systems))
            )
        self.cache = cache
        self.rank = rank
        self.world_size = world_size
        self.batches_per_step = batches_per_step
        if seed is None:
            seed = new_seed()
        # Without names: data that moved to another place are still the same data.
        identity = repr([(s.natoms, s.pbc, s.mixed, sorted(s.labels)) for s in self.systems])
        self._sampler: Sampler | AtomBudgetSampler
        if rule.kind == "mix":
            self._sampler = AtomBudgetSampler(
                nframes, natoms, self.probabilities, rule.number, seed, identity
            )
        else:
            mixed = rule.number if rule.kind == "mixed" else 0
            self._sampler = Sampler(
                nframes, self.batch_sizes, self.probabilities, seed, mixed, identity
            )
        self._order = BalancedOrder(self._sampler, self._cost) if balance else self._sampler
        self._balance = balance
        self._costs: dict[int, float] = {}
        self._bounded: dict[tuple[int, float], list[np.ndarray]] = {}
        self._drawn: deque[Plan] = deque()
        self._step = self._taken = 0
        self._seats: Iterator[Seats] = itertools.repeat(Seats(world_size, rank))
        self._present = world_size
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="deepmd_muon-data") if prefetch else None
        )
        self._ahead: Future[Batch] | None = None

    # -- random batches --------------------------------------------------------------------------------------

    def next(self) -> Batch:
        """Return the next random batch of this rank."""
        if self._thread is None:
            batch = self.build(self.draw())
        else:
            ahead = (
                self._ahead
                if self._ahead is not None
                else self._thread.submit(self.build, self.draw())
            )
            self._ahead = None
            batch = ahead.result()
            self._ahead = self._thread.submit(self.build, self.draw())
        self.advance()
        return batch

    @property
    def mixes_systems(self) -> bool:
        """Whether the frames of a batch may come from several systems."""
        return self._sampler.mixes_systems

    @property
    def most_frames(self) -> int:
        """Frames of a batch, at most."""
        if isinstance(self._sampler, AtomBudgetSampler):
            return self._sampler.most_frames
        return max(self._sampler.mixed, *self.batch_sizes)

    def draw(self) -> Plan:
        """Draw the next batch of this rank without reading its frames, any number ahead of `advance`."""
        while not self._drawn:
            number, mine = next(self._seats)
            plans = [self._order.next() for _ in range(number * self.batches_per_step)]
            if number * self.batches_per_step == 1 and mine is not None:
                self._drawn.extend(plans)
            elif mine is not None:
                by_cost = self._balance and self.batches_per_step > 1
                costs = [self._cost(plan) if by_cost else 1.0 for plan in plans]
                self._drawn.extend(plans[k] for k in distribute(costs, number)[mine])
        return self._drawn.popleft()

    def _cost(self, plan: Plan) -> float:
        """Return the cost of a batch: that of the first frame of its systems, for each of its frames."""
        for k, _ in plan.parts:
            if k not in self._costs:
                first = self.systems[k].frames(np.zeros(1, dtype=np.int64))
                self._costs[k] = cost_of_frame(self.cache.frame(self.systems[k], 0, first, 0))
        return sum(len(numbers) * self._costs[k] for k, numbers in plan.parts)

    def advance(self) -> None:
        """Take the next batch, which has been drawn: the position moves when the last one of a step has been taken."""
        self._taken += 1
        if self._taken == self.batches_per_step:
            self._step += self._present * self._taken
            self._taken = 0

    def seat(self, seats: Iterator[Seats]) -> None:
        """Deal out batches by these seats of each step, before the first draw; by default all ranks have one always.

        They are read as far ahead as batches are drawn.
        """
        self._seats = seats

    def begin_step(self, seats: Seats) -> None:
        """Note the seats of the step that begins: the position moves now where this rank has none."""
        self._present = seats.number
        if seats.mine is None:
            self._step += seats.number * self.batches_per_step

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the batches of whole steps: plain values, equal on all ranks."""
        return self._order.state_dict(self._step)

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue after a saved position: the next batches are those of an uninterrupted run.

        Raises
        ------
        SamplerStateError
            When the position was saved with other systems, batch sizes or probabilities; the loader stays as
            it was.
        """
        self._order.load_state_dict(state)
        self._step = self._order.step
        self._taken = 0
        self._drawn.clear()
        self._ahead = None

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every system is expected to have been served once, ceil(max(batches / probability)).

        Those of all ranks together; this is what ``numb_epoch`` multiplies, as in DeePMD.
        """
        if isinstance(self._sampler, AtomBudgetSampler):
            return self._sampler.batches_per_epoch
        drawn = self.probabilities > 0
        turns = float((np.array(self.nbatches)[drawn] / self.probabilities[drawn]).max())
        frames_a_batch = max(1, self._sampler.mixed)
        # 1e-9: probabilities in proportion to batches give the sum of batches up to rounding.
        return math.ceil(turns * (1 - 1e-9) / frames_a_batch)

    # -- batches dealt out to the ranks ------------------------------------------------------------------------

    def deal(self, count: int) -> Iterator[tuple[Batch, bool]]:
        """Distribute the next `count` random batches among the ranks, which together see those of one process.

        Yield a batch of this rank, and whether it counts: if `count` is not a multiple of the number of ranks, some
        repeat a batch of another rank, so that all get equally many.
        """

        def drawn() -> Iterator[Plan]:
            for _ in range(count):
                self._step += 1
                yield self._order.next()

        for batch, counts, _ in self._dealt(drawn()):
            yield batch, counts

    def deal_all(self) -> Iterator[tuple[Batch, bool]]:
        """Deal every frame of every system out once, in order; otherwise as `deal`. The random order does not move."""
        for batch, counts, _ in self.deal_sample([system.nframes for system in self.systems]):
            yield batch, counts

    def deal_sample(self, wanted: Sequence[int]) -> Iterator[tuple[Batch, bool, int]]:
        """Deal `wanted` frames of each system out, spread evenly over it, with its number; otherwise as `deal_all`."""
        yield from self._dealt(self._spread(wanted))

    def _spread(self, wanted: Sequence[int]) -> Iterator[Plan]:
        """Yield batches of at most `wanted` frames of each system, spread evenly over it."""
        for k, (size, numbers) in enumerate(
            zip(self.batch_sizes, self._numbers(wanted), strict=True)
        ):
            for first in range(0, len(numbers), size):
                yield Plan(((k, numbers[first : first + size]),))

    def _numbers(self, wanted: Sequence[int]) -> list[np.ndarray]:
        """Return the numbers of at most `wanted` frames of each system, spread evenly over it."""
        pairs = (
            (system.nframes, min(system.nframes, n))
            for system, n in zip(self.systems, wanted, strict=True)
        )
        return [np.arange(n) * nframes // max(1, n) for nframes, n in pairs]

    def _dealt(self, plans: Iterator[Plan]) -> Iterator[tuple[Batch, bool, int]]:
        """Yield this rank's batches, whether each counts, and the number of its first system."""
        while turn := list(itertools.islice(plans, self.world_size)):
            there = self.rank < len(turn)
            plan = turn[self.rank if there else 0]
            yield self.build(plan), there, plan.parts[0][0]

    # -- samples for statistics ------------------------------------------------------------------------------

    def sample_batches(self, nbatches: int) -> Iterator[Batch]:
        """At most `nbatches` batches of every system, spread evenly over its frames, for statistics.

        The same on every rank, and leaves the random order where it is.
        """
        return map(self.build, self._spread([nbatches * size for size in self.batch_sizes]))

    def bounded_batches(self, nbatches: int, most: float) -> Iterator[Batch]:
        """Frames of `sample_batches`, small systems together in a batch; for measuring the data.

        Where they cost more than `most`, a sample of them; see `sample_frames`.
        """
        numbers = self.bounded_numbers(nbatches, most)
        plans = (Plan(tuple(part)) for part in packed(self.systems, numbers, CHUNK_ATOMS))
        return read_ahead(self.build, plans, worker_count())

    def bounded_numbers(self, nbatches: int, most: float) -> list[np.ndarray]:
        """Return the numbers of the frames of each system that `bounded_batches` reads."""
        if (nbatches, most) not in self._bounded:
            candidates = self._numbers([nbatches * size for size in self.batch_sizes])
            self._bounded[nbatches, most] = sample_frames(
                self.systems, most, self.cache.rcut, candidates
            )
        return self._bounded[nbatches, most]

    # -- building --------------------------------------------------------------------------------------------

    def build(self, plan: Plan) -> Batch:
        """Read the frames of a plan and look their neighbours up."""
        frames = []
        neighbors = []
        for k, numbers in plan.parts:
            system = self.systems[k]
            part = system.frames(numbers)
            frames.append(part)
            neighbors += [
                self.cache.frame(system, int(n), part, row) for row, n in enumerate(numbers)
            ]
        origin = Origin.of(self.systems, plan)
        return Batch(Frames.concatenate(frames), stack_neighbors(neighbors), origin)

    def close(self) -> None:
        """End the background thread; the loader still works, without it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
            self.load_state_dict(self.state_dict())
