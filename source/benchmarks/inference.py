"""Time a step of molecular dynamics with our frozen file and with deepmd-kit's of the same weights.

Water of 192 atoms or more, the model of DeePMD's water example (or DPA-1, DPA-3), random weights. Routes: one
evaluation by our ASE calculator, by deepmd-kit's, and by its `DeepPot`; NVE in LAMMPS. Every file takes its turn in
every round; the median over rounds is reported with its range, as wall time and, on a CPU, as processor time, which a
busy machine changes less. Each route's first energy and forces are compared with the checkpoint's on the CPU.

    python source/benchmarks/inference.py --descriptor se_e2_a --deepmd-kit .../bin/python --lammps .../bin/lmp
    python source/benchmarks/inference.py --device cuda --deepmd-kit .../bin/python

With --resident, one process times force calls whose positions and lists stay on the GPU: one call from arrays on the
host, one from tensors on the device, one through ASE, and the batched simulator. Each case is first compared with lists
of the host and torch's own operations, also after atoms have moved and the cell has changed.

    python source/benchmarks/inference.py --resident --device cuda --descriptor se_e2_a --molecules 64 4096

Dynamics of many structures side by side need a trained potential and its data:

    python source/benchmarks/inference.py --resident --device cuda --molecules --copies 512 --model water/model.ckpt.pt
        --system examples/water_xtb/data/train/300K
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

MODELS: dict[str, Any] = json.loads(Path(__file__).with_name("water_models.json").read_text())
DESCRIPTORS: dict[str, Any] = MODELS["inference"]
MIN_DISTANCE = 0.75  # in that water, rounded down [Å]; where deepmd-kit's fine tables end
LATTICE = 3.105  # between molecules [Å]: 1 g/cm³

# One process times all files of a route: in every round each takes its turn, with slightly moved atoms.
TIMED = """
import json, sys, time
import numpy as np
device, rounds, repeats, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
given = np.load("water.npz")
coord, box, atype = given["coord"].copy(), given["box"], given["atype"]
def time_all(load):
    rows, found = {name: [] for name in names}, {}
    evaluate = {name: load(name) for name in names}
    for name in names:
        energy, force = evaluate[name](coord)
        found[name] = float(np.sum(energy)), np.reshape(force, (-1, 3)).tolist()
    for number in range(rounds + 1):
        for name in names:
            taken = []
            for _ in range(repeats):
                coord[0, 0] += 1e-4
                start = time.perf_counter(), time.process_time()
                evaluate[name](coord)
                taken.append((time.perf_counter() - start[0], time.process_time() - start[1]))
            if number:  # TorchScript optimizes programs in their first calls
                rows[name].append(np.median(taken, axis=0).tolist())
    print(json.dumps([rows, found]))
"""

# deepmd-kit may be there without its compiled operators, whose names our files of DPA-3 hold.
DEEPMD_KIT = f"""
import sys
sys.path.append({str(Path(__file__).resolve().parent)!r})
from deepmd_kit_step import import_deepmd_kit
entry = import_deepmd_kit()
import torch
if not torch._C._jit_get_schemas_for_operator("deepmd::border_op"):
    vars(torch.ops.deepmd).pop("border_op", None)  # a Python function that deepmd-kit puts there
    library = torch.library.Library("deepmd", "FRAGMENT")
    library.define("border_op({", ".join(f"Tensor x{i}" for i in range(9))}) -> Tensor[]")
"""

CALCULATOR = """
from ase import Atoms
def load(name):
    symbols = [("O", "H")[t] for t in atype]
    atoms = Atoms(symbols, positions=coord, cell=box, pbc=True, calculator=calculator(name))
    def evaluate(moved):
        atoms.positions = moved
        return atoms.get_potential_energy(), atoms.get_forces()
    return evaluate
time_all(load)
"""

PROGRAMS = {
    "ASE, ours": """
from deepmd_muon.infer import DeepPotCalculator
calculator = lambda name: DeepPotCalculator(name, device=device)
"""
    + CALCULATOR,
    "ASE, deepmd-kit": DEEPMD_KIT
    + """
