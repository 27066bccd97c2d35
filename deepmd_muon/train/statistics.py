"""Statistics of data in models: standardised environments, and energy biases, also those of trained models."""

from __future__ import annotations

import collections
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from deepmd_muon.argcheck.differences import EXCLUDED_ATOMS
from deepmd_muon.checkpoint_file.file import read_checkpoint, understood
from deepmd_muon.data import (
    Batch,
    DataError,
    DataLoader,
    Frames,
    NeighborCache,
    Parameters,
    StatFile,
    System,
    data_fingerprint,
    energy_bias,
    with_parameters,
)
from deepmd_muon.data.frames import PARAMETERS
from deepmd_muon.files import make_folder_of, whole_file
from deepmd_muon.model import EnergyModel, ModelSettings, Structures, build_model
from deepmd_muon.model.deepmd_kit import branch_prefix, from_deepmd_kit
from deepmd_muon.model.fitting.interface import Conditioned
from deepmd_muon.model.statistics import environment_statistics
from deepmd_muon.section import thaw
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import training_device

if TYPE_CHECKING:
    from deepmd_muon.train.batches.device_sample import DeviceSample
    from deepmd_muon.train.branches import RunBranch
    from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

BiasMode = Literal["change", "set"]

# Atoms at 6 Å (see `frame_costs`) of the frames behind the statistics of the environment and the energies.
_MOST_MEASURED = 1 << 15


def set_model_statistics(
    branches: Mapping[str, RunBranch], samples: Mapping[str, DeviceSample] = MappingProxyType({})
) -> None:
    """Standardise the descriptors' inputs and set the energy biases, from samples of the data or from `stat_file`.

    A descriptor that several branches share is standardised by the samples of all of them, as one set of data, and so
    are the frame and atomic parameters of a fitting net that they share with it; the energy bias of each branch comes
    from its own data. Branches with a sample take their neighbours from the device, where their models are.
    """
    groups: dict[int, list[RunBranch]] = {}
    for branch in branches.values():
        groups.setdefault(id(branch.model.atomic_model.descriptor), []).append(branch)
    for group in groups.values():
        kept = [
            arrays for branch in group if (arrays := _kept_statistics(branch, group)) is not None
        ]
        found = kept if len(kept) == len(group) else _compute(group, samples)
        for branch, arrays in zip(group, found, strict=True):
            if found is not kept and (path := branch.settings.data.stat_file):
                StatFile(path).save(_key_of(branch, group), arrays)
            _take_statistics(branch, arrays)


def _take_statistics(branch: RunBranch, arrays: Mapping[str, np.ndarray]) -> None:
    model = branch.model
    model.set_statistics(torch.from_numpy(arrays["mean"]), torch.from_numpy(arrays["stddev"]))
    net = model.atomic_model.fitting_net
    for name in PARAMETERS:
        if f"{name}_mean" in arrays and isinstance(net, Conditioned):
            mean, deviation = (
                torch.from_numpy(arrays[f"{name}_{what}"]) for what in ("mean", "stddev")
            )
            net.set_parameter_statistics(name, mean, deviation)
            log.info(
                "%s%s: mean %s, deviation %s",
                branch.prefix,
                name,
                mean.tolist(),
                deviation.tolist(),
            )
    if "energy_bias" in arrays:
        model.set_energy_bias(torch.from_numpy(arrays["energy_bias"]))
        bias = zip(model.type_map, arrays["energy_bias"].ravel(), strict=True)
        log.info(
            "%senergy bias: %s",
            branch.prefix,
            ", ".join(f"{name} {value:.6g} eV" for name, value in bias),
        )
    else:
        log.warning("%sno training system has energies: the energy bias stays 0", branch.prefix)


