"""Settings that an input omits: those of the checkpoint it continues, or numbers that suit its data."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from deepmd_muon.argcheck import Input
from deepmd_muon.checkpoint_file.file import OWN_KEY, understood
from deepmd_muon.data import (
    DataLoader,
    NeighborCache,
    NeighborStatistics,
    System,
    neighbor_statistics,
)
from deepmd_muon.data.checks.close_atoms import distance_problem
from deepmd_muon.data.neighbors.cache import number_of_types
from deepmd_muon.data.sampling.samples import frame_costs, sample_frames, sample_with
from deepmd_muon.model import EnergyModel, Structures
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.optim.groups.group_settings import current_spelling
from deepmd_muon.train.batches.device_sample import DeviceSample, sample_on
from deepmd_muon.train.branches import RunBranch
from deepmd_muon.train.checkpoint.source import Source
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import Ranks
from deepmd_muon.train.statistics import measured_frames
from deepmd_muon.train.systems import Systems

log = logging.getLogger(__name__)


class Count(Protocol):
    """Counts the neighbours in frames `numbers` of each of some systems."""

    def __call__(self, *, numbers: Sequence[np.ndarray]) -> NeighborStatistics:
        """Return the statistics."""


_CPU = torch.device("cpu")

# Atoms at 6 Å (see `frame_costs`) of the frames in which neighbours are counted, a second of work; and of those in
# which the length of descriptors is measured.
_MOST_COUNTED, _MEASURED = 5 << 14, 1 << 14


def take_from_checkpoint(
    given: Input,
    sources: Mapping[str, Source],
    *,
    use_pretrain_script: bool,
    force_load: bool = False,
) -> Input:
    """Let checkpoints decide type maps that the input omits, or whole models, and the scales of a run that goes on.

    Raises
    ------
    ModelError
        When the input has another type map, the checkpoint's model cannot have one, and `force_load` is false.
    """
    for name, source in sources.items():
        if not given.branches[name].model.type_map:
            given = given.with_model([name], type_map=source.model.type_map)
            log.info(
                "model/type_map is left out and becomes %s, as in %s",
                list(source.model.type_map),
                source.path,
            )
        # Before the rest of the section is compared: a `sel` for other types is the same fault in other words.
        if not force_load and not (use_pretrain_script and source.way != "finetune"):
            source.check_type_map(given.branches[name].model.type_map)
    if use_pretrain_script:
        present = given.branches
        given = given.with_models(
            {name: source.script(present[name].model) for name, source in sources.items()}
        )
        for names in given.descriptor_sections.values():
            # A branch that starts anew shares what the script of another one says.
            if scripted := next((name for name in names if name in sources), None):
                given = given.with_model(
                    names, descriptor=given.branches[scripted].model.descriptor
                )
    first = next(iter(sources.values()), None)
    if given.scales is None or first is None or first.way != "restart":
        return given
    with understood(first.path):
        groups = (first.content.get("optimizer") or {}).get("param_groups", [])
        saved = current_spelling(groups[0]) if groups else {}
        if not isinstance(saved.get("lr_adjust_coeff"), float):
            return given
        start_lr = _saved_start_lr(first.content, saved)
        return given.with_scales(given.scales.kept_from(saved, start_lr, str(first.path)))


def _saved_start_lr(content: Mapping[str, Any], group: Mapping[str, Any]) -> float | None:
    """Return the first learning rate of the run that wrote a checkpoint; None if it is not in there.

    deepmd-kit's scheduler keeps it in the optimizer's parameter groups.
    """
    if own := content.get(OWN_KEY):
        return float(json.loads(own["settings"])["learning_rate"]["start_lr"])
    return float(group["initial_lr"]) if "initial_lr" in group else None


def resolve_sel(
    given: Input,
    systems: Mapping[str, Systems],
    sources: Mapping[str, Source] = MappingProxyType({}),
    *,
    count: bool,
    device: torch.device = _CPU,
) -> tuple[Input, dict[str, NeighborStatistics]]:
    """Replace ``sel: "auto"`` and the like by the numbers of the branch's checkpoint, or those found in its data.

    Neighbours are counted on `device` where it can search for them.

    Returns
    -------
    tuple
        The input with numbers, and the neighbour statistics of branches within the model's cut-off where they were
        needed. Branches with the same entry of model/shared_dict get the same numbers, enough for all of them.

    Raises
    ------
    TrainingError
        When a descriptor needs counts and `count` is false (--skip-neighbor-stat).
    """
    statistics: dict[str, NeighborStatistics] = {}
    for where, names in given.descriptor_sections.items():
        descriptor = given.branches[names[0]].model.descriptor
        if not descriptor.needs_counts:
            continue
        if source := next(
            (
                sources[name]
                for name in names
                if name in sources and _has_sel_for(given, sources, name)
            ),
            None,
        ):
            descriptor = descriptor.with_counts_of(source.model.descriptor)
            given = given.with_model(names, descriptor=descriptor)
            log.info(
                "sel of %s becomes %s, as in %s",
                where,
                list(descriptor.neighbors().sel),
                source.path,
            )
            if not descriptor.needs_counts:
                continue
        if not count:
            raise TrainingError(
                f'{where}/sel is "auto", which needs the neighbour statistics, and --skip-neighbor-stat turns them '
                "off: leave that option out, or give numbers"
            )
        together = [system for name in names for system in systems[name].training]
        counted: dict[float, NeighborStatistics] = {}
        resolved = descriptor.with_counts(partial(_count_within, together, device, counted))
        given = given.with_model(names, descriptor=resolved)
        rcut = resolved.neighbors().rcut
        log.info("sel of %s becomes %s", where, list(resolved.neighbors().sel))
        if len(names) == 1 and rcut in counted:
            statistics[names[0]] = counted[rcut]
    return given, statistics


def _has_sel_for(given: Input, sources: Mapping[str, Source], name: str) -> bool:
    """Return whether `sel` of a branch's checkpoint suits its type map; with --force-load it may not."""
    saved = sources[name].model
    types = given.branches[name].model.type_map
    return saved.type_map == types or not saved.descriptor.neighbors().by_type


