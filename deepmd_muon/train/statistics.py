"""Statistics of data in models: environments, frame and atomic parameters, and energy biases.

They are computed once, before training, or read from `stat_file`. A trained model gets another
energy bias by `settle_energy_bias` (fine-tuning, new types) and `change_bias` (a command).

A *group* is the branches that share a descriptor, and so its statistics. Hosted models, those of
deepmd-kit, compute their own (`hosted_statistics`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

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
    System,
    data_fingerprint,
    energy_bias,
    with_parameters,
)
from deepmd_muon.data.frames import FRAME_PARAMETERS, PARAMETERS
from deepmd_muon.data.system import longest_spin
from deepmd_muon.files import make_folder_of, whole_file
from deepmd_muon.model import EnergyModel, ModelSettings, Structures, build_model
from deepmd_muon.model.deepmd_kit import branch_prefix, from_deepmd_kit
from deepmd_muon.model.fitting.interface import Conditioned
from deepmd_muon.model.statistics import environment_statistics
from deepmd_muon.section import thaw
from deepmd_muon.train import hosted_statistics
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import training_device

if TYPE_CHECKING:
    from deepmd_muon.train.batches.device_sample import DeviceSample
    from deepmd_muon.train.branches import RunBranch
    from deepmd_muon.train.checkpoint.source import Source

log = logging.getLogger(__name__)

BiasMode = Literal["change", "set"]
Arrays = dict[str, np.ndarray]
"""Statistics of a branch by name: "mean", "stddev" and, if known, "energy_bias", "fparam_mean" …"""

# Most cost (`frame_costs`: atoms with a cut-off of 6 Å) of the *measured* frames: those that
# statistics and energy biases read.
_MOST_MEASURED = 1 << 15

# ----- before training ---------------------------------------------------------------------------


def set_model_statistics(
    branches: Mapping[str, RunBranch], samples: Mapping[str, DeviceSample] = MappingProxyType({})
) -> None:
    """Standardise the descriptors' inputs and set the energy biases.

    A descriptor that several branches share is standardised by the frames of all of them, as one
    set of data. So are the frame and atomic parameters of branches that share the fitting net, too.
    The energy bias of each branch comes from its own data. Branches with a sample on the device
    take their neighbours from there.
    """
    groups: dict[int, list[RunBranch]] = {}
    for branch in branches.values():
        groups.setdefault(id(branch.model.statistics_owner), []).append(branch)
    for group in groups.values():
        keys = _keys_of(group)
        statistics = _load_stored(group, keys)
        if statistics is None:
            if group[0].model.fits_own_statistics:
                statistics = hosted_statistics.compute(group, _MOST_MEASURED)
            else:
                statistics = _compute(group, samples)
            for branch, key, arrays in zip(group, keys, statistics, strict=True):
                if file := branch.stat_file:
                    file.save(key, arrays)
        for branch, arrays in zip(group, statistics, strict=True):
            _set_statistics(branch, arrays)


def _set_statistics(branch: RunBranch, arrays: Mapping[str, np.ndarray]) -> None:
    """Set a model's statistics to computed or stored ones, and log them."""
    model = branch.model
    if model.fits_own_statistics:
        hosted_statistics.load(model, arrays)
        _log_bias(branch)
        return
    model.set_statistics(torch.from_numpy(arrays["mean"]), torch.from_numpy(arrays["stddev"]))
    net = model.atomic_model.fitting_net
    for name in PARAMETERS:
        if f"{name}_mean" in arrays and isinstance(net, Conditioned):
            mean = torch.from_numpy(arrays[f"{name}_mean"])
            deviation = torch.from_numpy(arrays[f"{name}_stddev"])
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
        _log_bias(branch)
    else:
        log.warning("%sno training system has energies: the energy bias stays 0", branch.prefix)


def _log_bias(branch: RunBranch) -> None:
    biases = branch.model.out_bias.ravel().tolist()
    by_type = [
        f"{name} {bias:.6g} eV" for name, bias in zip(branch.model.type_map, biases, strict=True)
    ]
    log.info("%senergy bias: %s", branch.prefix, ", ".join(by_type))


# ----- stat_file ---------------------------------------------------------------------------------


