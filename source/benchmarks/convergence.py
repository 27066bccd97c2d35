"""Race of optimizers and learning rates on one input: force error on validation data after a fixed number of steps.

Every contestant is trained by the command line in a process of its own, several at a time, from the same seeds and
batches. Run it from anywhere::

    python source/benchmarks/convergence.py --input examples/water_xtb/input.json --steps 3000 --jobs 8 \
        --race adam:lr=1e-3,3e-3 --race muon:lr=1e-3:lr_adjust_coeff=4.32,8.64:magma_muon=false

A race names a base (adam, adamw, muon) and values for keys of the optimizer section, or `lr`; lists are combined. A key
with dots is one of the whole input, such as model.descriptor.repflow.fix_stat_std=0.1,0.3.
The result is a table (Markdown) and, with --out, a JSON file with every error and setting.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import operator
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

BASES = {"adam": {"type": "Adam"}, "adamw": {"type": "AdamW"}, "muon": {"type": "HybridMuon"}}


def contestants(race: str) -> list[dict[str, Any]]:
    """Expand ``muon:lr=1e-3,3e-3:magma_muon=false`` into one dict of settings per combination."""
    base, *terms = race.split(":")
    keys, values = [], []
    for term in terms:
        key, _, listed = term.partition("=")
        keys.append(key)
        values.append(
            [
                json.loads(value) if value[0] in "-0123456789tfn[" else value
                for value in listed.split(",")
            ]
        )
    return [
        {**BASES[base], **dict(zip(keys, combination, strict=True))}
        for combination in itertools.product(*values)
    ]


def input_of(
    base: dict[str, Any], optimizer: dict[str, Any], seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Put a contestant's optimizer, learning rate, seed and other settings into the input."""
    others = {key: value for key, value in optimizer.items() if "." in key}
    optimizer = {key: value for key, value in optimizer.items() if "." not in key}
    lr = optimizer.pop("lr")
    rate = {"type": "exp", "decay_steps": 5000, "start_lr": lr, "stop_lr": args.stop_lr}
    training = {**base["training"], "numb_steps": args.steps, "seed": seed}
    training.update(disp_freq=max(1, args.steps // 20), save_freq=args.steps, max_ckpt_keep=1)
    training["training_data"] = {**training["training_data"]}
    if args.train:
        training["training_data"]["systems"] = args.train
    training.pop("validation_data", None)
    model = json.loads(json.dumps(base["model"]))
    for part in ("descriptor", "fitting_net"):
        model[part]["seed"] = seed
        if args.precision:
            model[part]["precision"] = args.precision
    content = {
        **base,
        "model": model,
        "learning_rate": rate,
        "optimizer": optimizer,
        "training": training,
    }
    for key, value in others.items():
        *sections, last = key.split(".")
        functools.reduce(operator.getitem, sections, content)[last] = value
    return content


def run(content: dict[str, Any], valid: list[str], threads: int) -> dict[str, Any]:
    """Train one contestant and measure it on all validation frames."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "input.json").write_text(json.dumps(content))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "deepmd_muon", "--pt", "train", "input.json"]
        start = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            return {"failed": done.stderr.strip().splitlines()[-1][:300], "seconds": seconds}
        curve = [line.split() for line in Path(folder, "lcurve.out").read_text().splitlines()]
        column = curve[0].index("rmse_f_trn") - 1  # after the sign of a comment
        forces = [(int(row[0]), float(row[column])) for row in curve if row[0] != "#"]
        code = (
            "import json,sys;from deepmd_muon.infer.predictor import Predictor;"
            "from deepmd_muon.infer.evaluation import evaluate_system;"
            "from deepmd_muon.infer.metrics import add_errors;from deepmd_muon.data import open_systems;"
            "p=Predictor('model.ckpt.pt');total={}\n"
            "for s in open_systems(sys.argv[1:],p.type_map):\n"
            "  for c in evaluate_system(p,s): total=add_errors(total,c.errors)\n"
            "print(json.dumps({k:v.rmse for k,v in total.items()}))"
        )
        found = subprocess.run(
            [sys.executable, "-c", code, *valid],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return {
            "rmse": json.loads(found.stdout.splitlines()[-1]),
            "seconds": seconds,
            "forces": forces,
        }


def main() -> None:
    """Run the races and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--input", type=Path, required=True, help="input.json whose model, loss and data are used"
    )
    parser.add_argument(
        "--train", nargs="+", help="training systems, instead of those of the input"
    )
    parser.add_argument(
        "--valid", nargs="+", help="validation systems, instead of those of the input"
    )
    parser.add_argument(
        "--race", action="append", required=True, help="base:key=value,…:key=value,…"
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--stop-lr", type=float, default=1e-6)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[10], help="of the data order and of the weights"
    )
    parser.add_argument("--precision", help="of descriptor and fitting net, instead of the input's")
    parser.add_argument("--jobs", type=int, default=1, help="contestants at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--out", type=Path, help="JSON file with all results")
    args = parser.parse_args()
    base = json.loads(args.input.read_text())
    folder = args.input.resolve().parent
    for part in ("training_data", "validation_data"):
        if part in base["training"]:
            systems = [str(folder / system) for system in base["training"][part]["systems"]]
            base["training"][part] = {**base["training"][part], "systems": systems}
    args.train = [str(Path(system).resolve()) for system in args.train or []]
    valid = [
        str(Path(s).resolve()) for s in args.valid or base["training"]["validation_data"]["systems"]
    ]
    field = [
        (optimizer, seed)
        for seed in args.seed
        for race in args.race
        for optimizer in contestants(race)
    ]
    results = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {
            pool.submit(run, input_of(base, *each, args), valid, args.threads): each
            for each in field
        }
        for job in concurrent.futures.as_completed(jobs):
            optimizer, seed = jobs[job]
            results.append({"optimizer": optimizer, "seed": seed, **job.result()})
            print(json.dumps(results[-1]), flush=True)
            if args.out:
                machine = (
                    torch.cuda.get_device_name()
                    if torch.cuda.is_available()
                    else platform.processor()
                )
                about = {"machine": machine, "torch": torch.__version__, "steps": args.steps}
                args.out.write_text(
                    json.dumps({**about, "stop_lr": args.stop_lr, "results": results}, indent=1)
                )
    print("\n| optimizer | settings | seed | force RMSE [eV/Å] | energy RMSE [eV/atom] | seconds |")
    print("|---|---|---|---|---|---|")
    for entry in sorted(results, key=lambda e: e.get("rmse", {}).get("force", float("inf"))):
        settings = ", ".join(f"{k} {v}" for k, v in entry["optimizer"].items() if k != "type")
        rmse = entry.get("rmse", {})
        force, energy = rmse.get("force", float("nan")), rmse.get("energy_per_atom", float("nan"))
        note = f" ({entry['failed']})" if "failed" in entry else ""
        first = f"| {entry['optimizer']['type']} | {settings} | {entry['seed']} |"
        print(f"{first} {force:.4f}{note} | {energy:.5f} | {entry['seconds']:.0f} |")


if __name__ == "__main__":
    main()
