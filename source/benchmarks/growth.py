"""Time and memory of a training step as structures and batches grow, on a GPU.

    python source/benchmarks/growth.py --log growth.json
    python source/benchmarks/growth.py --draw growth.json --picture doc/images/growth.png

Structures are made here: a jittered cubic lattice of water's density (0.1 atoms/Å³), a third of the atoms oxygen,
labels random; the networks are those of DeePMD's water example (`training_step.MODELS`). Every point trains as
`dp train` does, all in this process; the loop is stopped when graphs are captured and again after --seconds. Memory is
what torch reserves on the device for a run (a captured graph keeps its memory), the resident training data taken off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SPACING = 10.0 ** (1 / 3)  # Å
ATOMS = (24, 96, 192, 384, 768, 1536, 3072, 6144)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def write_system(folder: Path, natoms: int, nframes: int) -> str:
    """Write frames of a jittered lattice that fills its cell."""
    random = np.random.default_rng(natoms)
    sides = [side for side in range(1, natoms + 1) if natoms % side == 0]
    _, *shape = min(
        (max(a, b, natoms // a // b) - min(a, b, natoms // a // b), a, b, natoms // a // b)
        for a in sides
        for b in sides
        if natoms // a % b == 0
    )
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 3)
    coord = SPACING * grid + random.normal(0.0, 0.15, (nframes, natoms, 3))
    part = folder / "set.000"
    part.mkdir(parents=True)
    (folder / "type.raw").write_text("".join(f"{int(i >= natoms // 3)}\n" for i in random.permutation(natoms)))
    (folder / "type_map.raw").write_text("O\nH\n")
    np.save(part / "coord.npy", coord.reshape(nframes, -1))
    np.save(part / "box.npy", np.tile((SPACING * np.diag(shape)).reshape(-1), (nframes, 1)))
    np.save(part / "energy.npy", random.normal(-150.0 * natoms, 0.1, nframes))
    np.save(part / "force.npy", random.normal(0.0, 0.5, (nframes, 3 * natoms)))
    return str(folder)


def measure(kind: str, precision: str, natoms: int, batch: int, seconds: float) -> dict[str, float]:
    """Train on structures of a size in batches of a size; return what a step takes."""
    import torch
    from gpu_step import resident_bytes
    from training_step import make_input

    from deepmd_muon.argcheck import load
    from deepmd_muon.train import run
    from deepmd_muon.train.trainer import Trainer

    found: dict[str, float] = {"atoms": natoms, "batch": batch}
    original = Trainer._steps

    def steps(trainer: Any, reports: Any, batches: Any) -> None:
        def settled(count: int) -> float:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            trainer.num_steps = trainer.step + count
            original(trainer, reports, batches)
            torch.cuda.synchronize()
            return (time.perf_counter() - begun) / count

        settled(2)
        trainer._tuning = None  # keeps the pieces of a run's start
        settled(4)
        found["ms"] = 1e3 * settled(max(10, int(seconds / settled(4))))
        found["MiB"] = (torch.cuda.max_memory_reserved() - before - resident_bytes(batches)) / 2**20

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()

    with tempfile.TemporaryDirectory() as folder:
        content = make_input(kind, f"{precision}-b{batch}", "HybridMuon", 1_000_000, Path(folder), {})
        system = write_system(Path(folder, "system"), natoms, max(4, batch))
        content["training"]["training_data"]["systems"] = [system]
        Path(folder, "input.json").write_text(json.dumps(content))
        here = Path.cwd()
        os.chdir(folder)
        Trainer._steps = steps  # type: ignore[method-assign]  # the same loop, stopped and looked at
        try:
            run(load("input.json"), skip_neighbor_stat=True, log_level="WARNING")
        finally:
            Trainer._steps = original  # type: ignore[method-assign]
            os.chdir(here)
    print(
        f"{kind}, {precision}: {natoms:5d} atoms × {batch:2d}: {found['ms']:8.3f} ms a step, "
        f"{1e3 * found['ms'] / (natoms * batch):7.3f} µs and {found['MiB'] * 1024 / (natoms * batch):7.1f} KiB an atom",
        flush=True,
    )
    return found


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw time and, where it was measured, memory per atom against the atoms of a batch."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = [("ms", 1e3, "µs a step and atom"), ("MiB", 1024.0, "KiB an atom")]
    panels = [panel for panel in panels if all(panel[0] in p for points in content["points"].values() for p in points)]
    figure, several = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for axes, (key, scale, what) in zip(several[0], panels, strict=True):
        for kind, points in content["points"].items():
            one = [p for p in points if p["batch"] == 1]
            batches = [p for p in points if p["atoms"] == 192]
            for label, chosen in ((f"{kind}, one structure", one), (f"{kind}, batches of 192 atoms", batches)):
                atoms = np.array([p["atoms"] * p["batch"] for p in chosen])
                axes.plot(atoms, scale * np.array([p[key] for p in chosen]) / atoms, marker=".", label=label)
        axes.set(xscale="log", yscale="log", xlabel="atoms in a batch", ylabel=what)
    several[0][0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure all points, or draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["se_e2_a"])
    parser.add_argument("--precision", default="f64", choices=("f64", "f32"))
    parser.add_argument("--atoms", nargs="+", type=int, default=ATOMS, help="of one structure")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="structures of 192 atoms in a batch")
    parser.add_argument("--seconds", type=float, default=0.2, help="of steps that are timed for each point")
    parser.add_argument("--log", type=Path, help="file for all points, JSON")
    parser.add_argument("--draw", type=Path, help="draw the points of such a file instead of measuring")
    parser.add_argument("--picture", type=Path, help="where the picture goes")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.picture)
        return
    import torch

    sizes = dict.fromkeys([*((n, 1) for n in args.atoms), *((192, b) for b in args.batches)])
    points = {
        kind: [measure(kind, args.precision, natoms, batch, args.seconds) for natoms, batch in sizes]
        for kind in args.models
    }
    if args.log:
        about = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "precision": args.precision}
        args.log.write_text(json.dumps({**about, "points": points}, indent=1))


if __name__ == "__main__":
    main()