def _keys_of(group: Sequence[RunBranch]) -> list[dict[str, object]]:
    """Return what the statistics of each branch depend on; empty if none has a `stat_file`."""
    if not any(branch.stat_file for branch in group):  # the fingerprints read all measured frames
        return [{} for _ in group]
    if group[0].model.fits_own_statistics:
        return hosted_statistics.keys_of(group, _MOST_MEASURED)
    keys = [_dependencies(branch) for branch in group]
    if len(group) == 1:
        return keys
    return [
        {
            **key,
            "shared_with": keys,
            "shared_fitting_net": [_share_fitting_net(branch, member) for member in group],
        }
        for branch, key in zip(group, keys, strict=True)
    ]


def _dependencies(branch: RunBranch) -> dict[str, object]:
    """Return the settings and the content of the frames behind the statistics of one branch."""
    settings = branch.model.settings
    loader = branch.data.training
    key: dict[str, object] = {
        "descriptor": settings.descriptor.statistics_key(),
        "type_map": list(settings.type_map),
        "frames": data_fingerprint(loader.systems, measured_frames(branch.model, loader)),
    }
    for name in ("pair_exclude_types", "atom_exclude_types", "data_stat_protect"):
        key[name] = thaw(getattr(settings, name))
    for name in ("numb_fparam", "numb_aparam", "atom_ener", "rcond"):
        key[name] = thaw(getattr(settings.fitting_net, name, None))
    return key


def _share_fitting_net(branch: RunBranch, another: RunBranch) -> bool:
    """Return whether two branches have the weights of one fitting net."""
    weight = next(branch.model.atomic_model.fitting_net.parameters(), None)
    return weight is next(another.model.atomic_model.fitting_net.parameters(), None)


def _load_stored(
    group: Sequence[RunBranch], keys: Sequence[Mapping[str, object]]
) -> list[Arrays] | None:
    """Return the stored statistics of each branch.

    None unless all are stored: those of a shared descriptor belong to all its branches.
    """
    stored = []
    for branch, key in zip(group, keys, strict=True):
        file = branch.stat_file
        arrays = file.load(key) if file else None
        if arrays is not None:
            if not branch.model.fits_own_statistics:
                _check_statistics(arrays, branch)
            stored.append(arrays)
    if len(stored) < len(group):
        return None
    for branch in group:
        log.info("%sstatistics come from %s", branch.prefix, branch.settings.data.stat_file)
    return stored


def _check_statistics(arrays: Mapping[str, np.ndarray], branch: RunBranch) -> None:
    """Refuse stored statistics of another size or kind, and those that are not finite."""
    model = branch.model
    ntypes = model.ntypes
    shapes: dict[str, tuple[int, ...]] = {
        "mean": (ntypes, 4),
        "stddev": (ntypes, 4),
        "energy_bias": (ntypes,),
    }
    for name in PARAMETERS:
        if number := getattr(model.settings.fitting_net, f"numb_{name}", 0):
            shapes[f"{name}_mean"] = (number,)
            shapes[f"{name}_stddev"] = (number,)
    missing = shapes.keys() - arrays.keys() - {"energy_bias"}  # data may have no energies
    problems = [f"{name} is missing" for name in shapes if name in missing]
    for name, array in arrays.items():
        if name not in shapes:
            problems.append(f"{name} is unknown")
        elif array.dtype.kind != "f" or array.size != math.prod(shapes[name]):
            problems.append(
                f"{name} is {array.dtype} of shape {array.shape}, "
                f"expected numbers of shape {shapes[name]}"
            )
        elif not np.isfinite(array).all():
            problems.append(f"{name} has values that are not finite")
        elif name.endswith("stddev") and not (array > 0.0).all():
            problems.append(f"{name} has values that are not above 0")
    if problems:
        raise DataError(
            f"stat_file {branch.settings.data.stat_file} is damaged: {'; '.join(problems)}; "
            "remove it, or name another"
        )


# ----- computing ---------------------------------------------------------------------------------


def measured_frames(model: EnergyModel, loader: DataLoader) -> list[np.ndarray]:
    """Return the numbers of the measured frames of each system."""
    return loader.bounded_numbers(model.settings.data_stat_nbatch, _MOST_MEASURED)


class _MeasuredBatch(NamedTuple):
    """Measured frames on the host, and their structures on the model's device."""

    frames: Frames
    structures: Structures


