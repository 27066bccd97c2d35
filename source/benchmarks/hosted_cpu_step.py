"""Time of a CPU step and of the start of training runs: deepmd-kit's own trainer and this one in turn.

    OMP_NUM_THREADS=1 DEVICE=cpu python source/benchmarks/hosted_cpu_step.py --cases mini dpa2 hybrid se_e3

A case is a model of `hosted_step.py`. Both trainers run the same input with Adam on random water, one after the other,
`--pairs` times. Ratios are medians over the pairs, so that a machine that slows down meets both. The start is the CPU
time of a run of one step. That of the import is what deepmd-kit needs to be imported.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

from hosted_train import input_of, write_data

_AVERAGE = re.compile(r"average training time: ([\d.]+) s/batch")
_TRAINERS = {"deepmd-kit": "deepmd", "here": "deepmd_muon"}


def cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended [s]."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(words: list[str], folder: Path) -> tuple[float, str]:
    """Run a command; return its CPU time [s] and its output."""
    begin = cpu_seconds()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(output[-3000:])
    return cpu_seconds() - begin, output


def train(trainer: str, folder: Path) -> tuple[float, str]:
    """Train in a new process; return its CPU time [s] and its output."""
    words = ["-m", _TRAINERS[trainer], "--pt", "train", "input.json", "--skip-neighbor-stat"]
    return run(words, folder)


def step_of(trainer: str, folder: Path) -> float:
    """Return the average time of a step [s]."""
    _, output = train(trainer, folder)
    average = _AVERAGE.search(output)
    if average is None:
        raise SystemExit(output[-3000:])
    return float(average[1])


def main() -> int:
    """Print the times of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["mini", "dpa2", "hybrid", "se_e3"])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--atoms", type=int, default=96)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    folder = Path(mkdtemp())
    system = write_data(folder, options.atoms, nframes=8)
    imported, _ = run(["-c", "import deepmd.pt.train.training"], folder)
    print(f"import of deepmd-kit: {imported:.1f} s")
    for case in options.cases:
        content = input_of(case, system, options.steps, folder / "model")
        content["optimizer"] = {"type": "Adam"}
        content["training"] |= {"disp_freq": options.steps // 4, "save_freq": options.steps}
        (folder / "input.json").write_text(json.dumps(content))
        steps: dict[str, list[float]] = {trainer: [] for trainer in _TRAINERS}
        for _ in range(options.pairs):
            for trainer, times in steps.items():
                times.append(step_of(trainer, folder))
        content["training"] |= {"numb_steps": 1, "disp_freq": 1, "save_freq": 1}
        (folder / "input.json").write_text(json.dumps(content))
        for trainer, times in steps.items():
            start, _ = train(trainer, folder)
            step = statistics.median(times)
            print(f"{case}, {trainer}: step {1e3 * step:.0f} ms, start {start:.1f} s")
        pairs = zip(steps["here"], steps["deepmd-kit"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"{case}: here / deepmd-kit {ratio:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
