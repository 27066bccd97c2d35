"""How long a first run on a machine takes, with an empty cache of kernels, and a later one.

    python source/benchmarks/first_run.py --data WATER --cases se_e2_a:f64-b1 dpa3:f32-b1

WATER holds DeePMD's example systems (data_0, data_1, data_2, 192 atoms). A case is MODEL:PRECISION-bFRAMES. Each is
trained twice for 100 steps by `dp train` in a process of its own, whose whole time is shown: imports, data, statistics,
kernels, steps and a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from training_step import make_input


def seconds_of(content: dict[str, object], cache: Path) -> float:
    """Return the time of a run whose kernels are kept in the folder `cache` [s]."""
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
    environment = {**os.environ, **{name: str(cache / name) for name in caches}}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "input.json").write_text(json.dumps(content))
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "deepmd_muon", "--pt", "train", "input.json"],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        return time.perf_counter() - begun


def main() -> None:
    """Train each case twice and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with data_0, data_1, data_2"
    )
    parser.add_argument("--cases", nargs="+", default=["se_e2_a:f64-b1", "dpa3:f32-b1"])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    print("| case | first run [s] | later run [s] |\n|---|---|---|")
    for case in options.cases:
        model, precision = case.split(":")
        content = make_input(model, precision, "HybridMuon", options.steps, options.data, {})
        with tempfile.TemporaryDirectory() as cache:
            first = seconds_of(content, Path(cache))
            later = seconds_of(content, Path(cache))
        print(f"| {case} | {first:.1f} | {later:.1f} |", flush=True)


if __name__ == "__main__":
    main()
