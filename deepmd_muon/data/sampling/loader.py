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

from deepmd_muon.data.errors import SamplingError
from deepmd_muon.data.frames import Frames
from deepmd_muon.data.neighbors.cache import (
    CHUNK_ATOMS,
    NeighborCache,
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
_SYSTEMS_NAMED = 8
_FRAMES_NAMED = 16


@dataclass(frozen=True)
class Origin:
    """Where the frames of a batch come from."""

    # Names of systems, each with the numbers of its frames, in the order of the batch.
    parts: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, systems: Sequence[System], plan: Plan) -> Origin:
        """Return the origin of a planned batch."""
        return cls(tuple((systems[k].name, tuple(numbers.tolist())) for k, numbers in plan.parts))

    def __str__(self) -> str:
        """Name systems and frames; the first ones if there are many."""
        by_system: dict[str, list[int]] = {}
        for name, numbers in self.parts:
            by_system.setdefault(name, []).extend(numbers)
        words = [
            f"{name} ({_frames_in_words(numbers)})"
            for name, numbers in itertools.islice(by_system.items(), _SYSTEMS_NAMED)
        ]
        n_unnamed = len(by_system) - len(words)
        if n_unnamed:
            words.append(f"{n_unnamed} more systems")
        return ", ".join(words)


def _frames_in_words(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_FRAMES_NAMED]))
    if len(numbers) > _FRAMES_NAMED:
        return f"frames {shown}, … of {len(numbers)}"
    return f"frame {shown}" if len(numbers) == 1 else f"frames {shown}"


@dataclass(frozen=True)
class Batch:
    """Frames with their neighbours, and their origin."""

    frames: Frames
    neighbors: NeighborList
    origin: Origin


class Seats(NamedTuple):
    """The ranks that take a batch in a step."""

    number: int  # how many there are
    mine: int | None  # place of this rank among them; None if it takes no batch


