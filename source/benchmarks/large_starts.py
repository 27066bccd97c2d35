"""How long `dp train` takes to its first step on large data sets, and the memory of the host until then.

    python source/benchmarks/large_starts.py --data WATER --out FILE.json [--device cuda] [--cases CASE …]

WATER holds DeePMD's example systems. Cases: `one`, the frames of WATER; `npyN`, N systems of 12 to 180 atoms with four
frames each; `lmdbN:ATOMS`, a database of N frames. The networks are DeePMD's for water in float64. A start is timed by
`run` of `two_revisions.py`, from the command to the line of the first step, imports included. The files are in the page
cache, since they have just been written. Memory is the most that a run had resident until its first step. Of databases,
it also reads random frames, 256 at a time, in one thread.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from data_sets import water
from training_step import make_input
from two_revisions import run

from deepmd_muon.data import open_systems
from deepmd_muon.data.writing import write_lmdb

CASES = ("one", "npy400", "npy10000", "lmdb1000000:6", "lmdb1000000:24")
HERE = Path(__file__).parents[2]


def write_set(case: str, root: Path) -> list[str] | None:
    """Write the data of a case; return its systems, None for those of WATER."""
    if case == "one":
        return None
    found = re.fullmatch(r"(npy|lmdb)(\d+):?(\d*)", case)
    if found is None:
        raise SystemExit(f"{case} is no case: one, npyN or lmdbN:ATOMS")
    kind, count, atoms = found.groups()
    if kind == "npy":
        sizes = np.linspace(4, 60, int(count)).round().astype(int) * 3
        folders = [root / f"s{k}" for k in range(len(sizes))]
        with ProcessPoolExecutor() as pool:
            return list(pool.map(water, folders, sizes.tolist(), [4] * len(folders), chunksize=50))
    system, database = water(root / "npy", int(atoms), int(count)), root / "water.lmdb"
    return write_lmdb(open_systems([system], ["O", "H"]), database)


def content_of(case: str, data: Path, root: Path) -> dict[str, Any]:
    """Return the input of a case."""
    content = make_input("se_e2_a", "f64-b1", "HybridMuon", 1, data, {})
    systems = write_set(case, root)
    if systems is not None:
        content["training"]["training_data"]["systems"] = systems
    return content


def frames_a_second(path: str, seconds: float = 3.0) -> int:
    """Return how many random frames of a database one thread reads in a second."""
    (system,) = open_systems([path], ["O", "H"])
    rng, count, begun = np.random.default_rng(0), 0, time.monotonic()
    while time.monotonic() < begun + seconds:
        count += system.frames(np.sort(rng.choice(system.nframes, 256, replace=False))).nframes
    return round(count / (time.monotonic() - begun))


def main() -> None:
    """Write and time all cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--sets", type=Path, help="folder of the data of an earlier call with --write"
    )
    parser.add_argument(
        "--write",
        type=lambda text: Path(text).resolve(),
        help="only write the data, into this folder",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for case in options.cases:
        with tempfile.TemporaryDirectory() as name:
            root, begun = Path(name), time.monotonic()
            if options.write:
                place = options.write / case
                place.mkdir(parents=True)
                (place / "input.json").write_text(json.dumps(content_of(case, options.data, place)))
                print(f"{case} written in {time.monotonic() - begun:.1f} s", flush=True)
                continue
            if options.sets:
                content = json.loads((options.sets / case / "input.json").read_text())
            else:
                content = content_of(case, options.data, root)
            found = [run(HERE, content, 1, 1, options.device) for _ in range(options.runs)]
            result: dict[str, Any] = {
                "case": case,
                "first step [s]": [round(each.first_step, 2) for each in found],
                "processor [s]": [round(each.processor, 2) for each in found],
                "peak [MiB]": max(each.peak for each in found),
            }
            if case.startswith("lmdb"):
                result["frames/s"] = frames_a_second(
                    content["training"]["training_data"]["systems"][0]
                )
        results.append(result)
        print(json.dumps(result), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
