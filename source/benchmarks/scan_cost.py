"""What the look at every frame costs when `dp train` starts: time to the first step with and without it.

    python source/benchmarks/scan_cost.py [--systems 100 400] [--frames 20] [--runs 5] [--device cuda]

Systems are of 12 to 180 atoms with the density of water, as `sizes400` of `data_sets.py`; labels are random. The model
is se_e2_a with small networks, so that little but data and imports takes time. Runs with and without the scan
(`deepmd_muon.data.checks.scan`) alternate; figures are medians, on the clock and of the processor, until the line of
the first step. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from data_sets import water
from two_revisions import _processor_of

TRAIN = """
import sys
from deepmd_muon.cli.main import main
if sys.argv[1] == "without":
    from deepmd_muon.data.checks import labels
    labels.scan = lambda system, share: None
sys.exit(main(["train", "input.json"]))
"""


class Start(NamedTuple):
    """Seconds until the first step."""

    clock: float
    processor: float


def content_of(systems: list[str]) -> dict[str, Any]:
    """Return the input of a run of one step."""
    return {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": {
                "type": "se_e2_a",
                "sel": "auto",
                "rcut": 6.0,
                "rcut_smth": 0.5,
                "neuron": [8, 16],
                "axis_neuron": 4,
                "seed": 1,
            },
            "fitting_net": {"neuron": [32, 32], "seed": 1},
        },
        "learning_rate": {"type": "exp", "start_lr": 1e-3, "stop_lr": 1e-5},
        "loss": {"type": "ener"},
        "optimizer": {"type": "HybridMuon", "lr_adjust_coeff": 8.64},
        "training": {
            "training_data": {"systems": systems, "batch_size": 1},
            "numb_steps": 1,
            "seed": 1,
            "disp_freq": 1,
        },
    }


def start(folder: Path, scan: str, device: str) -> Start:
    """Train one step in a process of its own; return when it was done."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DEVICE": device}
    begin = time.perf_counter()
    found = None
    log = []
    with subprocess.Popen(
        [sys.executable, "-c", TRAIN, scan],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if found is None and re.search(r" Batch +1:", line):
                found = Start(time.perf_counter() - begin, _processor_of(process.pid))
    if process.returncode or found is None:
        raise SystemExit(f"dp train ended with {process.returncode}:\n{''.join(log[-50:])}")
    return found


def main() -> None:
    """Write the systems, time the starts, and print a line for each number of systems."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--systems", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--frames", type=int, default=20, help="frames of a system")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    for count in options.systems:
        sizes = np.linspace(4, 60, count).round().astype(int) * 3
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            systems = [
                water(folder / f"s{k}", natoms, options.frames)
                for k, natoms in enumerate(sizes.tolist())
            ]
            (folder / "input.json").write_text(json.dumps(content_of(systems)))
            starts: dict[str, list[Start]] = {"with": [], "without": []}
            for _ in range(options.runs):
                for scan, times in starts.items():
                    times.append(start(folder, scan, options.device))
        print(f"{count} systems of {options.frames} frames, {options.device}:", flush=True)
        for field in Start._fields:
            median = {
                scan: statistics.median(getattr(one, field) for one in times)
                for scan, times in starts.items()
            }
            cost = median["with"] / median["without"] - 1.0
            print(
                f"  {field:9} {median['with']:6.2f} s with the scan, {median['without']:6.2f} s "
                f"without it: {100 * cost:+.1f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