class DataLoader:
    """Endless random batches with a position that can be saved, and evenly spread samples.

    Single-threaded and deterministic. With `prefetch`, a background thread builds one batch ahead;
    the batches and `state_dict` are the same. Under data parallelism all ranks hold the same
    position: rank r of N takes batches r, r + N, r + 2N, … of one order. A loader is read by `next`
    or by `deal`, not by both.

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
    cache : NeighborCache
        The neighbour lists, such as those that `neighbor_statistics` has filled in.
    prefetch : bool
        Build one batch ahead in a thread.
    rank, world_size : int
        Which of the parallel readers this is.
    batches_per_step : int
        Batches that a reader needs at once: a position lies between such groups.
    balance : bool
        Order batches so that the batches of a step cost about the same, see `BalancedOrder`. If a
        reader takes several batches a step, deal them out by their cost. The order is the same for
        any number of readers.

    Attributes
    ----------
    systems : tuple of System
        The systems in use: ``filter:N`` leaves some out.
    batch_sizes : tuple of int
        Frames of a batch of each system.
    nbatches : tuple of int
        Batches of each system.
    probabilities : ndarray, (nsystems,)
        Probability of each system.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each setting of training_data
        self,
        systems: Sequence[System],
        batch_size: int | str | Sequence[int] = "auto",
        *,
        auto_prob: str = "prob_sys_size",
        sys_probs: Sequence[float] | None = None,
        seed: int | None = None,
        cache: NeighborCache,
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
        # Batches of several systems draw single frames: there, systems count by their frames.
        draws_frames = rule.kind in ("mixed", "mix")
        self.nbatches = tuple(
            n if draws_frames else -(-n // size)
            for n, size in zip(nframes, self.batch_sizes, strict=True)
        )
        self.probabilities = system_probabilities(self.nbatches, auto_prob, sys_probs)
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
                nframes=nframes,
                natoms=natoms,
                probabilities=self.probabilities,
                budget=rule.number,
                seed=seed,
                identity=identity,
            )
        else:
            self._sampler = Sampler(
                nframes=nframes,
                sizes=self.batch_sizes,
                probabilities=self.probabilities,
                seed=seed,
                mixed=rule.number if rule.kind == "mixed" else 0,
                identity=identity,
            )
        self._order = BalancedOrder(self._sampler, self._cost) if balance else self._sampler
        self._balance = balance
        self._costs: dict[int, float] = {}  # of the first frame of each system
        self._bounded: dict[tuple[int, float], list[np.ndarray]] = {}  # see `bounded_numbers`
        # Plans of this rank that were drawn ahead; batches drawn but not taken do not count in the
        # position.
        self._drawn: deque[Plan] = deque()
        self._step = 0  # position: batches of all ranks in whole steps
        self._taken = 0  # batches of this rank in the step
        self._seats: Iterator[Seats] = itertools.repeat(Seats(world_size, rank))
        self._n_present = world_size  # seats of the step
        self._thread: ThreadPoolExecutor | None = None
        if prefetch:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="deepmd_muon-data")
        self._ahead: Future[Batch] | None = None  # the batch that the thread builds

    # ----- random batches ------------------------------------------------------------------------

    def next(self) -> Batch:
        """Return the next random batch of this rank."""
        if self._thread is None:
            batch = self.build(self.draw())
        else:
            ahead = self._ahead
            if ahead is None:
                ahead = self._thread.submit(self.build, self.draw())
            self._ahead = None  # not built again if it raises
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
        """Draw the next batch of this rank without reading its frames.

        It may be called any number of times ahead of `advance`.
        """
        while not self._drawn:
            seats = next(self._seats)
            plans = [self._order.next() for _ in range(seats.number * self.batches_per_step)]
            if seats.mine is None:
                continue
            if len(plans) == 1:
                self._drawn.extend(plans)
                continue
            costs = [1.0] * len(plans)  # equal costs are dealt out in turn
            if self._balance and self.batches_per_step > 1:
                costs = [self._cost(plan) for plan in plans]
            positions = distribute(costs, seats.number)[seats.mine]
            self._drawn.extend(plans[k] for k in positions)
        return self._drawn.popleft()

    def _cost(self, plan: Plan) -> float:
        """Return the cost of a batch: every frame counts as the first frame of its system."""
        for k, _ in plan.parts:
            if k not in self._costs:
                frame = self.systems[k].frames(np.zeros(1, dtype=np.int64))
                self._costs[k] = cost_of_frame(self.cache.frame(self.systems[k], 0, frame, 0))
        return sum(len(numbers) * self._costs[k] for k, numbers in plan.parts)

    def advance(self) -> None:
        """Count the next drawn batch as taken; the last one of a step moves the position."""
        self._taken += 1
        if self._taken == self.batches_per_step:
            self._step += self._n_present * self._taken
            self._taken = 0

    def seat(self, seats: Iterator[Seats]) -> None:
        """Deal out batches by these seats of each step; call it before the first draw.

        By default each rank takes part in every step. Seats are read as far ahead as batches are
        drawn.
        """
        self._seats = seats

    def begin_step(self, seats: Seats) -> None:
        """Note the seats of the step that begins; if this rank has none, the position moves now."""
        self._n_present = seats.number
        if seats.mine is None:
            self._step += seats.number * self.batches_per_step

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the last whole step: plain values, equal on all ranks."""
        return self._order.state_dict(self._step)

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Continue after a saved position with the next batches of an uninterrupted run.

        Raises
        ------
        SamplerStateError
            When the position was saved with other systems, batch sizes or probabilities; the loader
            stays as it was.
        """
        self._order.load_state_dict(state)
        self._step = self._order.step
        self._taken = 0
        self._drawn.clear()
        self._ahead = None

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every system is expected to have been served once, of all ranks together.

        This is ⌈max(batches / probability)⌉, which ``numb_epoch`` multiplies, as in DeePMD.
        """
        if isinstance(self._sampler, AtomBudgetSampler):
            return self._sampler.batches_per_epoch
        is_drawn = self.probabilities > 0
        draws = float((np.array(self.nbatches)[is_drawn] / self.probabilities[is_drawn]).max())
        draws_per_batch = max(1, self._sampler.mixed)
        # 1e-9: probabilities in proportion to batches give the sum of batches up to rounding.
        return math.ceil(draws * (1 - 1e-9) / draws_per_batch)

    # ----- batches dealt out to the ranks --------------------------------------------------------

    def deal(self, count: int) -> Iterator[tuple[Batch, bool]]:
        """Distribute the next `count` random batches among the ranks.

        Together the ranks see the batches of one process. Yield a batch of this rank, and whether
        it counts: if `count` is not a multiple of the number of ranks, some ranks repeat a batch of
        another rank, so that all get equally many.
        """

        def draw() -> Iterator[Plan]:
            for _ in range(count):
                self._step += 1
                yield self._order.next()

        for batch, counts, _ in self._deal_plans(draw()):
            yield batch, counts

    def deal_all(self) -> Iterator[tuple[Batch, bool]]:
        """Deal every frame of every system out once, in order; otherwise as `deal`.

        The random order does not move.
        """
        for batch, counts, _ in self.deal_sample([system.nframes for system in self.systems]):
            yield batch, counts

    def deal_sample(self, max_frames: Sequence[int]) -> Iterator[tuple[Batch, bool, int]]:
        """Deal at most `max_frames` frames of each system, evenly spread; otherwise as `deal_all`.

        The third value is the number of the system.
        """
        yield from self._deal_plans(self._sample_plans(max_frames))

    def _deal_plans(self, plans: Iterator[Plan]) -> Iterator[tuple[Batch, bool, int]]:
        """Yield this rank's batches, whether each counts, and the number of its first system."""
        while turn := list(itertools.islice(plans, self.world_size)):
            counts = self.rank < len(turn)
            plan = turn[self.rank if counts else 0]
            system, _ = plan.parts[0]
            yield self.build(plan), counts, system

    # ----- samples for statistics ----------------------------------------------------------------

    def sample_batches(self, nbatches: int) -> Iterator[Batch]:
        """Yield at most `nbatches` batches of every system, spread evenly over its frames.

        They are the same on every rank. The random order does not move.
        """
        return map(self.build, self._sample_plans([nbatches * size for size in self.batch_sizes]))

    def bounded_batches(self, nbatches: int, max_cost: float) -> Iterator[Batch]:
        """Yield the frames of `sample_batches`, small systems together in a batch.

        If they cost more than `max_cost`, take a sample of them; see `sample_frames`.
        """
        numbers = self.bounded_numbers(nbatches, max_cost)
        plans = (Plan(tuple(pack)) for pack in packed(self.systems, numbers, CHUNK_ATOMS))
        return read_ahead(self.build, plans, worker_count())

    def bounded_numbers(self, nbatches: int, max_cost: float) -> list[np.ndarray]:
        """Return the numbers of the frames of each system that `bounded_batches` reads."""
        if (nbatches, max_cost) not in self._bounded:
            candidates = self._sample_numbers([nbatches * size for size in self.batch_sizes])
            self._bounded[nbatches, max_cost] = sample_frames(
                self.systems, max_cost, self.cache.rcut, candidates
            )
        return self._bounded[nbatches, max_cost]

    def _sample_plans(self, max_frames: Sequence[int]) -> Iterator[Plan]:
        """Yield batches of at most `max_frames` frames of each system, spread evenly over it."""
        for k, numbers in enumerate(self._sample_numbers(max_frames)):
            size = self.batch_sizes[k]
            for begin in range(0, len(numbers), size):
                yield Plan(((k, numbers[begin : begin + size]),))

    def _sample_numbers(self, max_frames: Sequence[int]) -> list[np.ndarray]:
        """Return the numbers of at most `max_frames` frames of each system, evenly spread."""
        numbers = []
        for system, limit in zip(self.systems, max_frames, strict=True):
            count = min(system.nframes, limit)
            numbers.append(np.arange(count) * system.nframes // max(1, count))
        return numbers

    # ----- building ------------------------------------------------------------------------------

    def build(self, plan: Plan) -> Batch:
        """Read the frames of a plan and look their neighbours up."""
        frames = []
        neighbors = []
        for k, numbers in plan.parts:
            system = self.systems[k]
            of_system = system.frames(numbers)
            frames.append(of_system)
            neighbors += [
                self.cache.frame(system, number, of_system, row)
                for row, number in enumerate(numbers.tolist())
            ]
        return Batch(
            frames=Frames.concatenate(frames),
            neighbors=stack_neighbors(neighbors),
            origin=Origin.of(self.systems, plan),
        )

    def close(self) -> None:
        """End the background thread; the loader still works, without it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None
            self.load_state_dict(self.state_dict())
