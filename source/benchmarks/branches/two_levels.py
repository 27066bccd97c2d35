"""Two branches on water clusters at two levels of theory, against two single-task runs of the same budget.

``python two_levels.py --data clusters --work WORK --json FILE``, after ``make_clusters.py``. Each single-task run has
half the steps of the run with two branches, so that the budgets are equal. The GFN2 branch has 40 clusters of one
temperature, the GFN1 branch 200 of two.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
from runs import branched_input, errors, mean_and_spread, single_input, table, train

LEVELS, PLACES = ("gfn1", "gfn2"), ("test", "hot", "dense", "large")


def main() -> None:
    """Train, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that make_clusters.py wrote"
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the runs; those that exist are kept"
    )
    parser.add_argument("--json", type=Path, required=True, help="receives all errors")
    parser.add_argument("--steps", type=int, default=800, help="steps of a single-task run")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    data = args.data.resolve()
    training = {level: (str(data / level / "train"),) for level in LEVELS}
    tests = {level: {place: (str(data / level / place),) for place in PLACES} for level in LEVELS}
    found: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}
    for seed in range(1, args.seeds + 1):
        both = train(
            args.work / f"both_{seed}", branched_input(training, steps=2 * args.steps, seed=seed)
        )
        for level, systems in training.items():
            single = train(
                args.work / f"{level}_{seed}", single_input(systems, steps=args.steps, seed=seed)
            )
            for run, checkpoint, head in (("single", single, None), ("both", both, level)):
                for place, paths in tests[level].items():
                    of_run = found.setdefault(level, {}).setdefault(place, {})
                    of_run.setdefault(run, []).append(errors(checkpoint, paths, head))
    settings = {
        "steps": args.steps,
        "seeds": args.seeds,
        "machine": platform.processor() or platform.machine(),
    }
    args.json.write_text(json.dumps({"settings": settings, "errors": found}, indent=1) + "\n")
    print(report(found))


def report(found: dict[str, dict[str, dict[str, list[dict[str, float]]]]]) -> str:
    """Return the table of force errors and energy spreads: mean and standard deviation over seeds."""
    rows = []
    for level, places in found.items():
        for place, of_run in places.items():
            values = {
                (key, run): [each[key] for each in of_run[run]]
                for key in ("force", "energy_spread")
                for run in ("single", "both")
            }
            cells = [mean_and_spread(each) for each in values.values()]
            pairs = [*zip(values["force", "both"], values["force", "single"], strict=True)]
            better = f"{sum(both < single for both, single in pairs)} of {len(pairs)}"
            ratio = f"{np.mean([both / single for both, single in pairs]):.2f}"
            rows.append([level, place, *cells[:2], ratio, better, *cells[2:]])
    header = [
        "level",
        "frames",
        "force, single",
        "force, branches",
        "ratio",
        "better",
        "energy, single",
        "energy, branches",
    ]
    return table(header, rows)


if __name__ == "__main__":
    main()
