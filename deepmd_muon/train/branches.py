"""The branches of a run: each a model with its loss and data; the order in which they are trained."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepmd_muon.argcheck.settings import MultiTaskSettings
from deepmd_muon.argcheck.training import MultiTaskTrainingSettings, TrainingSettings
from deepmd_muon.data import DataLoader, Seats, StatFile
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
    """One of the models that a run trains.

    The only one of a run that is not multi-task is called "Default".

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
        """Beginning of messages about it; empty if it is the only one."""
        return "" if self.name == SINGLE else f"{self.name}: "

    @property
    def stat_file(self) -> StatFile | None:
        """The file with its statistics; None without."""
        data = self.settings.data
        return StatFile(data.stat_file, data.stat_file_mode) if data.stat_file else None

    def metric_names(self) -> list[str]:
        """Return the names of its metrics."""
        return sorted({"rmse", *(term.metric for term in self.loss.terms)})

    def named(self, metric: str) -> str:
        """Return the name of one of its metrics among all branches: metric/branch."""
        return metric if self.name == SINGLE else f"{metric}/{self.name}"


def build_of(run_input: Input) -> EnergyModel | Branches:
    """Build the models that an input describes, see `build_branches`."""
    models = {name: branch.model for name, branch in run_input.branches.items()}
    aliases = {}
    if isinstance(run_input.settings, MultiTaskSettings):
        sections = run_input.settings.model.model_dict
        aliases = {name: section.model_branch_alias for name, section in sections.items()}
    return build_branches(models, run_input.references, aliases)


def make_branches(
    run_input: Input,
    model: EnergyModel | Branches,
    data: Mapping[str, Data],
    distances: Mapping[str, float],
    continued: Mapping[str, str],
) -> dict[str, RunBranch]:
    """Put the parts of each branch together.

    `distances` are the shortest ones in the training data [Å], if known. `continued` has the branch
    of the checkpoint that each starts from.
    """
    models = branches_of(model)
    return {
        name: RunBranch(
            name=name,
            settings=settings,
            model=models[name],
            loss=build_loss(settings.loss, models[name].type_map),
            data=data[name],
            min_nbor_dist=distances.get(name, UNKNOWN_DISTANCE),
            continued=continued.get(name, name),
        )
        for name, settings in run_input.branches.items()
    }


def require_labels(branches: Mapping[str, RunBranch]) -> None:
    """Warn about loss terms without labels in any system.

    Raises
    ------
    TrainingError
        If a system has no label for any term.
    """
    errors = []
    for branch in branches.values():
        report = check_labels(branch.loss, branch.data.training_systems)
        for warning in report.warnings:
            log.warning("%s%s", branch.prefix, warning)
        errors += [f"{branch.prefix}{error}" for error in report.errors]
    if errors:
        raise TrainingError("; ".join(errors))


# ----- the length of a run -----------------------------------------------------------------------


class Length(NamedTuple):
    """The length of a run in steps, and the probabilities of its branches.

    In each step every rank takes one batch.
    """

    num_steps: int
    probabilities: dict[str, float]


def length_and_probabilities(run_input: Input, data: Mapping[str, Data]) -> Length:
    """Return the length of the run and how often each branch is trained."""
    if not isinstance(run_input.settings, MultiTaskSettings):
        num_steps = number_of_steps(run_input.settings.training, data[SINGLE].training)
        return Length(num_steps, {SINGLE: 1.0})
    training = run_input.settings.training
    if training.num_epoch_dict:
        batches = {
            name: training.num_epoch_dict[name] * branch_data.training.batches_per_epoch
            for name, branch_data in data.items()
        }
        loader = next(iter(data.values())).training
        n_batches = math.ceil(math.fsum(batches.values()))
        return Length(_steps_of(n_batches, loader), _normalized(batches))
    assert training.numb_steps is not None
    if training.model_prob:
        weights = {name: training.model_prob[name] for name in data}
    else:
        weights = {
            name: float(len(branch_data.training_systems)) for name, branch_data in data.items()
        }
    return Length(training.numb_steps, _normalized(weights))


def number_of_steps(training: TrainingSettings, loader: DataLoader) -> int:
    """Return the length of the run in steps, from `numb_steps` or `numb_epoch`."""
    if training.numb_steps is not None:
        return training.numb_steps
    assert training.numb_epoch is not None  # the input checker requires one of the two
    return _steps_of(math.ceil(training.numb_epoch * loader.batches_per_epoch), loader)


def _steps_of(n_batches: int, loader: DataLoader) -> int:
    """Return the steps in which all ranks together take so many batches."""
    return math.ceil(n_batches / (loader.world_size * loader.batches_per_step))


def _normalized(weights: Mapping[str, float]) -> dict[str, float]:
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


# ----- the order of branches ---------------------------------------------------------------------


