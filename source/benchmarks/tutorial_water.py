"""The tutorial's water as `dp init` writes its input, with and without the first layer on AdamW.

    python source/benchmarks/tutorial_water.py --steps 12000 --seeds 1 2 --csv tutorial.csv

Trains each potential, measures its force error on the validation frames and runs `dp check`. A row has wall-clock and
processor time of the training, and the processor time of the check [s].
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_muon.cli.main import main as dp
from deepmd_muon.data import open_systems
from deepmd_muon.files import working_folder
from deepmd_muon.infer import Predictor
from deepmd_muon.stability.check import CheckSettings, check_models

DATA = Path(__file__).resolve().parents[2] / "examples" / "water_xtb" / "data"
FIRST_LAYER = ["*fitting_net*layers.0.matrix"]
#: 1.5 times the temperature of the data [K]; time [ps] and copies are those of `dp check` on a CPU.
CHECK = CheckSettings(temperature=527.0, time=2.0, copies=4)
#: What each setting changes in the optimizer's section of the input.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "first layer": {"adamw_patterns": FIRST_LAYER},
    "first layer, ratio 1": {"adamw_patterns": FIRST_LAYER, "adam_lr_ratio": 1.0},
}


def write_input(path: Path, *, steps: int, seed: int, setting: str) -> None:
    """Write the input of `dp init`, with the optimizer of a setting."""
    words = [str(DATA / "train"), "--valid-data", str(DATA / "valid"), "--rcut", "5"]
    if status := dp(["init", *words, "--steps", str(steps), "-o", str(path), "-v", "ERROR"]):
        raise SystemExit(status)
    content = json.loads(path.read_text())
    content["optimizer"] = {"type": "HybridMuon", **SETTINGS[setting]}
    for section in (content["model"]["descriptor"], content["model"]["fitting_net"]):
        section["seed"] = seed
    content["training"] |= {"seed": seed, "disp_freq": steps, "save_freq": steps}
    path.write_text(json.dumps(content))


def force_error(predictor: Predictor) -> float:
    """Return the force error on the validation frames [eV/Å]."""
    squares = []
    for system in open_systems(str(DATA / "valid"), predictor.type_map):
        frames = system.frames(np.arange(system.nframes))
        squares.append(((predictor.evaluate(frames).force - frames.force) ** 2).mean())
    return float(np.sqrt(np.mean(squares)))


def row_of(setting: str, *, seed: int, steps: int) -> dict[str, Any]:
    """Train a potential, check it and return its row."""
    with tempfile.TemporaryDirectory() as name, working_folder(Path(name)):
        write_input(Path("input.json"), steps=steps, seed=seed, setting=setting)
        begun = time.monotonic()
        begun_processor = time.process_time()
        if status := dp(["train", "input.json", "-v", "ERROR"]):
            raise SystemExit(status)
        seconds = time.monotonic() - begun
        processor = time.process_time() - begun_processor
        predictor = Predictor(f"model.ckpt-{steps}.pt")
    training = open_systems(str(DATA / "train"), predictor.type_map)
    begun_check = time.process_time()
    check = check_models(["model"], [predictor], training, CHECK)
    checked = time.process_time() - begun_check
    (model,) = check.models
    shortest = check.coverage.shortest
    known = np.isfinite(shortest)
    return {
        "setting": setting,
        "seed": seed,
        "steps": steps,
        "wall": round(seconds),
        "processor": round(processor),
        "check": round(checked),
        "test": round(force_error(predictor), 4),
        "copies": model.dynamics.copies,
        "blown": len(model.dynamics.blow_ups),
        "closest": round(float((model.dynamics.reached[known] / shortest[known]).min()), 3),
        "verdict": model.verdict.name,
    }


def main() -> None:
    """Add a row to the file as each potential ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS)[:2])
    parser.add_argument("--csv", type=Path, required=True)
    args = parser.parse_args()
    for seed in args.seeds:
        for setting in args.settings:
            row = row_of(setting, seed=seed, steps=args.steps)
            is_new = not args.csv.exists()
            with args.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if is_new:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
