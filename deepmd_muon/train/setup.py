"""Preparation of the first step: systems, neighbour statistics, model, statistics of the data."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from deepmd_muon.argcheck import Input, TrainingDataSettings, TrainingSettings
from deepmd_muon.argcheck.changes import changed_settings
from deepmd_muon.data import (
    Batch,
    DataError,
    DataLoader,
    NeighborCache,
    NeighborStatistics,
    StatFile,
    System,
    data_fingerprint,
    energy_bias,
    neighbor_statistics,
)
from deepmd_muon.data.checks.digest import content_digest
from deepmd_muon.data.sampling.samples import sample_frames
from deepmd_muon.model import EnergyModel, ModelSettings, Structures
from deepmd_muon.model.settings import changed
from deepmd_muon.model.statistics import environment_statistics
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks

log = logging.getLogger(__name__)

# Places of files, which may have other names on another machine; data are compared by content.
_OF_A_MACHINE = frozenset(
    f"training/{key}"
    for key in (
        "training_data/systems",
        "validation_data/systems",
        "stat_file",
        "tensorboard_log_dir",
        "profiling_file",
    )
)
#: Atoms at 6 Å (see `frame_costs`) of the frames in which neighbours are counted, a second of work; and of those
#: behind the statistics of the environment and the energies.
MOST_COUNTED, MOST_MEASURED = 5 << 14, 1 << 15
# Neighbour lists of a training set are kept in memory up to this many bytes.
CACHE_BYTES = 2 << 30


@dataclasses.dataclass
class Data:
    """Where batches come from.

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


def resolve_sel(given: Input, systems: list[System], *, count: bool) -> tuple[Input, NeighborStatistics | None]:
    """Replace settings that depend on the data, such as ``sel: "auto"``, by numbers.

    Parameters
    ----------
    given
        The checked input.
    systems
        Training data; see `MOST_COUNTED` for how much of them is looked at.
    count
        False when neighbours are not to be counted (--skip-neighbor-stat).

    Returns
    -------
    tuple
        The input with numbers, and the neighbour statistics within the model's cut-off where they were needed.

    Raises
    ------
    TrainingError
        When the descriptor needs counts and counting is switched off.
    """
    descriptor = given.settings.model.descriptor
    if not descriptor.needs_counts:
        return given, None
    if not count:
        raise TrainingError('model/descriptor/sel is "auto", which needs the neighbour statistics: give numbers')
    counted: dict[float, NeighborStatistics] = {}

    def within(rcut: float) -> NeighborStatistics:
        counted[rcut] = _count_neighbors(systems, rcut, None)
        return counted[rcut]

    resolved = given.changed(model=changed(given.settings.model, {"descriptor": descriptor.with_counts(within)}))
    neighbors = resolved.settings.model.descriptor.neighbors()
    log.info("sel of model/descriptor becomes %s", list(neighbors.sel))
    return resolved, counted.get(neighbors.rcut)