def _key_of(branch: RunBranch, group: Sequence[RunBranch]) -> dict[str, object]:
    """Return what the statistics of a branch depend on; `group` shares its descriptor."""
    key = _dependencies(branch)
    if len(group) > 1:
        key["shared_with"] = [_dependencies(one) for one in group]
        key["shared_fitting_net"] = [_share_fitting_net(branch, one) for one in group]
    return key


def _dependencies(branch: RunBranch) -> dict[str, object]:
    """Return the settings and the content of the frames behind the statistics of one branch."""
    settings = branch.model.settings
    loader = branch.data.training
    keys = ("pair_exclude_types", "atom_exclude_types", "data_stat_protect")
    fitting_keys = ("numb_fparam", "numb_aparam", "atom_ener", "rcond")
    return {
        "descriptor": settings.descriptor.statistics_key(),
        "type_map": list(settings.type_map),
        **{name: thaw(getattr(settings, name)) for name in keys},
        **{name: thaw(getattr(settings.fitting_net, name, None)) for name in fitting_keys},
        "frames": data_fingerprint(loader.systems, measured_frames(branch.model, loader)),
    }


def _share_fitting_net(one: RunBranch, other: RunBranch) -> bool:
    """Return whether two branches have the weights of one fitting net."""
    first, second = (
        next(branch.model.atomic_model.fitting_net.parameters(), None) for branch in (one, other)
    )
    return first is second


def _kept_statistics(branch: RunBranch, group: Sequence[RunBranch]) -> dict[str, np.ndarray] | None:
    """Return the statistics that a branch's `stat_file` holds; None without any."""
    path = branch.settings.data.stat_file
    arrays = StatFile(path).load(_key_of(branch, group)) if path else None
    if arrays is not None:
        _check_statistics(arrays, branch.model, str(path))
        log.info("%sstatistics come from %s", branch.prefix, path)
    return arrays


def _check_statistics(arrays: Mapping[str, np.ndarray], model: EnergyModel, path: str) -> None:
    """Refuse kept statistics of another shape or kind, which would end as a loss that is not finite."""
    ntypes = model.ntypes
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (ntypes, 4),
        "stddev": (ntypes, 4),
        "energy_bias": (ntypes,),
    }
    for name in PARAMETERS:
        if number := getattr(model.settings.fitting_net, f"numb_{name}", 0):
            shapes |= {f"{name}_mean": (number,), f"{name}_stddev": (number,)}
    problems = [
        f"{name} is missing" for name in shapes if name not in arrays and name != "energy_bias"
    ]
    for name, found in arrays.items():
        if name not in shapes:
            problems.append(f"{name} is unknown")
        elif found.dtype.kind != "f" or found.size != math.prod(shapes[name]):
            problems.append(
                f"{name} is {found.dtype} of shape {found.shape}, expected numbers of shape {shapes[name]}"
            )
        elif not np.isfinite(found).all():
            problems.append(f"{name} has values that are not finite")
        elif name.endswith("stddev") and not (found > 0.0).all():
            problems.append(f"{name} has values that are not above 0")
    if problems:
        raise DataError(
            f"stat_file {path} is damaged: {'; '.join(problems)}; remove it, or name another"
        )


def measured_frames(model: EnergyModel, loader: DataLoader) -> list[np.ndarray]:
    """Return the numbers of the frames of each system that `set_model_statistics` reads."""
    return loader.bounded_numbers(model.settings.data_stat_nbatch, _MOST_MEASURED)


