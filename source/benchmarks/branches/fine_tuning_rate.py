"""Find the learning rate for fine-tuning: potentials of twenty molecules, fine-tuned on a larger one.

    python fine_tuning_rate.py --molecules FOLDER --bpa race-data/bpa --work WORK --json FILE

The first potentials learn the sets `small` and `six` of ../molecules.py, one with AdamW, as published checkpoints, and
one with HybridMuon. They are fine-tuned on 50 frames of race/make_bpa.py at 300 K, at several first learning rates that
decay to a hundredth. The test frames have 300 and 600 K; the old ones are validation frames of the twenty molecules.
`dp init` writes the model. The table is in doc/benchmarks/fine_tuning.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from runs import errors, mean_and_spread, table, train

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "race"))


from deepmd_muon.data import open_systems
from deepmd_muon.data.writing import write_npy

NEW_FRAMES = 50
# As the best of the race's molecules for AdamW; HybridMuon's is the default.
OPTIMIZERS: dict[str, tuple[dict[str, Any], float]] = {
    "AdamW": ({"type": "AdamW", "weight_decay": 0.01}, 0.006),
    "HybridMuon": ({"type": "HybridMuon"}, 0.001),
}
SHARES = (1.0, 0.3, 0.1, 0.03, 0.01)  # of the first rate of a training from scratch


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning; `before` is the optimizer of the first potential, None for a training from scratch."""

    before: str | None
    optimizer: str
    share: float
    seed: int


def main() -> None:
    """Train the first potentials, fine-tune them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--molecules", type=Path, required=True, help="folder of ../molecules.py")
    parser.add_argument("--bpa", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="one line for each potential")
    parser.add_argument("--seeds", type=int, default=2, help="0: only the first potentials")
    parser.add_argument("--first-steps", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    old = propose(args.molecules, work)
    new = work / "few"
    write_few(args.bpa / "train" / "bpa_300K", new)
    places = {
        "300 K": args.bpa / "test" / "bpa_300K",
        "600 K": args.bpa / "out" / "bpa_600K",
        "old": work / "split" / "valid",
    }

    def measured(tuning: Tuning | str, checkpoint: Path) -> None:
        found = {place: errors(checkpoint, [path.resolve()]) for place, path in places.items()}
        name = {"before": tuning} if isinstance(tuning, str) else asdict(tuning)
        with args.json.open("a") as file:
            file.write(json.dumps(name | {"errors": found}) + "\n")

    def first(optimizer: str) -> Path:
        content = input_of(old, optimizer, steps=args.first_steps, seed=args.first_seed)
        checkpoint = train(work / f"first_{optimizer}", content)
        measured(optimizer, checkpoint)
        return checkpoint

    def tune(tuning: Tuning) -> None:
        content = input_of(old, tuning.optimizer, steps=args.steps, seed=tuning.seed)
        rate = content["learning_rate"]["start_lr"] * tuning.share
        content["learning_rate"] |= {"start_lr": rate, "stop_lr": 0.01 * rate}
        content["training"]["training_data"] = {"systems": [str(new)], "batch_size": "auto"}
        options = [] if tuning.before is None else ["--finetune", str(checkpoints[tuning.before])]
        name = "_".join(str(value) for value in asdict(tuning).values())
        measured(tuning, train(work / name, content, *options))

    tunings = [
        Tuning(before, optimizer, share, seed)
        for seed in range(1, args.seeds + 1)
        for share in SHARES
        for before in OPTIMIZERS
        for optimizer in OPTIMIZERS
    ]
    tunings += [Tuning(None, "HybridMuon", 1.0, seed) for seed in range(1, args.seeds + 1)]
    with ThreadPoolExecutor(args.workers) as pool:
        checkpoints = dict(zip(OPTIMIZERS, pool.map(first, OPTIMIZERS), strict=True))
        list(pool.map(tune, tunings))
    print(report([json.loads(line) for line in args.json.read_text().splitlines()]))


def propose(molecules: Path, work: Path) -> dict[str, Any]:
    """Return the input that `dp init` writes for both sets with DPA-1."""
    if not (work / "input.json").exists():
        data = [str((molecules / name / "all.xyz").resolve()) for name in ("small", "six")]
        command = [sys.executable, "-m", "deepmd_muon", "init", *data, "--descriptor", "dpa1"]
        subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)
    content: dict[str, Any] = json.loads((work / "input.json").read_text())
    systems = content["training"]["training_data"]["systems"]
    content["training"]["training_data"]["systems"] = [str(work / path) for path in systems]
    del content["training"]["validation_data"]
    return content


def write_few(system: Path, folder: Path) -> None:
    """Write frames at equal distances in time."""
    if not folder.exists():
        (whole,) = open_systems(str(system))
        rows = np.linspace(0, whole.nframes - 1, NEW_FRAMES).round().astype(int)
        write_npy([whole.select(rows)], folder)


def input_of(content: dict[str, Any], optimizer: str, *, steps: int, seed: int) -> dict[str, Any]:
    """Return the input with an optimizer at the rate of a training from scratch."""
    content = copy.deepcopy(content)
    section, rate = OPTIMIZERS[optimizer]
    content["optimizer"] = section
    content["learning_rate"]["start_lr"] = rate
    for part in (content["model"]["descriptor"], content["model"]["fitting_net"]):
        part["seed"] = seed
    content["training"] |= {
        "seed": seed,
        "numb_steps": steps,
        "disp_freq": steps,
        "save_freq": steps,
    }
    return content


def report(results: list[dict[str, Any]]) -> str:
    """Return the table of force errors [meV/Å] over the seeds."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        name = str(result["before"] or "nothing")
        key = (name, result.get("optimizer", "-"), f"{result.get('share', 0):g}")
        groups.setdefault(key, []).append(result["errors"])
    rows = []
    for key, found in groups.items():
        cells = [mean_and_spread([each[place]["force"] for each in found]) for place in found[0]]
        rows.append([*key, *cells])
    return table(["first", "fine-tuning", "share of the rate", "300 K", "600 K", "old"], rows)


if __name__ == "__main__":
    main()
