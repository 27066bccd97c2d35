"""Fine-tune a potential of water clusters to dense ones, with replay and without.

``python fine_tuning.py --data clusters --work WORK --json FILE``, after ``make_clusters.py``. All runs of a seed start
from one GFN1 potential of 200 hexamers. Their new data are 40 hexamers whose molecules stand closer together. A run
with replay takes twice the steps, half of them on the new data, so that each run sees these equally often. The table
has the errors on new and old test clusters and the verdicts of ``dp check`` near the old training data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import errors, mean_and_spread, single_input, table, train

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


def fine_tuning_input(
    new: str, replay: dict[str, Any], *, steps: int, seed: int, trainable: bool
) -> dict[str, Any]:
    """Return the input of a fine-tuning run, whose learning rate is a tenth of the first one's."""
    content = single_input([new], steps=steps, seed=seed, start_lr=1e-4)
    content["model"]["descriptor"]["trainable"] = trainable
    content["replay"] = replay
    return content


def check(checkpoint: Path, data: tuple[str, ...]) -> dict[str, Any]:
    """Return the verdicts of ``dp check`` on a potential near some data, its reasons, and what its dynamics did."""
    report = checkpoint.with_name(f"{checkpoint.name}.check.json")
    if not report.exists():
        command = [sys.executable, "-m", "deepmd_muon", "check", str(checkpoint), "-s", *data]
        command += ["--time", "0.25", "--json", str(report)]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (model,) = json.loads(report.read_text())["models"]
    run = {key: model["dynamics"][key] for key in ("followed", "drift", "blow_ups_per_ps")}
    return {item["name"]: f"{item['verdict']}: {item['reason']}" for item in model["items"]} | {
        "run": run
    }


def potentials(seed: int, data: Path, work: Path, steps: int) -> Iterator[tuple[str, Path]]:
    """Yield the names and checkpoints of the runs of a seed, the one that they start from first."""
    before, new = str(data / "gfn1" / "train"), str(data / "dense" / "train")
    # The GFN1 run of two_levels.py, where it is there.
    old = train(work / f"gfn1_{seed}", single_input([before], steps=800, seed=seed))
    yield "before", old
    for name, (replay, settings, trainable) in RUNS.items():
        length = (1 + bool(replay)) * steps
        content = fine_tuning_input(new, settings, steps=length, seed=seed, trainable=trainable)
        replayed = [before if each == OLD else each for each in replay]
        options = ["--finetune", str(old), *(["--replay", *replayed] if replay else [])]
        folder = work / f"{name.replace(',', '').replace(' ', '_')}_{seed}"
        found = train(folder, content, *options)
        yield name, folder / "model.ckpt.finetuned.pt" if replay else found


def main() -> None:
    """Fine-tune, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that make_clusters.py wrote"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the runs; those that exist are kept"
    )
    parser.add_argument("--json", type=Path, required=True, help="receives errors and verdicts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="steps on the new data")
    args = parser.parse_args()
    data, work = args.data.resolve(), args.work.resolve()
    sets = {"new": "dense", "old": "test", "hot": "hot", "large": "large"}
    places = {place: (str(data / "gfn1" / name),) for place, name in sets.items()}
    result: dict[str, list[dict[str, Any]]] = {}
    for seed in range(1, args.seeds + 1):
        for name, path in potentials(seed, data, work, args.steps):
            found = {place: errors(path, systems) for place, systems in places.items()}
            result.setdefault(name, []).append(
                {**found, "check": check(path, (str(data / "gfn1" / "train"),))}
            )
    settings = {"steps": args.steps, "seeds": args.seeds}
    args.json.write_text(
        json.dumps({**settings, "results": result}, indent=1, ensure_ascii=False) + "\n"
    )
    print(report(result))


def report(result: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table of force errors [meV/Å], verdicts, drift [meV/atom] and blow-ups of the dynamics."""
    rows = []
    for name, found in result.items():
        cells = [mean_and_spread([each[place]["force"] for each in found]) for place in PLACES]
        for item in ITEMS:
            verdicts = Counter(each["check"][item].partition(":")[0] for each in found)
            cells.append(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
        runs = [each["check"]["run"] for each in found]
        cells.append(
            " ".join("-" if run["drift"] is None else f"{1e3 * run['drift']:.2f}" for run in runs)
        )
        cells.append(" ".join(f"{run['blow_ups_per_ps']:.2g}" for run in runs))
        rows.append([name, *cells])
    return table(["fine-tuning", *PLACES, *ITEMS, "drift", "blow-ups per ps"], rows)


if __name__ == "__main__":
    main()
