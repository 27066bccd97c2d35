"""Seconds until the first step of `dp train`, and those of the optimizer's first step, with cold and warm caches.

    python source/benchmarks/start_up.py --data WATER --models se_e2_a:f64-b1 dpa1:f64-b1 --log start_up.json

WATER holds DeePMD's example systems (data_0, data_1, data_2, 192 atoms). Each model is trained for three steps from
the command line, every step displayed: once with an empty cache of compiled kernels, then --warm times with that
cache, one process after the other. A stage ends with its line of the log; the clock starts before the process. Files
that the first process reads from disk stay in memory for the others, so a process that imports torch comes before all.

The optimizer's first step is timed apart (--first-steps), in a process of its own for each model and cache: the model's
parameters with random gradients, nothing compiled ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from training_step import make_input

# A pattern of a line of the log, and the stage that this line ends.
STAGES = (
    ("training data: ", "imports, data found"),
    ("model: ", "model"),
    ("energy bias: ", "statistics"),
    ("training from step", "optimizer"),
    ("embedding nets are", "data on the device, pieces"),
    ("Batch *1: trn", "first step"),
    ("Batch *3: trn", "third step"),
    ("training done", "end"),
)


def stages(log: str, begun: float) -> dict[str, float]:
    """Return the seconds after which each stage ended: at the first line that says so."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        stamp = re.match(r"\[([\d-]+ [\d:]+),(\d+)\] DEEPMD (.*)", line)
        name = stamp and next((name for start, name in STAGES if re.search(start, stamp[3])), None)
        if stamp and name:
            at = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S")) + int(stamp[2]) / 1e3
            found.setdefault(name, round(at - begun, 3))
    return found


def start(case: str, optimizer: str, data: Path, cache: str, timeout: float) -> dict[str, float]:
    """Train three steps from the command line; return the ends of the stages."""
    model, precision = case.split(":")
    content = make_input(model, precision, optimizer, 3, data, {})
    content["training"].update(disp_freq=1, disp_training=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "input.json").write_text(json.dumps(content))
        command = [sys.executable, "-m", "deepmd_muon", "--pt", "train", "--skip-neighbor-stat", "input.json"]
        begun = time.time()
        log = run(command, cache, timeout, folder)
    return stages(log, begun)


def run(command: list[str], cache: str, timeout: float, folder: str | None = None) -> str:
    """Run a command with a cache of compiled kernels; return its output."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        command, cwd=folder, env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def time_optimizer(case: str, kind: str, data: Path) -> None:
    """Time the first two steps of an optimizer in this process, and print them."""
    import torch

    from deepmd_muon.argcheck import normalize
    from deepmd_muon.model import build_model
    from deepmd_muon.train.optimizers import build_optimizer

    model_kind, _, precision = case.partition(":")
    given = normalize(make_input("se_e2_a", precision or "f32-b1", kind, 1, data, {}))
    shapes = Path(__file__).with_name("shapes") / f"{case}.json"
    model: torch.nn.Module
    if shapes.exists():
        model = torch.nn.ParameterDict()
        for name, shape, dtype in json.loads(shapes.read_text()):
            model[name.replace(".", "/")] = torch.nn.Parameter(torch.randn(shape, dtype=getattr(torch, dtype)))
    else:
        model = build_model(normalize(make_input(model_kind, precision, kind, 1, data, {})).normalized["model"])
    optimizer = build_optimizer(given.settings.optimizer, model.cuda(), 1e-3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.found_inf = torch.zeros((), device="cuda")  # type: ignore[attr-defined]  # as in a run
    torch.cuda.synchronize()
    found = []
    for _ in range(2):
        begun = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        found.append(round(time.perf_counter() - begun, 3))
    print("STEPS " + json.dumps(found))


def first_steps(case: str, kind: str, data: Path, cache: str, timeout: float) -> list[float]:
    """Return seconds of the first two steps of an optimizer in a new process."""
    log = run([sys.executable, __file__, "--data", str(data), "--child", case, kind], cache, timeout)
    found = re.search("STEPS (.*)", log)
    assert found is not None, log
    steps: list[float] = json.loads(found[1])
    return steps


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all models."""
    found: dict[str, Any] = {}
    for what in ("files not read before", "again") if args.cold else ():
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, triton"], check=True)
        show(f"import torch and triton, {what}", seconds=round(time.perf_counter() - begun, 2))
    for case in args.models:
        mine: dict[str, Any] = {"cold": [], "warm": []}
        found[case] = mine
        with tempfile.TemporaryDirectory() as empty:
            cache = empty if args.cold else os.environ["TRITON_CACHE_DIR"]
            for state in ["cold"] * args.cold + ["warm"] * args.warm:
                mine[state].append(start(case, args.optimizer, args.data, cache, args.timeout))
                show(f"{case} {state}", **mine[state][-1])
    for case in args.first_steps:
        with tempfile.TemporaryDirectory() as cache:
            twice = [
                first_steps(case, args.optimizer, args.data, cache, args.timeout) for _ in range(1 + bool(args.warm))
            ]
            mine = {f"{state} cache": steps for state, steps in zip(("cold", "warm"), twice, strict=False)}
            found.setdefault(case, {})["optimizer"] = mine
            show(f"{case} first two steps of {args.optimizer}", **mine)
    return found


def show(what: str, **values: object) -> None:
    """Print a line at once."""
    print(what + ": " + ", ".join(f"{name} {value}" for name, value in values.items()), flush=True)


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with data_0, data_1, data_2")
    parser.add_argument("--models", nargs="*", default=["se_e2_a:f64-b1"], help="MODEL:PRECISION-bFRAMES")
    parser.add_argument("--optimizer", default="HybridMuon", help="of the runs")
    parser.add_argument("--warm", type=int, default=2, help="runs with a filled cache")
    parser.add_argument("--no-cold", dest="cold", action="store_false", help="use the filled TRITON_CACHE_DIR")
    parser.add_argument("--first-steps", nargs="*", default=[], help="models, or files of shapes/ by name")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a process may take")
    parser.add_argument("--log", type=Path, help="file for all figures, JSON")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        time_optimizer(*args.child, args.data)
        return
    found = measure(args)
    if args.log:
        import torch

        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        args.log.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
