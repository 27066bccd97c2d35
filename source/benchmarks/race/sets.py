"""The race's data sets and models: where the files are, and the sections of the input that go with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Part = Literal["train", "test", "out"]


@dataclass(frozen=True)
class DataSet:
    """A set with its training part, a test part of the same distribution, and one out of distribution.

    Attributes
    ----------
    type_map
        Elements.
    rcut
        Cut-off [Å].
    batch_size
        Frames in a batch: 30 to 200 atoms.
    parts
        Names of systems of each part, where they are not the folders below ``train``, ``test`` and ``out``.
    """

    type_map: tuple[str, ...]
    rcut: float
    batch_size: int
    parts: dict[Part, tuple[str, ...]] | None = None

    def systems(self, folder: Path, part: Part) -> list[Path]:
        """Return the system folders of a part, sorted; none where the set has no such part."""
        if self.parts is not None:
            return [folder / name for name in self.parts.get(part, ())]
        return sorted(path.parent for path in (folder / part).glob("*/type.raw"))


SETS = {
    "water": DataSet(("O", "H"), 5.0, 1),
    "molecules": DataSet(("H", "C", "N", "O"), 5.0, 4),
    "alloys": DataSet(("Cu", "Ag", "Au"), 6.0, 2),
    "silicon": DataSet(("Si",), 5.0, 1),
    "dft_water": DataSet(("O", "H"), 6.0, 1, {"train": ("data_0", "data_1", "data_2"), "test": ("data_3",)}),
}


def descriptor_of(model: str, rcut: float) -> dict[str, Any]:
    """Return the descriptor's section of a model; sizes are those of the examples of this repository."""
    if model == "se_e2_a":
        return {
            "type": "se_e2_a",
            "sel": "auto",
            "rcut": rcut,
            "rcut_smth": 0.5,
            "neuron": [16, 32, 64],
            "axis_neuron": 8,
            "type_one_side": True,
        }
    if model == "tiny":  # for tests
        return {**descriptor_of("se_e2_a", rcut), "neuron": [4, 8], "axis_neuron": 2}
    raise ValueError(f"model {model!r} is unknown: choose se_e2_a or tiny")


def input_of(name: str, model: str, systems: list[Path], *, seed: int, steps: int) -> dict[str, Any]:
    """Return the input of a run without its optimizer and learning rate.

    Parameters
    ----------
    name, model
        Of the set, and of the model.
    systems
        The training part.
    seed
        Of the weights and of the order of the data.
    steps
        Length of the run.
    """
    data = SETS[name]
    width = 8 if model == "tiny" else 96
    return {
        "model": {
            "type_map": list(data.type_map),
            "descriptor": {**descriptor_of(model, data.rcut), "precision": "float32", "seed": seed},
            "fitting_net": {"neuron": [width] * 3, "precision": "float32", "seed": seed},
        },
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
            "start_pref_v": 0.02 if name != "molecules" else 0.0,
            "limit_pref_v": 1 if name != "molecules" else 0.0,
        },
        "training": {
            "training_data": {"systems": [str(path) for path in systems], "batch_size": data.batch_size},
            "numb_steps": steps,
            "seed": seed,
        },
    }