def _compute(group: Sequence[RunBranch], samples: Mapping[str, DeviceSample]) -> list[Arrays]:
    """Return the statistics of each branch of a group."""
    frames_of: dict[str, list[Frames]] = {branch.name: [] for branch in group}

    def read_structures() -> Iterator[Structures]:
        for branch in group:
            for batch in _measured_batches(branch, samples.get(branch.name)):
                frames_of[branch.name].append(batch.frames)
                yield batch.structures

    # One pass: reading structures fills `frames_of`, and the host builds further batches meanwhile.
    structures = read_structures()
    mean, stddev = environment_statistics(group[0].model, structures)
    for _ in structures:  # a descriptor that standardises nothing has read none
        pass
    statistics = []
    for branch in group:
        frames_of_net = [
            frames
            for member in group
            if _share_fitting_net(branch, member)
            for frames in frames_of[member.name]
        ]
        protection = branch.model.settings.data_stat_protect
        arrays = {
            "mean": mean.cpu().numpy(),
            "stddev": stddev.cpu().numpy(),
            **_parameter_statistics(frames_of_net, protection),
        }
        bias = _energy_bias_of(branch.model, frames_of[branch.name])
        if bias is not None:
            arrays["energy_bias"] = bias
        statistics.append(arrays)
    return statistics


def _measured_batches(branch: RunBranch, sample: DeviceSample | None) -> Iterator[_MeasuredBatch]:
    """Yield the measured frames of a branch; `sample` finds their neighbours on the device."""
    model = branch.model
    loader = branch.data.training
    if sample is not None:
        for frames, structures in sample.batches(measured_frames(model, loader)):
            yield _MeasuredBatch(frames, structures)
        return
    device = model.out_bias.device
    for batch in loader.bounded_batches(model.settings.data_stat_nbatch, _MOST_MEASURED):
        structures = Structures.of(batch.frames, batch.neighbors, model.ntypes, device)
        yield _MeasuredBatch(batch.frames, structures)


def _parameter_statistics(frames_of_net: Sequence[Frames], protection: float) -> Arrays:
    """Return means and deviations of the parameters that frames carry, over frames or atoms.

    Deviations are at least `protection`.
    """
    arrays = {}
    for name in PARAMETERS:
        rows = []
        for frames in frames_of_net:
            values = getattr(frames, name)
            if values is not None:
                of_frames = name in FRAME_PARAMETERS
                rows.append(values if of_frames else values[frames.atype >= 0])
        if rows:
            joined = np.concatenate(rows)
            mean = joined.mean(axis=0)
            # Rounding may make the difference of two large numbers negative.
            variance = np.clip(np.square(joined).mean(axis=0) - np.square(mean), 0.0, None)
            arrays[f"{name}_mean"] = mean
            arrays[f"{name}_stddev"] = np.maximum(np.sqrt(variance), protection)
    return arrays


def _energy_bias_of(model: EnergyModel, frames_of_branch: Sequence[Frames]) -> np.ndarray | None:
    """Return the energy bias of a branch `(ntypes,)` [eV]; None if no frame has an energy."""
    labelled = [frames for frames in frames_of_branch if frames.energy is not None]
    if not labelled:
        return None
    settings = model.settings
    counts = np.concatenate([_type_counts(frames, model) for frames in labelled])
    energies = np.concatenate([frames.energy for frames in labelled])
    rcond = getattr(settings.fitting_net, "rcond", None)
    return energy_bias(counts, energies, fixed_energies(settings), rcond)


def _type_counts(frames: Frames, model: EnergyModel) -> np.ndarray:
    """Return the atoms of each type that add to the energy `(nframes, ntypes)`."""
    counts = frames.type_counts(model.ntypes)
    counts[:, list(model.settings.atom_exclude_types)] = 0
    return counts


def fixed_energies(settings: ModelSettings) -> np.ndarray | None:
    """Return the energies of `atom_ener` `(ntypes,)` [eV], NaN for types to fit; None if unset."""
    energies = getattr(settings.fitting_net, "atom_ener", None)
    if not energies:
        return None
    return np.array([math.nan if energy is None else energy for energy in energies])


# ----- the energy bias of a trained model --------------------------------------------------------


