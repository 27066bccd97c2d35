"""Time of one training step, ours against deepmd-kit's, on the same input, data and machine.

    python source/benchmarks/training_step.py --data WATER --deepmd-kit /path/to/other/venv/bin/dp

WATER holds DeePMD's example water systems (data_0 … data_3, 192 atoms). deepmd-kit 3.2.0 lives in an environment of
its own; without --deepmd-kit only our times are shown. Each trainer runs as its own process and is timed by the
steps' own log lines: the first `--warm-up` steps (imports, compilation, first allocation) are not counted. The two
take turns, so that a drift of the machine's speed meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

# The network of DeePMD's water example (se_e2_a, 1.01 million weights), float64.
INPUT: dict[str, Any] = {
    "model": {
        "type_map": ["O", "H"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [46, 92],
            "rcut_smth": 0.5,
            "rcut": 6.0,
            "neuron": [25, 50, 100],
            "axis_neuron": 16,
            "type_one_side": True,
            "seed": 1,
        },
        "fitting_net": {"neuron": [240, 240, 240], "resnet_dt": True, "seed": 1},
    },
    "learning_rate": {"type": "exp", "decay_steps": 5000, "start_lr": 1e-3, "stop_lr": 1e-6},
    "loss": {"type": "ener"},
}


def seconds_per_step(command: list[str], optimizer: dict[str, Any], args: argparse.Namespace) -> float:
    """Train and return the mean time of the counted steps [s], from the log."""
    with tempfile.TemporaryDirectory() as folder:
        systems = [str(args.data.resolve() / f"data_{i}") for i in range(3)]
        training = {
            "training_data": {"systems": systems, "batch_size": 1},
            "numb_steps": args.warm_up + args.steps,
            "seed": 1,
            "disp_freq": args.warm_up,
            "save_freq": 1000000,
        }
        Path(folder, "input.json").write_text(json.dumps({**INPUT, "optimizer": optimizer, "training": training}))
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "DP_INTRA_OP_PARALLELISM_THREADS": "0"}
        done = subprocess.run(
            [*command, "--pt", "train", "--skip-neighbor-stat", "input.json"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        log = done.stdout + done.stderr
        found = re.findall(r"Batch +(\d+): total wall time = ([\d.]+) s", log)
        counted = [float(seconds) for step, seconds in found if int(step) > args.warm_up]
        if done.returncode or not counted:
            raise SystemExit(f"{' '.join(command)} failed:\n{log[-2000:]}")
        return sum(counted) / args.steps


def main() -> None:
    """Take turns, print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with data_0, data_1, data_2")
    parser.add_argument("--deepmd-kit", help="the dp command of deepmd-kit 3.2.0")
    parser.add_argument("--steps", type=int, default=20, help="counted steps; a multiple of --warm-up")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--optimizers", nargs="+", default=["Adam", "HybridMuon"])
    args = parser.parse_args()
    commands = {"deepmd_muon": [sys.executable, "-m", "deepmd_muon"]}
    if args.deepmd_kit:
        commands["deepmd-kit"] = [shutil.which(args.deepmd_kit) or args.deepmd_kit]
    times: dict[tuple[str, str], list[float]] = {}
    for round_number in range(args.rounds):
        for optimizer in args.optimizers:
            for name, command in commands.items():
                taken = seconds_per_step(command, {"type": optimizer}, args)
                times.setdefault((name, optimizer), []).append(taken)
                print(f"round {round_number}: {name} {optimizer}: {taken * 1e3:.1f} ms a step", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    print(
        f"\n{device}, {args.threads} threads, torch {torch.__version__}, {args.rounds} rounds of {args.steps} steps\n"
    )
    print("| trainer | optimizer | median ms a step | range | of deepmd-kit's |\n|---|---|---|---|---|")
    for (name, optimizer), taken in times.items():
        other = times.get(("deepmd-kit", optimizer))
        ratio = f"{statistics.median(taken) / statistics.median(other):.3f}" if other else "–"
        span = f"{min(taken) * 1e3:.1f}–{max(taken) * 1e3:.1f}"
        print(f"| {name} | {optimizer} | {statistics.median(taken) * 1e3:.1f} | {span} | {ratio} |")


if __name__ == "__main__":
    main()
