"""Seconds from the start of `dp train` until the force error on all validation frames reaches a target.

    python source/benchmarks/time_to_accuracy.py --steps 1500 --seeds 10 11 --adam-steps 18000 --log times.json
    python source/benchmarks/time_to_accuracy.py --steps 1500 --deepmd-kit /path/to/other/venv/bin/dp --log times.json

Trains examples/water_xtb from the command line, one run after the other: HybridMuon for each seed, Adam once with
--adam-steps, and deepmd-kit's Adam with --deepmd-kit. The learning rate falls from --rate to 1e-6 within the steps. A
run measures the error on all validation frames --looks times (deepmd-kit on six batches of 24 frames), in its own log,
whose times count; the clock starts before the process does. Kernels should be compiled already: --warm-up takes a few
steps first. The error between two looks is not known, so that the time found is that of the first look at or below the
target.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "water_xtb"
OURS = [sys.executable, "-m", "deepmd_muon"]
THEIR_PYTHON = [sys.executable, str(Path(__file__).with_name("measured_train.py")), "deepmd-kit"]
THEIRS = "deepmd-kit's Adam"


def systems(part: str) -> list[str]:
    """Return the folders of the systems in a part of the example's data."""
    return sorted(str(kind.parent) for kind in (EXAMPLE / "data" / part).rglob("type.raw"))


def make_input(optimizer: dict[str, Any], rate: float, steps: int, seed: int, looks: int) -> dict[str, Any]:
    """Return the example's input for a run of so many steps that looks at the validation error so often."""
    content: dict[str, Any] = json.loads((EXAMPLE / "input.json").read_text())
    for part in ("descriptor", "fitting_net"):
        content["model"][part]["seed"] = seed
    content["model"]["descriptor"]["sel"] = [40, 80]  # as "auto" finds, without counting at every start
    content["learning_rate"] = {"type": "exp", "decay_steps": max(1, steps // 100), "start_lr": rate, "stop_lr": 1e-6}
    content["optimizer"] = optimizer
    training = content["training"]
    training.update(numb_steps=steps, seed=seed, disp_freq=max(1, steps // looks), save_freq=steps)
    training["training_data"]["systems"] = systems("train")
    training["validation_data"] = {"systems": systems("valid"), "batch_size": 24, "numb_btch": "all"}
    return content


def for_deepmd_kit(content: dict[str, Any]) -> dict[str, Any]:
    """Return an input that deepmd-kit takes: it draws six of the three systems' 24 frames instead of seeing all."""
    training = content["training"]
    validation = {**training["validation_data"], "numb_btch": 6}
    return {**content, "training": {**training, "validation_data": validation}}


def train(content: dict[str, Any], command: list[str] = OURS) -> dict[str, list[float]]:
    """Train from the command line; return steps, seconds since the start, and validation force errors [eV/Å]."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "input.json").write_text(json.dumps(content))
        begun = time.time()
        done = subprocess.run(
            [*command, "--pt", "train", "--skip-neighbor-stat", "input.json"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"dp train failed:\n{done.stderr[-3000:]}")
    found: dict[str, list[float]] = {"step": [], "seconds": [], "force": []}
    pattern = r"\[([\d-]+ [\d:]+),(\d+)\] DEEPMD .*Batch +(\d+): val: .*rmse_f = ([\d.e+-]+)"
    for date, thousandths, step, force in re.findall(pattern, done.stderr):
        at = time.mktime(time.strptime(date, "%Y-%m-%d %H:%M:%S")) + int(thousandths) / 1e3
        found["step"].append(int(step))
        found["seconds"].append(at - begun)
        found["force"].append(float(force))
    return found


def reached(run: dict[str, Any], target: float) -> tuple[int, float] | None:
    """Return step and seconds of the first look at or below the target; None where there is none."""
    looks = zip(run["step"], run["seconds"], run["force"], strict=True)
    return next(((step, seconds) for step, seconds, force in looks if force <= target), None)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all contestants."""
    muon = {"type": "HybridMuon", "lr_adjust_coeff": args.coeff}
    field = [("HybridMuon", muon, args.rate, args.steps, seed, args.looks) for seed in args.seeds]
    if args.adam_steps:
        field.append(("Adam", {"type": "Adam"}, 3e-3, args.adam_steps, args.seeds[0], 2 * args.looks))
    if args.warm_up:
        for _, optimizer, rate, _, seed, _ in {each[0]: each for each in field}.values():
            train(make_input(optimizer, rate, 40, seed, 1))
    runs = []
    for name, optimizer, rate, steps, seed, looks in field:
        run = {"optimizer": name, "rate": rate, "steps": steps, "seed": seed}
        runs.append({**run, **train(make_input(optimizer, rate, steps, seed, looks))})
        say(runs[-1], args.target)
    if args.deepmd_kit:
        command = THEIR_PYTHON if args.deepmd_kit == "here" else [shutil.which(args.deepmd_kit) or args.deepmd_kit]
        run = {"optimizer": THEIRS, "rate": 3e-3, "steps": args.deepmd_kit_steps, "seed": args.seeds[0]}
        content = make_input({"type": "Adam"}, 3e-3, args.deepmd_kit_steps, args.seeds[0], 2 * args.looks)
        runs.append({**run, **train(for_deepmd_kit(content), command)})
        say(runs[-1], args.target)
    return runs


def say(run: dict[str, Any], target: float) -> None:
    """Print what a run reached, and when."""
    found, first = reached(run, target), run["seconds"][0]
    print(
        f"{run['optimizer']}, seed {run['seed']}, {run['steps']} steps: first look at {first:.2f} s, target at "
        f"{found}, in the end {run['force'][-1]:.4f} eV/Å after {run['seconds'][-1]:.2f} s",
        flush=True,
    )


def table(runs: list[dict[str, Any]], target: float) -> None:
    """Print seconds to the target, with start-up and without."""
    print(f"\n| optimizer | seed | steps in all | reaches {target} eV/Å at step | seconds | without start-up |")
    print("|---|---|---|---|---|---|")
    for run in runs:
        head = f"| {run['optimizer']} | {run['seed']} | {run['steps']} |"
        if (found := reached(run, target)) is None:
            print(f"{head} never: {run['force'][-1]:.4f} in the end | {run['seconds'][-1]:.2f} in all | – |")
        else:
            print(f"{head} {found[0]} | {found[1]:.2f} | {found[1] - run['seconds'][0]:.2f} |")


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="length of HybridMuon's runs")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--coeff", type=float, default=17.28, help="lr_adjust_coeff of HybridMuon")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11])
    parser.add_argument("--adam-steps", type=int, default=0, help="length of a run of Adam at 3e-3; 0 for none")
    parser.add_argument("--deepmd-kit", help="the dp command of deepmd-kit 3.2.0, or `here`: a run of its Adam at 3e-3")
    parser.add_argument("--deepmd-kit-steps", type=int, default=18000, help="length of that run")
    parser.add_argument("--target", type=float, default=0.060, help="validation force RMSE [eV/Å]")
    parser.add_argument("--looks", type=int, default=12, help="validations in a run")
    parser.add_argument("--warm-up", action="store_true", help="take 40 steps first, which compile kernels")
    parser.add_argument("--log", type=Path, help="file for all looks, JSON")
    args = parser.parse_args()
    runs = measure(args)
    if args.log:
        import torch

        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        args.log.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "runs": runs}, indent=1))
    table(runs, args.target)


if __name__ == "__main__":
    main()