def settle_energy_bias(model: EnergyModel, source: Source, loader: DataLoader) -> None:
    """Fit the energy bias to training data.

    Fine-tuning fits the bias of all types; otherwise only types that are new to the checkpoint. The
    bias of a type in `atom_ener` stays, as do all biases of a new fitting net.
    """
    move = source.move_to(model.type_map)
    new_types = move.new if move else ()
    refits_all = source.way == "finetune"
    if source.new_fitting or not (new_types or refits_all):
        return
    keep = set()
    if not refits_all:
        keep = {name for name in model.type_map if name not in new_types}
    fixed = fixed_energies(model.settings)
    if fixed is not None:
        keep |= {
            name
            for name, energy in zip(model.type_map, fixed, strict=True)
            if not math.isnan(energy)
        }
    batches = loader.bounded_batches(model.settings.data_stat_nbatch, _MOST_MEASURED)
    fit_energy_bias(model, batches, keep=keep)


@torch.no_grad()
def fit_energy_bias(
    model: EnergyModel,
    batches: Iterable[Batch],
    mode: BiasMode = "change",
    *,
    keep: Collection[str] = (),
) -> None:
    """Fit the energy of each type that the model adds to its atoms, by least squares.

    As deepmd-kit does, with the `rcond` of its fitting net.

    Parameters
    ----------
    model
        The model; its bias changes.
    batches
        Samples; frames without energy (None for a batch, NaN for a frame) do not count.
    mode
        'change' adds to the bias what explains the model's errors best. 'set' replaces it by what
        explains the total energies best without the model.
    keep
        Types with a bias that stays.

    Raises
    ------
    TrainingError
        If no frame has an energy.
    """
    bias = model.out_bias
    before = bias[0, :, 0].cpu().numpy().copy()
    counts = []
    errors = []
    for batch in batches:
        frames = batch.frames
        if frames.energy is None:
            continue
        predicted = 0.0
        if mode == "change":
            structures = Structures.of(frames, batch.neighbors, model.ntypes, bias.device)
            # (nframes,) [eV]
            predicted = model(structures, force=False)["energy"].cpu().numpy()
        counts.append(_type_counts(frames, model))
        errors.append(frames.energy - predicted)
    if not counts:
        raise TrainingError("no system has energies, which the energy bias is fitted to")
    # Fitted is the change of the bias, or the bias itself. Types to keep change by 0.
    is_kept = np.array([name in keep for name in model.type_map])
    fixed = np.where(is_kept, 0.0 if mode == "change" else before, np.nan)
    rcond = getattr(model.settings.fitting_net, "rcond", None)
    fitted = energy_bias(np.concatenate(counts), np.concatenate(errors), fixed, rcond)
    after = before + fitted if mode == "change" else fitted
    model.set_energy_bias(torch.from_numpy(after))
    changes = [
        f"{name} {old:.6g} → {new:.6g} eV"
        for name, old, new in zip(model.type_map, before, after, strict=True)
        if old != new
    ]
    log.info("energy bias: %s", ", ".join(changes) or "unchanged")


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
    """Write a checkpoint with another energy bias; all else in it stays, optimizer state too.

    Parameters
    ----------
    source, output
        The checkpoint and the new one.
    open_data
        Opens the systems with the energies that the bias is fitted to, for a type map.
    values
        Energies [eV] to set instead, one for each type.
    mode
        See `fit_energy_bias`.
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
        systems = with_parameters(open_data(model.type_map), Parameters.of(settings))
        if settings.atom_exclude_types:
            log.info("%s", EXCLUDED_ATOMS)
        if model.lists_depend_on_spins:
            model.reach_spins(longest_spin(systems))
        cache = NeighborCache.of(model.neighbors, model.ntypes, max_bytes=0)
        if frames:
            loader = DataLoader(systems, 1, cache=cache)
            n_batches = frames  # of one frame each
        else:
            loader = DataLoader(systems, "auto:1024", cache=cache)
            n_batches = max(system.nframes for system in systems)  # enough for all frames
        fit_energy_bias(model, loader.sample_batches(n_batches), mode)
    elif len(values) != model.ntypes:
        raise TrainingError(
            f"one energy is needed for each type of {list(model.type_map)}; found {len(values)}"
        )
    else:
        log.info("energy bias of %s: %s eV", ", ".join(model.type_map), list(values))
        model.set_energy_bias(values)
    # The tensor as it is stored: in a model with virtual atoms it has their types, too.
    (name,) = [name for name in model.state_dict() if name.endswith("atomic_model.out_bias")]
    bias = model.state_dict()[name].cpu()
    content["model"] = {**content["model"], branch_prefix(content["model"], branch) + name: bias}
    make_folder_of(output)
    with whole_file(output) as file:
        torch.save(content, file)
    log.info("saved %s", output)
