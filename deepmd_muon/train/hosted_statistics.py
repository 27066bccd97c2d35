"""Statistics of the data in hosted models: deepmd-kit's own call on our frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deepmd_muon.data import Frames, System, data_fingerprint
from deepmd_muon.data.frames import PARAMETERS
from deepmd_muon.model import EnergyModel

if TYPE_CHECKING:
    from deepmd_muon.train.branches import RunBranch

Arrays = dict[str, np.ndarray]


def compute(group: Sequence[RunBranch], most_measured: int) -> list[Arrays]:
    """Fit the models of branches that share a descriptor, and return their statistics.

    The descriptor is fitted to the frames of all branches, the energy bias of each branch to its
    own. Frames of at most `most_measured` atoms at 6 Å are read for a branch.
    """
    samples = {branch.name: list(_samples(branch, most_measured)) for branch in group}
    biases = []
    for branch in group:
        branch.model.fit_statistics(samples[branch.name])
        biases.append(branch.model.out_bias.clone())
    if len(group) > 1:
        # Each fit has replaced the statistics of the descriptor by those of one branch.
        group[0].model.fit_statistics([one for of_branch in samples.values() for one in of_branch])
        for branch, bias in zip(group, biases, strict=True):
            branch.model.set_energy_bias(bias)
    return [_buffers(branch.model) for branch in group]


def _samples(branch: RunBranch, most_measured: int) -> Iterator[dict[str, Tensor]]:
    """Yield the measured frames of each system of a branch in deepmd-kit's form."""
    device = branch.model.out_bias.device
    for system, numbers in _measured(branch, most_measured):
        if not len(numbers):
            continue
        arrays = sample_of(system.frames(numbers), branch.model.ntypes)
        yield {name: torch.as_tensor(array, device=device) for name, array in arrays.items()}


def _measured(branch: RunBranch, most: int) -> Iterator[tuple[System, np.ndarray]]:
    loader = branch.data.training
    numbers = loader.bounded_numbers(branch.model.settings.data_stat_nbatch, most)
    yield from zip(loader.systems, numbers, strict=True)


def sample_of(frames: Frames, ntypes: int) -> dict[str, np.ndarray]:
    """Return frames of one system as deepmd-kit's models read them."""
    nframes, natoms = frames.atype.shape
    counts = np.full((nframes, 2), natoms)
    sample = {
        "coord": frames.coord,
        "atype": frames.atype.astype(np.int64),
        # deepmd-kit counts atoms as total, local, and of each type.
        "natoms": np.concatenate([counts, frames.type_counts(ntypes)], axis=1).astype(np.int64),
        "find_energy": np.float64(frames.energy is not None),
        "energy": np.zeros((nframes, 1)),
    }
    if frames.box is not None:
        sample["box"] = frames.box.reshape(nframes, 9)
    if frames.energy is not None:
        sample["energy"] = frames.energy.reshape(nframes, 1)
    for name in PARAMETERS:
        values = getattr(frames, name)
        if values is not None:
            sample[name] = values
            sample[f"find_{name}"] = np.float64(1.0)
    return sample


# ----- stat_file ---------------------------------------------------------------------------------


def keys_of(group: Sequence[RunBranch], most_measured: int) -> list[dict[str, object]]:
    """Return what the statistics of each branch depend on."""
    keys = []
    for branch in group:
        systems, numbers = zip(*_measured(branch, most_measured), strict=True)
        keys.append(
            {
                "model": branch.model.settings.plain_form(),
                "frames": data_fingerprint(list(systems), list(numbers)),
            }
        )
    return [{"hosted": keys, "branch": i} for i in range(len(group))]


def _buffers(model: EnergyModel) -> Arrays:
    """Return the numbers that a fit may change: all buffers of the state."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value.double().cpu().numpy()
        for name, value in model.state_dict().items()
        if name not in parameters and value.is_floating_point()
    }


def load(model: EnergyModel, arrays: Mapping[str, np.ndarray]) -> None:
    """Write stored numbers into the buffers, which keep their storage."""
    state = model.state_dict()
    for name, array in arrays.items():
        if name in state and state[name].numel() == array.size:
            state[name].copy_(torch.from_numpy(array).view(state[name].shape))
