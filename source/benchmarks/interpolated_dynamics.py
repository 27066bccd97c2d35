"""Compare dynamics with nets and with tables in their place: drift of the energy, radial distributions.

One run is one file, one ensemble and some starts, frames of a system with velocities, side by side. Trajectories of
two files part after some hundred steps, because dynamics magnify rounding: what can be compared are averages with
their errors. On a CPU a plain file has nets and a compressed file tables. A GPU makes tables of a plain file, too;
with --nets it evaluates the nets.

    python source/benchmarks/interpolated_dynamics.py prepare --input examples/water_xtb/input.json --folder water
    python source/benchmarks/interpolated_dynamics.py run --model water/plain.pth --ensemble nve --frames 2
        --system examples/water_xtb/data/valid/300K --out water/plain.nve.json
    python source/benchmarks/interpolated_dynamics.py table water/*.nv?.*.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from deepmd_muon.data import open_systems
from deepmd_muon.dynamics import ForceField, Langevin, Systems, simulate
from deepmd_muon.infer import Predictor

BIN = 0.1  # [Å]
BLOCK = 1.0  # [ps]: averages over it are the samples of a standard error
SKIPPED = 1.0  # [ps] before the first block
FEWEST_STARTS = (
    8  # with which averages of starts are the samples instead: blocks of one run may be correlated
)


def prepare(options: argparse.Namespace) -> None:
    """Train an example in float64 to a learning rate near 0, and write `plain.pth` and `compressed.pth`."""
    example, folder = options.input.resolve().parent, options.folder
    content = json.loads(options.input.read_text())
    for part in content["model"]["descriptor"], content["model"]["fitting_net"]:
        part["precision"] = "float64"
    content["learning_rate"]["stop_lr"] = 1e-6
    content["training"]["numb_steps"] = options.steps
    content["training"] |= {"disp_freq": max(50, options.steps // 20), "save_freq": options.steps}
    if options.optimizer:
        content["optimizer"] = {"type": options.optimizer}
    for data in content["training"]["training_data"], content["training"]["validation_data"]:
        data["systems"] = [str(example / system) for system in data["systems"]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "input.json").write_text(json.dumps(content))
    for words in (
        "train input.json",
        "freeze -c model.ckpt.pt -o plain.pth",
        "compress -i model.ckpt.pt -o compressed.pth",
    ):
        subprocess.run(
            [sys.executable, "-m", "deepmd_muon", "--pt", *words.split()], cwd=folder, check=True
        )


def radial(systems: Systems, kinds: tuple[int, int], reach: float) -> np.ndarray:
    """Return g(r) `(nsystems, nbins)` of pairs of types, r below half the cell; all structures have the same types."""
    assert systems.box is not None
    first, second = (torch.nonzero(systems.atype[0] == kind).flatten() for kind in kinds)
    apart = systems.coord[:, first, None] - systems.coord[:, None, second]
    fraction = apart @ torch.linalg.inv(systems.box)[:, None]
    distance = ((fraction - fraction.round()) @ systems.box[:, None]).norm(dim=-1)
    distance = distance[:, first[:, None] != second].cpu().numpy()
    edges = np.arange(0.0, reach, BIN)
    shell = 4.0 / 3.0 * np.pi * np.diff(edges**3)
    counts = np.stack([np.histogram(row, edges)[0] for row in distance])
    volume = systems.box.det().abs().cpu().numpy()
    found: np.ndarray = counts * volume[:, None] / (distance.shape[1] * shell)
    return found


def run(options: argparse.Namespace) -> None:
    """Run one file in one ensemble from some starts, and write what `table` reads."""
    predictor = Predictor(options.model, device=options.device)
    if options.nets:
        if predictor.resident is None:
            raise SystemExit(
                "--nets is for a GPU; elsewhere a plain file has nets, a compressed one tables"
            )
        vars(predictor.resident.atomic_model.descriptor)["tabulate"] = lambda *_: None
    frames = open_systems(options.system, predictor.type_map)[0].frames(
        np.arange(options.frames) + options.first
    )
    systems = Systems.from_frames(frames, predictor.type_map, predictor.device)
    systems = systems.heated(options.temperature, torch.Generator().manual_seed(options.first))
    assert systems.box is not None
    types = sorted(set(systems.atype[0].tolist()))
    pairs = list(itertools.combinations_with_replacement(types, 2))
    inverse = np.linalg.inv(systems.box.cpu().numpy())
    reach = float((0.5 / np.linalg.norm(inverse, axis=1)).min())
    steps, per_block = (
        round(options.ps * 1000 / options.time_step),
        round(BLOCK * 1000 / options.time_step),
    )
    times, energies, temperatures, start = [], [], [], time.process_time()
    blocks: dict[str, dict[int, list[np.ndarray]]] = {f"{a}-{b}": {} for a, b in pairs}
    thermostat = Langevin(options.temperature) if options.ensemble == "nvt" else None
    for snapshot in simulate(
        ForceField(predictor),
        systems,
        steps,
        options.time_step,
        thermostat=thermostat,
        every=options.every,
        seed=options.first,
    ):
        if snapshot.lost:
            raise SystemExit(
                f"lost {snapshot.lost}: the potential is not fit for {options.temperature} K"
            )
        times.append(snapshot.step * options.time_step / 1000)
        energies.append(snapshot.total_energy.cpu().numpy())
        temperatures.append(float(snapshot.systems.temperature.mean()))
        block = (snapshot.step - 1) // per_block
        if block * BLOCK >= SKIPPED:
            for a, b in pairs:
                blocks[f"{a}-{b}"].setdefault(block, []).append(
                    radial(snapshot.systems, (a, b), reach)
                )
    natoms = systems.atype.shape[1]
    drift = np.polyfit(times, np.stack(energies), 1)[0] / natoms * 1000
    found = {
        "model": "nets" if options.nets else "tables" if predictor.resident else options.model.name,
        "device": predictor.device.type,
        "ensemble": options.ensemble,
        "atoms": natoms,
        "ps": options.ps,
        "drift": drift.tolist(),  # of each start [meV/atom/ps]
        "temperature": float(np.mean(temperatures)),
        "ms_a_step": (time.process_time() - start) / steps * 1000,
        # Averages over a block, of each start: (starts, blocks, bins).
        "radial": {
            pair: np.stack([np.mean(rows, axis=0) for rows in of_blocks.values()], 1).tolist()
            for pair, of_blocks in blocks.items()
        },
    }
    options.out.write_text(json.dumps(found) + "\n")
    shown = ", ".join(f"{value:.4f}" for value in drift)
    print(
        f"{options.out}: {shown} meV/atom/ps, {found['temperature']:.1f} K, {found['ms_a_step']:.2f} ms a step"
    )


def samples_of(rows: list[list[list[float]]]) -> np.ndarray:
    """Return independent averages `(samples, bins)` from `(starts, blocks, bins)`: of starts if there are enough."""
    values = np.array(rows)
    return values.mean(1) if len(values) >= FEWEST_STARTS else values.reshape(-1, values.shape[-1])


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean over samples and its standard error."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) / len(values) ** 0.5


def table(options: argparse.Namespace) -> None:
    """Print drifts, their difference, and how often radial distributions differ by more than two standard errors."""
    runs = [json.loads(path.read_text()) for path in sorted(options.files)]
    print(
        "| ensemble | file | K | drift [meV/atom/ps] | bins of g(r) | beyond 2 errors | largest |"
    )
    print("|---|---|---|---|---|---|---|")
    for ensemble in ("nve", "nvt"):
        of_file = {
            name: [run for run in runs if (run["ensemble"], run["model"]) == (ensemble, name)]
            for name in ("plain.pth", "compressed.pth", "nets", "tables")
        }
        radials = []
        for name, group in of_file.items():
            if not group:
                continue
            pairs = group[0]["radial"]
            samples = {
                pair: samples_of([row for run in group for row in run["radial"][pair]])
                for pair in pairs
            }
            radials.append({pair: mean_and_error(rows) for pair, rows in samples.items()})
            kelvin = np.mean([run["temperature"] for run in group])
            drifts = np.concatenate([run["drift"] for run in group])
            error = f" ± {drifts.std(ddof=1) / len(drifts) ** 0.5:.1e}" if len(drifts) > 1 else ""
            drift = f"{drifts.mean():.2e}{error}, {len(drifts)} starts" if ensemble == "nve" else ""
            cells = [ensemble, name, f"{kelvin:.1f}", drift]
            if len(radials) > 1:
                apart = []
                for (mean, error_of), (expected, other) in zip(
                    radials[-1].values(), radials[0].values(), strict=True
                ):
                    both = np.hypot(error_of, other)
                    apart.append(np.abs(mean - expected)[both > 0] / both[both > 0])
                errors = np.concatenate(apart)
                cells += [
                    str(len(errors)),
                    f"{(errors > 2).mean():.1%}",
                    f"{errors.max():.1f} errors",
                ]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Run one file, or compare runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    files = commands.add_parser("prepare", help="train an example, and freeze it both ways")
    files.add_argument("--input", type=Path, required=True)
    files.add_argument("--folder", type=Path, required=True)
    files.add_argument("--steps", type=int, default=2000)
    files.add_argument(
        "--optimizer", help="instead of the example's; water of AdamW blows up least"
    )
    files.set_defaults(do=prepare)
    one = commands.add_parser("run", help="dynamics with one file")
    one.add_argument("--model", type=Path, required=True, help="frozen file, plain or compressed")
    one.add_argument("--system", type=Path, required=True)
    one.add_argument("--frames", type=int, default=1, help="of the system, side by side")
    one.add_argument(
        "--first", type=int, default=0, help="of these frames, and seed of velocities and noise"
    )
    one.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    one.add_argument("--nets", action="store_true", help="on a GPU: no tables in place of nets")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--ensemble", choices=("nve", "nvt"), default="nve")
    one.add_argument("--ps", type=float, default=10.0)
    one.add_argument("--time-step", type=float, default=0.5, help="fs")
    one.add_argument(
        "--temperature", type=float, default=300.0, help="K; of the start, and of the thermostat"
    )
    one.add_argument("--every", type=int, default=20, help="steps between samples")
    one.set_defaults(do=run)
    several = commands.add_parser("table", help="plain and compressed side by side")
    several.add_argument("files", type=Path, nargs="+")
    several.set_defaults(do=table)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
