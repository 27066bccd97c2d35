"""The race's data sets and models: where the files are, and the sections of the input that go with them."""

from __future__ import annotations

import json
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
    cell
        Whether frames have cells and virials.
    parts
        Names of systems of each part, where they are not the folders below ``train``, ``test`` and ``out``.
    """

    type_map: tuple[str, ...]
    rcut: float
    batch_size: int
    cell: bool = True
    parts: dict[Part, tuple[str, ...]] | None = None

    def systems(self, folder: Path, part: Part) -> list[Path]:
        """Return the system folders of a part, sorted; none where the set has no such part."""
        if self.parts is not None:
            return [folder / name for name in self.parts.get(part, ())]
        return sorted(path.parent for path in (folder / part).glob("*/type.raw"))


SETS = {
    "water": DataSet(("O", "H"), 5.0, 1),
    "molecules": DataSet(("H", "C", "N", "O"), 5.0, 4, cell=False),
    "alloys": DataSet(("Cu", "Ag", "Au"), 6.0, 2),
    "silicon": DataSet(("Si",), 5.0, 1),
    "dft_water": DataSet(
        ("O", "H"), 6.0, 1, parts={"train": ("data_0", "data_1", "data_2"), "test": ("data_3",)}
    ),
    # Made last: no setting was chosen on these two.
    "salt": DataSet(("Na", "K", "Cl"), 6.0, 1),
    "aluminides": DataSet(("Ni", "Al"), 6.0, 2),
    "bpa": DataSet(("H", "C", "N", "O"), 5.0, 4, cell=False),  # compared with MACE and NequIP
}
USUAL = ("water", "molecules", "alloys", "silicon")  # raced where nothing is asked for
# Sets with more training frames, and the test and out-of-distribution frames of the small ones.
SETS |= {f"{name}_large": SETS[name] for name in USUAL}
SETS["alloys_emt"] = SETS["alloys"]  # large, and drawn by the labelling method


# Whose networks and loss a model takes, among the examples of this repository.
MODELS = {"se_e2_a": "water_xtb", "dpa1": "dpa1_water", "dpa3": "dpa3_water", "tiny": "water_xtb"}
FIXED = {
    "dpa1_sel120": "dpa1",
    "dpa3_sel120": "dpa3",
}  # models with `sel` as inputs for large systems set it
MODELS |= {name: MODELS[plain] for name, plain in FIXED.items()}
TINY: dict[str, dict[str, Any]] = {
    "descriptor": {"neuron": [4, 8], "axis_neuron": 2},
    "fitting_net": {"neuron": [8, 8, 8]},
}  # for tests
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def input_of(
    name: str, model: str, systems: list[Path], *, seed: int, steps: int
) -> dict[str, Any]:
    """Return the input of a run without its optimizer and learning rate.

    Parameters
    ----------
    name, model
        Of the set, and of the model: that of an example with the set's elements and cut-off.
    systems
        The training part.
    seed
        Of the weights and of the order of the data.
    steps
        Length of the run.
    """
    data = SETS[name]
    example = json.loads((EXAMPLES / MODELS[model] / "input.json").read_text())
    descriptor, fitting_net = (example["model"][part] for part in ("descriptor", "fitting_net"))
    if model == "tiny":
        descriptor, fitting_net = (
            {**descriptor, **TINY["descriptor"]},
            {**fitting_net, **TINY["fitting_net"]},
        )
    if "repflow" in descriptor:
        slots = (
            {"e_sel": 120, "a_sel": 40} if model in FIXED else {"e_sel": "auto", "a_sel": "auto"}
        )
        repflow = {**descriptor["repflow"], "use_dynamic_sel": False, **slots}
        repflow.pop("sel_reduce_factor")
        descriptor = {
            **descriptor,
            "repflow": {**repflow, "e_rcut": data.rcut, "e_rcut_smth": data.rcut - 0.6},
        }
    else:
        descriptor = {**descriptor, "sel": 120 if model in FIXED else "auto", "rcut": data.rcut}
    no_virial: dict[str, float] = {} if data.cell else {"start_pref_v": 0.0, "limit_pref_v": 0.0}
    batches = {"systems": [str(path) for path in systems], "batch_size": data.batch_size}
    norm = {key: value for key, value in example["training"].items() if key == "gradient_max_norm"}
    return {
        "model": {
            "type_map": list(data.type_map),
            "descriptor": {**descriptor, "seed": seed},
            "fitting_net": {**fitting_net, "seed": seed},
        },
        "loss": {**example["loss"], **no_virial},
        "training": {"training_data": batches, "numb_steps": steps, "seed": seed, **norm},
    }
