"""Fine-tune a potential of water clusters to dense ones, with replay and without.

``python fine_tuning.py --data clusters --work WORK --json FILE``, after ``make_clusters.py``. All runs start from one
GFN1 potential of 200 hexamers. Their new data are 40 hexamers whose molecules stand closer together. A run with replay
takes twice the steps, half of them on the new data, so that each run sees these equally often. The table has the errors
on new and old test clusters and the verdicts of ``dp check`` near the old training data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from runs import errors, single_input, table, train

OLD = "OLD DATA"  # stands for their path

PLACES, ITEMS = ("new", "old", "hot", "large"), ("coverage", "scans", "dimers", "dynamics")
# Name of a run: what --replay takes, settings of section replay, whether the descriptor is trained.
RUNS: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    "no replay": ((), {}, True),
    "no replay, descriptor frozen": ((), {}, False),
    "old data, two fitting nets": ((OLD,), {"share_fitting_net": False}, True),
    "old data": ((OLD,), {}, True),
    "pseudo, two fitting nets": (("pseudo",), {"share_fitting_net": False}, True),
    "pseudo": (("pseudo",), {}, True),
    "old data, descriptor frozen": ((OLD,), {}, False),
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
    parser.add_argument("--data", type=Path, required=True, help="folder that make_clusters.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs; those that exist are kept")
    parser.add_argument("--json", type=Path, required=True, help="receives errors and verdicts")
    parser.add_argument("--steps", type=int, default=150, help="steps on the new data")
    args = parser.parse_args()
    data, work = args.data.resolve(), args.work.resolve()
    before, new = str(data / "gfn1" / "train"), str(data / "dense" / "train")
    # The GFN1 run of two_levels.py, where it is there.
    old = train(work / "gfn1_1", single_input([before], steps=800, seed=1))
    potentials = {"before": old}
    for name, (replay, settings, trainable) in RUNS.items():
        content = fine_tuning_input(new, settings, steps=(1 + bool(replay)) * args.steps, trainable=trainable)
        replayed = [before if each == OLD else each for each in replay]
        options = ["--finetune", str(old), *(["--replay", *replayed] if replay else [])]
        folder = work / name.replace(",", "").replace(" ", "_")
        found = train(folder, content, *options)
        potentials[name] = folder / "model.ckpt.finetuned.pt" if replay else found
    sets = {"new": "dense", "old": "test", "hot": "hot", "large": "large"}
    places = {place: (str(data / "gfn1" / name),) for place, name in sets.items()}
    result = {
        name: {
            **{place: errors(path, systems) for place, systems in places.items()},
            "check": check(path, (before,)),
        }
        for name, path in potentials.items()
    }
    args.json.write_text(json.dumps({"steps": args.steps, "results": result}, indent=1, ensure_ascii=False) + "\n")
    print(report(result))


def report(result: dict[str, dict[str, Any]]) -> str:
    """Return the table of force errors [meV/Å] and verdicts."""
    rows = []
    for name, found in result.items():
        cells = [f"{found[place]['force']:.1f}" for place in PLACES]
        verdicts = [found["check"][item].partition(":")[0] for item in ITEMS]
        rows.append([name, *cells, *verdicts])
    return table(["fine-tuning", *PLACES, *ITEMS], rows)


if __name__ == "__main__":
    main()
