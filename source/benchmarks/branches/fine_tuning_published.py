"""Find the learning rate for fine-tuning a published DPA-4 on few frames of a molecule and of water.

    python fine_tuning_published.py --checkpoint FILE --sets SETS --work WORK --json FILE

SETS has the folders bpa/{train,300K,600K} (systems of race/make_bpa.py) and water/{train,test} (frames of DeePMD's
water example). The checkpoint is fine-tuned at several first learning rates, which decay to a hundredth. "crystals" is
how far the forces on rattled crystals have moved from those of the checkpoint: what was forgotten. `--until` (seconds
since 1970) and `--claims` let several processes, one for each GPU, share the runs. The table is in
doc/benchmarks/fine_tuning.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from runs import errors, mean_and_spread, table, train

from deepmd_muon.infer.predictor import Predictor

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "HybridMuon": {"type": "HybridMuon", "muon_mode": "slice"},
    "AdamW": {"type": "AdamW", "weight_decay": 0.01},
}
RATES = {
    "HybridMuon": (1e-3, 1e-4, 3e-4, 3e-5, 1e-5),
    "AdamW": (1e-3, 1e-4, 3e-4, 3e-5),
}
# Steps, frames of a batch, and systems that errors are measured on.
STEPS = {"bpa": 1_000, "water": 600}
BATCH = {"bpa": 2, "water": 1}
PLACES = {"bpa": ("300K", "600K"), "water": ("test",)}
# Crystal, lattice constant [Å].
CRYSTALS = (
    ("Cu", "fcc", 3.61),
    ("Al", "fcc", 4.05),
    ("W", "bcc", 3.17),
    ("Si", "diamond", 5.43),
    ("NaCl", "rocksalt", 5.64),
    ("MgO", "rocksalt", 4.21),
    ("GaAs", "zincblende", 5.65),
    ("TiC", "rocksalt", 4.33),
)
DISPLACEMENT = 0.08  # standard deviation of the coordinates of rattled crystals [Å]


@dataclass(frozen=True)
class Tuning:
    """A training; without `pretrained` its weights start anew. 0 steps: only the energies are fitted."""

    set: str
    optimizer: str
    rate: float
    seed: int
    steps: int
    pretrained: bool = True


def main() -> None:
    """Train and measure what another process has not claimed, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--sets", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="one line for each potential")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of all trainings, for tests of this script")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--claims", type=Path, help="folder that processes share [WORK/claims]")
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--guess", type=float, default=60.0, help="seconds of the first training")
    parser.add_argument("--measure", nargs=2, metavar=("SET", "POTENTIAL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(args.checkpoint, args.sets, *args.measure)))
        return
    claims = args.claims or args.work / "claims"
    claims.mkdir(parents=True, exist_ok=True)
    seconds = [args.guess]

    def run(tuning: Tuning) -> None:
        begin = time.time()
        if begin + max(seconds[-6:]) > args.until:
            return
        try:
            (claims / name_of(tuning)).touch(exist_ok=False)
        except FileExistsError:
            return
        place = args.work.resolve() / name_of(tuning)
        options = ["--finetune", str(args.checkpoint.resolve())] if tuning.pretrained else []
        potential = args.checkpoint.resolve()
        if tuning.steps:
            potential = train(place, input_of(args.checkpoint, args.sets, tuning), *options)
        command = [sys.executable, __file__, *sys.argv[1:]]
        command += ["--measure", tuning.set, str(potential)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        line = asdict(tuning) | {"errors": json.loads(output.splitlines()[-1])}
        line["seconds"] = round(time.time() - begin, 1)
        seconds.append(line["seconds"])
        with args.json.open("a") as file:
            file.write(json.dumps(line) + "\n")

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(run, tunings(args.seeds, args.steps)))
    print(report([json.loads(line) for line in args.json.read_text().splitlines()]))


def tunings(nseeds: int, steps: int | None) -> list[Tuning]:
    """Return all trainings, the first seed first."""
    every: list[Tuning] = []
    for seed in range(1, nseeds + 1):
        for name, own_steps in STEPS.items():
            length = own_steps if steps is None else steps
            if seed == 1:
                every.append(Tuning(name, "none", 0.0, seed, 0))
            every += [
                Tuning(name, optimizer, rate, seed, length)
                for optimizer, rates in RATES.items()
                for rate in rates
            ]
            every.append(Tuning(name, "HybridMuon", 1e-3, seed, length, pretrained=False))
    return every


def name_of(tuning: Tuning) -> str:
    """Return the name of its folder."""
    return "_".join(str(value) for value in asdict(tuning).values())


def input_of(checkpoint: Path, sets: Path, tuning: Tuning) -> dict[str, Any]:
    """Return the input of a training: the model of the checkpoint, the loss of `dp init`."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = dict(saved["model"]["_extra_state"]["model_params"])
    model.pop("info", None)
    model["use_compile"] = False
    for part in ("descriptor", "fitting_net"):
        model[part] = {**model[part], "seed": tuning.seed}
    data = str((sets / tuning.set / "train").resolve())
    return {
        "model": model,
        "learning_rate": {"type": "exp", "start_lr": tuning.rate, "stop_lr": 0.01 * tuning.rate},
        "loss": {
            "type": "ener",
            "start_pref_e": 0.02,
            "limit_pref_e": 1,
            "start_pref_f": 1000,
            "limit_pref_f": 1,
        },
        "optimizer": OPTIMIZERS[tuning.optimizer],
        "training": {
            "training_data": {"systems": [data], "batch_size": BATCH[tuning.set]},
            "numb_steps": tuning.steps,
            "disp_freq": max(1, tuning.steps // 5),
            "save_freq": tuning.steps,
            "seed": tuning.seed,
        },
    }


def measured(
    checkpoint: Path, sets: Path, name: str, potential: str
) -> dict[str, dict[str, float]]:
    """Return the errors of a potential on new frames, and its change on crystals [meV/Å]."""
    found = {place: errors(Path(potential), [sets / name / place]) for place in PLACES[name]}
    former = forces_on_crystals(checkpoint)
    change = forces_on_crystals(Path(potential)) - former
    found["crystals"] = {"force": rms(change), "size": rms(former)}
    return found


def forces_on_crystals(potential: Path) -> np.ndarray:
    """Return the forces on all atoms of the rattled crystals, `(natoms · 3,)` [eV/Å]."""
    predictor = Predictor(potential)
    assert predictor.type_map is not None
    forces = []
    for seed, (formula, structure, a) in enumerate(CRYSTALS):
        atoms: Atoms = bulk(formula, structure, a=a, cubic=True) * (2, 2, 2)
        atoms.rattle(DISPLACEMENT, seed=seed)
        types = [predictor.type_map.index(symbol) for symbol in atoms.get_chemical_symbols()]
        prediction = predictor.predict(atoms.positions, atoms.cell.array, np.array(types))
        forces.append(prediction.force.ravel())
    return np.concatenate(forces)


def rms(values: np.ndarray) -> float:
    """Return the root mean square of forces [eV/Å] in meV/Å."""
    return 1e3 * float(np.sqrt((values**2).mean()))


def report(results: list[dict[str, Any]]) -> str:
    """Return a table of force errors [meV/Å] for each set."""
    parts = []
    for name, places in PLACES.items():
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for result in results:
            if result["set"] == name:
                start = "published" if result["pretrained"] else "nothing"
                key = (start, result["optimizer"], f"{result['rate']:g}")
                groups.setdefault(key, []).append(result["errors"])
        rows = [
            [
                *key,
                *(
                    mean_and_spread([each[place]["force"] for each in found])
                    for place in (*places, "crystals")
                ),
            ]
            for key, found in groups.items()
        ]
        parts.append(table(["start", "optimizer", "rate", *places, "crystals"], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
