"""Settings that an input omits: taken from the checkpoint it continues, or from its data."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

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
from deepmd_muon.model.settings import HostedSettings
from deepmd_muon.model.statistics import descriptor_length
from deepmd_muon.optim.config import HybridMuonConfig
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

# Atoms at 6 Å (see `frame_costs`) of the frames in which neighbours are counted: a second of work.
_MOST_COUNTED = 5 << 14
# The same, of the frames in which the length of descriptors is measured.
_MOST_MEASURED = 1 << 14
# The log shows every number of neighbours for so many types.
_MANY_TYPES = 10

# ----- from the checkpoint -----------------------------------------------------------------------


def take_from_checkpoint(
    run_input: Input,
    sources: Mapping[str, Source],
    *,
    use_pretrain_script: bool,
    force_load: bool = False,
) -> Input:
    """Take from checkpoints type maps that the input omits, or whole models, and a restart's scales.

    Type maps that the input has are compared with the checkpoints'.

    Raises
    ------
    ModelError
        If the input has another type map, the checkpoint's model cannot have one, and `force_load`
        is false.
    """
    for name, source in sources.items():
        if not run_input.branches[name].model.type_map:
            run_input = run_input.with_model([name], type_map=source.settings.type_map)
            log.info(
                "model/type_map is left out and becomes %s, as in %s",
                list(source.settings.type_map),
                source.path,
            )
    # Before the rest of the section is compared: a `sel` for other types is the same fault in
    # other words.
    for name, source in sources.items():
        replaces_model = use_pretrain_script and source.way != "finetune"
        if not force_load and not replaces_model:
            source.check_type_map(run_input.branches[name].model.type_map)
    if use_pretrain_script:
        run_input = _with_saved_models(run_input, sources)
    return _with_saved_scales(run_input, sources)


def _with_saved_scales(run_input: Input, sources: Mapping[str, Source]) -> Input:
    """Return the input with the scales of HybridMuon that it omits, if it restarts a run."""
    restarted = next((source for source in sources.values() if source.way == "restart"), None)
    if run_input.scales is None or restarted is None:
        return run_input
    with understood(restarted.path):
        groups = (restarted.content.get("optimizer") or {}).get("param_groups", [])
        group = current_spelling(groups[0]) if groups else {}
        if not isinstance(group.get("lr_adjust_coeff"), float):
            return run_input
        # deepmd-kit's scheduler keeps the first rate in the optimizer's parameter groups.
        start_lr = group.get("initial_lr")
        if ours := restarted.content.get(OWN_KEY):
            start_lr = json.loads(ours["settings"])["learning_rate"]["start_lr"]
        return run_input.with_scales(
            run_input.scales.kept_from(
                group,
                None if start_lr is None else float(start_lr),
                str(restarted.path),
            )
        )


def _with_saved_models(run_input: Input, sources: Mapping[str, Source]) -> Input:
    """Return the input with the models of --use-pretrain-script."""
    branches = run_input.branches
    run_input = run_input.with_models(
        {name: source.script(branches[name].model) for name, source in sources.items()}
    )
    for names in run_input.descriptor_sections.values():
        # A branch that starts anew shares the descriptor that the script gives to another one.
        with_script = [name for name in names if name in sources]
        if with_script:
            descriptor = run_input.branches[with_script[0]].model.descriptor
            run_input = run_input.with_model(names, descriptor=descriptor)
    is_hosted = any(
        isinstance(branch.model, HostedSettings) for branch in run_input.branches.values()
    )
    if run_input.scales is not None and is_hosted:
        # As for inputs that name the model themselves: the scales were measured on our models.
        run_input = run_input.with_default_scales()
        optimizer = run_input.settings.optimizer
        assert isinstance(optimizer, HybridMuonConfig)  # no other one has scales
        log.info(
            "optimizer/lr_adjust_coeff is not given and takes %g, deepmd-kit's default for models "
            "that deepmd-kit computes (doc/learning-rate.md)",
            optimizer.lr_adjust_coeff,
        )
    return run_input


# ----- sel ---------------------------------------------------------------------------------------


def resolve_sel(
    run_input: Input,
    systems: Mapping[str, Systems],
    sources: Mapping[str, Source] = MappingProxyType({}),
    *,
    count: bool,
    device: torch.device = _CPU,
) -> tuple[Input, dict[str, NeighborStatistics]]:
    """Replace ``sel: "auto"`` and the like by numbers of the branch's checkpoint, or from its data.

    Neighbours are counted on `device` if it can search for them.

    Returns
    -------
    tuple
        The input with numbers, and the neighbour statistics within the model's cut-off by branch,
        if they were needed. Branches with the same entry of model/shared_dict get the same numbers,
        enough for all of them.

    Raises
    ------
    TrainingError
        If a descriptor needs counts and `count` is false (--skip-neighbor-stat).
    """
    statistics: dict[str, NeighborStatistics] = {}
    for path, names in run_input.descriptor_sections.items():
        present = run_input.branches[names[0]].model
        if isinstance(present, HostedSettings):
            run_input = _resolve_hosted_sel(run_input, systems, names, count=count, device=device)
            continue
        descriptor = present.descriptor
        if not descriptor.needs_counts:
            continue
        with_sel = []  # branches with a checkpoint with a `sel` for their types
        for name in names:
            if name in sources:  # with --force-load, its model may be of other types
                saved = sources[name].settings
                same_types = saved.type_map == run_input.branches[name].model.type_map
                if same_types or not saved.descriptor.neighbors().by_type:
                    with_sel.append(name)
        if with_sel:
            source = sources[with_sel[0]]
            descriptor = descriptor.with_counts_of(source.settings.descriptor)
            run_input = run_input.with_model(names, descriptor=descriptor)
            sel = list(descriptor.neighbors().sel)
            log.info("sel of %s becomes %s, as in %s", path, sel, source.path)
            if not descriptor.needs_counts:
                continue
        if not count:
            raise TrainingError(
                f'{path}/sel is "auto", which needs the neighbour statistics, and '
                "--skip-neighbor-stat turns them off: leave that option out, or give numbers"
            )
        training = [system for name in names for system in systems[name].training]
        counted: dict[float, NeighborStatistics] = {}  # by cut-off
        resolved = descriptor.with_counts(partial(_count_within, training, device, counted))
        run_input = run_input.with_model(names, descriptor=resolved)
        log.info("sel of %s becomes %s", path, list(resolved.neighbors().sel))
        rcut = resolved.neighbors().rcut
        if len(names) == 1 and rcut in counted:
            statistics[names[0]] = counted[rcut]
    return run_input, statistics


def _resolve_hosted_sel(
    run_input: Input,
    systems: Mapping[str, Systems],
    names: Sequence[str],
    *,
    count: bool,
    device: torch.device,
) -> Input:
    """Replace "auto" in the sections of hosted models; deepmd-kit computes the numbers."""
    from deepmd_muon.model.hosted.section import with_counts

    training = [system for name in names for system in systems[name].training]
    counted: dict[float, NeighborStatistics] = {}

    def count_within(rcut: float) -> NeighborStatistics:
        if not count:
            raise TrainingError(
                'sel is "auto", which needs the neighbour statistics, and --skip-neighbor-stat '
                "turns them off: leave that option out, or give numbers"
            )
        return counted.get(rcut) or _count_within(training, device, counted, rcut)

    models = {}
    for name in names:
        settings = run_input.branches[name].model
        assert isinstance(settings, HostedSettings)
        models[name] = with_counts(settings, count_within)
    return run_input.with_models(models)


def _count_within(
    systems: Sequence[System],
    device: torch.device,
    counted: dict[float, NeighborStatistics],
    rcut: float,
) -> NeighborStatistics:
    """Count neighbours within a cut-off in a sample of frames, and add the result to `counted`."""
    ntypes = max(number_of_types(system) for system in systems)
    cache = NeighborCache(rcut, None, by_type=False, ntypes=ntypes)
    sample = sample_on(device, systems, cache)
    count: Count = sample.count if sample else partial(neighbor_statistics, systems, rcut)
    numbers = sample_frames(systems, _MOST_COUNTED, rcut)
    counted[rcut] = _count_neighbors(systems, rcut, numbers, count)
    return counted[rcut]


def counting_of(
    run_input: Input,
    model: EnergyModel,
    loader: DataLoader,
    sample: DeviceSample | None,
    *,
    measured: bool,
) -> Count:
    """Return what counts neighbours in a loader's systems: the device, or the host.

    The host lists the neighbours of frames that are read next on the way.
    """
    if sample is not None:
        return sample.count
    listed = frames_to_list(run_input, model, loader, measured=measured)
    return partial(neighbor_statistics, loader.systems, model.rcut, loader.cache, listed=listed)


def frames_to_list(
    run_input: Input, model: EnergyModel, loader: DataLoader, *, measured: bool
) -> list[np.ndarray] | None:
    """Return the frames of each training system with neighbour lists that the start reads.

    Statistics read them, if the data are `measured`, and the length of descriptors. None if all
    frames are counted: then all are listed at once.
    """
    nframes = [system.nframes for system in loader.systems]
    if frame_costs(loader.systems, model.rcut) @ nframes <= _MOST_COUNTED:
        return None
    no_frames = np.zeros(0, dtype=np.int64)
    frames_of_readers = [[no_frames] * len(loader.systems)]
    if measured:
        frames_of_readers.append(measured_frames(model, loader))
    if run_input.scales is not None and not run_input.scales.kept:
        frames_of_readers.append(loader.bounded_numbers(1, _MOST_MEASURED))
    return [np.concatenate(of_system) for of_system in zip(*frames_of_readers, strict=True)]


def check_sel(
    model: EnergyModel, loader: DataLoader, count: Count, model_path: str = "model"
) -> NeighborStatistics:
    """Count neighbours in training frames, and warn if the model's `sel` is too small.

    The frames behind the statistics of the data are among those counted. `model_path` is the
    model's place in the input.
    """
    measured = measured_frames(model, loader)
    numbers = sample_with(loader.systems, measured, _MOST_COUNTED, model.rcut)
    statistics = _count_neighbors(loader.systems, model.rcut, numbers, count)
    if model.by_type:
        needed = list(statistics.max_neighbors)
        names = list(model.type_map)
    else:
        needed = [statistics.max_total]
        names = ["all types"]
    short = [
        f"{name}: {number} > {limit}"
        for name, number, limit in zip(names, needed, model.sel, strict=True)
        if number > limit
    ]
    if short:
        enough = [-(-number // 4) * 4 for number in needed]  # deepmd-kit takes multiples of 4
        log.warning(
            "sel is smaller than the most neighbours found (%s): the farthest are left out; "
            "set %s/descriptor/sel to at least %s",
            "; ".join(short),
            model_path,
            enough if model.by_type else enough[0],
        )
    return statistics


def _count_neighbors(
    systems: Sequence[System], rcut: float, numbers: Sequence[np.ndarray], count: Count
) -> NeighborStatistics:
    """Count neighbours in frames `numbers` of each system, and log the result."""
    n_counted = sum(len(of_system) for of_system in numbers)
    n_frames = sum(system.nframes for system in systems)
    statistics = count(numbers=numbers)
    log.info(
        "neighbours within %g Å%s: at most %s per type; shortest distance %.3f Å",
        rcut,
        f" in {n_counted} of {n_frames} frames" if n_counted < n_frames else "",
        _by_type(list(statistics.max_neighbors), systems[0].type_map),
        statistics.min_distance,
    )
    if problem := distance_problem(systems, numbers, statistics.min_distance, rcut):
        log.warning("data: %s", problem)
    return statistics


def _by_type(counts: Sequence[int], type_map: Sequence[str] | None) -> str:
    """Return a number for each type; of many types, as of a universal model, only those above 0."""
    if type_map is None or len(counts) <= _MANY_TYPES:
        return str(list(counts))
    counted = zip(type_map, counts, strict=True)
    return ", ".join(f"{element} {count}" for element, count in counted if count)


# ----- the scales of HybridMuon ------------------------------------------------------------------


def suit_scales(
    run_input: Input,
    branches: Mapping[str, RunBranch],
    ranks: Ranks,
    samples: Mapping[str, DeviceSample],
) -> Input:
    """Lower the scales of HybridMuon that input and checkpoint omit, if descriptors are long.

    Branches with a sample on the device take their neighbours from there.
    """
    if run_input.scales is None or run_input.scales.kept:
        return run_input

    def structures_of(branch: RunBranch) -> Iterator[Structures]:
        loader = branch.data.training
        if sample := samples.get(branch.name):
            for _, structures in sample.batches(loader.bounded_numbers(1, _MOST_MEASURED)):
                yield structures
            return
        for batch in loader.bounded_batches(1, _MOST_MEASURED):
            yield Structures.of(batch.frames, batch.neighbors, branch.model.ntypes, ranks.device)

    def measure_longest() -> float:
        return max(
            descriptor_length(branch.model, structures_of(branch)) for branch in branches.values()
        )

    scales = run_input.scales.for_descriptors(
        ranks.run_on_rank0("measuring descriptors", measure_longest)
    )
    # Ranks other than the first show warnings, and one is enough.
    level = logging.WARNING if scales.fallen and ranks.first else logging.INFO
    log.log(level, "%s", scales.notice)
    return run_input.with_scales(scales)