def task_order(
    run_input: Input, probabilities: Mapping[str, float], seed: int, ranks: Ranks
) -> TaskOrder | StratifiedOrder:
    """Return the order of a run's branches, see `MultiTaskTrainingSettings.stratified`."""
    training = run_input.settings.training
    if isinstance(training, MultiTaskTrainingSettings) and training.stratified:
        return StratifiedOrder(probabilities, seed, ranks.rank, ranks.size)
    return TaskOrder(probabilities, seed)


class TaskOrder:
    """The branch of each step, the same on all ranks; its position in a checkpoint is one integer."""

    def __init__(self, probabilities: Mapping[str, float], seed: int) -> None:
        self._names = tuple(probabilities)
        # Branches are drawn like systems with one frame each.
        weights = np.array([*probabilities.values()])
        one_frame = (1,) * len(weights)
        self._sampler = Sampler(
            one_frame,
            one_frame,
            weights,
            seed_of(seed, "order of tasks"),
            identity=repr(self._names),
        )

    def deal(self, loaders: Mapping[str, DataLoader]) -> None:
        """Arrange how batches are dealt out to the ranks: all take one of the branch's in a step."""

    def next(self, left_out: Collection[str] = ()) -> str:
        """Return the branch of the next step, never one of `left_out`.

        Another branch must have a positive probability.
        """
        while True:
            number, _ = self._sampler.next().parts[0]
            name = self._names[number]
            if name not in left_out:
                return name

    def state_dict(self) -> dict[str, int | str]:
        """Return the position; see `SavedOrder`."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go to a saved position of the same branches and probabilities; see `SavedOrder`."""
        self._sampler.load_state_dict(dict(state))


class StratifiedOrder(SavedOrder):
    """The branch of each rank in each step.

    Systematic sampling: N ranks are 1/N apart on the unit interval. The probabilities cut it into
    branches, and one random number a step shifts all ranks. So a branch of probability p has ⌊N·p⌋
    or ⌈N·p⌉ ranks, on average N·p. The ranks rotate, so that each meets every branch. A position is
    a step and holds for any number of ranks.
    """

    def __init__(self, probabilities: Mapping[str, float], seed: int, rank: int, size: int) -> None:
        self._names = tuple(probabilities)
        shares = [*probabilities.values()]
        self._ends = np.cumsum(shares)
        # Rounding must not leave a gap at the end, nor draw a branch of probability zero there.
        self._ends[np.flatnonzero(shares)[-1] :] = 1.0
        self.seed = seed_of(seed, "stratified order")
        self.step = 0
        self._identity = repr(("stratified", [*probabilities.items()]))
        self._rank = rank
        self._size = size
        self._block: _Shifts | None = None
        self._loaders: Mapping[str, DataLoader] = {}

    def next(self, left_out: Collection[str] = ()) -> str:
        """Return the branch that this rank trains in the next step.

        None is left out, because loaders have drawn ahead.
        """
        branches = self._branches(self.step)
        self.step += 1
        for name, loader in self._loaders.items():
            loader.begin_step(self._seats(branches, name))
        return branches[self._rank]

    def deal(self, loaders: Mapping[str, DataLoader]) -> None:
        """Arrange how batches are dealt out to the ranks; after a position has been restored."""
        self._loaders = loaders
        for name, loader in loaders.items():
            loader.seat(self._all_seats(name, self.step))

    def _all_seats(self, name: str, step: int) -> Iterator[Seats]:
        """Yield the seats of a branch from `step` on, for a loader that reads them ahead."""
        # A copy: an iterator at another step needs another block of random numbers.
        ahead = StratifiedOrder.__new__(StratifiedOrder)
        ahead.__dict__ |= {**self.__dict__, "_block": None, "_loaders": {}}
        for number in itertools.count(step):
            yield ahead._seats(ahead._branches(number), name)

    def _seats(self, branches: Sequence[str], name: str) -> Seats:
        ranks = [rank for rank, branch in enumerate(branches) if branch == name]
        return Seats(len(ranks), ranks.index(self._rank) if self._rank in ranks else None)

    def _branches(self, step: int) -> list[str]:
        """Return the branch of every rank in a step."""
        number, row = divmod(step, CHOICE_BLOCK)
        if self._block is None or self._block.number != number:
            draws = np.random.Generator(np.random.PCG64([self.seed, 0, number]))
            self._block = _Shifts(number, draws.random(CHOICE_BLOCK))
        rotated = (np.arange(self._size) + step) % self._size
        points = (rotated + self._block.values[row]) / self._size
        numbers = np.searchsorted(self._ends, points, side="right").tolist()
        return [self._names[k] for k in numbers]

    def _forget(self) -> None:
        self._block = None


class _Shifts(NamedTuple):
    """Random shifts of a block of steps `(CHOICE_BLOCK,)`."""

    number: int
    values: np.ndarray
