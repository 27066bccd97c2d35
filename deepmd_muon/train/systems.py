"""Data of a run: systems, opened as the input says and checked before the long work, and loaders."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from deepmd_muon.argcheck import Input, TrainingDataSettings
from deepmd_muon.argcheck.changes import changed_settings
from deepmd_muon.data import (
    DataLoader,
    NeighborCache,
    Parameters,
    System,
    open_systems,
    with_parameters,
)
from deepmd_muon.data.checks.digest import ContentDigest, content_digest
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.checks.overlap import shared_frames
from deepmd_muon.data.opening import check_labels, elements_of
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.model.settings import HostedSettings
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks

log = logging.getLogger(__name__)

# Settings that name files, which may have other names on another machine; data are compared by
# content.
_PLACES = (
    "training_data/systems",
    "validation_data/systems",
    "/stat_file",
    "/stat_file_mode",
    "/tensorboard_log_dir",
    "/profiling_file",
)
# Doubts about the data that are named at the usual log level.
_MOST_SUSPICIONS = 20
# Share of batches of systems that cannot fill one, above which the log names them.
_MOST_UNFILLED = 0.05


@dataclasses.dataclass(frozen=True)
class Systems:
    """The systems of one branch."""

    training: list[System]
    validation: list[System]

    @property
    def all(self) -> list[System]:
        """Training systems, then validation systems."""
        return [*self.training, *self.validation]


def open_section(section: TrainingDataSettings, type_map: Sequence[str] | None) -> list[System]:
    """Open the systems of a data section, with types that index `type_map`.

    Without a type map, each system keeps its own.
    """
    return open_systems(
        section.systems,
        type_map or None,
        section.reading,
        section.rglob_patterns,
    )


def open_training_systems(run_input: Input) -> tuple[Input, dict[str, Systems]]:
    """Open the systems of each branch, with the types of its model.

    Returns
    -------
    tuple
        The input, with type maps from the data if it omits them, and the systems by branch.

    Raises
    ------
    DataError
        If a system cannot be read or lacks frame or atomic parameters, or no training system has
        labels.
    TypeMapError
        If neither the input nor a system has element names.
    """
    systems = {}
    for name, branch in run_input.branches.items():
        type_map = branch.model.type_map
        validation_section = branch.data.validation_data
        training = open_section(branch.data.training_data, type_map)
        validation = open_section(validation_section, type_map) if validation_section else []
        if not type_map:
            elements = elements_of(training)
            run_input = run_input.with_model([name], type_map=elements)
            training = [system.with_types(elements) for system in training]
            validation = [system.with_types(elements) for system in validation]
            log.info(
                "model/type_map is left out and becomes %s: the types of the training data",
                list(elements),
            )
        run_input = _with_number_of_parameters(run_input, name)
        parameters = Parameters.of(run_input.branches[name].model)
        # Both at once, so that one error lists the problems of all systems.
        with_all = with_parameters([*training, *validation], parameters)
        systems[name] = Systems(with_all[: len(training)], with_all[len(training) :])
        of_branch = f" of {name}" if run_input.multi_task else ""
        _look_at(f"training data{of_branch}", systems[name].training)
        _look_at(f"validation data{of_branch}", systems[name].validation)
    # Each branch alone: others may have labels of other methods for the same structures.
    doubts = [
        doubt for branch_systems in systems.values() for doubt in suspicions(branch_systems.all)
    ]
    _log_doubts(doubts)
    return run_input, systems


def _with_number_of_parameters(run_input: Input, name: str) -> Input:
    """Set numb_fparam of a branch where it is left out and its data name their parameters."""
    branch = run_input.branches[name]
    names = branch.data.training_data.frame_parameters
    fitting_net: Any = branch.model.fitting_net
    if not names or getattr(fitting_net, "numb_fparam", None) != 0:
        return run_input
    log.info("fitting_net/numb_fparam becomes %d: %s", len(names), ", ".join(names))
    if isinstance(branch.model, HostedSettings):
        return run_input.with_models({name: branch.model.with_frame_parameters(len(names))})
    fitting_net = dataclasses.replace(fitting_net, numb_fparam=len(names))
    return run_input.with_model([name], fitting_net=fitting_net)


def _look_at(kind: str, systems: Sequence[System]) -> None:
    """Log what data are, in one line: thousands of systems must not bury the rest of the log.

    Raises
    ------
    DataError
        If no system has labels.
    """
    if not systems:
        return
    natoms = sorted({system.natoms for system in systems})
    labels = sorted({label for system in systems for label in system.labels})
    log.info(
        "%s: %d system%s, %d frames of %s atoms, %d periodic, labels %s",
        kind,
        len(systems),
        "s" if len(systems) > 1 else "",
        sum(system.nframes for system in systems),
        f"{natoms[0]} to {natoms[-1]}" if len(natoms) > 1 else natoms[0],
        sum(system.pbc for system in systems),
        ", ".join(labels) or "none",
    )
    for system in systems:
        log.debug("%s: %s", kind, system)
    check_labels(systems)


def _log_doubts(doubts: Sequence[str]) -> None:
    """Log each doubt about the data once: branches, or training and validation, may share systems."""
    distinct = list(dict.fromkeys(doubts))
    for doubt in distinct[:_MOST_SUSPICIONS]:
        log.warning("data: %s", doubt)
    for doubt in distinct[_MOST_SUSPICIONS:]:
        log.debug("data: %s", doubt)
    if len(distinct) > _MOST_SUSPICIONS:
        log.warning(
            "data: %d more suspicions; --log-level DEBUG names them",
            len(distinct) - _MOST_SUSPICIONS,
        )


def warn_of_shared_frames(training: Sequence[System], validation: Sequence[System]) -> None:
    """Warn if validation data repeat training data.

    Their errors would say nothing about other structures.
    """
    if not validation:
        return
    n_shared, n_compared = shared_frames(training, validation)
    if n_shared:
        log.warning(
            "%d of %d validation frames looked at are training frames too: their errors do not show "
            "how the model does on other structures; split by trajectories or blocks of time "
            "(dp init does)",
            n_shared,
            n_compared,
        )


# ----- loaders -----------------------------------------------------------------------------------


def seed_of(seed: int, name: str) -> int:
    """Return the seed of one part of a run, such as the order of a branch's data.

    Branches with the same data must not draw the same frames, nor ranks the same numbers.
    """
    if name == SINGLE:
        return seed
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits


@dataclasses.dataclass
class Data:
    """Endless shuffled batches of a branch; no `validation` without validation data.

    `training_systems` has also those that the batch size of `training` leaves out.
    """

    training: DataLoader
    validation: DataLoader | None
    training_systems: list[System]


def make_loaders(
    run_input: Input,
    systems: Mapping[str, Systems],
    caches: Mapping[str, NeighborCache],
    seed: int,
    ranks: Ranks,
) -> dict[str, Data]:
    """Make this rank's loaders of every branch; loaders of a branch share its neighbour lists."""

    def make_loader(
        name: str, opened: list[System], section: TrainingDataSettings, **options: Any
    ) -> DataLoader:
        return DataLoader(
            opened,
            section.batch_size,
            auto_prob=section.auto_prob,
            sys_probs=section.sys_probs,
            seed=seed_of(seed, name),
            cache=caches[name],
            rank=ranks.rank,
            world_size=ranks.size,
            **options,
        )

    settings = run_input.settings.training
    data = {}
    for name, branch in run_input.branches.items():
        training = make_loader(
            name,
            systems[name].training,
            branch.data.training_data,
            prefetch=True,
            batches_per_step=settings.accumulate_grad_batches,
            balance=settings.balance_batches,
        )
        _tell_of_unfilled_batches(training)
        validation = None
        if branch.data.validation_data:
            validation = make_loader(name, systems[name].validation, branch.data.validation_data)
        data[name] = Data(training, validation, systems[name].training)
    return data


