"""Label structures of hot dynamics with the mean of several potentials, for one net that learns from data and mean.

    python source/benchmarks/race/distill.py --set water --data race-data --members kept/water_default_30000_*.pt \
        --results means.jsonl

Copies of training frames run at 1.5 times the temperature of the set, moved by the mean's forces. Their structures
become systems below ``SET/distilled``, which the setting `distilled` adds to the training data. The training frames
keep the labels of the reference, and the reference labels nothing new.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from anchors import Surroundings, starts_of
from sets import SETS, Part
from settings import DISTILLED
from stability_runs import append, errors_of, opened, surroundings
from torch import Tensor
from watched import WATCH, WatchedRun

from deepmd_muon.data import Frames, System
from deepmd_muon.infer.prediction import Prediction
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.model import EnergyModel, Structures

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

from write_system import LabelledSystem, write_npy  # needs the path above

#: Dynamics of the mean: their number, how often each gives a structure, and the time steps between two structures.
COPIES, SAMPLES, SPACING = 24, 10, 200
#: Structures with a larger force of the mean [eV/Å], or with a pair nearer than this ratio of the shortest distance in
#: the data, teach nothing.
LARGEST, CLOSEST = 30.0, 0.6


class MeanModel(torch.nn.Module):
    """The mean of models with the same types and neighbours, as far as dynamics ask for it."""

    def __init__(self, models: Sequence[EnergyModel]) -> None:
        super().__init__()
        self.members = torch.nn.ModuleList(models)
        self.type_map = models[0].type_map
        self.ntypes = models[0].ntypes
        self.rcut = models[0].rcut
        self.neighbors = models[0].neighbors

    def forward(self, structures: Structures, *, force: bool, virial: bool) -> dict[str, Tensor]:
        """Return mean energies and forces."""
        found = [member(structures, force=force, virial=virial) for member in self.members]
        return {key: sum(one[key] for one in found) / len(found) for key in ("energy", "force")}


class MeanPredictor:
    """The mean of potentials, as far as `errors_of` and `labelled` ask for it."""

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        self.predictors = predictors
        self.model = MeanModel([predictor.model for predictor in predictors])

    def evaluate(self, frames: Frames) -> Prediction:
        """Return the mean predictions for frames."""
        found = [predictor.evaluate(frames) for predictor in self.predictors]
        means = {
            key: np.mean([getattr(one, key) for one in found], axis=0)
            for key in ("energy", "force", "virial", "atom_energy")
        }
        return Prediction(**means)


class Sampled(NamedTuple):
    """Structures of dynamics.

    Attributes
    ----------
    coord
        Positions `(nsamples, ncopies, natoms, 3)` [Å].
    usable
        Whether a copy still ran, with moderate forces and no pair too close `(nsamples, ncopies)`.
    blown
        When each copy blew up `(ncopies,)` [ps]; infinite where it did not.
    """

    coord: np.ndarray
    usable: np.ndarray
    blown: np.ndarray


class SampledRun(WatchedRun):
    """Dynamics from which structures are taken."""

    @torch.no_grad()
    def sample(self, samples: int, spacing: int) -> Sampled:
        """Take a structure of each copy every `spacing` time steps."""
        advance = self._recorded() if self._device.type == "cuda" else self._round
        coord, usable = [], []
        for _ in range(samples):
            for _ in range(max(1, spacing // WATCH)):
                advance()
            largest = self._force.square().sum(-1).sqrt().amax(1)
            fine = self._blown.isinf() & (largest < LARGEST) & (self._smallest() > CLOSEST)
            coord.append(self._coord.cpu().numpy())
            usable.append(fine.cpu().numpy())
        return Sampled(np.array(coord), np.array(usable), self._blown.cpu().numpy())


def sampled(
    mean: MeanPredictor, around: Surroundings, *, copies: int, samples: int, spacing: int
) -> Sampled:
    """Run copies of training frames by the mean's forces; copy k starts from system k modulo their number."""
    model: Any = mean.model
    start = starts_of(model, around, copies)[0]
    kelvin = torch.full((copies,), around.temperature, dtype=torch.float64)
    run = SampledRun(model, start, around.shortest, kelvin, around.time_step)
    return run.sample(samples, spacing)


def labelled(
    mean: MeanPredictor, systems: Sequence[System], structures: Sampled
) -> dict[str, LabelledSystem]:
    """Return the usable structures by the system that their copies started from, with the mean's labels."""
    found = {}
    for number, system in enumerate(systems):
        chosen = slice(number, None, len(systems))
        coord = structures.coord[:, chosen][structures.usable[:, chosen]][:, : system.natoms]
        if not len(coord):
            continue
        # Labels belong to stored numbers.
        coord = coord.astype(np.float32).astype(np.float64)
        first = system.frames([0])
        repeated = len(coord)
        box = None if first.box is None else np.repeat(first.box, repeated, axis=0)
        found_labels = mean.evaluate(Frames(np.repeat(first.atype, repeated, axis=0), coord, box))
        found[Path(system.name).name] = LabelledSystem(
            atype=first.atype[0],
            type_map=tuple(mean.model.type_map),
            coord=coord,
            box=box,
            energy=found_labels.energy,
            force=found_labels.force,
            virial=None if box is None else found_labels.virial.reshape(-1, 3, 3),
        )
    return found


def main() -> None:
    """Label structures of one set, and write a line with the errors of the mean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", required=True, choices=SETS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--members", type=Path, nargs="+", required=True)
    parser.add_argument("--results", type=Path, required=True, help="file that gets a line")
    parser.add_argument("--copies", type=int, default=COPIES)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--spacing", type=int, default=SPACING, help="time steps")
    args = parser.parse_args()
    data = args.data / args.set
    mean = MeanPredictor([Predictor(path) for path in args.members])
    around = surroundings(args.set, data)
    structures = sampled(
        mean, around, copies=args.copies, samples=args.samples, spacing=args.spacing
    )
    systems = labelled(mean, around.systems, structures)
    for name, system in systems.items():
        write_npy(data / DISTILLED / name, system)
    type_map = SETS[args.set].type_map
    parts: tuple[Part, ...] = ("test", "out")
    line = {
        "set": args.set,
        "members": [path.stem for path in args.members],
        "structures": sum(len(system.energy) for system in systems.values()),
        "copies": args.copies,
        "blown": int(np.isfinite(structures.blown).sum()),
        "picoseconds": 1e-3 * args.samples * args.spacing * around.time_step,
        "temperature": around.temperature,
    }
    for part in parts:
        line[part] = errors_of(mean, opened(SETS[args.set].systems(data, part), type_map))
    append(args.results, line)


if __name__ == "__main__":
    main()
