"""Anchors: where a run's own dynamics leave the data, hold it near the forces of an early copy of itself. An experiment.

At one step the weights are copied. From then on, dynamics of the present weights run every few hundred steps, hotter
than the data. Structures with a pair that is too close, or with a force that changes too fast, enter a ring with the
copy's forces, and some training steps add a hinge on the difference. No labels are needed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from watched import WatchedRun, copies_of

from deepmd_muon.data import DataLoader, Frames, System
from deepmd_muon.dynamics.systems import Systems
from deepmd_muon.model import EnergyModel
from deepmd_muon.model.nn.graphs import GraphMemory, Replayed
from deepmd_muon.train import trainer
from deepmd_muon.train.step.step import TrainingStep
from deepmd_muon.train.step.stepper import Stepper, build_stepper

#: Bad structures have a pair below this ratio of the shortest distance in the data; below the other one they are useless.
CLOSE, CLOSEST = 0.9, 0.45
#: Largest change of a force over that of positions [eV/Å²]: at least `STIFF`, more where forces are large.
STIFF, SOFTENED, LARGE = 300.0, 0.1, 100.0
#: Largest force of the copy on a structure that enters [eV/Å].
LARGEST = 50.0
#: Differences of forces that cost nothing, relative to the copy's force.
FREE_SHARE = 0.1
#: Structures of each copy in the ring, and looks after which it starts again.
SLOTS, LONGEST = 32, 500
#: Starts of each copy.
STARTS = 16
#: Prefactor of the hinge, from the first to the last rate: that of forces in the race's loss.
PREFACTORS = (1000.0, 1.0)


@dataclass(frozen=True)
class Anchors:
    """When a run is anchored, and how strongly.

    Attributes
    ----------
    hand_over
        Step at which the weights are copied.
    weight
        Of the hinge, relative to that of forces.
    explore_every, looks
        Steps between two rounds of dynamics, and how many times `WATCH` steps a round has.
    every
        A step in so many has the hinge.
    copies
        Structures in the dynamics, and in the hinge.
    all_structures
        Whether good structures enter, too.
    in_a_row
        Bad structures after which a copy starts again.
    free
        Differences of forces that cost nothing [eV/Å].
    """

    hand_over: int = 3000
    weight: float = 1.0
    explore_every: int = 500
    looks: int = 25
    every: int = 10
    copies: int = 8
    all_structures: bool = False
    in_a_row: int = 8
    free: float = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What the dynamics of a set need."""

    systems: Sequence[System]
    shortest: np.ndarray  # distances of pairs of types (ntypes, ntypes) [Å]
    temperature: float  # [K]
    time_step: float  # [fs]
    masses: tuple[float, ...]


def starts_of(model: EnergyModel, surroundings: Surroundings, copies: int) -> list[Systems]:
    """Return `STARTS` times the copies with velocities; a copy keeps its types and its cell."""
    random = np.random.default_rng(1)
    systems = [surroundings.systems[k % len(surroundings.systems)] for k in range(copies)]
    cells = [system.frames([0]).box for system in systems]
    device = next(model.parameters()).device
    kelvin = torch.full((copies,), surroundings.temperature, dtype=torch.float64)
    results = []
    for number in range(STARTS):
        frames = [
            Frames(frame.atype, frame.coord, cell)
            for system, cell in zip(systems, cells, strict=True)
            for frame in [system.frames([int(random.integers(system.nframes))])]
        ]
        start = Systems.from_frames(
            Frames.concatenate(frames), model.type_map, device, surroundings.masses
        )
        results.append(copies_of(start, kelvin, seed=number))
    return results


