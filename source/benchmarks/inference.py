"""Time a step of molecular dynamics with our frozen file and with deepmd-kit's of the same weights.

Water of 192 atoms or more, the model of DeePMD's water example (or DPA-1, DPA-3), random weights. Routes: one
evaluation by ASE's calculator, one by deepmd-kit's `DeepPot`, NVE in LAMMPS. Every file takes its turn in every round,
and the median over rounds is reported with its range.

    python source/benchmarks/inference.py --descriptor se_e2_a --deepmd-kit .../bin/python --lammps .../bin/lmp
    python source/benchmarks/inference.py --device cuda --deepmd-kit .../bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

DESCRIPTORS: dict[str, dict[str, Any]] = {
    "se_e2_a": {
        "type": "se_e2_a",
        "sel": [46, 92],
        "rcut": 6.0,
        "rcut_smth": 0.5,
        "neuron": [25, 50, 100],
        "axis_neuron": 16,
        "seed": 1,
    },
    "dpa1": {
        "type": "se_atten",
        "sel": 120,
        "rcut": 6.0,
        "rcut_smth": 0.5,
        "neuron": [25, 50, 100],
        "axis_neuron": 16,
        "attn": 128,
        "attn_layer": 2,
        "seed": 1,
    },
    "dpa3": {
        "type": "dpa3",
        "repflow": {
            "n_dim": 128,
            "e_dim": 64,
            "a_dim": 32,
            "nlayers": 6,
            "e_rcut": 6.0,
            "e_rcut_smth": 5.3,
            "e_sel": 120,
            "a_rcut": 4.0,
            "a_rcut_smth": 3.5,
            "a_sel": 30,
            "axis_neuron": 4,
            "smooth_edge_update": True,
            "a_compress_rate": 1,
            "a_compress_e_rate": 2,
            "a_compress_use_split": True,
        },
        "activation_function": "silut:10.0",
        "seed": 1,
    },
}
LATTICE = 3.105  # between molecules [Å]: 1 g/cm³

DEEP_POT = """
import json, sys, time
import numpy as np
from deepmd.infer import DeepPot
name, repeats = sys.argv[1], int(sys.argv[2])
given = np.load("water.npz")
potential = DeepPot(name)
arguments = given["coord"].reshape(1, -1), given["box"].reshape(1, 9), given["atype"]
times = []
for number in range(repeats + 5):
    start = time.perf_counter()
    energy, force, virial = potential.eval(*arguments)[:3]
    times.append(time.perf_counter() - start)
print(json.dumps({"times": times[5:], "energy": float(energy[0, 0])}))
"""

LAMMPS = """units metal
boundary p p p
atom_style atomic
atom_modify map yes
read_data water.data
mass 1 15.999
mass 2 1.008
pair_style deepmd {name}
pair_coeff * * O H
neighbor 1.0 bin
timestep 0.0005
velocity all create 300 1
fix 1 all nve
thermo 1000
run {warm}
run {steps}
"""


def water(molecules: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions (natoms, 3) [Å], the cell (3, 3) [Å] and types (natoms,) of jittered molecules on a lattice."""
    random = np.random.default_rng(1)
    side = round(molecules ** (1 / 3))
    points = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3) * LATTICE
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = points + molecule + random.normal(scale=0.05, size=(side**3, 3, 3))
    return coord.reshape(-1, 3), side * LATTICE * np.eye(3), np.tile([0, 1, 1], side**3)


