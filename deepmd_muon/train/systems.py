"""Data of a run: systems, opened as the input says and looked at before the long work begins, and their loaders."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

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
from deepmd_muon.data.checks.digest import content_digest
from deepmd_muon.data.checks.labels import suspicions
from deepmd_muon.data.checks.overlap import shared_frames
from deepmd_muon.data.opening import check_labels, elements_of
from deepmd_muon.model.branch_settings import SINGLE
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks

log = logging.getLogger(__name__)

# Places of files, which may have other names on another machine; data are compared by content.
_OF_A_MACHINE = (
    *("training_data/systems", "validation_data/systems"),
    *("/stat_file", "/tensorboard_log_dir", "/profiling_file"),
)
# Doubts about the data that are named at the usual log level.
_MOST_SUSPICIONS = 20


@dataclasses.dataclass(frozen=True)
class Systems:
    """The systems of one branch."""

    training: list[System]
    validation: list[System]

    @property
    def all(self) -> list[System]:
        """Both."""
        return [*self.training, *self.validation]


def open_section(section: TrainingDataSettings, type_map: Sequence[str] | None) -> list[System]:
    """Open the systems of a data section, with types that index `type_map`; without one, each keeps its own."""
    return open_systems(
        section.systems,
        type_map or None,
        section.label_keys,
        section.rglob_patterns,
        keep_unconverged=section.keep_unconverged,
    )


def open_training_systems(given: Input) -> tuple[Input, dict[str, Systems]]:
    """Open the systems of each branch, types translated to its model's; take a type map that the input omits from them.

    Raises
    ------
    DataError
        When a system cannot be read or lacks frame or atomic parameters, or no training system has labels.
    TypeMapError
        When neither the input nor a system has element names.
    """
    opened = {}
    for name, branch in given.branches.items():
        model = branch.model
        sections = branch.data.training_data, branch.data.validation_data
        train, valid = (
            open_section(section, model.type_map) if section else [] for section in sections
        )
        if not model.type_map:
            names = elements_of(train)
            given = given.with_model([name], type_map=names)
            train, valid = (
                [system.with_types(names) for system in part] for part in (train, valid)
            )
            log.info(
                "model/type_map is left out and becomes %s: the types of the training data",
                list(names),
            )
        every = with_parameters([*train, *valid], Parameters.of(model.fitting_net))
        opened[name] = Systems(every[: len(train)], every[len(train) :])
        of_branch = f" of {name}" if given.multi_task else ""
        for kind, systems in (
            ("training", opened[name].training),
            ("validation", opened[name].validation),
        ):
            if systems:
                _log_systems(f"{kind} data{of_branch}", systems)
                check_labels(systems)
    # Branches may have labels of other methods, for the same structures too.
    sentences = [sentence for systems in opened.values() for sentence in suspicions(systems.all)]
    # Branches, or training and validation, may share systems.
    found = list(dict.fromkeys(sentences))
    for number, suspicion in enumerate(found):
        log.log(
            logging.WARNING if number < _MOST_SUSPICIONS else logging.DEBUG, "data: %s", suspicion
        )
    if len(found) > _MOST_SUSPICIONS:
        log.warning(
            "data: %d more suspicions; --log-level DEBUG names them", len(found) - _MOST_SUSPICIONS
        )
    return given, opened


def _log_systems(kind: str, systems: Sequence[System]) -> None:
    """Log what the data are: thousands of systems must not bury the rest of the log."""
    atoms = sorted({system.natoms for system in systems})
    log.info(
        "%s: %d system%s, %d frames of %s atoms, %d periodic, labels %s",
        kind,
        len(systems),
        "s" * (len(systems) > 1),
        sum(system.nframes for system in systems),
        f"{atoms[0]} to {atoms[-1]}" if len(atoms) > 1 else atoms[0],
        sum(system.pbc for system in systems),
        ", ".join(sorted(frozenset[str]().union(*(system.labels for system in systems)))) or "none",
    )
    for system in systems:
        log.debug("%s: %s", kind, system)


def warn_of_shared_frames(train: Sequence[System], valid: Sequence[System]) -> None:
    """Warn when validation data repeat training data: their errors would say nothing about other structures."""
    shared, looked = shared_frames(train, valid) if valid else (0, 0)
    if shared:
        log.warning(
            "%d of %d validation frames looked at are training frames too: their errors do not show how the model does "
            "on other structures; split by trajectories or blocks of time (dp init does)",
            shared,
            looked,
        )


def seed_of(seed: int, name: str) -> int:
    """Return the seed of the order of a branch's data; branches with the same data must not draw the same frames."""
    if name == SINGLE:
        return seed
    return (
        int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1
    )  # 63 bits


@dataclasses.dataclass
class Data:
    """Endless shuffled batches of a branch; no `validation` without validation data.

    `training_systems` has those that the batch size of `training` leaves out, too.
    """

    training: DataLoader
    validation: DataLoader | None
    training_systems: list[System]


def make_loaders(
    given: Input,
    systems: Mapping[str, Systems],
    caches: Mapping[str, NeighborCache],
    seed: int,
    ranks: Ranks,
) -> dict[str, Data]:
    """Make this rank's loaders of every branch, those of a branch on one cache of neighbour lists."""

    def loader(
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

    training = given.settings.training
    steps = {
        "batches_per_step": training.accumulate_grad_batches,
        "balance": training.balance_batches,
    }
    found = {}
    for name, branch in given.branches.items():
        own, validation = systems[name], branch.data.validation_data
        found[name] = Data(
            loader(name, own.training, branch.data.training_data, prefetch=True, **steps),
            loader(name, own.validation, validation) if validation else None,
            own.training,
        )
    return found


def check_same_run(given: Input, systems: Mapping[str, Systems], ranks: Ranks) -> None:
    """Compare the inputs and data that the ranks see, which may be other files on another machine.

    Raise a TrainingError on all ranks, naming one that differs from rank 0, and in what.
    """
    if ranks.size == 1:
        return
    sections = {}
    for name, branch in given.branches.items():
        for kind in ("training", "validation"):
            sections[f"{branch.data_path}/{kind}_data"] = (kind, getattr(systems[name], kind))
    with ranks.barrier("comparing inputs and data"):
        digests = {where: content_digest(opened) for where, (_, opened) in sections.items()}
        found = ranks.gather_objects((given.normalized, digests))
    for where, digest in digests.items():
        if digest.share < 1.0:
            kind = sections[where][0]
            log.info(
                "%.2g %% of the frames of the %s data were compared between the ranks",
                100 * digest.share,
                kind,
            )
    for rank, theirs in enumerate(found):
        changes = changed_settings(found[0][0], theirs[0])
        keys = [
            key
            for key in changes
            if not (key.startswith("training/") and key.endswith(_OF_A_MACHINE))
        ]
        if keys:
            raise TrainingError(
                f"the input of rank {rank} differs from that of rank 0 in {', '.join(keys)}: "
                "all ranks must read the same input"
            )
        for where, (kind, opened) in sections.items():
            first, other = found[0][1][where], theirs[1][where]
            if first != other:
                pairs = zip(opened, first.systems, other.systems, strict=False)
                which = next((f" in system {system.name}" for system, a, b in pairs if a != b), "")
                raise TrainingError(
                    f"the {kind} data of rank {rank} are not those of rank 0{which}: "
                    f"see that {where}/systems is the same on all machines"
                )
