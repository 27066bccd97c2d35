"""How many labels until a potential is stable? Rounds of `dp explore` after a training, and dynamics after each.

    python source/benchmarks/race/labels_to_stability.py --data race-data --results labels.jsonl --steps 30000 \
        --settings default first_c4.32_r1 adamw --seeds 1 2 3 --workers 13
    python source/benchmarks/race/labels_to_stability.py --table labels.jsonl

A potential is stable when no item of `dp check` fails and none of 10 copies blows up within 10 ps each, both at 1.2
times the temperature of the set. Options are those of `stability_runs.py`. Needs ASE and tblite.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sets import SETS
from stability_runs import (
    CONDITIONS,
    Job,
    dynamics_of,
    errors_of,
    main,
    opened,
    pooled,
    trained,
)

from deepmd_muon.cli.main import main as dp
from deepmd_muon.explore.rounds import Round
from deepmd_muon.infer.predictor import Predictor
from deepmd_muon.stability.check import CheckSettings, check_models
from deepmd_muon.stability.coverage import coverage_of

ROUNDS = 6
#: Structures that a round labels at most, and steps of its training.
FRAMES, STEPS = 40, 3000
HOTTER = 1.2
COPIES, PICOSECONDS = 10, 10.0
#: The calculators that labelled the sets.
CALCULATORS: dict[str, dict[str, Any]] = {
    "water": {
        "calculator": "tblite.ase:TBLite",
        "arguments": {"method": "GFN1-xTB", "accuracy": 0.1, "verbosity": 0},
    },
    "molecules": {
        "calculator": "tblite.ase:TBLite",
        "arguments": {"method": "GFN2-xTB", "accuracy": 0.01, "verbosity": 0},
    },
    "alloys": {"calculator": "ase.calculators.emt:EMT"},
}


def explore_input(name: str, model: Path, rounds: int) -> dict[str, Any]:
    """Return the input of `dp explore`."""
    temperature = CONDITIONS[name].temperature
    return {
        "input": "input.json",
        "models": str(model),
        "rounds": rounds,
        "dynamics": {"temperatures": [temperature, 1.5 * temperature], "copies": 4, "time": 1.0},
        "selection": {"frames": FRAMES},
        "labels": {**CALCULATORS[name], "workers": 3, "most_failed": 1.0},
        "training": {"start": "finetune", "steps": STEPS},
        "check": {
            "temperature": HOTTER * temperature,
            "time": 2.0,
            "copies": 8,
            "enough": "never",
        },
    }


def lines_of(job: Job, args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a line after the training and after each round, until the potential is stable."""
    name = job.set
    model, _ = trained(job, args, folder)
    first = model
    labels = 0
    for number in range(ROUNDS + 1):
        verdict = None
        if number:
            content = explore_input(name, first, number)
            (folder / "explore.json").write_text(json.dumps(content))
            if dp(["explore", str(folder / "explore.json"), "-v", "ERROR"]):
                return  # its dynamics found nothing to label
            current = Round(folder / "explore" / f"round_{number}", number)
            model = current.model(0) / "model.ckpt.pt"
            record = current.done()
            assert record.labels is not None
            assert record.check is not None
            labels += record.labels.labelled
            verdict = record.check.verdict
        judged = _judged(name, model, args.data / name, verdict)
        line = {**job._asdict(), "model": args.model, "round": number, "labels": labels, **judged}
        yield line
        if is_stable(line):
            return


def is_stable(line: Mapping[str, Any]) -> bool:
    """Return whether no copy of a line blew up and its check did not fail."""
    return line["blown"] == 0 and line["verdict"] in ("holds", "doubtful")


def _judged(name: str, model: Path, data: Path, verdict: str | None) -> dict[str, Any]:
    """Return the error on test frames, how many copies blew up, and the verdict of the check.

    Of a first potential without blow-ups, the verdict is found here; its copies are as those of the rounds.
    """
    predictor = Predictor(model)
    training = opened(SETS[name].systems(data, "train"), predictor.type_map)
    coverage = coverage_of(training, predictor.type_map, float(predictor.model.rcut))
    run = dynamics_of(
        predictor,
        name,
        data,
        coverage,
        copies=(0, COPIES),
        picoseconds=PICOSECONDS,
        hotter=HOTTER,
    )
    blown = sum(time is not None for time in run["blown"])
    if verdict is None and not blown:
        settings = CheckSettings(
            temperature=HOTTER * CONDITIONS[name].temperature, time=2.0, copies=8
        )
        verdict = check_models(["model"], [predictor], training, settings).models[0].verdict.name
    test = opened(SETS[name].systems(data, "test"), predictor.type_map)
    return {"test": pooled(errors_of(predictor, test)), "blown": blown, "verdict": verdict}


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return labels until stability by set and setting, as Markdown."""
    rows = [
        "| set | setting | stable after labels | error before [eV/Å] | after [eV/Å] |",
        "|" + "---|" * 5,
    ]
    runs: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for line in lines:
        if "round" in line:
            seeds = runs.setdefault((line["set"], line["setting"]), {})
            seeds.setdefault(line["seed"], []).append(line)
    for (name, setting), seeds in sorted(runs.items()):
        last = [seeds[seed][-1] for seed in sorted(seeds)]
        counts = [f"{'' if is_stable(one) else '> '}{one['labels']}" for one in last]
        before = statistics.fmean(rounds[0]["test"] for rounds in seeds.values())
        after = statistics.fmean(one["test"] for one in last)
        rows.append(f"| {name} | {setting} | {', '.join(counts)} | {before:.4f} | {after:.4f} |")
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        results = [
            json.loads(line)
            for file in sys.argv[2:]
            for line in Path(file).read_text().splitlines()
        ]
        print("\n".join(table(results)))
    else:
        main(lines_of)