def write_inputs(options: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoint, both frozen files and the structure."""
    from ase import Atoms
    from ase.io import write

    from deepmd_muon.argcheck import normalize
    from deepmd_muon.deploy.freeze import freeze
    from deepmd_muon.model import build_model
    from deepmd_muon.model.deepmd_kit import to_deepmd_kit

    descriptor = DESCRIPTORS[options.descriptor] | {"precision": options.precision}
    content = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": descriptor,
            "fitting_net": {"neuron": [240, 240, 240], "precision": options.precision, "seed": 2},
        },
        "learning_rate": {"start_lr": 1e-3},
        "loss": {},
        "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1},
    }
    section = normalize(content).normalized["model"]
    model = build_model(section)
    model.set_statistics(torch.zeros(2, 4), torch.tensor([[0.2, 0.1, 0.1, 0.1], [0.3, 0.12, 0.12, 0.12]]))
    torch.save({"model": to_deepmd_kit(model, section, {"lr": 1e-3, "step": 0})}, folder / "model.pt")
    freeze(model, folder / "ours.pth")
    coord, box, atype = water(options.molecules)
    np.savez(folder / "water.npz", coord=coord, box=box, atype=atype)
    atoms = Atoms([("O", "H")[t] for t in atype], positions=coord, cell=box, pbc=True)
    atoms.wrap()
    write(folder / "water.data", atoms, format="lammps-data", specorder=["O", "H"], atom_style="atomic")
    if options.deepmd_kit:
        code = "from deepmd.pt.entrypoints.main import freeze; freeze('model.pt', 'theirs.pth')"
        run([options.deepmd_kit, "-c", code], folder, options)


def run(words: list[str], folder: Path, options: argparse.Namespace) -> str:
    """Run another Python or LAMMPS; return what it prints."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    threads = str(options.threads)
    own |= {
        "OMP_NUM_THREADS": threads,
        "DP_INTRA_OP_PARALLELISM_THREADS": threads,
        "DP_INTER_OP_PARALLELISM_THREADS": "1",
    }
    if options.device == "cpu":
        own |= {"CUDA_VISIBLE_DEVICES": "", "DEVICE": "cpu"}
    done = subprocess.run(words, cwd=folder, env=own, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)[:200]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def by_deep_pot(name: str, folder: Path, options: argparse.Namespace) -> list[float]:
    """Return seconds of single evaluations by deepmd-kit's `DeepPot`."""
    out = run([options.deepmd_kit, "-c", DEEP_POT, name, str(options.repeats)], folder, options)
    return list(json.loads(out.splitlines()[-1])["times"])


def by_lammps(name: str, folder: Path, options: argparse.Namespace) -> list[float]:
    """Return the seconds of one step, from LAMMPS's own loop time."""
    (folder / "in.lammps").write_text(LAMMPS.format(name=name, warm=5, steps=options.repeats))
    out = run([options.lammps, "-in", "in.lammps"], folder, options)
    return [float(re.findall(r"Loop time of ([\d.]+)", out)[-1]) / options.repeats]


def by_ase(name: str, folder: Path, options: argparse.Namespace) -> list[float]:
    """Return seconds of single evaluations by our ASE calculator, in a process of its own."""
    words = [sys.executable, str(Path(__file__).resolve()), "--ase", name, "--device", options.device]
    out = run([*words, "--repeats", str(options.repeats)], folder, options)
    return list(json.loads(out.splitlines()[-1]))


def ase_worker(options: argparse.Namespace) -> None:
    """Time evaluations of slightly moved atoms."""
    import time

    from ase import Atoms

    from deepmd_muon.infer import DeepPotCalculator

    given = np.load("water.npz")
    symbols = [("O", "H")[t] for t in given["atype"]]
    atoms = Atoms(symbols, positions=given["coord"], cell=given["box"], pbc=True)
    atoms.calc = DeepPotCalculator(options.ase, device=options.device)
    times = []
    for _ in range(options.repeats + 5):
        atoms.positions[0, 0] += 1e-4
        start = time.perf_counter()
        atoms.get_forces()
        times.append(time.perf_counter() - start)
    print(json.dumps(times[5:]))


def main() -> None:
    """Write the files, time all routes in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--descriptor", choices=DESCRIPTORS, default="se_e2_a")
    parser.add_argument("--precision", choices=("float64", "float32"), default="float64")
    parser.add_argument("--molecules", type=int, default=64, help="a cube: 64, 125, 216, …")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deepmd-kit", metavar="PYTHON", help="python of an environment with deepmd-kit")
    parser.add_argument("--lammps", metavar="LMP", help="LAMMPS with the DeePMD plugin")
    parser.add_argument("--ase", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ase:
        ase_worker(options)
        return
    routes = [("ASE, ours", by_ase, "model.pt"), ("ASE, ours", by_ase, "ours.pth")]
    if options.deepmd_kit:
        routes += [("ASE, ours", by_ase, "theirs.pth")]
        routes += [("DeepPot", by_deep_pot, name) for name in ("ours.pth", "theirs.pth")]
    if options.lammps:
        routes += [
            ("LAMMPS", by_lammps, name) for name in ("ours.pth", "theirs.pth") if name[0] == "o" or options.deepmd_kit
        ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(options, folder)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.rounds):
            for title, measure, name in routes:
                times.setdefault((title, name), []).append(float(np.median(measure(name, folder, options))))
    natoms = len(water(options.molecules)[2])
    print(f"{options.descriptor}, {options.precision}, {natoms} atoms, {options.device}, {options.threads} threads")
    for (title, name), found in times.items():
        middle = float(np.median(found))
        spread = f"({min(found) * 1e3:.1f} … {max(found) * 1e3:.1f})"
        print(f"{title:10s} {name:11s} {middle * 1e3:8.1f} ms a step {spread:20s} {natoms / middle:10.0f} atoms/s")


if __name__ == "__main__":
    main()