def check_sel(model: EnergyModel, systems: list[System], cache: NeighborCache) -> NeighborStatistics:
    """Count neighbours in training frames, filling the cache, and warn when the model's `sel` is too small."""
    found = _count_neighbors(systems, model.rcut, cache)
    most = found.max_neighbors if model.by_type else (found.max_total,)
    names = model.type_map if model.by_type else ("all types",)
    short = [f"{name}: {n} > {limit}" for name, n, limit in zip(names, most, model.sel, strict=True) if n > limit]
    if short:
        enough = [-(-n // 4) * 4 for n in most]  # deepmd-kit rounds sel up to multiples of 4
        log.warning(
            "sel is smaller than the most neighbours found (%s): the farthest are left out; set model/descriptor/sel "
            "to at least %s",
            "; ".join(short),
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
    training: TrainingSettings,
    cache: NeighborCache,
    seed: int,
    ranks: Ranks,
) -> Data:
    """Make this rank's loaders of training and validation batches on one cache of neighbour lists."""

    def loader(systems: list[System], section: TrainingDataSettings, each: int = 1, *, prefetch: bool) -> DataLoader:
        return DataLoader(
            systems,
            section.batch_size,
            auto_prob=section.auto_prob,
            sys_probs=section.sys_probs,
            seed=seed,
            cache=cache,
            prefetch=prefetch,
            rank=ranks.rank,
            world_size=ranks.size,
            batches_per_step=each,
        )

    validation = training.validation_data
    return Data(
        loader(train, training.training_data, training.accumulate_grad_batches, prefetch=True),
        loader(valid, validation, prefetch=False) if validation else None,
        train,
    )


def number_of_steps(training: TrainingSettings, loader: DataLoader) -> int:
    """Return the length of the run in steps, from `numb_steps` or `numb_epoch`."""
    if training.numb_steps is not None:
        return training.numb_steps
    assert training.numb_epoch is not None  # the input checker requires one of the two
    batches = math.ceil(training.numb_epoch * loader.batches_per_epoch)
    return math.ceil(batches / (loader.world_size * loader.batches_per_step))


def set_model_statistics(model: EnergyModel, data: Data, training: TrainingSettings) -> None:
    """Standardise the descriptor's input and set the energy bias, from samples of the data or from `stat_file`."""
    store = StatFile(training.stat_file) if training.stat_file else None
    key = _statistics_key(model, data) if store else {}
    arrays = store.load(key) if store else None
    if arrays is None:
        arrays = _compute(model, data)
        if store:
            store.save(key, arrays)
    else:
        _check_statistics(arrays, model.ntypes, str(training.stat_file))
        log.info("statistics come from %s", training.stat_file)
    model.set_statistics(torch.from_numpy(arrays["mean"]), torch.from_numpy(arrays["stddev"]))
    if "energy_bias" in arrays:
        model.set_energy_bias(torch.from_numpy(arrays["energy_bias"]))
        bias = zip(model.type_map, arrays["energy_bias"].ravel(), strict=True)
        log.info("energy bias: %s", ", ".join(f"{name} {value:.6g} eV" for name, value in bias))
    else:
        log.warning("no training system has energies: the energy bias stays 0")


def _statistics_key(model: EnergyModel, data: Data) -> dict[str, object]:
    """Return what statistics depend on."""
    settings = model.settings
    return {
        "descriptor": settings.descriptor.statistics_key(),
        "type_map": list(settings.type_map),
        "data": data_fingerprint(data.training_systems),
        "data_stat_nbatch": settings.data_stat_nbatch,
        "data_stat_protect": settings.data_stat_protect,
        "batch_sizes": list(data.training.batch_sizes),
        "atom_ener": getattr(settings.fitting_net, "atom_ener", None),
        "rcond": getattr(settings.fitting_net, "rcond", None),
    }


def _check_statistics(arrays: Mapping[str, np.ndarray], ntypes: int, path: str) -> None:
    """Refuse kept statistics of another shape or kind, which would end as a loss that is not finite."""
    shapes = {"mean": (ntypes, 4), "stddev": (ntypes, 4), "energy_bias": (ntypes,)}
    problems = [f"{name} is missing" for name in ("mean", "stddev") if name not in arrays]
    for name, found in arrays.items():
        if name not in shapes:
            problems.append(f"{name} is unknown")
        elif found.dtype.kind != "f" or found.size != math.prod(shapes[name]):
            problems.append(f"{name} is {found.dtype} of shape {found.shape}, expected numbers of shape {shapes[name]}")
        elif not np.isfinite(found).all():
            problems.append(f"{name} has values that are not finite")
        elif name == "stddev" and not (found > 0.0).all():
            problems.append("stddev has values that are not above 0")
    if problems:
        raise DataError(f"stat_file {path} is damaged: {'; '.join(problems)}; remove it, or name another")


def check_same_run(given: Input, train: list[System], valid: list[System], ranks: Ranks) -> None:
    """Compare the inputs and data that the ranks see: files of one name may differ on another machine.

    Raises
    ------
    TrainingError
        On all ranks, naming one that differs from rank 0, and in what.
    """
    if ranks.size == 1:
        return
    with ranks.together("comparing inputs and data"):
        digests = content_digest(train), content_digest(valid)
        found = ranks.gather_objects((given.normalized, *digests))
    for kind, digest in zip(("training", "validation"), digests, strict=True):
        if digest.share < 1.0:
            log.info("%.2g %% of the frames of the %s data were compared between the ranks", 100 * digest.share, kind)
    for rank, theirs in enumerate(found):
        keys = [key for key in changed_settings(found[0][0], theirs[0]) if key not in _OF_A_MACHINE]
        if keys:
            raise TrainingError(
                f"the input of rank {rank} differs from that of rank 0 in {', '.join(keys)}: "
                "all ranks must read the same input"
            )
        for kind, first, other in zip(("training", "validation"), found[0][1:], theirs[1:], strict=True):
            if first != other:
                systems = {"training": train, "validation": valid}[kind]
                pairs = zip(systems, first.systems, other.systems, strict=False)
                which = next((f" in system {system.name}" for system, a, b in pairs if a != b), "")
                raise TrainingError(
                    f"the {kind} data of rank {rank} are not those of rank 0{which}: "
                    f"see that training/{kind}_data/systems is the same on all machines"
                )


def _compute(model: EnergyModel, data: Data) -> dict[str, np.ndarray]:
    counts, energies = [], []

    def batches() -> Iterator[Batch]:
        for batch in data.training.bounded_batches(model.settings.data_stat_nbatch, MOST_MEASURED):
            if batch.frames.energy is not None:
                counts.append(batch.frames.type_counts(model.ntypes))
                energies.append(batch.frames.energy)
            yield batch

    sample = batches()
    structures = (Structures.of(batch.frames, batch.neighbors, model.ntypes) for batch in sample)
    mean, stddev = environment_statistics(model, structures, protection=model.settings.data_stat_protect)
    for _ in sample:  # energies are wanted of descriptors that standardise nothing, too
        pass
    arrays = {"mean": mean.numpy(), "stddev": stddev.numpy()}
    if energies:
        rcond = getattr(model.settings.fitting_net, "rcond", None)
        arrays["energy_bias"] = energy_bias(
            np.concatenate(counts), np.concatenate(energies), fixed_energies(model.settings), rcond
        )
    return arrays


def fixed_energies(settings: ModelSettings) -> np.ndarray | None:
    """Return given vacuum energies `(ntypes,)` [eV] with NaN where there is none; None when all are free."""
    given = getattr(settings.fitting_net, "atom_ener", None)
    return np.array([math.nan if value is None else value for value in given]) if given else None
