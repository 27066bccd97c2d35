"""A training step on data sets of many frames, sizes and compositions, by whole runs of `dp train`.

    python source/benchmarks/data_sets.py --data WATER --out FILE.json [--cases CASE …]

WATER holds DeePMD's example systems (192 atoms). A case is SET:MODEL:PRECISION-bBATCH. Sets:

- `framesN`: the frames of WATER repeated until there are N, each displaced by 0.02 Å; `lmdbN` the same in LMDB
- `passingN`: the same as `framesN`, trained as if the device had no room for them
- `sizes400`: 400 systems of 12 to 180 atoms with the density of water; `uniformN`: systems of N such atoms
- `molecules10000`: so many compositions of ten elements with 2 to 110 atoms, without cells; `moleculeN`: N atoms each

Labels of all but water's frames are random. A figure is the median over the intervals of 100 steps after the first
three, the time of an atom that over the mean atoms of a batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from runs import milliseconds, train
from training_step import make_input

ELEMENTS = ["H", "C", "N", "O", "F", "P", "S", "Cl", "Br", "I"]
SHARES = np.array([0.48, 0.32, 0.07, 0.08, 0.01, 0.005, 0.02, 0.01, 0.004, 0.001])
WITHOUT_ROOM = """
import sys
from deepmd_muon.cli.main import main
from deepmd_muon.train.step import stepper
stepper._RESIDENT_SHARE = 0.0
sys.exit(main())
"""
CASES = [
    *(f"frames{n}:se_e2_a:f64-b{b}" for n in (320, 20000) for b in (1, 8, 32)),
    *(
        f"{kind}:se_e2_a:f64-b{b}"
        for kind in ("frames1000000", "passing1000000", "lmdb200000")
        for b in (1, 8, 32)
    ),
    *("uniform96:se_e2_a:f64-b1", "sizes400:se_e2_a:f64-b1"),
    *(
        "uniform128:se_e2_a:f64-b2",
        "sizes400:se_e2_a:f64-bauto:256",
        "sizes400:se_e2_a:f64-bmix:256",
    ),
    *("molecule56:dpa3:f32-b9", "molecules10000:dpa3:f32-bmix:512"),
]


def write_frames(root: Path, data: Path, count: int) -> list[str]:
    """Repeat frames of water."""
    rng = np.random.default_rng(0)
    source = data / "data_0"
    folder = root / "set.000"
    folder.mkdir(parents=True)
    for name in ("type.raw", "type_map.raw"):
        (root / name).write_text((source / name).read_text())
    for name in ("coord", "box", "energy", "force"):
        values = np.concatenate(
            [np.load(path) for path in sorted(source.glob(f"set.*/{name}.npy"))]
        )
        values = values[np.arange(count) % len(values)]
        if name == "coord":
            values = values + rng.uniform(-0.02, 0.02, values.shape)
        np.save(folder / f"{name}.npy", values)
    return [str(root)]


def write_system(
    root: Path, types: np.ndarray, names: list[str], frames: int, spacing: float, *, cell: bool
) -> str:
    """Write atoms on a lattice with displacements; types are one row for all frames, or a row each."""
    rng = np.random.default_rng(types.size)
    natoms = types.shape[-1]
    side = int(np.ceil(natoms ** (1 / 3) - 1e-9))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3), -1).reshape(-1, 3)[:natoms] * spacing
    layers = -(-natoms // side**2)
    coord = grid[:, [1, 0, 2]] + rng.uniform(-0.2, 0.2, (frames, natoms, 3))
    folder = root / "set.000"
    folder.mkdir(parents=True)
    (root / "type_map.raw").write_text("\n".join(names))
    np.save(folder / "coord.npy", coord.reshape(frames, -1))
    np.save(folder / "energy.npy", rng.normal(0.0, 0.1, frames))
    np.save(folder / "force.npy", rng.normal(0.0, 0.5, (frames, natoms * 3)))
    if cell:
        box = np.diag([layers, side, side]) * spacing
        np.save(folder / "box.npy", np.tile(box.ravel(), (frames, 1)))
    else:
        (root / "nopbc").touch()
    if types.ndim == 2:
        np.save(folder / "real_atom_types.npy", types)
        types = np.zeros(natoms, dtype=int)
    (root / "type.raw").write_text("\n".join(map(str, types)))
    return str(root)


def water(root: Path, natoms: int, frames: int = 20) -> str:
    """Write frames of so many atoms, a third of them oxygen."""
    return write_system(
        root, (np.arange(natoms) % 3 > 0).astype(int), ["O", "H"], frames, 2.15, cell=True
    )


def write_set(root: Path, name: str, data: Path) -> tuple[list[str], list[str]]:
    """Write a data set, unless an earlier case has; return its systems and elements."""
    listing = root / "names.json"
    if not listing.exists():
        root.mkdir()
        rng = np.random.default_rng(1)
        names = ELEMENTS if name.startswith("molecule") else ["O", "H"]
        count = int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        if name.startswith(("frames", "passing")):
            systems = write_frames(root / "water", data, count)
        elif name.startswith("lmdb"):
            folder, database = write_frames(root / "water", data, count)[0], root / "water.lmdb"
            subprocess.run(
                [sys.executable, "-m", "deepmd_muon", "convert-data", folder, str(database)],
                check=True,
            )
            systems = [str(database)]
        elif name == "sizes400":
            sizes = np.linspace(4, 60, 400).round().astype(int) * 3
            systems = [water(root / f"s{k}", n) for k, n in enumerate(sizes)]
        elif name.startswith("uniform"):
            systems = [water(root / f"s{k}", count) for k in range(20)]
        else:
            many = range(2, 111) if name == "molecules10000" else [count]
            rows = [rng.choice(len(ELEMENTS), (10_000 // len(many), n), p=SHARES) for n in many]
            systems = [
                write_system(
                    root / f"m{types.shape[1]}", types, ELEMENTS, len(types), 1.6, cell=False
                )
                for types in rows
            ]
        listing.write_text(json.dumps([systems, names]))
    systems, names = json.loads(listing.read_text())
    return systems, names


def atoms_of_a_batch(systems: list[str], names: list[str], batch: int | str) -> float:
    """Return the mean number of atoms in a batch."""
    from deepmd_muon.data import DataLoader, NeighborCache, open_systems

    cache = NeighborCache(6.0, [100] * len(names), by_type=True)
    loader = DataLoader(open_systems(systems, names), batch, seed=1, cache=cache)
    plans = [loader.draw() for _ in range(500)]
    return float(
        np.mean([sum(loader.systems[k].natoms * len(n) for k, n in plan.parts) for plan in plans])
    )


def first_row(place: Path) -> float:
    """Return when the first row of JSON was written, as seconds since the epoch; rows count from the run's begin."""
    path = place / "steps.jsonl"
    times = [row["time"] for row in map(json.loads, path.read_text().splitlines()) if "time" in row]
    return path.stat().st_mtime - float(times[-1]) + float(times[0])