from deepmd.calculator import DP as calculator
"""
    + CALCULATOR,
    "DeepPot": DEEPMD_KIT
    + """
from deepmd.infer import DeepPot
def load(name):
    potential = DeepPot(name)
    return lambda moved: potential.eval(moved.reshape(1, -1), box.reshape(1, 9), atype)[:2]
time_all(load)
""",
}

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
thermo_modify format float %.15g
dump 1 all custom 1000000 forces.dump id fx fy fz
dump_modify 1 format float %.17g
run {warm}
undump 1
run {steps} pre no
"""


def water(molecules: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions (natoms, 3) [Å], the cell (3, 3) [Å] and types (natoms,) of jittered molecules on a lattice."""
    random = np.random.default_rng(1)
    sides = [2, 4, 4] if molecules == 32 else [round(molecules ** (1 / 3))] * 3
    points = (
        np.stack(np.meshgrid(*map(np.arange, sides), indexing="ij"), axis=-1).reshape(-1, 1, 3)
        * LATTICE
    )
    molecule = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coord = points + molecule + random.normal(scale=0.05, size=(len(points), 3, 3))
    return (
        coord.reshape(-1, 3),
        LATTICE * np.diag(np.array(sides, dtype=float)),
        np.tile([0, 1, 1], len(points)),
    )


def random_model(name: str, precision: str, kind: str) -> Any:
    """Return a model with random weights, and statistics about those of water."""
    from deepmd_muon.argcheck import normalize
    from deepmd_muon.model import build_model

    given = MODELS[kind][name]
    descriptor, fitting = (
        (given, {}) if kind == "inference" else (given["descriptor"], given["fitting_net"])
    )
    content = {
        "model": {
            "type_map": ["O", "H"],
            "descriptor": descriptor | {"precision": precision},
            "fitting_net": {"neuron": [240, 240, 240], "seed": 2}
            | fitting
            | {"precision": precision},
        },
        "learning_rate": {"start_lr": 1e-3},
        "loss": {},
        "training": {"training_data": {"systems": ["data"]}, "numb_steps": 1},
    }
    model = build_model(normalize(content).normalized["model"])
    model.set_statistics(
        torch.zeros(2, 4), torch.tensor([[0.2, 0.1, 0.1, 0.1], [0.3, 0.12, 0.12, 0.12]])
    )
    return model


def write_inputs(options: argparse.Namespace, folder: Path) -> None:
    """Write the checkpoint, both frozen files and the structure."""
    from ase import Atoms
    from ase.io import write

    from deepmd_muon.deploy.compress import compress
    from deepmd_muon.deploy.freeze import freeze
    from deepmd_muon.model.deepmd_kit import to_deepmd_kit

    model = random_model(options.descriptor, options.precision, "inference")
    saved = to_deepmd_kit(model, {"lr": 1e-3, "step": 0}, min_nbor_dist=MIN_DISTANCE)

    torch.save({"model": saved}, folder / "model.pt")
    freeze(model, folder / "ours.pth")
    if options.compress:
        print(
            "ours, compressed:",
            compress(model, folder / "ours_compressed.pth", min_distance=MIN_DISTANCE),
        )
    coord, box, atype = water(options.molecules[0])
    np.savez(folder / "water.npz", coord=coord, box=box, atype=atype)
    atoms = Atoms([("O", "H")[t] for t in atype], positions=coord, cell=box, pbc=True)
    atoms.wrap()
    write(
        folder / "water.data",
        atoms,
        format="lammps-data",
        specorder=["O", "H"],
        atom_style="atomic",
    )
    if options.deepmd_kit:
        run(
            [options.deepmd_kit, "-c", DEEPMD_KIT + "entry.freeze('model.pt', 'theirs.pth')"],
            folder,
            options,
        )
        if options.compress:
            words = [
                "-m",
                "deepmd",
                "--pt",
                "compress",
                "-i",
                "theirs.pth",
                "-o",
                "theirs_compressed.pth",
            ]
            run([options.deepmd_kit, *words], folder, options)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Compute with lists of the host and torch's own operations."""
    from deepmd_muon.model.nn import triton_support

    usable, triton_support.usable = triton_support.usable, lambda _: False
    try:
        yield
    finally:
        triton_support.usable = usable


class Resident:
    """Checks and times force calls of one model that stay on the device.

    Parameters
    ----------
    options
        Of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from deepmd_muon.infer import Predictor

        self.options = options
        model = self.model()
        if options.frozen:
            from deepmd_muon.deploy.freeze import freeze

            with tempfile.TemporaryDirectory() as folder:
                freeze(model, Path(folder) / "model.pth")
                self.predictor = Predictor(Path(folder) / "model.pth", device=options.device)
        else:
            self.predictor = Predictor(model, device=options.device)
        self.predictor.batch_atoms = 1 << 16
        with plainly():
            self.plain = Predictor(self.model(), device=options.device)

    def model(self) -> Any:
        """Return the model of `--model`, or one with random weights."""
        from deepmd_muon.infer.predictor import load_model

        options = self.options
        if options.model:
            return load_model(options.model)
        return random_model(options.descriptor, options.precision, "training")

    def expected(self, coord: np.ndarray, box: np.ndarray | None, atype: np.ndarray) -> Any:
        """Predict with lists of the host and without Triton's kernels."""
        with plainly():
            return self.plain.predict(coord, box, atype)

    def check(self, molecules: int) -> None:
        """Compare results, while atoms move, after the cell has changed, and without one."""
        random = np.random.default_rng(3)
        coord, box, atype = water(molecules)
        skewed = box + 0.04 * box[0, 0] * np.array([[0, 0, 0], [1, 0, 0], [-1, 1, 0]])
        cases = [("as they are", coord, box)]
        for number in range(4):
            coord = coord + random.normal(scale=0.12 if number else 0.01, size=coord.shape)
            cases.append((f"moved {number}", coord, box))
        cases += [
            ("triclinic", coord @ np.linalg.inv(box) @ skewed, skewed),
            ("denser", 0.96 * coord, 0.96 * box),
        ]
        cases.append(("no cell", coord, None))
        for name, points, cell in cases:
            found, wanted = (
                self.predictor.predict(points, cell, atype),
                self.expected(points, cell, atype),
            )
            apart = {
                "energy": np.abs(found.energy - wanted.energy).max() / len(atype),
                "force": np.abs(found.force - wanted.force).max(),
                "virial": np.abs(found.virial - wanted.virial).max() / len(atype),
            }
            scale = np.abs(wanted.force).max()
            text = ", ".join(f"{key} {value:.1e}" for key, value in apart.items())
            print(
                f"CHECK {len(atype)} atoms, {name}: {text}, largest force {scale:.2f}", flush=True
            )

    def time(self, molecules: int) -> list[tuple[str, float]]:
        """Return the ms of a call, the atoms moving as in dynamics, by route."""
        from deepmd_muon.data import Frames
        from deepmd_muon.dynamics import ForceField, Systems

        device = self.predictor.device
        coord, box, atype = water(molecules)
        # Atoms tremble, and all drift together, so that lists are built again in every hundredth call.
        steps = np.random.default_rng(1).normal(scale=0.004, size=(8, *coord.shape))
        steps += 0.003 - steps.mean(axis=0)
        number = 0

        def moved() -> np.ndarray:
            nonlocal coord, number
            number += 1
            coord = coord + steps[number % 8]
            return coord

        found = [("arrays", self.best(lambda: self.predictor.predict(moved(), box, atype)))]
        start = Systems.from_frames(
            Frames(atype[None].astype(np.int32), coord[None], box[None]), ("O", "H"), device
        )
        force_field, points = ForceField(self.predictor), start.coord
        walk = torch.from_numpy(steps).to(device)

        def on_device() -> None:
            nonlocal points, number
            number += 1
            points = points + walk[number % 8]
            force_field(points, start.box, start.atype)

        found.append(("tensors", self.best(on_device)))
        if self.options.kernels:
            from gpu_step import profiled

            print(
                profiled(lambda count: [on_device() for _ in range(count)], 10, show=True),
                flush=True,
            )
        found.append(("ASE", self.best(self.ase_step(coord, box, atype, self.options.time_step))))
        return [("lists built", force_field.lists_built), *found]

    def ase_step(
        self, coord: np.ndarray, box: np.ndarray, atype: np.ndarray, time_step: float
    ) -> Any:
        """Return a step of velocity Verlet with ASE's atoms and our calculator, as ASE's own class takes it."""
        from ase import Atoms, units

        from deepmd_muon.infer import DeepPotCalculator

        symbols = [("O", "H")[t] for t in atype]
        atoms = Atoms(
            symbols,
            positions=coord,
            cell=box,
            pbc=True,
            calculator=DeepPotCalculator(self.predictor),
        )
        atoms.set_momenta(np.random.default_rng(2).normal(scale=0.1, size=coord.shape))
        forces, dt = atoms.get_forces(), time_step * units.fs
        masses = atoms.get_masses()[:, None]

        def step() -> None:
            nonlocal forces
            momenta = atoms.get_momenta() + 0.5 * dt * forces
            atoms.set_positions(atoms.get_positions() + dt * momenta / masses)
            forces = atoms.get_forces(md=True)
            atoms.set_momenta(momenta + 0.5 * dt * forces)

        return step

    def best(self, call: Any) -> float:
        """Return the median over rounds of the mean ms of a call."""
        import time

        options, found = self.options, []
        for _ in range(4):  # lists, kernels, graphs
            call()
        for _ in range(options.rounds):
            if options.device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(options.repeats):
                call()
            if options.device == "cuda":
                torch.cuda.synchronize()
            found.append(1e3 * (time.perf_counter() - begun) / options.repeats)
        return float(np.median(found))

    def simulate(self, frames: Any) -> list[tuple[str, float]]:
        """Return the ms of a step of all frames side by side, and print what dynamics should keep.

        At constant energy the total energy is compared with its start, under a thermostat the temperature.
        """
        from deepmd_muon.dynamics import ForceField, Langevin, Systems, simulate

        device, options = self.predictor.device, self.options
        systems = Systems.from_frames(frames, self.predictor.type_map, device)
        systems = systems.heated(options.temperature, torch.Generator().manual_seed(1))
        force_field, found = ForceField(self.predictor), []
        for name, thermostat in (("NVE", None), ("Langevin", Langevin(options.temperature))):
            each, begun, first = options.repeats, 0.0, 0.0
            kelvin = []
            for snapshot in simulate(
                force_field,
                systems,
                10 * each,
                options.time_step,
                thermostat=thermostat,
                every=each,
            ):
                if snapshot.lost:
                    raise SystemExit(
                        f"lost {snapshot.lost[0]}: the potential is not fit for dynamics"
                    )
                total = snapshot.total_energy
                first = first if snapshot.step else total
                kelvin.append(float(snapshot.systems.temperature.mean()))
                if snapshot.step == 2 * each:
                    begun = self.now()
            found.append((name, 1e3 * (self.now() - begun) / (8 * each)))
            change = (total - first) / frames.natoms
            kept = f"total energy moved by {float(change.mean()):.1e} eV/atom, at most {float(change.abs().max()):.1e}, "
            print(
                f"CHECK {frames.nframes} × {frames.natoms} atoms, {name}: {kept if thermostat is None else ''}"
                f"{kelvin[0]:.0f} to {kelvin[-1]:.0f} K, {force_field.lists_built} lists built",
                flush=True,
            )
        return found

    def now(self) -> float:
        """Wait for the device, and return the time [s]."""
        import time

        if self.options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def resident(options: argparse.Namespace) -> None:
    """Check and time force calls that stay on the device, and print a table."""
    from deepmd_muon.data import open_systems

    cases = Resident(options)
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    for molecules in options.molecules:
        if molecules <= options.check_up_to:
            cases.check(molecules)
        rows.append((str(len(water(molecules)[2])), cases.time(molecules)))
    for copies in options.copies:
        system = open_systems(options.system, cases.predictor.type_map)[0]
        frames = system.frames(np.arange(copies) % system.nframes)
        found, natoms = cases.simulate(frames), frames.natoms
        loop = cases.best(
            cases.ase_step(frames.coord[0], frames.box[0], frames.atype[0], options.time_step)
        )
        speeds = [(name, copies * natoms / ms * 1e3) for name, ms in found] + [
            ("ASE", natoms / loop * 1e3)
        ]
        print(
            f"RATE {copies} × {natoms} atoms·steps/s:",
            ", ".join(f"{n} {v:.3g}" for n, v in speeds),
            flush=True,
        )
        rows.append((f"{copies} × {natoms}", [*found, ("ASE, one", loop)]))
    for name, found in rows:
        shown = ", ".join(f"{route} {value:.3f}" for route, value in found)
        kind = "frozen file" if options.frozen else "checkpoint"
        print(
            f"| {options.descriptor} | {options.precision} | {kind} | {name} | {shown} |",
            flush=True,
        )


def run(words: list[str], folder: Path, options: argparse.Namespace, *, own: bool = False) -> str:
    """Run this Python (`own`), another one or LAMMPS; return what it prints."""
    environment = dict(os.environ)
    if own:
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    else:
        environment["PYTHONPATH"] = options.deepmd_kit_path
    threads = str(options.threads)
    environment |= {
        "OMP_NUM_THREADS": threads,
        "DP_INTRA_OP_PARALLELISM_THREADS": threads,
        "DP_INTER_OP_PARALLELISM_THREADS": "1",
    }
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DEVICE": "cpu"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)[:200]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    return done.stdout


class Measured:
    """Rounds of wall and processor time of a step [s], by route and file, and differences from the checkpoint.

    Parameters
    ----------
    folder
        Where the files are.
    options
        Of the command.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from deepmd_muon.infer import Predictor

        self.folder, self.options = folder, options
        self.times: dict[tuple[str, str], list[list[float]]] = {}
        self.differences: dict[tuple[str, str], float] = {}
        given = np.load(folder / "water.npz")
        expected = Predictor(folder / "model.pt", device="cpu").predict(
            given["coord"], given["box"], given["atype"]
        )
        self.energy, self.force = expected.energy[0], expected.force[0]

    def add(
        self, route: str, name: str, times: list[list[float]], energy: float, force: np.ndarray
    ) -> None:
        """Note times, and the largest difference of energy per atom and forces from the checkpoint on the CPU."""
        self.times.setdefault((route, name), []).extend(times)
        apart = max(abs(energy - self.energy) / len(self.force), np.abs(force - self.force).max())
        self.differences[route, name] = max(apart, self.differences.get((route, name), 0.0))

    def by_python(self, route: str, names: list[str]) -> None:
        """Time evaluations of some files in a process of its own."""
        options, own = self.options, route == "ASE, ours"
        words = [sys.executable if own else options.deepmd_kit, "-c", TIMED + PROGRAMS[route]]
        words += [options.device, str(options.rounds), str(options.repeats), *names]
        rows, found = json.loads(run(words, self.folder, options, own=own).splitlines()[-1])
        for name in names:
            self.add(route, name, rows[name], found[name][0], np.array(found[name][1]))

    def by_lammps(self, names: list[str]) -> None:
        """Take LAMMPS's own loop time and its share of the processor, a run for each file and round."""
        folder, options = self.folder, self.options
        for _ in range(options.rounds):
            for name in names:
                (folder / "in.lammps").write_text(
                    LAMMPS.format(name=name, warm=options.warm, steps=options.repeats)
                )
                out = run([options.lammps, "-in", "in.lammps"], folder, options)
                wall = float(re.findall(r"Loop time of ([\d.]+)", out)[-1]) / options.repeats
                share = float(re.findall(r"([\d.]+)% CPU use", out)[-1]) / 100.0
                energy = float(re.findall(r"^ +0 +\S+ +(\S+)", out, re.MULTILINE)[0])
                rows = np.loadtxt(folder / "forces.dump", skiprows=9)
                self.add(
                    "LAMMPS", name, [[wall, wall * share]], energy, rows[np.argsort(rows[:, 0]), 1:]
                )


def describe(values: np.ndarray) -> str:
    """Return median and range in ms."""
    return f"{np.median(values) * 1e3:.2f} ({values.min() * 1e3:.2f}–{values.max() * 1e3:.2f})"


def main() -> None:
    """Write the files, time all routes in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--descriptor", choices=DESCRIPTORS, default="se_e2_a")
    parser.add_argument("--precision", choices=("float64", "float32"), default="float64")
    parser.add_argument(
        "--molecules", type=int, nargs="*", default=[64], help="cubes: 64, 125, 216, …, or 32"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warm", type=int, default=3, help="steps of LAMMPS before, beside its first evaluation"
    )
    parser.add_argument(
        "--deepmd-kit", metavar="PYTHON", help="python of an environment with deepmd-kit"
    )
    parser.add_argument(
        "--deepmd-kit-path", metavar="PATH", default="", help="PYTHONPATH of that python"
    )
    parser.add_argument("--lammps", metavar="LMP", help="LAMMPS with the DeePMD plugin")
    parser.add_argument("--compress", action="store_true", help="time compressed files as well")
    parser.add_argument(
        "--routes", nargs="+", choices=(*PROGRAMS, "LAMMPS"), default=[*PROGRAMS, "LAMMPS"]
    )
    parser.add_argument(
        "--resident", action="store_true", help="time force calls that stay on the device"
    )
    parser.add_argument("--frozen", action="store_true", help="with --resident: of the frozen file")
    parser.add_argument(
        "--model", type=Path, help="with --resident: a checkpoint instead of random weights"
    )
    parser.add_argument(
        "--copies", nargs="+", type=int, default=[], help="with --resident: structures side by side"
    )
    parser.add_argument("--system", type=Path, help="whose frames they are, with --model")
    parser.add_argument("--temperature", type=float, default=300.0, help="of dynamics [K]")
    parser.add_argument(
        "--kernels", action="store_true", help="with --resident: list the kernels of a call"
    )
    parser.add_argument(
        "--check-up-to", type=int, default=1000, help="molecules up to which results are compared"
    )
    parser.add_argument("--time-step", type=float, default=0.5, help="of dynamics [fs]")
    options = parser.parse_args()
    if options.copies and not (options.model and options.system):
        # Atoms of a potential with random weights pass through each other, where its slopes are steep.
        parser.error(
            "--copies needs --model and --system: only a trained potential is fit for dynamics"
        )
    if options.resident:
        resident(options)
        return
    files = ["ours.pth", "theirs.pth"] if options.deepmd_kit else ["ours.pth"]
    if options.compress:
        files += [name.replace(".pth", "_compressed.pth") for name in files]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(options, folder)
        measured = Measured(folder, options)
        for route in options.routes:
            if route == "ASE, ours":
                # deepmd-kit's compressed file needs its compiled operators.
                measured.by_python(
                    route,
                    ["model.pt", *(name for name in files if name != "theirs_compressed.pth")],
                )
            elif route == "LAMMPS" and options.lammps:
                measured.by_lammps(files)
            elif route != "LAMMPS" and options.deepmd_kit:
                measured.by_python(route, files)
    natoms = len(measured.force)
    print(
        f"{options.descriptor}, {options.precision}, {natoms} atoms, {options.device}, {options.threads} threads"
    )
    print(
        "| route | file | ms a step | processor ms a step | atoms a second | from the checkpoint [eV, eV/Å] |"
    )
    print("|---|---|---|---|---|---|")
    for (route, name), rounds in measured.times.items():
        wall, processor = np.array(rounds).T
        speed = f"{natoms / np.median(wall):.0f}"
        cells = [
            route,
            name,
            describe(wall),
            describe(processor),
            speed,
            f"{measured.differences[route, name]:.0e}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
