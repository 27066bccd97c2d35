"""Time of a CPU step and of the start of training runs: deepmd-kit's own trainer and this one in turn.

    OMP_NUM_THREADS=1 DEVICE=cpu python source/benchmarks/hosted_cpu_step.py --cases mini dpa2 hybrid se_e3

A case is a model of `hosted_step.py`. Both trainers run the same input with Adam on random water, one after the other,
`--pairs` times. Ratios are medians over the pairs, so that a machine that slows down meets both. The start is the time
of a whole process without its steps. That of the import is what deepmd-kit needs to be imported.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from hosted_train import input_of, write_data

_AVERAGE = re.compile(r"average training time: ([\d.]+) s/batch")
_TRAINERS = {"deepmd-kit": "deepmd", "here": "deepmd_muon"}


class Run(NamedTuple):
    """Times of a run [s]."""

    step: float
    start: float


def seconds_of(words: list[str], folder: Path) -> tuple[float, str]:
    """Run a command; return its duration [s] and its output."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    output = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(output[-3000:])
    return seconds, output


def train(trainer: str, folder: Path, steps: int) -> Run:
    """Train in a new process."""
    words = ["-m", _TRAINERS[trainer], "--pt", "train", "input.json", "--skip-neighbor-stat"]
    whole, output = seconds_of(words, folder)
    found = _AVERAGE.search(output)
    if found is None:
        raise SystemExit(output[-3000:])
    step = float(found[1])
    return Run(step, whole - steps * step)


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
    imported, _ = seconds_of(["-c", "import deepmd.pt.train.training"], folder)
    print(f"import of deepmd-kit: {imported:.1f} s")
    for case in options.cases:
        content = input_of(case, system, options.steps, folder / "model")
        content["optimizer"] = {"type": "Adam"}
        content["training"] |= {"disp_freq": options.steps // 4, "save_freq": options.steps}
        (folder / "input.json").write_text(json.dumps(content))
        runs: dict[str, list[Run]] = {trainer: [] for trainer in _TRAINERS}
        for _ in range(options.pairs):
            for trainer, done in runs.items():
                done.append(train(trainer, folder, options.steps))
        for trainer, done in runs.items():
            step = statistics.median(run.step for run in done)
            start = statistics.median(run.start for run in done)
            print(f"{case}, {trainer}: step {1e3 * step:.0f} ms, start {start:.1f} s")
        pairs = zip(runs["here"], runs["deepmd-kit"], strict=True)
        ratio = statistics.median(ours.step / theirs.step for ours, theirs in pairs)
        print(f"{case}: here / deepmd-kit {ratio:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
