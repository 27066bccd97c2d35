"""Fine-tune water at 300 and 350 K to 600 K, with replay and without: new error, old error, dynamics before and after.

``python fine_tuning.py --data branches-data --work WORK --json FILE``, after ``make_water.py``. All runs start from one
GFN1 potential of 240 frames. Their new data are 40 frames at 600 K. A run with replay takes twice the steps, half of
them on the new data, so that each run sees these equally often.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from runs import OLD_TEST, OLD_TRAINING, errors, single_input, table, train

# Name of a run: what --replay takes, settings of section replay, whether the descriptor is trained.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    "no replay": ((), {}, True),
    "no replay, descriptor frozen": ((), {}, False),
    "old data": (OLD_TRAINING, {}, True),
    "old data, one fitting net": (OLD_TRAINING, {"share_fitting_net": True}, True),
    "pseudo": (("pseudo",), {}, True),
    "pseudo, one fitting net": (("pseudo",), {"share_fitting_net": True}, True),
    "old data, one fitting net, descriptor frozen": (OLD_TRAINING, {"share_fitting_net": True}, False),
}


def fine_tuning_input(new: str, replay: dict[str, Any], *, steps: int, trainable: bool) -> dict[str, Any]:
    """Return the input of a fine-tuning run, whose learning rate is a tenth of the first one's."""
    content = single_input([new], steps=steps, seed=1, start_lr=1e-4)
    content["model"]["descriptor"]["trainable"] = trainable
    content["replay"] = replay
    return content


def check(checkpoint: Path, data: tuple[str, ...]) -> dict[str, str]:
    """Return the verdicts of ``dp check`` on a potential near some data, and its reasons."""
    report = checkpoint.with_name(f"{checkpoint.name}.check.json")
    if not report.exists():
        command = [sys.executable, "-m", "deepmd_muon", "check", str(checkpoint), "-s", *data, "--json", str(report)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (model,) = json.loads(report.read_text())["models"]
    return {item["name"]: f"{item['verdict']}: {item['reason']}" for item in model["items"]}


def main() -> None:
    """Fine-tune, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that make_water.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; those that exist are kept")
    parser.add_argument("--json", type=Path, required=True, help="receives errors and verdicts")
    parser.add_argument("--steps", type=int, default=500, help="steps on the new data")
    args = parser.parse_args()
    data, work = args.data.resolve(), args.work.resolve()
    # The GFN1 run of two_levels.py, where it is there.
    old = train(work / "gfn1_1", single_input(OLD_TRAINING, steps=2000, seed=1))
    potentials = {"before": old}
    for name, (replay, settings, trainable) in RUNS.items():
        content = fine_tuning_input(
            str(data / "hot" / "train" / "600K"), settings, steps=(1 + bool(replay)) * args.steps, trainable=trainable
        )
        options = ["--finetune", str(old), *(["--replay", *replay] if replay else [])]
        folder = work / name.replace(",", "").replace(" ", "_")
        found = train(folder, content, *options)
        potentials[name] = folder / "model.ckpt.finetuned.pt" if replay else found
    places = {"new": (str(data / "out" / "gfn1" / "600K"),), "old": OLD_TEST}
    result = {
        name: {
            **{place: errors(path, systems) for place, systems in places.items()},
            "check": check(path, OLD_TRAINING),
        }
        for name, path in potentials.items()
    }
    args.json.write_text(json.dumps({"steps": args.steps, "results": result}, indent=1, ensure_ascii=False) + "\n")
    print(report(result))


def report(result: dict[str, dict[str, Any]]) -> str:
    """Return the table of errors and verdicts."""
    rows = []
    for name, found in result.items():
        cells = [f"{found[place][key]:.1f}" for key in ("force", "energy_spread") for place in ("new", "old")]
        verdicts = [found["check"][item].partition(":")[0] for item in ("coverage", "scans", "dimers", "dynamics")]
        rows.append([name, *cells, *verdicts])
    header = ["fine-tuning", "force, new", "force, old", "energy, new", "energy, old"]
    return table([*header, "coverage", "scans", "dimers", "dynamics"], rows)


if __name__ == "__main__":
    main()
