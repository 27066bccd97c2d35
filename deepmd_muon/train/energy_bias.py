"""The energy bias of a trained model, fitted to other data: `dp train --finetune` and `dp change-bias`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from deepmd_muon.checkpoint_file.file import read_checkpoint, understood
from deepmd_muon.data import Batch, DataLoader, NeighborCache, Parameters, System, energy_bias, with_parameters
from deepmd_muon.files import whole_file
from deepmd_muon.model import EnergyModel, Structures, build_model
from deepmd_muon.model.deepmd_kit import branch_prefix, from_deepmd_kit
from deepmd_muon.train.errors import TrainingError
from deepmd_muon.train.ranks.ranks import training_device

log = logging.getLogger(__name__)

BiasMode = Literal["change", "set"]


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
    model
        Changed in place.
    batches
        Samples; frames without energy do not count.
    mode
        'change' adds to the bias what explains the model's errors best; 'set' replaces it by what explains the total
        energies best without the model.
    keep
        Types whose bias stays.
    rcond
        As in `energy_bias`.

    Raises
    ------
    TrainingError
        When no sample has an energy.
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
    source, output
        The checkpoint, ours or deepmd-kit's, and the new file.
    open_data
        Opens the systems whose energies the bias is fitted to, for a type map.
    values
        Energies [eV] to set instead, one for each type.
    mode
        See `fit_energy_bias`.
    frames
        At most this many of each system; 0 takes all.
    branch
        Name or alias of a branch of a multi-task checkpoint.

    Raises
    ------
    TrainingError
        When the number of values is not that of the types, or no system has energies.
    CheckpointError
        When the file is not a checkpoint, or its model cannot be built here.
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
        fit_energy_bias(model, _samples(model, systems, frames), mode, rcond=rcond)
    elif len(values) != model.ntypes:
        raise TrainingError(f"one energy is needed for each type of {list(model.type_map)}; found {len(values)}")
    else:
        log.info("energy bias of %s: %s eV", ", ".join(model.type_map), list(values))
        model.set_energy_bias(values)
    name = f"{branch_prefix(content['model'], branch)}atomic_model.out_bias"
    content["model"] = {**content["model"], name: model.atomic_model.out_bias.cpu()}
    with whole_file(output) as file:
        torch.save(content, file)
    log.info("saved %s", output)


def _samples(model: EnergyModel, systems: list[System], frames: int) -> Iterator[Batch]:
    """Return frames of every system, spread evenly."""
    cache = NeighborCache.of(model.neighbors, model.ntypes, max_bytes=0)
    if frames:
        return DataLoader(systems, 1, cache=cache).sample_batches(frames)
    return DataLoader(systems, "auto:1024", cache=cache).sample_batches(max(system.nframes for system in systems))