def frames_to_list(
    given: Input, model: EnergyModel, loader: DataLoader, *, measured: bool
) -> list[np.ndarray] | None:
    """Return the frames of each training system whose neighbour lists are read before the first step.

    Those are read by statistics, if the data are `measured`, and by the length of descriptors. None where all frames
    are counted: then all are listed at once.
    """
    nframes = [system.nframes for system in loader.systems]
    if frame_costs(loader.systems, model.rcut) @ nframes <= _MOST_COUNTED:
        return None
    read = [[np.zeros(0, dtype=np.int64)] * len(loader.systems)]
    if measured:
        read.append(measured_frames(model, loader))
    if given.scales is not None and not given.scales.kept:
        read.append(loader.bounded_numbers(1, _MEASURED))
    return [np.concatenate(mine) for mine in zip(*read, strict=True)]


def counting_of(
    given: Input,
    model: EnergyModel,
    loader: DataLoader,
    sample: DeviceSample | None,
    *,
    measured: bool,
) -> Count:
    """Return what counts neighbours in a loader's systems: the device, or the host, which lists what is read next."""
    if sample is not None:
        return sample.count
    listed = frames_to_list(given, model, loader, measured=measured)
    return partial(neighbor_statistics, loader.systems, model.rcut, loader.cache, listed=listed)


def check_sel(
    model: EnergyModel, loader: DataLoader, count: Count, where: str = "model"
) -> NeighborStatistics:
    """Count neighbours in training frames, and warn when the model's `sel` is too small.

    The frames behind the statistics of the data are among those counted.
    """
    numbers = sample_with(loader.systems, measured_frames(model, loader), _MOST_COUNTED, model.rcut)
    found = _count_neighbors(loader.systems, model.rcut, numbers, count)
    most = found.max_neighbors if model.by_type else (found.max_total,)
    names = model.type_map if model.by_type else ("all types",)
    short = [
        f"{name}: {n} > {limit}"
        for name, n, limit in zip(names, most, model.sel, strict=True)
        if n > limit
    ]
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


def _count_within(
    systems: Sequence[System],
    device: torch.device,
    counted: dict[float, NeighborStatistics],
    rcut: float,
) -> NeighborStatistics:
    """Count neighbours within a cut-off in a sample of frames, and keep the result in `counted`."""
    cache = NeighborCache(rcut, None, by_type=False, ntypes=max(map(number_of_types, systems)))
    sample = sample_on(device, systems, cache)
    count: Count = sample.count if sample else partial(neighbor_statistics, systems, rcut)
    counted[rcut] = _count_neighbors(
        systems, rcut, sample_frames(systems, _MOST_COUNTED, rcut), count
    )
    return counted[rcut]


def _count_neighbors(
    systems: Sequence[System], rcut: float, numbers: Sequence[np.ndarray], count: Count
) -> NeighborStatistics:
    """Count neighbours in frames `numbers` of each system, and log what was found."""
    counted, total = sum(map(len, numbers)), sum(system.nframes for system in systems)
    found = count(numbers=numbers)
    log.info(
        "neighbours within %g Å%s: at most %s per type; shortest distance %.3f Å",
        rcut,
        f" in {counted} of {total} frames" if counted < total else "",
        list(found.max_neighbors),
        found.min_distance,
    )
    if problem := distance_problem(systems, numbers, found.min_distance, rcut):
        log.warning("data: %s", problem)
    return found


def suit_scales(
    given: Input,
    branches: Mapping[str, RunBranch],
    ranks: Ranks,
    samples: Mapping[str, DeviceSample],
) -> Input:
    """Lower the scales of HybridMuon that the input omits, and no checkpoint had, where descriptors are long.

    Branches with a sample take their neighbours from the device.
    """
    if given.scales is None or given.scales.kept:
        return given

    def batches(branch: RunBranch) -> Iterator[Structures]:
        if sample := samples.get(branch.name):
            for _, structures in sample.batches(branch.data.training.bounded_numbers(1, _MEASURED)):
                yield structures
            return
        for batch in branch.data.training.bounded_batches(1, _MEASURED):
            yield Structures.of(batch.frames, batch.neighbors, branch.model.ntypes, ranks.device)

    def longest() -> float:
        return max(descriptor_length(branch.model, batches(branch)) for branch in branches.values())

    scales = given.scales.for_descriptors(ranks.from_first("measuring descriptors", longest))
    # On other ranks than the first the log shows warnings alone.
    level = logging.WARNING if scales.fallen and ranks.first else logging.INFO
    log.log(level, "%s", scales.notice)
    return given.with_scales(scales)
