"""The branches of a run: one model with its loss and data each, and the order in which they are trained."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from deepmd_muon.argcheck.settings import MultiTaskSettings
from deepmd_muon.argcheck.training import MultiTaskTrainingSettings, TrainingSettings
from deepmd_muon.data import DataLoader, Seats
from deepmd_muon.data.sampling.sampler import CHOICE_BLOCK, Sampler, SavedOrder
from deepmd_muon.loss import Loss, build_loss, check_labels
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.branches import branches_of, build_branches
from deepmd_muon.model.deepmd_kit import UNKNOWN_DISTANCE
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.systems import Data, seed_of

if TYPE_CHECKING:
    from deepmd_muon.argcheck import Input
    from deepmd_muon.argcheck.load import Branch
    from deepmd_muon.model import EnergyModel
    from deepmd_muon.model.branches import Branches

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RunBranch:
    """One of the models that a run trains; the only one of a run that is not multi-task is called "Default".

    Attributes
    ----------
    name
        Its name.
    settings
        Its settings in the input.
    model, loss, data
        The parts themselves; the model may share modules with others.
    min_nbor_dist
        Shortest distance in its training data [Å], which deepmd-kit keeps in its checkpoints.
    continued
        The branch of the checkpoint that it starts from; its own name without a checkpoint.
    """

    name: str
    settings: Branch
    model: EnergyModel
    loss: Loss
    data: Data
    min_nbor_dist: float = UNKNOWN_DISTANCE
    continued: str = SINGLE

    @property
    def prefix(self) -> str:
        """Beginning of messages about it; empty where it is the only one."""
        return "" if self.name == SINGLE else f"{self.name}: "

    def metric_names(self) -> list[str]:
        """Return the names of its metrics."""
        return sorted({"rmse", *(term.metric for term in self.loss.terms)})

    def named(self, metric: str) -> str:
        """Return the name of one of its metrics among those of all branches: metric/branch."""
        return metric if self.name == SINGLE else f"{metric}/{self.name}"


def build_of(given: Input) -> EnergyModel | Branches:
    """Build the models that an input describes, see `build_branches`."""
    models = {name: branch.model for name, branch in given.branches.items()}
    aliases = {}
    if isinstance(given.settings, MultiTaskSettings):
        aliases = {
            name: one.model_branch_alias for name, one in given.settings.model.model_dict.items()
        }
    return build_branches(models, given.references, aliases)


def make_branches(
    given: Input,
    model: EnergyModel | Branches,
    data: Mapping[str, Data],
    distances: Mapping[str, float],
    continued: Mapping[str, str],
) -> dict[str, RunBranch]:
    """Put the parts of each branch together; `continued` has the branch of the checkpoint that each starts from."""
    models = branches_of(model)
    found = {}
    for name, settings in given.branches.items():
        parts = (
            models[name],
            build_loss(settings.loss),
            data[name],
            distances.get(name, UNKNOWN_DISTANCE),
        )
        found[name] = RunBranch(name, settings, *parts, continued.get(name, name))
    return found


def require_labels(branches: Mapping[str, RunBranch]) -> None:
    """Warn about loss terms without labels in any system; reject systems without labels for any term."""
    errors = []
    for branch in branches.values():
        found = check_labels(branch.loss, branch.data.training_systems)
        for warning in found.warnings:
            log.warning("%s%s", branch.prefix, warning)
        errors += [f"{branch.prefix}{error}" for error in found.errors]
    if errors:
        raise TrainingError("; ".join(errors))


def length_and_probabilities(
    given: Input, data: Mapping[str, Data]
) -> tuple[int, dict[str, float]]:
    """Return the length of the run in steps, of which each takes one batch a rank, and the branches' probabilities."""
    if not isinstance(given.settings, MultiTaskSettings):
        return number_of_steps(given.settings.training, data[SINGLE].training), {SINGLE: 1.0}
    several = given.settings.training
    if several.num_epoch_dict:
        loader = next(iter(data.values())).training
        size = loader.world_size * loader.batches_per_step
        batches = {name: part.training.batches_per_epoch for name, part in data.items()}
        wanted = {name: several.num_epoch_dict[name] * count for name, count in batches.items()}
        return math.ceil(math.ceil(math.fsum(wanted.values())) / size), _normalized(wanted)
    assert several.numb_steps is not None
    systems = {name: float(len(part.training_systems)) for name, part in data.items()}
    return several.numb_steps, _normalized(several.model_prob or systems, [*data])


def number_of_steps(training: TrainingSettings, loader: DataLoader) -> int:
    """Return the length of the run in steps, from `numb_steps` or `numb_epoch`."""
    if training.numb_steps is not None:
        return training.numb_steps
    assert training.numb_epoch is not None  # the input checker requires one of the two
    batches = math.ceil(training.numb_epoch * loader.batches_per_epoch)
    return math.ceil(batches / (loader.world_size * loader.batches_per_step))


