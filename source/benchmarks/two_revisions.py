"""Compare start-up and steps of `dp train` between two checkouts, in pairs of runs.

    python source/benchmarks/two_revisions.py OLD NEW --data WATER --runs 9 --steps 200
    python source/benchmarks/two_revisions.py OLD NEW --data WATER --runs 3 --steps 6000 --interval 500 --device cuda \
        --cases se_e2_a:f64-b1 se_e2_a:f64-b8 se_e2_a:f64-b32 dpa3:f32-b1

OLD and NEW are folders of checkouts, WATER holds DeePMD's example systems. Runs of the checkouts alternate. A start is
a run of one step, imports included: time on the clock and processor time (user and system) until its line is logged,
and processor time of the whole run. The time of a step is the least of all intervals between
logged steps of a run; its processor time is the mean between its second line and its last. A case
MODEL:PRECISION-bFRAMES is one of `training_step.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data_sets import write_set, write_system
from training_step import make_input

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = ("example", "water", "dpa1", "dpa1-no-attention", "small100", "sizes400", "dpa3")
QUANTITIES = (
    ("first_step", "first step, clock [s]"),
    ("processor", "first step, processor [s]"),
    ("whole", "run of one step, processor [s]"),
)
STEPS = (("step", "step, clock [ms]"), ("step_processor", "step, processor [ms]"))


class Run(NamedTuple):
    """Seconds on the clock and of the processor until the first step is logged, of the whole run, and of a step.

    `peak` is the most memory that the run had resident until its last logged step [MiB].
    """

    first_step: float
    processor: float
    whole: float
    step: float
    step_processor: float
    peak: int


def content_of(case: str, data: Path, folder: Path) -> dict[str, Any]:
    """Return the input of a case; its data lie in `folder`, `data` or the examples."""
    if ":" in case:
        return make_input(*case.split(":"), "HybridMuon", 1, data, {})
    if case in ("water", "sizes400", "dpa1", "dpa1-no-attention"):
        model = "dpa1" if case.startswith("dpa1") else "se_e2_a"
        content = make_input(model, "f64-b1", "HybridMuon", 1, data, {})
        if case == "dpa1-no-attention":
            content["model"]["descriptor"]["attn_layer"] = 0
        if case == "sizes400":  # one system after another, of `data_sets.py`
            content["training"]["training_data"]["systems"] = write_set(folder / case, case, data)[
                0
            ]
        return content
    path = EXAMPLES / ("dpa3_water" if case == "dpa3" else "water_xtb") / "input.json"
    content: dict[str, Any] = json.loads(path.read_text())
    for section in ("training_data", "validation_data"):
        given = content["training"][section]
        given["systems"] = [str(path.parent / system) for system in given["systems"]]
    if case == "small100":
        types = (np.arange(12) % 3 > 0).astype(int)
        names = [folder / f"{case}_{k}" for k in range(100)]
        content["training"]["training_data"]["systems"] = [
            write_system(name, types, ["O", "H"], 10, 2.15, cell=True) for name in names
        ]
        del content["training"]["validation_data"]
    return content


def run(checkout: Path, content: dict[str, Any], steps: int, interval: int, device: str) -> Run:
    """Train in a new folder, in a process of its own; a line is logged every `interval` steps."""
    training = {
        "numb_steps": steps,
        "disp_training": True,
        "disp_freq": interval,
        "save_freq": 10**8,
        "jsonl_file": "steps.jsonl",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.json")
        path.write_text(json.dumps({**content, "training": {**content["training"], **training}}))
        command = [sys.executable, "-m", "deepmd_muon", "--pt", "train", "input.json"]
        path_of_modules = os.pathsep.join(
            filter(None, [str(checkout.resolve()), os.environ.get("PYTHONPATH")])
        )
        environment = {
            **os.environ,
            "PYTHONPATH": path_of_modules,
            "OMP_NUM_THREADS": "1",
            "DEVICE": device,
        }
        begin, before = time.perf_counter(), _seconds(resource.getrusage(resource.RUSAGE_CHILDREN))
        first = (np.inf, np.inf)
        log = []
        peak = 0
        used: dict[int, float] = {}
        with subprocess.Popen(
            command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                log.append(line)
                if found := re.search(r" Batch +(\d+):", line):
                    used[int(found[1])], peak = _processor_of(process.pid), _peak_of(process.pid)
                    if int(found[1]) == 1:
                        first = time.perf_counter() - begin, used[1]
        if process.returncode:
            raise SystemExit(
                f"{checkout}: dp train ended with {process.returncode}:\n{''.join(log[-50:])}"
            )
        whole = _seconds(resource.getrusage(resource.RUSAGE_CHILDREN)) - before
        rows = map(json.loads, Path(folder, "steps.jsonl").read_text().splitlines())
        times = {
            row["step"]: row["time"]
            for row in rows
            if "time" in row and row["step"] % interval == 0
        }
        step = (
            min(
                (times[k] - times[k - interval] for k in times if k - interval in times),
                default=np.inf,
            )
            / interval
        )
    last = max(used)
    processor = (used[last] - used[interval]) / (last - interval) if last > interval else np.inf
    return Run(*first, whole, step, processor, peak)


def _seconds(used: resource.struct_rusage) -> float:
    return used.ru_utime + used.ru_stime


def _processor_of(pid: int) -> float:
    """Return the processor time of a process so far [s]: fields 14 and 15 of its line, counted behind its name."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_of(pid: int) -> int:
    """Return the most memory that a process has had resident [MiB]."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) >> 10 if found else 0


def row(case: str, quantity: str, pairs: list[tuple[float, float]], change: str) -> str:
    """Return a row of the table; `change` formats the change from old to new, with % as a share."""
    old, new = zip(*pairs, strict=True)
    found = [(min(values), statistics.median(values)) for values in (old, new)]
    rise = [b / a - 1 if change.endswith("%") else b - a for a, b in zip(*found, strict=True)]
    numbers = [f"{value:.3f}" for least, middle in found for value in (least, middle)]
    return " | ".join([f"| {case}", quantity, *numbers, *(format(r, change) for r in rise)]) + " |"


def main() -> None:
    """Run all cases and print a table of both checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs=2, type=Path, metavar="CHECKOUT")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help=f"{', '.join(CASES)}, or MODEL:PRECISION-bFRAMES"
    )
    parser.add_argument("--runs", type=int, default=9, help="starts of each checkout")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of further runs that time a step"
    )
    parser.add_argument(
        "--interval", type=int, default=10, help="steps between two lines of the log"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(
        "| case | quantity | old least | old median | new least | new median | rise of least | of medians |"
    )
    print("|" + "---|" * 8)
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            content = content_of(case, options.data, Path(folder))
            for steps in (1, options.steps) if options.steps else (1,):
                pairs = [
                    [
                        run(each, content, steps, options.interval, options.device)
                        for each in options.checkouts
                    ]
                    for _ in range(options.runs)
                ]
                for name, quantity in QUANTITIES if steps == 1 else STEPS:
                    scale, change = (1, "+.3f") if steps == 1 else (1e3, "+.1%")
                    print(
                        row(
                            case,
                            quantity,
                            [tuple(scale * getattr(r, name) for r in p) for p in pairs],
                            change,
                        )
                    )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
