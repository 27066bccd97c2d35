"""Common parts of the experiments with branches: inputs on water, runs of ``dp train``, errors of their potentials."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_muon.data import open_systems
from deepmd_muon.infer.evaluation import evaluate_system
from deepmd_muon.infer.predictor import Predictor

TYPE_MAP = ("O", "H")
BATCH = 4
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "water_xtb"


def single_input(
    systems: Sequence[str], *, steps: int, seed: int, start_lr: float | None = None
) -> dict[str, Any]:
    """Return the input of examples/water_xtb for clusters: without virials, four in a batch."""
    content: dict[str, Any] = json.loads((EXAMPLE / "input.json").read_text())
    content["model"]["descriptor"] |= {
        "seed": seed,
        "sel": [12, 24],
    }  # every atom of twelve molecules
    content["model"]["fitting_net"]["seed"] = seed
    content["learning_rate"]["stop_lr"] = (
        1e-6  # whatever the example has: published figures were measured with it
    )
    content["loss"] |= {"start_pref_v": 0.0, "limit_pref_v": 0.0}
    if start_lr is not None:
        content["learning_rate"]["start_lr"] = start_lr
    training = {
        "training_data": {"systems": [*systems], "batch_size": BATCH},
        "numb_steps": steps,
        "seed": seed,
    }
    content["training"] = {**training, "disp_freq": 200, "save_freq": steps}
    return content


def branched_input(
    branches: Mapping[str, Sequence[str]], *, steps: int, seed: int
) -> dict[str, Any]:
    """Return the same input with one descriptor and a fitting net for each branch, all drawn equally often."""
    content = single_input((), steps=steps, seed=seed)
    model, loss = content["model"], content.pop("loss")
    parts = {"type_map": "types", "descriptor": "all"}
    nets = {name: {**model["fitting_net"], "seed": seed + k} for k, name in enumerate(branches)}
    content["model"] = {
        "shared_dict": {"types": [*TYPE_MAP], "all": model["descriptor"]},
        "model_dict": {name: {**parts, "fitting_net": net} for name, net in nets.items()},
    }
    content["loss_dict"] = {name: copy.deepcopy(loss) for name in branches}
    training = content["training"]
    del training["training_data"]
    data = {
        name: {"training_data": {"systems": [*paths], "batch_size": BATCH}}
        for name, paths in branches.items()
    }
    content["training"] = {
        **training,
        "data_dict": data,
        "model_prob": dict.fromkeys(branches, 1.0),
    }
    return content


def train(folder: Path, content: Mapping[str, Any], *options: str) -> Path:
    """Run ``dp train`` in a folder, unless its last checkpoint is there; return the checkpoint."""
    checkpoint = folder / f"model.ckpt-{content['training']['numb_steps']}.pt"
    if not checkpoint.exists():
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted run leaves an earlier checkpoint
        folder.mkdir(parents=True)
        (folder / "input.json").write_text(json.dumps(content, indent=4))
        command = [
            sys.executable,
            "-m",
            "deepmd_muon",
            "--pt",
            "train",
            "input.json",
            "-l",
            "train.log",
            *options,
        ]
        with open(folder / "output.txt", "w") as output:
            subprocess.run(
                command, cwd=folder, check=True, stdout=output, stderr=output, env={**os.environ}
            )
    return checkpoint


def errors(
    checkpoint: Path, systems: Sequence[str | Path], head: str | None = None
) -> dict[str, float]:
    """Return root mean square errors over systems: energy [meV/atom], its spread without the mean, force [meV/Å]."""
    predictor = Predictor(checkpoint, head=head)
    energies: list[np.ndarray] = []
    forces: list[np.ndarray] = []
    for path in systems:
        for system in open_systems(str(path), predictor.type_map):
            for part in evaluate_system(predictor, system):
                assert part.reference.energy is not None
                assert part.reference.force is not None
                energies.append(
                    (part.prediction.energy - part.reference.energy) / part.reference.natoms
                )
                forces.append((part.prediction.force - part.reference.force).ravel())
    energy, force = np.concatenate(energies), np.concatenate(forces)
    return {
        "energy": 1e3 * float(np.sqrt((energy**2).mean())),
        "energy_spread": 1e3 * float(energy.std()),
        "force": 1e3 * float(np.sqrt((force**2).mean())),
    }


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean over seeds and, of several, their standard deviation."""
    spread = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