def _tell_of_unfilled_batches(loader: DataLoader) -> None:
    """Warn if systems with too few frames for a batch take a large share of the batches.

    Batches of one system are drawn in proportion to their number, whatever they hold.
    """
    if loader.mixes_systems:
        return
    nframes = np.array([system.nframes for system in loader.systems])
    natoms = np.array([system.natoms for system in loader.systems])
    unfilled = nframes < np.array(loader.batch_sizes)
    share = float(loader.probabilities[unfilled].sum())
    share_of_atoms = float((nframes * natoms)[unfilled].sum() / (nframes * natoms).sum())
    if share > _MOST_UNFILLED and share > 2.0 * share_of_atoms:
        log.warning(
            "%d of %d systems have fewer frames than a batch; %.0f %% of the batches are theirs, with "
            '%.1f %% of the atoms: "batch_size": "mix:32" fills batches from all systems',
            unfilled.sum(),
            len(unfilled),
            100.0 * share,
            100.0 * share_of_atoms,
        )


# ----- several ranks -----------------------------------------------------------------------------


class _Section(NamedTuple):
    """A data section of the input, and its systems as this rank sees them."""

    path: str
    kind: str  # "training" or "validation"
    systems: list[System]


class RankView(NamedTuple):
    """What a rank sees: its normalised input, and digests of the data by section."""

    normalized: Mapping[str, Any]
    digests: Mapping[str, ContentDigest]


def check_same_run(run_input: Input, systems: Mapping[str, Systems], ranks: Ranks) -> None:
    """Compare the inputs and data that the ranks see, which may be other files on another machine.

    Raises
    ------
    TrainingError
        On all ranks, naming a rank that differs from rank 0, and in what.
    """
    if ranks.size == 1:
        return
    sections = []
    for name, branch in run_input.branches.items():
        path = branch.data_path
        sections.append(_Section(f"{path}/training_data", "training", systems[name].training))
        sections.append(_Section(f"{path}/validation_data", "validation", systems[name].validation))
    with ranks.barrier("comparing inputs and data"):
        digests = {section.path: content_digest(section.systems) for section in sections}
        views = ranks.gather_objects(RankView(run_input.normalized, digests))
    for section in sections:
        share = digests[section.path].share
        if share < 1.0:
            log.info(
                "%.2g %% of the frames of the %s data were compared between the ranks",
                100 * share,
                section.kind,
            )
    for rank, view in enumerate(views):
        changes = changed_settings(views[0].normalized, view.normalized)
        # Each machine may keep files elsewhere.
        keys = [
            key for key in changes if not (key.startswith("training/") and key.endswith(_PLACES))
        ]
        if keys:
            raise TrainingError(
                f"the input of rank {rank} differs from that of rank 0 in {', '.join(keys)}: "
                "all ranks must read the same input"
            )
        for section in sections:
            digest_of_first = views[0].digests[section.path]
            digest = view.digests[section.path]
            if digest != digest_of_first:
                # None differs if only the number of systems does.
                digests_of_systems = zip(
                    section.systems, digest_of_first.systems, digest.systems, strict=False
                )
                differing = [system.name for system, x, y in digests_of_systems if x != y]
                in_system = f" in system {differing[0]}" if differing else ""
                raise TrainingError(
                    f"the {section.kind} data of rank {rank} are not those of rank 0{in_system}: "
                    f"see that {section.path}/systems is the same on all machines"
                )
