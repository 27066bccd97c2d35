"""Print what is known of each set before training: descriptor length, force components for each weight.

python source/benchmarks/race/set_features.py --data race-data
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from sets import SETS, input_of
from stability_frontier import MODEL
from stability_frontier import SETS as NAMES

from deepmd_muon.argcheck import normalize
from deepmd_muon.data import System, build_neighbors, open_systems, stack_neighbors
from deepmd_muon.data.neighbors.lists import find_pairs
from deepmd_muon.model import EnergyModel, Structures, build_model
from deepmd_muon.model.statistics import descriptor_length, environment_statistics

#: Frames of a system that descriptors are measured on.
FRAMES = 12
#: Slots for neighbours over the most that any atom has.
SPARE = 1.1


def slots_of(systems: Sequence[System], rcut: float, ntypes: int) -> list[int]:
    """Return slots for the neighbours of each type."""
    most = np.zeros(ntypes, dtype=np.int64)
    for system in systems:
        for number in range(0, system.nframes, max(1, system.nframes // FRAMES)):
            frames = system.frames([number])
            pairs = find_pairs(frames.coord[0], frames.cell(0), frames.atype[0], rcut)
            most = np.maximum(most, pairs.statistics(ntypes).max_neighbors)
    return [int(np.ceil(SPARE * count / 4)) * 4 for count in most]


def batches_of(systems: Sequence[System], model: EnergyModel) -> Iterator[Structures]:
    """Yield some frames of each system."""
    ntypes = len(model.type_map)
    for system in systems:
        numbers = np.unique(np.linspace(0, system.nframes - 1, FRAMES).astype(int))
        frames = system.frames(numbers)
        neighbors = [
            build_neighbors(
                frames.coord[k],
                frames.cell(k),
                frames.atype[k],
                model.rcut,
                model.sel,
                model.by_type,
                ntypes,
                model.neighbors.inner,
            )
            for k in range(len(numbers))
        ]
        yield Structures.of(frames, stack_neighbors(neighbors), ntypes)


def main() -> None:
    """Print a line for each set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    print("set          cell  types  descriptor length  force components for each weight")
    for name in NAMES:
        chosen = SETS[name]
        paths = chosen.systems(data / name, "train")
        systems = open_systems([str(path) for path in paths], list(chosen.type_map))
        content = input_of(name, MODEL, paths, seed=1, steps=1)
        content["learning_rate"] = {"start_lr": 1e-3}
        content["model"]["descriptor"]["sel"] = slots_of(systems, chosen.rcut, len(chosen.type_map))
        model = build_model(normalize(content).settings.model)
        model.set_statistics(*environment_statistics(model, batches_of(systems, model)))
        length = descriptor_length(model, batches_of(systems, model))
        components = sum(3 * system.nframes * system.natoms for system in systems)
        weights = sum(parameter.numel() for parameter in model.parameters())
        cell = "yes" if chosen.cell else "no"
        features = f"{len(chosen.type_map):5}  {length:17.2f}  {components / weights:.2f}"
        print(f"{name:12} {cell:4}  {features}")


if __name__ == "__main__":
    main()