def _compute(
    group: Sequence[RunBranch], samples: Mapping[str, DeviceSample]
) -> list[dict[str, np.ndarray]]:
    """Return the statistics of branches with one descriptor."""
    read: list[list[Frames]] = [[] for _ in group]
    model = group[0].model

    def structures() -> Iterator[Structures]:
        for branch, own in zip(group, read, strict=True):
            for frames, found in _measured(branch, samples.get(branch.name)):
                own.append(frames)
                yield found

    # On the host further batches are built ahead while those before are standardised.
    reading = structures()
    mean, stddev = environment_statistics(model, reading)
    collections.deque(
        reading, maxlen=0
    )  # those that are not standardised are read for their energies
    found = [{"mean": mean.cpu().numpy(), "stddev": stddev.cpu().numpy()} for _ in group]
    for branch, own, arrays in zip(group, read, found, strict=True):
        sharing = [
            theirs
            for other, theirs in zip(group, read, strict=True)
            if _share_fitting_net(branch, other)
        ]
        arrays |= _parameter_statistics(
            [*itertools.chain(*sharing)], branch.model.settings.data_stat_protect
        )
        labelled = [frames for frames in own if frames.energy is not None]
        if labelled:
            settings = branch.model.settings
            counts = np.concatenate(
                [frames.type_counts(branch.model.ntypes) for frames in labelled]
            )
            counts[:, list(settings.atom_exclude_types)] = 0
            energies = np.concatenate([frames.energy for frames in labelled])
            rcond = getattr(settings.fitting_net, "rcond", None)
            arrays["energy_bias"] = energy_bias(counts, energies, fixed_energies(settings), rcond)
    return found


def _measured(
    branch: RunBranch, sample: DeviceSample | None
) -> Iterator[tuple[Frames, Structures]]:
    """Yield the frames behind a branch's statistics, and their structures on the model's device."""
    model, loader = branch.model, branch.data.training
    if sample is not None:
        yield from sample.batches(measured_frames(model, loader))
        return
    device = model.atomic_model.out_bias.device
    for batch in loader.bounded_batches(model.settings.data_stat_nbatch, _MOST_MEASURED):
        yield batch.frames, Structures.of(batch.frames, batch.neighbors, model.ntypes, device)


def _parameter_statistics(every: Sequence[Frames], protection: float) -> dict[str, np.ndarray]:
    """Return means and deviations, at least `protection`, of the parameters that frames carry, over frames or atoms."""
    found: dict[str, np.ndarray] = {}
    for name in PARAMETERS:
        rows = [
            values if name == "fparam" else values[frames.atype >= 0]
            for frames in every
            if (values := getattr(frames, name)) is not None
        ]
        if rows:
            joined = np.concatenate(rows)
            mean = joined.mean(axis=0)
            variance = np.clip(np.square(joined).mean(axis=0) - np.square(mean), 0.0, None)
            found |= {
                f"{name}_mean": mean,
                f"{name}_stddev": np.maximum(np.sqrt(variance), protection),
            }
    return found


def fixed_energies(settings: ModelSettings) -> np.ndarray | None:
    """Return given vacuum energies `(ntypes,)` [eV] with NaN where there is none; None when all are free."""
    given = getattr(settings.fitting_net, "atom_ener", None)
    return np.array([math.nan if value is None else value for value in given]) if given else None


def settle_energy_bias(model: EnergyModel, source: Source, loader: DataLoader) -> None:
    """Fit the energy bias to training data: of all types when fine-tuning, else of those new to the checkpoint."""
    move = source.move_to(model.type_map)
    new = move.new if move else ()
    if source.new_fitting or not (new or source.way == "finetune"):
        return
    keep = (
        {name for name in model.type_map if name not in new} if source.way != "finetune" else set()
    )
    fixed = fixed_energies(model.settings)
    if fixed is not None:
        keep |= {
            name for name, value in zip(model.type_map, fixed, strict=True) if not math.isnan(value)
        }
    batches = loader.bounded_batches(model.settings.data_stat_nbatch, _MOST_MEASURED)
    fit_energy_bias(
        model, batches, keep=keep, rcond=getattr(model.settings.fitting_net, "rcond", None)
    )