def _normalized(weights: Mapping[str, float], names: list[str] | None = None) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: weights[name] / total for name in names or weights}


def task_order(
    given: Input, probabilities: Mapping[str, float], seed: int, ranks: Ranks
) -> TaskOrder | StratifiedOrder:
    """Return the order of a run's branches, see `MultiTaskTrainingSettings.stratified`."""
    training = given.settings.training
    if isinstance(training, MultiTaskTrainingSettings) and training.stratified:
        return StratifiedOrder(probabilities, seed, ranks.rank, ranks.size)
    return TaskOrder(probabilities, seed)


class TaskOrder:
    """The branch of each step, the same on all ranks; its position in a checkpoint is one integer."""

    def __init__(self, probabilities: Mapping[str, float], seed: int) -> None:
        self._names = tuple(probabilities)
        weights = np.array([*probabilities.values()])
        ones = (1,) * len(weights)
        # Draw branches like systems of one frame each.
        self._sampler = Sampler(
            ones, ones, weights, seed_of(seed, "order of tasks"), identity=repr(self._names)
        )

    def deal(self, loaders: Mapping[str, DataLoader]) -> None:
        """Arrange how the batches of each branch are dealt out to the ranks: all take one in its steps."""

    def next(self, left_out: Collection[str] = ()) -> str:
        """Return the branch of the next step, never one left out; another one must have a positive probability."""
        while (name := self._names[self._sampler.next().parts[0][0]]) in left_out:
            pass
        return name

    def state_dict(self) -> dict[str, int | str]:
        """Return the position; see `SavedOrder`."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go to a saved position of the same branches and probabilities; see `SavedOrder`."""
        self._sampler.load_state_dict(dict(state))


class StratifiedOrder(SavedOrder):
    """The branch of each rank in each step.

    Systematic sampling: N ranks stand 1/N apart on the unit interval, which the probabilities cut into branches, and
    one random number a step shifts all of them. So a branch of probability p has ⌊N·p⌋ or ⌈N·p⌉ ranks, on average N·p.
    The ranks rotate, so that each meets every branch. A position is a step and holds for any number of ranks.
    """

    def __init__(self, probabilities: Mapping[str, float], seed: int, rank: int, size: int) -> None:
        self._names = tuple(probabilities)
        self._ends = np.cumsum([*probabilities.values()])
        # Rounding must not leave a gap at the end, nor draw a branch of probability zero there.
        self._ends[np.flatnonzero([*probabilities.values()])[-1] :] = 1.0
        self.seed, self.step = seed_of(seed, "stratified order"), 0
        self._identity = repr(("stratified", [*probabilities.items()]))
        self._rank, self._size = rank, size
        self._block: tuple[int, np.ndarray] | None = None
        self._loaders: Mapping[str, DataLoader] = {}

    def next(self, left_out: Collection[str] = ()) -> str:
        """Return the branch that this rank trains in the next step; none is left out, as loaders have drawn ahead."""
        branches = self._branches(self.step)
        self.step += 1
        for name, loader in self._loaders.items():
            loader.begin_step(self._seats(branches, name))
        return branches[self._rank]

    def deal(self, loaders: Mapping[str, DataLoader]) -> None:
        """Arrange how the batches of each branch are dealt out to the ranks; after a position has been restored."""
        self._loaders = loaders
        for name, loader in loaders.items():
            loader.seat(self._all_seats(name, self.step))

    def _all_seats(self, name: str, step: int) -> Iterator[Seats]:
        """Yield the seats of a branch in every step from `step` on, for a loader that reads them ahead."""
        # A copy: an iterator at another step needs another block of random numbers.
        ahead = StratifiedOrder.__new__(StratifiedOrder)
        ahead.__dict__ |= {**self.__dict__, "_block": None, "_loaders": {}}
        for number in itertools.count(step):
            yield ahead._seats(ahead._branches(number), name)

    def _seats(self, branches: list[str], name: str) -> Seats:
        there = [rank for rank, branch in enumerate(branches) if branch == name]
        return Seats(len(there), there.index(self._rank) if self._rank in there else None)

    def _branches(self, step: int) -> list[str]:
        """Return the branch of every rank in a step."""
        block, row = divmod(step, CHOICE_BLOCK)
        if self._block is None or self._block[0] != block:
            draws = np.random.Generator(np.random.PCG64([self.seed, 0, block])).random(CHOICE_BLOCK)
            self._block = block, draws
        places = ((np.arange(self._size) + step) % self._size + self._block[1][row]) / self._size
        return [self._names[k] for k in np.searchsorted(self._ends, places, side="right").tolist()]

    def _forget(self) -> None:
        self._block = None