def time_case(case: str, data: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Run a case."""
    name, kind, sizes = case.split(":", 2)
    precision, _, batch = sizes.partition("-b")
    systems, names = write_set(folder / name, name, data)
    count: int | str = int(batch) if batch.isdigit() else batch
    own = {"disp_freq": 100, "jsonl_file": "steps.jsonl"}
    content = make_input(kind, f"{precision}-b1", "HybridMuon", steps, data, own)
    content["training"]["training_data"] |= {"systems": systems, "batch_size": count}
    content["model"]["type_map"] = names
    place = folder / case.replace(":", "_")
    begun = time.time()
    program = ("-c", WITHOUT_ROOM) if name.startswith("passing") else ("-m", "deepmd_muon")
    log = train(place, content, 1, program=program)
    atoms = atoms_of_a_batch(systems, names, count)
    step = milliseconds(place)
    words = ("graph", "device", "eager", "launched", "waited")
    return {
        "case": case,
        "ms a step": round(step, 3),
        "atoms a batch": round(atoms, 1),
        "µs an atom": round(1e3 * step / atoms, 3),
        "run [s]": round(time.time() - begun, 1),
        "to the first row [s]": round(first_row(place) - begun, 1),
        "notes": [line[-170:] for line in log.splitlines() if any(word in line for word in words)],
    }


def main() -> None:
    """Run all cases and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            try:
                results.append(time_case(case, options.data.resolve(), Path(folder), options.steps))
            except SystemExit as error:
                results.append({"case": case, "failed": str(error)})
            print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