class AnchoredRun(WatchedRun):
    """Dynamics of the present weights that fill the ring; all of it on the device."""

    def __init__(self, model: EnergyModel, surroundings: Surroundings, anchors: Anchors) -> None:
        starts = starts_of(model, surroundings, anchors.copies)
        kelvin = torch.full((anchors.copies,), surroundings.temperature, dtype=torch.float64)
        with exactly(model):
            super().__init__(
                model, starts[0], surroundings.shortest, kelvin, surroundings.time_step
            )
        self._anchors = anchors
        self._copy = copy.deepcopy(model).requires_grad_(False)
        self._copy.pieces = ()
        self._starts = torch.stack([start.coord for start in starts])
        self._velocities = torch.stack([start.velocity for start in starts])
        device = self._coord.device
        self._rows = torch.arange(anchors.copies, device=device)
        self._ring = self._coord[:, None].repeat(1, SLOTS, 1, 1)
        self._ring_force = torch.zeros_like(self._ring)

        def counts() -> Tensor:
            return torch.zeros(anchors.copies, dtype=torch.int64, device=device)

        self.taken, self.blown, self.bad = counts(), counts(), counts()
        self._turn, self._started, self._in_a_row, self._age = (counts() for _ in range(4))
        self._coord_before, self._force_before = self._coord.clone(), self._force.clone()
        memory = GraphMemory() if device.type == "cuda" else None
        self._advance = Replayed(self._round, memory)

    @torch.no_grad()
    def explore(self) -> None:
        """Run some steps of dynamics."""
        with exactly(self._model):
            for _ in range(self._anchors.looks):
                self._advance()

    def add_gradient(self, model: EnergyModel, lr_fraction: float | Tensor) -> Tensor:
        """Add the gradient of the hinge to that of the parameters; return the hinge."""
        count = self.taken.clamp(max=SLOTS)
        slot = (self._turn + 5 * self._rows) % count.clamp(min=1)
        self._turn.add_(1)
        wanted = self._ring_force[self._rows, slot]
        structures = self._structures(self._ring[self._rows, slot])
        with exactly(model):
            force = model(structures, force=True, virial=False)["force"]
        difference = ((force - wanted).square().sum(-1) + 1e-12).sqrt()
        free = self._anchors.free + FREE_SHARE * wanted.square().sum(-1).sqrt()
        excess = torch.relu(difference - free)
        cost = (1.0 + excess.square()).sqrt() - 1.0
        first, last = PREFACTORS
        prefactor = self._anchors.weight * (last + (first - last) * lr_fraction)
        has_structure = (count > 0)[:, None]
        value = prefactor * torch.where(has_structure, cost, 0.0).sum() / self._natoms.sum()
        value.backward(inputs=[p for p in model.parameters() if p.requires_grad])
        return value.detach()

    def _step(self) -> None:
        self._coord_before.copy_(self._coord)
        self._force_before.copy_(self._force)
        super()._step()

    def _look(self) -> None:
        """Take bad structures into the ring; copies that blew up, or are old, start again."""
        ratio, _ = self._nearest()
        closest = torch.full_like(self._energy, torch.inf)
        closest.scatter_reduce_(0, self._frame, ratio.amin(1), "amin")
        moved = _longest(self._coord - self._coord_before)
        curvature = _longest(self._force - self._force_before) / moved.clamp(min=1e-6)
        ceiling = STIFF + _longest(self._force).clamp(max=LARGE) / SOFTENED
        gone = self._is_gone()
        bad = ((closest < CLOSE) | (curvature > ceiling)) & ~gone
        wanted = self._copy(self._present, force=True, virial=False)["force"]
        usable = (closest > CLOSEST) & (_longest(wanted) < LARGEST) & ~gone
        if not self._anchors.all_structures:
            usable = usable & bad
        slot = self.taken % SLOTS
        place = (self._rows, slot)
        new = usable[:, None, None]
        self._ring[place] = torch.where(new, self._coord, self._ring[place])
        self._ring_force[place] = torch.where(new, wanted, self._ring_force[place])
        self.taken.add_(usable)
        self.bad.add_(bad)
        self.blown.add_(gone)
        self._in_a_row.add_(bad)
        self._age.add_(1)
        self._restart(gone | (self._in_a_row >= self._anchors.in_a_row) | (self._age >= LONGEST))

    def _restart(self, ends: Tensor) -> None:
        """Let some copies start again."""
        self._started.add_(ends)
        place = (self._started % STARTS, self._rows)
        mask = ends[:, None, None]
        self._coord.copy_(torch.where(mask, self._starts[place], self._coord))
        self._velocity.copy_(torch.where(mask, self._velocities[place], self._velocity))
        # The first half step of a new start has no force.
        self._force.copy_(torch.where(mask, 0.0, self._force))
        self._age.masked_fill_(ends, 0)
        self._in_a_row.masked_fill_(ends, 0)
        self._fast.zero_()


