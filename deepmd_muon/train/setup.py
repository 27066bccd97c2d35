"""Preparation of the first step: neighbour statistics, loaders, length, agreement of the ranks."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_muon.argcheck import BranchDataSettings, Input, TrainingDataSettings
from deepmd_muon.argcheck.changes import changed_settings
from deepmd_muon.data import (
    DataLoader,
    NeighborCache,
    NeighborStatistics,
    System,
    neighbor_statistics,
)
from deepmd_muon.data.checks.digest import content_digest
from deepmd_muon.data.sampling.samples import sample_frames
from deepmd_muon.model import DescriptorSettings, EnergyModel
from deepmd_muon.model.settings import changed
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.systems import Systems

if TYPE_CHECKING:
    from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

# Places of files, which may have other names on another machine; data are compared by content.
_OF_A_MACHINE = (
    *("training_data/systems", "validation_data/systems"),
    *("/stat_file", "/tensorboard_log_dir", "/profiling_file"),
)
#: Atoms at 6 Å (see `frame_costs`) of the frames in which neighbours are counted, a second of work; and of those
#: behind the statistics of the environment and the energies.
MOST_COUNTED, MOST_MEASURED = 5 << 14, 1 << 15
# Neighbour lists of a training set are kept in memory up to this many bytes.
CACHE_BYTES = 2 << 30


@dataclasses.dataclass
class Data:
    """The sources of batches.

    Attributes
    ----------
    training, validation
        Endless shuffled batches; no `validation` without validation data.
    training_systems
        The systems behind `training`.
    """

    training: DataLoader
    validation: DataLoader | None
    training_systems: list[System]


def resolve_sel(
    given: Input, systems: Mapping[str, Systems], sources: Mapping[str, Source] = MappingProxyType({}), *, count: bool
) -> tuple[Input, dict[str, NeighborStatistics]]:
    """Replace settings that depend on the data, such as ``sel: "auto"``, by numbers.

    Parameters
    ----------
    given
        The checked input.
    systems
        Of each branch; see `MOST_COUNTED` for how much of the training data is looked at.
    sources
        Checkpoints of branches, whose numbers are taken.
    count
        False when neighbours are not to be counted (--skip-neighbor-stat).

    Returns
    -------
    tuple
        The input with numbers, and the neighbour statistics of branches within the model's cut-off where they were
        needed. Branches with the same entry of model/shared_dict get the same numbers, enough for all of them.

    Raises
    ------
    TrainingError
        When a descriptor needs counts and counting is switched off.
    """
    statistics: dict[str, NeighborStatistics] = {}
    for where, names in descriptor_sections(given).items():
        branch = given.branches[names[0]]
        descriptor = branch.model.descriptor
        if not descriptor.needs_counts:
            continue
        if source := next((sources[name] for name in names if name in sources), None):
            descriptor = descriptor.with_counts_of(source.model.descriptor)
            given = with_descriptor(given, names, descriptor)
            log.info("sel of %s becomes %s, as in %s", where, list(descriptor.neighbors().sel), source.path)
            if not descriptor.needs_counts:
                continue
        if not count:
            raise TrainingError(f'{where}/sel is "auto", which needs the neighbour statistics: give numbers')
        together = [system for name in names for system in systems[name].training]
        counted: dict[float, NeighborStatistics] = {}

        def within(rcut: float) -> NeighborStatistics:
            counted[rcut] = _count_neighbors(together, rcut, None)  # noqa: B023 (called before the next branch)
            return counted[rcut]  # noqa: B023

        resolved = descriptor.with_counts(within)
        given = with_descriptor(given, names, resolved)
        rcut = resolved.neighbors().rcut
        log.info("sel of %s becomes %s", where, list(resolved.neighbors().sel))
        if len(names) == 1 and rcut in counted:
            statistics[names[0]] = counted[rcut]
    return given, statistics


def descriptor_sections(given: Input) -> dict[str, list[str]]:
    """Return the sections of descriptors, and the branches whose descriptor each is."""
    found: dict[str, list[str]] = {}
    for name, branch in given.branches.items():
        shared = given.references.get(name, {}).get("descriptor")
        where = f"model/shared_dict/{shared.key}" if shared else f"{branch.model_path}/descriptor"
        found.setdefault(where, []).append(name)
    return found


def with_descriptor(given: Input, names: Sequence[str], descriptor: DescriptorSettings) -> Input:
    """Return the input with another descriptor in some branches."""
    found = {name: given.branches[name] for name in names}
    return given.with_models(
        {name: changed(branch.model, {"descriptor": descriptor}, branch.model_path) for name, branch in found.items()}
    )


def check_sel(
    model: EnergyModel, systems: list[System], cache: NeighborCache, where: str = "model"
) -> NeighborStatistics:
    """Count neighbours in training frames, filling the cache, and warn when the model's `sel` is too small."""
    found = _count_neighbors(systems, model.rcut, cache)
    most = found.max_neighbors if model.by_type else (found.max_total,)
    names = model.type_map if model.by_type else ("all types",)
    short = [f"{name}: {n} > {limit}" for name, n, limit in zip(names, most, model.sel, strict=True) if n > limit]
    if short:
        enough = [-(-n // 4) * 4 for n in most]  # deepmd-kit rounds sel up to multiples of 4
        log.warning(
            "sel is smaller than the most neighbours found (%s): the farthest are left out; set %s/descriptor/sel "
            "to at least %s",
            "; ".join(short),
            where,
            enough if model.by_type else enough[0],
        )
    return found


def _count_neighbors(systems: list[System], rcut: float, cache: NeighborCache | None) -> NeighborStatistics:
    numbers = sample_frames(systems, MOST_COUNTED, rcut)
    counted, total = sum(map(len, numbers)), sum(system.nframes for system in systems)
    found = neighbor_statistics(systems, rcut, cache, numbers=numbers)
    log.info(
        "neighbours within %g Å%s: at most %s per type; shortest distance %.3f Å",
        rcut,
        f" in {counted} of {total} frames" if counted < total else "",
        list(found.max_neighbors),
        found.min_distance,
    )
    return found


def new_seed() -> int:
    """Draw a seed for the order of the data."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0] >> 1)  # 63 bits: a plain integer everywhere


def make_loaders(
    train: list[System],
    valid: list[System],
    training: BranchDataSettings,
    cache: NeighborCache,
    seed: int,
    ranks: Ranks,
    **of_training: Any,
) -> Data:
    """Make this rank's loaders of training and validation batches on one cache of neighbour lists.

    `of_training` holds further arguments of the `DataLoader` of training batches.
    """

    def loader(systems: list[System], section: TrainingDataSettings, **options: Any) -> DataLoader:
        return DataLoader(
            systems,
            section.batch_size,
            auto_prob=section.auto_prob,
            sys_probs=section.sys_probs,
            seed=seed,
            cache=cache,
            rank=ranks.rank,
            world_size=ranks.size,
            **options,
        )

    validation = training.validation_data
    return Data(
        loader(train, training.training_data, prefetch=True, **of_training),
        loader(valid, validation) if validation else None,
        train,
    )


def check_same_run(given: Input, systems: Mapping[str, Systems], ranks: Ranks) -> None:
    """Compare the inputs and data that the ranks see: files of one name may differ on another machine.

    Raises
    ------
    TrainingError
        On all ranks, naming one that differs from rank 0, and in what.
    """
    if ranks.size == 1:
        return
    sections = {}
    for name, branch in given.branches.items():
        for kind in ("training", "validation"):
            sections[f"{branch.data_path}/{kind}_data"] = (kind, getattr(systems[name], kind))
    with ranks.together("comparing inputs and data"):
        digests = {where: content_digest(opened) for where, (_, opened) in sections.items()}
        found = ranks.gather_objects((given.normalized, digests))
    for where, digest in digests.items():
        if digest.share < 1.0:
            kind = sections[where][0]
            log.info("%.2g %% of the frames of the %s data were compared between the ranks", 100 * digest.share, kind)
    for rank, theirs in enumerate(found):
        changes = changed_settings(found[0][0], theirs[0])
        keys = [key for key in changes if not (key.startswith("training/") and key.endswith(_OF_A_MACHINE))]
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