@torch.no_grad()
def fit_energy_bias(
    model: EnergyModel,
    batches: Iterable[Batch],
    mode: BiasMode = "change",
    *,
    keep: Collection[str] = (),
    rcond: float | None = None,
) -> None:
    """Fit the energy of each type that the model adds to its atoms, by least squares, as deepmd-kit does.

    Parameters
    ----------
    batches
        Samples; frames without energy do not count. A TrainingError where none has an energy.
    mode
        'change' adds to the bias what explains the model's errors best; 'set' replaces it by what explains the total
        energies best without the model.
    keep
        Types whose bias stays.
    rcond
        As in `energy_bias`.
    """
    before = model.atomic_model.out_bias[0, :, 0].cpu().numpy().copy()
    counts, errors = [], []
    for batch in batches:
        frames = batch.frames
        if frames.energy is None:
            continue
        predicted = 0.0
        if mode == "change":
            device = model.atomic_model.out_bias.device
            structures = Structures.of(frames, batch.neighbors, model.ntypes, device)
            predicted = model(structures, force=False)["energy"].cpu().numpy()
        counted = frames.type_counts(model.ntypes)
        counted[:, list(model.settings.atom_exclude_types)] = 0
        counts.append(counted)
        errors.append(frames.energy - predicted)
    if not counts:
        raise TrainingError("no system has energies, which the energy bias is fitted to")
    kept = np.array([name in keep for name in model.type_map])
    fixed = np.where(kept, 0.0 if mode == "change" else before, np.nan)
    found = energy_bias(np.concatenate(counts), np.concatenate(errors), fixed, rcond)
    after = before + found if mode == "change" else found
    model.set_energy_bias(torch.from_numpy(after))
    values = zip(model.type_map, before, after, strict=True)
    changed = [f"{name} {old:.6g} → {new:.6g} eV" for name, old, new in values if old != new]
    log.info("energy bias: %s", ", ".join(changed) or "unchanged")


def change_bias(
    source: Path,
    output: Path,
    *,
    open_data: Callable[[Sequence[str]], list[System]],
    values: Sequence[float] | None = None,
    mode: BiasMode = "change",
    frames: int = 0,
    branch: str | None = None,
) -> None:
    """Write a checkpoint with another energy bias; all else in it, optimizer state too, stays.

    Parameters
    ----------
    open_data
        Opens the systems whose energies the bias is fitted to, for a type map.
    values
        Energies [eV] to set instead, one for each type.
    frames
        At most this many of each system; 0 takes all.
    branch
        Name or alias of a branch of a multi-task checkpoint.
    """
    content = read_checkpoint(source)
    with understood(source):
        settings, weights = from_deepmd_kit(content["model"], branch)
        model = build_model(settings)
        model.load_state_dict(weights)
    if values is None:
        model = model.to(training_device())
        rcond = getattr(settings.fitting_net, "rcond", None)
        systems = with_parameters(open_data(model.type_map), Parameters.of(settings.fitting_net))
        if settings.atom_exclude_types:
            log.info("%s", EXCLUDED_ATOMS)
        fit_energy_bias(model, _samples(model, systems, frames), mode, rcond=rcond)
    elif len(values) != model.ntypes:
        raise TrainingError(
            f"one energy is needed for each type of {list(model.type_map)}; found {len(values)}"
        )
    else:
        log.info("energy bias of %s: %s eV", ", ".join(model.type_map), list(values))
        model.set_energy_bias(values)
    name = f"{branch_prefix(content['model'], branch)}atomic_model.out_bias"
    content["model"] = {**content["model"], name: model.atomic_model.out_bias.cpu()}
    make_folder_of(output)
    with whole_file(output) as file:
        torch.save(content, file)
    log.info("saved %s", output)


def _samples(model: EnergyModel, systems: list[System], frames: int) -> Iterator[Batch]:
    """Return frames of every system, spread evenly."""
    cache = NeighborCache.of(model.neighbors, model.ntypes, max_bytes=0)
    if frames:
        return DataLoader(systems, 1, cache=cache).sample_batches(frames)
    return DataLoader(systems, "auto:1024", cache=cache).sample_batches(
        max(system.nframes for system in systems)
    )