def _longest(vectors: Tensor) -> Tensor:
    """Return the longest vector of each structure `(nstructures,)`."""
    return vectors.square().sum(-1).sqrt().amax(1)


@contextlib.contextmanager
def exactly(model: EnergyModel) -> Iterator[None]:
    """Let a model evaluate its embedding nets: tables do not reach to distances outside the data."""
    pieces = model.pieces
    if pieces:
        model.pieces = ()
    try:
        yield
    finally:
        if pieces:
            model.pieces = pieces


class AnchoredSteps(Stepper):
    """The steps of a run, with dynamics in between and the hinge in some."""

    def __init__(self, steps: Stepper, model: EnergyModel, run: RunAnchors) -> None:
        self._steps, self._model, self._run = steps, model, run

    def __call__(self, feed: Any, done: int) -> dict[str, Tensor]:
        """Update the parameters once; see `Stepper`."""
        self._run.before(done, self._model)
        return self._steps(_Feed(feed, self._run.holds), done)

    def check(self, done: int) -> None:
        """See `Stepper`."""
        self._steps.check(done)

    def close(self) -> None:
        """See `Stepper`."""
        self._steps.close()

    def open_batches(self, loader: DataLoader, ntypes: int) -> Any:
        """See `Stepper`."""
        return self._steps.open_batches(loader, ntypes)


class _Feed:
    """A batch whose step has a graph of its own if it has the hinge."""

    def __init__(self, feed: Any, holds: bool) -> None:
        self._feed = feed
        self.layout = (feed.layout, holds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)


class RunAnchors:
    """The anchors of a training run."""

    #: Dynamics with the ring.
    dynamics_type: type[AnchoredRun] = AnchoredRun

    def __init__(self, anchors: Anchors, surroundings: Surroundings) -> None:
        self._anchors, self._surroundings = anchors, surroundings
        self._dynamics: AnchoredRun | None = None
        self.holds = False  # whether the present step has the hinge

    def before(self, done: int, model: EnergyModel) -> None:
        """Prepare the step after `done` updates."""
        if done == self._anchors.hand_over:
            self._dynamics = self.dynamics_type(model, self._surroundings, self._anchors)
        if self._dynamics is None:
            return
        if done % self._anchors.explore_every == 0:
            self._dynamics.explore()
        self.holds = done % self._anchors.every == 0

    def counts(self) -> dict[str, float]:
        """Return how many structures were bad, how many entered, and how many copies blew up."""
        run = self._dynamics
        if run is None:
            return {}
        return {name: int(getattr(run, name).sum()) for name in ("bad", "taken", "blown")}

    def act(self, step: TrainingStep, dynamics: AnchoredRun, lr_fraction: float | Tensor) -> None:
        """Do what a step with the hinge does after the gradient of its loss."""
        dynamics.add_gradient(step._model, lr_fraction)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Let `dp train` in this process take anchored steps."""
        plain = TrainingStep._differentiate

        def differentiate(
            step: TrainingStep, batch: Any, lr_fraction: Any, layout: Hashable | None = None
        ) -> Any:
            found = plain(step, batch, lr_fraction, layout)
            if self.holds:
                assert self._dynamics is not None
                self.act(step, self._dynamics, lr_fraction)
            return found

        def built(**parts: Any) -> Stepper:
            return AnchoredSteps(build_stepper(**parts), parts["model"], self)

        with (
            mock.patch.object(TrainingStep, "_differentiate", differentiate),
            mock.patch.object(trainer, "build_stepper", built),
        ):
            yield
